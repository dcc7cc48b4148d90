"""An expanded model behaves as any other model of the library does, on every backbone."""

import pickle

import pytest
import torch
from conftest import COMMON_BACKBONES, refused, tiny_config
from transformers import AttentionInterface, AutoModelForCausalLM

from hf_moe_expand import LayerMoEConfig, LayerMoEForCausalLM


def build(backbone, counts=(3, 1, 2), classifiers=(2,), kind=(), **changes):
    """Three experts, a dense layer, two experts behind a classifier; nothing in it is zero or alike."""
    torch.manual_seed(0)
    config = LayerMoEConfig.from_dense(
        tiny_config(backbone, **changes), num_experts_per_layer=list(counts), classifier_layers=list(classifiers),
        **dict(kind),
    )  # fmt: skip
    model = LayerMoEForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.fixture
def model(backbone):
    return build(backbone)


@pytest.fixture
def ids():
    torch.manual_seed(1)
    return torch.randint(0, 256, (2, 9))


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def test_resized_embeddings_survive_saving(model, ids, tmp_path):
    before = model(ids).logits
    model.resize_token_embeddings(270)
    assert model.config.vocab_size == 270
    close(model(ids).logits[..., :257], before)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(ids + 13).logits, model(ids + 13).logits)


def test_a_pickled_model_has_no_secret_of_the_hub(model):
    model.hub_options = {"token": "hf_secret", "revision": "main"}
    assert b"hf_secret" not in pickle.dumps(model)
    assert pickle.loads(pickle.dumps(model)).hub_options == {"revision": "main"}


def test_the_attention_switch_reaches_every_part(model, ids):
    if not model._supports_sdpa:
        pytest.skip("the backbone has one attention implementation")
    expected = model(ids).logits
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        found = {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")}
        assert found == {implementation}
        close(model(ids).logits, expected)


KINDS = [{"expert_kind": "added", "expert_width": 16}, {"expert_kind": "lora", "lora_rank": 4, "lora_alpha": 6.0}]


@pytest.mark.parametrize(
    ("backbone", "kind"), [*((name, {}) for name in COMMON_BACKBONES), *(("qwen2", kind) for kind in KINDS)]
)
def test_it_compiles_into_one_graph(backbone, kind, ids):
    model = build(backbone, counts=[3], classifiers=[0], num_hidden_layers=1, kind=kind)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        torch.compiler.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        close(compiled(ids, use_cache=False).logits, expected)


@pytest.mark.parametrize(("attention", "server"), [("vllm", "vLLM"), ("sglang", "SGLang")])
def test_a_server_is_told_what_it_would_compute_wrongly(monkeypatch, attention, server):
    monkeypatch.setitem(AttentionInterface._global_mapping, attention, None)  # as the server registers its own

    def served(backbone, **fields):
        config = LayerMoEConfig.from_dense(tiny_config(backbone), num_experts_per_layer=[2, 1, 2], **fields)
        config._attn_implementation_internal = attention
        return LayerMoEForCausalLM(config)

    with pytest.raises(ValueError, match=f"{server} merges the linear layers.*export --expert"):
        served("qwen2", expert_kind="lora", lora_rank=2, lora_alpha=4.0)
    with pytest.raises(ValueError, match=f"{server} runs a mixture of experts by code of its own"):
        served("olmoe", expert_kind="added", expert_width=4)


def test_configurations_that_contradict_themselves_are_refused():
    dense = tiny_config("qwen2")
    with pytest.raises(ValueError, match="has 2 entries, but the qwen2 backbone has 3 layers"):
        LayerMoEConfig.from_dense(dense, num_experts_per_layer=[2, 2])
    with pytest.raises(ValueError, match=r"num_experts_per_layer\[1\] is 0"):
        LayerMoEConfig.from_dense(dense, num_experts_per_layer=[2, 0, 2])
    with pytest.raises(ValueError, match=r"layer 1, which is dense"):
        LayerMoEConfig.from_dense(dense, num_experts_per_layer=[2, 1, 2], classifier_layers=[1])
    with pytest.raises(ValueError, match=r"does not know the backbone architecture 'no-such'"):
        LayerMoEConfig(backbone_model_type="no-such")
    refused(LayerMoEForCausalLM, dense, says="not a Qwen2Config", raises=ValueError)

"""An expanded model as the library's others: languages in `forward` and `generate`, saving, switches, compiling."""

import re

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from conftest import TABLES, byte_tokenizer, enable_checkpointing, moved, refused, shaken, tiny_config, tiny_dense
from gated_models import gated_model
from transformers import AttentionInterface, AutoModelForCausalLM, Trainer, TrainingArguments, pipeline

from hf_moe_expand import LayerMoEConfig, LayerMoEForCausalLM, Plan, expand_model

OPTIONS = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}


def expanded():
    """The dense model and its expansion, with experts and classifiers that change its output."""
    model = expand_model(tiny_dense("qwen2"), Plan("layer-moe", [3, 1, 2], [2], old=["en"], new=["el"])).eval()
    with torch.no_grad():
        for ffn in model.expanded_ffns().values():
            if ffn.classifier is not None:
                ffn.classifier.weight.normal_(generator=torch.Generator().manual_seed(2))
    return tiny_dense("qwen2"), moved(model)


def text(rows: int, length: int = 9) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 250, (rows, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def test_pipelines_take_a_language():
    of_base, talk = (pipeline("text-generation", one, tokenizer=byte_tokenizer()) for one in expanded())
    texts, options = ["the cat", "sat on the mat"], {"max_new_tokens": 5, "do_sample": False}
    for size in (1, 2):
        assert talk(texts, languages="en", batch_size=size, **options) == of_base(texts, batch_size=size, **options)
    assert talk(texts, languages="el", **options) != of_base(texts, **options)


def test_the_word_holds_inside_the_call_alone():
    _, model = expanded()
    batch = text(2)
    before = model(**batch).logits
    model(**batch, languages="en")
    refused(model, **batch, languages="xx", says="languages", raises=ValueError)
    assert torch.equal(model(**batch).logits, before)
    with model.use_languages(["en", "el"]):
        inside = model(**batch).logits
    assert torch.equal(inside, model(**batch, languages=["en", "el"]).logits)
    assert model.routing_control.request.classes is None


@pytest.mark.parametrize(("languages", "said"), TABLES["wrong languages"])
def test_wrong_languages_are_refused(languages, said):
    _, model = expanded()
    for call in (model, model.generate):
        refused(call, **text(2), languages=languages, says=re.escape(said), raises=ValueError)
        refused(call, text(2)["input_ids"], languages=languages, says=re.escape(said), raises=ValueError)


def test_accelerate_leaves_the_argument_in_place():
    """It wraps the forward pass for mixed precision, and unwinds it."""
    AcceleratorState._reset_state(reset_partial_state=True)  # of tests in the same process
    _, model = expanded()
    before = model(**text(2), languages="en").logits
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    prepared = accelerator.prepare(model)
    prepared(**text(2), languages="en")
    unwound = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert torch.equal(unwound(**text(2), languages="en").logits, before)
    AcceleratorState._reset_state(reset_partial_state=True)


def test_the_forward_pass_keeps_its_signature_for_the_library(tmp_path):
    _, model = expanded()
    trainer = Trainer(model, TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True))
    trainer._set_signature_columns_if_needed()
    assert {"input_ids", "attention_mask", "labels"} <= set(trainer._signature_columns)
    assert trainer.model_accepts_loss_kwargs
    refused(model.generate, **text(1), language="en", **OPTIONS, says="not used by the model", raises=ValueError)


def test_around_forward_passes_the_codes_are_counted_as_inside():
    """Repeated by division, they would label two texts that are packed into one row, or half of a larger batch."""
    _, model = expanded()
    packed = {"input_ids": text(1, 12)["input_ids"], "position_ids": torch.arange(12).remainder(6).unsqueeze(0)}
    with model.use_languages(["en", "el"]):
        for batch, count in ((packed, 1), (text(4), 4), (text(3), 3)):
            for call in (lambda: model(**batch), lambda: model.generate(batch["input_ids"], **OPTIONS)):  # noqa: B023
                refused(call, says=f"has 2 codes, but the batch has {count} sequences", raises=ValueError)
        said = model(**text(2)).logits
        found = model.generate(**text(2), **OPTIONS, num_beams=3)
        with model.use_languages("en"):
            model(**text(3))
        for rows in (3, 4):  # after a search with beams, and after another word inside
            refused(model, **text(rows), says="has 2 codes", raises=ValueError)
    assert torch.equal(said, model(**text(2), languages=["en", "el"]).logits)
    assert torch.equal(found, model.generate(**text(2), languages=["en", "el"], **OPTIONS, num_beams=3))


def test_a_captured_pass_whose_tokens_all_go_home_is_recomputed_as_it_was():
    """By gradient checkpointing, which nothing captures and which must save as many tensors."""
    _, model = expanded()
    enable_checkpointing(model.train())
    with model.capture_routing() as routing:
        loss = model(**text(2), labels=text(2)["input_ids"], use_cache=False, languages="en").loss
    (loss + sum(layer.router_logits.sum() for layer in routing)).backward()
    assert all(ffn.router.weight.grad.any() for ffn in model.expanded_ffns().values())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("languages", ["el", ["en", "el"]])
@pytest.mark.parametrize("exclusive", [False, True], ids=["copies", "exclusive"])
def test_a_told_language_holds_for_the_recomputation_of_gradient_checkpointing(exclusive, languages, reentrant):
    """Also where the block is left before the backward pass."""
    grads = []
    for way in ("plain", "argument", "block"):
        model = gated_model(exclusive=exclusive).train()
        if way != "plain":
            enable_checkpointing(model, reentrant)
        ids = torch.arange(24).view(2, 12)
        if way == "block":
            with model.use_languages(languages):
                loss = model(ids, labels=ids, use_cache=False).loss
        else:
            loss = model(ids, labels=ids, use_cache=False, languages=languages).loss
        loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None and p.grad.any()})
    assert grads[0]
    for found in grads[1:]:
        assert found.keys() == grads[0].keys()
        assert all(torch.equal(found[name], grad) for name, grad in grads[0].items())


def build(backbone, counts=(3, 1, 2), classifiers=(2,), kind=(), **changes):
    """Three experts, a dense layer, two experts behind a classifier; nothing in it is zero or alike."""
    torch.manual_seed(0)
    config = LayerMoEConfig.from_dense(
        tiny_config(backbone, **changes), num_experts_per_layer=list(counts), classifier_layers=list(classifiers),
        **dict(kind),
    )  # fmt: skip
    return shaken(LayerMoEForCausalLM(config).eval())


@pytest.fixture
def model(backbone):
    return build(backbone)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


IDS = text(2)["input_ids"]


def test_resized_embeddings_survive_saving(model, tmp_path):
    before = model(IDS).logits
    model.resize_token_embeddings(270)
    assert model.config.vocab_size == 270
    close(model(IDS).logits[..., :257], before)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(IDS + 13).logits, model(IDS + 13).logits)


def test_the_attention_switch_reaches_every_part(model):
    if not model._supports_sdpa:
        pytest.skip("the backbone has one attention implementation")
    expected = model(IDS).logits
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        found = {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")}
        assert found == {implementation}
        close(model(IDS).logits, expected)


KINDS = [{"expert_kind": "added", "expert_width": 16}, {"expert_kind": "lora", "lora_rank": 4, "lora_alpha": 6.0}]


def test_it_compiles_into_one_graph(backbone):
    for kind in ({}, *KINDS) if backbone == "qwen2" else ({},):
        model = build(backbone, counts=[3], classifiers=[0], num_hidden_layers=1, kind=kind)
        torch.compiler.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        with torch.no_grad():
            close(compiled(IDS, use_cache=False).logits, model(IDS, use_cache=False).logits)


@pytest.mark.parametrize(("attention", "server"), [("vllm", "vLLM"), ("sglang", "SGLang")])
def test_a_server_is_told_what_it_would_compute_wrongly(monkeypatch, attention, server):
    monkeypatch.setitem(AttentionInterface._global_mapping, attention, None)  # as the server registers its own

    def served(backbone, **fields):
        config = LayerMoEConfig.from_dense(tiny_config(backbone), num_experts_per_layer=[2, 1, 2], **fields)
        config._attn_implementation_internal = attention
        return LayerMoEForCausalLM(config)

    lora, added = KINDS[1], KINDS[0]
    refused(served, "qwen2", **lora, says=f"{server} merges the linear layers.*export --expert", raises=ValueError)
    refused(served, "olmoe", **added, says=f"{server} runs a mixture of experts by code of its own", raises=ValueError)

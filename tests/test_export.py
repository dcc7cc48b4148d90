"""Export: a native architecture with the same logits, or one expert as a dense model, byte for byte."""

import json

import pytest
import torch
from conftest import COMMON_BACKBONES, byte_tokenizer, invoke, load, run_fresh, save_dense
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig

from hf_moe_expand import Plan, expand_checkpoint
from hf_moe_expand.checkpoint.export import export_native
from hf_moe_expand.core.errors import InputError

IDS = torch.randint(0, 256, (2, 20), generator=torch.Generator().manual_seed(0))
UNIFORM, WITH_DENSE = Plan("moe-lpr", [3, 3, 3], old=["en"], new=["el"]), Plan("moe-lpr", [3, 1, 3])
PLANS = {"all": UNIFORM, "dense": WITH_DENSE, "uneven": Plan("moe-lpr", [2, 1, 4])}
NATIVE = {
    ("qwen2", "all"): "Qwen2MoeForCausalLM",
    ("qwen2", "dense"): "Qwen2MoeForCausalLM",
    ("qwen2", "uneven"): "Ernie4_5_MoeForCausalLM",
    ("qwen3", "all"): "Qwen3MoeForCausalLM",
    ("qwen3", "dense"): "Qwen3MoeForCausalLM",
    ("llama", "all"): "MixtralForCausalLM",
    ("llama", "dense"): "Qwen2MoeForCausalLM",
    ("llama", "uneven"): "Ernie4_5_MoeForCausalLM",
    ("mistral", "all"): "MixtralForCausalLM",
    ("mistral", "uneven"): "Ernie4_5_MoeForCausalLM",
    ("olmo2", "all"): "FlexOlmoForCausalLM",
    ("olmo2", "dense"): "FlexOlmoForCausalLM",
    ("granite", "all"): "GraniteMoeForCausalLM",
    ("granite", "dense"): "GraniteMoeForCausalLM",
}


def trained(root, backbone, plan, **changes):
    """An expanded checkpoint whose experts differ and whose routers decide."""
    save_dense(root / "base", backbone, **changes)
    expand_checkpoint(root / "base", root / "expanded", plan)
    model = load(root / "expanded")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name and ".experts.0." not in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
            elif "router" in name:
                parameter.mul_(5)
    model.save_pretrained(root / "trained")
    byte_tokenizer().save_pretrained(root / "trained")
    return root / "trained"


@pytest.mark.parametrize(("backbone", "layers"), NATIVE, ids=lambda value: value)
def test_a_native_architecture_gives_the_same_logits(tmp_path, backbone, layers):
    tied = layers == "dense" or backbone == "granite"
    changes = {"sliding_window": None} if (backbone, layers) == ("mistral", "uneven") else {}
    model = trained(tmp_path, backbone, PLANS[layers], **changes, tie_word_embeddings=tied)
    assert export_native(model, tmp_path / "out") == NATIVE[backbone, layers]
    native, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert type(native).__name__ == NATIVE[backbone, layers]
    ours, dense = load(model), load(tmp_path / "base")
    with torch.no_grad():
        torch.testing.assert_close(native.eval()(IDS).logits, ours(IDS).logits, rtol=0, atol=1e-5)
        assert (ours(IDS).logits - dense(IDS).logits).abs().max() > 0.01  # the experts do matter
    native.save_pretrained(tmp_path / "again")
    for path in (tmp_path / "again").iterdir():  # the library itself writes the same
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes(), path.name


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_any_number_of_active_experts(tmp_path, top_k):
    model = trained(tmp_path, "qwen3", Plan("moe-lpr", [3, 3, 3], top_k=top_k))
    export_native(model, tmp_path / "out")
    with torch.no_grad():
        torch.testing.assert_close(load(tmp_path / "out")(IDS).logits, load(model)(IDS).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("backbone", "fields"),
    [
        ("granite", {"embedding_multiplier": 3.0, "attention_multiplier": 0.4, "residual_multiplier": 0.7,
                     "logits_scaling": 2.5}),
        ("qwen3", {"head_dim": 12}),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0,
                                       "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                       "original_max_position_embeddings": 16}}),
        ("olmo2", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0,
                                       "original_max_position_embeddings": 8}}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)  # fmt: skip
def test_fields_that_change_what_is_computed_travel(tmp_path, backbone, fields):
    model = trained(tmp_path, backbone, UNIFORM, **fields)
    export_native(model, tmp_path / "out")
    ours = load(model)
    with torch.no_grad():
        expected = ours(IDS).logits
        torch.testing.assert_close(load(tmp_path / "out")(IDS).logits, expected, rtol=0, atol=1e-5)
    plain = trained(tmp_path / "plain", backbone, UNIFORM)
    if "head_dim" not in fields:  # of the same weights, the fields alone differ
        other = AutoModelForCausalLM.from_pretrained(plain)
        other.load_state_dict(ours.state_dict())
        with torch.no_grad():
            assert (other.eval()(IDS).logits - expected).abs().max() > 1e-3


@pytest.mark.parametrize("backbone", ["qwen3", "granite", "olmo2"])
def test_one_active_expert_of_any_numbers(tmp_path, backbone):
    model = trained(tmp_path, backbone, Plan("moe-lpr", [2, 4, 3], top_k=1))
    export_native(model, tmp_path / "out")
    with torch.no_grad():
        torch.testing.assert_close(load(tmp_path / "out")(IDS).logits, load(model)(IDS).logits, rtol=0, atol=1e-5)


def test_an_expert_that_fills_a_layer_up_is_never_chosen(tmp_path):
    model = trained(tmp_path, "llama", Plan("moe-lpr", [2, 4, 3]))
    export_native(model, tmp_path / "out")
    native, found = load(tmp_path / "out"), {}
    for layer, block in enumerate(native.model.layers):
        block.mlp.gate.register_forward_hook(lambda _, __, out, layer=layer: found.update({layer: out[2]}))
    with torch.no_grad():
        native(torch.randint(0, 256, (8, 60), generator=torch.Generator().manual_seed(3)))
    assert [int(found[layer].max()) for layer in range(3)] == [1, 3, 2]
    ids = IDS.repeat(40, 1)[:, torch.randperm(20, generator=torch.Generator().manual_seed(4))]
    with torch.no_grad():
        torch.testing.assert_close(native(ids).logits, load(model)(ids).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("counts", [[3, 3, 3], [2, 1, 3]], ids=str)
def test_merged_lora_experts_compute_the_same(tmp_path, counts):
    save_dense(tmp_path / "base", "llama")
    expand_checkpoint(tmp_path / "base", tmp_path / "lora", Plan("mola", counts), expert_kind="lora", lora_rank=4)
    model = load(tmp_path / "lora")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
            elif "router" in name:
                parameter.mul_(5)
    model.save_pretrained(tmp_path / "trained")
    with pytest.raises(InputError, match=r"low-rank updates; .*`export --merge-lora` makes FFNs of them"):
        export_native(tmp_path / "trained", tmp_path / "out")
    invoke("export", tmp_path / "trained", tmp_path / "out", "--merge-lora")
    with torch.no_grad():
        ours, dense = model(IDS).logits, load(tmp_path / "base")(IDS).logits
        torch.testing.assert_close(load(tmp_path / "out")(IDS).logits, ours, rtol=0, atol=1e-5)
        assert (ours - dense).abs().max() > 0.01


def test_experts_of_several_types_cannot_be_stacked(tmp_path):
    model = trained(tmp_path, "granite", UNIFORM)
    weights = load_file(model / "model.safetensors")
    name = next(name for name in weights if ".experts.1." in name)
    save_file(weights | {name: weights[name].bfloat16()}, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"stacks tensors of several types \(BF16, F32\)"):
        export_native(model, tmp_path / "out")


def test_a_dmoe_checkpoint_with_dense_layers(tmp_path):
    model = trained(tmp_path, "qwen2", Plan("dmoe", [2, 1, 2], groups=[["en"], ["el"]]))
    export_native(model, tmp_path / "out")
    with torch.no_grad():
        torch.testing.assert_close(load(tmp_path / "out")(IDS).logits, load(model)(IDS).logits, rtol=0, atol=1e-5)
    assert load(tmp_path / "out").config.mlp_only_layers == [1]


def test_sliding_windows_and_other_fields_travel(tmp_path):
    changes = {"sliding_window": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 1234.0}}
    model = trained(tmp_path, "mistral", UNIFORM, rms_norm_eps=1e-3, **changes)
    export_native(model, tmp_path / "out")
    with torch.no_grad():
        torch.testing.assert_close(load(tmp_path / "out")(IDS).logits, load(model)(IDS).logits, rtol=0, atol=1e-5)


def test_the_export_needs_nothing_of_ours(tmp_path):
    model = trained(tmp_path, "qwen3", UNIFORM)
    GenerationConfig(temperature=0.7, do_sample=True, eos_token_id=256).save_pretrained(model)
    export_native(model, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.py"))
    text = (tmp_path / "out" / "config.json").read_text()
    assert str(tmp_path) not in text
    (entry,) = json.loads(text)["history"]
    assert entry["settings"]["expansions"][0]["new_languages"] == ["el"]
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert GenerationConfig.from_pretrained(tmp_path / "out").temperature == 0.7
    code = (
        "from transformers import AutoModelForCausalLM as A\nprint(A.from_pretrained(sys.argv[1]).config.num_experts)"
    )
    assert run_fresh(code, str(tmp_path / "out")).strip() == "3"


def test_without_a_native_form_it_says_why(tmp_path):
    def refused(message, model, **options):
        with pytest.raises(InputError, match=message):
            export_native(model, tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()

    def expanded(name, backbone, plan, **changes):
        save_dense(tmp_path / f"{name}-base", backbone, **changes)
        expand_checkpoint(tmp_path / f"{name}-base", tmp_path / name, plan)
        return tmp_path / name

    refused("is equivalent to an expanded bloom model: none has .* exist for granite", expanded("b", "bloom", UNIFORM))
    refused("expanded gemma3_text model: Gemma 4's mixture", expanded("g", "gemma3_text", UNIFORM))
    refused(
        "2, 3 experts, but .* one number for all .* a bias on the scores .* sigmoid in place of softmax",
        expanded("c", "qwen3", Plan("moe-lpr", [2, 3, 3])),
    )
    refused("with Granite's multipliers has one", expanded("gr", "granite", Plan("moe-lpr", [2, 1, 3])))
    refused(
        "sliding windows, Mixtral, has none", expanded("mi", "mistral", Plan("moe-lpr", [2, 1, 3]), sliding_window=4)
    )
    refused(
        "has 2 experts, fewer than the 3 that are active", expanded("k3", "llama", Plan("moe-lpr", [2, 3, 4], top_k=3))
    )
    refused("no LoRA experts, so that there is nothing to merge", expanded("q2", "qwen2", UNIFORM), merge_lora=True)
    refused("layers 2 have a classifier", expanded("k", "qwen2", Plan("layer-moe", [3, 3, 3], [2])))
    sliding = {"sliding_window": 4, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 3}
    refused("sliding-window attention, which qwen3_moe", expanded("s", "qwen3", UNIFORM, **sliding))
    refused("cannot be written as mixtral: tensor .*bias'", expanded("l", "llama", UNIFORM, attention_bias=True))
    refused("not an expanded one", tmp_path / "b-base")
    with pytest.raises(InputError, match="is the input folder"):
        export_native(tmp_path / "c", tmp_path / "c", overwrite=True)


@pytest.mark.parametrize("backbone", [*COMMON_BACKBONES, "qwen3"])
def test_expert_0_is_the_base_byte_for_byte_and_others_are_what_they_compute(tmp_path, backbone):
    model = trained(tmp_path, backbone, WITH_DENSE, **({"tie_word_embeddings": True} if backbone == "qwen3" else {}))
    for expert in (0, 2):
        name = export_native(model, tmp_path / f"expert{expert}", expert=expert)
        assert name == type(load(tmp_path / "base")).__name__
    for file in ("model.safetensors", "generation_config.json"):
        assert (tmp_path / "expert0" / file).read_bytes() == (tmp_path / "base" / file).read_bytes()
    configs = [json.loads((tmp_path / which / "config.json").read_text()) for which in ("expert0", "base")]
    assert configs[0].pop("history")[0]["settings"]["expert"] == 0
    assert configs[0] == configs[1]
    ours, dense = load(model), load(tmp_path / "expert2")
    with ours.use_expert(2), torch.no_grad():
        assert torch.equal(ours(IDS).logits, dense(IDS).logits)
    with torch.no_grad():
        assert not torch.equal(dense(IDS).logits, load(tmp_path / "base")(IDS).logits)


def test_an_expert_that_not_every_layer_has(tmp_path):
    save_dense(tmp_path / "base")
    expand_checkpoint(tmp_path / "base", tmp_path / "out", Plan("moe-lpr", [3, 1, 2]))
    with pytest.raises(InputError, match=r"layer 2 has no expert 2; give one of 0\.\.1"):
        export_native(tmp_path / "out", tmp_path / "no", expert=2)
    export_native(tmp_path / "out", tmp_path / "one", expert=1)
    with pytest.raises(InputError, match="not an expanded one"):
        export_native(tmp_path / "base", tmp_path / "no", expert=0)
    with pytest.raises(InputError, match="has no expert -1"):
        export_native(tmp_path / "out", tmp_path / "no", expert=-1)

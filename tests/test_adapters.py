"""Language adapters: low-rank updates of all linear maps, against dense models whose weights have them."""

import copy

import pytest
import torch
from added import MIXTURES as MIXTURE_FIELDS
from conftest import byte_tokenizer, load, refused, save_dense, tiny_config, tiny_dense
from gated_models import GREEDY, tokens
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.pytorch_utils import Conv1D

from hf_moe_expand import (
    LayerMoEConfig,
    LayerMoEForCausalLM,
    Plan,
    expand_checkpoint,
    expand_model,
    grow_checkpoint,
    join_expansions,
    make_card,
)
from hf_moe_expand.checkpoint.adapter_maps import all_linear
from hf_moe_expand.checkpoint.promises import tiny_twin
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.modeling.experts import LoraUpdate
from hf_moe_expand.modeling.routing import TokenClasses
from hf_moe_expand.report.inspection import inspect_checkpoint

RANK, ALPHA = 4, 6.0
KIND = {"expert_kind": "adapter", "lora_rank": RANK, "lora_alpha": ALPHA}
PLAN = Plan("moe-lpr", [2, 2, 2], old=["en"], new=["el"], exclusive=True)
MORE = Plan("moe-lpr", [3, 3, 3], old=["en", "el"], new=["tr"], grows_from=[2, 2, 2], exclusive=True)
# Gated; one matrix for q, k and v; Conv1D; a residual inside the FFN; an FFN of two layers in the layer; scaled
# embeddings; attention and FFN side by side.
BACKBONES = ("qwen2", "gpt_neox", "gpt2", "bloom", "opt", "gemma", "phi", "falcon")
MIXTURES = ("qwen3_moe", "mixtral")
IDS = tokens(2, 12)


def moved(model, seed=0):
    """The model with updates that are far from nothing, of its last expansion."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in model.expanded_ffns().values():
            for parameter in layer.experts[layer.experts_after_expansion[-2] :].parameters():
                parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.2)
    return model


def merged(model, dense, expert):
    """The dense model whose weights are `W + scaling * B A`, written out."""
    merged = copy.deepcopy(dense)
    with torch.no_grad():
        for name, layer in model.named_modules():
            for update in layer.experts[expert].children() if name.endswith(".adapters") else ():
                own = merged.get_submodule(f"{name.removesuffix('.adapters')}.{update.name}")
                change = update.scaling * update.lora_B.weight @ update.lora_A.weight
                own.weight += change.T if isinstance(own, Conv1D) else change
    return merged.eval()


def moved_file(folder, seed=0):
    moved(AutoModelForCausalLM.from_pretrained(folder), seed).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_dense(tmp_path_factory.mktemp("adapters") / "base")


@pytest.fixture(scope="module")
def el(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("packs") / "qwen-el"
    expand_checkpoint(base, folder, PLAN, **KIND)
    return moved_file(folder)


@pytest.fixture(scope="module")
def grown(el, tmp_path_factory):
    folder = tmp_path_factory.mktemp("grown") / "qwen-tr"
    grow_checkpoint(el, folder, MORE)
    return moved_file(folder, 1)


@torch.no_grad()
def logits(model, **more):
    return (model if isinstance(model, torch.nn.Module) else load(model))(IDS, **more).logits


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backbone", BACKBONES + MIXTURES)
def test_told_it_is_the_merged_model_and_at_home_the_base_bit_for_bit(backbone):
    dense, plan = tiny_dense(backbone).eval(), PLAN
    if (count := dense.config.num_hidden_layers) != 3:
        plan = Plan("moe-lpr", [2] * count, old=["en"], new=["el"], exclusive=True)
    model = expand_model(copy.deepcopy(dense), plan, **KIND).eval()
    assert {name for name in model.state_dict() if ".adapters." not in name} == {*dense.state_dict()}
    assert torch.equal(logits(model), logits(dense))  # updates of zero
    moved(model)
    updated = [module for module in model.modules() if isinstance(module, LoraUpdate)]
    assert len(updated) == len(all_linear(dense)) >= 4 * count
    expected = logits(merged(model, dense, 1))
    assert not torch.allclose(expected, logits(dense), atol=1e-2)
    close(logits(model, languages="el"), expected)
    close(logits(model), expected)  # without a gate, the newest expansion's
    assert torch.equal(logits(model, languages="en"), logits(dense))
    with model.use_expansion(0):
        assert torch.equal(logits(model), logits(dense))
    mixed = logits(model, languages=["en", "el"])
    if backbone not in MIXTURES:  # which run an expert's tokens together: their number changes the rounding
        assert torch.equal(mixed[0], logits(dense)[0])
    close(mixed[0], logits(dense)[0])
    close(mixed[1], expected[1])


@pytest.mark.parametrize("backbone", MIXTURES)
def test_of_a_mixture_attention_and_shared_parts_are_updated(backbone):
    names = {name.rpartition(".")[2] for name in all_linear(tiny_dense(backbone))}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_the_shared_expert_of_a_mixture_is_updated_and_its_gate_is_not():
    names = {name.split(".", 3)[3] for name in all_linear(tiny_dense("qwen2_moe"))}
    assert {name for name in names if "shared" in name} == {
        f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")
    }
    assert not any(".experts." in name or name == "mlp.gate" for name in names)


# Several streams of a token, before the batch or after the tokens; maps that read the cache.
UNUSUAL = {
    "gemma3n_text": {},
    "hy_v4": {"target_modules": ".*self_attn.*(q|kv?|o)[a-z_]*_proj"},
    "doge": {},
    "youtu": {},
}


def gated(model):
    """The model with a gate that decides now one way, now the other."""
    fields = model.config.to_dict() | {
        "language_gate": {"layer": 1, "languages": [["en"], ["el"]], "window": 4, "bound": 2.0},
        "expansions": [{"method": "x", "old_languages": ["en"], "new_languages": ["el"]}],
    }
    made = LayerMoEForCausalLM(LayerMoEConfig(**{k: v for k, v in fields.items() if k != "model_type"})).eval()
    made.load_state_dict(model.state_dict(), strict=False)
    weight, draw = made.language_gate.weight, torch.Generator().manual_seed(5)
    torch.nn.init.normal_(weight, generator=draw)
    return made


def unusual(name):
    dense = tiny_twin(CONFIG_MAPPING[name]()).eval()
    plan = Plan("moe-lpr", [2] * dense.config.num_hidden_layers, old=["en"], new=["el"], exclusive=True)
    return dense, moved(expand_model(dense, plan, **KIND, **UNUSUAL[name]))


@pytest.mark.parametrize("name", UNUSUAL)
def test_each_row_of_an_unusual_layer_has_its_languages_maps(name):
    dense, model = unusual(name)
    told = {code: logits(model.eval(), languages=code) for code in ("en", "el")}
    close(told["en"], logits(dense))
    mixed = logits(model, languages=["en", "el"])
    close(mixed, torch.stack([told["en"][0], told["el"][1]]))
    assert not torch.allclose(told["en"], told["el"], atol=1e-2)
    answers = [model.generate(IDS, languages=codes, **GREEDY) for codes in ("en", ["en", "el"], "el")]
    assert torch.equal(answers[1], torch.stack([answers[0][0], answers[2][1]]))
    assert torch.equal(answers[2], model.generate(IDS, languages="el", use_cache=False, **GREEDY))
    model.train()
    in_training = []
    for classes in ([0, 0], [1, 1], [0, 1]):
        rows = TokenClasses(torch.tensor(classes).repeat_interleave(12), sorted({*classes}))
        with model.routing_control.asking(token_classes=rows):
            in_training.append(logits(model))
    close(in_training[2], torch.stack([in_training[0][0], in_training[1][1]]))
    assert not torch.allclose(in_training[0], in_training[1], atol=1e-2)


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "opt", "bloom", *UNUSUAL])
def test_behind_a_gate_a_text_is_told_its_class(name):
    """Also padded, where positions are learned; in layers that map what the cache holds anew; in those of mixtures."""
    dense, model = unusual(name) if name in UNUSUAL else (tiny_dense(name), None)
    model = gated(model or moved(expand_model(dense, PLAN, **KIND)))
    ids = tokens(12, 12, seed=3)
    classes = model.judge(ids)
    assert {*classes.tolist()} == {0, 1}
    codes = ["el" if number else "en" for number in classes]
    assert torch.equal(model(ids).logits, model(ids, languages=codes).logits)
    assert torch.equal(model.generate(ids, **GREEDY), model.generate(ids, languages=codes, **GREEDY))
    padded, mask = (torch.nn.functional.pad(x, (6, 0), value=0) for x in (ids, torch.ones_like(ids)))
    assert torch.equal(model.judge(padded, mask), classes)
    found, told = (model.generate(padded, attention_mask=mask, **GREEDY, **more) for more in ({}, {"languages": codes}))
    assert torch.equal(found, told)


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_maps_whose_names_peft_takes_for_experts_are_left_out(name):
    dense = tiny_dense(name, **MIXTURE_FIELDS[name]) if name in MIXTURE_FIELDS else tiny_twin(CONFIG_MAPPING[name]())
    plan = Plan("moe-lpr", [2] * dense.config.num_hidden_layers, old=["en"], new=["el"], exclusive=True)
    with pytest.warns(
        UserWarning, match="PEFT knows down_proj, gate_proj, up_proj of this model as the experts' alone"
    ):
        model = moved(expand_model(dense, plan, **KIND)).eval()
    maps = {update.name for update in model.modules() if isinstance(update, LoraUpdate)}
    assert "self_attn.o_proj" in maps
    assert all(name.startswith("self_attn.") for name in maps)
    close(logits(model, languages="el"), logits(merged(model, dense, 1)))


def test_growth_by_two_adapters_is_refused(el, tmp_path):
    plan = Plan("moe-lpr", [4, 4, 4], old=["en", "el"], new=["tr"], grows_from=[2, 2, 2], exclusive=True)
    with pytest.raises(InputError, match="a language has one adapter, but the plan adds more experts to a layer"):
        grow_checkpoint(el, tmp_path / "out", plan)
    assert not (tmp_path / "out").exists()


def test_copies_pickles_and_compiled_passes_have_their_own_hooks(grown):
    import pickle

    model = load(grown)
    expected = logits(model, languages="tr")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(other, languages="tr"), expected)
        with torch.no_grad():
            for parameter in other.expanded_ffns()[0].parameters():
                parameter.zero_()
        assert not torch.equal(logits(other, languages="tr"), expected)
        assert torch.equal(logits(model, languages="tr"), expected)
    exported = torch.export.export(model, (IDS,), {"use_cache": False}, strict=False).module()
    close(exported(IDS, use_cache=False).logits, logits(model))


@pytest.fixture(scope="module")
def hu(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("packs") / "qwen-hu"
    plan = Plan("moe-lpr", [1, 2, 2], old=["en"], new=["hu"], exclusive=True)
    expand_checkpoint(base, folder, plan, expert_kind="adapter", lora_rank=2, target_modules="q_proj,down_proj")
    return moved_file(folder, 2)


def test_packs_of_other_ranks_and_maps_join(el, hu, tmp_path):
    join_expansions([el, hu], tmp_path / "out")
    joined = load(tmp_path / "out")
    for code, pack in (("el", el), ("hu", hu), ("en", el)):
        assert torch.equal(logits(joined, languages=code), logits(pack, languages=code))


def test_a_pack_is_shown_with_its_own_updates(el, hu, tmp_path):
    join_expansions([el, hu], tmp_path / "joined")
    shown = inspect_checkpoint(tmp_path / "joined").packs
    for folder, pack in zip((el, hu), shown, strict=True):
        assert pack.experts == load(folder).config.expert_kinds[0].words
    assert shown[0].experts != shown[1].experts


def test_adapters_join_adapters_alone(base, el, tmp_path):
    expand_checkpoint(base, tmp_path / "fi", Plan("moe-lpr", [2] * 3, old=["en"], new=["fi"], exclusive=True))
    refused(join_expansions, [tmp_path / "fi", el], tmp_path / "out", says="adapters are joined with adapters alone")


def test_a_quantised_base_calls_its_adapters(el):
    """Loading replaces the linear maps, to which the updates are added."""
    model = load(el)
    layer = model.model.layers[0]
    layer.self_attn.q_proj = copy.deepcopy(layer.self_attn.q_proj)
    layer.self_attn.q_proj._forward_hooks.clear()
    expected = logits(el, languages="el")
    assert not torch.equal(logits(model, languages="el"), expected)
    model._attach_parts()
    model._attach_parts()
    assert torch.equal(logits(model, languages="el"), expected)


@pytest.mark.parametrize(
    ("plan", "given", "said"),
    [
        (Plan("moe-lpr", [2] * 3, old=["en"], new=["el"]), {}, r"experts and a router: a language has one adapter"),
        (Plan("moe-lpr", [3] * 3, old=["en"], new=["el"], exclusive=True), {}, r"one adapter and no router; plan with"),
        (PLAN, {"lora_rank": 0}, "lora_rank"),
        (PLAN, {"target_modules": "q_porj"}, r"target_modules \['q_porj'\]: PEFT finds no maps"),
        (PLAN, {"target_modules": "lm_head"}, "which is no linear map of a layer"),
        (PLAN, {"target_modules": "embed_tokens"}, "which is no linear map of a layer"),
        (
            Plan("moe-lpr", [1, 1, 2], old=["en"], new=["el"], exclusive=True),
            {"target_modules": r".*layers\.0\..*q_proj"},
            r"updates nothing in the plan's layers \(1 1 2 experts\)",
        ),
        (PLAN, {"expert_init": "random"}, "adapters start with an update of zero"),
        (PLAN, {"expert_kind": "ffn", "target_modules": "q_proj"}, "only adapters choose the maps"),
        (PLAN, {"expert_width": 8}, "only added experts have a width"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(base, tmp_path, plan, given, said):
    refused(expand_checkpoint, base, tmp_path / "out", plan, says=said, **KIND | given)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"exclusive_experts": False}, "set exclusive_experts"),
        ({"adapters": None}, "adapters is empty"),
        ({"adapters": [{}]}, "must have `maps`"),
        ({"adapters": [{"maps": {"self_attn.q_proj": [0, 1.0]}}]}, "a rank of at least 1"),
        ({"adapters": [{"maps": {"self_attn.q_proj": [4, float("nan")]}}]}, "a finite scaling"),
        ({"adapters": [{"maps": {}}, {"maps": {}}]}, "one entry of adapters for each expansion"),
        ({"num_experts_per_layer": [3, 3, 3]}, "let each expansion add one expert"),
    ],
)
def test_a_configuration_that_contradicts_itself_is_refused(fields, said):
    given = {
        "num_experts_per_layer": [2, 2, 2], "exclusive_experts": True, "expert_kind": "adapter",
        "adapters": [{"maps": {"self_attn.q_proj": [4, 1.0]}}],
    }  # fmt: skip
    refused(LayerMoEConfig.from_dense, tiny_config("qwen2"), says=said, raises=ValueError, **given | fields)


def test_only_some_maps_of_some_layers(base, tmp_path):
    pattern = r".*layers\.[02]\.(self_attn\.q_proj|mlp\.up_proj)"
    expand_checkpoint(base, tmp_path / "x", PLAN, **KIND, target_modules=pattern)
    moved_file(tmp_path / "x")
    model = load(tmp_path / "x")
    assert [len(layer.updated) for layer in model.expanded_ffns().values()] == [2, 0, 2]
    close(logits(model, languages="el"), logits(merged(model, load(base), 1)))


def test_the_card_speaks_of_adapters(el, grown):
    card = str(make_card(el))
    assert "- lora" in card
    assert "[LoRA](https://arxiv.org/abs/2106.09685) adapters of base, for el" in card
    assert "(updates of rank 4 on down_proj, gate_proj" in card
    assert "without a language it takes the newest" in card
    assert "| 2 | tr | moe-lpr | 1 1 1 | copies of expert 0 | none |" in str(make_card(grown))
    assert "FFN" not in card.split("## Citation")[0]


def test_a_new_adapter_may_be_a_copy(el, tmp_path):
    grow_checkpoint(el, tmp_path / "copied", MORE, copy_from=dict.fromkeys(range(3), 1))
    assert torch.equal(logits(tmp_path / "copied", languages="tr"), logits(el, languages="el"))

"""Language adapters: low-rank updates of all linear maps, against dense models whose weights have them."""

import copy

import pytest
import torch
from conftest import load, move, moved, refused, tiny_config, tiny_dense
from gated_models import GREEDY, tokens
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.pytorch_utils import Conv1D

from hf_moe_expand import LayerMoEConfig, Plan, expand_checkpoint, expand_model, grow_checkpoint, join_expansions
from hf_moe_expand.checkpoint.facts import kind_of
from hf_moe_expand.checkpoint.new_experts import all_linear
from hf_moe_expand.checkpoint.promises import tiny_twin
from hf_moe_expand.modeling.routing import TokenClasses
from hf_moe_expand.modeling.updates import LoraUpdate
from hf_moe_expand.report.inspection import inspect_checkpoint

RANK, ALPHA = 4, 6.0
KIND = {"expert_kind": "adapter", "lora_rank": RANK, "lora_alpha": ALPHA}
PLAN = Plan("moe-lpr", [2, 2, 2], old=["en"], new=["el"], exclusive=True)
LAST_LAYER = Plan("moe-lpr", [1, 1, 2], old=["en"], new=["el"], exclusive=True)
# One matrix for q, k and v; Conv1D; a residual inside the FFN; an FFN of two layers in the layer; scaled embeddings;
# attention and FFN side by side; a mixture.
BACKBONES = ("gpt_neox", "gpt2", "bloom", "opt", "gemma", "phi", "mixtral")
IDS = tokens(2, 12)


def plan_of(dense):
    return Plan("moe-lpr", [2] * dense.config.num_hidden_layers, old=["en"], new=["el"], exclusive=True)


@torch.no_grad()
def merged(model, dense, expert=1):
    """The dense model whose weights are `W + scaling * B A`, written out."""
    merged = copy.deepcopy(dense)
    for name, layer in model.named_modules():
        for update in layer.experts[expert].children() if name.endswith(".adapters") else ():
            own = merged.get_submodule(f"{name.removesuffix('.adapters')}.{update.name}")
            change = update.scaling * update.lora_B.weight @ update.lora_A.weight
            own.weight += change.T if isinstance(own, Conv1D) else change
    return merged.eval()


@pytest.fixture(scope="module")
def el(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("packs") / "qwen-el"
    expand_checkpoint(base, folder, PLAN, **KIND)
    return move(folder)


@torch.no_grad()
def logits(model, **more):
    return (model if isinstance(model, torch.nn.Module) else load(model))(IDS, **more).logits


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_told_it_is_the_merged_model_and_at_home_the_base_bit_for_bit(backbone):
    dense = tiny_dense(backbone)
    model = expand_model(copy.deepcopy(dense), plan_of(dense), **KIND).eval()
    assert {name for name in model.state_dict() if ".adapters." not in name} == {*dense.state_dict()}
    model = moved(model)
    updated = [module for module in model.modules() if isinstance(module, LoraUpdate)]
    assert len(updated) == len(all_linear(dense)) >= 4 * dense.config.num_hidden_layers
    home, expected = logits(dense), logits(merged(model, dense))
    assert not torch.allclose(expected, home, atol=1e-2)
    close(logits(model), expected)  # without a gate, the newest expansion's
    assert torch.equal(logits(model, languages="en"), home)
    mixed = logits(model, languages=["en", "el"])
    # A mixture runs an expert's tokens together: their number changes the rounding.
    assert torch.equal(mixed[0], home[0]) or backbone == "mixtral"
    close(mixed, torch.stack([home[0], expected[1]]))


def test_of_a_mixture_attention_and_shared_parts_are_updated():
    attention = {f"self_attn.{part}_proj" for part in "qkvo"}
    shared = {f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}
    for backbone, parts in (("qwen3_moe", attention), ("mixtral", attention), ("qwen2_moe", attention | shared)):
        assert {name.split(".", 3)[3] for name in all_linear(tiny_dense(backbone))} == parts


# Several streams of a token, before the batch or after the tokens; maps that read the cache.
UNUSUAL = {
    "gemma3n_text": {},
    "hy_v4": {"target_modules": ".*self_attn.*(q|kv?|o)[a-z_]*_proj"},
    "doge": {},
    "youtu": {},
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_each_row_of_an_unusual_layer_has_its_languages_maps(name):
    dense = tiny_twin(CONFIG_MAPPING[name]()).eval()
    model = moved(expand_model(dense, plan_of(dense), **KIND, **UNUSUAL[name])).eval()
    home, away = (logits(model, languages=code) for code in ("en", "el"))
    close(home, logits(dense))
    assert not torch.allclose(home, away, atol=1e-2)
    close(logits(model, languages=["en", "el"]), torch.stack([home[0], away[1]]))
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


def test_maps_whose_names_peft_takes_for_experts_are_left_out():
    dense = tiny_twin(CONFIG_MAPPING["glm4_moe"]())
    with pytest.warns(UserWarning, match="PEFT knows down_proj, gate_proj, up_proj of this model as the experts'"):
        model = moved(expand_model(dense, plan_of(dense), **KIND)).eval()
    maps = {update.name for update in model.modules() if isinstance(update, LoraUpdate)}
    assert "self_attn.o_proj" in maps
    assert all(name.startswith("self_attn.") for name in maps)
    close(logits(model, languages="el"), logits(merged(model, dense)))


def test_packs_of_other_ranks_and_maps_join_and_are_shown(base, el, tmp_path):
    plan = Plan("moe-lpr", [1, 2, 2], old=["en"], new=["hu"], exclusive=True)
    hu = tmp_path / "qwen-hu"
    expand_checkpoint(base, hu, plan, expert_kind="adapter", lora_rank=2, target_modules="q_proj,down_proj")
    join_expansions([el, move(hu, seed=4)], tmp_path / "joined")
    for code, pack in (("el", el), ("hu", hu), ("en", el)):
        assert torch.equal(logits(tmp_path / "joined", languages=code), logits(pack, languages=code))
    shown = [pack.experts for pack in inspect_checkpoint(tmp_path / "joined").packs]
    configs = [load(folder).config for folder in (el, hu)]
    kind_of(configs[0]).settings["adapters"][0].clear()  # the configuration's own stay
    assert shown == [kind_of(config).words for config in configs]
    assert shown[0] != shown[1]
    expand_checkpoint(base, tmp_path / "fi", Plan("moe-lpr", [2] * 3, old=["en"], new=["fi"], exclusive=True))
    refused(join_expansions, [tmp_path / "fi", el], tmp_path / "out", says="adapters are joined with their own kind")
    two = Plan("moe-lpr", [4, 4, 4], old=["en", "el"], new=["tr"], grows_from=[2, 2, 2], exclusive=True)
    refused(grow_checkpoint, el, tmp_path / "out", two, says="a language has one adapter, but the plan adds more")


def test_a_map_that_was_replaced_has_its_updates_and_so_does_a_graph(el):
    """As loading a quantised model replaces the linear maps."""
    model = load(el)
    attention = model.model.layers[0].self_attn
    attention.q_proj = copy.deepcopy(attention.q_proj)
    expected = logits(el, languages="el")
    assert torch.equal(logits(model, languages="el"), expected)
    exported = torch.export.export(model, (IDS,), {"use_cache": False}, strict=False).module()
    close(exported(IDS, use_cache=False).logits, logits(model))


def test_bad_input_is_refused(base, tmp_path):
    for plan, given, said in (
        (Plan("moe-lpr", [2] * 3, old=["en"], new=["el"]), {}, "a language has one expert"),
        (Plan("moe-lpr", [3] * 3, old=["en"], new=["el"], exclusive=True), {}, "take the plan"),
        (PLAN, {"target_modules": "q_porj"}, "target_modules 'q_porj': PEFT finds no maps"),
        (PLAN, {"target_modules": "lm_head"}, "which is no linear map of a layer"),
        (PLAN, {"target_modules": "embed_tokens"}, "which is no linear map of a layer"),
        (LAST_LAYER, {"target_modules": r".*layers\.0\..*q_proj"}, r"updates nothing in the plan's layers \(1 1 2"),
        (PLAN, {"expert_init": "random"}, "adapters start with an update of zero"),
        (PLAN, {"expert_kind": "ffn", "target_modules": "q_proj"}, "set expert_kind to 'lora' or 'adapter'"),
        (PLAN, {"expert_width": 8}, "leave it out, or set expert_kind to 'added'"),
    ):
        refused(expand_checkpoint, base, tmp_path / "out", plan, says=said, **KIND | given)
        assert not (tmp_path / "out").exists()


def test_a_configuration_that_contradicts_itself_is_refused():
    maps = {"self_attn.q_proj": [4, 1.0]}
    good = {"num_experts_per_layer": [2, 2, 2], "exclusive_experts": True, "expert_kind": "adapter"}
    for fields, said in (
        ({"exclusive_experts": False}, "set exclusive_experts"),
        ({"adapters": None}, "adapters is empty"),
        ({"adapters": [{}]}, "must have `maps`"),
        ({"adapters": [{"maps": {"self_attn.q_proj": [0, 1.0]}}]}, "a rank of at least 1"),
        ({"adapters": [{"maps": {"self_attn.q_proj": [4, float("nan")]}}]}, "a finite scaling"),
        ({"adapters": [{"maps": {}}, {"maps": {}}]}, "one entry of adapters for each expansion"),
        ({"num_experts_per_layer": [3, 3, 3]}, "add at most one expert to a layer"),
    ):
        given = {**good, "adapters": [{"maps": maps}], **fields}
        refused(LayerMoEConfig.from_dense, tiny_config("qwen2"), says=said, raises=ValueError, **given)


def test_only_some_maps_of_some_layers(base, tmp_path):
    pattern = r".*layers\.[02]\.(self_attn\.q_proj|mlp\.up_proj)"
    expand_checkpoint(base, tmp_path / "x", PLAN, **KIND, target_modules=pattern)
    model = load(move(tmp_path / "x"))
    assert [len(layer.names) for layer in model.expanded_ffns().values()] == [2, 0, 2]
    close(logits(model, languages="el"), logits(merged(model, load(base))))

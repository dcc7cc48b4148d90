"""Added experts in checkpoints: grown, joined, exported, grafted, inspected, and made by every verb."""

import json

import pytest
import torch
from added import EXPERTS, IDS, PLAN, WIDTH, moved, saved_in
from conftest import invoke, load, tiny_config, write_texts

from hf_moe_expand import LayerMoEConfig, LayerMoEForCausalLM, Plan, expand_checkpoint, join_expansions
from hf_moe_expand.checkpoint.merge import average_checkpoints
from hf_moe_expand.core.errors import InputError


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return saved_in(tmp_path_factory.mktemp("added"))


def pack_of(folder, base, plan, seed, **arguments):
    """An expanded checkpoint whose new experts are no one else's."""
    assert expand_checkpoint(base, folder, plan, seed=seed, **arguments).left_out == []
    model = moved(load(folder))
    with torch.no_grad():
        for ffn in model.expanded_ffns().values():
            ffn.experts[1].down_proj.weight.add_(seed)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("base", ["olmoe", "qwen2"])
def test_packs_of_any_width_are_joined(base, saved, tmp_path):
    folder = saved(base)
    plans = [
        Plan("moe-lpr", [2, 1, 3], old=["en"], new=["el"], exclusive=True),
        Plan("moe-lpr", [2, 2, 2], old=["en"], new=["hu"], exclusive=True),
        Plan("moe-lpr", [3, 1, 1], old=["en"], new=["tr"], exclusive=True),
    ]
    widths = (WIDTH, 24, WIDTH)
    packs = [
        pack_of(tmp_path / plan.new[0], folder / "base", plan, seed, expert_kind="added", expert_width=width)
        for seed, (plan, width) in enumerate(zip(plans, widths, strict=True))
    ]
    join_expansions(packs, tmp_path / "joined")
    joined = load(tmp_path / "joined")
    assert joined.config.updates_of_packs == [[16], [24], [16]]
    first = 1
    for number, (pack, plan) in enumerate(zip(packs, plans, strict=True), start=1):
        alone = load(pack)
        for e in range(1, plan.experts_per_layer[0]):
            ours, theirs = (m.expanded_ffns()[0].experts for m in (joined, alone))
            assert torch.equal(ours[first].down_proj.weight, theirs[e].down_proj.weight)
            first += 1
        assert f"pack {number}              {plan.new[0]}" in invoke("inspect", tmp_path / "joined")
    with torch.no_grad(), joined.use_expert(0):
        assert torch.equal(joined(IDS).logits, load(folder / "base")(IDS).logits)
    join_expansions([packs[0], packs[2]], tmp_path / "two")
    assert load(tmp_path / "two").config.updates_of_packs is None
    if base == "qwen2":
        copies = tmp_path / "copies"
        expand_checkpoint(folder / "base", copies, Plan("u", [2, 2, 2], old=["en"], new=["de"], exclusive=True))
        with pytest.raises(InputError, match="added experts are joined with added experts alone"):
            join_expansions([packs[0], copies], tmp_path / "out")


@pytest.mark.parametrize("base", ["olmoe", "qwen2"])
def test_every_verb_once(base, saved, tmp_path, help_text):
    folder, moved_ = saved(base), saved(base) / "moved"
    dense = folder / "base"
    for code in ("en", "el"):
        write_texts(tmp_path / f"{code}.jsonl", [text[:400] for text in help_text(code, "train", 12)])
    en, el = (f"{code}={tmp_path / f'{code}.jsonl'}" for code in ("en", "el"))
    out = {name: tmp_path / f"{name}.json" for name in ("analysis", "plan", "routing", "evaluation")}
    both = ("--old", en, "--new", el, "--tokens", 400, "--block-size", 32)
    invoke("analyze", "similarity", dense, *both, "--out", out["analysis"])
    measured = ("--analysis", out["analysis"], "--similarity-floor", 2)
    invoke("plan", "layer-moe", *measured, "--total-experts", 7, "--out", out["plan"])
    expanded = tmp_path / "expanded"
    kind = ("--expert-kind", "added", "--expert-width", WIDTH)
    invoke("expand", dense, expanded, "--plan", out["plan"], *kind)
    config = json.loads((expanded / "config.json").read_text())
    assert (config["expert_kind"], config["expert_width"]) == ("added", WIDTH)
    invoke("diff", expanded, expanded)
    data = ("--data", en, "--data", el)
    invoke("analyze", "routing", moved_, *data, "--tokens", 200, "--block-size", 32, "--out", out["routing"])
    invoke("evaluate", moved_, "--data", en, "--block-size", 32, "--out", out["evaluation"])
    fitted = ("--tokens", 200, "--anchor-tokens", 100)
    invoke("gates", moved_, tmp_path / "gated", *data, *fitted)
    gated, before = load(tmp_path / "gated"), load(moved_)
    with torch.no_grad(), gated.use_expert(2), before.use_expert(2):
        assert torch.equal(gated(IDS).logits, before(IDS).logits)
    said = invoke("chat", moved_, "--prompt", "Hello", "--languages", "en", "--base", "inside", "--max-new-tokens", 4)
    assert said.index("base inside") > 0


def test_refusals(saved, tmp_path):
    mixture, dense = saved("olmoe") / "base", saved("qwen2") / "base"

    def refused(message, base, plan=PLAN, **options):
        with pytest.raises(InputError, match=message):
            expand_checkpoint(base, tmp_path / "out", plan, **options)

    refused("there is no expert_width: give the width", dense, expert_kind="added")
    refused("expert_width is 0: must be at least 1", dense, expert_kind="added", expert_width=0)
    refused("would not fit into this machine's memory", mixture, expert_kind="added", expert_width=1 << 40)
    refused("expert_width is 16, but expert_kind is 'ffn'", dense, expert_width=16)
    with pytest.raises(InputError, match="has added experts, which the dense checkpoint lacks"):
        average_checkpoints([saved("qwen2") / "moved", dense], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="expert_width is None: added experts need a width of at least 1"):
        LayerMoEConfig.from_dense(tiny_config("qwen2"), expert_kind="added")
    with pytest.raises(ValueError, match="mixtures of experts of the backbone's own, beside which only added experts"):
        LayerMoEForCausalLM(LayerMoEConfig.from_dense(tiny_config("olmoe", **EXPERTS), num_experts_per_layer=[2, 1, 1]))

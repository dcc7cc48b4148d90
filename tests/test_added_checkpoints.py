"""Added experts in checkpoints: joined, planned and expanded by commands, refused."""

import pytest
import torch
from added import EXPERTS, IDS, PLAN, WIDTH, saved_in
from conftest import invoke, load, move, refused, tiny_config

from hf_moe_expand import LayerMoEConfig, LayerMoEForCausalLM, Plan, expand_checkpoint, join_expansions
from hf_moe_expand.checkpoint.average import average_checkpoints


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return saved_in(tmp_path_factory.mktemp("added"))


@pytest.mark.parametrize("base", ["olmoe", "qwen2"])
def test_packs_of_any_width_are_joined(base, saved, tmp_path):
    dense, packs = saved(base) / "base", []
    plans = [
        Plan("moe-lpr", counts, old=["en"], new=[code], exclusive=True)
        for code, counts in (("el", [2, 1, 3]), ("hu", [2, 2, 2]), ("tr", [3, 1, 1]))
    ]
    for seed, (plan, width) in enumerate(zip(plans, (WIDTH, 24, WIDTH), strict=True)):
        folder = tmp_path / plan.new[0]
        made = expand_checkpoint(dense, folder, plan, seed=seed, expert_kind="added", expert_width=width)
        assert made.left_out == []
        packs.append(move(folder, seed=seed))
    join_expansions(packs, tmp_path / "joined")
    joined = load(tmp_path / "joined")
    assert joined.config.parts["added"] == {"each": [{"width": width} for width in (16, 24, 16)]}
    found, alone = iter(joined.expanded_ffns()[0].experts[1:]), map(load, packs)
    for number, (pack, plan) in enumerate(zip(alone, plans, strict=True), start=1):
        for theirs in pack.expanded_ffns()[0].experts[1:]:
            assert torch.equal(next(found).down_proj.weight, theirs.down_proj.weight)
        assert f"pack {number}              {plan.new[0]}" in invoke("inspect", tmp_path / "joined")
    with torch.no_grad(), joined.use_expert(0):
        assert torch.equal(joined(IDS).logits, load(dense)(IDS).logits)
    join_expansions([packs[0], packs[2]], tmp_path / "two")
    assert load(tmp_path / "two").config.parts["added"] == {"width": WIDTH}
    if base == "qwen2":
        copies = Plan("u", [2, 2, 2], old=["en"], new=["de"], exclusive=True)
        expand_checkpoint(dense, tmp_path / "copies", copies)
        said = "added experts are joined with added experts alone"
        refused(join_expansions, [packs[0], tmp_path / "copies"], tmp_path / "out", says=said)


def test_refusals(saved, tmp_path):
    mixture, dense, out = saved("olmoe") / "base", saved("qwen2") / "base", tmp_path / "out"
    for said, base, options in (
        ("there is no expert_width: give the width", dense, {"expert_kind": "added"}),
        ("expert_width is 0: must be at least 1", dense, {"expert_kind": "added", "expert_width": 0}),
        ("more than the disk has free", mixture, {"expert_kind": "added", "expert_width": 1 << 40}),
        ("expert_width is 16, but expert_kind is 'ffn'", dense, {"expert_width": 16}),
    ):
        refused(expand_checkpoint, base, out, PLAN, says=said, **options)
    said = "has added experts, which the dense checkpoint lacks"
    refused(average_checkpoints, [saved("qwen2") / "moved", dense], out, says=said)
    assert not out.exists()
    with pytest.raises(ValueError, match="expert_width is None: added experts need a width of at least 1"):
        LayerMoEConfig.from_dense(tiny_config("qwen2"), expert_kind="added")
    config = LayerMoEConfig.from_dense(tiny_config("olmoe", **EXPERTS), num_experts_per_layer=[2, 1, 1])
    with pytest.raises(ValueError, match="of which no ffn experts are made"):
        LayerMoEForCausalLM(config)

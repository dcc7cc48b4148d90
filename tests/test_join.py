"""Language packs: joined without training, and taken out again."""

import json
import logging
import re
import shutil
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from conftest import invoke, load, run_fresh, save_dense
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_moe_expand import (
    LayerMoEForCausalLM,
    Plan,
    expand_checkpoint,
    grow_checkpoint,
    join_expansions,
    leave_out_pack,
)
from hf_moe_expand.checkpoint.expansion_only import save_expansion
from hf_moe_expand.checkpoint.gate_file import Gate, write_gate
from hf_moe_expand.checkpoint.join import load_packs, write_joined
from hf_moe_expand.checkpoint.local import name_in_results, own_name
from hf_moe_expand.checkpoint.packs import joined_rows, packs_inside
from hf_moe_expand.checkpoint.records import History, StageRecord
from hf_moe_expand.checkpoint.stored import StoredModel
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.modeling.language_gate import GateRule
from hf_moe_expand.modeling.routing import expert_ranges, select_experts

EL = Plan("layer-moe", [2, 1, 3], [2], old=["en"], new=["el"])
HU = Plan("layer-moe", [3, 2, 1], old=["en", "de"], new=["hu"])
TR = Plan("layer-moe", [2, 2, 2], [0, 2], old=["en"], new=["tr"])


def make_pack(folder, base, plan, seed, **arguments):
    """An expanded checkpoint whose new experts, routers and classifiers are no one else's."""
    expand_checkpoint(base, folder, plan, seed=seed, **arguments)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        new_expert = ".experts." in name and ".experts.0." not in name
        if new_expert or "router" in name or "classifier" in name:
            scale = 0.3 if new_expert else 1.0
            tensor.copy_(scale * torch.randn(tensor.shape, generator=generator))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_dense(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def packs(base, tmp_path_factory):
    """Three packs of one base."""
    home = tmp_path_factory.mktemp("packs")
    named = {"el": EL, "hu": HU, "tr": TR}
    return {
        code: make_pack(home / f"qwen-{code}", base, plan, seed) for seed, (code, plan) in enumerate(named.items(), 1)
    }


def join_with_scales(packs, out, scales):
    """A join as releases wrote it that found a factor for each pack's router."""
    loaded = [replace(pack, scale=scale) for pack, scale in zip(load_packs(packs, out, False), scales, strict=True)]
    return write_joined(loaded, out)


def same_files(one, other):
    """Whether two folders hold the same files with the same bytes."""
    names = {file.name for file in one.iterdir()}
    assert names == {file.name for file in other.iterdir()}
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


IDS = torch.randint(0, 250, (2, 14), generator=torch.Generator().manual_seed(0))


def test_experts_and_base_are_the_same_bytes(packs, tmp_path):
    report = join_expansions([packs["el"], packs["hu"], packs["tr"]], tmp_path / "out")
    assert report.packs == ["qwen-el", "qwen-hu", "qwen-tr"]
    assert report.old_languages == ["en", "de"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_experts_per_layer"] == report.experts_per_layer == [5, 3, 4]
    assert config["earlier_experts_per_layer"] == [[2, 1, 3], [4, 2, 3]]
    assert config["packs"] == [1, 1, 1]
    joined = load_file(tmp_path / "out" / "model.safetensors")
    own = {code: load_file(folder / "model.safetensors") for code, folder in packs.items()}
    # Layer 0: el has 1 expert of its own, hu 2, tr 1. Layer 1: hu and tr. Layer 2: el has 2, tr 1.
    where = {
        0: [("el", 1), ("hu", 1), ("hu", 2), ("tr", 1)],
        1: [("hu", 1), ("tr", 1)],
        2: [("el", 1), ("el", 2), ("tr", 1)],
    }
    for layer, experts in where.items():
        for number, (code, theirs) in enumerate(experts, start=1):
            for part in ("gate_proj", "up_proj", "down_proj"):
                mine = joined[f"model.layers.{layer}.mlp.experts.{number}.{part}.weight"]
                assert torch.equal(mine, own[code][f"model.layers.{layer}.mlp.experts.{theirs}.{part}.weight"])
    for name, tensor in own["tr"].items():
        if (".experts." not in name and "router" not in name and "classifier" not in name) or ".experts.0." in name:
            assert torch.equal(joined[name], tensor)
    assert not any(".experts.5." in name for name in joined)


def test_the_rows_are_each_packs_log_odds_against_the_base(packs, tmp_path):
    join_expansions([packs["el"], packs["tr"]], tmp_path / "out")
    joined = load_file(tmp_path / "out" / "model.safetensors")
    el, tr = (load_file(packs[code] / "model.safetensors") for code in ("el", "tr"))
    name = "model.layers.2.mlp.router.weight"
    rows = [torch.zeros(32), el[name][1] - el[name][0], el[name][2] - el[name][0], tr[name][1] - tr[name][0]]
    assert torch.equal(joined[name], torch.stack(rows))
    only = "model.layers.1.mlp.router.weight"
    assert torch.equal(joined[only], torch.stack([torch.zeros(32), tr[only][1] - tr[only][0]]))
    gate = "model.layers.2.mlp.classifier.weight"
    assert torch.equal(
        joined[gate], torch.stack([torch.zeros(32), el[gate][1] - el[gate][0], tr[gate][1] - tr[gate][0]])
    )
    half = "model.layers.0.mlp.classifier.weight"  # el has none here
    assert torch.equal(joined[half], torch.stack([torch.zeros(32), torch.zeros(32), tr[half][1] - tr[half][0]]))


def test_a_router_joined_with_nothing_gives_the_same_weights():
    matrix, x = torch.randn(4, 8), torch.randn(50, 8)
    weights, index = select_experts(x @ matrix.T, 2)
    again, same = select_experts(x @ joined_rows([(matrix, 3, 1.0)], 8).T, 2)
    assert torch.equal(index, same)
    torch.testing.assert_close(again, weights)


def test_a_token_goes_to_the_pack_that_claims_it():
    """A keeps the token at home, and B sends it to its expert."""
    x = torch.eye(4)[:1]
    a, b = torch.zeros(2, 4), torch.zeros(3, 4)
    a[:, 0] = torch.tensor([5.0, 1.0])  # 4 nats for expert 0
    b[:, 0] = torch.tensor([-3.0, -9.0, 2.0])  # 5 nats for its second expert
    weights, index = select_experts(x @ joined_rows([(a, 1, 1.0), (b, 2, 1.0)], 4).T, 2)
    assert index.tolist() == [[3, 0]]
    alone, _ = select_experts(x @ b.T, 2)
    torch.testing.assert_close(weights, alone)


def test_one_pack_among_others_that_stay_at_home_computes_what_it_did(packs, tmp_path):
    """With the other packs' routers turned far towards expert 0."""
    home = tmp_path / "home"
    shutil.copytree(packs["hu"], home)
    tensors = load_file(home / "model.safetensors")
    for name, tensor in tensors.items():
        if "router" in name:
            tensor.zero_()
    save_file(tensors, home / "model.safetensors", metadata={"format": "pt"})
    join_expansions([packs["el"], home], tmp_path / "out")
    joined, alone = load(tmp_path / "out"), load(packs["el"])
    for ffn in joined.expanded_ffns().values():
        own = EL.experts_per_layer[ffn.layer_index]
        route = ffn.route
        ffn.route = lambda *inputs, route=route, own=own: _without_others(route, inputs, own)
    with torch.no_grad():
        for ffn in joined.expanded_ffns().values():
            ffn.classifier = None
        for ffn in alone.expanded_ffns().values():
            ffn.classifier = None
        torch.testing.assert_close(joined(IDS).logits, alone(IDS).logits, rtol=1e-4, atol=1e-5)


def _without_others(route, inputs, own):
    """The routing with the experts from `own` on out of reach."""
    from dataclasses import replace

    found = route(*inputs)
    allowed = (torch.arange(found.router_logits.shape[1]) < own).expand_as(found.router_logits)
    weights, experts = select_experts(found.router_logits, found.top_k, allowed)
    return replace(found, weights=weights, experts=experts)


def test_a_class_sees_its_own_packs_experts(packs, tmp_path):
    assert expert_ranges((1, 3, 4, 6), (1, 2)) == ((1, 1), (1, 3), (3, 4), (3, 6))
    assert expert_ranges((1, 3, 4, 6), (1, 1)) == ((1, 1), (1, 3), (3, 4), (1, 6))  # then grown
    join_expansions([packs["el"], packs["hu"], packs["tr"]], tmp_path / "out")
    model = load(tmp_path / "out")
    with torch.no_grad(), model.capture_routing() as routing:
        said = model(IDS[:1].repeat(4, 1), languages=["en", "el", "hu", "tr"]).logits
    sees = routing.layers[0].allowed.view(4, 14, 5)[:, 0]
    assert [row.nonzero().flatten().tolist() for row in sees] == [[0], [0, 1], [0, 2, 3], [0, 4]]
    for row, code in enumerate(("el", "hu", "tr"), start=1):
        alone = load(packs[code])
        with torch.no_grad():
            expected = alone(IDS[:1], languages=code).logits[0]
        torch.testing.assert_close(said[row], expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad(), model.use_expert(0):
        assert torch.equal(said[0], model(IDS[:1].repeat(4, 1)).logits[0])


@pytest.mark.parametrize("order", [["el", "hu", "tr"], ["tr", "el", "hu"]])
def test_joining_and_taking_out_is_the_identity(packs, tmp_path, order):
    join_expansions([packs[code] for code in order], tmp_path / "three")
    join_expansions([packs[code] for code in order[:2]], tmp_path / "two")
    assert leave_out_pack(tmp_path / "three", tmp_path / "again", f"qwen-{order[2]}").restored
    same_files(tmp_path / "again", tmp_path / "two")
    leave_out_pack(tmp_path / "two", tmp_path / "one", order[1])
    same_files(tmp_path / "one", packs[order[0]])
    leave_out_pack(tmp_path / "two", tmp_path / "other", order[0])
    same_files(tmp_path / "other", packs[order[1]])


def test_joined_models_and_expansion_only_packs_join(packs, base, tmp_path):
    save_expansion(packs["tr"], tmp_path / "small", base=base)
    fields = json.loads((tmp_path / "small" / "config.json").read_text())
    fields["expansion_base"]["base_model"] = str(base)
    (tmp_path / "small" / "config.json").write_text(json.dumps(fields))
    shutil.move(tmp_path / "small", tmp_path / "qwen-tr")
    join_expansions([packs["el"], packs["hu"]], tmp_path / "two")
    join_expansions([tmp_path / "two", tmp_path / "qwen-tr"], tmp_path / "again")
    join_expansions([packs["el"], packs["hu"], packs["tr"]], tmp_path / "three")
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("again", "three")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_updates_and_ffns_meet(packs, base, tmp_path):
    lora = make_pack(
        tmp_path / "qwen-fr", base, Plan("mola", [2, 3, 1], old=["en"], new=["fr"]), 7, expert_kind="lora", lora_rank=4,
        lora_alpha=6.0,
    )  # fmt: skip
    join_expansions([packs["el"], lora], tmp_path / "out")
    model = load(tmp_path / "out")
    with torch.no_grad():
        said = model(IDS[:1].repeat(2, 1), languages=["el", "fr"]).logits
        for row, (code, folder) in enumerate((("el", packs["el"]), ("fr", lora))):
            expected = load(folder)(IDS[:1], languages=code).logits[0]
            torch.testing.assert_close(said[row], expected, rtol=1e-4, atol=1e-5)
    leave_out_pack(tmp_path / "out", tmp_path / "one", "el")
    same_files(tmp_path / "one", lora)
    said = invoke("inspect", tmp_path / "out")
    assert re.search(r"expansion 2 +pack qwen-fr: mola on base: old en; new fr\n", said)
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(load(tmp_path / "saved")(IDS).logits, model(IDS).logits)


def test_a_fresh_process_loads_the_joined_model(packs, tmp_path):
    join_expansions([packs["el"], packs["hu"]], tmp_path / "out")
    code = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
print(model(torch.arange(12).view(1, 12), languages="hu").logits.double().sum().item())
"""
    with torch.no_grad():
        here = load(tmp_path / "out")(torch.arange(12).view(1, 12), languages="hu").logits.double().sum().item()
    assert float(run_fresh(code, str(tmp_path / "out"))) == pytest.approx(here, rel=1e-6)


def test_the_history_keeps_each_packs_own(packs, base, tmp_path):
    join_expansions([packs["el"], packs["hu"]], tmp_path / "out")
    history = History.of(json.loads((tmp_path / "out" / "config.json").read_text()))
    assert [one.pack for one in history.expansions] == ["qwen-el", "qwen-hu"]
    assert history.classes == {"en": 0, "de": 0, "el": 1, "hu": 2}
    assert all(set(a.new_languages) <= set(b.old_languages) for a, b in pairwise(history.expansions))
    joined, own = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", packs["hu"]))
    name = "model.layers.1.mlp.router.weight"
    assert torch.equal(joined[name][1], own[name][1] - own[name][0])
    later = Plan("moe-lpr", [2, 2, 2], old=["en", "el"], new=["fr"])  # another pack's new language is not old
    make_pack(tmp_path / "qwen-fr", base, later, 5)
    assert join_expansions([packs["el"], tmp_path / "qwen-fr"], tmp_path / "fr").old_languages == ["en"]


def test_a_join_with_factors_of_an_earlier_release_is_read_as_before(packs, tmp_path):
    """Its routers have other log-odds, and the factors stay with its packs."""
    join_with_scales([packs["el"], packs["hu"]], tmp_path / "two", [0.5, 2.0])
    history = History.of(json.loads((tmp_path / "two" / "config.json").read_text()))
    assert [one.router_scale for one in history.expansions] == [0.5, 2.0]
    joined, own = (load_file(folder / "model.safetensors") for folder in (tmp_path / "two", packs["hu"]))
    name = "model.layers.1.mlp.router.weight"
    assert torch.equal(joined[name][1], 2 * (own[name][1] - own[name][0]))
    assert torch.equal(load(tmp_path / "two").state_dict()[name], joined[name])
    assert "pack 2              qwen-hu: hu; FFNs, router x 2\n" in invoke("inspect", tmp_path / "two")
    join_expansions([tmp_path / "two", packs["tr"]], tmp_path / "three")
    join_with_scales([packs["el"], packs["hu"], packs["tr"]], tmp_path / "same", [0.5, 2.0, 1.0])
    same_files(tmp_path / "three", tmp_path / "same")
    assert leave_out_pack(tmp_path / "three", tmp_path / "left", "tr").restored
    same_files(tmp_path / "left", tmp_path / "two")
    leave_out_pack(tmp_path / "two", tmp_path / "one", "el")
    same_files(tmp_path / "one", packs["hu"])


def test_a_trained_join_leaves_a_pack_out_with_its_rows_as_they_are(packs, tmp_path):
    join_expansions([packs["el"], packs["hu"], packs["tr"]], tmp_path / "three")
    tensors = load_file(tmp_path / "three" / "model.safetensors")
    for name, tensor in tensors.items():
        if "router" in name or "classifier" in name:
            tensor.add_(0.25)
    save_file(tensors, tmp_path / "three" / "model.safetensors", metadata={"format": "pt"})
    report = leave_out_pack(tmp_path / "three", tmp_path / "two", "hu")
    assert not report.restored
    assert report.left == ["qwen-el", "qwen-tr"]
    left = load_file(tmp_path / "two" / "model.safetensors")
    name = "model.layers.0.mlp.router.weight"
    assert torch.equal(left[name], tensors[name][[0, 1, 4]])
    name = "model.layers.2.mlp.classifier.weight"
    assert torch.equal(left[name], tensors[name][[0, 1, 3]])
    load(tmp_path / "two")
    with pytest.raises(InputError, match="was trained or grown after its packs were joined"):
        join_expansions([tmp_path / "three", packs["el"]], tmp_path / "no")


@pytest.mark.parametrize("stage", ["graft", "average-experts"])
def test_what_was_done_to_a_joined_model_is_not_lost_in_a_further_join(packs, tmp_path, stage):
    join_expansions([packs["el"], packs["hu"]], tmp_path / "joined")
    staged(tmp_path / "joined", stage)
    with pytest.raises(InputError, match=rf"was trained or grown after its packs were joined \(`{stage}`\)"):
        join_expansions([tmp_path / "joined", packs["tr"]], tmp_path / "no")


def test_all_classes_of_a_pack_that_grew_go_with_it(packs, tmp_path):
    plan = Plan("layer-moe", [4, 3, 1], [0], old=["en", "de", "hu"], new=["fi"], grows_from=[3, 2, 1])
    grow_checkpoint(packs["hu"], tmp_path / "twice", plan)
    join_expansions([packs["el"], tmp_path / "twice", packs["tr"]], tmp_path / "joined")
    tensors = load_file(tmp_path / "joined" / "model.safetensors")
    for name, tensor in tensors.items():
        if "router" in name or "classifier" in name:
            tensor.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)))
    save_file(tensors, tmp_path / "joined" / "model.safetensors", metadata={"format": "pt"})
    leave_out_pack(tmp_path / "joined", tmp_path / "two", "fi")
    left = load_file(tmp_path / "two" / "model.safetensors")
    for name, rows in (("0.mlp.router", [0, 1, 5]), ("2.mlp.classifier", [0, 1, 4])):
        name = f"model.layers.{name}.weight"
        assert torch.equal(left[name], tensors[name][rows])
    staged(tmp_path / "joined", "everything")
    with pytest.raises(InputError, match="`everything` changed the shared weights after the join"):
        leave_out_pack(tmp_path / "joined", tmp_path / "no", "fi")


def test_a_gate_loses_the_class_of_a_pack_that_is_taken_out(packs, tmp_path):
    rows = torch.arange(5.0)  # two languages stay home
    gate = Gate(GateRule(0, [["en", "de"], ["el"], ["hu"], ["tr"]]), rows[:, None].repeat(1, 32), rows)
    write_joined(load_packs(list(packs.values()), tmp_path / "three", False), tmp_path / "three", gate=gate)
    assert not load(tmp_path / "three").config.classifier_layers
    leave_out_pack(tmp_path / "three", tmp_path / "two", "hu")
    left = load_file(tmp_path / "two" / "model.safetensors")
    assert left["model.layers.0.mlp.language_gate.bias"].tolist() == [0, 1, 2, 4]
    assert left["model.layers.0.mlp.language_gate.weight"][:, 0].tolist() == [0, 1, 2, 4]
    fields = json.loads((tmp_path / "two" / "config.json").read_text())
    assert fields["language_gate"]["languages"] == [["en", "de"], ["el"], ["tr"]]
    leave_out_pack(tmp_path / "two", tmp_path / "one", "el")
    same_files(tmp_path / "one", packs["tr"])
    own = Gate(GateRule(0, [["en"], ["el"]]), torch.zeros(2, 32), torch.zeros(2))
    write_gate(packs["el"], tmp_path / "gated", own, StageRecord(stage="gates"))
    with pytest.raises(InputError, match="gated: has a gate that was fitted for it alone"):
        join_expansions([tmp_path / "gated", packs["hu"]], tmp_path / "no")


@pytest.fixture
def other(base, tmp_path):
    """A pack of another base."""
    return make_pack(
        tmp_path / "qwen-fr",
        save_dense(tmp_path / "other", seed=9),
        Plan("moe-lpr", [2, 2, 2], old=["en"], new=["fr"]),
        4,
    )


def test_what_does_not_fit_is_refused(packs, base, other, tmp_path):
    def refused(said, *given, **options):
        with pytest.raises(InputError, match=said):
            join_expansions(given, tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()

    el = packs["el"]
    refused("two or more packs", el)
    refused(
        "is no expansion of the base of qwen-el: tensor 'lm_head.weight' differs|tensor 'model.embed_tokens.weight'",
        el,
        other,
    )
    copy = shutil.copytree(el, tmp_path / "again")
    refused("again: is the same pack as qwen-el", el, copy)
    second = make_pack(tmp_path / "qwen-el-2", base, EL, 12)
    refused("el: qwen-el and qwen-el-2 both add it", el, second)
    assert join_expansions([el, second], tmp_path / "both", keep_both=True).new_languages == [["el"], ["el"]]
    refused("is a dmoe checkpoint.*nothing of a DMoE's base is frozen", el, make_dmoe(base, tmp_path))
    refused("is a qwen2 checkpoint, which is no language pack", el, base)
    three = make_pack(tmp_path / "qwen-fi", base, Plan("moe-lpr", [3, 3, 3], top_k=3, old=["en"], new=["fi"]), 3)
    refused("router_top_k is 2 in qwen-el, but 3 in qwen-fi", el, three)
    refused("router_top_k is 3 in qwen-fi, but 2 in qwen-el: their routers", three, el)
    trained = staged(shutil.copytree(packs["hu"], tmp_path / "trained"), "everything")
    refused("trained: `everything` trained the base inside", el, trained)
    grafted = staged(shutil.copytree(packs["hu"], tmp_path / "grafted"), "graft")
    refused("grafted: got a graft, and qwen-el did not", el, grafted)
    conditional = make_pack(
        tmp_path / "qwen-pl", base, Plan("moe-lpr", [3, 3, 3], old=["en"], new=["pl"]), 3, conditional_routing=True
    )
    refused("qwen-pl: has conditional routing", el, conditional)


def make_dmoe(base, tmp_path):
    expand_checkpoint(base, tmp_path / "dmoe", Plan("dmoe", [2, 1, 2], groups=[["en"], ["el"]]))
    return tmp_path / "dmoe"


def staged(folder, stage):
    fields = json.loads((folder / "config.json").read_text())
    fields["expansions"][-1]["stages"].append({"stage": stage})
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_taking_out_refuses_what_it_cannot(packs, tmp_path):
    with pytest.raises(InputError, match="joins no language packs"):
        leave_out_pack(packs["el"], tmp_path / "out", "el")
    join_expansions([packs["el"], packs["hu"]], tmp_path / "two")
    with pytest.raises(InputError, match=r"'xx': no pack has this name or language; the model joins qwen-el \(el\)"):
        leave_out_pack(tmp_path / "two", tmp_path / "out", "xx")
    write_joined(packs_inside(StoredModel(tmp_path / "two"))[:1], tmp_path / "one")
    with pytest.raises(InputError, match="qwen-el is its only pack; without it, it is the base model"):
        leave_out_pack(tmp_path / "one", tmp_path / "out", "el")
    (tmp_path / "two" / "pack_2.safetensors").write_bytes(b"no")
    with pytest.raises(InputError, match=r"pack_2\.safetensors: cannot be read"):
        leave_out_pack(tmp_path / "two", tmp_path / "out", "el")
    (tmp_path / "two" / "pack_2.safetensors").unlink()
    with pytest.raises(InputError, match=r"pack_2\.safetensors: is missing"):
        leave_out_pack(tmp_path / "two", tmp_path / "out", "el")
    assert LayerMoEForCausalLM.from_pretrained(tmp_path / "two") is not None


def test_a_run_names_its_pack_and_a_name_may_be_given(packs, tmp_path):
    """Both runs end in a folder `review`."""
    for code in ("el", "hu"):
        run = tmp_path / "runs" / f"qwen-{code}"
        shutil.copytree(packs[code], run / "review")
        (run / "steps.json").write_text("{}")
    el, hu = (tmp_path / "runs" / f"qwen-{code}" / "review" for code in ("el", "hu"))
    assert join_expansions([el, hu], tmp_path / "out").packs == ["qwen-el", "qwen-hu"]
    assert "# qwen-el\n" in invoke("card", el)
    assert join_expansions([f"greek={el}", hu], tmp_path / "named").packs == ["greek", "qwen-hu"]
    invoke("shrink", tmp_path / "named", tmp_path / "one", "--without", "greek")
    same_files(tmp_path / "one", hu)
    said = invoke("join", tmp_path / "cli", el, hu, "--name", "greek", "--name", "Hungarian 1")
    assert "pack 2  Hungarian 1: hu" in said
    assert "pack greek" in invoke("inspect", tmp_path / "cli")
    for arguments, wrong in (
        (["--name", "greek"], "1 names were given for 2 packs"),
        (["--name", "a", "--name", "a"], "a: two packs have this name"),
        (["--name", "a\nb", "--name", "c"], "no name of a pack"),
    ):
        with pytest.raises(InputError, match=wrong):
            invoke("join", tmp_path / "no", el, hu, *arguments)
    with pytest.raises(InputError, match="joins packs already, which keep their names"):
        join_expansions([f"both={tmp_path / 'out'}", packs["tr"]], tmp_path / "no")
    shutil.move(tmp_path / "named", tmp_path / "a=b")
    assert join_expansions([tmp_path / "a=b", packs["tr"]], tmp_path / "three").packs[0] == "greek"


def test_results_name_a_runs_checkpoints_by_run_and_stage(packs, tmp_path):
    run = tmp_path / "qwen-el"
    shutil.copytree(packs["el"], run / "2" / "review")
    (run / "steps.json").write_text("{}")
    assert name_in_results(run / "2" / "review") == "qwen-el/2/review"
    assert own_name(run / "2" / "review") == "qwen-el"
    assert name_in_results(packs["el"]) == own_name(packs["el"]) == "qwen-el"
    assert name_in_results("me/qwen") == own_name("me/qwen") == "me/qwen"


def test_packs_are_found_where_the_model_was_loaded(packs, tmp_path):
    inner = tmp_path / "outer" / "inner"
    join_expansions([packs["el"], packs["hu"]], inner)
    AutoModelForCausalLM.from_pretrained(tmp_path / "outer", subfolder="inner").save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "pack_2.safetensors").read_bytes() == (inner / "pack_2.safetensors").read_bytes()


def test_a_saved_model_keeps_its_packs(packs, tmp_path, caplog):
    join_expansions([packs["el"], packs["hu"]], tmp_path / "two")
    model = load(tmp_path / "two")
    model.save_pretrained(tmp_path / "saved")
    kept = [f"pack_{number}.safetensors" for number in (1, 2)]
    for name in kept:
        assert (tmp_path / "saved" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    for folder in ("two", "saved"):  # servers that read every safetensors file read those of an index, if there is one
        index = json.loads((tmp_path / folder / "model.safetensors.index.json").read_text())
        weights = load_file(tmp_path / folder / "model.safetensors")
        assert index["weight_map"] == dict.fromkeys(weights, "model.safetensors")
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights.values())
    assert not (packs["el"] / "model.safetensors.index.json").exists()
    shutil.copy(packs["el"] / "tokenizer.json", tmp_path / "saved")
    leave_out_pack(tmp_path / "saved", tmp_path / "one", "hu")
    assert (
        load_file(tmp_path / "one" / "model.safetensors").keys() == load_file(packs["el"] / "model.safetensors").keys()
    )
    for name in kept:
        (tmp_path / "two" / name).unlink()
    assert "cannot be taken out" not in caplog.text
    logging.getLogger("transformers").addHandler(caplog.handler)
    model.save_pretrained(tmp_path / "without")
    logging.getLogger("transformers").removeHandler(caplog.handler)
    assert "packs cannot be taken out" in caplog.text
    load(tmp_path / "without")
    code = "import sys; from transformers import AutoModelForCausalLM as A\n"
    code += "A.from_pretrained(sys.argv[1], trust_remote_code=True).save_pretrained(sys.argv[2])"
    run_fresh(code, str(tmp_path / "saved"), str(tmp_path / "fresh"))
    assert all((tmp_path / "fresh" / name).is_file() for name in kept)

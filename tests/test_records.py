"""The history in config.json, damaged or with unknown keys; and a checkpoint as a table, which rules rewrite."""

import copy
import json
import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from conftest import TABLES, load, refused, save_dense
from safetensors.torch import load_file

from hf_moe_expand import Plan, PostPretrainConfig, expand_checkpoint
from hf_moe_expand.checkpoint import table
from hf_moe_expand.checkpoint.facts import Facts
from hf_moe_expand.checkpoint.reader import CheckpointReader, headers_alone
from hf_moe_expand.checkpoint.records import CHANGES_EVERYTHING, ExpansionRecord, History, StageRecord, add_stage
from hf_moe_expand.checkpoint.source import load_config
from hf_moe_expand.checkpoint.table import Copy, Given, Mix, New, Rows, mean_of, opened, rewrite
from hf_moe_expand.core.schema import read
from hf_moe_expand.stages import training_stages

EXPANSION = {"method": "moe-lpr", "old_languages": ["en"], "new_languages": ["el"]}
# As `to_dict` orders its keys; the last two of each are none that this release knows.
FULL = {
    "method": "dmoe-adapt", "old_languages": ["en", "el"], "new_languages": ["tr"], "base_model": "me/base",
    "experts_per_layer": [3, 1, 3], "classifier_layers": [2], "seed": 0,
    "expert_init": "branches", "branches": ["a", "b"], "copied_expert": 1, "copied_experts": {"0": 2, "2": 0},
    "base_parameters": 10, "parameters": 20, "versions": {"torch": "2.13"},
    "stages": [
        {
            "stage": "review", "steps": 3, "documents": {"en": 5}, "tokens": {"en": 70}, "seed": 1,
            "settings": {"block_size": 16, "training": {}}, "later": [1, None], "and": {"more": "text"},
        },
        {"stage": "graft", "settings": {"instruct": "b"}},
    ],
    "later": {"key": [1.5, None]}, "and": None,
}  # fmt: skip


@pytest.mark.parametrize("entry", [EXPANSION, FULL], ids=["least", "all keys"])
def test_unknown_keys_are_kept(entry):
    record = read(ExpansionRecord, entry)
    written = record.to_dict()
    assert {name: written[name] for name in entry} == entry
    assert read(ExpansionRecord, written) == record
    if entry is FULL:
        assert json.dumps(written) == json.dumps(FULL)
        assert set(record.model_extra) == set(record.stages[0].model_extra) == {"later", "and"}


def test_a_step_is_added_to_the_last_expansion_and_leaves_the_others():
    config, dense = (SimpleNamespace(expansions=of) for of in ([json.loads(json.dumps(FULL)), dict(EXPANSION)], None))
    step = StageRecord(stage="review", steps=3, seed=0)
    add_stage(config, step)
    assert config.expansions[0] == FULL
    assert config.expansions[1]["stages"] == [{"stage": "review", "steps": 3, "seed": 0}]
    assert History.of(config).stages[-1] == step
    add_stage(dense, step)
    add_stage(dense, step)
    assert dense.history == [step.to_dict()] * 2
    assert dense.expansions is None


def test_languages_and_their_classes():
    second = {"method": "moe-lpr", "old_languages": ["en", "de", "el"], "new_languages": ["tr", "hu"]}
    history = History.of({"expansions": [{**EXPANSION, "old_languages": ["en", "de"]}, second]})
    assert history.languages == ["en", "de", "el", "tr", "hu"]
    assert history.classes == {"en": 0, "de": 0, "el": 1, "tr": 2, "hu": 2}
    assert history.by_expansion == [["en", "de"], ["el"], ["tr", "hu"]]
    assert (history.first.new_languages, history.last.new_languages) == (["el"], ["tr", "hu"])
    for empty in ({}, {"expansions": None}, {"expansions": []}):
        history = History.of(empty)
        assert (len(history), history.languages, history.classes, history.stages) == (0, [], {}, [])


@pytest.mark.parametrize(("expansions", "message"), TABLES["damaged histories"])
def test_damaged_histories_name_the_entry(expansions, message):
    refused(History.of, {"expansions": expansions}, says=re.escape(f"config.json: {message}"))


def test_every_stage_that_trains_everything_is_known_to_change_everything():
    everything = [stage for stage in training_stages() if stage.trains.everything]
    assert {"group", "joint"} <= {stage.name for stage in everything}
    for stage in everything:
        assert stage.name in CHANGES_EVERYTHING
        assert StageRecord(stage=stage.name).changes_everything
    name, trained = PostPretrainConfig(everything=True).trained()
    assert trained.everything
    assert name in CHANGES_EVERYTHING
    for stage in training_stages():
        assert stage.trains.everything or not StageRecord(stage=stage.name).changes_everything


def test_the_facts_of_a_dense_and_of_an_expanded_model(base, tmp_path):
    dense = Facts(load_config(base))
    assert (dense.counts, dense.grown, dense.encoder_layers) == ([1, 1, 1], [], 0)
    assert not any((dense.exclusive, dense.classifiers, dense.groups, dense.gate, dense.packs, dense.has_adapters))
    plan = Plan("moe-lpr", [3, 1, 2], [2], old=["en"], new=["el", "tr"])
    expand_checkpoint(base, tmp_path / "out", plan, expert_kind="lora")
    facts = Facts(load_config(tmp_path / "out"))
    assert (facts.counts, facts.grown, facts.classifiers) == ([3, 1, 2], [0, 2], [2])
    assert facts.languages == (["en"], ["el", "tr"])
    assert [kind.name for kind in facts.kinds] == ["lora"]
    groups = Plan("dmoe", [2, 1, 2], old=["en"], new=["el"], groups=[["el"], ["en"]])
    expand_checkpoint(base, tmp_path / "dmoe", groups)
    assert Facts(load_config(tmp_path / "dmoe")).group_of == {"el": 0, "en": 1}


IDS = torch.arange(3, 27).view(2, 12)


def drop_last_experts(model, out=None):
    """The model without the new experts of its last layer, of which expert 0 is left."""
    (source,) = opened([model], out, overwrite=False)
    config = copy.deepcopy(source.config)
    config.num_experts_per_layer = [*config.num_experts_per_layer[:-1], 1]
    home = {place.dense: key for key, place in source.places.items() if place.expert in (None, 0)}

    def rule(place):
        return Copy(place.key if place.key in source.shapes else home[place.key])

    return rewrite([source], config, rule, out, record=StageRecord(stage="drop"), title="drop")


@pytest.fixture(scope="module")
def expanded(tmp_path_factory):
    root = tmp_path_factory.mktemp("table")
    save_dense(root / "base")
    expand_checkpoint(root / "base", root / "expanded", Plan("moe-lpr", [2, 2, 3], old=["en"], new=["el"]))
    return root / "expanded"


@torch.no_grad()
def test_an_operation_of_ones_own(expanded, tmp_path):
    out = drop_last_experts(expanded, tmp_path / "out")
    before, after = load_file(expanded / "model.safetensors"), load_file(out / "model.safetensors")
    last = "model.layers.2.mlp."
    assert all(torch.equal(value, before[name]) for name, value in after.items() if not name.startswith(last))
    for name in ("gate_proj", "up_proj", "down_proj"):
        assert torch.equal(after[f"{last}{name}.weight"], before[f"{last}experts.0.{name}.weight"])
    assert sum(name.startswith(last) for name in after) == 3
    model, loaded = load(out), load(expanded)
    assert model.config.expansions[0]["stages"] == [{"stage": "drop"}]
    in_memory = drop_last_experts(loaded)
    assert torch.equal(in_memory(IDS).logits, model(IDS).logits)
    assert in_memory.model.norm.weight.data_ptr() == loaded.model.norm.weight.data_ptr()
    assert loaded.config.num_experts_per_layer == [2, 2, 3]


def test_without_tensors_a_checkpoint_has_its_headers_and_holes(expanded, tmp_path):
    made = {"whole": nullcontext(), "bare": headers_alone()}
    for name, mode in made.items():
        with mode:
            drop_last_experts(expanded, tmp_path / name)
    whole, bare = (CheckpointReader(tmp_path / name) for name in made)
    types = [{name: (one.dtype, one.shape) for name, one in of.tensors.items()} for of in (whole, bare)]
    assert types[0] == types[1]
    for file in ("config.json", "expanded_model.py"):
        assert (tmp_path / "bare" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in made]
    assert sizes[0] == sizes[1]
    assert not any(bare.tensor(name).any() for name in bare.tensors)
    # Inside, the tensors of one type and shape are the same; outside they are what they are.
    name = "model.norm.weight"
    assert not whole.tensors[name].same_bytes(bare.tensors[name])
    with headers_alone():
        assert whole.tensors[name].same_bytes(bare.tensors[name])


def test_each_entry_against_the_obvious_arithmetic(expanded, tmp_path, monkeypatch):
    monkeypatch.setattr(table, "_PIECE", 100)  # tensors come in several pieces, the last one shorter
    one, two = "model.layers.0.mlp.router.weight", "model.layers.1.mlp.router.weight"
    rules = {
        "model.norm.weight": Given(torch.full((32,), 0.5)),
        one: Mix([Copy(one), Copy(two)], [0.25, 0.75]),
        two: Rows(Copy(one), [1], more=lambda: torch.ones(1, 32)),
        "lm_head.weight": New(lambda: torch.full((257, 32), 1 / 3, dtype=torch.float64), "F32"),
    }
    (source,) = opened([expanded], tmp_path / "out", overwrite=False)
    out = rewrite([source], source.config, lambda place: rules.get(place.key, Copy(place.key)), tmp_path / "out")
    before, after = load_file(expanded / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    assert {name for name in after if not torch.equal(before[name], after[name])} == rules.keys()
    assert torch.equal(after["model.norm.weight"], torch.full((32,), 0.5))
    torch.testing.assert_close(after[one], 0.25 * before[one] + 0.75 * before[two], rtol=0, atol=1e-7)
    assert torch.equal(after[two], torch.cat([before[one][1:2], torch.ones(1, 32)]))
    assert torch.equal(after["lm_head.weight"], torch.full((257, 32), 1 / 3))


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (Copy("model.nothing"), "expanded: has no tensor 'model.nothing', of which 'model.norm.weight' is made"),
        (Copy("lm_head.weight"), r"'lm_head.weight' has shape \[257, 32\], but 'model.norm.weight' .* needs \[32\]"),
        (Rows(Copy("model.norm.weight"), [0, 1]), r"'model.norm.weight' of the new model needs \[32\]"),
        (New(lambda: torch.full((32,), torch.inf), "F32"), "the result is not finite in F32"),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_nothing(expanded, tmp_path, entry, says):
    (source,) = opened([expanded], tmp_path / "out", overwrite=False)

    def rule(place):
        return entry if place.key == "model.norm.weight" else Copy(place.key)

    refused(rewrite, [source], source.config, rule, tmp_path / "out", says=says)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("weights", [[0.0, 1.0], [1.0, 0.0]])
def test_a_mean_with_all_weight_on_one_tensor_has_its_bits(weights):
    pieces = torch.randn(2, 999, generator=torch.Generator().manual_seed(0)) * 10 ** torch.arange(-4.0, 5.0).repeat(111)
    assert torch.equal(mean_of(weights)(*pieces), pieces[weights.index(1.0)])

"""The history in config.json: an entry round-trips with unknown keys, damaged ones are named; languages' classes."""

import json
import re

import pytest
from conftest import TABLES, refused

from hf_moe_expand import Plan, PostPretrainConfig, expand_checkpoint
from hf_moe_expand.checkpoint.facts import Facts
from hf_moe_expand.checkpoint.records import CHANGES_EVERYTHING, ExpansionRecord, History, StageRecord, add_stage
from hf_moe_expand.checkpoint.source import load_config
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
    class Config:
        expansions = None

    config = Config()
    config.expansions = [json.loads(json.dumps(FULL)), dict(EXPANSION)]
    step = StageRecord(stage="review", steps=3, seed=0)
    add_stage(config, step)
    assert config.expansions[0] == FULL
    assert config.expansions[1]["stages"] == [{"stage": "review", "steps": 3, "seed": 0}]
    assert History.of(config).stages[-1] == step
    dense = Config()
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

"""The history in config.json: every kind of entry round-trips, damaged ones are named; languages and their classes."""

import json
import re
import shutil

import pytest
import torch
from conftest import invoke, refused, save_dense, write_texts
from tables import TABLES
from transformers import AutoModelForCausalLM

from hf_moe_expand import (
    AdaptConfig,
    JointConfig,
    Plan,
    PostPretrainConfig,
    adapt_language,
    expand_checkpoint,
    graft_delta,
    grow_checkpoint,
    train_stage,
)
from hf_moe_expand.baselines.branches import expand_branches
from hf_moe_expand.checkpoint.average import average_checkpoints
from hf_moe_expand.checkpoint.records import CHANGES_EVERYTHING, ExpansionRecord, History, StageRecord, add_stage
from hf_moe_expand.core.schema import read
from hf_moe_expand.data.sources import LanguageText
from hf_moe_expand.stages import training_stages

QUICK = {"block_size": 16, "max_steps": 1, "per_device_train_batch_size": 2, "disable_tqdm": True}
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


# The stages of each expansion of what each step writes.
STAGES = {
    "expand": [[]], "stage": [["post-pretrain"]], "grow": [["post-pretrain"], []],
    "graft": [["post-pretrain", "graft"]], "average": [["post-pretrain", "average"]], "dmoe": [[]],
    "joint": [["joint"]], "adapt": [["joint"], ["adapt"]], "branches": [[]],
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A checkpoint after each kind of step."""
    root = tmp_path_factory.mktemp("records")
    data = {}
    for code, words in {"en": "the cat ", "el": "η γάτα ", "hi": "बिल्ली "}.items():
        data[code] = LanguageText(code, str(write_texts(root / f"{code}.jsonl", [f"{words} {i}" for i in range(30)])))
    base = save_dense(root / "base")
    other = save_dense(root / "other", seed=1)
    expand_checkpoint(base, root / "expand", Plan("moe-lpr", [2, 2, 2], [2], old=["en"], new=["el"]))
    train_stage(root / "expand", root / "stage", {"el": data["el"]}, PostPretrainConfig(**QUICK))
    second = Plan("moe-lpr", [3, 3, 3], [2], old=["en", "el"], new=["tr"], grows_from=[2, 2, 2])
    grow_checkpoint(root / "stage", root / "grow", second, copy_from={0: 1})
    with pytest.warns(UserWarning, match="look unrelated"):
        graft_delta(root / "stage", root / "graft", base, other)
    average_checkpoints([root / "stage", root / "graft"], root / "average")
    groups = Plan("dmoe", [2, 1, 2], groups=[["en"], ["el"]])
    expand_checkpoint(base, root / "dmoe", groups)
    train_stage(root / "dmoe", root / "joint", {code: data[code] for code in ("en", "el")}, JointConfig(**QUICK))
    adapt_language(root / "joint", root / "adapt", data["hi"], AdaptConfig(sample_tokens=100, **QUICK))
    expand_branches([base, other], root / "branches", groups)
    return root


def in_config_json(value):
    return json.dumps(value, sort_keys=True)  # as transformers writes it


@pytest.mark.parametrize(("kind", "stages"), STAGES.items())
def test_what_a_step_writes_comes_back_to_the_byte(folders, kind, stages):
    written = json.loads((folders / kind / "config.json").read_text())["expansions"]
    history = History.of({"expansions": written})
    assert [[stage.stage for stage in expansion.stages] for expansion in history.expansions] == stages
    assert not any(record.model_extra for record in (*history.expansions, *history.stages))
    assert in_config_json([record.to_dict() for record in history.expansions]) == in_config_json(written)
    # Through the model's own configuration, as a tool saves it that knows nothing of histories.
    config = AutoModelForCausalLM.from_pretrained(folders / kind, dtype=torch.float32).config
    History.of(config).write(config)
    assert in_config_json(config.expansions) == in_config_json(written)


def test_a_model_of_the_separable_plan_is_read_as_before(folders, tmp_path):
    """Releases before this one had this plan, and a field of the record."""
    old = shutil.copytree(folders / "stage", tmp_path / "old")
    config = json.loads((old / "config.json").read_text())
    config["expansions"][-1] |= {"method": "separable", "separability": [0.99, 0.5, 1]}
    (old / "config.json").write_text(json.dumps(config))
    loaded = AutoModelForCausalLM.from_pretrained(old).config
    History.of(loaded).write(loaded)
    assert loaded.expansions == config["expansions"]
    assert "separable on base: old en" in invoke("inspect", old)
    invoke("card", old, "--out", tmp_path / "card.md")
    settings = {"separability": [0.99, 0.5, 1], "min_separability": 0.9}
    Plan("separable", [2, 1, 2], old=["en"], new=["el"], settings=settings).save(tmp_path / "plan.json")
    expand_checkpoint(folders / "base", tmp_path / "new", Plan.load(tmp_path / "plan.json"))


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

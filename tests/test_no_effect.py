"""Arguments, options and fields that would have no effect are refused, by functions and by commands."""

import pytest
from conftest import byte_tokenizer, invoke, save_dense, tiny_dense, write_texts

from hf_moe_expand import (
    Plan,
    PostPretrainConfig,
    ReviewConfig,
    expand_checkpoint,
    expand_model,
    fit_gates,
)
from hf_moe_expand.checkpoint.expand import check_plan_of_gate
from hf_moe_expand.checkpoint.grow import grow_checkpoint
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.inference.writing import Answering
from hf_moe_expand.modeling.expanded_config import ExpertKind

ROUTED = Plan("moe-lpr", [3, 1, 3], old=["en"], new=["el"])


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("no effect")
    save_dense(root / "base")
    expand_checkpoint(root / "base", root / "model", ROUTED)
    for code in ("el", "tr"):
        write_texts(root / f"{code}.jsonl", ["ένα κείμενο" if code == "el" else "bir metin"] * 30)
    return root


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["grow", "model", "out", "--plan", "grown.json", "--tokens", 7], "--tokens, .* belong to --copy-from nearest"),
        (["inspect", "model", "--lora-rank", 3], "settings of new experts belong to --plan"),
        (["expand", "base", "out", "--plan", "plan.json", "--lora-alpha", 7], "lora_alpha 7, but expert_kind is 'ffn'"),
        (["chat", "model", "--top-p", 0.1], "top_p and seed are for drawing, but the temperature is 0"),
        (["chat", "model", "--seed", 9], "top_p and seed are for drawing, but the temperature is 0"),
    ],
)
def test_options_of_something_that_is_not_asked_for(root, monkeypatch, words, said):
    monkeypatch.chdir(root)
    ROUTED.save(root / "plan.json")
    Plan("moe-lpr", [4, 1, 4], old=["en", "el"], new=["tr"], grows_from=[3, 1, 3]).save(root / "grown.json")
    with pytest.raises(InputError, match=said):
        invoke(*words)
    assert not (root / "out").exists()


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (
            Plan("moe-lpr", [1, 2, 2], [2], old=["en"], new=["el"]),
            "the place of classifiers, .* in layers 2: plan",
        ),
        (Plan("dmoe", [1, 2, 2], groups=[["en"], ["el"]]), "DMoE trains the base: leave the gate out"),
    ],
)
def test_a_gate_takes_neither_classifiers_nor_groups(plan, said):
    with pytest.raises(InputError, match=said):
        check_plan_of_gate(plan, 1, ExpertKind())


def test_a_checkpoint_takes_no_other_tokenizer(root, tmp_path):
    with pytest.raises(InputError, match="processing_class: a checkpoint has its own tokenizer"):
        fit_gates(root / "model", tmp_path / "out", {"el": ["a"]}, processing_class=byte_tokenizer())


def test_a_layer_or_a_language_that_nothing_is_about(root, tmp_path):
    grown = Plan("moe-lpr", [4, 1, 4], old=["en", "el"], new=["tr"], grows_from=[3, 1, 3])
    with pytest.raises(InputError, match=r"copy_from names layer 99, but .* has layers 0 to 2"):
        grow_checkpoint(root / "model", tmp_path / "out", grown, copy_from={99: 1})
    with pytest.raises(InputError, match="new: hu stands in no group, so that no expert learns it"):
        Plan("dmoe", [2, 1, 2], groups=[["el"], ["tr"]], new=["el", "hu"]).checked()


def test_answers_that_are_not_drawn_have_no_seed():
    for options in ({"top_p": 0.5}, {"seed": 3}):
        with pytest.raises(InputError, match="but the temperature is 0"):
            Answering(**options)
        Answering(temperature=1.0, **options)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (PostPretrainConfig(budget_coef=9.0), "budget_coef: is for conditional routing"),
        (PostPretrainConfig(gate_budget=0.1), "gate_budget: is for conditional routing"),
        (ReviewConfig(classifier_coef=9.0), "classifier_coef: the model has no classifiers"),
        (ReviewConfig(classifier_tokens=9), "classifier_tokens: says where new classifiers go"),
    ],
)
def test_losses_that_apply_to_nothing(config, said):
    model = expand_model(tiny_dense("qwen2"), ROUTED).config
    with pytest.raises(InputError, match=said):
        config.check_settings(model)

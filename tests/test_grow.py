"""Lifelong expansion: what an earlier expansion made stays, byte for byte; and the way back."""

import inspect
import json

import pytest
import torch
from conftest import invoke, move, refused, verb, write_texts

from hf_moe_expand import LayerMoEConfig, LayerMoEForCausalLM, Plan, expand_checkpoint, grow_checkpoint
from hf_moe_expand.analysis.routing import nearest_experts
from hf_moe_expand.analysis.settings import AnalysisSettings
from hf_moe_expand.checkpoint.reader import CheckpointReader
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.core.schema import changed
from hf_moe_expand.data.sources import LanguageText
from hf_moe_expand.inference.models import load_for_inference
from hf_moe_expand.modeling.routing import expert_ranges, experts_allowed, select_experts, token_classes
from hf_moe_expand.planning.make import make_plan
from hf_moe_expand.planning.methods import plan_settings
from hf_moe_expand.planning.results import SimilarityResult

FIRST = Plan("layer-moe", [3, 2, 2], [1, 2], old=["en"], new=["el"])
SECOND = Plan("layer-moe", [4, 4, 3], [0, 2], old=["en", "el"], new=["tr"], grows_from=[3, 2, 2])
WORDS = {"en": "the cat sat ", "el": "η γάτα κά", "tr": "kedi otur"}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    root = tmp_path_factory.mktemp("text")
    return {
        code: LanguageText(code, str(write_texts(root / f"{code}.jsonl", [f"{words} {i} {words}" for i in range(30)])))
        for code, words in WORDS.items()
    }


@pytest.fixture(scope="module")
def first(base, tmp_path_factory):
    """A model after one expansion."""
    folder = tmp_path_factory.mktemp("grow") / "first"
    expand_checkpoint(base, folder, FIRST, expert_init="random")
    return move(folder)


@pytest.fixture(scope="module")
def grown(first):
    return grow_checkpoint(first, first.with_name("grown"), SECOND)


def test_a_token_of_group_g_sees_the_experts_of_its_time():
    classifier_logits = torch.tensor([[3.0, 1, 2], [0, 2, 1], [0, 1, 2], [1, 1, 0], [0, 0, 0]])
    allowed = experts_allowed(token_classes(classifier_logits), expert_ranges((1, 3, 5)))
    limit = [1, 3, 5, 3, 5]  # ties go to the later class
    assert [row.nonzero().flatten().tolist() for row in allowed] == [list(range(most)) for most in limit]
    router_logits = torch.randn(5, 5, generator=torch.Generator().manual_seed(0))
    weights, index = select_experts(router_logits, 2, allowed)
    for token, most in enumerate(limit):
        scores = router_logits[token, :most].softmax(-1)
        top, chosen = scores.topk(min(2, most))
        real = index[token] < 5
        assert index[token][real].tolist() == chosen.tolist()
        torch.testing.assert_close(weights[token][real], top / top.sum())
        assert not weights[token][~real].any()


def test_grow_copies_what_it_is_told(first, text, tmp_path):
    plan = tmp_path / "plan.json"
    SECOND.save(plan)
    name = "model.layers.{}.mlp.experts.{}.up_proj.weight"
    sources = CheckpointReader(first)

    def copied(folder, *arguments):
        """Of each new expert, the one whose weights it has."""
        invoke("grow", first, tmp_path / folder, "--plan", plan, *arguments)
        reader = CheckpointReader(tmp_path / folder)
        return {
            (layer, new): [
                old for old in range(before)
                if torch.equal(reader.tensor(name.format(layer, new)), sources.tensor(name.format(layer, old)))
            ]
            for layer, (before, after) in enumerate(zip(SECOND.grows_from, SECOND.experts_per_layer, strict=True))
            for new in range(before, after)
        }  # fmt: skip

    new = [(0, 3), (1, 2), (1, 3), (2, 2)]
    assert copied("by default") == {key: [0] for key in new}
    assert copied("one", "--copy-from", 1) == {key: [1] for key in new}
    size = ("--tokens", 200, "--block-size", 16, "--batch-size", 4)
    found = copied("nearest", "--copy-from", "nearest", "--data", f"tr={text['tr'].source}", *size)
    model, tokenizer = load_for_inference(first)
    texts = {"tr": text["tr"].load().shuffle(seed=0)["text"]}
    nearest = nearest_experts(model, tokenizer, texts, tokens=200, block_size=16, batch_size=4)
    assert found == {(layer, expert): [nearest[layer]] for layer, expert in new}
    config = LayerMoEForCausalLM.from_pretrained(tmp_path / "nearest").config
    assert {int(layer): expert for layer, expert in config.expansions[1]["copied_experts"].items()} == nearest

    grow = ("grow", first, tmp_path / "out", "--plan", plan)
    data = ("--data", f"tr={text['tr'].source}")
    nearest = ("--copy-from", "nearest")
    for said, *arguments in (
        ("nearest measures text in the plan's new languages: give --data tr=FILE", *nearest),
        (r"el: not a new language of the plan \(tr\)", *nearest, *data, "--data", f"el={text['el'].source}"),
        ("--data belongs to --copy-from nearest", *data),
        ("--copy-from is 'next': must be an expert's number", "--copy-from", "next"),
        ("layer 1 has no expert 2 to copy; give one of 0..1", "--copy-from", 2),
        ("Language 'tr' has .* tokens, but 90,000 were asked for", *nearest, *data, "--tokens", 90000),
    ):
        refused(invoke, *grow, *arguments, says=said)
    changed(SECOND, grows_from=[3, 3, 2]).save(plan)
    refused(invoke, *grow, *nearest, *data, says="was made for a model with .3, 3, 2. experts")
    assert not (tmp_path / "out").exists()


def test_evaluate_groups_languages_by_expansion(first, grown, text, tmp_path):
    data = [argument for code, source in text.items() for argument in ("--data", f"{code}={source.source}")]
    out = tmp_path / "evaluation.json"
    said = invoke("evaluate", first, grown, *data, "--block-size", 32, "--out", out)
    for label in ("en (old)", "el (expansion 1)", "tr (expansion 2)"):
        assert label in said
    found = json.loads(out.read_text())
    assert (found["old"], found["new"], found["expansions"]) == (["en"], ["el", "tr"], [["el"], ["tr"]])
    assert found["mean_bits_per_byte"]["grown"]["expansion 2"] == found["models"]["grown"]["tr"]["bits_per_byte"]
    # As told goes before history.
    told = invoke("evaluate", first, grown, *data, "--old", "en,el", "--new", "tr", "--out", out, "--overwrite")
    assert "el (old)" in told
    assert "tr (new)" in told
    assert "tr (unnamed)" in invoke("evaluate", first, *data, "--block-size", 32, "--out", out, "--overwrite")
    found = json.loads(out.read_text())
    assert found["unnamed"] == ["tr"]
    assert found["mean_bits_per_byte"]["first"]["unnamed"] == found["models"]["first"]["tr"]["bits_per_byte"]


def test_plans_for_growth_count_new_experts():
    same = [0.1, 0.2, 0.4]
    analysis = SimilarityResult(["en", "el"], ["tr"], 0, {}, None, same, same)
    settings = plan_settings(total_experts=5, classifier_layers=1)
    plan = make_plan(settings, 3, ["en", "el"], ["tr"], analysis, grows_from=[3, 2, 2])
    assert plan.experts_per_layer == [3 + 3, 2 + 1, 2 + 1]
    assert plan.grows_from == [3, 2, 2]
    plan = make_plan(plan_settings(method="moe-lpr", experts=1), 3, ["en"], ["tr"], grows_from=[3, 2, 2])
    assert plan.experts_per_layer == [4, 3, 3]
    plan = make_plan(plan_settings(method="random", total_experts=6), 3, ["en"], ["tr"], grows_from=[3, 2, 2])
    assert sum(plan.experts_per_layer) == 7 + 6
    with pytest.raises(InputError, match="3 layers with at least 1 each"):
        make_plan(plan_settings(total_experts=2), 3, ["en"], ["tr"], analysis, grows_from=[3, 2, 2])
    with pytest.raises(InputError, match=r"cannot grow one; use .*layer-moe, moe-"):
        make_plan(plan_settings(method="mola"), 3, ["en"], ["tr"], grows_from=[3, 2, 2])


def test_the_published_second_expansion_adds_48(published):
    figures = published["layermoe_qwen15_1b8"]
    added = [b - a for a, b in zip(figures["g1"], figures["g1_then_g2_total"], strict=True)]
    assert sum(figures["g1"]) == 72
    assert sum(added) == 48
    assert min(added) == 1
    plan = Plan(
        "layer-moe", figures["g1_then_g2_total"], figures["g1_then_g2_classifier_layers"], grows_from=figures["g1"]
    )
    assert plan.total_experts == 72 + 48


def test_wrong_growth_is_refused(base, first, tmp_path):
    out = tmp_path / "out"
    expand_checkpoint(base, tmp_path / "dmoe", Plan("dmoe", [2, 1, 2], groups=[["en"], ["el"]]))
    for said, plan, model in (
        ("el: already a language of the model", changed(SECOND, old=["en"], new=["el", "tr"]), first),
        (r"made for a model with \[2, 2, 2\] experts", changed(SECOND, grows_from=[2, 2, 2]), first),
        ("made for a dense model", changed(SECOND, grows_from=[]), first),
        ("a DMoE does not grow by plans: .*train adapt", SECOND, tmp_path / "dmoe"),
        ("not an expanded one", SECOND, base),
    ):
        refused(grow_checkpoint, model, out, plan, says=said)
    refused(expand_checkpoint, base, out, SECOND, says="made to grow an expanded checkpoint")
    assert not out.exists()
    with pytest.raises(InputError, match="grows_from: experts_per_layer must not give a layer fewer"):
        Plan("layer-moe", [2, 2, 2], grows_from=[3, 2, 2])
    config = json.loads((first / "config.json").read_text())
    config["earlier_experts_per_layer"] = [[4, 2, 2]]
    with pytest.raises(ValueError, match="a layer must not lose experts"):
        LayerMoEConfig.from_dict(config)


def test_the_nearest_expert_reads_as_much_from_python_the_command_line_and_a_recipe():
    of_python = inspect.signature(nearest_experts).parameters
    of_recipes = AnalysisSettings().model_dump()
    assert {name: of_python[name].default for name in of_recipes} == of_recipes
    of_command = {one.name: one.default for one in verb("grow").params}
    assert {name: of_command[name] for name in of_recipes} == of_recipes

"""The `separable` plan: its rule by hand, dense layers, growth, the command line, a whole run and what shows it."""

import json
import re

import pytest
from conftest import invoke, save_dense, write_texts

from hf_moe_expand import (
    Plan,
    PostPretrainConfig,
    ReviewConfig,
    allocate_experts,
    expand_checkpoint,
    expand_model,
    run_recipe,
    validate_recipe,
)
from hf_moe_expand.checkpoint.grow import grow_checkpoint
from hf_moe_expand.errors import InputError
from hf_moe_expand.models import load_for_inference
from hf_moe_expand.pipeline import steps_of
from hf_moe_expand.planning.make import make_plan
from hf_moe_expand.planning.methods import plan_settings
from hf_moe_expand.recipe import Expansion, Recipe
from hf_moe_expand.records import History
from hf_moe_expand.report.page import make_page
from hf_moe_expand.results import SeparabilityResult, SimilarityResult
from hf_moe_expand.schema import changed
from hf_moe_expand.settings import AnalysisSettings, ExpandSettings
from hf_moe_expand.stages.config import settings_of

SIMILAR = [0.9, 0.2, 0.4, 0.8, 0.3]
ACCURATE = [0.97, 0.6, 0.93, 0.9, 0.89]


def similarity(values=SIMILAR, old=("en",), new=("el",)):
    return SimilarityResult(list(old), list(new), 100, {}, None, list(values), list(values))


def separability(values=ACCURATE, old=("en",), new=("el",)):
    token = [value / 2 + 0.25 for value in values]
    running = {"8": token, "16": token, "32": list(values)}
    return SeparabilityResult(list(old), list(new), 100, {}, 4.0, 0, token, running, {})


def planned(grows_from=(), similar=None, accurate=None, **keys):
    settings = plan_settings("separable", **{"total_experts": 15, **keys})
    found, apart = similar or similarity(), accurate or separability()
    return make_plan(settings, len(found.similarity), ["en"], ["el"], found, grows_from=grows_from, separability=apart)


def test_layers_that_can_tell_share_the_experts_by_similarity():
    plan = planned()
    # Layers 0, 2 and 3 pass; 2 of the 15 are the FFNs of layers 1 and 4.
    counts = allocate_experts([SIMILAR[0], SIMILAR[2], SIMILAR[3]], 13)
    assert plan.experts_per_layer == [counts[0], 1, counts[1], counts[2], 1]
    assert counts[1] > max(counts[0], counts[2])
    assert plan.total_experts == 15
    assert plan.settings == {"similarity": SIMILAR, "separability": ACCURATE, "min_separability": 0.9}
    assert plan.separability == ACCURATE
    assert planned(min_separability=0.95).experts_per_layer == [11, 1, 1, 1, 1]
    # With the least accuracy there is, it is LayerMoE's rule.
    assert planned(min_separability=0.5).experts_per_layer == allocate_experts(SIMILAR, 15)
    assert planned(minimum=4).experts_per_layer == [4, 1, 5, 4, 1]


def test_equal_layers_are_served_in_their_order():
    same = similarity([0.5] * 5)
    assert planned(similar=same, total_experts=10).experts_per_layer == [3, 1, 3, 2, 1]


def test_only_some_layers_may_get_experts():
    plan = planned(only_layers="2-4", total_experts=9)
    assert plan.experts_per_layer == [1, 1, 4, 2, 1]
    assert plan.settings["separability"] == ACCURATE
    assert plan.settings["similarity"] == SIMILAR


def test_classifiers_lie_in_the_layers_with_experts():
    assert planned(classifier_layers=2).classifier_layers == [0, 3]


def test_an_expanded_model_grows_where_it_has_routers_and_can_tell():
    # Layer 0 was dense before and stays so, though it can tell; layer 1 has experts, but cannot tell.
    plan = planned(grows_from=[1, 2, 3, 2, 2], total_experts=5)
    assert plan.experts_per_layer[:2] == [1, 2]
    assert plan.experts_per_layer[4] == 2
    assert [plan.experts_per_layer[2], plan.experts_per_layer[3]] == [6, 4]
    assert planned(grows_from=[2] * 5, total_experts=5).total_experts == 15


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"min_separability": 0.98}, r"No layer can tell.*after 32 tokens is 0\.970, but min_separability is 0\.98\."),
        ({"total_experts": 7}, "7 experts in total are too few: 3 layers with .* and 2 of dense layers, need 8"),
        ({"min_separability": 0.4}, "min_separability is 0.4: must be at least 0.5"),
        ({"min_separability": 1.1}, "min_separability is 1.1: must be at most 1"),
        ({"classifier_layers": 4}, "4 classifier layers were asked for, but 3 layers are expanded"),
        ({"similar": similarity([0.9, -1, 0.4, -0.1, 0.3])}, "The similarity of layer 3 is -0.1.*--similarity-floor"),
        ({"accurate": separability(ACCURATE[:4])}, "The analysis has 4 layers, but the model has 5"),
        ({"accurate": separability(new=["tr"])}, "is of old en and new el, the separability of old en and new tr"),
    ],
)  # fmt: skip
def test_wrong_input_is_refused(keys, message):
    with pytest.raises(InputError, match=message):
        planned(**keys)


def test_a_floor_replaces_small_similarities():
    low = similarity([0.9, -1, 0.4, -0.1, 0.3])
    assert planned(similar=low, similarity_floor=0.4).experts_per_layer == [3, 1, 5, 5, 1]


def test_without_the_separability_it_is_refused():
    with pytest.raises(InputError, match="run `analyze separability` first"):
        make_plan(plan_settings("separable", total_experts=15), 5, ["en"], ["el"], similarity())


@pytest.mark.parametrize("wrong", ["high", [0.5], [0.5, True, 0.5], {"0": 0.5}])
def test_a_plan_of_ones_own_with_a_wrong_separability_is_refused(tmp_path, wrong):
    plan = Plan("mine", [2, 1, 2], settings={"separability": wrong})
    with pytest.raises(InputError, match=r"settings\.separability: a list with one number for each layer is needed"):
        expand_checkpoint(save_dense(tmp_path / "base"), tmp_path / "out", plan)
    assert not (tmp_path / "out").exists()


def test_from_texts_to_plan_on_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = save_dense(tmp_path / "base")
    write_texts(tmp_path / "en.jsonl", [f"a plain sentence {i} " * 4 for i in range(12)])
    write_texts(tmp_path / "el.jsonl", [f"μια απλή πρόταση {i} " * 4 for i in range(12)])
    texts = ["--old", "en=en.jsonl", "--new", "el=el.jsonl", "--tokens", "400", "--block-size", "32"]
    invoke("analyze", "similarity", base, *texts, "--out", "analysis.json")
    measure = ["analyze", "separability", base, *texts, "--out", "separability.json"]
    said = invoke(*measure, "--figure", "s.svg")
    found = SeparabilityResult.from_json("separability.json")
    rows = [re.findall(r"\d+(?:\.\d+)?", line) for line in said.splitlines() if re.search(r"\d\.\d{3}", line)]
    assert rows == [list(row) for row in found.rows()[1]]
    assert "1 token" in (tmp_path / "s.svg").read_text()
    with pytest.raises(InputError, match="exists already"):
        invoke(*measure)
    make = [
        "plan",
        "separable",
        "--analysis",
        "analysis.json",
        "--separability",
        "separability.json",
        "--out",
        "p.json",
    ]
    assert "experts per layer  3 2 2" in invoke(*make, "--total-experts", "7", "--similarity-floor", "2")
    assert Plan.load("p.json").separability == found.separability
    missing = ["plan", "separable", "--analysis", "analysis.json", "--total-experts", "7", "--out", "q.json"]
    with pytest.raises(AssertionError, match="--separability"):  # the option must be given
        invoke(*missing)
    with pytest.raises(InputError, match="not a separability analysis"):
        invoke(*missing, "--separability", "analysis.json")


@pytest.fixture
def recipe(tmp_path):
    save_dense(tmp_path / "base")
    words = {"en": "a plain sentence", "el": "μια απλή πρόταση", "tr": "yalın bir cümle"}
    for code, said in words.items():
        write_texts(tmp_path / f"{code}.jsonl", [f"{said} {i} " * 6 for i in range(9)])
    training = {"max_steps": 1, "per_device_train_batch_size": 1, "disable_tqdm": True}
    return Recipe(
        base=str(tmp_path / "base"),
        output=str(tmp_path / "run"),
        old={"en": str(tmp_path / "en.jsonl")},
        new={"el": str(tmp_path / "el.jsonl")},
        analysis=AnalysisSettings(tokens=400, block_size=32, batch_size=4),
        plan=plan_settings("separable", total_experts=7, similarity_floor=0.5),
        post_pretrain=settings_of(PostPretrainConfig)(block_size=16, training=training),
        review=settings_of(ReviewConfig)(block_size=16, training=training),
    )


def test_a_run_measures_both_resumes_and_shows_it(recipe, tmp_path):
    run, said = tmp_path / "run", []
    assert "analysis: en el have enough text" in validate_recipe(recipe)
    final = run_recipe(recipe, said.append)
    text = "\n".join(said)
    assert [step.name for step in steps_of(recipe)[0]][:3] == ["analyze", "analyze separability", "plan"]
    assert re.search(r"\[2/6\] analyze separability: accuracy after 32 tokens [\d.]+ to [\d.]+ over 3 layers", text)
    found, plan = SeparabilityResult.from_json(run / "separability.json"), Plan.load(run / "plan.json")
    assert plan.separability == found.separability
    assert History.of(json.loads((final / "config.json").read_text())).last.separability == found.separability
    shown = " ".join(f"{value:.2f}" for value in found.separability)
    assert f"  separability by layer {shown}" in invoke("inspect", final)
    assert f"separability        {shown}" in invoke("inspect", tmp_path / "base", "--plan", run / "plan.json")
    again = []
    run_recipe(recipe, again.append)
    assert sum("done already" in line for line in again) == 6
    page = make_page(run)
    assert '<th scope="col">accuracy, 16 tokens</th><th scope="col">accuracy, 32 tokens</th>' in page
    assert all(f"<td>{value:.3f}</td></tr>" in page for value in found.separability)
    assert "Layers that tell old text from new worse than 0.9 get no experts." in page
    model = expand_model(load_for_inference(tmp_path / "base")[0], plan)
    assert History.of(model.config).last.separability == found.separability
    with pytest.raises(InputError, match=r"run: analyze: analysis: changed after step `analyze` had run with it"):
        run_recipe(changed(recipe, analysis=changed(recipe.analysis, tokens=300)))


def test_the_page_of_another_plan_shows_a_separability_beside_it(tmp_path):
    plan = make_plan(plan_settings("layer-moe", total_experts=12), 5, ["en"], ["el"], similarity())
    plan.save(tmp_path / "plan.json")
    assert "linear probe" not in make_page(tmp_path)
    separability().to_json(tmp_path / "separability.json")
    page = make_page(tmp_path)
    assert "linear probe" in page
    assert all(f"<td>{value}</td></tr>" in page for value in ("0.970", "0.600", "0.930", "0.900", "0.890"))
    assert "get no experts" not in page
    separability(ACCURATE[:4]).to_json(tmp_path / "separability.json")
    with pytest.raises(InputError, match=r"separability\.json: has 4 layers, but the plan beside it has 5"):
        make_page(tmp_path)


def test_the_separability_does_not_stand_for_the_similarity(recipe, tmp_path, monkeypatch):
    """Where both are measured, a lost similarity is measured again before the plan is made."""
    from hf_moe_expand.steps import plan as plan_step

    with monkeypatch.context() as patch:
        patch.setattr(plan_step.MakePlan, "work", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_recipe(recipe, lambda line: None)
    (tmp_path / "run" / "analysis.json").unlink()
    said = []
    run_recipe(recipe, said.append)
    assert "[1/6] analyze ..." in said
    assert any(line.startswith("[2/6] analyze separability: done already") for line in said)


def test_validate_refuses_text_of_which_nothing_can_be_held_out(recipe, tmp_path):
    short = changed(recipe, analysis=AnalysisSettings(tokens=90, block_size=1024))
    with pytest.raises(InputError, match="Language 'en' has one block of text, so none can be held out"):
        validate_recipe(short)
    with pytest.raises(InputError, match=r"Language 'en' has [\d,]+ tokens, but 50,000 were asked for"):
        validate_recipe(changed(recipe, analysis=AnalysisSettings(tokens=50_000)))
    with pytest.raises(InputError, match="old: no old language"):
        changed(recipe, old={}, review=None)


def test_two_expansions_by_the_rule(recipe, tmp_path):
    rounds = [changed(recipe.all_expansions[0], new={code: str(tmp_path / f"{code}.jsonl")}) for code in ("el", "tr")]
    keys = {name: getattr(rounds[0], name) for name in ("analysis", "post_pretrain", "review")}
    plans = [recipe.plan, plan_settings("separable", total_experts=4, similarity_floor=0.5)]
    expansions = [Expansion(new=one.new, plan=plan, **keys) for one, plan in zip(rounds, plans, strict=True)]
    both = changed(recipe, new={}, expansions=expansions)
    found = [line for line in validate_recipe(both) if line.startswith("expansion ") and " experts, " in line]
    assert [line.partition(", ")[2] for line in found] == ["7 experts, 0 classifiers", "11 experts, 0 classifiers"]
    said = []
    final = run_recipe(both, said.append)
    assert sum(": analyze separability ..." in line for line in said) == 2
    grown = SeparabilityResult.from_json(tmp_path / "run" / "2" / "separability.json")
    assert (grown.old, grown.new) == (["en", "el"], ["tr"])
    history = History.of(json.loads((final / "config.json").read_text()))
    assert history.last.separability == grown.separability
    assert sum(history.last.experts_per_layer) == 11
    page = make_page(tmp_path / "run")
    assert page.count("<figcaption>Balanced accuracy of a linear probe") == 2
    assert page.count("worse than 0.9 get no new experts.") == page.count("worse than 0.9 get no experts.") == 1
    nearest = changed(expansions[1], expand=ExpandSettings(copy_from=3))
    with pytest.raises(InputError, match=r"copy_from is 3, but a layer may have only experts 0\.\.1"):
        validate_recipe(changed(both, expansions=[expansions[0], nearest]))


@pytest.mark.parametrize("keys", [{"method": "separable"}, {"method": "layer-moe", "only_layers": "1"}])
def test_a_growth_in_some_layers_leaves_out_others(recipe, tmp_path, keys):
    """After it, no layer is certain to have more experts than before, so a third expansion cannot copy them."""
    write_texts(tmp_path / "hu.jsonl", [f"egy egyszerű mondat {i} " * 6 for i in range(9)])
    plans = [plan_settings("moe-lpr", experts=2), plan_settings(total_experts=3, **keys)]
    rest = {name: getattr(recipe, name) for name in ("analysis", "post_pretrain", "review")}
    expansions = [
        Expansion(new={code: str(tmp_path / f"{code}.jsonl")}, plan=plan, **rest)
        for code, plan in zip(("el", "tr", "hu"), [*plans, plans[1]], strict=True)
    ]
    for copied, refused in ((1, False), (2, True)):
        last = changed(expansions[2], expand=ExpandSettings(copy_from=copied))
        three = changed(recipe, new={}, expansions=[*expansions[:2], last])
        if not refused:
            assert sum("experts, 0 classifiers" in line for line in validate_recipe(three)) == 3
            continue
        with pytest.raises(InputError, match=r"copy_from is 2, but a layer may have only experts 0\.\.1"):
            validate_recipe(three)


def test_a_layer_that_cannot_tell_gets_no_new_experts_in_growth(tmp_path):
    base = save_dense(tmp_path / "base")
    expand_checkpoint(base, tmp_path / "first", Plan("moe-lpr", [2, 2, 2], old=["en"], new=["el"]))
    found = similarity([0.5, 0.2, 0.5], ("en", "el"), ("tr",)), separability([0.99, 0.99, 0.7], ("en", "el"), ("tr",))
    settings = plan_settings("separable", total_experts=3)
    plan = make_plan(settings, 3, ["en", "el"], ["tr"], found[0], grows_from=[2, 2, 2], separability=found[1])
    assert plan.experts_per_layer == [3, 4, 2]
    grow_checkpoint(tmp_path / "first", tmp_path / "grown", plan)
    history = History.of(json.loads((tmp_path / "grown" / "config.json").read_text()))
    assert [record.separability for record in history.expansions] == [None, [0.99, 0.99, 0.7]]

"""A run's steps, what each was made from, and its end; a run's folder in the place of a checkpoint; its card."""

import json
import os
import shutil
from dataclasses import replace
from itertools import pairwise

import pytest
from conftest import keywords, refused, save_dense, write_texts
from typer.testing import CliRunner

from hf_moe_expand import Plan, PostPretrainConfig, ReviewConfig, cli, expand_checkpoint, run_recipe, validate_recipe
from hf_moe_expand.analysis.settings import GateSettings
from hf_moe_expand.checkpoint.arguments import AverageSettings, GraftSettings
from hf_moe_expand.checkpoint.source import local_checkpoint, name_in_results
from hf_moe_expand.core.saying import say_once
from hf_moe_expand.core.schema import changed
from hf_moe_expand.data.curriculum import Curriculum
from hf_moe_expand.evaluation.scoring_settings import EvaluationSettings
from hf_moe_expand.hub import card as card_module
from hf_moe_expand.hub.publish import card_to_push, push_to_hub
from hf_moe_expand.planning.methods import plan_settings
from hf_moe_expand.runs.pipeline import steps_of
from hf_moe_expand.runs.recipe import Expansion, Recipe
from hf_moe_expand.stages.run import check_frozen

TRAINING = {"max_steps": 1, "per_device_train_batch_size": 1, "disable_tqdm": True}
WORDS = {"en": "a plain sentence ", "el": "μια απλή πρόταση "}


@pytest.fixture
def recipe(tmp_path):
    save_dense(tmp_path / "base")
    for code, words in WORDS.items():
        write_texts(tmp_path / f"{code}.jsonl", [words * 8] * 4)
        write_texts(tmp_path / f"{code}.test.jsonl", [words])
    return Recipe(
        base=str(tmp_path / "base"), output=str(tmp_path / "run"), old={"en": str(tmp_path / "en.jsonl")},
        new={"el": str(tmp_path / "el.jsonl")}, test={code: str(tmp_path / f"{code}.test.jsonl") for code in WORDS},
        plan=plan_settings("moe-lpr", experts=2), evaluation=EvaluationSettings(block_size=16),
        post_pretrain=keywords(PostPretrainConfig, block_size=16, **TRAINING),
        review=keywords(ReviewConfig, block_size=16, **TRAINING),
    )  # fmt: skip


def repeated(recipe):
    """The steps that a further run does again."""
    said = []
    run_recipe(recipe, said.append)
    return [line.partition("] ")[2].removesuffix(" ...") for line in said if line.endswith(" ...")]


def test_changed_text_and_a_replaced_base_are_noticed_and_named(recipe, tmp_path):
    assert repeated(recipe) == ["plan", "expand", "post_pretrain", "review", "evaluate"]
    # The content counts: the same text, written again a day later, is no change.
    for code, words in WORDS.items():
        os.utime(write_texts(tmp_path / f"{code}.jsonl", [words * 8] * 4), (0, 0))
    assert repeated(recipe) == []
    write_texts(tmp_path / "el.test.jsonl", ["άλλο κείμενο"])
    assert repeated(recipe) == ["evaluate"]
    assert repeated(recipe) == []
    write_texts(tmp_path / "en.jsonl", ["another sentence " * 8] * 4)  # the review alone reads it
    refused(run_recipe, recipe, says=r"run: review: texts: changed after step `review` had run with it\. Give an")
    write_texts(tmp_path / "el.jsonl", ["άλλη πρόταση " * 8] * 4)
    refused(run_recipe, recipe, says=r"run: post_pretrain: texts: changed after step `post_pretrain` had run")
    for code, words in WORDS.items():
        write_texts(tmp_path / f"{code}.jsonl", [words * 8] * 4)
    assert repeated(recipe) == []
    save_dense(tmp_path / "base", seed=1)
    refused(run_recipe, recipe, says="run: base: changed after step `plan` had run with it")


def test_an_address_of_nothing_is_found_before_anything_runs(recipe, tmp_path):
    given = {"el": f"file://{tmp_path / 'el.jsonl'}"}
    assert f"new.el: {given['el']}, elsewhere" in validate_recipe(changed(recipe, new=given))
    (tmp_path / "el.jsonl").write_text("")
    refused(validate_recipe, changed(recipe, new=given), says=r"new.el: file://.*el.jsonl: holds no text; .*\(empty\)")
    (tmp_path / "el.jsonl").unlink()
    refused(validate_recipe, changed(recipe, new=given), says=r"new.el: file://.*el.jsonl: cannot be opened: no such")
    assert f"new.el: {given['el']}, elsewhere" in validate_recipe(changed(recipe, new=given), offline=True)


def test_the_record_says_what_each_step_found_and_was_made_from(recipe, tmp_path):
    run_recipe(recipe, lambda line: None)
    run = tmp_path / "run"
    record = json.loads((run / "steps.json").read_text())
    names = ["plan", "expand", "post_pretrain", "review", "evaluate"]
    assert list(record) == names
    assert record["review"]["facts"] == {"frozen": check_frozen(run / "post_pretrain", run / "review", recipe.review)}
    assert f"{record['review']['facts']['frozen']} frozen tensors are byte-identical" in record["review"]["summary"]
    # A step is made from all that the steps before it were.
    made = [set(record[name]["made_from"].items()) for name in names]
    assert all(one < next_one for one, next_one in pairwise(made))
    assert set(record["plan"]["made_from"]) == {"form", "base", "seed", "plan: plan", "plan: old", "plan: new"}
    assert "evaluate: test" in record["evaluate"]["made_from"]
    assert str(tmp_path) not in (run / "steps.json").read_text()
    # Changed settings are noticed by the first step that has them.
    for changes, message in [
        ({"seed": 1}, "seed: changed after step `plan`"),
        ({"expand": changed(recipe.expand, expert_init="random")}, "expand: expand: changed after step `expand`"),
        ({"review": replace(recipe.review, balance_coef=0.5)}, "review: review: changed after step `review`"),
    ]:
        refused(run_recipe, changed(recipe, **changes), says=message)
    for changes in ({"review": None}, {"evaluation": EvaluationSettings(block_size=8)}):
        assert repeated(changed(recipe, **changes)) == ["evaluate"]


def test_a_gate_is_fitted_once_more_on_a_base_that_a_stage_changed(recipe, tmp_path):
    gated = changed(recipe, review=None, gates=GateSettings())
    assert [step.name for step in steps_of(gated)[0]] == ["gate", "plan", "expand", "post_pretrain", "evaluate"]
    grafted = changed(gated, graft=GraftSettings(instruct=str(tmp_path / "base")))
    everything = changed(gated, post_pretrain=replace(recipe.post_pretrain, everything=True))
    for one in (grafted, everything):
        assert [step.name for step in steps_of(one)[0]][-2:] == ["gates", "evaluate"]


def test_a_gate_may_stand_where_the_plan_puts_no_experts(recipe, quick_gates):
    plan = plan_settings("moe-lpr", experts=2, exclusive=True, only_layers="1-2")
    gated = changed(recipe, review=None, test={}, plan=plan, gates=GateSettings(unseen_share=0.99))
    final = run_recipe(gated, lambda line: None)
    config = json.loads((final / "config.json").read_text())
    assert (config["parts"]["gate"]["layer"], config["num_experts_per_layer"]) == (0, [1, 2, 2])


RECIPE = """
base: {root}/base
output: {root}/qwen el
old: {{en: {root}/en.jsonl}}
new: {{el: {root}/el.jsonl}}
test: {{el: {root}/el.test.jsonl}}
plan: {{method: moe-lpr, experts: 2}}
post_pretrain: {{block_size: 16, max_steps: 1, per_device_train_batch_size: 1, save_strategy: "no"}}
review: null
evaluation: {{block_size: 16}}
"""


@pytest.fixture(autouse=True)
def said_anew():
    say_once.cache_clear()


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The folder of a run, and what the run said."""
    root = tmp_path_factory.mktemp("ran")
    save_dense(root / "base")
    for code, text in {"en": "The cat sat on the mat. ", "el": "Η γάτα κάθισε στο χαλί. "}.items():
        write_texts(root / f"{code}.jsonl", [text * 3] * 4)
    write_texts(root / "el.test.jsonl", ["Ο σκύλος κοιμάται στον κήπο όλη μέρα."] * 4)
    said = []
    run_recipe(Recipe.of_text(RECIPE.format(root=root), "recipe.yaml"), said.append)
    return root / "qwen el", "\n".join(said)


def test_a_run_s_folder_stands_for_its_last_checkpoint(ran, tmp_path):
    run, _ = ran
    last, data = run / "post_pretrain", f"el={run.parent / 'el.jsonl'}"
    for verb in (
        ["inspect", run], ["card", run], ["push", run, "me/x", "--dry-run"], ["chat", run, "--prompt", "The"],
        ["diff", run / "expanded", run],
        ["evaluate", run, "--data", data, "--max-tokens", "20", "--out", tmp_path / "e.json", "--overwrite"],
        ["analyze", "routing", run, "--data", data, "--out", tmp_path / "r.json", "--tokens", "100", "--overwrite"],
    ):  # fmt: skip
        say_once.cache_clear()
        by_run, by_stage = (
            CliRunner().invoke(cli.app, [str(place if part is run else part) for part in verb]) for place in (run, last)
        )
        assert "is the folder of a run" in by_run.stderr, verb
        assert str(last) in by_run.stderr
        assert "is the folder of a run" not in by_stage.stderr
        assert by_run.exit_code == by_stage.exit_code == (verb[0] == "diff"), verb
        assert by_run.stdout == by_stage.stdout, verb
    assert name_in_results(run) == name_in_results(last) == "qwen el/post_pretrain"


def test_a_run_s_folder_before_its_first_checkpoint_and_after_one_is_gone(ran, tmp_path):
    run = shutil.copytree(ran[0], tmp_path / "run")
    shutil.rmtree(run / "post_pretrain")
    assert local_checkpoint(run) == run / "expanded"
    shutil.rmtree(run / "expanded")
    for record in ((run / "steps.json").read_text(), '{"expand": 3, "other": {"output": ["x"]}}'):
        (run / "steps.json").write_text(record)
        refused(local_checkpoint, run, says="of a run that has no finished checkpoint: run its recipe again")


@pytest.mark.parametrize("stage", ["", "expanded", "post_pretrain"])
@pytest.mark.parametrize("options", [{}, {"license": "mit"}, {"base": "org/base"}], ids=str)
def test_card_prints_what_push_writes(ran, monkeypatch, stage, options):
    monkeypatch.setattr(card_module, "_base_license", lambda base: {})
    monkeypatch.setattr("hf_moe_expand.hub.publish.base_on_hub", lambda config, base, token: card_module.BaseModel(
        base, base, None))  # fmt: skip
    notes, pushed = [], []
    card, *_ = card_to_push(ran[0] / stage, "me/x", say=notes.append, **options)
    assert card == push_to_hub(ran[0] / stage, "me/x", dry_run=True, say=pushed.append, **options).card
    assert notes == [line for line in pushed if line in notes]
    assert any("warning: the card names no license" in line for line in notes) == ("license" not in options)
    assert ("| el (new) |" in card) == (stage != "expanded")  # the run's evaluation, where it has this model


def test_a_card_of_the_users_own_is_pushed_as_it_stands(tmp_path):
    expand_checkpoint(save_dense(tmp_path / "tiny"), tmp_path / "el", Plan("moe-lpr", [2] * 3, old=["en"], new=["el"]))
    own, said = tmp_path / "el" / "README.md", []
    for metadata, warned in (("language: [el]", True), ("license: mit", False)):
        own.write_text(f"---\n{metadata}\n---\n# mine\n")
        assert push_to_hub(tmp_path / "el", "me/x", dry_run=True, say=said.append).card == own.read_text()
        assert any("names no license" in line for line in said) == warned
        said.clear()
    assert "# mine" not in card_to_push(tmp_path / "el", "me/x", say=said.append)[0]
    assert any("which `push` publishes as it stands" in line for line in said)


def test_outputs_that_the_record_does_not_know_and_runs_of_other_kinds_stay(recipe, tmp_path):
    run, short = tmp_path / "run", changed(recipe, review=None, test={})
    (run / "review").mkdir(parents=True)
    says = "run: holds review, which is not of this run: give another `output`"
    refused(run_recipe, recipe, says=says)
    run_recipe(short)
    refused(run_recipe, recipe, says=says)
    one = {"plan": recipe.plan, "post_pretrain": recipe.post_pretrain, "review": recipe.review}
    expansions = [Expansion(new=recipe.new, **one), Expansion(new={"tr": str(tmp_path / "en.jsonl")}, **one)]
    several = Recipe(base=recipe.base, output=recipe.output, old=recipe.old, expansions=expansions)
    refused(run_recipe, several, says=r"run: holds a run of one expansion.*`expansion 1: plan`\): give another")
    assert not (run / "1").exists()
    names, more = ([step.name for step in steps_of(changed(several, expansions=expansions[:n]))[0]] for n in (1, 2))
    assert names == more[: len(names)]  # beside one of a list there is room for a second
    steps = json.loads((run / "steps.json").read_text())
    for made_from in (step["made_from"] for step in steps.values()):
        del made_from["form"]  # as the first versions wrote it
    (run / "steps.json").write_text(json.dumps(steps))
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    refused(run_recipe, short, says="steps.json: is of another version: finish it with that one, or give another")
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before
    assert not [*(run / "review").iterdir()]


def test_too_little_text_to_replay_is_refused_before_a_run(recipe, tmp_path):
    write_texts(tmp_path / "el.jsonl", ["μια μακριά πρόταση " * 8] * 40)
    replayed = replace(recipe.post_pretrain, replay=True, replay_share=0.5)
    refused(validate_recipe, changed(recipe, post_pretrain=replayed), says=r"replay_share is 0.5: Language 'en' has")


def test_a_run_ends_with_new_experts_averaged_with_their_ffns_and_notices_a_changed_curriculum(recipe, tmp_path):
    file, said = tmp_path / "curriculum.json", []
    Curriculum(2, {"el": 0}).save(file)
    training = {name: value for name, value in TRAINING.items() if name != "max_steps"}
    stage = keywords(PostPretrainConfig, block_size=16, curriculum=str(file), **training)
    recipe = changed(recipe, post_pretrain=stage, review=None, average=AverageSettings(weight=0.25), test={})
    assert validate_recipe(recipe)
    assert run_recipe(recipe, said.append).name == "average"
    assert any(line.startswith("[4/4] average: 0") for line in said)
    assert repeated(recipe) == []
    Curriculum(3, {"el": 0}).save(file)
    refused(run_recipe, recipe, says=r"post_pretrain: curriculum.json: changed after step `post_pretrain` had run")

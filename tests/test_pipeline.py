"""`run` on real text: the whole way, P3, resuming (P7), repeating (P8), and the ablations."""

import json
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
import yaml
from conftest import fork_ranks, interrupted, keywords, refused, save_dense, write_texts

from hf_moe_expand import (
    DMoEForCausalLM,
    GroupConfig,
    JointConfig,
    LayerMoEForCausalLM,
    PostPretrainConfig,
    ReviewConfig,
    run_recipe,
    validate_recipe,
)
from hf_moe_expand.analysis.routers import nearest_experts
from hf_moe_expand.analysis.settings import AnalysisSettings, DeviationSettings
from hf_moe_expand.analysis.similarity import measure_similarity
from hf_moe_expand.checkpoint.compare import compare_checkpoints
from hf_moe_expand.checkpoint.operation_settings import ExpandSettings
from hf_moe_expand.checkpoint.reader import CheckpointReader
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.core.schema import changed
from hf_moe_expand.data.pairs import texts_for
from hf_moe_expand.data.sources import LanguageText
from hf_moe_expand.evaluation.scoring_settings import EvaluationSettings
from hf_moe_expand.hub.published import published_files
from hf_moe_expand.inference.models import load_for_inference
from hf_moe_expand.planning.methods import plan_settings
from hf_moe_expand.planning.plan import Plan
from hf_moe_expand.report.page import make_page
from hf_moe_expand.runs.pipeline import steps_of
from hf_moe_expand.runs.recipe import Expansion, Recipe
from hf_moe_expand.runs.steps import stage as stage_steps
from hf_moe_expand.stages.kinds.graft import GraftSettings

PostPretrainSettings, ReviewSettings = partial(keywords, PostPretrainConfig), partial(keywords, ReviewConfig)
GroupSettings, JointSettings = partial(keywords, GroupConfig), partial(keywords, JointConfig)
TRAINING = {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "disable_tqdm": True, "logging_steps": 2}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("road")


@pytest.fixture
def recipe(root, help_text):
    if not (root / "base").exists():
        save_dense(root / "base")
        for code in ("en", "zh", "el", "tr"):
            write_texts(root / f"{code}.jsonl", [text[:400] for text in help_text(code, "train", 12)])
            write_texts(root / f"{code}.test.jsonl", [text[:300] for text in help_text(code, "test", 3)])
    return Recipe(
        base=str(root / "base"), output=str(root / "run"),
        old={code: str(root / f"{code}.jsonl") for code in ("en", "zh")},
        new={code: str(root / f"{code}.jsonl") for code in ("el", "tr")},
        test={code: str(root / f"{code}.test.jsonl") for code in ("en", "zh", "el", "tr")},
        analysis=AnalysisSettings(tokens=500, block_size=32, batch_size=4),
        plan=plan_settings(total_experts=7, classifier_layers=1, similarity_floor=0.01),
        post_pretrain=PostPretrainSettings(block_size=32, **{**TRAINING, "max_steps": 6, "save_steps": 2}),
        review=ReviewSettings(block_size=32, **{**TRAINING, "max_steps": 4}),
        evaluation=EvaluationSettings(block_size=32, batch_size=4),
    )  # fmt: skip


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


def test_the_whole_way_and_again_and_once_more_elsewhere(recipe, root, capsys):
    said = []
    final = run_recipe(recipe, said.append)
    text = "\n".join(said)
    assert "[6/6] evaluate: 4 languages, 3 models" in text
    assert "frozen tensors are byte-identical" in text
    assert "| mean of new |" in text
    assert "parameters train" in capsys.readouterr().out
    evaluation = json.loads((root / "run" / "evaluation.json").read_text())
    scores = evaluation["models"]
    assert scores["post-pretrained"]["el"]["bits_per_byte"] < scores["base"]["el"]["bits_per_byte"]
    stages = json.loads((final / "config.json").read_text())["expansions"][-1]["stages"]
    assert [(stage["stage"], stage["steps"]) for stage in stages] == [("post-pretrain", 6), ("review", 4)]
    assert str(root) not in (final / "config.json").read_text()
    # LayerMoE 3.3: the classifier stands where old and new languages are most alike after stage 1.
    assert not Plan.load(root / "run" / "plan.json").classifier_layers
    model, tokenizer = load_for_inference(root / "run" / "post_pretrain")
    sources = {code: LanguageText(code, path) for code, path in {**recipe.old, **recipe.new}.items()}
    texts = texts_for(model.config, sources, recipe.seed)
    measured = measure_similarity(model, tokenizer, texts, list(recipe.old), list(recipe.new), 500, 32)
    (layer,) = json.loads((final / "config.json").read_text())["classifier_layers"]
    assert layer == measured.new_old.index(max(measured.new_old))
    assert stages[-1]["settings"]["classifier_layers"] == 1
    # P3 over the whole way: every tensor of the base is in the final checkpoint, as expert 0 or under its own name.
    base, last = CheckpointReader(root / "base"), CheckpointReader(final)
    for name in base.tensors:
        home = name if name in last.tensors else name.replace(".mlp.", ".mlp.experts.0.")
        assert torch.equal(base.tensor(name), last.tensor(home)), name
    # Once more: nothing is done twice.
    before = {path: path.stat().st_mtime_ns for path in (root / "run").rglob("*") if path.is_file()}
    again = []
    run_recipe(recipe, again.append)
    assert sum("done already" in line for line in again) == 6
    assert before == {path: path.stat().st_mtime_ns for path in (root / "run").rglob("*") if path.is_file()}
    # What is evaluated may change: that step alone runs again.
    fewer = []
    run_recipe(changed(recipe, test={"el": recipe.test["el"]}), fewer.append)
    assert sum("done already" in line for line in fewer) == 5
    assert "[6/6] evaluate: 1 languages, 3 models; no held-out text in en, zh, tr (" in "\n".join(fewer)
    # P8: the same seed elsewhere gives the same bytes; another seed does not.
    twin = run_recipe(changed(recipe, output=str(root / "twin"), test={}), said.append)
    assert weights(twin) == weights(final)
    # A recipe that changed after its steps ran is refused, by step.
    other = changed(recipe, plan=plan_settings(total_experts=8))
    refused(run_recipe, other, said.append, says="changed after step `plan` had run")


def test_p7_an_interrupted_run_goes_on_and_ends_the_same(recipe, root, capsys):
    whole = run_recipe(changed(recipe, output=str(root / "whole"), test={}), lambda line: None)
    broken = changed(recipe, output=str(root / "broken"), test={})
    with interrupted(5), pytest.raises(KeyboardInterrupt) as stopped:
        run_recipe(broken, lambda line: None)
    steps = [step.name for step in steps_of(broken)[0]]
    number = steps.index("post_pretrain") + 1
    assert stopped.value.__notes__ == ["from step 4", f"with step {number} of {len(steps)}, post_pretrain"]
    assert (root / "broken" / "post_pretrain.training" / "checkpoint-4").is_dir()
    assert not (root / "broken" / "post_pretrain").exists()
    other = changed(broken, post_pretrain=replace(broken.post_pretrain, balance_coef=0.5))
    refused(run_recipe, other, lambda line: None, says=r"an interrupted run with other balance_coef \(then 0.01, now")
    capsys.readouterr()
    final = run_recipe(broken, lambda line: None)
    assert "resumes at step 4 of 6" in capsys.readouterr().out
    assert weights(final) == weights(whole)
    assert (final / "config.json").read_bytes() == (whole / "config.json").read_bytes()
    steps = json.loads((root / "broken" / "steps.json").read_text())
    assert steps["post_pretrain"]["attempts"] == 2
    assert not [name for name, step in steps.items() if name != "post_pretrain" and "attempts" in step]
    assert "(2 attempts)" in make_page(root / "broken")
    assert not (root / "broken" / "post_pretrain.training").exists()


def test_a_run_that_dies_after_a_stage_and_before_its_record(recipe, root, monkeypatch):
    recipe = changed(recipe, output=str(root / "died"), test={})
    with monkeypatch.context() as patch:
        patch.setattr(stage_steps, "check_frozen", lambda *rest: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_recipe(recipe)
    kept = weights(root / "died" / "post_pretrain")
    with pytest.raises(InputError, match="changed after step `post_pretrain` had run"):
        run_recipe(changed(recipe, post_pretrain=replace(recipe.post_pretrain, balance_coef=0.5)))
    said = []
    run_recipe(recipe, said.append)
    assert any("post_pretrain: 6 steps; " in line and "byte-identical" in line for line in said)
    assert weights(root / "died" / "post_pretrain") == kept
    assert "begun" not in json.loads((root / "died" / "steps.json").read_text())


def test_two_ranks_run_a_recipe_together(recipe, root):
    recipe = changed(recipe, output=str(root / "ranks"))
    (root / "recipe.yaml").write_text(yaml.safe_dump(recipe.model_dump()))
    said = root / "said"
    fork_ranks("hf_moe_expand", "run", str(root / "recipe.yaml"), environment={"SAID": str(said)})
    said = said.with_suffix(".0").read_text("utf-8") + said.with_suffix(".1").read_text("utf-8")
    assert said.count("[1/6] analyze ...") == said.count("[6/6] evaluate: 4 languages, 3 models") == 1
    assert said.count("frozen tensors are byte-identical") == 2
    stages = json.loads((root / "ranks" / "review" / "config.json").read_text())["expansions"][-1]["stages"]
    assert [stage["steps"] for stage in stages] == [6, 4]
    size = recipe.model_dump()["post_pretrain"]["per_device_train_batch_size"]
    assert [stage["blocks_seen"] for stage in stages] == [6 * size * 2, 4 * size * 2]
    assert all(stage["tokens_seen"] == 32 * stage["blocks_seen"] for stage in stages)
    assert all(sum(stage["tokens_seen_by_language"].values()) == stage["tokens_seen"] for stage in stages)


def test_two_expansions_one_after_the_other(recipe, root):
    """G0 -> G1 -> G2: `run` grows the model, reviews with all earlier languages, and goes on inside any expansion."""
    (first, second) = recipe.new.items()
    rounds = [
        Expansion(new=dict([first]), plan=recipe.plan, post_pretrain=recipe.post_pretrain, review=recipe.review),
        Expansion(
            new=dict([second]), plan=plan_settings(total_experts=4, classifier_layers=1, similarity_floor=0.01),
            analysis=recipe.analysis, post_pretrain=recipe.post_pretrain, review=recipe.review,
            expand=ExpandSettings(copy_from="nearest"),
        ),
    ]  # fmt: skip
    rounds[0] = changed(rounds[0], analysis=recipe.analysis)
    recipe = changed(recipe, new={}, expansions=rounds, output=str(root / "lifelong"))
    found = validate_recipe(recipe)
    assert sum(line.startswith("expansion ") and " experts, " in line for line in found) == 2
    said = []
    final = run_recipe(recipe, said.append)
    assert final == root / "lifelong" / "2" / "review"
    assert "[7/11] expansion 2: plan ..." in said
    model = LayerMoEForCausalLM.from_pretrained(final)
    counts = json.loads((root / "lifelong" / "1" / "plan.json").read_text())["experts_per_layer"]
    assert model.config.earlier_experts_per_layer == [counts]
    assert sum(model.config.num_experts_per_layer) == 7 + 4
    assert [entry["new_languages"] for entry in model.config.expansions] == [[first[0]], [second[0]]]
    assert set(model.config.expansions[1]["stages"][1]["documents"]) == {*recipe.old, first[0], second[0]}
    parent, tokenizer = load_for_inference(root / "lifelong" / "1" / "review")
    texts = {code: LanguageText(code, source).load().shuffle(seed=0)["text"] for code, source in [second]}
    nearest = nearest_experts(parent, tokenizer, texts, tokens=500, block_size=32, batch_size=4)
    assert {int(layer): expert for layer, expert in model.config.expansions[1]["copied_experts"].items()} == nearest
    assert any(f"new experts; nearest in each layer {' '.join(map(str, nearest.values()))} (" in line for line in said)
    evaluation = json.loads((root / "lifelong" / "evaluation.json").read_text())
    assert list(evaluation["models"]) == ["base", "after expansion 1", "after expansion 2"]
    assert evaluation["expansions"] == [[first[0]], [second[0]]]
    assert f"{second[0]} (expansion 2)" in make_page(root / "lifelong")
    # The second half again, the first untouched.
    shutil.rmtree(root / "lifelong" / "2" / "review")
    again = []
    run_recipe(recipe, again.append)
    assert sum("done already" in line for line in again) == 9  # neither the review nor the evaluation


def test_a_dmoe_recipe(recipe, root):
    training = {"max_steps": 3, "per_device_train_batch_size": 2, "disable_tqdm": True}
    recipe = changed(
        recipe, new={**recipe.old, **recipe.new}, old={}, output=str(root / "dmoe"),
        deviation=DeviationSettings(steps=2, batch_size=2, block_size=16, micro_batch_size=2),
        plan=plan_settings("dmoe", groups=2, ratio=0.7), group=GroupSettings(block_size=16, **training),
        joint=JointSettings(block_size=16, **training), post_pretrain=PostPretrainSettings(), review=None,
        graft=GraftSettings(str(root / "base"), keep_tokenizer=True),
    )  # fmt: skip
    validate_recipe(recipe)
    more = changed(recipe, deviation=changed(recipe.deviation, steps=10**6))
    refused(validate_recipe, more, says=r"Language '..' has [\d.]+ kB of text, but the .* reads 32,000,000 tokens")
    validate_recipe(changed(more, new=dict.fromkeys(more.new, "hub:no/such:text:train")))  # not read
    final = run_recipe(recipe, lambda line: None)
    config = DMoEForCausalLM.from_pretrained(final).config
    assert sorted(code for group in config.language_groups for code in group) == sorted(recipe.new)
    assert sorted(config.num_experts_per_layer) == [1, 2, 2]
    assert [stage["stage"] for stage in config.expansions[0]["stages"]] == ["group", "joint", "graft"]
    models = json.loads((root / "dmoe" / "evaluation.json").read_text())["models"]
    assert list(models) == ["base", "group-trained", "trained jointly", "grafted"]
    assert models["grafted"] == models["trained jointly"]  # of a fine-tune that changed nothing
    assert "Group training" in make_page(root / "dmoe")


def test_deltamoe_from_end_to_end(recipe, root, monkeypatch):
    """The review after the graft moves routers alone, and a second run goes on after the graft."""
    save_dense(root / "instruct", seed=1)
    mapping = {**recipe.model_dump(), "base": "$ROOT/base", "output": "$ROOT/delta", "test": {}}
    mapping |= {"plan": {"method": "moe-lpr", "experts": 2}, "graft": {"instruct": "$ROOT/instruct", "scale": 0.5}}
    (root / "delta.yaml").write_text(yaml.safe_dump(mapping))
    monkeypatch.setenv("ROOT", str(root))
    loaded, run = Recipe.load(root / "delta.yaml"), root / "delta"
    said = []
    with pytest.warns(UserWarning, match="look unrelated"):
        final = run_recipe(loaded, said.append)
    assert final == run / "review"
    assert any(line.startswith("[4/5] graft: base and instruct have a cosine of") for line in said)
    moved = compare_checkpoints(run / "graft", final).changed
    assert moved
    assert all(name.endswith("mlp.router.weight") for name in moved)
    entries = json.loads((final / "config.json").read_text())["expansions"][0]["stages"]
    assert [entry["stage"] for entry in entries] == ["post-pretrain", "graft", "review"]
    assert str(root) not in (final / "config.json").read_text()
    # The run keeps its recipe as it was written, for `push`.
    assert (run / "recipe.yaml").read_text() == (root / "delta.yaml").read_text()
    assert published_files(final)["recipe.yaml"] == run / "recipe.yaml"
    shutil.rmtree(final)
    again = []
    run_recipe(loaded, again.append)
    assert sum("done already" in line for line in again) == 4
    with pytest.raises(InputError, match="changed after step `graft` had run"):
        run_recipe(changed(loaded, graft=GraftSettings(str(root / "instruct"), 1.0)), said.append)


def test_what_is_no_longer_kept_is_not_made_anew_under_what_was_made_from_it(recipe, root):
    recipe = changed(recipe, output=str(root / "gone"))
    run_recipe(recipe, lambda line: None)
    before = {name: weights(root / "gone" / name) for name in ("post_pretrain", "review")}
    shutil.rmtree(root / "gone" / "expanded")  # to save room
    shutil.rmtree(root / "gone" / "post_pretrain")
    said = []
    recipe = changed(recipe, test={"el": recipe.test["el"]})
    run_recipe(recipe, said.append)
    text = "\n".join(said)
    assert (
        f"post_pretrain: done, its output is no longer kept; to run it again, delete {root / 'gone' / 'review'} too"
        in text
    )
    assert "evaluate: 1 languages, 2 models (post-pretrained: no longer kept)" in text
    assert weights(root / "gone" / "review") == before["review"]
    shutil.rmtree(root / "gone" / "review")  # without it both are made anew
    run_recipe(recipe, lambda line: None)
    assert {name: weights(root / "gone" / name) for name in before} == before

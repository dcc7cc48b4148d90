"""`run` on real text: the whole way, P3, resuming (P7), repeating (P8), and the ablations."""

import json
import re
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import yaml
from conftest import fork_ranks, interrupted, keywords, save_dense, tensors, write_texts

from hf_moe_expand import (
    DMoEForCausalLM,
    GroupConfig,
    JointConfig,
    LayerMoEForCausalLM,
    PostPretrainConfig,
    ReviewConfig,
)
from hf_moe_expand.analysis.settings import AnalysisSettings, DeviationSettings
from hf_moe_expand.checkpoint.arguments import ExpandSettings
from hf_moe_expand.checkpoint.compare import compare_checkpoints
from hf_moe_expand.core.schema import changed
from hf_moe_expand.evaluation.scoring_settings import EvaluationSettings
from hf_moe_expand.hub.published import published_files
from hf_moe_expand.planning.methods import plan_settings
from hf_moe_expand.planning.plan import Plan
from hf_moe_expand.report.page import make_page
from hf_moe_expand.runs.pipeline import run_recipe, steps_of, validate_recipe
from hf_moe_expand.runs.recipe import Expansion, Recipe
from hf_moe_expand.runs.steps import stage as stage_steps
from hf_moe_expand.stages.kinds.graft import GraftSettings

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
            write_texts(root / f"{code}.test.jsonl", [text[:100] for text in help_text(code, "test", 3)])
    return Recipe(
        base=str(root / "base"), output=str(root / "run"),
        old={code: str(root / f"{code}.jsonl") for code in ("en", "zh")},
        new={code: str(root / f"{code}.jsonl") for code in ("el", "tr")},
        test={code: str(root / f"{code}.test.jsonl") for code in ("en", "zh", "el", "tr")},
        analysis=AnalysisSettings(tokens=500, block_size=32, batch_size=4),
        plan=plan_settings(total_experts=7, classifier_layers=1, similarity_floor=0.01),
        post_pretrain=keywords(PostPretrainConfig, block_size=32, **{**TRAINING, "max_steps": 6, "save_steps": 2}),
        review=keywords(ReviewConfig, block_size=32, **{**TRAINING, "max_steps": 4}),
        evaluation=EvaluationSettings(block_size=32, batch_size=16),
    )  # fmt: skip


@pytest.fixture
def quick(recipe):
    """The recipe with few steps, of which none is saved."""
    few = {**TRAINING, "block_size": 32, "max_steps": 2, "save_strategy": "no"}
    return changed(recipe, post_pretrain=keywords(PostPretrainConfig, **few), review=keywords(ReviewConfig, **few))


@pytest.fixture
def ran(recipe, root, capsys):
    """What the recipe's run said, which is made once."""
    said = root / "said.txt"
    if not said.exists():
        lines = []
        assert run_recipe(recipe, lines.append) == root / "run" / "review"
        assert "parameters train" in capsys.readouterr().out
        said.write_text("\n".join(lines))
    return said.read_text()


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


def run_again(recipe):
    """What a run says, and how many of its steps were done already."""
    said = []
    run_recipe(recipe, said.append)
    return "\n".join(said), sum("done already" in line for line in said)


def stages_of(folder):
    return json.loads((folder / "config.json").read_text())["expansions"][-1]["stages"]


def test_the_whole_way_and_again(recipe, ran, root):
    final = root / "run" / "review"
    assert "[6/6] evaluate: 4 languages, 3 models" in ran
    assert "frozen tensors are byte-identical" in ran
    assert "| mean of new |" in ran
    scores = json.loads((root / "run" / "evaluation.json").read_text())["models"]
    assert scores["post-pretrained"]["el"]["bits_per_byte"] < scores["base"]["el"]["bits_per_byte"]
    stages = stages_of(final)
    assert [(stage["stage"], stage["steps"]) for stage in stages] == [("post-pretrain", 6), ("review", 4)]
    assert str(root) not in (final / "config.json").read_text()
    # LayerMoE 3.3: classifiers are placed after stage 1, by the review.
    assert not Plan.load(root / "run" / "plan.json").classifier_layers
    assert len(json.loads((final / "config.json").read_text())["classifier_layers"]) == 1
    # P3 over the whole way: every tensor of the base is in the final checkpoint, as expert 0 or under its own name.
    base, last = tensors(root / "base"), tensors(final)
    for name, value in base.items():
        assert torch.equal(value, last[name if name in last else name.replace(".mlp.", ".mlp.experts.0.")]), name
    # Once more: nothing is done twice. What is evaluated may change: that step alone runs again.
    times = lambda: {path: path.stat().st_mtime_ns for path in (root / "run").rglob("*") if path.is_file()}  # noqa: E731
    before = times()
    assert run_again(recipe)[1] == 6
    assert times() == before
    said, done = run_again(changed(recipe, test={"el": recipe.test["el"]}))
    assert done == 5
    assert "[6/6] evaluate: 1 languages, 3 models; no held-out text in en, zh, tr (" in said


@pytest.mark.usefixtures("ran")
def test_p7_a_run_that_dies_twice_goes_on_and_ends_the_same(recipe, root, capsys):
    """Inside a stage, and between it and its record; and P8: the same seed elsewhere gives the same bytes."""
    folder, whole = root / "broken", root / "run" / "review"
    broken = changed(recipe, output=str(folder), test={})
    with interrupted(5), pytest.raises(KeyboardInterrupt) as stopped:
        run_recipe(broken)
    steps = [step.name for step in steps_of(broken)[0]]
    number = steps.index("post_pretrain") + 1
    assert stopped.value.__notes__ == ["from step 4", f"with step {number} of {len(steps)}, post_pretrain"]
    assert (folder / "post_pretrain.training" / "checkpoint-4").is_dir()
    assert not (folder / "post_pretrain").exists()
    capsys.readouterr()
    with patch.object(stage_steps, "check_frozen", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        run_recipe(broken)
    assert "resumes at step 4 of 6" in capsys.readouterr().out
    kept = weights(folder / "post_pretrain")
    said, _ = run_again(broken)
    assert re.search("post_pretrain: 6 steps; .*byte-identical", said)
    assert weights(folder / "post_pretrain") == kept
    assert weights(folder / "review") == weights(whole)
    assert (folder / "review" / "config.json").read_bytes() == (whole / "config.json").read_bytes()
    record = json.loads((folder / "steps.json").read_text())
    assert {name: step["attempts"] for name, step in record.items() if "attempts" in step} == {"post_pretrain": 3}
    assert "(3 attempts)" in make_page(folder)
    assert not (folder / "post_pretrain.training").exists()


def test_two_ranks_run_a_recipe_together(quick, root):
    recipe = changed(quick, output=str(root / "ranks"))
    (root / "recipe.yaml").write_text(yaml.safe_dump(recipe.model_dump()))
    fork_ranks("hf_moe_expand", "run", str(root / "recipe.yaml"), environment={"SAID": str(root / "said")})
    said = "".join((root / f"said.{rank}").read_text("utf-8") for rank in range(2))
    assert said.count("[1/6] analyze ...") == said.count("[6/6] evaluate: 4 languages, 3 models") == 1
    assert said.count("frozen tensors are byte-identical") == 2
    stages = stages_of(root / "ranks" / "review")
    assert [(stage["steps"], stage["blocks_seen"]) for stage in stages] == [(2, 2 * 4 * 2)] * 2
    assert all(stage["tokens_seen"] == 32 * stage["blocks_seen"] for stage in stages)
    assert all(sum(stage["tokens_seen_by_language"].values()) == stage["tokens_seen"] for stage in stages)


def test_two_expansions_one_after_the_other(quick, root):
    """G0 -> G1 -> G2: `run` grows the model, reviews with all earlier languages, and goes on inside any expansion."""
    (first, second) = quick.new.items()
    stages = {"analysis": quick.analysis, "post_pretrain": quick.post_pretrain, "review": quick.review}
    further = plan_settings(total_experts=4, classifier_layers=1, similarity_floor=0.01)
    rounds = [
        Expansion(new=dict([first]), plan=quick.plan, **stages),
        Expansion(new=dict([second]), plan=further, expand=ExpandSettings(copy_from="nearest"), **stages),
    ]
    test = {second[0]: quick.test[second[0]]}
    recipe = changed(quick, new={}, expansions=rounds, test=test, output=str(root / "lifelong"))
    said, _ = run_again(recipe)
    assert "[7/11] expansion 2: plan ..." in said
    model = LayerMoEForCausalLM.from_pretrained(root / "lifelong" / "2" / "review")
    counts = json.loads((root / "lifelong" / "1" / "plan.json").read_text())["experts_per_layer"]
    assert model.config.earlier_experts_per_layer == [counts]
    assert sum(model.config.num_experts_per_layer) == 7 + 4
    assert [entry["new_languages"] for entry in model.config.expansions] == [[first[0]], [second[0]]]
    assert set(model.config.expansions[1]["stages"][1]["documents"]) == {*recipe.old, first[0], second[0]}
    nearest = " ".join(map(str, model.config.expansions[1]["copied_experts"].values()))
    assert f"new experts; nearest in each layer {nearest} (" in said
    evaluation = json.loads((root / "lifelong" / "evaluation.json").read_text())
    assert list(evaluation["models"]) == ["base", "after expansion 1", "after expansion 2"]
    assert evaluation["expansions"] == [[first[0]], [second[0]]]
    assert f"{second[0]} (expansion 2)" in make_page(root / "lifelong")
    # The second half again, the first untouched.
    shutil.rmtree(root / "lifelong" / "2" / "review")
    assert run_again(recipe)[1] == 9  # neither the review nor the evaluation


def test_a_dmoe_recipe(recipe, root):
    training = {"max_steps": 2, "per_device_train_batch_size": 2, "disable_tqdm": True, "save_strategy": "no"}
    recipe = changed(
        recipe, new={**recipe.old, **recipe.new}, old={}, output=str(root / "dmoe"),
        deviation=DeviationSettings(steps=2, batch_size=2, block_size=16, micro_batch_size=2),
        plan=plan_settings("dmoe", groups=2, ratio=0.7), group=keywords(GroupConfig, block_size=16, **training),
        joint=keywords(JointConfig, block_size=16, **training), post_pretrain=keywords(PostPretrainConfig), review=None,
        graft=GraftSettings(str(root / "base"), keep_tokenizer=True),
    )  # fmt: skip
    validate_recipe(changed(recipe, new=dict.fromkeys(recipe.new, "hub:no/such:text:train")))  # not read
    final = run_recipe(recipe)
    config = DMoEForCausalLM.from_pretrained(final).config
    assert sorted(code for group in config.language_groups for code in group) == sorted(recipe.new)
    assert sorted(config.num_experts_per_layer) == [1, 2, 2]
    assert [stage["stage"] for stage in config.expansions[0]["stages"]] == ["group", "joint", "graft"]
    models = json.loads((root / "dmoe" / "evaluation.json").read_text())["models"]
    assert list(models) == ["base", "group-trained", "trained jointly", "grafted"]
    assert models["grafted"] == models["trained jointly"]  # of a fine-tune that changed nothing
    assert "Group training" in make_page(root / "dmoe")


def test_deltamoe_from_end_to_end(quick, root, monkeypatch):
    """The review after the graft moves routers alone, and a second run goes on after the graft."""
    save_dense(root / "instruct", seed=1)
    mapping = {**quick.model_dump(), "base": "$ROOT/base", "output": "$ROOT/delta", "test": {}}
    mapping |= {"plan": {"method": "moe-lpr", "experts": 2}, "graft": {"instruct": "$ROOT/instruct", "scale": 0.5}}
    (root / "delta.yaml").write_text(yaml.safe_dump(mapping))
    monkeypatch.setenv("ROOT", str(root))
    loaded, run = Recipe.load(root / "delta.yaml"), root / "delta"
    with pytest.warns(UserWarning, match="look unrelated"):
        said, _ = run_again(loaded)
    assert "[4/5] graft: base and instruct have a cosine of" in said
    final = run / "review"
    moved = compare_checkpoints(run / "graft", final).changed
    assert moved
    assert all(name.endswith("mlp.router.weight") for name in moved)
    assert [entry["stage"] for entry in stages_of(final)] == ["post-pretrain", "graft", "review"]
    # The run keeps its recipe as it was written, for `push`.
    assert published_files(final)["recipe.yaml"] == run / "recipe.yaml"
    assert (run / "recipe.yaml").read_text() == (root / "delta.yaml").read_text()
    shutil.rmtree(final)
    assert run_again(loaded)[1] == 4


@pytest.mark.usefixtures("ran")
def test_what_is_no_longer_kept_is_not_made_anew_under_what_was_made_from_it(recipe, root):
    gone = Path(shutil.copytree(root / "run", root / "gone"))
    recipe = changed(recipe, output=str(gone), test={"el": recipe.test["el"]})
    before = {name: weights(gone / name) for name in ("post_pretrain", "review")}
    shutil.rmtree(gone / "expanded")  # to save room
    shutil.rmtree(gone / "post_pretrain")
    (gone / "evaluation.json").unlink()
    said, _ = run_again(recipe)
    assert f"post_pretrain: done, its output is no longer kept; to run it again, delete {gone / 'review'} too" in said
    assert "evaluate: 1 languages, 2 models (post-pretrained: no longer kept)" in said
    assert weights(gone / "review") == before["review"]
    shutil.rmtree(gone / "review")  # without it both are made anew
    run_recipe(recipe)
    assert {name: weights(gone / name) for name in before} == before

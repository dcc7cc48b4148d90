"""Recipes whose base writes the old text itself: the whole way, resuming, further expansions, refusals."""

import json
from collections import Counter
from functools import partial

import pytest
import torch
from conftest import invoke, keywords, save_dense, write_texts
from transformers import Trainer

from hf_moe_expand import PostPretrainConfig, ReviewConfig, run_recipe, validate_recipe
from hf_moe_expand.analysis.settings import AnalysisSettings
from hf_moe_expand.checkpoint.records import History
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.core.schema import changed
from hf_moe_expand.data.sources import LanguageText
from hf_moe_expand.evaluation.settings import EvaluationSettings
from hf_moe_expand.hub.card import make_card
from hf_moe_expand.inference import self_written as writing
from hf_moe_expand.inference.self_written import writer_of
from hf_moe_expand.inference.writing import SelfWrittenSettings
from hf_moe_expand.planning.methods import plan_settings
from hf_moe_expand.report.inspection import inspect_checkpoint
from hf_moe_expand.report.page import make_page
from hf_moe_expand.runs.recipe import Expansion, Recipe
from hf_moe_expand.runs.steps.write import WriteOldText

TRAINING = {"per_device_train_batch_size": 2, "learning_rate": 1e-2, "disable_tqdm": True, "max_steps": 2}
PostPretrainSettings, ReviewSettings = partial(keywords, PostPretrainConfig), partial(keywords, ReviewConfig)
WRITTEN = "self_written.jsonl"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("self-written")
    save_dense(root / "base")
    for code, words in {"en": "the cat sat", "el": "η γάτα", "hu": "a macska"}.items():
        write_texts(root / f"{code}.jsonl", [f"{words} {number} {words}" for number in range(60)])
        write_texts(root / f"{code}.test.jsonl", [f"{words} {number} {words}" for number in range(60, 120)])
    return root


@pytest.fixture
def recipe(root, tmp_path):
    return Recipe(
        base=str(root / "base"), output=str(tmp_path / "run"), new={"el": str(root / "el.jsonl")},
        self_written=SelfWrittenSettings(documents=12, tokens=40),
        analysis=AnalysisSettings(tokens=100, block_size=32, batch_size=4),
        plan=plan_settings(total_experts=7, classifier_layers=1, similarity_floor=0.01),
        post_pretrain=PostPretrainSettings(block_size=32, **TRAINING),
        review=ReviewSettings(block_size=32, distillation_coef=1.0, **TRAINING),
    )  # fmt: skip


def silently(recipe):
    return run_recipe(recipe, lambda line: None)


def rows(path):
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def history(folder):
    return History.of(json.loads((folder / "config.json").read_text("utf-8")))


def test_a_recipe_without_old_text_keeps_what_the_base_writes(recipe, root, tmp_path):
    recipe = changed(
        recipe, test={code: str(root / f"{code}.test.jsonl") for code in ("en", "el")},
        evaluation=EvaluationSettings(block_size=32, batch_size=4),
    )  # fmt: skip
    assert "self_written: the base writes 12 documents of up to 40 tokens: und" in validate_recipe(recipe)
    said = []
    final = run_recipe(recipe, said.append)
    assert any("[1/7] self_written: 12 documents (und) and" in line for line in said)
    written = rows(tmp_path / "run" / WRITTEN)
    assert Counter((row["language"], row["written_by"], row["seed"], row["prompt"]) for row in written) == {
        ("und", "base", 0, ""): 12
    }
    # Review read all of it as old text, and the history says who wrote it.
    found = history(final)
    review = found.last.stages[-1]
    assert (found.last.old_languages, found.classes) == (["und"], {"und": 0, "el": 1})
    assert (review.documents["und"], review.written_by) == (12, {"und": "base"})
    longest = max(len(text.encode()) + 1 for text in (row["text"] for row in rows(root / "el.jsonl")))
    assert review.tokens["und"] <= review.tokens["el"] < review.tokens["und"] + longest  # equally many of both
    assert found.last.stages[0].written_by is None
    log = json.loads((final / "trainer_state.json").read_text())["log_history"]
    assert any(entry.get("distillation_loss", 0) > 0 for entry in log)
    assert any(entry.get("language_prior_loss", 0) > 0 for entry in log)
    # Reports name it, and no language `und` among the scores or in the card's metadata.
    assert "12 documents of und that base wrote" in "\n".join(inspect_checkpoint(final).lines())
    card = make_card(final)
    assert "It read 12 documents of und that base wrote." in str(card)
    assert card.data.language == ["el"]
    assert "It read 12 documents of und that base wrote." in make_page(tmp_path / "run")
    evaluation = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert (evaluation["old"], evaluation["new"]) == (["en"], ["el"])
    # Once more nothing is done, elsewhere the same bytes come out, and another seed gives other text.
    again = []
    run_recipe(recipe, again.append)
    assert sum("done already" in line for line in again) == 7
    twin = silently(changed(recipe, output=str(tmp_path / "twin"), test={}))
    assert (tmp_path / "twin" / WRITTEN).read_bytes() == (tmp_path / "run" / WRITTEN).read_bytes()
    assert (twin / "model.safetensors").read_bytes() == (final / "model.safetensors").read_bytes()
    silently(changed(recipe, output=str(tmp_path / "other"), test={}, seed=1, review=None))
    assert [row["text"] for row in rows(tmp_path / "other" / WRITTEN)] != [row["text"] for row in written]
    with pytest.raises(InputError, match="self_written: self_written: changed after step `self_written` had run"):
        silently(changed(recipe, self_written=SelfWrittenSettings(documents=13, tokens=40)))


def test_a_killed_run_leaves_no_half_a_file_and_ends_the_same(recipe, tmp_path, monkeypatch):
    whole = silently(recipe)
    broken = changed(recipe, output=str(tmp_path / "broken"))
    file, write = tmp_path / "broken" / WRITTEN, writing.write_documents

    def interrupted(*given):
        for number, row in enumerate(write(*given)):
            if number == 5:
                raise KeyboardInterrupt
            yield row

    with monkeypatch.context() as patch:
        patch.setattr(writing, "write_documents", interrupted)
        with pytest.raises(KeyboardInterrupt):
            silently(broken)
    assert {path.name for path in file.parent.iterdir()} == {"steps.json"}
    # Killed again, between the file and its record: the file is not written a second time.
    with monkeypatch.context() as patch:
        patch.setattr(WriteOldText, "finish", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            silently(broken)
    kept = file.stat().st_mtime_ns
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train", lambda *given, **others: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            silently(broken)
    assert file.stat().st_mtime_ns == kept
    # A file that is lost before review is written anew, with the same bytes; after review it is not missed.
    file.unlink()
    final = silently(broken)
    assert file.read_bytes() == (tmp_path / "run" / WRITTEN).read_bytes()
    assert (final / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert (final / "config.json").read_bytes() == (whole / "config.json").read_bytes()
    file.unlink()
    said = []
    run_recipe(broken, said.append)
    assert "no longer kept" in said[0]
    assert not file.exists()


def test_every_review_of_several_expansions_reads_what_the_base_wrote_once(recipe, root, tmp_path):
    def expansion(code):
        return Expansion(
            new={code: str(root / f"{code}.jsonl")}, analysis=recipe.analysis, plan=recipe.plan,
            post_pretrain=recipe.post_pretrain, review=recipe.review,
        )  # fmt: skip

    later = changed(expansion("hu"), plan=plan_settings(total_experts=3, similarity_floor=0.01))
    several = Recipe(
        base=recipe.base, output=recipe.output, self_written=recipe.self_written,
        expansions=[expansion("el"), later],
    )  # fmt: skip
    said = []
    final = run_recipe(several, said.append)
    assert sum(": 12 documents (und)" in line for line in said) == 1
    found = history(final)
    assert found.by_expansion == [["und"], ["el"], ["hu"]]
    reviews = [record.stages[-1] for record in found.expansions]
    assert [set(review.documents) for review in reviews] == [{"und", "el"}, {"und", "el", "hu"}]
    assert [review.written_by for review in reviews] == [{"und": "base"}] * 2
    assert not (tmp_path / "run" / "2" / WRITTEN).exists()


def test_prompts_by_language_beside_old_text(recipe, root, tmp_path):
    prompts = {"de": ["Die Katze", "Ein Hund"], "und": []}
    recipe = changed(
        recipe, old={"en": str(root / "en.jsonl")}, output=str(tmp_path / "prompts"),
        self_written=SelfWrittenSettings(documents=4, tokens=30, prompts=prompts),
        plan=plan_settings("moe-lpr", experts=2),
        post_pretrain=recipe.post_pretrain.but(replay=True),
        review=recipe.review.but(old_documents=3),
    )  # fmt: skip
    final = silently(recipe)
    written = Counter((row["language"], row["prompt"]) for row in rows(tmp_path / "prompts" / WRITTEN))
    assert written == {("de", "Die Katze"): 2, ("de", "Ein Hund"): 2, ("und", ""): 4}
    assert all(row["text"].startswith(row["prompt"]) for row in rows(tmp_path / "prompts" / WRITTEN))
    found = history(final)
    assert found.last.old_languages == ["en", "de", "und"]
    replay, review = found.last.stages
    assert review.documents == {"en": 3, "de": 3, "und": 3, "el": 6}
    assert review.written_by == replay.written_by == {"de": "base", "und": "base"}


def test_text_counts_as_written_only_if_a_model_wrote_every_row_of_it(tmp_path):
    own, other = {"text": "a", "written_by": "base"}, {"text": "a", "written_by": "another"}
    files = {
        "own": [own, own], "two": [own, other], "mixed": [own, {"text": "b"}], "plain": [{"text": "b"}, own],
        "odd": [{"text": "a", "written_by": ["base"]}],
    }  # fmt: skip
    for name, found in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found), "utf-8")
    (tmp_path / "lines.txt").write_text("a\n", "utf-8")
    names = [*(f"{name}.jsonl" for name in files), "lines.txt"]
    assert [writer_of(LanguageText("en", str(tmp_path / name))) for name in names] == ["base", *[None] * 5]
    assert writer_of(LanguageText("en", "hub:some/dataset")) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"self_written": None}, "review.distillation_coef: keeps the base's predictions on old text, but the recipe"),
        ({"self_written": None, "review": ReviewSettings()}, r"let the base write it \(`self_written: {}`\), or set"),
        ({"old": {"und": "x.jsonl"}}, "self_written.prompts: und has text under `old` already"),
        ({"new": {"und": "x.jsonl"}}, "und: given as an old and as a new language"),
        (
            {"plan": plan_settings("dmoe", groups=1), "post_pretrain": PostPretrainSettings(), "review": None},
            "self_written: DMoE trains the base too",
        ),
        ({"plan": plan_settings("moe-lpr", experts=2), "review": None}, "self_written: no step would read the text"),
        ({"test": {"klingonisch": "x.jsonl"}}, "test.klingonisch: 'klingonisch' is not a language code"),
    ],
)
def test_recipes_are_refused(recipe, changes, message):
    with pytest.raises(InputError, match=message):
        changed(recipe, **changes)


def test_distillation_without_the_bases_text_is_refused_in_a_further_expansion_too(recipe, root):
    first = Expansion(new=recipe.new, plan=plan_settings("moe-lpr", experts=2), review=None)
    later = Expansion(
        new={"hu": str(root / "hu.jsonl")}, plan=plan_settings("moe-lpr", experts=1), review=recipe.review
    )
    with pytest.raises(InputError, match=r"review\.distillation_coef: keeps the base's predictions"):
        Recipe(base=recipe.base, output=recipe.output, expansions=[first, later])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokens": 64}, "self_written: tokens is 64, and a prompt has up to 1, but the model takes 64 positions"),
        ({"prompts": ["The long beginning"]}, "a prompt has up to 19, but the model takes 64 positions: lower tokens"),
        ({"documents": 2}, "self_written: the base writes at most 100 tokens in und, but the analysis reads 120"),
        ({"documents": 5}, "self_written.documents is 5, but `review` takes 6 documents of each old language"),
    ],
)
def test_checks_before_anything_runs(recipe, settings, message):
    changes = {
        "self_written": SelfWrittenSettings(**{"documents": 12, "tokens": 50, **settings}),
        "analysis": AnalysisSettings(tokens=120, block_size=32),
        "review": recipe.review.but(old_documents=2 if settings.get("documents") == 2 else 6),
    }
    with pytest.raises(InputError, match=message):
        validate_recipe(changed(recipe, **changes))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{temperature: 0}", "self_written: temperature is 0: must be larger than 0"),
        ("{prompts: ['']}", "self_written: prompts: a prompt is empty"),
        ("{prompts: {en: [The], de: [' ']}}", "self_written: prompts: a prompt is empty"),
        ("{prompts: {en: [], de: []}}", "en, de have no prompts, so their texts would be the same"),
        ("{prompts: {}}", "prompts: names no language"),
        ("{prompts: {xyzzy: [A]}}", "'xyzzy' is not a language code"),
        (
            "{prompts: The}",
            "self_written.prompts: expected a list of prompts, or a list for each language, found 'The'",
        ),
        ("{prompts: {en: The}}", "self_written.prompts.en: expected a list, found 'The'"),
        ("{prompts: [1]}", "expected text, found 1"),
        ("{seed: 1}", "unknown key `seed`"),
    ],
)
def test_the_key_of_a_file_is_checked(root, tmp_path, line, message):
    lines = [
        f"base: {root / 'base'}", f"output: {tmp_path / 'out'}", f"new: {{el: {root / 'el.jsonl'}}}",
        "plan: {method: moe-lpr, experts: 2}", f"self_written: {line}",
    ]  # fmt: skip
    (tmp_path / "recipe.yaml").write_text("\n".join(lines), "utf-8")
    with pytest.raises(InputError, match=message):
        Recipe.load(tmp_path / "recipe.yaml")


def test_the_commands_of_a_user_without_any_old_text(root, tmp_path):
    torch.manual_seed(0)
    out, config = tmp_path / "und.jsonl", tmp_path / "stage.yaml"
    invoke("sample", root / "base", "--documents", "8", "--tokens", "20", "--out", out)
    assert {row["language"] for row in rows(out)} == {"und"}
    plan = ("--experts", "2", "--layers", "3", "--old", "und", "--new", "el")
    invoke("plan", "moe-lpr", *plan, "--out", tmp_path / "plan.json")
    invoke("expand", root / "base", tmp_path / "expanded", "--plan", tmp_path / "plan.json")
    config.write_text(json.dumps({"block_size": 16, "distillation_coef": 1.0, **TRAINING}), "utf-8")
    texts = ("--data", f"und={out}", "--data", f"el={root / 'el.jsonl'}")
    invoke("train", "review", tmp_path / "expanded", tmp_path / "reviewed", *texts, "--config", config)
    assert history(tmp_path / "reviewed").last.stages[-1].written_by == {"und": "base"}
    found = invoke(
        "evaluate", root / "base", tmp_path / "reviewed", "--data", f"en={root / 'en.jsonl'}", "--data",
        f"el={root / 'el.jsonl'}", "--old", "en", "--new", "el", "--block-size", "32",
        "--out", tmp_path / "evaluation.json",
    )  # fmt: skip
    assert "en (old)" in found


def test_distillation_of_a_model_whose_plan_names_no_old_language_is_refused(root, tmp_path):
    plan = ("--experts", "2", "--layers", "3", "--old", "", "--new", "el")
    invoke("plan", "moe-lpr", *plan, "--out", tmp_path / "plan.json")
    invoke("expand", root / "base", tmp_path / "expanded", "--plan", tmp_path / "plan.json")
    text = ("--data", f"el={root / 'el.jsonl'}")
    with pytest.raises(InputError, match=r"which the base can write itself \(`hf-moe-expand sample`"):
        invoke("train", "review", tmp_path / "expanded", tmp_path / "reviewed", *text)

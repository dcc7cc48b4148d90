"""A recipe that joins language packs."""

import json
import shutil

import pytest
import yaml
from conftest import load, refused, save_dense, write_texts
from test_join import EL, HU, WORDS, make_pack, same_files
from test_tuned import fine_tune

from hf_moe_expand import join_expansions, run_recipe, validate_recipe
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.report.page import make_page
from hf_moe_expand.runs.recipe import Recipe

TRAINING = {"max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "disable_tqdm": True}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    for code, words in WORDS.items():
        write_texts(home / f"{code}.jsonl", [words.format(number) for number in range(20)])
        write_texts(home / f"{code}.test.jsonl", [words.format(number) for number in range(100, 120)])
    save_dense(home / "base")
    for seed, (code, plan) in enumerate({"el": EL, "hu": HU}.items(), start=1):
        make_pack(home / f"qwen-{code}", home / "base", plan, seed)
    return home


def fields(home, tmp_path, **changes):
    texts = {code: str(home / f"{code}.jsonl") for code in WORDS}
    found = {
        "base": str(home / "base"), "output": str(tmp_path / "run"),
        "join": {"packs": [str(home / "qwen-el"), str(home / "qwen-hu")]},
        "old": {code: texts[code] for code in ("en", "de")}, "new": {code: texts[code] for code in ("el", "hu")},
        "test": {code: str(home / f"{code}.test.jsonl") for code in ("en", "el", "hu", "tr")},
        "gates": {"tokens": 200, "anchor_tokens": 100}, "evaluation": {"block_size": 32, "batch_size": 4}, **changes,
    }  # fmt: skip
    return {name: value for name, value in found.items() if value is not None}


def recipe(home, tmp_path, **changes):
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(fields(home, tmp_path, **changes)))
    return Recipe.load(file)


def steps(said):
    return [line.split("] ")[1].split(":")[0] for line in said if line.startswith("[") and not line.endswith("...")]


def test_it_joins_fits_the_gate_and_evaluates_and_resumes(home, tmp_path, quick_gates):
    loaded = recipe(home, tmp_path)
    found = validate_recipe(loaded)
    assert "join: qwen-el, qwen-hu; experts per layer 4 2 3" in found
    said = []
    assert run_recipe(loaded, said.append) == tmp_path / "run" / "gates"
    assert steps(said) == ["join", "gates", "evaluate"]
    again = []
    run_recipe(loaded, again.append)
    assert all("done already" in line for line in again if line.startswith("["))
    evaluation = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert list(evaluation["models"]) == ["base", "joined", "gated"]
    assert (evaluation["expansions"], evaluation["unnamed"]) == ([["el"], ["hu"]], ["tr"])
    config = json.loads((tmp_path / "run" / "gates" / "config.json").read_text())
    assert config["parts"]["gate"]["languages"][1:] == [["el"], ["hu"]]
    page = make_page(tmp_path / "run")
    assert "New: el, then hu." in page
    assert "Packs: qwen-el, qwen-hu." in page


def test_without_text_it_joins_and_trains_nothing(home, tmp_path):
    join = {"packs": [str(home / "qwen-el"), str(home / "qwen-hu")]}
    said = []
    loaded = recipe(home, tmp_path, old=None, new=None, gates=None, join=join)
    validate_recipe(loaded)
    assert run_recipe(loaded, said.append) == tmp_path / "run" / "joined"
    assert steps(said) == ["join", "evaluate"]
    join_expansions(join["packs"], tmp_path / "same")
    same_files(tmp_path / "run" / "joined", tmp_path / "same")
    evaluation = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert (evaluation["old"], evaluation["expansions"]) == (["en", "de"], [["el"], ["hu"]])
    assert "Packs: qwen-el, qwen-hu." in make_page(tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"plan": {"method": "moe-lpr", "experts": 2}}, "plan: a recipe with `join` makes and trains no new experts"),
        ({"post_pretrain": {**TRAINING}}, "post_pretrain: a recipe with `join` makes and trains no new"),
        ({"expansions": [{"new": {"tr": "tr.jsonl"}}]}, "expansions: a recipe with `join`"),
        ({"graft": {"instruct": "x"}}, "graft: a recipe with `join`"),
        ({"expand": {"expert_kind": "lora"}}, "expand: a recipe with `join`"),
        ({"join": {"packs": ["only-one"]}}, "join.packs"),
        ({"join": {"packs": ["a", "b"], "gates": False}}, "join: unknown key `gates`"),
        ({"review": {**TRAINING}}, "review: a recipe with `join` makes and trains no new"),
        ({"join": {"packs": ["a", "b"], "calibrate": True}}, "join: unknown key `calibrate`"),
    ],
)
def test_what_a_recipe_cannot_say(home, tmp_path, changes, message):
    refused(recipe, home, tmp_path, says=message, **changes)


def test_what_validation_refuses(home, tmp_path):
    def refused(message, **changes):
        with pytest.raises(InputError, match=message):
            validate_recipe(recipe(home, tmp_path, **changes))
        assert not (tmp_path / "run").exists()

    el = str(home / "qwen-el")
    refused("join.packs: .*no such folder", join={"packs": [el, str(tmp_path / "nothing")]})
    refused("join.packs: .*is a qwen2 checkpoint, which is no language pack", join={"packs": [el, str(home / "base")]})
    shutil.copytree(el, tmp_path / "copy")
    refused("join.packs: el: qwen-el and copy both add it", join={"packs": [el, str(tmp_path / "copy")]})
    wide = save_dense(tmp_path / "wide", intermediate_size=64)
    refused("qwen-el: is no expansion of `base`, .*wide: tensor .* differs", base=str(wide))
    texts = {code: str(home / f"{code}.jsonl") for code in WORDS}
    refused("new: tr: the packs do not have it as a new language", new={**{c: texts[c] for c in ("el", "hu", "tr")}})
    refused("output: .*lies in the input folder", output=el + "/run")


def test_fine_tunes_become_languages_fit_the_gate_and_are_evaluated(home, tmp_path, quick_gates):
    for seed, code in enumerate(("el", "hu")):
        tuned = fine_tune(load(home / "base"), seed)
        tuned.save_pretrained(tmp_path / f"tuned-{code}")
    models = {code: str(tmp_path / f"tuned-{code}") for code in ("el", "hu")}
    loaded = recipe(home, tmp_path, join=None, tuned=models, old={"en": str(home / "en.jsonl")})
    (line,) = [line for line in validate_recipe(loaded) if line.startswith("tuned")]
    assert line.endswith("parameters, if all of their tensors differ")
    said = []
    assert run_recipe(loaded, said.append) == tmp_path / "run" / "gates"
    assert steps(said) == ["tuned", "gates", "evaluate"]
    again = []
    run_recipe(loaded, again.append)
    assert all("done already" in line for line in again if line.startswith("["))
    for changes, why in (
        ({"plan": {"method": "exclusive"}}, "a recipe with `tuned` makes and trains no new experts"),
        ({"tuned": {"el": models["el"]}}, "`tuned` has no fine-tune for it"),
        ({"join": {"packs": ["a", "b"]}}, "a recipe with `join` takes no fine-tunes"),
    ):
        with pytest.raises(InputError, match=why):
            validate_recipe(recipe(home, tmp_path, **{"join": None, "tuned": models, **changes}))

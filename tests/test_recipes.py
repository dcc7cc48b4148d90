"""The packaged recipes: each is found good without a network, explained key by key, and has the papers' numbers."""

import re
import socket
from fnmatch import fnmatch
from pathlib import Path

import papers
import pytest
import yaml
from conftest import invoke, refused, save_dense, tiny_config, write_texts
from data_tables import TABLES
from encoder_decoders import tiny
from guides import DOCS, small

from hf_moe_expand.checkpoint.records import History
from hf_moe_expand.checkpoint.source import load_config
from hf_moe_expand.core.schema import changed
from hf_moe_expand.runs.pipeline import run_recipe, validate_recipe
from hf_moe_expand.runs.recipe import Recipe, keeps_null
from hf_moe_expand.runs.recipes import WholeRecipe, find_recipe, packaged_files, packaged_recipes
from hf_moe_expand.trainers.losses import LocalizedBalanceLoss

NAMES = list(packaged_files())
# Of the real bases: backbone, layers, positions.
BASES = TABLES["bases of recipes"]


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(self, address):
        raise AssertionError(f"a connection to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    for variable in ("MADLAD", "INSTRUCT", "NLLB"):
        monkeypatch.delenv(variable, raising=False)


def load(name):
    return Recipe.load(find_recipe(name), unset_ok=True)


@pytest.mark.parametrize("name", NAMES)
def test_each_passes_offline_and_its_plans_fit_its_base(name, tmp_path):
    recipe = load(name)
    assert recipe.output == f"runs/{name}"
    assert validate_recipe(recipe, offline=True)
    backbone, layers, positions = BASES[recipe.base]
    depth = {"n_layer" if backbone == "bloom" else "num_hidden_layers": layers}
    if positions is not None:
        depth["max_position_embeddings"] = positions
    if backbone == "m2m_100":
        tiny("m2m_100", encoder_layers=12, decoder_layers=12, max_position_embeddings=positions).config.save_pretrained(
            tmp_path / "base"
        )
    else:
        tiny_config(backbone, **depth).save_pretrained(tmp_path / "base")
    narrow = changed(recipe.expand, lora_rank=8) if recipe.expand.expert_kind == "lora" else recipe.expand
    found = validate_recipe(changed(recipe, base=str(tmp_path / "base"), expand=narrow), offline=True)
    assert f"base: {tmp_path / 'base'}, {backbone}, {layers} layers" in found
    assert sum(line.startswith("expansion ") and " experts, " in line for line in found) == len(recipe.all_expansions)


# What is no number of a paper: recipes (patterns), dotted keys of the first expansion, values.
OURS = TABLES["recipes"]


def found_at(recipe, key):
    """What a recipe has where the table names it."""
    first = recipe.all_expansions[0]
    if key.startswith("second."):
        first, key = recipe.all_expansions[1], key.removeprefix("second.")
    if key == "new":
        return " ".join(first.new)
    if key == "languages":
        return len(first.new)
    if key.startswith("sequences."):
        stage = getattr(first, key.partition(".")[2]).given
        return stage["per_device_train_batch_size"] * stage["gradient_accumulation_steps"] * 8
    value = first
    for part in key.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return len(value) if key == "plan.groups" and isinstance(value, list) else value


def of_recipes(words):
    """The packaged recipes of these patterns; none for a row of the page."""
    return [name for name in NAMES if any(fnmatch(name, pattern) for pattern in words.split())]


@pytest.mark.parametrize("name", NAMES)
def test_the_papers_numbers(name):
    wanted = {key: value for words, of in OURS.items() if name in of_recipes(words) for key, value in of.items()}
    for _, _, words, key, value in papers.facts():
        if name in of_recipes(words):
            wanted[key] = value["is"] if isinstance(value, dict) else value
    recipe = load(name)
    assert len(wanted) > 5
    assert {key: found_at(recipe, key) for key in wanted} == wanted
    assert ("graft" in recipe.model_fields_set) == name.startswith(("deltamoe", "mola"))
    if name.startswith(("layermoe", "moe-lpr")):
        assert list(recipe.old) == ["en", "es", "zh"]


def test_the_constraint_of_loramoe_has_the_papers_alpha():
    assert LocalizedBalanceLoss(0.1).delta == 0.1  # MoE-LPR, appendix B: blc-alpha


def test_the_128_languages_are_in_the_papers_groups(published):
    recipe = load("dmoe-bloom-560m-128-languages")
    assert recipe.plan.groups[9] == ["bn", "gu", "kn", "ml", "mr", "pa", "ta", "te"]
    assert sorted(code for group in recipe.plan.groups for code in group) == sorted(recipe.new)
    assert sorted(load("dmoe-bloom-560m").new) == sorted(published["dmoe_bloom_560m_grouping"]["languages"])


def test_names_and_files(tmp_path, monkeypatch):
    assert {recipe.name for recipe in packaged_recipes()} == set(NAMES)
    name = "moe-lpr-qwen1.5-1.8b"
    listed = next(line for line in invoke("recipes", "ls").splitlines() if line.startswith(name))
    assert listed.split("  ")[0] == name
    assert all(word in listed for word in ("MoE-LPR", "Qwen/Qwen1.5-1.8B", "Greek"))
    shown = invoke("recipes", "show", name)
    assert yaml.safe_load(shown)["plan"]["experts"] == 6
    assert "inherits" not in shown
    assert invoke("recipes", "ls").splitlines()[-1] == "to inherit: deltamoe, dmoe, layermoe, moe-lpr"
    assert f"{name}: ok" in invoke("validate", "--offline", name)
    # A file of the same name wins.
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(yaml.safe_dump({**yaml.safe_load(shown), "base": "org/other"}))
    assert "org/other is not on this machine" in invoke("validate", "--offline", name)
    for verb in (["validate"], ["run"], ["recipes", "show"]):
        refused(invoke, *verb, "moe-lpr-qwen.yaml", says=r"yaml: no such file, .*; did you mean `moe-lpr-qwen1.5-1.8b`")
    refused(find_recipe, "zzz", says=r"zzz: no such file, .* `hf-moe-expand recipes ls` shows them")


@pytest.mark.parametrize("name", ["moe-qwen1.5-1.8b", "loramoe-qwen1.5-1.8b", "mola-qwen2.5-7b"])
def test_a_baseline_runs_on_a_tiny_base(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = WholeRecipe.load(packaged_files()[name], keeps_null).mapping
    save_dense(tmp_path / "base", num_hidden_layers=4)
    for key in ("old", "new"):
        for code in whole[key]:
            write_texts(tmp_path / f"{code}.jsonl", [f"{code} {number} text. " * 9 for number in range(20)])
            whole[key][code] = f"{code}.jsonl"
    whole = {key: value for key, value in whole.items() if key not in ("test", "evaluation")} | {"base": "base"}
    stage = small(whole["post_pretrain"])
    whole["post_pretrain"] = {key: value for key, value in stage.items() if key != "tokens_per_language"}
    if "replay_share" in stage:
        whole["post_pretrain"]["replay_share"] = 0.2
    if "expand" in whole and "lora_rank" in whole["expand"]:
        whole["expand"]["lora_rank"] = 4
    if "graft" in whole:
        whole["graft"]["instruct"] = str(save_dense(tmp_path / "chat", num_hidden_layers=4))
    Path("recipe.yaml").write_text(yaml.safe_dump(whole), "utf-8")
    final = run_recipe(Recipe.load("recipe.yaml"), lambda line: None)
    assert final.name == ("graft" if "graft" in whole else "post_pretrain")
    record = History.of(load_config(final)).last.stages[0]
    given = whole["post_pretrain"]
    assert record.settings["learning_rate"] == given["learning_rate"]
    assert record.settings["masking"].get("lora_dropout") == given.get("masking", {}).get("lora_dropout")


@pytest.mark.skipif(not papers.TEXTS.is_dir(), reason=f"the papers are not at {papers.TEXTS}")
def test_the_papers_have_these_numbers():
    for paper, section, _, key, value in papers.facts():
        printed = value["of"] if isinstance(value, dict) else [value]
        text = papers.section_text(paper, section)
        for number in printed:
            if number is not None and not isinstance(number, bool):
                assert papers.has(text, number), (paper, section, key, number)


@pytest.mark.skipif(not papers.TEXTS.is_dir(), reason=f"the papers are not at {papers.TEXTS}")
def test_the_page_of_choice_quotes_table_1_of_moe_lpr():
    (row,) = [line for line in (DOCS / "choose.md").read_text("utf-8").splitlines() if line.startswith("| billions |")]
    expanded, original = papers.section_text("MoE-LPR", "Experiment Results").split("Original Languages", 1)
    for part, base, ours in ((expanded, "34.36", "45.07"), (original, "53.97", "52.12")):
        rows = {
            line.split("\t")[0]: re.sub(r"</?[bu]>", "", line).split("\t")[-1] for line in part.splitlines() if line
        }
        assert (rows["Qwen1.5-1.8B"], rows["MoE-LPR"]) == (base, ours)
        assert f"from {base} to {ours}" in row

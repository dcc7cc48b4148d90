"""What is wrong is refused in one sentence that names it: settings, options, names, files, values and text. Each
kind stands here once; wrong_settings.yaml has the cases of settings, test_wrong_arguments.py those of arguments."""

import json
import math
import shlex
import shutil
import struct
from pathlib import Path

import pytest
import torch
import yaml
from conftest import TABLES, byte_tokenizer, invoke, refused, save_dense, write_texts
from safetensors.torch import load_file, save_file

import hf_moe_expand
from hf_moe_expand import LanguageText, Plan, PostPretrainConfig, Recipe, expand_checkpoint
from hf_moe_expand.baselines.depth import expand_depth
from hf_moe_expand.checkpoint.arguments import check_file
from hf_moe_expand.checkpoint.expand import check_plan_of_gate, grow_checkpoint
from hf_moe_expand.checkpoint.reader import CheckpointReader
from hf_moe_expand.checkpoint.source import load_config
from hf_moe_expand.core.jsonfile import write_json
from hf_moe_expand.data.held_out import check_held_out
from hf_moe_expand.inference.models import load_for_inference
from hf_moe_expand.planning.methods import read_plan_settings
from hf_moe_expand.report.inspection import inspect_checkpoint
from hf_moe_expand.runs.pipeline import validate_recipe
from hf_moe_expand.runs.run_record import read_steps
from hf_moe_expand.stages.run import train_stage

PLAN = Plan("moe-lpr", [2, 1, 2], old=["en"], new=["el"])
GROWTH = Plan("moe-lpr", [3, 1, 3], old=["en", "el"], new=["tr"], grows_from=[2, 1, 2])


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("wrong")
    save_dense(root / "base")
    for code, text in {"en": "a text", "el": "ένα κείμενο", "tr": "bir metin"}.items():
        write_texts(root / f"{code}.jsonl", [text] * 20)
    (root / "curriculum.json").write_text('{"steps": 9, "entry": {"el": 0, "hi": 4}}')
    expand_checkpoint(root / "base", root / "expanded", PLAN)
    expand_checkpoint(root / "base", root / "dmoe", Plan("dmoe", [2, 1, 2], groups=[["en"], ["el"]]))
    PLAN.save(root / "plan.json")
    GROWTH.save(root / "grown.json")
    return root


SETTINGS = yaml.safe_load((Path(__file__).parent / "wrong_settings.yaml").read_text("utf-8"))
GOOD = """{base: ROOT/base, output: ROOT/run, old: {en: ROOT/en.jsonl}, new: {el: ROOT/el.jsonl},
analysis: {tokens: 30}, plan: {total_experts: 7, classifier_layers: 1},
post_pretrain: {block_size: 32, max_steps: 2}, review: {block_size: 32, max_steps: 2}}"""
DMOE = """{base: ROOT/base, output: ROOT/run, new: {el: ROOT/el.jsonl, tr: ROOT/tr.jsonl, en: ROOT/en.jsonl},
deviation: {steps: 1, batch_size: 1, block_size: 16}, plan: {method: dmoe, groups: 2, ratio: 0.5},
group: {block_size: 32, max_steps: 2}, joint: {block_size: 32, max_steps: 2}}"""


def merged(one, other):
    """`other`'s keys in `one`; null takes a key out, and `"null"` is null."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return None if other == "null" else other
    both = {key: merged(one.get(key), other[key]) if key in other else one[key] for key in {**one, **other}}
    return {key: value for key, value in both.items() if other.get(key, 0) is not None}


def try_settings(case, root, number):
    """Does what the case asks for, in the folder `root`."""
    case = yaml.safe_load(yaml.safe_dump(case).replace("ROOT", str(root)))
    if "recipe" in case:
        good = yaml.safe_load((DMOE if case.get("dmoe") else GOOD).replace("ROOT", str(root)))
        path, offline = root / f"{number}.yaml", bool(case.get("offline"))
        path.write_text(yaml.safe_dump(merged(good, case["recipe"])), "utf-8")
        validate_recipe(Recipe.load(path, unset_ok=offline), offline)
    elif "stage" in case:
        config = getattr(hf_moe_expand, case["stage"])(**case["keywords"])
        texts = {code: LanguageText(code, str(root / f"{code}.jsonl")) for code in case.get("texts", ["el"])}
        train_stage(root / case.get("model", "expanded"), root / f"out{number}", texts, config)
    else:
        read_plan_settings(case["plan"])


@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_the_line_says_which_setting_is_wrong_and_where(root, number):
    line = refused(try_settings, SETTINGS[number], root, number)
    line = line.replace(str(root), "ROOT").replace(f"{number}.yaml", "recipe.yaml")
    # A line that lists what the library knows is kept as far as the list.
    wanted = SETTINGS[number]["line"]
    assert line.startswith(wanted[:-3]) if wanted.endswith("...") else line == wanted


def test_the_good_recipes_are_good(root):
    for number, text in enumerate((GOOD, DMOE)):
        (root / f"good{number}.yaml").write_text(text.replace("ROOT", str(root)), "utf-8")
        assert validate_recipe(Recipe.load(root / f"good{number}.yaml"))


@pytest.mark.parametrize(("words", "says"), TABLES["commands"].items())
def test_commands_without_effect_and_names_without_a_last_part(root, monkeypatch, words, says):
    monkeypatch.chdir(root)
    before = sorted(root.rglob("*"))
    refused(invoke, *shlex.split(words), says=says)
    assert sorted(root.rglob("*")) == before


def test_a_file_that_cannot_be_written_is_refused_before_the_work(tmp_path):
    (tmp_path / "there.json").write_text("{}")
    (tmp_path / "folder").mkdir()
    for name, says in (
        ("there.json", "exists already; choose another file or pass --overwrite"),
        ("folder", "is a folder; give the name of a file in it"),
        ("there.json/out.json", "cannot be written there: .*Not a directory"),
        ("n" * 300, "File name too long"),
    ):
        refused(check_file, tmp_path / name, overwrite=False, says=says)
    check_file(tmp_path / "there.json", overwrite=True)
    check_file(tmp_path / "new" / "out.json", overwrite=False)
    assert not (tmp_path / "new").exists()


def test_a_header_that_lies_is_refused(tmp_path):
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    for header, says in (
        ({"a": entry | {"data_offsets": [-8, 0]}}, "-8"),
        ({"a": entry, "b": entry | {"data_offsets": [4, 12]}}, "invalid offset"),
        ({"a": entry | {"dtype": "F33\n"}}, "F33"),
        ([], "not a whole safetensors file"),
        (None, "model.safetensors: "),
    ):
        encoded = json.dumps(header).encode()
        content = b"" if header is None else struct.pack("<Q", len(encoded)) + encoded + bytes(8)
        (tmp_path / "model.safetensors").write_bytes(content)
        refused(CheckpointReader, tmp_path, says=says)


def test_an_index_that_lies_is_refused(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for file in (tmp_path / "x.safetensors", folder / "model-1.safetensors", folder / "model-2.safetensors"):
        save_file({"a": torch.ones(2)}, file)
    (folder / "link.safetensors").symlink_to(tmp_path / "x.safetensors")
    for where, says in TABLES["indices that lie"]:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
        refused(CheckpointReader, folder, says=says)


def test_a_config_json_that_is_no_json(tmp_path):
    for text, says in (
        ("", "Expecting value"), ("[]", "found a list"), ('{"a": 1, "a": 3}', "duplicate key 'a'"),
        ('{"a": [-Infinity]}', "-Infinity is not a JSON number"), ('{"a": ' + "[" * 100_000, "recursion depth"),
        ('{"a": ' + "9" * 5000 + "}", "4300 digits"), (r'{"a": "\ud800"}', "surrogate"),
        ("\xff", "codec can't decode byte"),
    ):  # fmt: skip
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
        refused(load_config, tmp_path, says=says)


def copied(source: Path, target: Path, change=lambda tensors: None, **fields) -> Path:
    """A copy of a checkpoint with other tensors or fields of config.json."""
    shutil.copytree(source, target)
    weights = load_file(source / "model.safetensors")
    change(weights)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **fields}))
    return target


# These show when the model runs.
RUNNING = [{"num_attention_heads": 5}, {"rope_parameters": {"rope_type": "spiral"}}]


@pytest.mark.parametrize("fields", TABLES["fields of configurations"], ids=lambda fields: str(fields)[1:60])
def test_a_configuration_with_a_wrong_value(root, tmp_path, fields):
    folder = copied(root / "expanded", tmp_path / "x", **fields)
    for door in (load_for_inference, *([] if fields in RUNNING else [inspect_checkpoint])):
        refused(door, folder, says=f"^{folder}: ")


NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda weights: weights.pop(NAME), f"missing from the checkpoint: {NAME}"),
        (lambda weights: weights.update({NAME: weights[NAME][:3].clone()}), r"has shape \[3, 32\]"),
        (lambda weights: weights.update({NAME: weights[NAME].to(torch.int8)}), "stored as I8"),
        (lambda weights: weights[NAME].view(-1).__setitem__(7, math.nan), f"'{NAME}' holds NaN or infinite values"),
    ],
    ids=["missing", "of another shape", "quantised", "NaN"],
)
def test_a_checkpoint_with_wrong_tensors_is_refused_at_every_door(root, tmp_path, change, says):
    base, expanded = (copied(root / name, tmp_path / name, change) for name in ("base", "expanded"))
    out, text = tmp_path / "out", {"el": LanguageText("el", str(root / "el.jsonl"))}
    for door, *given in (
        (load_for_inference, base), (load_for_inference, expanded), (expand_checkpoint, base, out, PLAN),
        (expand_depth, base, out, 1), (grow_checkpoint, expanded, out, GROWTH),
        (invoke, "export", expanded, out, "--expert", "0"),
        (train_stage, expanded, out, text, PostPretrainConfig(block_size=16, max_steps=1)),
    ):  # fmt: skip
        refused(door, *given, says=says)
    if "NaN" in says:
        refused(invoke, "push", expanded, "me/x", "--dry-run", "--base", "me/base", says=says)
    assert {path.name for path in tmp_path.iterdir()} == {"base", "expanded"}


def test_numbers_that_are_not_finite_are_not_written(tmp_path):
    refused(write_json, tmp_path / "x.json", {"a": [math.nan]}, says=r"x\.json: Out of range float values")
    assert not list(tmp_path.iterdir())


LONG = [f"text number {number} of a language, which has some words" for number in range(200)]
HELD_OUT = [f"held-out text {number} of a language, which has other words" for number in range(200)]
RECIPE = """
base: {home}/base
output: {home}/run
old: {{en: {home}/en.jsonl}}
new: {{el: {home}/el.jsonl}}
test: {{el: {home}/test.jsonl}}
plan: {{method: moe-lpr, experts: 2, exclusive: true}}
post_pretrain: {{block_size: 64, max_steps: 2}}
"""
DMOE_RECIPE = """{{base: {home}/base, output: {home}/run, new: {{el: {home}/el.jsonl, hu: {home}/short.jsonl}},
plan: {{method: dmoe, groups: [[el], [hu]], ratio: 0.5}}, group: {{block_size: 64}}, joint: {{block_size: 64}},
deviation: {{steps: 1, batch_size: 1, block_size: 4}}}}"""


@pytest.fixture
def home(root, tmp_path):
    (tmp_path / "base").symlink_to(root / "base")
    for name, texts in (("en", LONG[:100]), ("el", LONG[100:]), ("test", HELD_OUT), ("short", ["short text"])):
        write_texts(tmp_path / f"{name}.jsonl", texts)
    return tmp_path


def check(home, text=RECIPE, **options):
    return validate_recipe(Recipe.of_text(text.format(home=home), "recipe.yaml"), **options)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (RECIPE.replace("el.jsonl}}\nt", "short.jsonl}}\nt"), "post_pretrain: All text of el together is .* one block"),
        (RECIPE.replace("max_steps: 2", "tokens_per_language: 100000"), "post_pretrain: Language 'el' .* but 100,000"),
        (RECIPE.replace("en.json", "short.json").replace("true}}", "false}}\nreview: {{block_size: 64}}"), "review: "),
        (RECIPE + "gates: {{}}\nanchors: {{de: {home}/short.jsonl, fr: {home}/en.jsonl, it: {home}/en.jsonl}}",
         "gates: de has .* tokens of text, but .* at least 100"),
        (DMOE_RECIPE, "group: All text of hu together is .* less than one block"),
    ],
)  # fmt: skip
def test_too_little_text(home, text, says):
    refused(check, home, text, says=says)
    assert check(home, text, offline=True)


def rows_and_white_space(home):
    rows = [{"id": n, "text": f"  {text.replace(' ', chr(10))} "} for n, text in enumerate(LONG[100:])]
    (home / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))


def in_its_folder(home):
    (home / "folder").mkdir()
    shutil.move(home / "el.jsonl", home / "folder")
    (home / "el.jsonl").symlink_to(home / "folder")
    shutil.copy(home / "test.jsonl", home / "folder")


TRAINED_ON = {
    "some documents": lambda home: write_texts(home / "test.jsonl", [*HELD_OUT[:40], LONG[150]]),
    "a folder": in_its_folder,
    "other rows and white space": rows_and_white_space,
}


@pytest.mark.parametrize("make", TRAINED_ON.values(), ids=TRAINED_ON)
def test_held_out_text_that_is_training_text(home, make):
    make(home)
    refused(check, home, says=r"test\.el: .*test\.jsonl: .*training text, too \(new\..*el\.jsonl\): .*hold some")
    scored = "max_steps: 2, validation: {{texts: {{el: {home}/test.jsonl}}}}"
    text = RECIPE.replace("test: ", "# test: ").replace("max_steps: 2", scored)
    refused(check, home, text, says=r"^post_pretrain\.validation\.texts\.el: .*training text, too")


def test_a_document_or_two_are_a_warning(home):
    write_texts(home / "test.jsonl", [*HELD_OUT, LONG[150]])
    (line,) = [line for line in check(home) if "are training text" in line]
    assert "test.jsonl: 1 of its 201 documents are training text, too (new.el: " in line


def test_sentence_pairs_of_an_encoder_decoder(tmp_path):
    def pairs(name, rows):
        lines = [json.dumps({"translation": {"en": en, "el": el}}) for en, el in rows]
        (tmp_path / name).write_text("\n".join(lines))
        return {name: LanguageText("el", str(tmp_path / name))}

    training = pairs("train.jsonl", [(f"word {n}", f"mot {n}") for n in range(9)])
    other = pairs("test.jsonl", [(f"word {n}", f"autre {n}") for n in range(9)])  # the same sentence, translated anew
    assert check_held_out(other, training, as_pairs=True) == []
    one_of_them = pairs("test.jsonl", [("word 3", "mot 3"), *((f"x {n}", f"y {n}") for n in range(3))])
    refused(check_held_out, one_of_them, training, as_pairs=True, says=r"test\.jsonl: 2 of its 8 documents")


def test_plans_and_tokenizers_that_apply_to_nothing(root, tmp_path):
    placed = Plan("moe-lpr", [1, 2, 2], [2], old=["en"], new=["el"])
    refused(check_plan_of_gate, placed, says="has classifiers in layers 2, which a gate takes the place of")
    dmoe = Plan("dmoe", [1, 2, 2], groups=[["en"], ["el"]])
    refused(check_plan_of_gate, dmoe, says="has groups of a DMoE, which a gate")
    given = (root / "expanded", tmp_path / "out")
    refused(grow_checkpoint, *given, GROWTH, copy_from={99: 1}, says="copy_from names layer 99, but .* layers 0 to 2")
    gate = {"processing_class": byte_tokenizer(), "says": "processing_class: a checkpoint has its own tokenizer"}
    refused(hf_moe_expand.fit_gates, *given, {"el": ["a"]}, **gate)
    groups = {"groups": [["el"], ["tr"]], "new": ["el", "hu"]}
    refused(Plan, "dmoe", [2, 1, 2], **groups, says="new: hu stands in no group, so that no expert learns it")


def test_the_record_of_a_run_is_checked(tmp_path):
    file = tmp_path / "steps.json"
    assert read_steps(file) == ({}, None)
    for step in (3, None, {"summary": "x"}, {"seconds": 1.0, "summary": "x", "made_from": 3}):
        for key in ("plan", "begun"):
            file.write_text(json.dumps({key: step}))
            refused(read_steps, file, says=rf"steps\.json: {key}")


def test_a_dense_checkpoint_with_fields_of_expanded_ones_and_an_expanded_one_without_a_history(root, tmp_path):
    base = copied(root / "base", tmp_path / "base", classifier_layers=[1])
    said = "its configuration says that it has fields of expanded models"
    refused(expand_checkpoint, base, tmp_path / "out", PLAN, says=said)
    folder = copied(root / "expanded", tmp_path / "x", expansions=[])
    refused(grow_checkpoint, folder, tmp_path / "out", GROWTH, says=r"x: config\.json records no expansion")

"""Broken checkpoints and input files by the thousand: every verb must succeed, or refuse in one sentence, in time.

    python benchmarks/fuzz.py --cases 3000 --seed 0

A case damages a tiny checkpoint, or spoils one file (a recipe, a stage's settings, a plan, a result, the record of a
run, text), and runs a verb that reads it, in this process. Nothing trains: what would train stops where its settings
and data are checked. The exit status is 1 where a case ended in any other error than `InputError`, left a file where it
refused, or took longer than `--limit` seconds. A case depends on its number and the seed alone: `--only NUMBER` runs it
again and shows the traceback.
"""

import argparse
import copy
import json
import os
import random
import shutil
import signal
import struct
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # "x" is a model's name, too

import datasets
import pyarrow
import pyarrow.parquet
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging
from typer.testing import CliRunner

from hf_moe_expand import LanguageText, Plan, PostPretrainConfig, ReviewConfig, expand_checkpoint, train_stage
from hf_moe_expand.cli import app
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.evaluation.perplexity import LanguageScore
from hf_moe_expand.evaluation.report import Evaluation
from hf_moe_expand.evaluation.validation import ValidationCurves
from hf_moe_expand.planning.results import DeviationResult, RoutingResult, SimilarityResult
from hf_moe_expand.runs import pipeline
from hf_moe_expand.stages import run as stage_run

# The checkpoints that a case starts from, and the verbs that read the damaged one, {x}.
STARTS = ("base", "expanded", "sharded", "run/review")
CHECKPOINT_READERS = {
    "inspect {x}": STARTS[1:],
    "evaluate {x} --data el={made}/el.jsonl --out {out} --new el": STARTS,
    "expand {x} {out} --plan {made}/plan.json": ("base", *STARTS),
    "grow {x} {out} --plan {made}/grow.json": STARTS[1:],
    "merge average {whole} {x} --out {out}": STARTS,
    "diff {whole} {x}": STARTS,
}
# What replaces a field of a JSON file, and a value or key of a YAML file.
POOL = (
    None, True, False, -1, 0, 1, 2, 3, 7, 2.5, -0.0, 1e300, 10**9, 2**63, 10**30, "", "x", "../x", "/etc/passwd", "nan",
    "float8_e4m3fn", "qwen2", [], {}, [1], [None], ["x"], [[]], {"x": 1}, [2, 1], [2.0, 1.0], {"0": 0}, [[1, 2]], "é\n",
)  # fmt: skip
SNIPPETS = (
    "", "~", "true", "no", "-1", "0", "1", "1.5", "1e999", "1e5", ".nan", "-.inf", "010", "0o17", "1_000", "9" * 5000,
    "-9999999999999999999", "2026-01-31", "2026-01-31T10:00:00Z", "1:30", "x", "é", '"\\ud800"', '"\\0"', "''", "../x",
    "/etc/passwd", "$HOME", "$NOT_SET", "hub:x", "hub:", "hub:x:y:z[:3]", "~x/y", "[]", "{}", "[1]", "[null]", "[[]]",
    "{a: 1}", "{1: 2}", "{null: 1}", "{[1]: 2}", "{? {a: 1} : 2}", "*a", "&a [*a]", "!!python/object:os.system x",
    "!!binary aGk=", "!!set {a, b}", "!!int x", "!!timestamp x", "!!omap [a: 1]", "!x y", "|\n  text", "- 1", "a: b: c",
    "\t", "@", "%", "`x`", "[", "{", "'", '"', "# x", "en", "{en: x, el: y}", "[el, en]", "layer-moe", "dmoe", "random",
    "cosine", "float16", "{method: dmoe}", "{method: layer-moe, total_experts: 9999999999999999999999}", "{<<: 1}",
)  # fmt: skip
KEYS = (
    "<<", "training", "block_size", "seed", "settings", "? x", "1", "null", "'é'", "[a]", "learning_rate", "plan",
    "max_steps", "fsdp", "deepspeed", "output_dir", "push_to_hub", "report_to", "validation", "curriculum", "bf16",
    "expansions", "optim", "accelerator_config", "graft", "save_strategy", "torch_compile", "dataloader_num_workers",
    "revision", "lr_scheduler_kwargs", "optim_args", "gradient_checkpointing", "ddp_backend", "use_cpu",
)  # fmt: skip
RECIPE = """\
base: {made}/base
output: out
old: {{en: {made}/el.jsonl}}
new:
  el: {made}/el.jsonl
test: {{el: {made}/held.jsonl}}
seed: 3
analysis: {{tokens: 8, block_size: 8}}
plan:
  method: layer-moe
  total_experts: 4
  classifier_layers: 1
  top_k: 2
expand:
  expert_init: copy
  max_shard_size: 5GB
post_pretrain:
  block_size: 8
  balance_coef: 0.01
  max_steps: 2
  learning_rate: 5e-5
review: {{block_size: 8, old_documents: 1, new_per_old: 1, max_steps: 2}}
evaluation:
  block_size: 8
"""
STAGE = """\
block_size: 8
old_documents: 1
language_prior_coef: 0.1
validation:
  texts: {{el: {made}/el.jsonl}}
  every: 1
max_steps: 2
learning_rate: 5e-5
per_device_train_batch_size: 1
"""
_TEXTS = "--data en={made}/el.jsonl --data el={made}/el.jsonl"
# JSON files, by the name of the file in the folder of a case, and the verbs that read each.
READERS: dict[str, tuple[str, ...]] = {
    "plan.json": ("expand {made}/base {out} --plan {file}", "inspect {made}/base --plan {file}"),
    "grow.json": ("grow {made}/expanded {out} --plan {file}",),
    "analysis.json": (
        "plan layer-moe --analysis {file} --total-experts 4 --classifier-layers 1 --out {out}",
        "plan random --analysis {file} --total-experts 4 --layers 2 --new el --out {out}",
    ),
    "deviation.json": ("plan dmoe --deviation {file} --groups 2 --layers-to-expand 1 --out {out}",),
    "evaluation.json": ("report {run} --out {out}", "card {run}/review --evaluation {file} --out {out}"),
    "routing.json": ("report {run} --out {out}",),
    "steps.json": ("report {run} --out {out}", "run {run}/recipe.yaml"),
    "validation.json": ("curriculum derive {file} --out {out}", "report {run} --out {out}"),
    "curriculum.json": ("train review {made}/expanded {out} --config {case}/stage.yaml " + _TEXTS,),
    "trainer_state.json": ("report {run} --out {out}",),
    "started_with.json": ("train review {made}/expanded {out} " + _TEXTS,),
}  # fmt: skip
RECIPE_READERS = ("validate {file}", "validate --offline {file}", "validate {file}", "recipes show {file}")
STAGE_READERS = (
    "train review {made}/expanded {out} --config {file} " + _TEXTS,
    "train post-pretrain {made}/expanded {out} --config {file} " + _TEXTS,
    "train dense {made}/base {out} --config {file} " + _TEXTS,
)
TEXT_READERS = (
    "evaluate {made}/base --data el={file} --new el --out {out} --block-size 8 --max-tokens 64",
    "analyze similarity {made}/base --old en={made}/el.jsonl --new el={file} --out {out} --tokens 4 --block-size 4",
    "curriculum counts --data el={file} --steps 10 --thresholds 2 --shares 1,0.5 --out {out}",
    "train review {made}/expanded {out} --data en={made}/el.jsonl --data el={file}",
)


class Stop(SystemExit):
    """The settings and the data were accepted: from here on it would train."""


class Hang(BaseException):
    """A case took too long; not an Exception, so that no code under test catches it."""


# Making what the cases start from


def make(folder: Path) -> None:
    """Makes a dense checkpoint, an expanded one, one in shards, plans and text."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model(
        "qwen2", vocab_size=257, num_key_value_heads=1, max_position_embeddings=32, bos_token_id=None, eos_token_id=256,
        pad_token_id=256, **sizes,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    vocabulary = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary | {"<end>": 256}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder / "base")
    plan = Plan("layer-moe", [2, 2], [0], old=["en"], new=["el"])
    expand_checkpoint(folder / "base", folder / "expanded", plan)
    expand_checkpoint(folder / "base", folder / "sharded", plan, max_shard_size="20KB")
    plan.save(folder / "plan.json")
    Plan("layer-moe", [3, 3], [0], old=["en", "el"], new=["hu"], grows_from=[2, 2]).save(folder / "grow.json")
    (folder / "el.jsonl").write_text('{"text": "a tiny text"}\n')
    (folder / "held.jsonl").write_text('{"text": "another tiny text"}\n')


def make_all(folder: Path) -> None:
    """The checkpoints and texts of `make`, and a run folder with every kind of result."""
    make(folder)
    run = folder / "run"
    run.mkdir()
    shutil.copytree(folder / "expanded", run / "expanded")
    texts = {code: LanguageText(code, str(folder / "el.jsonl")) for code in ("en", "el")}
    training = {"block_size": 8, "max_steps": 1, "report_to": [], "disable_tqdm": True, "logging_steps": 1}
    train_stage(run / "expanded", run / "post_pretrain", {"el": texts["el"]}, PostPretrainConfig(**training))
    review = ReviewConfig(old_documents=1, new_per_old=1, **training)
    train_stage(run / "post_pretrain", run / "review", texts, review)
    (run / "recipe.yaml").write_text(RECIPE.format(made=folder))
    shutil.copy(folder / "plan.json", run)
    SimilarityResult.from_pairs({"el-en": [0.5, 0.25]}, ["en"], ["el"], 8).to_json(run / "analysis.json")
    DeviationResult(
        ["el", "hu"], [0.1, 0.2], {"el": [0.1, 0.2], "hu": [0.1, 0.2]}, [[1.0, 0.5], [0.5, 1.0]], [1], 1, 1e-5, 1, 8, 0
    ).to_json(folder / "deviation.json")
    scores = {code: LanguageScore(8.0, 3.0, 10, 10) for code in ("en", "el")}
    Evaluation(["en"], ["el"], {"base": scores, "reviewed": scores}).to_json(run / "evaluation.json")
    shares = {code: [[0.5, 0.5], [0.5, 0.5]] for code in ("en", "el")}
    by_layer: dict[str, list[Any]] = {code: [0.5, 0.5] for code in ("en", "el")}
    RoutingResult(
        {"en": 0, "el": 1}, 8, [0, 1], shares, shares, by_layer, {code: [1, 1] for code in by_layer}, by_layer,
        [[[1.0, 0.5], [0.5, 1.0]]] * 2, [0.5], {"en": 8.0, "el": 8.0}, {"en": 9.0, "el": 9.0}, [0],
    ).to_json(run / "routing.json")  # fmt: skip
    curves = ValidationCurves(["el"], 4)
    for step in range(5):
        curves.add(step, {"el": scores["el"]})
    curves.save(run / "post_pretrain" / "validation.json")
    step = {"seconds": 1.0, "summary": "1 steps; 3 frozen tensors are byte-identical", "facts": {"frozen": 3}}
    names = ("analyze", "plan", "expand", "post_pretrain", "review", "evaluate")
    steps = {name: {**step, "made_from": {"recipe": "0" * 64}} for name in names}
    (run / "steps.json").write_text(json.dumps(steps))
    (folder / "curriculum.json").write_text(json.dumps({"steps": 2, "entry": {"en": 0, "el": 1}}))


# Spoiling files. Each function returns what it did.


def spoil_bytes(rng: random.Random, file: Path) -> str:
    """The bytes of any file."""
    content = file.read_bytes()
    at = rng.randrange(len(content) + 1)
    begin, end = content[:at], content[at:]
    spoilt = {
        "truncated": lambda: begin, "empty": lambda: b"", "blank": lambda: b" \n\n",
        "binary": lambda: rng.randbytes(200), "BOM": lambda: b"\xef\xbb\xbf" + content,
        "UTF-16": lambda: content.decode("utf-8", "replace").encode("utf-16"),
        "CRLF": lambda: content.replace(b"\n", b"\r\n"), "CR": lambda: content.replace(b"\n", b"\r"),
        "NUL": lambda: begin + b"\0" + end, "surrogate": lambda: begin + b"\xed\xa0\x80" + end,
        "Latin-1": lambda: begin + b"\xe9" + end, "control": lambda: begin + b"\x1b\x07" + end,
        "flipped": lambda: begin + rng.randbytes(3) + end, "twice": lambda: content + content,
        "line separators": lambda: content.replace(b"\n", "\u2028\x85".encode()), "unreadable": lambda: content,
    }  # fmt: skip
    what = rng.choice((*spoilt, "gone", "folder", "loop of links"))
    file.unlink()
    if what == "folder":
        file.mkdir()
    elif what == "loop of links":
        file.symlink_to(file)
    elif what != "gone":
        file.write_bytes(spoilt[what]())
    if what == "unreadable":
        file.chmod(0)
    return what


def change(rng: random.Random, value: Any) -> str:
    """Replaces, drops or adds one value, at any depth of `value`."""
    places = list(_places(value))
    if not places:  # an earlier change has taken all that there was
        return "nothing"
    holder, key = rng.choice(places)
    if rng.random() < 0.15:
        del holder[key]
        return f"no {key}"
    holder[key] = copy.deepcopy(rng.choice(POOL))
    return f"{key} = {holder[key]!r}"


def _places(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys[:200] if isinstance(keys, list) else keys:
        yield value, key
        if depth < 6:
            yield from _places(value[key], depth + 1)


def spoil_json(rng: random.Random, file: Path) -> str:
    """Values of a JSON file, or its text."""
    what = rng.choice((*["value"] * 6, "constant", "deep", "twice", "list", "many"))
    if what in ("value", "many"):
        value = json.loads(file.read_text())
        if what == "many":
            value |= {f"key {number}": number for number in range(20_000)}
        done = [change(rng, value) for _ in range(rng.choice((1, 1, 1, 2, 4)))] if what == "value" else [what]
        file.write_text(json.dumps(value))
        return "; ".join(done)
    content = file.read_text()
    if what == "list":
        content = f"[{content}]"
    elif what == "twice":
        content = content.replace("{", '{"old": ["en"], "old": [],', 1)
    elif what == "deep":
        content = content.replace("{", '{"new": ' + "[" * 50_000 + ",", 1)
    else:
        numbers = [number for number, letter in enumerate(content) if letter.isdecimal()]
        if numbers:
            at = rng.choice(numbers)
            put = rng.choice(("NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, "-1", "1e300", "0.5"))
            content, what = content[:at] + put + content[at + 1 :], put[:12]
    file.write_text(content)
    return what


def spoil_yaml(rng: random.Random, file: Path) -> str:
    """Lines of a YAML file of one key a line."""
    lines = file.read_text().splitlines()
    done = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = rng.randrange(len(lines))
        what = rng.choice(("value", "value", "value", "value", "key", "new key", "new key", "twice", "none", "indent"))
        key, _, value = lines[at].partition(":")
        if what == "value":
            lines[at] = f"{key}: {rng.choice(SNIPPETS)}"
        elif what == "key":
            lines[at] = f"{key[: len(key) - len(key.lstrip())]}{rng.choice(KEYS)}:{value}"
        elif what == "new key":
            lines.insert(at, f"{key[: len(key) - len(key.lstrip())]}{rng.choice(KEYS)}: {rng.choice(SNIPPETS)}")
        elif what == "twice":
            lines.insert(at, lines[at])
        elif what == "none" and len(lines) > 1:
            del lines[at]
        elif what == "indent":
            lines[at] = rng.choice(("  ", "\t", " ")) + lines[at]
        done.append(f"{what} {lines[min(at, len(lines) - 1)].strip()[:40]!r}")
    content = "\n".join(lines) + "\n"
    if rng.random() < 0.08:
        levels = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)]
        what, content = rng.choice((
            ("alias bomb", "a0: &a0 [x]\n" + "".join(levels) + content), ("two documents", f"---\n{content}" * 2),
            ("20,000 keys", content + "".join(f"key{n}: {n}\n" for n in range(20_000))),
            ("deep", content + "deep: " + rng.choice("[{") * rng.choice((90, 200, 20_000)) + "\n"),
            ("no mapping", rng.choice(("x", "- a\n- b", "3", "null", "# x", "%YAML 3.0\n---\na: 1", "---"))),
        ))  # fmt: skip
        done = [what]
    file.write_text(content)
    return "; ".join(done)


def spoil_text(rng: random.Random, folder: Path) -> tuple[Path, str]:
    """A file of text, of any kind; returns it."""
    kind = rng.choice((".jsonl", ".jsonl", ".txt", ".parquet", "folder", ".json", ""))
    file = folder / f"el{kind if kind != 'folder' else ''}"
    if kind == "folder":
        file.mkdir()
        inside = [spoil_text(rng, file)[1] for _ in range(rng.choice((0, 1))) if not file.is_file()]
        return file, f"folder: {inside}"
    if kind == ".parquet":
        column: Any = rng.choice((
            ["a text"], ["", " "], [None], [1, 2], [b"\xff"], [["x"]], [{"el": "a", "en": "b"}], [{"el": 1}], [1.5], [],
            ["x", None, "y"], [True], ["\0"], ["x" * 100_000],
        ))  # fmt: skip
        name = rng.choice(("text", "text", "text", "translation", "x", "Text"))
        languages = rng.choice((["el"], ["en"], [None], [1], [["el"]], [{"a": 1}])) * len(column)
        pyarrow.parquet.write_table(pyarrow.table({name: column, "language": languages}), file)
    else:
        rows = [rng.choice(_ROWS) for _ in range(rng.choice((1, 1, 2, 5)))]
        file.write_text("\n".join(rows) + rng.choice(("", "\n", "\n\n\n")), encoding="utf-8")
    what = f"{kind} text"
    if rng.random() < 0.5:
        what += f", {spoil_bytes(rng, file)}"
    return file, what


_ROWS = (
    '{"text": "a tiny text"}', '{"text": "ein Text", "language": "el"}', '{"text": "x", "language": "en"}',
    '{"text": ""}', '{"text": null}', '{"text": 1}', '{"text": ["x"]}', '{"text": {"a": 1}}', "{}", "[]", "1", "null",
    '"x"', "x", "{", '{"text": "\\ud800"}', '{"text": "\\u0000"}', '{"text": "x", "language": 1}',
    '{"text": "x", "language": ["el"]}', '{"text": "x", "language": {"a": 1}}', '{"text": "x", "language": "\\ud800"}',
    '{"text": "x", "text": "y"}', '{"text": "' + "x" * 200_000 + '"}', '{"text": NaN}', '{"text": "x", "n": 1e999}',
    '{"n": ' + "9" * 5000 + "}", '{"a": ' + "[" * 50_000, '{"translation": {"el": "a", "en": "b"}}',
    '{"translation": {"el": null}}', '{"translation": {}}', '{"translation": {"en": "x"}}', '{"translation": []}',
    '{"translation": {"": "x", "\\ud800": "y"}}', '{"text": "<end>"}', '{"translation": {"el": "a", "tlh-x-é": "b"}}',
    '{"text": "x", "translation": 3}', '{"Text": "x"}', " ", "\x85", "\x1c",
)  # fmt: skip


# Damaging a checkpoint. Each function changes a file of `folder`, and returns what it did.


def header(rng: random.Random, folder: Path) -> str:
    """Changes one entry of a weight file's header."""
    file = rng.choice(sorted(folder.glob("model*.safetensors")))
    entries, data = read_weights(file)
    name = rng.choice(sorted(set(entries) - {"__metadata__"}))
    entry = entries[name]
    what = rng.choice(("offset", "dtype", "shape", "rename", "quantised", "any", "any"))
    if what == "offset":
        entry["data_offsets"][rng.randrange(2)] += rng.choice((-1, 1, 4, -(10**9), 2**63, 0.5))
    elif what == "dtype":
        entry["dtype"] = rng.choice(("F64", "F16", "I8", "I32", "F8_E4M3", "F4", "BOOL", "X", None, 7))
    elif what == "shape":
        entry["shape"] = rng.choice(([*entry["shape"], 1], entry["shape"][::-1], [0], [-1, -64], [10**12], ["2"]))
    elif what == "rename":
        entries[rng.choice(("", "x", "../x", "model", name + ".weight", name[:-1], "é" * 300))] = entries.pop(name)
    elif what == "quantised":  # as many bytes, of another type
        start, end = entry["data_offsets"]
        entries[name] = {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}
    else:
        what = change(rng, entries)
    encoded = json.dumps(entries).encode()
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    return f"{file.name}: {what} of {name}"


def weights(rng: random.Random, folder: Path) -> str:
    """Changes a weight file's bytes."""
    file = rng.choice(sorted(folder.glob("model*.safetensors")))
    what = rng.choice(("length", "not finite", "others", "others", "others", "others"))
    if what == "others":
        return f"{file.name}: {spoil_bytes(rng, file)}"
    content = bytearray(file.read_bytes())
    if what == "length":
        content[:8] = struct.pack("<Q", rng.choice((0, 1, 2, 10**6, 2**40, 2**64 - 1)))
    else:
        content[-16:] = struct.pack("<ffff", *rng.choices((float("nan"), float("inf"), 0.0), k=4))
    file.write_bytes(content)
    return f"{file.name}: {what}"


def index(rng: random.Random, folder: Path) -> str:
    """Changes the index of the shards, which is written first if it is missing."""
    file = folder / "model.safetensors.index.json"
    if not file.is_file():
        entries, _ = read_weights(folder / "model.safetensors")
        (folder / "model.safetensors").rename(folder / "model-1.safetensors")
        names = dict.fromkeys(sorted(set(entries) - {"__metadata__"}), "model-1.safetensors")
        file.write_text(json.dumps({"weight_map": names}))
    value = json.loads(file.read_text())
    if rng.random() < 0.5:
        what = change(rng, value)
    else:
        what = rng.choice(("../x.safetensors", "/x.safetensors", "x.safetensors", "config.json", ".", "", "a\0b"))
        value["weight_map"][rng.choice(sorted(value["weight_map"]))] = what
    file.write_text(json.dumps(value))
    return f"{file.name}: {what!r}"


def fields(rng: random.Random, folder: Path) -> str:
    """Spoils a JSON file."""
    others = ("tokenizer_config.json", "tokenizer.json", "generation_config.json")
    file = folder / rng.choice((*["config.json"] * 6, *others))
    return f"{file.name}: {(spoil_json if rng.random() < 0.8 else spoil_bytes)(rng, file)}"


def size(rng: random.Random, folder: Path) -> str:
    """Changes the sizes and types in the configuration."""
    file = folder / "config.json"
    value = json.loads(file.read_text())
    number = rng.choice((0, 1, 3, 17, 4000, 10**6, 10**9, 2**31, 2**62, 10**25, -5, 2.0, "2", None))
    what = rng.choice((
        {"num_hidden_layers": number}, {"num_hidden_layers": number, "layer_types": None}, {"hidden_size": number},
        {"vocab_size": number}, {"intermediate_size": number}, {"num_attention_heads": number}, {"head_dim": number},
        {"num_key_value_heads": number}, {"num_experts_per_layer": [number, 2]}, {"router_top_k": number},
        {"num_experts_per_layer": [2] * (number if isinstance(number, int) and 0 < number < 5000 else 3)},
        {"max_position_embeddings": number}, {"classifier_layers": [number]}, {"rms_norm_eps": number},
        {"model_type": rng.choice(("gpt2", "llama", "bert", "t5", "mamba", "dmoe", "layer_moe", "x", "opt"))},
        {"backbone_model_type": rng.choice(("gpt2", "llama", "bloom", "x", 7))}, {"tie_word_embeddings": True},
        {"quantization_config": rng.choice(({}, {"quant_method": "x"}, {"quant_method": "fp8"}, 7, "x"))},
        {"expert_kind": "lora", "lora_rank": number, "lora_alpha": 1.0}, {"expert_kind": number},
        {"expert_kind": "added", "expert_width": number},
        {"conditional_routing": True}, {"language_groups": [["en"], ["el"]], "model_type": "dmoe"},
        {"rope_parameters": {"rope_type": rng.choice(("linear", "yarn", "x", "dynamic")), "factor": number}},
        {"hidden_act": rng.choice(("relu", "x", 7))}, {"dtype": rng.choice(("float16", "x", 7))},
        {"auto_map": rng.choice(({"AutoConfig": "x.X"}, {"AutoModelForCausalLM": "a/b--x.X"}, 7))},
        {"text_config": {"num_hidden_layers": number}}, {"gating_dropout": number}, {"architectures": ["X"]},
        {"layer_types": ["sliding_attention", "x"]}, {"expansion_base": {"base_model": "../base", "revision": None}},
    ))  # fmt: skip
    file.write_text(json.dumps({**value, **what}))
    return f"{file.name}: {what}"


# Errors from damaging a damaged file.
_DAMAGED_ALREADY = (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError, struct.error)
DAMAGES = (header, weights, index, fields, fields, fields, fields, size, size)


def read_weights(file: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a weight file."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


# Running the verbs


def prepare(rng: random.Random, made: Path, case: Path) -> tuple[str, str]:
    """A spoilt file or checkpoint in the folder of a case: the command line that reads it, and what was done to it."""
    kind = rng.choice(("recipe", "stage", "stage", "json", "json", "text", *["checkpoint"] * 6))
    if kind == "checkpoint":
        file, (verb, starts) = case / "x", rng.choice([*CHECKPOINT_READERS.items()])
        start = rng.choice(starts)
        shutil.copytree(made / start, file)
        damage = [start]
        for _ in range(rng.choice((1, 1, 1, 2))):
            with suppress(*_DAMAGED_ALREADY):
                damage.append(rng.choice(DAMAGES)(rng, file))
        whole = made / ("base" if start == "base" else "expanded")
        return verb.format(x=file, made=made, out=case / "out", whole=whole), " | ".join(damage)
    if kind == "text":
        file, what = spoil_text(rng, case)
        verbs: tuple[str, ...] = TEXT_READERS
    elif kind == "json":
        name = rng.choice(sorted(READERS))
        verbs, file = READERS[name], place(name, made, case)
        what = f"{name}: {(spoil_json if rng.random() < 0.8 else spoil_bytes)(rng, file)}"
    else:
        file = case / f"{kind}.yaml"
        file.write_text((RECIPE if kind == "recipe" else STAGE).format(made=made))
        verbs = RECIPE_READERS if kind == "recipe" else STAGE_READERS
        what = (spoil_yaml if rng.random() < 0.85 else spoil_bytes)(rng, file)
    return rng.choice(verbs).format(made=made, case=case, out=case / "out", run=case / "run", file=file), what


def place(name: str, made: Path, case: Path) -> Path:
    """Puts the whole file of this name into the folder of a case, with what is read together with it."""
    if name in ("plan.json", "grow.json", "deviation.json", "curriculum.json"):
        shutil.copy(made / name, case / name)
        settings = {"curriculum": str(case / "curriculum.json"), "block_size": 8, "training": {"max_steps": 2}}
        (case / "stage.yaml").write_text(yaml.safe_dump(settings))
        return case / name
    if name == "started_with.json":
        checkpoint = case / "out.training" / "checkpoint-1"
        checkpoint.mkdir(parents=True)
        (case / "out.training" / ".hf-moe-expand").touch()
        (checkpoint / "trainer_state.json").write_text("{}")
        file = case / "out.training" / name
        started = {"model": "x", "settings": {"block_size": 8}, "seed": 0, "data": {"el": ["x", "y"]}}
        file.write_text(json.dumps(started))
        return file
    run = case / "run"
    shutil.copytree(made / "run", run)
    recipe = run / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("output: out", f"output: {run}"))
    if name == "validation.json":
        return run / "post_pretrain" / name
    return run / "review" / name if name == "trainer_state.json" else run / name


@contextmanager
def no_training(cache: Path) -> Iterator[None]:
    """What would train stops when its settings and data are read; texts are cached in this folder."""
    with (
        patch.object(stage_run, "load_tokenizer", side_effect=Stop(0)),
        patch.object(pipeline._Record, "attempt", side_effect=Stop(0)),
        patch.object(datasets.config, "HF_DATASETS_CACHE", cache),
    ):
        yield


def watched(command: list[str], limit: float, verbose: bool = False) -> tuple[str, str]:
    """Runs a command line in this process: how it ended (`ok`, `refused`, `traceback` or `hang`), and the reason."""

    def late(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        error = CliRunner().invoke(app, command).exception
    except Hang as hang:
        error = hang
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    if verbose and error is not None:
        traceback.print_exception(error)
    if isinstance(error, Hang):
        return "hang", f"longer than {limit:g} s"
    if isinstance(error, InputError):
        return "refused", str(error)
    if error is None or isinstance(error, SystemExit):
        return "ok", ""
    return "traceback", f"{type(error).__name__}: {str(error)[:200]!r}"


def run_case(number: int, seed: int, made: Path, limit: float, verbose: bool = False) -> tuple[str, str, str]:
    """One case: how it ended (`ok`, `refused`, `traceback` or `hang`), the case in words, and the reason."""
    rng = random.Random(f"{seed}-{number}")
    # Outside of the other folder: its files would be found by `**`.
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory() as cache:
        case = Path(scratch)
        command, what = prepare(rng, made, case)
        before = sorted(case.rglob("*"))
        words = f"{number}: {command.replace(scratch, '').replace(str(made), 'made')}: {what}"
        with no_training(Path(cache)):
            ending, reason = watched(command.split(), limit, verbose)
        if ending == "refused" and (left := sorted(set(case.rglob("*")) - set(before))):
            ending, reason = "traceback", f"left {left[0].name}: {reason}"
        return ending, words, reason.replace(scratch, "")


def run_cases(cases: int, seed: int, limit: float = 20) -> tuple[Counter, list[str]]:
    """How so many cases ended, and each that ended badly."""
    counts: Counter = Counter()
    bad = []
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = Path(scratch)
        make_all(made)
        for number in range(cases):
            ending, words, reason = run_case(number, seed, made, limit)
            counts[ending] += 1
            if ending in ("traceback", "hang"):
                bad.append(f"{ending} {words}: {reason}")
                print(bad[-1], flush=True)
    return counts, bad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=20, help="seconds that a case may take")
    parser.add_argument("--only", type=int, help="run this case alone, and show its traceback")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    if options.only is not None:
        with tempfile.TemporaryDirectory() as scratch:
            make_all(Path(scratch))
            print(run_case(options.only, options.seed, Path(scratch), options.limit, verbose=True))
        return
    counts, bad = run_cases(options.cases, options.seed, options.limit)
    print(f"{options.cases} cases: {', '.join(f'{count} {ending}' for ending, count in sorted(counts.items()))}")
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()

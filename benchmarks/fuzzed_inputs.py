"""Broken and strange input files, by the thousand: every verb must succeed or refuse in one sentence, and never hang.

    python benchmarks/fuzzed_inputs.py --cases 3000 --seed 0

A case spoils one file (a recipe, a stage's settings, a plan, a result, the record of a run, text) and runs a verb that
reads it, in this process. Nothing trains: what would train stops where its settings and data are checked. The exit
status is 1 where a case ended in any other error than `InputError`, left a file where it refused, or took longer than
`--limit` seconds. A case depends on its number and the seed alone: `--only NUMBER` runs it again.
"""

import argparse
import json
import os
import random
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # "x" is a model's name, too

import datasets
import pyarrow
import pyarrow.parquet
import torch
import yaml
from hostile import Found, change, make, watched
from transformers.utils import logging

from hf_moe_expand import LanguageText, PostPretrainConfig, ReviewConfig, pipeline, train_stage
from hf_moe_expand.evaluation.perplexity import LanguageScore
from hf_moe_expand.evaluation.report import Evaluation
from hf_moe_expand.evaluation.validation import ValidationCurves
from hf_moe_expand.results import DeviationResult, RoutingResult, SimilarityResult
from hf_moe_expand.stages import run as stage_run

# What a value in a YAML file may become.
SNIPPETS = (
    "", "~", "true", "no", "-1", "0", "1", "2", "1.5", "-0.0", "1e999", "1e5", ".nan", ".inf", "-.inf", "010", "0x1F",
    "0o17", "1_000", "9" * 30, "9" * 5000, "-9999999999999999999", "2026-01-31", "2026-01-31T10:00:00Z", "1:30", "x",
    "é", '"\\ud800"', '"\\0"', "''", "../x", "/etc/passwd", "$HOME", "$NOT_SET", "hub:x", "hub:", "hub:x:y:z[:3]",
    "~x/y",
    "[]", "{}", "[1]", "[null]", "[[]]", "{a: 1}", "{1: 2}", "{null: 1}", "{[1]: 2}", "{? {a: 1} : 2}", "*a", "&a [*a]",
    "&a 1", "!!python/object:os.system x", "!!binary aGk=", "!!binary x", "!!set {a, b}", "!!int x", "!!float x",
    "!!timestamp x", "!!omap [a: 1]", "!x y", "|\n  text", ">-\n  text", "- 1", "a: b: c", "\t", "@", "%", "`x`", "[",
    "{", "'", '"', "# x", "en", "{en: x, el: y}", "[el, en]", "layer-moe", "dmoe", "moe-lpr", "random", "cosine",
    "float16",
    "{method: dmoe}", "{method: layer-moe, total_experts: 9999999999999999999999}", "{<<: {a: 1}}", "{<<: 1}",
)  # fmt: skip
KEYS = (
    "<<", "training", "block_size", "seed", "settings", "? x", "no", "1", "null", "'é'", "[a]", "learning_rate", "plan",
    "max_steps", "fsdp", "deepspeed", "output_dir", "push_to_hub", "report_to", "validation", "curriculum",
    "expansions",
    "bf16", "fp16", "optim", "lr_scheduler_type", "accelerator_config", "per_device_train_batch_size", "tf32", "graft",
    "save_steps", "save_strategy", "eval_strategy", "torch_compile", "dataloader_num_workers", "revision",
    "model_dtype",
    "lr_scheduler_kwargs", "optim_args", "warmup_steps", "gradient_checkpointing", "local_rank", "ddp_backend",
    "use_cpu",
)  # fmt: skip
RECIPE = """\
base: {made}/base
output: out
old: {{en: {made}/el.jsonl}}
new:
  el: {made}/el.jsonl
test:
  el: {made}/el.jsonl
seed: 3
analysis:
  tokens: 8
  block_size: 8
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
  training:
    max_steps: 2
    learning_rate: 5e-5
review:
  block_size: 8
  old_documents: 1
  new_per_old: 1
  training:
    max_steps: 2
evaluation:
  block_size: 8
"""
STAGE = """\
block_size: 8
old_documents: 1
new_per_old: 1
language_prior_coef: 0.1
classifier_coef: 0.1
validation:
  texts:
    el: {made}/el.jsonl
  every: 1
training:
  max_steps: 2
  learning_rate: 5e-5
  per_device_train_batch_size: 1
  logging_steps: 1
"""
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
    "curriculum.json": ("train review {made}/expanded {out} --config {case}/stage.yaml --data en={made}/el.jsonl "
                        "--data el={made}/el.jsonl",),
    "trainer_state.json": ("report {run} --out {out}",),
    "started_with.json": ("train review {made}/expanded {out} --data en={made}/el.jsonl --data el={made}/el.jsonl",),
}  # fmt: skip
RECIPE_READERS = ("validate {file}", "validate --offline {file}", "validate {file}", "recipes show {file}")
STAGE_READERS = tuple(
    f"train {stage} {{made}}/{model} {{out}} --config {{file}} --data en={{made}}/el.jsonl --data el={{made}}/el.jsonl"
    for stage, model in (
        ("review", "expanded"),
        ("review", "expanded"),
        ("post-pretrain", "expanded"),
        ("dense", "base"),
    )
)
TEXT_READERS = (
    "evaluate {made}/base --data el={file} --new el --out {out} --block-size 8 --max-tokens 64",
    "analyze similarity {made}/base --old en={made}/el.jsonl --new el={file} --out {out} --tokens 4 --block-size 4",
    "curriculum counts --data el={file} --steps 10 --thresholds 2 --shares 1,0.5 --out {out}",
    "train review {made}/expanded {out} --data en={made}/el.jsonl --data el={file}",
)


class Stop(SystemExit):
    """The settings and the data were accepted: from here on it would train."""


def make_all(folder: Path) -> None:
    """The checkpoints and texts of `hostile.make`, and a run folder with every kind of result."""
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
    what = rng.choice((
        "truncated", "empty", "blank", "binary", "BOM", "UTF-16", "CRLF", "CR", "NUL", "surrogate", "Latin-1",
        "flipped",
        "twice", "gone", "folder", "loop of links", "control", "line separators", "unreadable",
    ))  # fmt: skip
    spoilt = {
        "truncated": lambda: content[: rng.randrange(len(content))], "empty": lambda: b"", "blank": lambda: b" \n\n",
        "binary": lambda: rng.randbytes(200), "BOM": lambda: b"\xef\xbb\xbf" + content,
        "UTF-16": lambda: content.decode("utf-8", "replace").encode("utf-16"),
        "CRLF": lambda: content.replace(b"\n", b"\r\n"), "CR": lambda: content.replace(b"\n", b"\r"),
        "NUL": lambda: _inserted(rng, content, b"\0"), "surrogate": lambda: _inserted(rng, content, b"\xed\xa0\x80"),
        "Latin-1": lambda: _inserted(rng, content, b"\xe9"), "control": lambda: _inserted(rng, content, b"\x1b\x07"),
        "flipped": lambda: _inserted(rng, content, rng.randbytes(3)), "twice": lambda: content + content,
        "line separators": lambda: content.replace(b"\n", "\u2028\x85".encode()),
    }  # fmt: skip
    file.unlink()
    if what == "folder":
        file.mkdir()
    elif what == "loop of links":
        file.symlink_to(file)
    elif what != "gone":
        file.write_bytes(spoilt[what]() if what in spoilt else content)
    if what == "unreadable":
        file.chmod(0)
    return what


def _inserted(rng: random.Random, content: bytes, piece: bytes) -> bytes:
    at = rng.randrange(len(content) + 1)
    return content[:at] + piece + content[at:]


def spoil_json(rng: random.Random, file: Path) -> str:
    """Values of a JSON file, or its text."""
    what = rng.choice(
        ("value", "value", "value", "value", "value", "value", "constant", "deep", "twice", "list", "many")
    )
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
    large = rng.random()
    if large < 0.02:
        levels = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
        content, done = "\n".join(["a0: &a0 [x]", *levels]) + "\n" + content, ["alias bomb"]
    elif large < 0.03:
        content, done = content + "".join(f"key{n}: {n}\n" for n in range(20_000)), ["20,000 keys"]
    elif large < 0.05:
        content, done = content + "deep: " + rng.choice("[{") * rng.choice((90, 200, 20_000)) + "\n", ["deep"]
    elif large < 0.06:
        content, done = "--- \n" + content + "---\n" + content, ["two documents"]
    elif large < 0.08:
        content, done = (
            rng.choice(("x", "- a\n- b", "3", "null", "# x", "%YAML 3.0\n---\na: 1", "---", "...")),
            ["no mapping"],
        )
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
        table = {
            name: column,
            "language": rng.choice((["el"], ["en"], [None], [1], [["el"]], [{"a": 1}])) * len(column),
        }
        pyarrow.parquet.write_table(pyarrow.table(table), file)
    else:
        rows = [rng.choice(_ROWS) for _ in range(rng.choice((1, 1, 2, 5)))]
        file.write_text("\n".join(rows) + rng.choice(("", "\n", "\n\n\n")), encoding="utf-8")
    what = f"{kind} text"
    if rng.random() < 0.5:
        what += f", {spoil_bytes(rng, file)}"
    return file, what


_ROWS = (
    '{"text": "a tiny text"}', '{"text": "ein Text", "language": "el"}', '{"text": "x", "language": "en"}',
    '{"text": ""}',
    '{"text": null}', '{"text": 1}', '{"text": ["x"]}', '{"text": {"a": 1}}', "{}", "[]", "1", "null", '"x"', "x", "{",
    '{"text": "\\ud800"}', '{"text": "\\u0000"}', '{"text": "x", "language": 1}', '{"text": "x", "language": ["el"]}',
    '{"text": "x", "language": {"a": 1}}', '{"text": "x", "language": "\\ud800"}', '{"text": "x", "text": "y"}',
    '{"text": "' + "x" * 200_000 + '"}', '{"text": NaN}', '{"text": "x", "n": 1e999}', '{"n": ' + "9" * 5000 + "}",
    '{"a": ' + "[" * 50_000, '{"translation": {"el": "a", "en": "b"}}', '{"translation": {"el": null}}',
    '{"translation": {}}',
    '{"translation": {"en": "x"}}', '{"translation": []}', '{"translation": {"": "x", "\\ud800": "y"}}',
    '{"text": "<end>"}',
    '{"translation": {"el": "a", "tlh-x-é": "b"}}', '{"text": "x", "translation": 3}', '{"Text": "x"}', " ", "\x85",
    "\x1c",
)  # fmt: skip


def prepare(rng: random.Random, made: Path, case: Path) -> tuple[str, str]:
    """A spoilt file in the folder of a case: the command line that reads it, and what was done to it."""
    kind = rng.choice(("recipe", "recipe", "stage", "stage", "stage", "json", "json", "json", "json", "text", "text"))
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
        file.write_text(
            json.dumps({"model": "x", "settings": {"block_size": 8}, "seed": 0, "data": {"el": ["x", "y"]}})
        )
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
    with ExitStack() as stack:
        stop = {"side_effect": Stop(0)}
        stack.enter_context(patch.object(stage_run, "load_tokenizer", **stop))
        stack.enter_context(patch.object(pipeline._Record, "attempt", **stop))
        stack.enter_context(patch.object(datasets.config, "HF_DATASETS_CACHE", cache))
        yield


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


def run_cases(
    cases: int, seed: int, limit: float = 20, first: int = 0, say: Callable[[str], None] = lambda line: None
) -> Found:
    """Runs cases `first` to `first + cases`."""
    found = Found()
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = Path(scratch)
        make_all(made)
        for number in range(first, first + cases):
            ending, words, reason = run_case(number, seed, made, limit)
            found.counts[ending] += 1
            if ending in ("traceback", "hang"):
                found.bad.append(f"{ending} {words}: {reason}")
                say(found.bad[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
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
    started = time.monotonic()
    found = run_cases(options.cases, options.seed, options.limit, options.first, partial(print, flush=True))
    hangs = sum(line.startswith("hang") for line in found.bad)
    seconds = round(time.monotonic() - started)
    print(f"{options.cases} cases ({found.counts['ok']} ok, {found.counts['refused']} refused): "
          f"{len(found.bad) - hangs} failures, {hangs} hangs; {seconds} s")  # fmt: skip
    raise SystemExit(bool(found.bad))


if __name__ == "__main__":
    main()

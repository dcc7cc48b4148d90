"""Broken checkpoints and input files by the thousand: every verb must succeed, or refuse in one sentence, in time.

    python benchmarks/fuzz.py --cases 3000 --seed 0

A case spoils one file and runs a verb that reads it, up to where it would train. The exit status is 1 where a case
ended in any other error than `InputError`, left a file where it refused, or took longer than 20 seconds. A case depends
on its number and the seed alone: `--only NUMBER` runs it again.
"""

import argparse
import json
import os
import random
import shutil
import signal
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # "x" is a model's name, too

import datasets
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from hf_moe_expand import Plan, expand_checkpoint
from hf_moe_expand.cli import app
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.runs.run_record import RunRecord
from hf_moe_expand.stages import run as stage_run

# What replaces a value of a JSON file, a value or a key of a YAML file, and the rows of a text.
POOL = (
    None, True, -1, 0, 1, 3, 2.5, 1e300, 2**63, 10**30, "", "x", "../x", "nan", "float16", "é\n", [], {}, [1], [None],
    ["x"], [[]], {"x": 1}, [2, 1], [2.0, 1.0], {"0": 0}, [[1, 2]],
)  # fmt: skip
SNIPPETS = (
    "", "~", "true", "-1", "1.5", "1e999", ".nan", "010", "9" * 5000, "2026-01-31", "1:30", '"\\ud800"', "{", "en",
    '"\\0"', "$NOT_SET", "hub:x", "hub:x:y:z[:3]", "~x/y", "[]", "{}", "[null]", "{a: 1}", "{null: 1}", "{[1]: 2}",
    "&a [*a]", "!!python/object:os.system x", "!!binary aGk=", "!!int x", "- 1", "|\n  text", "a: b: c", "\t", "@", "'",
    "{en: x, el: y}", "dmoe", "{<<: 1}", "{method: layer-moe, total_experts: 9999999999999999999999}", "? x", "plan",
    "training", "max_steps", "fsdp", "output_dir", "push_to_hub", "validation", "curriculum", "optim_args",
)  # fmt: skip
ROWS = (
    '{"text": "a tiny text"}', '{"text": "x", "language": "en"}', '{"text": ""}', '{"text": 1}', "{}", "[]", "x", "{",
    '{"text": "\\ud800"}', '{"text": "\\u0000"}', '{"text": "x", "language": {"a": 1}}', '{"text": "x", "text": "y"}',
    '{"text": "' + "x" * 200_000 + '"}', '{"text": NaN}', '{"n": ' + "9" * 5000 + "}", '{"a": ' + "[" * 50_000, "\x85",
    '{"translation": {"el": "a", "en": "b"}}', '{"translation": {"el": null}}', '{"translation": {"\\ud800": "y"}}',
)  # fmt: skip
STAGE = "block_size: 8\nmax_steps: 1\nlearning_rate: 5e-5\nold_documents: 1\ncurriculum: {made}/curriculum.json\n"
RECIPE = """\
base: {made}/base
output: {made}/run
old: {{en: {made}/el.jsonl}}
new: {{el: {made}/el.jsonl}}
test: {{el: {made}/held.jsonl}}
analysis: {{tokens: 8, block_size: 8}}
plan: {{method: layer-moe, total_experts: 4, classifier_layers: 1}}
post_pretrain: {{block_size: 8, max_steps: 1, validation: {{texts: {{el: {made}/held.jsonl}}, every: 1}}}}
review: {{block_size: 8, old_documents: 1, new_per_old: 1, max_steps: 1}}
evaluation: {{block_size: 8}}
"""
TEXTS = "--data en={made}/held.jsonl --data el={made}/el.jsonl"
# The commands that make results for cases to spoil.
MAKERS = (
    "run {made}/recipe.yaml",
    "analyze routing {made}/run/review --data el={made}/el.jsonl --out {made}/run/routing.json --tokens 8",
    "curriculum counts --counts el=30,en=9 --steps 10 --thresholds 2 --shares 1,0.5 --out {made}/curriculum.json",
)
# Command lines, and the files that a case spoils for each.
READS = (
    ("inspect {made}/run/review", "run/review/*"),
    ("evaluate {made}/sharded --data el={made}/el.jsonl --out {out} --new el --block-size 8", "sharded/*", "el.jsonl"),
    ("expand {made}/base {out} --plan {made}/plan.json", "base/*", "plan.json"),
    ("grow {made}/sharded {out} --plan {made}/grow.json", "sharded/*", "grow.json"),
    ("merge average {made}/run/expanded {made}/sharded --out {out}", "sharded/*"),
    ("plan layer-moe --analysis {made}/run/analysis.json --total-experts 4 --out {out}", "run/analysis.json"),
    ("report {made}/run --out {out}", "run/*.json", "run/*/*.json"),
    ("card {made}/run/review --evaluation {made}/run/evaluation.json --out {out}", "run/evaluation.json"),
    ("run {made}/recipe.yaml", "recipe.yaml", "run/steps.json"),
    ("validate {made}/recipe.yaml", "recipe.yaml", "el.jsonl"),
    (f"train review {{made}}/sharded {{out}} --config {{made}}/review.yaml {TEXTS}", "review.yaml", "curriculum.json"),
    ("curriculum derive {made}/run/post_pretrain/validation.json --out {out}", "run/post_pretrain/validation.json"),
)  # fmt: skip


class Hang(BaseException):
    """A case took too long; not an Exception, so that no code under test catches it."""

    @classmethod
    def late(cls, *_: object) -> None:
        raise cls


def make(folder: Path) -> None:
    """A dense checkpoint, an expanded one in shards, plans, text, settings, and a run with its results."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen2", vocab_size=257, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, bos_token_id=None, eos_token_id=256, pad_token_id=256,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    vocabulary = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary | {"<end>": 256}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder / "base")
    plan = Plan("layer-moe", [2, 2], [0], old=["en"], new=["el"])
    expand_checkpoint(folder / "base", folder / "sharded", plan, max_shard_size="20KB")
    plan.save(folder / "plan.json")
    Plan("layer-moe", [3, 3], [0], old=["en", "el"], new=["hu"], grows_from=[2, 2]).save(folder / "grow.json")
    (folder / "el.jsonl").write_text('{"text": "a tiny text, of some words"}\n' * 3)
    (folder / "held.jsonl").write_text('{"text": "another tiny text, of other words"}\n')
    (folder / "recipe.yaml").write_text(RECIPE.format(made=folder))
    (folder / "review.yaml").write_text(STAGE.format(made=folder))
    for line in MAKERS:
        CliRunner().invoke(app, line.format(made=folder).split(), catch_exceptions=False)


def spoil_bytes(rng: random.Random, file: Path, content: bytes) -> str:
    at = rng.randrange(len(content) + 1)
    begin, end = content[:at], content[at:]
    spoilt = {
        "truncated": begin, "empty": b"", "blank": b" \n\n", "binary": rng.randbytes(200), "twice": content + content,
        "BOM": b"\xef\xbb\xbf" + content, "UTF-16": content.decode("utf-8", "replace").encode("utf-16"),
        "NUL": begin + b"\0" + end, "Latin-1": begin + b"\xe9" + end, "length": b"\xff" * 8 + content[8:],
    }  # fmt: skip
    what = rng.choice((*spoilt, "folder"))
    file.unlink()
    file.mkdir() if what == "folder" else file.write_bytes(spoilt[what])
    return what


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each value inside `value`, as its holder and its key."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


def spoil_json(rng: random.Random, file: Path, content: bytes) -> str:
    """A value at any depth, or the text; of a weight file those of its header."""
    size = int.from_bytes(content[:8], "little") + 8 if file.suffix == ".safetensors" else 0
    text = (content[8:size] if size else content).decode()
    what = rng.choice((*["value"] * 6, "list", "deep"))
    if what == "value":
        value = json.loads(text)
        holder, key = rng.choice(list(places(value)))
        holder[key] = rng.choice(POOL)
        what, text = f"{key} = {holder[key]!r}", json.dumps(value)
    else:
        text = f"[{text}]" if what == "list" else text.replace("{", '{"new": ' + "[" * 50_000 + ",", 1)
    file.write_bytes(len(text).to_bytes(8, "little") + text.encode() + content[size:] if size else text.encode())
    return what


def spoil_yaml(rng: random.Random, file: Path, content: bytes) -> str:
    lines = content.decode().splitlines()
    at, what = rng.randrange(len(lines)), rng.choice(("value", "value", "key", "new key", "twice", "indent", "bomb"))
    (key, _, value), snippet = lines[at].partition(":"), rng.choice(SNIPPETS)
    lines[at : at + 1] = {
        "value": [f"{key}: {snippet}"], "key": [f"{snippet}:{value}"], "twice": [lines[at]] * 2,
        "new key": [f"{snippet}: {rng.choice(SNIPPETS)}", lines[at]], "indent": [rng.choice((" ", "\t")) + lines[at]],
        "bomb": ["a0: &a0 [x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)), lines[at]],
    }[what]  # fmt: skip
    file.write_text("\n".join(lines) + "\n")
    return f"{what} {lines[at][:60]!r}"


def spoil_text(rng: random.Random, file: Path, content: bytes) -> str:
    file.write_text("\n".join(rows := rng.choices(ROWS, k=rng.choice((1, 1, 2, 5)))))
    return str([row[:60] for row in rows])


SPOILERS = {".json": spoil_json, ".safetensors": spoil_json, ".yaml": spoil_yaml, ".jsonl": spoil_text}


def watched(command: list[str], limit: float) -> tuple[str, str]:
    """How a command line ends in this process (`ok`, `refused`, `traceback` or `hang`), and the reason."""
    signal.signal(signal.SIGALRM, Hang.late)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        error = CliRunner().invoke(app, command).exception
    except Hang:
        return "hang", f"longer than {limit:g} s"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if error is None or isinstance(error, SystemExit):
        return "ok", ""
    if isinstance(error, InputError):
        return "refused", str(error)
    return "traceback", "".join(traceback.format_exception(error))


def run_case(number: int, seed: int, whole: Path, limit: float) -> tuple[str, str, str]:
    """One case: how it ended, the case in words, and the reason."""
    rng = random.Random(f"{seed}-{number}")
    # The cache lies outside of the other folder: its files would be found by `**`.
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory() as cache:
        made = shutil.copytree(whole, Path(scratch) / "made")
        for file in made.glob("*.yaml"):
            file.write_text(file.read_text().replace(str(whole), str(made)))
        line, *patterns = rng.choice(READS)
        found = [one for one in sorted(made.glob(rng.choice(patterns))) if one.suffix in SPOILERS]
        file = rng.choice([*found, *(one for one in found if one.name == "config.json")])
        spoiler = SPOILERS[file.suffix] if rng.random() < 0.75 else spoil_bytes
        words = f"{number}: {line}: {file.relative_to(made)}: {spoiler(rng, file, file.read_bytes())}"
        before = {*made.parent.rglob("*")}
        with (
            patch.object(stage_run, "load_tokenizer", side_effect=SystemExit(0)),  # before it would train
            patch.object(RunRecord, "attempt", side_effect=SystemExit(0)),
            patch.object(datasets.config, "HF_DATASETS_CACHE", Path(cache)),
        ):
            ending, reason = watched(line.format(made=made, out=made.parent / "out").split(), limit)
        left = {*made.parent.rglob("*")} - before if ending == "refused" else None
        return ("traceback", words, f"left {left}: {reason}") if left else (ending, words, reason)


def run_cases(numbers: range, seed: int, limit: float = 20) -> Counter:
    """How cases ended; prints those that ended badly."""
    endings: Counter = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        make(Path(scratch))
        for number in numbers:
            ending, *words = run_case(number, seed, Path(scratch), limit)
            endings[ending] += 1
            if ending in ("traceback", "hang"):
                print(ending, *words, flush=True)
    return endings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run this case alone")
    asked = parser.parse_args()
    numbers = range(asked.cases) if asked.only is None else range(asked.only, asked.only + 1)
    endings = run_cases(numbers, asked.seed)
    print(f"{len(numbers)} cases: {', '.join(f'{count} {ending}' for ending, count in sorted(endings.items()))}")
    raise SystemExit(bool(endings["traceback"] + endings["hang"]))


if __name__ == "__main__":
    main()

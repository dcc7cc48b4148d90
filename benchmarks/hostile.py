"""Thousands of broken and hostile checkpoints: every verb must succeed or refuse in one sentence, and never hang.

    python benchmarks/hostile.py --cases 10000 --seed 0

Each case copies a tiny checkpoint, damages one or two of its files, and runs a verb on it in this process. The exit
status is 1 if a case ended in another error than `InputError`, or took longer than `--limit` seconds. A case depends
only on its number and the seed: `--only NUMBER` runs it again and shows the traceback.
"""

import argparse
import copy
import json
import random
import shutil
import signal
import struct
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging
from typer.testing import CliRunner

from hf_moe_expand import Plan, expand_checkpoint
from hf_moe_expand.cli import app
from hf_moe_expand.errors import InputError

STARTS = ("base", "expanded", "sharded")
VERBS = ("inspect", "evaluate", "expand", "grow", "merge average", "diff")
# Values that replace a field.
POOL = (
    None, True, False, -1, 0, 1, 2, 3, 7, 2.5, -0.0, 1e300, 10**9, 2**63, 10**30, "", "x", "../x", "/etc/passwd", "nan",
    "float8_e4m3fn", "qwen2", [], {}, [1], [None], ["x"], [[]], {"x": 1}, [2, 1], [2.0, 1.0], {"0": 0}, [[1, 2]], "é\n",
)  # fmt: skip


class Hang(BaseException):
    """A case took too long; not an Exception, so that no code under test catches it."""


@dataclass
class Found:
    """The results of the cases, and the number, verb and damage of each that ended badly."""

    counts: Counter = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    reasons: Counter = field(default_factory=Counter)


# Making the checkpoints


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


# Damage. Each function changes a file of `folder`, and returns a description of the damage.

Damage = Callable[[random.Random, Path], str]


def header(rng: random.Random, folder: Path) -> str:
    """Changes one entry of a weight file's header."""
    file = rng.choice(sorted(folder.glob("model*.safetensors")))
    entries, data = read_weights(file)
    name = rng.choice(sorted(set(entries) - {"__metadata__"}))
    entry = entries[name]
    what = rng.choice(("start", "end", "swap", "dtype", "shape", "size", "drop", "rename", "entry", "quantised"))
    if what in ("start", "end"):
        entry["data_offsets"][what == "end"] += rng.choice((-1, 1, 4, -(10**9), 2**63, 0.5))
    elif what == "swap":
        entry["data_offsets"].reverse()
    elif what == "dtype":
        entry["dtype"] = rng.choice(("F64", "F16", "I8", "I32", "F8_E4M3", "F4", "BOOL", "X", None, 7))
    elif what == "shape":
        entry["shape"] = rng.choice((copy.deepcopy(rng.choice(POOL)), [*entry["shape"], 1], entry["shape"][::-1]))
    elif what == "size" and entry["shape"]:
        entry["shape"][rng.randrange(len(entry["shape"]))] = rng.choice((0, -1, 1.0, 10**12, "2", None))
    elif what == "drop":
        del entries[name]
    elif what == "rename":
        entries[rng.choice(("", "x", "../x", "model", name + ".weight", name[:-1], "é" * 300))] = entries.pop(name)
    elif what == "entry":
        entries[name] = rng.choice(POOL)
    else:  # as many bytes, of another type
        size = entry["data_offsets"][1] - entry["data_offsets"][0]
        entries[name] = {"dtype": "U8", "shape": [size], "data_offsets": entry["data_offsets"]}
    write_weights(file, entries, data)
    return f"{file.name}: {what} of {name}"


def weights(rng: random.Random, folder: Path) -> str:
    """Changes a weight file's bytes."""
    file = rng.choice(sorted(folder.glob("model*.safetensors")))
    content = bytearray(file.read_bytes())
    what = rng.choice(("truncated", "longer", "flipped", "length", "empty", "not finite", "gone", "folder"))
    if what == "truncated":
        content = content[: rng.randrange(len(content))]
    elif what == "longer":
        content += bytes(rng.randrange(1, 100))
    elif what == "flipped":
        for _ in range(rng.randrange(1, 20)):
            content[rng.randrange(min(len(content), 4000))] = rng.randrange(256)
    elif what == "length":
        content[:8] = struct.pack("<Q", rng.choice((0, 1, 2, 10**6, 2**40, 2**64 - 1)))
    elif what == "empty":
        content = bytearray()
    elif what == "not finite":
        content[-16:] = struct.pack("<ffff", *rng.choices((float("nan"), float("inf"), 0.0), k=4))
    file.unlink()
    if what == "folder":
        file.mkdir()
    elif what != "gone":
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
    what = change(rng, value)
    if rng.random() < 0.5:
        names = value.get("weight_map") if isinstance(value, dict) else None
        if isinstance(names, dict) and names:
            place = rng.choice(("../x.safetensors", "/x.safetensors", "x.safetensors", "config.json", ".", "", "a\0b"))
            names[rng.choice(sorted(names))] = place
            what += f", {place!r}"
    file.write_text(json.dumps(value))
    return f"{file.name}: {what}"


def fields(rng: random.Random, folder: Path) -> str:
    """Changes one or more values of a JSON file."""
    names = ["config.json"] * 6 + ["tokenizer_config.json", "tokenizer.json", "generation_config.json"]
    file = folder / rng.choice(names)
    value = json.loads(file.read_text())
    what = [change(rng, value) for _ in range(rng.choice((1, 1, 1, 2, 5)))]
    file.write_text(json.dumps(value))
    return f"{file.name}: {'; '.join(what)}"


def history(rng: random.Random, folder: Path) -> str:
    """Changes the history of an expanded checkpoint."""
    file = folder / "config.json"
    value = json.loads(file.read_text())
    expansions = value.setdefault("expansions", [{"method": "layer-moe", "stages": []}])
    expansions[-1]["stages"].append({"stage": "review", "steps": 3, "seed": 0, "settings": {"balance": 0.1}})
    what = change(rng, expansions) if rng.random() < 0.9 else "replaced"
    value["expansions"] = copy.deepcopy(rng.choice(POOL)) if what == "replaced" else expansions
    file.write_text(json.dumps(value))
    return f"{file.name}: expansions: {what}"


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
        {"max_position_embeddings": number}, {"classifier_layers": [number]}, {"sliding_window": number},
        {"model_type": rng.choice(("gpt2", "llama", "bert", "t5", "mamba", "dmoe", "layer_moe", "x", "opt"))},
        {"backbone_model_type": rng.choice(("gpt2", "llama", "bloom", "x", 7))}, {"tie_word_embeddings": True},
        {"quantization_config": rng.choice(({}, {"quant_method": "x"}, {"quant_method": "fp8"}, 7, "x"))},
        {"expert_kind": "lora", "lora_rank": number, "lora_alpha": 1.0}, {"expert_kind": number},
        {"expert_kind": "added", "expert_width": number},
        {"conditional_routing": True}, {"language_groups": [["en"], ["el"]], "model_type": "dmoe"},
        {"rope_parameters": {"rope_type": rng.choice(("linear", "yarn", "x", "dynamic")), "factor": number}},
        {"hidden_act": rng.choice(("relu", "x", 7))}, {"dtype": rng.choice(("float16", "x", 7))},
        {"auto_map": rng.choice(({"AutoConfig": "x.X"}, {"AutoModelForCausalLM": "a/b--x.X"}, 7))},
        {"transformers_weights": "x"}, {"expansion_base": {"base_model": "../base", "revision": None}},
        {"text_config": {"num_hidden_layers": number}}, {"gating_dropout": number}, {"rms_norm_eps": number},
        {"layer_types": ["sliding_attention", "x"]}, {"use_cache": "x"}, {"architectures": ["X"]},
    ))  # fmt: skip
    file.write_text(json.dumps({**value, **what}))
    return f"{file.name}: {what}"


def text(rng: random.Random, folder: Path) -> str:
    """Changes the text of a JSON file."""
    file = folder / rng.choice(("config.json", "config.json", "tokenizer.json", "tokenizer_config.json"))
    content = file.read_text()
    what = rng.choice(("truncated", "deep", "constant", "digits", "twice", "surrogate", "bytes", "BOM", "list", "gone"))
    if what == "truncated":
        content = content[: rng.randrange(len(content))]
    elif what in ("deep", "constant", "digits", "surrogate"):
        value = {"deep": "[" * 50_000, "constant": "NaN", "digits": "9" * 5000, "surrogate": r'"\ud800"'}[what]
        content = content.replace("{", f'{{"hidden_size": {value},', 1)
    elif what == "twice":
        content = content.replace("{", '{"model_type": "x",', 1)
    elif what == "list":
        content = f"[{content}]"
    file.write_bytes(b"\xff\xfe\0" if what == "bytes" else content.encode("utf-8-sig" if what == "BOM" else "utf-8"))
    if what == "gone":
        file.unlink()
    return f"{file.name}: {what}"


# Errors from damaging a damaged file.
_DAMAGED_ALREADY = (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError, struct.error)
DAMAGES: tuple[Damage, ...] = (header, weights, index, fields, fields, history, size, size, text)


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


def read_weights(file: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a weight file."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_weights(file: Path, entries: Any, data: bytes) -> None:
    """Writes a weight file with this header, valid or not."""
    encoded = json.dumps(entries).encode()
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


# Running the verbs


def arguments(verb: str, start: str, made: Path, case: Path) -> list[str]:
    """The command line of a verb on the damaged checkpoint `case / "x"`."""
    x, out, whole = str(case / "x"), str(case / "out"), str(made / ("base" if start == "base" else "expanded"))
    return {
        "inspect": ["inspect", x],
        "evaluate": ["evaluate", x, "--data", f"el={made / 'el.jsonl'}", "--out", out, "--new", "el"],
        "expand": ["expand", x, out, "--plan", str(made / "plan.json")],
        "grow": ["grow", x, out, "--plan", str(made / "grow.json")],
        "merge average": ["merge", "average", whole, x, "--out", out],
        "diff": ["diff", whole, x],
    }[verb]


def run_case(number: int, seed: int, made: Path, limit: float, verbose: bool = False) -> tuple[str, str, str]:
    """Runs one case: returns its result (`ok`, `refused`, `traceback` or `hang`), the case in words, and the reason."""
    rng = random.Random(f"{seed}-{number}")
    verb = VERBS[number % len(VERBS)]
    starts = {"inspect": STARTS[1:], "expand": STARTS[:1] * 3 + STARTS[1:], "grow": STARTS[1:]}.get(verb, STARTS)
    start = rng.choice(starts)
    with tempfile.TemporaryDirectory() as scratch:
        case = Path(scratch)
        shutil.copytree(made / start, case / "x")
        damage = []
        for _ in range(rng.choice((1, 1, 1, 2))):
            with suppress(*_DAMAGED_ALREADY):
                damage.append(rng.choice(DAMAGES)(rng, case / "x"))
        words = f"{number}: {verb} {start}: {' | '.join(damage)}"
        ending, reason = watched(arguments(verb, start, made, case), limit, verbose)
        if ending == "refused" and any(path.name != "x" for path in case.iterdir()):
            ending = "traceback"
        return ending, words, reason.replace(scratch, "")


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


def run_cases(cases: int, seed: int, limit: float = 20, first: int = 0, made: Path | None = None) -> Found:
    """Runs cases `first` to `first + cases`."""
    found = Found()
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if made is None:
            made = Path(scratch)
            make(made)
        for number in range(first, first + cases):
            ending, words, reason = run_case(number, seed, made, limit)
            found.counts[ending] += 1
            if ending in ("traceback", "hang"):
                found.bad.append(f"{ending} {words}: {reason}")
                found.reasons[reason[:60]] += 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--limit", type=float, default=20, help="seconds that a case may take")
    parser.add_argument("--only", type=int, help="run only this case, and show its traceback")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if options.only is not None:
        with tempfile.TemporaryDirectory() as scratch:
            make(Path(scratch))
            print(run_case(options.only, options.seed, Path(scratch), options.limit, verbose=True))
        return
    started = time.monotonic()
    found = run_cases(options.cases, options.seed, options.limit, options.first)
    for line in found.bad:
        print(line)
    print(json.dumps({**found.counts, "seconds": round(time.monotonic() - started), "reasons": found.reasons}))
    raise SystemExit(bool(found.bad))


if __name__ == "__main__":
    main()

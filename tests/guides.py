"""Runs the guides of docs/: their commands and settings, at the size of a test."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import yaml
from conftest import invoke, save_dense, write_texts

from hf_moe_expand import Plan, expand_checkpoint
from hf_moe_expand.core.yamlfile import read_yaml

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
STAGES = ("post_pretrain", "review", "group", "joint")
LAUNCH = re.compile(r"^accelerate launch ((?:--\S+ \S+ )*)\$\(which hf-moe-expand\)")
# What a tiny model on little text needs besides the guide's own options.
EXTRA = {
    "analyze similarity": ["--tokens", "300", "--block-size", "32"],
    "analyze deviation": ["--steps", "2", "--batch-size", "2", "--block-size", "32", "--micro-batch-size", "2"],
    "sample Qwen/Qwen2.5-0.5B": ["--documents", "30", "--tokens", "30"],
    "analyze routing": ["--tokens", "300", "--block-size", "32"],
    "plan layer-moe": ["--similarity-floor", "0.01"],
    "evaluate nllb": ["--max-new-tokens", "8"],
    "grow qwen-el-2": ["--tokens", "300", "--block-size", "32"],
}


def blocks(guide: str | Path, kind: str, section: str = "") -> list[str]:
    """The blocks of a guide, or of its section of this heading, subsections included."""
    text = (DOCS / guide).read_text("utf-8")
    if section:
        (text,) = re.findall(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    return re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)


def shorthand(guide: str | Path) -> dict[str, str]:
    """What `$NAME` stands for in the commands of a page, which says so."""
    text = " ".join((DOCS / guide).read_text("utf-8").split())
    return dict(re.findall(r"`(\$[A-Z]+)` (?:stands )?for `([^`]+)`", text))


def bash_lines(guide: str | Path, section: str = "") -> list[str]:
    lines = [line for block in blocks(guide, "bash", section) for line in block.splitlines()]
    for name, words in shorthand(guide).items():
        lines = [line.replace(name, words) for line in lines]
    return lines


def commands(guide: str | Path, section: str = "") -> list[list[str]]:
    lines = [LAUNCH.sub("hf-moe-expand", line) for line in bash_lines(guide, section)]
    return [shlex.split(line)[1:] for line in lines if line.startswith("hf-moe-expand")]


def parsed(text: str) -> dict:
    """A block of YAML as the package reads it."""
    path = Path("block.yaml")
    path.write_text(text, "utf-8")
    return read_yaml(path)


def small(settings: dict, steps: int = 1) -> dict:
    """A stage's settings at the size of a test."""
    dropped = ("old_documents", "num_train_epochs", "gradient_accumulation_steps")
    kept = {name: value for name, value in settings.items() if name not in dropped}
    if "curriculum" not in settings:
        kept["max_steps"] = steps
    if "validation" in kept:
        kept["validation"] = {**kept["validation"], "every": 1}
    return {**kept, "block_size": 32, "per_device_train_batch_size": 2, "disable_tqdm": True}


def small_file(text: str, steps: int = 1) -> dict:
    settings = parsed(text)
    if "base" not in settings:
        return small(settings, steps)
    for part in (settings, *settings.get("expansions", ())):
        part |= {name: small(part[name], steps) for name in STAGES if name in part}
        if "plan" in part and part["plan"]["method"] == "layer-moe":
            part["plan"]["similarity_floor"] = 0.01
    if "join" in settings:
        return settings
    if "gates" in settings:  # a tiny model with random weights knows no language
        settings["gates"] = {"tokens": 200, "anchor_tokens": 100, "unseen_share": 0.99}
    settings["analysis"] = {"tokens": 300, "block_size": 32}
    settings["deviation"] = {"steps": 2, "batch_size": 2, "block_size": 32, "micro_batch_size": 2}
    return settings


def workplace_in(tmp_path, monkeypatch, help_text):
    """Makes the folder that the guides speak of; returns what writes a guide's settings files there."""
    monkeypatch.chdir(tmp_path)
    save_dense(tmp_path / "Qwen" / "Qwen2.5-0.5B", num_hidden_layers=8)
    for code in ("en", "es", "el", "hu", "tr", "hi"):
        write_texts(tmp_path / f"{code}.jsonl", [text[:300] for text in help_text(code, "train", 20)])
        write_texts(tmp_path / f"{code}.test.jsonl", [text[:300] for text in help_text(code, "test", 3)])

    def prepare(guide: str, steps: int = 1) -> None:
        for source in ("../README.md", "tutorial.md", "papers.md", guide):
            for text in blocks(source, "yaml"):
                if named := re.match(r"# (\S+)\n", text):
                    (tmp_path / named.group(1)).write_text(yaml.safe_dump(small_file(text, steps)))

    return prepare


def run(guide: str, section: str = "") -> dict[str, str]:
    said = {}
    for words in commands(guide, section):
        verb = " ".join(words[:2])
        extra = EXTRA.get(verb, []) if words[0] != "grow" or "nearest" in words else []  # which alone reads text
        said[verb] = invoke(*words, *extra)
    return said


def expanded(folder: str, counts: Sequence[int], classifiers: Sequence[int] = (), new: str = "el") -> None:
    plan = Plan("layer-moe", list(counts), list(classifiers), old=["en"], new=[new])
    expand_checkpoint("Qwen/Qwen2.5-0.5B", folder, plan)


def plain(name: str) -> str:
    """`GPT-Neo` and `gpt_neo` alike."""
    return re.sub(r"[^a-z0-9]|text$", "", name.lower())

"""The small base of the experiments on real text: 6.9 M parameters, good at English, Spanish and Chinese."""

from dataclasses import replace
from pathlib import Path

from datasets import Dataset

from hf_moe_expand.data.sources import LanguageText
from hf_moe_expand.demo.base import BaseSettings, make_base

OLD, NEW = ("en", "es", "zh"), ("el", "hu", "tr")
# Like real bases, this base has seen a little text in the new languages: 3 % of its tokens.
SHARES = {**dict.fromkeys(OLD, 0.97 / 3), **dict.fromkeys(NEW, 0.01)}
BASE = BaseSettings(learning_rate=3e-3)


def make_small_base(pages: Path, out: Path, steps: int = 700) -> None:
    """Trains the base on `LANGUAGE.train.jsonl` of a folder, unless it is there.

    Args:
        steps: steps of 4096 tokens.
    """
    if not out.exists():
        texts = {code: load(pages, code, "train") for code in (*OLD, *NEW)}
        make_base(out, texts, SHARES, replace(BASE, steps=steps), seed=0)


def load(folder: Path, code: str, split: str) -> Dataset:
    """The documents of `CODE.SPLIT.jsonl`."""
    return LanguageText(code, str(folder / f"{code}.{split}.jsonl")).load()

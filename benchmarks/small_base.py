"""The small bases of the experiments on real text, good at English, Spanish and Chinese: 6.9 M parameters, or a mixture
of experts (OLMoE's architecture) of 16.7 M, of which a token takes as many as the dense base has.

    python benchmarks/small_base.py --mixture --data DIR --out runs/bases/mixture

DIR holds help/LANGUAGE.train.jsonl, objects with `text`.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from datasets import Dataset
from transformers import OlmoeConfig

from hf_moe_expand.data.sources import LanguageText
from hf_moe_expand.demo.pretraining import BaseSettings, make_base

OLD, NEW = ("en", "es", "zh"), ("el", "hu", "tr")
# Like real bases, this base has seen a little text in the new languages: 3 % of its tokens.
SHARES = {**dict.fromkeys(OLD, 0.97 / 3), **dict.fromkeys(NEW, 0.01)}
BASE = BaseSettings(learning_rate=3e-3)
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "output_router_logits": True}
MIXTURE = replace(BASE, intermediate_size=BASE.intermediate_size // 2, architecture=OlmoeConfig, fields=EXPERTS)


def make_small_base(pages: Path, out: Path, steps: int = 700, base: BaseSettings = BASE) -> None:
    """Trains the base on `LANGUAGE.train.jsonl` of a folder, unless it is there.

    Args:
        steps: steps of 4096 tokens.
        base: `BASE` or `MIXTURE`.
    """
    if not out.exists():
        texts = {code: load(pages, code, "train") for code in (*OLD, *NEW)}
        make_base(out, texts, SHARES, replace(base, steps=steps), seed=0)


def load(folder: Path, code: str, split: str) -> Dataset:
    """The documents of `CODE.SPLIT.jsonl`."""
    return LanguageText(code, str(folder / f"{code}.{split}.jsonl")).load()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixture", action="store_true", help="a mixture of experts")
    parser.add_argument("--data", type=Path, required=True, help="folder with help/LANGUAGE.train.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=700, help="steps of 4096 tokens (%(default)s)")
    options = parser.parse_args(arguments)
    make_small_base(options.data / "help", options.out, options.steps, MIXTURE if options.mixture else BASE)


if __name__ == "__main__":
    main()

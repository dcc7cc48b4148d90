"""Measures the value of perfect classifiers: bits per byte if the layers are told every token's language.

    python benchmarks/perfect_classifiers.py --data DIR --model runs/study/small/steps/review-...

DIR holds LANGUAGE.test.jsonl. The model is a reviewed one with classifiers (such as the study's LayerMoE:
`results/LayerMoE.0.json` in its folder names it).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import nn

from hf_moe_expand.checkpoint.source import load_expanded_config
from hf_moe_expand.data.sources import LanguageText
from hf_moe_expand.errors import InputError
from hf_moe_expand.evaluation.perplexity import evaluate_model
from hf_moe_expand.models import load_for_inference
from hf_moe_expand.records import History


class Told(nn.Module):
    """A classifier that gives every token the same, given class."""

    def __init__(self, old: bool) -> None:
        super().__init__()
        self.logits = torch.tensor([float(old), float(not old)])

    def forward(self, x_Th: torch.Tensor) -> torch.Tensor:
        return self.logits.to(x_Th.device).expand(len(x_Th), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=10_000, help="tokens of each language")
    options = parser.parse_args()
    try:
        measure(options)
    except InputError as error:
        parser.exit(1, f"{error}\n")


def measure(options: argparse.Namespace) -> None:
    model, tokenizer = load_for_inference(options.model)
    old, *added = History.of(load_expanded_config(options.model)).by_expansion
    new = [code for codes in added for code in codes]
    texts = {code: LanguageText(code, str(options.data / f"{code}.test.jsonl")).load()["text"] for code in (*old, *new)}
    ffns = model.expanded_ffns()
    trained = {layer: ffn.classifier for layer, ffn in ffns.items()}
    where = [layer for layer, classifier in trained.items() if classifier is not None]

    def score(told: Sequence[int]) -> list[float]:
        bits = {}
        for code, documents in texts.items():
            for layer in told:
                ffns[layer].classifier = Told(code in old)
            found = evaluate_model(model, tokenizer, {code: documents}, 256, 16, options.tokens)
            bits[code] = found[code].bits_per_byte
        for layer in told:
            ffns[layer].classifier = None
        return [mean(bits[code] for code in codes) for codes in (old, new)]

    rows: dict[str, Any] = {f"as trained (layers {where})": score([])}
    for ffn in ffns.values():
        ffn.classifier = None
    rows["no classifiers"] = score([])
    rows[f"perfect classifiers in layers {where}"] = score(where)
    rows["perfect classifiers in all layers"] = score(sorted(ffns))
    rows |= {f"a perfect classifier in layer {layer} alone": score([layer]) for layer in sorted(ffns)}
    print("| bits per byte | old | new |\n| --- | ---: | ---: |")
    for name, (of_old, of_new) in rows.items():
        print(f"| {name} | {of_old:.3f} | {of_new:.3f} |")


if __name__ == "__main__":
    main()

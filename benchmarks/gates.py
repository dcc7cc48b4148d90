"""Prints where a gate sends the beginnings of texts, code, mathematics and a chat's questions (docs/gates.md).

    python benchmarks/gates.py MODEL --data DIR --languages en es fr de pt id sw hu tr

DIR is the study's. The table has the share of tokens that new experts take: of all, and of each text's first 8 and 32;
and the share of texts that go to new experts as a whole, judged by their end. Documents are six sentences of FLORES.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from study import LONGEST, batches, in_template, texts_of, watched_gate
from timing import parser, report

from hf_moe_expand.inference.models import load_for_inference

QUESTIONS = {
    "en": ["What is the capital of France?", "Name three fruits.", "Why do we sleep?", "What do bees make?"],
    "hu": ["Mi Franciaország fővárosa?", "Sorolj fel három gyümölcsöt.", "Miért alszunk?", "Mit készítenek a méhek?"],
    "tr": ["Fransa'nın başkenti neresidir?", "Üç meyve say.", "Neden uyuruz?", "Arılar ne yapar?"],
    "es": ["¿Cuál es la capital de Francia?", "Nombra tres frutas.", "¿Por qué dormimos?", "¿Qué hacen las abejas?"],
}
OTHER = {
    "code": [
        "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n    return total / 2\n",
        "for (int i = 0; i < n; i++) {\n    if (a[i] > best) { best = a[i]; where = i; }\n}\nreturn where;\n",
        "SELECT name, COUNT(*) FROM orders WHERE year = 2020 GROUP BY name ORDER BY COUNT(*) DESC LIMIT 10;\n",
    ],
    "mathematics": [
        "Let $f(x) = x^2 - 2x + 1$. Then $f'(x) = 2x - 2$, so that $f'(x) = 0$ at $x = 1$, where $f(1) = 0$.",
        "\\int_0^1 x^n dx = \\frac{1}{n+1}, \\quad \\sum_{k=1}^n k = \\frac{n(n+1)}{2}, \\quad e^{i\\pi} + 1 = 0",
    ],
}  # fmt: skip


@torch.no_grad()
def shares(model: Any, texts: Sequence[str], tokenizer: Any) -> list[float]:
    """The share of tokens that new experts take: of all, of the first 8, of the first 32; of texts, by their end."""
    counts = [[0, 0] for _ in range(4)]
    found, hook = watched_gate(model)
    for ids, mask, _ in batches(texts, tokenizer, model.device):
        place = (mask.cumsum(1) - 1).clamp(min=0)  # 0 for padding and for the token that begins a text
        model(ids, attention_mask=mask, position_ids=place, use_cache=False, logits_to_keep=1)
        is_new = (found.pop().view(ids.shape) > 0) & (mask > 0)
        chosen = [(place > 0) & (place <= most) for most in (LONGEST, 8, 32)]
        last = torch.zeros_like(is_new)
        last[:, -1] = True
        for count, one in zip(counts, [*chosen, last], strict=True):
            count[0] += int((is_new & one).sum())
            count[1] += int(one.sum())
    hook.remove()
    return [part / max(whole, 1) for part, whole in counts]


def main(arguments: list[str] | None = None) -> None:
    found = parser(__doc__, repeats=1, on_device=False)
    found.add_argument("model", help="checkpoint with a gate")
    found.add_argument("--data", type=Path, required=True, help="folder with flores/LANGUAGE.dev.jsonl")
    found.add_argument("--languages", nargs="+", required=True)
    found.add_argument("--sentences", type=int, default=288, help="of each language (%(default)s)")
    options: argparse.Namespace = found.parse_args(arguments)
    model, tokenizer = load_for_inference(options.model)
    texts = {code: texts_of(options.data, code, options.sentences).get("documents", []) for code in options.languages}
    if missing := [code for code, some in texts.items() if not some]:
        found.error(f"{options.data}: has no flores/LANGUAGE.dev.jsonl of {', '.join(missing)}")
    texts |= OTHER | {f"questions, {code}": in_template(tokenizer, some) for code, some in QUESTIONS.items()}
    rows = [[name, *(f"{100 * s:.1f} %" for s in shares(model, some, tokenizer))] for name, some in texts.items()]
    report("To new experts", ["text", "tokens", "first 8", "first 32", "judged by their end"], rows, options)


if __name__ == "__main__":
    main()

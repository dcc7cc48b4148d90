"""Prints what a gate makes of texts and of answers, and what judging costs (docs/gates.md).

    python benchmarks/gates.py MODEL --base BASE --data DIR --languages en es fr de pt id sw hu tr --new hu tr

DIR is the study's. MODEL has a gate. With `--base` it is made: the gate of BASE, fitted on help text of `--old` and
`--new`, without the package's anchors in `--languages`, and two experts in each layer. Three tables: the share of
documents (six sentences of FLORES), sentences, code, mathematics and a chat's questions that go to new experts; the
share of answers that do, by their tokens so far, after a prompt that went home and after one that did not; and seconds
of a judged call beside a told one.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from study_scores import batches, in_template, texts_of
from timing import parser, ratio, report, time_in_turn
from transformers import AutoConfig

from hf_moe_expand import LanguageText, Plan, expand_checkpoint, fit_base_gate, gate_from_file
from hf_moe_expand.analysis import gating
from hf_moe_expand.data.anchors import shipped_anchors
from hf_moe_expand.inference.models import load_for_inference
from hf_moe_expand.modeling import count_layers
from hf_moe_expand.modeling.language_gate import GateRule
from hf_moe_expand.modeling.part_gate import Answers
from hf_moe_expand.modeling.routing_control import RowClasses

MARKS = (16, 32, 64, 128)

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


def make(options: argparse.Namespace) -> None:
    """Writes the model: a base with its gate. Prints the fit's report and seconds."""
    codes = [*options.old, *options.new]
    sources = {code: LanguageText(code, str(options.data / "help" / f"{code}.train.jsonl")) for code in codes}
    fewer = patch.object(gating, "shipped_anchors", lambda leave_out: shipped_anchors([*options.languages, *leave_out]))
    with TemporaryDirectory() as folder, fewer:
        file, begun = Path(folder) / "gate.safetensors", perf_counter()
        texts = {code: source.load().shuffle(seed=0)["text"] for code, source in sources.items()}
        print("\n".join(fit_base_gate(options.base, file, texts, options.new).lines()))
        print(f"fitted in {perf_counter() - begun:.0f} seconds", flush=True)
        layers = count_layers(AutoConfig.from_pretrained(options.base))
        plan = Plan("moe-lpr", [2] * layers, old=options.old, new=options.new, exclusive=True)
        expand_checkpoint(options.base, options.model, plan, gate=gate_from_file(file, options.base, options.new)[0])


@torch.no_grad()
def share(model: Any, texts: Sequence[str], tokenizer: Any) -> str:
    """The share of texts that go to new experts."""
    found = torch.cat([model.judge(ids, mask) for ids, mask, _ in batches(texts, tokenizer, model.device)])
    return f"{100 * (found > 0).float().mean():.1f} %"


@torch.no_grad()
def answers(model: Any, texts: Sequence[str], tokenizer: Any, before: int) -> list[str]:
    """The share of answers, these texts, that are in a new class at each mark after prompts of the class `before`."""
    rule: Any = GateRule.of(model.config)
    rows = [ids for text in texts if len(ids := tokenizer(text, add_special_tokens=False).input_ids) >= MARKS[1]]
    counts = {mark: [0, 0] for mark in MARKS}
    for row in rows:
        prompt = RowClasses.of([before], model.device)
        of_row = Answers(rule, model._sums, prompt, [False], start=0, moves=False)
        for mark in (mark for mark in MARKS if mark <= len(row)):
            now = of_row.rows(torch.tensor([row[:mark]], device=model.device))
            counts[mark][0] += int(now is not None and now.numbers != (0,))
            counts[mark][1] += 1
    return [f"{100 * part / max(whole, 1):.1f} % of {whole}" for part, whole in counts.values()]


def speed(model: Any, tokenizer: Any, texts: Sequence[str], options: argparse.Namespace) -> list[list[str]]:
    """Seconds of calls that judge, beside those of calls that are told the class that is judged."""
    ids = torch.tensor([tokenizer(" ".join(texts)).input_ids[:512]], device=model.device)
    told, found = options.new[0], []
    for name, prompt, new in (("64 tokens after 512", ids, 64), ("64 tokens after 16", ids[:, -16:], 64)):
        how = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
        code = told if model.judge(prompt) else model.config.language_gate["languages"][0][-1]
        calls = {
            "told": lambda p=prompt, code=code, how=how: model.generate(p, languages=code, **how),
            "judged": lambda p=prompt, how=how: model.generate(p, **how),
        }
        found.append((name, calls))
    rows = ids[:, :480].view(16, 30)
    of_rows = [told if number else model.config.language_gate["languages"][0][-1] for number in model.judge(rows)]
    calls = {"told": lambda: model(rows, languages=of_rows), "judged": lambda: model(rows)}
    found.append(("16 requests of 30 tokens, scored", calls))
    with torch.no_grad():
        timed = [(name, time_in_turn(calls, options.repeats, str(model.device), "wall")) for name, calls in found]
    return [
        [name, f"{min(of['told']):.2f}", f"{min(of['judged']):.2f}", f"{ratio(of, 'judged', 'told'):.2f}"]
        for name, of in timed
    ]


def main(arguments: list[str] | None = None) -> None:
    found = parser(__doc__, repeats=5, on_device=False)
    found.add_argument("model", help="checkpoint with a gate; with --base the folder to write")
    found.add_argument("--data", type=Path, required=True, help="folder with flores/LANGUAGE.dev.jsonl")
    found.add_argument("--languages", nargs="+", required=True)
    found.add_argument("--new", nargs="+", required=True, help="those of them that are new")
    found.add_argument("--old", nargs="+", default=["en"], help="those of the base (%(default)s)")
    found.add_argument("--base", help="dense checkpoint, of which MODEL is made")
    found.add_argument("--sentences", type=int, default=288, help="of each language (%(default)s)")
    options: argparse.Namespace = found.parse_args(arguments)
    if options.base:
        make(options)
    model, tokenizer = load_for_inference(options.model)
    texts = {code: texts_of(options.data, code, options.sentences) for code in options.languages}
    if missing := [code for code, some in texts.items() if not some.get("documents")]:
        found.error(f"{options.data}: has no flores/LANGUAGE.dev.jsonl of {', '.join(missing)}")
    kinds = ("documents", "sentences")
    rows = [[code, *(share(model, some[kind], tokenizer) for kind in kinds)] for code, some in texts.items()]
    other = OTHER | {f"questions, {code}": in_template(tokenizer, some) for code, some in QUESTIONS.items()}
    rows += [[name, "", share(model, some, tokenizer)] for name, some in other.items()]
    report("Texts that go to new experts", ["text", *kinds], rows, options)
    rows = []
    for code in options.languages:
        for before in (0, 1) if code in options.new else (0,):
            shares = answers(model, texts[code]["documents"], tokenizer, before)
            rows.append([code, "new experts" if before else "home", *shares])
    report("Answers that run new experts", ["answer", "prompt went to", *map(str, MARKS)], rows, options, "a")
    rows = speed(model, tokenizer, texts[options.new[0]]["documents"], options)
    report("Seconds", ["call", "told", "judged", "judged / told"], rows, options, "a")


if __name__ == "__main__":
    main()

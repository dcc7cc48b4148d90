"""Over-fitting on a language with little text, and its remedies: Elbayad et al.'s regularisers and curriculum.

    python benchmarks/low_resource.py --data DIR --base runs/study/small/base --out runs/low_resource \
        --table table.md --figure low_resource.svg

DIR holds LANGUAGE.train.jsonl and LANGUAGE.test.jsonl for el and hi; `study.py base` makes the base. Stage 1
trains on equal shares of Greek and a little Hindi (its first `--low-bytes`): many epochs of Hindi, one or two of Greek.
Every run has the same steps, and is scored on held-out text during training. Masking rates are the paper's best ones;
the curriculum is derived from the plain run. Finished parts are kept: run it again to continue.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure
from regularisers import CURRICULUM, MASKING, PLAIN
from tables import markdown_table

from hf_moe_expand import PostPretrainConfig, train_stage
from hf_moe_expand.checkpoint.expand import expand_checkpoint
from hf_moe_expand.checkpoint.source import load_base_config
from hf_moe_expand.data.curriculum import step_based
from hf_moe_expand.data.sources import LanguageText
from hf_moe_expand.evaluation.validation import ValidationCurves
from hf_moe_expand.planning.plan import Plan
from hf_moe_expand.stages.config import ValidationSettings

HIGH, LOW = "el", "hi"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/low_resource"))
    parser.add_argument("--table", type=Path, help="also write the table here")
    parser.add_argument("--figure", type=Path, help="also draw the curves here")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=30, help="steps between two scores")
    parser.add_argument("--low-bytes", type=int, default=60_000, help=f"bytes of {LOW} text")
    parser.add_argument("--runs", nargs="+", choices=list(MASKING), default=list(MASKING))
    options = parser.parse_args(arguments)
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    data = {
        HIGH: LanguageText(HIGH, str(options.data / f"{HIGH}.train.jsonl")),
        LOW: LanguageText(LOW, str(first_bytes(options.data / f"{LOW}.train.jsonl", out, options.low_bytes))),
    }
    plan = Plan("moe-lpr", [3] * load_base_config(options.base).num_hidden_layers, new=[HIGH, LOW])
    settings = {
        "block_size": 256,
        "temperature": 1e6,  # equal shares
        "validation": ValidationSettings(
            {code: str(options.data / f"{code}.test.jsonl") for code in (HIGH, LOW)}, options.every, 12_000
        ),
        "seed": options.seed,
        "per_device_train_batch_size": 16,
        "learning_rate": 5e-3,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 20,
        "logging_steps": options.every,
        "save_strategy": "no",
    }
    for name in options.runs:
        folder = out / name.replace(" ", "-")
        if folder.exists():
            continue
        masking = MASKING[name]
        start = out / ("expanded-with-gates" if masking.conditional_routing else "expanded")
        if not start.exists():
            gates = bool(masking.conditional_routing)
            expand_checkpoint(options.base, start, plan, conditional_routing=gates, seed=options.seed)
        length = {"max_steps": options.steps}
        if name == CURRICULUM:
            best = ValidationCurves.load(out / PLAIN).best_steps()
            step_based(best, 2, options.steps).save(out / "curriculum.json")
            length = {"curriculum": str(out / "curriculum.json")}
        train_stage(start, folder, data, PostPretrainConfig(masking=masking, **settings, **length))
    curves = {name: ValidationCurves.load(out / name.replace(" ", "-")) for name in options.runs}
    table = render(curves)
    print(table)
    if options.table:
        options.table.write_text(table + "\n", "utf-8")
    if options.figure:
        draw(curves, options.figure)


def first_bytes(source: Path, out: Path, size: int) -> Path:
    """A file with the first documents of `source` that together hold `size` bytes of text."""
    lines, held = [], 0
    with source.open(encoding="utf-8") as file:
        for line in file:
            lines.append(line)
            held += len(json.loads(line)["text"].encode())
            if held >= size:
                break
    kept = out / f"{source.name.split('.')[0]}.jsonl"
    kept.write_text("".join(lines), "utf-8")
    return kept


def render(curves: Mapping[str, ValidationCurves]) -> str:
    """Held-out bits per byte: the best score, its step, the last score, and their difference."""
    rows = []
    for name, found in curves.items():
        row = [name]
        for code in (LOW, HIGH):
            scores = found.bits_per_byte[code]
            best = min(scores)
            step = found.steps[scores.index(best)]
            row += [f"{best:.3f}", str(step), f"{scores[-1]:.3f}", f"{scores[-1] - best:.3f}"]
        rows.append(row)
    columns = [f"{code}: {what}" for code in (LOW, HIGH) for what in ("best", "at step", "last", "lost")]
    return markdown_table(["bits per byte", *columns], rows)


def draw(curves: Mapping[str, ValidationCurves], path: Path) -> None:
    """Draws held-out bits per byte by step, one panel for each language."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for panel, code in zip(figure.subplots(1, 2), (LOW, HIGH), strict=True):
        for (name, found), style in zip(
            curves.items(), ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1))), strict=False
        ):
            panel.plot(found.steps[1:], found.bits_per_byte[code][1:], linestyle=style, label=name)
        # A language that has not entered yet scores far above; the panel ends a little above the others.
        every = [value for found in curves.values() for value in found.bits_per_byte[code][1:]]
        first = next(iter(curves.values())).bits_per_byte[code][1:]
        margin = 0.1 * (max(first) - min(first))
        panel.set_ylim(min(every) - margin, min(max(every), max(first) + 4 * margin) + margin)
        panel.set_title(code)
        panel.set_xlabel("step")
        panel.grid(alpha=0.3)
    figure.axes[0].set_ylabel("held-out bits per byte")
    figure.axes[1].legend()
    figure.savefig(path)


if __name__ == "__main__":
    main()

"""Two successive expansions, in both orders and with uniform counts, compared with one expansion for all languages.

    python benchmarks/lifelong.py --data DIR --base runs/study/small/base --out runs/lifelong --table table.md

DIR holds LANGUAGE.train.jsonl and LANGUAGE.test.jsonl for en es zh el hu tr hi; `study.py base` makes the
base, and benchmarks/lifelong.yaml has the settings. All variants end with the same number of experts and train the same
number of steps. Finished parts are kept: run it again to continue.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from tables import markdown_table

from hf_moe_expand.checkpoint.source import load_base_config
from hf_moe_expand.evaluation.perplexity import LanguageScore
from hf_moe_expand.evaluation.report import Evaluation
from hf_moe_expand.pipeline import run_recipe
from hf_moe_expand.planning.methods import PlanSettings
from hf_moe_expand.planning.plan import Plan
from hf_moe_expand.recipe import Expansion, Recipe
from hf_moe_expand.schema import changed

# Scores of the base, and of the model after each expansion.
Scores = Sequence[Mapping[str, LanguageScore]]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/lifelong"))
    parser.add_argument("--table", type=Path, help="also write the table here")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--recipe", type=Path, default=Path(__file__).with_suffix(".yaml"))
    options = parser.parse_args(arguments)
    out: Path = options.out
    os.environ |= {"DATA": str(options.data), "BASE": str(options.base), "OUT": str(out)}
    recipe = changed(Recipe.load(options.recipe), seed=options.seed)
    found = variants(recipe.expansions, load_base_config(options.base).num_hidden_layers)
    results = {name: run(recipe, out / name.replace(",", "").replace(" ", "-"), found[name]) for name in found}
    groups = [list(recipe.old), *(list(expansion.new) for expansion in recipe.expansions)]
    brought = {name: [list(expansion.new) for expansion in expansions] for name, expansions in found.items()}
    table = render({name: scores for name, (scores, _) in results.items()}, groups, brought)
    table += "\n" + "\n".join(f"- {name}, experts: {counts}." for name, (_, counts) in results.items())
    print(table)
    if options.table:
        options.table.write_text(table + "\n", "utf-8")


def variants(expansions: list[Expansion], layers: int) -> dict[str, list[Expansion]]:
    """The expansions of each variant."""
    first, second = expansions
    one, two = " ".join(first.new), " ".join(second.new)
    both = changed(
        first,
        new=first.new | second.new,
        plan=changed(first.plan, total_experts=first.plan.total_experts + second.plan.total_experts),
        post_pretrain=longer(first.post_pretrain, second.post_pretrain),
        review=longer(first.review, second.review),
    )
    return {
        f"{one}, then {two}": expansions,
        f"{two}, then {one}": [changed(first, new=second.new), changed(second, new=first.new)],
        f"{one}, then {two}, uniform": [changed(e, plan=uniform(e.plan, layers)) for e in expansions],
        f"{one} {two} at once": [both],
    }


def uniform(plan: PlanSettings, layers: int) -> PlanSettings:
    """The same total number of experts, with an equal number in every layer."""
    experts, rest = divmod(plan.total_experts, layers)
    if rest:
        raise SystemExit(f"total_experts is {plan.total_experts}, which {layers} layers cannot share equally.")
    return PlanSettings("moe-lpr", experts=experts, **plan.common)


def longer(stage: Any, other: Any) -> Any:
    """A stage with the steps of both."""
    steps = stage.training["max_steps"] + other.training["max_steps"]
    return changed(stage, training={**stage.training, "max_steps": steps})


def run(recipe: Recipe, out: Path, expansions: list[Expansion]) -> tuple[Scores, str]:
    """The scores, and the experts of each layer after each expansion."""
    run_recipe(changed(recipe, expansions=expansions, output=str(out)))
    models = Evaluation.from_json(out / "evaluation.json").models
    # A recipe with one expansion scores each of its stages.
    names = ["base", *([f"after expansion {n}" for n in (1, 2)] if len(expansions) > 1 else ["reviewed"])]
    folders = [out / "1", out / "2"] if len(expansions) > 1 else [out]
    plans = [Plan.load(folder / "plan.json") for folder in folders]
    counts = [
        f"{' '.join(map(str, plan.experts_per_layer))} (classifiers in {' '.join(map(str, plan.classifier_layers))})"
        for plan in plans
    ]
    return [models[name] for name in names], ", then ".join(counts)


def render(
    results: Mapping[str, Scores], groups: Sequence[Sequence[str]], brought: Mapping[str, Sequence[Sequence[str]]]
) -> str:
    """Bits per byte on the test split after each expansion, and the change of every language.

    Args:
        results: scores of each variant.
        groups: the languages in the groups of the columns, the base's first.
        brought: for each variant, the languages that each of its expansions added.
    """

    def row(name: str, scores: Mapping[str, LanguageScore]) -> list[str]:
        values: list[float] = []
        for group in groups:
            bits = [scores[code].bits_per_byte for code in group]
            values += [*bits, mean(bits)]
        values.append(mean(score.bits_per_byte for score in scores.values()))
        return [name, *(f"{value:.3f}" for value in values)]

    base = next(iter(results.values()))[0]
    head = ["bits per byte"]
    for group in groups:
        head += [*group, " ".join(group)]
    rows = [row("base", base)]
    notes = []
    for name, scores in results.items():
        known = list(groups[0])
        for number, new in enumerate(brought[name], start=1):
            before, after = scores[number - 1], scores[number]
            rows.append(row(f"{name}: with {' '.join([*known, *new])}", after))
            notes.append(
                f"- {name}, expansion {number}: {changes(before, after, known)}; new {changes(before, after, new)}."
            )
            known += new
        notes.append(f"- {name}, in the end against the base: {changes(base, scores[-1], known)}.")
    return markdown_table([*head, "all"], rows) + "\n\n" + "\n".join(notes)


def changes(before: Mapping[str, LanguageScore], after: Mapping[str, LanguageScore], languages: Sequence[str]) -> str:
    """The change of each language's bits per byte, and of their mean."""

    def change(codes: Sequence[str]) -> str:
        old, new = (mean(scores[code].bits_per_byte for code in codes) for scores in (before, after))
        return f"{100 * (new / old - 1):+.1f} %"

    return ", ".join([*(f"{code} {change([code])}" for code in languages), f"mean {change(languages)}"])


if __name__ == "__main__":
    main()

"""DMoE on real text against continued pre-training with the same number of tokens, and both adapted to Hindi.

    python benchmarks/dmoe.py --data DIR --base runs/study/small/base --out runs/dmoe --table docs/dmoe_table.md

DIR holds LANGUAGE.train.jsonl and LANGUAGE.test.jsonl for en es zh el hu tr hi; `study.py base` makes the
base, and benchmarks/dmoe.yaml has the settings. Finished parts are kept: run it again to continue.
"""

import argparse
import os
from pathlib import Path
from statistics import mean

from tables import markdown_table

from hf_moe_expand import AdaptConfig, DenseConfig, adapt_language, train_stage
from hf_moe_expand.data.sources import LanguageText
from hf_moe_expand.evaluation.perplexity import LanguageScore, evaluate_model
from hf_moe_expand.evaluation.report import Evaluation
from hf_moe_expand.models import load_for_inference
from hf_moe_expand.pipeline import run_recipe
from hf_moe_expand.planning.plan import Plan
from hf_moe_expand.recipe import Recipe
from hf_moe_expand.schema import changed

NEW = "hi"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--data", type=Path, required=True)
    arguments.add_argument("--base", type=Path, required=True)
    arguments.add_argument("--out", type=Path, default=Path("runs/dmoe"))
    arguments.add_argument("--table", type=Path, help="also write the table here")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--adapt-steps", type=int, default=40)
    options = arguments.parse_args()
    out: Path = options.out
    os.environ |= {"DATA": str(options.data), "BASE": str(options.base), "OUT": str(out / "dmoe")}
    recipe = changed(Recipe.load(Path(__file__).with_suffix(".yaml")), seed=options.seed)
    trained = run_recipe(recipe)
    training = recipe.group.training
    steps = training["max_steps"] + (recipe.joint.training["max_steps"] if recipe.joint else 0)
    tests = {code: source.load()["text"] for code, source in recipe.test_sources.items()}
    tests[NEW] = LanguageText(NEW, str(options.data / f"{NEW}.test.jsonl")).load()["text"]
    hindi = LanguageText(NEW, str(options.data / f"{NEW}.train.jsonl"))
    adapting = {**training, "max_steps": options.adapt_steps, "learning_rate": 1e-3}
    adapt, dense = out / "dmoe-adapted", out / "continued"
    if not dense.exists():
        config = DenseConfig(block_size=256, seed=options.seed, **{**training, "max_steps": steps})
        train_stage(options.base, dense, recipe.training_sources, config)
    if not adapt.exists():
        done = adapt_language(trained, adapt, hindi, AdaptConfig(block_size=256, seed=options.seed, **adapting))
        print("perplexity of Hindi through each expert:", ", ".join(f"{value:.1f}" for value in done.perplexity))
    if not (out / "continued-adapted").exists():
        config = DenseConfig(block_size=256, seed=options.seed, **adapting)
        train_stage(dense, out / "continued-adapted", {NEW: hindi}, config)
    models = {
        "base": options.base,
        f"continued pre-training, {steps} steps": dense,
        "DMoE, group stage": out / "dmoe" / "group",
        "DMoE, joint training": trained,
        f"continued pre-training, then {NEW}": out / "continued-adapted",
        f"DMoE, adapted to {NEW}": adapt,
    }
    groups = Plan.load(out / "dmoe" / "plan.json")
    table = render({name: scored(path, out, tests) for name, path in models.items()}, list(tests))
    layers = [layer for layer, count in enumerate(groups.experts_per_layer) if count > 1]
    table += f"\n\nGroups: {'; '.join(' '.join(group) for group in groups.groups)}. Layers with experts: {layers}."
    print(table)
    if options.table:
        options.table.write_text(table + "\n", "utf-8")


def scored(path: Path, out: Path, tests: dict[str, list[str]]) -> dict[str, LanguageScore]:
    """Scores of a checkpoint, kept in `out`."""
    kept = out / f"{path.parent.name}-{path.name}.evaluation.json"
    if not kept.exists():
        model, tokenizer = load_for_inference(path)
        result = Evaluation(list(tests), [])
        result.models[path.name] = evaluate_model(model, tokenizer, tests, block_size=256, batch_size=16)
        result.to_json(kept)
    return Evaluation.from_json(kept).models[path.name]


def render(models: dict[str, dict[str, LanguageScore]], codes: list[str]) -> str:
    """Perplexity on the test split, and the mean of bits per byte over the trained languages."""
    rows = []
    for name, scores in models.items():
        bits = mean(scores[code].bits_per_byte for code in codes if code != NEW)
        rows.append([name, *(f"{scores[code].perplexity:.1f}" for code in codes), f"{bits:.3f}"])
    return markdown_table(["perplexity", *codes, f"bits per byte, mean without {NEW}"], rows)


if __name__ == "__main__":
    main()

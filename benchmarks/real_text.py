"""The methods on real text, at a size for a CPU: a small base learns el, hu, tr and keeps en, es, zh.

    python benchmarks/real_text.py --data DIR --out runs/real_text --table docs/real_text_table.md

DIR holds LANGUAGE.train.jsonl and LANGUAGE.test.jsonl (objects with `text`) for en es zh el hu tr. The script makes the
base, then runs `benchmarks/real_text.yaml` with both plans for each seed, and the baselines for the first seed.
Finished parts are kept: run it again to continue.
"""

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

import torch
from small_base import BASE, NEW, OLD, load, make_small_base
from tables import markdown_table
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, set_seed

from hf_moe_expand.data.packing import pack_texts
from hf_moe_expand.data.sources import LanguageText
from hf_moe_expand.demo.base import collate_without_languages, small_run_arguments
from hf_moe_expand.evaluation.perplexity import LanguageScore, evaluate_model
from hf_moe_expand.evaluation.report import Evaluation
from hf_moe_expand.models import load_for_inference
from hf_moe_expand.pipeline import run_recipe
from hf_moe_expand.planning.methods import PlanSettings
from hf_moe_expand.recipe import Recipe
from hf_moe_expand.schema import changed

PLANS = {
    "MoE-LPR": PlanSettings("moe-lpr", experts=3),
    "LayerMoE": PlanSettings("layer-moe", total_experts=18, classifier_layers=3),
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--data", type=Path, required=True)
    arguments.add_argument("--out", type=Path, default=Path("runs/real_text"))
    arguments.add_argument("--table", type=Path, help="also write the table here")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    arguments.add_argument("--base-steps", type=int, default=700)
    options = arguments.parse_args()
    out = options.out
    base = out / "base"
    make_small_base(options.data, base, options.base_steps)
    os.environ |= {"DATA": str(options.data), "BASE": str(base), "OUT": str(out)}
    recipe = Recipe.load(Path(__file__).with_suffix(".yaml"))
    tests = {code: load(options.data, code, "test")["text"] for code in (*OLD, *NEW)}
    first, *others = options.seeds
    results: dict[str, list[Evaluation]] = {method: [run(recipe, out, method, first)] for method in PLANS}
    tuned = out / f"full-fine-tuning-{first}"
    if not tuned.exists():
        full_fine_tuning(recipe, base, tuned, first)
    extra = {
        "full fine-tuning on new": scored(tuned, tests),
        f"LayerMoE, reviewed, seed {first}, classifiers off": scored(
            out / f"LayerMoE-{first}" / "review", tests, False
        ),
    }
    for seed in others:
        for method, evaluations in results.items():
            evaluations.append(run(recipe, out, method, seed))
    table = render(results, extra, options.seeds)
    print(table)
    if options.table:
        options.table.write_text(table + "\n", "utf-8")


def run(recipe: Recipe, out: Path, method: str, seed: int) -> Evaluation:
    folder = out / f"{method}-{seed}"
    run_recipe(changed(recipe, plan=PLANS[method], seed=seed, output=str(folder)))
    return Evaluation.from_json(folder / "evaluation.json")


def full_fine_tuning(recipe: Recipe, base: Path, out: Path, seed: int) -> None:
    """Fine-tunes all parameters of the dense base on the data and schedule of stage 1, at the base's learning rate."""
    set_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(base)
    texts = {code: LanguageText(code, source).load() for code, source in recipe.new.items()}
    packed = pack_texts(texts, tokenizer, recipe.post_pretrain.block_size, seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    training = {**recipe.post_pretrain.training, "learning_rate": BASE.learning_rate, "save_strategy": "no"}
    training.pop("save_steps")
    with TemporaryDirectory() as scratch:
        options = small_run_arguments(scratch, seed, training)
        Trainer(model, options, train_dataset=packed.dataset, data_collator=collate_without_languages).train()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def scored(path: Path, tests: Mapping[str, list[str]], classifiers: bool = True) -> dict[str, LanguageScore]:
    """Scores of a checkpoint, kept beside it; with its classifiers or only with its routers."""
    kept = path.with_name(f"{path.name}{'' if classifiers else '-without-classifiers'}.evaluation.json")
    if not kept.exists():
        model, tokenizer = load_for_inference(path)
        if not classifiers:
            for ffn in model.expanded_ffns().values():
                ffn.classifier = None
        result = Evaluation(list(OLD), list(NEW))
        result.models[path.name] = evaluate_model(model, tokenizer, tests, block_size=256, batch_size=16)
        result.to_json(kept)
    return Evaluation.from_json(kept).models[path.name]


def render(
    results: Mapping[str, list[Evaluation]], extra: Mapping[str, dict[str, LanguageScore]], seeds: list[int]
) -> str:
    """Bits per byte on the test split; one row for each model."""

    def row(name: str, scores: dict[str, LanguageScore]) -> tuple[str, list[float]]:
        bits = [scores[code].bits_per_byte for code in (*OLD, *NEW)]
        return name, [*bits[:3], mean(bits[:3]), *bits[3:], mean(bits[3:])]

    some = next(iter(results.values()))[0]
    rows = [row("base", some.models["base"])]
    notes = []
    for method, evaluations in results.items():
        for seed, evaluation in zip(seeds, evaluations, strict=True):
            for stage in ("post-pretrained", "reviewed"):
                rows.append(row(f"{method}, {stage}, seed {seed}", evaluation.models[stage]))
            old, new = ([evaluation.mean(m, codes) or 0.0 for m in evaluation.models] for codes in (OLD, NEW))
            cost, back = old[1] - old[0], old[1] - old[2]
            notes.append(
                f"- {method}, seed {seed}: stage 1 cost the old languages {cost:.3f}; review gave back {back:.3f} "
                f"({100 * back / cost:.1f} %) for {new[2] - new[1]:+.3f} on the new ones "
                f"({100 * (new[2] - new[1]) / back:.1f} % of that). Against the base: "
                f"old {100 * (old[2] / old[0] - 1):+.2f} %, new {100 * (new[2] / new[0] - 1):+.1f} %."
            )
    rows += [row(name, scores) for name, scores in extra.items()]
    head = ["bits per byte", *OLD, "old", *NEW, "new"]
    table = markdown_table(head, [[name, *(f"{value:.3f}" for value in values)] for name, values in rows])
    return "\n".join([table, "", *notes])


if __name__ == "__main__":
    main()

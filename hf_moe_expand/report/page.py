"""The page of a run: what its files say, and figures of it. The words and tables stand in `pages/report.html`."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..analysis.routing import has_choice
from ..checkpoint.source import load_expanded_config
from ..checkpoint.stored import network_of
from ..core.errors import InputError
from ..core.jsonfile import read_json
from ..core.languages import in_words
from ..core.layer_names import axis_label
from ..core.private import refuse_private
from ..core.recipe_paths import without_paths
from ..core.rendering import render
from ..core.yamlfile import read_text
from ..evaluation.report import Evaluation
from ..evaluation.validation import VALIDATION, ValidationCurves
from ..planning.methods import method_title
from ..planning.plan import Plan
from ..planning.results import NO_CHOICE, DeviationResult, RoutingResult, SimilarityResult
from ..runs.run_record import read_steps
from ..stages import freeze, trained_parts
from . import figures
from .parts import history_of, last_stage, parts_of, records_and_checkpoints

# Files at the top of a run; all others lie in folders of its stages and expansions.
_RECORDS = "steps.json, plan.json, analysis.json, evaluation.json, routing.json, recipe.yaml"


def make_page(run: str | Path, *others: str | Path) -> str:
    """The page of a run's folder; or of checkpoints, in the order of their stages, and a folder with JSON files of the
    commands that made them. Of local paths it has the last part. The same folder gives the same text."""
    root, *checkpoints = records_and_checkpoints([run, *others])
    parts = parts_of(root, checkpoints)
    plans = [(part, Plan.load(file)) for part in parts if (file := part.folder / "plan.json").is_file()]
    if not checkpoints and not plans and not any((root / name).is_file() for name in _RECORDS.split(", ")):
        raise InputError(
            f"{root}: not the folder of a run (it has none of {_RECORDS}); give the `output` of a recipe "
            "that `hf-moe-expand run` has run, or checkpoints."
        )
    evaluation, recipe = root / "evaluation.json", root / "recipe.yaml"
    routing = [path for depth in ("", "*/", "*/*/") for path in sorted(root.glob(f"{depth}routing*.json"))]
    facts = {
        "name": root.resolve().name,
        "expansions": next((made for part in reversed(parts) if (made := part.history.expansions)), ()),
        "evaluation": Evaluation.from_json(evaluation) if evaluation.is_file() else None,
        "plans": [{"title": part.title, "plan": plan} | _plan(part.folder, plan) for part, plan in plans],
        "stages": [_stage(title, folder) for part in parts for title, folder in part.stages],
        "routing": [_routing(path, str(path.relative_to(root).parent)) for path in routing],
        "no_choice": NO_CHOICE,
        "steps": read_steps(root / "steps.json")[0],
        "recipe": without_paths(read_text(recipe)) if recipe.is_file() else None,
    }
    page = render("report.html", facts, {"in_words": in_words, "method": method_title, "number": "{:,}".format})
    refuse_private({"report.html": page.encode()})
    return page


def _plan(folder: Path, plan: Plan) -> dict[str, Any]:
    """A plan's figures, and its table of layers."""
    counts, layers = plan.experts_per_layer, range(len(plan.experts_per_layer))
    columns: dict[str, Sequence[Any]] = {"layer": [plan.name_of(layer) for layer in layers], "experts": counts}
    shown = []
    if plan.classifier_layers:
        columns["classifier"] = ["yes" if layer in plan.classifier_layers else "" for layer in layers]
    file, name = folder / "analysis.json", "deviation" if "deviation" in plan.settings else "similarity"
    measure = plan.settings.get(name)
    if file.is_file() and "by_language" in read_json(file, "an analysis"):
        found = DeviationResult.from_json(file)
        name, measure = "deviation", found.deviation
        drawn = figures.deviation(found, plan.groups, [layer for layer in layers if counts[layer] > 1])
        shown.append(figures.svg(drawn, "How fine-tuning on each language changes the FFNs"))
    elif file.is_file():
        measure = SimilarityResult.from_json(file).similarity
    if measure:
        columns[name] = [f"{value:.4g}" for value in measure]
    if measure and not shown:
        drawn = figures.allocation(counts, measure, name, plan.classifier_layers, axis_label(plan.encoder_layers))
        dark = " (dark: with a classifier)" if plan.classifier_layers else ""
        shown.append(figures.svg(drawn, f"Experts of each layer{dark} and {name} (line)"))
    return {"figures": shown, "header": list(columns), "rows": list(zip(*columns.values(), strict=True))}


def _stage(title: str, folder: Path) -> dict[str, Any]:
    """What a stage trained, and its curves."""
    record, config, shown = last_stage(folder), load_expanded_config(folder), []
    settings = record.settings or {} if record else {}
    for caption, lines in _curves(read_logs(folder / "trainer_state.json"), settings, has_choice(config)):
        ends = "; ".join(f"{line.label} {line.y[0]:.3f} to {line.y[-1]:.3f}" for line in lines)
        shown.append(figures.svg(figures.curves(lines, "step"), f"{caption}: {ends}", title))
    if (folder / VALIDATION).is_file() and len((curves := ValidationCurves.load(folder)).steps) > 1:
        old = next(iter(history_of(folder).by_expansion), [])
        lines = [figures.Line(code, curves.steps, values, code in old) for code, values in curves.bits_per_byte.items()]
        shown.append(figures.svg(figures.curves(lines, "step"), "Bits per byte of held-out text", title))
    frozen = freeze(network_of(config), trained) if record and (trained := trained_parts(record.stage)) else None
    return {"title": title, "record": record, "figures": shown, "frozen": frozen}


def read_logs(file: Path) -> list[dict[str, Any]]:
    """The finite numbers of a training's log, those with a step; none without a log."""
    history = read_json(file, "a trainer's state").get("log_history") or [] if file.is_file() else []
    if not isinstance(history, list) or not all(isinstance(log, dict) for log in history):
        raise InputError(f"{file}: not a trainer's state: log_history is no list of mappings.")
    logs = [{k: v for k, v in log.items() if isinstance(v, int | float) and abs(v) < 1e300} for log in history]
    return [log for log in logs if "step" in log]


def _curves(logs: list[dict], settings: dict, choice: bool) -> Iterator[tuple[str, list[figures.Line]]]:
    """Captions and lines of what a training logged. A loss without a weight is no part of the training. Without a
    choice of experts, their shares and the balance loss cannot change."""
    known = dict.fromkeys(key for log in logs for key in log)
    shown = {"Loss": {"all": "loss", "text": "next_token_loss"}}  # by caption, the key of each label
    for key in sorted(key for key in known if key.endswith("_loss") and key not in ("next_token_loss", "train_loss")):
        part = key.removesuffix("_loss")
        weight = settings.get(f"{part}_coef", settings.get(part))
        if (weight or not settings) and (choice or not part.endswith("balance")):
            words = f"{part.replace('_', ' ')} loss".capitalize()
            shown[words + (f", weight {weight:g}" if weight else "")] = {"loss": key}
    shares = [key for key in sorted(known, key=len) if choice and re.fullmatch(r"expert_\d+_share", key)]
    shown |= {
        "Tokens that classifiers class right": {"old": "old_tokens_right", "new": "new_tokens_right"},
        "Tokens that routers give to their group": {"group": "group_accuracy"},
        "Mean weight of the routed experts": {"gate": "gate"},
        "Router's score of expert 0": {"old": "expert_0_score_old", "new": "expert_0_score_new"},
        "Choices of each expert, over the layers with it": {key.split("_")[1]: key for key in shares},
    }
    for caption, keys in shown.items():
        points = {name: [(log["step"], log[key]) for log in logs if key in log] for name, key in keys.items()}
        lines = [figures.Line(n, [x for x, _ in xy], [y for _, y in xy], n == "old") for n, xy in points.items() if xy]
        if any(len(set(line.y)) > 1 for line in lines):
            yield caption, lines


def _routing(file: Path, folder: str) -> dict[str, Any]:
    result, scores = RoutingResult.from_json(file), "Router's score of expert 0 (dashed: old languages)"
    shown = [figures.svg(figures.expert_0_scores(result), scores, folder)]
    if result.has_choice:
        shown.append(figures.svg(figures.expert_shares(result), "Share of tokens by top-1 expert", folder))
    return {"title": folder.removeprefix("."), "result": result, "figures": shown}

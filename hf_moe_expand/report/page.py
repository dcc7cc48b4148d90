"""The page of a run: tables, the losses of its stages, and samples of text. `pages/report.html` has the words."""

import math
import warnings
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ..checkpoint.records import History, StageRecord
from ..checkpoint.source import check_expanded, load_expanded_config
from ..checkpoint.stored import network_of
from ..core.errors import InputError, library_errors_at
from ..core.jsonfile import read_json, read_text
from ..core.languages import in_words
from ..core.private import refuse_private
from ..core.recipe_paths import without_paths
from ..core.rendering import render
from ..evaluation.report import Evaluation
from ..evaluation.validation import VALIDATION, ValidationCurves
from ..planning.methods import method_title
from ..planning.plan import Plan
from ..planning.results import NO_CHOICE, RoutingResult
from ..runs.run_record import StepDone, read_steps, run_folder
from ..stages import freeze, recipe_stages, trained_parts

# Files at the top of a run; all others lie in folders of its stages and expansions.
_RECORDS = "steps.json, plan.json, analysis.json, evaluation.json, routing.json, recipe.yaml"
_STYLE = {"axes.grid": True, "svg.fonttype": "none", "svg.hashsalt": "losses", "text.parse_math": False}


def make_page(run: str | Path, *others: str | Path) -> str:
    """The page of a run's folder; or of checkpoints, in the order of their stages, and a folder with JSON files of the
    commands that made them. The same folder gives the same text."""
    root, *checkpoints = _records_and_checkpoints([run, *others])
    parts = _parts(root, checkpoints)
    plans = [(title, Plan.load(file)) for title, folder, _ in parts if (file := folder / "plan.json").is_file()]
    if not checkpoints and not plans and not any((root / name).is_file() for name in _RECORDS.split(", ")):
        raise InputError(f"{root}: not the folder of a run (it has none of {_RECORDS}).")
    made = [path for _, folder, stages in parts
            for path in (folder / "expanded", folder / "joined", *(checkpoint for _, checkpoint in stages))
            if (path / "config.json").is_file()]  # fmt: skip
    evaluation, recipe = root / "evaluation.json", root / "recipe.yaml"
    routing = [path for depth in ("", "*/", "*/*/") for path in sorted(root.glob(f"{depth}routing*.json"))]
    trained = [_stage(title, checkpoint) for _, _, stages in parts for title, checkpoint in stages]
    facts = {
        "name": root.resolve().name,
        "expansions": _history(made[-1]).expansions if made else (),
        "evaluation": Evaluation.from_json(evaluation) if evaluation.is_file() else None,
        "plans": [(title, plan, _choice(plan), _layers(plan)) for title, plan in plans],
        "losses": _drawn(logged) if (logged := [stage for stage in trained if len(stage["losses"]) > 1]) else None,
        "stages": trained,
        "routing": [(path.parent.relative_to(root), RoutingResult.load(path)) for path in routing],
        "no_choice": NO_CHOICE,
        "steps": [[name, _time(step), step.summary] for name, step in read_steps(root / "steps.json")[0].items()],
        "recipe": without_paths(read_text(recipe)) if recipe.is_file() else None,
    }
    page = render("report.html", facts, {"in_words": in_words, "method": method_title, "number": "{:,}".format})
    refuse_private({"report.html": page.encode()})
    return page


def _records_and_checkpoints(folders: Sequence[str | Path]) -> list[Path]:
    """The folder with a run's JSON files, for which the first of checkpoints alone stands; then all checkpoints."""
    resolved = [run_folder(folder) for folder in folders]
    checkpoints = [folder for folder in resolved if (folder / "config.json").is_file()]
    for folder in checkpoints:
        check_expanded(folder)
    others = [folder for folder in resolved if folder not in checkpoints]
    if len(others) > 1:
        raise InputError(f"{others[1]}: a page tells of one run: give one folder, and checkpoints.")
    return [*(others or checkpoints[:1]), *checkpoints]


def _parts(root: Path, checkpoints: Sequence[Path]) -> list[tuple[str, Path, list[tuple[str, Path]]]]:
    """For each expansion its heading, empty without another; its folder; headings and checkpoints of its stages."""
    if checkpoints:
        names = [record.stage if (record := _last_stage(path)) else "expanded" for path in checkpoints]
        return [("", root, [(f"{name}: {path.name}", path) for name, path in zip(names, checkpoints, strict=True)])]
    numbered = sorted((p for p in root.iterdir() if p.name.isdecimal() and p.is_dir()), key=lambda p: int(p.name))
    parts = []
    for folder in numbered or [root]:
        title = f"Expansion {folder.name}" if numbered else ""
        found = [stage for stage in recipe_stages().values() if (folder / stage.key / "config.json").is_file()]
        stages = [(f"{title}: {stage.title}".removeprefix(": "), folder / stage.key) for stage in found]
        parts.append((title, folder, stages))
    return parts


def _history(folder: Path) -> History:
    return History.of(read_json(folder / "config.json", "a checkpoint's configuration"))


def _last_stage(folder: Path) -> StageRecord | None:
    history = _history(folder)
    return history.last.stages[-1] if len(history) and history.last.stages else None


def _choice(plan: Plan) -> str:
    """The experts that a token runs, in words."""
    if plan.exclusive:
        before = plan.grows_from or [1] * len(plan.experts_per_layer)
        alone = all(now - then < 2 for now, then in zip(plan.experts_per_layer, before, strict=True))
        return f"a token runs the {'expert' if alone else f'experts (at most {plan.top_k})'} of its language alone"
    return f"top-{plan.top_k} routing"


def _layers(plan: Plan) -> tuple[list[str], list[tuple]]:
    """A table of the layers, with the measure by which the plan was made; without rows if all layers are alike."""
    layers = range(len(plan.experts_per_layer))
    columns: dict[str, Sequence[Any]] = {"layer": list(map(plan.name_of, layers)), "experts": plan.experts_per_layer}
    if plan.classifier_layers:
        columns["classifier"] = ["yes" if layer in plan.classifier_layers else "" for layer in layers]
    with library_errors_at("plan.json: settings", TypeError, ValueError):
        columns |= {name: [f"{value:.4g}" for value in plan.settings[name]]
                    for name in ("similarity", "deviation") if plan.settings.get(name)}  # fmt: skip
        alike = len(columns) == 2 and len(set(plan.experts_per_layer)) == 1
        return list(columns), [] if alike else list(zip(*columns.values(), strict=True))


def _stage(title: str, folder: Path) -> dict[str, Any]:
    """What a stage trained, its losses, and its text and held-out text by language."""
    record, logs = _last_stage(folder), read_logs(folder / "trainer_state.json")
    counts = {"documents at hand": "documents", "tokens at hand": "tokens", "tokens seen": "tokens_seen_by_language"}
    columns = {name: {code: f"{n:,}" for code, n in of.items()}
               for name, key in counts.items() if (of := getattr(record, key, None))}  # fmt: skip
    if (folder / VALIDATION).is_file() and len((curves := ValidationCurves.load(folder)).steps) > 1:
        scores = curves.bits_per_byte.items()
        columns["held-out bits per byte"] = {code: f"{of[0]:.3f} to {of[-1]:.3f}" for code, of in scores}
    codes = dict.fromkeys(code for of in columns.values() for code in of)
    trained = trained_parts(record.stage) if record else None
    return {
        "title": title, "record": record, "losses": [(log["step"], log["loss"]) for log in logs if "loss" in log],
        "text": [(log["step"], log["next_token_loss"]) for log in logs if "next_token_loss" in log],
        "frozen": freeze(network_of(load_expanded_config(folder)), trained) if trained else None,
        "table": (["language", *columns], [[code, *(of.get(code, "–") for of in columns.values())] for code in codes]),
    }  # fmt: skip


def read_logs(file: Path) -> list[dict[str, Any]]:
    """The finite numbers of a training's log, those with a step; none without a log."""
    history = read_json(file, "a trainer's state").get("log_history") or [] if file.is_file() else []
    if not isinstance(history, list) or not all(isinstance(log, dict) for log in history):
        raise InputError(f"{file}: not a trainer's state: log_history is no list of mappings.")
    logs = [{k: v for k, v in log.items() if isinstance(v, int | float) and abs(v) < 1e300} for log in history]
    return [log for log in logs if "step" in log]


def _time(step: StepDone) -> str:
    time = f"{step.seconds:.1f} s" if step.seconds < 60 else f"{step.seconds / 60:.1f} min"
    return f"{time} ({step.attempts} attempts)" if step.attempts > 1 else time


def _drawn(stages: list[dict[str, Any]]) -> Markup:
    """The losses of stages by step; the text's own as well where other losses are added to it."""
    from matplotlib import style
    from matplotlib.figure import Figure

    stream = StringIO()
    with style.context(["default", _STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # the browser has these glyphs
        figure = Figure(figsize=(5, 2.2 * len(stages)), layout="constrained")
        for axes, stage in zip(figure.subplots(len(stages), squeeze=False).flat, stages, strict=True):
            whole, text = dict(stage["losses"]), dict(stage["text"])
            axes.plot(whole.keys(), whole.values(), label="all")
            # Rounding and the last batch of an epoch tell equal losses apart by less.
            if any(not math.isclose(text[step], whole[step], rel_tol=0.01) for step in text if step in whole):
                axes.plot(text.keys(), text.values(), "--", label="text")
                axes.legend()
            axes.set(title=stage["title"], xlabel="step")
            axes.locator_params(axis="x", integer=True)
        unsaid = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(stream, format="svg", transparent=True, metadata=unsaid)
    return Markup('<svg role="img" aria-label="Loss by step of each stage" ' + stream.getvalue().partition("<svg ")[2])

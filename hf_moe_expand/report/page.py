"""Shows a run as one HTML page, with a section for each kind of data that the run has."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..checkpoint.source import load_expanded_config
from ..checkpoint.stored import network_of
from ..errors import InputError
from ..evaluation.report import Evaluation
from ..evaluation.validation import VALIDATION, ValidationCurves
from ..hub_files import refuse_private
from ..jsonfile import read_json
from ..languages import in_words
from ..layer_names import axis_label
from ..planning.methods import method_title
from ..planning.plan import Plan
from ..recipe_paths import without_paths
from ..records import ExpansionRecord, History, StageRecord, without_folders
from ..rendering import render
from ..results import NO_CHOICE, DeviationResult, RoutingResult, SimilarityResult
from ..run_record import StepDone, read_steps
from ..stages import trained_parts
from ..trainers.freezing import freeze
from ..yamlfile import read_text, read_yaml, to_yaml
from .charts import allocation_chart, change_chart, heat_map, line_chart
from .drawing import Change, Line, with_means
from .figures import expert_0_lines, grouped
from .parts import Loose, Part, history_of, last_stage, records_and_checkpoints

# Files and folders at the top of a run; all others lie in folders of its stages and expansions.
_RECORDS = ("steps.json", "plan.json", "analysis.json", "evaluation.json", "routing.json", "recipe.yaml")


def make_page(run: str | Path, *others: str | Path) -> str:
    """The page of a run's folder: evaluation, tasks, recipe, plan, training, routing, frozen tensors, versions. Or of
    what single commands made: checkpoints, in the order of their stages, and a folder with their JSON files.

    It contains its styles and figures, and of local paths the last part. The same folder gives the same text."""
    root, *checkpoints = records_and_checkpoints([run, *others])
    numbered = sorted((p for p in root.iterdir() if p.name.isdecimal() and p.is_dir()), key=lambda p: int(p.name))
    parts = [Part(int(folder.name), folder) for folder in numbered] or [Part(0, root)]
    parts = [Loose(0, root, tuple(checkpoints))] if checkpoints else parts
    recorded = any((root / name).is_file() for name in _RECORDS) or any(part.plan() for part in parts)
    if not checkpoints and not recorded:
        raise InputError(
            f"{root}: not the folder of a run (it has none of {', '.join(_RECORDS)}); give the `output` of a recipe "
            "that `hf-moe-expand run` has run, or checkpoints."
        )
    steps, _ = read_steps(root / "steps.json")
    history = next((made for part in reversed(parts) if len(made := part.history())), History())
    evaluation = Evaluation.from_json(root / "evaluation.json") if (root / "evaluation.json").is_file() else None
    plans = [plan for part in parts if (plan := part.plan())]
    planned = [ExpansionRecord(method=plan.method, old_languages=plan.old, new_languages=plan.new) for plan in plans]
    expansions = history.expansions or planned
    routing = [path for depth in ("", "*/", "*/*/") for path in sorted(root.glob(f"{depth}routing*.json"))]
    facts = {
        "name": root.resolve().name,
        "expansions": expansions,
        "base": _base(root, expansions[0]) if expansions else None,
        "scores": _scores(evaluation, history) if evaluation and evaluation.models else None,
        "tasks": evaluation.task_rows() if evaluation and evaluation.tasks else None,
        "chats": evaluation.chats if evaluation else [],
        "recipe": without_paths(read_text(root / "recipe.yaml")) if (root / "recipe.yaml").is_file() else None,
        "plans": [_plan(part, plan) for part in parts if (plan := part.plan())],
        "training": [stage for part in parts for name in part.stages() if (stage := _training(part, name, steps))],
        "routing": [_routing(path, root) for path in routing],
        "no_choice": NO_CHOICE,
        "frozen": [_frozen(part, name, steps) for part in parts for name in part.stages()],
        "steps": [{"name": name, "summary": step.summary, "time": _time_of(step)} for name, step in steps.items()],
        "total_time": _time(sum(step.seconds for step in steps.values())),
        "history": history.expansions,
    }
    filters: dict[str, Any] = {
        "count": _count, "percent": lambda share: f"{100 * share:.2f} %", "score": _score, "change": _change,
        "in_words": in_words, "method_title": method_title,
    }  # fmt: skip
    page = render("report.html", facts, filters)
    refuse_private({"report.html": page.encode()})
    return page


def _base(root: Path, first: ExpansionRecord) -> str | None:
    """The base as the recipe names it, an absolute path by its last part."""
    name, written = first.base_model, None
    if (root / "recipe.yaml").is_file():
        with suppress(InputError):  # a recipe that was broken after the run
            written = read_yaml(root / "recipe.yaml").get("base")
    name = without_folders(written) if isinstance(written, str) else name
    local = name is not None and first.base_model is not None and first.base_revision is None
    return f"{name} (a local folder)" if local else name


# --- languages -----------------------------------------------------------------------------------------------------


def _scores(evaluation: Evaluation, history: History) -> dict[str, Any]:
    """Each model's bits per byte by language, grouped as old and new, and their figure; of each group the means, and
    the best and the worst change from the first model to the last."""
    if len(history) > 1 and not evaluation.expansions:
        evaluation.expansions = [list(record.new_languages) for record in history.expansions]
    groups: list[dict[str, Any]] = []
    for kind, languages in evaluation.groups():
        codes = [code for code in languages if any(code in scores for scores in evaluation.models.values())]
        rows = {code: [evaluation.mean(name, [code]) for name in evaluation.models] for code in codes}
        ratios = {code: last / row[0] for code, row in rows.items() if row[0] and (last := row[-1]) is not None}
        ranked = sorted(ratios, key=ratios.__getitem__) if len(evaluation.models) > 1 else []
        if codes:
            groups.append({
                "title": {"old": "old languages", "new": "new languages"}.get(kind, f"new in {kind}"),
                "kind": "old" if kind == "old" else "new",
                "rows": rows,
                "marks": {ranked[0]: "▲ best", ranked[-1]: "▼ worst"} if len(ranked) > 1 else {},
                "mean": [evaluation.mean(name, codes) for name in evaluation.models],
            })  # fmt: skip
    if len(groups) == 1 and groups[0]["kind"] == "new":
        groups[0]["title"] = "all languages"
    changes, described = [], []
    for group in groups:
        changes.append(Change(group["title"]))
        for code, row in group["rows"].items():
            values = [value for value in row if value is not None]
            changes.append(Change(code, values, group["kind"], _change(row).replace(" %", "%")))
        mean = group["mean"]
        end = f" to {_score(mean[-1])} ({_change(mean)})" if len(mean) > 1 else ""
        described.append(f"{group['title']}: mean {_score(mean[0])}{end}")
    return {
        "models": list(evaluation.models),
        "groups": groups,
        "figure": change_chart(f"Bits per byte before and after. {'; '.join(described)}.", changes, "bits per byte"),
        "perplexity": evaluation.rows("perplexity"),
    }


def _score(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _count(number: int | None) -> str:
    return "–" if number is None else f"{number:,}"


def _change(values: Sequence[float | None], number: int = -1) -> str:
    """The change of a score, by default the last, from the first one; empty for the first, and where one is missing."""
    first, value = values[0], values[number]
    if number % len(values) == 0 or not first or value is None:
        return ""
    text = f"{100 * (value / first - 1):+.1f} %".replace("-", "−")
    return "0.0 %" if text in ("+0.0 %", "−0.0 %") else text


# --- plan ----------------------------------------------------------------------------------------------------------


def _plan(part: Part, plan: Plan) -> dict[str, Any]:
    similarity, deviation, path = None, None, part.folder / "analysis.json"
    if path.is_file() and "by_language" in read_json(path, "an analysis"):
        deviation = DeviationResult.from_json(path)
    elif path.is_file():
        similarity = SimilarityResult.from_json(path)
    name, label = "similarity", "similarity of languages"
    if deviation or "deviation" in plan.settings:
        name = label = "deviation"
    measure = getattr(deviation or similarity, name, None) or plan.settings.get(name)
    counts = ", ".join(map(str, plan.experts_per_layer))
    description = f"Experts per layer, from layer {plan.name_of(0)}: {counts}."
    if measure:
        description += f" {label.capitalize()}: {', '.join(f'{value:.3g}' for value in measure)}."
    layers = range(len(plan.experts_per_layer))
    columns: dict[str, Sequence[Any]] = {
        "layer": [plan.name_of(layer) for layer in layers],
        "experts": plan.experts_per_layer,
        "classifier": ["yes" if layer in plan.classifier_layers else "" for layer in layers],
    }
    if measure:
        columns[label] = [f"{measure[layer]:.4g}" for layer in layers]
    alike = None
    if deviation:
        names, values = grouped(deviation.languages, deviation.similarity, plan.groups)
        groups = "; ".join(map(" ".join, plan.groups))
        said = f"Cosine of two languages' changes of the FFNs; groups are framed: {groups}"
        alike = heat_map(said, names, names, values, blocks=[len(group) for group in plan.groups])
    return {
        "title": part.title,
        "plan": plan,
        "measure": label if measure else None,
        "figure": allocation_chart(
            description,
            plan.experts_per_layer,
            measure,
            label,
            plan.classifier_layers,
            plan.grows_from,
            axis_label(plan.encoder_layers),
        ),
        "header": list(columns),
        "rows": list(zip(*columns.values(), strict=True)),
        "alike": alike,
    }


# --- training ------------------------------------------------------------------------------------------------------


def _training(part: Part, name: str, steps: Mapping[str, StepDone]) -> dict[str, Any] | None:
    folder = part.folder / name
    entry = last_stage(folder)
    logs: list[dict[str, Any]] = []
    if (folder / "trainer_state.json").is_file():
        state = read_json(folder / "trainer_state.json", "a trainer's state")
        logs = _logs(state.get("log_history"), folder / "trainer_state.json")
    curves = ValidationCurves.load(folder) if (folder / VALIDATION).is_file() else None
    if entry is None and not logs and curves is None:
        return None
    entry = entry or StageRecord(stage=name)
    settings, tokens, documents = entry.settings or {}, entry.tokens or {}, entry.documents or {}
    seen = entry.tokens_seen_by_language or {}
    history = history_of(folder)
    old = history.last.old_languages if len(history) else []
    figures = list(_training_figures(logs, settings, part.title_of(name)))
    if curves is not None and curves.steps:
        figures.append(_validation_figure(curves, old))
    step = steps.get(part.prefix + name)
    return {
        "title": part.title_of(name),
        "entry": entry,
        "time": _time_of(step) if step else None,
        "data": [
            (code, *map(_count, (documents.get(code), tokens.get(code), seen.get(code, 0) if seen else None)))
            for code in dict.fromkeys([*documents, *tokens])
        ],
        "settings": without_paths(to_yaml(settings)) if settings else None,
        "figures": figures,
    }


def _logs(history: Any, file: Path) -> list[dict[str, Any]]:
    """The numbers of a training's log, those with a step."""
    if not isinstance(history, list | None) or not all(isinstance(log, dict) for log in history or ()):
        raise InputError(f"{file}: not a trainer's state: log_history is no list of mappings.")
    logs = [{k: v for k, v in log.items() if isinstance(v, int | float) and abs(v) < 1e300} for log in history or ()]
    return [log for log in logs if "step" in log]


def _training_figures(
    logs: Sequence[Mapping[str, float]], settings: Mapping[str, Any], stage: str
) -> Iterator[dict[str, Any]]:
    """Yields the text's loss, then each weighted part of the loss, then other figures about the routers."""
    known = list(dict.fromkeys(key for log in logs for key in log))

    def curve(key: str, label: str, kind: str = "new") -> Line:
        points = [(log["step"], log[key]) for log in logs if key in log]
        return Line(label, [step for step, _ in points], [value for _, value in points], kind)

    def by_kind(key: str) -> list[Line]:
        """The curves of old and of new languages, those of them that the log has."""
        return [curve(key.format(kind), kind, kind) for kind in ("old", "new") if key.format(kind) in known]

    def figure(caption: str, lines: list[Line], **options: Any) -> dict[str, Any]:
        ends = [f"{line.label} {line.points[0][1]:.3f} to {line.points[-1][1]:.3f}" for line in lines if line.points]
        description = f"{stage}, {caption} by step: {'; '.join(ends)}."
        return {"caption": caption, "svg": line_chart(description, lines, "step", **options)}

    losses = (("loss", "all", "old"), ("next_token_loss", "text", "new"))
    if main := [curve(*loss) for loss in losses if loss[0] in known]:
        yield figure("loss: of the text (next token), and all parts" if len(main) > 1 else "loss", main)
    for key in sorted(key for key in known if key.endswith("_loss") and key not in ("next_token_loss", "train_loss")):
        part = key.removesuffix("_loss")
        weight = settings.get(f"{part}_coef", settings.get(part))
        if settings and not weight:
            continue
        words = part.replace("_", "-" if part == "language_prior" else " ")
        yield figure(f"{words} loss" + (f", weight {weight:g}" if weight else ""), [curve(key, words)])
    if sides := by_kind("{}_tokens_right"):
        yield figure("tokens that classifiers put on their side", sides, y_range=(0, 1))
    for key in ("group_accuracy", "gate"):
        if key in known:
            words = key.replace("_", " ")
            yield figure(words if key != "gate" else "gate: mean weight of the routed experts", [curve(key, words)])
    if homes := by_kind("expert_0_score_{}"):
        kinds = " and ".join(line.kind for line in homes)
        yield figure(f"router's score of expert 0, {kinds} languages", homes, y_range=(0, 1))
    shares = sorted((int(key.split("_")[1]), key) for key in known if re.fullmatch(r"expert_\d+_share", key))
    if shares:
        lines = [curve(key, str(expert), "old" if expert == 0 else "new") for expert, key in shares]
        yield figure("share of the routers' choices by expert (0: the original), over the layers with it", lines)


def _validation_figure(curves: ValidationCurves, old: Sequence[str]) -> dict[str, Any]:
    lines = [
        Line(code, curves.steps, values, "old" if code in old else "new")
        for code, values in sorted(curves.bits_per_byte.items(), key=lambda item: item[0] not in old)
    ]
    ends = "; ".join(f"{line.label} {line.y[0]:.3f} to {line.y[-1]:.3f}" for line in lines)
    svg = line_chart(f"Bits per byte of held-out text by step: {ends}.", with_means(lines), "step")
    return {"caption": "bits per byte of held-out text", "svg": svg}


# --- routing and freezing ------------------------------------------------------------------------------------------


def _routing(path: Path, root: Path) -> dict[str, Any]:
    result = RoutingResult.from_json(path)
    old, new = result.of_kind(old=True), result.of_kind(old=False)
    maps = []
    for index, layer in enumerate(result.names):
        values = [result.top1_share[code][index] for code in old + new]
        experts = [str(expert) for expert in range(len(values[0]))]
        shares = "; ".join(f"{c} {' '.join(f'{v:.2f}' for v in row)}" for c, row in zip(old + new, values, strict=True))
        description = f"Layer {layer}, share of each language's tokens by expert: {shares}."
        rule = len(old) if old and new else 0
        maps.append(heat_map(description, old + new, experts, values, f"layer {layer}", True, 1.0, rule))
    lines = expert_0_lines(result)
    ends = "; ".join(f"{line.label} {sum(line.y) / len(line.y):.2f}" for line in lines)
    description = f"Router's score of expert 0, mean over layers: {ends}."
    svg = line_chart(description, with_means(lines), axis_label(result.encoder_layers), (0, 1))
    return {
        "title": str(path.relative_to(root).parent) if path.parent != root else "",
        "result": result,
        "both": bool(old and new),
        "maps": maps,
        "expert_0": svg,
        "perplexity": [
            (code, f"{result.perplexity[code]:.2f}", f"{result.random_perplexity[code]:.2f}") for code in old + new
        ],
    }


def _frozen(part: Part, name: str, steps: Mapping[str, StepDone]) -> dict[str, Any]:
    """The stage's trained parameters, counted from the model's shape, and the tensors that the run found unchanged."""
    folder = part.folder / name
    entry, report = last_stage(folder), None
    if entry is not None and (trained := trained_parts(entry.stage)) is not None:
        report = freeze(network_of(load_expanded_config(folder)), trained, entry.stage)
    step = steps.get(part.prefix + name)
    return {"title": part.title_of(name), "report": report, "checked": step and step.facts.get("frozen")}


def _time_of(step: StepDone) -> str:
    """The time of a step, over all attempts."""
    return _time(step.seconds) + (f" ({step.attempts} attempts)" if step.attempts > 1 else "")


def _time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"

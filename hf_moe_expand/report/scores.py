"""The page's section on languages: each model's scores, their means, and their changes."""

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from ..evaluation.report import Evaluation
from ..records import History
from .charts import change_chart
from .drawing import Change


def scores_section(evaluation: Evaluation, history: History) -> dict[str, Any]:
    """The scores by language, grouped as old and new, and their figure."""
    if len(history) > 1 and not evaluation.expansions:
        evaluation.expansions = [list(record.new_languages) for record in history.expansions]
    names = list(evaluation.models)
    scored = [
        (kind, [c for c in codes if any(c in evaluation.models[n] for n in names)])
        for kind, codes in evaluation.groups()
    ]
    groups = [_score_group(evaluation, kind, codes, names) for kind, codes in scored if codes]
    if len(groups) == 1 and not groups[0]["old"]:
        groups[0]["title"] = "all languages"
    changes = []
    for group in groups:
        changes.append(Change(group["title"]))
        for row in group["rows"]:
            values = [cell["value"] for cell in row["cells"] if cell["value"] is not None]
            kind = "old" if group["old"] else "new"
            changes.append(Change(row["label"], values, kind, row["cells"][-1]["change"].replace(" %", "%")))
    described = "; ".join(f"{group['title']}: {group['mean']['text']}" for group in groups)
    return {
        "models": names,
        "groups": groups,
        "figure": Markup(change_chart(f"Bits per byte before and after. {described}.", changes, "bits per byte")),
        "perplexity": evaluation.rows("perplexity"),
    }


def _score_group(evaluation: Evaluation, kind: str, codes: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
    """A group's rows, with the best and the worst change from the first model to the last."""
    rows = [{"label": code, **_score_row(evaluation, [code], names), "mark": ""} for code in codes]
    ranked = sorted((row for row in rows if row["change"] is not None), key=lambda row: row["change"])
    if len(ranked) > 1:
        ranked[0]["mark"], ranked[-1]["mark"] = "best", "worst"
    mean = _score_row(evaluation, codes, names)
    ends = [mean["cells"][0], mean["cells"][-1]]
    text = f"mean {ends[0]['text']}" + (f" to {ends[1]['text']} ({ends[1]['change']})" if len(names) > 1 else "")
    title = {"old": "old languages", "new": "new languages"}.get(kind, f"new in {kind}")
    return {
        "title": title, "old": kind == "old", "rows": rows, "mean": {**mean, "text": text, "ends": ends},
    }  # fmt: skip


def _score_row(evaluation: Evaluation, codes: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
    values = [evaluation.mean(name, codes) for name in names]
    changes = [None if value is None or not values[0] else value / values[0] - 1 for value in values]
    cells = [
        {
            "value": value,
            "text": "–" if value is None else f"{value:.3f}",
            "change": "" if number == 0 or change is None else _signed_percent(change),
        }
        for number, (value, change) in enumerate(zip(values, changes, strict=True))
    ]
    return {"cells": cells, "change": changes[-1] if len(names) > 1 else None}


def _signed_percent(share: float) -> str:
    text = f"{100 * share:+.1f} %".replace("-", "−")
    return "0.0 %" if text in ("+0.0 %", "−0.0 %") else text

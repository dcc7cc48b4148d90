"""The study's tables, figures and JSON, from its kept results."""

import argparse
from collections.abc import Mapping, Sequence
from math import dist
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from matplotlib.figure import Figure
from study_changes import DOMAINS, Results, change, file_name, groups, read_results, spread
from study_claims import claims_table
from study_settings import read_settings
from tables import markdown_table

from hf_moe_expand.errors import InputError
from hf_moe_expand.jsonfile import read_json, write_json, write_text

_AROUND = ((1, 1), (-1, 1), (1, -1), (-1, -1), (1.4, 0), (-1.4, 0), (0, 1.4), (0, -1.4))
_DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))


def write_report(options: argparse.Namespace) -> None:
    """Prints the tables of the finished rows, and writes what the options name."""
    settings = read_settings(options.settings)
    results = read_results(settings, options.out)
    if "base" not in results:
        raise InputError(f"{options.out}: no result of the row `base`; `study.py run` makes it, or name another --out.")
    speeds = read_json(options.out / "speed.json", "speeds") if (options.out / "speed.json").exists() else {}
    parts = [quality_table(settings, results), cost_table(results, speeds), claims_table(settings, results)]
    tables = "\n\n".join(filter(None, parts))
    print(tables)
    if options.table:
        write_text(options.table, tables + "\n")
    if options.json:
        write_json(options.json, as_json(settings, results, speeds, options.out))
    if options.figures:
        draw_pareto(settings, results, options.figures / f"{options.name}_pareto.svg")
        draw_losses(settings, results, options.figures / f"{options.name}_loss.svg")


def as_json(settings: Mapping[str, Any], results: Results, speeds: Mapping[str, float], out: Path) -> dict[str, Any]:
    """All that the study found: settings, sweeps, and each row's figures by seed; no paths."""
    rows = {}
    for name, found in results.items():
        sweep = out / "sweep" / f"{file_name(name)}.json"
        rows[name] = {
            "sweep": read_json(sweep, "a sweep") if sweep.exists() else {},
            "tokens_per_second": speeds.get(name),
            "seeds": [{key: value for key, value in one.items() if key != "path"} for one in found],
        }
    return {"settings": settings, "rows": rows}


def quality_table(settings: Mapping[str, Any], results: Results) -> str:
    """Bits per byte of the base, each row's change against it, accuracy on minimal pairs; mean and spread of seeds."""
    base = results["base"][0]
    columns = [
        (domain, [code for code in codes if code in base["scores"][domain]])
        for domain in DOMAINS
        for group, codes in groups(settings).items()
        if group != "old"
    ]
    columns = [column for column in columns if column[1]]
    pairs = list(base["scores"]["pairs"])
    head = [
        "",
        "",
        *(f"{domain}: {', '.join(codes)}" for domain, codes in columns),
        *(f"pairs: {code}" for code in pairs),
    ]
    rows = []
    for number, (name, found) in enumerate(results.items()):
        cells = [str(number), name]
        for domain, codes in columns:
            if name == "base":
                cells.append(f"{mean(base['scores'][domain][code] for code in codes):.3f}")
            else:
                cells.append(spread([change(one, base, domain, codes) for one in found], "{:+.1f} %"))
        cells += [spread([100 * one["scores"]["pairs"][code] for one in found], "{:.1f}") for code in pairs]
        rows.append(cells)
    return markdown_table(head, rows)


def cost_table(results: Results, speeds: Mapping[str, float]) -> str:
    """Parameters, processor time, the sweep's choice and the speed of generation, of each row."""
    rows = []
    for number, (name, found) in enumerate(results.items()):
        first = found[0]
        millions = [f"{first[key] / 1e6:.2f}" for key in ("trained", "total", "active")]
        seconds = f"{mean(one['seconds'] for one in found):.0f}"
        speed = [f"{speeds[name]:.0f}" if name in speeds else ""] if speeds else []
        rate = f"{first['rate']:g}" if first["rate"] else ""
        rows.append([str(number), name, *millions, rate, seconds, *speed, str(len(found))])
    measured = ["tokens/s"] if speeds else []
    head = ["", "", "trained, M", "total, M", "active, M", "learning rate", "CPU s", *measured, "seeds"]
    return markdown_table(head, rows)


def pareto(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """The names of the points that no other point beats in both, by the first figure; higher is better."""
    return sorted(
        (
            name
            for name, (x, y) in points.items()
            if not any(a >= x and b >= y and (a, b) != (x, y) for a, b in points.values())
        ),
        key=lambda name: points[name],
    )


def draw_pareto(settings: Mapping[str, Any], results: Results, path: Path) -> None:
    """Retention against gain: a numbered point a row with its spread, and the Pareto front as a line.

    A column a domain; above the old languages that were reviewed, below the others.
    """
    base, named = results["base"][0], groups(settings)
    kinds = [kind for kind in ("reviewed", "not reviewed") if named[kind]]
    figure = Figure(figsize=(11, 5.2 * len(kinds)), layout="constrained")
    panels = figure.subplots(len(kinds), len(DOMAINS), sharex="col", squeeze=False)
    for kind, line in zip(kinds, panels, strict=True):
        for domain, panel in zip(DOMAINS, line, strict=True):
            known = [
                [code for code in codes if code in base["scores"][domain]] for codes in (named["new"], named[kind])
            ]
            points = {}
            for name, found in results.items():
                gains, losses = ([-change(one, base, domain, codes) for one in found] for codes in known)
                points[name] = (mean(gains), mean(losses))
                bars = [stdev(values) if len(values) > 1 else 0 for values in (gains, losses)]
                dense = "dense" in settings["rows"][name] or name == "base"
                panel.errorbar(
                    *points[name], xerr=bars[0], yerr=bars[1], fmt="s" if dense else "o", color="black", markersize=4,
                    markerfacecolor="white" if dense else "black", elinewidth=0.5,
                )  # fmt: skip
            front = [points[name] for name in pareto(points)]
            panel.plot(*zip(*front, strict=True), "--", color="gray", linewidth=1, zorder=0)
            panel.set_title(f"{domain}: {', '.join(known[1])} ({kind})")
            panel.grid(alpha=0.3)
            _number(panel, list(points.values()))
        line[0].set_ylabel("kept (% fewer bits per byte; 0: the base)")
    for domain, panel in zip(DOMAINS, panels[-1], strict=True):
        codes = [code for code in named["new"] if code in base["scores"][domain]]
        panel.set_xlabel(f"gain of {', '.join(codes)} (% fewer bits per byte)")
    figure.legend(
        handles=[
            figure.axes[0].plot([], [], fmt, color="black", markerfacecolor=face, label=label)[0]
            for fmt, face, label in (("s", "white", "dense"), ("o", "black", "mixture"))
        ],
        loc="outside lower center", ncols=2, frameon=False,
    )  # fmt: skip
    figure.savefig(path)


def _number(panel: Any, points: Sequence[tuple[float, float]]) -> None:
    """Writes each point's number beside it, where the fewest points and numbers are near."""
    panel.figure.draw_without_rendering()  # lays the panels out
    taken = [tuple(place) for place in panel.transData.transform(points)]
    for number, (x, y) in enumerate(taken[: len(points)]):
        around = [(x + far * dx, y + far * dy) for far in (9, 16, 24) for dx, dy in _AROUND]
        free = min(around, key=lambda place: (sum(dist(place, other) < 9 for other in taken), dist(place, (x, y))))
        taken.append(free)
        panel.annotate(
            str(number), points[number], xytext=(free[0] - x, free[1] - y), textcoords="offset pixels", fontsize=7,
            ha="center", va="center", arrowprops={"arrowstyle": "-", "linewidth": 0.3, "shrinkA": 3, "shrinkB": 2},
        )  # fmt: skip


def draw_losses(settings: Mapping[str, Any], results: Results, path: Path) -> None:
    """Training loss of the main stage by tokens, seed 0."""
    figure = Figure(figsize=(6.5, 4), layout="constrained")
    axes = figure.subplots()
    shown = [name for name in settings["curves"] if name in results and results[name][0]["losses"]]
    for name, dashes in zip(shown, _DASHES, strict=False):
        tokens, losses = zip(*results[name][0]["losses"], strict=True)
        axes.plot([count / 1000 for count in tokens], losses, linestyle=dashes, label=name, color="black")
    axes.set(xlabel="thousand tokens trained", ylabel="training loss, nats a token")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path)

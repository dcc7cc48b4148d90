"""The study's tables, figures and JSON, from its kept results."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from matplotlib.figure import Figure
from study_changes import DOMAINS, Results, change, file_name, groups, read_results, spread
from study_claims import claims_table
from study_settings import read_settings
from tables import markdown_table

from hf_moe_expand.jsonfile import read_json, write_json, write_text

_DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))


def write_report(options: argparse.Namespace) -> None:
    """Prints the tables of the finished rows, and writes what the options name."""
    settings = read_settings(options.settings)
    results = read_results(settings, options.out)
    speeds = read_json(options.out / "speed.json", "speeds") if (options.out / "speed.json").exists() else {}
    tables = "\n\n".join(
        [quality_table(settings, results), cost_table(results, speeds), claims_table(settings, results)]
    )
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
        speed = f"{speeds[name]:.0f}" if name in speeds else ""
        rate = f"{first['rate']:g}" if first["rate"] else ""
        rows.append([str(number), name, *millions, rate, seconds, speed, str(len(found))])
    head = ["", "", "trained, M", "total, M", "active, M", "learning rate", "CPU s", "tokens/s", "seeds"]
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
    """Retention against gain: a numbered point a row with its spread, a panel a domain, the Pareto front as a line."""
    base, named = results["base"][0], groups(settings)
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    for panel, domain in zip(figure.subplots(1, 2), DOMAINS, strict=True):
        known = [[code for code in codes if code in base["scores"][domain]] for codes in (named["new"], named["old"])]
        points = {}
        for number, (name, found) in enumerate(results.items()):
            gains, losses = ([-change(one, base, domain, codes) for one in found] for codes in known)
            points[name] = (mean(gains), mean(losses))
            bars = [stdev(values) if len(values) > 1 else 0 for values in (gains, losses)]
            dense = "dense" in settings["rows"][name] or name == "base"
            panel.errorbar(
                *points[name], xerr=bars[0], yerr=bars[1], fmt="s" if dense else "o", color="black", markersize=4,
                markerfacecolor="white" if dense else "black", elinewidth=0.5,
            )  # fmt: skip
            panel.annotate(str(number), points[name], xytext=(4, 3), textcoords="offset points", fontsize=7)
        front = [points[name] for name in pareto(points)]
        panel.plot(*zip(*front, strict=True), "--", color="gray", linewidth=1, zorder=0)
        panel.set(title=domain, xlabel=f"gain of {', '.join(known[0])} (% fewer bits per byte)")
        panel.grid(alpha=0.3)
    figure.axes[0].set_ylabel("change of the old languages (% fewer bits per byte; 0: the base)")
    figure.legend(
        handles=[
            figure.axes[0].plot([], [], fmt, color="black", markerfacecolor=face, label=label)[0]
            for fmt, face, label in (("s", "white", "dense"), ("o", "black", "mixture"))
        ],
        loc="outside lower center", ncols=2, frameon=False,
    )  # fmt: skip
    figure.savefig(path)


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

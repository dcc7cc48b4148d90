"""The study's figures: retention against gain, also by length, and the training loss."""

from collections.abc import Mapping, Sequence
from math import dist
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from matplotlib.figure import Figure
from study_changes import DOMAINS, Results, change, groups
from study_claims import ByLength

_AROUND = ((1, 1), (-1, 1), (1, -1), (-1, -1), (1.4, 0), (-1.4, 0), (0, 1.4), (0, -1.4))
_DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
_MARKERS = "os^vDPX*<>ph"


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

    A column a domain, a line a group of old languages.
    """
    base, named = results["base"][0], groups(settings)
    kinds = _kinds(settings)
    figure = Figure(figsize=(11, 5.2 * len(kinds)), layout="constrained")
    panels = figure.subplots(len(kinds), len(DOMAINS), sharex="col", squeeze=False)
    for kind, line in zip(kinds, panels, strict=True):
        for domain, panel in zip(DOMAINS, line, strict=True):
            known = [_scored(base, domain, codes) for codes in (named["new"], named[kind])]
            if not known[1]:
                panel.set_axis_off()
                continue
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
        codes = _scored(base, domain, named["new"])
        panel.set_xlabel(f"gain of {', '.join(codes)} (% fewer bits per byte)")
    figure.legend(
        handles=[
            figure.axes[0].plot([], [], fmt, color="black", markerfacecolor=face, label=label)[0]
            for fmt, face, label in (("s", "white", "dense"), ("o", "black", "mixture"))
        ],
        loc="outside lower center", ncols=2, frameon=False,
    )  # fmt: skip
    figure.savefig(path)


def _kinds(settings: Mapping[str, Any]) -> list[str]:
    """The groups of old languages that have any."""
    return [kind for kind, codes in settings["old"].items() if codes]


def _scored(base: Mapping[str, Any], domain: str, codes: Sequence[str]) -> list[str]:
    """The languages of which a domain has text."""
    return [code for code in codes if code in base["scores"][domain]]


def draw_lengths(settings: Mapping[str, Any], results: ByLength, path: Path) -> None:
    """What is lost against what is gained, a line a row, from the shortest length to the longest, whose point is
    filled.

    A column a domain, a line of panels a group of old languages; the mean of the seeds.
    """
    named, kinds = groups(settings), _kinds(settings)
    figure = Figure(figsize=(11, 4.2 * len(kinds) + 1.2), layout="constrained")
    panels = figure.subplots(len(kinds), len(DOMAINS), sharex="col", squeeze=False)
    first = next(iter(results.values()))["base"][0]
    rows = [name for name in settings["rows"] if any(name in found for found in results.values()) and name != "base"]
    for kind, line in zip(kinds, panels, strict=True):
        for domain, panel in zip(DOMAINS, line, strict=True):
            known = [_scored(first, domain, codes) for codes in (named["new"], named[kind])]
            if not known[1]:
                panel.set_axis_off()
                continue
            for number, name in enumerate(rows):
                found = [(of[name], of["base"][0]) for _, of in sorted(results.items()) if name in of]
                points = []
                for seeds, base in found:
                    gain, lost = (mean(change(one, base, domain, codes) for one in seeds) for codes in known)
                    points.append((-gain, lost))
                style = {"marker": _MARKERS[number % len(_MARKERS)], "color": f"C{number % 10}", "markersize": 5}
                drawn = _DASHES[number // 10 % len(_DASHES)]
                panel.plot(*zip(*points, strict=True), linestyle=drawn, markerfacecolor="white", label=name, **style)
                panel.plot(*points[-1], linestyle="", **style)
            panel.axhline(0, color="gray", linewidth=0.7)
            panel.set_title(f"{domain}: {', '.join(known[1])} ({kind})")
            panel.grid(alpha=0.3)
        line[0].set_ylabel("lost (% more bits per byte)")
    for panel in panels[-1]:
        panel.set_xlabel(f"gained of {', '.join(named['new'])} (% fewer bits per byte)")
    figure.legend(*panels[0][-1].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
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

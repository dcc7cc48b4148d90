"""The tables, the judged claims and the figure of benchmarks/study.py, from its CSV."""

import argparse
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas
import yaml
from tables import markdown_table

GENERAL = ("documents", "sentences")
KINDS = (*GENERAL, "pages")
SHOWN = (*(f"new: {kind}" for kind in KINDS), "kept", "unnamed, mean", "unnamed, worst", "chat en")
WAYS = ("judged", "told")
HELD = r"^held\.(?!0$)"
TUNED = "tuned"
WHOLE = "full fine-tuning"  # the measure of what a gate lets through
Languages = Mapping[str, Sequence[str]]
Groups = Mapping[int, tuple[pandas.DataFrame, Languages]]  # by tokens: lines and languages


def report(options: argparse.Namespace) -> None:
    """Prints the tables of one CSV or of several, and draws their figure."""
    settings = yaml.safe_load(options.settings.read_text("utf-8"))
    frame = pandas.concat([changes(file) for file in options.csv], ignore_index=True)
    parts, panels, verdicts, groups = list[str](), {}, [], {}
    for base, lines in frame.groupby("base", sort=False):
        if base not in settings["bases"]:
            sys.exit(f"{base}: no such base in {options.settings}; it has {', '.join(settings['bases'])}.")
        languages = settings["bases"][base].get("languages", settings["languages"])
        lines = ways_of(lines)
        found = measures(lines, languages)
        lines = lines.join(found).copy()  # in one piece
        for tokens, some in lines.groupby("tokens", sort=False):
            if settings["bases"][base].get("figure", True):
                panels[f"{base}, {tokens:,} tokens"] = some[some["row"].isin([*settings["rows"]])]
            groups[tokens] = some, languages
            parts += [
                f"**{base}, {tokens:,} tokens**",
                quality(some),
            ]
            if (some["name"] == TUNED).any():
                parts += ["**Joined fine-tunes**", joined(some, languages["new"])]
            if some.filter(regex=HELD).notna().any(axis=None):
                parts += ["**Weights on held-out text, told**", swept(some)]
        gated = lines[lines.filter(regex=r"^new\.").notna().any(axis=1)]
        if len(gated) and (lines["name"] == WHOLE).any():
            parts += [f"**Share of the gain of {WHOLE}, %**", let_through(lines, gated, languages["new"])]
        verdicts.append(judged(lines, settings["claims"]).add_prefix(f"{base}, "))
    claims = pandas.concat(verdicts, axis=1)
    claims = claims[(claims != "").any(axis=1)]
    parts += ["**Claims**", markdown_table(["claim", *claims], claims.reset_index().to_numpy().tolist())]
    parts += ["**README.md**", overview(groups, settings["overview"])]
    for page, sentences in settings["pages"].items():
        parts += [f"**{page}**", "\n".join(said(groups, sentences))]
    print("\n\n".join(parts))
    if options.figure:
        draw(panels, options.figure)


def changes(file: Path) -> pandas.DataFrame:
    """The lines of a CSV but the base's, their bits per byte as changes in % against the base on the same device."""
    if not file.is_file():
        sys.exit(f"{file}: no such file; `study.py run` writes OUT/study.csv.")
    try:
        frame, found = pandas.read_csv(file), []
    except ValueError as error:  # empty, of another kind, or no text
        sys.exit(f"{file}: no CSV of `study.py run`: {str(error).strip()}")
    if missing := [name for name in ("base", "row", "weight", "tokens", "seed", "device") if name not in frame]:
        sys.exit(f"{file}: no CSV of `study.py run`: it has no column {', '.join(missing)}.")
    for (base, device), lines in frame.groupby(["base", "device"], sort=False):
        own = lines[lines["row"] == "base"]
        if own.empty:
            sys.exit(f"{file}: has no line of the base itself: {base} on {device}.")
        lines = lines[lines["row"] != "base"].copy()
        for name in lines.filter(regex=r"^(read|end|told)\."):
            lines[name] = 100 * (lines[name] / own.iloc[0][f"read.{name.partition('.')[2]}"] - 1)
        for name in lines.filter(regex=HELD):
            lines[name] = 100 * (lines[name] / own.iloc[0]["held.0"] - 1)
        found.append(lines)
    frame = pandas.concat(found).copy()  # in one piece
    frame["name"] = frame["row"] + ["" if weight == 1 else f", {weight:g}" for weight in frame["weight"]]
    for column, word in (("is_best", ", best"), ("thirds", ", thirds")):
        if column in frame:
            frame.loc[frame[column].notna(), "name"] = frame["row"] + word
    return frame


def ways_of(lines: pandas.DataFrame) -> pandas.DataFrame:
    """What a text costs judged by its end where a model has a gate, else as it reads it; and told, else as judged."""

    def named(way: str, new: str) -> pandas.DataFrame:
        return lines.filter(regex=rf"^{way}\.").rename(columns=lambda name: name.replace(way, new, 1))

    judged = named("end", "judged").combine_first(named("read", "judged"))
    told = named("told", "told").combine_first(judged.rename(columns=lambda name: name.replace("judged", "told", 1)))
    return pandas.concat([lines[lines.columns.drop(list(lines.filter(regex=r"^told\.")))], judged, told], axis=1)


def measures(lines: pandas.DataFrame, languages: Languages) -> pandas.DataFrame:
    """What tables and claims are about, in %."""

    def over(codes: Sequence[str], kinds: Sequence[str] = GENERAL, how: str = "mean", way: str = "judged") -> Any:
        return lines.reindex(columns=[f"{way}.{kind}.{code}" for kind in kinds for code in codes]).agg(how, axis=1)

    found = {f"new: {kind}": over(languages["new"], [kind]) for kind in KINDS}
    found |= {f"told: {kind}": over(languages["new"], [kind], way="told") for kind in GENERAL}
    found["kept"] = over(languages["kept"])
    found["anchored, worst"] = over(languages["anchored"], how="max")
    found["unnamed, mean"] = over(languages["unnamed"])
    found["unnamed, worst"] = over(languages["unnamed"], how="max")
    others = [code for group, codes in languages.items() if group != "new" for code in codes]
    found["all others"] = over(others)
    found["others, worst"] = over(others, how="max")
    found["chat en"] = 100 * lines["chat.en"]
    return pandas.DataFrame(found)


def quality(lines: pandas.DataFrame) -> str:
    """A row's means over its seeds, and the worst of them all."""
    rows = []
    for name, some in lines.groupby("name", sort=False):
        figures = [some[one].agg("max" if "worst" in one else "mean") for one in SHOWN]
        forms = ["{:.0f}" if one.startswith("chat") else "{:+.1f}" for one in SHOWN]
        rows.append([name, seeds_of(some), *map(cell, figures, forms)])
    return markdown_table(["row", "seed", *SHOWN], rows)


def joined(lines: pandas.DataFrame, new: Sequence[str]) -> str:
    """What joined fine-tunes gain where they are told, and in brackets the share of it, in %, of what they gain whole;
    and the surgery's seconds."""
    rows = []
    for name, some in lines[lines["made_in"].notna()].groupby("name", sort=False):
        whole = lines[(lines["name"] == TUNED) & lines["seed"].isin(some["seed"])]
        gains = [(gain(some, "told", kind, new), gain(whole, "told", kind, new)) for kind in KINDS]
        cells = [f"{cell(ours)} ({cell(100 * ours / theirs, '{:.0f}')})" for ours, theirs in gains]
        facts = [cell(some["parameters"].mean() / 1e6, "{:.1f}"), cell(some["made_in"].mean(), "{:.1f}")]
        rows.append([name, seeds_of(some), *cells, cell(some["others, worst"].max()), *facts])
    return markdown_table(["row", "seed", *KINDS, "others, worst", "M parameters", "made in s"], rows)


def swept(lines: pandas.DataFrame) -> str:
    """The change on held-out text at each weight, a row's mean over its seeds, and each seed's best weight, or that of
    each third of the layers."""
    names, rows = list(lines.filter(regex=HELD)), []
    for name, some in lines[lines["is_best"] == 1].groupby("name", sort=False):
        chosen = some["thirds"] if name.endswith(", thirds") else some["weight"].map("{:g}".format)
        rows.append([name, seeds_of(some), *map(cell, some[names].mean()), "; ".join(chosen)])
    return markdown_table(["row", "seed", *(name.removeprefix("held.") for name in names), "weights"], rows)


def let_through(lines: pandas.DataFrame, gated: pandas.DataFrame, new: Sequence[str]) -> str:
    """The gain behind a gate, in all new languages, as a share of what full fine-tuning gains."""
    rows = []
    for (tokens, name), some in gated.groupby(["tokens", "name"], sort=False):
        whole = lines[(lines["name"] == WHOLE) & (lines["tokens"] == tokens) & lines["seed"].isin(some["seed"])]
        some, cells = some[some["seed"].isin(whole["seed"])], []
        for kind in KINDS:
            of = gain(whole, "judged", kind, new)
            cells += [cell(100 * gain(some, way, kind, new) / of, "{:.0f}") if of < 0 else "" for way in WAYS]
        rows.append([f"{tokens:,}", name, seeds_of(some), *cells])
    return markdown_table(["tokens", "row", "seed", *(f"{kind}, {way}" for kind in KINDS for way in WAYS)], rows)


def gain(some: pandas.DataFrame, way: str, kind: str, new: Sequence[str]) -> float:
    """The mean change of the new languages, judged or told."""
    return some.reindex(columns=[f"{way}.{kind}.{code}" for code in new]).mean().mean(skipna=False)


def overview(groups: Groups, rows: Mapping[str, str]) -> str:
    """The table of README.md, of the longest training: rows by their names there."""
    lines, languages = groups[max(groups)]
    head = ["", "English", "six unnamed languages: mean, worst", "Hungarian and Turkish: documents, sentences"]
    cells = []
    for label, name in rows.items():
        some = lines[lines["name"] == name]
        if some.empty:
            continue
        gains = [cell(gain(some, "judged", kind, languages["new"])) for kind in GENERAL]
        others = [cell(some["unnamed, mean"].mean()), cell(some["unnamed, worst"].max())]
        kept = cell(some["kept"].mean())
        cells.append([label, f"{kept} %", *(f"{', '.join(pair)} %" for pair in (others, gains))])
    return markdown_table(head, cells)


def said(groups: Groups, sentences: Sequence[str]) -> list[str]:
    """Sentences of a page with their figures filled in; without those of rows that are not there."""
    found = []
    for sentence in sentences:
        parts = re.split(r"\{(.+?)\}", " ".join(sentence.split()))
        try:
            parts[1::2] = [figure(groups, *part.split(" | ")) for part in parts[1::2]]
        except KeyError:
            continue
        found.append("".join(parts))
    return found


def figure(groups: Groups, row: str, measure: str, tokens: str = "", seed: str = "") -> str:
    """One figure, without its sign: the mean over the seeds, or the worst.

    Args:
        measure: one of `measures`; `WAY: KIND`, of the new languages; `astray: KIND CODE`, the share of texts that go
            to new modules; a column of the CSV; `M parameters`, `GB`, or `times`, those of full fine-tuning.
        tokens: of the longest training by default.
    """
    lines, languages = groups[int(tokens or max(groups))]
    some = lines[lines["name"] == row]
    if seed:
        some = some[some["seed"] == int(seed)]
    if some.empty:
        raise KeyError(row)
    way, _, kind = measure.partition(": ")
    form = "{:.0f}" if measure.startswith("chat") else "{:.1f}"
    if measure in ("M parameters", "times"):
        dense = lines[lines["name"] == WHOLE]["parameters"].mean()
        value = some["parameters"].mean() / (dense if measure == "times" else 1e6)
    elif measure == "GB":
        value = some["peak_gigabytes"].mean()
    elif way == "astray":
        value = 100 * some[f"new.{kind.replace(' ', '.')}"].mean()
    elif way in WAYS:
        value = gain(some, way, kind, languages["new"])
    else:
        value = some[measure].agg("max" if "worst" in measure else "mean")
    if math.isnan(value):
        raise KeyError(measure)
    return cell(abs(value), form)


def judged(lines: pandas.DataFrame, claims: Sequence[Sequence[Any]]) -> pandas.DataFrame:
    """The claims, a column a length: each seed's difference, and whether all are below the limit, or above, beyond the
    spread: the wider one of the two rows' ranges over the seeds, of the length where it is widest. One seed, or a row
    that has one at every length, is not judged."""

    def range_of(some: pandas.Series) -> float:
        return some.max() - some.min() if len(some) > 1 else math.nan

    values = lines.set_index(["name", "tokens", "seed"]).sort_index()
    lengths = list(lines["tokens"].unique())
    rows = {}
    for says, row, other, measure, limit in claims:
        names = [name for name in (row, other) if name]
        if any(name not in values.index for name in names):
            rows[says] = [""] * len(lengths)
            continue
        ranges = values.loc[names, measure].groupby(["name", "tokens"]).agg(range_of)
        spread = ranges.groupby("name").max().max(skipna=False)
        cells = []
        for tokens in lengths:
            ours, others = (values[measure].get((name, tokens), pandas.Series(dtype=float)) for name in (row, other))
            differences = (ours - others if other else ours).dropna()
            verdict = "cannot tell"
            if len(differences) == 1:
                verdict = "one seed"
            elif (differences < limit - spread).all():
                verdict = "holds"
            elif (differences > limit + spread).all():
                verdict = "does not hold"
            of = ", ".join(map(cell, differences))
            cells.append(f"{verdict} ({of})" if of else "")
        rows[says] = cells
    head = [f"{tokens:,} tokens" for tokens in lengths]
    return pandas.DataFrame.from_dict(rows, "index", columns=head)


def cell(value: float, form: str = "{:+.1f}") -> str:
    return "" if math.isnan(value) else form.format(value).replace("-0.0", "0.0").replace("+0.0", "0.0")


def seeds_of(lines: pandas.DataFrame) -> str:
    return ", ".join(map(str, sorted(lines["seed"])))


def draw(panels: Mapping[str, pandas.DataFrame], file: Path) -> None:
    """A panel for each length: what all other languages lost, against what the new ones gained in general text."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "study"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(panels), figsize=(5 * len(panels) + 2, 4.5), squeeze=False)
    colours: dict[str, Any] = {}
    shown: dict[str, Any] = {}
    for (title, lines), ax in zip(panels.items(), axes[0], strict=True):
        lines = lines[~lines["row"].str.match(rf"{TUNED} \d")]  # they lie where whole ones do
        lines = lines[(lines["name"] == lines["row"]) | (lines["weight"] != 1)]  # a best weight of 1 is no average
        means = lines.assign(gain=-lines[[f"told: {kind}" for kind in GENERAL]].mean(axis=1))
        means = means.groupby(["row", "name"], sort=False)[["gain", "all others"]].mean()
        for row, some in means.groupby("row", sort=False):
            colour = colours.setdefault(row, pyplot.get_cmap("tab20")(2 * len(colours) % 20 + len(colours) // 10))
            ax.plot(some["gain"], some["all others"], "-", color=colour, linewidth=1)
            for (_, name), (gain, lost) in some.iterrows():
                face = colour if name == row else "white"
                (dot,) = ax.plot(gain, lost, "o", color=colour, markerfacecolor=face)
                if name == row:
                    shown.setdefault(row, dot)
        ax.set(title=title, xlabel="new languages, told, general text: gained, %", ylabel="all others: lost, %")
    place = {"bbox_to_anchor": (1.02, 1), "loc": "upper left", "title": "hollow: averaged with the base"}
    axes[0][-1].legend(shown.values(), shown.keys(), **place)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)

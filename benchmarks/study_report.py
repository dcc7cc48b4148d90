"""The study's tables and JSON, from its kept results."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from study_changes import (
    DOMAINS,
    Results,
    change,
    file_name,
    groups,
    kept_results,
    read_results,
    row_folder,
    spread,
)
from study_claims import claims_table, turned_table
from study_figures import draw_lengths, draw_losses, draw_pareto
from study_settings import at_length, lengths_of, read_settings, trained_tokens
from study_tuning import at_an_end
from tables import markdown_table

from hf_moe_expand.core.errors import InputError
from hf_moe_expand.core.jsonfile import read_json, write_json, write_text


def write_report(options: argparse.Namespace) -> None:
    """Prints the tables of the finished rows, and writes what the options name.

    Raises:
        InputError: there is no result of the base, or rows are of different settings.
    """
    settings = read_settings(options.settings)
    kept_results(settings, options.out)
    lengths = {tokens: at_length(settings, tokens) for tokens in lengths_of(settings)}
    found = {trained_tokens(of): read_results(settings, options.out, tokens) for tokens, of in lengths.items()}
    if "base" not in next(iter(found.values())):
        raise InputError(f"{options.out}: no result of the row `base`; `study.py run` makes it, or name another --out.")
    results = {tokens: rows for tokens, rows in found.items() if set(rows) != {"base"}} or dict([*found.items()][:1])
    speeds = read_json(options.out / "speed.json", "speeds") if (options.out / "speed.json").exists() else {}
    parts = []
    for tokens, rows in results.items():
        longest = tokens == max(results)
        parts += [f"### {tokens:,} tokens"] * (len(lengths) > 1)
        parts += [quality_table(settings, rows), _of_other_bases(rows), _in_float32(rows)]
        parts += [cost_table(settings, rows, speeds if longest else {})]
    claims, turned = claims_table(settings, results), turned_table(settings, results)
    tables = "\n\n".join(filter(None, [*parts, claims, turned]))
    print(tables)
    if options.table:
        write_text(options.table, tables + "\n")
    if options.json:
        write_json(options.json, as_json(settings, options.out, speeds))
    if options.figures:
        options.figures.mkdir(parents=True, exist_ok=True)
        draw_pareto(settings, results[max(results)], options.figures / f"{options.name}_pareto.svg")
        draw_losses(settings, results[max(results)], options.figures / f"{options.name}_loss.svg")
        if len(results) > 1:
            draw_lengths(settings, results, options.figures / f"{options.name}_lengths.svg")


def as_json(settings: Mapping[str, Any], out: Path, speeds: Mapping[str, float]) -> dict[str, Any]:
    """All that the study found: settings, sweeps, and each row's figures by seed, by the tokens of the `lengths` where
    the settings have any; no paths."""
    found = {tokens: _rows_as_json(settings, out, tokens, speeds) for tokens in lengths_of(settings)}
    if None in found:
        return {"settings": settings, "rows": found[None]}
    return {"settings": settings, "lengths": {str(tokens): {"rows": rows} for tokens, rows in found.items()}}


def _rows_as_json(
    settings: Mapping[str, Any], out: Path, tokens: int | None, speeds: Mapping[str, float]
) -> dict[str, Any]:
    rows = {}
    for name, found in read_results(settings, out, tokens).items():
        sweep = row_folder(settings, out, tokens, name) / "sweep" / f"{file_name(name)}.json"
        rows[name] = {
            "sweep": read_json(sweep, "a sweep") if sweep.exists() else {},
            "tokens_per_second": speeds.get(name) if tokens == lengths_of(settings)[-1] else None,
            "seeds": [{key: value for key, value in one.items() if key != "path"} for one in found],
        }
    return rows


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
    exact = " (s.e.)" if "pairs_stderr" in base["scores"] else ""
    head = [
        "",
        "",
        *(f"{domain}: {', '.join(codes)}" for domain, codes in columns),
        *(f"pairs: {code}{exact}" for code in pairs),
    ]
    rows = []
    for number, (name, found) in enumerate(results.items()):
        cells = [str(number), name]
        for domain, codes in columns:
            if name == "base":
                cells.append(f"{mean(base['scores'][domain][code] for code in codes):.3f}")
            else:
                cells.append(spread([change(one, base, domain, codes) for one in found], "{:+.1f} %"))
        cells += [_right(found, code) for code in pairs]
        rows.append(cells)
    return markdown_table(head, rows)


def _of_other_bases(results: Results) -> str:
    """Says which rows were restored from another training of the base; empty if none."""
    named = [name for name, found in results.items() if any("base" in one for one in found)]
    if not named:
        return ""
    others = ["the base" if name == "base" else f"`{name}`" for name in results if name not in named]
    whose = ", ".join(named) if len(named) < len(others) else f"All rows but {' and '.join(others)}"
    return f"{whose}: with seeds of another training of the base, whose own scores their changes are against."


def _in_float32(results: Results) -> str:
    """Says which rows trained in float32 though the settings ask for bfloat16, with which seeds; empty if none."""
    named = []
    for name, found in results.items():
        if seeds := [str(one["seed"]) for one in found if one.get("float32")]:
            named.append(name if len(seeds) == len(found) else f"{name} (seed {', '.join(seeds)})")
    return f"{'; '.join(named)}: trained in float32, on a processor without bfloat16." if named else ""


def _right(found: Sequence[Mapping[str, Any]], code: str) -> str:
    """The minimal pairs judged right in percent, and the standard error of one seed's."""
    said = spread([100 * one["scores"]["pairs"][code] for one in found], "{:.1f}")
    errors = [one["scores"].get("pairs_stderr", {}).get(code) for one in found]
    known = [100 * error for error in errors if error is not None]
    return f"{said} ({mean(known):.1f})" if known else said


def cost_table(settings: Mapping[str, Any], results: Results, speeds: Mapping[str, float]) -> str:
    """Parameters, processor time, the sweep's choice and the speed of generation, of each row."""
    tuned = {"rate": "learning rate", "review_rate": "review's", "weight": "weight"}
    shown = [key for key in tuned if key == "rate" or any(one.get(key) for (one, *_) in results.values())]
    rows = []
    for number, (name, found) in enumerate(results.items()):
        first = found[0]
        millions = [f"{first[key] / 1e6:.2f}" for key in ("trained", "total", "active")]
        seconds = f"{mean(one['seconds'] for one in found):.0f}"
        speed = [f"{speeds[name]:.0f}" if name in speeds else ""] if speeds else []
        chosen = [
            (f"{first[key]:g}" + " (end)" * at_an_end(settings, key, first[key])) if first.get(key) else ""
            for key in shown
        ]
        rows.append([str(number), name, *millions, *chosen, seconds, *speed, str(len(found))])
    measured = ["tokens/s"] if speeds else []
    head = ["", "", "trained, M", "total, M", "active, M", *(tuned[key] for key in shown), "CPU s", *measured, "seeds"]
    return markdown_table(head, rows)

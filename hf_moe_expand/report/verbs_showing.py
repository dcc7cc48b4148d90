"""The verbs that show what was made: the page of a run, what a checkpoint is, and what changed between two."""

import json
from pathlib import Path
from typing import Annotated

import typer

from ..checkpoint.arguments import ExpandSettings, Model, PlanFile, check_file, expanded
from ..core.printing import print_or_write, print_table
from ..core.verbs import Given, Keys, Kind, belongs

_HIDDEN = ("expert_init", "copy_from", "conditional_routing", "max_shard_size")


def report(
    folders: Annotated[list[Path], Kind(metavar="FOLDER...")], *, out: Path | None = None, overwrite: bool = False
) -> None:
    """Write the HTML page of a run, or of single commands' outputs: languages and text before and after, plan, losses,
    routing. Loads no weights.

    For tables of routing, run `analyze routing MODEL --out FOLDER/routing.json` first.

    Example: hf-moe-expand report runs/qwen-el

    Example: hf-moe-expand report . qwen-el-1 qwen-el-2 --out report.html

    Args:
        folders: folder of a run: the recipe's `output`. Or checkpoints that single commands made, in the order of their
            stages, and the folder with the commands' JSON files.
        out: file to write; by default report.html in a run's folder, or where you are.
    """
    alone = len(folders) == 1 and not (folders[0] / "config.json").is_file()
    out = out or (folders[0] / "report.html" if alone else Path("report.html"))
    check_file(out, overwrite)
    from .page import make_page

    print_or_write(make_page(*folders), out)


def inspect(
    model: Model,
    *,
    settings: Annotated[ExpandSettings, Keys(without=_HIDDEN)],
    plan: PlanFile | None = None,
    revision: str | None = None,
    given: Given,
) -> None:
    """Show layers, experts, parameters (total, active, trained by each stage) and history of an expanded checkpoint.

    Example: hf-moe-expand inspect qwen-el-2

    Example: hf-moe-expand inspect Qwen/Qwen2.5-0.5B --plan plan.json

    Args:
        plan: plan.json for the dense MODEL: show what it makes of it, before anything runs.
    """
    belongs(given, "plan", *ExpandSettings.model_fields)
    if plan is None:
        expanded(model, {"revision": revision})
    from .inspection import inspect_checkpoint, inspect_plan

    if plan is None:
        found = inspect_checkpoint(model, revision)
    else:
        found = inspect_plan(model, plan, revision, **settings.experts.model_dump())
    print("\n".join(found.lines()))


def diff(before: Model, after: Model, *, all_: bool = False, json_: bool = False) -> None:
    """Show which tensors differ between two checkpoints. Exit status 0: none differ; 1: some differ; 2: an error.

    Example: hf-moe-expand diff qwen-el qwen-el-1

    Args:
        all_: name every tensor that differs.
        json_: print JSON, with all names.
    """
    from ..checkpoint.compare import compare_checkpoints
    from ..checkpoint.source import resolve_checkpoint

    difference = compare_checkpoints(resolve_checkpoint(before), resolve_checkpoint(after))
    parts = difference.by_part()
    if json_:
        print(json.dumps({**vars(difference), "by_part": parts}, indent=2))
    else:
        rows = [[part, *map(str, counts.values())] for part, counts in parts.items()]
        print_table(["", *next(iter(parts.values()), {})], rows)
        for kind in ("changed", "removed", "added") if all_ else ():
            for name in getattr(difference, kind):
                print(f"{kind}  {name}")
    raise typer.Exit(0 if difference.same else 1)

"""The ranks of `conftest.fork_ranks`."""

import gc
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path


def run_rank(
    rank: int, script: str, arguments: Sequence[str], count: int, port: int, environment: dict[str, str]
) -> None:
    """Runs a script of this folder, or a module, as one of `count` ranks, which meet at the store on this port."""
    gc.freeze()  # what was imported before the fork; accelerate collects garbage after each training
    os.environ.update(environment)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True",
    )  # fmt: skip
    sys.argv = [script, *arguments]
    if said := os.environ.get("SAID"):
        sys.stdout = open(f"{said}.{rank}", "w", 1, "utf-8")  # noqa: SIM115
    if script.endswith(".py"):
        runpy.run_path(str(Path(__file__).with_name(script)), run_name="__main__")
    else:
        runpy.run_module(script, run_name="__main__")

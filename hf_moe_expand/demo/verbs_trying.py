"""The verb `demo`."""

from functools import partial
from pathlib import Path

from ..core.errors import InputError


def demo(*, real: bool = False, out: Path | None = None, base: str | None = None, seed: int = 0) -> None:
    """Run all steps with a tiny model, which the demo makes itself, on a CPU in a few minutes; or with a real one.

    Example: hf-moe-expand demo

    Example: hf-moe-expand demo --real

    Args:
        real: a real model, SmolLM2-135M-Instruct, learns Spanish: about four minutes on two idle cores.
        out: folder for all files of the demo; runs/demo or runs/demo-real by default.
        base: with --real: folder or hub id of a model to take, instead of downloading SmolLM2 (93 MB).
    """
    if base is not None and not real:
        raise InputError("--base belongs to --real, which is not given.")
    from datasets import disable_progress_bars
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bars()  # reading and writing take no time here
    disable_progress_bar()
    from .real import run_real_demo
    from .tiny import run_demo

    work = partial(run_real_demo, base=base) if real else run_demo
    work(out or Path("runs/demo-real" if real else "runs/demo"), seed=seed)

"""The command line. Each verb is a function: its signature is the options, its docstring the help.

Nothing heavy is imported up here, so that `--help` answers at once.
"""

import os
import sys

from ..errors import InputError

# In the order of `--help`.
from . import analyze, curriculum, evaluate, plan, publish, report, run, surgery, train  # noqa: F401
from .apps import app

__all__ = ["app", "main"]


def main() -> None:
    """Entry point: wrong input is told in one line, without a traceback (HF_MOE_EXPAND_DEBUG=1 shows it)."""
    try:
        app()
    except InputError as error:
        if os.environ.get("HF_MOE_EXPAND_DEBUG"):
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    finally:
        _leave_ranks()


def _leave_ranks() -> None:
    torch = sys.modules.get("torch")
    if torch and torch.distributed.is_available() and torch.distributed.is_initialized():
        from ..distributed import leave_ranks

        leave_ranks()

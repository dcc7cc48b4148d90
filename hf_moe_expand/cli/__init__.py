"""The command line. Each verb is a function: its signature is the options, its docstring the help.

The modules of the work, and with them the Trainer, are imported inside the verbs: `--help` does not wait for them.
"""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partialmethod

from tqdm import tqdm

from ..errors import InputError, is_full_disk

# In the order of `--help`.
from . import analyze, asking, evaluate, gates, plan, publish, run, surgery, train  # noqa: F401
from .ending import INTERRUPTED, orderly_stops, tell_full_disk, tell_interrupted, tell_unforeseen
from .options import app

__all__ = ["app", "main"]


def main() -> None:
    """Entry point. Errors are printed in one line, without a traceback (HF_MOE_EXPAND_DEBUG=1 shows it). The exit code
    is 2 after wrong input, 130 after Ctrl-C (143 after SIGTERM, 129 after SIGHUP), 70 after an unexpected error."""
    debug = bool(os.environ.get("HF_MOE_EXPAND_DEBUG"))
    with _lines_for_logs(), orderly_stops() as came:
        try:
            app()
        except InputError as error:
            if debug:
                raise
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        except (SystemExit, KeyboardInterrupt) as stop:
            if isinstance(stop, SystemExit) and stop.code != INTERRUPTED:
                raise
            sys.exit(tell_interrupted(came))
        except Exception as error:
            if debug:
                raise
            sys.exit(tell_full_disk(error) if is_full_disk(error) else tell_unforeseen(error))
        finally:
            _leave_ranks()


@contextmanager
def _lines_for_logs() -> Iterator[None]:
    """Where the output is a file or a pipe, whole lines appear as they are printed, and no progress bar does.

    tqdm makes the bars of every library here. It reads its variable when it is imported, as the processes do that this
    one starts; an empty one keeps bars.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    if "TQDM_DISABLE" in os.environ or (sys.stderr is not None and sys.stderr.isatty()):
        yield
        return
    with_bars = tqdm.__init__
    os.environ["TQDM_DISABLE"] = "1"
    tqdm.__init__ = partialmethod(with_bars, disable=True)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        tqdm.__init__ = with_bars  # type: ignore[method-assign]
        os.environ.pop("TQDM_DISABLE", None)


def _leave_ranks() -> None:
    torch = sys.modules.get("torch")
    if torch and torch.distributed.is_available() and torch.distributed.is_initialized():
        from ..distributed import leave_ranks

        leave_ranks()

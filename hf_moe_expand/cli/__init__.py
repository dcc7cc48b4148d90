"""The command line. Each verb is a function: its signature is the options, its docstring the help.

The module of a verb is imported when the verb runs, and the modules of the work inside it, once its arguments are read.
"""

import io
import os
import re
import shlex
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from tempfile import NamedTemporaryFile
from types import FrameType

from ..core.errors import InputError, file_of, in_one_line, is_full_disk, is_unicode
from ..core.progress import all_in_lines, shows_bars
from .groups import app, version_line

__all__ = ["app", "main"]

INTERRUPTED = 130  # the exit code that shells report after Ctrl-C
UNFORESEEN = 70  # EX_SOFTWARE of sysexits.h
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


def main() -> None:
    """Entry point. Errors are one line, without a traceback (`--debug` shows it). The exit code is 2 after wrong input,
    128 and its number after a signal, 70 after an unexpected error."""
    debug = "--debug" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--debug"]
    with _lines_for_logs(), nullcontext() if debug else _warnings_in_one_line(), orderly_stops() as came:
        try:
            if wrong := [argument for argument in sys.argv if not is_unicode(argument)]:
                raise InputError(f"{wrong[0]!r}: the name is not Unicode; rename the file or folder.")
            app()
        except InputError as error:
            if debug:
                raise
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        except (SystemExit, KeyboardInterrupt) as stop:
            if isinstance(stop, SystemExit) and stop.code != INTERRUPTED:
                raise
            sys.exit(tell_interrupted(came, stop))
        except Exception as error:
            if debug:
                raise
            sys.exit(tell_full_disk(error) if is_full_disk(error) else tell_unforeseen(error))
        finally:
            _leave_ranks()


@contextmanager
def _lines_for_logs() -> Iterator[None]:
    """Where the output is a file or a pipe, whole lines appear as they are printed, and lines in place of progress
    bars. The processes that this one starts show neither."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
        with suppress(OSError):  # where a pipe took the place of the file that it was opened on
            # Names of files may be no Unicode, and a terminal's encoding may lack letters of the text.
            sys.stdout.reconfigure(errors="backslashreplace")
    if "TQDM_DISABLE" in os.environ or shows_bars():
        yield
        return
    os.environ["TQDM_DISABLE"] = "1"  # tqdm read it when it was imported
    try:
        with all_in_lines():
            yield
    finally:
        os.environ.pop("TQDM_DISABLE", None)


@contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Inside, a warning is printed as an error is, without a place in the code."""
    usual = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"warning: {' '.join(str(message).split())}\n"
    try:
        yield
    finally:
        warnings.formatwarning = usual


def _leave_ranks() -> None:
    torch = sys.modules.get("torch")
    if torch and torch.distributed.is_available() and torch.distributed.is_initialized():
        from ..stages.distributed import leave_ranks

        leave_ranks()


@contextmanager
def orderly_stops() -> Iterator[list[int]]:
    """Inside, SIGTERM and SIGHUP raise KeyboardInterrupt, as SIGINT does, so that all three clean up in the same way;
    yields the received signals. An ignored signal, as under nohup, stays ignored."""
    came: list[int] = []
    process, before = os.getpid(), {}

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:  # a forked worker: it ends as it would without this handler
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not came or number == signal.SIGINT:  # a second signal must not stop the clean-up
            came.append(number)
            raise KeyboardInterrupt

    with suppress(ValueError):  # only the main thread may set handlers
        for number in _SIGNALS:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                before[number] = signal.signal(number, stop)
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def tell_interrupted(came: list[int], stop: BaseException) -> int:
    """Prints the interrupted command and where it goes on, once for all ranks; returns the exit code."""
    number = came[0] if came else signal.SIGINT
    by = "" if number == signal.SIGINT else f" by {signal.Signals(number).name}"
    if os.environ.get("RANK", "0") == "0":
        interrupt: BaseException | None = stop
        while interrupt is not None and not isinstance(interrupt, KeyboardInterrupt):
            interrupt = interrupt.__context__  # typer makes an Exit of it
        where = getattr(interrupt, "__notes__", [])  # of the outer work last
        again = f"goes on {', '.join(reversed(where))}" if where else "starts from the beginning"
        verb = " ".join(word for word in sys.argv[1:3] if re.fullmatch(r"[a-z][a-z-]*", word))
        print(f"interrupted{by}: hf-moe-expand {verb}. The same command {again}.", file=sys.stderr)
    return 128 + number


def tell_full_disk(error: BaseException) -> int:
    """Prints that the disk is full; returns the exit code."""
    said = f"error: the disk is full ({in_one_line(error)}{file_of(error)}). Make room, and run the same command again."
    print(said, file=sys.stderr)
    return 2


def tell_unforeseen(error: BaseException) -> int:
    """Prints the name of an error, and writes its traceback to a file; returns the exit code."""
    kind, message = type(error).__name__, in_one_line(error) + file_of(error)
    message = message if message.startswith(kind) else f"{kind}: {message}"
    with NamedTemporaryFile("wb", prefix="hf-moe-expand-error-", suffix=".log", delete=False) as file:
        text = f"hf-moe-expand {shlex.join(sys.argv[1:])}\n{version_line()}\n\n"
        file.write((text + "".join(traceback.format_exception(error))).encode(errors="backslashreplace"))
    print(f"error: {message}. This error was not expected. The traceback is in {file.name}.", file=sys.stderr)
    return UNFORESEEN

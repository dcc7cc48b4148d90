"""Says how far long work is and how long it still takes, at least every 15 seconds: by a bar on a terminal, elsewhere
by lines. All bars, also those of other libraries, are tqdm's."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from typing import Any
from weakref import ref

from tqdm import asyncio, auto, std

EVERY = 15.0  # seconds
EARLY = 10.0  # between two lines, at a step of the work: the next one may take long
_said = [0.0]  # when the last line was


def shows_bars() -> bool:
    """Whether there is a terminal or a notebook for bars. `TQDM_DISABLE` decides where it is set: an empty one keeps
    them."""
    given = os.environ.get("TQDM_DISABLE")
    if given is not None:
        return not given
    return auto.tqdm is not asyncio.tqdm or (sys.stderr is not None and sys.stderr.isatty())


def duration(seconds: float) -> str:
    """A time in words, such as `3 h 20 min`."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60} min"


class Bar(auto.tqdm):  # type: ignore[misc,valid-type]
    """A bar of tqdm for work of this package that takes longer than a second, or its lines; it moves at least every 15
    seconds, also within a long step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.has_lines, self.ended, now = not shows_bars(), threading.Event(), time.monotonic()
        self.told = min(_said[0] or now, now)  # else short works, one after the other, would say nothing
        super().__init__(*args, **{"delay": 1.0, **kwargs})
        if not self.disable:
            threading.Thread(target=_beat, args=(ref(self), self.ended), daemon=True).start()

    def display(self, *args: Any, **kwargs: Any) -> Any:
        return _say_line(self) if self.has_lines else super().display(*args, **kwargs)

    def close(self) -> None:
        self.ended.set()
        super().close()


def _beat(bar_of: Any, ended: threading.Event) -> None:
    """Moves a bar of which nothing was said for long, until it ends or is gone."""
    wait = EVERY
    while not ended.wait(wait) and (bar := bar_of()) is not None:
        wait = bar.told + EVERY - time.monotonic() if bar.has_lines else 0.0  # since its last line
        if wait <= 0:
            bar.refresh()
            wait = EVERY
        del bar  # else it would stay


def _say_line(bar: Any, *args: Any, **kwargs: Any) -> bool:
    """In place of a bar's `display`: a line, if the last one is some time ago."""
    bar.fp = StringIO()  # for the line ends that the bar writes
    now = time.monotonic()
    if now - vars(bar).setdefault("told", now) >= EARLY and not bar.disable:
        bar.told = _said[0] = now
        print(std.tqdm.format_meter(**{**bar.format_dict, "ncols": 0}), file=sys.stderr, flush=True)
    return True


@contextmanager
def all_in_lines() -> Iterator[None]:
    """Inside, the bars of all libraries are lines."""
    usual = std.tqdm.display
    std.tqdm.display = _say_line
    try:
        yield
    finally:
        std.tqdm.display = usual

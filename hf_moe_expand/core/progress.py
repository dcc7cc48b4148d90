"""Says how far long work is and how long it still takes, at least every 15 seconds: by a bar on a terminal, elsewhere
by lines. All bars, also those of other libraries, are tqdm's."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakMethod

from tqdm import asyncio, auto, std

EVERY = 15.0  # seconds
EARLY = 10.0  # at a step of the work after so many: the next one may take long


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


class Heartbeat:
    """Calls a method whenever nothing was said for `EVERY` seconds, until it is stopped or the object is gone."""

    def __init__(self, say: Callable[[], Any]) -> None:
        self.last, self._ended = time.monotonic(), threading.Event()
        threading.Thread(target=self._beat, args=(WeakMethod(say),), daemon=True).start()

    def said(self) -> None:
        """Tells that something was said."""
        self.last = time.monotonic()

    def stop(self) -> None:
        self._ended.set()

    def _beat(self, method: Callable[[], Callable[[], Any] | None]) -> None:
        while not self._ended.wait(max(self.last + EVERY - time.monotonic(), 0.1)):
            if time.monotonic() - self.last >= EVERY:
                self.said()
                if (say := method()) is None:
                    return
                say()
                del say  # else it would keep the object


class Bar(auto.tqdm):  # type: ignore[misc,valid-type]
    """A bar of tqdm for work of this package that takes longer than a second, or its lines; it moves at least every 15
    seconds, also between two updates."""

    _heart: Heartbeat | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.has_lines, self.told = not shows_bars(), time.monotonic()
        super().__init__(*args, **{"delay": 1.0, **kwargs})
        if not self.disable:
            self._heart = Heartbeat(self.refresh)

    def display(self, *args: Any, **kwargs: Any) -> Any:
        return _say_line(self) if self.has_lines else super().display(*args, **kwargs)

    def close(self) -> None:
        if self._heart is not None:
            self._heart.stop()
        if self.has_lines:
            self.fp = _NOWHERE
        super().close()


class _Nowhere:
    """A file for the line ends that a bar writes."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None: ...


_NOWHERE = _Nowhere()


def _say_line(bar: Any, *args: Any, **kwargs: Any) -> bool:
    """In place of a bar's `display`: a line, if the last one is some time ago."""
    bar.fp = _NOWHERE
    now = time.monotonic()
    if now - vars(bar).setdefault("told", now) >= EARLY and not bar.disable:
        bar.told = now
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

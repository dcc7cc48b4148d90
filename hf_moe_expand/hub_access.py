"""Asks once whether the hub answers: its libraries would try five times, or wait for minutes."""

import time
from threading import Thread

from huggingface_hub import get_session
from huggingface_hub.constants import ENDPOINT as HF_ENDPOINT
from huggingface_hub.constants import is_offline_mode
from huggingface_hub.errors import HTTPError

from .errors import first_line

_PATIENCE = 8.0  # seconds
# Seconds for which an answer, or its absence, is remembered.
_REMEMBERED = {True: 600.0, False: 60.0}
_asked: dict[str, tuple[float, str]] = {}


def hub_problem() -> str:
    """The reason why the hub cannot be reached; empty if it answers, or if the libraries are told to work offline."""
    if is_offline_mode():
        return ""
    asked_at, reason = _asked.get(HF_ENDPOINT, (0.0, ""))
    if not asked_at or time.monotonic() - asked_at > _REMEMBERED[not reason]:
        reason = _ask(HF_ENDPOINT)
        _asked[HF_ENDPOINT] = (time.monotonic(), reason)
    return reason


def _ask(endpoint: str) -> str:
    problem = [f"{endpoint} gave no answer within {_PATIENCE:g} seconds"]

    def ask() -> None:
        try:
            get_session().head(endpoint, timeout=_PATIENCE, follow_redirects=False)
            problem[0] = ""
        except (HTTPError, OSError) as error:
            problem[0] = first_line(error)

    # In a thread, since no timeout covers the search for the address of a name.
    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    return problem[0]

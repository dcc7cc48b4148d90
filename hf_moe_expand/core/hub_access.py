"""Asks once whether the hub answers, and asks again where it says when."""

import time
import warnings
from collections.abc import Callable
from threading import Thread
from typing import Any, TypeVar

from huggingface_hub import get_session
from huggingface_hub.constants import ENDPOINT as HF_ENDPOINT
from huggingface_hub.constants import is_offline_mode
from huggingface_hub.errors import HTTPError
from huggingface_hub.utils import hf_raise_for_status

from .hub_answers import answer_of, time_in_words, wait_of, with_hint, without_secrets

T = TypeVar("T")
_PATIENCE = 8.0  # seconds
# Seconds for which an answer, or its absence, is remembered.
_REMEMBERED = {True: 600.0, False: 60.0}
_MOST_WAIT = 300.0  # seconds, the window of the hub's own limits
_TRIES = 5
_asked: dict[str, tuple[float, str]] = {}


def hub_problem() -> str:
    """The reason why the hub cannot be reached; empty if it answers, or if the libraries are told to work offline."""
    if is_offline_mode():
        return ""
    asked_at, reason = _asked.get(HF_ENDPOINT, (0.0, ""))
    if not asked_at or time.monotonic() - asked_at > _REMEMBERED[not reason]:
        reason = without_secrets(_ask(HF_ENDPOINT))
        _asked[HF_ENDPOINT] = (time.monotonic(), reason)
    return reason


def _ask(endpoint: str) -> str:
    """Asks once: the hub's libraries would try five times, or wait for minutes."""
    problem = [f"{endpoint} gave no answer within {_PATIENCE:g} seconds"]

    def ask() -> None:
        try:
            get_session().head(endpoint, timeout=_PATIENCE, follow_redirects=False)
            problem[0] = ""
        except (HTTPError, OSError) as error:
            problem[0] = with_hint(error)

    # In a thread, since no timeout covers the search for the address of a name.
    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    return problem[0]


def patiently(call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """The result of a call that asks the hub, and that may be repeated. Where the hub says when to ask again, this
    waits for at most five minutes in all; a longer wait is an error at once, which the library would sleep through."""
    until = time.monotonic() + _MOST_WAIT
    for _ in range(_TRIES - 1):
        hooks = get_session().event_hooks["response"]
        if _refuse_long_wait not in hooks:
            hooks.append(_refuse_long_wait)
        try:
            return call(*args, **kwargs)
        except Exception as error:
            answer = answer_of(error)
            seconds = None if answer is None else wait_of(answer.response)
            if seconds is None or time.monotonic() + seconds > until:
                raise
        warnings.warn(f"the hub asks to wait {time_in_words(seconds)}", stacklevel=2)
        time.sleep(seconds)
    return call(*args, **kwargs)


def _refuse_long_wait(response: Any) -> None:
    if response.is_error and (wait_of(response) or 0) > _MOST_WAIT:
        hf_raise_for_status(response)

"""Puts into words what goes wrong in a call to the hub: each answer of it, or of a proxy or a login page before it."""

import re
import socket
import ssl
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from json import JSONDecodeError
from math import ceil
from typing import Any

from huggingface_hub import get_token
from huggingface_hub.constants import ENDPOINT as HF_ENDPOINT
from huggingface_hub.constants import is_offline_mode
from huggingface_hub.errors import (
    DisabledRepoError,
    FileMetadataError,
    GatedRepoError,
    HTTPError,
    LocalEntryNotFoundError,
)
from huggingface_hub.utils import parse_ratelimit_headers

from .errors import first_line

_NETWORK = (HTTPError, ConnectionError, TimeoutError, socket.gaierror, ssl.SSLError)
_HUB = "the hub"
_TO_DO = {
    401: "log in with `hf auth login`, or set HF_TOKEN to a valid token",
    402: "see https://huggingface.co/settings/billing",
    403: "use a token that may, or ask the owner",
    404: "check the name",
    407: "name a user and a password of the proxy in HTTPS_PROXY",
    409: "something else changed it meanwhile, so try again",
    410: "it was removed for good",
    413: "make smaller files, with a smaller max_shard_size",
    416: "remove the file's *.incomplete from the hub's cache",
    422: "change what it names",
    451: "it may not be had where you are, so take another",
    507: "make room there",
}
_TRY_AGAIN = (408, 425, 429)
_QUOTA = re.compile(r"quota|storage|billing|payment|upgrade|exceed|limit reached|reached .*limit", re.IGNORECASE)
_QUOTA_STATUSES = (400, 402, 403, 413, 422, 507)
_HINTS = {
    "CERTIFICATE_VERIFY_FAILED": "set SSL_CERT_FILE to a file with the certificates of your network",
    "Proxy Authentication": _TO_DO[407],
}
_SECRET = re.compile(r"\bhf_[A-Za-z0-9]{20,}|(?<=[Bb]earer )\S+|(?<=://)[^/\s@]+(?=@)")


def cause_of(error: BaseException) -> BaseException:
    """The error of the network or of the disk behind a library's error; the error itself if there is none."""
    found: BaseException | None = error
    while found is not None:
        on_disk = isinstance(found, OSError) and found.errno is not None
        if on_disk or isinstance(found, (*_NETWORK, FileMetadataError)):
            return found
        found = found.__cause__ or found.__context__
    return error


def is_of_hub(error: BaseException) -> bool:
    """Whether the hub refused something that it has, or did not answer as itself."""
    cause = cause_of(error)
    return status_of(error) != HTTPStatus.NOT_FOUND and isinstance(
        cause, (*_NETWORK, FileMetadataError, JSONDecodeError)
    )


def answer_of(error: BaseException) -> Any:
    """The error with the hub's `response` behind a library's error; None if there was none."""
    cause = cause_of(error)
    return cause if isinstance(cause, HTTPError) and hasattr(cause, "response") else None


def status_of(error: BaseException) -> int | None:
    """The status with which the hub itself refused; None if it did not, or if a proxy or a storage did."""
    answer = answer_of(error)
    return None if answer is None or _is_page(answer) or _who(answer) != _HUB else answer.response.status_code


def _message(answer: Any) -> str:
    """The hub's own words, in one line; the library makes new errors of some, without them."""
    while answer is not None and not getattr(answer, "server_message", None):
        answer = answer.__cause__ or answer.__context__
    return " ".join(getattr(answer, "server_message", "").split())


def _is_page(answer: Any) -> bool:
    """Whether an answer is made for people, which the hub's own answers to programs are not."""
    return "html" in answer.response.headers.get("Content-Type", "") or "<html" in _message(answer).lower()


def _who(answer: Any) -> str:
    url = answer.response.request.url
    return _HUB if str(url).startswith(HF_ENDPOINT) else url.host


def is_quota(error: BaseException) -> bool:
    """Whether the hub refuses since room or money is used up, which it says in words alone."""
    return status_of(error) in _QUOTA_STATUSES and bool(_QUOTA.search(_message(answer_of(error))))


def refusal(error: BaseException) -> str:
    """What went wrong in a call to the hub, and what to do, in words that go on a sentence. Access tokens and passwords
    are left out."""
    cause = cause_of(error)
    words = "without the hub's headers" if isinstance(cause, FileMetadataError) else first_line(cause)
    if (answer := answer_of(error)) is not None:
        return _said(answer)
    if is_offline_mode():
        text = "offline mode is on, and the hub's cache does not hold it whole: unset HF_HUB_OFFLINE"
    elif isinstance(cause, (*_NETWORK, RuntimeError)):
        text = f"the connection to the hub failed ({with_hint(cause)})"
    elif isinstance(cause, LocalEntryNotFoundError):
        text = f"the hub's cache does not hold it ({words})"
    elif isinstance(cause, OSError) and not isinstance(cause, FileMetadataError):
        broken = cause.errno is None  # a file came in part
        text = (
            f"the download broke off ({words}): try again" if broken else f"a file cannot be read or written ({words})"
        )
    else:
        text = (
            f"what answers is not the hub ({words}): a login page or a proxy may stand before it, check your network "
            "and HF_ENDPOINT"
        )
    return without_secrets(text)


def _said(answer: Any) -> str:
    response, status = answer.response, answer.response.status_code
    token = response.request.headers.get("Authorization", "").removeprefix("Bearer ")
    words = without_secrets(_message(answer), token)[:500].rstrip(".:")
    if _is_page(answer):
        words = "with a page, so perhaps a proxy before it does"
    seconds = wait_of(response)
    if seconds is not None:
        to_do = f"try again in {time_in_words(seconds)}"
    elif isinstance(answer, GatedRepoError):
        to_do = "ask for access on its page on the hub, and log in with `hf auth login`"
    elif isinstance(answer, DisabledRepoError):
        to_do = "it was disabled, so take another"
    elif is_quota(answer):
        to_do = "make room, or get more (https://huggingface.co/settings/billing)"
    elif status >= HTTPStatus.INTERNAL_SERVER_ERROR or status in _TRY_AGAIN:
        to_do = _TO_DO.get(status, "try again later")
    elif status_of(answer) is None and status != HTTPStatus.PROXY_AUTHENTICATION_REQUIRED:
        to_do = "check your network and HF_ENDPOINT, or try again"
    else:
        to_do = _TO_DO.get(status, "")
    phrase = HTTPStatus(status).phrase if status in {*HTTPStatus} else response.reason_phrase
    text = f"{_who(answer)} answers {status} {phrase}".rstrip() + (f" ({words})" if words else "")
    return f"{text}: {to_do}" if to_do else text


def with_hint(error: BaseException) -> str:
    text = first_line(error)
    return text + next((f"; {hint}" for part, hint in _HINTS.items() if part in text), "")


def without_secrets(text: str, *secrets: str) -> str:
    """A text without access tokens, and without users and passwords in addresses."""
    for secret in (*secrets, get_token() or ""):
        text = text.replace(secret, "***") if secret else text
    return _SECRET.sub("***", text)


def wait_of(response: Any) -> float | None:
    """The seconds after which a hub that refuses wants to be asked again; None if it does not say."""
    limit = parse_ratelimit_headers(response.headers) if response.status_code == HTTPStatus.TOO_MANY_REQUESTS else None
    if limit is not None and limit.remaining == 0:
        return limit.reset_in_seconds
    given = response.headers.get("Retry-After", "").strip()
    if re.fullmatch(r"[0-9]{1,9}", given):
        return int(given)
    try:
        return max((parsedate_to_datetime(given) - datetime.now(UTC)).total_seconds(), 0)
    except (TypeError, ValueError):  # no date, or one without a time zone
        return None


def time_in_words(seconds: float) -> str:
    sizes = {"day": 86_400, "hour": 3_600, "minute": 60, "second": 1}
    unit = next((unit for unit, size in sizes.items() if seconds >= size), "second")
    count = max(ceil(seconds / sizes[unit]), 1)
    return f"{count:,} {unit}{'s' * (count > 1)}"

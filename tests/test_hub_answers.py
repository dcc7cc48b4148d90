"""Whatever a hub, a proxy or a login page answers is said as what it is, on reading and on a push, and the hub is asked
again where it says when."""

import itertools
import json
import socket
import ssl
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from types import SimpleNamespace

import pytest
from conftest import save_dense
from hub_server import OTHER_TOKEN, TOKEN, Fault, HubServer
from huggingface_hub.errors import FileMetadataError, LocalEntryNotFoundError

from hf_moe_expand import Plan, expand_checkpoint
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.core.hub_answers import refusal, time_in_words, wait_of

HTML = {"Content-Type": "text/html; charset=utf-8"}
PAGE = b"<!doctype html><html><body>Please log in</body></html>"
NUMBERS = itertools.count()
RUN = """
import time, warnings
from hf_moe_expand.core.errors import InputError
slept, usual = [], time.sleep
time.sleep = slept.append
result = {"slept": slept, "message": "", "warned": []}
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    try:
        exec(call)
    except InputError as error:
        result["message"] = str(error)
    finally:
        time.sleep = usual
result["warned"] = [str(one.message) for one in warned if "hub" in str(one.message)]
"""
READ = "from hf_moe_expand.checkpoint.source import resolve_checkpoint\nresolve_checkpoint(name)"
PUSH = """
import hf_moe_expand.hub.publish as hub
hub.check_loads_alone = lambda folder: None
hub.push_to_hub(folder, name, token=token, say=lambda line: None)
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_dense(tmp_path_factory.mktemp("dense") / "tiny")


@pytest.fixture(scope="module")
def checkpoint(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("expanded") / "tiny-el"
    expand_checkpoint(base, folder, Plan("moe-lpr", [2] * 3, old=["en"], new=["el"]))
    return folder


def ask(server, client, fault, call, **values):
    server.fault = fault
    try:
        answer = client.run(RUN, call=call, **values)["value"]
    finally:
        server.fault = None
    assert "\n" not in answer["message"]
    assert not any(secret in json.dumps(answer) for secret in (TOKEN, OTHER_TOKEN, "opensesame"))
    return answer


@pytest.fixture
def read(server, client, base):
    """Reads a new model while something goes wrong."""
    name = f"org/model-{next(NUMBERS)}"
    server.add(name, {file.name: file.read_bytes() for file in base.iterdir()})

    def asked(fault):
        answer = ask(server, client, fault, READ, name=name)
        assert not answer["message"] or answer["message"].startswith(f"{name}: ")
        assert "Traceback" not in answer["message"]
        return answer

    return asked


@pytest.fixture
def push(server, client, checkpoint):
    """Pushes to a new repository while something goes wrong."""
    name = f"me/model-{next(NUMBERS)}"

    def asked(fault, token=None):
        return ask(server, client, fault, PUSH, folder=str(checkpoint), name=name, token=token)

    return asked


def said(words, code=""):
    headers = {"X-Error-Code": code, "X-Error-Message": words.splitlines()[0]}
    return {"body": json.dumps({"error": words}).encode(), "headers": headers}


STATUSES = [
    (400, {}, "400 Bad Request"),
    (401, said("Invalid credentials in Authorization header"), "401 Unauthorized .Invalid.*: log in with"),
    (402, said("Payment required"), "402 Payment Required .Payment required.: make room"),
    (403, said("Your token lacks the scope"), "403 Forbidden .Your token lacks the scope.: use a token that may"),
    (403, said("You have exceeded your storage quota"), "403 Forbidden .You have exceeded.*: make room"),
    (403, said("Access to model is restricted", "GatedRepo"), "403 Forbidden .Access to model.*: ask for access"),
    (403, said("Access to this resource is disabled."), "403 Forbidden .Access to this.*: it was disabled"),
    (404, said("No such endpoint"), "404 Not Found .No such endpoint.: check the name"),
    (407, {}, "407 Proxy Authentication Required: name a user and a password of the proxy in HTTPS_PROXY"),
    (408, {}, "408 Request Timeout: try again later"),
    (409, {}, "409 Conflict: something else changed it meanwhile"),
    (410, {}, "410 Gone: it was removed for good"),
    (413, {}, "413 Request Entity Too Large: make smaller files"),
    (413, said("Storage limit reached"), "413 .*: make room"),
    (416, {}, r"416 Requested Range Not Satisfiable.*: remove the file's \*\.incomplete"),
    (418, {}, r"418 I'm a Teapot"),
    (422, said("bad name"), "422 Unprocessable .*bad name.: change what it names"),
    (429, {"body": b"Too many requests:\nretry in 1 hour"}, "429 Too Many Requests .Too many requests: retry in 1 h"),
    (451, {}, "451 Unavailable For Legal Reasons: it may not be had where you are"),
    (500, said("storage backend"), "500 Internal Server Error .storage backend.: try again later"),
    (502, {"headers": HTML, "body": PAGE}, "502 Bad Gateway .with a page.*: try again later"),
    (503, {}, "503 Service Unavailable: try again later"),
    (504, {}, "504 Gateway Timeout: try again later"),
    (507, {}, "507 Insufficient Storage: make room"),
    (599, {}, "599.*: try again later"),
]  # fmt: skip


@pytest.mark.parametrize(("status", "answer", "message"), STATUSES)
def test_each_status_is_said_on_reading(read, status, answer, message):
    found = read(Fault("/api/models/org/", status, **{"body": b"{}", **answer}))["message"]
    gated = "GatedRepo" in str(answer)
    with pytest.raises(InputError, match=f": {'' if gated else 'no such folder, and '}the hub answers {message}"):
        raise InputError(found)
    assert "no model of that name" not in found


@pytest.mark.parametrize(
    ("part", "status", "answer", "message"),
    [("/whoami-v2", *one) for one in STATUSES]
    + [("/commit/", *one) for one in STATUSES if one[0] in (400, 401, 403, 409, 413, 429, 502)],
)
def test_each_status_is_said_on_a_push(push, part, status, answer, message):
    found = push(Fault(part, status, **{"body": b"{}", **answer}))["message"]
    with pytest.raises(InputError, match=f"the hub answers {message}"):
        raise InputError(found)
    token = status in (401, 403) and "exceeded" not in str(answer)
    assert ("access token" in found) == token
    lasts = status in (401, 402, 403, 404, 407, 410, 413, 422, 451, 507)
    assert ("Run the same command again" in found) == (part != "/whoami-v2" and not lasts)


def test_a_repository_that_the_hub_does_not_show_is_as_before(read):
    found = read(Fault("/api/models/", 404, **said("Repository not found", "RepoNotFound")))["message"]
    assert "the hub shows no model of that name" in found


@pytest.mark.parametrize("part", ["/api/models/org/", "/tree/", "HEAD /org/", "GET /org/"])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"body": PAGE, "headers": HTML}, "what answers is not the hub|the download broke off"),
        ({"body": b'{"status": "ok"}'}, "what answers is not the hub|the download broke off"),
        ({"body": b"[1, 2]"}, "what answers is not the hub|the download broke off"),
        ({"body": b"\xff\xfe"}, "what answers is not the hub|the download broke off"),
        ({"body": b'{"id": "x", "si', "cut": True}, "the connection to the hub failed|is not the hub|broke off"),
        ({"reset": True}, "the connection to the hub failed"),
        ({"status": 403, "body": PAGE, "headers": HTML}, "403 Forbidden .with a page.*: check your network and HF_END"),
    ],
)
def test_what_is_no_answer_of_the_hub_is_said_so(read, part, fault, message):
    with pytest.raises(InputError, match=message):
        raise InputError(read(Fault(part, **fault))["message"] or "read")


def test_a_redirect_to_a_login_page_is_said_so(read, server):
    with HubServer() as elsewhere:
        elsewhere.fault = Fault("", 200, PAGE, HTML)
        for part in ("/api/models/", "HEAD /org/"):
            found = read(Fault(part, 302, headers={"Location": f"{elsewhere.endpoint}/login?opensesame"}))["message"]
            assert "no such folder, and what answers is not the hub" in found


@pytest.mark.parametrize("part", ["/whoami-v2", "/api/models/me/", "/preupload/", "/objects/batch", "/commit/"])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"body": PAGE, "headers": HTML}, "what answers is not the hub"),
        ({"body": b"[]"}, "what answers is not the hub"),
        ({"reset": True}, "the connection to the hub failed"),
        ({"status": 403, "body": PAGE, "headers": HTML}, "403 Forbidden .with a page.*: check your network and HF_END"),
    ],
)
def test_a_push_says_so_too(push, part, fault, message):
    found = push(Fault(part, **fault))["message"]
    assert "access token" not in found
    with pytest.raises(InputError, match=message):
        raise InputError(found)


PAST = format_datetime(datetime.now(UTC) - timedelta(hours=1), usegmt=True)


@pytest.mark.parametrize(
    ("status", "headers", "slept"),
    [
        (429, {"Retry-After": "7"}, 7),
        (429, {"ratelimit": '"api";r=0;t=55', "ratelimit-policy": '"fixed window";"api";q=500;w=300'}, 55),
        (429, {"ratelimit": '"api";r=3;t=55', "Retry-After": "9"}, 9),
        (503, {"Retry-After": "7"}, 7),
        (503, {"Retry-After": PAST}, 0),
    ],
)
def test_a_short_wait_is_waited_for(read, push, status, headers, slept):
    for ask, part in ((read, "/api/models/org/"), (push, "/whoami-v2"), (push, "/api/repos/create")):
        answer = ask(Fault(part, status, b"{}", headers, times=2))
        assert answer["message"] == ""
        assert answer["slept"] == [slept] * 2
        assert answer["warned"] == [f"the hub asks to wait {time_in_words(slept)}"] * 2


@pytest.mark.parametrize("part", ["/api/models/org/", "/tree/", "HEAD /org/", "GET /org/"])
def test_a_long_wait_is_said_at_once(read, part):
    answer = read(Fault(part, 429, headers={"Retry-After": "3600"}))
    assert answer["slept"] == []
    assert "the hub answers 429 Too Many Requests: try again in 1 hour." in answer["message"]


@pytest.mark.parametrize("part", ["/whoami-v2", "/preupload/", "/objects/batch", "PUT /upload", "/commit/"])
def test_a_push_does_not_sleep_through_a_long_wait(push, server, part):
    server.objects.clear()
    answer = push(Fault(part, 429, headers={"Retry-After": "3600"}))
    assert answer["slept"] == []
    assert "the hub answers 429 Too Many Requests: try again in 1 hour" in answer["message"]


def test_a_hub_that_always_asks_to_wait_is_left(read):
    answer = read(Fault("/api/models/org/", 429, headers={"Retry-After": "0"}))
    assert answer["slept"] == [0] * 4
    assert "429 Too Many Requests: try again in 1 second." in answer["message"]


@pytest.mark.parametrize("given", ["", "soon", "-5", "1e9", "nan", "9" * 5000, "²", "Wed, 21 Oct 2065 07:28:00"])
def test_a_wait_that_is_no_time_is_none(given):
    assert wait_of(SimpleNamespace(status_code=503, headers={"Retry-After": given})) is None


def test_times_are_said_in_their_largest_unit():
    times = {0: "1 second", 55: "55 seconds", 61: "2 minutes", 3600: "1 hour", 5000: "2 hours", 90_000: "2 days"}
    assert {seconds: time_in_words(seconds) for seconds in times} == times


def test_tokens_do_not_reach_a_message(read, push, server):
    words = f"Bearer {TOKEN} and {OTHER_TOKEN} may not, see https://me:opensesame@example.org/x"
    for status in (400, 401, 403, 500):
        assert "***" in read(Fault("/api/models/org/", status, **said(words)))["message"]
        assert "***" in push(Fault("/whoami-v2", status, **said(words)), token=OTHER_TOKEN)["message"]


def test_a_token_of_another_form_does_not_reach_a_message_either(push):
    found = push(Fault("/whoami-v2", 403, **said("x" * 490 + " token-of-another-kind")), token="token-of-another-kind")
    assert "of-another" not in found["message"]
    assert "***" in found["message"]


@pytest.mark.parametrize(
    "asked",
    [
        "from hf_moe_expand.hub.card import _base_license as ask\nassert ask(BaseModel(name, name, None)) == {}",
        "from hf_moe_expand.hub.files import base_on_hub as ask\nassert ask(None, name).revision is None",
    ],
)
@pytest.mark.parametrize(
    "fault", [{"status": 429, "headers": {"Retry-After": "3600"}}, {"body": PAGE}, {"reset": True}]
)
def test_what_can_be_done_without_is_not_waited_for(server, client, asked, fault):
    call = f"from hf_moe_expand.checkpoint.expansion_only import BaseModel\n{asked}"
    answer = ask(server, client, Fault("HEAD /org/", **fault), call, name=f"org/model-{next(NUMBERS)}")
    assert answer["slept"] == [] or "reset" in fault
    assert answer["message"] == ""


def test_offline_mode_is_named(client):
    answer = client.run(
        RUN,
        call="import huggingface_hub.constants as c\nc.HF_HUB_OFFLINE = True\n"
        "try:\n    from hf_moe_expand.checkpoint.source import resolve_checkpoint\n    resolve_checkpoint('no/such')\n"
        "finally:\n    c.HF_HUB_OFFLINE = False",
    )["value"]
    assert answer["message"] == (
        "no/such: no such folder, and offline mode is on, and the hub's cache does not hold it whole: unset "
        "HF_HUB_OFFLINE."
    )


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault("/api/datasets/", 429, headers={"Retry-After": "3600"}), "429 Too Many Requests: try again in 1 hour"),
        (Fault("HEAD /datasets/", 429, headers={"Retry-After": "3600"}), "429 Too Many Requests: try again in 1 hour"),
        (Fault("/api/datasets/", 403, **said("You have exceeded your quota")), "403 Forbidden .*: make room"),
        (Fault("/api/datasets/", 200, PAGE, HTML), "what answers is not the hub"),
        (Fault("HEAD /datasets/", 200, PAGE, HTML), "what answers is not the hub .without the hub's headers"),
        (Fault("/api/datasets/", reset=True), "the connection to the hub failed"),
        (Fault("/api/datasets/", 404, **said("Repository not found", "RepoNotFound")), "gives no dataset of that name"),
    ],
)
def test_a_dataset_s_answers_are_said_too(server, client, fault, message):
    name = f"org/data-{next(NUMBERS)}"
    server.add(name, {"data.jsonl": b'{"text": "a"}\n'}, kind="dataset")
    call = "from hf_moe_expand.data.sources import read_hub\nlist(read_hub('hub:' + name, 'en'))"
    answer = ask(server, client, fault, call, name=name)
    assert answer["slept"] == []
    with pytest.raises(InputError, match=f"^hub:{name}: .*{message}"):
        raise InputError(answer["message"])


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ssl.SSLError(1, "[SSL: CERTIFICATE_VERIFY_FAILED] self-signed"), r"failed \(.*; set SSL_CERT_FILE to a file"),
        (ConnectionResetError(104, "Connection reset by peer"), "the connection to the hub failed"),
        (socket.gaierror(-2, "Name or service not known"), "the connection to the hub failed"),
        (FileMetadataError("no header"), "what answers is not the hub"),
        (OSError(28, "No space left on device"), "a file cannot be read or written .*No space left"),
        (PermissionError(13, "Permission denied"), "a file cannot be read or written .*Permission denied"),
        (OSError("Consistency check failed: file should be of size 5"), "the download broke off .*: try again"),
        (RuntimeError("Data processing error"), "the connection to the hub failed"),
        (KeyError("name"), "what answers is not the hub .KeyError: 'name'"),
        (LocalEntryNotFoundError("not in the cache"), "the hub's cache does not hold it"),
    ],
)
def test_errors_of_the_network_and_the_disk(error, message):
    with pytest.raises(InputError, match=message):
        raise InputError(refusal(error))

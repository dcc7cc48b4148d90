"""A hub on localhost that speaks the protocol of the real one, as far as pushing and pulling models needs it.

Every request is recorded, so that a test can say what was *not* sent. Clients are processes of their own.
"""

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import yaml

OWNER, TOKEN = "me", "hf_" + "aTestToken" * 3
OTHER, OTHER_TOKEN = "other", "hf_" + "anotherOne" * 3
KINDS = {"models": "model", "datasets": "dataset", "spaces": "space"}
_LANGUAGE = re.compile(r"[a-z]{2,3}$|multilingual$|code$")
_REPO = re.compile(r"[\w.-]+(/[\w.-]+)?$")


@dataclass
class Repo:
    """`branches` name commits; a commit maps a path to (is it LFS, object id)."""

    private: bool = False
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, tuple[bool, str]]] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)

    def find(self, revision: str) -> str | None:
        return self.branches.get(revision) or (revision if revision in self.commits else None)

    def commit(self, branch: str, files: dict[str, tuple[bool, str]], summary: str) -> str:
        parent = self.branches.get(branch, "")
        sha = hashlib.sha1(json.dumps([parent, sorted(files.items()), len(self.commits)]).encode()).hexdigest()
        self.branches[branch], self.commits[sha] = sha, files
        self.log.append(summary)
        return sha


class HubServer:
    """`with HubServer() as server:`.

    Attributes:
        repos: by (kind, id).
        objects: contents by object id (git's sha1 of a regular file, sha256 of an LFS file).
        requests: "METHOD path" of every request so far.
        uploads_left: LFS uploads that still go through; the next one breaks off in the middle.
    """

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.uploads_left: int | None = None
        self.lock = threading.RLock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.endpoint = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def environment(self, home: Path, token: str | None = TOKEN, **more: str) -> dict[str, str]:
        """The environment of a client with a cache of its own under `home`."""
        kept = {name: value for name, value in os.environ.items() if name not in ("HF_TOKEN", "HF_HUB_OFFLINE")}
        client = {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
        client |= {"HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1"}
        return {**kept, **client, **({"HF_TOKEN": token} if token else {}), **more}

    def repo(self, name: str, kind: str = "model") -> Repo:
        return self.repos[kind, name]

    def add(self, name: str, files: dict[str, bytes], kind: str = "model", private: bool = False) -> str:
        """A repository with these files, put there without the protocol; returns the commit."""
        repo = self.repos.setdefault((kind, name), Repo(private))
        return repo.commit("main", {path: self.store(path, data) for path, data in files.items()}, "added")

    def store(self, path: str, data: bytes) -> tuple[bool, str]:
        lfs = is_lfs(path, len(data))
        oid = hashlib.sha256(data).hexdigest() if lfs else git_sha1(data)
        self.objects[oid] = data
        return lfs, oid

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        """Path to content of a revision."""
        repo = self.repo(name)
        return {path: self.objects[oid] for path, (_, oid) in repo.commits[repo.find(revision)].items()}

    def count(self, method: str, part: str = "") -> int:
        """Requests so far of a method whose path contains `part`."""
        return sum(line.startswith(f"{method} ") and part in line for line in self.requests)


def is_lfs(path: str, size: int) -> bool:
    return path.endswith((".safetensors", ".bin", ".model")) or size > 10_000_000


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def metadata_errors(card: str) -> list[str]:
    """What the hub finds wrong in a README's metadata (the fields that our cards use)."""
    found = re.match(r"---\r?\n(.*?)\r?\n---(\r?\n|$)", card, re.DOTALL)
    try:
        data = yaml.safe_load(found[1] if found else "")
    except yaml.YAMLError as error:
        return [f"not YAML: {error}"]
    if not isinstance(data, dict):
        return ["metadata must be a mapping"]
    listed = {key: value if isinstance(value, list) else [value] for key, value in data.items()}
    texts = ("license", "library_name", "pipeline_tag", "base_model_relation", "tags")
    errors = [f'"{key}" must hold strings' for key in texts if not all(isinstance(v, str) for v in listed.get(key, []))]
    for key, form in (("language", _LANGUAGE), ("base_model", _REPO)):
        errors += [f'"{key}" with value {v!r} is not valid' for v in listed.get(key, []) if not form.match(str(v))]
    if data.get("base_model_relation") not in (None, "adapter", "finetune", "merge", "quantized"):
        errors.append('"base_model_relation" must be one of [adapter, finetune, merge, quantized]')
    for model in data.get("model-index", []):
        results = model.get("results") if isinstance(model.get("name"), str) else None
        for result in results or [{}]:
            of = [result.get("task", {}).get("type"), *(result.get("dataset", {}).get(key) for key in ("type", "name"))]
            metrics = result.get("metrics") or [{}]
            of += [one.get("type") for one in metrics]
            if not all(isinstance(text, str) for text in of) or any(one.get("value") is None for one in metrics):
                errors.append(f'"model-index" {model.get("name")!r} has a result without task, data set or metrics')
    return errors


class _Error(Exception):
    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        super().__init__(status, code, message)


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        pass

    def _handle(self) -> None:
        path = unquote(urlsplit(self.path).path)
        with self.hub.lock:
            self.hub.requests.append(f"{self.command} {path}")
        self.body = self._body() if self.command == "POST" else b""
        try:
            for methods, pattern, action in _ROUTES:
                if self.command in methods and (match := re.fullmatch(pattern, path)):
                    action(self, *match.groups())
                    return
            raise _Error(404, "EntryNotFound", "No such endpoint")
        except _Error as error:
            status, code, message = error.args
            self._send({"error": message}, status, {"X-Error-Code": code, "X-Error-Message": message})

    do_GET = do_HEAD = do_POST = do_PUT = _handle

    def _send(self, body: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def _user(self) -> str | None:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        users = {TOKEN: OWNER, OTHER_TOKEN: OTHER}
        if given and given not in users:
            raise _Error(401, "", "Invalid credentials in Authorization header")
        return users.get(given)

    def _repo(self, kind: str, name: str, write: bool = False) -> Repo:
        """The repository, if this client may see it (and write to it)."""
        user, repo = self._user(), self.hub.repos.get((KINDS[kind], name))
        mine = user is not None and user == name.partition("/")[0]
        if repo is None or (repo.private and not mine):
            raise _Error(404 if user else 401, "RepoNotFound", "Repository not found")
        if write and not mine:
            message = "You don't have the rights to write to this repository"
            raise _Error(403 if user else 401, "", message if user else "Invalid username or password.")
        return repo

    def _commit(self, repo: Repo, revision: str) -> str:
        sha = repo.find(revision)
        if sha is None:
            raise _Error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return sha

    def whoami(self) -> None:
        user = self._user()
        if user is None:
            raise _Error(401, "", "Invalid username or password.")
        self._send({"type": "user", "name": user, "orgs": []})

    def create(self) -> None:
        user, asked = self._user(), json.loads(self.body)
        if user is None:
            raise _Error(401, "", "Invalid username or password.")
        namespace = asked.get("organization") or user
        name, kind = f"{namespace}/{asked['name']}", asked.get("type", "model")
        with self.hub.lock:
            if namespace != user:
                raise _Error(
                    403, "", f'You don\'t have the rights to create a {kind} under the namespace "{namespace}"'
                )
            if (kind, name) in self.hub.repos:
                taken = {"error": f"You already created this {kind} repo", "url": f"{self.hub.endpoint}/{name}"}
                self._send(taken, 409)
                return
            repo = self.hub.repos[kind, name] = Repo(asked.get("visibility") == "private")
            attributes = self.hub.store(".gitattributes", b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n")
            repo.commit("main", {".gitattributes": attributes}, "initial commit")
        self._send({"url": f"{self.hub.endpoint}/{name}", "name": name, "id": name})

    def validate_yaml(self) -> None:
        errors = metadata_errors(json.loads(self.body)["content"])
        self._send({"errors": [{"message": e} for e in errors], "warnings": []}, 400 if errors else 200)

    def branch(self, kind: str, name: str, branch: str) -> None:
        repo, asked = self._repo(kind, name, write=True), json.loads(self.body or b"{}")
        with self.hub.lock:
            if branch in repo.branches:
                raise _Error(409, "", f"Reference already exists: {branch}")
            repo.branches[branch] = self._commit(repo, asked.get("startingPoint", "main"))
        self._send({})

    def preupload(self, kind: str, name: str, revision: str) -> None:
        repo = self._repo(kind, name, write=True)
        there = repo.commits[self._commit(repo, revision)]
        files = []
        for asked in json.loads(self.body)["files"]:
            path = asked["path"]
            mode = "lfs" if is_lfs(path, asked["size"]) else "regular"
            found = {"oid": there[path][1]} if path in there else {}
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, **found})
        self._send({"files": files})

    def lfs_batch(self, name: str) -> None:
        self._repo("models", name, write=True)
        asked = json.loads(self.body)
        if (asked["operation"], asked["hash_algo"]) != ("upload", "sha256") or "basic" not in asked["transfers"]:
            raise _Error(400, "", "not an upload that this server knows")
        objects = []
        for item in asked["objects"]:
            if item["oid"] not in self.hub.objects:
                links = {"upload": "upload", "verify": f"{name}.git/info/lfs/verify"}
                hrefs = {action: f"{self.hub.endpoint}/{link}" for action, link in links.items()}
                hrefs["upload"] += f"/{item['oid']}"
                item = {**item, "actions": {action: {"href": href} for action, href in hrefs.items()}}
            objects.append(item)
        self._send({"transfer": "basic", "objects": objects})

    def upload(self, oid: str) -> None:
        with self.hub.lock:
            left = self.hub.uploads_left
            self.hub.uploads_left = None if left is None else left - 1
        if left == 0:
            self.rfile.read(int(self.headers["Content-Length"]) // 2)
            self.close_connection = True
            raise _Error(400, "", "RequestTimeout: the connection broke in the middle of the upload")
        data = self._body()
        if hashlib.sha256(data).hexdigest() != oid:
            raise _Error(400, "", "BadDigest")
        self.hub.objects[oid] = data
        self._send(b"")

    def verify(self, name: str) -> None:
        self._repo("models", name, write=True)
        asked = json.loads(self.body)
        if len(self.hub.objects.get(asked["oid"], b"")) != asked["size"]:
            raise _Error(404, "", "Object not found")
        self._send({})

    def commit(self, kind: str, name: str, revision: str) -> None:
        repo = self._repo(kind, name, write=True)
        lines = [json.loads(line) for line in self.body.splitlines()]
        if [line["key"] for line in lines].index("header") != 0:
            raise _Error(400, "", "the header must come first")
        with self.hub.lock:
            files = dict(repo.commits[self._commit(repo, revision)])
            for line in lines[1:]:
                value = line["value"]
                if line["key"] == "file":
                    data = base64.b64decode(value["content"])
                    files[value["path"]] = (False, git_sha1(data))
                    self.hub.objects[git_sha1(data)] = data
                elif line["key"] == "lfsFile":
                    if value["oid"] not in self.hub.objects:
                        raise _Error(400, "", f"LFS object {value['oid']} was never uploaded")
                    files[value["path"]] = (True, value["oid"])
                elif line["key"] == "deletedFile":
                    if files.pop(value["path"], None) is None:
                        raise _Error(404, "EntryNotFound", "A file with this name doesn't exist")
                else:
                    raise _Error(400, "", f"unknown operation {line['key']}")
            sha = repo.commit(revision, files, lines[0]["value"]["summary"])
        url = f"{self.hub.endpoint}/{name}/commit/{sha}"
        self._send({"success": True, "commitOid": sha, "commitUrl": url, "hookOutput": ""})

    def info(self, kind: str, name: str, revision: str | None = None) -> None:
        repo = self._repo(kind, name)
        sha = self._commit(repo, revision or "main")
        siblings = [{"rfilename": path} for path in repo.commits[sha]]
        self._send({"id": name, "sha": sha, "private": repo.private, "siblings": siblings, "tags": []})

    def tree(self, kind: str, name: str, revision: str) -> None:
        repo = self._repo(kind, name)
        found = []
        for path, (lfs, oid) in repo.commits[self._commit(repo, revision)].items():
            size = len(self.hub.objects[oid])
            entry = {"type": "file", "oid": oid[:40], "size": size, "path": path}
            found.append({**entry, **({"lfs": {"oid": oid, "size": size, "pointerSize": 134}} if lfs else {})})
        self._send(found)

    def resolve(self, name: str, revision: str, path: str) -> None:
        repo = self._repo("models", name)
        sha = self._commit(repo, revision)
        if path not in repo.commits[sha]:
            raise _Error(404, "EntryNotFound", "Entry not found")
        lfs, oid = repo.commits[sha][path]
        etag = {"ETag": f'"{oid}"', "X-Linked-ETag": f'"{oid}"' if lfs else "", "X-Repo-Commit": sha}
        self._send(self.hub.objects[oid], headers=etag)


_NAME, _KIND, _REVISION = r"([\w.-]+/[\w.-]+)", r"/api/(models|datasets|spaces)/", r"([\w.-]+)"
_ROUTES = [
    (("GET",), "/api/whoami-v2", _Handler.whoami),
    (("POST",), "/api/repos/create", _Handler.create),
    (("POST",), "/api/validate-yaml", _Handler.validate_yaml),
    (("POST",), _KIND + _NAME + "/branch/(.+)", _Handler.branch),
    (("POST",), _KIND + _NAME + "/preupload/(.+)", _Handler.preupload),
    (("POST",), _KIND + _NAME + "/commit/(.+)", _Handler.commit),
    (("POST",), "/" + _NAME + r"\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    (("POST",), "/" + _NAME + r"\.git/info/lfs/verify", _Handler.verify),
    (("PUT",), "/upload/([0-9a-f]{64})", _Handler.upload),
    (("GET",), _KIND + _NAME, _Handler.info),
    (("GET",), _KIND + _NAME + "/revision/(.+)", _Handler.info),
    (("GET",), _KIND + _NAME + "/tree/" + _REVISION, _Handler.tree),
    (("GET", "HEAD"), "/" + _NAME + "/resolve/" + _REVISION + "/(.+)", _Handler.resolve),
]
# Runs the code that it is sent, so that many pushes share one start of the interpreter.
LOOP = """
import contextlib, io, json, sys
answers = sys.stdout
for line in sys.stdin:
    asked, said = json.loads(line), io.StringIO()
    scope = dict(asked["values"])
    try:
        with contextlib.redirect_stdout(said):
            exec(asked["code"], scope)
        answer = {"value": scope.get("result")}
    except Exception as error:
        answer = {"error": type(error).__name__, "message": str(error)}
    print(json.dumps({**answer, "said": said.getvalue()}), file=answers, flush=True)
"""
PUSH = """
import dataclasses, os
import hf_moe_expand.hub.publish as hub
from hf_moe_expand.hub.published import check_loads_alone
hub.check_loads_alone = check_loads_alone if check else (lambda folder: None)
os.environ.update(environment)
if environment.get("HF_TOKEN") == "":
    del os.environ["HF_TOKEN"]
result = dataclasses.asdict(hub.push_to_hub(model, repo_id, **options))
"""


class Client:
    """A process with the package and a token for the server."""

    def __init__(self, environment):
        command = [sys.executable, "-c", LOOP]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True, cwd="/")

    def run(self, code, **values):
        self.process.stdin.write(json.dumps({"code": code, "values": values}) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        assert "error" not in answer or answer["error"] == "InputError", answer
        return answer

    def stop(self):
        self.process.kill()  # the end of an interpreter takes seconds
        self.process.wait()

    def push(self, model, repo_id, token=TOKEN, check=False, **options):
        """`push_to_hub` in the process: {"value": the Push} or {"message": what it refused}, and "said"."""
        values = {"environment": {"HF_TOKEN": token}, "check": check, "options": options}
        return self.run(PUSH, model=str(model), repo_id=repo_id, **values)

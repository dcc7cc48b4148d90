"""Starts Python programs by forking a process that has imported the large libraries: `zygote.py SOCKET MODULE...`."""

import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from types import ModuleType


class Child:
    """A running program: its process number, and its standard input and output as files of text.

    Attributes:
        returncode: its exit code, negative where a signal ended it; None until it was waited for.
    """

    def __init__(self, zygote: "Zygote", request: dict) -> None:
        self._zygote, self._errors = zygote, tempfile.TemporaryFile()  # noqa: SIM115
        self.returncode: int | None = None
        (read, self_in), (self_out, write) = os.pipe(), os.pipe()
        self.pid = zygote.ask(request, read, write, self._errors.fileno())
        os.close(read)
        os.close(write)
        self.stdin, self.stdout = open(self_in, "w"), open(self_out)  # noqa: SIM115

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        if self.returncode is None:
            self.returncode = self._zygote.ask({"wait": self.pid})
        return self.returncode

    def communicate(self, said: str = "") -> tuple[str, str]:
        """What it prints and its errors, once it has read `said` and ended."""
        try:
            self.stdin.write(said)
            self.stdin.close()
        except BrokenPipeError:
            pass
        printed = self.stdout.read()
        self.stdout.close()
        self.wait()
        with self._errors as errors:
            errors.seek(0)
            return printed, errors.read().decode(errors="replace")


class Zygote:
    """A process to fork from, started by its first program."""

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._socket: socket.socket | None = None

    def ask(self, request: dict, *files: int) -> int:
        """The process's answer to a request, which it gets with open files."""
        if self._socket is None:
            self._socket, theirs = socket.socketpair()
            command = [sys.executable, str(Path(__file__)), str(theirs.fileno()), *self._modules]
            subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
            theirs.close()
        text = json.dumps(request).encode()
        socket.send_fds(self._socket, [f"{len(text):<20}".encode()], files)
        self._socket.sendall(text)
        return json.loads(self._socket.recv(100))

    def start(self, code: str, *arguments: str, cwd: str | Path = "/", timeout: int = 900) -> Child:
        """Starts a program, which ends after `timeout` seconds at the latest."""
        request = {"code": code, "arguments": arguments, "cwd": str(cwd), "timeout": timeout}
        return Child(self, {**request, "environment": dict(os.environ)})


def _run(code: str, arguments: list[str], cwd: str, timeout: int, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    signal.alarm(timeout)
    sys.argv = ["-c", *arguments]
    main = sys.modules["__main__"] = ModuleType("__main__")
    ending = 0
    try:
        exec(compile(code, "<string>", "exec"), main.__dict__)
    except SystemExit as stop:
        ending = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        ending = 1
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ending)


def _request(connection: socket.socket) -> tuple[dict, list[int]]:
    """The next request and its open files; ends the process where there is none."""
    size, files, _, _ = socket.recv_fds(connection, 20, 3)
    if not size:
        raise SystemExit
    text = b""
    while len(text) < int(size):
        text += connection.recv(int(size) - len(text))
    return json.loads(text), files


def _serve(connection: socket.socket, modules: list[str]) -> None:
    for name in modules:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # all that was imported, in the programs too: accelerate collects garbage after each training
    while True:
        request, files = _request(connection)
        if "wait" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        elif not (answer := os.fork()):
            connection.close()
            for number, file in enumerate(files):
                os.dup2(file, number)
                os.close(file)
            _run(**request)
        for file in files:
            os.close(file)
        connection.sendall(json.dumps(answer).encode())


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, which programs do not expect
    _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])

"""Starts Python programs by forking a process that has imported the large libraries: an interpreter of one's own takes
four seconds to import them.

`python zygote.py NAME...` imports modules. Each line of its standard input is a request, each line of its standard
output the answer.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from types import ModuleType


class Zygote:
    """A process to fork from, started by its first program."""

    def __init__(self, *modules: str) -> None:
        self._command = [sys.executable, str(Path(__file__)), *modules]
        self._process: subprocess.Popen | None = None

    def run(self, code: str, *arguments: str, cwd: str | Path = "/", timeout: int = 900) -> str:
        """What a program prints. It must end with exit code 0."""
        if self._process is None:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, text=True)
        assert self._process.stdin
        assert self._process.stdout
        request = {"code": code, "arguments": arguments, "cwd": str(cwd), "timeout": timeout}
        request["environment"] = dict(os.environ)
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        ending, said, errors = json.loads(self._process.stdout.readline())
        assert ending == 0, errors
        return said


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


def _serve(modules: list[str]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in modules:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    for line in sys.stdin:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
            child = os.fork()
            if not child:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(out.fileno(), 1)
                os.dup2(errors.fileno(), 2)
                _run(**json.loads(line))
            _, status = os.waitpid(child, 0)
            said = []
            for file in (out, errors):
                file.seek(0)
                said.append(file.read().decode(errors="replace"))
        answers.write(json.dumps([os.waitstatus_to_exitcode(status), *said]) + "\n")
        answers.flush()


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, which programs do not expect
    _serve(sys.argv[1:])

"""How commands end: signals clean up, and no error shows a bare traceback."""

import os
import platform
import signal
import subprocess
import sys
import warnings
from importlib.metadata import version

import pytest
import torch
from conftest import start_python
from tqdm.auto import tqdm
from typer.testing import CliRunner

from hf_moe_expand import __version__, cli
from hf_moe_expand.cli import orderly_stops
from hf_moe_expand.cli.options import versions
from hf_moe_expand.core.errors import InputError

# A verb that writes a folder until something stops it.
# It undoes the SIG_IGN that `nohup` and `&` hand down, as in a terminal.
WAITS = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from pathlib import Path
from hf_moe_expand import cli
from hf_moe_expand.checkpoint.writer import new_folder
@cli.app.command()
def wait(out: Path) -> None:
    with new_folder(out) as partial:
        (partial / "config.json").write_text("{}")
        print("writing", flush=True)
        time.sleep(600)
sys.argv = ["hf-moe-expand", "wait", sys.argv[1]]
cli.main()
"""


@pytest.mark.parametrize(
    ("number", "said"),
    [(signal.SIGINT, "interrupted:"), (signal.SIGTERM, "by SIGTERM:"), (signal.SIGHUP, "by SIGHUP:")],
)
def test_signals_clean_up_and_say_one_line(tmp_path, number, said):
    process = start_python(WAITS, str(tmp_path / "out"))
    assert process.stdout.readline() == "writing\n"
    assert len(list(tmp_path.iterdir())) == 1
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == 128 + number
    assert not list(tmp_path.iterdir())
    lines = [line for line in errors.splitlines() if line]
    assert len(lines) == 1
    assert said in lines[0]
    assert lines[0].endswith("hf-moe-expand wait. The same command starts from the beginning.")


def run_main(monkeypatch, capsys, error, *arguments):
    """`main` with a verb that raises `error`: its exit code and what it says."""

    def fail():
        raise error

    monkeypatch.setattr(cli, "app", fail)
    monkeypatch.setattr(sys, "argv", ["hf-moe-expand", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code, capsys.readouterr().err


def test_an_unforeseen_error_is_one_line_and_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, said = run_main(monkeypatch, capsys, ZeroDivisionError("division\nby zero"), "inspect", "x")
    assert code == 70
    assert len(said.splitlines()) == 1
    assert said.startswith("error: ZeroDivisionError: division. This error was not expected. The traceback is in ")
    (file,) = tmp_path.iterdir()
    assert str(file) in said
    text = file.read_text()
    assert "Traceback (most recent call last)" in text
    assert text.startswith(f"hf-moe-expand inspect x\n{versions()}\n")


def test_where_the_folder_is_read_only_the_traceback_goes_elsewhere(tmp_path, monkeypatch, capsys):
    (tmp_path / "temporary").mkdir()
    (tmp_path / "gone").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    try:
        code, said = run_main(monkeypatch, capsys, RuntimeError("x"))
    finally:
        os.chdir(tmp_path)
    assert code == 70
    (file,) = (tmp_path / "temporary").iterdir()
    assert str(file) in said


def test_a_warning_is_one_line_without_a_place_in_the_code(monkeypatch, capsys):
    def warn():
        warnings.warn("two\nlines", stacklevel=1)
        raise InputError("stop")

    usual = warnings.formatwarning
    monkeypatch.setattr(cli, "app", warn)
    # pytest keeps warnings for itself.
    monkeypatch.setattr(warnings, "showwarning", lambda *of: sys.stderr.write(warnings.formatwarning(*of[:4])))
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().err == "warning: two lines\nerror: stop\n"
    assert warnings.formatwarning is usual


def test_debugging_shows_the_error_itself(monkeypatch):
    monkeypatch.setenv("HF_MOE_EXPAND_DEBUG", "1")

    def fail():
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main()


def test_an_interrupt_names_the_verb_without_its_arguments(monkeypatch, capsys):
    code, said = run_main(monkeypatch, capsys, KeyboardInterrupt(), "train", "review", "a", "b")
    assert code == 130
    assert said == "interrupted: hf-moe-expand train review. The same command starts from the beginning.\n"
    stopped = KeyboardInterrupt()
    for where in ("from step 30", "with step 5 of 7, review"):
        stopped.add_note(where)
    _, said = run_main(monkeypatch, capsys, stopped, "run", "a.yaml")
    assert said == "interrupted: hf-moe-expand run. The same command goes on with step 5 of 7, review, from step 30.\n"
    monkeypatch.setenv("RANK", "1")
    assert run_main(monkeypatch, capsys, KeyboardInterrupt(), "run", "--x") == (130, "")


def test_handlers_are_put_back_and_ignored_signals_stay_ignored(monkeypatch, capsys):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        seen = []
        monkeypatch.setattr(cli, "app", lambda: seen.append(signal.getsignal(signal.SIGHUP)))
        cli.main()
        assert seen == [signal.SIG_IGN]
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_forked_worker_ends_as_it_would_without_handlers(tmp_path):
    program = (
        "import os, signal, sys, time\n"
        "from hf_moe_expand.cli import orderly_stops\n"
        "with orderly_stops():\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        time.sleep(60)\n"
        "        os._exit(0)\n"
        "    time.sleep(0.5)\n"
        "    os.kill(child, signal.SIGTERM)\n"
        "    print(os.waitpid(child, 0)[1])\n"
    )
    said, errors = start_python(program).communicate()
    assert said.strip() == str(int(signal.SIGTERM)), errors
    assert not errors


# A verb that prints a line, waits for it to be read, and shows a bar of each library.
SHOWS_BARS = """
import sys
from pathlib import Path
from hf_moe_expand import cli
@cli.app.command()
def bars() -> None:
    print("a line")
    sys.stdin.readline()
    from datasets import Dataset
    from tqdm.auto import tqdm
    from transformers.utils import logging
    for make in (tqdm, logging.tqdm):
        list(make(range(3), desc="a bar"))
    Dataset.from_dict({"a": [1]}).map(lambda row: row, desc="a bar")
    import torch
    from hf_moe_expand.checkpoint.writer import _write_weights, in_memory
    for what in ("a bar", None):
        _write_weights(Path.cwd(), [in_memory("tensor", torch.zeros(2))], "model", what, "5GB")
sys.argv = ["hf-moe-expand", "bars"]
cli.main()
"""


@pytest.mark.parametrize("wanted", [False, True])
def test_a_log_gets_lines_at_once_and_no_bars(wanted, tmp_path):
    environment = {**os.environ, **({"TQDM_DISABLE": ""} if wanted else {})}
    if not wanted:
        environment.pop("TQDM_DISABLE", None)
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", SHOWS_BARS], stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment,
        cwd=tmp_path,
    )  # fmt: skip
    assert process.stdout
    assert process.stdout.readline() == "a line\n"  # while the verb is still at work
    _, errors = process.communicate("\n", timeout=120)
    assert process.returncode == 0, errors
    assert errors.count("a bar: 100%") == (4 if wanted else 0), errors
    assert ("tensor" in errors) == wanted


def test_the_versions_are_printed():
    said = CliRunner().invoke(cli.app, ["--version"])
    assert said.exit_code == 0
    for name, found in (("hf-moe-expand", __version__), ("torch", torch.__version__), ("trl", version("trl"))):
        assert f"{name} {found}, " in said.stdout
    assert said.stdout.endswith(f", Python {platform.python_version()}\n")


def test_bars_are_back_after_the_command(monkeypatch, capsys):
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    monkeypatch.setattr(sys, "argv", ["hf-moe-expand", "--version"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "TQDM_DISABLE" not in os.environ
    list(tqdm(range(3), desc="a bar"))
    assert "a bar: 100%" in capsys.readouterr().err


def test_a_second_signal_does_not_stop_the_clean_up():
    # Ignored ones, as SIGINT is in the background, would stay so.
    handlers = {
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
        signal.SIGINT: signal.default_int_handler,
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        with orderly_stops() as came:
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGHUP)
            with pytest.raises(KeyboardInterrupt):  # but Ctrl-C does
                signal.raise_signal(signal.SIGINT)
        assert came == [signal.SIGTERM, signal.SIGINT]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

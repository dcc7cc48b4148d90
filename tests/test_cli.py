"""The command line as a user meets it: help, options, errors and signals."""

import json
import platform
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import warnings
from typing import Annotated, Literal

import pytest
import torch
import typer
from conftest import invoke, run_python, save_dense, start_python, verb, write_texts
from pydantic import Field
from typer.testing import CliRunner

import hf_moe_expand
from hf_moe_expand import Plan, cli, expand_checkpoint
from hf_moe_expand.cli import groups, orderly_stops
from hf_moe_expand.cli.groups import version_line
from hf_moe_expand.core.schema import Count, Schema
from hf_moe_expand.core.verbs import Given, Keys, Kind, belongs, without_effect


def commands(*words):
    """Every verb: `["plan", "dmoe"]`."""
    inside = getattr(verb(*words), "commands", None)
    if inside is None:
        yield [*words]
    for name in inside or ():
        yield from commands(*words, name)


@pytest.mark.parametrize("words", [*commands()], ids=" ".join)
def test_every_verb_has_help_with_an_example(words):
    text = invoke(*words, "--help")
    assert f"Example: hf-moe-expand {' '.join(words)}" in " ".join(text.split()) or "accelerate launch" in text
    assert [option.name for option in verb(*words).params if not getattr(option, "help", None)] == []


@pytest.fixture
def error_of(monkeypatch, capsys, tmp_path):
    """Runs the entry point in `tmp_path`; what it prints as its error."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["hf-moe-expand", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        assert stopped.value.code == 2
        return capsys.readouterr().err.strip()

    return run


def test_a_plan_to_grow_knows_the_models_languages(base, error_of):
    expand_checkpoint(base, "moe", Plan("x", [2, 2, 3], old=["en"], new=["el"]))
    grow = ["plan", "moe-lpr", "--experts", 1, "--from", "moe", "--out", "p.json"]
    invoke(*grow, "--new", "tr")
    assert Plan.load("p.json") == Plan("moe-lpr", [3, 3, 4], old=["en", "el"], new=["tr"], grows_from=[2, 2, 3])
    again = [*grow, "--overwrite", "--new"]
    assert error_of(*again, "tr,el").startswith("error: el: given as an old and as a new language")
    assert "plan is for 4 layers, but the model to grow has 3" in error_of(*again, "tr", "--layers", 4)
    expand_checkpoint(base, "dmoe", Plan("dmoe", [2, 1, 2], new=["el", "tr"], groups=[["el"], ["tr"]]))
    assert "does not grow by plans" in error_of(*again, "hu", "--from", "dmoe")


def test_deviation_to_dmoe_plan(tmp_path, error_of):
    save_dense(tmp_path / "base", num_hidden_layers=5)
    words = {"en": "a plain sentence ", "es": "una frase ", "el": "μια απλή πρόταση ", "tr": "yalın bir cümle "}
    data = [f"--data={code}={write_texts(tmp_path / f'{code}.jsonl', [text * 30])}" for code, text in words.items()]
    sizes = ["--steps", 2, "--batch-size", 2, "--block-size", 32]
    text = invoke("analyze", "deviation", "base", *data, *sizes, "--out", "deviation.json")
    assert re.search(r"\n    4  0\.\d{6}\n", text)
    assert not (tmp_path / "deviation.json.work").exists()
    dmoe = ["plan", "dmoe", "--deviation", "deviation.json"]
    text = invoke(*dmoe, "--groups", 2, "--out", "a.json")
    plan = Plan.load("a.json")
    assert sorted(plan.experts_per_layer) == [1, 1, 1, 2, 2]
    assert f"expert 1  {', '.join(plan.groups[1])}" in text
    for words, message in (
        ("--groups 2 --vectors v.csv --random", "give only one of them"),
        ("--groups 2 --by-hand en,es;el;tr", "--groups and --by-hand: give only one of them"),
        ("", "error: Give --groups or --by-hand."),
        ("--groups 2 --deviation a.json", "not a deviation analysis"),
    ):
        assert message in error_of(*dmoe, *words.split(), "--out", "d.json")
    assert not (tmp_path / "d.json").exists()


HEAVY = ("torch", "transformers", "datasets", "trl", "transformers.trainer", "matplotlib")
PROGRAM = """
import sys
sys.argv[0] = "/bin/hf-moe-expand"
from hf_moe_expand.cli import main
code = 0
try:
    main()
except SystemExit as stop:
    code = stop.code
print("IMPORTED", code, *sys.modules)
"""


def heavy_imports(*arguments):
    """Exit code and standard error of the console script in a fresh process, and the heavy modules that it imported."""
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    _, exit_code, *found = done.stdout.splitlines()[-1].split()
    return int(exit_code), done.stderr, {*HEAVY} & {*found}


class Sized(Schema):
    """Settings of a verb that is made up."""

    size: Count = Field(3, description="size of it")
    word: Literal["a", "b"] = Field("a", description="a word.")
    hidden: bool = Field(False, description="not for the command line")


def made_up(
    name: str, *, settings: Annotated[Sized, Keys(without=("hidden",), defaults={"size": 5, "hidden": True})],
    times: int = 1, json_: bool = False, langs: Annotated[list, Kind("Codes.", lambda text, _: text.split(), str)] = (),
    given: Given,
) -> None:  # fmt: skip
    """Do something.

    Args:
        name: name of
            the thing.
        times: how often
        json_: print JSON.
    """
    belongs(given, "langs", "times")
    without_effect(given, "the name", "name", "times", "langs", "size", "word")
    print(json.dumps([name, settings.model_dump(), times, json_, list(langs), sorted(given)]))


def test_the_options_of_a_verb_follow_from_its_signature_and_docstring():
    app = typer.Typer()
    groups.add(app, made_up, "do")

    def run(*words):
        done = CliRunner().invoke(app, words)
        return json.loads(done.output) if done.exit_code == 0 else str(done.exception)

    assert run("x") == ["x", {"size": 5, "word": "a", "hidden": True}, 1, False, [], ["name"]]
    assert run("y", "--size", "7", "--word", "b", "--times", "2", "--langs", "en el") == [
        "y", {"size": 7, "word": "b", "hidden": True}, 2, False, ["en", "el"],
        ["langs", "name", "size", "times", "word"],
    ]  # fmt: skip
    assert run("x", "--size", "0") == "size: Input should be greater than or equal to 1, found 0."
    assert run("x", "--word", "c") == "word: Input should be 'a' or 'b', found 'c'."
    assert run("x", "--times", str(10**16)) == f"--times is {10**16}: must be at most {10**15:,}."
    assert run("x", "--times", "1") == "--times belongs to --langs, which is not given."
    assert run("x", "--json") == "--json has no effect beside the name: leave it out."
    assert run("x", "--hidden") == "2"
    shown = " ".join(CliRunner().invoke(app, ["--help"]).stdout.split())
    for text in ("Do something.", "Size of it. [default: 5]", "A word. [default: a]", "Name of the thing.", "Codes."):
        assert text in shown
    assert "Args:" not in shown


def test_the_verbs_are_few_each_has_a_summary_and_an_old_one_says_its_new_form(error_of):
    (_, *blocks) = re.split(r"^\w.*:\n", invoke("--help"), flags=re.MULTILINE)[1:]
    verbs = [line.split()[0] for block in blocks for line in block.splitlines() if re.match(r"  \w+  +\S", line)]
    assert len(verbs) == len({*verbs}) == len(verb().commands) <= 24
    for gone in groups._GONE:
        said = error_of(*gone.split(), "x", "--help")
        assert said.startswith(f"error: `{gone}` is gone. Its new form: hf-moe-expand ")
        assert said.partition("hf-moe-expand ")[2].split()[0] in verbs


MISSPELT = "unknown key `learning_rat`; did you mean `learning_rate`?"


@pytest.mark.parametrize(
    ("words", "said"), [("--help", ""), ("plan layer-moe --help", ""), ("validate recipe.yaml", MISSPELT)]
)
def test_help_and_a_misspelt_key_wait_for_neither_torch_nor_transformers(tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text("base: x\noutput: y\nnew: {el: z}\npost_pretrain: {learning_rat: 1}\n")
    code, error, imported = heavy_imports(*words.split())
    assert (code, imported) == (2 if said else 0, set()), error
    assert said in error


def test_the_console_script_loads_expanded_checkpoints_and_no_more_than_it_needs(base, tmp_path):
    expand_checkpoint(base, tmp_path / "moe", Plan("moe-lpr", [2, 1, 2], old=["en"], new=["el"]))
    code, error, imported = heavy_imports("inspect", tmp_path / "moe")
    assert (code, imported & {"trl", "matplotlib"}) == (0, set()), error
    asked = ("chat", str(tmp_path / "moe"), "--prompt", "a", "--max-new-tokens", "1")
    said = run_python(PROGRAM, *asked).splitlines()[-1].split()  # a process that has torch and transformers already
    assert said[:2] == ["IMPORTED", "0"]
    assert "matplotlib" not in said


# A verb that writes a folder until something stops it. It undoes the SIG_IGN that `nohup` and `&` hand down.
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_clean_up_and_say_one_line(tmp_path, number):
    process = start_python(WAITS, str(tmp_path / "out"))
    assert process.stdout.readline() == "writing\n"
    assert len(list(tmp_path.iterdir())) == 1
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == 128 + number
    assert not list(tmp_path.iterdir())
    (line,) = (line for line in errors.splitlines() if line)
    assert ("interrupted:" if number == signal.SIGINT else f"by {number.name}:") in line
    assert line.endswith("hf-moe-expand wait. The same command starts from the beginning.")


def test_a_second_signal_does_not_stop_the_clean_up():
    handlers = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        with orderly_stops() as came:
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            with pytest.raises(KeyboardInterrupt):  # but Ctrl-C does
                signal.raise_signal(signal.SIGINT)
        assert came == [signal.SIGTERM, signal.SIGINT]
        assert {number: signal.getsignal(number) for number in handlers} == handlers
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ended(monkeypatch, capsys, error, *arguments):
    """The exit code of `main` with a verb that raises `error`, and what it says."""

    def fail():
        warnings.warn(f"{arguments}\nlines", stacklevel=1)
        raise error

    monkeypatch.setattr(cli, "app", fail)
    monkeypatch.setattr(sys, "argv", ["hf-moe-expand", *arguments])
    # pytest keeps warnings for itself.
    monkeypatch.setattr(warnings, "showwarning", lambda *of: sys.stderr.write(warnings.formatwarning(*of[:4])))
    with pytest.raises(SystemExit) as end:
        cli.main()
    warning, _, rest = capsys.readouterr().err.partition("\n")
    assert warning == f"warning: {arguments} lines"
    return end.value.code, rest


def test_an_unforeseen_error_is_one_line_and_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code, said = ended(monkeypatch, capsys, ZeroDivisionError("division\nby zero"), "inspect", "x")
    assert code == 70
    assert len(said.splitlines()) == 1
    begin = "error: ZeroDivisionError: division by zero. This error was not expected. The traceback is in "
    assert said.startswith(begin)
    (file,) = tmp_path.iterdir()
    assert str(file) in said
    assert file.read_text().startswith(f"hf-moe-expand inspect x\n{version_line()}\n")
    assert "Traceback (most recent call last)" in file.read_text()
    # Who asks for the traceback is shown it.
    for words in (["--debug", "inspect", "x"], ["inspect", "x", "--debug"]):
        monkeypatch.setattr(sys, "argv", ["hf-moe-expand", *words])
        with pytest.raises(ZeroDivisionError):
            cli.main()


def test_an_interrupt_names_the_verb_without_its_arguments(monkeypatch, capsys):
    given = (monkeypatch, capsys)
    said = "interrupted: hf-moe-expand train review. The same command starts from the beginning.\n"
    assert ended(*given, KeyboardInterrupt(), "train", "review", "a", "b") == (130, said)
    stopped = KeyboardInterrupt()
    for where in ("from step 30", "with step 5 of 7, review"):
        stopped.add_note(where)
    said = "interrupted: hf-moe-expand run. The same command goes on with step 5 of 7, review, from step 30.\n"
    assert ended(*given, stopped, "run", "a.yaml") == (130, said)
    monkeypatch.setenv("RANK", "1")
    assert ended(*given, KeyboardInterrupt(), "run", "--x") == (130, "")


def test_the_package_is_a_program_that_says_its_versions(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["hf-moe-expand", "--version"])
    with pytest.raises(SystemExit):
        runpy.run_module("hf_moe_expand", run_name="__main__")
    said = capsys.readouterr().out
    for name, found in (("hf-moe-expand", hf_moe_expand.__version__), ("torch", torch.__version__)):
        assert f"{name} {found}, " in said
    assert said.endswith(f", Python {platform.python_version()}\n")

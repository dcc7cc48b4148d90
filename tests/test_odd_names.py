"""Names of folders that have no last part, odd values in config.json, and other input that ended in a traceback."""

import json
import shutil
import subprocess
import sys

import pytest
from conftest import invoke, save_dense
from test_join import EL, HU, TR, make_pack
from typer.testing import CliRunner

from hf_moe_expand import cli, join_expansions
from hf_moe_expand.core.errors import InputError


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    home = tmp_path_factory.mktemp("odd")
    base = save_dense(home / "base")
    EL.save(home / "plan.json")
    packs = [make_pack(home / plan.new[0], base, plan, seed) for seed, plan in enumerate((EL, HU, TR), start=1)]
    join_expansions(packs[:2], home / "joined")
    return home


def refused(*arguments) -> str:
    """The one sentence with which a command refuses."""
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    assert isinstance(result.exception, InputError | SystemExit), repr(result.exception)
    return str(result.exception)


NAMES = [".", "./", "", "/", ".."]


@pytest.mark.parametrize("name", NAMES)
def test_names_without_a_last_part_are_refused_as_models(made, tmp_path, monkeypatch, name):
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    for command in (
        ["inspect", name], ["card", name], ["push", name, "me/x", "--dry-run"],
        ["join", "out", name, made / "hu"], ["expand", name, "out", "--plan", made / "plan.json"],
        ["evaluate", name, "--data", "el=el.jsonl"],
    ):  # fmt: skip
        assert refused(*command)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
def test_names_without_a_last_part_are_refused_as_outputs(made, tmp_path, monkeypatch, name, overwrite):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "note").touch()
    monkeypatch.chdir(tmp_path / "inner")
    for command in (
        ["join", name, made / "el", made / "hu"], ["expand", made / "base", name, "--plan", made / "plan.json"],
        ["card", made / "el", "--out", name],
    ):  # fmt: skip
        assert refused(*command, *overwrite)
    assert (tmp_path / "inner" / "note").is_file()


@pytest.mark.parametrize("name", [".", "./", ""])
def test_the_working_folder_is_a_model_like_any_other(made, tmp_path, monkeypatch, name):
    pack = shutil.copytree(made / "el", tmp_path / "qwen-el")
    monkeypatch.chdir(pack)
    if not name:
        assert "empty" in refused("inspect", name)
        return
    assert "experts per layer" in invoke("inspect", name)
    assert "# qwen-el" in invoke("card", name)
    assert "qwen-el" in invoke("join", tmp_path / f"out{len(name)}", name, made / "hu")
    assert "from_pretrained(&quot;" not in invoke("card", name)
    assert "model.safetensors" in invoke("push", name, "me/qwen-el", "--dry-run")


@pytest.mark.parametrize(
    "fields",
    [
        {"earlier_experts_per_layer": [[9, 9, 9]]}, {"earlier_experts_per_layer": [[2, 1]]},
        {"earlier_experts_per_layer": [[2, 1, 3], [2, 1, 3], [2, 1, 3]]}, {"earlier_experts_per_layer": None},
        {"earlier_experts_per_layer": [[0, 1, 3]]}, {"packs": [1, 1, 1]}, {"packs": [5]}, {"expansions": []},
        {"updates_of_packs": [None]}, {"updates_of_packs": [[0, "x"], None]}, {"language_gate": {}},
        {"language_gate": {"layer": 0}}, {"language_gate": {"layer": 0, "languages": [["en"], "el", 3]}},
        {"language_gate": {"layer": "0", "languages": [["en"], ["el"], ["hu"]]}}, {"prefix_gate": {"decay": 0.9}},
    ],
    ids=str,
)  # fmt: skip
def test_odd_values_are_refused_by_every_command_that_reads_them(made, tmp_path, fields):
    model = shutil.copytree(made / "joined", tmp_path / "joined")
    written = json.loads((model / "config.json").read_text()) | fields
    (model / "config.json").write_text(json.dumps(written))
    out = tmp_path / "out"
    for command in (
        ["inspect", model], ["card", model], ["join", out, model, made / "tr"], ["push", model, "me/x", "--dry-run"],
    ):  # fmt: skip
        assert refused(*command)


def test_long_numbers_are_cut(tmp_path, made):
    assert str(InputError(f"size is {'7' * 400}, not 1")) == f"size is {'7' * 20}... (400 digits), not 1"
    (tmp_path / "plan.json").write_text('{"method": "layer-moe", "experts_per_layer": [' + "1" * 400 + "]}")
    said = refused("expand", made / "base", tmp_path / "out", "--plan", tmp_path / "plan.json")
    assert len(said) < 400


def test_the_package_is_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "hf_moe_expand", "--help"], capture_output=True, text=True, check=True, timeout=100
    )
    assert "expand" in done.stdout

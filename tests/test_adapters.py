"""An adapter of PEFT in the place of a model, or beside one, is refused wherever a model is given."""

import json
import shutil

import pytest
from conftest import save_dense, write_texts
from typer.testing import CliRunner

from hf_moe_expand import cli
from hf_moe_expand.checkpoint import source
from hf_moe_expand.checkpoint.source import resolve_checkpoint
from hf_moe_expand.core.errors import InputError

ADAPTER = {"adapter_config.json": json.dumps({"peft_type": "LORA", "base_model_name_or_path": "me/x"})}
WEIGHTS = {"adapter_model.safetensors": ""}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_dense(tmp_path_factory.mktemp("adapters") / "base")


def put(folder, files):
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


ALONE = {
    "both files": {**ADAPTER, **WEIGHTS},
    "the configuration": ADAPTER,
    "the weights": WEIGHTS,
    "pickled": {**ADAPTER, "adapter_model.bin": ""},
    "a base's configuration": {**ADAPTER, **WEIGHTS, "config.json": '{"model_type": "llama"}'},
    "a configuration of wrong fields": {"adapter_config.json": '{"base_model_name_or_path": 3}'},
}


@pytest.mark.parametrize("files", ALONE.values(), ids=ALONE)
def test_an_adapter_alone_is_refused_with_its_base(tmp_path, files, monkeypatch):
    folder = put(tmp_path / "adapter", files)
    of = " of me/x" if ADAPTER.items() <= files.items() else ""
    with pytest.raises(InputError, match=f"adapter: is an adapter{of}, not a model: merge it into its base"):
        resolve_checkpoint(folder)
    monkeypatch.setattr(source, "hub_problem", lambda: "")
    monkeypatch.setattr(source, "snapshot_download", lambda *args, **options: str(folder))
    with pytest.raises(InputError, match=f"^me/adapter: is an adapter{of}, not a model: merge it into its base"):
        resolve_checkpoint("me/adapter")


def test_an_adapter_beside_weights_is_refused_and_its_weights_alone_are_not_read(base, tmp_path):
    folder = put(shutil.copytree(base, tmp_path / "both"), {**ADAPTER, **WEIGHTS})
    with pytest.raises(InputError, match=r"both: has an adapter of me/x beside .* have it already, move adapter_conf"):
        resolve_checkpoint(folder)
    (folder / "adapter_config.json").unlink()
    assert resolve_checkpoint(folder) == folder


VERBS = {
    "expand": "MODEL OUT --plan PLAN", "generate": "MODEL hello", "chat": "MODEL", "inspect": "MODEL",
    "evaluate": "MODEL --data en=TEXT --out OUT", "backbones": "MODEL", "card": "MODEL", "diff": "MODEL BASE",
    "graft": "BASE OUT --base BASE --instruct MODEL", "merge average": "BASE MODEL --out OUT", "export": "MODEL OUT",
    "grow": "MODEL OUT --plan PLAN", "join": "MODEL MODEL OUT", "gates": "MODEL OUT --data en=TEXT",
    "train dense": "MODEL OUT --data en=TEXT", "train post-pretrain": "MODEL OUT --data el=TEXT",
    "analyze fertility": "MODEL --data en=TEXT", "expand-depth": "MODEL OUT --blocks 1",
    "plan moe-lpr": "--layers MODEL --old en --new el --experts 2 --out OUT", "push": "MODEL me/x",
    "sample": "MODEL --out OUT",
}  # fmt: skip


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_that_takes_a_model_says_so(base, tmp_path, verb):
    (tmp_path / "plan.json").write_text('{"method": "moe-lpr", "experts_per_layer": [2, 2, 2], "new": ["el"]}')
    places = {
        "MODEL": put(tmp_path / "adapter", {**ADAPTER, **WEIGHTS}), "OUT": tmp_path / "out", "BASE": base,
        "PLAN": tmp_path / "plan.json", "TEXT": write_texts(tmp_path / "text.jsonl", ["hello"]),
    }  # fmt: skip
    words = [*verb.split(), *VERBS[verb].split()]
    for word, place in places.items():
        words = [given.replace(word, str(place)) for given in words]
    result = CliRunner().invoke(cli.app, words)
    said = f"{result.output}{result.exception}"
    assert "adapter: is an adapter of me/x, not a model" in " ".join(said.split()), said
    assert not (tmp_path / "out").exists()

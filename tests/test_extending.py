"""docs/extending.md: its package, installed, adds a method, a stage and a loss."""

import importlib
import json
import re
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import yaml
from conftest import keywords, refused, run_python, save_dense, write_texts
from guides import blocks

import hf_moe_expand
from hf_moe_expand import LayerLoss, Plan, ReviewConfig, expand_checkpoint, register_loss, register_stage
from hf_moe_expand.core import extensions
from hf_moe_expand.core.schema import Coefficient
from hf_moe_expand.stages.keywords import setting

GUIDE = "extending.md"
SMALL = {"max_steps": 1, "per_device_train_batch_size": 2, "disable_tqdm": True}
GREEK = ["Η γλώσσα αυτή είναι καινούργια για το μοντέλο. " * 3] * 8


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_dense(tmp_path / "Qwen" / "Qwen2.5-0.5B")
    write_texts(tmp_path / "el.jsonl", GREEK)
    return tmp_path


@pytest.fixture
def installed(place):
    """The guide's package, as pip installs it: its files, and its entry points in a folder beside them."""
    site = place / "site"
    (site / "my_extension").mkdir(parents=True)
    (site / "my_extension" / "__init__.py").touch()
    named = {m.group(1): text for text in blocks(GUIDE, "python") if (m := re.match(r"# (my_extension/\S+)\n", text))}
    assert len(named) == 3
    for name, text in named.items():
        (site / name).write_text(text, "utf-8")
    (project,) = map(tomllib.loads, blocks(GUIDE, "toml"))
    facts = site / "my_extension-0.1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['project']['name']}\nVersion: 0.1\n")
    groups = project["project"]["entry-points"].items()
    points = [f"[{group}]\n" + "".join(f"{name} = {at}\n" for name, at in of.items()) for group, of in groups]
    (facts / "entry_points.txt").write_text("\n".join(points))
    return site


def in_a_process(site, *lines: list[str]) -> str:
    program = f"sys.path.insert(0, {str(site)!r})\nimport accelerate.utils.other\nfrom hf_moe_expand.cli import app\n"
    program += "accelerate.utils.other.is_deepspeed_available = lambda: False\n"  # whose import takes seconds
    program += "".join(f"app({words!r}, standalone_mode=False)\n" for words in lines)
    return run_python(program, cwd=Path.cwd())


def test_the_guides_package_adds_a_method_a_stage_and_a_loss(installed, place):
    (settings,) = map(yaml.safe_load, blocks(GUIDE, "yaml"))
    small = {**SMALL, "block_size": 32, "logging_steps": 1}
    (place / "warm_up.yaml").write_text(yaml.safe_dump({**settings, **small, "bf16": False}))
    recipe = {
        "base": "Qwen/Qwen2.5-0.5B", "output": "run", "new": {"el": "el.jsonl"}, "plan": {"method": "ends", "most": 3},
        "warm_up": small, "post_pretrain": {**small, "losses": {"router_entropy": 0.5}}, "review": None,
    }  # fmt: skip
    (place / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    lines = [shlex.split(line)[1:] for block in blocks(GUIDE, "bash") for line in block.splitlines()]
    said = in_a_process(installed, *lines, ["recipes", "settings"], ["run", "recipe.yaml"])
    assert "4 2 4 (total 10)" in said
    assert re.search(r"wrote qwen-el-0: .*1 steps.*frozen tensors are byte-identical", said)
    assert "- `most` (4): experts of the first and of the last layer" in said
    assert "## `warm_up`" in said
    assert "final checkpoint: run/post_pretrain" in said
    for folder in (place / "qwen-el-0", place / "run" / "warm_up", place / "run" / "post_pretrain"):
        logs = json.loads((folder / "trainer_state.json").read_text())["log_history"]
        entropies = [entry["router_entropy_loss"] for entry in logs if "router_entropy_loss" in entry]
        assert all(0 < entropy <= 1.3863 for entropy in entropies)  # log 4
        assert bool(entropies) == (folder.name != "warm_up")


def test_an_extension_that_is_gone_and_a_stage_that_does_not_train(installed, place):
    stage = "from hf_moe_expand.stages.kinds.average import AverageExperts\n\n\nclass Idle(AverageExperts):\n"
    (installed / "my_extension" / "idle.py").write_text(f'"""Idles."""\n{stage}    key = name = "idle"\n')
    points = installed / "my_extension-0.1.dist-info" / "entry_points.txt"
    points.write_text("[hf_moe_expand.stages]\nidle = my_extension.idle:Idle\n")
    expand_checkpoint("Qwen/Qwen2.5-0.5B", "qwen-el", Plan("moe-lpr", [2] * 3, old=["en"], new=["el"]))
    with pytest.raises(AssertionError, match="idle: a stage that does not train"):
        in_a_process(installed, ["train", "idle", "qwen-el", "out", "--data", "el=el.jsonl"])
    gone = "gone = no_such_package.deep:Gone\n"
    points.write_text(f"{points.read_text()}{gone}[hf_moe_expand.plan_methods]\n{gone}")
    said = in_a_process(installed, ["train", "--help"], ["--help"])
    assert re.search(r"idle +Idles", said)
    assert re.search(r"inspect +Show", said)
    with pytest.raises(AssertionError, match="adds 'gone' to hf-moe-expand, but cannot be imported"):
        in_a_process(installed, ["recipes", "settings"])


def test_the_guides_loss_trains(place, installed, monkeypatch):
    monkeypatch.syspath_prepend(str(installed))
    expand_checkpoint("Qwen/Qwen2.5-0.5B", "qwen-el", Plan("moe-lpr", [3] * 3, old=["en"], new=["el"]))
    real = hf_moe_expand.PostPretrainConfig
    small = {**SMALL, "block_size": 32, "logging_steps": 1}
    monkeypatch.setattr(hf_moe_expand, "PostPretrainConfig", lambda out, **given: real(out, **given, **small))
    script, field = [text for text in blocks(GUIDE, "python") if not text.startswith("# ")]
    namespace: dict = {}
    exec(script, namespace)
    (logged,) = [entry for entry in namespace["trainer"].state.log_history if "router_entropy_loss" in entry]
    assert 0 < logged["router_entropy_loss"] <= 1.0987  # log 3
    namespace |= {"Annotated": Annotated, "Coefficient": Coefficient, "setting": setting, "dataclass": dataclass}
    exec(f"@dataclass\nclass Longer(hf_moe_expand.ReviewConfig):\n    {field}", namespace | globals(), namespace)
    longer = namespace["Longer"]
    assert longer("out", router_entropy_coef=0.5).router_entropy_coef == 0.5
    losses = keywords(longer, router_entropy_coef=0.5).router_losses()
    assert losses[-1] == namespace["RouterEntropyLoss"](0.5)
    refused(longer, "out", says="router_entropy_coef: Input should be greater", router_entropy_coef=-1.0)


def test_what_a_script_registers(monkeypatch):
    @dataclass(frozen=True)
    class Nothing(LayerLoss):
        name, metrics = "nothing", ("nothing_loss",)

        def layer_loss(self, batch, layer, count):
            return 0 * batch.routing[layer].router_logits.sum()

    monkeypatch.setitem(extensions._REGISTERED, "losses", {})
    refused(keywords, ReviewConfig, says="losses: unknown key `nothing`", losses={"nothing": 1})
    refused(keywords, ReviewConfig, says="losses: must hold `name: weight` lines, found 3", losses=3)
    assert register_loss(Nothing) is Nothing
    assert keywords(ReviewConfig, losses={"nothing": 1}).router_losses()[-1] == Nothing(1)
    refused(keywords, ReviewConfig, says="unknown key `nothin`; did you mean `nothing`", losses={"nothin": 1})
    refused(keywords, ReviewConfig, says="losses: nothing is -1: must be a number of at least", losses={"nothing": -1})
    importlib.import_module("hf_moe_expand.runs.recipe")
    refused(register_stage, ReviewConfig, says="ReviewConfig: recipes are read already: register a stage first")

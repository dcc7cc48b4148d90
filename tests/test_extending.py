"""docs/extending.md: its files, put into a copy of the package, make a method and a stage; its loss trains."""

import re
import shlex
import shutil
from pathlib import Path
from typing import Annotated

import pytest
import yaml
from conftest import keywords, run_python, save_dense, write_texts

import hf_moe_expand
from hf_moe_expand import Plan, expand_checkpoint
from hf_moe_expand.errors import InputError
from hf_moe_expand.schema import Coefficient
from hf_moe_expand.stages.config import setting

ROOT = Path(__file__).resolve().parents[1]
GUIDE = (ROOT / "docs" / "extending.md").read_text("utf-8")
SMALL = {"max_steps": 1, "per_device_train_batch_size": 2, "disable_tqdm": True}
GREEK = ["Η γλώσσα αυτή είναι καινούργια για το μοντέλο. " * 3] * 8


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", GUIDE, re.DOTALL)


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_dense(tmp_path / "Qwen" / "Qwen2.5-0.5B")
    write_texts(tmp_path / "el.jsonl", GREEK)
    return tmp_path


def test_the_guides_files_make_a_method_and_a_stage(place):
    package = place / "copy" / "hf_moe_expand"
    shutil.copytree(ROOT / "hf_moe_expand", package, ignore=shutil.ignore_patterns("__pycache__"))
    named = {m.group(1): text for text in blocks("python") if (m := re.match(r"# (hf_moe_expand/\S+)\n", text))}
    assert len(named) == 2
    for name, text in named.items():
        (package.parent / name).write_text(text, "utf-8")
    (settings,) = map(yaml.safe_load, blocks("yaml"))
    (place / "warm_up.yaml").write_text(yaml.safe_dump({**settings, "block_size": 32, **SMALL}))
    stage = {"block_size": 32, **SMALL}
    recipe = {
        "base": "Qwen/Qwen2.5-0.5B", "output": "run", "new": {"el": "el.jsonl"}, "plan": {"method": "ends", "most": 3},
        "warm_up": stage, "post_pretrain": stage, "review": None,
    }  # fmt: skip
    (place / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    lines = [shlex.split(line)[1:] for block in blocks("bash") for line in block.splitlines()]
    lines += [["recipes", "settings"], ["run", "recipe.yaml"]]
    program = f"sys.path.insert(0, {str(package.parent)!r})\nfrom hf_moe_expand.cli import app\n"
    program += "".join(f"app({words!r}, standalone_mode=False)\n" for words in lines)
    said = run_python(program, cwd=Path.cwd())
    assert "4 2 4 (total 10)" in said
    assert re.search(r"wrote qwen-el-0: .*1 steps.*frozen tensors are byte-identical", said)
    assert "| `most` | 4 | experts of the first and of the last layer" in said
    assert "## `warm_up`" in said
    assert "final checkpoint: run/post_pretrain" in said
    assert (place / "run" / "warm_up" / "config.json").is_file()


def test_the_guides_loss_trains(place, monkeypatch):
    expand_checkpoint("Qwen/Qwen2.5-0.5B", "qwen-el", Plan("moe-lpr", [3] * 3, old=["en"], new=["el"]))
    real = hf_moe_expand.PostPretrainConfig
    small = {**SMALL, "block_size": 32, "logging_steps": 1}
    monkeypatch.setattr(hf_moe_expand, "PostPretrainConfig", lambda out, **given: real(out, **given, **small))
    loss, field = [text for text in blocks("python") if not text.startswith("# ")]
    namespace: dict = {}
    exec(loss, namespace)
    (logged,) = [entry for entry in namespace["trainer"].state.log_history if "router_entropy_loss" in entry]
    assert 0 < logged["router_entropy_loss"] <= 1.0987  # log 3
    namespace |= {"Annotated": Annotated, "Coefficient": Coefficient, "setting": setting}
    exec(f"@dataclass\nclass Longer(hf_moe_expand.ReviewConfig):\n    {field}", namespace | globals(), namespace)
    longer = namespace["Longer"]
    assert longer("out", router_entropy_coef=0.5).router_entropy_coef == 0.5
    losses = keywords(longer, router_entropy_coef=0.5).losses()
    assert losses[-1] == namespace["RouterEntropyLoss"](0.5)
    with pytest.raises(InputError, match="router_entropy_coef is -1"):
        longer("out", router_entropy_coef=-1.0)

"""The guides' commands and recipes run, one after the other, with a tiny model in the place of the real one."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from conftest import invoke, save_dense, write_texts

from hf_moe_expand.pipeline import run_recipe, validate_recipe
from hf_moe_expand.recipe import Recipe
from hf_moe_expand.recipes import packaged_files

DOCS = Path(__file__).resolve().parents[1] / "docs"
STAGES = ("post_pretrain", "review", "group", "normal")
# What a tiny model on little text needs besides the guide's own options.
EXTRA = {
    "analyze similarity": ["--tokens", "300", "--block-size", "32"],
    "analyze deviation": ["--steps", "2", "--batch-size", "2", "--block-size", "32", "--micro-batch-size", "2"],
    "plan layer-moe": ["--similarity-floor", "0.01"],
    "grow qwen-el-2": ["--tokens", "300", "--block-size", "32"],
}


def blocks(guide: str, kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", (DOCS / guide).read_text("utf-8"), re.DOTALL)


def commands(guide: str) -> list[list[str]]:
    lines = [line for block in blocks(guide, "bash") for line in block.splitlines()]
    lines = [line.replace("accelerate launch $(which hf-moe-expand)", "hf-moe-expand") for line in lines]
    return [shlex.split(line)[1:] for line in lines if line.startswith("hf-moe-expand")]


def small(settings: dict) -> dict:
    """A stage's settings at the size of a test."""
    training = {**settings["training"], "max_steps": 1, "per_device_train_batch_size": 2, "disable_tqdm": True}
    training.pop("num_train_epochs", None)
    training.pop("gradient_accumulation_steps", None)
    return {**settings, "block_size": 32, "training": training}


def small_file(text: str) -> dict:
    settings = yaml.safe_load(text)
    if "base" not in settings:
        settings.pop("old_documents", None)
        return small(settings)
    for part in (settings, *settings.get("expansions", ())):
        part |= {name: small(part[name]) for name in STAGES if name in part}
        if "plan" in part and part["plan"]["method"] == "layer-moe":
            part["plan"]["similarity_floor"] = 0.01
    settings["analysis"] = {"tokens": 300, "block_size": 32}
    settings["deviation"] = {"steps": 2, "batch_size": 2, "block_size": 32, "micro_batch_size": 2}
    return settings


@pytest.fixture
def workplace(tmp_path, monkeypatch, help_text):
    """The folder that the guides speak of: a base model, text, and the settings files of guide and README."""
    monkeypatch.chdir(tmp_path)
    save_dense(tmp_path / "Qwen" / "Qwen2.5-0.5B", num_hidden_layers=8)
    for code in ("en", "el", "hu", "tr", "hi"):
        write_texts(tmp_path / f"{code}.jsonl", [text[:300] for text in help_text(code, "train", 20)])
        write_texts(tmp_path / f"{code}.test.jsonl", [text[:300] for text in help_text(code, "test", 3)])

    def prepare(guide: str) -> None:
        for source in (guide, "../README.md"):
            for text in blocks(source, "yaml"):
                name = re.match(r"# (\S+)\n", text).group(1)
                (tmp_path / name).write_text(yaml.safe_dump(small_file(text)))

    return prepare


def run(guide: str) -> dict[str, str]:
    said = {}
    for words in commands(guide):
        verb = " ".join(words[:2])
        said[verb] = invoke(*words, *EXTRA.get(verb, []))
    return said


def test_the_dmoe_guide(workplace):
    workplace("dmoe.md")
    said = run("dmoe.md")
    assert "expert 0" in said["plan dmoe"]
    assert "frozen tensors are byte-identical, and so are the routers' other rows" in said["train adapt"]
    assert "hi (new)" in said["train adapt"]
    validate_recipe(Recipe.load("dmoe.yaml"))
    assert run_recipe(Recipe.load("dmoe.yaml"), lambda line: None).name == "normal"


def test_the_delta_moe_guide(workplace):
    workplace("delta_moe.md")
    for seed, name in enumerate(("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B-Instruct")):
        save_dense(Path(name), num_hidden_layers=28, seed=seed)
    said = run("delta_moe.md")  # `diff` would exit with 1 if a tensor differed
    assert "expert 0" not in said["diff qwen-hu-tr-chat-0"]
    assert "FFNs" in said["diff qwen-hu-tr-chat-0"]
    assert "frozen tensors are byte-identical" in said["train dense"]


def test_the_lora_guide(workplace):
    workplace("lora_experts.md")
    said = run("lora_experts.md")
    assert "expert 0 with updates of rank 8, alpha 16" in said["inspect qwen-mola-2"]
    assert "Qwen2ForCausalLM" in said["export qwen-mola-2"]


def test_the_lifelong_guide(workplace):
    workplace("dmoe.md")
    workplace("lifelong.md")
    first = Recipe.load("recipe.yaml")
    run_recipe(first, lambda line: None).rename("qwen-el-2")
    said = run("lifelong.md")
    assert "expansion 2" in said["inspect qwen-el-tr-2"]
    assert "as they were then" in said["shrink qwen-el-tr-2"]
    assert "el (expansion 1)" in said["evaluate qwen-el-2"]
    assert "tr (expansion 2)" in said["evaluate qwen-el-2"]
    assert "nearest experts: layer 0: " in said["grow qwen-el-2"]
    assert run_recipe(Recipe.load("lifelong.yaml"), lambda line: None).parts[-2:] == ("2", "review")


def test_the_recipes_guide(workplace):
    workplace("recipes.md")
    save_dense(Path("Qwen/Qwen2.5-0.5B-Instruct"), num_hidden_layers=8)
    told = commands("recipes.md")
    assert [words[0] for words in told] == ["recipes", "recipes", "validate", "recipes"]
    for words in told:
        assert words[-1] != "ls" or "layermoe-qwen1.5-1.8b-g1 " in invoke(*words)
        assert words[0] != "validate" or invoke(*words).endswith(": ok\n")
        assert "show" not in words or "base: Qwen/Qwen1.5-1.8B" in invoke(*words[:3])
    names = [*packaged_files()]
    patterns = re.findall(r"`([\w.-]+-)\*`", (DOCS / "recipes.md").read_text("utf-8"))
    assert {name for name in names if name.startswith(tuple(patterns))} == set(names)
    validate_recipe(Recipe.load("delta.yaml"))
    assert run_recipe(Recipe.load("delta.yaml"), lambda line: None).name == "review"
    assert Path("runs/qwen-el-chat/graft").is_dir()

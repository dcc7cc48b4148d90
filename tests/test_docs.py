"""The guides' commands, recipes and Python, with a tiny model; `make guides` runs all, `make test` few of them."""

import argparse
import importlib
import json
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
import trl
import yaml
from accelerate.commands.launch import launch_command_parser
from conftest import BACKBONE_NAMES, CHAT, byte_tokenizer, invoke, keywords, refused, save_dense, tiny_config
from encoder_decoders import SENTENCES, save_tiny
from guides import DOCS, LAUNCH, ROOT, bash_lines, blocks, commands, expanded, parsed, plain, run, small, workplace_in
from test_peft_adapters import make
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers.cli.serving.model_manager import ModelManager
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from typer.core import TyperCommand
from typer.testing import CliRunner

from hf_moe_expand import Plan, PostPretrainConfig, cli, expand_checkpoint
from hf_moe_expand.checkpoint.compare import compare_checkpoints
from hf_moe_expand.evaluation.benchmarks import task_list
from hf_moe_expand.hub import publish as hub
from hf_moe_expand.modeling import LayerMoEConfig
from hf_moe_expand.runs.pipeline import run_recipe, validate_recipe
from hf_moe_expand.runs.recipe import Recipe
from hf_moe_expand.runs.recipes import packaged_files

# A tiny model with random weights tells no languages apart.
GATES = ["--tokens", "200", "--anchor-tokens", "100", "--unseen-share", "0.99", "--layer", "2"]
GUIDES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]


def guide_text(name):
    return (DOCS / name).read_text("utf-8")


@pytest.fixture
def workplace(tmp_path, monkeypatch, help_text):
    return workplace_in(tmp_path, monkeypatch, help_text)


@pytest.fixture
def pushed(monkeypatch):
    """What `push` would have been told: its arguments, and its options."""
    pushed = []
    monkeypatch.setattr(hub, "push_to_hub", lambda *where, **how: pushed.append((where, how)))
    return pushed


def exec_all(guide, section="", **small):
    """Runs the Python of a guide, with words in the place of others; its names."""
    names = {}
    for program in blocks(guide, "python", section):
        for word, other in small.items():
            program = program.replace(word, other)
        exec(compile(program, guide, "exec"), names)
    return names


def test_every_command_of_the_readme_runs(workplace, quick_gates):
    """The recipe from its check to the list of files that a push uploads; the tiny tokenizer has no chat template."""
    workplace("../README.md")
    said = {words[0]: invoke(*words) for words in commands("../README.md") if words[0] != "chat"}
    assert [*said] == ["validate", "run", "report", "push"]
    assert "recipe.yaml: ok" in said["validate"]
    assert "frozen tensors are byte-identical" in said["run"]
    assert "el (new)" in said["run"]
    assert Path("runs/qwen-el/report.html").exists()
    assert "model.safetensors" in said["push"]
    assert "post-pretrain, 1 steps" in invoke("inspect", "runs/qwen-el/post_pretrain")
    (chat,) = (words for words in commands("../README.md") if words[0] == "chat")
    refused(invoke, *chat, says="its tokenizer has no chat template")


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.name)
def test_every_block_reads(guide, tmp_path, monkeypatch):
    """Commands are parsed, not run: `make guides` runs them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(TyperCommand, "invoke", lambda self, context: None, raising=False)
    fences = re.findall(r"^ *```(.*)$", guide.read_text("utf-8"), re.MULTILINE)
    assert fences[1::2] == [""] * (len(fences) // 2)
    assert set(fences) <= {"", "bash", "json", "python", "text", "toml", "yaml"}
    for line in bash_lines(guide):
        if line.startswith("make "):
            assert f"\n{line.split()[1]}: " in (ROOT / "Makefile").read_text("utf-8")
        else:
            assert line.startswith(("hf-moe-expand ", "python benchmarks/", "# ")) or LAUNCH.match(line), line
    for words in commands(guide) if guide.name != "extending.md" else []:  # its verbs are files of its own
        invoke(*words[: words.index(">") if ">" in words else None])
    for text in blocks(guide, "json"):
        json.loads(text)
    for text in blocks(guide, "yaml"):
        assert parsed(text)
    for text in blocks(guide, "python"):
        compile(text, guide.name, "exec")


def test_benchmarks_take_the_options_that_the_guides_give(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for script in (ROOT / "benchmarks").glob("*.py"):
        importlib.import_module(script.stem)
    parse = argparse.ArgumentParser.parse_args

    def read(parser, given=None, namespace=None):
        raise InterruptedError(parse(parser, given, namespace))  # the options were read

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", read)
    lines = [line for guide in GUIDES for line in bash_lines(guide) if line.startswith("python ")]
    assert len(lines) >= 8
    for line in lines:
        _, script, *options = shlex.split(line)
        monkeypatch.setattr(sys, "argv", [script, *options])
        with pytest.raises(InterruptedError):
            importlib.import_module(Path(script).stem).main()


@pytest.mark.guides
def test_the_tutorial(workplace, pushed):
    workplace("tutorial.md")
    save_dense(Path("Qwen/Qwen2.5-0.5B"), num_hidden_layers=8, max_position_embeddings=1024)
    small = Path("recipe.yaml").read_text("utf-8")
    Path("recipe.yaml").unlink()
    said = {}
    for words in commands("tutorial.md"):
        said[words[0]] = invoke(*words, *(GATES if words[0] == "gates" else []))
        if words[:2] == ["recipes", "new"]:
            validate_recipe(Recipe.load("recipe.yaml"))
            Path("recipe.yaml").write_text(small, "utf-8")
    assert re.search("^tokens a byte: .*el", said["validate"], re.MULTILINE)
    assert said["validate"].rstrip("\n").endswith("recipe.yaml: ok")
    assert "final checkpoint: runs/qwen-el/average" in said["run"]
    (listed,) = (rows for rows in re.findall(r"\| in `runs/qwen-el` .*?\n\n", guide_text("tutorial.md"), re.DOTALL))
    folders = {"expanded", "post_pretrain", "average"}
    for name in {*folders, "report.html", *re.findall(r"`([\w.]+\.(?:json|yaml|safetensors))`", listed)}:
        assert Path("runs/qwen-el", name).exists(), name
    assert "license" in said["card"]
    assert [(where, how["dry_run"]) for where, how in pushed] == [(("runs/qwen-el", "me/qwen-el"), True)]
    assert "in layer 2\n" in said["gates"]
    config = json.loads(Path("qwen-el-1/config.json").read_text("utf-8"))
    assert (config["parts"]["gate"]["layer"], config["exclusive_experts"]) == (2, True)
    assert "el (new)" in said["evaluate"]
    Path("me").mkdir()
    Path("me/qwen-el").symlink_to(Path("runs/qwen-el/average").resolve())
    exec_all("tutorial.md")


def test_the_size_and_the_recommended_recipe_are_those_that_the_guide_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    section = "Costs, before anything runs"
    (expected,), (config,) = (blocks("choose.md", kind, section) for kind in ("text", "json"))
    Path("Qwen/Qwen2.5-7B").mkdir(parents=True)
    Path("Qwen/Qwen2.5-7B/config.json").write_text(config)
    assert run("choose.md", section)["inspect Qwen/Qwen2.5-7B"] == expected
    assert "24,725,632,512" in expected
    (recommended,) = blocks("choose.md", "yaml", "What to take")
    recipe = "base: Qwen/Qwen2.5-0.5B\noutput: runs/x\nold: {en: en.jsonl}\nnew: {hu: hu.jsonl}\n" + recommended
    Path("recommended.yaml").write_text(recipe)
    stages = [stage.key for stage, _ in Recipe.load("recommended.yaml").stages()]
    assert stages == ["post_pretrain", "gates", "average"]


BACKBONES_SAY = {
    "Encoder-decoders": {
        "plan layer-moe": "(total 60)",
        "train review": "frozen tensors are byte-identical",
        "evaluate nllb": "en-el",
        "analyze routing": "encoder.1, encoder.3",
        "inspect nllb-el-2": "12 encoder and 12 decoder layers",
    },
    "LoRA experts": {
        "inspect qwen-mola-2": "expert 0 with updates of rank 8, alpha 16",
        "export qwen-mola-2": "Qwen2ForCausalLM",
    },
    "Added experts": {
        "inspect Qwen/Qwen3-30B-A3B": "expert 0 with an added FFN of width 512",
        "inspect moe-el-3": "language gate",
    },
}


@pytest.mark.guides
@pytest.mark.parametrize("section", BACKBONES_SAY)
def test_the_guide_to_backbones(workplace, tmp_path, quick_gates, section):
    workplace("backbones.md")
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": []}
    save_dense(tmp_path / "Qwen" / "Qwen3-30B-A3B", "qwen3_moe", **sizes)
    save_tiny(tmp_path / "nllb", encoder_layers=12, decoder_layers=12)
    (tmp_path / "flores").mkdir()
    for code in ("en", "es", "el"):
        rows = [{"translation": {"en": b, code: a}} for a, b in zip(SENTENCES[code], SENTENCES["en"], strict=True)]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (tmp_path / f"en-{code}.jsonl").write_text(text * 15, "utf-8")
        (tmp_path / f"en-{code}.test.jsonl").write_text(text, "utf-8")
        (tmp_path / "flores" / f"{code}.txt").write_text("\n".join(SENTENCES[code][:2]) + "\n", "utf-8")
    said = run("backbones.md", section)
    for verb, text in BACKBONES_SAY[section].items():
        assert text in said[verb]
    if section == "Encoder-decoders":
        exec_all("backbones.md", section, **{"max_steps=100": "max_steps=1, use_cpu=True", "size=256": "size=32"})


@pytest.mark.guides
def test_the_distributed_guide(workplace):
    workplace("distributed.md")
    expanded("qwen-el", [3, 2, 2, 2, 2, 2, 2, 4])
    launches = [LAUNCH.match(line).group(1) for line in bash_lines("distributed.md")]
    for options in launches:
        asked = launch_command_parser().parse_args([*shlex.split(options), "script"])
        assert asked.config_file is None or (ROOT / "hf_moe_expand/accelerate_configs" / asked.config_file).is_file()
    for text in blocks("distributed.md", "yaml"):
        assert keywords(PostPretrainConfig, **parsed(text).get("post_pretrain", parsed(text))).changes()
    said = run("distributed.md")
    assert "final checkpoint: runs/qwen-el/average" in said["run recipe.yaml"]


@pytest.mark.guides
def test_the_recipes_of_the_papers(workplace):
    workplace("papers.md")
    save_dense(Path("Qwen/Qwen2.5-0.5B-Instruct"), num_hidden_layers=8)
    for name, last in (("dmoe.yaml", "joint"), ("delta.yaml", "review")):
        validate_recipe(Recipe.load(name))
        assert run_recipe(Recipe.load(name), lambda line: None).name == last
    assert Path("runs/qwen-el-chat/graft").is_dir()


def test_the_page_of_the_papers_names_every_recipe():
    names, text = [*packaged_files()], guide_text("papers.md")
    patterns = tuple(re.findall(r"`([\w.-]+-)\*`", text))
    assert {name for name in names if name.startswith(patterns)} == set(names) - {"recommended"}
    assert "`recommended`" in text
    (shown,) = re.findall(r"recipes show (\S+)`", text)
    assert "base: Qwen/Qwen1.5-1.8B" in invoke("recipes", "show", shown)
    assert f"{shown} " in invoke("recipes", "ls")


@pytest.mark.guides  # the harness takes half a minute to list its tasks
def test_the_evaluation_guide():
    """Every task that the guide names is one of lm_eval's; those of papers' lists have the numbers of examples."""
    harness = pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")
    known = {*importlib.import_module("lm_eval.tasks").TaskManager().all_tasks}
    text = guide_text("evaluation.md")
    asked = [part for part in re.findall(r"--tasks (\S+)", text) if task_list(part) is None]
    named = {name for part in asked for name in re.sub(r"@\d+", "", part).split(",")}
    assert named | set(re.findall(r"`((?:arc|m_mmlu|hellaswag|belebele|global|cmmlu)\w*)`", text)) <= known
    assert f"lm_eval {harness.__version__} has" in text
    assert not {"hellaswag_zh", "hellaswag_el", "hellaswag_tr", "arc_el", "arc_tr", "m_mmlu_el", "m_mmlu_tr"} & known
    examples = {"arc": "25", "m_mmlu": "5", "global": "5", "hellaswag": "10", "belebele": "5"}
    for of in (of for paper in ("moe-lpr", "layermoe") for of in task_list(paper).values()):
        for name, _, shots in (task.partition("@") for task in of.values()):
            assert shots == next(count for start, count in examples.items() if name.startswith(start))


@pytest.mark.guides
def test_the_guide_to_languages(workplace, quick_gates):
    for seed, code in enumerate(("el", "hu")):
        make(f"lora-{code}", "Qwen/Qwen2.5-0.5B", seed)
    for code in ("el", "tr"):
        tuned = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
        tuned.lm_head.weight.data *= 1.1
        tuned.save_pretrained(f"me/qwen-{code}")
    said = {}
    for words in commands("languages.md"):
        said[" ".join(words[:3])] = invoke(*words, *(GATES if words[0] == "gates" else []))
    assert "told" in said["expand Qwen/Qwen2.5-0.5B qwen-el-hu"]
    assert compare_checkpoints("me/qwen-el", "qwen-greek").same
    assert "no gate" in said["grow qwen-el qwen-el-tr"]
    assert "el=lora/el hu=lora/hu" in said["export qwen-el-hu lora"]
    exec_all("languages.md")
    assert Path("qwen-el-16/config.json").is_file()


@pytest.mark.guides
def test_the_lifelong_guide(workplace, quick_gates):
    workplace("packs.md")
    settings = yaml.safe_load(Path("recipe.yaml").read_text("utf-8"))
    settings |= {"plan": {"method": "moe-lpr", "experts": 2}, "gates": None, "review": small({})}
    Path("first.yaml").write_text(yaml.safe_dump(settings), "utf-8")
    run_recipe(Recipe.load("first.yaml"), lambda line: None).rename("qwen-el-2")
    said = run("packs.md", "Grow an expanded model")
    assert said["run lifelong.yaml"].count("done already") == 0
    more = yaml.safe_load(Path("lifelong.yaml").read_text("utf-8"))
    more["expansions"].append({"new": {"hu": "hu.jsonl"}})
    Path("lifelong.yaml").write_text(yaml.safe_dump(more), "utf-8")
    again = invoke("run", "lifelong.yaml")
    assert again.count("done already") == 2 * 5
    assert "final checkpoint: runs/qwen-lifelong/3/average" in again
    assert "expansion 2" in said["inspect qwen-el-tr-2"]
    assert "el (expansion 1)" in said["evaluate qwen-el-2"]
    assert "tr (expansion 2)" in said["evaluate qwen-el-2"]
    assert "nearest experts: layer 0: " in said["grow qwen-el-2"]


@pytest.mark.guides
def test_the_guide_to_what_to_take(workplace, quick_gates):
    workplace("choose.md")
    run("choose.md", "Without any old text")
    recipe = Recipe.load("no-old-text.yaml")
    validate_recipe(recipe)
    assert run_recipe(recipe, lambda line: None).name == "post_pretrain"
    expanded("qwen-el-2", [2] * 8)
    run("choose.md", "An average with the base")
    run("choose.md", "Averaged experts")
    scores = json.loads(Path("scores.json").read_text("utf-8"))
    assert [*scores["models"]][1:] == ["tuned", "averaged-0.4", "averaged-0.6"]
    assert (scores["old"], scores["new"]) == (["en", "es"], ["el"])
    tuned, base, mean = (
        AutoModelForCausalLM.from_pretrained(name).lm_head.weight
        for name in ("tuned", "Qwen/Qwen2.5-0.5B", "averaged-0.4")
    )
    assert torch.allclose(mean, 0.4 * tuned + 0.6 * base)
    assert not torch.equal(tuned, base)
    models = json.loads(Path("experts.json").read_text("utf-8"))["models"]
    assert [*models][1:] == ["qwen-el-2", "qwen-el-0.8", "qwen-el-0.6"]
    history = AutoModelForCausalLM.from_pretrained("qwen-el-0.6").config.expansions
    assert history[0]["stages"][-1] == {"stage": "average-experts", "settings": {"weight": 0.6}}


@pytest.mark.guides
def test_the_guide_to_packs(workplace, quick_gates, pushed):
    workplace("packs.md")
    plan = Plan("moe-lpr", [2] * 8, old=["en"], new=["el"], exclusive=True)
    expand_checkpoint("Qwen/Qwen2.5-0.5B", "me/qwen-el", plan)
    said = {" ".join(words[:3]): invoke(*words) for words in commands("packs.md", "Packs")}
    assert [where for where, _ in pushed] == [("qwen-hu-1", "me/qwen-hu")]
    assert "pack 2  qwen-hu-1: hu" in said["join qwen-el-hu me/qwen-el"]
    assert "pack 1              qwen-el: el; FFNs" in said["inspect qwen-el-hu"]
    assert "unseen languages" in said["gates qwen-el-hu qwen-el-hu-gated"]
    assert said["validate join.yaml"].rstrip("\n").endswith("join.yaml: ok")
    assert "final checkpoint: runs/qwen-el-hu/gates" in said["run join.yaml"]


class Small(trl.SFTConfig):
    """The guide's settings for a few steps; PEFT's checkpoints pickle them."""

    def __init__(self, folder, **given):
        super().__init__(folder, **{**given, "max_steps": 2, "max_length": 64, "per_device_train_batch_size": 2})


@pytest.mark.guides
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated:FutureWarning")  # TRL uses the old name
def test_the_chat_guide(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_dense(tmp_path / "chat", max_position_embeddings=256)
    byte_tokenizer(CHAT).save_pretrained(tmp_path / "chat")
    expand_checkpoint("chat", tmp_path / "qwen-el-2", Plan("moe-lpr", [2, 2, 2], old=["en"], new=["el"]))
    row = {"messages": [{"role": "user", "content": "Μία λέξη;"}, {"role": "assistant", "content": "Δύο."}]}
    Path("chat.el.jsonl").write_text(f"{json.dumps(row)}\n" * 8, "utf-8")
    monkeypatch.setattr(trl, "SFTConfig", Small)
    (program,) = re.findall(r"```python\n(# chat\.py\n.*?)```", guide_text("trainers.md"), re.DOTALL)
    exec(compile(program, "chat.py", "exec"), {})
    found = compare_checkpoints("qwen-el-2", "qwen-el-chat")
    assert found.changed
    assert all(re.search(r"\.experts\.1\.(gate|up|down)_proj\.weight$", name) for name in found.changed)
    assert (found.added, found.removed) == ([], [])
    diff, generate, chat = commands("trainers.md", "Chat models")
    said = CliRunner().invoke(cli.app, diff)
    assert said.exit_code == 1  # as where any tensor differs
    assert re.search(r"other experts .* 9 ", said.output)
    assert "base inside" in invoke(*generate[:-1], "4")
    invoke(*chat, "--max-new-tokens", "2")


@pytest.mark.guides
def test_the_serving_guide(workplace, monkeypatch, pushed):
    plan = Plan("moe-lpr", [2] * 8, old=["en"], new=["el"], exclusive=True)
    expand_checkpoint("Qwen/Qwen2.5-0.5B", "qwen-el-2", plan)
    Path("me").mkdir()
    Path("me/qwen-el").symlink_to(Path("qwen-el-2").resolve())
    said = run("serving.md")
    ((where, how),) = pushed
    assert (where, how["expansion_only"], how["dry_run"]) == (("qwen-el-2", "me/qwen-el"), True, True)
    assert Path("qwen-greek/config.json").is_file()
    assert said["export qwen-el-2"].strip().endswith(": Qwen2ForCausalLM")
    served, loaded = [], []
    vllm = SimpleNamespace(LLM=lambda model, **options: served.append(model))
    monkeypatch.setitem(sys.modules, "vllm", vllm)  # which is not installed: the block alone is looked at
    monkeypatch.setattr(transformers, "LayerMoEForCausalLM", None, raising=False)
    manager = ModelManager(device="cpu", trust_remote_code=True)  # of `transformers serve`
    load = manager.load_model_and_processor
    monkeypatch.setattr("transformers.cli.transformers.main", lambda: loaded.append(load("qwen-el-2@main")[0]))
    names = exec_all("serving.md")
    manager.shutdown()
    assert [type(model).__name__ for model in (names["model"], *loaded)] == ["LayerMoEForCausalLM"] * 2
    assert served == ["qwen-el-2"]
    assert AutoTokenizer.from_pretrained("qwen-el-2", trust_remote_code=True).padding_side == "right"


def test_what_serving_back_ends_ask_for_holds_where_the_guide_says_so(workplace, monkeypatch):
    expanded("model", [2] * 8, [1])
    auto_map = json.loads(Path("model/config.json").read_text("utf-8"))["auto_map"]
    assert {"AutoConfig", "AutoModel"} <= set(auto_map)
    assert get_class_from_dynamic_module(auto_map["AutoModel"], "model").is_backend_compatible()
    sdpa, asked = ALL_ATTENTION_FUNCTIONS["sdpa"], []

    def attention(module, query, key, value, *_, attention_instances=None, scaling=None, **__):
        asked.append(attention_instances)
        return sdpa(module, query, key, value, None, scaling=scaling)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "vllm", attention)
    ids, ready, planned = torch.arange(12)[None], set(), set()
    for backbone in BACKBONE_NAMES:
        config = LayerMoEConfig.from_dense(tiny_config(backbone), num_experts_per_layer=[3, 1, 2])
        assert config.get_text_config() is config
        fields = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
        assert not any(hasattr(config, name) for name in fields)
        config._attn_implementation = "vllm"
        instances: dict = {}
        asked.clear()
        try:
            model = AutoModel.from_config(config).eval()
            model(ids, position_ids=ids, use_cache=False, attention_instances=instances, return_dict=False)
        except (AttributeError, KeyError):  # attention that is none of the interface's
            continue
        if model.is_backend_compatible() and [given is instances for given in asked] == [True] * 3:
            ready.add(plain(backbone))
            if any("experts" in rule for rule in model.tp_plan):
                planned.add(plain(backbone))
    row = re.search(r"the backbone's own: (.*?)\. Not (.*?) \|", (DOCS / "serving.md").read_text("utf-8"))
    named, others = ({plain(name) for name in group.split(", ")} for group in row.groups())
    assert ready == named
    assert named | others == {plain(name) for name in BACKBONE_NAMES}
    assert named - planned == {"gpt2", "opt"}

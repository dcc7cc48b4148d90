"""The page of the papers' commands: each runs, in the order of the page, on a tiny model."""

import gc
import json
import re
import shlex
from functools import reduce
from pathlib import Path
from types import SimpleNamespace

import papers
import pytest
import torch
import yaml
from conftest import invoke, save_dense, write_texts
from encoder_decoders import SENTENCES, save_tiny
from guides import EXTRA, bash_lines
from test_recipes import of_recipes
from transformers import AutoModelForCausalLM

from hf_moe_expand import Plan
from hf_moe_expand.core.yamlfile import parse_mapping
from hf_moe_expand.evaluation import harness
from hf_moe_expand.planning.results import DeviationResult, RoutingResult

SMALL = {
    "block_size": 16, "per_device_train_batch_size": 2, "max_steps": 1, "save_strategy": "no", "disable_tqdm": True,
}  # fmt: skip
OPTIONS = EXTRA | {
    "analyze similarity": ["--tokens", "40", "--block-size", "16"],
    "analyze routing": ["--tokens", "24", "--block-size", "16"],
    "sample base": ["--tokens", "10"],
    "evaluate base": ["--block-size", "16"],
    "--pairs": ["--max-new-tokens", "3"],
    "evaluate dense-1": ["--block-size", "16", "--max-tokens", "40"],
}
# Of the papers' sizes: too many for a tiny model, or more than its text.
SMALLER = {"--blocks": "2"}
LARGE = ("tokens_per_language", "replay_share")
TEXTS = {
    "en": "The cat {} sits in the sun.", "es": "El gato {} duerme al sol.", "el": "Η γάτα {} κάθεται.",
    "hu": "A macska {} a napon ül.", "tr": "Kedi {} güneşte oturuyor.",
}  # fmt: skip


def rows() -> list[tuple[str, str, list[list[str]]]]:
    """What a comment of the page announces: its words, its settings, and the commands below it."""
    found = []
    for line in bash_lines("papers.md"):
        if line.startswith("# "):
            what, _, settings = line[2:].partition("; s.yaml: ")
            found.append((what, settings, []))
        else:
            found[-1][2].append(shlex.split(line)[1:])
    return found


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = {"num_hidden_layers": 4, "max_position_embeddings": 256}
    save_dense(tmp_path / "base", **sizes)
    save_dense(tmp_path / "chat", **sizes)
    chat = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        for parameter in chat.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    chat.save_pretrained(tmp_path / "chat")
    save_tiny(tmp_path / "nllb")
    for code, sentence in TEXTS.items():
        write_texts(tmp_path / f"{code}.jsonl", [sentence.format(number) for number in range(12)])
    for code in ("es", "el"):
        pairs = [{"translation": {"en": b, code: a}} for a, b in zip(SENTENCES[code], SENTENCES["en"], strict=True)]
        text = "".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs)
        (tmp_path / f"en-{code}.jsonl").write_text(text * 2, "utf-8")
    for code in ("en", "el"):
        (tmp_path / f"{code}.txt").write_text("\n".join(SENTENCES[code][:2]) + "\n", "utf-8")
    vectors = {"en": [1, 0], "tr": [1, 0.1], "el": [0, 1], "hu": [0.2, 1]}
    (tmp_path / "vectors.json").write_text(json.dumps(vectors))
    # The tasks' data are on the hub.
    no_tasks = SimpleNamespace(evaluate=lambda *_: {}, benchmarks={}, unnamed=[])
    monkeypatch.setattr(harness, "HarnessTasks", lambda *given: no_tasks)


def test_the_commands_have_the_papers_numbers():
    page = {what.partition(":")[0]: (what, settings, commands) for what, settings, commands in rows()}
    held = 0
    for paper, section, row, key, value in papers.facts():
        if of_recipes(row):
            continue
        what, settings, commands = page[row]
        wanted = value["is"] if isinstance(value, dict) else value
        if key == "title":
            found = [int(number) for number in re.findall(r"\b\d+(?= )", what)]
        elif key.startswith("--"):
            found = [float(words[words.index(key) + 1]) for words in commands if key in words]
        else:
            found = [reduce(dict.__getitem__, key.split("."), parse_mapping(settings, row))]
        assert wanted in found, (paper, section, row, key)
        held += 1
    assert held > 25


def test_every_command_of_the_papers_runs(workplace):
    made, said = rows(), {}
    assert len(made) > 60
    for what, settings, commands in made:
        if settings:
            stage = parse_mapping(settings, what)
            small = SMALL if "curriculum" not in stage else {k: v for k, v in SMALL.items() if k != "max_steps"}
            size = 64 if Path("pairs").is_dir() else 16  # a sentence pair is not cut
            stage |= {key: 0.1 if key == "replay_share" else 100 for key in LARGE if key in stage}
            Path("s.yaml").write_text(yaml.safe_dump({**small, **stage, "block_size": size}))
        for command in commands:
            before = [None, *command]
            words = [SMALLER.get(option, word) for option, word in zip(before, command, strict=False)]
            assert ("s.yaml" in words) <= bool(settings), what
            said[" ".join(words)] = invoke(
                *words, *OPTIONS.get("--pairs" if "--pairs" in words else " ".join(words[:2]), [])
            )  # `diff`: no tensor differs
        gc.freeze()  # accelerate collects after each training: a third of its time
    assert Plan.load("random.json").classifier_layers == Plan.load("layer-moe.json").classifier_layers
    assert len(DeviationResult.from_json("deviation.json").similarity_at) == 1
    assert [*RoutingResult.from_json("directions.json").classes] == ["en-el", "el-en"]
    assert len(RoutingResult.from_json("pairs-routing.json").random_seeds) == 2
    assert Path("comet/lpr-2/en-el.txt").is_file()

    def answer(start):
        return next(text for words, text in said.items() if words.startswith(start))

    assert "trained in post-pretrain" in answer("inspect base")
    assert "mean of old" in answer("evaluate base lpr-1 lpr-2")
    assert "random experts" in answer("analyze routing lpr-2")
    assert "(total 10)" in answer("plan random")
    assert "classifier layers  none: the paper's ablation" in said["plan layer-moe --analysis analysis.json "
                                                                   "--total-experts 10 --out none.json"]  # fmt: skip
    assert "wrote written.jsonl: 30 documents" in answer("sample base")
    for stage in ("post-pretrain lpr lpr-1", "review lpr-1 lpr-2", "dense deep pro", "post-pretrain pairs eom"):
        assert "frozen tensors are byte-identical" in answer(f"train {stage}"), stage
    assert "frozen tensors are byte-identical, and so are the routers' other rows" in answer("train adapt")
    assert "es (new)" in answer("train adapt")
    assert len(config("layer-placed")["classifier_layers"]) == 2
    assert stages("und-2")[-1]["written_by"] == {"und": "base"}
    assert [stage["stage"] for name in ("lpr-one", "lpr-all") for stage in stages(name)] == [
        "post-pretrain",
        "everything",
    ]
    assert stages("eom")[-1]["settings"]["masking"]["expert_output"] == 0.1
    log = json.loads(Path("cmr-1/trainer_state.json").read_text("utf-8"))["log_history"]
    assert any({"budget_loss", "gate"} <= set(entry) for entry in log)
    scored = Path("pairs-1/validation.json").read_text("utf-8")
    assert '"es"' in scored
    assert '"el"' in scored
    assert json.loads(Path("steps.json").read_text("utf-8"))["steps"] == 2
    assert json.loads(Path("counts.json").read_text("utf-8"))["steps"] == 100_000


def config(name):
    return json.loads(Path(name, "config.json").read_text("utf-8"))


def stages(name):
    return config(name)["expansions"][-1]["stages"]

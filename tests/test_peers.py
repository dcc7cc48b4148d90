"""The comparison with other tools at a tiny size, without a network."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("peers")


def base(peers, folder):
    peers.write_base(folder, 300, hidden=32, layers=2, dtype=torch.float32, seed=0)
    return folder


def table(text):
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {name: values for name, *values in lines}


def test_tables_have_every_tool_and_name_the_reason_for_a_skipped_one(peers, monkeypatch, tmp_path, capsys):

    def no_index(folder, *packages):
        raise peers.UnavailableError(f"Could not find a version of {packages[0]}")

    monkeypatch.setattr(peers, "environment", no_index)
    few = {"full": "full fine-tuning", "peft": "PEFT LoRA"}
    monkeypatch.setattr(peers, "STEPS", few)
    # Bases are made and compared in processes of their own for the sake of memory alone.
    monkeypatch.setattr(peers, "in_own_process", lambda work, *arguments: work(*arguments))
    files = ["--out", str(tmp_path / "t.md"), "--json", str(tmp_path / "t.json")]
    sizes = "--disk-hidden 32 --disk-layers 2 --hidden 32 --layers 2 --vocabulary 300 --batch 1 --block 16 --steps 2"
    peers.main([*files, *sizes.split(), "--repeats", "1"])
    said = capsys.readouterr().out
    assert (tmp_path / "t.md").read_text("utf-8") == said
    rows = table(said)
    assert rows["mergekit-moe"] == [*"––––", "skipped: Could not find a version of mergekit", "–"]
    assert "PEFT LoRA, skipped: Could not find a version of peft" in rows
    kept = json.loads((tmp_path / "t.json").read_text("utf-8"))
    for name in ("hf-moe-expand expand", "transformers by hand"):
        assert rows[name][4] == "yes"
        found = kept["builders"][name]
        assert found["difference"] < 1e-5 * max(1, found["largest"])
        assert min(found["peak"]) > 0
    assert list(kept["steps"]) == ["full fine-tuning"]


@pytest.mark.parametrize(
    "case", ["full", "peft", "post-pretrain-ffn", "post-pretrain-lora", "review-ffn", "review-lora"]
)
def test_a_step_trains_what_it_should(peers, case, tmp_path, capsys):
    pytest.importorskip("peft")
    options = {"batch": 2, "block": 16, "steps": 2, "rank": 4, "trained_experts": 3, "dtype": "fp32", "seed": 0}
    peers.main(["step", case, str(base(peers, tmp_path / "base")), json.dumps(options)])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    ffn, routers = 3 * 32 * 64, 2 * 3 * 32
    dense = 2 * 300 * 32 + 32 + 2 * (ffn + 4 * 32 * 32 + 2 * 32)
    lora = 3 * 4 * (32 + 64)
    new = {"post-pretrain-ffn": 2 * 2 * ffn, "post-pretrain-lora": 2 * 2 * lora}
    trained = {
        "full": dense, "peft": 2 * (lora + 4 * 4 * 64), **{name: size + routers for name, size in new.items()},
    }  # fmt: skip
    assert found["trained"] == trained.get(case, routers)
    assert found["parameters"] >= dense


def test_what_does_not_keep_the_function_is_told(peers, tmp_path):
    folder = base(peers, tmp_path / "base")
    peers.main(["upcycle", str(folder), str(tmp_path / "out"), "4"])
    same = peers.compare(folder, tmp_path / "out", seed=0)
    assert same["loads"] == "yes"
    assert same["difference"] < 1e-5
    safetensors = importlib.import_module("safetensors.torch")
    file = tmp_path / "out" / "model.safetensors"
    weights = safetensors.load_file(file)
    weights["other"] = weights.pop("model.norm.weight") * 2
    safetensors.save_file(weights, file, {"format": "pt"})
    assert peers.compare(folder, tmp_path / "out", seed=0)["loads"] == "1 tensors missing, 1 tensors not used"
    (tmp_path / "out" / "config.json").write_text("{}")
    assert peers.compare(folder, tmp_path / "out", seed=0)["loads"].startswith("no: ValueError: ")


def test_a_launched_commands_memory_is_its_own(peers):
    _, peak = peers.launch([sys.executable, "-S", "-c", "x = bytearray(64 << 20)"])
    assert 64 << 20 < peak < 96 << 20
    with pytest.raises(RuntimeError, match="ended with 3: no"):
        peers.launch([sys.executable, "-S", "-c", "import sys; print('no', file=sys.stderr); sys.exit(3)"])


def test_an_environment_is_made_once_and_never_with_cuda(peers, monkeypatch, tmp_path):
    names, ran = ["torch", "peft"], []

    def run(command, **_):
        ran.append(command[1:])
        report = json.dumps({"install": [{"metadata": {"name": name}} for name in names]})
        (tmp_path / "tool").mkdir(exist_ok=True)
        return subprocess.CompletedProcess(command, 0, stdout=report, stderr="")

    monkeypatch.setattr(peers, "subprocess", SimpleNamespace(run=run))
    version = torch.__version__.partition("+")[0]
    python = peers.environment(tmp_path / "tool", "peft")
    assert python == tmp_path / "tool" / "bin" / "python"
    assert ran[-1][-2:] == ("peft", f"torch=={version}")
    made = len(ran)
    peers.environment(tmp_path / "tool", "peft")
    assert len(ran) == made == 3
    names.append("nvidia-cudnn")
    with pytest.raises(peers.UnavailableError, match="1 CUDA packages, such as nvidia-cudnn"):
        peers.environment(tmp_path / "other", "peft")
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr="WARNING: a\nERROR: Could not find x\nb\n")
    monkeypatch.setattr(peers, "subprocess", SimpleNamespace(run=lambda *_, **__: failed))
    with pytest.raises(peers.UnavailableError, match=r"^Could not find x$"):
        peers.environment(tmp_path / "other", "peft")

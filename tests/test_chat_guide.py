"""Chat models in docs/trainers.md: training and commands run; all but the new experts stays as it was."""

import json
import re
from pathlib import Path

import pytest
import torch
import trl
from conftest import byte_tokenizer, invoke, save_dense, tiny_dense
from guides import commands
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_moe_expand import Plan, cli, expand_checkpoint
from hf_moe_expand.checkpoint.compare import compare_checkpoints

DOCUMENT = Path(__file__).parents[1] / "docs" / "trainers.md"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


class Small(trl.SFTConfig):
    """The guide's settings for a few steps; PEFT's checkpoints pickle them."""

    def __init__(self, folder, **given):
        super().__init__(folder, **{**given, "max_steps": 2, "max_length": 64, "per_device_train_batch_size": 2})


@pytest.mark.guides
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated:FutureWarning")  # TRL uses the old name
def test_the_chat_guide(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    save_dense(tmp_path / "chat", max_position_embeddings=256)
    tokenizer.save_pretrained(tmp_path / "chat")
    changed = tiny_dense("qwen2", max_position_embeddings=256)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(1e-3)
    changed.save_pretrained(tmp_path / "chat")
    plan = Plan("moe-lpr", [2, 2, 2], old=["en"], new=["el"])
    expand_checkpoint("chat", tmp_path / "qwen-el-2", plan)
    row = {"messages": [{"role": "user", "content": "Μία λέξη;"}, {"role": "assistant", "content": "Δύο."}]}
    Path("chat.el.jsonl").write_text(f"{json.dumps(row)}\n" * 8, "utf-8")
    monkeypatch.setattr(trl, "SFTConfig", Small)
    (program,) = re.findall(r"```python\n(# chat\.py\n.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL)
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
    model = AutoModelForCausalLM.from_pretrained("qwen-el-chat").eval()
    with torch.no_grad(), model.use_expert(0):
        here = model(torch.arange(20)[None]).logits
        assert torch.equal(here, AutoModelForCausalLM.from_pretrained("chat").eval()(torch.arange(20)[None]).logits)

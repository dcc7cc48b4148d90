"""Checkpoints compute the same with an older transformers: `floor.py make FOLDER`, there `load FOLDER`."""

import sys
from pathlib import Path

import torch
import transformers

IDS = torch.arange(3, 43).view(2, 20)


def make(root: Path) -> None:
    from conftest import COMMON_BACKBONES, save_dense
    from matrix.forms import PARTS, Form, refused

    from hf_moe_expand import Plan, expand_checkpoint

    left_out = ("encoder-decoder", "expansion-only", "copies")
    forms = [Form((name,), root) for name in PARTS if name not in left_out and not refused((name,))]
    folders = [form.whole.rename(root / f"form-{form.parts[0]}") for form in forms]
    plan = Plan("layer-moe", [3, 1, 2], [2], old=["en"], new=["el"])
    for backbone in (*COMMON_BACKBONES, "mistral", "qwen3", "granite"):
        expand_checkpoint(save_dense(root / f"{backbone}-base", backbone), root / backbone, plan)
        folders.append(root / backbone)
    for folder in folders:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        with torch.no_grad():
            torch.save([model(IDS).logits, generated(model)], folder / "computed.pt")


def generated(model) -> torch.Tensor:
    return model.generate(IDS, max_new_tokens=5, do_sample=False, eos_token_id=None)


def load(root: Path) -> None:
    sys.modules["hf_moe_expand"] = None  # type: ignore[assignment]
    folders = sorted(path.parent for path in root.glob("*/computed.pt"))
    assert folders, f"{root} holds no checkpoints"
    for folder in folders:
        logits, tokens = torch.load(folder / "computed.pt")
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
        with torch.no_grad():
            torch.testing.assert_close(model(IDS).logits, logits, rtol=0, atol=1e-5, msg=str(folder))
            assert torch.equal(generated(model), tokens), folder
    print(f"transformers {transformers.__version__}: {len(folders)} checkpoints compute the same")


if __name__ == "__main__":
    {"make": make, "load": load}[sys.argv[1]](Path(sys.argv[2]))

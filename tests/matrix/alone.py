"""A process without the package, which loads forms."""

import os
from pathlib import Path
from typing import Any

import torch
from hub_server import Client

PROGRAM = """
import sys
sys.modules["hf_moe_expand"] = None
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
inputs, asked = torch.load(place + "/asked.pt")
model, info = globals()[kind].from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
assert not any(info.values()), info
assert type(model).__module__.startswith("transformers_modules"), type(model)
with torch.no_grad():
    torch.save([model.eval()(**inputs, use_cache=False, **more).logits for more in asked], place + "/found.pt")
model.save_pretrained(place + "/again")
"""


class Alone:
    """Started when it is first asked."""

    def __init__(self, home: Path) -> None:
        self.home, self.client = home, None

    def load(self, form: Any, place: Path, inputs: dict, asked: list[dict]) -> list[torch.Tensor]:
        """The logits of the form's checkpoint, which is saved again to the folder `again`."""
        if self.client is None:
            self.client = Client({**os.environ, "HF_HOME": str(self.home)})
        place.mkdir()
        torch.save([inputs, asked], place / "asked.pt")
        kind = "AutoModelForSeq2SeqLM" if "encoder-decoder" in form else "AutoModelForCausalLM"
        answer = self.client.run(PROGRAM, place=str(place), kind=kind, folder=str(form.folder))
        assert "message" not in answer, answer
        return torch.load(place / "found.pt")

    def stop(self) -> None:
        if self.client is not None:
            self.client.process.stdin.close()
            self.client.process.wait()

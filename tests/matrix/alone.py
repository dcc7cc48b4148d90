"""A process without the package, which loads forms."""

from pathlib import Path
from typing import Any

import torch
from conftest import start_python
from hub_server import LOOP, Client

START = f"""
import transformers.dynamic_module_utils
transformers.dynamic_module_utils.HF_MODULES_CACHE = sys.argv[1]
{LOOP}
"""
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


class Alone(Client):
    """Started when it is first asked."""

    def __init__(self, home: Path) -> None:
        self.home, self.process = home, None

    def load(self, form: Any, place: Path, inputs: dict, asked: list[dict]) -> list[torch.Tensor]:
        """The logits of the form's checkpoint, which is saved again to the folder `again`."""
        if self.process is None:
            self.process = start_python(START, str(self.home), timeout=7200)
        place.mkdir()
        torch.save([inputs, asked], place / "asked.pt")
        kind = "AutoModelForSeq2SeqLM" if "encoder-decoder" in form else "AutoModelForCausalLM"
        answer = self.run(PROGRAM, place=str(place), kind=kind, folder=str(form.folder))
        assert "message" not in answer, answer
        return torch.load(place / "found.pt")

    def stop(self) -> None:
        if self.process is not None:
            super().stop()

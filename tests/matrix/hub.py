"""A hub on localhost, and a process that pushes to it and loads from it."""

from pathlib import Path
from typing import Any

import torch
from hub_server import Client, HubServer

PULL = """
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
import hf_moe_expand
inputs, asked = torch.load(place + "/asked.pt")
model = globals()[kind].from_pretrained(name).eval()
with torch.no_grad():
    torch.save([model(**inputs, use_cache=False, **more).logits for more in asked], place + "/found.pt")
"""


class Hub:
    """Started when it is first asked."""

    def __init__(self, home: Path) -> None:
        self.home, self.client = home, None

    def push(self, form: Any, name: str) -> str:
        """Publishes the form's checkpoint; returns its name on the hub."""
        if self.client is None:
            self.server = HubServer().__enter__()
            self.client = Client(self.server.environment(self.home))
            self.bases: set[Path] = set()
        if form.base not in self.bases:
            self.bases.add(form.base)
            self.server.add(f"org/{form.base.name}", {file.name: file.read_bytes() for file in form.base.iterdir()})
        alone = "expansion-only" in form
        answer = self.client.push(form.whole, name, base=f"org/{form.base.name}", expansion_only=alone)
        assert "message" not in answer, answer
        return answer["value"]["repo_id"]

    def pull(self, form: Any, name: str, inputs: dict, asked: list[dict]) -> list[torch.Tensor]:
        """Its logits, loaded from the hub."""
        place = form.place("pulled")
        place.mkdir()
        torch.save([inputs, asked], place / "asked.pt")
        kind = "AutoModelForSeq2SeqLM" if "encoder-decoder" in form else "AutoModelForCausalLM"
        answer = self.client.run(PULL, place=str(place), name=name, kind=kind)
        assert "message" not in answer, answer
        return torch.load(place / "found.pt")

    def stop(self) -> None:
        if self.client is not None:
            self.client.process.stdin.close()
            self.client.process.wait()
            self.server.__exit__(None, None, None)

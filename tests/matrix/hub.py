"""A hub on localhost, a process that pushes to it and loads from it, and one without the package."""

import os
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
        return logits_of(self.client, PULL, form, form.place("pulled"), [inputs, asked], name=name)

    def stop(self) -> None:
        if self.client is not None:
            self.client.process.stdin.close()
            self.client.process.wait()
            self.server.__exit__(None, None, None)


def logits_of(client: Any, program: str, form: Any, place: Any, asked: list, **given: str) -> list[torch.Tensor]:
    """What a program finds in the process of a client, for the inputs and requests in `asked`."""
    place.mkdir()
    torch.save(asked, place / "asked.pt")
    kind = "AutoModelForSeq2SeqLM" if "encoder-decoder" in form else "AutoModelForCausalLM"
    answer = client.run(program, place=str(place), kind=kind, **given)
    assert "message" not in answer, answer
    return torch.load(place / "found.pt")


ALONE = """
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
    """A process that cannot import the package, and loads all forms: started when it is first asked."""

    def __init__(self, home: Path) -> None:
        self.home, self.client = home, None

    def load(self, form: Any, place: Path, inputs: dict, asked: list[dict]) -> list[torch.Tensor]:
        """The logits of the form's checkpoint, which is saved again to the folder `again`."""
        if self.client is None:
            self.client = Client({**os.environ, "HF_HOME": str(self.home)})
        return logits_of(self.client, ALONE, form, place, [inputs, asked], folder=str(form.folder))

    def stop(self) -> None:
        if self.client is not None:
            self.client.process.stdin.close()
            self.client.process.wait()

"""Two ranks that are forked once, and take a step of each form that they are told: `python -m matrix.two_ranks`."""

import os
import pickle
import traceback
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
from conftest import start_ranks

_LONG = timedelta(hours=2)


class Ranks:
    """The process that asks them."""

    def __init__(self) -> None:
        self.started: Any = None
        self.asked = 0

    def step(self, form: Any) -> dict[str, torch.Tensor]:
        """Every parameter after one step."""
        if self.started is None:
            self.started, self.store = start_ranks("matrix.two_ranks")
        self.asked += 1
        self.store.set(f"matrix/task/{self.asked}", pickle.dumps((form.parts, str(form.root.parent))))
        answer = Path(self.store.get(f"matrix/answer/{self.asked}").decode())
        return torch.load(answer) if answer.suffix == ".pt" else _raise(answer)

    def stop(self) -> None:
        for process in self.started.processes if self.started else ():
            process.kill()


def _raise(answer: Path) -> Any:
    raise AssertionError(answer.read_text())


def serve() -> None:
    """What a rank does."""
    import torch.distributed as dist
    from datasets import disable_progress_bars
    from transformers.utils import logging

    from matrix.forms import Form, load
    from matrix.steps import trainer_of

    disable_progress_bars()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    dist.init_process_group("gloo")
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=_LONG)
    for number in count(1):
        parts, root = pickle.loads(store.get(f"matrix/task/{number}"))
        form = Form(parts, Path(root))
        try:
            model = load(form.root / "whole")
            trainer_of(model, form, batch=4).train()
            answer = form.root / "ranks.pt"
            found = {name: value.detach() for name, value in model.named_parameters()}
        except Exception:
            answer, found = form.root / "ranks.txt", traceback.format_exc()
        if dist.get_rank() == 0:
            torch.save(found, answer) if answer.suffix == ".pt" else answer.write_text(str(found))
            store.set(f"matrix/answer/{number}", str(answer))


if __name__ == "__main__":
    serve()

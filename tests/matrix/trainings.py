"""Trains each stage on each form for a few steps, and prints a line for each: hashes of losses and weights.

`make trainings > before.txt` on the commit before a change, and again after it: lines that differ are trainings that
the change has changed. The same machine and the same number of threads give the same lines.
"""

import contextlib
import hashlib
import io
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from datasets import disable_progress_bars
from safetensors.torch import load_file
from transformers.utils import logging

import hf_moe_expand as moe
from matrix.forms import PARTS, Form, name_of, refused
from matrix.steps import sft

QUICK = {"block_size": 16, "max_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 1,
         "disable_tqdm": True}  # fmt: skip
# Name: configuration, and whether the text is that of all languages.
STAGES: dict[str, tuple[Callable[..., Any], bool]] = {
    "post-pretrain": (moe.PostPretrainConfig, False),
    "one-stage": (partial(moe.PostPretrainConfig, replay=True, language_prior_coef=0.1), True),
    "everything": (partial(moe.PostPretrainConfig, everything=True), False),
    "masked": (partial(moe.PostPretrainConfig, masking=moe.Masking(expert_output=0.2, gating_dropout=0.2)), False),
    "localized": (partial(moe.PostPretrainConfig, localized_balance_coef=0.1, replay=True), True),
    "tempered": (partial(moe.PostPretrainConfig, replay=True, temperature=2.0), True),
    "recomputed": (
        partial(moe.PostPretrainConfig, gradient_checkpointing=True, gradient_accumulation_steps=2), False
    ),
    "review": (moe.ReviewConfig, True),
    "distilled": (partial(moe.ReviewConfig, distillation_coef=1.0), True),
    "group": (moe.GroupConfig, True),
    "joint": (moe.JointConfig, True),
}  # fmt: skip
DENSE = {"dense": {}, "dense-lora": {"method": "lora"}}
FORMS = [(), *((name,) for name in PARTS if name not in ("copies", "expansion-only")), ("exclusive", "gated"),
         ("exclusive", "uneven"), ("lora", "grown"), ("adapters", "joined"), ("adapters", "gated"),
         ("conditional", "lora"), ("joined", "grown")]  # fmt: skip


def digest(values: Any) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:12]


def of_weights(folder: Path) -> str:
    found = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        for name, value in sorted(load_file(file).items()):
            found.update(name.encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:12]


def said_of(out: Path) -> str:
    log = json.loads((out / "trainer_state.json").read_text())["log_history"]
    losses = [
        (entry["step"], sorted((n, v) for n, v in entry.items() if n.endswith(("loss", "norm")))) for entry in log
    ]
    last = next(entry["loss"] for entry in reversed(log) if "loss" in entry)
    return f"losses {digest(losses)}  weights {of_weights(out)}  last loss {last:.6f}"


def quietly(run: Callable[[], str]) -> str:
    """What a training says, or the sentence that refuses it."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            return run()
        except ValueError as error:
            return f"refused: {str(error)[:150]}"


def run(form: Form, stage: str) -> str:
    """Trains a stage; returns what there is to compare."""
    out = form.place(stage)
    if stage == "sft":
        _, after, _ = sft(form)
        return f"weights {digest([(name, value.double().sum().item()) for name, value in after.items()])}"
    if stage == "adapt":
        moe.adapt_language(form.whole, out, form.text("ru"), moe.AdaptConfig(sample_tokens=200, **QUICK))
    elif stage in DENSE:
        moe.train_stage(form.base, out, {"el": form.text("el")}, moe.DenseConfig(**DENSE[stage], **QUICK))
    else:
        config, everything = STAGES[stage]
        newest = form.languages[1:] if form.joins else form.languages[-1:]
        data = {code: form.text(code) for code in (form.languages if everything or "dmoe" in form else newest)}
        moe.train_stage(form.whole, out, data, config(**QUICK))
    return said_of(out)


def main(root: Path) -> None:
    bases: set[Path] = set()
    for parts in FORMS:
        if refused(parts):
            continue
        form = Form(parts, root)
        dense = () if form.base in bases else DENSE
        bases.add(form.base)
        for stage in (*STAGES, "sft", *(["adapt"] if "dmoe" in form else []), *dense):
            print(f"{name_of(parts):<20} {stage:<14} {quietly(partial(run, form, stage))}", flush=True)


if __name__ == "__main__":
    os.environ |= {"CI": "true", "TQDM_DISABLE": "1"}
    warnings.simplefilter("ignore")
    disable_progress_bars()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))

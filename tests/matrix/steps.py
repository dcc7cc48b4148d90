"""Training steps of a form, in memory and from folder to folder."""

from pathlib import Path
from typing import Any

import torch
from conftest import checkpointed
from datasets import Dataset
from trl import SFTConfig

import hf_moe_expand as moe
from hf_moe_expand.stages.config import StageConfig
from matrix import oracles
from matrix.forms import ALPHABETS, Form, lines


def trainer_of(
    model: Any, form: Form, stage: type[StageConfig] | None = None, batch: int = 8, accumulation: int = 1,
    checkpointing: bool = False, **settings: Any,
) -> Any:  # fmt: skip
    """The Trainer of a stage, by default the form's first, for one step of plain gradient descent."""
    kind = stage or stage_of(form)
    arguments = kind(
        output_dir=str(form.root / "step"), per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation, max_steps=1, learning_rate=1.0, lr_scheduler_type="constant",
        optim="sgd", max_grad_norm=0.0, weight_decay=0.0, use_cpu=True, report_to="none", save_strategy="no",
        disable_tqdm=True, train_sampling_strategy="sequential", logging_steps=1, **checkpointed(checkpointing),
        **settings,
    )  # fmt: skip
    losses = None if stage else [moe.LanguagePriorLoss(0.5)] if "routed" in form else []
    return kind.trainer_class(
        model, args=arguments, train_dataset=form.once("blocks", lambda: blocks(form)), router_losses=losses,
        language_classes=[*range(len(form.languages))],
    )  # fmt: skip


def stage_of(form: Form) -> type[StageConfig]:
    return moe.JointConfig if "dmoe" in form else moe.PostPretrainConfig


def blocks(form: Form) -> Dataset:
    """Eight blocks of 12 tokens, each in one language, most in that of the last expansion; or pairs of sentences."""
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(5, 200, (8, 12), generator=draw)
    last = len(form.languages) - 1
    classes = [last, 0, last, last, min(1, last), 0, last, last]
    if "encoder-decoder" in form:
        sizes = [(12 - n, 5 + n % 3) for n in range(8)]
        return Dataset.from_dict({
            "input_ids": [ids[n, :a].tolist() for n, (a, _) in enumerate(sizes)],
            "labels": [ids[n, -b:].tolist() for n, (_, b) in enumerate(sizes)],
            "language_ids": [[number, 0] for number in classes],
        })  # fmt: skip
    return Dataset.from_dict({"input_ids": ids.tolist(), "language_ids": [[number] * 12 for number in classes]})


def step(form: Form, **cut: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Every parameter before and after one step."""
    model, before = form.copy(), dict(form.model.named_parameters())
    trainer_of(model, form, **cut).train()
    return {name: (before[name].detach(), value.detach()) for name, value in model.named_parameters()}


def whole_step(form: Form) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The step of one process and one batch, made once."""
    return form.once("step", lambda: step(form))


def train(form: Form, out: Path, stage: type[StageConfig] | None = None, **settings: Any) -> None:
    """Three steps of a stage, by default the form's first, from folder to folder."""
    kind = stage or stage_of(form)
    config = kind(
        block_size=16, max_steps=3, save_steps=2, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1,
        disable_tqdm=True, **settings,
    )  # fmt: skip
    languages = form.languages[1:] if form.joins else form.languages[-1:]
    data = {code: form.text(code) for code in (form.languages if "dmoe" in form or stage else languages)}
    moe.train_stage(form.folder, out, data, config)


def sft(form: Form) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Every parameter before and after a step of TRL's SFT, and the slow gradients."""
    model, tokenizer = form.copy(), form.tokenizer
    before = {name: value.detach() for name, value in form.model.named_parameters()}
    codes = [form.languages[-1], "en", form.languages[-1]]
    texts = [
        lines("abc" if "encoder-decoder" in form else ALPHABETS[code], 1, seed=31 + n)[0][: 12 + 3 * n]
        for n, code in enumerate(codes)
    ]
    rows = Dataset.from_dict({"text": texts, "language": codes})
    # TRL reads the head's weight itself, and a fine-tune has its own.
    size, steps = (1, 3) if "tuned" in form else (3, 1)
    batches = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps}
    arguments = SFTConfig(
        output_dir=str(form.root / "sft"), max_steps=1, learning_rate=1.0, optim="sgd", max_grad_norm=0.0,
        lr_scheduler_type="constant", train_sampling_strategy="sequential", **batches,
        max_length=64, use_cpu=True, bf16=False, report_to="none", save_strategy="no", disable_tqdm=True,
        **checkpointed(False),
    )  # fmt: skip
    trainer = moe.MoESFTTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    after = {name: value.detach() for name, value in model.named_parameters()}
    ids = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    classes = [form.languages.index(code) for code in codes] if "exclusive" in form else None
    return before, after, oracles.sft_step(form.copy(), ids, classes)

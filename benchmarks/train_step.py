"""Compares a training step of each stage with a full fine-tuning step of the dense base on the same tokens.

    python benchmarks/train_step.py --out train_step.md

The base has Qwen2's shape and 30 M parameters by default; its expansion has classifiers in the last third of the
layers. A step is the whole step of `Trainer`, `PostPretrainTrainer` or `ReviewTrainer`: forward, losses, backward,
clipping and AdamW, with float32 weights under bfloat16 autocast (`--dtype fp32`: without).

`FLOPs` are those of the matrix products that the step needs, as a multiple of full fine-tuning's: the limit of `time`.
Frozen weights need no gradient of their own, but the activations above the lowest router do. They are counted in an
eager step, which runs each expert on its own tokens.

Peak memory is that of the model and two steps in a separate process: resident memory without that of the imports, or
with cuda the memory that torch allocated. Linux only.
"""

import argparse
import contextlib
import sys
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from datasets import Dataset
from models import add_model_options, dense_config, dense_model, uniform_plan
from timing import in_own_process, parser, ratio, report, reset_peak, resident_bytes, synchronize
from torch.utils.flop_counter import FlopCounterMode
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_moe_expand import PostPretrainTrainer, ReviewTrainer, expand_model
from hf_moe_expand.data.packing import collate_blocks
from hf_moe_expand.demo.base import collate_without_languages

BASE = "full fine-tuning of the base"
TRAINERS = {BASE: Trainer, "post-pretrain": PostPretrainTrainer, "review": ReviewTrainer}


class StepTimer(TrainerCallback):
    """Measures the seconds of the last step. The first step allocates the optimizer's state, so run two."""

    def __init__(self, device: str) -> None:
        self.device, self.start, self.seconds = device, 0.0, 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        synchronize(self.device)
        self.start = perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        synchronize(self.device)
        self.seconds = perf_counter() - self.start


def make_model(case: str, options: argparse.Namespace) -> Any:
    """The base, or its expansion."""
    dense = dense_model(dense_config(options, options.layers), options.seed)
    if case == BASE:
        return dense
    plan = uniform_plan(options.layers, options.experts, options.layers // 3)
    return expand_model(dense, plan, seed=options.seed)


def train(case: str, model: Any, options: argparse.Namespace) -> float:
    """Runs two steps of a new trainer; returns the seconds of the second."""
    generator = torch.Generator().manual_seed(options.seed)
    ids = torch.randint(1, options.vocabulary, (options.batch, options.block), generator=generator)
    languages = torch.randint(0, 2, (options.batch, 1), generator=generator).expand(ids.shape)
    timer = StepTimer(options.device)
    # The trainers print to stdout, where this script prints only its table.
    with TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=options.batch,
            max_steps=2,
            learning_rate=5e-5,
            bf16=options.dtype == "autocast",
            use_cpu=options.device == "cpu",
            seed=options.seed,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        TRAINERS[case](
            model,
            args=arguments,
            train_dataset=Dataset.from_dict({"input_ids": ids.tolist(), "language_ids": languages.tolist()}),
            data_collator=collate_without_languages if case == BASE else collate_blocks,
            callbacks=[timer],
            **({} if case == BASE else {"language_classes": [0, 1]}),
        ).train()
    return timer.seconds


def count_flops(case: str, model: Any, options: argparse.Namespace) -> int:
    """FLOPs of the matrix products of two steps."""
    with FlopCounterMode(display=False) as counter:
        train(case, model, options)
    return counter.get_total_flops()


def peak_bytes(case: str, options: argparse.Namespace) -> int:
    """Peak memory in bytes of two steps; run it in a process of its own."""
    imports = resident_bytes()
    model = make_model(case, options)
    reset_peak()
    train(case, model, options)
    return torch.cuda.max_memory_allocated() if options.device == "cuda" else resident_bytes(peak=True) - imports


def main(arguments: list[str] | None = None) -> None:
    options_parser = parser(__doc__, repeats=7)
    add_model_options(options_parser, hidden=512, vocabulary=8192)
    options_parser.add_argument("--layers", type=int, default=8, help="decoder layers (%(default)s)")
    options_parser.add_argument("--batch", type=int, default=8, help="blocks in a step (%(default)s)")
    options_parser.add_argument("--block", type=int, default=256, help="tokens in a block (%(default)s)")
    options_parser.add_argument("--dtype", choices=["autocast", "fp32"], default="autocast", help="(%(default)s)")
    options = options_parser.parse_args(arguments)
    memory = {case: in_own_process(peak_bytes, case, options) for case in TRAINERS}
    models = {case: make_model(case, options) for case in TRAINERS}
    flops = {case: count_flops(case, model, options) for case, model in models.items()}
    times: dict[str, list[float]] = {case: [] for case in TRAINERS}
    for _ in range(options.repeats):
        for case, model in models.items():
            times[case].append(train(case, model, options))
    rows = [
        [
            case,
            f"{sum(p.numel() for p in model.parameters()):,}",
            f"{sum(p.numel() for p in model.parameters() if p.requires_grad):,}",
            f"{1000 * min(times[case]):.1f}",
            f"{ratio(times, case, BASE):.2f}",
            f"{flops[case] / flops[BASE]:.2f}",
            f"{memory[case] / 2**20:,.0f}",
            f"{memory[case] / memory[BASE]:.2f}",
        ]
        for case, model in models.items()
    ]
    head = ["step", "parameters", "trained", "ms", "time", "FLOPs", "peak MiB", "memory"]
    title = f"Training step, {options.layers} layers of {options.hidden}, {options.experts} experts"
    report(f"{title}, {options.batch} x {options.block} tokens, {options.dtype}", head, rows, options)


if __name__ == "__main__":
    main()

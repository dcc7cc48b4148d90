"""Compares a training step of each stage with a full fine-tuning step of the dense base on the same tokens.

    python benchmarks/train_step.py --out train_step.md

The base has Qwen2's shape and 30 M parameters by default; its expansion has classifiers in the last third of the
layers. A step is the whole step of `Trainer`, `PostPretrainTrainer` or `ReviewTrainer`: forward, losses, backward,
clipping and AdamW, with float32 weights under bfloat16 autocast (`--dtype fp32`: without). About half of the blocks are
of the new language; exclusive experts and adapters stand in all layers.

`--ways` adds rows: `default` runs the experts as they choose, `eager` one after the other.

`FLOPs` are those of the matrix products that the step needs, as a multiple of full fine-tuning's: the limit of `time`.
Frozen weights need no gradient of their own, but the activations above the lowest router do. They are counted in an
eager step, which runs each expert on its own tokens. `TFLOP/s` are these FLOPs, in 10^12, by the step's seconds.

Peak memory is that of the model and its steps: resident memory of a separate process without that of the imports, or
with cuda the memory that torch allocated. Linux only.
"""

import argparse
import contextlib
import gc
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from models import add_model_options, dense_config, dense_model, uniform_plan
from timing import CLOCKS, in_own_process, parser, ratio, report, reset_peak, resident_bytes, synchronize
from torch.utils.flop_counter import FlopCounterMode
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_moe_expand import Plan, PostPretrainConfig, PostPretrainTrainer, ReviewConfig, ReviewTrainer, expand_model
from hf_moe_expand.data.packing import collate_blocks
from hf_moe_expand.demo.pretraining import collate_without_languages

BASE = "full fine-tuning of the base"
EXCLUSIVE, ADAPTERS = "exclusive experts", "adapters of rank 16"
_POST_PRETRAIN = (PostPretrainTrainer, PostPretrainConfig)
STAGES = {
    "post-pretrain": _POST_PRETRAIN, "review": (ReviewTrainer, ReviewConfig), EXCLUSIVE: _POST_PRETRAIN,
    ADAPTERS: _POST_PRETRAIN,
}  # fmt: skip
KINDS = {EXCLUSIVE: {}, ADAPTERS: {"expert_kind": "adapter", "lora_rank": 16}}
TRAINERS = {BASE: (Trainer, TrainingArguments), **STAGES}
WAYS = ("default", "eager")
HEAD = ["step", "parameters", "trained", "ms", "time", "FLOPs", "TFLOP/s", "peak MiB", "memory"]


@dataclass(frozen=True)
class Case:
    """A row: a stage, and how its experts run (one of `WAYS`)."""

    stage: str
    way: str = "default"

    def __str__(self) -> str:
        return self.stage if self.way == "default" else f"{self.stage}, {self.way}"


class StepTimer(TrainerCallback):
    """Measures the seconds of the fastest step but the first, which allocates the optimizer's state."""

    def __init__(self, device: str, clock: str) -> None:
        self.device, self.clock, self.start, self.seconds = device, CLOCKS[clock], 0.0, math.inf

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        synchronize(self.device)
        self.start = self.clock()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        synchronize(self.device)
        if state.global_step > 1:
            self.seconds = min(self.seconds, self.clock() - self.start)


def make_model(case: Case, options: argparse.Namespace) -> Any:
    """The base, or its expansion."""
    dense = dense_model(dense_config(options, options.layers), options.seed, device=options.device)
    if case.stage == BASE:
        return dense
    if case.stage in KINDS:
        plan = Plan("moe-lpr", [2] * options.layers, old=["en"], new=["el"], exclusive=True)
    else:
        plan = uniform_plan(options.layers, options.experts, options.layers // 3)
    model = expand_model(dense, plan, seed=options.seed, **KINDS.get(case.stage, {}))
    for ffn in model.expanded_ffns().values():
        ffn.in_turn = case.way == "eager"
    return model


def train(case: Case, model: Any, options: argparse.Namespace) -> float:
    """Trains with a new trainer; returns the seconds of its fastest step."""
    generator = torch.Generator().manual_seed(options.seed)
    rows = options.batch * options.steps
    ids = torch.randint(1, options.vocabulary, (rows, options.block), generator=generator)
    languages = torch.randint(0, 2, (rows, 1), generator=generator).expand(ids.shape)
    timer = StepTimer(options.device, options.clock)
    # The trainers print to stdout, where this script prints only its table.
    with TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        trainer, settings = TRAINERS[case.stage]
        arguments = settings(
            output_dir=folder,
            per_device_train_batch_size=options.batch,
            max_steps=options.steps,
            learning_rate=5e-5,
            bf16=options.dtype == "autocast",
            use_cpu=options.device == "cpu",
            seed=options.seed,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        trainer(
            model,
            args=arguments,
            train_dataset=Dataset.from_dict({"input_ids": ids.tolist(), "language_ids": languages.tolist()}),
            data_collator=collate_without_languages if case.stage == BASE else collate_blocks,
            callbacks=[timer],
            **({} if case.stage == BASE else {"language_classes": [0, 1]}),
        ).train()
    return timer.seconds


def count_flops(stage: str, options: argparse.Namespace) -> int:
    """FLOPs of the matrix products of all steps."""
    case = Case(stage, "eager")
    model = make_model(case, options)
    with FlopCounterMode(display=False) as counter:
        train(case, model, options)
    return counter.get_total_flops()


def peak_bytes(case: Case, options: argparse.Namespace) -> int:
    """Peak resident memory in bytes of the model and its steps; run it in a process of its own."""
    imports = resident_bytes()
    model = make_model(case, options)
    reset_peak()
    train(case, model, options)
    return resident_bytes(peak=True) - imports


def rows(options: argparse.Namespace) -> Iterator[list[list[str]]]:
    """Yields the row of each case once its last round is over."""
    ways = {stage: ["default"] if stage in KINDS else options.ways for stage in STAGES}  # those have one way
    cases = [Case(BASE), *(Case(stage, way) for stage in STAGES for way in ways[stage])]
    on_cpu = options.device == "cpu"
    memory = {case: in_own_process(peak_bytes, case, options) for case in cases if on_cpu}
    flops = {stage: count_flops(stage, options) for stage in TRAINERS}
    times: dict[str, list[float]] = {str(case): [] for case in cases}
    for turn in range(options.repeats):
        for case in cases:
            model = make_model(case, options)
            if not on_cpu:
                gc.collect()
                torch.cuda.reset_peak_memory_stats()
            times[str(case)].append(train(case, model, options))
            if not on_cpu:
                memory[case] = torch.cuda.max_memory_allocated()
            if turn + 1 == options.repeats:
                row = [
                    str(case),
                    f"{sum(p.numel() for p in model.parameters()):,}",
                    f"{sum(p.numel() for p in model.parameters() if p.requires_grad):,}",
                    f"{1000 * min(times[str(case)]):.1f}",
                    f"{ratio(times, str(case), BASE):.2f}",
                    f"{flops[case.stage] / flops[BASE]:.2f}",
                    f"{flops[case.stage] / options.steps / min(times[str(case)]) / 1e12:.3g}",
                    f"{memory[case] / 2**20:,.0f}",
                    f"{memory[case] / memory[cases[0]]:.2f}",
                ]
                yield [row]
            del model


def title(options: argparse.Namespace) -> str:
    """What the table shows."""
    shape = f"{options.layers} layers of {options.hidden}, {options.experts} experts"
    return f"Training step, {shape}, {options.batch} x {options.block} tokens, {options.dtype}"


def options_parser() -> argparse.ArgumentParser:
    """The script's options."""
    found = parser(__doc__, repeats=7)
    add_model_options(found, hidden=512, vocabulary=8192)
    found.add_argument("--layers", type=int, default=8, help="decoder layers (%(default)s)")
    found.add_argument("--batch", type=int, default=8, help="blocks in a step (%(default)s)")
    found.add_argument("--block", type=int, default=256, help="tokens in a block (%(default)s)")
    found.add_argument("--steps", type=int, default=2, help="steps of a trainer; the first is not timed (%(default)s)")
    found.add_argument("--dtype", choices=["autocast", "fp32"], default="autocast", help="(%(default)s)")
    found.add_argument("--ways", choices=WAYS, nargs="+", default=["default"], help="(default)")
    return found


def main(arguments: list[str] | None = None) -> None:
    options = options_parser().parse_args(arguments)
    report(title(options), HEAD, list(chain.from_iterable(rows(options))), options)


if __name__ == "__main__":
    main()

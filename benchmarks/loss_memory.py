"""Peak memory and time of a training step of a stage, with the loss in pieces and with that of the whole logits.

    python benchmarks/loss_memory.py MODEL --stage post-pretrain --batch 8 --block 1024 --ways pieces

MODEL is an expanded checkpoint. A row is one step of `PostPretrainConfig` or `ReviewConfig` (with self-distillation) on
random tokens, half of them old, in a process of its own: the peak of its resident memory, imports counted, and the
processor seconds of its training. Linux only.
"""

import contextlib
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

import torch
from datasets import Dataset
from timing import in_own_process, parser, report, resident_bytes

from hf_moe_expand import PostPretrainConfig, PostPretrainTrainer, ReviewConfig, ReviewTrainer
from hf_moe_expand.checkpoint.records import History
from hf_moe_expand.checkpoint.source import load_expanded_config
from hf_moe_expand.modeling import auto_class
from hf_moe_expand.trainers import pieces

WAYS = ("pieces", "whole")
STAGES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "post-pretrain": (PostPretrainTrainer, PostPretrainConfig, {}),
    "review": (ReviewTrainer, ReviewConfig, {"distillation_coef": 1.0, "classifier_coef": 0.0}),
}
HEAD = ["stage", "loss", "tokens", "peak GB", "CPU s"]


def step(way: str, options: Any) -> tuple[int, float]:
    """The peak of resident memory in bytes, and the processor seconds of a step."""
    torch.set_num_threads(options.threads)
    if way == "whole":
        pieces.LARGE = sys.maxsize
    trainer_class, config_class, own = STAGES[options.stage]
    config = load_expanded_config(options.model)
    torch.manual_seed(options.seed)
    ids = torch.randint(config.vocab_size, (options.batch, options.block))
    old = History.of(config).languages.index(History.of(config).first.new_languages[0])
    languages = torch.full_like(ids, old)
    languages[: options.batch // 2] = 0
    with TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        arguments = config_class(
            folder, block_size=options.block, per_device_train_batch_size=options.batch, max_steps=1, use_cpu=True,
            save_strategy="no", disable_tqdm=True, **own,
        )  # fmt: skip
        trainer = trainer_class(
            auto_class(config).from_pretrained(options.model, dtype=torch.float32),
            arguments,
            train_dataset=Dataset.from_dict({"input_ids": ids.tolist(), "language_ids": languages.tolist()}),
        )
        started = process_time()
        trainer.train()
    return resident_bytes(peak=True), process_time() - started


def main(arguments: list[str] | None = None) -> None:
    found = parser(__doc__, repeats=1, on_device=False)
    found.add_argument("model", type=Path, help="expanded checkpoint")
    found.add_argument("--stage", choices=list(STAGES), default="post-pretrain", help="(%(default)s)")
    found.add_argument("--batch", type=int, default=8, help="blocks at a time (%(default)s)")
    found.add_argument("--block", type=int, default=1024, help="tokens in a block (%(default)s)")
    found.add_argument("--threads", type=int, default=2, help="(%(default)s)")
    found.add_argument("--ways", choices=WAYS, nargs="+", default=list(WAYS), help="(both)")
    options = found.parse_args(arguments)
    rows = []
    for way in options.ways:
        peak, seconds = in_own_process(step, way, options)
        rows.append([options.stage, way, f"{options.batch} x {options.block}", f"{peak / 1e9:.1f}", f"{seconds:.0f}"])
    report("A training step", HEAD, rows, options)


if __name__ == "__main__":
    main()

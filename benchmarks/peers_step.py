"""Times training steps of one case in this process, and prints the figures as JSON.

    python benchmarks/peers_step.py CASE BASE --batch 8 --block 256 --steps 4

For `peers.py`, which runs it in the environment of each tool: the cases `full` and `peft` import nothing of this
package. The loop, the text and the measuring are the same in every case. BASE is a dense Llama.
"""

import argparse
import contextlib
import json
import sys
from importlib import import_module
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
import transformers
from datasets import Dataset
from timing import reset_peak, resident_bytes
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

# Stage and expert kind of our cases.
OURS = {
    "post-pretrain-ffn": ("post-pretrain", "ffn"),
    "post-pretrain-lora": ("post-pretrain", "lora"),
    "review-ffn": ("review", "ffn"),
    "review-lora": ("review", "lora"),
}


class StepTimer(TrainerCallback):
    """Collects the seconds of each step."""

    def __init__(self) -> None:
        self.start = 0.0
        self.seconds: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.start = perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds.append(perf_counter() - self.start)


def import_tool(case: str) -> Any:
    """The tool's module, imported before memory is measured; transformers itself for full fine-tuning."""
    tool = import_module({"full": "transformers", "peft": "peft"}.get(case, "hf_moe_expand"))
    if case in OURS:  # the package imports these on first use
        _ = tool.Plan, tool.expand_model, tool.PostPretrainTrainer, tool.ReviewTrainer
    return tool


def trainer_of(case: str, dense: Any, tool: Any, options: argparse.Namespace) -> tuple[type, Any, dict[str, Any]]:
    """The trainer class of a case, its model, and its arguments beside those that all cases share."""
    if case == "full":
        return Trainer, dense, {}
    if case == "peft":
        # PEFT's usual choice: every linear layer but the output head, scaled by alpha / rank = 2.
        config = tool.LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear")
        return Trainer, tool.get_peft_model(dense, config), {}
    stage, kind = OURS[case]
    layers = dense.config.num_hidden_layers
    plan = tool.Plan("moe-lpr", [options.experts] * layers, old=["en"], new=["el"])
    lora = {"expert_kind": "lora", "lora_rank": options.rank, "lora_alpha": 2 * options.rank} if kind == "lora" else {}
    model = tool.expand_model(dense, plan, seed=options.seed, **lora)
    trainer = tool.PostPretrainTrainer if stage == "post-pretrain" else tool.ReviewTrainer
    return trainer, model, {"language_classes": [0, 1]}


def blocks(options: argparse.Namespace, vocabulary: int) -> Dataset:
    """A batch of random tokens for each step, a language a block."""
    generator = torch.Generator().manual_seed(options.seed)
    ids = torch.randint(1, vocabulary, (options.batch * options.steps, options.block), generator=generator)
    languages = torch.randint(0, 2, (len(ids), 1), generator=generator).expand(ids.shape)
    return Dataset.from_dict({"input_ids": ids.tolist(), "labels": ids.tolist(), "language_ids": languages.tolist()})


def measured(case: str, base: str, options: argparse.Namespace) -> dict[str, Any]:
    """Median seconds of the steps after the first, peak bytes above those of the imports, and parameters."""
    tool = import_tool(case)
    imports = resident_bytes()
    dense = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    trainer_class, model, arguments = trainer_of(case, dense, tool, options)
    data = blocks(options, dense.config.vocab_size)
    timer = StepTimer()
    with TemporaryDirectory() as folder:
        training = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=options.batch,
            max_steps=options.steps,
            learning_rate=5e-5,
            bf16=options.dtype == "autocast",
            use_cpu=True,
            seed=options.seed,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        if case not in OURS:
            data = data.remove_columns("language_ids")
        reset_peak()
        trainer_class(
            model, args=training, train_dataset=data, data_collator=transformers.default_data_collator,
            callbacks=[timer], **arguments,
        ).train()  # fmt: skip
    return {
        "seconds": median(timer.seconds[1:]),
        "peak": resident_bytes(peak=True) - imports,
        "parameters": sum(p.numel() for p in model.parameters()),
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "tool": f"{tool.__name__} {tool.__version__}",
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=["full", "peft", *OURS])
    parser.add_argument("base")
    parser.add_argument("--batch", type=int, default=8, help="blocks in a step (%(default)s)")
    parser.add_argument("--block", type=int, default=256, help="tokens in a block (%(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="the first is not timed (%(default)s)")
    parser.add_argument("--experts", type=int, default=2, help="experts of each layer, expert 0 counted (%(default)s)")
    parser.add_argument("--rank", type=int, default=16, help="rank of LoRA (%(default)s)")
    parser.add_argument("--dtype", choices=["autocast", "fp32"], default="autocast", help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    options = parser.parse_args(arguments)
    with contextlib.redirect_stdout(sys.stderr):  # the trainers print
        found = measured(options.case, options.base, options)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

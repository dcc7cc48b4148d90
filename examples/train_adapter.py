"""A LoRA of every linear layer, with PEFT and TRL's SFTTrainer alone: `expand --tuned` makes a language of it.

    python examples/train_adapter.py Qwen/Qwen2.5-0.5B adapter-el --data el.jsonl --steps 500
    hf-moe-expand expand Qwen/Qwen2.5-0.5B qwen-el --tuned el=adapter-el --old en

A row of `el.jsonl` has a `text`.
"""

import argparse

import torch
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("base", help="dense checkpoint")
parser.add_argument("out", help="folder to write")
parser.add_argument("--data", required=True, help=".jsonl file")
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--rank", type=int, default=16)
parser.add_argument("--max-length", type=int, default=256)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--gradient-checkpointing", action="store_true", help="less memory, a third more time")
asked = parser.parse_args()

trainer = SFTTrainer(
    asked.base,
    SFTConfig(
        asked.out,
        max_steps=asked.steps,
        max_length=asked.max_length,
        packing=True,
        packing_strategy="wrapped",  # the default leaves out what of a document is longer than max_length
        per_device_train_batch_size=asked.batch_size,
        gradient_checkpointing=asked.gradient_checkpointing,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        use_cpu=not torch.accelerator.is_available(),
        bf16=torch.accelerator.is_available(),
        save_strategy="no",
        logging_steps=10,
        report_to="none",
    ),
    train_dataset=load_dataset("json", data_files=asked.data, split="train").select_columns("text"),
    peft_config=LoraConfig(r=asked.rank, lora_alpha=2 * asked.rank, target_modules="all-linear", task_type="CAUSAL_LM"),
)
trainer.train()
trainer.save_model()

"""Supervised fine-tuning with TRL, the load-balancing loss and the language-prior loss.

    python examples/train_trl.py qwen-el-2 qwen-el-chat --data chat.jsonl --steps 500

A row of `chat.jsonl` has a `prompt` and a `completion` (or other columns that TRL takes), and its `language`.
"""

import argparse

import torch
from datasets import load_dataset
from trl import SFTConfig

from hf_moe_expand import BalanceLoss, LanguagePriorLoss, MoESFTTrainer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", help="expanded checkpoint")
parser.add_argument("out", help="folder to write")
parser.add_argument("--data", required=True, help=".jsonl file")
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--max-length", type=int, default=1024)
asked = parser.parse_args()

# TRL's SFTTrainer, with the router losses and the column `language`.
trainer = MoESFTTrainer(
    asked.model,  # its config.json names old and new languages
    SFTConfig(
        asked.out,
        max_steps=asked.steps,
        max_length=asked.max_length,
        learning_rate=1e-5,
        trust_remote_code=True,  # the checkpoint contains the model's code
        use_cpu=not torch.accelerator.is_available(),
        bf16=torch.accelerator.is_available(),
        report_to="none",
    ),
    train_dataset=load_dataset("json", data_files=asked.data, split="train"),
    router_losses=[BalanceLoss(0.01), LanguagePriorLoss(0.1)],
)
# The training, and the checkpoint with its code and tokenizer.
trainer.train()
trainer.save_model()

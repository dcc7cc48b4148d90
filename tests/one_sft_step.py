"""One optimizer step of MoESFTTrainer on fixed text, alone or on ranks: `one_sft_step.py OUT.pt '{...}'`."""

import json
import os
import sys

import torch
from conftest import byte_tokenizer, checkpointed, save_dense
from datasets import Dataset, disable_progress_bars
from one_step import build
from peft import LoraConfig
from trl import SFTConfig

from hf_moe_expand import BalanceLoss, ClassifierLoss, LanguagePriorLoss, MoESFTTrainer, Plan, expand_checkpoint
from hf_moe_expand.stages.distributed import leave_ranks

TEXTS = [
    ("en", "Good day. ", "Hello!"), ("el", "Καλημέρα. ", "Γεια!"), ("el", "Πώς; ", "Καλά."), (None, "1 + 1 = ", "2"),
    ("en", "a", "bcd"), ("tr", "Günaydın, nasılsın? ", "İyiyim."), ("en", "Say more, please: ", "No"),
    ("el", "Ν", "α, όχι."),
]  # fmt: skip
ROWS = [dict(zip(("language", "prompt", "completion"), row, strict=True)) for row in TEXTS]
LANGUAGES = {"en": 0, "el": 1, "tr": 1}
# LoRA on every linear layer of the new experts; of expert 0 and of attention nothing.
NEW_EXPERTS = {"target_modules": "all-linear", "exclude_modules": r"(?!.*\.experts\.[1-9]).*"}


def save_expanded(folder, backbone="qwen2"):
    """A checkpoint of a model expanded for Greek and Turkish, with its tokenizer."""
    base = save_dense(folder / "base", backbone)
    plan = Plan("moe-lpr", [3, 1, 2], [2], old=["en"], new=["el", "tr"])
    expand_checkpoint(base, folder / "out", plan)
    return folder / "out"


def settings(folder, kind=SFTConfig, **changes):
    """Plain gradient descent, one step, logged; learning rate 1, so that parameters move by the gradient."""
    fixed = {
        "max_steps": 1, "learning_rate": 1.0, "optim": "sgd", "max_grad_norm": 0.0, "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 8, "train_sampling_strategy": "sequential", "max_length": 64, "use_cpu": True,
        "bf16": False, **checkpointed(False), "report_to": "none", "save_strategy": "no",
        "logging_steps": 1, "disable_tqdm": True,
    }  # fmt: skip
    return kind(output_dir=str(folder), **{**fixed, **changes})


def lora(**changes):
    """LoRA that changes the model's output from the start, as a trained one does."""
    return LoraConfig(**{"r": 4, "init_lora_weights": False, "task_type": "CAUSAL_LM", **changes})


def trainer(folder, rows=ROWS, model=None, balance=0.0, prior=0.0, classifier=0.0, adapter=None, **changes):
    losses = [BalanceLoss(balance), LanguagePriorLoss(prior), ClassifierLoss(classifier)]
    return MoESFTTrainer(
        build() if model is None else model, settings(folder, **changes), train_dataset=Dataset.from_list(rows),
        processing_class=byte_tokenizer(), router_losses=losses, peft_config=adapter, language_classes=LANGUAGES,
    )  # fmt: skip


def train(folder, logs=None, **options):
    """The parameters after the step."""
    one = trainer(folder, **options)
    one.train()
    if logs is not None:
        logs.update(one.state.log_history[0])
    return {name: parameter.detach().clone() for name, parameter in one.model.named_parameters()}


if __name__ == "__main__":
    disable_progress_bars()
    out, options = sys.argv[1], json.loads(sys.argv[2])
    parameters = train(out + ".run", **options)
    if int(os.environ.get("RANK", "0")) == 0:
        torch.save(parameters, out)
    leave_ranks()

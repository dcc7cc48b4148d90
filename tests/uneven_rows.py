"""Seven rows with labels on very different numbers of tokens, the Trainers that score them, and the slow loss."""

import torch
import torch.nn.functional as F
from conftest import byte_tokenizer, checkpointed, tiny_dense
from datasets import Dataset
from transformers import Trainer, TrainingArguments
from trl import SFTConfig

import hf_moe_expand as moe
from hf_moe_expand.stages.kinds.dense import DenseTrainer

PRIOR = 0.3
KINDS = ("review", "exclusive", "dense", "sft", "plain", "own loss")
SETTINGS = ((3, 7), (1, 5), (4, 1))  # rows in a batch, and in all


def model_of(kind):
    if kind == "dense":
        return tiny_dense("qwen2")
    plan = moe.Plan("moe-lpr", [1, 2, 2], old=["en"], new=["el"], exclusive=kind == "exclusive")
    model, draw = moe.expand_model(tiny_dense("qwen2"), plan), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for ffn in model.expanded_ffns().values():
            for parameter in [*ffn.experts[1].parameters(), *(() if ffn.router is None else ffn.router.parameters())]:
                parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.3)
    return model.eval()


def uneven_rows(count=7, masked=()):
    """Rows of 16 tokens, the first with labels on its last three, each later one on two more."""
    draw = torch.Generator().manual_seed(4)
    ids = torch.randint(0, 250, (count, 16), generator=draw).tolist()
    first = [16 if row in masked else 13 - 2 * row for row in range(count)]
    labels = [[-100] * at + row[at:] for at, row in zip(first, ids, strict=True)]
    return Dataset.from_dict(
        {"input_ids": ids, "labels": labels, "language_ids": [[row % 2] * 16 for row in range(count)]}
    )


def slow_loss(model, kind, rows):
    """The mean over all targets, each row alone; then over all old tokens of the language-prior loss."""
    nats, targets, prior, old = 0.0, 0, 0.0, 0
    for row in rows:
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])[1:]
        told = {"languages": ["en", "el"][row["language_ids"][0]]} if kind == "exclusive" else {}
        with torch.no_grad():
            if kind == "review":
                with model.capture_routing() as routing:
                    logits = model(ids).logits[0, :-1]
                if row["language_ids"][0] == 0:
                    scores = [layer.router_logits.log_softmax(-1)[:, 0].sum().item() for layer in routing]
                    prior, old = prior - sum(scores) / len(scores), old + 16
            else:
                logits = model(ids, **told).logits[0, :-1]
        nats += F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum").item()
        targets += int((labels != -100).sum())
    return nats / targets + (PRIOR * prior / old if old else 0.0)


class Plain(moe.RouterLossMixin, Trainer):
    pass


def own_loss(outputs, labels, num_items_in_batch=None):
    logits, targets = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum") / num_items_in_batch


def scoring(kind, folder, batch, rows):
    """A Trainer that scores the rows, so many at a time."""
    model = model_of(kind)
    settings = {
        "per_device_eval_batch_size": batch, "max_steps": 1, "use_cpu": True, "report_to": "none", "disable_tqdm": True,
        "save_strategy": "no",
    }  # fmt: skip
    if kind == "review":
        losses, config = [moe.LanguagePriorLoss(PRIOR)], moe.ReviewConfig(folder, block_size=16, **settings)
        return moe.ReviewTrainer(model, config, train_dataset=rows, eval_dataset=rows, router_losses=losses)
    if kind in ("exclusive", "own loss"):
        config = moe.PostPretrainConfig(folder, block_size=16, **settings)
        own = {"compute_loss_func": own_loss} if kind == "own loss" else {}
        return moe.PostPretrainTrainer(model, config, train_dataset=rows, eval_dataset=rows, router_losses=[], **own)
    rows = rows.remove_columns("language_ids")
    if kind == "dense":
        return DenseTrainer(model, moe.DenseConfig(folder, block_size=16, **settings), moe.collate_blocks, rows, rows)
    if kind == "sft":
        config = SFTConfig(str(folder), bf16=False, **checkpointed(False), **settings)
        return moe.MoESFTTrainer(
            model, config, train_dataset=rows, eval_dataset=rows, processing_class=byte_tokenizer(), router_losses=[]
        )
    return Plain(model, TrainingArguments(str(folder), **settings), moe.collate_blocks, rows, rows, router_losses=[])


def scores(folder):
    """`eval_loss` and, where it is logged, `eval_next_token_loss`, by kind, rows in a batch and rows in all."""
    found = {}
    for kind in KINDS:
        for batch, count in SETTINGS:
            one = scoring(kind, folder / "scored", batch, uneven_rows(count)).evaluate()
            found[kind, batch, count] = [one["eval_loss"], one.get("eval_next_token_loss")]
    return found

"""One optimizer step of a stage trainer on fixed data, alone or on ranks: `one_step.py OUT.pt '{...settings}'`."""

import json
import os
import sys

import torch
from conftest import checkpointed, tiny_config
from datasets import Dataset
from torch.distributed.tensor import DTensor

import hf_moe_expand as moe
from hf_moe_expand.stages.distributed import leave_ranks

PAD = 256


def rows():
    """Eight blocks of 12 tokens with very uneven shares of old (0), new (1) and unknown (-1) languages."""
    torch.manual_seed(3)
    ids = torch.randint(0, 250, (8, 12))
    languages = torch.tensor([[0] * old + [1] * (12 - old) for old in (12, 0, 1, 0, 7, 3, 0, 12)])
    languages[3, 4:6] = -1
    return ids, languages


def collate_padded(batch):
    """The same tokens, six more of padding behind them."""
    found = moe.collate_blocks(batch)
    found["attention_mask"] = torch.ones_like(found["input_ids"])
    values = {"input_ids": PAD, "labels": -100}
    return {name: torch.nn.functional.pad(ids, (0, 6), value=values.get(name, 0)) for name, ids in found.items()}


def build(backbone="qwen2", vocab_size=257, **fields):
    """The model before the step; `fields` of its configuration."""
    torch.manual_seed(0)
    config = moe.LayerMoEConfig.from_dense(
        tiny_config(backbone, vocab_size=vocab_size), num_experts_per_layer=[3, 1, 4], classifier_layers=[0, 2],
        router_top_k=2, **fields,
    )  # fmt: skip
    model = moe.LayerMoEForCausalLM(config)
    with torch.no_grad():
        for ffn in model.expanded_ffns().values():
            ffn.router.weight.normal_()
            ffn.classifier.weight.normal_()
    return model


def train(
    folder, stage="review", balance=0.0, prior=0.1, classifier=0.1, batch=8, steps=1, padded=False, checkpointing=False,
    same=False, halves=False, everything=False, backbone="qwen2", logs=None, model=None, save=None, localized=0.0,
    budget=0.0, distillation=0.0, fields=None, losses=None, scored=0,
):  # fmt: skip
    model = build(backbone, **fields or {}) if model is None else model
    ids, languages = rows()
    if same:  # every micro-batch holds the same two blocks
        ids, languages = ids[:2].repeat(4, 1), languages[:2].repeat(4, 1)
    if halves:
        ids = in_halves(ids)
    dataset = Dataset.from_dict({"input_ids": ids.tolist(), "language_ids": languages.tolist()})
    name = "Review" if stage == "review" else "PostPretrain"
    kind, config = getattr(moe, f"{name}Trainer"), getattr(moe, f"{name}Config")
    arguments = config(
        output_dir=folder, per_device_train_batch_size=batch, gradient_accumulation_steps=steps, max_steps=1,
        learning_rate=1.0, lr_scheduler_type="constant", optim="sgd", max_grad_norm=0.0, weight_decay=0.0, use_cpu=True,
        report_to="none", save_strategy="no", logging_steps=1, disable_tqdm=True, per_device_eval_batch_size=2,
        train_sampling_strategy="sequential", **checkpointed(checkpointing),
        **({"everything": True} if everything else {}),
    )  # fmt: skip
    if losses is None:
        losses = [moe.BalanceLoss(balance), moe.LanguagePriorLoss(prior), moe.GateBudgetLoss(budget)]
        losses += [moe.LocalizedBalanceLoss(localized), moe.ClassifierLoss(classifier)]
        losses += [moe.DistillationLoss(distillation)] if distillation else []
    trainer = kind(
        model, args=arguments, train_dataset=dataset, data_collator=collate_padded if padded else moe.collate_blocks,
        router_losses=losses, language_classes=[0, 1],
    )  # fmt: skip
    scores = {}
    if scored:
        trainer.evaluate(dataset.select(range(scored)))
        found = {name: value for name, value in trainer.state.log_history.pop().items() if name.startswith("eval_")}
        scores = {name: torch.tensor(found[name]) for name in found if not name.endswith(("time", "second"))}
    trainer.train()
    if logs is not None:
        logs.update(trainer.state.log_history[0])
    if save:
        trainer.save_model(save)
    return scores | {name: full(parameter) for name, parameter in model.named_parameters()}


def assert_same(a, b, **tolerances):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], msg=name, **(tolerances or {"rtol": 1e-4, "atol": 1e-6}))


def largest_difference(a, b):
    return max((a[name] - b[name]).abs().max().item() for name in a)


def in_halves(ids):
    """Blocks whose first four hold other tokens (below 125) than the last four."""
    return ids // 2 + 125 * (torch.arange(8) >= 4).unsqueeze(-1)


def full(parameter):
    """A copy of the whole parameter, where ranks hold a part of it each."""
    value = parameter.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value.clone()


if __name__ == "__main__":
    out, settings = sys.argv[1], json.loads(sys.argv[2])
    parameters = train(out + ".run", **settings)
    if int(os.environ.get("RANK", "0")) == 0:
        torch.save(parameters, out)
    leave_ranks()

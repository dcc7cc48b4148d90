"""Exclusive experts: a token of a new language takes its expert alone, from the plan to training, growth and export."""

import copy

import pytest
import torch
from conftest import byte_tokenizer, checkpointed, load, move, refused, tiny_dense
from datasets import Dataset
from gated_models import all_go_to, gated_model, tokens
from peft import PromptTuningConfig, get_peft_model
from transformers import Trainer, TrainingArguments
from trl import SFTConfig

from hf_moe_expand import (
    LanguagePriorLoss,
    MoESFTTrainer,
    Plan,
    PostPretrainConfig,
    PostPretrainTrainer,
    RouterLossMixin,
    expand_checkpoint,
    expand_model,
    grow_checkpoint,
    join_expansions,
)
from hf_moe_expand.analysis.routers import measure_routing
from hf_moe_expand.checkpoint.export import export_dense
from hf_moe_expand.checkpoint.merge import average_checkpoints
from hf_moe_expand.data.packing import collate_blocks
from hf_moe_expand.report.inspection import inspect_config

PLAN = Plan("moe-lpr", [2, 2, 2], old=["en"], new=["el"], exclusive=True)
IDS = tokens(2, 12)
QUICK = {"max_steps": 1, "use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}


@pytest.fixture(scope="module")
def el(base, tmp_path_factory):
    """A checkpoint whose exclusive experts are those of Greek."""
    folder = tmp_path_factory.mktemp("packs") / "qwen-el"
    expand_checkpoint(base, folder, PLAN)
    return move(folder)


def one_step(folder, model, ids, languages, classes=(0, 1), **options):
    """A step of plain SGD with learning rate 1 on these blocks, by the stage's own trainer."""
    dataset = Dataset.from_dict({"input_ids": ids.tolist(), "language_ids": languages.tolist()})
    arguments = PostPretrainConfig(
        output_dir=folder, per_device_train_batch_size=len(ids), learning_rate=1.0, optim="sgd",
        lr_scheduler_type="constant", max_grad_norm=0.0, **QUICK, **options,
    )  # fmt: skip
    trainer = PostPretrainTrainer(
        model, args=arguments, train_dataset=dataset, data_collator=collate_blocks, language_classes=list(classes)
    )
    trainer.train()
    return model, trainer.state.log_history[0]


def blocks(*languages: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One block of 12 tokens in each language."""
    ids = tokens(len(languages), 12, seed=4)
    return ids, torch.tensor(languages).unsqueeze(1).expand_as(ids).clone()


@pytest.mark.parametrize(("experts", "top_k"), [(3, 2), (4, 2), (3, 1)])
def test_the_experts_of_a_class_are_balanced_among_themselves(tmp_path, experts, top_k):
    """Where a class has no more than K experts there is no balance, and its router learns from the text alone."""
    plan = Plan("moe-lpr", [experts] * 3, old=["en"], new=["el"], exclusive=True, top_k=top_k)
    model = expand_model(tiny_dense("qwen2"), plan, seed=1)
    ids, languages = blocks(1, 0, 1, 1)
    with torch.no_grad(), model.capture_routing() as seen:
        model(ids, languages=["el", "en", "el", "el"])
    steps = {}
    for coef in (0.0, 0.5):
        options = {"balance_coef": coef, "replay": True, "logging_steps": 1}
        steps[coef], log = one_step(tmp_path, copy.deepcopy(model), ids, languages, **options)
    changed = any(
        not torch.allclose(one, other, rtol=0, atol=1e-6)
        for one, other in zip(*(m.parameters() for m in steps.values()), strict=True)
    )
    assert changed == (experts - 1 > top_k)
    shares = [log.get(f"expert_{expert}_share") for expert in range(experts)]
    assert (shares[0] is not None) == ("balance_loss" in log) == changed
    if changed:
        taken = torch.zeros(experts)
        for layer in seen.layers.values():
            for expert in layer.experts[layer.experts < experts]:
                taken[expert] += 1
        assert shares == pytest.approx((taken / taken.sum()).tolist(), abs=1e-5)
        assert shares[0] > 0
    assert (log["expert_0_score_new"], log["expert_0_score_old"]) == (0, 1)


def test_old_text_that_the_gate_sends_astray_leaves_the_scores_finite(tmp_path):
    """The language-prior loss is logged, with coefficient 0, and such a token has no score of expert 0."""
    model = gated_model(expansions=[(3, 3, 3)], exclusive=True)
    all_go_to(model, 1)
    ids, languages = blocks(0, 0)
    dataset = Dataset.from_dict({"input_ids": ids.tolist(), "language_ids": languages.tolist()})
    given = {"args": PostPretrainConfig(str(tmp_path), **QUICK), "eval_dataset": dataset, "language_classes": [0, 1]}
    found = PostPretrainTrainer(model, **given).evaluate()
    assert found["eval_expert_0_score_old"] == 0  # all went astray
    assert found["eval_language_prior_loss"] == 0
    assert found["eval_loss"] == pytest.approx(found["eval_next_token_loss"], abs=0.1)  # and the balance


def test_virtual_tokens_have_their_rows_class(tmp_path):
    """Of prompt tuning, in training: old rows behind virtual tokens run expert 0 alone."""
    plan = Plan("moe-lpr", [3] * 3, old=["en"], new=["el"], exclusive=True)
    prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = get_peft_model(expand_model(tiny_dense("qwen2"), plan), prompt)

    class OwnTrainer(RouterLossMixin, Trainer):
        pass

    ids, languages = blocks(0, 0, 1, 1)
    rows = {"input_ids": ids.tolist(), "labels": ids.tolist(), "language_ids": languages.tolist()}
    arguments = TrainingArguments(str(tmp_path), per_device_train_batch_size=4, logging_steps=1, **QUICK)
    trainer = OwnTrainer(
        model, arguments, train_dataset=Dataset.from_dict(rows), router_losses=[LanguagePriorLoss(0.1)],
        language_classes=[0, 1], data_collator=collate_blocks,
    )  # fmt: skip
    trainer.train()
    log = trainer.state.log_history[0]
    assert (log["expert_0_score_old"], log["expert_0_score_new"], log["language_prior_loss"]) == (1, 0, 0)
    assert log["loss"] == pytest.approx(log["next_token_loss"], abs=1e-3)


@pytest.mark.parametrize("count", [1, 3], ids=["one", "three"])
def test_a_later_language_leaves_the_choice_of_an_earlier_one(base, tmp_path, count):
    """Its rows of the shared router stay; and all of it, where the later language has no choice."""
    first = Plan("moe-lpr", [4] * 3, old=["en"], new=["el"], exclusive=True)
    expand_checkpoint(base, tmp_path / "el", first)
    counts = [4 + count] * 3
    later = Plan("moe-lpr", counts, old=["en", "el"], new=["tr"], grows_from=[4] * 3, exclusive=True)
    grow_checkpoint(tmp_path / "el", tmp_path / "tr", later)
    model, before = load(tmp_path / "tr"), load(tmp_path / "tr")
    options = {"replay": True, "balance_coef": 0.5, "weight_decay": 0.1}
    one_step(tmp_path, model, *blocks(2, 2, 1, 0), (0, 1, 2), **options)
    with torch.no_grad():
        told = [one.eval()(IDS, languages="el").logits for one in (model, before)]
    assert torch.equal(*told)
    moved = not torch.equal(*(one.expanded_ffns()[0].router.weight for one in (model, before)))
    assert moved == (count > 1)


@torch.no_grad()
def test_routed_and_exclusive_experts_do_not_meet(base, el, tmp_path):
    routed, out, plan = tmp_path / "routed", tmp_path / "out", {"old": ["en", "el"], "grows_from": [2, 2, 2]}
    expand_checkpoint(base, routed, Plan("moe-lpr", [2, 2, 2], old=["en"], new=["el"]))
    said = "the plan's experts are exclusive, but its own are not: plan without"
    refused(grow_checkpoint, routed, out, Plan("moe-lpr", [3, 3, 3], exclusive=True, new=["tr"], **plan), says=said)
    refused(average_checkpoints, [el, routed], out, says="exclusive")
    refused(export_dense, routed, out, says="el, layer 0: a token has", language="el")
    refused(export_dense, el, out, language="fr", says="the checkpoint does not know 'fr'")
    assert not out.exists()
    export_dense(routed, out, language="en")
    assert torch.equal(load(out)(IDS).logits, load(base)(IDS).logits)


def test_a_joined_model_is_told_each_rows_language(base, el, tmp_path):
    hu = Plan("moe-lpr", [1, 2, 2], old=["en"], new=["hu"], exclusive=True)
    expand_checkpoint(base, tmp_path / "qwen-hu", hu)
    join_expansions([el, tmp_path / "qwen-hu"], tmp_path / "joined")
    given = {**QUICK, **checkpointed(False)}
    rows, arguments = Dataset.from_dict({"text": ["η γάτα κάθισε"] * 4}), SFTConfig(str(tmp_path), bf16=False, **given)
    untold = MoESFTTrainer(
        load(tmp_path / "joined"), arguments, train_dataset=rows, processing_class=byte_tokenizer(), router_losses=[]
    )
    refused(untold.train, says="joins packs, and a row's language says whose experts it takes: give a column")
    packed, stage = Dataset.from_dict({"input_ids": IDS.tolist()}), PostPretrainConfig(str(tmp_path), **given)
    refused(PostPretrainTrainer(load(tmp_path / "joined"), stage, train_dataset=packed).train, says="joins packs")


def test_routing_is_measured_where_a_class_has_several_experts(el):
    plan = Plan("moe-lpr", [4, 2, 3], old=["en"], new=["el"], exclusive=True)
    model = expand_model(tiny_dense("qwen2"), plan)
    found = measure_routing(model, byte_tokenizer(), {"el": ["αβγδ"] * 40, "en": ["abc d"] * 40}, tokens=50)
    assert found.layers == [0, 2]
    assert found.expert_0_score["el"] == [0, 0]
    assert all(sum(share[1:]) == pytest.approx(1) for share in found.top1_share["el"])
    assert "review" not in inspect_config(model.config).trainable
    says = "takes its exclusive expert alone: there is no routing to measure"
    refused(measure_routing, load(el), byte_tokenizer(), {"el": ["αβγδ"] * 40}, tokens=50, says=says)

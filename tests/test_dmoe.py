"""DMoE: one expert a language group; group training, joint training, adaptation to a new language."""

import json
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from conftest import byte_tokenizer, checkpointed, refused, write_texts
from datasets import Dataset

from hf_moe_expand import (
    AdaptConfig,
    DMoEForCausalLM,
    GroupConfig,
    GroupTrainer,
    JointConfig,
    Plan,
    adapt_language,
    expand_checkpoint,
    train_stage,
)
from hf_moe_expand.checkpoint.compare import compare_checkpoints
from hf_moe_expand.checkpoint.reader import CheckpointReader
from hf_moe_expand.checkpoint.records import History
from hf_moe_expand.core.schema import changed
from hf_moe_expand.data.packing import collate_blocks, pack_texts
from hf_moe_expand.data.sources import LanguageText
from hf_moe_expand.stages.run import check_frozen
from hf_moe_expand.trainers import GroupedSampler, GroupLoss

GROUPS = [["en", "es"], ["el"], ["tr", "hu"]]
PLAN = Plan("dmoe", [3, 1, 3], groups=GROUPS)
WORDS = {"en": "the cat sat ", "es": "el gato se ", "el": "η γάτα κά", "tr": "kedi otur", "hu": "a macska "}
WORDS["hi"] = "बिल्ली "
QUICK = {"max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 1e-3, "disable_tqdm": True}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    root = tmp_path_factory.mktemp("text")
    return {
        code: LanguageText(code, str(write_texts(root / f"{code}.jsonl", [f"{words} {i} {words}" for i in range(30)])))
        for code, words in WORDS.items()
    }


@pytest.fixture(scope="module")
def expanded(base, tmp_path_factory):
    out = tmp_path_factory.mktemp("dmoe") / "expanded"
    expand_checkpoint(base, out, PLAN)
    return out


@pytest.fixture(scope="module")
def trained(expanded, text):
    """After one group stage and one joint stage."""
    data = {code: source for code, source in text.items() if code != "hi"}
    group, joint = expanded.with_name("group"), expanded.with_name("joint")
    train_stage(expanded, group, data, GroupConfig(block_size=16, **{**QUICK, "max_steps": 12}))
    train_stage(group, joint, data, JointConfig(block_size=16, **QUICK))
    return joint


def test_groups_do_not_share_blocks():
    texts = {code: Dataset.from_dict({"text": [words] * 7}) for code, words in WORDS.items() if code != "hi"}
    packed = pack_texts(texts, byte_tokenizer(), 16, 0, groups=GROUPS)
    group_of = {code: number for number, group in enumerate(GROUPS) for code in group}
    rows = [{packed.languages[number] for number in row} for row in packed.dataset["language_ids"]]
    assert {tuple({group_of[code] for code in row}) for row in rows} == {(0,), (1,), (2,)}
    assert {len(row) for row in rows} == {1, 2}  # languages of one group may share a block


def test_the_sampler_gives_whole_batches_of_one_group_in_an_order_of_the_seed():
    groups = [0] * 7 + [1] * 4 + [2] * 2
    sampler = GroupedSampler(groups, 2, seed=1)
    rows = list(sampler)
    assert len(rows) == len({*rows}) == len(sampler) == 6 + 4 + 2
    assert all(groups[a] == groups[b] for a, b in zip(rows[::2], rows[1::2], strict=True))
    assert rows == list(GroupedSampler(groups, 2, seed=1))
    sampler.set_epoch(1)
    assert rows != list(sampler)
    said = "Language group 2 has 2 blocks, less than a batch of 3"
    refused(GroupedSampler, groups, 3, seed=1, says=said, raises=ValueError)


def group_step(folder, rows, tmp_path, batch=4, steps=1, checkpointing=False):
    model = DMoEForCausalLM.from_pretrained(folder)
    arguments = GroupConfig(
        output_dir=tmp_path, per_device_train_batch_size=batch, gradient_accumulation_steps=steps, max_steps=1,
        learning_rate=1.0, lr_scheduler_type="constant", optim="sgd", max_grad_norm=0.0, use_cpu=True,
        report_to="none", save_strategy="no", disable_tqdm=True, **checkpointed(checkpointing),
    )  # fmt: skip
    GroupTrainer(
        model, args=arguments, train_dataset=rows, data_collator=collate_blocks, language_classes=[0, 0, 1, 2, 2],
        router_losses=[GroupLoss(1.28)],
    ).train()  # fmt: skip
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def blocks(languages, count=4):
    ids = torch.randint(0, 250, (count, 8), generator=torch.Generator().manual_seed(4))
    return Dataset.from_dict({"input_ids": ids.tolist(), "language_ids": [languages] * count})


@pytest.mark.parametrize("cut", [{"batch": 4}, {"batch": 1, "steps": 4, "checkpointing": True}])
def test_a_group_step_is_the_equation(expanded, tmp_path, cut):
    """Eq. 4 written out: the group's expert alone, and the mean over layers and tokens of - log p(group | token)."""
    rows = blocks([3, 4, 3, 3, 4, 4, 3, 3])  # group 2
    model = DMoEForCausalLM.from_pretrained(expanded).train()
    ids = torch.tensor(rows["input_ids"])
    with model.use_expert(2), model.capture_routing() as routing:
        loss = model(ids, labels=ids).loss
    for layer in routing:
        targets = torch.full((ids.numel(),), 2)
        loss = loss + 1.28 * F.cross_entropy(layer.router_logits, targets) / len(routing)
    before = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss, [*before.values()])
    after = group_step(expanded, rows, tmp_path, **cut)
    for (name, value), gradient in zip(before.items(), gradients, strict=True):
        torch.testing.assert_close(after[name], (value - gradient).detach(), rtol=1e-4, atol=1e-6, msg=name)
        if ".experts." in name:  # the other experts got nothing
            assert torch.equal(after[name], value) != (".experts.2." in name), name


def test_what_group_training_and_adaptation_refuse(base, expanded, text, tmp_path):
    said = r"2 groups of languages \(\[0, 1\]\)"
    refused(group_step, expanded, blocks([0] * 3 + [2] * 5), tmp_path, says=said, raises=ValueError)
    expand_checkpoint(base, tmp_path / "uniform", changed(PLAN, method="moe-lpr", groups=[], new=["el"]))
    refused(adapt_language, tmp_path / "uniform", tmp_path / "out", text["hi"], says="has no language groups")
    assert not (tmp_path / "out").exists()


def test_group_and_joint_training_move_what_they_should(expanded, trained):
    group = expanded.with_name("group")
    first = compare_checkpoints(expanded, group)
    assert not first.added + first.removed + [name for name in first.identical if name.endswith("proj.weight")]
    stages = History.of(DMoEForCausalLM.from_pretrained(trained).config).last.stages
    assert [stage.stage for stage in stages] == ["group", "joint"]
    history = json.loads((group / "trainer_state.json").read_text())["log_history"]
    assert {"group_loss", "group_accuracy", "next_token_loss"} <= set(history[-2])
    assert "expert_0_score_old" not in history[-2]


def test_adaptation_copies_the_nearest_expert_and_leaves_every_other_byte(trained, text, tmp_path):
    # An expert that knows Hindi best: every other one is spoilt.
    model = DMoEForCausalLM.from_pretrained(trained)
    for ffn in model.expanded_ffns().values():
        for number in (0, 2):
            ffn.experts[number].down_proj.weight.data.normal_(0, 3)
    model.save_pretrained(tmp_path / "spoilt")
    byte_tokenizer().save_pretrained(tmp_path / "spoilt")
    config = AdaptConfig(block_size=16, sample_tokens=300, weight_decay=0.1, **QUICK)
    done = adapt_language(tmp_path / "spoilt", tmp_path / "hi", text["hi"], config)
    assert done.nearest == 1
    assert done.perplexity[1] < min(done.perplexity[0], done.perplexity[2])
    found = compare_checkpoints(tmp_path / "spoilt", tmp_path / "hi")
    assert not found.removed
    assert {name.split(".experts.")[1][0] for name in found.added} == {"3"}
    assert all(name.endswith("router.weight") for name in found.changed)
    a, b = CheckpointReader(tmp_path / "spoilt"), CheckpointReader(tmp_path / "hi")
    for name in found.changed:
        assert torch.equal(b.tensor(name)[:3], a.tensor(name))
    assert any(not torch.equal(b.tensor(n), a.tensor(n.replace(".experts.3.", ".experts.1."))) for n in found.added)
    adapted = DMoEForCausalLM.from_pretrained(tmp_path / "hi").config
    assert adapted.language_groups == [*GROUPS, ["hi"]]
    assert History.of(adapted).last.copied_expert == 1
    assert History.of(adapted).last.stages == [done.record]
    assert not [path.name for path in tmp_path.iterdir() if "grown" in path.name]
    refused(adapt_language, tmp_path / "hi", tmp_path / "again", text["hi"], config, says=r"has 'hi' already \(expert")
    second = LanguageText("ro", text["es"].source)
    assert adapt_language(tmp_path / "hi", tmp_path / "ro", second, config).expert == 4


def test_adaptation_streams_its_first_step_too(trained, text, tmp_path):
    """Of files of which one is bad, and with no copy of the text in the library's cache."""
    (tmp_path / "hi").mkdir()
    rows = Path(text["hi"].source).read_text("utf-8")
    (tmp_path / "hi" / "1.jsonl").write_text(rows, "utf-8")
    (tmp_path / "hi" / "2.jsonl").write_text('{"other": 1}\n')
    source = LanguageText("hi", str(tmp_path / "hi"))
    config = AdaptConfig(block_size=16, max_steps=1, use_cpu=True, report_to="none", stream=True)
    refused(adapt_language, trained, tmp_path / "out", source, config, says="on_bad_shard: skip")
    config.on_bad_shard = "skip"
    with patch.object(LanguageText, "load", side_effect=AssertionError):
        assert adapt_language(trained, tmp_path / "out", source, config).frozen


def test_a_router_row_that_moved_in_adaptation_is_found_out(trained, text, tmp_path):
    config = AdaptConfig(block_size=16, sample_tokens=300, **QUICK)
    adapt_language(trained, tmp_path / "hi", text["hi"], config)
    model = DMoEForCausalLM.from_pretrained(tmp_path / "hi")
    model.expanded_ffns()[0].router.weight.data[-1] += 1
    model.save_pretrained(tmp_path / "last")
    check_frozen(tmp_path / "hi", tmp_path / "last", AdaptConfig())
    model.expanded_ffns()[0].router.weight.data[1] += 1
    model.save_pretrained(tmp_path / "wrong")
    with pytest.raises(RuntimeError, match=r"layers\.0\.mlp\.router\.weight"):
        check_frozen(tmp_path / "hi", tmp_path / "wrong", AdaptConfig())

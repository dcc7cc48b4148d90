"""Data sets in every form train and are scored alike, and no setting or column of them is dropped."""

from contextlib import nullcontext

import pytest
import torch
from conftest import byte_tokenizer, refused, tiny_dense, write_texts
from datasets import Dataset
from one_sft_step import settings
from test_trainers_in_memory import by_code, tagged

from hf_moe_expand import (
    JointConfig,
    JointTrainer,
    LayerMoEConfig,
    LayerMoEForCausalLM,
    Masking,
    MoESFTTrainer,
    Plan,
    PostPretrainConfig,
    PostPretrainTrainer,
    ReviewConfig,
    ReviewTrainer,
    expand_checkpoint,
    expand_model,
    pack_texts,
    train_stage,
)
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.data.curriculum import Curriculum
from hf_moe_expand.data.sources import LanguageText
from hf_moe_expand.trainers.losses import BalanceLoss, GroupLoss
from hf_moe_expand.trainers.samplers import LanguageMix

ROUTED = Plan("moe-lpr", [3, 1, 3], [2], old=["en"], new=["el"])
OWN = Plan("moe-lpr", [2, 2, 2], old=["en"], new=["el"], exclusive=True)
MASK = Masking(expert_output=0.5)
CONFIGS = {PostPretrainTrainer: PostPretrainConfig, ReviewTrainer: ReviewConfig, JointTrainer: JointConfig}


def packed(*codes, **options):
    return pack_texts(by_code(*codes), byte_tokenizer(), 16, seed=5, **options)


def as_rows(*codes, languages=("en", "el"), without=()):
    rows = Dataset.from_list([dict(row) for row in packed(*codes, languages=languages).dataset])
    return rows.remove_columns(list(without))


def trainer_of(kind, plan, data, folder, args=None, **options):
    torch.manual_seed(0)
    quick = {"block_size": 16, "max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "seed": 5}
    quick |= {"save_strategy": "no", "disable_tqdm": True, **(args or {})}
    quick = {name: value for name, value in quick.items() if value is not ...}
    config = CONFIGS[kind](str(folder), **quick)
    model = expand_model(tiny_dense("qwen2"), plan)
    return kind(model, config, train_dataset=data, processing_class=byte_tokenizer(), **options)


def moved(trainer):
    """The names of the experts that a training moves."""
    before = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    after = dict(trainer.model.named_parameters())
    names = [name for name, value in before.items() if not torch.equal(after[name], value)]
    return {name.split(".experts.")[1].split(".")[0] for name in names if ".experts." in name}


def loss_of(trainer, data):
    return trainer.evaluate(data)["eval_loss" if not isinstance(data, dict) else f"eval_{next(iter(data))}_loss"]


FORMS = {
    "text": lambda code: tagged(code),
    "packed": lambda code: packed(code),
    "packed, numbered": lambda code: packed(code, languages=["en", "el"]),
    "rows": lambda code: as_rows(code),
    "rows with codes": lambda code: as_rows(code, without=["language_ids"]).add_column(
        "language", [code] * len(as_rows(code))
    ),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(("code", "expert"), [("en", "0"), ("el", "1")])
def test_exclusive_experts_learn_their_language_whatever_the_form(tmp_path, form, code, expert):
    assert moved(trainer_of(JointTrainer, OWN, form(code), tmp_path)) == {expert}


@pytest.mark.parametrize("trained_on", [lambda: packed("el"), lambda: tagged("el")], ids=["packed", "text"])
def test_text_is_scored_by_its_own_experts_whatever_the_form(tmp_path, trained_on):
    trainer = trainer_of(PostPretrainTrainer, OWN, trained_on(), tmp_path, {"max_steps": 10})
    trainer.train()
    for code in ("en", "el"):
        wanted = loss_of(trainer, {code: FORMS["text"](code)})
        for form in FORMS.values():
            assert loss_of(trainer, form(code)) == pytest.approx(wanted, rel=1e-5)
        without = as_rows(code, without=["language_ids"])
        assert loss_of(trainer, {code: without}) == pytest.approx(wanted, rel=1e-5)
    assert loss_of(trainer, tagged("en")) != pytest.approx(loss_of(trainer, tagged("el")), rel=1e-2)


@pytest.mark.parametrize("kind", [PostPretrainTrainer, ReviewTrainer])
def test_a_language_that_the_model_does_not_have_is_refused(tmp_path, kind):
    text = pack_texts({"de": tagged("el"), "fr": tagged("tr")}, byte_tokenizer(), 16, 0)
    with pytest.raises(InputError, match="train_dataset has the unknown language de, fr; known: en, el"):
        trainer_of(kind, ROUTED, text, tmp_path)
    trainer = trainer_of(kind, ROUTED, packed("en", "el") if kind is ReviewTrainer else packed("el"), tmp_path)
    refused(trainer.evaluate, text, says="eval_dataset has the unknown language de, fr; known: en, el")


@pytest.mark.parametrize("classes", [None, [1, 0]])
def test_a_model_without_a_history_takes_packed_text_as_it_is(tmp_path, classes):
    """Made from a configuration: nothing says its languages, but the classes that come with the text."""
    config = LayerMoEConfig.from_dense(tiny_dense("qwen2").config, num_experts_per_layer=[2, 2, 2])
    kind = JointTrainer if classes is None else PostPretrainTrainer
    args = CONFIGS[kind](str(tmp_path), block_size=16, max_steps=1, save_strategy="no", disable_tqdm=True)
    text = packed("el", "en")
    trainer = kind(LayerMoEForCausalLM(config), args, train_dataset=text, language_classes=classes)
    assert trainer.packed.languages == ("el", "en")
    assert trainer.evaluate(text)["eval_loss"] > 0


def weights_after(data, folder, **options):
    trainer = trainer_of(PostPretrainTrainer, ROUTED, data, folder, **options)
    trainer.train()
    return torch.cat([value.flatten() for value in trainer.model.state_dict().values()])


def test_masked_labels_of_rows_are_no_targets(tmp_path):
    rows = as_rows("el")
    whole = weights_after(rows, tmp_path)
    assert torch.equal(whole, weights_after(rows.map(lambda row: {"labels": row["input_ids"]}), tmp_path))
    half = rows.map(lambda row: {"labels": [-100] * 8 + row["input_ids"][8:]})
    assert not torch.equal(whole, weights_after(half, tmp_path))
    trainer = trainer_of(PostPretrainTrainer, ROUTED, rows, tmp_path)
    assert loss_of(trainer, half) != pytest.approx(loss_of(trainer, rows), rel=1e-4)


@pytest.mark.parametrize(
    ("column", "values", "said"),
    [
        ("position_ids", [3] * 16, "has a column `position_ids`, but blocks have positions 0, 1"),
        ("attention_mask", [1] * 15 + [0], "has a column `attention_mask` with zeros, but blocks have no padding"),
        ("text", "a text", "has both text and `input_ids`: remove the column that is not to be read"),
    ],
)
def test_columns_that_a_batch_would_lose_are_refused(tmp_path, column, values, said):
    rows = as_rows("el")
    changed = rows.add_column(column, [values] * len(rows))
    refused(trainer_of, PostPretrainTrainer, ROUTED, changed, tmp_path, says=f"train_dataset {said}")
    with pytest.raises(InputError, match=f"eval_dataset {said}"):
        trainer_of(PostPretrainTrainer, ROUTED, rows, tmp_path).evaluate(changed)
    ones = rows.add_column("attention_mask", [[1] * 16] * len(rows))
    trainer_of(PostPretrainTrainer, ROUTED, ones, tmp_path)


@pytest.mark.parametrize(
    ("kind", "plan", "args", "said"),
    [
        (PostPretrainTrainer, ROUTED, {"language_prior_coef": 0.5}, "needs old-language text"),
        (ReviewTrainer, ROUTED, {"classifier_layers": 1}, "the model has classifiers already"),
        (JointTrainer, OWN, {"masking": Masking(expert_output=0.5)}, "there is no choice to mask"),
        (ReviewTrainer, OWN, {}, "no router is left to review"),
        (PostPretrainTrainer, ROUTED, {"block_size": 32}, "blocks of 16 tokens, but block_size is 32"),
    ],
)
def test_settings_are_checked_with_the_model_whatever_the_form(tmp_path, kind, plan, args, said):
    codes = ["el"] if "language_prior_coef" in args else ["en", "el"]
    forms = [packed(*codes, languages=["en", "el"])]
    if "block_size" not in args:
        forms += [tagged(*codes)] + [as_rows(*codes)] * (plan is OWN)
    for data in forms:
        refused(trainer_of, kind, plan, data, tmp_path, args, says=said)


def test_a_temperature_needs_blocks_of_one_language_each(tmp_path):
    plan = Plan("moe-lpr", [3, 1, 3], old=["en"], new=["el", "tr"])
    with pytest.raises(InputError, match=r'languages share blocks .* pass groups=\[\["el"\], \["tr"\]\]'):
        trainer_of(PostPretrainTrainer, plan, packed("el", "tr"), tmp_path, {"temperature": 2.0})
    groups = packed("tr", "el", groups=[["tr"], ["el"]])
    trainer = trainer_of(PostPretrainTrainer, plan, groups, tmp_path, {"temperature": 2.0})
    assert trainer.mix.rows == groups.blocks


@pytest.mark.parametrize(
    ("options", "args", "said"),
    [
        ({"mix": LanguageMix([3])}, {}, "mix has 3 rows: train_dataset must have as many"),
        ({"mix": LanguageMix([9])}, {"temperature": 2.0}, "mix, and the configuration's temperature or curriculum"),
        ({"masking": MASK}, {"masking": Masking(final_output=0.5)}, "masking is given twice, here and in args"),
        ({"masking": MASK, "plan": OWN}, {}, "there is no choice to mask"),
        ({"masking": MASK, "kind": ReviewTrainer}, {}, "masking: ReviewTrainer has no choice of experts to mask"),
    ],
)
def test_arguments_that_contradict_the_configuration_or_the_model_are_refused(tmp_path, options, args, said):
    given = {"kind": PostPretrainTrainer, "plan": ROUTED, **options}
    codes = ["en", "el"] if "kind" in options else ["el"]
    refused(trainer_of, data=packed(*codes, languages=["en", "el"]), folder=tmp_path, args=args, **given, says=said)


def sft(folder, data, plan=OWN, **options):
    config = settings(folder, max_length=16)
    options = {"router_losses": [BalanceLoss(0.1)] if plan is ROUTED else [], **options}
    model = expand_model(tiny_dense("qwen2"), plan)
    return MoESFTTrainer(model, config, train_dataset=data, processing_class=byte_tokenizer(), **options)


@pytest.mark.parametrize("plan", [OWN, ROUTED])
@pytest.mark.parametrize(
    ("classes", "wrong"), [([0, 7], 7), ([0, -1], -1), ({"en": 0, "el": 7}, 7), ({"en": -1, "el": 1}, -1)]
)
def test_a_class_that_the_model_does_not_have_is_refused(tmp_path, plan, classes, wrong):
    by_codes = isinstance(classes, dict)
    said = f"has the class {wrong}, but the model has 0 to 1: g is the class of the languages of expansion g"
    with pytest.raises(InputError, match=said):
        sft(tmp_path, tagged("en", "el") if by_codes else as_rows("en", "el"), plan, language_classes=classes)
    if not by_codes:
        refused(trainer_of, JointTrainer, plan, as_rows("en", "el"), tmp_path, language_classes=classes, says=said)


def test_a_class_is_a_group_where_a_loss_is_of_groups(tmp_path):
    three, options = Plan("moe-lpr", [3, 1, 3], old=["en"], new=["el"]), {"router_losses": [GroupLoss(0.1)]}
    sft(tmp_path, as_rows("en", "el"), three, language_classes=[0, 2], **options)
    with pytest.raises(InputError, match=r"has the class 3, but the model has 0 to 2: .* of language group g"):
        sft(tmp_path, as_rows("en", "el"), three, language_classes=[0, 3], **options)


def test_sft_trains_the_experts_of_each_rows_language(tmp_path):
    assert moved(sft(tmp_path, as_rows("el"), language_classes=[0, 1])) == {"1"}
    assert moved(sft(tmp_path, as_rows("en"), language_classes=[0, 1])) == {"0"}


def test_text_under_another_languages_code_is_refused(base, tmp_path):
    expand_checkpoint(base, tmp_path / "model", ROUTED)
    text = LanguageText("en", str(write_texts(tmp_path / "en.jsonl", ["a text"] * 40)))
    with pytest.raises(InputError, match=r"data\['el'\] is text in 'en': give it under its own code"):
        train_stage(tmp_path / "model", tmp_path / "out", {"el": text}, PostPretrainConfig(block_size=16))


def test_a_loss_of_routers_is_refused_where_there_are_none(tmp_path):
    said = "The balance loss is of routers or classifiers, and no layer of the model has"
    refused(sft, tmp_path, tagged("en", "el"), router_losses=[BalanceLoss(0.1)], says=said)


def test_a_curriculum_sets_the_number_of_steps(tmp_path):
    Curriculum(4, {"el": 0, "tr": 2}).save(tmp_path / "c.json")
    plan = Plan("moe-lpr", [3, 1, 3], old=["en"], new=["el", "tr"])
    args = {"curriculum": str(tmp_path / "c.json"), "max_steps": ...}
    for data in (tagged("el", "tr"), packed("el", "tr", groups=[["el"], ["tr"]])):
        trainer = trainer_of(PostPretrainTrainer, plan, data, tmp_path, args)
        assert trainer.train().global_step == 4


def test_metrics_of_another_set_and_of_a_prediction_do_not_mix(tmp_path):
    trainer = trainer_of(ReviewTrainer, ROUTED, tagged("en", "el"), tmp_path)
    first = trainer.evaluate(tagged("en", "el"))
    trainer.predict(tagged("en"))
    again = trainer.evaluate(tagged("en", "el"))
    other = trainer.evaluate(tagged("en"), metric_key_prefix="test")
    assert first["eval_next_token_loss"] == again["eval_next_token_loss"]
    assert other["test_next_token_loss"] == pytest.approx(other["test_loss"], abs=0.2)
    assert "eval_next_token_loss" not in other
    assert "test_language_prior_loss" in other


def test_an_optimizer_that_would_decay_rows_which_stay_is_refused(tmp_path, monkeypatch):
    for decay, moves in ((0.1, True), (0.0, False)):
        model = expand_model(tiny_dense("qwen2"), ROUTED)
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=decay)
        config = PostPretrainConfig(str(tmp_path), block_size=16, max_steps=1, save_strategy="no")
        trainer = PostPretrainTrainer(
            model, config, train_dataset=tagged("el"), processing_class=byte_tokenizer(), optimizers=(optimizer, None)
        )
        monkeypatch.setattr(trainer, "_kept_rows", lambda model=model: [(model.expanded_ffns()[0].router, 1)])
        with pytest.raises(InputError, match="weight decay would move rows") if moves else nullcontext():
            trainer.train()

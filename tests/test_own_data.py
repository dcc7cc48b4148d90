"""Data sets in every form train alike, nothing of them is dropped, and nothing wrong passes in silence."""

import pytest
import torch
from conftest import byte_tokenizer, refused, save_dense, tiny_dense, write_texts
from datasets import Dataset
from one_sft_step import settings
from safetensors.torch import load_file
from test_trainers_in_memory import by_code, tagged
from uneven_rows import model_of, uneven_rows

from hf_moe_expand import (
    JointConfig,
    JointTrainer,
    LanguageText,
    LayerMoEConfig,
    LayerMoEForCausalLM,
    Masking,
    MoESFTTrainer,
    Plan,
    PostPretrainConfig,
    PostPretrainTrainer,
    ReviewConfig,
    ReviewTrainer,
    evaluate_model,
    expand_checkpoint,
    expand_model,
    freeze,
    pack_texts,
    train_stage,
)
from hf_moe_expand.checkpoint.records import History
from hf_moe_expand.trainers.losses import BalanceLoss, GroupLoss

ROUTED = Plan("moe-lpr", [3, 1, 3], [2], old=["en"], new=["el"])
OWN = Plan("moe-lpr", [2, 2, 2], old=["en"], new=["el"], exclusive=True)
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
    config = CONFIGS[kind](str(folder), **quick)
    model = expand_model(tiny_dense("qwen2"), plan)
    return kind(model, config, train_dataset=data, processing_class=byte_tokenizer(), **options)


def moved(trainer):
    """The numbers of the experts that a training moves."""
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    names = [name for name, value in trainer.model.state_dict().items() if not torch.equal(before[name], value)]
    return {name.split(".experts.")[1].split(".")[0] for name in names if ".experts." in name}


def loss_of(trainer, data):
    return trainer.evaluate(data)["eval_loss" if not isinstance(data, dict) else f"eval_{next(iter(data))}_loss"]


FORMS = {
    "text": lambda code: tagged(code),
    "packed": lambda code: packed(code),
    "packed, numbered": lambda code: packed(code, languages=["en", "el"]),
    "rows": lambda code: as_rows(code),
    "rows with codes": lambda code: as_rows(code, without=["language_ids"]).map(lambda _: {"language": code}),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_exclusive_experts_learn_their_language_whatever_the_form(tmp_path, form):
    for code, expert in (("en", "0"), ("el", "1")):
        assert moved(trainer_of(JointTrainer, OWN, form(code), tmp_path, {"max_steps": 1})) == {expert}


def test_text_is_scored_by_its_own_experts_whatever_the_form(tmp_path):
    trainer = trainer_of(PostPretrainTrainer, OWN, packed("el"), tmp_path, {"max_steps": 4, "learning_rate": 3e-2})
    trainer.train()
    for code in ("en", "el"):
        wanted = loss_of(trainer, {code: FORMS["text"](code)})
        for form in (*(form(code) for form in FORMS.values()), {code: as_rows(code, without=["language_ids"])}):
            assert loss_of(trainer, form) == pytest.approx(wanted, rel=1e-5)
    assert loss_of(trainer, tagged("en")) != pytest.approx(loss_of(trainer, tagged("el")), rel=1e-2)


def test_a_language_that_the_model_does_not_have_is_refused(tmp_path):
    text = pack_texts({"de": tagged("el"), "fr": tagged("tr")}, byte_tokenizer(), 16, 0)
    said = "{}_dataset has the unknown language de, fr; known: en, el"
    refused(trainer_of, ReviewTrainer, ROUTED, text, tmp_path, says=said.format("train"))
    refused(trainer_of(ReviewTrainer, ROUTED, packed("en", "el"), tmp_path).evaluate, text, says=said.format("eval"))


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


def test_masked_labels_of_rows_are_no_targets(tmp_path):
    rows, found = as_rows("el"), []
    half = rows.map(lambda row: {"labels": [-100] * 8 + row["input_ids"][8:]})
    for data in (rows, rows.map(lambda row: {"labels": row["input_ids"]}), half):
        trainer = trainer_of(PostPretrainTrainer, ROUTED, data, tmp_path)
        trainer.train()
        found.append(torch.cat([value.flatten() for value in trainer.model.state_dict().values()]))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert loss_of(trainer, half) != pytest.approx(loss_of(trainer, rows), rel=1e-4)


def test_columns_that_a_batch_would_lose_are_refused(tmp_path):
    rows, kind = as_rows("el"), (PostPretrainTrainer, ROUTED)
    good = trainer_of(*kind, rows.add_column("attention_mask", [[1] * 16] * len(rows)), tmp_path)
    for column, values, said in (
        ("position_ids", [3] * 16, "has a column `position_ids`, but blocks have positions 0, 1"),
        ("attention_mask", [1] * 15 + [0], "has a column `attention_mask` with zeros, but blocks have no padding"),
        ("text", "a text", "has both text and `input_ids`: remove the column that is not to be read"),
    ):
        changed = rows.add_column(column, [values] * len(rows))
        refused(trainer_of, *kind, changed, tmp_path, says=f"train_dataset {said}")
        refused(good.evaluate, changed, says=f"eval_dataset {said}")


@pytest.mark.parametrize(
    ("kind", "plan", "args", "said"),
    [
        (PostPretrainTrainer, ROUTED, {"language_prior_coef": 0.5}, "needs text of the old languages"),
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


@pytest.mark.parametrize("plan", [OWN, ROUTED])
def test_a_class_that_the_model_does_not_have_is_refused(tmp_path, plan):
    said, rows = "has the class {}, but the model has 0 to 1", as_rows("en", "el")
    chat = (chat_trainer, tmp_path, expand_model(tiny_dense("qwen2"), plan))
    more = {"router_losses": [BalanceLoss(0.1)] if plan is ROUTED else []}
    refused(*chat, tagged("en", "el"), **more, language_classes={"en": -1, "el": 1}, says=said.format(-1))
    refused(*chat, rows, **more, language_classes=[0, 7], says=said.format(7))
    refused(trainer_of, JointTrainer, plan, rows, tmp_path, language_classes=[0, 7], says=said.format(7))


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
    model = expand_model(tiny_dense("qwen2"), ROUTED)
    monkeypatch.setattr(PostPretrainTrainer, "_kept_rows", lambda self: [(model.expanded_ffns()[0].router, 1)])
    decays, does_not = (torch.optim.AdamW(model.parameters(), weight_decay=decay) for decay in (0.1, 0.0))
    made = post(tmp_path, model, tagged("el"), max_steps=1, optimizers=(decays, None))
    refused(made.train, says="weight decay would move rows")
    post(tmp_path, model, tagged("el"), max_steps=1, optimizers=(does_not, None)).train()


def post(folder, model, rows, optimizers=(None, None), **settings):
    settings = {"per_device_train_batch_size": 1, "max_steps": 3, "save_strategy": "no", "logging_steps": 1, **settings}
    config = PostPretrainConfig(folder, block_size=16, disable_tqdm=True, **settings)
    given = {"train_dataset": rows, "processing_class": byte_tokenizer(), "router_losses": [], "optimizers": optimizers}
    return PostPretrainTrainer(model, config, eval_dataset=rows if "eval_strategy" in settings else None, **given)


def chat_trainer(folder, model, rows, router_losses=(), language_classes=(0, 1), **changes):
    config = settings(folder, **{"max_steps": 2, "learning_rate": 0.5, "per_device_train_batch_size": 1, **changes})
    classes = {} if isinstance(model, str) else {"language_classes": language_classes}
    given = {"train_dataset": rows, "processing_class": byte_tokenizer(), "router_losses": [*router_losses], **classes}
    return MoESFTTrainer(model, config, **given)


def in_greek(count=7, masked=()):
    rows = uneven_rows(count, masked).remove_columns("language_ids")
    return rows.add_column("language_ids", [[1] * 16] * count)


@pytest.mark.parametrize("make", [post, chat_trainer])
@pytest.mark.parametrize("kind", ["exclusive", "review"])
def test_a_training_that_reaches_no_trained_parameter_ends_with_the_reason(tmp_path, make, kind):
    model = model_of(kind)
    if make is chat_trainer:
        freeze(model, "post-pretrain")
    made = make(tmp_path, model, in_greek())
    for block in (model.use_languages("en"), model.use_expert(0), model.use_expansion(0)):
        with block:
            refused(made.train, says="inside `use_")
    assert not History.of(model.config).stages
    with model.use_languages("el"):
        made.train()
    assert History.of(model.config).stages


def test_it_ends_after_twenty_steps_and_one_row_that_reaches_them_is_enough(tmp_path):
    rows = uneven_rows(7).remove_columns("language_ids")
    english, one_of_greek = (rows.add_column("language_ids", [[0] * 16] * 6 + [[last] * 16]) for last in (0, 1))
    made = post(tmp_path, model_of("exclusive"), english, max_steps=1000)
    refused(made.train, says=r"In 20 steps .* no row is in a language whose experts train")
    assert made.state.global_step == 20
    made = post(tmp_path, model_of("exclusive"), one_of_greek, max_steps=7)
    made.train()
    assert made.record.steps == 7


@pytest.mark.parametrize("optimizer", ["sgd", "adamw_torch"])
def test_a_step_without_a_target_is_skipped_and_counted(tmp_path, capsys, optimizer):
    """Weights, momentum and weight decay are as without it."""
    found = []
    for rows in (in_greek(5, masked={1, 3}), in_greek(5).select([0, 2, 4])):
        settings = {"optim": optimizer, "weight_decay": 0.1, "learning_rate": 0.05, "lr_scheduler_type": "constant"}
        model = model_of("review")
        made = post(
            tmp_path, model, rows, num_train_epochs=1, max_steps=-1, train_sampling_strategy="sequential", **settings
        )
        made.train()
        assert all(torch.isfinite(torch.tensor(log["loss"])) for log in made.state.log_history if "loss" in log)
        found.append(model.state_dict())
    assert "2 of 5 steps had no label to learn from, and were skipped" in capsys.readouterr().out
    for name, value in found[1].items():
        torch.testing.assert_close(found[0][name], value, rtol=1e-6, atol=1e-7, msg=name)


def test_rows_that_have_no_target_at_all_end_with_that_reason_and_a_score_is_of_the_others(tmp_path):
    for rows in (in_greek(4, masked=range(4)), Dataset.from_dict({"input_ids": [[5]] * 4})):
        refused(post(tmp_path, model_of("review"), rows).train, says="the rows have no label to predict")
    rows = in_greek(4, masked={1})
    made = post(tmp_path, model_of("review"), rows, per_device_eval_batch_size=1)
    without = made.evaluate(rows.select([0, 2, 3]))["eval_loss"]
    for own_count in (True, False):  # without it the model's own mean over no target is no number
        made.model_accepts_loss_kwargs = own_count
        assert made.evaluate(rows)["eval_loss"] == pytest.approx(without, abs=1e-6)


@pytest.mark.parametrize("name", ["bf16_full_eval", "fp16_full_eval"])
def test_evaluation_that_rounds_the_weights_is_refused(tmp_path, name):
    for make in (post, chat_trainer):
        refused(make, tmp_path, model_of("review"), in_greek(), **{name: True}, says=f"{name}: it rounds the weights")
    config = PostPretrainConfig(**{name: True, "use_cpu": True})
    refused(config.check, model_of("review").config, None, says=f"{name}: it rounds")


@pytest.mark.parametrize("saves", [{"save_steps": 4}, {"save_steps": 1, "save_total_limit": 1}])
def test_the_best_step_is_saved_and_loaded(tmp_path, saves):
    model = model_of("review")
    made = post(
        tmp_path, model, in_greek(), max_steps=6, save_strategy="steps", eval_strategy="steps", eval_steps=1,
        load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=True, learning_rate=0.01,
        **saves,
    )  # fmt: skip
    made.train()
    scored = [(log["eval_loss"], log["step"]) for log in made.state.log_history if "eval_loss" in log]
    best, step = max(scored)
    assert step != 6
    assert made.record.steps == step
    assert made.evaluate()["eval_loss"] == pytest.approx(best, abs=1e-5)


def test_a_compiled_model_trains_and_is_saved_under_its_own_names(tmp_path):
    for make in (post, chat_trainer):
        compiled = torch.compile(model_of("review"), backend="eager")
        made = make(tmp_path / make.__name__, compiled, in_greek())
        made.train()
        made.save_model(tmp_path / make.__name__)
        saved = load_file(tmp_path / make.__name__ / "model.safetensors")
        assert saved.keys() <= model_of("review").state_dict().keys()
        loaded = LayerMoEForCausalLM.from_pretrained(tmp_path / make.__name__)
        ids = torch.arange(12).unsqueeze(0)
        torch.testing.assert_close(loaded(ids).logits, made.model.eval()(ids).logits)


def test_columns_that_change_the_loss_are_refused(tmp_path, capsys):
    whole, mask = in_greek().remove_columns("labels"), [[0] * 12 + [1] * 4] * 7
    for name in ("completion_mask", "assistant_masks"):
        refused(post, tmp_path, model_of("review"), whole.add_column(name, mask), says=f"a column `{name}`")
    for name in ("loss_mask", "weight"):
        rows = whole.add_column(name, mask if name == "loss_mask" else [2.0] * 7)
        for make in (post, chat_trainer):
            refused(make, tmp_path, model_of("review"), rows, says=f"a column `{name}`, which .* change the loss")
    listed = [dict(row) for row in whole.add_column("completion_mask", mask)]  # rows that are no data set
    refused(post, tmp_path, model_of("review"), listed, says="a column `completion_mask`")
    for make in (post, chat_trainer):
        make(tmp_path, model_of("review"), whole.add_column(f"origin_{make.__name__}", ["web"] * 7))
        assert f"nothing reads the column origin_{make.__name__}" in capsys.readouterr().err


def test_trls_training_is_recorded_and_keeps_the_type_of_a_named_checkpoint(tmp_path):
    base = save_dense(tmp_path / "base", dtype=torch.bfloat16)
    expand_checkpoint(base, tmp_path / "expanded", Plan("moe-lpr", [1, 2, 2], old=["en"], new=["el"]))
    made = chat_trainer(tmp_path / "tuned", str(tmp_path / "expanded"), in_greek().remove_columns("language_ids"))
    assert made.model.dtype == torch.float32
    made.train()
    made.save_model()
    assert {value.dtype for value in load_file(tmp_path / "tuned" / "model.safetensors").values()} == {torch.bfloat16}
    (stage,) = History.of(LayerMoEForCausalLM.from_pretrained(tmp_path / "tuned").config).stages
    assert (stage.stage, stage.steps, stage.trained) == ("sft", 2, ["base", "experts", "router"])
    assert stage.changes_everything
    model = model_of("review")
    freeze(model, "post-pretrain")
    chat_trainer(tmp_path / "experts", model, in_greek()).train()
    (stage,) = History.of(model.config).stages
    assert stage.trained == ["experts", "router"]
    assert not stage.changes_everything


def test_a_data_set_is_scored_as_its_texts_are():
    texts = ["ένα κείμενο", "και άλλο ένα"]
    score = lambda given: evaluate_model(model_of("review"), byte_tokenizer(), {"el": given}, 16)  # noqa: E731
    assert score(texts) == score(Dataset.from_dict({"text": texts, "more": [1, 2]}))


def test_text_under_another_languages_code_is_refused(base, tmp_path):
    expand_checkpoint(base, tmp_path / "model", ROUTED)
    text = LanguageText("en", str(write_texts(tmp_path / "en.jsonl", ["a text"] * 40)))
    given = {"el": text}, PostPretrainConfig(block_size=16)
    refused(train_stage, tmp_path / "model", tmp_path / "out", *given, says="is text in 'en': give it under its own")


def test_labels_that_no_loss_takes_are_refused(tmp_path):
    rows = in_greek(2).remove_columns("labels")
    for labels, message in (([1] * 15, "not as many as their `input_ids`"), ([-1] * 16, "holds -1: must be")):
        refused(post, tmp_path, model_of("review"), rows.add_column("labels", [labels] * 2), says=message)


def test_a_class_is_a_group_where_a_loss_is_of_groups(tmp_path):
    given = (tmp_path, expand_model(tiny_dense("qwen2"), ROUTED), as_rows("en", "el"))
    chat_trainer(*given, language_classes=[0, 2], router_losses=[GroupLoss(0.1)])
    said = r"has the class 3, but the model has 0 to 2"
    refused(chat_trainer, *given, language_classes=[0, 3], router_losses=[GroupLoss(0.1)], says=said)

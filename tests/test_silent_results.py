"""What would pass in silence, such as a training that trains nothing, or steps without a target."""

import pytest
import torch
from conftest import byte_tokenizer, checkpointed, refused, save_dense, tiny_dense
from datasets import Dataset
from safetensors.torch import load_file
from trl import SFTConfig
from uneven_rows import model_of, uneven_rows

from hf_moe_expand import (
    LayerMoEForCausalLM,
    MoESFTTrainer,
    Plan,
    PostPretrainConfig,
    PostPretrainTrainer,
    evaluate_model,
    expand_checkpoint,
    expand_model,
    freeze,
)
from hf_moe_expand.checkpoint.records import History
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.stages import config as stage_config

SGD = {"optim": "sgd", "lr_scheduler_type": "constant", "learning_rate": 0.5, "weight_decay": 0.0}


def post(folder, model, rows, **settings):
    settings = {"per_device_train_batch_size": 1, "max_steps": 3, "save_strategy": "no", "logging_steps": 1, **settings}
    evaluated = {"eval_dataset": rows} if "eval_strategy" in settings else {}
    config = PostPretrainConfig(folder, block_size=16, disable_tqdm=True, **settings)
    return PostPretrainTrainer(
        model, config, train_dataset=rows, processing_class=byte_tokenizer(), router_losses=[], **evaluated
    )


def sft(folder, model, rows, **settings):
    settings = {"max_steps": 2, "save_strategy": "no", **SGD, **settings}
    config = SFTConfig(
        str(folder), use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, **checkpointed(False), **settings
    )
    return MoESFTTrainer(
        model, config, train_dataset=rows, processing_class=byte_tokenizer(), router_losses=[],
        **({} if isinstance(model, str) else {"language_classes": [0, 1]}),
    )  # fmt: skip


def in_greek(count=7, masked=()):
    rows = uneven_rows(count, masked).remove_columns("language_ids")
    return rows.add_column("language_ids", [[1] * 16] * count)


@pytest.mark.parametrize("make", [post, sft])
@pytest.mark.parametrize("kind", ["exclusive", "review"])
@pytest.mark.parametrize("block", ["use_languages", "use_expert", "use_expansion"])
def test_a_training_that_reaches_no_trained_parameter_ends_with_the_reason(tmp_path, make, kind, block):
    model = model_of(kind)
    if make is sft:
        freeze(model, "post-pretrain")
    made = make(tmp_path, model, in_greek())
    with (
        getattr(model, block)("en" if block == "use_languages" else 0),
        pytest.raises(InputError, match="inside `use_"),
    ):
        made.train()
    assert not any(stage.stage in ("post-pretrain", "sft") for stage in History.of(model.config).stages)
    with model.use_languages("el"):
        made.train()
    assert History.of(model.config).stages


def test_it_ends_after_twenty_steps_and_one_row_that_reaches_them_is_enough(tmp_path):
    rows = uneven_rows(7).remove_columns("language_ids")
    made = post(tmp_path, model_of("exclusive"), rows.add_column("language_ids", [[0] * 16] * 7), max_steps=1000)
    refused(made.train, says=r"In 20 steps .* no row is in a language whose experts train")
    assert made.state.global_step == 20
    rows = rows.add_column("language_ids", [[0] * 16] * 6 + [[1] * 16])
    made = post(tmp_path, model_of("exclusive"), rows, max_steps=7)
    made.train()
    assert made.record.steps == 7


@pytest.mark.parametrize("optimizer", ["sgd", "adamw_torch"])
def test_a_step_without_a_target_is_skipped_and_counted(tmp_path, capsys, optimizer):
    """Weights, momentum and weight decay are as without it."""
    found = []
    for rows in (in_greek(5, masked={1, 3}), in_greek(5).select([0, 2, 4])):
        settings = {**SGD, "optim": optimizer, "weight_decay": 0.1, "learning_rate": 0.05}
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


def test_rows_that_have_no_target_at_all_end_with_that_reason(tmp_path):
    for rows in (in_greek(4, masked=range(4)), Dataset.from_dict({"input_ids": [[5]] * 4})):
        with pytest.raises(InputError, match="the rows have no label to predict"):
            post(tmp_path, model_of("review"), rows).train()


def test_evaluation_of_a_row_without_a_target_is_a_number(tmp_path):
    rows = in_greek(4, masked={1})
    made = post(tmp_path, model_of("review"), rows, per_device_eval_batch_size=1)
    without = made.evaluate(rows.select([0, 2, 3]))["eval_loss"]
    assert made.evaluate(rows)["eval_loss"] == pytest.approx(without, abs=1e-6)
    made.model_accepts_loss_kwargs = False  # then the model's own mean over no target is no number
    assert made.evaluate(rows)["eval_loss"] == pytest.approx(without, abs=1e-6)


@pytest.mark.parametrize("name", ["bf16_full_eval", "fp16_full_eval"])
def test_evaluation_that_rounds_the_weights_is_refused(tmp_path, name):
    for make in (post, sft):
        refused(make, tmp_path, model_of("review"), in_greek(), **{name: True}, says=f"{name}: it rounds the weights")
    refused(stage_config.read, PostPretrainConfig, {name: True}, says=f"{name}: it rounds")


@pytest.mark.parametrize("saves", [{"save_steps": 4}, {"save_steps": 100}, {"save_steps": 1, "save_total_limit": 1}])
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
    for make in (post, sft):
        compiled = torch.compile(model_of("review"), backend="eager")
        made = make(tmp_path / make.__name__, compiled, in_greek())
        made.train()
        made.save_model(tmp_path / make.__name__)
        saved = load_file(tmp_path / make.__name__ / "model.safetensors")
        assert saved.keys() <= model_of("review").state_dict().keys()
        loaded = LayerMoEForCausalLM.from_pretrained(tmp_path / make.__name__)
        ids = torch.arange(12).unsqueeze(0)
        torch.testing.assert_close(loaded(ids).logits, made.model.eval()(ids).logits)


def test_columns_that_change_the_loss_are_honoured_as_trl_does_or_refused(tmp_path, capsys):
    whole, mask = in_greek().remove_columns("labels"), [[0] * 12 + [1] * 4] * 7
    expected = whole.add_column("labels", [[-100] * 12 + row[12:] for row in whole["input_ids"]])
    losses = []
    for rows in (expected, whole.add_column("completion_mask", mask), whole.add_column("assistant_masks", mask)):
        made = post(tmp_path, model_of("review"), rows)
        made.train()
        losses.append([log["loss"] for log in made.state.log_history if "loss" in log])
    assert losses[0] == losses[1] == losses[2]
    for name in ("loss_mask", "weight"):
        rows = whole.add_column(name, mask if name == "loss_mask" else [2.0] * 7)
        for make in (post, sft):
            refused(make, tmp_path, model_of("review"), rows, says=f"a column `{name}`, which .* change the loss")
    with pytest.raises(InputError, match="a column `completion_mask`"):  # of rows that are no data set
        post(tmp_path, model_of("review"), [dict(row) for row in whole.add_column("completion_mask", mask)])
    for make in (post, sft):
        make(tmp_path, model_of("review"), whole.add_column(f"origin_{make.__name__}", ["web"] * 7))
        assert f"nothing reads the column origin_{make.__name__}" in capsys.readouterr().err


def test_labels_that_no_loss_takes_are_refused(tmp_path):
    rows = in_greek(2).remove_columns("labels")
    for labels, message in (([[1] * 15] * 2, "not as many as their `input_ids`"), ([[-1] * 16] * 2, "holds -1: give")):
        refused(post, tmp_path, model_of("review"), rows.add_column("labels", labels), says=message)


def test_a_checkpoint_without_an_optimizer_is_named_when_it_resumes(tmp_path, capsys):
    for only in (False, True):
        settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 3}
        folder = tmp_path / str(only)
        post(folder, model_of("review"), in_greek(), save_only_model=only, **settings).train()
        post(folder, model_of("review"), in_greek(), save_only_model=only, **settings).train(
            resume_from_checkpoint=str(folder / "checkpoint-1")
        )
        assert ("has weights alone (save_only_model)" in capsys.readouterr().out) == only


def test_trls_training_is_recorded_and_keeps_the_type_of_a_named_checkpoint(tmp_path):
    base = save_dense(tmp_path / "base", dtype=torch.bfloat16)
    expand_checkpoint(base, tmp_path / "expanded", Plan("moe-lpr", [1, 2, 2], old=["en"], new=["el"]))
    made = sft(tmp_path / "tuned", str(tmp_path / "expanded"), in_greek().remove_columns("language_ids"))
    assert made.model.dtype == torch.float32
    made.train()
    made.save_model()
    assert {value.dtype for value in load_file(tmp_path / "tuned" / "model.safetensors").values()} == {torch.bfloat16}
    (stage,) = History.of(LayerMoEForCausalLM.from_pretrained(tmp_path / "tuned").config).stages
    assert (stage.stage, stage.steps, stage.trained) == ("sft", 2, ["base", "experts", "router"])
    assert stage.changes_everything
    model = expand_model(tiny_dense("qwen2"), Plan("moe-lpr", [1, 2, 2], old=["en"], new=["el"]))
    freeze(model, "post-pretrain")
    sft(tmp_path / "experts", model, in_greek()).train()
    (stage,) = History.of(model.config).stages
    assert stage.trained == ["experts", "router"]
    assert not stage.changes_everything


@pytest.mark.parametrize("given", [b"bytes of text" * 9, [b"bytes" * 9], ["text" * 20, None], [3]])
def test_scores_are_of_text_alone(given):
    with pytest.raises(InputError, match=r"texts\['el'\]: document \d is .*: must be text"):
        evaluate_model(model_of("review"), byte_tokenizer(), {"el": given}, 16)


def test_a_data_set_is_scored_as_its_texts_are():
    texts, model = ["ένα κείμενο", "και άλλο ένα"], model_of("review")
    given = (texts, Dataset.from_dict({"text": texts, "more": [1, 2]}))
    found = [evaluate_model(model, byte_tokenizer(), {"el": one}, 16) for one in given]
    assert found[0] == found[1]

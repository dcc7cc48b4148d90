"""What a training says of its progress."""

from types import SimpleNamespace

import pytest

from hf_moe_expand.stages.recording import LogTable, Progress, _shares

LOGS = {"loss": 5.43219, "grad_norm": 0.5, "learning_rate": 0.01, "balance_loss": 1.25, "epoch": 0.1}


@pytest.fixture(autouse=True)
def a_terminal(monkeypatch):
    monkeypatch.delenv("TQDM_DISABLE", raising=False)


def said(capsys, seconds, disable_tqdm, begin=0, pairs=False, steps=1000, every=None, shows=True, ends=None):
    """The lines of a training of `steps` steps of 2 blocks of 50 tokens, or 2 sentence pairs, whose steps take
    `seconds` and which logs `every` so many."""
    now = [0.0]
    trainer = SimpleNamespace(
        get_total_train_batch_size=lambda args: 2, _is_encoder_decoder=pairs, trained_as="review", packed=None,
        router_losses=(None,), row_tokens=50,
    )  # fmt: skip
    callback = Progress(trainer, lambda: now[0], shows)
    arguments = SimpleNamespace(disable_tqdm=disable_tqdm, lr_scheduler_type="cosine", learning_rate=0.01)
    state = SimpleNamespace(global_step=begin, max_steps=steps, is_world_process_zero=True)
    callback.on_train_begin(arguments, state, None)
    assert capsys.readouterr().out.splitlines() == [
        f"review: {steps:,} steps of {'2 sentence pairs' if pairs else '100 tokens'}, learning rate 0.01 (cosine)",
        *([f"resumes at step {begin} of {steps}"] if begin else []),
    ]
    while state.global_step < steps:
        now[0] += seconds
        state.global_step += 1
        callback.on_step_end(arguments, state, None)
        if every and state.global_step % every == 0:
            callback.on_log(arguments, state, None, logs=dict(LOGS))
    if ends:
        callback.on_log(arguments, state, None, logs=ends)
    callback.on_train_end(arguments, state, None)
    return capsys.readouterr().out.splitlines()


def test_a_log_tells_of_it_in_the_first_half_minute_and_then_seldom(capsys):
    lines = said(capsys, 4.0, True)
    assert lines[0] == "step 3 of 1,000, 25 tokens a second, about 1 h 6 min left"
    assert lines[1] == "step 153 of 1,000, 25 tokens a second, about 56 min left"
    assert len(lines) == 7
    assert said(capsys, 60.0, True)[0].startswith("step 1 of 1,000, 2 tokens a second, about 16 h 39 min")


def test_beside_a_progress_bar_once(capsys, monkeypatch):
    assert len(said(capsys, 4.0, False)) == 1
    monkeypatch.setenv("TQDM_DISABLE", "1")
    assert len(said(capsys, 4.0, False)) == 7


def test_each_logging_step_is_a_row_on_a_terminal(capsys):
    ends = {"train_runtime": 1234.5, "train_loss": 5.5, "balance_loss": 1.1}
    speed, *lines = said(capsys, 4.0, False, every=250, ends=ends)
    assert "tokens a second" in speed
    assert [line.split() for line in lines[:3]] == [
        ["grad", "learning", "balance"],
        ["step", "left", "loss", "norm", "rate", "loss"],
        ["250", "of", "1,000", "50", "min", "5.432", "0.5", "0.01", "1.25"],
    ]
    assert len({len(line) for line in lines[:-1]}) == 1
    assert [line.split(" of ")[0].strip() for line in lines[3:-1]] == ["500", "750", "1,000"]
    assert lines[-1] == "trained 1,000 steps in 21 min, mean loss 5.5"


def test_a_table_has_a_new_head_where_the_names_change(capsys):
    table = LogTable(lambda: 0.0)
    state = SimpleNamespace(global_step=5, max_steps=10, is_world_process_zero=True)
    arguments = SimpleNamespace(disable_tqdm=False)
    table.on_train_begin(arguments, state, None)
    for logs in ({"loss": 1.0}, {"loss": 2.0}, {"eval_loss": 3.0}):
        table.on_log(arguments, state, None, logs=logs)
    table.on_train_end(arguments, state, None)
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["step", "left", "loss"], ["5", "of", "10", "?", "1"], ["5", "of", "10", "?", "2"],
        ["eval"], ["step", "left", "loss"], ["5", "of", "10", "?", "3"],
    ]  # fmt: skip


def test_a_log_has_the_step_and_the_time_left_on_every_line(capsys):
    lines = said(capsys, 4.0, True, every=100, begin=500)
    assert all(line.startswith("step ") and line.partition(":")[0].endswith(" left") for line in lines[1:])
    assert lines[1] == (
        "step 600 of 1,000, 27 min left: loss 5.432, grad_norm 0.5, learning_rate 0.01, balance_loss 1.25"
    )
    assert len(lines) == 6  # a row every 400 seconds: nothing more need be said


def test_a_loss_without_others_beside_it_is_shown_once(capsys):
    table = Progress(SimpleNamespace(
        get_total_train_batch_size=lambda args: 2, _is_encoder_decoder=False, trained_as="x", packed=None,
        router_losses=(), row_tokens=None,
    ))  # fmt: skip
    state = SimpleNamespace(global_step=0, max_steps=10, is_world_process_zero=True)
    arguments = SimpleNamespace(disable_tqdm=True, learning_rate=0.1, lr_scheduler_type="linear")
    for losses in ((), ("balance",)):
        table.trainer.router_losses, table.not_shown = losses, LogTable.not_shown
        table.on_train_begin(arguments, state, None)
        table.on_log(arguments, state, None, logs={"loss": 1.5, "next_token_loss": 1.5})
    assert capsys.readouterr().out.splitlines()[1::2] == [
        "step 0 of 10, ? left: loss 1.5", "step 0 of 10, ? left: loss 1.5, next_token_loss 1.5",
    ]  # fmt: skip


def test_a_notebook_shows_its_own_table(capsys):
    assert len(said(capsys, 4.0, False, every=250, shows=False)) == 1


def test_an_evaluation_before_any_training(capsys):
    state = SimpleNamespace(global_step=0, max_steps=0, is_world_process_zero=True)
    table, arguments = LogTable(), SimpleNamespace(disable_tqdm=False)
    table.on_prediction_step(arguments, state, None, eval_dataloader=[1])
    table.on_log(arguments, state, None, logs={"eval_loss": 3.0})
    table.on_evaluate(arguments, state, None)
    assert capsys.readouterr().out == "eval_loss 3\n"


def test_a_resumed_training_counts_its_own_steps(capsys):
    (line,) = said(capsys, 1.0, False, begin=900)[:1]
    assert line == "step 910 of 1,000, 100 tokens a second, about 2 min left"


def test_the_speed_of_a_translation_model_is_that_of_its_sentence_pairs(capsys):
    assert said(capsys, 0.5, True, pairs=True)[0].startswith("step 20 of 1,000, 4 sentence pairs a second")


def test_each_languages_share_is_said_before_a_training():
    assert _shares({"en": 50, "hu": 50}) == ["tokens: en 50%, hu 50%"]
    assert _shares({"en": 1, "hu": 24})[1] == (
        "warning: little of the text is en (4.0%): give more text of it, or less of the others"
    )

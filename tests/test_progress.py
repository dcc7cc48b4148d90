"""What a training says of its progress."""

from types import SimpleNamespace

import pytest
from tqdm.auto import tqdm

from hf_moe_expand.core import progress
from hf_moe_expand.stages.recording import Progress, _shares
from hf_moe_expand.trainers.log_table import LogTable

LOGS = {"loss": 5.43219, "grad_norm": 0.5, "learning_rate": 0.01, "balance_loss": 1.25, "epoch": 0.1}


@pytest.fixture(autouse=True)
def a_terminal(monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "")


def said(capsys, seconds, disable_tqdm, begin=0, pairs=False, steps=1000, every=None, ends=None):
    """The lines of a training whose steps have 2 blocks of 50 tokens, or 2 sentence pairs, and take `seconds`."""
    now = [0.0]
    trainer = SimpleNamespace(
        get_total_train_batch_size=lambda args: 2, _is_encoder_decoder=pairs, trained_as="review", packed=None,
        router_losses=(None,), row_tokens=50,
    )  # fmt: skip
    callback = Progress(trainer, lambda: now[0], True)
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


def test_a_log_tells_of_it_in_each_quarter_of_a_minute(capsys):
    lines = said(capsys, 4.0, True)
    assert lines[0] == "step 3 of 1,000, 25 tokens a second, about 1 h 6 min left"
    assert lines[1] == "step 6 of 1,000, 25 tokens a second, about 1 h 6 min left"
    assert len(lines) == 333
    assert said(capsys, 60.0, True)[0].startswith("step 1 of 1,000, 2 tokens a second, about 16 h 39 min")


def test_beside_a_progress_bar_once(capsys):
    assert len(said(capsys, 4.0, False)) == 1


class Beat:
    """In place of a heart: it beats when it is told to."""

    def __init__(self, say):
        self.beat = say

    def said(self): ...

    def stop(self): ...


def test_a_long_step_is_told_of_before_it_ends(capsys, monkeypatch):
    monkeypatch.setattr("hf_moe_expand.trainers.log_table.Heartbeat", Beat)
    now, state = [0.0], SimpleNamespace(global_step=0, max_steps=9, is_world_process_zero=True)
    table = LogTable(lambda: now[0])
    with table.beating():
        table.on_train_begin(SimpleNamespace(disable_tqdm=True), state, None)
        for state.global_step, now[0] in ((0, 15.0), (1, 31.0)):
            table.heart.beat()
    assert capsys.readouterr().out.splitlines() == ["step 0 of 9, 15 s so far", "step 1 of 9, about 4 min left"]


@pytest.mark.parametrize("ours", [False, True])
def test_where_there_is_no_terminal_a_bar_is_lines(capsys, monkeypatch, ours):
    monkeypatch.setenv("TQDM_DISABLE", "1")
    now = [100.0]
    monkeypatch.setattr(progress, "Heartbeat", Beat)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.all_in_lines():
        bar = (progress.Bar if ours else tqdm)(total=1000, desc="work", miniters=1, mininterval=0)
        bar._time, bar.start_t, bar.last_print_t = (lambda: now[0]), now[0], now[0]
        for seconds in (4, 4, 4, 4):
            now[0] += seconds
            bar.update(100)
        now[0] += 16
        if ours:
            bar._heart.beat()  # between two updates
        bar.close()
    lines = ["work:  30% 300/1000 [00:12<", "work:  40% 400/1000 [00:32<"]
    assert [line.partition("<")[0] + "<" for line in capsys.readouterr().err.splitlines()] == lines[: 1 + ours]


def test_each_logging_step_is_a_row_on_a_terminal(capsys):
    ends = {"train_runtime": 1234.5, "train_loss": 5.5, "balance_loss": 1.1}
    speed, *lines = said(capsys, 4.0, False, every=250, ends=ends)
    assert "tokens a second" in speed
    assert [line.split() for line in lines[:3]] == [
        ["grad", "learning", "balance"],
        ["step", "left", "loss", "norm", "rate", "loss"],
        ["250", "of", "1,000", "50", "min", "5.432", "0.5", "0.01", "1.25"],
    ]
    assert [line.split(" of ")[0].strip() for line in lines[3:-1]] == ["500", "750", "1,000"]
    assert lines[-1] == "trained 1,000 steps in 21 min, mean loss 5.5"


def test_a_log_has_the_step_and_the_time_left_on_every_line(capsys):
    lines = said(capsys, 4.0, True, every=2, begin=500)
    assert all(line.startswith("step ") and line.partition(":")[0].endswith(" left") for line in lines)
    assert lines[50] == (
        "step 600 of 1,000, 27 min left: loss 5.432, grad_norm 0.5, learning_rate 0.01, balance_loss 1.25"
    )
    assert len(lines) == 251  # a row every 8 seconds: nothing more need be said, but the tokens a second


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
    assert said(capsys, 0.5, True, pairs=True)[0].startswith("step 20 of 1,000, 4 sentence pairs a second")


def test_each_languages_share_is_said_before_a_training():
    assert _shares({"en": 50, "hu": 50}) == ["tokens: en 50%, hu 50%"]
    assert _shares({"en": 1, "hu": 24})[1] == (
        "warning: little of the text is en (4.0%): give more text of it, or less of the others"
    )

"""What a training says of its progress."""

from types import SimpleNamespace

import pytest
from tqdm.auto import tqdm

from hf_moe_expand.core import progress
from hf_moe_expand.stages.recording import Progress, _shares
from hf_moe_expand.trainers.log_lines import LogLines

LOGS = {"loss": 5.43219, "grad_norm": 0.5, "learning_rate": 0.01, "balance_loss": 1.25, "epoch": 0.1}


@pytest.fixture(autouse=True)
def a_terminal(monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "")


def said(capsys, seconds, disable_tqdm, begin=0, pairs=False, steps=1000, every=None, ends=None):
    """The lines of a training whose steps have 2 blocks of 50 tokens, or 2 sentence pairs, and take `seconds`."""
    now = [0.0]
    trainer = SimpleNamespace(
        get_total_train_batch_size=lambda args: 2, _is_encoder_decoder=pairs, trained_as="review", packed=None,
        router_losses=(None,), row_tokens=50, mix=None,
    )  # fmt: skip
    callback = Progress(trainer, True, lambda: now[0])
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


class Beat:
    """In place of a heart: it beats when it is told to."""

    def __init__(self, say):
        self.beat = say

    def said(self): ...

    def stop(self): ...


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


@pytest.mark.parametrize("disable_tqdm", [False, True])
def test_a_log_has_the_step_the_speed_and_the_time_left_on_every_line(capsys, disable_tqdm):
    ends = {"train_runtime": 1234.5, "train_loss": 5.5, "balance_loss": 1.1}
    lines = said(capsys, 4.0, disable_tqdm, every=2, begin=500, ends=ends)
    assert len(lines) == 251
    assert lines[49] == (
        "step 600 of 1,000, 25 tokens a second, 27 min left: loss 5.432, grad_norm 0.5, learning_rate 0.01, "
        "balance_loss 1.25"
    )
    assert lines[-2].startswith("step 1,000 of 1,000: loss 5.432")
    assert lines[-1] == "trained 500 steps in 21 min, mean loss 5.5"
    assert said(capsys, 0.5, True, pairs=True, every=20)[0].startswith("step 20 of 1,000, 4 sentence pairs a second")


def test_an_evaluation_before_any_training(capsys):
    state = SimpleNamespace(global_step=0, max_steps=0, is_world_process_zero=True)
    lines, arguments = LogLines(), SimpleNamespace(disable_tqdm=False)
    lines.on_prediction_step(arguments, state, None, eval_dataloader=[1])
    lines.on_log(arguments, state, None, logs={"eval_loss": 3.0})
    lines.on_evaluate(arguments, state, None)
    assert capsys.readouterr().out == "eval_loss 3\n"


def test_a_training_that_fails_leaves_no_bar():
    lines, state = LogLines(), SimpleNamespace(global_step=0, max_steps=9, is_world_process_zero=True)
    lines.on_train_begin(SimpleNamespace(disable_tqdm=False), state, None)
    bar = lines.training_bar
    lines.close()
    assert bar.disable or bar._heart._ended.is_set()
    assert lines.training_bar is None


def test_each_languages_share_is_said_before_a_training():
    assert _shares({"en": 50, "hu": 50}) == ["tokens: en 50%, hu 50%"]
    assert _shares({"en": 1, "hu": 24})[1] == (
        "warning: little of the text is en (4.0%): give more text of it, or less of the others"
    )

"""What a training says of its progress."""

from types import SimpleNamespace

import pytest

from hf_moe_expand.stages.recording import Progress, _duration, _shares


def said(capsys, seconds, disable_tqdm, begin=0, pairs=False):
    """The lines of a training of 1,000 steps of 2 blocks of 50 tokens, or 2 sentence pairs, whose steps take
    `seconds`."""
    now = [0.0]
    trainer = SimpleNamespace(
        get_total_train_batch_size=lambda args: 2, _is_encoder_decoder=pairs, trained_as="review", packed=None
    )
    callback = Progress(trainer, lambda: now[0])
    arguments = SimpleNamespace(
        block_size=50, disable_tqdm=disable_tqdm, lr_scheduler_type="cosine", learning_rate=0.01
    )
    state = SimpleNamespace(global_step=begin, max_steps=1000, is_world_process_zero=True)
    callback.on_train_begin(arguments, state, None)
    assert capsys.readouterr().out.splitlines() == [
        f"review: 1,000 steps of {'2 sentence pairs' if pairs else '100 tokens'}, learning rate 0.01 (cosine)",
        *([f"resumes at step {begin} of 1000"] if begin else []),
    ]
    while state.global_step < 1000:
        now[0] += seconds
        state.global_step += 1
        callback.on_step_end(arguments, state, None)
    return capsys.readouterr().out.splitlines()


def test_a_log_tells_of_it_in_the_first_half_minute_and_then_seldom(capsys, monkeypatch):
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    lines = said(capsys, 4.0, True)
    assert lines[0] == "step 3 of 1,000, 25 tokens a second, about 1 h 6 min left"
    assert lines[1] == "step 153 of 1,000, 25 tokens a second, about 56 min left"
    assert len(lines) == 7
    assert said(capsys, 60.0, True)[0].startswith("step 1 of 1,000, 2 tokens a second, about 16 h 39 min")


def test_beside_a_progress_bar_once(capsys, monkeypatch):
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    assert len(said(capsys, 4.0, False)) == 1
    monkeypatch.setenv("TQDM_DISABLE", "1")
    assert len(said(capsys, 4.0, False)) == 7


def test_a_resumed_training_counts_its_own_steps(capsys):
    (line,) = said(capsys, 1.0, False, begin=900)[:1]
    assert line == "step 910 of 1,000, 100 tokens a second, about 2 min left"


def test_the_speed_of_a_translation_model_is_that_of_its_sentence_pairs(capsys):
    assert said(capsys, 0.5, True, pairs=True)[0].startswith("step 20 of 1,000, 4 sentence pairs a second")


def test_a_short_training_says_nothing(capsys):
    assert said(capsys, 0.009, True) == []


@pytest.mark.parametrize(
    ("seconds", "words"), [(20, "20 s"), (95, "2 min"), (3600, "1 h 0 min"), (1e6, "277 h 47 min")]
)
def test_durations(seconds, words):
    assert _duration(seconds) == words


def test_each_languages_share_is_said_before_a_training():
    assert _shares({"en": 50, "hu": 50}) == ["tokens: en 50%, hu 50%"]
    assert _shares({"en": 1, "hu": 24})[1] == (
        "warning: little of the text is en (4.0%): give more text of it, or less of the others"
    )

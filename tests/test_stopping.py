"""Trainings that a signal stops: the step is saved, and nothing is done again; what a training says of its progress."""

import signal
import threading
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
from conftest import interrupted, save_dense, start_python, write_texts
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from hf_moe_expand import LanguageText, Plan, PostPretrainConfig, PostPretrainTrainer, expand_checkpoint, train_stage
from hf_moe_expand.core import progress
from hf_moe_expand.stages import stopping
from hf_moe_expand.stages.recording import Progress
from hf_moe_expand.trainers.log_lines import LogLines

TEXTS = ["a text that is long enough for a block " * 4] * 4
QUICK = {"block_size": 16, "max_steps": 6, "per_device_train_batch_size": 1, "disable_tqdm": True}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("stops")
    save_dense(root / "base", tie_word_embeddings=True)
    expand_checkpoint(root / "base", root / "expanded", Plan("layer-moe", [2, 1, 2], old=["en"], new=["el"]))
    write_texts(root / "el.jsonl", TEXTS)
    return root


@pytest.fixture(autouse=True)
def usual_handlers():
    """Those of a terminal: a process in the background ignores SIGINT."""
    handlers = dict.fromkeys(stopping.SIGNALS, signal.SIG_DFL) | {signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield handlers
    after = {number: signal.getsignal(number) for number in handlers}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after == handlers


class Signals(TrainerCallback):
    """Raises signals inside a step; notes the handlers, the first step and the saves."""

    def __init__(self, *numbers, step=3):
        self.numbers, self.step, self.first, self.handlers, self.saves = numbers, step, None, None, []

    def on_train_begin(self, args, state, control, **others):
        self.first, self.handlers = state.global_step, {n: signal.getsignal(n) for n in stopping.SIGNALS}

    def on_step_begin(self, args, state, control, **others):
        if state.global_step == self.step - 1:
            for number in self.numbers:
                signal.raise_signal(number)

    def on_save(self, args, state, control, **others):
        self.saves.append(state.global_step)


def stage(root, out, callback, **changes):
    with interrupted(0, callback=callback):
        text = {"el": LanguageText("el", str(root / "el.jsonl"))}
        return train_stage(root / "expanded", out, text, PostPretrainConfig(**QUICK | changes))


@pytest.fixture(scope="module")
def whole(root):
    stage(root, root / "whole", Signals())
    return (root / "whole" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "numbers",
    # Twice, as by `timeout`, which signals the process and its group.
    [[signal.SIGINT], [signal.SIGINT] * 2, [signal.SIGTERM] * 2, [signal.SIGHUP]],
)
def test_a_signal_saves_its_step_and_the_same_call_goes_on(root, whole, tmp_path, capsys, numbers):
    number, kind = numbers[0], KeyboardInterrupt if signal.SIGINT in numbers else SystemExit
    with pytest.raises(kind) as stopped:
        stage(root, tmp_path / "out", Signals(*numbers))
    if kind is SystemExit:
        assert stopped.value.code == 128 + number
    else:
        assert stopped.value.__notes__ == ["from step 3"]
    said = capsys.readouterr()
    assert f"{number.name}: step 3 of 6 is saved in {tmp_path / 'out'}.training; " in said.out
    assert not (tmp_path / "out").exists()
    goes_on = Signals()
    stage(root, tmp_path / "out", goes_on)
    assert goes_on.first == 3
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == whole


def test_a_second_signal_stops_at_once(root, tmp_path, monkeypatch, usual_handlers):
    with pytest.raises(KeyboardInterrupt) as stopped:
        stage(root, tmp_path / "out", Signals(signal.SIGTERM, signal.SIGINT))
    assert not hasattr(stopped.value, "__notes__")
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(stopping, "_SAME", -1)
    signal.signal(signal.SIGTERM, usual_handlers[signal.SIGINT])  # the usual one would end this process
    with pytest.raises(KeyboardInterrupt):
        stage(root, tmp_path / "out", Signals(signal.SIGTERM, signal.SIGTERM, step=4), save_steps=2)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert [path.name for path in (tmp_path / "out.training").glob("checkpoint-*")] == ["checkpoint-2"]


def test_a_signal_in_the_last_step_leaves_the_writing(root, whole, tmp_path):
    with pytest.raises(SystemExit):
        stage(root, tmp_path / "out", Signals(signal.SIGTERM, step=6))
    assert not (tmp_path / "out").exists()
    assert stage(root, tmp_path / "out", Signals()).steps == 6
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == whole


def test_a_handler_of_the_script_is_called_once_the_step_is_saved(root, tmp_path):
    came = []
    signal.signal(signal.SIGTERM, lambda number, frame: came.append(list((tmp_path / "out.training").glob("*-3"))))
    with pytest.raises(SystemExit):  # it returned, but the training is not done
        stage(root, tmp_path / "out", Signals(signal.SIGTERM))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert len(came) == 1
    assert came[0]


TEXT = Dataset.from_dict({"text": TEXTS})


def own_trainer(root, out, callbacks, eval_dataset=None, compute_metrics=None, **options):
    return PostPretrainTrainer(
        AutoModelForCausalLM.from_pretrained(root / "expanded"), PostPretrainConfig(str(out), **QUICK | options),
        train_dataset=TEXT, eval_dataset=eval_dataset, processing_class=AutoTokenizer.from_pretrained(root / "base"),
        compute_metrics=compute_metrics, callbacks=[*callbacks],
    )  # fmt: skip


@pytest.fixture
def scored(root, tmp_path):
    """`scored(2)`: a trainer that scores and saves each step, of which the second is the best."""

    def make(best, *callbacks, **options):
        given = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "greater_is_better": True}
        given |= {"metric_for_best_model": "near", "load_best_model_at_end": True, **options}
        metric = {"compute_metrics": lambda _: {"near": -abs(trainer.state.global_step - best)}}
        trainer = own_trainer(root, tmp_path, callbacks, eval_dataset=TEXT, **metric, **given)
        return trainer

    return make


@pytest.mark.parametrize("saves", ["best", "steps"])
def test_a_step_that_is_not_the_best_is_saved_too(scored, tmp_path, capsys, saves):
    signals = Signals(signal.SIGTERM)
    trainer = scored(1, signals, save_strategy=saves)
    with pytest.raises(SystemExit):
        trainer.train()
    assert "step 3 of 6 is saved" in capsys.readouterr().out
    assert (tmp_path / "checkpoint-3" / "optimizer.pt").is_file()
    assert signals.saves == ([1, 3] if saves == "best" else [1, 2, 3])
    assert trainer.args.save_total_limit == 1


@pytest.mark.parametrize("place", ["ignored", "thread", "no checkpoints"])
def test_other_handlers_stay(root, tmp_path, usual_handlers, place):
    kept = usual_handlers
    seen, changes = Signals(), {"save_strategy": "no"} if place == "no checkpoints" else {}
    if place == "ignored":
        kept = {signal.SIGHUP: signal.SIG_IGN}
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    thread = threading.Thread(target=stage, args=(root, tmp_path / "out", seen), kwargs=changes)
    if place == "thread":
        thread.start()
        thread.join()
    else:
        thread.run()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    assert (tmp_path / "out" / "config.json").is_file()
    assert {number: seen.handlers[number] for number in kept} == kept


@pytest.mark.parametrize(
    ("changes", "saves"), [({}, [1, 2, 3, 4, 5, 6]), ({"save_steps": 4}, [4, 6]), ({"save_strategy": "epoch"}, [6])]
)
def test_without_save_steps_the_clock_saves(root, tmp_path, monkeypatch, changes, saves):
    assert stopping.SECONDS_BETWEEN_SAVES == 600
    monkeypatch.setattr(stopping, "SECONDS_BETWEEN_SAVES", 0)
    seen = Signals()
    stage(root, tmp_path / "out", seen, **changes)
    assert seen.saves == saves


def test_a_trainer_of_ones_own_does_the_same(root, tmp_path, capsys):
    before = {number: signal.getsignal(number) for number in stopping.SIGNALS}
    stopped = own_trainer(root, tmp_path / "out", [Signals(signal.SIGTERM)])
    assert {number: signal.getsignal(number) for number in stopping.SIGNALS} == before
    with pytest.raises(SystemExit) as left:
        stopped.train()
    assert left.value.code == 143
    assert stopped.record is None
    assert f"SIGTERM: step 3 of 6 is saved in {tmp_path / 'out'}; " in capsys.readouterr().out
    seen = Signals()
    assert own_trainer(root, tmp_path / "out", [seen]).train(resume_from_checkpoint=True).global_step == 6
    assert seen.first == 3


# Signals its whole group, workers too, as clusters do.
WORKERS = """
import os, signal
from hf_moe_expand import LanguageText, PostPretrainConfig, train_stage
from transformers import TrainerCallback
from hf_moe_expand.stages.trainer import StageTrainer
class Stop(TrainerCallback):
    def on_step_begin(self, args, state, control, **others):
        if state.global_step == 2:
            os.killpg(0, signal.SIGTERM)
make = StageTrainer.__init__
def made(self, *args, **kwargs):
    make(self, *args, **kwargs)
    self.add_callback(Stop())
StageTrainer.__init__ = made
os.setpgid(0, 0)
root = sys.argv[1]
config = PostPretrainConfig(block_size=16, max_steps=6, per_device_train_batch_size=1, dataloader_num_workers=1)
train_stage(root + "/expanded", sys.argv[2], {"el": LanguageText("el", root + "/el.jsonl")}, config)
"""


def test_a_signal_to_the_whole_group_leaves_the_workers_to_their_step(root, tmp_path):
    process = start_python(WORKERS, str(root), str(tmp_path / "out"))
    said, errors = process.communicate()
    assert process.returncode == 143, errors
    assert "SIGTERM: step 3 of 6 is saved" in said


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


@pytest.mark.parametrize("ours", [False, True])
def test_where_there_is_no_terminal_a_bar_is_lines(capsys, monkeypatch, ours):
    monkeypatch.setenv("TQDM_DISABLE", "1")
    now = [100.0]
    monkeypatch.setattr(progress, "_said", [0.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.all_in_lines():

        def works(kind, desc, total, *seconds):
            bar = kind(total=total, desc=desc, miniters=1, mininterval=0)
            bar._time, bar.start_t, bar.last_print_t = (lambda: now[0]), now[0], now[0]
            for passed in seconds:
                now[0] += passed
                bar.update(100)
            bar.close()

        works(progress.Bar if ours else tqdm, "work", 1000, 4, 4, 4, 4)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("work:  30% 300/1000 [00:12<")
    if ours:  # a second work of as long, which says something sooner
        works(partial(progress.Bar, delay=0), "next", 200, 7)
        assert capsys.readouterr().err.startswith("next:  50% 100/200")


def test_a_long_step_is_told_of_before_it_ends(capsys, monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "1")
    monkeypatch.setattr(progress, "EVERY", 0.01)
    monkeypatch.setattr(progress, "EARLY", 0.0)
    shown = threading.Event()
    monkeypatch.setattr(progress.Bar, "display", lambda bar, *_, **__: shown.set())
    bar = progress.Bar(total=9, desc="work", delay=0)
    shown.clear()
    assert shown.wait(60)
    (beat,) = (one for one in threading.enumerate() if getattr(one, "_args", ())[1:] == (bar.ended,))
    left = weakref.ref(bar)
    bar.close()
    beat.join(60)
    assert not beat.is_alive()
    del bar
    assert left() is None


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


SHOWN = SimpleNamespace(disable_tqdm=False)


def beginning(steps=9):
    return SimpleNamespace(global_step=0, max_steps=steps, is_world_process_zero=True)


def test_an_evaluation_during_a_training_is_told_of_by_the_trainings_bar():
    lines, state = LogLines(), beginning()
    lines.on_train_begin(SHOWN, state, None)
    for _ in range(2):
        for _ in range(3):
            lines.on_prediction_step(SHOWN, state, None, eval_dataloader=range(3))
        assert lines.prediction_bar is None
        assert lines.training_bar.postfix == "evaluation: 3 of 3"
        lines.on_evaluate(SHOWN, state, None)
        assert not lines.training_bar.postfix
    lines.close()


@pytest.mark.parametrize("trains", [False, True])
def test_an_evaluation_where_there_is_no_terminal_is_lines(capsys, monkeypatch, trains):
    monkeypatch.setenv("TQDM_DISABLE", "1")
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    lines, state = LogLines(), beginning()
    if trains:
        lines.on_train_begin(SHOWN, state, None)
    for batch in range(12):
        lines.on_prediction_step(SHOWN, state, None, eval_dataloader=range(12))
        bar = lines.training_bar if trains else lines.prediction_bar
        assert isinstance(bar, progress.Bar)
        bar.refresh()
        assert len(capsys.readouterr().err.splitlines()) == (batch in (5, 10))
        now[0] += 2
    lines.on_evaluate(SHOWN, state, None)
    lines.close()
    assert capsys.readouterr().err == ""


def test_an_evaluation_or_a_training_that_fails_leaves_no_bar(scored):
    trainer = scored(1, disable_tqdm=False)
    trainer.compute_metrics = lambda _: {}["no metrics"]
    with pytest.raises(KeyError, match="no metrics"):
        trainer.evaluate()
    assert trainer._shown.prediction_bar is None
    lines = LogLines()
    lines.on_train_begin(SHOWN, beginning(), None)
    bar = lines.training_bar
    lines.close()
    assert bar.disable
    assert lines.training_bar is None

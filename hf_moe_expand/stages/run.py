"""Runs one training stage, from a checkpoint folder to a checkpoint folder."""

import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from ..checkpoint.compare import compare_checkpoints
from ..checkpoint.reader import CheckpointReader
from ..checkpoint.records import StageRecord, add_stage
from ..checkpoint.source import TOKENIZER_FILES, resolve_checkpoint
from ..checkpoint.stored import StoredModel, network_of
from ..checkpoint.writer import check_output, copy_companions, new_folder
from ..core.disk import check_room, folder_bytes
from ..core.errors import DivergedError, InputError, goes_on
from ..core.languages import same_language
from ..core.schema import changed, check_seed, checked
from ..core.scratch import last_step
from ..data.sources import LanguageText
from ..evaluation.validation import VALIDATION
from ..inference.memory import training_disk
from ..inference.models import check_finite, load_tokenizer
from ..inference.sampling import writer_of
from ..modeling import auto_class
from .config import StageConfig
from .distributed import check_deepspeed, is_split, save_whole, sharding, whole_weights
from .prepare import packed_text
from .resume import TrainingFolder
from .streaming import is_streamed


@checked
def train_stage(
    model: str | os.PathLike,
    out: str | os.PathLike,
    data: Mapping[str, LanguageText],
    config: StageConfig,
    seed: int | None = None,
    overwrite: bool = False,
    allow_lost_text: bool = False,
) -> StageRecord:
    """Trains one stage and writes the trained checkpoint, whole and in its own type, also where the launch splits the
    model over ranks (docs/distributed.md). An interrupted run resumes from its last training checkpoint, which is kept
    beside `out` until the stage is done; SIGINT and SIGTERM save one (`stages/stopping.py`).

    Args:
        model: expanded checkpoint; a dense one for `DenseConfig`.
        data: text of each language: the new languages in stage 1, all languages in review and in DMoE's stages, the
            newest language in adaptation.
        config: such as `PostPretrainConfig(bf16=True)`; its class selects the stage, and its `output_dir` is not read.
        seed: random seed; by default the configuration's.
        allow_lost_text: train on text of which the tokenizer loses more than 2 %, too.

    Returns:
        The record that the stage adds to the checkpoint's history.

    Raises:
        InputError: data or settings do not fit, the tokenizer loses text, or the disk has too little room.
        DivergedError: the loss, the gradient or a weight is not finite; it is an InputError, too.
        KeyboardInterrupt: Ctrl-C; its note says the step from which the same call goes on.
    """
    with goes_on(lambda: f"from step {step}" if (step := last_step(Path(out))) else ""):
        return _train_stage(model, out, data, config, seed, overwrite, allow_lost_text)


def _train_stage(
    model: str | os.PathLike,
    out: str | os.PathLike,
    data: Mapping[str, LanguageText],
    config: StageConfig,
    seed: int | None,
    overwrite: bool,
    allow_lost_text: bool,
) -> StageRecord:
    folder = resolve_checkpoint(model)
    out = check_output(out, overwrite, folder)
    before = config.load_config(folder)
    stored = StoredModel(folder, before)  # refuses an incomplete checkpoint
    config.check_alone()
    check_seed(seed)
    config = config.begun(**({} if seed is None else {"seed": seed, "data_seed": seed}))  # the caller's stays as it is
    settings = _checked(config, before, data)
    work = TrainingFolder(out, folder, settings, data, config.seed)
    config.output_dir = str(work.path)
    is_first = config.process_index == 0
    if is_first:
        work.lock.refuse_if_held()
    resume = work.resume()
    written = sum(tensor.nbytes for tensor in stored.reader.tensors.values())
    needed = written * (2 if is_split(config) else 1)  # once more where whole weights are gathered
    needed += max(training_disk(stored.network, config) - folder_bytes(work.path), 0)
    if is_first:
        check_room(out, needed, "the trained checkpoint and the training checkpoints beside it")
    tokenizer = load_tokenizer(folder, model)
    # The other ranks find the result in the cache; of a stream, each reads its own.
    with nullcontext() if is_streamed(config, data, before) else config.main_process_first(desc="pack"):
        packed = packed_text(config, before, data, tokenizer, allow_lost_text)
        callbacks = config.scoring(work.path, tokenizer, list(data), before)
    placed = config.place_classifiers(folder, before, data, resume)
    network = _loaded(model, folder, before, config, placed)
    with work.begun(is_first):  # before the Trainer makes the folder
        trainer = config.make_trainer(network, packed, callbacks)
        trainer.settings = {**settings, "stream": True} if trainer.stream is not None else settings
        check_deepspeed(trainer, before)
        trainer.train(resume_from_checkpoint=resume)
        weights: Mapping[str, torch.Tensor] = whole_weights(trainer, before, folder, work.path / "whole")
        if writers := {code: name for code, text in data.items() if (name := writer_of(text))}:
            trainer.record = changed(trainer.record, written_by=writers)
        add_stage(before, trainer.record)
        if trainer.is_world_process_zero():
            weights = config.to_write(folder, weights)
            check_trained(weights, config.name)
            with new_folder(out, overwrite, written) as partial:
                save_whole(weights, before, partial, folder)
                copy_companions(folder, partial, TOKENIZER_FILES)
                _save_state(trainer.state, partial)
                if callbacks:
                    shutil.copyfile(work.path / VALIDATION, partial / VALIDATION)
            work.remove()
    trainer.accelerator.wait_for_everyone()
    return trainer.record


def _checked(config: StageConfig, before: Any, data: Mapping[str, LanguageText]) -> dict[str, Any]:
    """The settings of a training for its history, once they are checked with model and text; sets its length."""
    lines, settings = config.check(before, data), config.recorded()
    for code, text in data.items():
        if not same_language(code, text.language):
            raise InputError(f"data[{code!r}] is text in {text.language!r}: give it under its own code.")
    if config.process_index == 0 and lines:
        print("\n".join(lines))
    if (curriculum := config.order(list(data))) is not None:
        settings["curriculum"] = curriculum.model_dump()
        config.max_steps = curriculum.steps
    return settings


def _loaded(name: Any, folder: Path, before: Any, config: StageConfig, placed: bool) -> Any:
    """The model of a checkpoint, as it trains: master weights in float32, since a step of 5e-5 would round away in
    bfloat16; with the classifiers of `before`, if these were `placed`."""
    split: dict[str, Any] = sharding(config.distributed_config)  # type: ignore[arg-type]
    with _only_errors() if placed else nullcontext():  # the library would report the new classifiers as missing
        network = auto_class(before).from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=False, **split, **({"config": before} if placed else {})
        )
    if not split and not config.deepspeed:  # else a rank holds parts alone
        check_finite(network, name)
    return network


def _save_state(state: Any, folder: Path) -> None:
    """Writes the log. Mixed precision skips steps whose gradient overflowed; JSON has no such number."""
    state.log_history = [
        {n: v for n, v in log.items() if not isinstance(v, float) or math.isfinite(v)} for log in state.log_history
    ]
    state.save_to_json(str(folder / "trainer_state.json"))


@contextmanager
def _only_errors() -> Iterator[None]:
    """Inside, transformers logs errors alone."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def check_trained(weights: Mapping[str, torch.Tensor], stage: str) -> None:
    """Refuses weights that are not finite, before they are written; the DivergedError names the first one."""
    for name, weight in weights.items():
        if weight.is_floating_point() and not torch.isfinite(weight).all():
            raise DivergedError(f"{stage}: {name} is not finite after training: lower the learning rate, or warm up.")


def check_frozen(before: str | os.PathLike, after: str | os.PathLike, config: StageConfig) -> int:
    """Checks that the tensors that a stage does not train are byte-identical (P3); returns their number."""
    before, after = resolve_checkpoint(before), Path(after)
    stage, trained = config.trained()
    network = network_of(config.load_config(after))
    config.freeze(network)
    moving = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    comparison = compare_checkpoints(before, after)
    added = [name for name in comparison.added if not (name in moving and name.endswith(".classifier.weight"))]
    wrong = [name for name in comparison.changed if name not in moving] + added + comparison.removed
    if trained.last_router_row:
        left, right = CheckpointReader(before), CheckpointReader(after)
        routers = [name for name in comparison.changed if name.endswith(".router.weight")]
        wrong += [name for name in routers if not torch.equal(left.tensor(name)[:-1], right.tensor(name)[:-1])]
    if wrong:
        raise RuntimeError(
            f"{after}: stage {stage} changed tensors that it had to leave alone: {', '.join(wrong[:5])}."
        )
    return sum(name not in moving for name in comparison.identical)

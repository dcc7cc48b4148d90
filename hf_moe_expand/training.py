"""One training stage from a checkpoint folder to a checkpoint folder."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from .checkpoint.compare import compare_checkpoints
from .checkpoint.expand import copy_companions
from .checkpoint.source import load_expanded_config, resolve_checkpoint
from .checkpoint.writer import check_output, new_folder
from .data.mixing import review_documents
from .data.packing import PackedText, collate_blocks, pack_texts
from .data.sources import LanguageText
from .errors import InputError
from .jsonfile import read_json, write_json
from .modeling import LayerMoEForCausalLM
from .settings import PostPretrainSettings, ReviewSettings, unknown_key
from .trainers import PostPretrainTrainer, ReviewTrainer, RouterLossWeights, Stage, freeze

_DEFAULTS = {"report_to": "none", "logging_steps": 10, "save_total_limit": 1}
_STARTED_WITH = "started_with.json"
# Ours to set: where things go, and what the losses rely on.
_RESERVED = ("output_dir", "seed", "data_seed", "remove_unused_columns", "label_names")


def check_training_arguments(training: Mapping[str, Any], where: str) -> None:
    """Refuses keys that `TrainingArguments` does not have, and those that are ours to set."""
    known = [f.name for f in fields(TrainingArguments) if f.init]
    for key in training:
        if key in _RESERVED:
            raise InputError(f"{where}: `{key}` is set by hf-moe-expand; leave it out.")
        if key not in known:
            raise InputError(f"{where}: {unknown_key(key, known)}")
    for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
        if (training.get(name) or {}).get("use_reentrant"):
            raise InputError(
                f"{where}: reentrant gradient checkpointing silently drops the gradient of the router losses; set "
                f"{name}: {{use_reentrant: false}}."
            )
    if training.get("label_smoothing_factor"):
        raise InputError(f"{where}: label_smoothing_factor is not supported; set it to 0.")


def train_stage(
    model: str | os.PathLike,
    out: str | os.PathLike,
    data: Mapping[str, LanguageText],
    settings: PostPretrainSettings | ReviewSettings,
    seed: int = 0,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Trains one stage and writes the trained checkpoint.

    Which languages are old and which are new is read from the checkpoint. A run that was interrupted goes on from its
    last training checkpoint (`save_steps` in `training`), kept beside `out` until the stage is done.

    Args:
        model: expanded checkpoint.
        data: text of each language: of the new ones in stage 1, of all of them in review.
        settings: of stage 1 or of review; their class decides the stage.

    Returns:
        The entry that the stage adds to the checkpoint's provenance.

    Raises:
        InputError: the data does not fit the checkpoint's languages, or a setting is wrong.
    """
    folder = resolve_checkpoint(model)
    out = check_output(out, overwrite, folder)
    config = load_expanded_config(folder)
    check_training_arguments(settings.training, "training")
    old, new = config.expansions[-1]["old_languages"], config.expansions[-1]["new_languages"]
    _check_data(data, old, new, settings)
    work = out.with_name(f"{out.name}.training")
    arguments = TrainingArguments(
        **{**_DEFAULTS, "use_cpu": not torch.accelerator.is_available(), **settings.training},
        output_dir=str(work),
        seed=seed,
        data_seed=seed,
        remove_unused_columns=True,
    )
    started_with = {"settings": asdict(settings), "seed": seed, "data": {code: data[code].source for code in data}}
    resume = _unfinished(work, json.loads(json.dumps(started_with)))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with arguments.main_process_first(desc="pack"):  # the others find its result in the cache
        packed = _pack(data, tokenizer, old, new, settings, seed)
    # Master weights in float32: a step of 5e-5 would round away in bfloat16. Saved in the checkpoint's own type.
    network = LayerMoEForCausalLM.from_pretrained(folder, dtype=torch.float32)
    trainer = _trainer(network, arguments, packed, old, settings)
    if trainer.is_world_process_zero():
        write_json(work / _STARTED_WITH, started_with)
    result = trainer.train(resume_from_checkpoint=resume)
    entry = {
        "stage": str(Stage.EVERYTHING if getattr(settings, "everything", False) else trainer.stage),
        "steps": result.global_step,
        "documents": packed.documents,
        "tokens": packed.tokens,
        "seed": seed,
        "settings": asdict(settings),
    }
    network.to(config.dtype or torch.float32)
    network.config.expansions[-1]["stages"].append(entry)
    if trainer.is_world_process_zero():
        with new_folder(out, overwrite) as partial:
            network.save_pretrained(partial)
            copy_companions(folder, partial)
            trainer.state.save_to_json(str(partial / "trainer_state.json"))
        shutil.rmtree(work, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    return entry


def _unfinished(work: Path, started_with: dict[str, Any]) -> str | None:
    """The last training checkpoint of an interrupted run with the same settings, if there is one."""
    record = work / _STARTED_WITH
    if not record.is_file():
        return None
    if read_json(record, "the record of a training run") != started_with:
        raise InputError(
            f"{work}: holds an interrupted run with other settings, seed or data. Delete the folder to start anew, or "
            "undo the change to go on."
        )
    return get_last_checkpoint(str(work))


def check_frozen(before: str | os.PathLike, after: str | os.PathLike, stage: str) -> int:
    """The number of tensors that `stage` had to leave alone, all of them found byte-identical (P3).

    Raises:
        RuntimeError: one of them changed, or a tensor appeared or disappeared.
    """
    before = resolve_checkpoint(before)
    config = load_expanded_config(before)
    with torch.device("meta"):
        network = LayerMoEForCausalLM(config)
    freeze(network, Stage(stage))
    trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    found = compare_checkpoints(before, after)
    wrong = [name for name in found.changed if name not in trained] + found.added + found.removed
    if wrong:
        raise RuntimeError(
            f"{after}: stage {stage} changed tensors that it had to leave alone: {', '.join(wrong[:5])}."
        )
    return len(found.identical)


def _check_data(data: Mapping[str, Any], old: list[str], new: list[str], settings: Any) -> None:
    if unknown := sorted(set(data) - set(old) - set(new)):
        raise InputError(
            f"{', '.join(unknown)}: not a language of this expansion (old: {', '.join(old) or 'none'}; new: "
            f"{', '.join(new) or 'none'}). The plan says which they are (--old and --new of `plan`)."
        )
    if isinstance(settings, ReviewSettings):
        if missing := [code for code in [*old, *new] if code not in data]:
            raise InputError(f"{', '.join(missing)}: review needs text of every old and new language.")
        return
    if missing := [code for code in new if code not in data]:
        raise InputError(f"{', '.join(missing)}: no text was given for a language that this expansion adds.")
    given_old = [code for code in old if code in data]
    if given_old and not settings.replay:
        raise InputError(
            f"{', '.join(given_old)}: post-pretraining sees new languages only; set `replay: true` to train on old "
            "ones too."
        )
    if settings.language_prior and not given_old:
        raise InputError("language_prior in post-pretraining needs old-language text: set `replay: true` and give it.")


def _pack(
    data: Mapping[str, LanguageText], tokenizer: Any, old: list[str], new: list[str], settings: Any, seed: int
) -> PackedText:
    languages = [*old, *new]
    texts = {code: data[code].load() for code in languages if code in data}
    if isinstance(settings, ReviewSettings):
        available = {code: len(dataset) for code, dataset in texts.items()}
        documents = review_documents(available, old, new, settings.old_documents, settings.new_per_old)
        return pack_texts(texts, tokenizer, settings.block_size, seed, documents=documents, languages=languages)
    return pack_texts(
        texts,
        tokenizer,
        settings.block_size,
        seed,
        tokens_per_language=settings.tokens_per_language,
        languages=languages,
    )


def _trainer(network: Any, arguments: TrainingArguments, packed: PackedText, old: list[str], settings: Any) -> Any:
    common = {
        "args": arguments,
        "train_dataset": packed.dataset,
        "data_collator": collate_blocks,
        "language_classes": [0 if code in old else 1 for code in packed.languages],
    }
    if isinstance(settings, ReviewSettings):
        losses = RouterLossWeights(settings.balance, settings.language_prior, settings.classifier)
        return ReviewTrainer(network, router_losses=losses, **common)
    losses = RouterLossWeights(settings.balance, settings.language_prior)
    return PostPretrainTrainer(network, router_losses=losses, everything=settings.everything, **common)

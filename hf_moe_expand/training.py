"""One training stage from a checkpoint folder to a checkpoint folder."""

import copy
import json
import os
import re
import shutil
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks

from .checkpoint.compare import compare_checkpoints
from .checkpoint.folder import copy_companions
from .checkpoint.history import without_folders
from .checkpoint.reader import CheckpointReader
from .checkpoint.source import load_expanded_config, resolve_checkpoint
from .checkpoint.writer import check_output, new_folder
from .data.curriculum import Curriculum
from .data.mixing import review_documents
from .data.packing import PackedText, collate_blocks, pack_texts
from .data.sources import LanguageText
from .distributed import SHARDING, check_deepspeed, check_sharding, save_whole, sharding, whole_weights
from .errors import InputError
from .evaluation.validation import VALIDATION, validation_callback, validation_sources
from .jsonfile import read_json, write_json
from .settings import (
    AdaptSettings,
    GroupSettings,
    NormalSettings,
    PostPretrainSettings,
    ReviewSettings,
    checked,
    unknown_key,
)
from .trainers import (
    AdaptTrainer,
    GroupTrainer,
    LanguageMix,
    Masking,
    NormalTrainer,
    PostPretrainTrainer,
    ReviewTrainer,
    RouterLossWeights,
    Stage,
    freeze,
)
from .trainers.masking import check_gates
from .trainers.router_losses import CHECKPOINTING, CHECKPOINTING_NAMES

StageSettings = PostPretrainSettings | ReviewSettings | GroupSettings | NormalSettings | AdaptSettings

_DEFAULTS = {"report_to": "none", "logging_steps": 10, "save_total_limit": 1}
_CHECKPOINTING = re.compile(f"^({'|'.join(CHECKPOINTING_NAMES)})(?=$|_kwargs$)")
STARTED_WITH = "started_with.json"
# Ours to set: where things go, and what the losses rely on.
_RESERVED = ("output_dir", "seed", "data_seed", "remove_unused_columns", "label_names")
_SCORED = ("eval_strategy", "do_eval", "eval_on_start", "load_best_model_at_end")
_PUBLISHED = ("push_to_hub", "hub_token", "hub_model_id", "hub_strategy", "hub_private_repo")
_FILES = ("deepspeed", "accelerator_config", "fsdp_config")
_NUMBERS = (bool, int, float, type(None))


def check_training_arguments(training: Mapping[str, Any], where: str) -> None:
    """Refuses keys that `TrainingArguments` does not have, and those that are ours to set."""
    known = {f.name: f.default for f in fields(TrainingArguments) if f.init}
    for key, value in _in_words_at_hand(training).items():
        if key in _RESERVED:
            raise InputError(f"{where}: `{key}` is set by hf-moe-expand; leave it out.")
        if key in _SCORED and value not in (known[key], False):
            raise InputError(f"{where}: leave `{key}` out; held-out text is scored by `validation`, beside `training`.")
        if key in _PUBLISHED and value != known[key]:
            raise InputError(f"{where}: leave `{key}` out; `hf-moe-expand push` publishes the finished checkpoint.")
        if key == "save_only_model" and value:
            raise InputError(f"{where}: leave `{key}` out; an interrupted run could not go on as it was.")
        if key in _FILES and not isinstance(value, str | Mapping | None):
            raise InputError(f"{where}.{key}: {value!r} is neither a file nor a mapping.")
        if key not in [*known, SHARDING]:
            raise InputError(f"{where}: {unknown_key(key, list(known))}")
    check_sharding(training, where)
    for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
        given = training.get(name)
        if isinstance(given, Mapping) and given.get("use_reentrant"):
            raise InputError(
                f"{where}: reentrant gradient checkpointing silently drops the gradient of the router losses; set "
                f"{name}: {{use_reentrant: false}}."
            )
    if training.get("label_smoothing_factor"):
        raise InputError(f"{where}: label_smoothing_factor is not supported; set it to 0.")


def _in_words_at_hand(training: Mapping[str, Any]) -> dict[str, Any]:
    """Gradient checkpointing under the name that the installed transformers gives it."""
    return {_CHECKPOINTING.sub(CHECKPOINTING, name): value for name, value in training.items()}


def training_arguments(training: Mapping[str, Any], work: Path, seed: int) -> TrainingArguments:
    """`training` and what is ours to set.

    Raises:
        InputError: a value is of another type than `TrainingArguments` wants, or one that it refuses.
    """
    hints = typing.get_type_hints(TrainingArguments)
    own = {}
    for given, value in training.items():
        if given != SHARDING and given not in _SCORED:  # which are off, in whatever words
            (name,) = _in_words_at_hand({given: value})
            is_number = all(option in _NUMBERS for option in typing.get_args(hints[name]) or [hints[name]])
            # A copy: the library fills in what a mapping leaves out.
            own[name] = checked(value, hints[name], f"training.{given}") if is_number else copy.deepcopy(value)
    defaults = {**_DEFAULTS, **({"save_strategy": "no"} if SHARDING in training else {})}
    try:
        arguments = TrainingArguments(
            **{**defaults, "use_cpu": not torch.accelerator.is_available(), **own},
            output_dir=str(work),
            seed=seed,
            data_seed=seed,
            remove_unused_columns=True,
        )
        arguments.get_process_log_level()
        for integration in get_reporting_integration_callbacks(arguments.report_to):
            integration()  # refuses where its library is not installed
    except (ValueError, TypeError, OSError, ImportError, RuntimeError, AttributeError) as error:
        raise InputError(f"training: {error}") from None
    except KeyError as error:
        raise InputError(f"training: {error} is none of the values that this key knows.") from None
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        if getattr(arguments, name) < 1:
            raise InputError(f"training.{name} is {getattr(arguments, name)}: must be at least 1.")
    return arguments


def train_stage(
    model: str | os.PathLike,
    out: str | os.PathLike,
    data: Mapping[str, LanguageText],
    settings: StageSettings,
    seed: int = 0,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Trains one stage and writes the trained checkpoint.

    Which languages are old and which are new is read from the checkpoint. A run that was interrupted goes on from its
    last training checkpoint (`save_steps` in `training`), kept beside `out` until the stage is done. The launch may
    split the model over ranks (docs/distributed.md): what is written is whole, in the checkpoint's own type.

    Args:
        model: expanded checkpoint.
        data: text of each language: of the new ones in stage 1, of all of them in review and in DMoE's stages, of the
            newest in adaptation.
        settings: of the stage; their class decides which one it is.

    Returns:
        The entry that the stage adds to the checkpoint's provenance.

    Raises:
        InputError: the data does not fit the checkpoint's languages, or a setting is wrong.
    """
    folder = resolve_checkpoint(model)
    out = check_output(out, overwrite, folder)
    config = load_expanded_config(folder)
    check_training_arguments(settings.training, "training")
    _check_data(data, config, settings)
    curriculum = check_mix(settings, list(data))
    work = out.with_name(f"{out.name}.training")
    training = settings.training if curriculum is None else {**settings.training, "max_steps": curriculum.steps}
    arguments = training_arguments(training, work, seed)
    recorded = asdict(settings) | ({} if curriculum is None else {"curriculum": curriculum.to_dict()})
    started_with = beginning(folder, recorded, data, seed)
    resume = unfinished_run(work, started_with)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    validation = getattr(settings, "validation", None)
    callbacks: list[Any] = []
    with arguments.main_process_first(desc="pack"):  # the others find its result in the cache
        packed = _pack(data, tokenizer, config, settings, seed)
        if validation is not None and validation.texts:
            path = work / VALIDATION
            callbacks.append(validation_callback(validation, tokenizer, path, settings.block_size, list(data)))
    # Master weights in float32: a step of 5e-5 would round away in bfloat16. Saved in the checkpoint's own type.
    network = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False, **sharding(settings.training)
    )
    trainer = _trainer(network, arguments, packed, config, settings, curriculum)
    for callback in callbacks:
        trainer.add_callback(callback)
    check_deepspeed(trainer, config)
    if trainer.is_world_process_zero():
        write_json(work / STARTED_WITH, started_with)
    result = trainer.train(resume_from_checkpoint=resume)
    entry = {
        "stage": str(Stage.EVERYTHING if getattr(settings, "everything", False) else trainer.stage),
        "steps": result.global_step,
        "documents": packed.documents,
        "tokens": packed.tokens,
        "seed": seed,
        # Validation leaves no trace in the weights, nor here.
        "settings": without_folders({name: value for name, value in recorded.items() if name != "validation"}),
    }
    config.expansions[-1]["stages"].append(entry)
    weights = whole_weights(trainer)
    if trainer.is_world_process_zero():
        with new_folder(out, overwrite) as partial:
            save_whole(weights, config, partial, folder)
            copy_companions(folder, partial)
            trainer.state.save_to_json(str(partial / "trainer_state.json"))
            if callbacks:
                shutil.copyfile(work / VALIDATION, partial / VALIDATION)
        shutil.rmtree(work, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    return entry


def beginning(folder: Path, settings: dict[str, Any], data: Mapping[str, LanguageText], seed: int) -> dict[str, Any]:
    """What a run is begun with, and must be gone on with: JSON."""
    sources = {code: [text.source, *text.digests()] for code, text in data.items()}
    found = {"model": CheckpointReader(folder).fingerprint(), "settings": settings, "seed": seed, "data": sources}
    return json.loads(json.dumps(found))


def unfinished_run(work: Path, started_with: dict[str, Any]) -> str | None:
    """The last whole training checkpoint of an interrupted run that began as this one, if there is one."""
    record = work / STARTED_WITH
    # Written last: without it the process was killed while it saved.
    whole = [path.parent for path in work.glob("checkpoint-*/trainer_state.json") if _is_json(path)]
    if not record.is_file() or not whole:
        return None
    before = read_json(record, "the record of a training run")
    if changed := [name for name in started_with if before.get(name) != started_with[name]]:
        raise InputError(
            f"{work}: holds an interrupted run with other {', '.join(changed)}. Delete the folder to start anew, or "
            "undo the change to go on."
        )
    return str(max(whole, key=lambda path: int(path.name.rpartition("-")[2])))


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return True


def check_mix(settings: Any, languages: Sequence[str], where: str = "") -> Curriculum | None:
    """Checks what a stage's settings say about languages: temperature, curriculum (which it reads) and validation.

    Args:
        languages: that the stage trains on.
        where: of the settings, for messages.

    Raises:
        InputError: one of them is wrong, or does not go with the languages or the training arguments.
    """
    prefix = f"{where}." if where else ""
    if getattr(settings, "validation", None) is not None:
        for code, source in validation_sources(settings.validation).items():
            try:
                source.check()
            except InputError as error:
                raise InputError(f"{prefix}validation.texts.{code}: {error}") from None
    temperature = getattr(settings, "temperature", 1.0)
    if not temperature > 0:
        raise InputError(f"{prefix}temperature is {temperature:g}: must be larger than 0; 1 leaves the data as it is.")
    if not _mixes(settings):
        return None
    training = settings.training
    accelerator = training.get("accelerator_config")
    if isinstance(accelerator, str):
        raise InputError(f"{prefix}training.accelerator_config: a mapping is needed here, not a file.")
    if training.get("ignore_data_skip") or (accelerator or {}).get("split_batches"):
        raise InputError(
            f"{prefix}training: ignore_data_skip and split_batches do not go with a curriculum or a temperature, whose "
            "batches have an order; leave them out."
        )
    if settings.curriculum is None:
        return None
    curriculum = Curriculum.load(settings.curriculum)
    try:
        curriculum.check_languages(languages)
    except InputError as error:
        raise InputError(f"{settings.curriculum}: {error}") from None
    if "num_train_epochs" in training or training.get("max_steps", curriculum.steps) != curriculum.steps:
        raise InputError(
            f"{settings.curriculum} is for {curriculum.steps} steps, but {prefix}training sets another length: leave "
            "max_steps and num_train_epochs out, or make the curriculum again with --steps."
        )
    return curriculum


def _mixes(settings: Any) -> bool:
    """Whether languages are drawn otherwise than from one shuffled heap."""
    return getattr(settings, "curriculum", None) is not None or getattr(settings, "temperature", 1.0) != 1.0


def check_masking(settings: Any, has_gates: bool, where: str = "") -> None:
    """Refuses settings that mask the gates of a model without gates; `where` names the settings in the message.

    Raises:
        InputError: gates are to be masked, and the model has none.
    """
    if (masking := getattr(settings, "masking", None)) is not None:
        check_gates(masking, has_gates, where)


def check_frozen(before: str | os.PathLike, after: str | os.PathLike, stage: str) -> int:
    """The number of tensors that `stage` had to leave alone, all of them found byte-identical (P3).

    Raises:
        RuntimeError: one of them changed, or a tensor appeared or disappeared.
    """
    before = resolve_checkpoint(before)
    config = load_expanded_config(before)
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    freeze(network, Stage(stage))
    trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    found = compare_checkpoints(before, after)
    wrong = [name for name in found.changed if name not in trained] + found.added + found.removed
    if stage == Stage.ADAPT:
        wrong += [
            name for name in found.changed if name.endswith("router.weight") and not _same_rows(before, after, name)
        ]
    if wrong:
        raise RuntimeError(
            f"{after}: stage {stage} changed tensors that it had to leave alone: {', '.join(wrong[:5])}."
        )
    return len(found.identical)


def _same_rows(before: Path, after: str | os.PathLike, router: str) -> bool:
    """Whether all rows of a router but the last are the same."""
    left, right = (CheckpointReader(Path(folder)).tensor(router)[:-1] for folder in (before, after))
    return torch.equal(left, right)


def _check_data(data: Mapping[str, Any], config: Any, settings: StageSettings) -> None:
    grouped = getattr(config, "language_groups", None)
    if grouped is None and isinstance(settings, GroupSettings | AdaptSettings):
        raise InputError(
            f"The checkpoint has no language groups (model_type {config.model_type!r}): group training and adaptation "
            "belong to DMoE; expand the base with a dmoe plan."
        )
    if grouped and isinstance(settings, PostPretrainSettings | ReviewSettings):
        raise InputError(
            "This is a DMoE checkpoint, which has no frozen expert for old languages to return to: use `train group`, "
            "`train normal` or `train adapt`."
        )
    old, new = _old_and_new(config)
    if unknown := sorted(set(data) - set(old) - set(new)):
        raise InputError(
            f"{', '.join(unknown)}: not a language of this expansion (old: {', '.join(old) or 'none'}; new: "
            f"{', '.join(new) or 'none'}). The plan says which they are (--old and --new of `plan`)."
        )
    if isinstance(settings, GroupSettings):
        for number, group in enumerate(config.language_groups):
            if not set(group) & set(data):
                raise InputError(f"Group {number} ({', '.join(group)}): no text was given for any of its languages.")
    elif isinstance(settings, ReviewSettings):
        if missing := [code for code in [*old, *new] if code not in data]:
            raise InputError(f"{', '.join(missing)}: review needs text of every old and new language.")
    elif isinstance(settings, PostPretrainSettings):
        check_post_pretraining_data(data, old, new, settings)
    elif not data:
        raise InputError("No text was given.")


def check_post_pretraining_data(
    data: Mapping[str, Any], old: list[str], new: list[str], settings: PostPretrainSettings
) -> None:
    """Refuses text, by language, that does not go with the settings of stage 1.

    Raises:
        InputError: that.
    """
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


def _old_and_new(config: Any) -> tuple[list[str], list[str]]:
    """The languages of the last expansion; those of a DMoE model are its groups'."""
    last = config.expansions[-1]
    groups = getattr(config, "language_groups", None)
    if not groups:
        return last["old_languages"], last["new_languages"]
    old = last["old_languages"]
    return old, [code for group in groups for code in group if code not in old]


def _language_classes(config: Any, languages: Sequence[str]) -> list[int]:
    """0 for a language of the base model, g for one that expansion g brought."""
    brought = {code: g for g, entry in enumerate(config.expansions, start=1) for code in entry["new_languages"]}
    return [brought.get(code, 0) for code in languages]


def _pack(
    data: Mapping[str, LanguageText], tokenizer: Any, config: Any, settings: StageSettings, seed: int
) -> PackedText:
    old, new = _old_and_new(config)
    texts = {code: data[code].load() for code in [*old, *new] if code in data}
    options: dict[str, Any] = {}
    if isinstance(settings, ReviewSettings):
        available = {code: len(dataset) for code, dataset in texts.items()}
        options["documents"] = review_documents(available, old, new, settings.old_documents, settings.new_per_old)
    else:
        options["tokens_per_language"] = settings.tokens_per_language
    if _mixes(settings):
        options["groups"] = [[code] for code in texts]
    elif isinstance(settings, GroupSettings):
        options["groups"] = config.language_groups
    return pack_texts(texts, tokenizer, settings.block_size, seed, languages=[*old, *new], **options)


def _mix(
    packed: PackedText,
    config: Any,
    settings: PostPretrainSettings | GroupSettings | NormalSettings,
    curriculum: Curriculum | None,
) -> LanguageMix:
    """How languages are drawn, in the order in which their blocks lie."""
    languages = [code for code in packed.languages if code in packed.tokens]
    entry = None if curriculum is None else [curriculum.entry[code] for code in languages]
    groups = None
    if isinstance(settings, GroupSettings):
        groups = [next(n for n, group in enumerate(config.language_groups) if code in group) for code in languages]
    return LanguageMix(packed.blocks, settings.temperature, entry, groups)


def _trainer(
    network: Any,
    arguments: TrainingArguments,
    packed: PackedText,
    config: Any,
    settings: StageSettings,
    curriculum: Curriculum | None,
) -> Any:
    common: dict[str, Any] = {
        "args": arguments,
        "train_dataset": packed.dataset,
        "data_collator": collate_blocks,
    }
    if isinstance(settings, PostPretrainSettings | GroupSettings | NormalSettings) and _mixes(settings):
        common["mix"] = _mix(packed, config, settings, curriculum)
    if isinstance(settings, GroupSettings):
        group_of = {code: number for number, group in enumerate(config.language_groups) for code in group}
        losses = RouterLossWeights(settings.balance, group=settings.group)
        classes = [group_of[code] for code in packed.languages]
        return GroupTrainer(network, router_losses=losses, language_classes=classes, **common)
    if isinstance(settings, AdaptSettings):
        return AdaptTrainer(network, **common)
    if isinstance(settings, NormalSettings):
        common["masking"] = Masking(**asdict(settings.masking))
        return NormalTrainer(network, router_losses=RouterLossWeights(settings.balance), **common)
    common["language_classes"] = _language_classes(config, packed.languages)
    if isinstance(settings, ReviewSettings):
        losses = RouterLossWeights(settings.balance, settings.language_prior, settings.classifier)
        return ReviewTrainer(network, router_losses=losses, **common)
    losses = RouterLossWeights(
        settings.balance, settings.language_prior, budget=settings.budget, gate_budget=settings.gate_budget,
        localized_balance=settings.localized_balance,
    )  # fmt: skip
    common["masking"] = Masking(**asdict(settings.masking))
    return PostPretrainTrainer(network, router_losses=losses, everything=settings.everything, **common)

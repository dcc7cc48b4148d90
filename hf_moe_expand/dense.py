"""Continued pre-training of a dense checkpoint: the plain baselines (all parameters, LoRA, LLaMA-Pro's new blocks)."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, set_seed

from .checkpoint.compare import compare_checkpoints
from .checkpoint.depth import layer_list
from .checkpoint.folder import copy_companions
from .checkpoint.history import record, without_folders
from .checkpoint.source import TOKENIZER_FILES, load_base_config, resolve_checkpoint
from .checkpoint.writer import check_output, new_folder
from .data.packing import collate_without_languages, pack_texts
from .data.sources import LanguageText
from .distributed import check_deepspeed, save_whole, sharding, whole_weights
from .errors import InputError
from .jsonfile import write_json
from .settings import DenseSettings, LoraSettings
from .training import STARTED_WITH, beginning, check_training_arguments, training_arguments, unfinished_run

METHODS = ("full", "lora", "new-blocks")


def train_dense(
    model: str | os.PathLike,
    out: str | os.PathLike,
    data: Mapping[str, LanguageText],
    settings: DenseSettings | None = None,
    seed: int = 0,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Trains a dense checkpoint on text and writes the result, again an ordinary dense checkpoint of the same type.

    Weights are kept in float32 for training and saved in the checkpoint's own type. A run that was interrupted goes on
    from its last training checkpoint (`save_steps` in `training`), kept beside `out` until it is done.

    Args:
        model: dense checkpoint.
        out: folder to write.
        data: text of each language.

    Returns:
        The entry that the run adds to the field `history` of the configuration.

    Raises:
        InputError: the checkpoint is not dense, has no new blocks to train, or a setting is wrong.
    """
    settings = settings or DenseSettings()
    folder = resolve_checkpoint(model)
    out = check_output(out, overwrite, folder)
    config: Any = load_base_config(folder)
    check_training_arguments(settings.training, "training")
    _check_settings(settings, config, data)
    work = out.with_name(f"{out.name}.training")
    arguments = training_arguments(settings.training, work, seed)
    started_with = beginning(folder, asdict(settings), data, seed)
    resume = unfinished_run(work, started_with)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with arguments.main_process_first(desc="pack"):  # the others find its result in the cache
        texts = {code: source.load() for code, source in data.items()}
        packed = pack_texts(
            texts, tokenizer, settings.block_size, seed, tokens_per_language=settings.tokens_per_language
        )
    # Master weights in float32: a step of 5e-5 would round away in bfloat16.
    network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **sharding(settings.training))
    if settings.method == "lora":
        set_seed(seed)  # adapters start at random
        network = _with_adapters(network, settings.lora)
    elif settings.method == "new-blocks":
        _freeze_all_but(network, config.new_layers)
    trainer = Trainer(network, arguments, train_dataset=packed.dataset, data_collator=collate_without_languages)
    check_deepspeed(trainer, config)
    if trainer.is_world_process_zero():
        write_json(work / STARTED_WITH, started_with)
    result = trainer.train(resume_from_checkpoint=resume)
    entry = {
        "stage": f"dense {settings.method}",
        "steps": result.global_step,
        "documents": packed.documents,
        "tokens": packed.tokens,
        "seed": seed,
        "settings": without_folders(asdict(settings)),
    }
    record(config, entry)
    weights = whole_weights(trainer)
    if trainer.is_world_process_zero():
        if settings.method == "lora":
            weights = _merged(folder, settings.lora, weights)
        with new_folder(out, overwrite) as partial:
            save_whole(weights, config, partial, folder)
            copy_companions(folder, partial, TOKENIZER_FILES)
            trainer.state.save_to_json(str(partial / "trainer_state.json"))
        shutil.rmtree(work, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    return entry


def check_old_blocks(before: str | os.PathLike, after: str | os.PathLike) -> int:
    """The number of tensors outside the new blocks, all of them found byte-identical.

    Raises:
        RuntimeError: one of them changed, or a tensor appeared or disappeared.
    """
    folder = resolve_checkpoint(before)
    config: Any = load_base_config(folder)
    with torch.device("meta"):
        layers = layer_list(AutoModelForCausalLM.from_config(config))
    new = tuple(f"{layers}.{layer}." for layer in config.new_layers)
    found = compare_checkpoints(folder, after)
    wrong = [name for name in found.changed if not name.startswith(new)] + found.added + found.removed
    if wrong:
        raise RuntimeError(f"{after}: training new blocks changed other tensors: {', '.join(wrong[:5])}.")
    return sum(not name.startswith(new) for name in found.identical)


def _check_settings(settings: DenseSettings, config: Any, data: Mapping[str, LanguageText]) -> None:
    if settings.method not in METHODS:
        raise InputError(f"method is {settings.method!r}; known: {', '.join(METHODS)}.")
    if settings.method != "lora" and settings.lora != LoraSettings():
        raise InputError(f"lora: settings were given, but the method is {settings.method}; set `method: lora`.")
    if settings.method == "new-blocks" and not getattr(config, "new_layers", None):
        raise InputError("The checkpoint has no new blocks: insert some with `expand-depth` first.")
    if not data:
        raise InputError("No text was given.")


def _with_adapters(network: Any, lora: LoraSettings) -> Any:
    try:
        return get_peft_model(
            network,
            LoraConfig(r=lora.r, lora_alpha=lora.alpha, target_modules=lora.target_modules, task_type="CAUSAL_LM"),
        )
    except ValueError as error:
        raise InputError(f"lora: {error}") from None


def _merged(folder: Path, lora: LoraSettings, trained: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The checkpoint's weights with the trained adapters in them; of the launch's model nothing is needed but these."""
    network = _with_adapters(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), lora)
    network.load_state_dict({name: value.cpu() for name, value in trained.items() if "lora_" in name}, strict=False)
    return network.merge_and_unload().state_dict()


def _freeze_all_but(network: Any, layers: list[int]) -> None:
    network.requires_grad_(False)
    blocks = network.get_submodule(layer_list(network))
    for layer in layers:
        blocks[layer].requires_grad_(True)

"""Training whose launch splits the model over ranks: what is refused, and how whole weights come back."""

from collections.abc import Mapping
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from time import sleep
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.integrations import unset_hf_deepspeed_config

from .checkpoint.reader import TORCH_DTYPES, CheckpointReader
from .checkpoint.stored import stored_names
from .errors import InputError
from .schema import unknown_key

SHARDING = "distributed_config"  # the one key of a stage's `training` that goes to `from_pretrained`
_LAST_MOMENT = 0.5  # seconds
_DEEPSPEED_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def launched() -> PartialState:
    """The launch that this process belongs to, made where no training has made it yet.

    The other ranks wait while the first does what is one process's work, which may take hours. Without `cpu`,
    accelerate takes each rank of a machine without an accelerator for a run of its own.
    """
    return PartialState(cpu=not torch.accelerator.is_available(), timeout=timedelta(days=7))


def leave_ranks() -> None:
    """Takes this process out of the launch's process group, if it is in one: the last thing before it exits.

    A rank that exits inside the group may abort when another is gone already. And gloo's threads let go of the last
    collective's tensors when they come to it; one that does so while Python shuts down aborts the process. Leaving the
    group does not wait for them (a DDP model keeps it alive), so they get a moment in which Python does nothing else.
    """
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        sleep(_LAST_MOMENT)


def check_sharding(training: Mapping[str, Any], where: str) -> None:
    """Checks `distributed_config` under `training`, if it is there.

    Raises:
        InputError: a key that `transformers.distributed.DistributedConfig` does not have, or a wish to save on the way.
    """
    if SHARDING not in training:
        return
    if not isinstance(training[SHARDING], Mapping):
        raise InputError(f"{where}.{SHARDING}: must hold `key: value` lines, such as {{fsdp_size: 8}}.")
    known = [f.name for f in fields(DistributedConfig)]
    for key in training[SHARDING]:
        if key not in known:
            raise InputError(f"{where}.{SHARDING}: {unknown_key(key, known)}")
    for key in training:
        if key.startswith("save_"):
            raise InputError(
                f"{where}: `{key}` does not go with {SHARDING}: transformers saves no optimizer state of a model that "
                "it split itself, so a stage that is interrupted starts anew. Leave it out, or let accelerate split "
                "the model (docs/distributed.md)."
            )


def sharding(settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """Arguments of `from_pretrained` for a stage's `distributed_config`."""
    return {} if settings is None else {SHARDING: DistributedConfig(**settings)}


def check_deepspeed(trainer: Any, config: Any) -> None:
    """Refuses, before the first step, a DeepSpeed configuration whose result could not be saved as it should be.

    Raises:
        InputError: whole weights could not be gathered, or frozen tensors would be rounded.
    """
    if not trainer.is_deepspeed_enabled:
        return
    settings = trainer.accelerator.state.deepspeed_plugin.hf_ds_config
    gathers = settings.is_true("zero_optimization.stage3_gather_16bit_weights_on_model_save")
    if settings.is_zero3() and not gathers:
        raise InputError(
            "DeepSpeed's ZeRO-3 is set to leave the weights in pieces: set zero3_save_16bit_model: true (accelerate's "
            "configuration) or stage3_gather_16bit_weights_on_model_save: true (DeepSpeed's)."
        )
    for name, dtype in _DEEPSPEED_DTYPES.items():
        if settings.is_true(f"{name}.enabled") and config.dtype != dtype:
            raise InputError(
                f"DeepSpeed's {name} would round the frozen tensors of this checkpoint, which are "
                f"{str(config.dtype or torch.float32).removeprefix('torch.')}: train without {name}, or convert the "
                "base model before it is expanded."
            )


def whole_weights(trainer: Any) -> dict[str, torch.Tensor]:
    """Every weight of the trained model, whole, on the first rank. All ranks must call this, when training is over."""
    unset_hf_deepspeed_config()  # ZeRO-3 splits no model that is made from now on, on the first rank alone perhaps
    model = trainer.accelerator.unwrap_model(trainer.model)
    if trainer.is_distributed_loading_by_transformers:
        return model.gather_sharded_state_dict_for_save(
            model,
            model.state_dict(),
            model.config.distributed_config,
            save_on_this_rank=trainer.is_world_process_zero(),
        )
    return trainer.accelerator.get_state_dict(trainer.model_wrapped if trainer.is_deepspeed_enabled else trainer.model)


def save_whole(weights: Mapping[str, torch.Tensor], config: Any, folder: Path, start: Path) -> None:
    """Writes a checkpoint of `config` from whole weights of any type, each in the type in which the checkpoint `start`
    stores it; one that it lacks in the configuration's."""
    with torch.device("meta"):  # not the trained model, whose class and configuration the launch may have changed
        model = AutoModelForCausalLM.from_config(config)
    reader = CheckpointReader(start)
    types = {key: TORCH_DTYPES.get(reader.tensors[name].dtype) for key, name in stored_names(reader, model).items()}
    default = config.dtype or torch.float32
    kept = {
        name: weight.to("cpu", (types.get(name) or default) if weight.is_floating_point() else None)
        for name, weight in weights.items()
        if name not in model.all_tied_weights_keys
    }
    model.save_pretrained(folder, state_dict=kept)

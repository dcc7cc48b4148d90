"""Training with a model split over ranks: checks the settings, and gathers and saves whole weights."""

from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from time import sleep
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig
from transformers.integrations import unset_hf_deepspeed_config

from ..checkpoint.reader import TORCH_DTYPES, CheckpointReader
from ..checkpoint.stored import network_of, stored_tensors
from ..core.disk import DEFAULT_SHARD_SIZE
from ..core.errors import InputError, library_errors_at
from ..modeling import auto_class

SHARDING = "distributed_config"  # the one keyword of a stage that goes to `from_pretrained`
_LAST_MOMENT = 0.5  # seconds
_DEEPSPEED_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def launched() -> PartialState:
    """The state of the launch that this process belongs to. Ranks wait for hours while the first works alone; without
    `cpu`, accelerate takes each rank of a machine without an accelerator for a separate run."""
    return PartialState(cpu=not torch.accelerator.is_available(), timeout=timedelta(days=7))


def leave_ranks() -> None:
    """Takes this process out of the launch's process group, if it is in one: call it last before the process exits.

    A rank that exits inside the group may abort if another has exited. gloo's threads release the last collective's
    tensors later, and abort a process that shuts down meanwhile: hence the sleep.
    """
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        sleep(_LAST_MOMENT)


def check_sharding(settings: Any, saves: Iterable[str]) -> None:
    """Refuses a `distributed_config` that `transformers.distributed.DistributedConfig` does not take, and keywords for
    training checkpoints beside it."""
    with library_errors_at(SHARDING):
        sharding(settings)
    for key in saves:
        raise InputError(
            f"`{key}` cannot be used with {SHARDING}: transformers does not save the optimizer state of a "
            "model that it split itself, so an interrupted stage starts from its beginning. Leave it out, or let "
            "accelerate split the model (docs/distributed.md)."
        )


def sharding(settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """The arguments of `from_pretrained` for a stage's `distributed_config`."""
    return {} if settings is None else {SHARDING: DistributedConfig(**settings)}


def check_deepspeed(trainer: Any, config: Any) -> None:
    """Refuses a DeepSpeed configuration that prevents gathering whole weights, or would round frozen tensors."""
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


def is_split(config: Any) -> bool:
    """Whether FSDP or transformers splits the model of a stage over the ranks."""
    return bool(config.distributed_config or config.fsdp or parse_flag_from_env("ACCELERATE_USE_FSDP"))


def whole_weights(trainer: Any, config: Any, start: Path, place: Path) -> dict[str, torch.Tensor]:
    """Every weight of the trained model, whole, on the first rank; all ranks must call this after training. Of a split
    model, one tensor at a time is gathered into the folder `place`, in its type in the checkpoint `start`, and mapped
    from there: main memory never holds the model."""
    unset_hf_deepspeed_config()  # ZeRO-3 must not split later models, which perhaps only the first rank creates
    model, accelerator = trainer.accelerator.unwrap_model(trainer.model), trainer.accelerator
    if not (accelerator.is_fsdp2 or trainer.is_distributed_loading_by_transformers):
        return accelerator.get_state_dict(trainer.model_wrapped if trainer.is_deepspeed_enabled else trainer.model)
    first, types = trainer.is_world_process_zero(), stored_types(start, config)
    weights: dict[str, torch.Tensor] = {}
    parts: dict[str, Any] = get_model_state_dict(model)
    for number, (name, part) in enumerate(parts.items()):
        whole: Any = part
        if isinstance(part, DTensor):  # offloaded or not, it is gathered on the device whose ranks can speak
            whole = DTensor.full_tensor(part.to(part.device_mesh.device_type))  # type: ignore[arg-type]
        if first:
            place.mkdir(exist_ok=True)
            file = place / f"{number}.safetensors"
            save_file({name: whole.to("cpu", types.get(name)).contiguous()}, file)
            weights |= load_file(file)
    return weights


def stored_types(start: Path, config: Any) -> dict[str, torch.dtype]:
    """The types that a checkpoint of `config` stores its floating-point tensors in, by their names in the model."""
    stored = stored_tensors(CheckpointReader(start), network_of(config))
    return {key: TORCH_DTYPES[tensor.dtype] for key, tensor in stored.items() if tensor.dtype in TORCH_DTYPES}


def save_whole(weights: Mapping[str, torch.Tensor], config: Any, folder: Path, start: Path) -> None:
    """Writes a checkpoint of `config` from whole weights of any type. Each weight gets the type that the checkpoint
    `start` stores, or the configuration's type if `start` lacks it."""
    with torch.device("meta"):  # a new model, since the launch may have changed the trained one's class and config
        model = auto_class(config).from_config(config)
    types, default = stored_types(start, config), config.dtype or torch.float32
    # A head that the files untie from the embedding is a tensor of its own, whatever the configuration says.
    tied = {
        name
        for name, source in model.all_tied_weights_keys.items()
        if name in weights and source in weights and torch.equal(weights[name], weights[source])
    }
    state = {
        name: weight.to("cpu", types.get(name, default) if weight.is_floating_point() else None)
        for name, weight in weights.items()
        if name not in tied
    }
    model.save_pretrained(folder, state_dict=state, max_shard_size=DEFAULT_SHARD_SIZE)

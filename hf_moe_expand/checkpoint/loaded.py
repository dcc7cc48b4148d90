"""A loaded model, as `StoredModel` shows a checkpoint, and a new model in memory of its tensors and others."""

import copy
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers import initialization as init

from ..core.errors import InputError
from ..modeling import auto_class
from .reader import TORCH_DTYPES, StoredTensor
from .source import TOKENIZER_FILES
from .stored import StoredModel, places
from .writer import DTYPE_NAMES, OutputTensor, check_output, copy_of, write_checkpoint


class LoadedModel:
    """The tensors of a loaded model under their names, tied ones once; see `StoredModel`.

    Raises:
        InputError: its weights lie on several devices.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.network: Any = model
        self.config: Any = copy.deepcopy(model.config)
        self.name = str(model.config.name_or_path or type(model).__name__).rstrip("/").rpartition("/")[2]
        self.folder = Path(self.name)  # what messages call it
        devices = {parameter.device for parameter in model.parameters()}
        if len(devices) > 1:
            raise InputError(
                f"model: its weights lie on {', '.join(sorted(map(str, devices)))}: load it onto one device."
            )
        tied = getattr(model, "all_tied_weights_keys", None) or {}
        self.values = {key: value for key, value in model.state_dict().items() if key not in tied}
        self.shapes = {key: tuple(value.shape) for key, value in self.values.items()}
        self.places = places(model)
        self.tensors = list(self.values)
        self._stored = {key: self._as_stored(key) for key in self.tensors}

    def _as_stored(self, key: str) -> StoredTensor:
        value = self.values[key]
        dtype = DTYPE_NAMES.get(value.dtype, str(value.dtype))
        return StoredTensor(key, dtype, self.shapes[key], self.folder / key, compute=lambda: value.detach().cpu())

    def __getitem__(self, key: str) -> StoredTensor:
        return self._stored[key]

    def copied(self, key: str) -> OutputTensor:
        """The tensor itself."""
        return copy_of(self[key])

    def copies(self, key: str) -> list[OutputTensor]:
        """`copied`."""
        return [self.copied(key)]


def opened(model: str | os.PathLike | PreTrainedModel) -> Any:
    """A checkpoint or a loaded model."""
    return LoadedModel(model) if isinstance(model, PreTrainedModel) else StoredModel(model)


def check_place(model: Any, out: str | os.PathLike | None, overwrite: bool, *inputs: Path) -> None:
    """Refuses a folder to write that is missing, or is there already; a loaded model needs none.

    Args:
        inputs: folders that are read.
    """
    if isinstance(model, PreTrainedModel):
        if out is not None:
            raise InputError(f"out is {str(out)!r}: a loaded model gives a loaded one, which save_pretrained writes.")
    elif out is None:
        raise InputError(f"out is None: give the folder to write, as model is {str(model)!r}, a checkpoint.")
    else:
        check_output(out, overwrite, *inputs)


def finished(
    source: Any,
    tensors: Sequence[OutputTensor],
    out: str | os.PathLike | None,
    what: str,
    max_shard_size: str | int,
    overwrite: bool,
) -> Any:
    """The model of these tensors: of a checkpoint, the folder that is written; of a loaded model, a loaded one, which
    shares the tensors that are copies."""
    if not isinstance(source, LoadedModel):
        companions = [(source.folder, TOKENIZER_FILES)]
        return write_checkpoint(out, source.config, tensors, companions, what, max_shard_size, overwrite)  # type: ignore[arg-type]
    state = {}
    for tensor in tensors:
        origin = getattr(tensor.data, "__self__", None)  # of a copy
        if isinstance(origin, StoredTensor):
            state[tensor.name] = source.values[origin.name]
        else:
            value = torch.frombuffer(bytearray().join(tensor.data()), dtype=TORCH_DTYPES[tensor.dtype])
            state[tensor.name] = value.view(tensor.shape).to(source.network.device)
    return filled(blank(source.network, source.config), source.network, state)


def blank(like: PreTrainedModel, config: Any, untied: Sequence[str] = ()) -> Any:
    """A model without weights, of the type and attention of `like`.

    Args:
        untied: the tensors that the configuration ties to others, but that have values of their own.
    """
    with torch.device("meta"), init.no_init_weights():
        model: Any = auto_class(config).from_config(
            config, dtype=like.dtype, attn_implementation=like.config._attn_implementation
        )
    for key in untied:
        model.all_tied_weights_keys.pop(key, None)
    return model


def filled(model: Any, like: PreTrainedModel, state: Mapping[str, torch.Tensor]) -> Any:
    """A `blank` model with these tensors, which it shares, and the buffers, the mode and the settings of `like`."""
    tied = {target: state[source] for target, source in (model.all_tied_weights_keys or {}).items() if source in state}
    model.load_state_dict({**tied, **state}, assign=True)
    _tie(model)
    _copy_buffers(like, model)
    model.generation_config = copy.deepcopy(like.generation_config)
    return model.train(like.training)


def _tie(model: Any) -> None:
    """Ties weights as `tie_weights` does, except for the head's bias, of which `tie_weights` makes a copy."""
    for target, source in (model.all_tied_weights_keys or {}).items():
        module, _, name = target.rpartition(".")
        setattr(model.get_submodule(module), name, model.get_parameter(source))


def _copy_buffers(like: PreTrainedModel, model: Any) -> None:
    """Copies buffers that checkpoints do not hold, such as rotary frequencies; `like` may be the dense model."""
    buffers, held = dict(like.named_buffers()), model.state_dict().keys()
    for name, _ in list(model.named_buffers()):
        if name not in held:
            module, _, buffer = name.rpartition(".")
            own = buffers[name if name in buffers else re.sub(r"\.experts\.\d+\.", ".", name)]
            model.get_submodule(module).register_buffer(buffer, own.clone(), persistent=False)

"""A checkpoint is a table of tensors. An operation is a rule, which says of what each tensor of the new model is made;
`rewrite` makes it of checkpoints, streamed, or of loaded models, and alone writes checkpoints."""

import copy
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers import initialization as init

from ..core.errors import InputError
from ..modeling import ExpandedConfig, auto_class
from .reader import TORCH_DTYPES, Bytes, StoredTensor, is_finite, tensor_bytes
from .records import History, StageRecord, add_stage
from .stored import LoadedModel, Place, load_any_config, network_of, places, source_of
from .writer import DEFAULT_SHARD_SIZE, DTYPE_NAMES, OutputTensor, check_output, name_code, write_checkpoint

_PIECE = 1 << 22  # elements


@dataclass(frozen=True)
class Copy:
    """The tensor `key` of a source, byte for byte; the parts of a mixture's that is stored in parts."""

    key: str
    source: int = 0


@dataclass(frozen=True)
class Rows:
    """The rows `index` of a tensor, and below them those that `more` makes, in its type."""

    of: Copy
    index: Sequence[int]
    more: Callable[[], torch.Tensor] | None = None


@dataclass(frozen=True)
class Mix:
    """An element-wise function of tensors, computed piece by piece in float32 (float64 if a tensor is) and rounded once
    to the type of the first.

    Attributes:
        how: the function of a piece of each; or the weight of each in their mean, in which equal values stay as they
            are, bit for bit.
        rest: a tensor whose further elements are taken where the new tensor has more than the first.
    """

    of: Sequence[Copy]
    how: Callable[..., torch.Tensor] | Sequence[float]
    rest: Copy | None = None


@dataclass(frozen=True)
class New:
    """A tensor that `make` gives, in any type, when it is written; `dtype` is a type by its name in safetensors."""

    make: Callable[[], torch.Tensor]
    dtype: str


@dataclass(frozen=True)
class Given:
    """A tensor at hand, in its own type: one in memory, or of a file that is no source."""

    tensor: torch.Tensor | StoredTensor


# What a tensor of the new model is made of; None leaves it out.
Rule = Callable[[Place], Copy | Rows | Mix | New | Given | None]


def opened(
    models: Sequence[Any], out: str | os.PathLike | None, overwrite: bool, load: Callable[[Path], Any] = load_any_config
) -> list:
    """The checkpoints or loaded models from which `out` is made, after checking that it may be written; `load` reads
    the configuration of a checkpoint's folder."""
    if len({isinstance(model, PreTrainedModel) for model in models}) > 1:
        raise InputError("models holds loaded models and names of checkpoints: give one kind of them.")
    sources: list = [source_of(model, load=load) for model in models]
    check_place(models[0], out, overwrite, *(source.folder for source in sources))
    return sources


def check_place(model: Any, out: str | os.PathLike | None, overwrite: bool, *inputs: str | os.PathLike) -> None:
    """Refuses a folder to write that is missing, or is there already; a loaded model needs none. `inputs` are folders
    that are read."""
    if isinstance(model, PreTrainedModel) != (out is None):
        raise InputError(f"out is {out!r}: a loaded model takes none, and a checkpoint's name needs one.")
    if out is not None:
        check_output(out, overwrite, *inputs)


def rewrite(
    sources: Sequence[Any],
    config: Any,
    rule: Rule,
    out: str | os.PathLike | None = None,
    *,
    record: StageRecord | History | None = None,
    title: str | None = None,
    names: Callable[[str], str] | None = None,
    companions: int = 0,
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
    **written: Any,
) -> Any:
    """Makes the model of a configuration: of checkpoints a folder, whole or not at all; of loaded models a loaded one,
    which shares each tensor that is copied once.

    A tensor that a source's model has, but not its files (a tied one), is left out. One that stays where it was keeps
    its name in the files; any other has the name of its place, unless `names` gives one.

    Args:
        sources: from `opened`; none for a model that is new.
        config: of the new model, and changed: it gets its history.
        record: the step, for the history; or the whole history, whose last expansion gets the count of parameters.
        title: name of the progress bar; None shows none.
        companions: number of the source whose tokenizer, templates and generation config are copied.
        written: further arguments of `write_checkpoint`.

    Raises:
        InputError: the rule needs a tensor that its source lacks, or one of another shape; a tensor is stored in a
            quantised type, or not finite; or `out` cannot be written. The message names the tensor.
    """
    tensors: list[OutputTensor] = []
    for place in places(network_of(config)).values():
        if (entry := rule(place)) is not None:
            tensors += _tensors(place, entry, sources, config, names)
    if isinstance(record, History):
        record.with_last(parameters=sum(tensor.numel for tensor in tensors)).write(config)
    elif record is not None:
        add_stage(config, record)
    name_code(config, "stem" not in written)
    if sources and isinstance(sources[0], LoadedModel):
        return _loaded(sources[0], config, tensors)
    folder = sources[companions].folder if sources else None
    return write_checkpoint(out, config, tensors, folder, title, max_shard_size, overwrite, **written)  # type: ignore[arg-type]


def _tensors(
    place: Place, entry: Any, sources: Sequence[Any], config: Any, names: Callable[[str], str] | None
) -> list[OutputTensor]:
    """The tensor of a place, or the parts of a mixture's; none if its source's files do not have it."""
    name = names(place.key) if names else place.key
    if isinstance(entry, New):
        return [_computed(name, entry.dtype, place.shape, lambda: [entry.make()])]
    if isinstance(entry, Given):
        given = entry.tensor
        if isinstance(given, torch.Tensor):
            return [given_tensor(name, given)]
        _ = given.torch_dtype  # which refuses a quantised type
        return [_checked(OutputTensor.copy_of(given, name), place, given)]
    of = entry if isinstance(entry, Copy) else entry.of[0] if isinstance(entry, Mix) else entry.of
    source = sources[of.source]
    if of.key not in source.shapes:
        raise InputError(f"{source.folder}: has no tensor {of.key!r}, of which {place.key!r} is made.")
    if of.key not in source:
        return []
    first, is_expanded = source[of.key], isinstance(source.config, ExpandedConfig)
    stays = names is None and of == Copy(place.key) and is_expanded == isinstance(config, ExpandedConfig)
    if isinstance(entry, Copy):
        copies = source.copies(of.key, None if stays else name, whole=place.number is not None)
        return [_checked(copies[0], place, first)] if len(copies) == 1 else copies
    name = first.name if stays else name
    if isinstance(entry, Rows):
        shape = (len(entry.index) if entry.more is None else place.shape[0], *first.shape[1:])
        made = _computed(name, first.dtype, shape, lambda: [_rows(first, entry)])
    else:
        shape = first.shape if entry.rest is None else sources[entry.rest.source][entry.rest.key].shape
        made = _computed(name, first.dtype, shape, lambda: _mixed(entry, sources))
    return [_checked(made, place, first)]


def given_tensor(name: str, tensor: torch.Tensor) -> OutputTensor:
    """A tensor at hand, to write."""
    return _computed(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), lambda: [tensor])


def _checked(tensor: OutputTensor, place: Place, stored: StoredTensor) -> OutputTensor:
    """`stored` is the tensor of which it is made."""
    if tensor.shape != place.shape:
        has = f"{stored.file.parent}: tensor {stored.name!r} has shape {list(stored.shape)}"
        raise InputError(f"{has}, but {place.key!r} of the new model needs {list(place.shape)}.")
    return tensor


def _computed(
    name: str, dtype: str, shape: tuple[int, ...], make: Callable[[], Iterable[torch.Tensor]]
) -> OutputTensor:
    """A tensor of the pieces that `make` gives, which are rounded, and must be finite, in its type."""

    def data() -> Iterable[Bytes]:
        for piece in (piece for made in make() for piece in made.detach().flatten().split(_PIECE)):
            result = piece.to(TORCH_DTYPES[dtype])
            if not is_finite(result):
                raise InputError(f"Tensor {name!r}: the result is not finite in {dtype}.")
            yield tensor_bytes(result)

    return OutputTensor(name, dtype, shape, data)


def _rows(tensor: StoredTensor, rows: Rows) -> torch.Tensor:
    value = tensor.load()
    more = [] if rows.more is None else [rows.more().to(value.dtype)]
    return torch.cat([value[list(rows.index)], *more])


def _mixed(mix: Mix, sources: Sequence[Any]) -> Iterable[torch.Tensor]:
    of = [sources[one.source][one.key] for one in mix.of]
    how = mix.how if callable(mix.how) else mean_of(mix.how)
    for pieces in zip(*(tensor.pieces(stop=of[0].numel) for tensor in of), strict=True):
        yield how(*map(widened, pieces))
    if mix.rest is not None:
        yield from sources[mix.rest.source][mix.rest.key].pieces(start=of[0].numel)


def widened(piece: torch.Tensor) -> torch.Tensor:
    """The piece in float32, or in float64 if it is."""
    return piece.to(torch.promote_types(piece.dtype, torch.float32))


def mean_of(weights: Sequence[float]) -> Callable[..., torch.Tensor]:
    """The weighted mean of tensors; equal values stay as they are, bit for bit."""
    heaviest = max(range(len(weights)), key=lambda number: weights[number])

    def mean(*pieces: torch.Tensor) -> torch.Tensor:
        # The mean is taken around one of the tensors: equal values keep their value, as does a tensor of weight 1.
        middle = pieces[heaviest]
        return middle + sum(weight * (piece - middle) for weight, piece in zip(weights, pieces, strict=True))

    return mean


# --- in memory --------------------------------------------------------------------------------------------------------


def _loaded(source: LoadedModel, config: Any, tensors: Sequence[OutputTensor]) -> Any:
    """The first place of a copied tensor shares it; other places have copies of their own."""
    like, shared = source.network, set()
    state: dict[str, torch.Tensor] = {}
    for tensor in tensors:
        if (stored := tensor.stored) is not None and stored.held is not None:
            state[tensor.name] = stored.held.clone() if stored in shared else stored.held
            shared.add(stored)
        else:
            value = torch.frombuffer(bytearray().join(tensor.data()), dtype=TORCH_DTYPES[tensor.dtype])
            state[tensor.name] = value.view(tensor.shape).to(like.device)
    with torch.device("meta"), init.no_init_weights():
        model: Any = auto_class(config).from_config(
            config, dtype=like.dtype, attn_implementation=like.config._attn_implementation
        )
    ties = model.all_tied_weights_keys or {}
    for key in source.untied:
        ties.pop(key, None)
    tied = {target: state[key] for target, key in ties.items() if key in state}
    model.load_state_dict({**tied, **state}, assign=True)
    for target, key in ties.items():  # as `tie_weights` does, which makes a copy of the head's bias
        module, _, name = target.rpartition(".")
        setattr(model.get_submodule(module), name, model.get_parameter(key))
    # Buffers that checkpoints do not hold, such as rotary frequencies; the source may be the dense model.
    buffers, held = dict(like.named_buffers()), model.state_dict().keys()
    for name, _ in list(model.named_buffers()):
        own = buffers.get(name, buffers.get(re.sub(r"\.experts\.\d+\.", ".", name)))
        if name not in held and own is not None:
            module, _, buffer = name.rpartition(".")
            model.get_submodule(module).register_buffer(buffer, own.clone(), persistent=False)
    getattr(model, "share_buffers", lambda: None)()  # of languages' own modules
    model.generation_config = copy.deepcopy(like.generation_config)
    return model.train(like.training)

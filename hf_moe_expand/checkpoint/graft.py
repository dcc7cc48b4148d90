"""DeltaMoE: adds the change of a fine-tune to a model that was expanded from the same base; streamed."""

import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from ..core.errors import InputError
from ..core.schema import checked
from ..modeling import ExpandedConfig, count_layers, decoder_ffns
from ..modeling.backbone import DECODER_LAYERS
from .reader import StoredTensor, is_finite
from .records import History, StageRecord, add_stage
from .source import TOKENIZER_FILES, differences
from .stored import StoredModel, computed, layer_list, rounded
from .writer import DEFAULT_SHARD_SIZE, OutputTensor, check_output, write_checkpoint

# Fields that change the computation although the shapes are the same.
COMPUTATION = (
    "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "hidden_activation", "activation_function",
)  # fmt: skip
# Fields that do not affect the computation, or that each model sets for itself.
_OWN = ("model_type", "architectures", "transformers_version", "auto_map", "_name_or_path", "dtype", "history")
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_RELATED = 0.5
_SAMPLE = 1 << 20


@dataclass(frozen=True)
class GraftReport:
    """Result of a graft.

    Attributes:
        instruct_cosine: cosine of base and instruct over a sample of every layer's FFN; near 1 for a fine-tune.
        model_cosine: the same cosine of base and the model's expert 0.
        new_rows: number of embedding rows that only instruct has.
        fields: fields of the configuration taken from instruct: (before, after) by name.
    """

    out: Path
    instruct_cosine: float
    model_cosine: float
    new_rows: int
    fields: dict[str, tuple[Any, Any]]

    def lines(self) -> list[str]:
        """The lines that the command line prints."""
        lines = []
        if self.new_rows:
            lines.append(f"{self.new_rows} embedding rows are taken from instruct: base does not have their tokens")
        lines += [f"{name} follows instruct: {before} -> {after}" for name, (before, after) in self.fields.items()]
        return [*lines, f"wrote {self.out}: base and instruct have a cosine of {self.instruct_cosine:.4f}"]


@checked
def graft_delta(
    model: str | os.PathLike,
    out: str | os.PathLike,
    base: str | os.PathLike,
    instruct: str | os.PathLike,
    *,
    scale: float = 1.0,
    keep_tokenizer: bool = False,
    revision: str | None = None,
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
) -> GraftReport:
    """Adds `delta = instruct - base` to an expanded checkpoint of `base` (DeltaMoE Eq. 8, 9).

    Shared tensors get their own delta, and every expert of a layer (expert 0 too) gets the delta of the layer's FFN.
    Routers, classifiers and gates stay byte for byte, as do the updates of LoRA experts, which share expert 0's
    weights. Sums are computed in float32 and rounded once to the type in which the model stores the tensor. Where the
    model's weights still equal the base's, scale 1 gives instruct's weights exactly: grafting onto a freshly expanded
    base is the same as expanding instruct. Scale 0 gives the model's own weights exactly.

    Args:
        model: expanded checkpoint (LayerMoE, DMoE).
        out: folder to write.
        base: the dense model from which `model` was expanded.
        instruct: a fine-tune of `base`. Its further embedding rows (chat tokens) are copied unchanged.
        scale: factor of the delta.
        keep_tokenizer: keep the model's tokenizer, chat template, generation config and special token ids; by default
            they are taken from instruct.
        revision: revision of `base`, if it is a hub id.

    Raises:
        InputError: the three models do not fit together (the message names the tensor or field), `model` was expanded
            from another model than `base`, a delta or a result is not finite, or `out` cannot be written.
    """
    target = StoredModel(model)
    if not isinstance(target.config, ExpandedConfig):
        raise InputError(f"{target.folder}: is a dense checkpoint; use `merge delta`.")
    before = StoredModel(base, revision=revision)
    return add_delta(target, out, before, instruct, scale, keep_tokenizer, max_shard_size, overwrite)


def check_fine_tune(
    base: str | os.PathLike, instruct: str | os.PathLike, keep_tokenizer: bool = False, revision: str | None = None
) -> None:
    """Refuses an `instruct` that `graft_delta` would refuse, as far as shapes and configurations tell, and warns if
    `graft_delta` would warn."""
    before, after = StoredModel(base, revision=revision), StoredModel(instruct)
    _new_rows(before, after, keep_tokenizer)
    _cosine(before, after, f"instruct ({after.name})")


def add_delta(
    target: StoredModel,
    out: str | os.PathLike,
    before: StoredModel,
    instruct: str | os.PathLike,
    scale: float,
    keep_tokenizer: bool,
    max_shard_size: str | int,
    overwrite: bool,
) -> GraftReport:
    """`graft_delta` for a model of any kind; blocks that `expand_depth` inserted stay as they are."""
    if not isfinite(scale):
        raise InputError(f"scale is {scale}: must be a finite number.")
    after = StoredModel(instruct)
    check_output(out, overwrite, target.folder, before.folder, after.folder)
    new_rows = _new_rows(before, after, keep_tokenizer)
    homes = dense_names(target)
    check_grew_from(target, before, homes)
    own = {home: key for key, home in homes.items() if home is not None and not target.places[key].expert}
    if isinstance(target.config, ExpandedConfig):
        _check_expanded_from(target, before, after, own)
    instruct_cosine = _cosine(before, after, f"instruct ({after.name})")
    model_cosine = _cosine(before, target, f"the model ({target.name})", own)
    config, fields = target.config, {}
    for name, _, new in differences(before.config, after.config, (*_OWN, *(_TOKEN_IDS if keep_tokenizer else ()))):
        if (old := getattr(config, name, None)) != new:
            fields[name] = (old, new)
            setattr(config, name, new)
    tensors = [
        target.copied(key) if home is None else _grafted(target, key, home, before, after, scale)
        for key, home in homes.items()
    ]
    tokenizer = target if keep_tokenizer else after
    settings = {"base": before.name, "instruct": after.name, "scale": scale, "tokenizer": tokenizer.name}
    step = "graft" if isinstance(config, ExpandedConfig) else "merge delta"
    add_stage(config, StageRecord(stage=step, settings=settings))
    write_checkpoint(out, config, tensors, [(tokenizer.folder, TOKENIZER_FILES)], step, max_shard_size, overwrite)
    return GraftReport(Path(out), instruct_cosine, model_cosine, new_rows, fields)


def _check_same_architecture(base: StoredModel, instruct: StoredModel) -> None:
    for which in (base, instruct):
        if isinstance(which.config, ExpandedConfig):
            raise InputError(f"{which.folder}: is an expanded checkpoint; base and instruct must be dense ones.")
    for name in ("model_type", "num_hidden_layers", *DECODER_LAYERS, *COMPUTATION):
        values = [getattr(which.config, name, None) for which in (base, instruct)]
        if values[0] != values[1]:
            raise InputError(
                f"{instruct.folder} is not a fine-tune of {base.folder}: its {name} is {values[1]!r}, not "
                f"{values[0]!r}. Give the base from which it was trained."
            )
    tied = [which.config.tie_word_embeddings for which in (base, instruct)]
    if tied[0] != tied[1]:
        raise InputError(
            f"tie_word_embeddings is {tied[0]} in {base.folder} and {tied[1]} in {instruct.folder}: "
            + (
                "fine-tuning gave embedding and head a delta each, but the model has one tensor for both."
                if tied[0]
                else "fine-tuning gave embedding and head one tensor, but the model has two."
            )
            + " Use a fine-tune with the base's tie_word_embeddings."
        )


def check_grew_from(target: StoredModel, base: StoredModel, homes: dict[str, str | None]) -> None:
    """Refuses a dense model from which `target` cannot have been expanded."""
    backbone = getattr(target.config, "backbone_model_type", target.config.model_type)
    if backbone != base.config.model_type:
        raise InputError(
            f"{target.folder}: its backbone is {backbone}, but {base.folder} is a {base.config.model_type} checkpoint."
        )
    if target.config.tie_word_embeddings != base.config.tie_word_embeddings:
        raise InputError(
            f"tie_word_embeddings is {target.config.tie_word_embeddings} in {target.folder} and "
            f"{base.config.tie_word_embeddings} in {base.folder}: the model did not grow from this base."
        )
    for name in COMPUTATION:
        ours, theirs = (getattr(which.config, name, None) for which in (target, base))
        if ours != theirs:
            raise InputError(f"{name} is {ours!r} in {target.folder}, but {theirs!r} in {base.folder}.")
    layers = count_layers(target.config) - len(getattr(target.config, "new_layers", None) or ())
    if layers != count_layers(base.config):
        raise InputError(
            f"{target.folder}: has {layers} layers of a base, but {base.folder} has {count_layers(base.config)}."
        )
    for key, home in homes.items():
        if home is not None and target.shapes[key] != base.shapes[home]:
            raise InputError(
                f"{target.folder}: tensor {key!r} has shape {list(target.shapes[key])}, but {home!r} in {base.folder} "
                f"has {list(base.shapes[home])}."
            )


def _check_expanded_from(target: StoredModel, base: StoredModel, instruct: StoredModel, own: dict[str, str]) -> None:
    """Refuses a base from which `target` was not expanded; `own` names the tensor of `target` that the expansion copied
    from each tensor of the base. Reads the tensors piece by piece.

    Tensors of different types are equal if one of them is the other, rounded to its type. A model whose history has a
    step that changes every tensor is not checked.
    """
    history = History.of(target.config)
    changed = any(stage.changes_everything for stage in history.stages)
    if changed or any(record.expert_init == "branches" for record in history.expansions):
        return
    wrong = next((home for home, key in own.items() if not _same_tensor(target[key], base[home])), None)
    if wrong is None:
        return
    if all(_same_tensor(target[key], instruct[home]) for home, key in own.items()):
        raise InputError(
            f"base ({base.folder}) and instruct ({instruct.folder}) look swapped: {target.folder} has the weights of "
            f"instruct, and other ones in {wrong!r} than base. Give the model that was expanded as base."
        )
    raise InputError(
        f"{base.folder}: is not the model from which {target.folder} was expanded: tensor {wrong!r} differs "
        "from the model's own, which the expansion copied. Give the model that was expanded as base."
    )


def _same_tensor(ours: StoredTensor, theirs: StoredTensor) -> bool:
    """Whether two tensors have the same elements in the type of one of them."""
    if ours.shape != theirs.shape:
        return False
    up_to_ours = up_to_theirs = True
    for a, b in zip(ours.pieces(), theirs.pieces(), strict=True):
        up_to_ours = up_to_ours and torch.equal(b.to(a.dtype), a)
        up_to_theirs = up_to_theirs and torch.equal(a.to(b.dtype), b)
        if not (up_to_ours or up_to_theirs):  # the rest of a large tensor is not read
            return False
    return True


def dense_names(target: StoredModel) -> dict[str, str | None]:
    """Maps each stored tensor to its name in the dense model from which `target` was expanded, the same for every
    expert; None for routers, classifiers and gates, and for inserted blocks."""
    layers, new = f"{layer_list(target.network)}.", getattr(target.config, "new_layers", None) or []
    homes = {key: target.places[key].dense for key in target.tensors}
    for key, home in homes.items():
        if home is not None and home.startswith(layers):
            number, inner = home.removeprefix(layers).split(".", 1)
            before = int(number) - sum(layer < int(number) for layer in new)
            homes[key] = None if int(number) in new else f"{layers}{before}.{inner}"
    return homes


def _new_rows(base: StoredModel, instruct: StoredModel, keep_tokenizer: bool) -> int:
    """The number of tokens that only instruct has, after checking that it is a fine-tune of base."""
    _check_same_architecture(base, instruct)
    if not keep_tokenizer and not any(any(instruct.folder.glob(pattern)) for pattern in TOKENIZER_FILES[:-1]):
        raise InputError(f"{instruct.folder}: has no tokenizer; pass --keep-tokenizer to keep the model's own.")
    if differ := sorted(set(base.shapes) ^ set(instruct.shapes)):
        where = base if differ[0] in base.shapes else instruct
        raise InputError(
            f"Tensor {differ[0]!r} is in {where.folder} alone, but instruct must have the tensors of base: give a "
            "fine-tune of it."
        )
    modules = [base.network.get_input_embeddings(), base.network.get_output_embeddings()]
    own = {id(parameter) for module in modules if module is not None for parameter in module.parameters()}
    embeddings = {key for key, value in base.network.named_parameters(remove_duplicate=False) if id(value) in own}
    rows = 0
    for key, shape in base.shapes.items():
        other = instruct.shapes[key]
        if shape == other:
            continue
        if key not in embeddings or shape[1:] != other[1:] or other[0] < shape[0]:
            hint = " Only rows of new tokens at the end of the embeddings are allowed." if key in embeddings else ""
            raise InputError(
                f"Tensor {key!r} has shape {list(shape)} in {base.folder}, but {list(other)} in {instruct.folder}."
                f"{hint}"
            )
        rows = other[0] - shape[0]
    return rows


def _grafted(
    target: StoredModel, key: str, home: str, base: StoredModel, instruct: StoredModel, scale: float
) -> OutputTensor:
    stored, of_instruct = target[key], instruct[home]

    def moved(now: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        delta = after - before
        if not is_finite(delta):
            raise InputError(f"Tensor {home!r}: {instruct.folder} minus {base.folder} is not finite (NaN or inf).")
        result = now + scale * delta
        # If training left the tensor alone, the sum is `after`, except for its rounding.
        return torch.where(now == before, after, result) if scale == 1 else result

    shared = computed(stored, [stored, base[home], of_instruct], moved)

    def data() -> Iterable[bytes]:
        yield from shared.data()
        for rest in of_instruct.pieces(start=stored.numel):
            yield rounded(rest, stored.dtype, stored.name)

    return replace(shared, shape=instruct.shapes[home], data=data)


def _cosine(base: StoredModel, other: StoredModel, what: str, names: Mapping[str, str] | None = None) -> float:
    """The cosine of two models over a sample of the first matrix of each layer's FFN. Warns if it is low.

    Args:
        what: the other model, for the warning.
        names: the other model's name of each tensor of `base`, where the names differ.
    """
    dot = left = right = 0.0
    for ffn in decoder_ffns(base.network):
        key = next(f"{ffn.name}.{name}" for name, value in ffn.module.named_parameters() if value.dim() > 1)
        ours, theirs = base[key], other[names[key] if names else key]
        stop = min(_SAMPLE, ours.numel)
        for a, b in zip(ours.pieces(stop=stop), theirs.pieces(stop=stop), strict=True):
            a, b = a.double(), b.double()
            dot, left, right = dot + float(a @ b), left + float(a @ a), right + float(b @ b)
    cosine = dot / max((left * right) ** 0.5, 1e-30)
    if cosine < _RELATED:
        warnings.warn(
            f"base ({base.name}) and {what} look unrelated: the cosine of their FFNs is {cosine:.3f}, while it is "
            "nearly 1 for a fine-tune. Adding this delta will hardly give a working model.",
            stacklevel=4,
        )
    return cosine

"""DeltaMoE: adds the change of a fine-tune to a model that was made from the same base; streamed."""

import copy
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from ..core.errors import InputError
from ..core.schema import checked
from ..modeling import ExpandedConfig, decoder_ffns
from .reader import StoredTensor, is_finite
from .records import History, StageRecord
from .source import TOKENIZER_FILES, differences
from .stored import Place, Source, StoredModel, check_alike, layer_list
from .table import Copy, Mix, Rule, rewrite
from .writer import DEFAULT_SHARD_SIZE, check_output

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
        new_rows: number of embedding rows that only instruct has.
        fields: fields of the configuration taken from instruct: (before, after) by name.
    """

    out: Path
    instruct_cosine: float
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
    """Adds `delta = instruct - base` to an expanded checkpoint of `base` (DeltaMoE Eq. 8, 9), to a dense one that was
    trained from `base` (Dense-FT-Delta), or to the old layers of one that `expand_depth` made of it (LLaMA-Pro).

    Shared tensors get their own delta, and every expert of a layer (expert 0 too) gets the delta of the layer's FFN.
    Routers, classifiers and gates stay byte for byte, as do the updates of LoRA experts, which share expert 0's
    weights. Sums are computed in float32 and rounded once to the type in which the model stores the tensor. Where the
    model's weights still equal the base's, scale 1 gives instruct's weights exactly: grafting onto a freshly expanded
    base is the same as expanding instruct. Scale 0 gives the model's own weights exactly.

    Args:
        model: the checkpoint.
        out: folder to write.
        base: the dense model from which `model` was made.
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
    before, after = StoredModel(base, revision=revision), StoredModel(instruct)
    if not isfinite(scale):
        raise InputError(f"scale is {scale}: must be a finite number.")
    check_output(out, overwrite, target.folder, before.folder, after.folder)
    new_rows = _new_rows(before, after, keep_tokenizer)
    homes = dense_names(target)
    check_alike(target, before, keys=homes)
    own = {home: key for key, home in homes.items() if home is not None and not target.places[key].expert}
    step = "graft" if isinstance(target.config, ExpandedConfig) else "merge delta"
    if step == "graft":
        _check_expanded_from(target, before, own)
    cosine = _cosine(before, after, f"instruct ({after.name})")
    _cosine(before, target, f"the model ({target.name})", own)
    config, fields = _following(target, before, after, (*_OWN, *(_TOKEN_IDS if keep_tokenizer else ())))
    tokenizer = target if keep_tokenizer else after
    settings = {"base": before.name, "instruct": after.name, "scale": scale, "tokenizer": tokenizer.name}
    rewrite(
        [target, before, after], config, _grafted(homes, scale, before, after), out, title=step,
        record=StageRecord(stage=step, settings=settings), companions=0 if keep_tokenizer else 2,
        max_shard_size=max_shard_size, overwrite=overwrite,
    )  # fmt: skip
    return GraftReport(Path(out), cosine, new_rows, fields)


def check_fine_tune(
    base: str | os.PathLike, instruct: str | os.PathLike, keep_tokenizer: bool = False, revision: str | None = None
) -> None:
    """Refuses an `instruct` that `graft_delta` would refuse, as far as shapes and configurations tell, and warns if
    `graft_delta` would warn."""
    before, after = StoredModel(base, revision=revision), StoredModel(instruct)
    _new_rows(before, after, keep_tokenizer)
    _cosine(before, after, f"instruct ({after.name})")


def _following(
    target: Source, before: Source, after: Source, ignored: Sequence[str]
) -> tuple[Any, dict[str, tuple[Any, Any]]]:
    """The configuration of `target` with the fields in which `after` differs from `before`; and what changed."""
    config, fields = copy.deepcopy(target.config), {}
    for name, _, new in differences(before.config, after.config, ignored):
        if (old := getattr(config, name, None)) != new:
            fields[name] = (old, new)
            setattr(config, name, new)
    return config, fields


def _grafted(homes: Mapping[str, str | None], scale: float, before: StoredModel, after: StoredModel) -> Rule:
    """Of what the tensors of a grafted model are made; `homes` names the tensor of base and instruct for each."""

    def rule(place: Place) -> Copy | Mix | None:
        home = homes.get(place.key)
        if home is None:
            return Copy(place.key)

        def moved(now: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
            delta = new - old
            if not is_finite(delta):
                raise InputError(f"Tensor {home!r}: {after.folder} minus {before.folder} is not finite (NaN or inf).")
            result = now + scale * delta
            # If training left the tensor alone, the sum is `new`, except for its rounding.
            return torch.where(now == old, new, result) if scale == 1 else result

        return Mix([Copy(place.key), Copy(home, 1), Copy(home, 2)], moved, rest=Copy(home, 2))

    return rule


def _check_expanded_from(target: StoredModel, base: StoredModel, own: Mapping[str, str]) -> None:
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
    if wrong is not None:
        raise InputError(
            f"{base.folder}: is not the model from which {target.folder} was expanded: tensor {wrong!r} differs "
            "from the model's own, which the expansion copied. Give the model that was expanded as base."
        )


def _same_tensor(ours: StoredTensor, theirs: StoredTensor) -> bool:
    """Whether two tensors have the same elements in the type of one of them."""

    def rounded(one: StoredTensor, other: StoredTensor) -> bool:
        return all(torch.equal(b.to(a.dtype), a) for a, b in zip(one.pieces(), other.pieces(), strict=True))

    return ours.shape == theirs.shape and (rounded(ours, theirs) or rounded(theirs, ours))


def dense_names(target: Source) -> dict[str, str | None]:
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
    for which in (base, instruct):
        if isinstance(which.config, ExpandedConfig):
            raise InputError(f"{which.folder}: is an expanded checkpoint; base and instruct must be dense ones.")
    if not keep_tokenizer and not any(any(instruct.folder.glob(pattern)) for pattern in TOKENIZER_FILES[:-1]):
        raise InputError(f"{instruct.folder}: has no tokenizer; pass --keep-tokenizer to keep the model's own.")
    modules = [base.network.get_input_embeddings(), base.network.get_output_embeddings()]
    own = {id(parameter) for module in modules if module is not None for parameter in module.parameters()}
    embeddings = {key for key, value in base.network.named_parameters(remove_duplicate=False) if id(value) in own}
    rows = {
        key: theirs[0] - ours[0]
        for key, ours in base.shapes.items()
        if (theirs := instruct.shapes.get(key)) and key in embeddings and ours[1:] == theirs[1:] and theirs[0] > ours[0]
    }
    check_alike(base, instruct, keys={key: key for key in (*base.shapes, *instruct.shapes) if key not in rows})
    return max(rows.values(), default=0)


def _cosine(base: StoredModel, other: StoredModel, what: str, names: Mapping[str, str] | None = None) -> float:
    """The cosine of two models over a sample of the first matrix of each layer's FFN. Warns if it is low.

    Args:
        what: the other model, for the warning.
        names: the other model's name of each tensor of `base`, where the names differ.
    """
    sums = torch.zeros(3, dtype=torch.float64)
    for ffn in decoder_ffns(base.network):
        key = next(f"{ffn.name}.{name}" for name, value in ffn.module.named_parameters() if value.dim() > 1)
        ours, theirs = base[key], other[names[key] if names else key]
        stop = min(_SAMPLE, ours.numel)
        for a, b in zip(ours.pieces(stop=stop), theirs.pieces(stop=stop), strict=True):
            a, b = a.double(), b.double()
            sums += torch.stack([a @ b, a @ a, b @ b])
    dot, left, right = sums.tolist()
    cosine = dot / max((left * right) ** 0.5, 1e-30)
    if cosine < _RELATED:
        warnings.warn(
            f"base ({base.name}) and {what} look unrelated: the cosine of their FFNs is {cosine:.3f}, while it is "
            "nearly 1 for a fine-tune. Adding this delta will hardly give a working model.",
            stacklevel=3,
        )
    return cosine

"""DeltaMoE, which adds the change of a fine-tune to a model of the same base; and averages of checkpoints, or of new
experts with the FFNs that they copied."""

import copy
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..core.errors import InputError
from ..core.schema import checked
from ..modeling import ExpandedConfig, LayerMoEConfig, decoder_ffns
from ..modeling.part_joined import joins_packs
from .arguments import AverageSettings
from .facts import Facts, kind_of
from .reader import StoredTensor
from .records import History, StageRecord
from .source import TOKENIZER_FILES, differences, load_base_config
from .stored import BASE_FIELDS, Place, Source, StoredModel, check_alike, layer_list
from .table import Copy, Mix, Rule, opened, rewrite
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
        base: the dense model from which `model` was made; `revision` is its own, if it is a hub id.
        instruct: a fine-tune of `base`. Its further embedding rows (chat tokens) are copied unchanged.
        scale: factor of the delta.
        keep_tokenizer: keep the model's tokenizer, chat template, generation config and special token ids; by default
            they are taken from instruct.

    Raises:
        InputError: the three models do not fit together (the message names the tensor or field), `model` was expanded
            from another model than `base`, a result is not finite, or `out` cannot be written.
    """
    target, before = StoredModel(model), StoredModel(base, revision=revision, load=load_base_config)
    after = StoredModel(instruct, load=load_base_config)
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
    config, fields = copy.deepcopy(target.config), {}
    for name, _, new in differences(before.config, after.config, (*_OWN, *(_TOKEN_IDS if keep_tokenizer else ()))):
        if (old := getattr(config, name, None)) != new:
            fields[name] = (old, new)
            setattr(config, name, new)
    tokenizer = target if keep_tokenizer else after
    settings = {"base": before.name, "instruct": after.name, "scale": scale, "tokenizer": tokenizer.name}
    rewrite(
        [target, before, after], config, _grafted(homes, scale), out, title=step,
        record=StageRecord(stage=step, settings=settings), companions=0 if keep_tokenizer else 2,
        max_shard_size=max_shard_size, overwrite=overwrite,
    )  # fmt: skip
    return GraftReport(Path(out), cosine, new_rows, fields)


def check_fine_tune(
    base: str | os.PathLike, instruct: str | os.PathLike, keep_tokenizer: bool = False, revision: str | None = None
) -> None:
    """Refuses an `instruct` that `graft_delta` would refuse, as far as shapes and configurations tell, and warns if
    `graft_delta` would warn."""
    before = StoredModel(base, revision=revision, load=load_base_config)
    after = StoredModel(instruct, load=load_base_config)
    _new_rows(before, after, keep_tokenizer)
    _cosine(before, after, f"instruct ({after.name})")


def _grafted(homes: Mapping[str, str | None], scale: float) -> Rule:
    def rule(place: Place) -> Copy | Mix | None:
        home = homes.get(place.key)
        if home is None:
            return Copy(place.key)

        def moved(now: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
            result = now + scale * (new - old)
            # If training left the tensor alone, the sum is `new`, except for its rounding.
            return torch.where(now == old, new, result) if scale == 1 else result

        return Mix([Copy(place.key), Copy(home, 1), Copy(home, 2)], moved, rest=Copy(home, 2))

    return rule


def _check_expanded_from(target: StoredModel, base: StoredModel, own: Mapping[str, str]) -> None:
    """`own` names the tensor of `target` that the expansion copied from each tensor of the base. A model whose history
    has a step that changes every tensor is not checked."""
    history = History.of(target.config)
    changed = any(stage.changes_everything for stage in history.stages)
    if changed or any(record.expert_init == "branches" for record in history.expansions):
        return
    for home, key in own.items():
        if not (_rounds_to(base[home], target[key]) or _rounds_to(target[key], base[home])):
            what = f"is not the model from which {target.folder} was expanded"
            raise InputError(f"{base.folder}: {what}: tensor {home!r} differs from the model's own.")


def _rounds_to(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether a tensor has the other's elements, rounded to its type."""
    return all(torch.equal(b.to(a.dtype), a) for a, b in zip(one.pieces(), other.pieces(), strict=True))


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
    """The cosine of two models over a sample of the first matrix of each layer's FFN. Warns, with `what` for the other
    model, if it is low; `names` has the other's name of each tensor of `base`, where the names differ."""
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
            "nearly 1 for a fine-tune.",
            stacklevel=3,
        )
    return cosine


# Fields that must agree between averaged models, besides all shapes.
_SAME = (
    *BASE_FIELDS, "num_experts_per_layer", "classifier_layers", "language_gate", "exclusive_experts", "router_top_k",
    "language_groups", "new_layers",
)  # fmt: skip
_FACTORS = "the mean of their updates' factors is not the mean of the updates"
# Why checkpoints, or the experts of one, have no mean.
REFUSED = {
    ("lora", "average"): _FACTORS,
    ("adapters", "average"): _FACTORS,
    ("dmoe", "average-with-the-base"): "all experts of a DMoE train: give a second checkpoint to average it with",
    ("random", "average-with-the-base"): "not as copies of an FFN, with which they could be averaged",
}
# The last matrices of LoRA experts and of added ones, which start at zero: expert 0 is as if theirs were zero.
_UPDATES = ("lora_B.weight", "lora_B.bias", "down_proj.weight")


@checked
def average_checkpoints(
    models: Sequence[str | os.PathLike | PreTrainedModel],
    out: str | os.PathLike | None = None,
    weights: Sequence[float] | None = None,
    *,
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
) -> Any:
    """The weighted mean of checkpoints of one shape, dense (Dense-FT-Avg) or expanded: a folder of them, which is
    written, or a new loaded model of loaded ones.

    Dense models of the expanded models' base count too (MoE-CPT-Avg), as if every expert were the dense FFN. Tensors
    that a dense model lacks, such as routers, are the mean of the expanded models' tensors. The mean is computed in
    float32 and rounded once. Configuration, history and tokenizer are the first model's.

    Args:
        models: two or more checkpoints, or loaded models; if any is expanded, the first must be.
        weights: one weight for each model, from 0 to 1 and with the sum 1; equal by default.
    """
    weights = [1 / len(models) for _ in models] if weights is None else list(weights)
    if not 2 <= len(models) == len(weights) or not abs(sum(weights) - 1) <= 1e-6 or min(weights) < 0:
        shown = [round(one, 6) for one in weights]
        raise InputError(f"weights is {shown}: checkpoints need as many weights with the sum 1, none below 0.")
    stored = opened(models, out, overwrite)
    expanded = [model for model in stored if isinstance(model.config, ExpandedConfig)]
    for model in expanded:
        kind = kind_of(model.config)
        if kind.has_updates:
            what = "adapters" if kind.name == "adapter" else "LoRA experts"
            raise InputError(f"{model.folder}: has {what}, and {_FACTORS}.")
        if kind.name == "added" and len(expanded) < len(stored):
            raise InputError(f"{model.folder}: has added experts, which the dense checkpoint lacks.")
    record = StageRecord(stage="average", settings={"models": [model.name for model in stored], "weights": weights})
    return rewrite(
        stored, copy.deepcopy(stored[0].config), _mean(stored, expanded, weights), out, record=record, title="average",
        max_shard_size=max_shard_size, overwrite=overwrite,
    )  # fmt: skip


def _mean(models: Sequence[Source], expanded: Sequence[Source], weights: Sequence[float]) -> Rule:
    first = models[0]
    dense = [model for model in models if model not in expanded]
    for model in (expanded or dense)[1:]:
        check_alike(first, model, _SAME)
    if not expanded or not dense:
        return lambda place: Mix([Copy(place.key, number) for number in range(len(models))], weights)
    homes = dense_names(first)
    for model in dense:
        check_alike(first, model, keys=homes)
    share = sum(weight for weight, model in zip(weights, models, strict=True) if model in expanded)
    if not share:
        raise InputError("The weights of the expanded checkpoints are 0, but only these have routers.")

    def rule(place: Place) -> Mix:
        home = homes.get(place.key)
        of = [number for number, model in enumerate(models) if home is not None or model in expanded]
        names = [Copy(str(home) if models[number] in dense else place.key, number) for number in of]
        return Mix(names, [weights[number] / (share if home is None else 1) for number in of])

    return rule


@checked
def average_experts(
    model: str | os.PathLike | PreTrainedModel,
    out: str | os.PathLike | None = None,
    weight: float = AverageSettings().weight,
    *,
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
) -> Any:
    """A model whose new experts are `weight * expert + (1 - weight) * FFN`, the FFN from which each was copied: the
    folder, or a loaded model, a new one that shares all other tensors.

    The new experts are those of the last expansion, or of all packs of a joined model. The update of a LoRA expert and
    the output of an added one are multiplied by `weight`. All other tensors stay byte for byte.

    Args:
        model: a LayerMoE checkpoint, or a loaded one.
        weight: from 0 (the experts as they began) to 1 (as they are).
    """
    if not 0 <= weight <= 1:
        raise InputError(f"weight is {weight}: must be from 0 to 1.")
    (stored,) = opened([model], out, overwrite)
    origins = _origins(stored)

    def rule(place: Place) -> Copy | Mix:
        origin = origins.get((place.layer, place.expert))
        if origin is not None and place.dense is not None:
            begun = place.of_expert(origin) if origin else stored.base.get(place.dense, place.dense)
            return Mix([Copy(begun), Copy(place.key)], partial(torch.lerp, weight=weight))
        if origin is not None and place.inner.endswith(_UPDATES):
            return Mix([Copy(place.key)], lambda update: weight * update)
        return Copy(place.key)

    record = StageRecord(stage="average-experts", settings={"weight": weight})
    return rewrite(
        [stored], copy.deepcopy(stored.config), rule, out, record=record, title="average",
        max_shard_size=max_shard_size, overwrite=overwrite,
    )  # fmt: skip


def _origins(stored: Source) -> dict[tuple[int, int | None], int]:
    """The expert that each new expert copied, by layer and expert."""
    config = stored.config
    if not isinstance(config, ExpandedConfig):
        raise InputError(f"{stored.folder}: is a dense model: give a second checkpoint to average it with.")
    if not isinstance(config, LayerMoEConfig):
        raise InputError(f"{stored.folder}: {REFUSED['dmoe', 'average-with-the-base']}.")
    history, joined = History.of(config), joins_packs(config)
    records = history.expansions if joined else [history.last]
    if made := next((one.expert_init for one in records if one.expert_init in ("random", "branches")), None):
        raise InputError(
            f"{stored.folder}: its new experts began as {made}, {REFUSED['random', 'average-with-the-base']}."
        )
    copied = {int(layer): expert for one in records for layer, expert in (one.copied_experts or {}).items() if expert}
    if copied and (joined or any(kind.name != "ffn" for kind in Facts(config).kinds)):
        raise InputError(f"{stored.folder}: its new experts copied other experts than expert 0 (copy_from).")
    inside: dict[tuple[int, int | None], int] = {
        (layer, expert): copied.get(layer, 0)
        for layer, ffn in stored.network.expanded_ffns().items()
        for expert in range(1 if joined else ffn.experts_after_expansion[-2], len(ffn.experts))
    }
    first = 1 if joined else len(history)  # of modules outside the layers, which have the number of their class
    return inside | {(-1, number): 0 for number in range(first, len(history) + 1)}

"""Compares two checkpoints tensor by tensor: the proof that frozen means frozen."""

import os
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..core.errors import InputError
from ..core.progress import Bar
from .reader import CheckpointReader, StoredTensor
from .stored import load_any_config, network_of, stored_tensors

# Names of modules in the backbones.
_PARTS = {
    "routers": {"router", "conditional_gate"},
    "classifiers": {"classifier"},
    "attention": {"self_attn", "self_attention", "attn", "attention"},
    "linear attention, convolutions and state spaces": {"linear_attn", "conv", "mamba", "temporal_block"},
    "side paths": {
        "altup", "altup_projections", "altup_unembed_projections", "laurel", "per_layer_input_gate",
        "per_layer_model_projection", "per_layer_projection",
    },
    "FFNs": {"mlp", "ffn", "feed_forward", "mlp_block", "fc1", "fc2"},
    "embeddings": {"wte", "wpe", "embed_in"},
    "head": {"lm_head", "embed_out"},
}  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """Names of the tensors, in order: identical ones, changed ones, and those that only one checkpoint has."""

    identical: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Whether all tensors are identical."""
        return not (self.changed or self.removed or self.added)

    def by_part(self) -> dict[str, dict[str, int]]:
        """Numbers of identical, changed, removed and added tensors for each part of the model (see `part_of`)."""
        kinds: dict[str, list[str]] = vars(self)
        parts = sorted({part_of(name) for names in kinds.values() for name in names})
        return {
            part: {kind: sum(part_of(name) == part for name in names) for kind, names in kinds.items()}
            for part in parts
        }


def part_of(name: str) -> str:
    """The part of a model that a tensor belongs to, by its name: attention, FFNs, expert 0, other experts, routers,
    classifiers, linear attention and the like, side paths, norms, embeddings, head or other."""
    words = name.split(".")
    if "experts" in words:
        return "expert 0" if words[words.index("experts") + 1] == "0" else "other experts"
    for part, known in _PARTS.items():
        if known & set(words):
            return part
    text = words[-2] if len(words) > 1 else name
    if "norm" in text or text.startswith("ln_"):
        return "norms"
    return "embeddings" if "embed" in text else "other"


def compare_checkpoints(before: str | os.PathLike, after: str | os.PathLike) -> Comparison:
    """Compares two checkpoints, tensor by tensor and in pieces. Types may differ: equal values are identical.

    If the names in the files differ (BLOOM's may lack `transformer.`), tensors are matched by the models' own names.
    """
    a, b = CheckpointReader(Path(before)), CheckpointReader(Path(after))
    ours, theirs = a.tensors, b.tensors
    if ours.keys() != theirs.keys():
        ours, theirs = _by_own_names(a), _by_own_names(b)
    result = Comparison(removed=sorted(set(ours) - set(theirs)), added=sorted(set(theirs) - set(ours)))
    for name in Bar(sorted(set(ours) & set(theirs)), desc="compare", unit="tensor", leave=False):
        (result.identical if _same(ours[name], theirs[name]) else result.changed).append(name)
    return result


def _by_own_names(reader: CheckpointReader) -> dict[str, StoredTensor]:
    """The tensors by the model's names; those of an unknown model by the names in the files."""
    try:
        config = load_any_config(reader.folder)
    except InputError:
        return reader.tensors
    return stored_tensors(reader, network_of(config, reader))


def _same(left: StoredTensor, right: StoredTensor) -> bool:
    if left.shape != right.shape:
        return False
    if left.dtype == right.dtype:
        return left.same_bytes(right)
    pairs = zip(left.pieces(), right.pieces(), strict=True)
    return all(torch.allclose(x.double(), y.double(), rtol=0, atol=0, equal_nan=True) for x, y in pairs)

"""Which tensors differ between two checkpoints: the proof that frozen means frozen."""

import os
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import torch

from .reader import CheckpointReader


@dataclass(frozen=True)
class Comparison:
    """Names of tensors, in order: byte-identical ones, changed ones, and those that only one side has."""

    identical: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)


def compare_checkpoints(before: str | os.PathLike, after: str | os.PathLike) -> Comparison:
    """Compares tensor by tensor, in pieces. Tensors of different types are identical where their values are."""
    a, b = CheckpointReader(Path(before)), CheckpointReader(Path(after))
    result = Comparison(removed=sorted(set(a.tensors) - set(b.tensors)), added=sorted(set(b.tensors) - set(a.tensors)))
    for name in sorted(set(a.tensors) & set(b.tensors)):
        (result.identical if _same(a, b, name) else result.changed).append(name)
    return result


def _same(a: CheckpointReader, b: CheckpointReader, name: str) -> bool:
    left, right = a.tensors[name], b.tensors[name]
    if left.shape != right.shape:
        return False
    if left.dtype != right.dtype:
        return torch.equal(a.tensor(name).double(), b.tensor(name).double())
    return all(x == y for x, y in zip_longest(a.chunks(name), b.chunks(name)))

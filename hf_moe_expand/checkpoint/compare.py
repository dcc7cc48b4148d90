"""Compares the tensors of two checkpoints, and the base inside an expanded model with the hashes of its expansion."""

import json
import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash

from ..core.errors import InputError
from ..core.jsonfile import read_json, write_json
from ..core.progress import Bar
from ..modeling.part_expansion_only import RECORD
from .reader import TORCH_DTYPES, Bytes, CheckpointReader, StoredTensor, tensor_bytes
from .records import History
from .stored import Source, StoredModel, load_any_config, network_of, stored_tensors


@dataclass(frozen=True)
class Comparison:
    """Names of the tensors, in order: identical ones, changed ones, and those that only one checkpoint has."""

    identical: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)

    @property
    def same(self) -> bool:
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
    """The part of a model that a tensor belongs to: expert 0, the other experts, or the module of the layer, or beside
    the layers, that has it."""
    words = name.split(".")
    if "experts" in words:
        return "expert 0" if words[words.index("experts") + 1] == "0" else "other experts"
    inside = max((place for place, word in enumerate(words[:-2]) if word.isdigit()), default=-1)
    if inside < 0:
        return words[-2] if len(words) > 1 else name
    return next((word for word in words if word in ("router", "classifier", "language_gate")), words[inside + 1])


def compare_checkpoints(before: str | os.PathLike, after: str | os.PathLike) -> Comparison:
    """Compares two checkpoints, tensor by tensor and in pieces. Types may differ: equal values are identical. If the
    names in the files differ (BLOOM's may lack `transformer.`), tensors are matched by the models' own names."""
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
    if left.dtype == right.dtype or left.shape != right.shape:
        return left.same_bytes(right)
    pairs = zip(left.pieces(), right.pieces(), strict=True)
    return all(torch.allclose(x.double(), y.double(), rtol=0, atol=0, equal_nan=True) for x, y in pairs)


def differing_tensor(one: Source, other: Source) -> str | None:
    """The first tensor of the base inside, by its name in the base, in which two models differ in type, shape or bytes,
    or that one of them lacks; None if they have one base."""

    def differs(name: str) -> bool:
        own, its = one.base.get(name), other.base.get(name)
        return own is None or its is None or not one[own].same_bytes(other[its])

    return next(filter(differs, sorted({*one.base, *other.base})), None)


# The verdict, in the checkpoint's folder.
BASE_CHECK = "base_check.json"
_FEW, _READERS = 3, 4


@dataclass(frozen=True)
class Verdict:
    """Whether the base inside a model is the base that was expanded: the names, in the base, of the tensors that moved,
    and whether the tensors were compared."""

    moved: list[str] = field(default_factory=list)
    checked: bool = False

    @property
    def names(self) -> str:
        """The first tensors that moved, and the number of the others."""
        more = len(self.moved) - _FEW
        return ", ".join(self.moved[:_FEW]) + (f" and {more} more" if more > 0 else "")

    @property
    def words(self) -> str:
        return f"moved: {self.names}" if self.moved else "as the base" if self.checked else "unchecked"


def base_hashes(source: Any) -> list[str]:
    """A hash of each tensor of the base in a `Source`, in the order of their names in the base."""
    with ThreadPoolExecutor(_READERS) as pool:  # reading and hashing release the GIL
        return list(pool.map(lambda of: _hash(of[1].dtype, of[1].shape, of[1].chunks()), _home(source)))


def moved_tensors(source: StoredModel) -> Verdict:
    """Compares the base inside a checkpoint with the hashes in its history, if it has any, and records the verdict in
    its folder. A tensor of another type has not moved if its values are the base's."""
    expansions = History.of(source.config).expansions
    recorded = next((record.base_hashes for record in expansions if record.base_hashes), None)
    if recorded is None:
        return Verdict()
    known = recorded_verdict(source.folder)
    if known.checked:
        return known
    home = list(_home(source))
    # A head that is its own tensor since then shifts the order.
    wanted = [{one} for one in recorded] if len(home) == len(recorded) else [set(recorded)] * len(home)
    moved = [name for (name, tensor), hashes in zip(home, wanted, strict=True) if not _is_one_of(tensor, hashes)]
    verdict = Verdict(moved, True)
    with suppress(OSError, InputError):  # a folder that cannot be written
        content = {"files": _files(source.folder), "moved": moved}
        write_json(source.folder / BASE_CHECK, content)
    return verdict


def recorded_verdict(folder: Path) -> Verdict:
    """The verdict in a checkpoint's folder, if the weights are those that were compared; reads none of them."""
    with suppress(InputError, OSError):
        content = read_json(folder / BASE_CHECK, "a verdict on the base") if (folder / BASE_CHECK).is_file() else {}
        if content.get("files") == _files(folder) and isinstance(content.get("moved"), list):
            return Verdict([str(name) for name in content["moved"]], True)
    return Verdict()


def _files(folder: Path) -> list[list[Any]]:
    files = [*CheckpointReader(folder).files, folder / RECORD]
    states = [(file.name, file.stat()) for file in files if file.is_file()]
    return [[name, state.st_size, state.st_mtime_ns] for name, state in states]


def _home(source: Any) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors of the dense model at expert 0, by their names in it; tied ones once."""
    network = source.network
    # Marian's positions are computed, and not stored.
    ignored = [*(network._keys_to_ignore_on_save or ()), *(network._keys_to_ignore_on_load_missing or ())]
    for name, key in sorted(source.base.items()):
        if source[key].dtype in TORCH_DTYPES and not any(re.search(pattern, name) for pattern in ignored):
            yield name, source[key]


def _hash(dtype: str, shape: Iterable[int], chunks: Iterable[Bytes]) -> str:
    digest = xxhash.xxh3_64(json.dumps([dtype, list(shape)]).encode())
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def _is_one_of(tensor: StoredTensor, hashes: set[str]) -> bool:
    """Whether a tensor has one of these hashes, in its type or in another one that holds its values."""
    if _hash(tensor.dtype, tensor.shape, tensor.chunks()) in hashes:
        return True
    value = tensor.load()
    for name in TORCH_DTYPES.keys() - {tensor.dtype}:
        other = value.to(TORCH_DTYPES[name])
        if torch.equal(other.to(value.dtype), value) and _hash(name, tensor.shape, [tensor_bytes(other)]) in hashes:
            return True
    return False

"""A fine-tune of a base, and what it changed: the modules of a language's own, whole or as low-rank updates."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..core.errors import InputError
from ..core.progress import Bar
from ..modeling import ExpandedConfig, decoder_ffns
from ..modeling.backbone import takes_hidden_states_alone
from ..modeling.part_languages import decoder_of
from .expand import base_of
from .export import dense_config
from .new_experts import Maps, entry_of, layer_of, layer_places
from .reader import are_headers_alone
from .source import differences, load_base_config, name_and_commit
from .stored import LoadedModel, Place, Source, StoredModel
from .table import Copy, Mix, New, Rule
from .tokenizer import load_tokenizer
from .writer import DTYPE_NAMES

# Fields of a configuration that its computation does not read: a fine-tune's may differ.
_MAY_DIFFER = (
    "_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "decoder_start_token_id",
    "history", "task_specific_params", "id2label", "label2id", "problem_type",
    "initializer_range", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop",
    "attention_probs_dropout_prob", "hidden_dropout_prob", "router_aux_loss_coef", "output_router_logits",
    "unsloth_version", "unsloth_fixed", "pretraining_tp",
)  # fmt: skip
_UNRELATED = 1.0  # the relative change of weights that have nothing to do with the base's is at least this


@dataclass
class FineTune:
    """A fine-tune of the base, whole.

    Attributes:
        name: what the user gave, without this machine's folders.
        home: the base.
        number: of `source` in the operation.
        rank: of the updates; None keeps all whole.
        weight: times the difference.
    """

    name: str
    commit: str | None
    source: Source
    home: Source
    number: int
    rank: int | None
    weight: float
    dtype: str | None
    _factors: tuple[str, Any] = ("", None)

    @property
    def folder(self) -> Path:
        """Its folder."""
        return self.source.folder

    @cached_property
    def changed(self) -> list[str]:
        """The tensors that differ from the base's, by their names in the dense model.

        Raises:
            InputError: one is of another type, or they have nothing to do with the base's.
        """
        if are_headers_alone():  # all may differ
            return list(self.home.base)
        found, changes = [], []
        for dense, key in Bar(self.home.base.items(), desc=f"compare {self.name}", unit="tensor", leave=False):
            ours, theirs = self.home[key], self.source[dense]
            if ours.dtype != theirs.dtype and self.dtype != ours.dtype:
                raise InputError(
                    f"{self.name}: tensor {dense!r} is {theirs.dtype}, but {ours.dtype} in {self.home.name}: give "
                    f"--dtype {_torch_name(ours.dtype)} (dtype=) to convert it."
                )
            if ours.dtype == theirs.dtype and ours.same_bytes(theirs):
                continue
            change = size = 0.0
            for a, b in zip(ours.pieces(), theirs.pieces(), strict=True):
                a, b = a.double(), b.double()
                change, size = change + float((b - a).square().sum()), size + float(a.square().sum())
            if not isfinite(change):
                raise InputError(f"{self.name}: tensor {dense!r}, or the base's, has values that are not finite.")
            if change:
                found.append(dense)
                if len(ours.shape) > 1 and size:
                    changes.append((change / size) ** 0.5)
        if not found:
            raise InputError(f"{self.name}: is {self.home.name} itself: none of its tensors differs.")
        if changes and (middle := sorted(changes)[len(changes) // 2]) >= _UNRELATED:
            raise InputError(
                f"{self.name}: is no fine-tune of {self.home.name}: its matrices differ from it by {middle:.0%} "
                "of their size (the median)."
            )
        return found

    def entry(self, network: Any) -> dict[str, Any]:
        """The entry of `languages` in a configuration: each changed tensor's smallest module."""
        ties = dict(getattr(network, "all_tied_weights_keys", None) or {})
        owned: dict[str, set[str]] = {}
        mixtures = [ffn.place for ffn in decoder_ffns(network) if ffn.is_mixture]  # which stay whole
        for dense in self.changed:
            for key in (dense, *(target for target, source in ties.items() if source == dense)):
                name, _, tensor = key.rpartition(".")
                name = next((place for place in mixtures if key.startswith(f"{place}.")), name)
                owned.setdefault(name, set()).add(tensor)
        places, decoder = layer_places(network), decoder_of(network)
        layers: list[Maps] = [{} for _ in places]
        others: dict[str, Maps] = {"outside": {}, "head": {}}
        widths: list[tuple[int, str]] = []
        for name in [name for name in owned if not any(name.startswith(f"{other}.") for other in owned)]:
            if name in ("", decoder, *places):
                tensor = ".".join(filter(None, (name, sorted(owned[name])[0])))
                raise InputError(
                    f"{self.name}: {tensor} belongs to no module inside a layer, so that no language has it."
                )
            if (update := self._update(network, name, owned[name])) is not None:
                widths.append((min(network.get_submodule(name).weight.shape), name))
            if (layer := layer_of(name, places)) is not None:
                layers[layer][name.removeprefix(f"{places[layer]}.")] = update
            elif decoder and name.startswith(f"{decoder}."):
                others["outside"][name.removeprefix(f"{decoder}.")] = update
            else:
                others["head"][name] = update
        width, name = min(widths, default=(self.rank or 0, ""))
        if (self.rank or 0) > width:
            raise InputError(f"rank is {self.rank}: must be at most {width}, the narrowest side of {name}.")
        return {**entry_of(layers), **{where: maps for where, maps in others.items() if maps}}

    def _update(self, network: Any, name: str, tensors: set[str]) -> list | None:
        """How a language has a module of its own: rank, scaling and whether its bias changed; None if whole."""
        module = network.get_submodule(name)
        is_map = isinstance(module, nn.Linear | Conv1D | nn.Embedding) and takes_hidden_states_alone(type(module))  # type: ignore[arg-type]
        if self.rank is None or not is_map or "weight" not in tensors:
            return None
        return [self.rank, 1.0, *([True] if "bias" in tensors else [])]

    def rule(self, own: Mapping[str, Place], network: Any) -> Rule:
        """Of what the tensors of its language's own modules are made; `network` is the dense model."""

        def made(place: Place) -> Copy | Mix | New | None:
            dense = place.dense or place.updates or ""
            base, here = Copy(self.home.base.get(dense, dense)), Copy(dense, self.number)
            if place.update is None:
                is_tied = dense not in self.source
                if is_tied or (self.weight == 1 and self.source[dense].dtype == self.home[base.key].dtype):
                    return here
                return Mix([base, here], [1 - self.weight, self.weight])
            if dense not in self.home.base:  # tied to another's
                return None
            make = partial(self._difference, dense)
            if place.factor != "lora_B.bias":
                is_conv = isinstance(network.get_submodule(dense.rpartition(".")[0]), Conv1D)
                make = partial(self._factor, dense, str(place.factor)[:6], is_conv)
            return New(make, self.home[base.key].dtype)

        return made

    def facts(self) -> dict[str, Any]:
        """What a history says of it."""
        converted = {"dtype": _torch_name(self.dtype)} if self.dtype else {}
        how = {"rank": self.rank, "weight": self.weight, **converted}
        return {"model": self.name, "revision": self.commit, **how}

    def warnings(self, base: str, commit: str | None) -> list[str]:
        """None: it was compared with the base."""
        return []

    def _difference(self, dense: str) -> torch.Tensor:
        ours, theirs = (tensor.load().double() for tensor in (self.home[self.home.base[dense]], self.source[dense]))
        return self.weight * (theirs - ours)

    def _factor(self, dense: str, which: str, is_conv: bool) -> torch.Tensor:
        """A or B of the truncated SVD of a difference `[out, in]`."""
        if self._factors[0] != dense:  # both are written one after the other
            difference = self._difference(dense)
            B, A = best_update(difference.T if is_conv else difference, self.rank or 0)
            self._factors = dense, {"lora_A": A, "lora_B": B}
        return self._factors[1][which]


def best_update(change: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """B `[out, rank]` and A `[rank, in]` whose product is nearest to a change `[out, in]` in float64: its truncated
    singular value decomposition, by the eigenvectors of the smaller of its two Gram matrices, which takes a tenth of
    the time. Both factors have the roots of the singular values."""
    if change.shape[0] < change.shape[1]:
        A, B = best_update(change.T, rank)
        return B.T, A.T
    V = torch.linalg.eigh(change.T @ change).eigenvectors[:, -rank:].flip(1)
    product = change @ V
    root = product.norm(dim=0).sqrt()
    return product / root.clamp(min=torch.finfo(root.dtype).tiny), root[:, None] * V.T


def _torch_name(dtype: str) -> str:
    return next((str(own).removeprefix("torch.") for own, name in DTYPE_NAMES.items() if name == dtype), dtype)


def load_fine_tune(
    home: Source, tuned: Any, number: int, rank: int | None, weight: float, dtype: str | None
) -> FineTune:
    """A fine-tune, checked against the base's configuration, shapes and vocabulary."""
    if isinstance(tuned, PreTrainedModel):
        source: Source = LoadedModel(tuned)
        name, commit = base_of(tuned)
    else:
        source = StoredModel(tuned, load=load_base_config)
        name, commit = name_and_commit(tuned, source.folder)
    base = home.config if not isinstance(home.config, ExpandedConfig) else dense_config(home.config)
    if base.model_type != source.config.model_type:
        raise InputError(f"{name}: is a {source.config.model_type} model, but {home.name} is a {base.model_type}.")
    longer = f": a model with other tokens is no fine-tune of {home.name}"
    for what, ours, theirs in differences(base, source.config, _MAY_DIFFER):
        more = longer if what == "vocab_size" else ", so that it computes otherwise with the same weights"
        raise InputError(f"{name}: {what} is {theirs!r}, but {ours!r} in {home.name}{more}.")
    for dense, key in home.base.items():
        ours, there = home.shapes[key], source.shapes.get(dense)
        if ours != there:
            has = "no such tensor" if there is None else f"shape {list(there)}"
            raise InputError(f"{name}: tensor {dense!r} has shape {list(ours)} in {home.name}, but {has} here.")
    if isinstance(source, StoredModel):
        _check_vocabulary(home, source)
    return FineTune(name, commit, source, home, number, rank, weight, dtype)


def _check_vocabulary(home: Source, source: Source) -> None:
    """Refuses other tokens, where both have a tokenizer in one file."""
    files = [one.folder / "tokenizer.json" for one in (home, source)]
    if not all(file.is_file() for file in files) or files[0].read_bytes() == files[1].read_bytes():
        return
    # As the library loads them: it adds the end token of a tokenizer's class, and writes it where it saves one.
    ours, theirs = (
        {number: token for token, number in load_tokenizer(one.folder, one.name).get_vocab().items()}
        for one in (home, source)
    )
    for number in sorted({*ours, *theirs}):
        if ours.get(number) != theirs.get(number):
            raise InputError(
                f"{source.name}: token {number} is {theirs.get(number)!r}, but {ours.get(number)!r} in {home.name}: a "
                "model with other tokens is no fine-tune of it."
            )

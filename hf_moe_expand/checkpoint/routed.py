"""The layers of an expanded checkpoint as other architectures take them: the same number of experts in each.

Where a layer has fewer experts, its free places are filled so that the outputs stay the same up to rounding:

- A dense layer becomes copies of its FFN. The weights of the chosen copies sum to 1, whatever the router says.
- With one active expert (K = 1), free places hold copies of expert 0 with its row of the router. The chosen expert's
  weight is 1, and of equal scores either expert gives the same output.
- Otherwise free places must never be chosen. A bias that is added to the scores for the choice alone (a selection bias)
  does it: -1e9 at these places. Without such a bias it cannot be done: the score of a place is linear in the hidden
  states, so that one below another expert's score for x is above it for -x.

Routers keep expert 0's row in free places: the largest score, which softmax subtracts, is then that of a real expert.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from ..core.errors import InputError
from ..modeling import decoder_ffns
from ..modeling.expanded_config import LoraKind
from ..modeling.experts import LoraLinear, LoraUpdate
from .reader import tensor_bytes
from .stored import StoredModel, block_names, rounded, widened
from .writer import OutputTensor, in_memory, zeros

_NEVER = -1e9


@dataclass(frozen=True)
class StoredFFN:
    """A layer's FFN in a checkpoint.

    Attributes:
        name: prefix of the FFN's tensors in the dense model.
        router: the router's weight `[N, h]`; None for a dense layer.
        experts: tensors of each expert, by their names inside the FFN; one expert for a dense layer.
        at: the expert at each place of the layer, where all layers have as many; None: a place never to be chosen.
    """

    name: str
    router: OutputTensor | None
    experts: list[dict[str, OutputTensor]]
    at: list[int | None]

    @property
    def dtype(self) -> str:
        """The type of its first tensor."""
        return next(iter(self.experts[0].values())).dtype

    def dense(self) -> list[OutputTensor]:
        """Expert 0's tensors under their names in the dense model."""
        return [replace(tensor, name=f"{self.name}.{part}") for part, tensor in self.experts[0].items()]

    def part(self, at: int | None, part: str) -> OutputTensor:
        """A tensor of the expert at a place; zeros for one that is never chosen."""
        if at is None:
            like = self.experts[0][part]
            return zeros(like.name, like.dtype, like.shape)
        return self.experts[at][part]

    def padded_router(self, name: str, hidden_size: int) -> OutputTensor:
        """The router's weight `[places, h]`; zeros for a dense layer."""
        shape, router = (len(self.at), hidden_size), self.router
        if router is None:
            return zeros(name, self.dtype, shape)
        places = [row or 0 for row in self.at]
        return OutputTensor(name, router.dtype, shape, lambda: [tensor_bytes(_rows(router)[places])])

    def selection_bias(self, name: str) -> OutputTensor:
        """The bias `[places]` on the scores that keeps places without an expert from being chosen."""
        return in_memory(name, torch.tensor([0.0 if expert is not None else _NEVER for expert in self.at]))


def check_routing(config: Any, folder: Any, target: str, merge_lora: bool) -> None:
    """Refuses a model that does more than choose K of N experts and weigh them by the softmax of their scores, which
    the architectures of the program `target` do."""
    if config.conditional_routing:
        raise InputError(
            f"{folder}: has conditional routing, a gate between expert 0 and the routed experts; no architecture of "
            f"{target} with this backbone's attention has one."
        )
    if config.has_kind("added"):
        raise InputError(
            f"{folder}: its experts are added to expert 0's output; no architecture of {target} has such experts. "
            "Publish the checkpoint with its own code (`push`)."
        )
    if config.has_kind("lora") and not merge_lora:
        raise InputError(
            f"{folder}: its experts are expert 0 with low-rank updates; no architecture of {target} has such experts. "
            "`export --merge-lora` makes FFNs of them; `export --expert` writes a dense model with one of them."
        )
    if config.vocabularies:
        raise InputError(
            f"{folder}: its languages have tokens of their own, which no architecture of {target} keeps from others: "
            "write a dense model of one language (`export --language`)."
        )
    if config.language_gate is not None or getattr(config, "exclusive_experts", False):
        raise InputError(
            f"{folder}: its tokens go by their language, and no architecture of {target} knows languages: write the "
            f"dense model of one (`export --language`){', or its adapter (`--peft`)' * config.has_kind('adapter')}."
        )
    if config.classifier_layers:
        raise InputError(
            f"{folder}: layers {', '.join(map(str, config.classifier_layers))} have a classifier; no architecture of "
            f"{target} has one."
        )
    if merge_lora and not config.has_kind("lora"):
        raise InputError(f"{folder}: has no LoRA experts, so that there is nothing to merge; leave --merge-lora out.")


def active_experts(config: Any) -> int:
    """The number of experts that are active for a token where each layer has as many experts as the largest one."""
    return min(config.router_top_k, max(config.num_experts_per_layer))


def _places(config: Any, layer: int) -> list[int | None]:
    count, most = config.num_experts_per_layer[layer], max(config.num_experts_per_layer)
    filler = 0 if count == 1 or active_experts(config) == 1 else None
    return [*range(count), *[filler] * (most - count)]


def needs_bias(config: Any, folder: Any, biased: bool, why: str) -> bool:
    """Whether an expanded model needs a selection bias (see the module). Refuses numbers of experts that the
    architecture cannot take; `biased` says whether it has such a bias, and `why` says why not, for the message."""
    sizes, top_k = sorted({*config.num_experts_per_layer} - {1}), active_experts(config)
    if top_k == 1 or len(sizes) < 2:
        return False
    if not biased:
        raise InputError(
            f"{folder}: its layers have {', '.join(map(str, sizes))} experts, but architectures have one number for "
            f"all layers. Filling layers up would need a bias on the scores that only the choice sees, and {why}. "
            "Expand with as many experts in every layer (`plan moe-lpr`) to export."
        )
    if sizes[0] < top_k:
        raise InputError(
            f"{folder}: a layer has {sizes[0]} experts, fewer than the {top_k} that are active for a token; an "
            f"architecture with one number of experts for all layers chooses {top_k} in each. Expand with at least "
            f"{top_k} experts in each expanded layer to export."
        )
    return True


def stored_ffns(source: StoredModel) -> list[StoredFFN]:
    """The FFN of each layer; LoRA experts' is expert 0's weights with their updates, added in float32, rounded once."""
    ffns = []
    for number, ffn in enumerate(decoder_ffns(source.network)):
        count = source.config.num_experts_per_layer[number]
        own = [ffn.place] if count == 1 else [f"{ffn.place}.experts.{expert}" for expert in range(count)]
        parts = [key.removeprefix(f"{own[0]}.") for key in source.tensors if key.startswith(f"{own[0]}.")]
        experts = []
        for expert, place in enumerate(own):
            kind = source.config.kind_of(number, expert)
            if isinstance(kind, LoraKind):
                layers = range(len(source.config.num_experts_per_layer))
                updates = lora_updates(source, [expert if layer == number else 0 for layer in layers])
                experts.append({part: merged(source, f"{own[0]}.{part}", updates) for part in parts})
            else:
                experts.append({part: source.copied(f"{place}.{part}") for part in parts})
        router = None if count == 1 else source.copied(f"{ffn.place}.router.weight")
        ffns.append(StoredFFN(ffn.name, router, experts, _places(source.config, number)))
    return ffns


def other_tensors(source: StoredModel, ffns: Sequence[StoredFFN]) -> list[OutputTensor]:
    """The tensors outside the FFNs, under the model's names."""
    inside = tuple(f"{ffn.name}." for ffn in ffns)
    return [source.copied(key, key) for key in source.tensors if not key.startswith(inside)]


@dataclass(frozen=True)
class StoredUpdate:
    """An update `scaling * B A` in a checkpoint: the names of its factors, and its rank."""

    lora_B: str
    lora_A: str
    scaling: float
    rank: int


def lora_updates(source: StoredModel, experts: Sequence[int]) -> dict[str, StoredUpdate]:
    """The updates of one expert of each layer, by the names of the weights that they change."""
    updates = {}
    for layer, block in block_names(source.network).items():
        place = f"{block}.experts.{experts[layer]}"
        for inner, module in source.network.get_submodule(place).named_modules(prefix=place):
            if isinstance(module, LoraUpdate):
                owner = f"{block}.experts.0" if isinstance(module, LoraLinear) else block.rpartition(".")[0]
                updates[f"{owner}.{module.name}.weight"] = StoredUpdate(
                    f"{inner}.lora_B.weight", f"{inner}.lora_A.weight", module.scaling, len(module.lora_A.weight)
                )
    return updates


def merged(source: StoredModel, key: str, updates: Mapping[str, StoredUpdate], name: str | None = None) -> OutputTensor:
    """The tensor `key` with its update, if it has one: `W + alpha / r * B A`; written as `name`, by default that in the
    files."""
    copied = source.copied(key, name)
    if (update := updates.get(key)) is None:
        return copied
    transposed = isinstance(source.network.get_submodule(key.removesuffix(".weight")), Conv1D)

    def data() -> Iterable[bytes]:
        b, a = (widened(source.tensor(factor)) for factor in (update.lora_B, update.lora_A))
        change = b @ a
        weight = widened(source.tensor(key))
        yield rounded(weight + update.scaling * (change.T if transposed else change), copied.dtype, copied.name)

    return OutputTensor(copied.name, copied.dtype, copied.shape, data)


def stacked(name: str, tensors: Sequence[OutputTensor], shape: tuple[int, ...]) -> OutputTensor:
    """Tensors of one type, one after another, as one of another shape."""
    if len(types := sorted({tensor.dtype for tensor in tensors})) > 1:
        raise InputError(f"Tensor {name!r} stacks tensors of several types ({', '.join(types)}): convert them to one.")
    return OutputTensor(name, tensors[0].dtype, shape, lambda: chain.from_iterable(t.data() for t in tensors))


def _rows(tensor: OutputTensor) -> torch.Tensor:
    """The bytes of each row, `[rows, bytes]`."""
    return torch.frombuffer(bytearray().join(tensor.data()), dtype=torch.uint8).view(tensor.shape[0], -1)


def interleaved(tensor: OutputTensor, config: Any) -> OutputTensor:
    """The rows of a query's or key's projection or bias, for rotations of neighbouring elements; else the tensor.

    transformers' Llama rotates element i of a head with element i + d / 2 (d is the head's size), llama.cpp's and
    ERNIE 4.5 element 2i with element 2i + 1. The same rotations of rows in the other order give the same scores.
    """
    projection = tensor.name.rpartition(".")[0].rpartition(".")[2]
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(projection)
    if heads is None:
        return tensor
    halves = (heads, 2, tensor.shape[0] // heads // 2, -1)
    return replace(tensor, data=lambda: [tensor_bytes(_rows(tensor).view(halves).transpose(1, 2))])

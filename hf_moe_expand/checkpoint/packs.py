"""Language packs: expansions of one base that were made apart, as the parts of a joined model.

A pack is an expanded checkpoint. A joined model keeps each pack's configuration and routing as they were, in
`pack_N.safetensors` beside the weights, so that a pack can be taken out again.

Shape suffixes: N experts of a layer, C classes, h hidden size.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save

from ..errors import InputError
from ..modeling import count_layers
from ..modeling.configuration_layer_moe import joins_packs
from ..modeling.expanded_config import ExpertKind
from ..records import History
from .pack_file import PACK_FILE, ROUTING, check_rows, own_text, read_pack_file
from .reader import TORCH_DTYPES
from .stored import Place, StoredModel, network_of, places

# Fields of a configuration in which packs may differ: those that the join computes, and those that computation ignores.
MAY_DIFFER = (
    "num_experts_per_layer", "earlier_experts_per_layer", "classifier_layers", "prefix_gate", "gate_languages",
    "expansions", "packs", "expert_kind", "lora_rank", "lora_alpha", "expert_width", "updates_of_packs",
    "expansion_base", "architectures", "auto_map", "transformers_version", "_name_or_path", "use_cache",
)  # fmt: skip
# Those that training the joined model may change besides.
_MAY_CHANGE_LATER = ("dtype", "bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Pack:
    """A pack, and where its tensors are: in its own checkpoint, or in a joined one.

    Attributes:
        name: the name by which `--without` finds it: the last part of its folder or hub id.
        config: its own configuration.
        config_text: its own config.json.
        stored: the checkpoint that holds its experts.
        routing: its own routers and classifiers: tensors by layer and inner name.
        before: for each layer, the experts of `stored` between expert 0 and its own first one.
        scale: factor of its router's log-odds, from a calibration.
    """

    name: str
    config: Any
    config_text: str
    stored: StoredModel
    routing: dict[tuple[int, str], torch.Tensor]
    before: Sequence[int]
    scale: float = 1.0

    @property
    def history(self) -> History:
        return History.of(self.config)

    @property
    def expansions(self) -> int:
        """Number of its expansions."""
        return len(self.history)

    @property
    def new_languages(self) -> list[str]:
        """The languages that it adds."""
        return list(dict.fromkeys(code for one in self.history.expansions for code in one.new_languages))

    @property
    def counts(self) -> list[list[int]]:
        """`num_experts_per_layer` after each of its expansions."""
        return [*(self.config.earlier_experts_per_layer or []), self.config.num_experts_per_layer]

    @property
    def kind(self) -> ExpertKind:
        """The kind of its experts."""
        return self.config.expert_kinds[0]

    @cached_property
    def places(self) -> dict[str, Place]:
        """The place of each tensor of `stored`."""
        return places(self.stored.network)

    @cached_property
    def base(self) -> dict[str, str]:
        """The key in `stored` of each stored tensor of the base, by its name there."""
        return {
            place.dense: key
            for key, place in self.places.items()
            if place.dense is not None and place.expert in (None, 0) and key in self.stored.names
        }

    @cached_property
    def experts(self) -> list[tuple[int, int, str, str]]:
        """Its own experts' tensors: layer, the expert's number in the pack, name inside the expert, key in `stored`."""
        experts = []
        for key, place in self.places.items():
            number = (place.expert or 0) - (self.before[place.layer] if place.layer >= 0 else 0)
            if place.expert and 1 <= number < self.config.num_experts_per_layer[place.layer]:
                experts.append((place.layer, number, place.inner.split(".", 2)[2], key))
        return experts

    def to_keep(self) -> bytes:
        """The content of its file in a joined model."""
        tensors = {f"{layer}.{inner}": tensor.contiguous() for (layer, inner), tensor in self.routing.items()}
        facts = {"name": self.name, "config": self.config_text, "scale": self.scale}
        return save(tensors, metadata={"pack": json.dumps(facts)})  # one key: several have no order of their own


def own_pack(name: str, stored: StoredModel) -> Pack:
    """A checkpoint that is one pack.

    Raises:
        InputError: a router or classifier holds values that no training makes.
    """
    routing = {}
    for key, place in places(stored.network).items():
        if place.inner in ROUTING:
            routing[place.layer, place.inner] = stored.reader.tensor(stored.home(key))
            check_rows(stored.folder, stored.home(key), routing[place.layer, place.inner])
    text = (stored.folder / "config.json").read_text("utf-8-sig")
    return Pack(name, stored.config, own_text(text, stored.config), stored, routing, [0] * count_layers(stored.config))


def packs_inside(stored: StoredModel) -> list[Pack]:
    """The packs of a joined checkpoint, in order.

    Raises:
        InputError: it joins no packs, or the file of a pack is missing or broken, or its record does not fit the
            tensors.
    """
    sizes = getattr(stored.config, "packs", None)
    if not sizes:
        raise InputError(f"{stored.folder}: joins no language packs.")
    history = [*(stored.config.earlier_experts_per_layer or []), stored.config.num_experts_per_layer]
    layers = count_layers(stored.config)
    packs = []
    for number, end in enumerate(accumulate(sizes), start=1):
        start = end - sizes[number - 1]
        before = [history[start - 1][layer] - 1 if start else 0 for layer in range(layers)]
        file = stored.folder / PACK_FILE.format(number)
        record = read_pack_file(file)
        own = [a - b for a, b in zip(history[end - 1], before, strict=True)]
        if own != record.config.num_experts_per_layer or sizes[number - 1] != len(History.of(record.config)):
            raise InputError(f"{file}: does not fit config.json's counts.")
        pack = Pack(record.name, record.config, record.text, stored, record.routing, before, record.scale)
        _check_record(pack, file)
        packs.append(pack)
    return packs


def _check_record(pack: Pack, file: Path) -> None:
    """Refuses a kept pack whose configuration describes other tensors than the joined checkpoint holds, or another
    computation."""
    stored, network = pack.stored, network_of(pack.config)
    ours, theirs = stored.config.to_dict(), pack.config.to_dict()
    for name in sorted((set(ours) | set(theirs)) - set(MAY_DIFFER) - set(_MAY_CHANGE_LATER)):
        if ours.get(name) != theirs.get(name):
            raise InputError(
                f"{file}: says {name} is {theirs.get(name)!r:.60}, but config.json says {ours.get(name)!r:.60}: it is "
                "not the record of a pack of this model."
            )
    shapes = {key: tuple(value.shape) for key, value in network.state_dict().items()}
    own = places(network)
    held = {(layer, f"experts.{number}.{rest}"): stored.shapes[key] for layer, number, rest, key in pack.experts}
    for key, place in own.items():
        if place.inner in ROUTING:
            shape = None if (rows := pack.routing.get((place.layer, place.inner))) is None else tuple(rows.shape)
        elif place.expert:
            shape = held.get((place.layer, place.inner))
        else:
            shape = stored.shapes.get(pack.base.get(place.dense or "", ""), shapes[key])
        if shape != shapes[key]:
            actual = "none" if shape is None else f"one of shape {list(shape)}"
            raise InputError(
                f"{file}: its record asks for {key!r} of shape {list(shapes[key])}, but there is {actual}."
            )
    known = {(place.layer, place.inner) for place in own.values()}
    if unknown := sorted(set(pack.routing) - known):
        layer, inner = unknown[0]
        raise InputError(f"{file}: holds {inner!r} of layer {layer}, which its record does not name.")


def stages_after_join(folder: Path, config: Any) -> int:
    """The number of steps on a joined model, which its last pack's record holds after the pack's own; 0 for a model
    that joins none, was grown since, or lacks its last pack's file."""
    file = folder / PACK_FILE.format(len(getattr(config, "packs", None) or []))
    if not joins_packs(config) or not file.is_file():
        return 0
    try:
        with safe_open(file, "pt") as opened:
            own = History.of(json.loads(json.loads(opened.metadata()["pack"])["config"]))
    except Exception as error:  # a broken file raises many types
        raise InputError(f"{file}: cannot be read ({error}).") from None
    return len(History.of(config).last.stages) - len(own.last.stages)


def joined_rows(parts: Sequence[tuple[torch.Tensor | None, int, float]], hidden_size: int) -> torch.Tensor:
    """The rows of a router or classifier that joins those of several packs, float32.

    A softmax knows its logits up to a shift: a pack's rows minus its row 0 are its log-odds against expert 0 (of a
    classifier, against class 0), which all packs share. So row 0 of the joined matrix is zero, and the other rows are

        scale_p * (W_p[j] - W_p[0])    for each pack p and j = 1, 2, ...

    Args:
        parts: for each pack its matrix `[n, h]`, None in a layer where it has none; the number of rows that it gets;
            and its scale. Rows of a pack without a matrix are zero: its class then wins exactly where class 0 would,
            and its router decides.
    """
    rows = [torch.zeros(1, hidden_size)]
    for matrix, number, scale in parts:
        if matrix is None:
            rows.append(torch.zeros(number, hidden_size))
        else:
            own = matrix.float()
            rows.append(scale * (own[1:] - own[:1]))
    return torch.cat(rows)


def routing_of(packs: Sequence[Pack], layer: int, dtype: str, gated: bool = False) -> dict[str, torch.Tensor]:
    """The joined router of a layer that a pack expands and, if a pack has one, its classifier, by inner name.

    Args:
        gated: whether gates that were fitted take the place of the packs' classifiers.
    """
    hidden = packs[0].config.hidden_size
    tensors = {}
    counts = [pack.config.num_experts_per_layer[layer] - 1 for pack in packs]
    routers = [pack.routing.get((layer, ROUTING[0])) for pack in packs]
    scales = [pack.scale for pack in packs]
    if any(counts):
        tensors[ROUTING[0]] = joined_rows(list(zip(routers, counts, scales, strict=True)), hidden)
    classifiers = [pack.routing.get((layer, ROUTING[1])) for pack in packs]
    if not gated and any(matrix is not None for matrix in classifiers):
        parts = [(matrix, pack.expansions, 1.0) for matrix, pack in zip(classifiers, packs, strict=True)]
        tensors[ROUTING[1]] = joined_rows(parts, hidden)
    return {name: rows.to(TORCH_DTYPES[dtype]) for name, rows in tensors.items()}

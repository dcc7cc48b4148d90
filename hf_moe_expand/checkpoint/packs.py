"""Language packs: expansions of one base that were made apart, as the parts of a joined model.

A pack is an expanded checkpoint. A joined model keeps each pack's configuration and routing as they were, in
`pack_N.safetensors` beside the weights, so that a pack can be taken out again.

Shape suffixes: N experts of a layer, C classes, h hidden size.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save

from ..core.errors import InputError, named_as
from ..core.jsonfile import parse_json
from ..core.languages import same_language
from ..modeling import LayerMoEConfig, count_layers, model_class
from ..modeling.configuration_layer_moe import joins_packs
from ..modeling.expanded_config import ExpertKind
from .reader import TORCH_DTYPES, is_finite
from .records import History, StageRecord
from .source import differences, load_expanded_config
from .stored import StoredModel, network_of, places

PACK_FILE = "pack_{}.safetensors"
ROUTING = ("router.weight", "classifier.weight")
GATE_ROWS = ("language_gate.weight", "language_gate.bias")
# The rows of routers and classifiers, by layer and inner name.
Rows = dict[tuple[int, str], torch.Tensor]
# float16's largest number. Scores that large make a softmax meaningless; no training comes near it.
_LARGEST = 65504.0
# Fields of a configuration in which packs may differ: those that the join computes, and those that computation ignores.
_MAY_DIFFER = (
    "num_experts_per_layer", "earlier_experts_per_layer", "classifier_layers", "language_gate",
    "expansions", "packs", "expert_kind", "lora_rank", "lora_alpha", "expert_width", "adapters", "updates_of_packs",
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
        scale: factor of its router's log-odds: 1, unless a release before this one calibrated it.
    """

    name: str
    config: Any
    config_text: str
    stored: StoredModel
    routing: Rows
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
    def kind(self) -> ExpertKind:
        """The kind of its experts."""
        return self.config.expert_kinds[0]

    @cached_property
    def base(self) -> dict[str, str]:
        """The key in `stored` of each stored tensor of the base, by its name there."""
        return {
            place.dense: key
            for key, place in self.stored.places.items()
            if place.dense is not None and place.expert in (None, 0) and key in self.stored
        }

    @cached_property
    def experts(self) -> list[tuple[int, int, str, str]]:
        """Its own experts' tensors: layer, the expert's number in the pack, name inside the expert, key in `stored`."""
        experts = []
        for key, place in self.stored.places.items():
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
    """The pack that a checkpoint is. Refuses routers and classifiers with values that no training makes."""
    routing = {}
    for key, place in stored.places.items():
        if place.is_routing:
            routing[place.layer, place.inner] = stored.tensor(key)
            _check_rows(stored.folder, stored[key].name, routing[place.layer, place.inner])
    text = (stored.folder / "config.json").read_text("utf-8-sig")
    return Pack(name, stored.config, _own_text(text, stored.config), stored, routing, [0] * count_layers(stored.config))


def packs_inside(stored: StoredModel) -> list[Pack]:
    """The packs of a joined checkpoint, in order. Refuses files of packs that are broken or do not fit its tensors."""
    sizes = getattr(stored.config, "packs", None)
    if not sizes:
        raise InputError(f"{stored.folder}: joins no language packs.")
    dense = [1] * count_layers(stored.config)
    history = [dense, *(stored.config.earlier_experts_per_layer or []), stored.config.num_experts_per_layer]
    packs = []
    for number, (start, end) in enumerate(pairwise(accumulate(sizes, initial=0)), start=1):
        before = [count - 1 for count in history[start]]
        file = stored.folder / PACK_FILE.format(number)
        pack = _kept_pack(file, stored, before)
        own = [a - b for a, b in zip(history[end], before, strict=True)]
        if own != pack.config.num_experts_per_layer or end - start != pack.expansions:
            raise InputError(f"{file}: does not fit config.json's counts.")
        _check_record(pack, file)
        packs.append(pack)
    return packs


def _check_record(pack: Pack, file: Path) -> None:
    """Refuses a kept pack of other tensors than the joined checkpoint holds, or of another computation."""
    stored = pack.stored
    for name, ours, theirs in differences(stored.config, pack.config, (*_MAY_DIFFER, *_MAY_CHANGE_LATER)):
        raise InputError(
            f"{file}: says {name} is {theirs!r:.60}, but config.json says {ours!r:.60}: it is not the record of a pack "
            "of this model."
        )
    own = places(network_of(pack.config))
    held = {(layer, f"experts.{number}.{rest}"): stored.shapes[key] for layer, number, rest, key in pack.experts}
    for key, place in own.items():
        if place.is_routing:
            shape = None if (rows := pack.routing.get((place.layer, place.inner))) is None else tuple(rows.shape)
        elif place.expert:
            shape = held.get((place.layer, place.inner))
        else:
            shape = stored.shapes.get(pack.base.get(place.dense or "", ""), place.shape)
        if shape != place.shape:
            actual = "none" if shape is None else f"one of shape {list(shape)}"
            raise InputError(
                f"{file}: its record asks for {key!r} of shape {list(place.shape)}, but there is {actual}."
            )
    known = {(place.layer, place.inner) for place in own.values()}
    if unknown := sorted(set(pack.routing) - known):
        layer, inner = unknown[0]
        raise InputError(f"{file}: holds {inner!r} of layer {layer}, which its record does not name.")


def stages_after_join(folder: Path, config: Any) -> list[StageRecord]:
    """The steps on a joined model, which its last pack's record holds after the pack's own; none of a model that joins
    no packs, was grown since, or lacks its last pack's file."""
    file = folder / PACK_FILE.format(len(getattr(config, "packs", None) or []))
    if not joins_packs(config) or not file.is_file():
        return []
    try:
        with safe_open(file, "pt") as opened:
            own = History.of(json.loads(json.loads(opened.metadata()["pack"])["config"]))
    except Exception as error:  # a broken file raises many types
        raise InputError(f"{file}: cannot be read ({error}).") from None
    return History.of(config).last.stages[len(own.last.stages) :]


def _kept_pack(file: Path, stored: StoredModel, before: Sequence[int]) -> Pack:
    """A pack of a joined checkpoint, from its file there."""
    if not file.is_file():
        raise InputError(f"{file}: is missing; it holds the pack's routers, without which no pack can be taken out.")
    try:
        with safe_open(file, "pt") as opened:
            facts = json.loads(opened.metadata()["pack"])
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 not a mapping
        name, text, scale = str(facts["name"]), str(facts["config"]), float(facts["scale"])
        routing = {(int(key.split(".", 1)[0]), key.split(".", 1)[1]): tensor for key, tensor in tensors.items()}
        if not 0 < scale < float("inf"):
            raise ValueError(f"the factor of its router is {scale}, not a positive number")
        if not isinstance(parse_json(text), dict):
            raise ValueError("its configuration is not an object")
        check_pack_name(name)
    except Exception as error:  # a broken file raises many types
        raise InputError(f"{file}: cannot be read ({error}).") from None
    for key, tensor in tensors.items():
        _check_rows(file, key, tensor)
    with TemporaryDirectory() as scratch, named_as(scratch, file):
        (Path(scratch) / "config.json").write_text(text, "utf-8")
        config: Any = load_expanded_config(Path(scratch))
    if not isinstance(config, LayerMoEConfig):
        raise InputError(f"{file}: holds no LayerMoE configuration.")
    return Pack(name, config, _own_text(text, config), stored, routing, before, scale)


def _check_rows(where: Path, name: str, rows: torch.Tensor) -> None:
    """Refuses rows of a router, classifier or gate that hold values which no training makes."""
    if rows.dtype not in TORCH_DTYPES.values():
        raise InputError(f"{where}: tensor {name!r} is of type {rows.dtype}; a router is of a floating-point type.")
    if rows.numel() and not is_finite(rows):
        raise InputError(f"{where}: tensor {name!r} holds NaN or infinite values; the checkpoint is damaged.")
    if rows.numel() and (largest := float(rows.abs().max())) > _LARGEST:
        raise InputError(
            f"{where}: tensor {name!r} holds {largest:.3g}, beyond {_LARGEST:,.0f}, with which no router can choose; "
            "the checkpoint is damaged."
        )


def check_pack_name(name: str) -> None:
    """Refuses a pack's name that is empty, too long, or holds line ends or other characters that are not printed."""
    if not name.strip() or len(name) > 200 or not name.isprintable():
        raise InputError(f"{name[:60]!r} is no name of a pack: it must be of 1 to 200 printable characters.")


def _own_text(text: str, config: Any) -> str:
    """A pack's config.json as a whole checkpoint of this package has it: with no reference to a base elsewhere, and to
    no other code than this package's. Where it is so already, the text stays byte for byte."""
    fields = parse_json(text)
    own = {name: value for name, value in fields.items() if name not in ("expansion_base", "custom_pipelines")}
    if "auto_map" in own:
        own["auto_map"] = model_class(config).auto_map(config)
    return text if own == fields else json.dumps(own, indent=2, sort_keys=True) + "\n"


def check_packs(packs: Sequence[Pack], keep_both: bool, bytes_too: bool = True) -> None:
    """Refuses packs that do not fit together; `bytes_too` compares the bytes of their bases too, which reads them."""
    first, *others = packs
    names = [pack.name for pack in packs]
    grafted = [any(stage.stage == "graft" for stage in pack.history.stages) for pack in packs]
    for pack, is_grafted in zip(packs, grafted, strict=True):
        if stage := pack.history.trained_base:
            raise InputError(
                f"{pack.name}: `{stage}` trained the base inside, which the other packs do not share: join packs whose "
                "base stayed frozen."
            )
        if pack.config.conditional_routing:
            raise InputError(
                f"{pack.name}: has conditional routing, whose gate weighs its own experts against expert 0 alone: it "
                "cannot be joined."
            )
        if is_grafted != grafted[0]:
            with_, without = (names[grafted.index(flag)] for flag in (True, False))
            raise InputError(
                f"{with_}: got a graft, and {without} did not: join the packs first and graft the joined model, or "
                "graft all of them with the same model."
            )
    for pack in others:
        _check_config(first, pack)
    for number, pack in enumerate(packs):
        for other in packs[:number]:
            alike = pack.config_text == other.config_text and pack.routing.keys() == other.routing.keys()
            if alike and all(bool((rows == other.routing[key]).all()) for key, rows in pack.routing.items()):
                raise InputError(f"{pack.name}: is the same pack as {other.name}: name each pack once.")
            of_other = other.new_languages
            twice = [code for code in sorted(pack.new_languages) if any(same_language(code, one) for one in of_other)]
            if twice and not keep_both:
                raise InputError(
                    f"{', '.join(twice)}: {other.name} and {pack.name} both add it: leave one of them out, or keep "
                    "both (--keep-both)."
                )
    for name in {pack.name for pack in packs if names.count(pack.name) > 1}:
        raise InputError(f"{name}: two packs have this name, by which they are told apart: name one, NAME=FOLDER.")
    for pack in others if bytes_too else ():
        _check_base(first, pack)


def _check_config(first: Pack, pack: Pack) -> None:
    apart = {"added": "added experts", "adapter": "adapters"}
    if kinds := [kind for kind in apart if (first.kind.name == kind) != (pack.kind.name == kind)]:
        own, another = (first, pack) if first.kind.name == kinds[0] else (pack, first)
        raise InputError(
            f"{own.name}: has {apart[kinds[0]]}, but the experts of {another.name} are {another.kind.words}: "
            f"{apart[kinds[0]]} are joined with {apart[kinds[0]]} alone."
        )
    if first.config.router_top_k != pack.config.router_top_k:
        raise InputError(
            f"router_top_k is {first.config.router_top_k} in {first.name}, but {pack.config.router_top_k} in "
            f"{pack.name}: their routers were trained for different numbers of active experts."
        )
    for field, ours, theirs in differences(first.config, pack.config, _MAY_DIFFER):
        raise InputError(
            f"{field} is {ours!r} in {first.name}, but {theirs!r} in {pack.name}: they were not expanded from the same "
            "base."
        )


def _check_base(first: Pack, pack: Pack) -> None:
    """Refuses a pack whose base has other bytes."""
    ours, theirs = first.base, pack.base
    for dense in sorted(set(ours) | set(theirs)):
        both = dense in ours and dense in theirs
        if not both or not first.stored[ours[dense]].same_bytes(pack.stored[theirs[dense]]):
            raise InputError(
                f"{pack.name}: is no expansion of the base of {first.name}: tensor {dense!r} differs. Join packs of "
                "one base, of the same revision and type."
            )


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
        own = torch.zeros(number + 1, hidden_size) if matrix is None else matrix.float()
        rows.append(scale * (own[1:] - own[:1]))
    return torch.cat(rows)


def joined_routing(packs: Sequence[Pack]) -> Rows:
    """The joined routers of the layers that a pack expands, and the classifiers where one has them, in float32."""
    hidden, rows = packs[0].config.hidden_size, {}
    for place in dict.fromkeys(place for pack in packs for place in pack.routing if place[1] in ROUTING):
        layer, inner = place
        if inner == ROUTING[0]:
            sizes = [(pack.config.num_experts_per_layer[layer] - 1, pack.scale) for pack in packs]
        else:
            sizes = [(pack.expansions, 1.0) for pack in packs]
        parts = [(pack.routing.get(place), *size) for pack, size in zip(packs, sizes, strict=True)]
        rows[place] = joined_rows(parts, hidden)
    return rows

"""Describes an expanded checkpoint: layers, experts, parameters, history. Reads no weights."""

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..checkpoint.arguments import NewExperts
from ..checkpoint.compare import recorded_verdict
from ..checkpoint.expand import check_layers, planned_config
from ..checkpoint.facts import Facts, JoinedPack, kind_of
from ..checkpoint.new_experts import chosen_kind
from ..checkpoint.reader import CheckpointReader
from ..checkpoint.records import ExpansionRecord, StageRecord
from ..checkpoint.source import check_expanded, load_base_config, load_expanded_config, resolve_checkpoint
from ..checkpoint.stored import check_size, network_of
from ..checkpoint.tuned import STAGE as TUNED
from ..core.errors import InputError
from ..core.languages import in_words
from ..core.layer_names import counts_in_words, layers_in_words
from ..core.rendering import render
from ..modeling import count_layers, decoder_ffns
from ..modeling.expanded_ffn import ExpandedFFN
from ..modeling.language_gate import TEMPLATE, GateRule
from ..modeling.language_modules import Choosing, OuterModules
from ..modeling.updates import LoraUpdate
from ..planning.plan import Plan
from ..stages import training_stages
from ..trainers.freezing import freeze

# The names that configurations have for the number of a mixture's experts that a token takes.
_ACTIVE = (
    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts",
    "expert_num_selected",
)  # fmt: skip


@dataclass(frozen=True)
class Inspection:
    """Parameter counts and history of an expanded checkpoint.

    Attributes:
        layers: for each layer: number of experts, whether it has a classifier, and parameters of its FFN block.
        total, active: all parameters, and parameters active for one token.
        base: parameters of the dense base.
        trainable: parameters that each stage trains.
        expansions: the expansions' records in config.json.
        experts: the kind of the new experts, in words, unless they are FFNs.
        mixtures: layers that are mixtures of experts of the backbone's own.
        gate: the language gate; None without one.
        exclusive: whether tokens of a new language take its experts alone.
        packs: the language packs that the model joins.
        encoder_layers: number of an encoder-decoder's first layers, its encoder's; 0 for a decoder.
        base_check: the recorded verdict on the base inside, in words; None for a configuration alone.
    """

    backbone: str
    top_k: int
    layers: list[tuple[int, bool, int]]
    total: int
    active: int
    base: int
    trainable: dict[str, int]
    expansions: Sequence[ExpansionRecord]
    experts: str | None = None
    mixtures: Sequence[int] = ()
    gate: GateRule | None = None
    exclusive: bool = False
    packs: Sequence[JoinedPack] = ()
    encoder_layers: int = 0
    base_check: str | None = None

    def lines(self) -> list[str]:
        """The report, line by line."""
        experts, encoder = [experts for experts, _, _ in self.layers], self.encoder_layers
        stages = [stage for expansion in reversed(self.expansions) for stage in reversed(expansion.stages)]
        fitted = next((stage.settings for stage in stages if stage.stage == "gates"), None) or {}
        shares = {code: of["end"] for code, of in fitted.get("shares", {}).items() if "end" in of}
        shares |= fitted.get("home", {})
        facts = {
            "model": self, "experts": experts, "counts": counts_in_words(experts, encoder),
            "stacks": f"{encoder} encoder and {len(experts) - encoder} decoder" if encoder else len(experts),
            "dense": [layer for layer, count in enumerate(experts) if count == 1],
            "classifiers": [layer for layer, (_, has_classifier, _) in enumerate(self.layers) if has_classifier],
            "home": sum(code != TEMPLATE for code in (self.gate.languages[0] if self.gate else ())),
            "passing": ", ".join(f"{code} {100 * share:.0f} %" for code, share in shares.items()),
            "brought": {code for record in self.expansions if record.pack for code in record.new_languages},
        }  # fmt: skip
        filters = {
            "layers": lambda layers: layers_in_words(layers, encoder), "stage": _in_words, "count": "{:,}".format,
            "languages": lambda codes: ", ".join(in_words(codes)),
        }  # fmt: skip
        return render("inspection.txt", facts, filters).splitlines()


def inspect_checkpoint(model: str | os.PathLike, revision: str | None = None) -> Inspection:
    """Inspects a folder or hub id."""
    check_expanded(model, revision)
    folder = resolve_checkpoint(model, revision, weights=False)
    config = load_expanded_config(folder)
    if any(folder.glob("*.safetensors")):
        check_size(config, CheckpointReader(folder))
    return replace(inspect_config(config), base_check=recorded_verdict(folder).words)


def inspect_config(config: Any) -> Inspection:
    """Inspects the model that an expanded configuration describes; allocates no weights."""
    network = network_of(config)
    facts = Facts(config)
    kind, *others = facts.kinds
    is_own = kind.name != "ffn" and all(other.name == kind.name for other in others)
    layers = [(1, False, 0)] * count_layers(config)
    gate = getattr(network, "language_gate", None)
    added, total = 0 if gate is None else _size_of(gate), _size_of(network)
    for index, ffn in network.expanded_ffns().items():
        layers[index] = (len(ffn.experts), ffn.classifier is not None, _size_of(ffn))
        added += _size_of(ffn) - _size_of(ffn.experts[0])
    outer = [parameter for one in network.modules() if isinstance(one, OuterModules) for parameter in one.parameters()]
    added += sum({id(parameter): parameter.numel() for parameter in outer}.values())  # two may share one
    stages = [stage for stage in training_stages() if config.model_type in stage.families]
    if facts.exclusive:  # they have no routing to review
        stages = [stage for stage in stages if stage.trains.experts != "none"]
    counts = {stage.name: freeze(network, stage.trains).trainable for stage in stages}
    trainable = {name: count for name, count in counts.items() if count}
    return Inspection(
        config.backbone_model_type, config.router_top_k, layers, total, total - _idle_weights(network), total - added,
        trainable, facts.history.expansions, kind_of(config).words if is_own else None,
        [layer for layer, ffn in enumerate(decoder_ffns(network)) if ffn.is_mixture],
        gate=facts.gate, exclusive=facts.exclusive, packs=facts.packs, encoder_layers=facts.encoder_layers,
    )  # fmt: skip


def inspect_plan(base: str | os.PathLike, plan: Plan, revision: str | None = None, **experts: Any) -> Inspection:
    """Inspects the model that `plan` makes of `base` with new `experts` (`NewExperts`); reads config.json alone."""
    if plan.grows_from:
        raise InputError("The plan grows an expanded checkpoint; give a dense base and its first plan.")
    dense = load_base_config(resolve_checkpoint(base, revision, weights=False))
    check_layers(plan, dense, base)
    kind = chosen_kind(network_of(dense), plan, NewExperts(**experts))
    return inspect_config(planned_config(dense, plan, kind))


def _in_words(stage: StageRecord) -> str:
    words = stage.stage
    if stage.steps is not None:
        words += f", {stage.steps:,} steps, seed {stage.seed}"
    if stage.tokens_seen is not None:
        words += f", {stage.tokens_seen:,} tokens seen"
        words += f" of {sum(stage.tokens.values()):,} at hand" if stage.tokens else ""
    settings = (stage.settings or {}) if stage.stage == TUNED else {}
    of_tuned = {name: settings.get(name) for name in ("model", "rank", "weight")}
    of_tuned["weight"] = None if of_tuned["weight"] == 1 else of_tuned["weight"]
    return ", ".join([words, *(f"{name} {value}" for name, value in of_tuned.items() if value), *stage.sampled])


def _size_of(module: Any) -> int:
    """The number of a module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def _idle_weights(network: Any) -> int:
    """Weights that a token does not use; none of a mixture whose configuration does not say how many it takes."""
    # Of each class the size of each of its tensors, less those it takes the place of.
    own: defaultdict[int, dict[int, int]] = defaultdict(dict)
    for name, holder in network.named_modules():
        for number in range(1, holder.classes) if isinstance(holder, Choosing) else ():
            expert = holder.expert_of(number) or 0
            for place in holder.own[expert]:
                module: Any = holder.get(expert, place)
                own[number] |= {id(parameter): parameter.numel() for parameter in module.parameters()}
                if not isinstance(module, LoraUpdate):
                    replaced = network.get_submodule(f"{name.removesuffix('adapters')}{place}")
                    own[number] |= {id(parameter): -parameter.numel() for parameter in replaced.parameters()}
    used = max([0, *(sum(sizes.values()) for sizes in own.values())])
    return _idle_in_ffns(network) + sum(size for sizes in own.values() for size in sizes.values() if size > 0) - used


def _idle_in_ffns(network: Any) -> int:
    config, idle = network.config, 0
    active = next((count for name in _ACTIVE if isinstance(count := getattr(config, name, None), int)), None)
    for ffn in decoder_ffns(network):
        block: Any = ffn.module
        expanded = isinstance(block, ExpandedFFN)
        if ffn.is_mixture and active is not None:
            fused = [p for p in (block.experts[0] if expanded else block).parameters() if p.dim() > 2]
            idle += sum(p.numel() // p.shape[0] * max(0, p.shape[0] - active) for p in fused)
        if expanded:
            sizes = sorted(map(_size_of, list(block.experts)[1:]), reverse=True)
            if any(kind.name == "ffn" for kind in Facts(config).kinds):
                sizes = sorted([*sizes, _size_of(block.experts[0])], reverse=True)
                sizes = sizes[int(block.shares_expert_0) :]
            idle += sum(sizes[block.top_k :])  # of other kinds a token uses expert 0's weights besides
    return idle

"""Describes an expanded checkpoint: layers, experts, parameters, history. Reads no weights."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf
from pathlib import Path
from typing import Any

from ..checkpoint.base_tensors import recorded_verdict
from ..checkpoint.expand import check_layers, planned_config
from ..checkpoint.local import check_expanded
from ..checkpoint.new_experts import check_kinds, chosen_kind
from ..checkpoint.reader import CheckpointReader
from ..checkpoint.records import ExpansionRecord, History, StageRecord
from ..checkpoint.settings import LORA_ALPHA, LORA_RANK
from ..checkpoint.source import load_base_config, load_expanded_config, resolve_checkpoint
from ..checkpoint.stored import check_size, network_of
from ..core.errors import InputError
from ..core.languages import in_words
from ..core.layer_names import counts_in_words
from ..core.layer_names import in_words as layers_in_words
from ..core.rendering import render
from ..core.scratch import leftovers
from ..inference.forecast import forecast, idle_weights, size_of
from ..modeling import count_layers, decoder_ffns, stack_sizes
from ..modeling.expanded_config import AdapterKind
from ..modeling.language_gate import TEMPLATE, GateRule
from ..planning.plan import Plan
from ..stages import all_stages, stages_for, training_stages
from ..stages.config import StageConfig
from ..trainers.freezing import freeze


@dataclass(frozen=True)
class InspectedPack:
    """A language pack of a joined model.

    Attributes:
        name: folder or hub id.
        languages: those that it adds.
        expansions: number of its expansions.
        experts: the kind of its experts, in words.
    """

    name: str
    languages: list[str]
    expansions: int
    experts: str

    def line(self) -> str:
        several = f", {self.expansions} expansions" if self.expansions > 1 else ""
        return f"{self.name}: {', '.join(in_words(self.languages))}; {self.experts}{several}"


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
        leftovers: what interrupted commands left beside the checkpoint, one sentence each.
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
    leftovers: Sequence[str] = ()
    gate: GateRule | None = None
    exclusive: bool = False
    packs: Sequence[InspectedPack] = ()
    encoder_layers: int = 0
    base_check: str | None = None

    def lines(self) -> list[str]:
        """The report, line by line."""
        return self.rendered("inspection.txt").splitlines()

    def rendered(self, template: str, **further: Any) -> str:
        """A template of this model's facts and of `further` ones."""
        experts, encoder = [experts for experts, _, _ in self.layers], self.encoder_layers
        stages = [stage for expansion in reversed(self.expansions) for stage in reversed(expansion.stages)]
        fitted = next((stage.settings for stage in stages if stage.stage == "gates"), None) or {}
        shares = {code: of["0"] for code, of in fitted.get("shares", {}).items()} | fitted.get("home", {})
        facts = {
            "model": self, "experts": experts, "counts": counts_in_words(experts, encoder),
            "stacks": f"{encoder} encoder and {len(experts) - encoder} decoder" if encoder else len(experts),
            "dense": [layer for layer, count in enumerate(experts) if count == 1],
            "classifiers": [layer for layer, (_, has_classifier, _) in enumerate(self.layers) if has_classifier],
            "home": sum(code != TEMPLATE for code in (self.gate.languages[0] if self.gate else ())),
            "passing": ", ".join(f"{code} {100 * share:.0f} %" for code, share in shares.items()),
            "brought": {code for record in self.expansions if record.pack for code in record.new_languages},
            **further,
        }  # fmt: skip
        filters = {
            "layers": lambda layers: layers_in_words(layers, encoder), "stage": _in_words, "count": "{:,}".format,
            "languages": lambda codes: ", ".join(in_words(codes)),
        }  # fmt: skip
        return render(template, facts, filters)


def inspect_checkpoint(model: str | os.PathLike, revision: str | None = None) -> Inspection:
    """Inspects a folder or hub id."""
    check_expanded(model, revision)
    folder = resolve_checkpoint(model, revision, weights=False)
    config = load_expanded_config(folder)
    if any(folder.glob("*.safetensors")):
        check_size(config, CheckpointReader(folder))
    inspection = inspect_config(config)
    return replace(inspection, leftovers=leftovers(Path(model)), base_check=recorded_verdict(folder).words)


def inspect_config(config: Any) -> Inspection:
    """Inspects the model that an expanded configuration describes; allocates no weights."""
    network = network_of(config)
    kinds = config.expert_kinds
    layers = [(1, False, 0)] * count_layers(config)
    added, total = 0, size_of(network)
    for index, ffn in network.expanded_ffns().items():
        layers[index] = (len(ffn.experts), ffn.classifier is not None, size_of(ffn))
        added += size_of(ffn) - size_of(ffn.experts[0])
    stages = [stage for stage in training_stages() if config.model_type in stage.families]
    if config.exclusive_experts:  # they have no routing to review
        stages = [stage for stage in stages if stage.trains.experts != "none"]
    counts = {stage.name: freeze(network, stage.trains).trainable for stage in stages}
    trainable = {name: count for name, count in counts.items() if count}
    return Inspection(
        config.backbone_model_type, config.router_top_k, layers, total, total - idle_weights(network), total - added,
        trainable, History.of(config).expansions, kinds[0].words if len(kinds) == 1 and not kinds[0].has_ffn else None,
        [layer for layer, ffn in enumerate(decoder_ffns(network)) if ffn.is_mixture],
        gate=GateRule.of(config), exclusive=config.exclusive_experts, packs=_packs(config),
        encoder_layers=stack_sizes(config).get("encoder", 0),
    )  # fmt: skip


def inspect_plan(
    base: str | os.PathLike,
    plan: Plan,
    revision: str | None = None,
    tokens: float | None = None,
    tflops: float | None = None,
    *,
    expert_kind: str = "ffn",
    lora_rank: int = LORA_RANK,
    lora_alpha: float = LORA_ALPHA,
    expert_width: int | None = None,
    target_modules: str | list[str] | None = None,
) -> list[str]:
    """The model that `plan` makes of `base` and the forecast of its stages, line by line; reads config.json alone.

    Args:
        tokens: tokens to train on.
        tflops: the device's speed in practice, in 10^12 operations a second; 200 by default.
    """
    for name, number in (("tokens", tokens), ("tflops", tflops)):
        if number is not None and not 0 < number < inf:
            raise InputError(f"{name} is {number:g}: must be above 0, and finite.")
    if plan.grows_from:
        raise InputError("The plan grows an expanded checkpoint; give a dense base and its first plan for a forecast.")
    dense = load_base_config(resolve_checkpoint(base, revision, weights=False))
    check_layers(plan, dense, base)
    check_kinds("copy", expert_kind)
    whole = network_of(dense)
    kind = chosen_kind(whole, plan, "copy", expert_kind, lora_rank, lora_alpha, expert_width, target_modules)
    config: Any = planned_config(dense, plan, kind)
    trained: list[Any] = [stage for stage in stages_for(config.model_type) if issubclass(stage, StageConfig)]
    model = inspect_config(config)
    rows = {stage.name: (network_of(config), stage()) for stage in trained if stage.name in model.trainable}
    rows["full fine-tuning"] = whole, all_stages()["dense"]()
    at_hand = {} if tokens is None else {"all": int(tokens)}
    speed = 1e12 * (200.0 if tflops is None else tflops)
    stages = {name: forecast(*row, at_hand, speed=speed).words() for name, row in rows.items()}
    return model.rendered("forecast.txt", stages=stages).splitlines()


def _packs(config: Any) -> list[InspectedPack]:
    sizes = getattr(config, "packs", None) or []
    kinds = config.expert_kinds if len(config.expert_kinds) == len(sizes) else config.expert_kinds * len(sizes)
    records, packs = History.of(config).expansions, []
    for size, end, kind in zip(sizes, accumulate(sizes), kinds, strict=True):
        own = records[end - size : end]
        kind = replace(kind, adapters=kind.adapters[end - size : end]) if isinstance(kind, AdapterKind) else kind
        codes = list(dict.fromkeys(code for record in own for code in record.new_languages))
        packs.append(InspectedPack(own[0].pack or "", codes, size, kind.words))
    return packs


def _in_words(stage: StageRecord) -> str:
    words = stage.stage
    if stage.steps is not None:
        words += f", {stage.steps:,} steps, seed {stage.seed}"
    if stage.tokens_seen is not None:
        words += f", {stage.tokens_seen:,} tokens seen"
        words += f" of {sum(stage.tokens.values()):,} at hand" if stage.tokens else ""
    return ", ".join([words, *stage.sampled])

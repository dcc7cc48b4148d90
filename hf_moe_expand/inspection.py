"""Describes an expanded checkpoint: layers, experts, parameters, history. Reads no weights."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from .checkpoint.local import check_expanded
from .checkpoint.reader import CheckpointReader
from .checkpoint.source import load_expanded_config, resolve_checkpoint
from .checkpoint.stored import check_size, network_of
from .languages import in_words
from .modeling import decoder_ffns
from .records import ExpansionRecord, History, StageRecord
from .scratch import leftovers
from .stages import trained_parts
from .trainers.freezing import freeze


@dataclass(frozen=True)
class Inspection:
    """Parameter counts and history of an expanded checkpoint.

    Attributes:
        layers: for each layer: number of experts, whether it has a classifier, and parameters of its FFN block.
        total, active: all parameters, and parameters active for one token.
        base: parameters of the dense base.
        trainable: parameters that each stage trains.
        expansions: the expansions' records in config.json.
        updates: rank and alpha of LoRA experts.
        mixtures: layers that are mixtures of experts of the backbone's own.
        prefix_gate: how the classifiers judge the text so far; None if they judge single tokens.
        leftovers: what interrupted commands left beside the checkpoint, one sentence each.
    """

    backbone: str
    top_k: int
    layers: list[tuple[int, bool, int]]
    total: int
    active: int
    base: int
    trainable: dict[str, int]
    expansions: Sequence[ExpansionRecord]
    updates: tuple[int, float] | None = None
    mixtures: Sequence[int] = ()
    leftovers: Sequence[str] = ()
    prefix_gate: dict[str, Any] | None = None

    def lines(self) -> list[str]:
        """The report, line by line."""
        counts = [experts for experts, _, _ in self.layers]
        classifiers = [str(index) for index, (_, has_classifier, _) in enumerate(self.layers) if has_classifier]
        rank, alpha = self.updates or (0, 0)
        lines = [
            f"backbone            {self.backbone}, {len(counts)} layers",
            f"experts per layer   {' '.join(map(str, counts))} (total {sum(counts)}, top-{self.top_k})",
            *([f"new experts         expert 0 with updates of rank {rank}, alpha {alpha:g}"] if self.updates else []),
            *(
                [f"mixtures before     layers {', '.join(map(str, self.mixtures))}, not expanded"]
                if self.mixtures
                else []
            ),
            f"classifier layers   {', '.join(classifiers) or 'none'}",
            *([f"prefix gates        {_gate_in_words(self.prefix_gate)}"] if self.prefix_gate else []),
            f"parameters          {self.total:,} ({self.total / self.base:.2f} x the base model's {self.base:,})",
            f"active for a token  {self.active:,}",
        ]
        for stage, count in self.trainable.items():
            lines.append(f"trained in {stage:<14}   {count:,} ({100 * count / self.total:.2f} %)")
        for number, expansion in enumerate(self.expansions, start=1):
            old, new = (
                ", ".join(in_words(codes)) or "-" for codes in (expansion.old_languages, expansion.new_languages)
            )
            lines.append(
                f"expansion {number}         {_pack(expansion)}{expansion.method} on {expansion.base_model}: "
                f"old {old}; new {new}"
            )
            if expansion.separability:
                lines.append(f"  separability by layer {separability_line(expansion.separability)}")
            lines += [f"  {_in_words(stage)}" for stage in expansion.stages]
        return lines + [f"left over           {sentence}" for sentence in self.leftovers]


def inspect_checkpoint(model: str | os.PathLike, revision: str | None = None) -> Inspection:
    """Inspects a folder or hub id.

    Raises:
        InputError: it is not an expanded checkpoint; names what interrupted commands left where it would be.
    """
    check_expanded(model, revision)
    folder = resolve_checkpoint(model, revision, weights=False)
    config = load_expanded_config(folder)
    if any(folder.glob("*.safetensors")):
        check_size(config, CheckpointReader(folder))
    return replace(inspect_config(config), leftovers=leftovers(Path(model)))


def inspect_config(config: Any) -> Inspection:
    """Inspects the model that an expanded configuration describes; allocates no weights."""
    network = network_of(config)
    updates = (config.lora_rank, config.lora_alpha) if config.expert_kind == "lora" else None
    layers = [(1, False, 0)] * config.num_hidden_layers
    idle = added = 0
    for index, ffn in network.expanded_ffns().items():
        expert = _size(ffn.experts[0])
        layers[index] = (len(ffn.experts), ffn.classifier is not None, _size(ffn))
        active = ffn.top_k + (ffn.conditional_gate is not None)
        if updates:  # a token uses expert 0's weights for every expert, and at most K updates
            active = min(1 + ffn.top_k, len(ffn.experts))
        sizes = sorted(map(_size, ffn.experts), reverse=True)
        idle += sum(sizes[active:])
        added += _size(ffn) - expert
    total = _size(network)
    parts = trained_parts(config.model_type)
    trainable = {stage: freeze(network, trained).trainable for stage, trained in parts.items()}
    return Inspection(
        config.backbone_model_type, config.router_top_k, layers, total, total - idle, total - added, trainable,
        History.of(config).expansions, updates,
        [layer for layer, ffn in enumerate(decoder_ffns(network)) if ffn.is_mixture],
        prefix_gate=config.prefix_gate,
    )  # fmt: skip


def _gate_in_words(gate: dict[str, Any]) -> str:
    reach = "for their own layers" if gate["reach"] == "layer" else "for the later layers too"
    return (
        f"the classifiers judge the text so far, {reach}: decay {gate['decay']:g} a token, evidence of a token at most "
        f"{gate['bound']:g} nats"
    )


def separability_line(values: Sequence[float]) -> str:
    """Balanced accuracy of each layer in telling old text from new, layer 0 first."""
    return " ".join(f"{value:.2f}" for value in values)


def _pack(expansion: ExpansionRecord) -> str:
    scale = f" (router x {expansion.router_scale:g})" if expansion.router_scale else ""
    return f"pack {expansion.pack}{scale}: " if expansion.pack else ""


def _in_words(stage: StageRecord) -> str:
    words = stage.stage
    if stage.steps is not None:
        words += f", {stage.steps:,} steps, seed {stage.seed}"
    if stage.tokens_seen is not None:
        words += f", {stage.tokens_seen:,} tokens seen"
        words += f" of {sum(stage.tokens.values()):,} at hand" if stage.tokens else ""
    return ", ".join([words, *stage.self_written])


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())

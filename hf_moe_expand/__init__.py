"""hf-moe-expand: teach a dense language model new languages by growing its FFNs into mixtures of experts."""

import importlib
from typing import Any

__version__ = "0.1.0"

# Imported on first use: `hf-moe-expand --help` must not wait for torch.
_HOMES = {
    "LayerMoEConfig": "modeling",
    "LayerMoEModel": "modeling",
    "LayerMoEForCausalLM": "modeling",
    "DMoEConfig": "modeling",
    "DMoEModel": "modeling",
    "DMoEForCausalLM": "modeling",
    "measure_similarity": "analysis.similarity",
    "measure_deviation": "analysis.deviation",
    "measure_routing": "analysis.routing",
    "allocate_experts": "planning.allocation",
    "group_languages": "planning.grouping",
    "select_layers": "planning.layers",
    "Plan": "planning.plan",
    "expand_checkpoint": "checkpoint.expand",
    "expand_model": "checkpoint.in_memory",
    "graft_delta": "checkpoint.graft",
    "grow_checkpoint": "checkpoint.grow",
    "shrink_checkpoint": "checkpoint.shrink",
    "adapt_language": "adaptation",
    "LanguageText": "data.sources",
    "PackedText": "data.packing",
    "evaluate_model": "evaluation.perplexity",
    "evaluate_ensemble": "evaluation.ensemble",
    "run_recipe": "pipeline",
    "make_card": "card",
    "push_to_hub": "hub",
    "save_expansion": "checkpoint.expansion_only",
    "Masking": "trainers",
    "mask_routing": "trainers",
    "RouterLossMixin": "trainers",
    "RouterLossWeights": "trainers",
    "PostPretrainTrainer": "trainers",
    "ReviewTrainer": "trainers",
    "GroupTrainer": "trainers",
    "NormalTrainer": "trainers",
    "AdaptTrainer": "trainers",
    "MoESFTTrainer": "trainers.sft",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)

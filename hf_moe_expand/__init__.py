"""hf-moe-expand: teach a dense language model new languages by growing its FFNs into mixtures of experts."""

import importlib
from typing import Any

__version__ = "0.1.0"

# Imported on first use: `hf-moe-expand --help` must not wait for torch.
_HOMES = {
    "LayerMoEConfig": "modeling",
    "LayerMoEModel": "modeling",
    "LayerMoEForCausalLM": "modeling",
    "measure_similarity": "analysis.similarity",
    "allocate_experts": "planning.allocation",
    "Plan": "planning.plan",
    "expand_checkpoint": "checkpoint.expand",
    "LanguageText": "data.sources",
    "PackedText": "data.packing",
    "evaluate_model": "evaluation.perplexity",
    "run_recipe": "pipeline",
    "RouterLossMixin": "trainers",
    "RouterLossWeights": "trainers",
    "PostPretrainTrainer": "trainers",
    "ReviewTrainer": "trainers",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)

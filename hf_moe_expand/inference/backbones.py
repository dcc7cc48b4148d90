"""Whether a model can be expanded, and the page of the architectures that can (docs/backbones.md)."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ..checkpoint.export import NATIVE_FORMS
from ..checkpoint.promises import check_architecture
from ..checkpoint.proven import LEFT_OUT, LEFT_OUT_ENCODER_DECODERS, PROVEN, PROVEN_ENCODER_DECODERS, PROVEN_MIXTURES
from ..checkpoint.source import load_base_config, resolve_checkpoint
from ..checkpoint.stored import network_of
from ..core.rendering import render
from ..modeling import decoder_ffns, layer_names


def answer(model: str, revision: str | None = None) -> list[str]:
    """What there is to say about one model, line by line; an InputError says why it cannot be expanded."""
    config: Any = load_base_config(resolve_checkpoint(model, revision, weights=False))
    check_architecture(config, model)
    ffns, names = decoder_ffns(network_of(config)), layer_names(config)
    kinds = Counter(type(ffn.module).__name__ for ffn in ffns)
    mixtures = [names[layer] for layer, ffn in enumerate(ffns) if ffn.is_mixture]
    where = "all layers" if len(mixtures) == len(ffns) else f"layers {', '.join(mixtures)}"
    return [
        f"{model}: a {config.model_type} checkpoint; it can be expanded",
        f"layers    {len(ffns)}: " + ", ".join(f"{kind} ({count})" for kind, count in kinds.items()),
        *([f"mixtures  {where}: take --expert-kind added, or give them 1 expert in the plan"] if mixtures else []),
    ]


def backbones_page() -> str:
    """The page: the architectures that keep every promise, and the reasons for the others."""
    proven = {"decoders": PROVEN, "mixtures": PROVEN_MIXTURES, "pairs": PROVEN_ENCODER_DECODERS}
    left_out = {"left_out": _by_reason(LEFT_OUT), "left_out_pairs": _by_reason(LEFT_OUT_ENCODER_DECODERS)}
    return render("backbones.md", {**proven, **left_out, "native": sorted(NATIVE_FORMS)})


def _by_reason(left_out: Mapping[str, str]) -> dict[str, list[str]]:
    return {reason: sorted(name for name in left_out if left_out[name] == reason) for reason in left_out.values()}

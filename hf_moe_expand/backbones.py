"""Whether a model can be expanded, and the page of the architectures that can (docs/backbones.md)."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from .checkpoint.export import NATIVE_FORMS
from .checkpoint.promises import PROMISES, broken_promise, in_refusal, tiny_twin
from .checkpoint.proven import LEFT_OUT, LEFT_OUT_ENCODER_DECODERS, PROVEN, PROVEN_ENCODER_DECODERS, PROVEN_MIXTURES
from .checkpoint.source import load_base_config, resolve_checkpoint
from .checkpoint.stored import network_of
from .errors import InputError, first_line
from .modeling import LayerMoEConfig, auto_class, decoder_ffns, layer_names
from .modeling.backbone import SeparateFFN
from .rendering import render


def answer(model: str, revision: str | None = None) -> list[str]:
    """What there is to say about one model, line by line; an InputError says why it cannot be expanded."""
    config: Any = load_base_config(resolve_checkpoint(model, revision, weights=False))
    if reason := broken_promise(config):
        raise InputError(f"{model}: a {config.model_type} checkpoint cannot be expanded: {in_refusal(config, reason)}.")
    ffns = decoder_ffns(network_of(config))
    kinds = Counter("mixture of experts" if ffn.is_mixture else ffn_kind(ffn.module) for ffn in ffns)
    names = layer_names(config)
    mixtures = [names[layer] for layer, ffn in enumerate(ffns) if ffn.is_mixture]
    lines = [
        f"{model}: a {config.model_type} checkpoint; it can be expanded",
        f"layers    {len(ffns)}, FFN {ffns[0].place}: "
        + ", ".join(f"{kind} ({count} layers)" for kind, count in kinds.items()),
        *(f"promise   {promise.words}: holds on a tiny twin" for promise in PROMISES),
    ]
    if mixtures:
        where = "all layers" if len(mixtures) == len(ffns) else f"layers {', '.join(mixtures)}"
        lines.append(f"mixtures  {where}: take --expert-kind added, or give them 1 expert in the plan")
    return lines


def ffn_kind(ffn: nn.Module) -> str:
    """The kind of an FFN: gated or plain, fused or separate, with biases or without."""
    matrices = [parameter for parameter in ffn.parameters() if parameter.dim() == 2]
    biases = any(name.endswith("bias") for name, _ in ffn.named_parameters())
    if isinstance(ffn, SeparateFFN):
        kind = "plain, its layers one by one"
    elif len(matrices) > 2:
        kind = "gated"
    else:
        widest = sorted(max(matrix.shape) for matrix in matrices)
        kind = "gated, gate and up fused" if widest[-1] > widest[0] else "plain"
    return f"{kind}, biases" if biases else kind


def backbones_page() -> str:
    """The page: a table of the architectures that keep every promise, and the reasons for the others."""
    facts = {
        "promises": PROMISES,
        "decoders": _rows(name for name in PROVEN if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        "mixtures": _rows(name for name in PROVEN_MIXTURES if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        "pairs": _rows(PROVEN_ENCODER_DECODERS),
        "left_out": _reasons(LEFT_OUT, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        "left_out_pairs": _reasons(LEFT_OUT_ENCODER_DECODERS, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    }
    return render("backbones.md", facts)


def _rows(names: Iterable[str]) -> list[list[str]]:
    """Name, facts and the promises of each architecture."""
    rows = []
    for name in tqdm(list(names), desc="backbones", unit="architecture"):
        config = CONFIG_MAPPING[name]()
        rows.append([name, *_facts(config), broken_promise(config) or "all hold"])
    return rows


def _reasons(left_out: Mapping[str, str], known: Collection[str]) -> dict[str, list[str]]:
    """The architectures that are left out, by reason."""
    reasons: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        if name in known:
            reasons.setdefault(reason, []).append(name)
    return reasons


def _facts(config: Any) -> list[str]:
    """Kind of FFN, kinds of layers, tensor-parallel plan and native export of an architecture."""
    try:
        twin = tiny_twin(config)
    except ValueError as error:
        return [first_line(error), "", "", ""]
    ffns = decoder_ffns(twin)
    blocks = [f"mixture ({type(f.module).__name__})" if f.is_mixture else ffn_kind(f.module) for f in ffns]
    kinds = "; ".join(dict.fromkeys(blocks))
    types = set(getattr(twin.config, "layer_types", None) or [])
    mixtures = "some are mixtures" if any(ffn.is_mixture for ffn in ffns) else ""
    hybrid = "hybrid" if types - {"full_attention", "sliding_attention", "chunked_attention"} else ""
    own: Any = LayerMoEConfig.from_dense(twin.config, num_experts_per_layer=[1 if f.is_mixture else 2 for f in ffns])
    with torch.device("meta"):
        rules = auto_class(own).from_config(own).tp_plan or {}
        split = any("experts" in rule for rule in rules) and not all(ffn.is_mixture for ffn in ffns)
    forms = [form.model_type for form in NATIVE_FORMS.get(config.model_type, ())]
    return [kinds, ", ".join(filter(None, (hybrid, mixtures))), "yes" if split else "", ", ".join(forms)]

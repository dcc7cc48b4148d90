"""Whether a model can be expanded, and the page of the architectures that can (docs/backbones.md)."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
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

_HEAD = """\
# Backbones

`hf-moe-expand backbones --out docs/backbones.md` prints this page; `hf-moe-expand backbones MODEL` tells whether a
model, a folder or hub id, can be expanded.

A backbone is taken when each layer has one FFN that maps the hidden states alone, and its architecture keeps every
promise:

{promises}

The architectures of the table keep them all; the suite proves it again for each. Any other architecture of transformers
is tried when `expand` meets it: a tiny twin of the model (same class and switches, small sizes) must keep the promises,
or the refusal names the one that it breaks.

Of a checkpoint that wraps a text decoder (Gemma 3 from 4B, Gemma 4, Qwen3.5, Mistral 3, LLaVA), `expand` takes the text
decoder and says what it leaves out: the towers for images and sound are not carried. Llama 3.2-Vision is refused, since
transformers has no text-only model for its decoder.

A layer that is a mixture of experts of the backbone's own takes [added experts](added_experts.md) alone: its block must
map the hidden states alone too. With copies and LoRA experts give such a layer 1 expert in the plan.

"""


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
    titles = ["architecture", "FFN", "layers", "tensor-parallel plan", "native export", "promises"]
    decoders = _rows(name for name in PROVEN if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    mixtures = [
        [*row[:2], row[-1]] for row in _rows(n for n in PROVEN_MIXTURES if n in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    ]
    pairs = [[*row[:2], row[-1]] for row in _rows(PROVEN_ENCODER_DECODERS)]
    promises = "\n".join(f"- {promise.words};" for promise in PROMISES).removesuffix(";") + "."
    return (
        _HEAD.format(promises=promises)
        + f"## Architectures that keep every promise ({len(decoders)})\n\n{_table(titles, decoders)}\n"
        + f"## Mixtures of experts that keep every promise ({len(mixtures)})\n\n"
        + "Their layers, or all but the first ones, are mixtures, which take [added experts](added_experts.md).\n\n"
        + f"{_table(['architecture', 'block', 'promises'], mixtures)}\n"
        + "## Architectures that are left out\n\n"
        + f"The default configuration of each is:\n\n{_reasons(LEFT_OUT, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)}\n"
        + f"## Encoder-decoders that keep every promise ({len(pairs)})\n\n"
        + "NLLB is an m2m_100 model, mBART-50 an mbart one; ByT5 and MADLAD-400 are t5 ones ([translation\n"
        + f"models](encoder_decoder.md)).\n\n{_table([*titles[:2], titles[-1]], pairs)}\n"
        + "## Encoder-decoders that are left out\n\n"
        + _reasons(LEFT_OUT_ENCODER_DECODERS, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
    )


def _rows(names: Iterable[str]) -> list[list[str]]:
    """Name, facts and the promises of each architecture."""
    rows = []
    for name in tqdm(list(names), desc="backbones", unit="architecture"):
        config = CONFIG_MAPPING[name]()
        rows.append([name, *_facts(config), broken_promise(config) or "all hold"])
    return rows


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (titles, ["---"] * len(titles), *rows))


def _reasons(left_out: Mapping[str, str], known: Collection[str]) -> str:
    """The table of the architectures that are left out, by reason."""
    reasons: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        if name in known:
            reasons.setdefault(reason, []).append(name)
    rows = "".join(f"| {reason} | {', '.join(sorted(names))} |\n" for reason, names in reasons.items())
    return f"| | architectures |\n| --- | --- |\n{rows}"


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

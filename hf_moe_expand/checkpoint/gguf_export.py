"""Exports an expanded checkpoint, or one of its experts as a dense model, as a GGUF file, the format of llama.cpp."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..errors import InputError
from ..extra import import_extra
from ..jsonfile import read_json, write_text
from ..records import History
from .export import dense_config, expert_tensors
from .gguf_file import FILE_TYPES, check_file, in_type, type_of, write_gguf
from .gguf_forms import GgufForm, gguf_form
from .gguf_tokenizer import load_tokenizer, tokenizer_fields
from .routed import (
    NEVER,
    StoredFFN,
    expert_part,
    other_tensors,
    padded_router,
    places_of_layer,
    stacked,
    stored_ffns,
    turned,
)
from .source import load_expanded_config, resolve_checkpoint
from .stored import StoredModel
from .writer import OutputTensor, check_apart, tensor_bytes, zeros

_PARTS = {"gate_proj.weight": "gate", "up_proj.weight": "up", "down_proj.weight": "down"}


def export_gguf(
    model: str | os.PathLike,
    out: str | os.PathLike,
    *,
    expert: int | None = None,
    kind: str | None = None,
    merge_lora: bool = False,
    modelfile: bool = False,
    overwrite: bool = False,
) -> str:
    """Writes a GGUF file with the model, its tokenizer and its chat template.

    In float32 llama.cpp's logits equal the expanded model's up to rounding. Routers stay in float32 in any type.

    Args:
        model: expanded checkpoint.
        out: file to write.
        expert: write the dense model that has this expert as its FFNs.
        kind: `f32`, `f16`, `bf16` or `q8_0`; by default the checkpoint's own type.
        merge_lora: make FFN experts of LoRA experts.
        modelfile: write `Modelfile` for Ollama beside it.

    Returns:
        The architecture's name in llama.cpp.

    Raises:
        InputError: no architecture of llama.cpp computes the same, or a GGUF file cannot hold the tokenizer; the
            message says why. Or `out` exists or cannot be written, or the disk has too little room.
    """
    gguf = import_extra("gguf", "gguf")
    if kind is not None and kind not in FILE_TYPES:
        raise InputError(
            f"--type is {kind!r}: give one of {', '.join(FILE_TYPES)}; llama.cpp's llama-quantize makes further types "
            "of a file in f32 or bf16."
        )
    out = Path(out)
    folder = resolve_checkpoint(model)
    check_file(out, overwrite)
    check_apart(out, folder)
    source = StoredModel(model, load_expanded_config(folder))
    config = dense_config(source.config)
    beside = out.with_name("Modelfile")
    lines = modelfile_text(out.name, config, folder) if modelfile else ""
    there = modelfile and os.path.lexists(beside)
    # The same text is what an interrupted export left.
    if there and not (beside.is_file() and beside.read_bytes() == lines.encode()):
        check_file(beside, overwrite)
    counts = None if expert is not None else source.config.num_experts_per_layer
    form = gguf_form(config if counts is None else source.config, counts, folder, merge_lora)
    kind = kind or type_of(source.copied(next(iter(source.tensors))).dtype)
    if counts is None:
        tensors = [(tensor.name, tensor) for tensor in expert_tensors(source, int(expert or 0))]
        tensors = list(_named(tensors, form, config, folder, gguf))
    else:
        tensors = list(_mixture(source, form, config, merge_lora, gguf))
    if (factors := _rope_factors(config)) is not None:
        tensors.append(("rope_freqs.weight", factors))
    tokenizer = tokenizer_fields(folder, config.vocab_size)
    fields = _fields(source, form, config, counts, kind, gguf)

    def add(writer: Any) -> None:
        fields(writer)
        tokenizer(writer)

    if modelfile:  # before the file of weights: where that exists, all is done
        write_text(beside, lines)
    try:
        write_gguf(out, form.architecture, add, [in_type(name, tensor, kind) for name, tensor in tensors], overwrite)
    except BaseException:
        if modelfile and not there:
            beside.unlink(missing_ok=True)
        raise
    return form.architecture


def modelfile_text(name: str, config: Any, folder: Path) -> str:
    """Ollama's `Modelfile` for the GGUF file `name`: four lines, or three without an end-of-text token."""
    settings = folder / "generation_config.json"
    temperature = (read_json(settings, "a generation config") if settings.is_file() else {}).get("temperature", 0)
    lines = [f"FROM ./{name}", f"PARAMETER num_ctx {config.max_position_embeddings}"]
    lines.append(f"PARAMETER temperature {temperature}")
    if (end := load_tokenizer(folder).eos_token) is not None:
        lines.append(f"PARAMETER stop {json.dumps(end, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"


_Named = tuple[str, OutputTensor]


def _named(tensors: list[_Named], form: GgufForm, config: Any, folder: Path, gguf: Any) -> Iterator[_Named]:
    """The tensors of a dense model under llama.cpp's names."""
    known = gguf.get_tensor_name_map(_architecture(form, gguf), config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for key, tensor in tensors:
        name = known.get_name(key, try_suffixes=(".weight", ".bias"))
        if name is None or (key.endswith(".bias") and not key.endswith(form.biases)):
            raise InputError(f"{folder}: llama.cpp's {form.architecture} has no place for the tensor {key!r}.")
        projection = key.rpartition(".")[0].rpartition(".")[2]
        yield name, turned(tensor, heads[projection]) if form.turned and projection in heads else tensor


def _architecture(form: GgufForm, gguf: Any) -> Any:
    return next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == form.architecture)


def _mixture(source: StoredModel, form: GgufForm, config: Any, merge_lora: bool, gguf: Any) -> Iterator[_Named]:
    """The tensors of an expanded model under llama.cpp's names."""
    ffns = stored_ffns(source, merge_lora)
    counts = source.config.num_experts_per_layer
    top_k = min(source.config.router_top_k, max(counts))
    outside = [(key, source.copied(key)) for key in other_tensors(source, ffns)]
    yield from _named(outside, form, config, source.folder, gguf)
    leading = _leading_dense(counts, form)
    dense = [(f"{ffn.name}.{part}", tensor) for ffn in ffns[:leading] for part, tensor in ffn.experts[0].items()]
    yield from _named(dense, form, config, source.folder, gguf)
    for ffn in ffns[leading:]:
        at = places_of_layer(counts[ffn.number], max(counts), top_k)
        yield from _experts(ffn, at, form, source, config)


def _experts(
    ffn: StoredFFN, at: list[int | None], form: GgufForm, source: StoredModel, config: Any
) -> Iterator[_Named]:
    block = f"blk.{ffn.number}"
    dtype = next(iter(ffn.experts[0].values())).dtype
    router = f"{block}.ffn_gate_inp.weight"
    yield router, padded_router(ffn, at, router, config.hidden_size, dtype)
    if form.bias:
        bias = torch.tensor([0.0 if expert is not None else NEVER for expert in at])
        name = f"{block}.exp_probs_b.bias"
        yield name, OutputTensor(name, "F32", (len(at),), lambda: [tensor_bytes(bias)])
    for part in ffn.experts[0]:
        if part not in _PARTS:
            raise InputError(
                f"{source.folder}: llama.cpp's {form.architecture} has no place for the tensor '{ffn.name}.{part}'."
            )
        tensors = [expert_part(ffn, expert, part) for expert in at]
        shape, name = tensors[0].shape, f"{block}.ffn_{_PARTS[part]}_exps.weight"
        yield name, stacked(name, tensors, (len(at), *shape))
        if form.shared:
            name = f"{block}.ffn_{_PARTS[part]}_shexp.weight"
            yield name, zeros(name, dtype, shape)


def _leading_dense(counts: list[int], form: GgufForm) -> int:
    """The number of dense layers before the first expanded one, where the architecture has such layers."""
    return next(layer for layer, count in enumerate(counts) if count > 1) if form.leading_dense else 0


def _rope_factors(config: Any) -> OutputTensor | None:
    """What llama.cpp divides the frequencies of Llama 3.1's rotary positions by; None for other positions."""
    rope = config.rope_parameters or {}
    if rope.get("rope_type") != "llama3":
        return None
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    size = _head_size(config)
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    factors = plain / frequencies
    return OutputTensor("rope_freqs.weight", "F32", tuple(factors.shape), lambda: [tensor_bytes(factors)])


def _head_size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _fields(
    source: StoredModel, form: GgufForm, config: Any, counts: list[int] | None, kind: str, gguf: Any
) -> Callable[[Any], None]:
    """The function that adds the model's fields to a `gguf.GGUFWriter`."""
    codes = [code for codes in History.of(source.config).by_expansion for code in codes]
    rope = config.rope_parameters or {}

    def add(writer: Any) -> None:
        writer.add_type(gguf.GGUFType.MODEL)
        writer.add_name(source.name)
        if codes:
            writer.add_languages(list(dict.fromkeys(codes)))
        writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[kind]])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        writer.add_vocab_size(config.vocab_size)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(_head_size(config))
        writer.add_value_length(_head_size(config))
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_dimension_count(_head_size(config))
        writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
        if rope.get("rope_type") in ("linear", "yarn"):
            writer.add_rope_scaling_type(gguf.RopeScalingType[rope["rope_type"].upper()])
            writer.add_rope_scaling_factor(rope["factor"])
        if rope.get("rope_type") == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if form.architecture.startswith("granite"):
            writer.add_embedding_scale(config.embedding_multiplier)
            writer.add_attention_scale(config.attention_multiplier)
            writer.add_residual_scale(config.residual_multiplier)
            writer.add_logit_scale(config.logits_scaling)
        if counts is not None:
            writer.add_expert_count(max(counts))
            writer.add_expert_used_count(min(source.config.router_top_k, max(counts)))
            writer.add_expert_feed_forward_length(config.intermediate_size)
        if form.leading_dense and counts is not None:
            writer.add_leading_dense_block_count(_leading_dense(counts, form))
            writer.add_interleave_moe_layer_step(1)
        if form.shared:
            writer.add_expert_shared_count(1)
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
            writer.add_expert_weights_norm(True)
            writer.add_expert_weights_scale(1.0)

    return add

"""Exports an expanded checkpoint, or one of its experts as a dense model, as a GGUF file, the format of llama.cpp.

The form of a model is chosen by what llama.cpp computes, not by name: `llama` with experts chooses K of N by softmax
and renormalises the chosen weights, as we do, and takes biases on queries, keys and values; so it runs Llama, Mistral
and Qwen2. `qwen2moe` does not renormalise. `ernie4_5-moe` adds a bias to the scores for the choice, and so does
`glm4moe`, whose score may be softmax. Both take layers with different numbers of experts (see `routed`).
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..core.disk import check_room, full_disk_as
from ..core.errors import InputError
from ..core.extra import import_extra
from ..core.jsonfile import write_text
from ..core.scratch import new_file
from .export import dense_config, dense_experts, expert_tensors
from .gguf import tokenizer_fields
from .local import own_name
from .modelfile import modelfile_text
from .peft_export import language_adapters
from .reader import TORCH_DTYPES, is_finite, tensor_bytes
from .records import History
from .routed import active_experts, check_routing, interleaved, needs_bias, other_tensors, stacked, stored_ffns
from .source import load_expanded_config, resolve_checkpoint
from .stored import StoredModel, computed, widened
from .writer import OutputTensor, check_apart, check_place, copy_of, full_disk, in_memory, zeros

# The types that this package writes, and the number of each in `general.file_type`.
FILE_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
_PARTS = {"gate_proj.weight": "gate", "up_proj.weight": "up", "down_proj.weight": "down"}
# Methods `add_...` of a `gguf.GGUFWriter`, each with its arguments.
_Fields = list[tuple[Any, ...]]


@dataclass(frozen=True)
class GgufForm:
    """How an architecture of llama.cpp stores a model.

    Attributes:
        architecture: its name.
        interleaved: whether it rotates neighbouring elements of queries and keys, not the halves of a head.
        bias: whether it adds a bias to the experts' scores for the choice alone.
        shared: whether it adds a shared expert, which must then be zero.
        leading_dense: whether the first layers may be dense; else dense layers become copies of their FFN.
        rope: types of rotary positions that it knows beside the default.
        biases: tensors besides the weights that it takes.
    """

    architecture: str
    interleaved: bool = False
    bias: bool = False
    shared: bool = False
    leading_dense: bool = False
    rope: tuple[str, ...] = ("linear", "yarn")
    biases: tuple[str, ...] = ()


_QKV = ("q_proj.bias", "k_proj.bias", "v_proj.bias")
_QKVO = (*_QKV, "o_proj.bias")
_MLP = ("gate_proj.bias", "up_proj.bias", "down_proj.bias")
_LLAMA3 = ("linear", "yarn", "llama3")
_LLAMA = GgufForm("llama", interleaved=True, rope=_LLAMA3, biases=_QKVO)
_ERNIE = GgufForm("ernie4_5-moe", interleaved=True, bias=True, leading_dense=True, biases=_QKV)
_DENSE_LLAMA = GgufForm("llama", interleaved=True, rope=_LLAMA3, biases=(*_QKVO, *_MLP))


# The forms of a backbone's dense model, of its mixture, and of its mixture with a selection bias.
BACKBONES: dict[str, tuple[GgufForm, GgufForm, GgufForm | None]] = {
    "granite": (
        GgufForm("granite", interleaved=True, rope=_LLAMA3, biases=(*_QKVO, *_MLP)),
        GgufForm("granitemoe", interleaved=True, rope=_LLAMA3, biases=_QKVO),
        None,
    ),
    "llama": (_DENSE_LLAMA, _LLAMA, _ERNIE),
    "mistral": (_DENSE_LLAMA, _LLAMA, _ERNIE),
    "qwen2": (GgufForm("qwen2", biases=_QKV), _LLAMA, _ERNIE),
    "qwen3": (GgufForm("qwen3"), GgufForm("qwen3moe"), GgufForm("glm4moe", bias=True, shared=True, leading_dense=True)),
}
_WITHOUT_BIAS = "no architecture of llama.cpp with Granite's multipliers has one"


def export_gguf(
    model: str | os.PathLike,
    out: str | os.PathLike,
    *,
    expert: int | None = None,
    language: str | None = None,
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
        expert, language: write the dense model of an expert or of a language; see `export_native`.
        kind: `f32`, `f16`, `bf16` or `q8_0`; by default the checkpoint's own type.
        merge_lora: make FFN experts of LoRA experts.
        modelfile: write `Modelfile` for Ollama beside it.

    Returns:
        The architecture's name in llama.cpp.
    """
    import_extra("gguf", "gguf")
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
    config = dense_config(source.config, language)
    beside_it = out.with_name("Modelfile")
    lines = modelfile_text(out.name, config, folder) if modelfile else ""
    there = modelfile and os.path.lexists(beside_it)
    # The same text is what an interrupted export left.
    if there and not (beside_it.is_file() and beside_it.read_bytes() == lines.encode()):
        check_file(beside_it, overwrite)
    chosen = dense_experts(source, expert, language)
    if chosen is None:
        form = gguf_form(source.config, folder, merge_lora)
        tensors, own = list(_mixture(source, form, config)), _mixture_fields(source.config, form)
    else:
        form = gguf_form(config, folder)
        tensors, own = list(_named(expert_tensors(source, chosen, language), form, config, folder)), []
    tensors += _rope_factors(config)
    kind = kind or {"F16": "f16", "BF16": "bf16"}.get(source[source.tensors[0]].dtype, "f32")
    fields = [*_model_fields(source, form, config, kind), *own, *tokenizer_fields(folder, config.vocab_size, language)]
    if modelfile:  # before the file of weights: where that exists, all is done
        write_text(beside_it, lines)
    try:
        _write(out, form.architecture, fields, tensors, kind, overwrite)
    except BaseException:
        if modelfile and not there:
            beside_it.unlink(missing_ok=True)
        raise
    return form.architecture


def export_adapter_gguf(
    model: str | os.PathLike,
    out: str | os.PathLike,
    *,
    language: str | None = None,
    kind: str | None = None,
    modelfile: bool = False,
    overwrite: bool = False,
) -> str:
    """Writes llama.cpp's adapter file of a language, for a GGUF file of the base.

    llama.cpp scales all updates by one alpha over their rank: an update of another scaling has the rest in its B.

    Args:
        model: expanded checkpoint of adapters.
        out: file to write.
        language: the language; a model of one adapter needs none.
        kind: `f32`, `f16` or `bf16`; by default that of the adapter.
        modelfile: write `Modelfile` for Ollama beside it, which calls the base `base.gguf`.

    Returns:
        The architecture's name in llama.cpp.
    """
    import_extra("gguf", "gguf")
    if kind not in (None, "f32", "f16", "bf16"):
        raise InputError(f"--type is {kind!r}: an adapter is written as f32, f16 or bf16.")
    out, folder = Path(out), resolve_checkpoint(model)
    beside_it = out.with_name("Modelfile")
    for file in (out, beside_it) if modelfile else (out,):
        check_file(file, overwrite)
    check_apart(out, folder)
    source = StoredModel(model, load_expanded_config(folder))
    adapter, *others = language_adapters(source, language)
    if others:
        raise InputError(
            f"{folder}: has adapters of {', '.join(one.name for one in (adapter, *others))}, and a file holds one: say "
            "which with --language."
        )
    config = dense_config(source.config)
    form = gguf_form(config, folder)
    updates = adapter.updates.items()
    (alpha, _), *_ = Counter(update.scaling * update.rank for _, update in updates).most_common(1)
    tensors = []
    for name, update in updates:
        a, b = source[update.lora_A], source[update.lora_B]
        rest = update.scaling * update.rank / alpha
        scaled = copy_of(b) if rest == 1 else computed(b, [b], partial(torch.mul, other=torch.tensor(rest)))
        (placed,) = _named([replace(scaled, name=f"{name}.weight")], form, config, folder)  # rows in llama.cpp's order
        tensors += [copy_of(a, f"{placed.name}.lora_a"), replace(placed, name=f"{placed.name}.lora_b")]
    kind = kind or {"F16": "f16", "BF16": "bf16"}.get(tensors[0].dtype, "f32")
    fields = [("type", "adapter"), ("string", "adapter.type", "lora"), ("float32", "adapter.lora.alpha", alpha)]
    if modelfile:
        comment = f"# base.gguf: hf-moe-expand export {own_name(model)} base.gguf --gguf --expert 0"
        write_text(beside_it, f"{comment}\nFROM ./base.gguf\nADAPTER ./{out.name}\n")
    _write(out, form.architecture, fields, tensors, kind, overwrite)
    return form.architecture


def gguf_form(config: Any, folder: Path, merge_lora: bool = False) -> GgufForm:
    """The form in which a model is written, by its configuration, expanded or dense."""
    counts = getattr(config, "num_experts_per_layer", None)
    name = config.model_type if counts is None else config.backbone_model_type
    if name not in BACKBONES:
        raise InputError(
            f"{folder}: models of {name} are not written as GGUF; those of {', '.join(BACKBONES)} are. llama.cpp's own "
            "converter may know a dense one (`export --expert`)."
        )
    form, mixture, biased = BACKBONES[name]
    if counts is not None:
        check_routing(config, folder, "llama.cpp", merge_lora)
        needed = needs_bias(config, folder, biased is not None, _WITHOUT_BIAS)
        form = biased if needed and biased else mixture
    where = f"llama.cpp's {form.architecture}"
    if config.hidden_act != "silu":
        raise InputError(f"{folder}: its FFNs have the activation {config.hidden_act}, but those of {where} have silu.")
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    sliding = window is not None if types is None else "sliding_attention" in types
    if sliding and (window or 0) < config.max_position_embeddings:
        raise InputError(
            f"{folder}: has attention in a sliding window of {window} tokens, which {where} does not compute."
        )
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    if rope not in ("default", *form.rope):
        raise InputError(
            f"{folder}: has rotary positions of the type {rope!r}; those of {where} are default, "
            f"{', '.join(form.rope)}."
        )
    if (part := (config.rope_parameters or {}).get("partial_rotary_factor", 1.0)) != 1.0:
        raise InputError(f"{folder}: rotates {part} of each head, but {where} rotates all of it.")
    return form


def _named(tensors: Sequence[OutputTensor], form: GgufForm, config: Any, folder: Path) -> Iterator[OutputTensor]:
    """The tensors of a dense model under llama.cpp's names."""
    gguf = import_extra("gguf", "gguf")
    architecture = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == form.architecture)
    known = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for tensor in tensors:
        name = known.get_name(tensor.name, try_suffixes=(".weight", ".bias"))
        if name is None or (tensor.name.endswith(".bias") and not tensor.name.endswith(form.biases)):
            raise _no_place(tensor.name, form, folder)
        yield replace(interleaved(tensor, config) if form.interleaved else tensor, name=name)


def _no_place(name: str, form: GgufForm, folder: Path) -> InputError:
    return InputError(f"{folder}: llama.cpp's {form.architecture} has no place for the tensor {name!r}.")


def _mixture(source: StoredModel, form: GgufForm, config: Any) -> Iterator[OutputTensor]:
    """The tensors of an expanded model under llama.cpp's names."""
    ffns = stored_ffns(source)
    leading = _leading_dense(source.config.num_experts_per_layer, form)
    dense = [tensor for ffn in ffns[:leading] for tensor in ffn.dense()]
    yield from _named([*other_tensors(source, ffns), *dense], form, config, source.folder)
    for number, ffn in enumerate(ffns[leading:], start=leading):
        block = f"blk.{number}"
        yield ffn.padded_router(f"{block}.ffn_gate_inp.weight", config.hidden_size)
        if form.bias:
            yield ffn.selection_bias(f"{block}.exp_probs_b.bias")
        for part in ffn.experts[0]:
            if part not in _PARTS:
                raise _no_place(f"{ffn.name}.{part}", form, source.folder)
            tensors = [ffn.part(expert, part) for expert in ffn.at]
            shape = tensors[0].shape
            yield stacked(f"{block}.ffn_{_PARTS[part]}_exps.weight", tensors, (len(ffn.at), *shape))
            if form.shared:
                yield zeros(f"{block}.ffn_{_PARTS[part]}_shexp.weight", ffn.dtype, shape)


def _leading_dense(counts: list[int], form: GgufForm) -> int:
    """The number of dense layers before the first expanded one, where the architecture has such layers."""
    return next(layer for layer, count in enumerate(counts) if count > 1) if form.leading_dense else 0


def _rope_factors(config: Any) -> list[OutputTensor]:
    """What llama.cpp divides the frequencies of Llama 3.1's rotary positions by; empty for other positions."""
    rope = config.rope_parameters or {}
    if rope.get("rope_type") != "llama3":
        return []
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    size = _head_size(config)
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    return [in_memory("rope_freqs.weight", plain / frequencies)]


def _head_size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _model_fields(source: StoredModel, form: GgufForm, config: Any, kind: str) -> _Fields:
    gguf = import_extra("gguf", "gguf")
    codes = [code for codes in History.of(source.config).by_expansion for code in codes]
    rope = config.rope_parameters or {}
    fields: _Fields = [("type", gguf.GGUFType.MODEL), ("name", source.name)]
    if codes:
        fields.append(("languages", list(dict.fromkeys(codes))))
    fields += [
        ("file_type", gguf.LlamaFileType[FILE_TYPES[kind]]),
        ("quantization_version", gguf.GGML_QUANT_VERSION),
        ("vocab_size", config.vocab_size),
        ("context_length", config.max_position_embeddings),
        ("embedding_length", config.hidden_size),
        ("block_count", config.num_hidden_layers),
        ("feed_forward_length", config.intermediate_size),
        ("head_count", config.num_attention_heads),
        ("head_count_kv", config.num_key_value_heads),
        ("key_length", _head_size(config)),
        ("value_length", _head_size(config)),
        ("layer_norm_rms_eps", config.rms_norm_eps),
        ("rope_dimension_count", _head_size(config)),
        ("rope_freq_base", rope.get("rope_theta", 10000.0)),
    ]
    if rope.get("rope_type") in ("linear", "yarn"):
        scaling = gguf.RopeScalingType[rope["rope_type"].upper()]
        fields += [("rope_scaling_type", scaling), ("rope_scaling_factor", rope["factor"])]
    if rope.get("rope_type") == "yarn":
        fields.append(("rope_scaling_orig_ctx_len", rope["original_max_position_embeddings"]))
    if form.architecture.startswith("granite"):
        fields += [
            ("embedding_scale", config.embedding_multiplier),
            ("attention_scale", config.attention_multiplier),
            ("residual_scale", config.residual_multiplier),
            ("logit_scale", config.logits_scaling),
        ]
    return fields


def _mixture_fields(config: Any, form: GgufForm) -> _Fields:
    counts = config.num_experts_per_layer
    fields: _Fields = [
        ("expert_count", max(counts)),
        ("expert_used_count", active_experts(config)),
        ("expert_feed_forward_length", config.intermediate_size),
    ]
    if form.leading_dense:
        fields += [("leading_dense_block_count", _leading_dense(counts, form)), ("interleave_moe_layer_step", 1)]
    if form.shared:
        softmax = import_extra("gguf", "gguf").ExpertGatingFuncType.SOFTMAX
        fields += [("expert_shared_count", 1), ("expert_gating_func", softmax)]
        fields += [("expert_weights_norm", True), ("expert_weights_scale", 1.0)]
    return fields


def _type(tensor: OutputTensor, kind: str) -> str:
    """The type in which a tensor is written into a file of type `kind`. What is small stays in float32, as llama.cpp
    expects it: vectors (norms, biases) and routers. Rows that q8_0 cannot take, whose length 32 does not divide, become
    f16."""
    if len(tensor.shape) == 1 or "ffn_gate_inp" in tensor.name:
        return "f32"
    return "f16" if kind == "q8_0" and tensor.shape[-1] % 32 else kind


def _write(
    out: Path, architecture: str, fields: _Fields, tensors: Sequence[OutputTensor], kind: str, overwrite: bool
) -> None:
    """Writes a file as a stream, one piece of one tensor in memory, and the file whole or not at all."""
    gguf = import_extra("gguf", "gguf")
    kinds = [_type(tensor, kind) for tensor in tensors]
    types = [gguf.GGMLQuantizationType[kind.upper()] for kind in kinds]
    shapes = [gguf.quant_shape_to_byte_shape(t.shape, type_) for t, type_ in zip(tensors, types, strict=True)]
    check_file(out, overwrite)
    check_room(out, needed := sum(map(prod, shapes)))
    with new_file(out) as partial, full_disk_as(full_disk(out, needed)):
        writer = gguf.GGUFWriter(partial, architecture)
        for name, *values in fields:
            getattr(writer, f"add_{name}")(*values)
        for tensor, shape, type_ in zip(tensors, shapes, types, strict=True):
            writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), prod(shape), type_)
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            (file,) = writer.fout
            writer.write_padding(file, file.tell())
            bar = tqdm(tensors, desc="export", unit="tensor")
            for tensor, shape, kind in zip(bar, shapes, kinds, strict=True):
                size = sum(file.write(piece) for piece in _converted(tensor, kind))
                if size != prod(shape):
                    raise RuntimeError(f"{tensor.name}: wrote {size} bytes instead of {prod(shape)}")
                writer.write_padding(file, size)
        finally:
            writer.close()


def _converted(tensor: OutputTensor, kind: str) -> Iterator[bytes]:
    """The bytes of a tensor in the type `kind`. A row lies in one piece, or its pieces are whole blocks."""
    gguf = import_extra("gguf", "gguf")
    if tensor.dtype not in TORCH_DTYPES:
        raise InputError(f"Tensor {tensor.name!r} is stored as {tensor.dtype}; use the unquantised checkpoint.")
    for piece in tensor.data():
        values = torch.frombuffer(bytearray(piece), dtype=TORCH_DTYPES[tensor.dtype])
        if kind == "q8_0":
            blocks = widened(values).to(torch.float32).view(-1, 32).numpy()
            yield gguf.quantize(blocks, gguf.GGMLQuantizationType.Q8_0).tobytes()
            continue
        result = values.to(TORCH_DTYPES[kind.upper()])
        if not is_finite(result):
            raise InputError(f"Tensor {tensor.name!r}: a value is not finite in {kind}; use --type bf16.")
        yield tensor_bytes(result)


def check_file(out: Path, overwrite: bool) -> None:
    """Refuses a file that exists (without `overwrite`), is a folder, or cannot be made there."""
    if out.is_dir():
        raise InputError(f"{out}: is a folder; give the name of the .gguf file to write.")
    if os.path.lexists(out) and not overwrite:
        raise InputError(f"{out}: exists already; choose another file or pass --overwrite.")
    check_place(out)

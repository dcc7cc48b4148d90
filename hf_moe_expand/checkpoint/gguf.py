"""Makes a checkpoint of a GGUF file, the format of llama.cpp, and the fields of a GGUF file of a tokenizer.

llama.cpp cuts text into words by rules of its own, each with a name, and knows no others. So a byte-level tokenizer is
written if its rule is one of them, and refused if not. A base that came from GGUF brings the fields that its file had
(`gguf_tokenizer.json`), which are written again.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..core.errors import InputError, first_line
from ..core.extra import import_extra
from ..core.jsonfile import read_json, write_json
from ..data.tokens import frame, tokenizer_for
from .tokenizer import load_tokenizer
from .writer import new_folder

# What a model that was read from quantised weights still says of itself, though its weights are float32 by then.
_TRACES = ("hf_quantizer", "is_quantized", "quantization_method", "_is_quantized_training_enabled")
# Types of tensors that are not quantised.
_UNQUANTISED = {"F64", "F32", "F16", "BF16"}
KEPT = "gguf_tokenizer.json"
_PREFIX = "tokenizer."
# They are in the tokenizer's own files, where a later step may change them.
_NOT_KEPT = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.chat_template", "tokenizer.chat_templates")

_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BY_REGEX, _WHOLE = ("ByteLevel", True), ("ByteLevel", False)
# llama.cpp's name of each rule, by the steps of the tokenizer and whether it looks words up before it merges.
_RULES = {
    ((_BY_REGEX,), False): "gpt-2",
    ((("Digits", True), _BY_REGEX), False): "smollm",
    ((("Split", _CONTRACTIONS + _WORDS + r"\p{N}{1,3}" + _REST), _WHOLE), True): "llama-bpe",
    ((("Split", _CONTRACTIONS + _WORDS + r"\p{N}{1,3}" + _REST), _WHOLE), False): "smaug-bpe",
    ((("Split", _CONTRACTIONS + _WORDS + r"\p{N}" + _REST), _WHOLE), False): "qwen2",
}


def checkpoint_from_gguf(file: str | os.PathLike, out: str | os.PathLike, overwrite: bool = False) -> int:
    """Writes a checkpoint, in float32, with the weights and the tokenizer of a GGUF file; its quantised weights are
    unpacked, and config.json names their types (`unpacked_from_gguf`), which cards of expanded models repeat.

    Needs the package `gguf` (the extra `gguf`) and memory for the whole model.

    Returns:
        The number of parameters.
    """
    file = Path(file)
    if not file.is_file():
        raise InputError(f"{file}: no such file; give a .gguf file.")
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise InputError(f"{file}: is not a GGUF file, which begins with the letters GGUF.")
    gguf = import_extra("gguf", "gguf")
    with new_folder(out, overwrite) as partial:
        try:
            options: dict[str, Any] = {"gguf_file": file.name, "trust_remote_code": False}
            model: Any = AutoModelForCausalLM.from_pretrained(file.parent, **options, dtype=torch.float32)
            tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, **options)
        except Exception as error:  # the library raises many types
            raise InputError(f"{file}: transformers cannot read it ({first_line(error)}).") from error
        model.config.__dict__.pop("quantization_config", None)
        reader = gguf.GGUFReader(file)
        kinds = sorted({tensor.tensor_type.name for tensor in reader.tensors} - _UNQUANTISED)
        if kinds:
            model.config.unpacked_from_gguf = kinds
        for name in _TRACES:
            model.__dict__.pop(name, None)
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        _keep_tokenizer(reader, tokenizer, partial)
    return model.num_parameters()


def _keep_tokenizer(reader: Any, tokenizer: Any, folder: Path) -> None:
    """Writes the tokenizer's fields of a GGUF file, of which `reader` is the `gguf.GGUFReader`, into the folder of the
    checkpoint that is made of it; none if the tokenizer that transformers made of it has other tokens."""
    fields = {name: field for name, field in reader.fields.items() if name.startswith(_PREFIX)}
    tokens = fields.get("tokenizer.ggml.tokens")
    if tokens is None or tokens.contents() != tokenizer.convert_ids_to_tokens(range(len(tokens.data))):
        return
    entries = {
        name: {"types": [kind.name for kind in field.types], "value": field.contents()}
        for name, field in fields.items()
        if name not in _NOT_KEPT
    }
    write_json(folder / KEPT, entries)


def tokenizer_fields(folder: Path, rows: int, language: str | None = None) -> list[tuple[Any, ...]]:
    """The tokenizer of a checkpoint whose embedding has so many rows, with its chat template: methods `add_...` of a
    `gguf.GGUFWriter`, each with its arguments.

    Args:
        language: take its own tokenizer, if it has one.
    """
    gguf = import_extra("gguf", "gguf")
    tokenizer = tokenizer_for(load_tokenizer(folder, folder), language)
    entries = _kept(folder, rows)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise InputError(f"{folder}: its tokenizer has no tokenizer.json, of which the GGUF file's fields are made.")
    state = json.loads(backend.to_str())
    tokens, types = _tokens(state, rows, gguf.TokenType)
    fields: list[tuple[Any, ...]] = [("token_list", tokens)]
    if merges := state["model"].get("merges"):
        fields.append(("token_merges", [pair if isinstance(pair, str) else " ".join(pair) for pair in merges]))
    if entries is None:
        rule = _rule(state, tokenizer, folder)
        begins, ends = _frame(tokenizer, folder)
        fields += [("tokenizer_model", "gpt2"), ("tokenizer_pre", rule), ("token_types", types)]
        for name in ("bos", "eos", "unk", "pad"):
            if (number := getattr(tokenizer, f"{name}_token_id", None)) is not None:
                fields.append((f"{name}_token_id", number))
        fields += [("add_bos_token", begins), ("add_eos_token", ends)]
    for name, entry in (entries or {}).items():
        kinds = [gguf.GGUFValueType[kind] for kind in entry["types"]]
        fields.append(("key_value", name, entry["value"], kinds[0], kinds[-1] if len(kinds) > 1 else None))
    if template := tokenizer.chat_template:
        several = {} if isinstance(template, str) else template
        fields.append(("chat_template", [{"name": n, "template": text} for n, text in several.items()] or template))
    return fields


def _kept(folder: Path, rows: int) -> dict | None:
    """The fields that the checkpoint's base had in its GGUF file; None without, or if the model has other embeddings by
    now. (The tokenizer that transformers made of the file may have a further token, which the model does not know.)"""
    if not (folder / KEPT).is_file():
        return None
    entries = read_json(folder / KEPT, "fields of a GGUF file")
    types = entries.get("tokenizer.ggml.token_type", {}).get("value", [])
    return entries if len(types) == rows else None


def _tokens(state: dict, rows: int, kinds: Any) -> tuple[list[str], list[int]]:
    """The text and the type of each token; rows of the embedding without a token are unused."""
    model = state["model"]["vocab"]
    pairs = model.items() if isinstance(model, dict) else ((entry[0], at) for at, entry in enumerate(model))
    texts = {number: text for text, number in pairs}
    types = dict.fromkeys(texts, kinds.NORMAL)
    for token in state["added_tokens"] or ():
        texts[token["id"]] = token["content"]
        types[token["id"]] = kinds.CONTROL if token["special"] else kinds.USER_DEFINED
    numbers = range(rows)
    return [texts.get(n, f"[PAD{n}]") for n in numbers], [types.get(n, kinds.UNUSED) for n in numbers]


def _rule(state: dict, tokenizer: Any, folder: Path) -> str:
    """llama.cpp's name of the rule by which a byte-level tokenizer cuts text into words."""
    why = _obstacle(state)
    rule = _RULES.get((_steps(state["pre_tokenizer"]), bool(state["model"].get("ignore_merges"))))
    if rule is None and why is None:
        why = f"llama.cpp has no rule that cuts words as it does; known: {', '.join(sorted(_RULES.values()))}"
    if why is not None:
        raise InputError(f"{folder}: its tokenizer ({type(tokenizer).__name__}) cannot be written as GGUF: {why}.")
    return str(rule)


def _obstacle(state: dict) -> str | None:
    """What a tokenizer does that llama.cpp's byte-level BPE does not, besides its rule that cuts words."""
    model = state["model"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        kind = "BPE with byte tokens" if model["type"] == "BPE" else model["type"]
        return f"it is {kind}, but only byte-level BPE is written, unless the base came from GGUF (`from-gguf`)"
    for name in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(name):
            return f"its BPE has {name}"
    if not model["merges"]:
        return "it merges nothing, and llama.cpp wants a list of merges"
    normaliser = state["normalizer"]
    if normaliser is not None and normaliser["type"] != "NFC":
        return f"it changes text before it cuts it ({normaliser['type']}), which llama.cpp does not"
    for token in state["added_tokens"] or ():
        if odd := [flag for flag in ("lstrip", "rstrip", "single_word") if token[flag]]:
            return f"its token {token['content']!r} has {odd[0]}"
    return None


def _steps(cut: dict | None) -> tuple:
    """The steps that cut text into words, with what matters of each; unknown ones as they are."""
    if cut is None:
        return ()
    if cut["type"] == "Sequence":
        return tuple(step for inner in cut["pretokenizers"] for step in _steps(inner))
    if cut["type"] == "ByteLevel" and not cut["add_prefix_space"]:
        return (("ByteLevel", cut["use_regex"]),)
    if cut["type"] == "Digits":
        return (("Digits", cut["individual_digits"]),)
    if cut["type"] == "Split" and cut["behavior"] == "Isolated" and not cut["invert"]:
        return (("Split", cut["pattern"].get("Regex")),)
    return (json.dumps(cut),)


def _frame(tokenizer: Any, folder: Path) -> tuple[bool, bool]:
    """Whether the tokenizer puts its begin-of-text token before a text, and its end-of-text token after it."""
    before, after = frame(tokenizer)
    if before in ([], [tokenizer.bos_token_id]) and after in ([], [tokenizer.eos_token_id]):
        return bool(before), bool(after)
    raise InputError(
        f"{folder}: its tokenizer puts other tokens around a text than its begin-of-text and end-of-text tokens, which "
        "a GGUF file cannot say."
    )

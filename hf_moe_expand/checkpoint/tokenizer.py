"""Loads the tokenizer of a checkpoint, checked against its model, and keeps it the same in a copy of the checkpoint."""

import json
import os
import shutil
import warnings
from inspect import signature
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES as _REGISTERED

from ..core.errors import InputError, library_errors_at
from ..core.jsonfile import read_json
from .source import EXPANDED, TOKENIZER_FILES, load_config, text_config

_SETTINGS = ("special_tokens_map", "chat_template", "padding_side", "truncation_side", "model_max_length")
# These make no tokenizer.
_BESIDE = ("generation_config.json", "chat_template", "additional_chat_templates")


def load_tokenizer(folder: str | os.PathLike, name: str | os.PathLike) -> Any:
    """The tokenizer in a checkpoint's folder; messages call the checkpoint `name`. An InputError refuses one that does
    not load, or has tokens beyond the model's."""
    folder = Path(folder)
    return _checked(_load(folder, name), folder, name)


def keep_tokenizer(source: Path, target: Path) -> None:
    """Lets the tokenizer of `target`, whose files are copies of those of `source`, be the one of `source`: its class,
    tokens, template and settings.

    The library chooses a tokenizer's class by files and by the model's type, and knows no types of expanded models. So
    a tokenizer without `tokenizer_config.json` may load as another one or not at all, and for some types the class in
    this file is overruled. Where that makes a difference, the tokenizer of `source` is saved anew. An expanded
    checkpoint that cannot keep it is refused; of a dense one a warning says so.
    """
    types = [str(read_json(folder / "config.json", "a configuration").get("model_type")) for folder in (source, target)]
    files = {str(file.relative_to(source)) for pattern in TOKENIZER_FILES for file in source.glob(pattern)}
    if types[0] == types[1] or all(file.startswith(_BESIDE) for file in files):
        return
    tokenizer = _load(source, source)
    if types[1] in EXPANDED and _class_is_told(source, types[0]):
        _checked(tokenizer, source, source)
        return
    before = _facts(tokenizer)
    same, own = _loads_as(before, target), source / "tokenizer.json"
    # The library writes the tokens that a class adds into this file, which stays as it is where it can.
    for keeps_file in (True, False) if own.is_file() else (False,):
        if not same:
            tokenizer.save_pretrained(target)
            if keeps_file:
                shutil.copyfile(own, target / own.name)
            same = _loads_as(before, target)
    _checked(tokenizer, source, source)
    if same:
        return
    if types[1] in EXPANDED:
        raise InputError(f"{source}: its tokenizer ({before[0]}) would be another one in the new checkpoint.")
    warnings.warn(
        f"{source}: transformers loads the tokenizer of a {types[1]} model as another class than {before[0]}: the "
        "exported model may cut text in another way.",
        stacklevel=2,
    )


def _class_is_told(folder: Path, model_type: str) -> bool:
    """Whether a file names the tokenizer's class, and the library takes it for this model type as for an unknown one
    (it looks closer where a file names Llama's)."""
    file = folder / "tokenizer_config.json"
    told = read_json(file, "a tokenizer's settings").get("tokenizer_class") if file.is_file() else None
    name = str(told).removesuffix("Fast")
    return told is not None and name != "LlamaTokenizer" and _REGISTERED.get(model_type, name) in (name, f"{name}Fast")


def _load(folder: Path, name: str | os.PathLike) -> Any:
    with library_errors_at(f"{name}: has no tokenizer that loads"):  # broken files raise many types
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        # Without files, the library may make a tokenizer without a vocabulary.
        if not tokenizer("a", add_special_tokens=False).input_ids:
            raise ValueError("its vocabulary is empty")
    return tokenizer


def _facts(tokenizer: Any) -> tuple:
    backend = getattr(tokenizer, "_tokenizer", None)
    added = sorted(tokenizer.added_tokens_decoder.items())
    inside = backend.to_str() if isinstance(backend, Tokenizer) else repr(added)
    settings = [getattr(tokenizer, name, None) for name in _SETTINGS]
    return type(tokenizer).__name__, settings, tokenizer.get_vocab(), inside


def _loads_as(before: tuple, folder: Path) -> bool:
    try:
        return _facts(_load(folder, folder)) == before
    except InputError:
        return False


def _checked(tokenizer: Any, folder: Path, name: str | os.PathLike) -> Any:
    """Refuses tokens beyond the model's; special ones that only a text that names them has are read as text."""
    rows = getattr(text_config(load_config(folder)), "vocab_size", None)
    beyond = {token: at for token, at in tokenizer.get_vocab().items() if rows is not None and at >= rows}
    backend = getattr(tokenizer, "_tokenizer", None)
    if beyond and isinstance(backend, Tokenizer):
        state = json.loads(backend.to_str())
        named = set(beyond) - _written(tokenizer, state)
        forgotten = {one["content"] for one in state["added_tokens"] if one["special"]} & named
        _forget(tokenizer, forgotten, state)
        beyond = {token: at for token, at in beyond.items() if token not in forgotten}
    if beyond:
        token, at = min(beyond.items(), key=lambda item: item[1])
        raise InputError(
            f"{name}: the tokenizer's token {token!r} has number {at}, but the model has {rows} tokens: add the rows "
            "(model.resize_token_embeddings(len(tokenizer)) and save_pretrained), or take the tokens out."
        )
    return tokenizer


def _written(tokenizer: Any, state: dict) -> set[str]:
    """The tokens that stand in what a model reads though no text names them; `state` is the tokenizer's own."""
    around = tokenizer.convert_ids_to_tokens(tokenizer("a").input_ids)
    own, unknown = state["model"], state["model"].get("unk_id")  # the second is Unigram's
    usual = signature(type(tokenizer).__init__).parameters.get("pad_token")  # which no file has to name
    pad = [] if usual is not None and tokenizer.pad_token == usual.default else [tokenizer.pad_token]
    return {
        *around, tokenizer.bos_token, tokenizer.eos_token, *pad,
        own.get("unk_token") if unknown is None else own["vocab"][unknown][0],
    }  # fmt: skip


def _forget(tokenizer: Any, tokens: set[str], state: dict) -> None:
    left = [one for one in state["added_tokens"] if one["content"] not in tokens]
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps({**state, "added_tokens": left}))
    for role in ("unk_token", "pad_token", "sep_token", "cls_token", "mask_token"):
        if getattr(tokenizer, role, None) in tokens:
            setattr(tokenizer, role, None)

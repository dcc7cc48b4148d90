"""Ollama's `Modelfile` for a GGUF file: the model's generation settings in Ollama's words.

Ollama has defaults of its own (it samples at temperature 0.8), so each setting that transformers' `generate` would use
is written.
"""

from pathlib import Path
from typing import Any

from ..core.jsonfile import read_json
from ..core.schema import Coefficient, Count, Flag, Positive, Schema, Share, Text, Whole, read
from .tokenizer import load_tokenizer

# Ollama takes the memory of the whole context at once; at this length it is a fraction of the weights'.
MOST_CONTEXT = 8192
# Settings that change no token of an answer, or that the file says in another way.
_UNUSED = (
    "_from_model_config", "bos_token_id", "cache_implementation", "max_length", "pad_token_id", "transformers_version",
    "use_cache",
)  # fmt: skip


class _Settings(Schema):
    """The fields of generation_config.json that Ollama has parameters for, each of which may be missing or null."""

    do_sample: Flag | None = None
    temperature: Coefficient | None = None
    top_k: Whole | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    repetition_penalty: Positive | None = None
    max_new_tokens: Count | None = None
    stop_strings: Text | list[Text] | None = None
    eos_token_id: Whole | list[Whole] | None = None


def modelfile_text(name: str, config: Any, folder: Path) -> str:
    """Ollama's `Modelfile` for the GGUF file `name`.

    Raises:
        InputError: a value in generation_config.json has another type or is out of range.
    """
    file = folder / "generation_config.json"
    given = read_json(file, "a generation config") if file.is_file() else {}
    fields = {key: value for key, value in given.items() if key in _Settings.model_fields}
    settings = read(_Settings, {"eos_token_id": config.eos_token_id, **fields}, str(file))
    longest = config.max_position_embeddings
    lines = [f"FROM ./{name}"]
    if longest > MOST_CONTEXT:
        lines.append(f"# The model reads {longest} tokens; a longer context takes more memory from the start.")
    lines.append(f"PARAMETER num_ctx {min(longest, MOST_CONTEXT)}")
    lines += [f"PARAMETER {key} {value}" for key, value in _sampling(settings).items()]
    if settings.repetition_penalty not in (None, 1):  # over the whole text, as transformers counts it
        lines += [f"PARAMETER repeat_penalty {settings.repetition_penalty}", "PARAMETER repeat_last_n -1"]
    if settings.max_new_tokens is not None:
        lines.append(f"PARAMETER num_predict {settings.max_new_tokens}")
    lines += [f"PARAMETER stop {_quoted(text)}" for text in _stops(settings, load_tokenizer(folder, folder))]
    if others := [
        key
        for key, value in given.items()
        if value is not None and value is not False and key not in (*fields, *_UNUSED)
    ]:
        lines.append(f"# In generation_config.json, but no parameter of Ollama: {' '.join(', '.join(others).split())}.")
    return "\n".join(lines) + "\n"


def _sampling(settings: _Settings) -> dict[str, Any]:
    """What chooses a token: without `do_sample` the likeliest one, whatever else is set."""
    if not settings.do_sample:
        return {"temperature": 0}
    defaults = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": None}  # of transformers
    values = {key: default if (own := getattr(settings, key)) is None else own for key, default in defaults.items()}
    return {key: value for key, value in values.items() if value is not None}


def _stops(settings: _Settings, tokenizer: Any) -> list[str]:
    """The texts that end an answer: of the tokens that do, and the strings."""
    ends, strings = settings.eos_token_id, settings.stop_strings
    ids = [tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])]
    texts = [tokenizer.decode([token]) for token in ids if token is not None and 0 <= token < len(tokenizer)]
    texts += [strings] if isinstance(strings, str) else strings or []
    return [text for text in dict.fromkeys(texts) if text]


def _quoted(text: str) -> str:
    """A Modelfile has no escapes: three quotes hold text with quotes."""
    quotes = '"""' if '"' in text else '"'
    return f"{quotes}{text}{quotes}"

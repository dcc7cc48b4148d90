"""`sample`: a base model writes text, which a gate and a review read as old text where there is none at hand."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.expand import versions
from ..checkpoint.facts import Facts
from ..checkpoint.source import name_and_commit, resolve_checkpoint
from ..core.errors import InputError
from ..core.jsonfile import write_text
from ..core.progress import Bar
from ..data.files import format_of, read_rows
from ..data.sources import LanguageText
from ..data.tokens import begin_tokens, prompt_tokens
from ..modeling import ExpandedConfig
from .models import check_decoder, generated, load_for_inference, longest_block
from .writing import SampleSettings

WRITTEN_BY = "written_by"  # the key of a row that names the model that wrote it
_TRIES = 4  # batches without a word, one after the other, before the model is given up


def writer_of(text: LanguageText) -> str | None:
    """The model that wrote all of a local text, as each row says; None for text from elsewhere, and where a row or a
    file, which a training may skip, cannot be read."""
    writers: set[str] = set()
    try:
        for path in text.files():
            for row in read_rows(path) if format_of(path) == ".jsonl" else [None]:
                writer = row.content.get(WRITTEN_BY) if row and isinstance(row.content, dict) else None
                if not isinstance(writer, str) or writers - {writer}:
                    return None
                writers.add(writer)
    except InputError:
        return None
    return writers.pop() if writers else None


def write_sample(model: str, revision: str | None, language: str, chosen: SampleSettings, out: Path) -> str:
    """Lets a model, or expert 0 of an expanded one, write a file of documents; each row says what wrote it and how.
    Returns what was written, in words."""
    network, tokenizer = load_for_inference(model, revision)
    check_decoder(network.config, model, "texts that the base writes itself")
    name, commit = name_and_commit(model, resolve_checkpoint(model, revision))
    origin = {"language": language, WRITTEN_BY: name, "revision": commit, **chosen.model_dump(exclude={"prompts"})}
    rows = [{**row, **origin, "versions": versions()} for row in write_documents(network, tokenizer, chosen)]
    write_text(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return f"{len(rows):,} documents, {sum(len(row['text'].split()) for row in rows):,} words"


def write_documents(model: Any, tokenizer: Any, chosen: SampleSettings) -> Iterator[dict[str, str]]:
    """Yields documents that the model writes: `text`, and the `prompt` that it begins with ("" for none).

    Tokens are drawn from the model's own distribution, with temperature and top-p. Of an expanded model, expert 0
    alone writes: that is the base. A document without a word is drawn anew."""
    expanded = isinstance(model.config, ExpandedConfig)
    if expanded and (stage := Facts(model.config).history.trained_base):
        raise InputError(f"Expert 0 of this model is not the base any more, since `{stage}` trained it: give the base.")
    begun = {prompt: _begin(prompt, tokenizer) for prompt in chosen.prompts or [""]}
    longest, positions = max(map(len, begun.values())), longest_block(model.config)
    if positions is not None and longest + chosen.tokens > positions:
        raise InputError(
            f"tokens is {chosen.tokens}, and a prompt has up to {longest}, but the model takes {positions} positions: "
            "lower tokens."
        )
    drawn: dict[str, Any] = {"do_sample": True, "temperature": chosen.temperature, "top_p": chosen.top_p, "top_k": 0}
    base = model.use_expert(0) if expanded else nullcontext()
    bar = Bar(total=chosen.documents, desc="sample", unit="document")
    devices = [model.device] if model.device.type == "cuda" else []
    with bar, base, torch.random.fork_rng(devices):
        torch.manual_seed(chosen.seed)
        for number, (prompt, ids) in enumerate(begun.items()):
            left, empty = len(range(number, chosen.documents, len(begun))), 0
            rows = [ids] * min(chosen.batch_size, left)
            while left:
                made = generated(model, tokenizer, rows, max_new_tokens=chosen.tokens, **drawn)
                own = tokenizer.batch_decode(made, skip_special_tokens=True)
                whole = tokenizer.batch_decode([[*ids[1:], *new] for new in made], skip_special_tokens=True)
                texts = [text for text, new in zip(whole, own, strict=True) if new.strip()][:left]
                left, empty = left - len(texts), 0 if texts else empty + 1
                if empty == _TRIES:
                    raise InputError(
                        "The model writes nothing but ends of text: give other prompts, or a higher temperature."
                    )
                bar.update(len(texts))
                yield from ({"text": text, "prompt": prompt} for text in texts)


def _begin(prompt: str, tokenizer: Any) -> list[int]:
    """A prompt's tokens behind what the tokenizer puts before a text, or else the begin-of-text token, or the
    end-of-text token if there is none."""
    if begin_tokens(tokenizer):
        return prompt_tokens(prompt, tokenizer)
    begin = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if begin is None:
        raise InputError("The tokenizer has neither a begin-of-text nor an end-of-text token: set its eos_token.")
    return [begin, *prompt_tokens(prompt, tokenizer)]

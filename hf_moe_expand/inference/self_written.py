"""Text that a base model writes itself, which review reads as old text where the base's own is not at hand."""

import json
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import GenerationConfig

from ..checkpoint.expand import versions
from ..checkpoint.local import name_and_commit
from ..checkpoint.records import History
from ..checkpoint.source import resolve_checkpoint
from ..core.errors import InputError
from ..core.jsonfile import write_text
from ..data.files import kind_of, read_rows
from ..data.sources import LanguageText
from ..data.tokens import begin_tokens, prompt_tokens
from ..modeling import ExpandedConfig
from .models import check_decoder, generating, load_for_inference, longest_block
from .writing import SampleSettings

WRITTEN_BY = "written_by"  # the key of a row that names the model that wrote it
_TRIES = 4  # batches without a word for each one with words, before the model is given up


@dataclass(frozen=True)
class SelfWrittenText(LanguageText):
    """Text that a run writes before it reads it.

    Attributes:
        documents_to_come: number of its documents.
        tokens_to_come: the most tokens of all of them.
    """

    documents_to_come: int
    tokens_to_come: int

    def count(self, most: int) -> int:
        return min(self.documents_to_come, most)

    def contents(self) -> list[str]:
        """Nothing: it follows from the inputs of the step that writes it."""
        return []


def writer_of(text: LanguageText) -> str | None:
    """The model that wrote all of a local text, as each row says; None for text from elsewhere."""
    writers: set[str] = set()
    for path in text.files():
        if kind_of(path) != ".jsonl":
            return None
        for row in read_rows(path):
            writer = row.content.get(WRITTEN_BY)
            if not isinstance(writer, str) or writers - {writer}:
                return None
            writers.add(writer)
    return writers.pop() if writers else None


def write_texts(
    model: str, revision: str | None, samples: Mapping[str, SampleSettings], out: str | Path
) -> tuple[int, int]:
    """Lets a model write a file of documents, whole or not at all; each row says what wrote it and how.

    Args:
        model: folder or hub id; of an expanded model, expert 0 writes.
        samples: how the documents of each language are written.

    Returns:
        The number of documents and of words.
    """
    network, tokenizer = load_for_inference(model, revision)
    check_decoder(network.config, model, "texts that the base writes itself")
    name, commit = name_and_commit(model, resolve_checkpoint(model, revision))
    origin = {WRITTEN_BY: name, "revision": commit}
    rows = []
    for language, chosen in samples.items():
        how = chosen.model_dump(exclude={"prompts"})
        for row in write_documents(network, tokenizer, chosen):
            rows.append({**row, "language": language, **origin, **how, "versions": versions()})
    write_text(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return len(rows), sum(len(row["text"].split()) for row in rows)


def check_positions(chosen: SampleSettings, config: Any, tokenizer: Any = None) -> None:
    """Refuses documents that are longer than the model's positions.

    Args:
        config: the model's configuration.
        tokenizer: without one, a prompt counts as one token.
    """
    positions = longest_block(config)
    longest = 1 if tokenizer is None else max(len(_ids(prompt, tokenizer)) for prompt in chosen.prompts or [""])
    if positions is not None and longest + chosen.tokens > positions:
        raise InputError(
            f"tokens is {chosen.tokens}, and a prompt has up to {longest}, but the model takes {positions} positions: "
            "lower tokens."
        )


def write_documents(model: Any, tokenizer: Any, chosen: SampleSettings) -> Iterator[dict[str, str]]:
    """Yields documents that the model writes: `text`, and the `prompt` that it begins with ("" for none).

    Tokens are drawn from the model's own distribution, with temperature and top-p. Of an expanded model, expert 0
    alone writes: that is the base. A document without a word is drawn anew."""
    if isinstance(model.config, ExpandedConfig) and (stage := History.of(model.config).trained_base):
        raise InputError(f"Expert 0 of this model is not the base any more, since `{stage}` trained it: give the base.")
    check_positions(chosen, model.config, tokenizer)
    base = model.use_expert(0) if isinstance(model.config, ExpandedConfig) else nullcontext()
    named = chosen.prompts or [""]
    left = [chosen.documents // len(named) + (i < chosen.documents % len(named)) for i in range(len(named))]
    bar = tqdm(total=chosen.documents, desc="sample", unit="document")
    devices = [model.device] if model.device.type == "cuda" else []
    ends = model.generation_config.eos_token_id
    plain = GenerationConfig(eos_token_id=tokenizer.eos_token_id if ends is None else ends)
    with base, generating(model, plain), torch.random.fork_rng(devices):
        torch.manual_seed(chosen.seed)
        for prompt, wanted in zip(named, left, strict=True):
            batch = [_ids(prompt, tokenizer)] * min(chosen.batch_size, wanted)
            for text in islice(_written(model, tokenizer, batch, chosen), wanted):
                bar.update()
                yield {"text": text, "prompt": prompt}
    bar.close()


def _ids(prompt: str, tokenizer: Any) -> list[int]:
    """A prompt's tokens behind what the tokenizer puts before a text, or else the begin-of-text token, or the
    end-of-text token if there is none."""
    if begin := begin_tokens(tokenizer):
        return prompt_tokens(prompt, tokenizer)
    begin = [tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id]
    if begin == [None]:
        raise InputError("The tokenizer has neither a begin-of-text nor an end-of-text token: set its eos_token.")
    return [*begin, *prompt_tokens(prompt, tokenizer)]


def _written(model: Any, tokenizer: Any, batch: list[list[int]], chosen: SampleSettings) -> Iterator[str]:
    """Documents without end, a batch of equal beginnings at a time."""
    prompt = torch.tensor(batch, device=model.device)
    empty = 0
    while True:
        ids = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=True, temperature=chosen.temperature,
            top_p=chosen.top_p, top_k=0, max_new_tokens=chosen.tokens, pad_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        texts, new = (tokenizer.batch_decode(ids[:, at:], skip_special_tokens=True) for at in (1, prompt.shape[1]))
        words = [text for text, own in zip(texts, new, strict=True) if own.strip()]
        empty = 0 if words else empty + 1
        if empty == _TRIES:
            raise InputError("The model writes nothing but ends of text: give other prompts, or a higher temperature.")
        yield from words

"""Text that a base model writes itself: what review reads as old text where none of what the base was trained on is at
hand."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import field
from itertools import islice
from typing import Annotated, Any

import torch
from pydantic import Field
from tqdm.auto import tqdm

from .errors import InputError
from .modeling import ExpandedConfig
from .models import longest_block
from .records import History
from .schema import Count, Positive, Share, Text, Whole, settings

_TRIES = 4  # batches without a word for each one with words, before the model is given up


@settings
class SampleSettings:
    """How a model writes text.

    Raises:
        InputError: a number is out of range, or a prompt is empty.
    """

    documents: Annotated[Count, Field(description="documents to write")] = 200
    tokens: Annotated[Count, Field(description="most tokens of a document, the prompt's left out")] = 256
    prompts: Annotated[
        list[Text], Field(description="beginnings, taken in turn; by default each document begins by itself")
    ] = field(default_factory=list)
    temperature: Annotated[Positive, Field(description="divisor of the logits")] = 1.0
    top_p: Annotated[Share, Field(description="share of the probability among whose tokens is drawn", gt=0)] = 1.0
    batch_size: Annotated[Count, Field(description="documents written at once")] = 16
    seed: Annotated[Whole, Field(ge=0, lt=2**32, description="random seed")] = 0

    def __post_init__(self) -> None:
        if not all(prompt.strip() for prompt in self.prompts):
            raise InputError("prompts: a prompt is empty: leave it out, or give a few words.")


def write_documents(model: Any, tokenizer: Any, chosen: SampleSettings) -> Iterator[dict[str, str]]:
    """Yields documents that the model writes: `text`, and the `prompt` that it begins with ("" for none).

    Tokens are drawn from the model's own distribution, with temperature and top-p. Of an expanded model, expert 0
    alone writes: that is the base. A document without a word is drawn anew.

    Raises:
        InputError: the documents are longer than the model's positions, the model writes no words, or it is an expanded
            model whose base was trained.
    """
    if isinstance(model.config, ExpandedConfig) and (stage := History.of(model.config).trained_base):
        raise InputError(f"Expert 0 of this model is not the base any more, since `{stage}` trained it: give the base.")
    prompts = [_ids(prompt, tokenizer) for prompt in chosen.prompts] or [_ids("", tokenizer)]
    positions = longest_block(model.config)
    if positions is not None and max(map(len, prompts)) + chosen.tokens > positions:
        raise InputError(
            f"tokens is {chosen.tokens}, and a prompt has up to {max(map(len, prompts))}, but the model takes "
            f"{positions} positions: lower tokens."
        )
    base = model.use_expert(0) if isinstance(model.config, ExpandedConfig) else nullcontext()
    named = chosen.prompts or [""]
    left = [chosen.documents // len(named) + (i < chosen.documents % len(named)) for i in range(len(named))]
    bar = tqdm(total=chosen.documents, desc="sample", unit="document")
    with base, torch.random.fork_rng():
        torch.manual_seed(chosen.seed)
        for prompt, ids, wanted in zip(named, prompts, left, strict=True):
            for text in islice(_written(model, tokenizer, ids, chosen), wanted):
                bar.update()
                yield {"text": text, "prompt": prompt}
    bar.close()


def _ids(prompt: str, tokenizer: Any) -> list[int]:
    """A prompt's tokens behind the begin-of-text token, or the end-of-text token if there is none."""
    begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if begin is None:
        raise InputError("The tokenizer has neither a begin-of-text nor an end-of-text token: set its eos_token.")
    return [begin, *tokenizer(prompt, add_special_tokens=False).input_ids]


def _written(model: Any, tokenizer: Any, ids: Sequence[int], chosen: SampleSettings) -> Iterator[str]:
    """Documents with this beginning, without end."""
    prompt = torch.tensor([ids] * chosen.batch_size, device=model.device)
    empty = 0
    while True:
        found = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=True, temperature=chosen.temperature,
            top_p=chosen.top_p, top_k=0, max_new_tokens=chosen.tokens, pad_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        texts = tokenizer.batch_decode(found[:, 1:], skip_special_tokens=True)
        words = [text for text, row in zip(texts, found, strict=True) if _has_words(row[len(ids) :], tokenizer)]
        empty = 0 if words else empty + 1
        if empty == _TRIES:
            raise InputError("The model writes nothing but ends of text: give other prompts, or a higher temperature.")
        yield from words


def _has_words(ids: torch.Tensor, tokenizer: Any) -> bool:
    return bool(tokenizer.decode(ids, skip_special_tokens=True).strip())

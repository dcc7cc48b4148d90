"""Translates sentences with an encoder-decoder; the generation settings that all translations share."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tqdm.auto import tqdm
from transformers import GenerationConfig

from ..data.pairs import PairEncoder, padded
from ..data.sources import Pair
from ..errors import InputError
from ..models import longest_block


def translate_pairs(
    model: Any,
    tokenizer: Any,
    sentences: Sequence[str],
    direction: Pair,
    batch_size: int = 8,
    max_new_tokens: int = 256,
    beams: int = 1,
) -> tuple[list[str], int]:
    """An encoder-decoder's translations, and the number of those cut off at `max_new_tokens`. The first token names the
    target's language, where the tokenizer has codes.

    Of the checkpoint's own generation settings, only its special tokens count.

    Raises:
        InputError: the tokenizer has no code for a language, or a sentence does not fit the model's positions.
    """
    model.eval()
    check_directions(model, tokenizer, {direction: sentences}, max_new_tokens)
    encoder = PairEncoder(tokenizer)
    encoded = encoder.sources(list(sentences), direction)
    own = model.generation_config
    ends = end_tokens(model, tokenizer)
    filler = model.config.pad_token_id or 0
    start = own.decoder_start_token_id
    options = GenerationConfig(
        do_sample=False, num_beams=beams, max_new_tokens=max_new_tokens, eos_token_id=ends or None, pad_token_id=filler,
        decoder_start_token_id=getattr(model.config, "decoder_start_token_id", None) if start is None else start,
        bad_words_ids=own.bad_words_ids,
    )  # fmt: skip
    options.update(**encoder.start(direction))
    translations, cut = [""] * len(sentences), 0
    order = sorted(range(len(sentences)), key=lambda index: -len(encoded[index]))
    with generation_config(model, options), tqdm(total=len(order), desc="translate", unit="sentence") as progress:
        for first in range(0, len(order), batch_size):
            batch = order[first : first + batch_size]
            ids_BS = padded([encoded[index] for index in batch], filler)
            mask_BS = padded([[1] * len(encoded[index]) for index in batch], 0)
            written_BT = model.generate(input_ids=ids_BS.to(model.device), attention_mask=mask_BS.to(model.device))
            for index, row in zip(batch, written_BT[:, 1:].tolist(), strict=True):
                cut += not set(row) & set(ends)
                translations[index] = " ".join(tokenizer.decode(row, skip_special_tokens=True).split())
            progress.update(len(batch))
    return translations, cut


def check_directions(model: Any, tokenizer: Any, sentences: Mapping[Pair, Sequence[str]], max_new_tokens: int) -> None:
    """Refuses sentences that `translate_pairs` would refuse.

    Args:
        sentences: the sentences to translate in each direction.

    Raises:
        InputError: the tokenizer has no code for a language, or a sentence does not fit the model's positions.
    """
    encoder, positions = PairEncoder(tokenizer), longest_block(model.config)
    encoder.check(sentences)
    for direction, texts in sentences.items():
        longest = max(map(len, encoder.sources(list(texts), direction)))
        if positions is not None and max(longest, max_new_tokens + 2) > positions:
            raise InputError(
                f"A sentence of {longest} tokens and a translation of {max_new_tokens} do not fit the model's "
                f"{positions} positions: give shorter sentences or fewer new tokens."
            )


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    own = model.generation_config.eos_token_id
    ends = own if isinstance(own, list) else [own]
    return [token for token in dict.fromkeys([tokenizer.eos_token_id, *ends]) if token is not None]


@contextmanager
def generation_config(model: Any, config: GenerationConfig) -> Iterator[None]:
    """Replaces the model's own generation settings, which `generate` would use for omitted arguments."""
    own = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = own

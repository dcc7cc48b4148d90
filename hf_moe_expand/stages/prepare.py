"""A stage's text: packed or streamed, whether there is enough of it, and how long it trains."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from datasets import Dataset

from ..data.lost import check_lost
from ..data.packing import PackedText, amounts_of, first_tokens
from ..data.pairs import lost_of_each
from ..data.sources import LanguageText
from ..data.tokens import encode_documents, tokens_at_hand
from .config import StageConfig
from .streaming import BY_DOCUMENTS, is_streamed, streamed

# Tokens that the beginning of each long text has at least; the characters for each token of a block below which a text
# may be less than a block.
_OF_BEGINNINGS, _SHORT = 10_000, 50
# Fewer steps hardly teach anything; more passes over the text teach it by heart.
_TOO_FEW_STEPS, _MOST_PASSES = 50, 4


def packed_text(
    config: StageConfig, model: Any, texts: Mapping[str, Any], tokenizer: Any, allow_lost_text: bool = False
) -> PackedText:
    """The text, read and in blocks, or as a stream of them; refused if the tokenizer loses much of it, unless that is
    allowed.

    Args:
        model: configuration of the model that trains.
        texts: text of each language: a `LanguageText`, or a data set.
    """
    if is_streamed(config, texts, model):
        found = streamed(config, texts, tokenizer, model, allow_lost_text)
        return replace(found, is_of_stage=True)
    pairs = model.is_encoder_decoder
    loaded = {code: text.load(pairs) if isinstance(text, LanguageText) else text for code, text in texts.items()}
    check_lost(lost_of_each(loaded, tokenizer, pairs, config.seed), allow_lost_text)
    return replace(config.pack(loaded, tokenizer, model), is_of_stage=True)


def check_enough(config: StageConfig, model: Any, texts: Mapping[str, LanguageText], tokenizer: Any) -> None:
    """Refuses local text that is too little for one block, or has fewer tokens than asked for: packs the beginnings
    of short texts as training packs the texts."""
    pairs, config = model.is_encoder_decoder, copy.copy(config)
    if is_streamed(config, texts, model) or not all(text.files() for text in texts.values()):
        return  # text that is not at hand is taken to be enough
    beginnings = {code: list(text.beginnings(pairs)) for code, text in texts.items()}
    rows = {code: [row for one in of for row in one.rows] for code, of in beginnings.items()}
    whole = [code for code, of in beginnings.items() if all(one.read == 1 for one in of)]
    all_whole = len(whole) == len(rows)
    wanted, counts = getattr(config, "tokens_per_language", None), getattr(config, "old_documents", None)
    share = getattr(config, "replay_share", None)
    replayed = config.amounts(texts, model).get("replay", ((), 0))[0] if wanted else ()
    for code in whole if wanted and not pairs else ():
        if code in replayed:  # its share is of the others' tokens
            continue
        first_tokens(code, map(len, encode_documents([row["text"] for row in rows[code]], tokenizer)), wanted)
    short = any(sum(len(str(row)) for row in rows[code]) < _SHORT * config.block_size for code in whole)
    some = counts or share
    if (some and not all_whole) or not (some or short or (wanted and wanted < config.block_size)):
        return
    if wanted and not all_whole:
        vars(config)["tokens_per_language"] = min(wanted, _OF_BEGINNINGS)
    config.pack({code: Dataset.from_list(of) for code, of in rows.items()}, tokenizer, model)


def length(config: StageConfig, model: Any, texts: Mapping[str, Any], name: str, tokenizer: Any = None) -> list[str]:
    """About how many steps it has, passes over the text and tokens by language, as far as that is known; and a
    warning of few steps or many passes. Without a tokenizer, the text is not counted."""
    words, taken, curriculum = list[str](), 0, config.order(list(texts))
    counts = {} if tokenizer is None else {code: tokens_at_hand(text, tokenizer) for code, text in texts.items()}
    known = {code: count for code, count in counts.items() if count is not None}
    by_documents = any(getattr(config, name, None) for name in BY_DOCUMENTS)
    if known and len(known) == len(counts) and not by_documents:
        taken = sum(amounts_of(known, **config.amounts(texts, model)).values())
    of_step = config.per_device_train_batch_size * config.block_size * config.gradient_accumulation_steps
    steps = config.max_steps if curriculum is None else curriculum.steps
    warnings = list[str]()
    if wanted := steps * of_step if steps > 0 else config.tokens or int(taken * config.num_train_epochs):
        steps = max(wanted // of_step, 1)
        words.append(f"about {steps:,} steps of {of_step:,} tokens")
        words += [f"passes over the text: {wanted / taken:.3g}"] if taken else []
        if steps < _TOO_FEW_STEPS:
            warnings.append(
                f"warning: {name}: fewer than {_TOO_FEW_STEPS} steps hardly teach anything: take smaller ones "
                "(gradient_accumulation_steps), or more tokens; `recipes new --tokens` chooses a batch and a rate"
            )
        if taken and wanted > _MOST_PASSES * taken:
            warnings.append(
                f"warning: {name}: after more than {_MOST_PASSES} passes it learns the text by heart: give "
                "more text, or train on fewer tokens"
            )
    if known:
        words.append(f"tokens at hand, about: {', '.join(f'{code} {count:,}' for code, count in known.items())}")
    return [*([f"{name}: {'; '.join(words)}"] if words else []), *warnings]

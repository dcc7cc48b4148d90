"""A stage's text: packed or streamed, whether there is enough of it, and how long it trains."""

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

# Fewer steps hardly teach anything; more passes over the text teach it by heart.
_TOO_FEW_STEPS, _MOST_PASSES = 50, 4


def packed_text(
    config: StageConfig, model: Any, texts: Mapping[str, Any], tokenizer: Any, allow_lost_text: bool = False
) -> PackedText:
    """The text of each language, a `LanguageText` or a data set, in blocks or as a stream of them; refused if the
    tokenizer loses much of it, unless that is allowed."""
    if is_streamed(config, texts, model):
        return replace(streamed(config, texts, tokenizer, model, allow_lost_text), is_of_stage=True)
    pairs = model.is_encoder_decoder
    loaded = {code: text.load(pairs) if isinstance(text, LanguageText) else text for code, text in texts.items()}
    check_lost(lost_of_each(loaded, tokenizer, pairs, config.seed), allow_lost_text)
    return replace(config.pack(loaded, tokenizer, model), is_of_stage=True)


def check_enough(config: StageConfig, model: Any, texts: Mapping[str, LanguageText], tokenizer: Any) -> None:
    """Refuses local text, of which the beginnings are all, that has fewer tokens than asked for or, where that is so of
    all languages, is too little for one block: packs it as training does. Longer text is taken to be enough."""
    pairs = model.is_encoder_decoder
    if is_streamed(config, texts, model) or not all(text.files() for text in texts.values()):
        return
    beginnings = {code: list(text.beginnings(pairs)) for code, text in texts.items()}
    whole = {
        code: [row for one in of for row in one.rows]
        for code, of in beginnings.items()
        if all(one.read == 1 for one in of)
    }
    if len(whole) == len(texts):
        config.pack({code: Dataset.from_list(rows) for code, rows in whole.items()}, tokenizer, model)
    elif not pairs and (wanted := getattr(config, "tokens_per_language", None)):
        replayed = config.amounts(texts, model).get("replay", ((), 0))[0]  # a share of the others' tokens
        for code in whole.keys() - {*replayed}:
            first_tokens(code, map(len, encode_documents([row["text"] for row in whole[code]], tokenizer)), wanted)


def length(config: StageConfig, model: Any, texts: Mapping[str, Any], name: str, tokenizer: Any = None) -> list[str]:
    """About how many steps it has, passes over the text and tokens by language, as far as that is known; and a
    warning of few steps or many passes. Without a tokenizer, the text is not counted."""
    words, warnings, taken, curriculum = list[str](), list[str](), 0, config.order(list(texts))
    counts = {} if tokenizer is None else {code: tokens_at_hand(text, tokenizer) for code, text in texts.items()}
    known = {code: count for code, count in counts.items() if count is not None}
    by_documents = any(getattr(config, name, None) for name in BY_DOCUMENTS)
    if known and len(known) == len(counts) and not by_documents:
        taken = sum(amounts_of(known, **config.amounts(texts, model)).values())
    of_step = config.per_device_train_batch_size * config.block_size * config.gradient_accumulation_steps
    steps = config.max_steps if curriculum is None else curriculum.steps
    if wanted := steps * of_step if steps > 0 else config.tokens or int(taken * config.num_train_epochs):
        steps = max(wanted // of_step, 1)
        words.append(f"about {steps:,} steps of {of_step:,} tokens")
        words += [f"passes over the text: {wanted / taken:.3g}"] if taken else []
        if steps < _TOO_FEW_STEPS:
            warnings.append(
                f"warning: {name}: fewer than {_TOO_FEW_STEPS} steps hardly teach anything: take smaller ones "
                "(gradient_accumulation_steps), or more tokens"
            )
        if taken and wanted > _MOST_PASSES * taken:
            warnings.append(f"warning: {name}: after more than {_MOST_PASSES} passes it learns the text by heart")
    if known:
        words.append(f"tokens at hand, about: {', '.join(f'{code} {count:,}' for code, count in known.items())}")
    return [*([f"{name}: {'; '.join(words)}"] if words else []), *warnings]

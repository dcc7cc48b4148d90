"""The one reader of hidden states: passes tokens of each language through a model, and hands over what its layers see.

Shape suffixes: B rows of a batch, S tokens of a row, T tokens of a target, h hidden size.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..checkpoint.facts import Facts
from ..core.errors import InputError
from ..core.languages import names_language
from ..core.progress import Bar
from ..data.packing import too_few_tokens
from ..data.pairs import IGNORED, PairEncoder, SentencePair, padded
from ..data.rows import Pair
from ..data.tokens import begin_tokens
from ..evaluation.perplexity import pair_batch
from ..inference.models import longest_block
from ..modeling import decoder_ffns


@dataclass(frozen=True)
class TextBatch:
    """Inputs of a model, and the tokens of them that are measured.

    Attributes:
        measured: `[B, S]` bool for each stack of layers: a decoder's, or an encoder's and its decoder's.
        targets: `[B, T]`, the tokens that the first T logits of a row predict; -100 is not scored.
    """

    inputs: dict[str, torch.Tensor]
    measured: tuple[torch.Tensor, ...]
    targets: torch.Tensor

    @property
    def tokens(self) -> int:
        return sum(int(mask.sum()) for mask in self.measured)

    def measured_in(self, layer: int, encoder_layers: int) -> torch.Tensor:
        """`[tokens]` bool: the measured tokens of a layer's stack."""
        return self.measured[0 if layer < encoder_layers else -1].flatten()


@contextmanager
def ffn_inputs(model: nn.Module, receive: Callable[[int, torch.Tensor], Any]) -> Iterator[None]:
    """Inside, every FFN, expanded or dense, passes its input to `receive(layer, hidden_states)`."""
    with ExitStack() as hooks:
        for layer, ffn in enumerate(decoder_ffns(model)):
            module = model.get_submodule(ffn.place)
            hooks.enter_context(module.register_forward_pre_hook(lambda _, args, layer=layer: receive(layer, args[0])))
        yield


def token_bar(title: str, batches: Mapping[str, Sequence[TextBatch]], times: int = 1) -> Bar:
    """A bar over the measured tokens of all batches, which are read so many times."""
    total = times * sum(batch.tokens for of in batches.values() for batch in of)
    return Bar(total=total, desc=title, unit="token", unit_scale=True)


class _Enough(Exception):
    """Ends a forward pass once the last layer that is read has been read."""


def read_inputs(
    model: Any,
    batches: Iterable[TextBatch],
    receive: Callable[[int, torch.Tensor], None],
    bar: Bar | None = None,
    last: int | None = None,
) -> None:
    """Passes each layer's FFN inputs at the measured tokens, `[tokens, h]`, to `receive`, batch after batch; layers
    behind the `last` one do not run."""
    base = getattr(model, "base_model", model)
    encoder_layers = Facts(model.config).encoder_layers

    def measured(layer: int, states: torch.Tensor) -> None:
        receive(layer, states.flatten(0, -2)[batch.measured_in(layer, encoder_layers)])
        if layer == last:
            raise _Enough

    with ffn_inputs(model, measured):
        for batch in batches:
            with suppress(_Enough):
                base(**{name: value.to(model.device) for name, value in batch.inputs.items()}, use_cache=False)
            if bar is not None:
                bar.update(batch.tokens)


def language_batches(
    model: Any,
    tokenizer: Any,
    texts: Mapping[str, Iterable[Any]],
    tokens: int,
    block_size: int,
    batch_size: int,
    sides: Mapping[str, Pair] | None = None,
    most: int | None = None,
) -> dict[str, list[TextBatch]]:
    """Batches with `tokens` tokens of each text, of an encoder-decoder on each side. All are made before the first is
    read, so that a lack of text is reported at once.

    Args:
        sides: for an encoder-decoder, the languages of each text's sources and targets, where it has two.
        most: for a decoder, the most tokens of a batch, padding too; a block of more is a batch by itself.
    """
    if model.config.is_encoder_decoder:
        return {
            name: side_batches((sides or {}).get(name, name), of, tokenizer, tokens, batch_size, model)
            for name, of in texts.items()
        }
    block_size = min(block_size, longest_block(model.config) or block_size)
    blocks = {name: token_blocks(name, of, tokenizer, tokens, block_size) for name, of in texts.items()}

    def fits(rows: list[list[int]], block: list[int]) -> bool:
        # Blocks of similar length together, so that hardly any is padding.
        is_bounded = most is None or (len(rows) + 1) * len(rows[0]) <= most
        return len(rows) < batch_size and is_bounded and 2 * len(block) >= len(rows[0])

    return {name: padded_batches(sorted(of, key=len, reverse=True), fits) for name, of in blocks.items()}


def padded_batches(rows: Iterable[list[int]], fits: Callable[[list[list[int]], list[int]], bool]) -> list[TextBatch]:
    """Batches of rows one after the other, each of which joins the last batch where it `fits(batch, row)`, padded; all
    tokens but padding are measured, and all but a row's first are targets."""
    groups: list[list[list[int]]] = []
    for row in rows:
        if not groups or not fits(groups[-1], row):
            groups.append([])
        groups[-1].append(row)
    batches = []
    for group in groups:
        ids, mask = padded(group, 0), padded([[1] * len(row) for row in group], 0)
        targets = ids.masked_fill(mask == 0, IGNORED)[:, 1:]
        batches.append(TextBatch({"input_ids": ids, "attention_mask": mask}, (mask.bool(),), targets))
    return batches


def count_tokens(texts: Iterable[str], tokenizer: Any, most: int) -> int:
    """The number of the texts' tokens, counted up to `most`."""
    count = 0
    for text in texts:
        count += len(tokenizer(text, verbose=False).input_ids)
        if count >= most:
            return most
    return count


def token_blocks(language: str, texts: Iterable[str], tokenizer: Any, tokens: int, block_size: int) -> list[list[int]]:
    """Exactly the first `tokens` tokens of the texts, each text cut into blocks; refuses texts with fewer tokens. Each
    block begins with the tokenizer's begin-of-text tokens, if any, in place of its first ones."""
    blocks: list[list[int]] = []
    first, left = begin_tokens(tokenizer), tokens
    for text in texts:
        ids = tokenizer(text, verbose=False).input_ids[:left]
        left -= len(ids)
        blocks += [[*first, *ids[start : start + block_size][len(first) :]] for start in range(0, len(ids), block_size)]
        if left == 0:
            return blocks
    raise too_few_tokens(language, tokens - left, tokens)


def side_batches(
    languages: str | Pair, pairs: Iterable[SentencePair], tokenizer: Any, tokens: int, batch_size: int, model: Any
) -> list[TextBatch]:
    """Batches with `tokens` tokens of a language on each side, sentences from it and translations into it; or of a
    direction, of its sources and of its targets."""
    of_side = (languages, languages) if isinstance(languages, str) else languages
    encoder, all_pairs = PairEncoder(tokenizer), list(pairs)
    translatable = [pair for pair in all_pairs if encoder.translates(pair.direction)]
    batches: list[TextBatch] = []
    for side, name in enumerate(("source", "target")):
        language = of_side[side]
        rows = [pair for pair in translatable if names_language(pair.direction[side], language)]
        if not rows and len(translatable) < len(all_pairs):
            raise InputError(
                f"Language {language!r} has no sentence as a {name}, and both sides are measured: {encoder.one_way()}. "
                "`plan moe-lpr` needs no analysis."
            )
        inputs, labels, left = [], [], tokens
        for _, source, target in encoder.fitting(rows, longest_block(model.config)):
            inputs.append(source)
            labels.append(target)
            left -= min(left, len((source, target)[side]))
            if not left:
                break
        if left:
            raise too_few_tokens(language, tokens - left, tokens, f" as a {name}")
        left = tokens
        for first in range(0, len(inputs), batch_size):
            taken = slice(first, first + batch_size)
            batch = pair_batch(model, inputs[taken], labels[taken])
            targets_BT = batch.pop("labels")
            measured = [batch["attention_mask"].bool(), targets_BT.ne(IGNORED)]
            measured[1 - side] = torch.zeros_like(measured[1 - side])
            # The last tokens beyond the wanted number are not measured.
            measured[side] &= (measured[side].flatten().cumsum(0) <= left).view(measured[side].shape)
            left -= int(measured[side].sum())
            batches.append(TextBatch(batch, tuple(measured), targets_BT.masked_fill(~measured[1], IGNORED)))
    return batches

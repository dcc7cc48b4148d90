"""Judges texts before a model reads them, and the answers that it writes: the passes that the language gate needs.

Shape suffixes as in `language_gate.py`.
"""

import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from transformers.integrations import is_fsdp_managed_module

from .dispatch import is_traced
from .language_gate import (
    GateRule,
    LanguageGate,
    classes_of_sums,
    counted_tokens,
    last_sums,
    text_ends,
    text_numbers,
)
from .routing import TokenClasses
from .routing_control import RoutingControl, RoutingRequest, RowClasses, is_filled

_ONE_BY_ONE = threading.Lock()  # the compiler's stance is that of all threads


class _ReadError(Exception):
    """Ends a pass at the gate."""


@dataclass
class Reading:
    """A pass that judges: the evidence `[T, E]` that it finds, and whether it ends at the gate."""

    ends: bool
    evidence: torch.Tensor | None = None


def catch(control: RoutingControl, gate: LanguageGate, ffn: Any, args: tuple) -> None:
    """Before the FFN of the gate's layer: in a pass that judges, the evidence of its tokens."""
    reading = control.request.reading
    if reading is not None:
        reading.evidence = gate(args[0].reshape(-1, args[0].shape[-1]))
        if reading.ends:
            raise _ReadError


def is_shared(decoder: Any) -> bool:
    """Whether processes share a model's weights and gather them in hooks, which then must all run."""
    of_several = (hasattr(weight, "ds_id") or hasattr(weight, "placements") for weight in decoder.parameters())
    return is_fsdp_managed_module(decoder) or any(of_several)


@torch.no_grad()
def sums_of(
    control: RoutingControl, rule: GateRule, model: Any, inputs: torch.Tensor, texts_BS: torch.Tensor
) -> torch.Tensor:
    """`s` of each text, `[M, E]`, by one pass up to the gate's layer; see `text_numbers` and `text_ends`.

    Args:
        model: the decoder; or the whole model, where processes share its weights and no pass of it goes on.
    """
    begin = None if rule.begin is None else torch.tensor(rule.begin, device=inputs.device)
    if begin is not None and inputs.ndim == 3:
        begin = model.get_input_embeddings()(begin)
    rows, lengths_M = text_ends(inputs, texts_BS, begin)
    first, column_L = int(begin is not None), torch.arange(rows.shape[1], device=rows.device)
    mask_ML = (column_L < lengths_M.unsqueeze(-1) + first) | (column_L == 0)
    given: dict[str, Any] = {"inputs_embeds" if rows.ndim == 3 else "input_ids": rows, "attention_mask": mask_ML.long()}
    reading = Reading(ends=not is_shared(model))
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        given["logits_to_keep"] = 1
    alone = control.asking(**vars(RoutingRequest(expert=0, reading=reading)))
    with _ONE_BY_ONE, alone, torch.compiler.set_stance("force_eager"), suppress(_ReadError):
        model(**given, use_cache=False)
    evidence_MLE = reading.evidence.view(*rows.shape[:2], -1)[:, first:]  # type: ignore[union-attr]
    return last_sums(evidence_MLE, lengths_M.to(evidence_MLE.device), rule.window).to(inputs.device)


@torch.no_grad()
def inside(control: RoutingControl, model: Any, decoder: Any, device: Any, work: Callable[[], torch.Tensor]) -> Any:
    """What `work` makes in a pass of the whole model: where processes share its weights, there alone each of them has
    the embeddings'."""
    found = []

    def run(*_: Any) -> None:
        handle.remove()  # `work` runs the decoder too
        found.append(work())

    handle = decoder.register_forward_pre_hook(run)
    try:
        with control.asking(**vars(RoutingRequest(expert=0))):
            model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device), use_cache=False)
    finally:
        handle.remove()
    return found[0]


def begin_pass(control: RoutingControl, rule: GateRule, decoder: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """Before a decoder runs: judges the texts whose language nobody tells, but in training."""
    asked, control.judged = control.request, None
    is_told = asked.classes is not None and asked.classes.complete
    if is_told or decoder.training or asked.as_in_training or asked.expert is not None or asked.expansion == 0:
        return
    control.judged = _judge_call(control, rule, decoder, args, kwargs)


def end_pass(control: RoutingControl, *_: Any) -> None:
    control.judged = None


@torch.compiler.disable
def _judge_call(control: RoutingControl, rule: GateRule, decoder: Any, args: tuple, kwargs: Any) -> TokenClasses:
    """The classes of a call's tokens.

    Raises:
        ValueError: the call goes on with a text that a cache holds; its attention mask tells no padding, and it has no
            position_ids; or a graph is made of it.
    """
    arguments = inspect.signature(decoder.forward).bind_partial(*args).arguments | kwargs if args else kwargs
    inputs = arguments.get("input_ids")
    inputs = (arguments["inputs_embeds"] if inputs is None else inputs).detach()
    if is_filled(arguments.get("past_key_values")) or is_traced(inputs):
        raise ValueError(
            f"language_gate: {'a graph' if is_traced(inputs) else 'a pass on a filled cache'} judges no text: tell its "
            "language (languages=), or run it in `with model.judged(input_ids):`, which judges whole texts first."
        )
    positions, mask = arguments.get("position_ids"), arguments.get("attention_mask")
    if positions is not None:
        positions = (positions[0] if positions.ndim == 3 else positions)[:, -inputs.shape[1] :]
        positions = positions.expand(inputs.shape[:2]).to(inputs.device)
    is_plain = isinstance(mask, torch.Tensor) and mask.ndim == 2
    if mask is not None and not is_plain and positions is None:
        raise ValueError(
            "language_gate: this attention_mask does not show padding and the beginnings of texts: give one of "
            "[batch, sequence], or position_ids."
        )
    counted_BS = counted_in(decoder, inputs, mask if is_plain else None, getattr(decoder.config, "pad_token_id", None))
    texts_BS = text_numbers(counted_BS, positions)
    class_M = classes_of_sums(sums_of(control, rule, decoder, inputs, texts_BS))
    present = sorted(set(class_M.tolist()))
    # Virtual tokens, and padding, have the class of the text that follows in their row, or of its last one.
    following_BS = texts_BS.masked_fill(texts_BS < 0, len(class_M)).flip(1).cummin(1).values.flip(1)
    texts_BS = torch.minimum(following_BS, texts_BS.amax(1, keepdim=True))
    class_BS = torch.where(texts_BS < 0, present[0], class_M[texts_BS.clamp(min=0)])
    return TokenClasses(class_BS.flatten(), present)


def counted_in(decoder: Any, inputs: torch.Tensor, mask: torch.Tensor | None, pad: int | None) -> torch.Tensor:
    """`counted_tokens`, less embeddings that are no token's, as PEFT's virtual ones are, beside some that are."""
    counted_BS = counted_tokens(inputs, mask, pad)
    if inputs.ndim == 2:
        return counted_BS
    embeddings, n = decoder.get_input_embeddings(), 8 // inputs.element_size()

    def keys(rows: torch.Tensor) -> torch.Tensor:
        return rows.detach()[..., :n].contiguous().view(torch.int64).flatten()

    ids_V = torch.arange(decoder.config.vocab_size, device=inputs.device)
    with torch.no_grad():
        known_V = torch.cat([keys(embeddings(part).to(inputs.dtype)) for part in ids_V.split(8192)])
    is_token_BS = torch.isin(keys(inputs), known_V.to(inputs.device)).view(inputs.shape[:2])
    return counted_BS & is_token_BS if (counted_BS & is_token_BS).any() else counted_BS


class Answers:
    """The classes of the rows of one call of `generate`: the prompts' until the answers' own tokens say otherwise.

    Args:
        rule: how the gate judges.
        judge: the sums `[R, E]` of answers `[R, S]`.
        prompts: the class of each prompt.
        told: whether each one's language is told, and holds.
        start: tokens of a row before its answer.
        moves: whether a row may go on with another one's answer, as beams do.
    """

    def __init__(
        self, rule: GateRule, judge: Callable[[torch.Tensor], torch.Tensor], prompts: RowClasses, told: list[bool],
        start: int, moves: bool,
    ) -> None:  # fmt: skip
        self.rule, self.judge, self.prompts, self.told = rule, judge, prompts, told
        self.start, self.moves = start, moves
        self.classes: dict[tuple, int] = {}  # by the prompt's number, and the answer up to a mark

    def rows(self, ids_RS: torch.Tensor) -> RowClasses | None:
        """The classes of the rows before the model reads the last token of these; None where they stay."""
        count = max(0, ids_RS.shape[1] - self.start)
        mark = count // 64 * 64 or count // 32 * 32 or count // 16 * 16  # 16, 32, 64, and every 64 more
        if not mark or (count > mark and not self.moves):
            return None
        before = mark - 64 if mark > 64 else mark // 2
        beams, answers_RS = len(ids_RS) // len(self.told), ids_RS[:, self.start : self.start + mark]
        keys = [(row // beams, *answer) for row, answer in enumerate(answers_RS.tolist())]
        unknown = {key: row for row, key in enumerate(keys) if key not in self.classes and not self.told[key[0]]}
        if unknown:
            had = [self._class(key[: before + 1]) for key in unknown]
            sums_RE = self.judge(answers_RS[list(unknown.values())])
            now_R = classes_of_sums(sums_RE, torch.tensor(had, device=sums_RE.device), self.rule.home)
            self.classes |= zip(unknown, now_R.tolist(), strict=True)
        return RowClasses.of([self._class(key) for key in keys], ids_RS.device)

    def _class(self, key: tuple) -> int:
        return self.classes.get(key, self.prompts.numbers[key[0]])  # type: ignore[return-value, arg-type]

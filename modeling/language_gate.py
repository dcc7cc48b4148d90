"""The language gate: it judges which expansion the language of a text belongs to, before the text is read.

A text is judged by its last 128 tokens, read alone: `begin`, the id that the tokenizer puts first, if it has one, then
these tokens from position 0, through the layers up to the gate's, each by its expert 0. With x the input of that
layer's FFN, and a row w_c and a bias b_c for each language c, token t is evidence for each later class g, the languages
of expansion g, against class 0, the languages that stay home, in whole 1/1024 nats:

    l_t[g] = logsumexp over c in g (w_c x_t + b_c) - logsumexp over c in 0 (w_c x_t + b_c)
    e_t[g] = round(1024 * (1 - z_t) * bound * tanh(l_t[g] / bound))

with z_t the share of the softmax over all rows that the row of a chat template's own words has (`zxx`, no language; 0
where there is none): they are evidence for no class.

    s[g] = sum of e over the last `window` tokens of the text

The class is the g with the largest s[g], if that is above 0; else 0, home. In an answer that a model writes the class
changes to g if the largest s[g] of the answer's own tokens is above 0, or `leave` if it is at home, and to home if it
is below `home`.

Shape suffixes: B rows, S tokens of a row, M texts, L tokens of a text's end, C classes, E = C - 1; others as in
`routing.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from .routing import Scores

UNIT = 1024  # of evidence in a nat
READ = 128  # tokens of a text's end
TEMPLATE = "zxx"  # of no language: the first row, where a chat template's own words have one


@dataclass(frozen=True)
class GateRule:
    """The settings of a model's gate; raises ValueError where one is out of range, or a language stands twice."""

    layer: int  # the layer that has the gate
    languages: list[list[str]]  # the languages that the gate tells apart, by class; class 0 stays home
    bound: float = 4.0  # most evidence of one token, in nats
    window: int = 64  # tokens whose evidence counts, at most 128
    begin: int | None = None  # the id that the tokenizer puts before a text; None if it puts none
    home: float = -40.0  # nats below which an answer's own tokens send it home
    leave: float = 0.0  # nats above which they take it from home

    def __post_init__(self) -> None:
        wholes = (self.layer, self.window, self.begin or 0)
        is_right = all(type(value) is int for value in wholes) and self.layer >= 0 and 1 <= self.window <= READ
        if not (is_right and 0 < self.bound <= UNIT and self.home <= 0 <= self.leave):
            raise ValueError(
                f"language_gate: layer is {self.layer}, window {self.window}, bound {self.bound:g}, begin "
                f"{self.begin!r}, home {self.home:g} and leave {self.leave:g}: layer must be at least 0, window 1 to "
                f"{READ}, bound above 0 and at most {UNIT} nats, begin an id, home at most 0, and leave at least 0."
            )
        codes = [code for of_class in self.languages for code in of_class]
        if len(self.languages) < 2 or not all(self.languages) or len(set(codes)) < len(codes) or not all(codes):
            raise ValueError(f"language_gate: languages is {self.languages}: each class has some, each language once.")

    @classmethod
    def of(cls, config: Any) -> "GateRule | None":
        """The rule in a model's configuration; None if it has no gate."""
        settings = (getattr(config, "parts", None) or {}).get("gate")
        return None if settings is None else cls(**settings)


class LanguageGate(Scores):
    """Each token's evidence for the later classes, `[T, h] -> [T, E]` whole numbers of 1/1024 nat."""

    is_fitted = True  # no pass of a training computes it

    def __init__(self, hidden_size: int, rule: GateRule) -> None:
        self.sizes, self.bound = [len(codes) for codes in rule.languages], rule.bound
        self.has_template = rule.languages[0][0] == TEMPLATE
        super().__init__(hidden_size, sum(self.sizes))
        self.bias = nn.Parameter(torch.empty(sum(self.sizes)))

    def forward(self, x_Th: torch.Tensor) -> torch.Tensor:
        return token_evidence(super().forward(x_Th) + self.bias.float(), self.sizes, self.bound, self.has_template)


def token_evidence(logits_TR: torch.Tensor, sizes: Sequence[int], bound: float, has_template: bool) -> torch.Tensor:
    """`e`, `[..., R] -> [..., E]` int32, of classes with these numbers of languages, in the order of the rows;
    `has_template`: whether the first row is that of a chat template's own words."""
    home, *classes = (logits.logsumexp(-1) for logits in logits_TR.split(list(sizes), -1))
    evidence_TE = bound * ((torch.stack(classes, -1) - home.unsqueeze(-1)) / bound).tanh()
    if has_template:
        evidence_TE = evidence_TE * (1 - logits_TR.softmax(-1)[..., :1])
    return (UNIT * evidence_TE).round().int()


def last_sums(evidence_MLE: torch.Tensor, lengths_M: torch.Tensor, window: int) -> torch.Tensor:
    """`s`, `[M, E]`: the sums over the last `window` of each text's first `lengths_M` tokens."""
    column_L, end_M1 = torch.arange(evidence_MLE.shape[1], device=evidence_MLE.device), lengths_M.unsqueeze(-1)
    counted_ML = (column_L < end_M1) & (column_L >= end_M1 - window)
    return evidence_MLE.long().masked_fill(~counted_ML.unsqueeze(-1), 0).sum(1)


def classes_of_sums(
    sums_ME: torch.Tensor, before_M: torch.Tensor | None = None, home: float = 0.0, leave: float = 0.0
) -> torch.Tensor:
    """`[..., E] -> [...]`, the class with the largest sum if it is above 0 (of equals the first), else 0. Answers keep
    the class that they had, `before_M`, where that sum is 0 or less, but not below `home` nats; those that were at home
    stay there up to `leave` nats."""
    E = sums_ME.shape[-1]
    best_M, most_M = (sums_ME * E - torch.arange(E, device=sums_ME.device)).argmax(-1), sums_ME.amax(-1)
    if before_M is None:
        return torch.where(most_M > 0, best_M + 1, 0)
    is_new_M = most_M > UNIT * leave * (before_M == 0)
    return torch.where(is_new_M, best_M + 1, before_M.masked_fill(most_M < UNIT * home, 0))


def counted_tokens(inputs: torch.Tensor, mask: Any, pad: int | None) -> torch.Tensor:
    """`[B, S]` bool, all tokens (ids `[B, S]`, or embeddings) but padding, which is what the mask says. Without one,
    `pad` at either end of a row and a run of one id at its end are padding, but never the whole row."""
    B, S = inputs.shape[:2]
    if mask is not None:
        return mask[:, -S:].to(inputs.device, torch.bool)
    counted_BS = torch.ones(B, S, dtype=torch.bool, device=inputs.device)
    if inputs.ndim == 3 or not S:
        return counted_BS
    is_pad_BS = torch.zeros_like(counted_BS) if pad is None else inputs == pad
    front_B1 = is_pad_BS.long().cumprod(1).sum(1, keepdim=True)
    back_B1 = (inputs == inputs[:, -1:]).flip(1).long().cumprod(1).sum(1, keepdim=True)
    back_B1 = back_B1.masked_fill((back_B1 == 1) & ~is_pad_BS[:, -1:], 0)
    column_S = torch.arange(S, device=inputs.device)
    inner_BS, behind_BS = (column_S >= front_B1) & (column_S < S - back_B1), column_S >= front_B1
    inner_BS = torch.where(inner_BS.any(1, keepdim=True), inner_BS, behind_BS)
    return torch.where(inner_BS.any(1, keepdim=True), inner_BS, counted_BS)


def text_numbers(counted_BS: torch.Tensor, positions_BS: torch.Tensor | None) -> torch.Tensor:
    """`[B, S]`, the number of each token's text, from 0 in the first row on; -1 of padding. A text begins at a counted
    token whose position is not its counted predecessor's plus one; without positions a row is one text."""
    column_BS = torch.arange(counted_BS.shape[1], device=counted_BS.device).expand_as(counted_BS)
    last_BS = torch.where(counted_BS, column_BS, -1).cummax(1).values
    before_BS = torch.cat([torch.full_like(last_BS[:, :1], -1), last_BS[:, :-1]], 1)
    begins_BS = before_BS < 0
    if positions_BS is not None:
        begins_BS = begins_BS | (positions_BS != positions_BS.gather(1, before_BS.clamp(min=0)) + 1)
    begins_BS = begins_BS & counted_BS
    return (begins_BS.flatten().cumsum(0).view_as(begins_BS) - 1).masked_fill(~counted_BS, -1)


def text_ends(
    inputs: torch.Tensor, texts_BS: torch.Tensor, begin: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The end of each text (see `text_numbers`) behind `begin`, if there is one, aligned left: ids `[M, L]` or
    embeddings `[M, L, h]`; and how many tokens of its own each has, `[M]`: `begin` at its beginning is none. At least
    one row and one column."""
    text_A, token_A = texts_BS.flatten(), inputs.flatten(0, 1)
    texts = int(text_A.max()) + 1 if len(text_A) else 0
    token_A, text_A = token_A[text_A >= 0], text_A[text_A >= 0]
    if begin is not None and len(text_A):
        is_first_A = torch.cat([text_A[:1] == text_A[:1], text_A[1:] != text_A[:-1]])
        own_A = ~(is_first_A & (token_A == begin).view(len(token_A), -1).all(-1))
        token_A, text_A = token_A[own_A], text_A[own_A]
    lengths = torch.bincount(text_A, minlength=max(texts, 1)).tolist()
    ends = [tokens[-READ:] for tokens in token_A.split(lengths)]
    rows = pad_sequence(ends, batch_first=True)
    if begin is not None or not rows.shape[1]:
        first = rows.new_zeros(inputs.shape[2:]) if begin is None else begin.to(rows)
        rows = torch.cat([first.expand(len(rows), 1, *inputs.shape[2:]), rows], 1)
    return rows, torch.tensor([len(end) for end in ends], device=inputs.device)

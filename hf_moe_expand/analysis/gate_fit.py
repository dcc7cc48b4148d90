"""Fits the gate that knows what is not a new language: softmax regression over languages, on frozen hidden states.

A gate in layer l reads the FFN's input x at the tokens of texts, which are cut and read as a model reads what it judges
(`modeling/language_gate.py`). It has a row w_c and a bias b_c for each language c,

    W, b = argmin  mean over languages of mean over tokens of  - log softmax(W x + b)[language]  +  lambda / 2 |W|^2

(x standardised, lambda = 0.003; convex, so that the start does not matter). Class 0 holds the languages of the base's
own text and *anchors*, a little text of many languages that nobody trains on, so that an unknown language goes home.
The words that a chat template puts around a message have a row too, which is evidence for no class.

The promise is measured on texts left out: three more fits leave out a third of the anchors each, and a third of the
texts of all other languages. Rows of new languages lose the smallest bias by which, of the texts of an anchor that is
left out, and of each old language, at most `unseen_share` go to new experts, each judged by its end. An anchor of which
more go is a near relative of a new language and is named; at most a tenth of the anchors may be.

`home` is the evidence below which an answer's own tokens send it home, at 16, 32, 64 and 128 of them: at 64, nine in
ten texts of other languages than new ones and their near relatives are below it; or, if that is less, at no mark are
more than 1 in 50 texts of new languages. `leave` is the evidence above which they take it from home: halfway, at 16
tokens, between what one in a hundred texts of other languages has more of and what one in ten of new ones has less of.

The layer is one of the last three of the first third. Of those that keep the promise it is the one in which most new
text passes; of equals, the one in which the weakest tenth of new text is most evidence.

Shape suffixes: T tokens, h hidden size, R languages, E later classes, M texts, L tokens of a text.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import cycle, repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from ..core.errors import InputError
from ..core.progress import Bar
from ..modeling.language_gate import TEMPLATE, UNIT, classes_of_sums, last_sums, token_evidence
from .gate_text import Example
from .reading import padded_batches, read_inputs, token_bar
from .settings import GateSettings

PENALTY = 0.003  # of the squared weights of standardised features
ITERATIONS = 30
FOLDS = 3
MARKS = (16, 32, 64, 128)  # tokens of an answer
_CANDIDATES = 3
_MOST_NAMED, _PASSING = 0.1, 0.1
_WIDEST = 16.0  # nats
_BATCH = 1024  # tokens


@dataclass(frozen=True)
class Scored:
    """The logits `[T, R]` of a language's texts, one after the other, by the fit that left them out (minus infinity in
    the rows that it lacks), and `[M, 2]`, how many tokens each text has and whether it is inside a chat template."""

    logits_TR: torch.Tensor
    texts_M2: torch.Tensor


@dataclass(frozen=True)
class Texts:
    """The language, padded logits and tokens of texts, judged by few rows, which are evidence as all are: a template's,
    the other ones of class 0, and each later class."""

    codes: list[str]
    logits_MLR: torch.Tensor
    lengths_M: torch.Tensor
    has_template: bool
    settings: GateSettings

    @classmethod
    def of(
        cls, scored: Mapping[str, Scored], gate: "FittedGate", classes: Mapping[str, int], settings: GateSettings,
        plain: bool = False,
    ) -> "Texts":  # fmt: skip
        """All texts of these languages, or those outside a chat template."""
        order, sizes = by_class(gate.codes, classes)
        if gate.has_template:
            sizes = [1, sizes[0] - 1, *sizes[1:]]
        codes: list[str] = []
        kept: list[torch.Tensor] = []
        for code, of_code in scored.items():
            parts = of_code.logits_TR.float()[:, order].split(sizes, -1)
            few_TR = torch.stack([part.logsumexp(-1) for part in parts], -1)
            pieces = zip(few_TR.split(of_code.texts_M2[:, 0].tolist()), of_code.texts_M2[:, 1].tolist(), strict=True)
            kept += [piece for piece, is_inside in pieces if not (plain and is_inside)]
            codes += [code] * (len(kept) - len(codes))
        padded = pad_sequence(kept, batch_first=True) if kept else torch.zeros(0, 0, len(sizes))
        lengths_M = torch.tensor([len(piece) for piece in kept], dtype=torch.long)
        return cls(codes, padded, lengths_M, gate.has_template, settings)

    def sums(self, bias: float, tokens: int | None = None) -> torch.Tensor:
        """The evidence of each text's end, `[M, E]`, or of the first `tokens` alone of those that have as many."""
        logits_MLR, lengths_M = self.logits_MLR, self.lengths_M
        if tokens is not None:
            logits_MLR, lengths_M = logits_MLR[lengths_M >= tokens], lengths_M[lengths_M >= tokens].clamp(max=tokens)
        first = 1 + int(self.has_template)
        is_later = torch.arange(logits_MLR.shape[-1]) >= first
        sizes = [first, *[1] * int(is_later.sum())]
        evidence_MLE = token_evidence(logits_MLR - bias * is_later, sizes, self.settings.bound, self.has_template)
        return last_sums(evidence_MLE, lengths_M, self.settings.window)

    def shares(self, bias: float) -> dict[str, float]:
        """Of each language, the share of texts that go to new experts."""
        classes_M = classes_of_sums(self.sums(bias))
        gone = Counter(code for code, number in zip(self.codes, classes_M, strict=True) if number > 0)
        return {code: gone[code] / count for code, count in Counter(self.codes).items()}

    def least(self, bias: float) -> torch.Tensor:
        """The least evidence of each text's first tokens at the marks of an answer; of texts that reach the first."""
        least_M = torch.full((len(self.codes),), float("inf"))
        for mark in MARKS:
            reaches_M = self.lengths_M >= mark
            least_M[reaches_M] = least_M[reaches_M].minimum(self.sums(bias, mark).amax(-1).float())
        return least_M[self.lengths_M >= MARKS[0]]


@dataclass(frozen=True)
class FittedGate:
    """A gate's rows `[R, h]` and `[R]` for all languages (`codes`), before classes, bias and `home` are known.

    Attributes:
        begin: the id that stands before every text; None if none does.
        anchors: those that were left out in turn.
        doubts: languages most of whose tokens the rows take for those of another one.
    """

    layer: int
    begin: int | None
    codes: list[str]
    anchors: list[str]
    weight_Rh: torch.Tensor
    bias_R: torch.Tensor
    scored: dict[str, Scored]
    doubts: dict[str, str] = field(default_factory=dict)

    @property
    def has_template(self) -> bool:
        return self.codes[0] == TEMPLATE


@dataclass(frozen=True)
class GateReport:
    """Where texts go by a fitted gate that did not see them: shares that new experts take, each text judged by its end.

    Attributes:
        unseen_share: the promise.
        bias: the bias that keeps it, in nats.
        home, leave: nats below which an answer's own tokens send it home, and above which they take it from home.
        unseen: each anchor, when its language is left out of the fit.
        named: anchors outside the promise, each with the new language that it is taken for.
        new, old: each new language, and the base's own ones.
        margin: nats of evidence below which one in ten new texts is.
        doubts: languages most of whose text the gate takes for another one.
    """

    layer: int
    unseen_share: float
    bias: float
    home: float
    unseen: dict[str, float]
    named: dict[str, str]
    new: dict[str, float]
    old: dict[str, float]
    margin: float = 0.0
    doubts: dict[str, str] = field(default_factory=dict)
    leave: float = 0.0

    @property
    def passing(self) -> float:
        """The share of new texts that pass, the mean over languages."""
        return sum(self.new.values()) / max(len(self.new), 1)

    @property
    def holds(self) -> bool:
        """Whether no more anchors are outside the promise than may be, and new text passes."""
        return len(self.named) <= most_named(self.unseen) and max(self.new.values(), default=1.0) >= _PASSING

    def lines(self) -> list[str]:
        """The lines that the command line prints."""
        shown = [share for code, share in self.unseen.items() if code not in self.named]
        old = ", ".join(f"{code} {100 * share:.0f} %" for code, share in self.old.items())
        return [
            f"gate               in layer {self.layer}",
            f"unseen languages   {100 * sum(shown) / max(len(shown), 1):.1f} % of their texts go to new experts, left "
            f"out of the fit in turn ({len(shown)} languages)",
            *self.near_relatives(),
            *([f"old languages      {old} of their texts go to new experts"] if old else []),
            *(f"{code:<18} {100 * share:.0f} % of its texts go to new experts" for code, share in self.new.items()),
            f"answers            go home below {self.home:.0f} nats of evidence, and leave it above {self.leave:.0f}",
            *(f"{code:<18} its text looks like {other}: check it" for code, other in self.doubts.items()),
        ]

    def near_relatives(self) -> list[str]:
        """What near relatives of new languages mean for those who speak them."""
        return [
            f"{code:<18} is taken for {other}: a gate that was not shown it sends {100 * self.unseen[code]:.0f} % of "
            "its texts to new experts, and this one may send those of its relatives without an anchor"
            for code, other in self.named.items()
        ]


@torch.no_grad()
def fit_gate(
    model: Any,
    examples: Mapping[str, Sequence[Example]],
    classes: Mapping[str, int],
    anchors: Sequence[str],
    settings: GateSettings,
    layers: Sequence[int],
    begin: int | None = None,
) -> tuple[FittedGate, GateReport]:
    """The gate of a model, dense or expanded, and where it sends texts.

    Args:
        classes: the class of each language of `examples`; 0 for anchors too.
        anchors: the languages that are left out of the fit in turn.
        layers: the layers in which it may stand.
        begin: the id that stands before every text.

    Raises:
        InputError: no layer keeps the promise and lets new text pass; the message gives the best one's figures.
    """
    model.eval()
    order = sorted(examples, key=lambda code: classes[code])
    shown = [(code, example) for code in order for example in examples[code]]
    codes = ([TEMPLATE] if any(example.has_template for _, example in shown) else []) + order
    classes = {**dict.fromkeys(codes, 0), **classes}
    tried: list[tuple[FittedGate, GateReport]] = []
    states = _read(model, [example for _, example in shown], begin, layers)
    for layer in Bar(layers, desc="fit the gate", unit="layer"):
        gate = _fitted(layer, begin, codes, shown, states.pop(layer), anchors)
        tried.append((gate, report_of(gate, classes, settings)))
    gate, report = max(tried, key=lambda of: (of[1].holds, of[1].passing, of[1].margin))
    if not report.holds:
        raise InputError(
            f"gates: none of the layers {', '.join(map(str, layers))} keeps unseen_share {settings.unseen_share:g} and "
            f"lets new text pass: in the best, layer {report.layer}, {100 * report.passing:.1f} % of a new language's "
            f"texts reach new experts, and {len(report.named)} of {len(report.unseen)} unseen languages go astray. "
            "Raise unseen_share, or read more text of the new languages (tokens)."
        )
    return gate, report


def most_named(anchors: Collection[str]) -> int:
    """How many anchors may be outside the promise."""
    return max(1, int(_MOST_NAMED * len(anchors)))


def candidates(count: int) -> list[int]:
    """The layers of `count` in which the gate is tried: the last ones of the first third."""
    return [layer for layer in range(count) if 3 * layer < count][-_CANDIDATES:]


def _fitted(
    layer: int, begin: int | None, codes: list[str], shown: Sequence[tuple[str, Example]], states_Th: torch.Tensor,
    anchors: Sequence[str],
) -> FittedGate:  # fmt: skip
    lengths = [len(example.ids) for _, example in shown]
    row_T = torch.cat([_rows(example, codes.index(code), codes[0] == TEMPLATE) for code, example in shown])
    fold_T = torch.tensor(_folds([code for code, _ in shown], anchors)).repeat_interleave(torch.tensor(lengths))
    row_T, fold_T = row_T.to(states_Th.device), fold_T.to(states_Th.device)
    fits_T = row_T >= 0
    mean_h, scale_h = _moments(states_Th[fits_T].float(), row_T[fits_T])
    x_Th = (states_Th.float() - mean_h) / scale_h
    weight_Rh, bias_R = softmax_regression(x_Th[fits_T], row_T[fits_T], len(codes))
    logits_TR = x_Th.new_full((len(x_Th), len(codes)), float("-inf"))
    for fold in range(FOLDS):
        kept_T, out_T = fits_T & (fold_T != fold), (fold_T == fold).nonzero()
        rows, row_K = row_T[kept_T].unique(return_inverse=True)
        start = weight_Rh[rows], bias_R[rows]
        logits_TR[out_T, rows] = F.linear(x_Th[out_T[:, 0]], *softmax_regression(x_Th[kept_T], row_K, len(rows), start))
    taken_T = F.linear(x_Th, weight_Rh, bias_R).argmax(-1)
    doubts, scored = {}, {}
    texts = {code: [example for of, example in shown if of == code] for code in codes[codes[0] == TEMPLATE :]}
    of_codes = logits_TR.cpu().split([sum(len(example.ids) for example in of) for of in texts.values()])
    for (code, of), logits in zip(texts.items(), of_codes, strict=True):
        scored[code] = Scored(logits, torch.tensor([[len(example.ids), example.has_template] for example in of]))
        most = codes[int(taken_T[row_T == codes.index(code)].mode().values)]
        if most != code:
            doubts[code] = most
    weight_Rh = weight_Rh / scale_h
    bias_R = bias_R - weight_Rh @ mean_h
    return FittedGate(layer, begin, codes, list(anchors), weight_Rh.cpu(), bias_R.cpu(), scored, doubts)


def _rows(example: Example, row: int, has_template: bool) -> torch.Tensor:
    """The row that each token of a text is fitted to: its language's, that of a chat template (0), or none (-1)."""
    place_T = torch.arange(len(example.ids))
    around = 0 if example.has_template and has_template else -1
    row_T = torch.where((place_T >= example.start) & (place_T < example.end), row, around)
    row_T[: min(example.start, 1)] = -1
    return row_T


def _folds(codes: Sequence[str], anchors: Sequence[str]) -> list[int]:
    """The fold that leaves out each text: an anchor's all together, those of another language in turn."""
    turns = {code: cycle(range(FOLDS)) for code in codes}
    turns |= {code: repeat(number % FOLDS) for number, code in enumerate(anchors)}  # type: ignore[misc]
    return [next(turns[code]) for code in codes]


def report_of(gate: FittedGate, classes: Mapping[str, int], settings: GateSettings) -> GateReport:
    """The bias that keeps the promise for these classes, and where texts go at it."""
    later = {code for code in gate.codes if classes.get(code, 0)}

    def texts(codes: Iterable[str], plain: bool = False) -> Texts:
        return Texts.of({code: gate.scored[code] for code in codes}, gate, classes, settings, plain)

    unseen = sorted({*gate.anchors} - later)
    new = [code for code in gate.scored if code not in gate.anchors and code in later]
    old = [code for code in gate.scored if code not in gate.anchors and code not in later]
    of_unseen, of_old, of_new = texts(unseen), texts(old), texts(new)

    def astray(shares: Mapping[str, float]) -> list[str]:
        return [code for code, share in shares.items() if share > settings.unseen_share]

    def holds(bias: float) -> bool:
        return len(astray(of_unseen.shares(bias))) <= most_named(unseen) and not astray(of_old.shares(bias))

    low, bias = -_WIDEST, _WIDEST
    while bias - low > 0.02:
        middle = (low + bias) / 2
        low, bias = (low, middle) if holds(middle) else (middle, bias)
    at_bias = of_unseen.shares(bias)
    named = {}
    for code in astray(at_bias):
        mean_R = gate.scored[code].logits_TR.float().mean(0)
        named[code] = max(sorted(later), key=lambda other: mean_R[gate.codes.index(other)])
    unrelated = [code for code in unseen if code not in named]
    new_N, *other_N = (texts(codes, True).sums(bias, MARKS[0]).amax(-1) for codes in (new, unrelated, old))
    leave = leave_of(new_N, *other_N)
    home = home_of(texts(new, True).least(bias), texts([*unrelated, *old], True).sums(bias, 64).amax(-1))
    margin = _quantile(of_new.sums(bias).amax(-1), 0.1)
    return GateReport(
        gate.layer, settings.unseen_share, bias, home, at_bias, named, of_new.shares(bias), of_old.shares(bias),
        margin, gate.doubts, leave,
    )  # fmt: skip


def home_of(new_N: torch.Tensor, other_N: torch.Tensor) -> float:
    """`home`, in nats, from the least evidence of each text of new languages, and that of each of others at 64
    tokens."""
    return min(0.0, _quantile(new_N, 0.02), _quantile(other_N, 0.9))


def leave_of(new_N: torch.Tensor, *other_N: torch.Tensor) -> float:
    """`leave`, in nats, from the evidence of each text of new languages at 16 tokens, and that of texts of other
    languages, in groups, of which the one with the most counts."""
    weakest, most = _quantile(new_N, 0.1), max((_quantile(of, 0.99) for of in other_N if len(of)), default=0.0)
    return max(0.0, min(weakest, (weakest + most) / 2))


def _quantile(sums_N: torch.Tensor, share: float) -> float:
    """The evidence below which this share of texts is, in nats; 0 without texts."""
    return float(sums_N.float().quantile(share)) / UNIT if len(sums_N) else 0.0


def by_class(codes: Sequence[str], classes: Mapping[str, int]) -> tuple[torch.Tensor, list[int]]:
    """The rows in the order of their classes, and how many each class has."""
    numbers = [classes.get(code, 0) for code in codes]
    order = sorted(range(len(codes)), key=numbers.__getitem__)
    return torch.tensor(order), [numbers.count(number) for number in range(max(numbers) + 1)]


def _moments(x_Th: torch.Tensor, row_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`[h]` each: mean and standard deviation of features, each row's tokens together counting alike."""
    share_T = _shares(row_T)
    mean_h = share_T @ x_Th
    scale_h = (share_T @ (x_Th - mean_h).square()).sqrt()
    return mean_h, scale_h.clamp(min=1e-3 * float(scale_h.max()) + 1e-12)


def _shares(row_T: torch.Tensor) -> torch.Tensor:
    """What each token counts, where each row counts alike."""
    counts_R = torch.bincount(row_T)
    return 1 / (counts_R[row_T] * (counts_R > 0).sum())


def softmax_regression(
    x_Th: torch.Tensor, row_T: torch.Tensor, rows: int, start: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`[R, h]` and `[R]`: the weights and biases that tell the rows of standardised features apart, each row counting
    alike. From a `start`, those of a like fit, half of the steps are enough."""
    share_T = _shares(row_T)
    with torch.enable_grad():
        given = (x_Th.new_zeros(rows, x_Th.shape[1]), x_Th.new_zeros(rows)) if start is None else start
        weight_Rh, bias_R = (part.clone().requires_grad_() for part in given)
        steps = ITERATIONS if start is None else ITERATIONS // 2
        options: Any = {"max_iter": steps, "history_size": 10, "line_search_fn": "strong_wolfe"}
        fit = torch.optim.LBFGS([weight_Rh, bias_R], **options)

        def loss() -> torch.Tensor:
            fit.zero_grad()
            of_tokens = F.cross_entropy(F.linear(x_Th, weight_Rh, bias_R), row_T, reduction="none")
            total = (of_tokens * share_T).sum() + PENALTY / 2 * weight_Rh.square().sum()
            total.backward()
            return total

        fit.step(loss)  # type: ignore[arg-type]
    return weight_Rh.detach(), bias_R.detach()


def _read(model: Any, examples: Sequence[Example], begin: int | None, layers: Sequence[int]) -> dict[int, torch.Tensor]:
    """By layer, the inputs of the FFN at the tokens of all examples, `[T, h]`, as the base alone computes them."""
    by_layer: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}

    def receive(layer: int, states_Th: torch.Tensor) -> None:
        if layer in by_layer:
            by_layer[layer].append(states_Th.half() if states_Th.abs().max() < 6e4 else states_Th)

    before = [] if begin is None else [begin]
    # Texts of like lengths together, so that there is little padding.
    order = sorted(range(len(examples)), key=lambda number: len(examples[number].ids))
    rows = [[*before, *examples[number].ids] for number in order]
    batches = padded_batches(rows, lambda group, row: (len(group) + 1) * len(row) <= _BATCH)
    base = model.use_expert(0) if hasattr(model, "use_expert") else nullcontext()
    with base, token_bar("read text for the gate", {"": batches}) as bar:
        read_inputs(model, batches, receive, bar, layers[-1])
    back = sorted(range(len(order)), key=order.__getitem__)
    states = {layer: torch.cat(parts).split([len(row) for row in rows]) for layer, parts in by_layer.items()}
    return {layer: torch.cat([of[number][len(before) :] for number in back]) for layer, of in states.items()}

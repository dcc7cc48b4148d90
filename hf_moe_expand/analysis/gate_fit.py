"""Fits the gate that knows what is not a new language: softmax regression over languages, on frozen hidden states.

A gate in layer l reads the FFN's input x. It has a row w_c and a bias b_c for each language c,

    W, b = argmin  mean over languages of mean over tokens of  - log softmax(W x + b)[language]  +  lambda / 2 |W|^2

(x standardised, lambda = 0.003; convex, so that the start does not matter). What the gate makes of the rows stands in
`modeling/language_gate.py`. Class 0 holds the languages of the base's own text and *anchors*, a little text of many
languages that nobody trains on: a text in a language that no row knows is then more like one of many than like the few
new ones, and goes home. Where there is a chat template, the words that it puts around a message have a row too, which
is evidence for no class: every chat begins at home, and its messages alone decide.

A bias, which the rows of new languages lose, keeps a promise: anchors are left out of the fit in turn, a third of them
at a time, and of each one new experts take at most `unseen_share` of the tokens. An anchor of which they take more is a
near relative of a new language and is named; at most a tenth of the anchors may be. The smallest such bias is taken.

The layer is one of the last three of the first third: earlier ones know words, these know languages (docs/gates.md). Of
those that keep the promise and let new text pass, it is the one with the largest

    (share of new text that passes) * (1 - 0.3 * layer / layers),

the second factor for what experts from this layer on can learn.

Shape suffixes: T tokens, h hidden size, R languages, E later classes, M texts, S tokens of a text.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm

from ..core.errors import InputError
from ..modeling.language_gate import TEMPLATE, classes_of_sums, token_evidence, window_sums
from .gate_text import Example, held_out
from .reading import padded_batches, read_inputs
from .settings import GateSettings

PENALTY = 0.003  # of the squared weights of standardised features
ITERATIONS = 30
FOLDS = 3
POSITIONS = (8, 32)
LEARNED_LESS = 0.3  # what experts lose for each layer below the gate, as a share of all layers
_CANDIDATES = 3
_MOST_NAMED, _PASSING = 0.1, 0.1
_WIDEST = 16.0  # nats
_BATCH = 16


@dataclass(frozen=True)
class FittedGate:
    """A gate's rows for all languages, before classes and bias are known.

    Attributes:
        layer: the layer whose FFN's input it reads.
        codes: the languages, in the order of the rows.
        weight_Rh, bias_R: the rows.
        left_out: for each anchor, the logits `[T, R]` of its tokens by the fit without it (its fold's rows are minus
            infinity), and the lengths of its texts and their beginnings before the language's own tokens.
    """

    layer: int
    codes: list[str]
    weight_Rh: torch.Tensor
    bias_R: torch.Tensor
    left_out: dict[str, "Scored"]


@dataclass(frozen=True)
class Scored:
    """The logits `[T, R]` of a language's texts, one after the other, `[M, 3]` each text's length, the first of the
    language's own tokens, and the end of these, and whether the first row is the chat template's."""

    logits_TR: torch.Tensor
    spans_M3: torch.Tensor
    has_template: bool

    @classmethod
    def of(cls, examples: Sequence[Example], logits_TR: torch.Tensor, codes: Sequence[str]) -> "Scored":
        spans = [[len(example.ids), example.start, example.end] for example in examples]
        return cls(logits_TR, torch.tensor(spans), codes[0] == TEMPLATE)

    def shares(
        self, order: torch.Tensor, sizes: Sequence[int], bias: float, settings: GateSettings
    ) -> dict[Any, float]:
        """The share of the language's own tokens that new experts take: of all (key 0), of each text's first ones, and
        of its texts as a whole, judged by their end (key `"end"`).

        Args:
            order: the rows by class; `sizes` of each class.
        """
        lengths = self.spans_M3[:, 0].tolist()
        is_new = torch.arange(len(order)) >= sizes[0]
        logits_TR = self.logits_TR.float()[:, order] - bias * is_new
        evidence_TE = token_evidence(logits_TR, sizes, settings.bound, self.has_template)
        evidence_MSE = pad_sequence(list(evidence_TE.split(lengths)), batch_first=True)
        place_S = torch.arange(evidence_MSE.shape[1])
        text_MS, own_MS = place_S < self.spans_M3[:, :1], place_S >= self.spans_M3[:, 1:2]
        own_MS &= place_S < self.spans_M3[:, 2:]
        starts_MS = (place_S == 0).expand_as(text_MS)
        called_MS = classes_of_sums(window_sums(evidence_MSE, text_MS, starts_MS, settings.window)) > 0
        first_MS = own_MS.cumsum(1)
        shares: dict[Any, float] = {0: _share(called_MS, own_MS)}
        shares |= {n: _share(called_MS, own_MS & (first_MS <= n)) for n in POSITIONS}
        last_M1 = self.spans_M3[:, 2:] - 1
        return shares | {"end": float(called_MS.gather(1, last_M1).float().mean())}


def _share(called_MS: torch.Tensor, counted_MS: torch.Tensor) -> float:
    return float((called_MS & counted_MS).sum() / counted_MS.sum())


@dataclass(frozen=True)
class GateReport:
    """Where tokens go by a fitted gate: shares of tokens that new experts take.

    Attributes:
        layer: the gate's layer.
        unseen_share: the promise.
        bias: the bias that keeps it, in nats.
        unseen: each anchor language, when it is left out of the fit.
        named: anchor languages outside the promise, each with the new language that it is taken for.
        new: each new language, on text that is left out of the fit: of all tokens (key 0), of the first ones of a text
            (`POSITIONS`), and of texts judged by their end (`"end"`).
        home: the base's own languages, on their text.
        doubts: languages most of whose text the gate takes for another one.
    """

    layer: int
    unseen_share: float
    bias: float
    unseen: dict[str, float]
    named: dict[str, str]
    new: dict[str, dict[Any, float]]
    home: dict[str, float]
    doubts: dict[str, str] = field(default_factory=dict)

    @property
    def passing(self) -> float:
        """The share of new text that passes, the mean over languages."""
        return sum(shares[0] for shares in self.new.values()) / len(self.new)

    @property
    def holds(self) -> bool:
        """Whether no more anchors are outside the promise than may be, and new text passes."""
        return len(self.named) <= most_named(self.unseen) and max(shares[0] for shares in self.new.values()) >= _PASSING

    def lines(self) -> list[str]:
        """The lines that the command line prints."""
        shown = [code for code in self.unseen if code not in self.named]
        worst = sorted(shown, key=lambda code: -self.unseen[code])[:3]
        mean = sum(self.unseen[code] for code in shown) / max(len(shown), 1)
        lines = [
            f"gate               in layer {self.layer}, for it and all later layers",
            f"unseen languages   {100 * mean:.1f} % of their tokens go to new experts, left out of the fit in turn "
            f"({len(shown)} languages; most: {', '.join(f'{code} {100 * self.unseen[code]:.1f} %' for code in worst)})",
        ]
        lines += [
            f"{code:<18} is taken for {other}: {100 * self.unseen[code]:.1f} % of its tokens went to new experts when "
            "the gate had not seen it; outside the promise"
            for code, other in self.named.items()
        ]
        if self.home:
            home_shares = ", ".join(f"{code} {100 * share:.1f} %" for code, share in self.home.items())
            lines.append(f"old languages      {home_shares} of their tokens go to new experts")
        for code, shares in self.new.items():
            first_shares = ", ".join(f"of the first {n}: {100 * shares[n]:.0f} %" for n in POSITIONS)
            lines.append(
                f"{code:<18} {100 * shares[0]:.0f} % of its tokens go to new experts ({first_shares}); "
                f"{100 * shares['end']:.0f} % of its texts, judged by their end"
            )
        lines += [f"{code:<18} its text looks like {other}: check it" for code, other in self.doubts.items()]
        return lines


@torch.no_grad()
def fit_gate(
    model: Any,
    examples: Mapping[str, Sequence[Example]],
    classes: Mapping[str, int],
    anchors: Sequence[str],
    settings: GateSettings,
    layers: Sequence[int],
) -> tuple[FittedGate, GateReport]:
    """The gate of a model, dense or expanded, and where it sends tokens.

    Args:
        examples: text of each language.
        classes: the class of each language; 0 for anchors too.
        anchors: the languages that are left out of the fit in turn.
        layers: the layers in which it may stand.

    Raises:
        InputError: no layer keeps the promise and lets new text pass; the message gives the best one's figures.
    """
    model.eval()
    order = sorted(examples, key=lambda code: classes[code])
    new = [code for code in order if classes[code]]
    fitted = {code: held_out(examples[code])[0] if classes[code] else list(examples[code]) for code in order}
    scored = {code: held_out(examples[code])[1] for code in new}
    codes = ([TEMPLATE] if any(e.has_template for of in fitted.values() for e in of) else []) + order
    tried: list[tuple[FittedGate, GateReport]] = []
    with tqdm(total=len(examples) + len(new) + len(layers), desc="fit the gate", unit="step") as bar:
        states = {code: _read(model, fitted[code], layers, bar) for code in order}
        held = {code: _read(model, scored[code], layers, bar) for code in new}
        for layer in layers:
            texts = {code: (fitted[code], of_layers.pop(layer)) for code, of_layers in states.items()}
            gate = _fitted(layer, codes, texts, anchors)
            of_new = {code: (scored[code], of_layers.pop(layer)) for code, of_layers in held.items()}
            tried.append((gate, report_of(gate, {**dict.fromkeys(codes, 0), **classes}, settings, texts, of_new)))
            bar.update()
    count = model.config.get_text_config(decoder=True).num_hidden_layers

    def worth(of: tuple[FittedGate, GateReport]) -> float:
        return of[1].passing * (1 - LEARNED_LESS * of[0].layer / count)

    best = max(tried, key=lambda of: (of[1].holds, worth(of)))
    if not best[1].holds:
        report = best[1]
        raise InputError(
            f"gates: none of the layers {', '.join(map(str, layers))} keeps unseen_share {settings.unseen_share:g} and "
            f"lets new text pass: in the best, layer {report.layer}, {100 * report.passing:.1f} % of a new language's "
            f"tokens reach new experts, and {len(report.named)} of {len(report.unseen)} unseen languages go astray. "
            "Raise unseen_share, or read more text of the new languages (tokens); the base may not tell them from its "
            "own."
        )
    return best


def most_named(anchors: Collection[str]) -> int:
    """How many anchors may be outside the promise."""
    return max(1, int(_MOST_NAMED * len(anchors)))


_Texts = Mapping[str, tuple[Sequence[Example], torch.Tensor]]


def candidates(layers: Sequence[int], count: int) -> list[int]:
    """The layers in which the gate is tried: the last ones of the first third of `count` that are among `layers`."""
    early = [layer for layer in layers if 3 * layer < count]
    return early[-_CANDIDATES:] or list(layers[:1])


def _fitted(layer: int, codes: list[str], texts: _Texts, anchors: Sequence[str]) -> FittedGate:
    parts = {code: _marked(*of_code) for code, of_code in texts.items()}
    if codes[0] == TEMPLATE:
        parts[TEMPLATE] = torch.cat([_marked(*of_code, of_template=True) for of_code in texts.values()])
    left_out: dict[str, Scored] = {}
    for fold in filter(None, (anchors[start::FOLDS] for start in range(FOLDS))):
        rows = [number for number, code in enumerate(codes) if code not in fold]
        weight, bias = _regression([parts[codes[row]] for row in rows])
        for code in fold:
            examples, states_Th = texts[code]
            logits_TR = torch.full((len(states_Th), len(codes)), float("-inf"))
            logits_TR[:, rows] = (states_Th.float() @ weight.T + bias).cpu()
            left_out[code] = Scored.of(examples, logits_TR, codes)
    weight, bias = _regression([parts[code] for code in codes])
    return FittedGate(layer, codes, weight.cpu(), bias.cpu(), left_out)


def report_of(
    gate: FittedGate, classes: Mapping[str, int], settings: GateSettings, texts: _Texts | None = None,
    held: _Texts | None = None,
) -> GateReport:  # fmt: skip
    """The bias that keeps the promise for these classes, and where tokens go at it.

    Args:
        texts: the text that was fitted on, by language, with its hidden states in the gate's layer.
        held: the same of new languages, left out of the fit.
    """
    order, sizes = by_class(gate.codes, classes)
    home = {code for code in gate.left_out if not classes.get(code, 0)}

    def unseen(bias: float) -> dict[str, float]:
        return {code: gate.left_out[code].shares(order, sizes, bias, settings)[0] for code in sorted(home)}

    def holds(shares: Mapping[str, float]) -> bool:
        return sum(share > settings.unseen_share for share in shares.values()) <= most_named(shares)

    low, high = -_WIDEST, _WIDEST
    while high - low > 0.02:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(unseen(middle)) else (middle, high)
    at_bias = unseen(high)

    def scored(examples: Sequence[Example], states_Th: torch.Tensor) -> Scored:
        logits_TR = (states_Th.float() @ gate.weight_Rh.T.to(states_Th.device)).cpu() + gate.bias_R
        return Scored.of(examples, logits_TR, gate.codes)

    named = {}
    for code, share in at_bias.items():
        if share > settings.unseen_share:
            mean_R = gate.left_out[code].logits_TR.float().mean(0)
            named[code] = max((c for c in gate.codes if classes.get(c, 0)), key=lambda c: mean_R[gate.codes.index(c)])
    old, doubts = {}, {}
    for code, of_code in (texts or {}).items():
        if not classes.get(code, 0) and code not in gate.left_out:
            old[code] = scored(*of_code).shares(order, sizes, high, settings)[0]
        most = gate.codes[int(scored(*of_code).logits_TR.argmax(-1).mode().values)]
        if most != code:
            doubts[code] = most
    new = {code: scored(*of_code).shares(order, sizes, high, settings) for code, of_code in (held or {}).items()}
    return GateReport(gate.layer, settings.unseen_share, high, at_bias, named, new, old, doubts)


def by_class(codes: Sequence[str], classes: Mapping[str, int]) -> tuple[torch.Tensor, list[int]]:
    """The rows in the order of their classes, and how many each class has."""
    numbers = [classes.get(code, 0) for code in codes]
    order = sorted(range(len(codes)), key=numbers.__getitem__)
    return torch.tensor(order), [numbers.count(number) for number in range(max(numbers) + 1)]


def _marked(examples: Sequence[Example], states_Th: torch.Tensor, of_template: bool = False) -> torch.Tensor:
    """The states of the languages' own tokens or, with `of_template`, of those of a chat template around them."""
    marks = [
        (example.start <= place < example.end)
        if not of_template
        else example.has_template and not example.start <= place < example.end
        for example in examples
        for place in range(len(example.ids))
    ]
    return states_Th[torch.tensor(marks, device=states_Th.device)]


def _regression(parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """`[R, h]` and `[R]`: the rows that tell the parts apart, each part counting alike."""
    x_Th = torch.cat(list(parts)).float()
    row_T = torch.cat([torch.full((len(part),), row) for row, part in enumerate(parts)]).to(x_Th.device)
    share_T = torch.cat([torch.full((len(part),), 1 / (len(part) * len(parts))) for part in parts]).to(x_Th.device)
    return softmax_regression(x_Th, row_T, share_T, len(parts))


def softmax_regression(
    x_Th: torch.Tensor, row_T: torch.Tensor, share_T: torch.Tensor, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`[R, h]` and `[R]`: the weights and biases that tell `row_T` from `x_Th`, each token with its share."""
    mean_h = (share_T[:, None] * x_Th).sum(0)
    scale_h = (share_T[:, None] * (x_Th - mean_h).square()).sum(0).sqrt()
    scale_h = scale_h.clamp(min=1e-3 * float(scale_h.max()) + 1e-12)
    x_Th = (x_Th - mean_h) / scale_h
    with torch.enable_grad():
        weight_Rh = torch.zeros(rows, x_Th.shape[1], device=x_Th.device, requires_grad=True)
        bias_R = torch.zeros(rows, device=x_Th.device, requires_grad=True)
        options: Any = {"max_iter": ITERATIONS, "history_size": 10, "line_search_fn": "strong_wolfe"}
        fit = torch.optim.LBFGS([weight_Rh, bias_R], **options)

        def loss() -> torch.Tensor:
            fit.zero_grad()
            of_tokens = F.cross_entropy(F.linear(x_Th, weight_Rh, bias_R), row_T, reduction="none")
            total = (of_tokens * share_T).sum() + PENALTY / 2 * weight_Rh.square().sum()
            total.backward()
            return total

        fit.step(loss)  # type: ignore[arg-type]
    weight_Rh = weight_Rh.detach() / scale_h
    return weight_Rh, bias_R.detach() - weight_Rh @ mean_h


class _Enough(Exception):
    """Ends a forward pass once the last layer that is read has been read."""


def _read(model: Any, examples: Sequence[Example], layers: Sequence[int], bar: Any) -> dict[int, torch.Tensor]:
    """By layer, the inputs of the FFN at the tokens of all examples, `[T, h]`, as the base alone computes them."""
    by_layer: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}

    def receive(layer: int, states_Th: torch.Tensor) -> None:
        if layer in by_layer:
            by_layer[layer].append(states_Th.half() if states_Th.abs().max() < 6e4 else states_Th)
        if layer == layers[-1]:
            raise _Enough

    # Texts of like lengths together, so that there is little padding.
    order = sorted(range(len(examples)), key=lambda number: len(examples[number].ids))
    sizes = [len(examples[number].ids) for number in order]
    for batch in padded_batches([examples[number].ids for number in order], _BATCH):
        with suppress(_Enough), model.use_expert(0) if hasattr(model, "use_expert") else nullcontext():
            read_inputs(model, [batch], receive)
    bar.update()
    back = sorted(range(len(order)), key=order.__getitem__)
    pieces = {layer: torch.cat(states).split(sizes) for layer, states in by_layer.items()}
    return {layer: torch.cat([of[number] for number in back]) for layer, of in pieces.items()}

"""Fits gates that know what is not a new language: softmax regression over languages, on frozen hidden states.

A gate of layer l reads the FFN's input x. It has a row w_c and a bias b_c for each language c,

    W, b = argmin  mean over languages of mean over tokens of  - log softmax(W x + b)[language]  +  lambda / 2 |W|^2

(x standardised, lambda = 0.003; convex, so that the start does not matter). A token is evidence for class g, the
languages of expansion g, against class 0, the languages that stay home,

    e[g] = logsumexp over c in g (w_c x + b_c) - logsumexp over c in 0 (w_c x + b_c) - bias,

which a prefix gate bounds and adds up along the text (`modeling/prefix_gate.py`). Class 0 holds the languages of the
base's own text and *anchors*, a little text of many languages that nobody trains on: a text in a language that no row
knows is then more like one of many than like the few new ones, and goes home. Where there is a chat template, the words
that it puts before a message have a row of class 0 too, so that every chat begins at home.

The bias keeps a promise: anchors are left out of the fit in turn, a third of them at a time, and on average at most
`unseen_share` of the tokens of a language that the gate has not seen may go to new experts.

Shape suffixes: T tokens, h hidden size, R languages, C classes, E = C - 1, M texts, S tokens of a text.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm

from ..checkpoint.gates import Gates
from ..errors import InputError
from ..languages import TEMPLATE
from ..memory import device_memory
from ..modeling.prefix_gate import PrefixRule, running_sums
from .gate_text import Example, held_out
from .reading import padded_batches, read_inputs

PENALTY = 0.003  # of the squared weights of standardised features
ITERATIONS = 30
FOLDS = 3
POSITIONS = (8, 32, 128)
# A language that takes more than this part of all that unseen languages take is named and left out of the promise.
_OF_ALL, _MOST_NAMED = 0.5, 0.1
_WIDEST = 16.0  # nats
_OF_MEMORY, _BYTES = 1 / 3, 2**32  # hidden states that are held at once: a part of the memory, or bytes
_BATCH = 16


@dataclass(frozen=True)
class GateReport:
    """Where tokens go by fitted gates: shares of tokens that new experts take, means over the layers.

    Attributes:
        unseen_share: the promise.
        unseen: each anchor language, when it is left out of the fit.
        named: anchor languages outside the promise, each with the new language that it is taken for.
        new: each new language, on text that is left out of the fit, after the first tokens of `POSITIONS`; key 0: all.
        home: the base's own languages, on their text.
        doubts: languages most of whose text the gates take for another one.
    """

    unseen_share: float
    unseen: dict[str, float]
    named: dict[str, str]
    new: dict[str, dict[int, float]]
    home: dict[str, float]
    doubts: dict[str, str] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """The lines that the command line prints."""
        shown = [code for code in self.unseen if code not in self.named]
        worst = sorted(shown, key=lambda code: -self.unseen[code])[:3]
        mean = sum(self.unseen[code] for code in shown) / max(len(shown), 1)
        lines = [
            f"unseen languages   {100 * mean:.1f} % of their tokens go to new experts, left out of the fit in turn "
            f"({len(shown)} languages; most: {', '.join(f'{code} {100 * self.unseen[code]:.1f} %' for code in worst)})"
        ]
        lines += [
            f"{code:<18} is taken for {other}: {100 * self.unseen[code]:.0f} % of its tokens went to new experts when "
            "the gates had not seen it; outside the promise"
            for code, other in self.named.items()
        ]
        if self.home:
            home_shares = ", ".join(f"{code} {100 * share:.1f} %" for code, share in self.home.items())
            lines.append(f"old languages      {home_shares} of their tokens go to new experts")
        for code, shares in self.new.items():
            first_shares = ", ".join(f"of the first {n}: {100 * share:.0f} %" for n, share in shares.items() if n)
            lines.append(f"{code:<18} {100 * shares[0]:.0f} % of its tokens go to new experts ({first_shares})")
        lines += [f"{code:<18} its text looks like {other}: check it" for code, other in self.doubts.items()]
        return lines


@torch.no_grad()
def fit_rows(
    model: Any,
    examples: Mapping[str, Sequence[Example]],
    classes: Mapping[str, int],
    anchors: Sequence[str],
    rule: PrefixRule | None,
    unseen_share: float,
) -> tuple[Gates, GateReport]:
    """Gates of a model's expanded layers (all layers of a dense one), and where they send tokens.

    All text is read twice, by the base's experts alone and by an expansion's: until a gate is sure of a new language,
    the layers before it run the base, and where one errs, the layers after it must not follow.

    Args:
        examples: text of each language.
        classes: the class of each language; 0 for anchors too.
        anchors: the languages that are left out of the fit in turn.
        rule: None fits gates that judge single tokens.
    """
    model.eval()
    config = model.config.get_text_config(decoder=True)
    layers = list(model.expanded_ffns() if hasattr(model, "expanded_ffns") else range(config.num_hidden_layers))
    order = sorted(examples, key=lambda code: classes[code])  # rows by class
    new = [code for code in order if classes[code]]
    fitted = {code: held_out(examples[code])[0] if classes[code] else list(examples[code]) for code in order}
    again = {code: fitted[code] if classes[code] else fitted[code][::2] for code in order}
    scored = {code: held_out(examples[code])[1] for code in new}
    told = {code: code if classes[code] else new[number % len(new)] for number, code in enumerate(order)}
    template = {TEMPLATE: 0} if any(e.has_template for of in fitted.values() for e in of) else {}
    rows = template | {code: classes[code] for code in order}
    fit = _Fit(rows, list(anchors), rule, unseen_share)
    tokens = 2 * sum(len(e.ids) for of_language in examples.values() for e in of_language)
    room = _OF_MEMORY * (device_memory() or _BYTES / _OF_MEMORY)
    at_once = max(1, int(room / (4 * tokens * config.hidden_size)))
    results: dict[int, _OfLayer] = {}
    with tqdm(total=len(layers), desc="fit gates", unit="layer") as bar:
        for start in range(0, len(layers), at_once):
            chosen = layers[start : start + at_once]
            readings = [
                {code: _read(model, some[code], chosen, experts.get(code)) for code in some}
                for some, experts in ((fitted, {}), (again, told), (scored, told))
            ]
            for layer in chosen:
                results[layer] = fit.layer(*({code: of.pop(layer) for code, of in some.items()} for some in readings))
                bar.update()
    languages = [[code for code in rows if rows[code] == number] for number in range(fit.count)]
    weights = {(layer, "classifier.weight"): one.weight_Rh for layer, one in results.items()}
    biases = {(layer, "classifier.bias"): one.bias_R for layer, one in results.items()}
    return Gates(languages, weights | biases, rule), _report(list(results.values()), unseen_share)


@dataclass(frozen=True)
class _Text:
    """A language's texts in one layer: `states` has the tokens of all examples, one after the other."""

    examples: Sequence[Example]
    states_Th: torch.Tensor

    def _marked(self, belongs: Callable[[Example, int], bool]) -> torch.Tensor:
        marks = [belongs(example, place) for example in self.examples for place in range(len(example.ids))]
        return torch.tensor(marks, device=self.states_Th.device)

    @property
    def own_T(self) -> torch.Tensor:
        return self._marked(lambda example, place: example.start <= place < example.end)

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`[T, h]` each: the language's tokens, to the end of the text, and the template's before them."""
        own_T = self._marked(lambda example, place: place >= example.start)
        before_T = self._marked(lambda example, place: example.has_template and place < example.start)
        return self.states_Th[own_T], self.states_Th[before_T]

    def logits(self, weight_Rh: torch.Tensor, bias_R: torch.Tensor) -> torch.Tensor:
        """`[T, R]`, of the language's own tokens."""
        return self.states_Th[self.own_T].float() @ weight_Rh.T + bias_R


@dataclass(frozen=True)
class _OfLayer:
    weight_Rh: torch.Tensor
    bias_R: torch.Tensor
    unseen: dict[str, float]
    home: dict[str, float]
    new: dict[str, dict[int, float]]
    taken_for: dict[str, str]  # by language, the language whose row its text gets most
    nearest: dict[str, str]  # by anchor, the new language that its text is most like when it is left out


@dataclass(frozen=True)
class _Fit:
    """What the fits of all layers share; `rows` are the languages with their classes, in order."""

    rows: dict[str, int]
    anchors: list[str]
    rule: PrefixRule | None
    unseen_share: float

    @property
    def count(self) -> int:
        return max(self.rows.values()) + 1

    def layer(self, texts: Mapping[str, _Text], also: Mapping[str, _Text], held: Mapping[str, _Text]) -> _OfLayer:
        """The gate of one layer.

        Args:
            texts: each language's text, read by the base.
            also: the same, read by an expansion's experts.
            held: new languages' text that is left out of the fit, read by their experts.
        """
        halves = {code: [text.parts for text in (texts[code], also[code])] for code in texts}
        parts = {code: [own for own, _ in of_language] for code, of_language in halves.items()}
        if TEMPLATE in self.rows:
            parts = {TEMPLATE: [torch.cat([of[n][1] for of in halves.values()]) for n in (0, 1)]} | parts
        evidence: dict[str, torch.Tensor] = {}
        nearest: dict[str, str] = {}
        for fold in filter(None, (self.anchors[start::FOLDS] for start in range(FOLDS))):
            rows = {code: number for code, number in self.rows.items() if code not in fold}
            new = [row for row, number in enumerate(rows.values()) if number]
            weight, bias = self._regression({code: parts[code] for code in rows})
            for code in fold:
                evidence[code] = self._evidence(texts[code], weight, bias, rows)
                nearest[code] = list(rows)[new[int(texts[code].logits(weight, bias)[:, new].mean(0).argmax())]]
        weight, bias = self._regression(parts)
        shift, unseen = self._bias(evidence, texts)
        bias = bias - shift * torch.tensor(list(self.rows.values()), device=bias.device).gt(0)

        def shares(text: _Text) -> dict[int, float]:
            return self._called_new(self._evidence(text, weight, bias, self.rows), text, 0.0)

        def taken_for(text: _Text) -> str:
            best_T = text.logits(weight, bias).argmax(-1)
            return list(self.rows)[int(best_T.bincount(minlength=len(self.rows)).argmax())]

        home = [code for code in texts if not self.rows[code] and code not in self.anchors]
        return _OfLayer(
            weight.cpu(), bias.cpu(), unseen, {code: shares(texts[code])[0] for code in home},
            {code: shares(text) for code, text in held.items()},
            {code: taken_for(text) for code, text in texts.items()}, nearest,
        )  # fmt: skip

    def _regression(self, parts: Mapping[str, Sequence[torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        """`[R, h]` and `[R]`: the rows of the languages in `parts`, in their order."""
        x_Th = torch.cat([states for of_language in parts.values() for states in of_language]).float()
        of_T = [(row, len(s), len(of)) for row, of in enumerate(parts.values()) for s in of]
        row_T = torch.cat([torch.full((size,), row) for row, size, _ in of_T]).to(x_Th.device)
        # Languages count alike, and each reading of a language's text.
        share_T = torch.cat([torch.full((size,), 1 / (size * readings)) for _, size, readings in of_T]).to(x_Th.device)
        return softmax_regression(x_Th, row_T, share_T / len(parts), len(parts))

    def _evidence(self, text: _Text, weight: torch.Tensor, bias: torch.Tensor, rows: Mapping[str, int]) -> torch.Tensor:
        """`[T, E]`: each token's log-odds of each class against class 0."""
        logits_TR = text.states_Th.float() @ weight.T + bias
        numbers = torch.tensor(list(rows.values()), device=bias.device)
        of_classes = [logits_TR[:, numbers == number].logsumexp(-1) for number in range(self.count)]
        return torch.stack(of_classes[1:], -1) - of_classes[0].unsqueeze(-1)

    def _called_new(self, evidence_TE: torch.Tensor, text: _Text, bias: float) -> dict[int, float]:
        """The share of a language's own tokens that new experts take: of all (key 0), and of each text's first ones."""
        lengths = [len(example.ids) for example in text.examples]
        raw_MSE = pad_sequence(list((evidence_TE - bias).split(lengths)), batch_first=True)
        own_MS = pad_sequence(list(text.own_T.split(lengths)), batch_first=True)
        if self.rule is not None:
            bounded_MSE = self.rule.bound * (raw_MSE / self.rule.bound).tanh()  # padding stands behind the text
            raw_MSE = running_sums(bounded_MSE, torch.full_like(raw_MSE[..., 0], self.rule.decay))
        new_MS = (raw_MSE > 0).any(-1) & own_MS
        place_MS = own_MS.cumsum(1)
        shares = {0: float(new_MS.sum() / own_MS.sum())}
        return shares | {
            n: float((new_MS & (place_MS <= n)).sum() / (own_MS & (place_MS <= n)).sum()) for n in POSITIONS
        }

    def _bias(self, evidence: Mapping[str, torch.Tensor], texts: Mapping[str, _Text]) -> tuple[float, dict[str, float]]:
        """The smallest bias that keeps the promise, to a hundredth of a nat, and each language's share at it.

        A language that takes most of what all take is left out: it is a near relative of a new one."""
        named: list[str] = []

        def shares(bias: float) -> dict[str, float]:
            return {code: self._called_new(evidence_TE, texts[code], bias)[0] for code, evidence_TE in evidence.items()}

        while True:
            low, high = -_WIDEST, _WIDEST
            while high - low > 0.01:
                middle = (low + high) / 2
                of_promise = [share for code, share in shares(middle).items() if code not in named]
                holds = sum(of_promise) <= self.unseen_share * len(of_promise)
                low, high = (low, middle) if holds else (middle, high)
            unseen = shares(high)
            rest = {code: share for code, share in unseen.items() if code not in named}
            most = max(rest, key=rest.__getitem__, default="")
            if len(named) + 1 > _MOST_NAMED * len(unseen) or rest[most] <= _OF_ALL * sum(rest.values()):
                return high, unseen
            named.append(most)


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


def _read(model: Any, examples: Sequence[Example], layers: Sequence[int], language: str | None) -> dict[int, _Text]:
    """By layer, the examples with the inputs of the FFN, read by a language's experts or, without one, by the base's; a
    dense model has no others."""
    by_layer: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}

    def receive(layer: int, states_Th: torch.Tensor) -> None:
        if layer in by_layer:
            by_layer[layer].append(states_Th)

    # Texts of like lengths together, so that there is little padding.
    order = sorted(range(len(examples)), key=lambda number: len(examples[number].ids))
    sizes = [len(examples[number].ids) for number in order]
    experts: AbstractContextManager = nullcontext()
    if hasattr(model, "use_expert"):
        experts = model.use_expert(0) if language is None else model.use_languages(language)
    with experts:
        read_inputs(model, padded_batches([examples[number].ids for number in order], _BATCH), receive)
    back = sorted(range(len(order)), key=order.__getitem__)
    pieces = {layer: torch.cat(states).split(sizes) for layer, states in by_layer.items()}
    return {layer: _Text(examples, torch.cat([of[number] for number in back])) for layer, of in pieces.items()}


def _report(layers: Sequence[_OfLayer], unseen_share: float) -> GateReport:
    def mean(shares: Sequence[Mapping[Any, float]]) -> dict[Any, float]:
        return {key: sum(share[key] for share in shares) / len(shares) for key in shares[0]}

    unseen = mean([layer.unseen for layer in layers])
    new = {code: mean([layer.new[code] for layer in layers]) for code in layers[0].new}
    passing = max(shares[0] for shares in new.values())
    if passing < 0.1:
        raise InputError(
            f"gates: no bias keeps unseen_share {unseen_share:g} and lets new text pass: with it {100 * passing:.1f} % "
            "of a new language's tokens reach new experts, at most. Raise unseen_share, or give more text of the new "
            "languages; the base may not tell them from its own."
        )
    named = {
        code: max(new, key=lambda other: sum(layer.nearest[code] == other for layer in layers))
        for code, share in unseen.items()
        if share > 10 * unseen_share
    }
    doubts = {}
    for code in layers[0].taken_for:
        ((most, times),) = Counter(layer.taken_for[code] for layer in layers).most_common(1)
        if most != code and times > len(layers) / 2:
            doubts[code] = most
    return GateReport(unseen_share, unseen, named, new, mean([layer.home for layer in layers]), doubts)

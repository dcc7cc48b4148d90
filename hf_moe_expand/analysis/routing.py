"""Measures how the routers treat each language: which experts they choose, how clearly, and whether the choice matters.

Shape suffixes as in `modeling/routing.py`; M experts of a neighbouring layer, B of both.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..checkpoint.records import History
from ..core.errors import InputError
from ..core.languages import check_old_and_new
from ..core.progress import Bar
from ..core.schema import checked
from ..data.pairs import IGNORED, SentencePair
from ..data.sources import Pair
from ..inference.models import longest_block, model_name
from ..modeling import ExpandedFFN, LayerRouting, Routing, stack_sizes
from ..planning.results import RoutingResult
from .reading import TextBatch, padded_batches, progress, side_batches, token_blocks

# Logits of a forward pass on a GPU and on a CPU, whatever the batch size: 2 GB and 0.25 GB in float32.
_MOST_LOGITS = (2**29, 2**26)


class ExpertUse:
    """Running sums over one language's tokens in one layer, in float64 or whole numbers."""

    def __init__(self, num_experts: int, language_class: int) -> None:
        self.language_class = language_class
        self.top1_N = torch.zeros(num_experts, dtype=torch.long)
        self.weights_N = torch.zeros(num_experts, dtype=torch.float64)
        self.expert_0_score = 0.0
        self.classed_right: int | None = None

    def add(self, routing: LayerRouting) -> None:
        weights_TN = routing.weight_of_each_expert().double()
        self.top1_N += weights_TN.argmax(-1).bincount(minlength=len(self.top1_N)).cpu()
        self.weights_N += weights_TN.sum(0).cpu()
        self.expert_0_score += routing.scored_logits.softmax(-1)[:, 0].double().sum().item()
        if (class_T := routing.token_classes) is not None:
            self.classed_right = (self.classed_right or 0) + int((class_T == self.language_class).sum())


class LargestCorrelation:
    """Largest correlation over tokens of expert weights in two layers, `max_{i,j} cor(u_ti, u_tj)` (Elbayad Eq. 9)."""

    def __init__(self, num_experts: int, num_next: int) -> None:
        both = num_experts + num_next
        self.num_experts, self.tokens = num_experts, 0
        self.sums_B = torch.zeros(both, dtype=torch.float64)
        self.products_BB = torch.zeros(both, both, dtype=torch.float64)

    def add(self, use_TN: torch.Tensor, next_TM: torch.Tensor) -> None:
        both_TB = torch.cat([use_TN, next_TM], dim=-1)
        self.tokens += len(both_TB)
        self.sums_B += both_TB.sum(0).cpu()
        self.products_BB += (both_TB.T @ both_TB).cpu()

    def value(self) -> float | None:
        """The correlation; None if all weights of a layer are constant."""
        mean_B = self.sums_B / self.tokens
        covariance_BB = self.products_BB / self.tokens - torch.outer(mean_B, mean_B)
        variance_B = covariance_BB.diagonal()
        varies_B = variance_B > 1e-12  # rounding leaves a constant a tiny variance
        correlation_BB = covariance_BB / torch.outer(variance_B, variance_B).sqrt()
        here, there = slice(self.num_experts), slice(self.num_experts, None)
        varying = correlation_BB[here, there][varies_B[here]][:, varies_B[there]]
        return varying.max().clamp(-1, 1).item() if varying.numel() else None


def experts_for_half(top1_N: Sequence[int]) -> int:
    """E_50%: the smallest number of experts that have half of the tokens or more (Elbayad et al. section 6)."""
    covered = accumulate(sorted(top1_N, reverse=True))
    return 1 + sum(2 * tokens < sum(top1_N) for tokens in covered)


def random_experts(seed: int, device: torch.device) -> Callable[[torch.Tensor, int], torch.Tensor]:
    """A function for `RoutingRequest.change_logits`: K experts drawn uniformly for each token keep their router logits,
    so that the router's scores combine them."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(logits_TN: torch.Tensor, top_k: int) -> torch.Tensor:
        drawn_TK = torch.rand(logits_TN.shape, generator=generator, device=device).topk(top_k, dim=-1).indices
        others_TN = torch.ones_like(logits_TN, dtype=torch.bool).scatter_(1, drawn_TK, False)
        return logits_TN.masked_fill(others_TN, float("-inf"))

    return draw


def random_routing(model: Any, seed: int) -> AbstractContextManager:
    """Inside, an expanded model sends every token to uniformly drawn experts, classifiers or not."""
    return model.routing_control.asking(change_logits=random_experts(seed, model.device))


def language_classes(config: Any, languages: Iterable[str], old: Sequence[str], new: Sequence[str]) -> dict[str, int]:
    """The class of each language: 0 for the base model's languages, g for those that expansion g added.

    Args:
        config: configuration of an expanded model; its history names its languages.
        old, new: languages to put into class 0 and into the last class, whether or not the history names them.

    Raises:
        InputError: the class of a language is not known, or a language is given both as old and as new.
    """
    check_old_and_new(old, new)
    history = History.of(config)
    known = history.classes | dict.fromkeys(old, 0) | dict.fromkeys(new, max(len(history), 1))
    if unknown := sorted(set(languages) - set(known)):
        raise InputError(f"{', '.join(unknown)}: not a known language of this model; name it in old or in new.")
    return {language: known[language] for language in languages}


@torch.no_grad()
@checked
def measure_routing(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    texts: Mapping[str, Iterable[Any]],
    *,
    tokens: int = 20_000,
    block_size: int = 1024,
    batch_size: int = 8,
    old: Sequence[str] = (),
    new: Sequence[str] = (),
    random_seeds: Sequence[int] = (0,),
    by_direction: bool = False,
) -> RoutingResult:
    """Measures how an expanded model routes each language's text: MoE-LPR's, DMoE's and Elbayad et al.'s analyses.

    Shares, E_50% and co-location describe the routing at inference: the K highest scores, renormalised, and in a layer
    with a classifier only the experts that a token's class allows. Expert 0's score is the router's own softmax.
    Co-location pools all languages. Random routing draws K experts for each token and layer and combines them by their
    router scores (Elbayad et al. section D.3); in a layer with K experts or fewer, it only bypasses the classifier, and
    where no layer has more experts or a classifier, it is the router's own.

    Runs exactly `tokens` tokens of each language, padding excluded, once, and once for each of `random_seeds`. Of an
    encoder-decoder, the encoder's layers are measured on `tokens` tokens of the language as a source, the decoder's on
    `tokens` tokens of it as a target, whose perplexity is reported; no co-location is measured from the encoder's last
    layer to the decoder's first, which see other tokens.

    Args:
        model: an expanded model with a language-model head.
        texts: documents of each language; for an encoder-decoder, sentence pairs to and from it.
        old, new: languages to count as old and as new, whether or not the model's history names them.
        random_seeds: seeds of random routing, whose perplexities are averaged.
        by_direction: of an encoder-decoder, measure each direction of translation, such as `en-el`, in place of each
            language (Elbayad et al. section D.1): the encoder on its sources, the decoder on its targets. A direction
            has the later class of its two languages.

    Raises:
        InputError: the model has no experts, a language has fewer tokens than `tokens` or is neither old nor new.
    """
    ffns: dict[int, ExpandedFFN] = model.expanded_ffns() if hasattr(model, "expanded_ffns") else {}  # type: ignore[operator]
    if not ffns:
        raise InputError(f"{type(model).__name__}: no layer has experts; give an expanded model.")
    ffns = {layer: ffn for layer, ffn in ffns.items() if ffn.router is not None}
    if not ffns:
        raise InputError(
            f"{type(model).__name__}: a token of a new language takes its exclusive expert alone: there is no routing "
            "to measure."
        )
    if not texts:
        raise InputError("No language was given.")
    if tokens < 1 or block_size < 2 or batch_size < 1 or not random_seeds:
        raise InputError("tokens and batch_size must be at least 1, block_size at least 2; random_seeds needs a seed.")
    encoder_layers = stack_sizes(model.config).get("encoder", 0)
    sides: dict[str, Pair] = {code: (code, code) for code in texts}  # the languages of encoder and decoder
    measured = texts
    if by_direction:
        sides, measured = _directions(texts, encoder_layers)
    of_language = language_classes(model.config, dict.fromkeys(chain(*sides.values())), old, new)
    by_side = {name: [of_language[code] for code in languages] for name, languages in sides.items()}
    classes = {name: max(of_sides) for name, of_sides in by_side.items()}
    model.eval()
    block_size = min(block_size, longest_block(model.config) or block_size)
    use = {
        name: {layer: ExpertUse(len(ffn.experts), of_sides[layer >= encoder_layers]) for layer, ffn in ffns.items()}
        for name, of_sides in by_side.items()
    }
    neighbours = {
        (here, there): LargestCorrelation(len(ffns[here].experts), len(ffns[there].experts))
        for here, there in pairwise(sorted(ffns))
    }
    # Tokenises every language before the first is measured, so that a lack of text is reported at once.
    batches = {
        code: side_batches(sides[code], measured[code], tokenizer, tokens, batch_size, model)
        if encoder_layers
        else _bounded_batches(code, measured[code], tokenizer, tokens, block_size, batch_size, model)
        for code in classes
    }
    drawn = list(random_seeds) if has_choice(model.config) else []  # else there is nothing to draw
    bar = progress(model, len(classes) * (1 + len(drawn)), tokens)
    perplexity, random_perplexity = {}, {}
    for language in classes:
        bar.set_description(f"routing of {model_name(model)}: {language}")

        def record(routing: Routing, batch: TextBatch, language: str = language) -> None:
            text = {
                layer: _only(layer_routing, batch.measured_in(layer, encoder_layers))
                for layer, layer_routing in routing.layers.items()
            }
            for layer, layer_routing in text.items():
                use[language][layer].add(layer_routing)
            for (here, there), correlation in neighbours.items():
                if not here < encoder_layers <= there:
                    correlation.add(*(text[layer].weight_of_each_expert().double() for layer in (here, there)))

        perplexity[language] = _perplexity(model, batches[language], record, bar)
        random = []
        for seed in drawn:
            with random_routing(model, seed):
                random.append(_perplexity(model, batches[language], None, bar))
        random_perplexity[language] = sum(random) / len(random) if random else perplexity[language]
    bar.close()
    layers = sorted(ffns)

    def by_layer(value: Callable[[ExpertUse], Any]) -> dict[str, list]:
        return {language: [value(use[language][layer]) for layer in layers] for language in classes}

    top1 = by_layer(lambda counts: (counts.top1_N.double() / tokens).tolist())
    return RoutingResult(
        classes=classes,
        tokens=tokens,
        layers=layers,
        top1_share=top1,
        weight_share=by_layer(lambda counts: (counts.weights_N / tokens).tolist()),
        expert_0_score=by_layer(lambda counts: counts.expert_0_score / tokens),
        experts_for_half=by_layer(lambda counts: experts_for_half(counts.top1_N.tolist())),
        classifier_accuracy=by_layer(
            lambda counts: None if counts.classed_right is None else counts.classed_right / tokens
        ),
        similarity=[_cosines([top1[language][index] for language in classes]) for index in range(len(layers))],
        colocation=[correlation.value() if correlation.tokens else None for correlation in neighbours.values()],
        perplexity=perplexity,
        random_perplexity=random_perplexity,
        random_seeds=list(random_seeds),
        has_choice=has_choice(model.config),
        encoder_layers=encoder_layers,
    )


def _directions(
    texts: Mapping[str, Iterable[SentencePair]], encoder_layers: int
) -> tuple[dict[str, Pair], dict[str, Any]]:
    """The directions of the pairs by name, and the pairs of each, from the text of the first language that has them: a
    pair stands in the text of both of its languages."""
    if not encoder_layers:
        raise InputError("by_direction: the model is a decoder, which reads no sentence pairs: leave it out.")
    found: dict[Pair, list[SentencePair]] = {}
    of_language: dict[Pair, str] = {}
    for code, pairs in texts.items():
        for pair in pairs:
            if of_language.setdefault(pair.direction, code) == code:
                found.setdefault(pair.direction, []).append(pair)
    names = {"-".join(direction): direction for direction in found}
    return names, {name: found[direction] for name, direction in names.items()}


def has_choice(config: Any) -> bool:
    """Whether some token of an expanded model can be without an expert: with K experts or fewer in each layer, no gate
    and no classifier, every token goes to all experts of its layer."""
    routed = [count - config.declares("shares_expert_0") for count in config.num_experts_per_layer if count > 1]
    chosen = bool(config.classifier_layers) or config.declares("judges")
    return chosen or max(routed) > config.router_top_k


def nearest_experts(
    model: Any,
    tokenizer: Any,
    texts: Mapping[str, Iterable[Any]],
    *,
    tokens: int = 100_000,
    block_size: int = 1024,
    batch_size: int = 8,
) -> dict[int, int]:
    """For each expanded layer, the expert to which `texts` are routed most: the one with the largest share of the
    weights that experts are combined with, mean over languages; the first one on a tie.

    Args:
        model: an expanded `...ForCausalLM`.
        texts: documents of each language; `tokens` tokens of each are measured.
    """
    routing = measure_routing(
        model, tokenizer, texts, tokens=tokens, block_size=block_size, batch_size=batch_size, new=list(texts)
    )
    by_layer = zip(routing.layers, zip(*routing.weight_share.values(), strict=True), strict=True)
    return {layer: int(torch.tensor(shares).sum(0).argmax()) for layer, shares in by_layer}


def _only(routing: LayerRouting, mask_T: torch.Tensor) -> LayerRouting:
    """The routing of the tokens that `mask_T` marks."""
    tensors: dict[str, Any] = {name: value for name, value in vars(routing).items() if isinstance(value, torch.Tensor)}
    return replace(routing, **{name: value[mask_T] for name, value in tensors.items()})


def _bounded_batches(
    language: str, texts: Iterable[str], tokenizer: Any, tokens: int, block_size: int, batch_size: int, model: Any
) -> list[TextBatch]:
    """Batches of blocks of similar length, so that hardly anything is padding, and with a bounded number of logits."""
    blocks = sorted(token_blocks(language, texts, tokenizer, tokens, block_size), key=len, reverse=True)
    if len(blocks[0]) < 2:
        raise InputError(f"Language {language!r}: no token follows another within a document and block.")
    most = _MOST_LOGITS[model.device.type == "cpu"] // model.get_output_embeddings().weight.shape[0]
    batches: list[list[list[int]]] = []
    for block in blocks:
        rows = batches[-1] if batches else []
        full = not rows or len(rows) == batch_size or (len(rows) + 1) * len(rows[0]) > most
        if full or 2 * len(block) < len(rows[0]):  # of two blocks of unlike length, each runs by itself
            batches.append([])
        batches[-1].append(block)
    return [batch for rows in batches for batch in padded_batches(rows, batch_size)]


def _perplexity(
    model: Any, batches: Iterable[TextBatch], receive: Callable[[Routing, TextBatch], None] | None, bar: Bar
) -> float:
    """Perplexity over the batches' targets; `receive` gets each pass's routing; `bar` counts the measured tokens."""
    nats, count = 0.0, 0
    for batch in batches:
        batch = batch.to(model.device)
        capture: Any = model.capture_routing() if receive else nullcontext()
        with capture as routing:
            logits = model(**batch.inputs, use_cache=False).logits
        if receive:
            receive(routing, batch)
        targets = batch.targets
        predicted = logits if model.config.is_encoder_decoder else logits[:, :-1]
        for row, target in zip(predicted, targets, strict=True):  # row by row: the softmax takes as much memory again
            nats += F.cross_entropy(row.float(), target, reduction="sum").item()
        count += int((targets != IGNORED).sum())
        bar.update(batch.tokens)
    return math.exp(min(nats / count, 700.0))


def _cosines(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    units = F.normalize(torch.tensor(rows, dtype=torch.float64), dim=-1)
    return (units @ units.T).clamp(max=1).tolist()

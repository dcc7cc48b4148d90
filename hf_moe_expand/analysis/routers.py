"""Measures how the routers treat each language: which experts they choose, how clearly, and whether the choice matters
(MoE-LPR's, DMoE's and Elbayad et al.'s analyses).

Shares, E_50% and co-location describe the routing at inference: the K highest scores, renormalised, and with a
classifier only the experts that a token's class allows. Expert 0's score is the router's own softmax. Co-location pools
all languages. Random routing combines K experts, drawn for each token and layer, by their router scores (Elbayad et al.
section D.3), and bypasses classifiers. Of an encoder-decoder, the encoder's layers are measured on a language's tokens
as a source, the decoder's on its tokens as a target.

Shape suffixes as in `modeling/routing.py`; M experts of a neighbouring layer, B of both.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..checkpoint.facts import Facts
from ..core.errors import InputError
from ..core.languages import check_old_and_new
from ..core.progress import Bar
from ..core.schema import checked
from ..data.pairs import IGNORED, SentencePair
from ..data.rows import Pair
from ..evaluation.perplexity import batch_nats
from ..inference.models import model_name
from ..modeling import ExpandedFFN, LayerRouting, Routing
from ..planning.results import RoutingResult
from .reading import TextBatch, language_batches, token_bar
from .settings import AnalysisSettings

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
    """For `RoutingRequest.change_logits`: K experts drawn uniformly for each token keep their router logits."""
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
    """The class of each language: 0 for the base model's languages, g for those that expansion g added; those in `old`
    and `new` have class 0 and the last one, whether or not the model's history names them.

    Raises:
        InputError: the class of a language is not known, or a language is given both as old and as new.
    """
    check_old_and_new(old, new)
    history = Facts(config).history
    known = history.classes | dict.fromkeys(old, 0) | dict.fromkeys(new, max(len(history), 1))
    if unknown := sorted(set(languages) - set(known)):
        raise InputError(f"{', '.join(unknown)}: not a known language of this model; name it in old or in new.")
    return {language: known[language] for language in languages}


class _Sums:
    """Running sums over the routing of all languages, each with the class of its tokens in an encoder and in a
    decoder."""

    def __init__(self, ffns: Mapping[int, ExpandedFFN], classes: Mapping[str, Sequence[int]], encoder_layers: int):
        self.encoder_layers, self.layers = encoder_layers, sorted(ffns)
        sizes = {layer: len(ffns[layer].experts) for layer in self.layers}
        self.use = {
            name: {layer: ExpertUse(size, of[layer >= encoder_layers]) for layer, size in sizes.items()}
            for name, of in classes.items()
        }
        self.neighbours = {
            (here, there): LargestCorrelation(sizes[here], sizes[there]) for here, there in pairwise(self.layers)
        }

    def add(self, language: str, routing: Routing, batch: TextBatch) -> None:
        """Adds the routing of a pass, at the tokens that are measured."""
        text: dict[int, LayerRouting] = {}
        for layer, of_layer in routing.layers.items():
            mask_T = batch.measured_in(layer, self.encoder_layers)
            tensors: Any = {name: of[mask_T] for name, of in vars(of_layer).items() if isinstance(of, torch.Tensor)}
            text[layer] = replace(of_layer, **tensors)
        for layer, of_layer in text.items():
            self.use[language][layer].add(of_layer)
        for (here, there), correlation in self.neighbours.items():
            if not here < self.encoder_layers <= there:
                correlation.add(*(text[layer].weight_of_each_expert().double() for layer in (here, there)))

    def fields(self, tokens: int) -> dict[str, Any]:
        """The fields of a `RoutingResult`, with `tokens` tokens of each language."""

        def by_layer(value: Callable[[ExpertUse], Any]) -> dict[str, list]:
            return {language: [value(of[layer]) for layer in self.layers] for language, of in self.use.items()}

        top1 = by_layer(lambda use: (use.top1_N.double() / tokens).tolist())
        in_layers = [torch.tensor(rows, dtype=torch.float64) for rows in zip(*top1.values(), strict=True)]
        directions = [F.normalize(rows, dim=-1) for rows in in_layers]
        return {
            "tokens": tokens,
            "layers": self.layers,
            "top1_share": top1,
            "weight_share": by_layer(lambda use: (use.weights_N / tokens).tolist()),
            "expert_0_score": by_layer(lambda use: use.expert_0_score / tokens),
            "experts_for_half": by_layer(lambda use: experts_for_half(use.top1_N.tolist())),
            "classifier_accuracy": by_layer(
                lambda use: None if use.classed_right is None else use.classed_right / tokens
            ),
            "similarity": [(units @ units.T).clamp(max=1).tolist() for units in directions],
            "colocation": [one.value() if one.tokens else None for one in self.neighbours.values()],
            "encoder_layers": self.encoder_layers,
        }


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
    """Measures how an expanded model routes each language's text; the module says how.

    Args:
        texts: documents of each language; for an encoder-decoder, sentence pairs to and from it.
        tokens: tokens of each language, padding excluded, that run once, and once for each of `random_seeds`.
        old, new: languages to count as old and as new, whether or not the model's history names them.
        by_direction: of an encoder-decoder, measure each direction of translation, such as `en-el`, in place of each
            language (Elbayad et al. section D.1). A direction has the later class of its two languages.

    Raises:
        InputError: the model has no experts, a language has fewer tokens than `tokens` or is neither old nor new.
    """
    ffns = _with_routers(model)
    if not texts or not random_seeds:
        raise InputError("No language was given." if not texts else "random_seeds is empty: give a seed.")
    AnalysisSettings(tokens=tokens, block_size=block_size, batch_size=batch_size)  # refuses numbers out of range
    encoder_layers = Facts(model.config).encoder_layers
    sides: dict[str, Pair] = {code: (code, code) for code in texts}  # the languages of encoder and decoder
    if by_direction:
        sides, texts = _directions(texts, encoder_layers)
    of_language = language_classes(model.config, dict.fromkeys(chain(*sides.values())), old, new)
    classes = {name: [of_language[code] for code in languages] for name, languages in sides.items()}
    model.eval()
    sums = _Sums(ffns, classes, encoder_layers)
    network: Any = model
    most = _MOST_LOGITS[network.device.type == "cpu"] // network.get_output_embeddings().weight.shape[0]
    batches = language_batches(model, tokenizer, texts, tokens, block_size, batch_size, sides, most)
    for name, of in batches.items():
        if not any((batch.targets != IGNORED).any() for batch in of):
            raise InputError(f"Language {name!r}: no token follows another within a document and block.")
    perplexity, random = {}, {}
    seeds = random_seeds if has_choice(model.config) else []
    with token_bar("routing", batches, 1 + len(seeds)) as bar:
        for language, of_text in batches.items():
            bar.set_description(f"routing of {model_name(model)}: {language}")
            perplexity[language] = _perplexity(model, of_text, partial(sums.add, language), bar)
            drawn = []
            for seed in seeds:
                with random_routing(model, seed):
                    drawn.append(_perplexity(model, of_text, None, bar))
            random[language] = sum(drawn) / len(drawn) if drawn else perplexity[language]
    return RoutingResult(
        classes={name: max(of_sides) for name, of_sides in classes.items()}, perplexity=perplexity,
        random_perplexity=random, random_seeds=list(random_seeds), has_choice=has_choice(model.config),
        **sums.fields(tokens),
    )  # fmt: skip


def _with_routers(model: Any) -> dict[int, ExpandedFFN]:
    expanded = model.expanded_ffns() if hasattr(model, "expanded_ffns") else {}
    ffns = {layer: ffn for layer, ffn in expanded.items() if ffn.router is not None}
    if not ffns:
        why = "a token of a new language takes its exclusive expert alone: there is no routing to measure"
        why = why if expanded else "no layer has experts; give an expanded model"
        raise InputError(f"{type(model).__name__}: {why}.")
    return ffns


def _directions(
    texts: Mapping[str, Iterable[SentencePair]], encoder_layers: int
) -> tuple[dict[str, Pair], dict[str, Any]]:
    """The directions of the pairs by name, and the pairs of each. A pair stands in the text of both of its languages:
    the first of them counts."""
    if not encoder_layers:
        raise InputError("by_direction: the model is a decoder, which reads no sentence pairs: leave it out.")
    found: dict[Pair, list[SentencePair]] = {}
    of_language: dict[Pair, str] = {}
    for code, pairs in texts.items():
        for pair in pairs:
            if of_language.setdefault(pair.direction, code) == code:
                found.setdefault(pair.direction, []).append(pair)
    return {"-".join(pair): pair for pair in found}, {"-".join(pair): of for pair, of in found.items()}


def has_choice(config: Any) -> bool:
    """Whether some token of an expanded model can be without an expert: some layer has more than K, a gate or a
    classifier."""
    facts, shared = Facts(config), config.declares("shares_expert_0")
    chosen = bool(facts.classifiers) or config.declares("judges")
    return chosen or max(facts.counts[layer] - shared for layer in facts.grown) > config.router_top_k


def nearest_experts(
    model: Any,
    tokenizer: Any,
    texts: Mapping[str, Iterable[Any]],
    *,
    tokens: int = 100_000,
    block_size: int = 1024,
    batch_size: int = 8,
) -> dict[int, int]:
    """For each expanded layer, the expert with the largest share of the weights on `texts`, mean over languages,
    `tokens` of each; the first one on a tie."""
    routing = measure_routing(
        model, tokenizer, texts, tokens=tokens, block_size=block_size, batch_size=batch_size, new=list(texts)
    )
    by_layer = zip(routing.layers, zip(*routing.weight_share.values(), strict=True), strict=True)
    return {layer: int(torch.tensor(shares).sum(0).argmax()) for layer, shares in by_layer}


def _perplexity(
    model: Any, batches: Iterable[TextBatch], receive: Callable[[Routing, TextBatch], None] | None, bar: Bar
) -> float:
    """Perplexity over the batches' targets; `receive` gets each pass's routing; `bar` counts the measured tokens."""
    nats, count = 0.0, 0
    for batch in batches:
        capture: Any = model.capture_routing() if receive else nullcontext()
        with capture as routing:
            nats += batch_nats(model, batch.targets, **batch.inputs).sum().item()
        if receive:
            receive(routing, batch)
        count += int((batch.targets != IGNORED).sum())
        bar.update(batch.tokens)
    return math.exp(min(nats / count, 700.0))

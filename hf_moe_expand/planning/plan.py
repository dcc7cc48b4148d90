"""The plan: a small JSON file with the experts and classifiers of each layer."""

from collections.abc import Iterable, Mapping
from operator import gt
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ..core.errors import InputError
from ..core.languages import LanguageCode, check_old_and_new
from ..core.layer_names import counts_in_words, layer_name, layers_in_words
from ..core.schema import Count, Flag, Text, Whole, read
from .grouping import check_groups
from .results import JsonFile

MOST_EXPERTS = 65_536
# Why a feature of a plan does not stand beside another one.
REFUSED = {
    ("exclusive", "encoder-decoder"): "a sentence of an encoder-decoder and its translation have a language each",
    ("exclusive", "dmoe"): "all experts of a DMoE train",
    ("encoder-decoder", "dmoe"): "each expert of a DMoE learns the text of one language group, but a pair of sentences "
    "has two languages",
    ("classifiers", "dmoe"): "a plan with groups has no classifiers; its routers learn the groups",
    ("dmoe", "grown"): "a DMoE does not grow by plans: add a language to it with `train adapt`",
}


class Plan(JsonFile):
    """The experts and classifiers of each layer. A plan with groups gives a DMoE model, any other a LayerMoE model.

    Attributes:
        method: the registered name of the method that made the plan, or any other word for a plan of your own.
        experts_per_layer: experts of each layer, expert 0 counted; a layer with 1 stays dense.
        top_k: active experts of a token.
        settings: inputs of the counts (total, seed, shape, similarities).
        groups: language groups of a DMoE model: expert `e` of every expanded layer belongs to group `e`.
        grows_from: `experts_per_layer` of the model that a further expansion grows; empty for a dense model.
        exclusive: whether tokens of the new languages take the new experts alone, without expert 0.
        modules: what a language has of its own: `ffn`, the FFN (None too), `all` linear maps of a layer, those of its
            `attention`, or maps as PEFT names them.
        rank: of low-rank updates of these; None for whole copies.
        encoder_layers: number of an encoder-decoder's first layers, its encoder's; 0 for a decoder.
    """

    kind = "a plan"

    method: Text
    experts_per_layer: Annotated[list[Count], Field(min_length=1)]
    classifier_layers: list[Whole] = Field(default_factory=list)
    top_k: Count = 2
    old: list[LanguageCode] = Field(default_factory=list)
    new: list[LanguageCode] = Field(default_factory=list)
    settings: dict[str, Any] = Field(default_factory=dict)
    groups: list[list[LanguageCode]] = Field(default_factory=list)
    grows_from: list[Count] = Field(default_factory=list)
    exclusive: Flag = False
    modules: Text | None = None
    rank: Count | None = None
    encoder_layers: Whole = 0

    if TYPE_CHECKING:

        def __init__(self, method: str, experts_per_layer: list[int], **others: Any) -> None: ...

    def model_post_init(self, _: Any) -> None:
        counts, before, encoder = self.experts_per_layer, self.grows_from, self.encoder_layers
        no_router = [n for n in self.classifier_layers if not 0 <= n < len(counts) or counts[n] < 2]
        fewer = len(before) not in (0, len(counts)) or any(map(gt, before, counts))
        dense = [n for n, count in enumerate(before) if not fewer and count == 1 < counts[n] and not self.groups]
        in_pairs = REFUSED["exclusive", "encoder-decoder" if encoder else "dmoe"]
        _refuse({
            "method is empty: name the plan's method, or give a word of your own.": not self.method.strip(),
            f"experts_per_layer: a model may have at most {MOST_EXPERTS:,} experts.": sum(counts) > MOST_EXPERTS,
            "experts_per_layer is 1 everywhere: no layer would be expanded.": max(counts) < 2,
            f"classifier_layers names layer {self._names(no_router)}, which has no router in this plan.": no_router,
            f"encoder_layers is {encoder}: must be at least 0 and below {len(counts)}, the number of all layers.":
                not 0 <= encoder < len(counts),
            f"exclusive: a token of a new language takes its expert alone, but {in_pairs}: leave exclusive out.":
                self.exclusive and (encoder or self.groups),
            "modules and rank are for a plan with exclusive alone: leave them out.":
                (self.modules or self.rank) and not self.exclusive,
            f"groups: {REFUSED['encoder-decoder', 'dmoe']}. Use another method, such as `plan layer-moe`.":
                encoder and self.groups,
            "classifier_layers names a layer twice; name each layer once.":
                len({*self.classifier_layers}) < len(self.classifier_layers),
            "grows_from: experts_per_layer must not give a layer fewer experts than grows_from.": fewer,
            f"grows_from: layer {self._names(dense)} is dense in the model that grows, so it gets no experts: "
            "experts_per_layer must be 1 there.": dense,
            "groups: a dmoe plan must name the languages of each expert.": self.method == "dmoe" and not self.groups,
        })  # fmt: skip
        check_old_and_new(self.old, self.new)
        if self.groups:
            self._check_groups()

    def _check_groups(self) -> None:
        """Refuses groups that are not those of a DMoE."""
        check_groups(self.groups)
        alone = [code for code in self.new if not any(code in group for group in self.groups)]
        odd = [n for n, count in enumerate(self.experts_per_layer) if count not in (1, len(self.groups))]
        _refuse({
            f"new: {', '.join(alone)} stands in no group, so that no expert learns it.": alone,
            f"experts_per_layer: layer {self._names(odd)} must have 1 expert, or {len(self.groups)}, one for each "
            "group.": odd,
            f"classifier_layers: {REFUSED['classifiers', 'dmoe']}.": self.classifier_layers,
            "grows_from: a plan with groups is for a dense model; `train adapt` adds a language.": self.grows_from,
        })  # fmt: skip

    def checked(self) -> "Plan":
        """This plan, after all checks of a new one: its lists may have been changed since it was made."""
        return read(Plan, dict(self), "plan")

    def name_of(self, layer: int) -> str:
        """The name of a layer: its number, or its number in the encoder or decoder."""
        return layer_name(layer, self.encoder_layers)

    def _names(self, layers: Iterable[int]) -> str:
        return ", ".join(map(self.name_of, layers))

    @property
    def total_experts(self) -> int:
        """Experts of all layers, expert 0 counted."""
        return sum(self.experts_per_layer)

    @property
    def counts_in_words(self) -> str:
        """The number of experts of each layer."""
        return counts_in_words(self.experts_per_layer, self.encoder_layers)

    @property
    def classifiers_in_words(self) -> str:
        """The layers with a classifier, in words."""
        return layers_in_words(self.classifier_layers, self.encoder_layers) or "none"


def _refuse(mistakes: Mapping[str, Any]) -> None:
    """Refuses the first of these mistakes that was made."""
    for sentence, was_made in mistakes.items():
        if was_made:
            raise InputError(sentence)

"""The plan: a small JSON file with the experts and classifiers of each layer."""

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
        classifier_layers: layers with a routing classifier.
        top_k: active experts of a token.
        old, new: the languages.
        settings: inputs of the counts (total, seed, shape, similarities).
        groups: language groups of a DMoE model: expert `e` of every expanded layer belongs to group `e`.
        grows_from: `experts_per_layer` of the model that a further expansion grows; empty for a dense model.
        exclusive: whether tokens of the new languages take the new experts alone, without expert 0.
        modules: what a language has of its own: `ffn`, the FFN (None too), `all` linear maps of a layer, those of its
            `attention`, or maps as PEFT names them.
        rank: of low-rank updates of these; None for whole copies.
        encoder_layers: number of an encoder-decoder's first layers, its encoder's; 0 for a decoder.

    Raises:
        InputError: a value has another type, a language code is unknown, or the plan contradicts itself.
    """

    kind = "a plan"
    gone = ("prefix_gate",)  # of gates in all layers

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
        counts = self.experts_per_layer
        if not self.method.strip():
            raise InputError("method is empty: name the plan's method, or give a word of your own.")
        if sum(counts) > MOST_EXPERTS:
            raise InputError(f"experts_per_layer: a model may have at most {MOST_EXPERTS:,} experts in all.")
        if max(counts) < 2:
            raise InputError("experts_per_layer is 1 everywhere: no layer would be expanded.")
        for layer in self.classifier_layers:
            if not 0 <= layer < len(counts) or counts[layer] < 2:
                raise InputError(
                    f"classifier_layers names layer {self.name_of(layer)}, which has no router in this plan."
                )
        if not 0 <= self.encoder_layers < len(counts):
            raise InputError(
                f"encoder_layers is {self.encoder_layers}: must be at least 0 and below {len(counts)}, the number of "
                "all layers."
            )
        if self.exclusive and (self.encoder_layers or self.groups):
            reason = REFUSED["exclusive", "encoder-decoder" if self.encoder_layers else "dmoe"]
            raise InputError(
                f"exclusive: a token of a new language takes its expert alone, but {reason}: leave exclusive out."
            )
        if (self.modules or self.rank) and not self.exclusive:
            raise InputError(
                f"{'modules' if self.modules else 'rank'}: is for a plan with exclusive alone: leave it out."
            )
        if self.encoder_layers and self.groups:
            raise InputError(
                f"groups: {REFUSED['encoder-decoder', 'dmoe']}. Use another method, such as `plan layer-moe`."
            )
        if len(set(self.classifier_layers)) < len(self.classifier_layers):
            raise InputError("classifier_layers names a layer twice; name each layer once.")
        grown = len(self.grows_from) in (0, len(counts))
        if not grown or any(before > count for before, count in zip(self.grows_from, counts, strict=False)):
            raise InputError("grows_from: experts_per_layer must not give a layer fewer experts than grows_from.")
        for layer, before in enumerate(self.grows_from):
            if before == 1 < counts[layer] and not self.groups:
                raise InputError(
                    f"grows_from: layer {self.name_of(layer)} is dense in the model that grows, so it gets no experts: "
                    f"experts_per_layer must be 1 there, not {counts[layer]}."
                )
        check_old_and_new(self.old, self.new)
        if self.method == "dmoe" and not self.groups:
            raise InputError("groups: a dmoe plan must name the languages of each expert.")
        if not self.groups:
            return
        check_groups(self.groups)
        if alone := [code for code in self.new if not any(code in group for group in self.groups)]:
            raise InputError(f"new: {', '.join(alone)} stands in no group, so that no expert learns it.")
        for layer, count in enumerate(self.experts_per_layer):
            if count not in (1, len(self.groups)):
                raise InputError(
                    f"experts_per_layer gives layer {self.name_of(layer)} {count} experts, but there are "
                    f"{len(self.groups)} groups: an expanded layer needs one expert for each group."
                )
        if self.classifier_layers:
            raise InputError(f"classifier_layers: {REFUSED['classifiers', 'dmoe']}.")
        if self.grows_from:
            raise InputError("grows_from: a plan with groups is for a dense model; `train adapt` adds a language.")

    def checked(self) -> "Plan":
        """This plan, after all checks of a new one: its lists may have been changed since it was made."""
        return read(Plan, dict(self), "plan")

    def name_of(self, layer: int) -> str:
        """The name of a layer: its number, or its number in the encoder or decoder."""
        return layer_name(layer, self.encoder_layers)

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

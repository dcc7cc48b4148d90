"""Results of the analyses: numbers, and their JSON files."""

from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field

from ..core.errors import InputError
from ..core.jsonfile import read_json, write_json
from ..core.layer_names import layer_name
from ..core.schema import Flag, Number, Schema, Text, Whole, changed, checked, read

_SELDOM = ("encoder_layers", "exclusive", "modules", "rank", "similarity_at", "likeness_of_steps")


class JsonFile(Schema):
    """Values that are a JSON file, which messages call `kind`, such as "a plan"."""

    kind: ClassVar[str]

    def save(self, path: str | Path) -> None:
        """Writes the file, without fields of encoders, exclusive experts and earlier steps where there are none."""
        fields = self.model_dump()
        unset = [name for name in _SELDOM if not fields.get(name)]
        write_json(path, {name: value for name, value in fields.items() if name not in unset})

    to_json = save

    @classmethod
    @checked
    def load(cls, path: str | Path) -> Self:
        """Reads the file."""
        return read(cls, read_json(path, cls.kind), f"{path}: not {cls.kind}")

    from_json = load


class Result(JsonFile):
    """The result of an analysis. `by_layer` names the fields that are lists with one entry a layer, or mappings to such
    lists; the first is a list."""

    by_layer: ClassVar[tuple[str, ...]]

    def model_post_init(self, _: Any) -> None:
        layers = len(getattr(self, self.by_layer[0]))
        for name in self.by_layer:
            value = getattr(self, name)
            lists = {f"{name}.{key}": of for key, of in value.items()} if isinstance(value, dict) else {name: value}
            for place, values in lists.items():
                if values is not None and len(values) != layers:
                    raise InputError(f"{place} has {len(values)} entries for {layers} layers.")

    def of_layers(self, layers: Sequence[int]) -> Self:
        """The values in these layers alone."""

        def some(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: some(values) for name, values in value.items()}
            return None if value is None else [value[layer] for layer in layers]

        return changed(self, **{name: some(getattr(self, name)) for name in self.by_layer})


class SimilarityResult(Result):
    """Similarities of languages in each layer; every list has one entry a layer.

    Attributes:
        pairs: for each pair of languages (key such as `"el-en"`, new ones first), the mean cosine over all pairs of
            their hidden states; a language with itself too (`"en-en"`). Files of earlier releases lack pairs of old
            languages.
        new_new: mean over pairs of new languages; None with a single new language.
        new_old: mean over pairs of a new and an old language; None without an old language.
        similarity: `(new_old + new_new) / 2`, or that of the two which is there.
        encoder_layers: an encoder-decoder's first layers, its encoder's; 0 for a decoder.
    """

    kind = "a similarity analysis"
    by_layer = ("similarity", "new_old", "new_new", "pairs")

    old: list[Text]
    new: list[Text]
    tokens: Whole
    pairs: dict[Text, list[Number]]
    new_new: list[Number] | None
    new_old: list[Number] | None
    similarity: list[Number]
    encoder_layers: Whole = 0

    @classmethod
    def from_pairs(
        cls,
        pairs: Mapping[str, Sequence[float]],
        old: Sequence[str],
        new: Sequence[str],
        tokens: int,
        encoder_layers: int = 0,
    ) -> "SimilarityResult":
        """Layer similarities from the pairs' similarities (LayerMoE Eq. 9; plain means, as the authors computed)."""

        def mean(lists: Sequence[Sequence[float]]) -> list[float] | None:
            return [sum(values) / len(lists) for values in zip(*lists, strict=True)] if lists else None

        new_old = mean([pairs[f"{a}-{b}"] for a in new for b in old])
        new_new = mean([pairs[f"{a}-{b}"] for a, b in combinations(new, 2)])
        both = mean([values for values in (new_old, new_new) if values is not None])
        if both is None:
            raise InputError("Similarity needs two languages: name an old and a new one, or two new ones.")
        return cls(
            old=list(old), new=list(new), tokens=tokens, pairs={name: list(values) for name, values in pairs.items()},
            new_new=new_new, new_old=new_old, similarity=both, encoder_layers=encoder_layers,
        )  # fmt: skip

    def between(self, languages: Sequence[str]) -> list[list[float]]:
        """`[languages, languages]`: the similarity of two languages, mean over layers; 1 with itself."""

        def mean(one: str, other: str) -> float:
            values = self.pairs.get(f"{one}-{other}") or self.pairs.get(f"{other}-{one}")
            if values is None:
                raise InputError(f"The analysis lacks the pair {one}-{other}: run `analyze similarity` again.")
            return sum(values) / len(values)

        return [[1.0 if a == b else mean(a, b) for b in languages] for a in languages]


class DeviationResult(Result):
    """How far fine-tuning on each language moves the FFNs, and how similar the changes of two languages are (DMoE).

    Attributes:
        deviation: L2 norm of the change of each layer's FFN weights, mean over languages; `by_language` of each.
        similarity: `[languages, languages]`, cosine between two languages' changes of the FFN weights of `layers`.
        similarity_at: `similarity` of each earlier step that was compared as well (text in JSON).
        likeness_of_steps: for each language `[steps, steps]`, cosine between its changes after two of these steps, the
            last step of all included; empty without earlier steps.
    """

    kind = "a deviation analysis"
    by_layer = ("deviation", "by_language")

    languages: list[Text]
    deviation: list[Number]
    by_language: dict[Text, list[Number]]
    similarity: list[list[Number]]
    layers: list[Whole]
    steps: Whole
    learning_rate: Number
    batch_size: Whole
    block_size: Whole
    seed: Whole
    similarity_at: dict[Text, list[list[Number]]] = Field({})
    likeness_of_steps: dict[Text, list[list[Number]]] = Field({})


NO_CHOICE = (
    "No router of this model can leave an expert out: every token goes to all experts of its layer, since no layer has "
    "more than top-k of them. The shares by expert then say only which of them weighs more, and random experts are the "
    "router's own. Plan more experts in a layer, or a smaller top-k, to let routers choose."
)


class RoutingResult(Result):
    """How the routers of an expanded model route the text of each language. Lists by layer have one entry for each of
    `layers`, the expanded ones.

    Attributes:
        classes: class of each language: 0 for the base model's languages, g for those that expansion g added. Where
            directions of translation were measured, such as `en-el`, they stand in the place of languages.
        tokens: tokens measured of each language.
        top1_share: `[language][layer][expert]`, share of the tokens whose largest weight is the expert's.
        weight_share: `[language][layer][expert]`, mean of the weights that experts are combined with.
        expert_0_score: `[language][layer]`, mean of the router's score of expert 0.
        experts_for_half: `[language][layer]`, E_50%: smallest number of experts with half of the tokens by top-1.
        classifier_accuracy: `[language][layer]`, share of tokens that the classifier puts into their language's class;
            None without a classifier.
        similarity: `[layer]`, `[languages, languages]` in the order of `classes`: cosine of their rows of `top1_share`.
        colocation: for each layer but the last, the largest correlation between the weight of one of its experts and
            that of an expert of the next layer; None if no weight varies.
        perplexity: of each language, within blocks; `random_perplexity` under random routing, mean over `random_seeds`.
        has_choice: whether some router can leave an expert out; without that, random routing is the router's own.
        encoder_layers: an encoder-decoder's first layers, its encoder's, dense ones included; 0 for a decoder.
    """

    kind = "a routing analysis"
    by_layer = (
        "layers", "top1_share", "weight_share", "expert_0_score", "experts_for_half", "classifier_accuracy",
        "similarity",
    )  # fmt: skip

    classes: dict[Text, Whole]
    tokens: Whole
    layers: list[Whole]
    top1_share: dict[Text, list[list[Number]]]
    weight_share: dict[Text, list[list[Number]]]
    expert_0_score: dict[Text, list[Number]]
    experts_for_half: dict[Text, list[Whole]]
    classifier_accuracy: dict[Text, list[Number | None]]
    similarity: list[list[list[Number]]]
    colocation: list[Number | None]
    perplexity: dict[Text, Number]
    random_perplexity: dict[Text, Number]
    random_seeds: list[Whole]
    has_choice: Flag = True
    encoder_layers: Whole = 0

    def model_post_init(self, _: Any) -> None:
        super().model_post_init(_)
        if len(self.colocation) != max(len(self.layers) - 1, 0):
            raise InputError(f"colocation has {len(self.colocation)} entries for {len(self.layers)} layers.")
        names = [name for name in self.by_layer if isinstance(getattr(self, name), dict)]
        for name in (*names, "perplexity", *(["random_perplexity"] if self.random_perplexity else [])):
            if missing := sorted(set(self.classes) - set(getattr(self, name))):
                raise InputError(f"{name}: lacks {', '.join(missing)}, which classes names.")

    @property
    def names(self) -> list[str]:
        """The name of each of `layers`."""
        return [layer_name(layer, self.encoder_layers) for layer in self.layers]

    def of_kind(self, old: bool) -> list[str]:
        """The base model's languages if `old`, else the other languages."""
        return [language for language, number in self.classes.items() if (number == 0) == old]

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """A table: header, and one row for each layer, with means over the base's languages and the added ones."""
        columns: list[tuple[str, Mapping[str, Sequence[Any]], int]] = [
            ("expert 0", self.expert_0_score, 3), ("classifier", self.classifier_accuracy, 3),
            ("E_50%", self.experts_for_half, 1),
        ]  # fmt: skip
        kinds = {"old": self.of_kind(True), "new": self.of_kind(False)}

        def mean(index: int, values: Mapping[str, Sequence[Any]], codes: list[str], digits: int) -> str:
            numbers = [values[code][index] for code in codes]
            return "-" if not numbers or None in numbers else f"{sum(numbers) / len(numbers):.{digits}f}"

        rows = []
        for index, name in enumerate(self.names):
            means = [mean(index, values, codes, digits) for _, values, digits in columns for codes in kinds.values()]
            rows.append([name, str(len(next(iter(self.top1_share.values()))[index])), *means])
        return ["layer", "experts", *(f"{name} {kind}" for name, _, _ in columns for kind in kinds)], rows

    def perplexity_rows(self) -> tuple[list[str], list[list[str]]]:
        """A table: header, and one row for each language, under the router's choice and under a random one."""
        ways = (self.perplexity, self.random_perplexity)
        rows = [[code, *(f"{way[code]:.2f}" if code in way else "-" for way in ways)] for code in self.classes]
        return ["perplexity", "router's experts", "random experts"], rows

    def colocation_rows(self) -> tuple[list[str], list[list[str]]]:
        """A table: header, and one row for each pair of successive expanded layers."""
        pairs = zip(pairwise(self.names), self.colocation, strict=True)
        rows = [[f"{here}, {there}", "-" if value is None else f"{value:.2f}"] for (here, there), value in pairs]
        return ["layers", "co-location"], rows

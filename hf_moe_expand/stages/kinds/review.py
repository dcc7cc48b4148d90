"""Stage 2: routers and classifiers learn, on old and new text, to send old-language tokens to expert 0.

Example: hf-moe-expand train review qwen-el-1 qwen-el-2 --data en=en.jsonl --data el=el.jsonl --config stage2.yaml
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from accelerate.utils import broadcast_object_list
from datasets import Dataset

from ...analysis.reading import count_tokens
from ...analysis.similarity import measure_similarity
from ...checkpoint.facts import Facts
from ...checkpoint.stored import built_whole
from ...core.errors import InputError
from ...core.jsonfile import read_json
from ...core.schema import Coefficient, Count, Flag, Times
from ...data.packing import NEW_PER_OLD, review_documents
from ...data.pairs import texts_for
from ...data.sources import LanguageText
from ...inference.models import load_for_inference
from ...modeling import layer_names
from ...planning.layers import CLASSIFIER_CHOICES, ClassifierChoice, classifier_layers
from ...trainers.freezing import FreezeReport, Trained
from ...trainers.losses import BalanceLoss, ClassifierLoss, DistillationLoss, LanguagePriorLoss
from ..config import BlockSize, StageConfig, Validation, ValidationSettings
from ..distributed import launched
from ..keywords import setting
from ..trainer import StageTrainer

_NO_ROUTER = "exclusive experts take the tokens of their languages alone, so that no router is left to review"
REFUSED = {
    ("exclusive", "review"): _NO_ROUTER,
    ("exclusive", "distillation"): _NO_ROUTER,
    ("encoder-decoder", "distillation"): "keeps the base's predictions of the next token of a text, which an "
    "encoder-decoder does not make",
}


@dataclass
class ReviewConfig(StageConfig):
    """Stage 2 (MoE-LPR Eq. 11, LayerMoE Eq. 12): `L_NTP + language_prior_coef * L_LPR + classifier_coef * L_CLS`, to
    which `distillation_coef * L_KD` may be added."""

    key = "review"
    name = "review"
    title = "Review"
    result_name = "reviewed"
    place = 60
    trains = Trained(classifiers=True)
    optional = True

    block_size: BlockSize = setting(512, "tokens in a block")
    old_documents: Count | None = setting(
        None,
        "count documents, as MoE-LPR does: this many of each old language. By default old and new languages have "
        "equally many tokens, as many as the text allows",
    )
    new_per_old: Times | None = setting(None, "count documents: new ones for each old one; 2 by default")
    fewer_documents: Flag = setting(
        False,
        "count documents: where a language has too little text for `old_documents`, take as many as the text allows",
    )
    balance_coef: Annotated[Coefficient, BalanceLoss] = setting(0.0, "weight of the load-balancing loss")
    language_prior_coef: Annotated[Coefficient, LanguagePriorLoss] = setting(0.1, "weight of the LPR loss")
    classifier_coef: Annotated[Coefficient, ClassifierLoss] = setting(0.1, "weight of the classifiers' loss")
    distillation_coef: Annotated[Coefficient, DistillationLoss] = setting(
        0.0, "weight of self-distillation: old-language tokens keep the base's predictions"
    )
    classifier_layers: Count | None = setting(
        None,
        "place classifiers in so many layers before training, by the languages' similarity in the model after stage 1, "
        "as LayerMoE does. By default those train that the plan placed",
    )
    classifier_choice: ClassifierChoice = setting("similarity", f"choice of these layers: {CLASSIFIER_CHOICES}")
    classifier_tokens: Count = setting(
        100_000, "tokens of each language on which the similarity is measured (Q), or as many as there are"
    )
    validation: Validation = setting(ValidationSettings, "held-out text to score during training")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self._unlike("classifier_choice", "classifier_tokens") if self.classifier_layers is None else ():
            raise InputError(f"{name}: says where new classifiers go: give classifier_layers too, their number.")

    @classmethod
    def languages(cls, settings: Any, old: Iterable[str], new: Iterable[str]) -> list[str]:
        return [*old, *new]

    def check_settings(self, model: Any) -> None:
        if getattr(model, "exclusive_experts", False):
            raise InputError(f"{REFUSED['exclusive', 'review']}: leave the review out (`review: null`).")
        if self.classifier_layers is not None:
            self._check_classifiers(model)
        elif self.classifier_coef not in (0, type(self).classifier_coef) and not model.classifier_layers:
            raise InputError("classifier_coef: the model has no classifiers: leave it out, or give classifier_layers.")
        if self.distillation_coef:
            _check_distillation(model)

    def check_texts(self, model: Any, texts: Mapping[str, Any]) -> list[str]:
        old, new = Facts(model).languages
        if missing := [code for code in (*old, *new) if code not in texts]:
            raise InputError(f"{', '.join(missing)}: no text was given; review needs that of every language.")
        if not old:
            raise InputError("No old language was given: review needs text of some (`hf-moe-expand sample` writes it).")
        return self._fewer_documents(texts, old, new)

    def _check_classifiers(self, model: Any) -> None:
        if layers := getattr(model, "classifier_layers", None):
            names = ", ".join(layer_names(model)[layer] for layer in layers)
            raise InputError(f"classifier_layers: the model has classifiers already, in layers {names}: leave it out.")
        if getattr(model, "language_gate", None):
            raise InputError("classifier_layers: the model has a gate in the place of classifiers: leave it out.")
        expanded = len(Facts(model).grown)
        if self.classifier_choice not in ("all", "none") and (self.classifier_layers or 0) > expanded:
            raise InputError(f"classifier_layers is {self.classifier_layers}, but {expanded} layers have a router.")

    def place_classifiers(
        self, folder: Path, model_config: Any, texts: Mapping[str, LanguageText], resume: str | None
    ) -> bool:
        """LayerMoE 3.3: places them where old and new languages are most alike after stage 1."""
        if self.classifier_layers is None:
            return False
        if resume is not None:
            layers = read_json(Path(resume) / "config.json", "a configuration")["classifier_layers"]
        else:
            (layers,) = broadcast_object_list([self._chosen(folder, texts) if launched().is_main_process else None])
        if launched().is_main_process:
            names = ", ".join(layer_names(model_config)[layer] for layer in layers)
            print(f"review: new classifiers in layers {names} ({self.classifier_choice})")
        model_config.classifier_layers = layers
        Facts(model_config).history.with_last(classifier_layers=layers).write(model_config)
        return True

    def _chosen(self, folder: Path, texts: Mapping[str, LanguageText]) -> list[int]:
        similarity = None
        with built_whole():
            network, tokenizer = load_for_inference(folder)
        config = network.config
        if self.classifier_choice in ("similarity", "last"):
            documents, tokens = texts_for(config, texts, self.seed), self.classifier_tokens
            if not config.is_encoder_decoder:
                tokens = min(count_tokens(some, tokenizer, tokens) for some in documents.values())
            old, new = Facts(config).languages
            similarity = measure_similarity(network, tokenizer, documents, old, new, tokens, self.block_size).new_old
        grown = Facts(config).grown
        return classifier_layers(self.classifier_choice, self.classifier_layers or 0, grown, similarity, self.seed)

    def _fewer_documents(self, texts: Mapping[str, Any], old: list[str], new: list[str]) -> list[str]:
        """Refuses text of fewer documents than the review needs, before stage 1 trains for days; says how many it takes
        if the settings allow fewer. Text that is not at hand is taken to be enough."""
        if self.old_documents is None:
            return []
        wanted = dict.fromkeys(old, self.old_documents)
        wanted |= dict.fromkeys(new, max(1, round(self.old_documents * (self.new_per_old or NEW_PER_OLD))))
        counts = {code: len(text) if isinstance(text, Dataset) else text and text.count(wanted[code])
                  for code, text in texts.items()}  # fmt: skip
        taken = self._documents({code: wanted[code] if n is None else n for code, n in counts.items()}, old, new)
        said = ", ".join(f"{count:,} of {wanted[code]:,} in {code}" for code, count in taken.items())
        return [f"fewer documents than asked for: {said}"] if taken != wanted else []

    def _documents(self, available: Mapping[str, int], old: list[str], new: list[str]) -> dict[str, int]:
        each = self.new_per_old or NEW_PER_OLD
        return review_documents(available, old, new, self.old_documents, each, self.fewer_documents)

    def amounts(self, texts: Mapping[str, Dataset], model_config: Any) -> dict[str, Any]:
        old, new = Facts(model_config).languages
        by_documents = self.old_documents is not None or self.new_per_old is not None or self.fewer_documents
        if not (by_documents or model_config.is_encoder_decoder):
            return {"sides": [old, new]}
        return {"documents": self._documents({code: len(dataset) for code, dataset in texts.items()}, old, new)}


def _check_distillation(model: Any) -> None:
    if model.is_encoder_decoder:
        reason = REFUSED["encoder-decoder", "distillation"]
        raise InputError(f"distillation_coef: {reason}: leave distillation_coef out.")
    history = Facts(model).history
    if not history.first.old_languages:
        raise InputError("distillation_coef: the first plan names no old language, whose predictions it would keep.")
    if stage := history.trained_base:
        raise InputError(f"distillation_coef: expert 0 is not the base any more: `{stage}` trained it.")


class ReviewTrainer(StageTrainer):
    """Stage 2: routers and classifiers learn to separate old and new languages, on text of both.

    `ReviewConfig(language_prior_coef=0)` is the ablation without LPR.
    """

    stage = ReviewConfig

    def _freeze(self, model: Any) -> FreezeReport | None:
        if self.args.classifier_layers and not Facts(model.config).classifiers:  # type: ignore[attr-defined]
            raise InputError(
                "classifier_layers: a Trainer places no classifiers: `train_stage` measures and places them."
            )
        return super()._freeze(model)

"""The base classes of a recipe's stages and of training stages."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from datasets import Dataset

from ..checkpoint.source import COMPANIONS, load_expanded_config
from ..data.packing import PackedText, pack_texts
from ..data.pairs import pack_pairs
from ..errors import InputError, errors_at
from ..evaluation.validation import VALIDATION, ValidationCallback
from ..modeling.configuration_layer_moe import joins_packs
from ..models import longest_block
from ..records import History
from ..trainers.freezing import Trained, freeze
from ..trainers.masking import check_gates
from ..trainers.samplers import LanguageMix
from .checks import StageFacts, check_block_size, check_mix
from .config import StageConfig, StageSettings, settings_of


class Stage:
    """A step of a recipe on an expanded model; a class with its settings, never an instance of its own.

    Attributes:
        key: its key in a recipe, and its folder in a run.
        name: its verb under `train`, and its name in a history.
        title: its heading on a run's page.
        participle: the name in an evaluation of the model after the stage.
        place: where it stands in a recipe, whose stages run from the lowest to the highest; 0 for a command alone.
        families: model types for which it exists.
        runs_unasked: whether it runs, with default settings, if a recipe does not name it.
        optional: whether a recipe may turn it off with `null`.
        settings: the class of its settings in YAML; a stage that trains makes one of its fields.
        by_key: the stages that are imported.
    """

    key: ClassVar[str]
    name: ClassVar[str]
    title: ClassVar[str]
    participle: ClassVar[str]
    place: ClassVar[int] = 0
    families: ClassVar[tuple[str, ...]] = ("layer_moe",)
    runs_unasked: ClassVar[bool] = True
    optional: ClassVar[bool] = False
    settings: ClassVar[type]
    by_key: ClassVar[dict[str, type["Stage"]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "key" in vars(cls):
            Stage.by_key.setdefault(cls.key, cls)

    @classmethod
    def settings_class(cls) -> type:
        """The class of its settings in YAML."""
        return cls.settings

    @classmethod
    def languages(cls, settings: Any, old: Iterable[str], new: Iterable[str]) -> list[str]:
        """The languages whose training text it reads."""
        return []


@dataclass
class TrainingStage(StageConfig, Stage):
    """A stage that trains: its settings are fields, and its losses stand in their types.

    Attributes:
        trains: the parts of the model that it trains.
        trainer_class: its Trainer, set where the Trainer is defined.
        companions: patterns of files that are copied to the trained model.
    """

    trains: ClassVar[Trained]
    trainer_class: ClassVar[Any] = None
    companions: ClassVar[Sequence[str]] = COMPANIONS

    @classmethod
    def settings_class(cls) -> type[StageSettings]:
        return settings_of(cls)  # type: ignore[arg-type]

    def trained(self) -> tuple[str, Trained]:
        """Its name in a history, and the parts of the model that train."""
        return self.name, self.trains

    @classmethod
    def languages(cls, settings: Any, old: Iterable[str], new: Iterable[str]) -> list[str]:
        return list(new)

    def check(self, facts: StageFacts) -> None:
        """Refuses settings that contradict the text, the model or each other, as far as they are known."""
        # Of a decoder, Trainer would smooth the unshifted labels.
        if self.label_smoothing_factor and facts.is_encoder_decoder is False:
            raise InputError(
                f"{facts.key_of('training')}: label_smoothing_factor is not supported for decoders; set it to 0."
            )
        if unknown := sorted({*facts.texts} - {*facts.old, *facts.new}):
            raise InputError(
                f"{', '.join(unknown)}: not a language of this expansion (old: {', '.join(facts.old) or 'none'}; new: "
                f"{', '.join(facts.new) or 'none'}). Languages are set by the plan (--old and --new of `plan`)."
            )
        with errors_at(facts.key):
            self.check_text(facts)
        check_gates(getattr(self, "masking", None), facts.has_gates, facts.key_of("masking"))
        check_block_size(self.block_size, facts.longest, facts.key_of("block_size"))
        check_mix(self, facts)

    def check_text(self, facts: StageFacts) -> None:
        """Refuses text in languages for which the stage is not made, and missing text."""
        if not facts.texts:
            raise InputError("No text was given: name files with --data.")

    @classmethod
    def facts(cls, model_config: Any, texts: Iterable[str]) -> StageFacts:
        """What is known of the stage on a model and the text of these languages."""
        old, new = languages_of(model_config)
        return StageFacts(
            old, new, list(texts), model_config.conditional_routing, longest_block(model_config),
            model_config.is_encoder_decoder, model_config,
        )  # fmt: skip

    @classmethod
    def check_model(cls, model_config: Any) -> None:
        """Refuses a model of a type that the stage does not train."""
        if model_config.model_type in cls.families:
            return
        if "dmoe" in cls.families:
            raise InputError(
                f"The checkpoint has no language groups (model_type {model_config.model_type!r}): `train {cls.name}` "
                "is for DMoE; expand the base with a dmoe plan."
            )
        raise InputError(
            "This is a DMoE checkpoint, which has no frozen expert for old languages to return to: use `train group`, "
            "`train joint` or `train adapt`."
        )

    @classmethod
    def load_config(cls, folder: Path) -> Any:
        """The configuration of a checkpoint that the stage trains; refuses other kinds."""
        config = load_expanded_config(folder)
        cls.check_model(config)
        return config

    def saved_parameters(self, network: Any) -> tuple[int, int]:
        """The number of parameters in a training checkpoint, and of those among them that train.

        Args:
            network: the model without its weights.
        """
        total = sum(parameter.numel() for parameter in network.parameters())
        return total, freeze(network, self.trained()[1]).trainable

    def scoring(
        self, folder: Path, tokenizer: Any, languages: Sequence[str], model_config: Any
    ) -> list[ValidationCallback]:
        """What scores the held-out text that the settings name, and writes the scores to the folder."""
        validation = getattr(self, "validation", None)
        if validation is None or not validation.texts:
            return []
        if tokenizer is None:
            raise InputError("validation names held-out text: pass the tokenizer as processing_class.")
        path = folder / VALIDATION
        return [ValidationCallback(validation, tokenizer, path, self.block_size, languages, model_config)]

    def make_trainer(self, network: Any, packed: PackedText, callbacks: list[Any]) -> Any:
        """The Trainer of a loaded model."""
        return self.trainer_class(network, self, train_dataset=packed, callbacks=callbacks)

    def to_write(self, folder: Path, weights: Mapping[str, Any]) -> Mapping[str, Any]:
        """The weights to write, from the whole weights of a finished training; on the first rank."""
        return weights

    def pack(self, texts: Mapping[str, Dataset], tokenizer: Any, model_config: Any) -> PackedText:
        """Blocks of the stage's text.

        Args:
            texts: documents of each language (column `text`); for an encoder-decoder, sentence pairs to and from it.
            model_config: configuration of the expanded model, whose history orders the languages.
        """
        old, new = languages_of(model_config)
        texts = {code: texts[code] for code in (*old, *new) if code in texts}
        if model_config.is_encoder_decoder:
            amounts = self.amounts(texts, model_config)
            return pack_pairs(texts, tokenizer, self.block_size, self.seed, languages=[*old, *new], **amounts)
        return pack_texts(
            texts, tokenizer, self.block_size, self.seed, languages=[*old, *new],
            groups=self.block_groups(texts, model_config), **self.amounts(texts, model_config),
        )  # fmt: skip

    def amounts(self, texts: Mapping[str, Dataset], model_config: Any) -> dict[str, Any]:
        """The amount of text to take of each language: arguments of `pack_texts`."""
        return {"tokens_per_language": getattr(self, "tokens_per_language", None)}

    def block_groups(self, texts: Iterable[str], model_config: Any) -> list[list[str]] | None:
        """Languages that may share a block; None for all."""
        return None

    def mix(self, packed: PackedText, model_config: Any) -> LanguageMix | None:
        """The weights and schedule of languages; None for shuffled rows."""
        return None

    @classmethod
    def language_classes(cls, model_config: Any, languages: Sequence[str]) -> list[int] | None:
        """The class of each language for the losses: 0 for the base model's languages, g for those of expansion g."""
        classes = History.of(model_config).classes
        return [classes.get(code, 0) for code in languages]


def languages_of(model_config: Any) -> tuple[list[str], list[str]]:
    """The languages before a model's last expansion, and those that it added; for DMoE, in the order of the groups. The
    packs of a joined model count as one expansion."""
    history = History.of(model_config)
    last = history.last
    if joins_packs(model_config):
        old = history.first.old_languages
        return old, [code for code in history.languages if code not in old]
    groups = getattr(model_config, "language_groups", None)
    if not groups:
        return last.old_languages, last.new_languages
    return last.old_languages, [code for group in groups for code in group if code not in last.old_languages]

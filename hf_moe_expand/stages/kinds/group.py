"""DMoE's first stage: each batch of one language group trains only its expert; routers learn to classify groups.

Example: hf-moe-expand train group qwen-dmoe qwen-dmoe-1 --data el=el.jsonl --data tr=tr.jsonl --config group.yaml
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

from torch.utils.data import Sampler

from ...checkpoint.facts import Facts
from ...core.errors import InputError
from ...core.schema import Coefficient, Positive
from ...trainers.freezing import EVERYTHING
from ...trainers.losses import BalanceLoss, GroupLoss
from ...trainers.samplers import GroupedSampler
from ..config import BlockSize, Validation, ValidationSettings
from ..keywords import setting
from ..mixing import MixedConfig
from ..trainer import StageTrainer


@dataclass
class GroupConfig(MixedConfig):
    """DMoE's extension stage (Eq. 4): `L = L_CLM + group_coef * L_group`, lambda = 1.28."""

    key = "group"
    name = "group"
    title = "Group training"
    result_name = "group-trained"
    place = 20
    families = ("dmoe",)
    trains = EVERYTHING

    block_size: BlockSize = setting(2048, "tokens in a block")
    learning_rate: Positive = setting(2e-5, "highest learning rate")
    balance_coef: Annotated[Coefficient, BalanceLoss] = setting(0.0, "weight of the load-balancing loss")
    group_coef: Annotated[Coefficient, GroupLoss] = setting(1.28, "lambda: weight of the language-group loss")
    validation: Validation = setting(ValidationSettings, "held-out text to score during training")

    def block_groups(self, texts: Iterable[str], model_config: Any) -> list[list[str]]:
        return super().block_groups(texts, model_config) or Facts(model_config).groups

    def groups_of_languages(self, languages: Sequence[str], model_config: Any) -> list[int]:
        return self.language_classes(model_config, languages)

    @classmethod
    def language_classes(cls, model_config: Any, languages: Sequence[str]) -> list[int]:
        group_of = Facts(model_config).group_of
        return [group_of.get(code, 0) for code in languages]

    def check_texts(self, model: Any, texts: Mapping[str, Any]) -> list[str]:
        said = super().check_texts(model, texts)
        with_text, groups = set(texts), Facts(model).groups
        for number, group in enumerate(groups):
            if not set(group) & with_text:
                raise InputError(f"Group {number} ({', '.join(group)}): none of its languages has text; give some.")
        if groups and (alone := sorted(with_text - {*Facts(model).group_of})):
            raise InputError(f"{', '.join(alone)}: in no language group of this checkpoint; leave its text out.")
        return said


class GroupTrainer(StageTrainer):
    """DMoE's extension stage: each batch belongs to one language group, and runs only that group's expert.

    All parameters train. `language_classes` gives the group of each language id, which is the number of its expert.
    Each row of the data set must hold only one group.

    Raises:
        InputError: a batch mixes groups, or a group has less than one batch of rows.
    """

    stage = GroupConfig
    needs_languages = True

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler | None:
        if self.mix is not None:
            return super()._get_train_sampler(train_dataset)
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        classes = self._classes()
        groups = [classes[int(languages[0])] for languages in dataset["language_ids"]]
        return GroupedSampler(groups, self.args.per_device_train_batch_size, self.args.data_seed)

    @contextmanager
    def asking(self, inputs: Mapping[str, Any], as_in_training: bool = False) -> Iterator[None]:
        classes = self._classes()
        groups = sorted({classes[i] for i in inputs["language_ids"].unique().tolist() if i >= 0})
        if len(groups) != 1:
            raise InputError(f"A batch holds {len(groups)} groups of languages ({groups}): pack them group by group.")
        with super().asking(inputs, as_in_training), self.accelerator.unwrap_model(self.model).use_expert(groups[0]):
            yield

    def _classes(self) -> list[int]:
        if self._language_classes is None:
            raise InputError("GroupTrainer needs language_classes: the language group of each language id.")
        return self._language_classes.tolist()

"""The trainers of each stage: MoE-LPR's and LayerMoE's two, DMoE's extension and adaptation."""

import math
from typing import Any

import torch
from torch.utils.data import Sampler
from transformers import Trainer

from .curriculum_sampler import CurriculumSampler, LanguageMix
from .freezing import FreezeReport, Stage, freeze
from .grouped_sampler import GroupedSampler
from .masking import MaskingMixin
from .router_losses import RouterLossMixin, RouterLossWeights


class _StageTrainer(RouterLossMixin, Trainer):  # type: ignore[misc]
    """Freezes what the stage must not move, says so, and trains with the stage's losses.

    `mix` says which rows of the data set belong to which language, and how and when languages are drawn; the data set's
    rows are shuffled by default.
    """

    stage: Stage
    default_losses: RouterLossWeights

    def __init__(
        self,
        model: Any,
        *args: Any,
        router_losses: RouterLossWeights | None = None,
        everything: bool = False,
        mix: LanguageMix | None = None,
        **kwargs: Any,
    ) -> None:
        self.mix = mix
        self.freeze_report: FreezeReport = freeze(model, Stage.EVERYTHING if everything else self.stage)
        super().__init__(model, *args, router_losses=router_losses or self.default_losses, **kwargs)
        if self.is_world_process_zero():
            print(self.freeze_report)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler | None:
        if self.mix is None:
            return super()._get_train_sampler(train_dataset)
        training = self.args
        rows = self.get_total_train_batch_size(training)
        if training.max_steps <= 0:  # the sampler's one epoch holds all the training
            training.max_steps = math.ceil(training.num_train_epochs * sum(self.mix.rows) / rows)
        batch = 1 if self.mix.groups is None else self._train_batch_size
        return CurriculumSampler(self.mix, training.max_steps, rows, training.seed, batch)


class PostPretrainTrainer(MaskingMixin, _StageTrainer):  # type: ignore[misc]
    """Stage 1 (MoE-LPR Eq. 8, LayerMoE Eq. 4): new experts and routers learn new-language text.

    `L = L_NTP + 0.01 * L_balance`. With `router_losses=RouterLossWeights(balance=0.01, language_prior=0.1)` and old
    languages in the data it is the one-stage ablation; with `everything=True` the plain "MoE" baseline, in which
    the base trains too. `masking` says what is masked (see `Masking`).
    """

    stage = Stage.POST_PRETRAIN
    default_losses = RouterLossWeights(balance=0.01)


class ReviewTrainer(_StageTrainer):
    """Stage 2 (MoE-LPR Eq. 11, LayerMoE Eq. 12): routers and classifiers learn who belongs where, on old and new text.

    `L = L_NTP + 0.1 * L_LPR + 0.1 * L_CLS`; `RouterLossWeights(language_prior=0)` is the ablation without LPR.
    """

    stage = Stage.REVIEW
    default_losses = RouterLossWeights(language_prior=0.1, classifier=0.1)


class GroupTrainer(_StageTrainer):
    """DMoE's extension stage (Eq. 4): batches of one language group each train that group's expert alone.

    `L = L_CLM + 1.28 * mean over (layer, token) of - log p(group | token)`; all parameters train. `language_classes`
    gives the group of each language id, which is the number of its expert; `RouterLossWeights(group=0)` is the ablation
    without the classification loss. The rows of the data set must hold one group each.

    Raises:
        ValueError: a batch mixes groups, or a group has less than one batch of rows.
    """

    stage = Stage.GROUP
    default_losses = RouterLossWeights(group=1.28)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler | None:
        if self.mix is not None:
            return super()._get_train_sampler(train_dataset)
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        classes = self._classes()
        groups = [classes[int(languages[0])] for languages in dataset["language_ids"]]
        return GroupedSampler(groups, self.args.per_device_train_batch_size, self.args.seed)

    def training_step(self, model: Any, inputs: dict, num_items_in_batch: Any = None) -> torch.Tensor:
        # Around the backward pass too: gradient checkpointing runs the forward pass again there.
        with self.accelerator.unwrap_model(model).use_expert(self._group_of(inputs)):
            return super().training_step(model, inputs, num_items_in_batch)

    def _classes(self) -> list[int]:
        if self._language_classes is None:
            raise ValueError("GroupTrainer needs language_classes: the language group of each language id.")
        return self._language_classes.tolist()

    def _group_of(self, inputs: dict) -> int:
        classes = self._classes()
        ids = inputs["language_ids"].unique().tolist()
        groups = {classes[i] for i in ids if i >= 0}
        if len(groups) != 1:
            raise ValueError(
                f"A batch holds languages of {len(groups)} groups ({sorted(groups)}): in this stage each batch belongs "
                "to one group. Pack documents group by group."
            )
        return groups.pop()


class NormalTrainer(MaskingMixin, _StageTrainer):  # type: ignore[misc]
    """DMoE after its extension stage, or any expanded model with nothing frozen: mixed batches, the top experts."""

    stage = Stage.NORMAL
    default_losses = RouterLossWeights(balance=0.02)


class AdaptTrainer(_StageTrainer):
    """DMoE's adaptation (section 3.3): the newest expert of each layer and its row of the router learn one language.

    Everything else stays as it is, bit for bit: the other rows' gradients are zeroed, and routers do not decay.
    """

    stage = Stage.ADAPT
    default_losses = RouterLossWeights()

    def training_step(self, model: Any, inputs: dict, num_items_in_batch: Any = None) -> torch.Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        for ffn in self.accelerator.unwrap_model(model).expanded_ffns().values():
            if ffn.router.weight.grad is not None:
                ffn.router.weight.grad[:-1] = 0
        return loss

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        return [name for name in super().get_decay_parameter_names(model) if not name.endswith("router.weight")]

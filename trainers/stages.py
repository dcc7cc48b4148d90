"""The trainers of MoE-LPR's and LayerMoE's two stages."""

from typing import Any

from transformers import Trainer

from .freezing import FreezeReport, Stage, freeze
from .router_losses import RouterLossMixin, RouterLossWeights


class _StageTrainer(RouterLossMixin, Trainer):  # type: ignore[misc]
    """Freezes what the stage must not move, says so, and trains with the stage's losses."""

    stage: Stage
    default_losses: RouterLossWeights

    def __init__(
        self,
        model: Any,
        *args: Any,
        router_losses: RouterLossWeights | None = None,
        everything: bool = False,
        **kwargs: Any,
    ) -> None:
        self.freeze_report: FreezeReport = freeze(model, Stage.EVERYTHING if everything else self.stage)
        super().__init__(model, *args, router_losses=router_losses or self.default_losses, **kwargs)
        if self.is_world_process_zero():
            print(self.freeze_report)


class PostPretrainTrainer(_StageTrainer):
    """Stage 1 (MoE-LPR Eq. 8, LayerMoE Eq. 4): new experts and routers learn new-language text.

    `L = L_NTP + 0.01 * L_balance`. With `router_losses=RouterLossWeights(balance=0.01, language_prior=0.1)` and old
    languages in the data it is the one-stage ablation; with `everything=True` the plain "MoE" baseline, in which
    the base trains too.
    """

    stage = Stage.POST_PRETRAIN
    default_losses = RouterLossWeights(balance=0.01)


class ReviewTrainer(_StageTrainer):
    """Stage 2 (MoE-LPR Eq. 11, LayerMoE Eq. 12): routers and classifiers learn who belongs where, on old and new text.

    `L = L_NTP + 0.1 * L_LPR + 0.1 * L_CLS`; `RouterLossWeights(language_prior=0)` is the ablation without LPR.
    """

    stage = Stage.REVIEW
    default_losses = RouterLossWeights(language_prior=0.1, classifier=0.1)

"""Stage 1: new experts and routers learn new-language text; the base model is frozen.

Example: hf-moe-expand train post-pretrain qwen-el qwen-el-1 --data el=el.jsonl --config stage1.yaml
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from ...checkpoint.facts import Facts
from ...core.errors import InputError
from ...core.schema import Coefficient, Flag, Share
from ...trainers.freezing import EVERYTHING, Trained
from ...trainers.losses import BalanceLoss, GateBudgetLoss, LanguagePriorLoss, LocalizedBalanceLoss
from ...trainers.losses.balance import BalanceCounts
from ...trainers.masking import Masking
from ..config import REPLAY_SHARE, ReplayShare, Validation, ValidationSettings
from ..keywords import mapping, setting
from ..mixing import MixedConfig
from ..trainer import StageTrainer


@dataclass
class PostPretrainConfig(MixedConfig):
    """Stage 1 (MoE-LPR Eq. 8, LayerMoE Eq. 4): `L = L_NTP + balance_coef * L_balance`."""

    key = "post_pretrain"
    name = "post-pretrain"
    title = "Post-pretraining"
    result_name = "post-pretrained"
    place = 10
    trains = Trained(experts="new")

    balance_coef: Annotated[Coefficient, BalanceLoss] = setting(0.01, "weight of the load-balancing loss")
    balance_counts: BalanceCounts = setting(
        "top-k", "choices of a token that the balance loss counts: `top-k`, all of them, or `top-1` (GShard's loss)"
    )
    language_prior_coef: Annotated[Coefficient, LanguagePriorLoss] = setting(
        0.0, "weight of the LPR loss, for one-stage training; needs `replay`"
    )
    replay: Flag = setting(False, "train on text of the old languages too")
    replay_share: ReplayShare = setting(None, f"with `replay`: {REPLAY_SHARE}")
    everything: Flag = setting(False, "train all parameters, the plain mixture of experts as a baseline")
    masking: Annotated[Masking | str | None, mapping(Masking)] = setting(Masking, "masking during training")
    budget_coef: Annotated[Coefficient, GateBudgetLoss] = setting(
        0.1, "weight of the loss that keeps the routed experts' share at `gate_budget` (CMR)"
    )
    gate_budget: Share = setting(0.8, "target of the routed experts' share of the output, mean over tokens (CMR)")
    localized_balance_coef: Annotated[Coefficient, LocalizedBalanceLoss] = setting(
        0.0, "weight of LoRAMoE's localized balancing constraint"
    )
    validation: Validation = setting(ValidationSettings, "held-out text to score during training")

    def trained(self) -> tuple[str, Trained]:
        return ("everything", EVERYTHING) if self.everything else (self.name, self.trains)

    @classmethod
    def languages(cls, settings: Any, old: Iterable[str], new: Iterable[str]) -> list[str]:
        return [*(old if settings.replay else ()), *new]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.language_prior_coef and not self.replay:
            raise InputError("language_prior_coef: needs text of the old languages: set `replay: true` and give it.")
        if self.replay_share is not None and not self.replay:
            raise InputError("replay_share: needs text of the old languages: set `replay: true` and give it.")
        if self.replay_share is not None and self.temperature != 1:
            raise InputError("replay_share: a temperature draws languages in other shares: leave one of them out.")

    def check_settings(self, model: Any) -> None:
        self.check_exclusive(model, "language_prior_coef")
        gates = [name for name in self._unlike("budget_coef", "gate_budget") if getattr(self, name)]
        if gates and not getattr(model, "conditional_routing", False):
            raise InputError(f"{gates[0]}: is for conditional routing, which the model does not have: leave it out.")

    def check_texts(self, model: Any, texts: Mapping[str, Any]) -> list[str]:
        old, new = Facts(model).languages
        if missing := [code for code in new if code not in texts]:
            raise InputError(f"{', '.join(missing)}: a language of this expansion has no text; give some.")
        old_with_text = [code for code in old if code in texts]
        if old_with_text and not self.replay:
            raise InputError(f"{', '.join(old_with_text)}: old languages train with `replay: true` alone: set it.")
        if self.replay and not old_with_text:
            raise InputError("replay: there is no text of the old languages: give some, or leave replay out.")
        if self.replay_share is not None and model.is_encoder_decoder:
            raise InputError("replay_share: counts tokens of one language, but a sentence pair has two: leave it out.")
        return []

    def amounts(self, texts: Mapping[str, Any], model_config: Any) -> dict[str, Any]:
        if self.replay_share is None:
            return super().amounts(texts, model_config)
        replayed = [code for code in Facts(model_config).languages[0] if code in texts]
        return {**super().amounts(texts, model_config), "replay": (replayed, self.replay_share)}


class PostPretrainTrainer(StageTrainer):
    """Stage 1: new experts and routers learn new-language text."""

    stage = PostPretrainConfig

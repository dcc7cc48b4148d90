"""DMoE, then: everything trains on mixed batches, each token routed to its top experts.

Example: hf-moe-expand train joint qwen-dmoe-1 qwen-dmoe-2 --data el=el.jsonl --data tr=tr.jsonl
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from ..schema import Coefficient
from ..trainers.freezing import EVERYTHING
from ..trainers.losses import BalanceLoss
from ..trainers.masking import Masking
from .config import BlockSize, ValidationSettings, key
from .mixing import MixedConfig, MixingStage
from .trainer import StageTrainer


@dataclass
class JointConfig(MixedConfig):
    """DMoE's normal training: `L = L_CLM + balance_coef * L_balance`."""

    renamed: ClassVar = {"balance": "balance_coef"}

    block_size: BlockSize = key(2048, "tokens in a block")
    balance_coef: Coefficient = key(0.02, "weight of the load-balancing loss")
    masking: Masking | str | None = key(Masking, "what is masked while it trains")
    validation: ValidationSettings | str | None = key(ValidationSettings, "held-out text that is scored meanwhile")


class Joint(MixingStage):
    """DMoE's second stage; of any expanded model, training with nothing frozen."""

    key, name, title, participle = "joint", "joint", "Joint training", "trained jointly"
    former = ("normal",)
    families = ("dmoe",)
    optional = True
    config_class = JointConfig
    trains = EVERYTHING

    def check_model(self, model_config: Any) -> None:
        """Any expanded model may train so."""

    def losses(self, config: JointConfig) -> list[Any]:
        return [BalanceLoss(config.balance_coef)]

    def language_classes(self, model_config: Any, languages: Any) -> None:
        """No loss of this stage asks for languages."""


class JointTrainer(StageTrainer):
    """DMoE after its extension stage, or any expanded model with nothing frozen: mixed batches, the top experts."""

    stage = Joint()


STAGE = JointTrainer.stage

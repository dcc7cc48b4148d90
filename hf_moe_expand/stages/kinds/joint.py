"""DMoE's second stage: all parameters train on mixed batches, with each token routed to its top-k experts.

Example: hf-moe-expand train joint qwen-dmoe-1 qwen-dmoe-2 --data el=el.jsonl --data tr=tr.jsonl
"""

from dataclasses import dataclass
from typing import Annotated, Any

from ...core.schema import Coefficient, Positive
from ...trainers.freezing import EVERYTHING
from ...trainers.losses import BalanceLoss
from ...trainers.losses.balance import BalanceCounts
from ...trainers.masking import Masking
from ...trainers.router_losses import classes_matter
from ..config import BlockSize, Validation, ValidationSettings
from ..keywords import mapping, setting
from ..mixing import MixedConfig
from ..trainer import StageTrainer


@dataclass
class JointConfig(MixedConfig):
    """DMoE's normal training: `L = L_CLM + balance_coef * L_balance`."""

    key = "joint"
    name = "joint"
    title = "Joint training"
    result_name = "trained jointly"
    place = 30
    families = ("dmoe",)
    optional = True
    trains = EVERYTHING

    block_size: BlockSize = setting(2048, "tokens in a block")
    learning_rate: Positive = setting(2e-5, "highest learning rate")
    balance_coef: Annotated[Coefficient, BalanceLoss] = setting(0.02, "weight of the load-balancing loss")
    balance_counts: BalanceCounts = setting(
        "top-k", "choices of a token that the balance loss counts: `top-k`, all of them, or `top-1` (GShard's loss)"
    )
    masking: Annotated[Masking | str | None, mapping(Masking)] = setting(Masking, "masking during training")
    validation: Validation = setting(ValidationSettings, "held-out text to score during training")

    def check_settings(self, model: Any) -> None:
        self.check_exclusive(model)

    @classmethod
    def check_model(cls, model_config: Any) -> None:
        """Accepts any expanded model."""

    @classmethod
    def language_classes(cls, model_config: Any, languages: Any) -> list[int] | None:
        """No loss of this stage needs languages; exclusive experts do."""
        return super().language_classes(model_config, languages) if classes_matter(model_config) else None


class JointTrainer(StageTrainer):
    """Trains all parameters of an expanded model, such as DMoE's after its extension stage: mixed batches, top-k."""

    stage = JointConfig

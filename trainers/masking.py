"""What training masks."""

from ..schema import Probability, settings


@settings
class Masking:
    """Placeholder until the masking branch lands."""

    expert_output: Probability = 0.0
    final_output: Probability = 0.0
    conditional_routing: Probability = 0.0
    gating_dropout: Probability = 0.0

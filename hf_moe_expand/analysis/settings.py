"""Settings of the analyses and of the gate."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from ..core.errors import InputError
from ..core.schema import Count, Positive, Schema, Whole


class AnalysisSettings(Schema):
    """Similarity of languages in each layer (LayerMoE), and which experts a further expansion copies."""

    tokens: Count = Field(100_000, description="tokens of each language (Q)")
    block_size: Count = Field(1024, description="tokens that the model sees at once")
    batch_size: Count = Field(8, description="blocks in a forward pass")


class DeviationSettings(Schema):
    """How training moves each layer (DMoE)."""

    steps: Count = Field(10, description="training steps on each language")
    learning_rate: Positive = Field(8e-6, description="learning rate of the first step; it decays to zero")
    batch_size: Count = Field(2048, description="blocks in a step")
    block_size: Whole = Field(512, ge=2, description="tokens in a block")
    micro_batch_size: Count = Field(
        8, description="blocks in one forward and backward pass; affects only memory and speed"
    )
    last_layers: Count = Field(3, description="number of last layers over whose FFNs languages are compared")
    at_steps: list[Count] = Field(
        [], description="earlier steps at which languages are compared as well, in order (DMoE figures 8 and 9)"
    )

    @model_validator(mode="after")
    def _check_steps(self) -> Self:
        if self.at_steps != sorted({*self.at_steps}) or (self.at_steps and self.at_steps[-1] >= self.steps):
            raise InputError(f"at_steps is {self.at_steps}: must be ascending steps below {self.steps}, the last one.")
        return self


class GateSettings(Schema):
    """How the gate is fitted."""

    layer: Annotated[Whole, Field(ge=0)] | None = Field(
        None, description="the layer that has the gate; by default the best one of the first third"
    )
    unseen_share: float = Field(
        0.01,
        gt=0,
        lt=1,
        description="most texts of a language that the gate has not seen that may go to new experts, as a share; a "
        "language above it is a near relative of a new one, and named",
    )
    tokens: Whole = Field(1600, ge=100, description="tokens of each of the model's languages to fit on")
    anchor_tokens: Whole = Field(400, ge=100, description="tokens of each anchor language to fit on")
    bound: Positive = Field(4.0, le=1024, description="most evidence of one token, in nats")
    window: Annotated[Count, Field(le=128)] = Field(64, description="last tokens of a text whose evidence counts")

"""Which layers are an FFN's gate and up projection, by what its code computes."""

import pytest
import torch
import torch.nn.functional as F
from layers import FORMS, Plain
from torch import nn

from hf_moe_expand.checkpoint.gated_ffn import gate_and_up
from hf_moe_expand.modeling.experts import AddedExpert


class Gated(nn.Module):
    """Names that say nothing, the layers in another order, and equal sizes."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.f = nn.Tanh()

    def forward(self, x):
        return self.a(self.f(self.c(x)) * self.b(x))


class Mixing(Gated):
    """Not row by row: the tokens of one call depend on each other."""

    def forward(self, x):
        inner = self.f(self.c(x)) * self.b(x)
        return self.a(inner - inner.mean(0, keepdim=True))


class Dropped(Gated):
    def forward(self, x):
        return self.a(F.dropout(self.f(self.c(x)) * self.b(x), 0.5, self.training))


class Scaled(Gated):
    def forward(self, x):
        return 2 * super().forward(x)


class WithNorm(Gated):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        return self.norm(super().forward(x))


class Inline(Gated):
    """Its activation is a function in its code, not one of its attributes."""

    def forward(self, x):
        return self.a(torch.relu(self.c(x)) * self.b(x))


def test_layers_are_known_by_what_they_compute():
    assert gate_and_up(Gated()) == ("c", "b")
    assert gate_and_up(FORMS["gated"](16, 24)) == ("gate_proj", "up_proj")
    assert gate_and_up(FORMS["fused"](16, 24)) == ("gate_up_proj",)
    assert gate_and_up(AddedExpert(8, 16, "gelu")) == ("gate_proj", "up_proj")


@pytest.mark.parametrize("ffn", [Mixing, Dropped, Scaled, WithNorm, Inline])
def test_code_of_another_form_has_none(ffn):
    assert gate_and_up(ffn()) is None


def test_an_ffn_without_a_gate_has_none():
    assert gate_and_up(Plain(16, 24)) is None
    assert gate_and_up(FORMS["conv1d"](16, 24)) is None


def test_they_are_found_on_a_device_without_values_and_no_random_number_is_drawn():
    with torch.device("meta"):
        ffn = FORMS["gated"](16, 24)
        state = torch.get_rng_state()
        assert gate_and_up(ffn) is not None
    assert torch.equal(torch.get_rng_state(), state)

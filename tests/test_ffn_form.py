"""Which FFNs' forward passes are read, and whether a change of an expert is noticed."""

from threading import Thread

import pytest
import torch
import torch.nn.functional as F
from layers import Plain, build, conv1d, other_rate
from torch import nn
from transformers import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

from hf_moe_expand.modeling.ffn_trace import form_of


class Mixing(Plain):
    """Not row by row: the tokens of one call depend on each other."""

    def forward(self, x):
        inner = self.up(x)
        return self.down(inner - inner.mean(0, keepdim=True))


class Branching(Plain):
    def forward(self, x):
        return self.down(self.up(x)) if x.sum() > 0 else x


@pytest.mark.parametrize("ffn", [Mixing, Branching])
def test_an_ffn_of_another_kind_runs_as_a_module(ffn):
    assert form_of(ffn(6, 10)) is None
    layer = build(ffn).eval()
    assert layer.block.forms == (None, None)
    layer(torch.randn(1, 5, 16))


class Halves(Plain):
    """Halves of the tokens, not of the neurons."""

    def forward(self, x):
        first, second = self.up(x).chunk(2)
        return self.down(torch.mul(first, second))


class FirstToken(Plain):
    def forward(self, x):
        return self.down(torch.relu(self.up(x)) * self.up(x)[0])


class InPlace(Plain):
    def __init__(self, hidden, inner):
        super().__init__(hidden, inner)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.down(self.up(self.act(x)))


class Dropped(Plain):
    def forward(self, x):
        return self.down(F.dropout(torch.relu(self.up(x)), 0.5, self.training))


@pytest.mark.parametrize("ffn", [Halves, FirstToken, InPlace, Dropped])
def test_a_pass_that_is_not_row_by_row_has_no_form(ffn):
    assert form_of(ffn(6, 10).train()) is None
    assert (form_of(ffn(6, 10).eval()) is None) == (ffn is not Dropped)


class Scaled(Plain):
    scale = 1.0

    def forward(self, x):
        return self.down(F.dropout(torch.relu(self.up(x)), 0.0, self.training) * self.scale)


class Nested(nn.Module):
    def __init__(self, hidden, inner):
        super().__init__()
        self.layers = nn.ModuleDict({"up": nn.Linear(hidden, inner), "down": nn.Linear(inner, hidden)})

    def forward(self, x):
        return self.layers["down"](torch.relu(self.layers["up"](x)))


class ByMode(Plain):
    def forward(self, x):
        return self.down(torch.relu(self.up(x))) if self.training else self.down(torch.tanh(self.up(x)))


def another_scale(expert):
    expert.scale = 3.0


def other_layers(expert):
    expert.layers = nn.ModuleDict({"up": nn.Linear(16, 16), "down": nn.Linear(16, 16)})


def other_mode(expert):
    expert.train()


def other_layout(expert):
    expert.up.weight.data = expert.up.weight.data.t()


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize(
    ("ffn", "change"),
    [
        (Scaled, another_scale),
        (Nested, other_layers),
        (ByMode, other_mode),
        (conv1d, other_rate),
        (Plain, other_layout),
    ],
)
def test_an_expert_that_differs_from_the_others_is_noticed(ffn, change, number):
    layer = build(ffn, inner=16).eval()
    x = torch.randn(1, 40, 16)
    before = layer(x)
    assert layer.block.forms[False] is not None
    change(layer.experts[number])
    y = layer(x)
    assert (y - before).abs().max() > 1e-2
    layer.model_config._experts_implementation = "eager"
    torch.testing.assert_close(layer(x), y)


def test_reading_a_forward_pass_leaves_other_threads_alone():
    found, other = [], nn.Linear(2, 2)

    class Meanwhile(Plain):
        def forward(self, x):
            thread = Thread(target=lambda: found.append(other(torch.ones(1, 2))))
            thread.start()
            thread.join()
            return super().forward(x)

    assert form_of(Meanwhile(6, 10)) is not None
    assert torch.equal(found[0], other(torch.ones(1, 2)))


def test_active_dropout_runs_as_a_module_in_training_alone():
    ffn = GPT2MLP(24, GPT2Config(n_embd=16, resid_pdrop=0.5))
    assert form_of(ffn.train()) is None
    assert form_of(ffn.eval()) is not None

"""Expanded layers for tests, and the comparison of the ways to run their experts."""

from types import SimpleNamespace

import torch
from torch import nn
from transformers import GPT2Config, Phi3Config, Qwen2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

from hf_moe_expand.modeling.expanded_ffn import ExpandedFFN
from hf_moe_expand.modeling.routing_control import RoutingControl

TOLERANCE = {torch.float32: 1e-5, torch.float64: 3e-6, torch.bfloat16: 4e-2, torch.float16: 5e-3}


class Plain(nn.Module):
    def __init__(self, hidden, inner):
        super().__init__()
        self.up, self.down = nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def gated(hidden, inner):
    return Qwen2MLP(Qwen2Config(hidden_size=hidden, intermediate_size=inner))


def conv1d(hidden, inner):
    return GPT2MLP(inner, GPT2Config(n_embd=hidden, resid_pdrop=0.0))


def fused(hidden, inner):
    return Phi3MLP(Phi3Config(hidden_size=hidden, intermediate_size=inner, pad_token_id=0))


FORMS = {"gated": gated, "plain": Plain, "conv1d": conv1d, "fused": fused}


def build(
    form="gated", num_experts=4, top_k=2, hidden=16, inner=24, dtype=torch.float32, has_classifier=False, **fields
):
    torch.manual_seed(0)
    ffn = FORMS[form](hidden, inner) if isinstance(form, str) else form(hidden, inner)
    config = SimpleNamespace(_experts_implementation=None)
    layer = ExpandedFFN(ffn, hidden, num_experts, top_k, 0, has_classifier, RoutingControl(), config=config, **fields)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return layer.to(dtype)


def results(layer, x, implementation, autocast=False):
    """The output, then the gradients of the input and of all that trains."""
    layer.model_config._experts_implementation = implementation
    x = x.detach().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = layer(x)
    wanted = [x, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), wanted, allow_unused=True)]


def assert_agree(layer, x, implementation, autocast=False):
    expected = results(layer, x, "eager", autocast)
    found = results(layer, x, implementation, autocast)
    tolerance = 8e-2 if autocast else TOLERANCE[x.dtype]
    for one, other in zip(found, expected, strict=True):
        if one is None:  # a classifier in training, which only its loss trains
            assert other is None
            continue
        other = torch.zeros_like(one) if other is None else other  # the loop leaves idle experts out in evaluation
        assert one.dtype == other.dtype
        scale = max(other.abs().max().item(), 1e-6)
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance * scale)


def other_rate(expert):
    expert.dropout.p = 1.0
    expert.dropout.train()

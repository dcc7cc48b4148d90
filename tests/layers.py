"""Expanded layers for tests, and the slow definition of what their experts compute."""

import copy
from dataclasses import replace

import torch
from torch import nn
from transformers import GPT2Config, Phi3Config, Qwen2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

from hf_moe_expand import LayerMoEConfig
from hf_moe_expand.modeling.expanded_ffn import ExpandedFFN
from hf_moe_expand.modeling.routing_control import RoutingControl

TOLERANCE = {torch.float32: 1e-5, torch.float64: 3e-6, torch.bfloat16: 4e-2, torch.float16: 5e-3}


class Plain(nn.Module):
    def __init__(self, hidden, inner):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(hidden, inner), nn.ReLU(), nn.Linear(inner, hidden)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


def gated(hidden, inner):
    return Qwen2MLP(Qwen2Config(hidden_size=hidden, intermediate_size=inner))


def conv1d(hidden, inner):
    return GPT2MLP(inner, GPT2Config(n_embd=hidden, resid_pdrop=0.0))


def fused(hidden, inner):
    return Phi3MLP(Phi3Config(hidden_size=hidden, intermediate_size=inner, pad_token_id=0))


FORMS = {"gated": gated, "plain": Plain, "conv1d": conv1d, "fused": fused}


def layer_config(hidden, num_experts, top_k, has_classifier=False, conditional=False, earlier=()):
    """The configuration of a model whose one layer is expanded."""
    return LayerMoEConfig(
        backbone_model_type="qwen2", hidden_size=hidden, num_hidden_layers=1, num_experts_per_layer=[num_experts],
        router_top_k=top_k, classifier_layers=[0] * has_classifier, conditional_routing=conditional,
        earlier_experts_per_layer=[[count] for count in earlier] or None,
    )  # fmt: skip


def build(form="gated", num_experts=4, top_k=2, hidden=16, inner=24, dtype=torch.float32, has_classifier=False):
    torch.manual_seed(0)
    ffn = FORMS[form](hidden, inner) if isinstance(form, str) else form(hidden, inner)
    layer = ExpandedFFN(ffn, layer_config(hidden, num_experts, top_k, has_classifier), 0, RoutingControl())
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return layer.to(dtype)


def drawn(T, K, N, dtype=torch.float32, missing=0.3, hidden=16):
    """Inputs, weights and indices of `dispatch`, some of which are N: no expert."""
    draw = torch.Generator().manual_seed(T * 100 + K * 10 + N)
    x_Th = torch.randn(T, hidden, generator=draw).to(dtype)
    index_TK = torch.rand(T, N, generator=draw).argsort(-1)[:, :K]
    weights_TK = torch.rand(T, K, generator=draw).softmax(-1)
    return x_Th, weights_TK, index_TK.masked_fill(torch.rand(T, K, generator=draw) < missing, N)


def slow(experts, x_Th, weights_TK, index_TK):
    """`y = sum_k weight_k E_index_k(x)`, token by token."""
    rows = []
    for x, weights, index in zip(x_Th, weights_TK, index_TK.tolist(), strict=True):
        chosen = [w * experts[e](x) for w, e in zip(weights, index, strict=True) if e < len(experts)]
        rows.append(sum(chosen, torch.zeros_like(x)))
    return torch.stack(rows)


def gradients(y_Th, inputs):
    """Of the input, the weights and all parameters; zero where the graph does not reach."""
    found = torch.autograd.grad(y_Th.double().square().sum(), inputs, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]


def assert_is_the_definition(run, experts, x_Th, weights_TK, index_TK, autocast=False):
    """Compares output and gradients of `run(experts, x, weights, index)` with slow ones in float64."""
    x_Th, weights_TK = x_Th.detach().requires_grad_(), weights_TK.detach().requires_grad_()
    trained = [parameter.requires_grad for parameter in experts.parameters()]
    exact = copy.deepcopy(experts).double()
    x64, weights64 = (one.detach().double().requires_grad_() for one in (x_Th, weights_TK))
    with torch.autocast(x_Th.device.type, torch.bfloat16, enabled=autocast):
        y_Th = run(experts, x_Th, weights_TK, index_TK)
    expected = slow(exact, x64, weights64, index_TK)
    assert y_Th.shape == expected.shape
    assert y_Th.dtype == (torch.bfloat16 if autocast else x_Th.dtype)
    pairs = [(y_Th, expected)]
    own = [x_Th, weights_TK, *(p for p, wanted in zip(experts.parameters(), trained, strict=True) if wanted)]
    theirs = [x64, weights64, *(p for p, wanted in zip(exact.parameters(), trained, strict=True) if wanted)]
    pairs += zip(gradients(y_Th, own), gradients(expected, theirs), strict=True)
    tolerance = 8e-2 if autocast else TOLERANCE[x_Th.dtype]
    for one, other in pairs:
        scale = max(other.abs().max().item(), 1e-6)
        torch.testing.assert_close(one.double(), other, rtol=0, atol=tolerance * scale)


def ask(layer, **changes) -> None:
    """From here on, forward passes of this thread through the layer have these values in their request."""
    layer.control.own.request = replace(layer.control.request, **changes)

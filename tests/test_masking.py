"""Elbayad et al.'s regularisers by construction: what is masked, what is left, and that they cost nothing when off."""

import pytest
import torch
from conftest import enable_checkpointing, refused, tiny_config
from layers import Plain, ask, layer_config
from test_dispatch import HIDDEN, WithResidual

from hf_moe_expand import LayerMoEConfig, LayerMoEForCausalLM
from hf_moe_expand.modeling.expanded_ffn import ExpandedFFN
from hf_moe_expand.modeling.part_cmr import ConditionalFFN
from hf_moe_expand.modeling.routing_control import Routing, RoutingControl
from hf_moe_expand.trainers import Masking, mask_routing
from hf_moe_expand.trainers.losses import load_balance_loss


def build(num_experts=4, top_k=2, conditional=False, ffn=Plain):
    """An expanded layer that can be masked as if it were a model of its own."""
    torch.manual_seed(0)
    config = layer_config(HIDDEN, num_experts, top_k, conditional=conditional)
    layer = (ConditionalFFN if conditional else ExpandedFFN)(ffn(HIDDEN, 10), config, 0, RoutingControl())
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    layer.config, layer.routing_control, layer.expanded_ffns = config, layer.control, lambda: {0: layer}
    return layer


def tiny(counts=(3, 1, 3), **fields):
    torch.manual_seed(0)
    config = LayerMoEConfig.from_dense(tiny_config("qwen2"), num_experts_per_layer=list(counts), **fields)
    return LayerMoEForCausalLM(config)


@pytest.mark.parametrize("ffn", [Plain, WithResidual])
@pytest.mark.parametrize("name", ["expert_output", "final_output"])
def test_the_layer_adds_up_what_is_left(ffn, name):
    layer = build(ffn=ffn).train()
    x, residual = torch.randn(40, HIDDEN), torch.randn(40, HIDDEN)
    inputs = (x,) if ffn is Plain else (x, residual)
    torch.manual_seed(3)
    with mask_routing(layer, Masking(**{name: 0.5})):
        found = layer(*inputs)
    top = (x @ layer.router.weight.T).softmax(-1).topk(2)
    torch.manual_seed(3)
    keep = torch.rand(40, 2 if name == "expert_output" else 1) >= 0.5
    weights = top.values / top.values.sum(-1, keepdim=True) * keep
    zeros = () if ffn is Plain else (torch.zeros_like(x[:1]),)
    for t in range(40):
        wanted = sum(weights[t, k] * layer.experts[top.indices[t, k]](x[t : t + 1], *zeros) for k in range(2))
        wanted = wanted if ffn is Plain else wanted + residual[t]
        torch.testing.assert_close(found[t : t + 1], wanted.expand(1, -1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_at_zero_and_in_evaluation_nothing_is_drawn(mode):
    layer = build(conditional=True).train(mode == "train")
    x = torch.randn(3, 7, HIDDEN)
    expected = layer(x)
    torch.manual_seed(4)
    before = torch.get_rng_state()
    with mask_routing(layer, Masking() if mode == "train" else Masking(0.9, 0.9, 0.9, 0.9)):
        assert torch.equal(layer(x), expected)
    assert torch.equal(torch.get_rng_state(), before)
    with mask_routing(layer, Masking(expert_output=0.9)):
        assert torch.equal(layer(x), expected) == (mode == "eval")
    assert torch.equal(layer(x), expected)  # it ends with its context


def test_the_balance_loss_sees_the_routing_unmasked():
    model = tiny().train()
    ids = torch.randint(0, 256, (2, 20))
    losses = []
    for masks in (Masking(), Masking(expert_output=0.8, final_output=0.5)):
        with mask_routing(model, masks), model.capture_routing() as routing:
            model(ids)
        losses.append(load_balance_loss(routing.layers[0].routed_logits, 2))  # the first layer's input is the same
    assert torch.equal(*losses)


@pytest.mark.parametrize("masks", [Masking(gating_dropout=0.5), Masking(0.3, 0.2, 0.3, 0.5)])
def test_several_forward_passes_may_come_before_the_backward_pass(masks):
    model, taken = tiny(counts=(2, 3, 3), conditional_routing=masks.conditional_routing > 0).train(), []
    batches = torch.randint(0, 256, (6, 2, 20))
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            enable_checkpointing(model)
        model.zero_grad()
        torch.manual_seed(7)
        with mask_routing(model, masks):
            losses = []
            for ids in batches:
                with model.capture_routing() as routing:
                    losses.append(model(ids, labels=ids).loss)
                local = {layer.weights.shape[1] == 1 for layer in routing}
                assert len(local) == 1  # all layers take a batch so, or none
                taken += local
            sum(losses).backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    if not masks.conditional_routing:
        assert 0 < sum(taken[:6]) < 6  # some batches are local, and some are not
    assert taken[:6] == taken[6:]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_gating_dropout_takes_whole_batches():
    layer = build().train()
    x = torch.randn(8, HIDDEN)
    local = torch.cat([expert(part) for expert, part in zip(layer.experts, x.split(2), strict=True)])
    routed = build().train()(x)
    torch.manual_seed(0)
    with mask_routing(layer, Masking(gating_dropout=0.4)):
        found = [layer(x) for _ in range(300)]
    is_local = [torch.allclose(y, local, atol=1e-6) for y in found]
    assert all(here or torch.allclose(y, routed, atol=1e-6) for here, y in zip(is_local, found, strict=True))
    assert 0.3 < sum(is_local) / 300 < 0.5


@pytest.mark.parametrize(("ffn", "num_experts", "top_k"), [(Plain, 4, 2), (Plain, 2, 1), (WithResidual, 4, 1)])
def test_conditional_routing_is_its_definition(ffn, num_experts, top_k):
    layer = build(num_experts, top_k, conditional=True, ffn=ffn).train()
    x, residual = torch.randn(9, HIDDEN), torch.randn(9, HIDDEN)
    found = layer(x) if ffn is Plain else layer(x, residual)
    zeros = () if ffn is Plain else (torch.zeros(1, HIDDEN),)
    for t in range(9):
        token = x[t : t + 1]
        gate = torch.sigmoid(layer.conditional_gate.weight[0] @ x[t])
        scores = (layer.router.weight[1:] @ x[t]).softmax(-1)  # expert 0 is outside the routed set
        chosen = scores.topk(min(top_k, num_experts - 1))
        moe = sum(
            w / chosen.values.sum() * layer.experts[1 + int(e)](token, *zeros)
            for w, e in zip(chosen.values, chosen.indices, strict=True)
        )
        wanted = (1 - gate) * layer.experts[0](token, *zeros) + gate * moe
        wanted = wanted if ffn is Plain else wanted + residual[t]
        torch.testing.assert_close(found[t : t + 1], wanted, rtol=1e-4, atol=1e-5)


def test_gate_masking_leaves_the_shared_expert_alone():
    layer = build(conditional=True).train()
    x = torch.randn(400, HIDDEN)
    torch.manual_seed(2)
    with mask_routing(layer, Masking(conditional_routing=0.5)):
        found = layer(x)
    open_gates = build(conditional=True).train()(x)
    shared = layer.experts[0](x)
    is_shared = [torch.equal(a, b) for a, b in zip(found, shared, strict=True)]
    same = [torch.allclose(a, b, atol=1e-6) for a, b in zip(found, open_gates, strict=True)]
    assert all(a != b for a, b in zip(is_shared, same, strict=True))
    assert 0.4 < sum(is_shared) / 400 < 0.6


def test_the_routing_that_losses_see_is_each_experts_share():
    layer = build(conditional=True).train()
    x = torch.randn(50, HIDDEN)
    ask(layer, capture=(routing := Routing()))
    layer(x)
    found = routing.layers[0]
    gate = torch.sigmoid(x @ layer.conditional_gate.weight[0])
    scores = found.router_logits.softmax(-1)
    torch.testing.assert_close(scores[:, 0], 1 - gate)
    torch.testing.assert_close(scores[:, 1:], gate[:, None] * (x @ layer.router.weight[1:].T).softmax(-1))
    routed = x @ layer.router.weight[1:].T
    torch.testing.assert_close(load_balance_loss(found.routed_logits, 2), load_balance_loss(routed, 2))


def test_masks_need_gates():
    refused(mask_routing, tiny(), Masking(conditional_routing=0.1), says="masks the routed experts beside a shared one")

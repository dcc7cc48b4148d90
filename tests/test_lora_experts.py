"""LoRA experts: expert 0 with low-rank updates, against copied FFNs whose weights are written out."""

import pytest
import torch
from conftest import BACKBONE_NAMES, refused, tensors, tiny_config
from torch import nn

from hf_moe_expand import LayerMoEConfig, LayerMoEForCausalLM, Plan, expand_checkpoint
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.modeling.part_lora import LoraLinear, lora_expert
from hf_moe_expand.modeling.updates import LoraFactor
from hf_moe_expand.report.inspection import inspect_checkpoint
from hf_moe_expand.trainers import Masking, mask_routing

COUNTS, RANK, ALPHA = [3, 1, 4], 4, 6.0
PLAN = Plan("mola", COUNTS, [2], top_k=2, old=["en"], new=["el"])
LORA = {"expert_kind": "lora", "lora_rank": RANK, "lora_alpha": ALPHA}


def build(backbone="qwen2", top_k=2, **fields):
    """A model whose updates are far from nothing."""
    torch.manual_seed(0)
    config = LayerMoEConfig.from_dense(
        tiny_config(backbone), num_experts_per_layer=COUNTS, classifier_layers=[2], router_top_k=top_k, **LORA | fields
    )
    model = LayerMoEForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.mark.parametrize("backbone", BACKBONE_NAMES)
def test_every_backbones_ffn_has_its_weights_in_linear_layers_alone(backbone):
    with torch.device("meta"):
        model = LayerMoEForCausalLM(build(backbone).config)
    for ffn in model.expanded_ffns().values():
        for expert in ffn.experts[1:]:
            assert type(expert) is type(ffn.experts[0])
            assert {type(m) for m in expert.modules() if any(True for _ in m.parameters(recurse=False))} == {
                *(type(m) for m in expert.modules() if isinstance(m, LoraFactor))
            }
            assert all(parameter.device.type == "meta" for parameter in expert.parameters())


def test_a_weight_outside_of_linear_layers_is_refused():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    refused(lora_expert, Scaled(), 2, 4, says="Scaled has a weight outside linear layers, scale", raises=ValueError)


def test_the_seed_decides_and_updates_differ(base, tmp_path):
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        expand_checkpoint(base, tmp_path / name, PLAN, **LORA, seed=seed)
    assert (tmp_path / "same/model.safetensors").read_bytes() == (tmp_path / "one/model.safetensors").read_bytes()
    first, other = tensors(tmp_path / "one"), tensors(tmp_path / "other")
    drawn = {name for name in first if not torch.equal(first[name], other[name])}
    assert drawn == {name for name in first if "router" in name or "lora_A" in name}
    place = "model.layers.{}.mlp.experts.{}.{}_proj.lora_A.weight"
    same_shape = [first[place.format(*at)] for at in ((0, 1, "gate"), (0, 1, "up"), (0, 2, "gate"), (2, 1, "gate"))]
    assert len({tuple(value.flatten().tolist()) for value in same_shape}) == 4


@pytest.mark.parametrize(("top_k", "active"), [(1, 1), (2, 2), (4, 3)])
def test_inspect_counts_updates(base, tmp_path, top_k, active):
    plan = Plan("moe-lpr", [4, 4, 4], top_k=top_k, old=["en"], new=["el"])
    report = expand_checkpoint(base, tmp_path / "out", plan, **LORA)
    found = inspect_checkpoint(tmp_path / "out")
    update, router = RANK * 3 * (32 + 48), 4 * 32
    assert found.base == report.base_parameters
    assert found.total == report.parameters == found.base + 3 * (3 * update + router)
    assert found.active == found.base + 3 * (active * update + router)  # expert 0's weights are always needed
    assert found.trainable["post-pretrain"] == 3 * (3 * update + router)


def test_refusals(base, tmp_path):
    for said, options in (
        ("expert_kind is 'qlora': must be 'ffn', 'lora'", {"expert_kind": "qlora"}),
        ("lora_rank is 0: must be at least 1", {"lora_rank": 0}),
        ("lora_rank is 32: must be below 32, the narrowest side", {"lora_rank": 32}),
        ("lora_alpha is 0: must be larger than 0", {"lora_alpha": 0}),
    ):
        refused(expand_checkpoint, base, tmp_path / "out", PLAN, says=said, **LORA | options)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="lora_rank is None and lora_alpha 1: LoRA experts need a rank"):
        LayerMoEConfig.from_dense(tiny_config("qwen2"), expert_kind="lora", lora_alpha=1)
    with pytest.raises(ValueError, match="expert_kind is 'ia3'; known: ffn, lora"):
        LayerMoEConfig.from_dense(tiny_config("qwen2"), expert_kind="ia3")


def test_dropout_of_the_updates_inputs():
    """As PEFT's, before A: in training alone, and inside the context alone."""
    model = build()
    update = next(module for module in model.modules() if isinstance(module, LoraLinear)).train()
    x = torch.randn(5, update.lora_A.weight.shape[1], generator=torch.Generator().manual_seed(1))
    plain = update(x)
    with mask_routing(model, Masking(lora_dropout=0.5)):
        torch.manual_seed(3)
        masked = update(x)
        torch.manual_seed(3)
        low = update.lora_A(torch.dropout(x, 0.5, True))
        own = update.owner[0].get_submodule(update.name)(x)
        torch.testing.assert_close(masked, own + update.scaling * update.lora_B(low))
        assert not torch.allclose(masked, plain)
        assert torch.equal(update.eval()(x), plain)
    assert torch.equal(update.train()(x), plain)
    copies = LayerMoEForCausalLM(LayerMoEConfig.from_dense(tiny_config("qwen2"), num_experts_per_layer=COUNTS))
    with pytest.raises(InputError, match=r"masking\.lora_dropout is for LoRA experts, but the checkpoint has none"):
        mask_routing(copies, Masking(lora_dropout=0.5))

"""`experts_implementation`: the switch of transformers' own mixtures, on expanded models."""

import logging

import pytest
import torch
from conftest import refused, run_fresh, tiny_config
from transformers import AutoConfig, AutoModelForCausalLM

from hf_moe_expand import LayerMoEConfig, LayerMoEForCausalLM, LayerMoEModel
from hf_moe_expand.modeling import dispatch as dispatch_module

NAMES = ("eager", "grouped_mm", "batched_mm")
IDS = torch.arange(3, 27).view(2, 12)
GREEDY = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 256, "attention_mask": torch.ones_like(IDS)}


def build(cls=LayerMoEForCausalLM, backbone="qwen2", **fields):
    torch.manual_seed(0)
    config = LayerMoEConfig.from_dense(
        tiny_config(backbone), num_experts_per_layer=[3, 1, 4], classifier_layers=[2], **fields
    )
    return cls(config).eval()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    build().save_pretrained(folder)
    return folder


def implementations(monkeypatch):
    """A list that receives how each layer's experts run."""
    ran = []
    for name in ("run_all", "run_in_turn"):
        original = getattr(dispatch_module, name)
        monkeypatch.setattr(dispatch_module, name, lambda *args, f=original, n=name: ran.append(n) or f(*args))
    return ran


# The way of a layer with more experts than a token takes.
RUNS = {"eager": ("eager", "run_in_turn"), "grouped_mm": (None, "run_in_turn"), "batched_mm": (None, "run_in_turn")}


@pytest.mark.parametrize("name", NAMES)
def test_the_name_is_taken_where_the_library_takes_it(name, saved, monkeypatch):
    given = AutoModelForCausalLM.from_pretrained(saved, experts_implementation=name).eval()
    config = AutoConfig.from_pretrained(saved, experts_implementation=name)
    configured = AutoModelForCausalLM.from_pretrained(saved, config=config).eval()
    switched = AutoModelForCausalLM.from_pretrained(saved).eval()
    assert switched.get_experts_implementation() == {"": None}
    expected = switched(IDS).logits
    generated = switched.generate(IDS, **GREEDY)
    switched.set_experts_implementation(name)
    ran = implementations(monkeypatch)
    known, way = RUNS[name]
    for model in (given, configured, switched):
        ran.clear()
        assert model.config._experts_implementation == known
        torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-4, atol=1e-5)
        assert ran == [way] * 2
        assert torch.equal(model.generate(IDS, **GREEDY), generated)


def test_the_model_without_a_head_and_every_backbone_take_it():
    assert build(LayerMoEModel, experts_implementation="eager").config._experts_implementation == "eager"
    model = build(backbone="bloom", experts_implementation="eager")  # whose FFN takes the residual
    torch.testing.assert_close(model(IDS).logits, build(backbone="bloom")(IDS).logits)


@pytest.mark.parametrize("name", ["grouped_mm", "batched_mm"])
def test_a_name_for_stacked_experts_is_the_default_with_one_warning(name, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("hf_moe_expand"), "propagate", True)
    dispatch_module.logger.warning_once.cache_clear()
    model = build(experts_implementation="eager")
    for _ in range(2):
        model.set_experts_implementation(name)
    assert model.config._experts_implementation is None
    (record,) = [record for record in caplog.records if name in record.getMessage()]
    assert "default" in record.getMessage()


@pytest.mark.parametrize("name", ["deepgemm", "grouped", ""])
def test_an_unknown_name_is_refused_with_the_known_ones(name, saved):
    for load in (
        lambda: AutoModelForCausalLM.from_pretrained(saved, experts_implementation=name),
        lambda: build().set_experts_implementation(name),
    ):
        refused(load, says=r"known: eager, grouped_mm, batched_mm", raises=ValueError)


def test_a_checkpoint_without_the_package_takes_it(saved):
    code = (
        "import torch\nfrom transformers import AutoModelForCausalLM\nfound = []\n"
        f"for name in {NAMES}:\n"
        "    model = AutoModelForCausalLM.from_pretrained(\n"
        f"        {str(saved)!r}, trust_remote_code=True, experts_implementation=name)\n"
        "    found.append(model.eval()(torch.arange(3, 27).view(2, 12)).logits)\n"
        "    print(model.config._experts_implementation, (found[-1] - found[0]).abs().max().item() < 1e-5)\n"
    )
    assert run_fresh(code).split() == [word for name in NAMES for word in (str(RUNS[name][0]), "True")]

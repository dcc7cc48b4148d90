"""`experts_implementation`: the switch of transformers' own mixtures, on expanded models."""

import logging

import pytest
import torch
from conftest import run_fresh, tiny_config
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
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
    for name in ("run_grouped", "dispatch_sorted"):
        original = getattr(dispatch_module, name)

        def call(*args, original=original, name=name):
            ran.append(("batched_mm" if args[-1] else "grouped_mm") if name == "run_grouped" else "eager")
            return original(*args)

        monkeypatch.setattr(dispatch_module, name, call)
    return ran


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
    for model in (given, configured, switched):
        ran.clear()
        assert model.config._experts_implementation == name
        torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-4, atol=1e-5)
        assert ran == [name] * 2
        assert torch.equal(model.generate(IDS, **GREEDY), generated)


def test_the_model_without_a_head_and_every_backbone_take_it():
    assert build(LayerMoEModel, experts_implementation="grouped_mm").config._experts_implementation == "grouped_mm"
    model = build(backbone="bloom", experts_implementation="grouped_mm")  # whose FFN takes the residual
    torch.testing.assert_close(model(IDS).logits, build(backbone="bloom")(IDS).logits)


def test_the_default_runs_all_experts_at_once_but_for_few_tokens_on_a_cpu(monkeypatch):
    model = build()  # layers of 3 and 4 experts, 2 of them for each token
    ran = implementations(monkeypatch)

    def kinds(tokens):
        ran.clear()
        model(torch.arange(3, 3 + tokens).unsqueeze(0))
        return ran

    monkeypatch.setattr(dispatch_module, "_FEW_ASSIGNMENTS", 128)
    assert kinds(65) == ["grouped_mm"] * 2
    assert kinds(64) == ["eager"] * 2
    assert kinds(16) == ["eager", "grouped_mm"]  # 8 assignments an expert in the second layer
    assert kinds(12) == kinds(1) == ["grouped_mm"] * 2
    with torch.autocast("cpu", torch.bfloat16):
        assert kinds(64) == kinds(1) == ["grouped_mm"] * 2
    model.train()
    assert kinds(64) == ["eager"] * 2
    model.to(torch.bfloat16)
    assert kinds(64) == kinds(1) == ["grouped_mm"] * 2
    model.eval()
    with torch.no_grad():
        assert kinds(64) == kinds(2) == ["grouped_mm"] * 2
        assert kinds(1) == []  # `dispatch_one_token`


@pytest.mark.parametrize("name", ["deepgemm", "grouped", ""])
def test_an_unknown_name_is_refused_with_the_known_ones(name, saved):
    for load in (
        lambda: AutoModelForCausalLM.from_pretrained(saved, experts_implementation=name),
        lambda: build().set_experts_implementation(name),
    ):
        with pytest.raises(ValueError, match=r"known: eager, grouped_mm, batched_mm"):
            load()


def test_one_that_the_device_lacks_falls_back_with_one_warning(monkeypatch, caplog):
    model = build(experts_implementation="grouped_mm")
    expected = model(IDS).logits
    monkeypatch.setattr(dispatch_module, "has_grouped_mm", lambda *_: False)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("hf_moe_expand"), "propagate", True)
    dispatch_module.logger.warning_once.cache_clear()
    with caplog.at_level("WARNING"):
        torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-4, atol=1e-5)
        model(IDS)
    (record,) = [record for record in caplog.records if "experts_implementation" in record.getMessage()]
    assert "'grouped_mm'" in record.getMessage()
    caplog.clear()
    model.set_experts_implementation(None)  # a default that is not there is no request
    model(IDS)
    assert not caplog.records


def test_a_checkpoint_without_the_package_takes_it(saved):
    code = (
        "import torch\nfrom transformers import AutoModelForCausalLM\nfound = []\n"
        f"for name in {NAMES}:\n"
        "    model = AutoModelForCausalLM.from_pretrained(\n"
        f"        {str(saved)!r}, trust_remote_code=True, experts_implementation=name)\n"
        "    found.append(model.eval()(torch.arange(3, 27).view(2, 12)).logits)\n"
        "    print(model.config._experts_implementation, (found[-1] - found[0]).abs().max().item() < 1e-5)\n"
    )
    assert run_fresh(code).split() == [word for name in NAMES for word in (name, "True")]


def test_generation_reads_no_routing_on_the_host():
    model = build(experts_implementation="grouped_mm")
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    for module in model.modules():
        for kind in (module._parameters, module._buffers):
            for name, value in kind.items():
                if value is not None:
                    converted = fake.from_tensor(value)
                    kind[name] = nn.Parameter(converted) if kind is module._parameters else converted
    with fake, torch.no_grad():
        prompt = model(torch.zeros(2, 6, dtype=torch.long), use_cache=True)
        step = model(torch.zeros(2, 1, dtype=torch.long), past_key_values=prompt.past_key_values)
    assert step.logits.shape == (2, 1, 257)

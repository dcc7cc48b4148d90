"""What a plan will cost, against a model that was really expanded: its parameters, its optimizer and its arithmetic."""

import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
import torch
from conftest import byte_tokenizer, invoke, save_dense
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from hf_moe_expand import LayerMoEForCausalLM, Plan, expand_checkpoint, freeze
from hf_moe_expand.errors import InputError
from hf_moe_expand.forecast import PROCESS, forecast

TOKENS = 8


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("forecast")
    save_dense(root / "base", tie_word_embeddings=False)
    save_dense(root / "tied", tie_word_embeddings=True)
    return root


def uniform(experts=3, classifiers=(0, 2)):
    return Plan("moe-lpr", [experts] * 3, list(classifiers), old=["en"], new=["el"])


def dmoe(experts=2):
    return Plan("dmoe", [1, experts, experts], new=["el", "hu"], groups=[["el"], ["hu"]])


def expanded(root, base, plan):
    expand_checkpoint(root / base, root / "expanded", plan, overwrite=True)
    return AutoModelForCausalLM.from_pretrained(
        root / "expanded", trust_remote_code=True, attn_implementation="eager", dtype=torch.float32
    )


def numel(parameters):
    return sum(parameter.numel() for parameter in parameters)


def expert_sizes(model):
    return [numel(expert.parameters()) for expert in next(iter(model.expanded_ffns().values())).experts]


def counted(model, expert=None):
    """Operations a token, forward and backward: the products with weights that a profiler sees, and norms and biases by
    the same rule, which are no matrix product.

    The gradient is asked of the embeddings too, so that every weight passes it on.
    """
    config = model.config
    embeddings = torch.randn(1, TOKENS, config.hidden_size, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        if expert is None:
            loss = model(inputs_embeds=embeddings).logits.sum()
        else:
            with model.use_expert(expert), model.capture_routing() as routing:
                loss = model(inputs_embeds=embeddings).logits.sum()
            loss = loss + sum(layer.router_logits.sum() for layer in routing.layers.values())  # which group it is
        loss.backward()
    # Scores and their sum of values: two products forward, four backward, of 2 operations each.
    attention = 3 * 2 * 2 * TOKENS**2 * config.num_attention_heads * config.head_dim * config.num_hidden_layers
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    rest = 4 * numel(vectors) + 2 * numel(parameter for parameter in vectors if parameter.requires_grad)
    return (counter.get_total_flops() - attention) / TOKENS + rest


@pytest.mark.parametrize("base", ["base", "tied"])
@pytest.mark.parametrize("plan", [uniform(), Plan("moe-lpr", [2, 4, 1], [1], 3, old=["en"], new=["el"])])
def test_parameters_are_those_of_the_expanded_model(root, base, plan):
    found, model = forecast(root / base, plan), expanded(root, base, plan)
    dense = AutoModelForCausalLM.from_pretrained(root / base)
    assert found.model.total == numel(model.parameters())
    assert found.model.base == numel(dense.parameters())
    (expert,) = set(expert_sizes(model))
    idle = sum(max(count - plan.top_k, 0) for count in plan.experts_per_layer)
    assert found.model.active == numel(model.parameters()) - idle * expert
    stages = {stage.name: stage for stage in found.stages}
    assert list(stages) == ["post-pretrain", "review", "full fine-tuning of the base"]
    for name in ("post-pretrain", "review"):
        freeze(model, name)
        trains = [(key, p) for key, p in model.named_parameters() if p.requires_grad]
        assert stages[name].trained == numel(p for _, p in trains)
        if name == "review":
            assert all("router" in key or "classifier" in key for key, _ in trains)
    assert stages["full fine-tuning of the base"].trained == numel(dense.parameters())


@pytest.mark.parametrize("stage", ["post-pretrain", "review"])
def test_memory_is_that_of_weights_gradients_and_adamw(root, stage):
    """One step of a model whose tokens reach every expert; the counter that AdamW keeps of each tensor is left out."""
    plan = uniform()
    model = expanded(root, "base", plan)
    freeze(model, stage)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    ids = byte_tokenizer()("ένα δύο τρία, one two three four five six", return_tensors="pt").input_ids
    with model.capture_routing() as routing:
        loss = model(ids, labels=ids).loss
    if stage == "review":
        loss = loss + sum(routing.layers[layer].classifier_logits.sum() for layer in plan.classifier_layers)
    loss.backward()
    optimizer.step()
    parameters = list(model.parameters())
    tensors = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
    tensors += [tensor for state in optimizer.state.values() for tensor in state.values() if tensor.dim()]
    used = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    (cost,) = [cost for cost in forecast(root / "base", plan).stages if cost.name == stage]
    assert cost.memory == used
    full = forecast(root / "base", plan).stages[-1]
    assert full.memory == 16 * full.trained


@pytest.mark.parametrize("base", ["base", "tied"])
@pytest.mark.parametrize("stage", ["post-pretrain", "review"])
def test_arithmetic_is_what_a_profiler_counts(root, base, stage):
    plan = uniform(experts=2, classifiers=())  # every token meets every expert
    model = expanded(root, base, plan)
    freeze(model, stage)
    (cost,) = [cost for cost in forecast(root / base, plan).stages if cost.name == stage]
    assert cost.flops == counted(model)


@pytest.mark.parametrize(("stage", "expert"), [("group", 1), ("joint", None)])
def test_arithmetic_of_dmoe(root, stage, expert):
    plan = dmoe()
    model = expanded(root, "base", plan)
    freeze(model, stage)
    found = forecast(root / "base", plan)
    assert [cost.name for cost in found.stages] == ["group", "joint", "full fine-tuning of the base"]
    (cost,) = [cost for cost in found.stages if cost.name == stage]
    assert cost.trained == numel(model.parameters())
    assert cost.flops == counted(model, expert)


def test_arithmetic_of_the_bases_fine_tuning(root):
    dense = AutoModelForCausalLM.from_pretrained(root / "base", attn_implementation="eager")
    assert forecast(root / "base", uniform()).stages[-1].flops == counted(dense)


def test_of_several_experts_a_token_meets_k_each_as_often(root):
    plan = Plan("moe-lpr", [4, 4, 4], [0], 3, old=["en"], new=["el"])
    cost = forecast(root / "base", plan).stages[0]
    model = expanded(root, "base", plan)
    expert = expert_sizes(model)[0]
    chosen = list(combinations(range(4), 3))  # every set of experts as likely; the original does not train
    trained = sum(len(set(experts) - {0}) for experts in chosen) / len(chosen) * expert * 3
    trained += numel(p for name, p in model.named_parameters() if "router" in name)
    met = numel(model.parameters()) - 3 * expert - model.get_input_embeddings().weight.numel()
    assert cost.flops == pytest.approx(4 * met + 2 * trained)


def test_what_the_command_prints(root, tmp_path):
    uniform().save(tmp_path / "plan.json")
    text = invoke("inspect", root / "base", "--plan", tmp_path / "plan.json", "--tokens", 6e9, "--tflops", 50)
    found = forecast(root / "base", uniform())
    assert f"parameters          {found.model.total:,} (" in text
    rows = {line[:30].strip(): line[30:].split() for line in text.splitlines() if len(line.split()) > 4}
    for stage in found.stages:
        trains, memory, unit, on_top, of_activations, giga, hours = rows[stage.name]
        assert (trains, unit, of_activations) == (f"{stage.trained:,}", "GB", "GB")
        assert float(on_top) == pytest.approx(stage.activations / 1e9, abs=0.051)
        assert float(memory) == pytest.approx(stage.memory / 1e9, abs=0.051)
        assert float(giga) == pytest.approx(stage.flops / 1e9, abs=0.0051)
        assert float(hours) == pytest.approx(stage.flops * 6e9 / 50e12 / 3600, abs=0.051)
    assert "at 50 TFLOP/s, if the stage trains on 6,000,000,000 tokens; a review needs few tokens" in text
    assert f"the process itself{PROCESS / 1e9:>37.1f} GB\n" in text
    short = invoke("inspect", root / "base", "--plan", tmp_path / "plan.json")
    assert "hours" not in short
    dmoe().save(tmp_path / "dmoe.json")
    text = invoke("inspect", root / "base", "--plan", tmp_path / "dmoe.json", "--tokens", 6e9)
    assert "joint" in text
    assert "review" not in text


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="only Linux says it there")
def test_the_process_takes_about_as_much_memory_before_it_loads_a_model():
    code = "import hf_moe_expand.stages.run, trl, datasets\nfrom transformers import Trainer\n"
    code += "print(open('/proc/self/status').read())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    resident = 1024 * int(re.search(r"VmRSS:\s+(\d+) kB", done.stdout)[1])
    assert 0.5 * PROCESS < resident < 2 * PROCESS  # torch for another device is larger


def test_a_forecast_reads_no_weights(root, tmp_path):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_bytes((root / "base" / "config.json").read_bytes())
    assert forecast(tmp_path / "bare", uniform()) == forecast(root / "base", uniform())


def test_bad_input(root, tmp_path):
    plan = tmp_path / "plan.json"
    uniform().save(plan)
    expanded(root, "base", uniform())
    assert LayerMoEForCausalLM.from_pretrained(root / "expanded")
    with pytest.raises(InputError, match="is an expanded checkpoint already"):
        invoke("inspect", root / "expanded", "--plan", plan)
    with pytest.raises(InputError, match=r"plan is for 2 layers, but \S*base has 3"):
        forecast(root / "base", Plan("moe-lpr", [2, 2], old=["en"], new=["el"]))
    with pytest.raises(InputError, match="give a dense base and its first plan"):
        forecast(root / "base", Plan("moe-lpr", [3, 3, 3], old=["en"], new=["el"], grows_from=[2, 2, 2]))
    for option, value in (("--tokens", 0), ("--tokens", -5), ("--tokens", "nan"), ("--tokens", "inf"), ("--tflops", 0)):
        with pytest.raises(InputError, match="must be above 0"):
            invoke("inspect", root / "base", "--plan", plan, option, value)
    with pytest.raises(InputError, match="--tokens belongs to --plan"):
        invoke("inspect", root / "expanded", "--tokens", 5)

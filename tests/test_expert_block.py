"""The memory under a layer's experts: one block of which nothing else takes notice."""

import copy
import gc
import importlib
import pickle
import sys
import weakref
from io import BytesIO
from pathlib import Path
from threading import Thread
from types import ModuleType

import pytest
import torch
from conftest import byte_tokenizer, load_offloaded, tiny_dense
from peft import LoraConfig, get_peft_model
from safetensors.torch import load, save
from torch import nn
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM

from hf_moe_expand import LayerMoEConfig, LayerMoEForCausalLM, Plan, expand_model
from hf_moe_expand.modeling import expert_block, weight_block

IDS = torch.arange(3, 27).view(2, 12)


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = LayerMoEConfig.from_dense(tiny_dense("qwen2").config, num_experts_per_layer=[3, 1, 4], router_top_k=2)
    made = LayerMoEForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    made(IDS)
    return made


def blocks(model):
    """The blocks that hold, of all layers."""
    found = []
    for ffn in model.expanded_ffns().values():
        form = ffn.block.forms[model.training]
        weights = ffn.block.weights(ffn.experts, form, torch.zeros(1))
        found += [None if weights is None else one.block for one in weights or [None]]
    return found


def assert_right(model):
    """Whatever lies beneath, the output is that of the experts run as modules."""
    inner = getattr(model, "get_base_model", lambda: model)()
    before = inner.config._experts_implementation
    found = model(IDS).logits
    inner.set_experts_implementation("eager")
    torch.testing.assert_close(found, model(IDS).logits, rtol=1e-4, atol=1e-5)
    inner.set_experts_implementation(before)


def test_weights_are_slices_of_one_block_and_storages_of_their_own(model):
    ffn = model.expanded_ffns()[2]
    gate_up, down = (one.block for one in ffn.block.weights(ffn.experts, ffn.block.forms[0], torch.zeros(1)))
    assert gate_up.shape == (4, 96, 32)
    assert down.shape == (4, 32, 48)
    for number, expert in enumerate(ffn.experts):
        place = 3 - number  # last expert first
        assert expert.gate_proj.weight.data_ptr() == gate_up[place].data_ptr()
        assert expert.up_proj.weight.data_ptr() == gate_up[place, 48:].data_ptr()
        assert expert.down_proj.weight.data_ptr() == down[place].data_ptr()
        assert torch.equal(gate_up[place, 48:], expert.up_proj.weight)
        assert expert.up_proj.weight.untyped_storage().nbytes() == 48 * 32 * 4
    storages = {value.untyped_storage().data_ptr() for value in model.state_dict().values()}
    assert len(storages) == len({id(parameter) for parameter in model.parameters()})


def test_files_and_copies_see_nothing_of_it(model, tmp_path):
    assert None not in blocks(model)
    state = dict(model.model.state_dict())
    again = load(save(state))  # refuses tensors that share memory
    assert all(torch.equal(again[name], value) for name, value in state.items())
    file = BytesIO()
    torch.save(model.expanded_ffns()[2].experts[1].state_dict(), file)
    assert len(file.getvalue()) < 2 * 3 * 48 * 32 * 4  # one expert's bytes, not the block's
    model.save_pretrained(tmp_path / "first")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "first").eval()
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    assert None not in blocks(loaded)
    loaded.save_pretrained(tmp_path / "second")
    first, second = (tmp_path / name / "model.safetensors" for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        ours = {parameter.data_ptr() for parameter in model.parameters()}
        assert not ours & {parameter.data_ptr() for parameter in copied.parameters()}
        assert torch.equal(copied(IDS).logits, model(IDS).logits)
        assert None not in blocks(copied)


def test_parameters_stay_the_same_objects_that_an_optimizer_moves(model):
    fresh = copy.deepcopy(model).train()
    optimizer = torch.optim.AdamW(fresh.parameters(), lr=1e-2)  # before the first forward pass lays the block out
    before = [parameter.clone() for parameter in fresh.parameters()]
    fresh(IDS, labels=IDS).loss.backward()
    optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, fresh.parameters(), strict=True) if b.grad.any())
    assert None not in blocks(fresh)
    assert_right(fresh.eval())


def test_loading_and_moving_keep_it_right(model):
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.9)
    held = [block.data_ptr() for block in blocks(model)]
    model.load_state_dict(other.state_dict())
    assert [block.data_ptr() for block in blocks(model)] == held  # in place
    assert torch.equal(model(IDS).logits, other(IDS).logits)
    model.load_state_dict(other.state_dict(), assign=True)
    assert_right(model)
    model.to(torch.bfloat16)
    assert model(IDS).logits.dtype == torch.bfloat16
    assert {block.dtype for block in blocks(model)} == {torch.bfloat16}


def test_a_move_leaves_no_memory_behind(model):
    old = [weakref.ref(block) for block in blocks(model)]
    model.to(torch.float64)
    gc.collect()
    assert all(block() is None for block in old)


def test_a_weight_that_was_swapped_is_noticed(model):
    expert = model.expanded_ffns()[0].experts[1]
    average = torch.randn_like(expert.up_proj.weight)
    expert.up_proj.weight.data, average = average, expert.up_proj.weight.data
    assert_right(model)
    kept = average.clone()
    with torch.no_grad():
        expert.up_proj.weight.zero_()
    assert torch.equal(average, kept)
    assert_right(model)


def test_memory_shared_with_the_dense_model_stays_shared():
    dense = tiny_dense("qwen2")
    expanded = expand_model(dense, Plan("moe-lpr", [3, 3, 3], old=["en"], new=["el"])).eval()
    expanded(IDS)
    assert blocks(expanded) == [None] * 6
    with torch.no_grad():
        dense.model.layers[0].mlp.up_proj.weight.mul_(2)
    ours = expanded.expanded_ffns()[0].experts[0].up_proj.weight
    assert torch.equal(ours, dense.model.layers[0].mlp.up_proj.weight)
    assert_right(expanded)


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


class Subclass(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


def hook(expert):
    expert.up_proj.register_forward_hook(lambda module, args, output: output + 1)


def replaced_forward(expert):
    forward = expert.up_proj.forward
    expert.up_proj.forward = lambda x: forward(x) + 1


def parametrized(expert):
    parametrize.register_parametrization(expert.up_proj, "weight", Doubled())


def other_class(expert):
    expert.up_proj = Subclass(32, 48, bias=False)


def other_class_in_place(expert):
    expert.up_proj.__class__ = Subclass


def on_the_whole(expert):
    expert.register_forward_pre_hook(lambda module, args: (args[0] + 1,))


def hook_on_the_activation(expert):
    expert.act_fn.register_forward_hook(lambda module, args, output: output + 1)


def other_activation(expert):
    expert.act_fn = nn.Tanh()


def replaced_activation(expert):
    expert.act_fn.forward = torch.tanh


def new_bias(expert):
    expert.down_proj.bias = nn.Parameter(torch.ones(32))


def fewer_neurons(expert):
    expert.gate_proj.weight.data = expert.gate_proj.weight.data[:24]
    expert.up_proj.weight.data = expert.up_proj.weight.data[:24]
    expert.down_proj.weight.data = expert.down_proj.weight.data[:, :24]


CHANGES = [hook, replaced_forward, parametrized, other_class, other_class_in_place, on_the_whole]
CHANGES += [hook_on_the_activation, other_activation, replaced_activation, new_bias, fewer_neurons]


@pytest.mark.parametrize("numbers", [(0,), (2,), (0, 3)])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_expert_runs_as_a_module(model, change, numbers):
    before = model(IDS).logits
    for number in numbers:
        change(model.expanded_ffns()[2].experts[number])
    after = model(IDS).logits
    assert (after - before).abs().max() > 1e-3
    assert_right(model)


def test_an_expert_put_in_place_of_another_is_used(model):
    experts = model.expanded_ffns()[0].experts
    before = model(IDS).logits
    experts[1], experts[2] = copy.deepcopy(experts[2]), copy.deepcopy(experts[1])
    assert (model(IDS).logits - before).abs().max() > 1e-3
    assert_right(model)


def test_another_list_of_experts_is_used(model):
    ffn = model.expanded_ffns()[0]
    before = model(IDS).logits
    ffn.experts = nn.ModuleList(reversed(ffn.experts))
    assert (model(IDS).logits - before).abs().max() > 1e-3
    assert_right(model)


def test_a_method_of_the_class_that_is_replaced_is_used(model, monkeypatch):
    before = model(IDS).logits
    kind = type(model.expanded_ffns()[0].experts[0])
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    monkeypatch.setattr(kind, "forward", lambda self, x: self.down_proj(torch.tanh(self.up_proj(x))))
    assert (model(IDS).logits - before).abs().max() > 1e-3
    assert_right(model)
    assert_right(copies[0])
    assert torch.equal(pickle.loads(pickle.dumps(model))(IDS).logits, model(IDS).logits)


def test_tied_experts_have_no_block(model):
    experts = model.expanded_ffns()[0].experts
    experts[2] = experts[1]
    experts[0].up_proj.weight = experts[1].up_proj.weight
    model(IDS)
    with torch.no_grad():
        experts[1].up_proj.weight.mul_(2)
    assert_right(model)


def test_memory_that_is_shared_no_longer_is_laid_out(model):
    fresh = copy.deepcopy(model)
    state = fresh.state_dict()
    fresh(IDS)
    assert set(blocks(fresh)) == {None}
    del state
    fresh(IDS)
    assert None not in blocks(fresh)


def test_an_expert_in_another_type_runs_as_a_module(model):
    expert = model.expanded_ffns()[2].experts[1].to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert_right(model)
    assert {parameter.dtype for parameter in expert.parameters()} == {torch.bfloat16}


def test_memory_of_several_processes_stays_theirs(model):
    model.share_memory()
    model(IDS)
    assert all(parameter.is_shared() for parameter in model.parameters())


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_training_and_evaluation_leave_the_weights_in_their_place(dropout):
    model = LayerMoEForCausalLM(
        LayerMoEConfig.from_dense(tiny_dense("gpt2", resid_pdrop=dropout).config, num_experts_per_layer=[3, 1, 4])
    ).eval()
    model(IDS)
    before = [parameter.data_ptr() for parameter in model.parameters()]
    model.train()(IDS)
    model.eval()(IDS)
    assert [parameter.data_ptr() for parameter in model.parameters()] == before
    assert None not in blocks(model)


def test_a_block_is_that_of_all_its_weights_in_order(model):
    ffn = model.expanded_ffns()[2]
    for found in ffn.block.weights(ffn.experts, ffn.block.forms[0], torch.zeros(1)):
        weights = found.weights
        assert weight_block.block_of(weights) is found.block
        assert weight_block.block_of(weights[:-1]) is None
        assert weight_block.block_of((weights[0], *weights[2:], weights[1])) is None
        assert weight_block.block_of(weights[1:]) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_change_before_the_backward_pass_are_noticed(model, dtype):
    loss = model.to(dtype).train()(IDS, labels=IDS).loss
    with torch.no_grad():
        model.expanded_ffns()[0].experts[1].up_proj.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_two_threads_lay_out_one_block(model, monkeypatch):
    fresh, moved, others = copy.deepcopy(model), weight_block._moved, []

    def meanwhile(*args):
        if not others:
            others.append(Thread(target=fresh, args=(IDS,)))
            others[0].start()
            others[0].join(0.5)
        return moved(*args)

    monkeypatch.setattr(weight_block, "_moved", meanwhile)
    fresh(IDS)
    others[0].join()
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.mul_(1.5)
    assert_right(fresh)


def test_operators_find_the_blocks_of_a_copy_of_the_code(monkeypatch):
    package = ModuleType("copy_of_the_code")
    package.__path__ = [str(Path(expert_block.__file__).parent)]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    other = importlib.import_module("copy_of_the_code.expert_block")
    assert other is not expert_block
    ffn = nn.Sequential(nn.Linear(4, 4, bias=False))
    layer, (form, _) = nn.ModuleList([ffn, copy.deepcopy(ffn)]), other.ExpertBlock.of(ffn).forms
    block = other.ExpertBlock((form, form))
    (found,) = block.weights(layer, form, torch.zeros(1))
    assert weight_block.block_of(found.weights) is found.block


def test_a_hook_on_all_modules_sees_the_experts(model):
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(module))
    try:
        model(IDS)
    finally:
        handle.remove()
    assert set(model.expanded_ffns()[2].experts) & set(seen)


def test_adapters_of_peft_come_and_go(model):
    plain = model(IDS).logits
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)).eval()
    assert (wrapped(IDS).logits - plain).abs().max() > 1e-3
    assert_right(wrapped)
    merged = wrapped.merge_and_unload()
    assert None not in blocks(merged)
    assert_right(merged)


def test_offloaded_experts_run_as_modules(model, tmp_path):
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    torch.testing.assert_close(load_offloaded(tmp_path)(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-5)


def test_under_inference_mode_it_is_laid_out_and_trains_afterwards(model):
    fresh = copy.deepcopy(model)
    with torch.inference_mode():
        fresh(IDS)
    fresh.train()(IDS, labels=IDS).loss.backward()
    assert all(parameter.grad is not None for parameter in fresh.expanded_ffns()[2].experts.parameters())

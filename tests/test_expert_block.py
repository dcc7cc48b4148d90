"""The memory under a layer's experts: one block of which nothing else takes notice."""

import copy
import gc
import pickle
import weakref
from io import BytesIO

import pytest
import torch
from conftest import byte_tokenizer, load_offloaded, tiny_dense
from peft import LoraConfig, get_peft_model
from safetensors.torch import load, save
from torch import nn
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM

from hf_moe_expand import LayerMoEConfig, LayerMoEForCausalLM, Plan, expand_model

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


def on_the_whole(expert):
    expert.register_forward_pre_hook(lambda module, args: (args[0] + 1,))


@pytest.mark.parametrize("change", [hook, replaced_forward, parametrized, other_class, on_the_whole])
def test_a_changed_expert_runs_as_a_module(model, change):
    before = model(IDS).logits
    change(model.expanded_ffns()[2].experts[0])
    change(model.expanded_ffns()[2].experts[3])
    after = model(IDS).logits
    assert (after - before).abs().max() > 1e-3
    assert_right(model)


def test_an_expert_put_in_place_of_another_is_used(model):
    experts = model.expanded_ffns()[0].experts
    before = model(IDS).logits
    experts[1], experts[2] = copy.deepcopy(experts[2]), copy.deepcopy(experts[1])
    assert (model(IDS).logits - before).abs().max() > 1e-3
    assert_right(model)


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

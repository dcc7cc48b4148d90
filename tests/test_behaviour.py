"""Every promise that a model keeps right after expansion, for each configuration on each backbone.

A further configuration or backbone joins with one line in conftest.py.
"""

import copy
import pickle
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from conftest import CONFIGURATIONS, matrix, moved, tiny_dense
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationConfig
from transformers.pytorch_utils import Conv1D

from hf_moe_expand import expand_checkpoint, expand_model, freeze
from hf_moe_expand.modeling.experts import LoraLinear

EVERYWHERE = matrix()
# The wide backbones have one configuration here.
COSTLY = matrix(wide=CONFIGURATIONS[:1])
ONE_CONFIGURATION = matrix(common=CONFIGURATIONS[:1], wide=CONFIGURATIONS[:1])
# One configuration for each way in which a new expert starts.
WAYS_TO_START = matrix(
    common=[one for one in CONFIGURATIONS if one.name in ("layer-moe", "random", "conditional-lora")], wide=()
)

_RANDOM = "random experts do not compute what the original FFN does"
_GROUPS = "the first expert of a DMoE model belongs to a language group: there is no model of before"
SENSELESS = {
    ("test_p1_each_expert_is_the_original_ffn", "random"): _RANDOM,
    ("test_p2_with_every_token_classed_old_it_is_the_dense_model", "dmoe"): _GROUPS,
}
GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 256, "eos_token_id": None}


def loaded(folder):
    """The model in aligned memory. Matrix products round otherwise where weights lie unaligned in a mapped file."""
    return copy.deepcopy(AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval())


class Made:
    """Checkpoints and models, each made once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.models: dict = {}

    def dense_folder(self, backbone, dtype=torch.float32):
        folder = self.root / f"{backbone}-{dtype}" / "dense"
        if not folder.exists():
            model = tiny_dense(backbone, dtype=dtype)
            model.generation_config = GenerationConfig(temperature=0.7, do_sample=True, eos_token_id=256)
            model.save_pretrained(folder)
        return folder

    def expanded_folder(self, configuration, backbone, dtype=torch.float32):
        dense = self.dense_folder(backbone, dtype)
        folder = dense.with_name(configuration.name)
        if not folder.exists():
            expand_checkpoint(dense, folder, configuration.plan, seed=3, **configuration.arguments)
        return folder

    def model(self, folder, change=None):
        if (folder, change) not in self.models:
            self.models[folder, change] = loaded(folder) if change is None else change(self.model(folder))
        return self.models[folder, change]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return Made(tmp_path_factory.mktemp("behaviour"))


@pytest.fixture(autouse=True)
def makes_sense(request, configuration):
    if reason := SENSELESS.get((request.function.__name__, configuration.name)):
        pytest.skip(reason)


# Tests share these models: one that changes its model takes a copy.


@pytest.fixture
def dense(made, backbone):
    return made.model(made.dense_folder(backbone))


@pytest.fixture
def expanded(made, configuration, backbone):
    """The model right after expansion."""
    return made.model(made.expanded_folder(configuration, backbone))


@pytest.fixture
def trained(made, configuration, backbone):
    """A model after something like training: experts differ, and routers, classifiers and gates decide."""
    return made.model(made.expanded_folder(configuration, backbone), moved)


def left_padded():
    """Prompts of 3, 7 and 12 tokens."""
    generator = torch.Generator().manual_seed(5)
    ids, mask = torch.full((3, 12), 256), torch.zeros(3, 12, dtype=torch.long)
    for row, length in enumerate((3, 7, 12)):
        ids[row, 12 - length :] = torch.randint(0, 256, (length,), generator=generator)
        mask[row, 12 - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


BATCH = left_padded()
TOKENS = BATCH["attention_mask"].bool()
IDS = torch.randint(0, 256, (4, 40), generator=torch.Generator().manual_seed(6))


@torch.no_grad()
def logits(model):
    """Of the tokens of the padded batch, `[22, 257]`."""
    return model(**BATCH).logits[TOKENS]


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def gradients(model):
    """Of the language loss and of every router's logits, by name."""
    model.zero_grad()
    torch.manual_seed(2)  # some backbones have dropout
    with model.capture_routing() as routing:
        loss = model(IDS, labels=IDS, use_cache=False).loss
    assert routing.layers.keys() == model.expanded_ffns().keys()
    (loss + sum(layer.router_logits.logsumexp(-1).mean() for layer in routing)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@EVERYWHERE
def test_p1_each_expert_is_the_original_ffn(dense, expanded, configuration):
    expected = logits(dense)
    for expert in range(min(count for count in configuration.plan.experts_per_layer if count > 1)):
        with expanded.use_expert(expert):
            assert torch.equal(logits(expanded), expected)
    for ffn in expanded.expanded_ffns().values():
        if expanded.config.expert_kind == "lora":
            check_updates_of_nothing(ffn)
        elif expanded.config.expert_kind == "added":
            check_additions_of_nothing(ffn)
        else:
            original = ffn.experts[0].state_dict()
            for expert in ffn.experts[1:]:
                assert all(torch.equal(original[name], value) for name, value in expert.state_dict().items())


def check_updates_of_nothing(ffn):
    """Each linear layer has an update in each new expert: B is zero, A is Kaiming uniform with a = sqrt(5)."""
    updates = [module for module in ffn.experts.modules() if isinstance(module, LoraLinear)]
    linear = [module for module in ffn.experts[0].modules() if isinstance(module, nn.Linear | Conv1D)]
    assert len(updates) == (len(ffn.experts) - 1) * len(linear) > 0
    for update in updates:
        bound = update.lora_A.weight.shape[1] ** -0.5
        assert 0.5 * bound < update.lora_A.weight.abs().max() <= bound
        assert not update.lora_B.weight.any()


def check_additions_of_nothing(ffn):
    """Each added FFN's `down` is zero, and its rows are Kaiming uniform with a = sqrt(5)."""
    for added in ffn.experts[1:]:
        assert not added.down_proj.weight.any()
        bound = added.gate_proj.in_features**-0.5
        for layer in (added.gate_proj, added.up_proj):
            assert 0.5 * bound < layer.weight.abs().max() <= bound


class SaysOld(nn.Module):
    def forward(self, x):
        return torch.tensor([1.0, 0.0]).expand(len(x), 2)


@EVERYWHERE
def test_p2_with_every_token_classed_old_it_is_the_dense_model(dense, trained):
    model = copy.deepcopy(trained)
    for ffn in model.expanded_ffns().values():
        ffn.classifier = SaysOld()
    assert torch.equal(logits(model), logits(dense))


@EVERYWHERE
def test_gradients_reach_all_that_trains_and_nothing_frozen(trained, configuration):
    trained = copy.deepcopy(trained)
    freeze(trained, "joint" if configuration.plan.groups else "post-pretrain")
    found = gradients(trained.train())
    assert found.keys() == {name for name, parameter in trained.named_parameters() if parameter.requires_grad}
    trains = (".router.", ".conditional_gate.", *(f".experts.{number}." for number in range(1, 4)))
    expected = {name for name, _ in trained.named_parameters() if any(part in name for part in trains)}
    assert expected <= found.keys() if configuration.plan.groups else expected == found.keys()
    assert [name for name in expected if not found[name].any()] == []


@EVERYWHERE
def test_a_model_of_the_configuration_alone_starts_as_expansion_does(made, configuration, backbone):
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(made.expanded_folder(configuration, backbone))
    model = AutoModelForCausalLM.from_config(config)
    assert type(model) is type(made.model(made.expanded_folder(configuration, backbone)))
    assert type(AutoModel.from_config(config)).__name__ == (
        "DMoEModel" if configuration.plan.groups else "LayerMoEModel"
    )
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    for ffn in model.expanded_ffns().values():
        assert ffn.router.weight.std() > 0.05
        assert not any(m.weight.any() for m in (ffn.classifier, ffn.conditional_gate) if m is not None)
        if config.expert_kind == "lora":
            check_updates_of_nothing(ffn)


@COSTLY
def test_expanded_in_memory_it_is_the_checkpoints_model(made, configuration, backbone, tmp_path):
    is_the_checkpoints_model(made, configuration, backbone, torch.float32, tmp_path)


@WAYS_TO_START
def test_expanded_in_memory_in_bfloat16_too(made, configuration, backbone, tmp_path):
    is_the_checkpoints_model(made, configuration, backbone, torch.bfloat16, tmp_path)


def is_the_checkpoints_model(made, configuration, backbone, dtype, tmp_path):
    folder = made.expanded_folder(configuration, backbone, dtype)
    stored, dense = made.model(folder), made.model(made.dense_folder(backbone, dtype))
    found = expand_model(dense, configuration.plan, seed=3, **configuration.arguments)
    assert type(found) is type(stored)
    assert found.training == stored.training
    for tensors in (lambda m: m.state_dict(), lambda m: dict(m.named_buffers()), lambda m: dict(m.named_parameters())):
        ours, theirs = tensors(found), tensors(stored)
        assert list(ours) == list(theirs)
        for name, value in theirs.items():
            assert (ours[name].dtype, ours[name].requires_grad) == (value.dtype, value.requires_grad), name
            assert torch.equal(ours[name], value), name
    assert torch.equal(logits(found), logits(stored))
    fields = [{**model.config.to_dict(), "_name_or_path": ""} for model in (found, stored)]
    assert fields[0] == fields[1]
    assert found.generation_config.to_dict() == stored.generation_config.to_dict()
    assert found.config._attn_implementation == stored.config._attn_implementation
    assert found.all_tied_weights_keys == stored.all_tied_weights_keys
    found.save_pretrained(tmp_path / "saved")
    assert files(tmp_path / "saved") == files(folder)


@COSTLY
def test_copies_and_pickles_stand_on_their_own(trained):
    expected = logits(trained)
    for twin in (copy.deepcopy(trained), pickle.loads(pickle.dumps(trained))):
        assert type(twin) is type(trained)
        assert torch.equal(logits(twin), expected)
        ours = {parameter.data_ptr() for parameter in trained.parameters()}
        assert not any(parameter.data_ptr() in ours for parameter in twin.parameters())
        with twin.capture_routing() as routing, twin.use_expert(1):
            assert torch.equal(logits(trained), expected)
            assert len(routing) == 0
            logits(twin)
            assert routing.layers.keys() == trained.expanded_ffns().keys()
        with torch.no_grad():  # expert 0 is part of a LoRA or added expert: the copy's of the copy's
            for parameter in next(iter(twin.expanded_ffns().values())).experts[0].parameters():
                parameter.zero_()
        with twin.use_expert(1):
            alone = logits(twin)
        with trained.use_expert(1):
            changed = not torch.equal(logits(trained), alone)
        assert changed == (trained.config.expert_kind != "ffn")
        assert torch.equal(logits(trained), expected)


@COSTLY
def test_bfloat16_stays_exact(made, configuration, backbone):
    dense = made.model(made.dense_folder(backbone, torch.bfloat16))
    stays_exact(dense, expand_model(dense, configuration.plan, **configuration.arguments), configuration, 1e-2)


@ONE_CONFIGURATION
def test_float16_stays_exact(made, configuration, backbone):
    dense = made.model(made.dense_folder(backbone, torch.float16))
    model = made.model(made.expanded_folder(configuration, backbone, torch.float16))
    stays_exact(dense, model, configuration, 1e-3)


def stays_exact(dense, model, configuration, tolerance):
    assert {parameter.dtype for parameter in model.parameters()} == {dense.dtype}
    expected = logits(dense)
    with model.use_expert(0):
        assert torch.equal(logits(model), expected)
    if configuration.arguments.get("expert_init") != "random":
        assert (logits(model) - expected).abs().max() < tolerance * expected.abs().max()


@EVERYWHERE
def test_use_expert_sends_all_tokens_to_one_expert_while_it_lasts(trained, configuration):
    routed = logits(trained)
    found = []
    fewest = min(count for count in configuration.plan.experts_per_layer if count > 1)
    for expert in range(fewest):
        with trained.use_expert(expert), ffn_calls(trained) as calls:
            found.append(logits(trained))
        for ffn, inputs, output in calls:
            if ffn.is_added and expert:
                expected = ffn.experts[0](*inputs) + ffn.experts[expert](inputs[0])
            else:
                expected = ffn.experts[expert](*inputs)
            assert torch.equal(output, expected)
        assert torch.equal(logits(trained), routed)
    assert all(not torch.allclose(a, b, atol=1e-3) for a, b in zip(found, [*found[1:], routed], strict=True))
    with trained.use_expert(1):
        with trained.use_expert(0):
            assert torch.equal(logits(trained), found[0])
        assert torch.equal(logits(trained), found[1])
    most = max(configuration.plan.experts_per_layer)
    with trained.use_expert(most), pytest.raises(ValueError, match=f"Layer 0 has no expert {most}; give one of"):
        logits(trained)


@contextmanager
def ffn_calls(model):
    """Inside, every expanded layer's call is noted: the layer, its inputs, its output."""
    calls: list = []
    hooks = [
        # A copy of the output: Falcon's layer adds to the original.
        ffn.register_forward_hook(lambda module, inputs, output: calls.append((module, inputs, output.clone())))
        for ffn in model.expanded_ffns().values()
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def of_expert(ffn, expert, token, zeros):
    """One expert's output; an added expert is expert 0 with its own output beside it."""
    if expert and ffn.is_added:
        return ffn.experts[0](token, *zeros)[0] + ffn.experts[expert](token)[0]
    return ffn.experts[expert](token, *zeros)[0]


@EVERYWHERE
def test_the_recorded_decision_is_the_one_that_was_carried_out(trained, configuration):
    with trained.capture_routing() as routing, ffn_calls(trained) as calls, torch.no_grad():
        trained(IDS)
    assert routing.layers.keys() == {
        layer for layer, count in enumerate(configuration.plan.experts_per_layer) if count > 1
    }
    with torch.no_grad():
        for ffn, inputs, output in calls:
            decision, x_Th = routing.layers[ffn.layer_index], inputs[0].flatten(0, -2)
            residual_Th = inputs[1].flatten(0, -2) if len(inputs) > 1 else torch.zeros_like(x_Th)
            zeros = [torch.zeros_like(x_Th[:1])] * (len(inputs) - 1)
            torch.testing.assert_close(decision.weights.sum(-1), torch.ones(IDS.numel()))
            for t, token in enumerate(x_Th.split(1)):
                chosen = zip(decision.weights[t], decision.experts[t].tolist(), strict=True)
                expected = residual_Th[t] + sum(
                    weight * of_expert(ffn, expert, token, zeros)
                    for weight, expert in chosen
                    if expert < len(ffn.experts)
                )
                torch.testing.assert_close(output.flatten(0, -2)[t], expected, rtol=1e-4, atol=1e-5)
            assert len({tuple(row) for row in decision.weight_of_each_expert().tolist()}) > 1  # tokens differ

"""Every promise that a model keeps right after expansion, for each configuration on each backbone.

A further configuration or backbone joins with one line in conftest.py.
"""

import copy
import pickle
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from conftest import CONFIGURATIONS, enable_checkpointing, matrix, tiny_dense
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationConfig

from hf_moe_expand import DMoEForCausalLM, LayerMoEForCausalLM, expand_checkpoint, expand_model, freeze
from hf_moe_expand.modeling.lora_expert import LoraA, LoraB

EVERYWHERE = matrix(on_wide=CONFIGURATIONS)
COSTLY = matrix(on_wide=CONFIGURATIONS[:1])

_RANDOM = "random experts do not compute what the original FFN does"
_GROUPS = "the first expert of a DMoE model belongs to a language group: there is no model of before"
SENSELESS = {
    ("test_p1_it_computes_what_the_dense_model_does_whatever_the_routers_say", "random"): _RANDOM,
    ("test_p1_each_expert_is_the_original_ffn", "random"): _RANDOM,
    ("test_p2_with_every_token_classed_old_it_is_the_dense_model", "dmoe"): _GROUPS,
    ("test_use_expansion_goes_back_to_the_dense_model", "dmoe"): _GROUPS,
}
GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 256, "eos_token_id": None}
WAYS_TO_GENERATE = ({}, {"num_beams": 3}, {"cache_implementation": "static", "disable_compile": True})


def loaded(folder):
    """The model in aligned memory. Matrix products round otherwise where weights lie unaligned in a mapped file."""
    return copy.deepcopy(AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval())


class Made:
    """Checkpoints and models, each made once; tests that change a model get a copy."""

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

    def model(self, folder):
        if folder not in self.models:
            self.models[folder] = loaded(folder)
        return self.models[folder]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return Made(tmp_path_factory.mktemp("behaviour"))


@pytest.fixture(autouse=True)
def makes_sense(request, configuration):
    if reason := SENSELESS.get((request.function.__name__, configuration.name)):
        pytest.skip(reason)


@pytest.fixture
def dense(made, backbone):
    """The dense model. No test changes it."""
    return made.model(made.dense_folder(backbone))


@pytest.fixture
def expanded(made, configuration, backbone):
    """The model right after expansion, to change at will."""
    return copy.deepcopy(made.model(made.expanded_folder(configuration, backbone)))


@pytest.fixture
def trained(expanded):
    """A model after something like training: experts differ, and routers, classifiers and gates decide."""
    generator = torch.Generator().manual_seed(2)

    def noise(parameter, size):
        parameter.add_(torch.randn(parameter.shape, generator=generator) * size)

    with torch.no_grad():
        for ffn in expanded.expanded_ffns().values():
            for parameter in ffn.experts[1:].parameters():
                noise(parameter, 0.3)
            for module in (ffn.router, ffn.classifier, ffn.conditional_gate):
                if module is not None:
                    noise(module.weight, 0.3)
    return expanded


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


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def gradients(model):
    """Of the language loss and of every router's logits, by name."""
    model.zero_grad()
    torch.manual_seed(2)  # some backbones have dropout
    with model.capture_routing() as routing:
        loss = model(IDS, labels=IDS, use_cache=False).loss
    (loss + sum(layer.router_logits.logsumexp(-1).mean() for layer in routing)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@EVERYWHERE
def test_p1_it_computes_what_the_dense_model_does_whatever_the_routers_say(dense, expanded):
    expected = logits(dense)
    for scale in (1.0, 50.0, -3.0):
        for ffn in expanded.expanded_ffns().values():
            ffn.router.weight.data.mul_(scale)
            if ffn.classifier is not None:
                ffn.classifier.weight.data.normal_(generator=torch.Generator().manual_seed(1))
        close(logits(expanded), expected)
    for gate in (-30.0, 1.0, 30.0):
        for ffn in expanded.expanded_ffns().values():
            if ffn.conditional_gate is not None:
                ffn.conditional_gate.weight.data.fill_(gate)
                close(logits(expanded), expected)


@EVERYWHERE
def test_p1_each_expert_is_the_original_ffn(dense, expanded, configuration):
    expected = logits(dense)
    for expert in range(min(count for count in configuration.plan.experts_per_layer if count > 1)):
        with expanded.use_expert(expert):
            assert torch.equal(logits(expanded), expected)
    for ffn in expanded.expanded_ffns().values():
        for expert in ffn.experts[1:]:
            updates = [module for module in expert.modules() if isinstance(module, LoraB)]
            assert not any(update.weight.any() for update in updates)
            own = dict(expert.named_parameters())
            assert updates or all(torch.equal(own[name], p) for name, p in ffn.experts[0].named_parameters())


@EVERYWHERE
def test_p2_expert_0_alone_gives_the_dense_logits(dense, trained):
    assert not torch.allclose(logits(trained), logits(dense), atol=1e-2)
    with trained.use_expert(0):
        assert torch.equal(logits(trained), logits(dense))


@COSTLY
@pytest.mark.parametrize("options", WAYS_TO_GENERATE, ids=["greedy", "beams", "static"])
def test_p2_expert_0_alone_generates_the_dense_models_tokens(dense, trained, options):
    with trained.use_expert(0):
        found = trained.generate(**BATCH, **GREEDY, **options)
    assert torch.equal(found, dense.generate(**BATCH, **GREEDY, **options))


class SaysOld(nn.Module):
    def forward(self, x):
        return torch.tensor([1.0, 0.0]).expand(len(x), 2)


@EVERYWHERE
def test_p2_with_every_token_classed_old_it_is_the_dense_model(dense, trained):
    for ffn in trained.expanded_ffns().values():
        ffn.classifier = SaysOld()
    assert torch.equal(logits(trained), logits(dense))


@EVERYWHERE
def test_gradients_reach_all_that_trains_and_nothing_frozen(trained, configuration):
    freeze(trained, "joint" if configuration.plan.groups else "post-pretrain")
    found = gradients(trained.train())
    assert found.keys() == {name for name, parameter in trained.named_parameters() if parameter.requires_grad}
    trains = ("router", "conditional_gate", *(f".experts.{number}." for number in range(1, 4)))
    expected = {name for name, _ in trained.named_parameters() if any(part in name for part in trains)}
    assert expected <= found.keys() if configuration.plan.groups else expected == found.keys()
    assert [name for name in expected if not found[name].any()] == []


@EVERYWHERE
def test_saved_and_loaded_it_has_the_same_names_and_bytes(made, expanded, trained, configuration, backbone, tmp_path):
    folder = made.expanded_folder(configuration, backbone)
    made.model(folder).save_pretrained(tmp_path / "again")
    assert files(tmp_path / "again") == files(folder)
    trained.save_pretrained(tmp_path / "trained")
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "trained", output_loading_info=True)
    assert not any(info.values()), info
    found, expected = again.state_dict(), trained.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert torch.equal(logits(copy.deepcopy(again).eval()), logits(trained))


@EVERYWHERE
def test_p4_the_auto_classes_load_it(made, expanded, configuration, backbone):
    folder = made.expanded_folder(configuration, backbone)
    family = "DMoE" if configuration.plan.groups else "LayerMoE"
    config, base, model = AutoConfig.from_pretrained(folder), AutoModel.from_pretrained(folder), expanded
    names = [type(each).__name__ for each in (config, base, model)]
    assert names == [f"{family}Config", f"{family}Model", f"{family}ForCausalLM"]
    assert isinstance(model, DMoEForCausalLM if configuration.plan.groups else LayerMoEForCausalLM)
    assert (config.backbone_model_type, config.num_experts_per_layer) == (
        backbone,
        configuration.plan.experts_per_layer,
    )
    with torch.no_grad():
        hidden = model(IDS, output_hidden_states=True).hidden_states[-1]
        assert torch.equal(copy.deepcopy(base).eval()(IDS).last_hidden_state, hidden)


@EVERYWHERE
def test_a_model_of_the_configuration_alone_starts_as_expansion_does(made, configuration, backbone):
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(made.expanded_folder(configuration, backbone))
    model = AutoModelForCausalLM.from_config(config)
    assert type(model) is type(made.model(made.expanded_folder(configuration, backbone)))
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    for ffn in model.expanded_ffns().values():
        assert ffn.router.weight.std() > 0.05
        assert not any(m.weight.any() for m in (ffn.classifier, ffn.conditional_gate) if m is not None)
        for module in ffn.experts.modules():
            if isinstance(module, LoraA):
                bound = module.weight.shape[1] ** -0.5  # Kaiming uniform with a = sqrt(5)
                assert 0.5 * bound < module.weight.abs().max() <= bound
            assert not isinstance(module, LoraB) or not module.weight.any()


@COSTLY
def test_p5_cached_batched_left_padded_generation_is_the_uncached_forward(trained):
    cached = trained.generate(**BATCH, **GREEDY)
    assert torch.equal(trained.generate(**BATCH, **GREEDY, **WAYS_TO_GENERATE[-1]), cached)
    for row in range(3):
        ids = BATCH["input_ids"][row][TOKENS[row]].unsqueeze(0)
        for _ in range(GREEDY["max_new_tokens"]):
            with torch.no_grad():
                ids = torch.cat([ids, trained(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
        assert ids[0, TOKENS[row].sum() :].tolist() == cached[row, 12:].tolist()


@COSTLY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_expanded_in_memory_it_is_the_checkpoints_model(made, configuration, backbone, dtype, tmp_path):
    folder = made.expanded_folder(configuration, backbone, dtype)
    stored = AutoModelForCausalLM.from_pretrained(folder)
    dense = AutoModelForCausalLM.from_pretrained(made.dense_folder(backbone, dtype))
    found = expand_model(dense, configuration.plan, seed=3, **configuration.arguments)
    assert type(found) is type(stored)
    assert found.training == stored.training
    for tensors in (lambda m: m.state_dict(), lambda m: dict(m.named_buffers()), lambda m: dict(m.named_parameters())):
        ours, theirs = tensors(found), tensors(stored)
        assert list(ours) == list(theirs)
        for name, value in theirs.items():
            assert (ours[name].dtype, ours[name].requires_grad) == (value.dtype, value.requires_grad), name
            assert torch.equal(ours[name], value), name
    assert torch.equal(logits(copy.deepcopy(found)), logits(copy.deepcopy(stored)))
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
        with torch.no_grad():  # expert 0 is part of a LoRA expert: the copy's of the copy's
            for parameter in next(iter(twin.expanded_ffns().values())).experts[0].parameters():
                parameter.zero_()
        with twin.use_expert(1):
            alone = logits(twin)
        with trained.use_expert(1):
            changed = not torch.equal(logits(trained), alone)
        assert changed == (trained.config.expert_kind == "lora")
        assert torch.equal(logits(trained), expected)


@COSTLY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_half_precision_stays_exact(made, configuration, backbone, dtype):
    dense = made.model(made.dense_folder(backbone, dtype))
    model = made.model(made.expanded_folder(configuration, backbone, dtype))
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    expected = logits(dense)
    with model.use_expert(0):
        assert torch.equal(logits(model), expected)
    if configuration.arguments.get("expert_init") != "random":
        difference = (logits(model) - expected).abs().max() / expected.abs().max()
        assert difference < (1e-2 if dtype is torch.bfloat16 else 1e-3)


@COSTLY
def test_gradient_checkpointing_gives_equal_gradients(trained):
    expected = gradients(trained.train())
    assert any("router" in name for name in expected)
    enable_checkpointing(trained)
    found = gradients(trained)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7, msg=name)


@EVERYWHERE
def test_use_expert_sends_all_tokens_to_one_expert_while_it_lasts(trained, configuration):
    routed = logits(trained)
    found = []
    fewest = min(count for count in configuration.plan.experts_per_layer if count > 1)
    for expert in range(fewest):
        with trained.use_expert(expert), ffn_calls(trained) as calls:
            found.append(logits(trained))
        for ffn, inputs, output in calls:
            assert torch.equal(output, ffn.experts[expert](*inputs))
        assert torch.equal(logits(trained), routed)
    assert all(not torch.allclose(a, b, atol=1e-3) for a, b in zip(found, [*found[1:], routed], strict=True))
    with trained.use_expert(1):
        with trained.use_expert(0):
            assert torch.equal(logits(trained), found[0])
        assert torch.equal(logits(trained), found[1])
    most = max(configuration.plan.experts_per_layer)
    with trained.use_expert(most), pytest.raises(ValueError, match=f"Expert {most} was asked for, but layer 0 has"):
        logits(trained)


@EVERYWHERE
def test_use_expansion_goes_back_to_the_dense_model(dense, trained):
    routed = logits(trained)
    with trained.use_expansion(0):
        assert torch.equal(logits(trained), logits(dense))
        with trained.use_expansion(1):
            assert torch.equal(logits(trained), routed)
    assert torch.equal(logits(trained), routed)


@contextmanager
def ffn_calls(model):
    """Inside, every expanded layer's call is noted: the layer, its inputs, its output."""
    calls: list = []
    hooks = [
        ffn.register_forward_hook(lambda module, inputs, output: calls.append((module, inputs, output)))
        for ffn in model.expanded_ffns().values()
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


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
                    weight * ffn.experts[expert](token, *zeros)[0]
                    for weight, expert in chosen
                    if expert < len(ffn.experts)
                )
                torch.testing.assert_close(output.flatten(0, -2)[t], expected, rtol=1e-4, atol=1e-5)
            assert len({tuple(row) for row in decision.weight_of_each_expert().tolist()}) > 1  # tokens differ

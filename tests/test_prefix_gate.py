"""Prefix gates: classifiers that judge the text so far."""

import copy
import json
import math
import pickle
from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import CONFIGURATIONS, matrix, run_fresh, tiny_dense
from one_step import build, rows, train
from torch._dynamo.utils import counters
from transformers import CompileConfig, DynamicCache, StaticCache

from hf_moe_expand import (
    DMoEConfig,
    LayerMoEConfig,
    LayerMoEForCausalLM,
    Plan,
)
from hf_moe_expand.errors import InputError
from hf_moe_expand.modeling.prefix_gate import (
    PrefixRule,
    RunningText,
    SeenText,
    TextMarks,
    _last_sum,
    _products_of_last,
    bounded_log_odds,
    running_sums,
    text_seen,
)
from hf_moe_expand.schema import changed
from hf_moe_expand.trainers.routing_capture import judged_by_text

RULE = {"decay": 0.9, "bound": 2.0, "reach": "layer"}


def gated_model(backbone: str = "qwen2", rule=None, layers=(0, 2), **changes):
    """A model with random weights whose classifiers are prefix gates that decide now one way, now the other."""
    dense = tiny_dense(backbone, **changes)
    config = LayerMoEConfig.from_dense(
        dense.config, num_experts_per_layer=[3, 1, 2], classifier_layers=list(layers), prefix_gate=rule or RULE
    )
    torch.manual_seed(1)
    model = LayerMoEForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for ffn in model.expanded_ffns().values():
            if ffn.classifier is not None:
                # Orthogonal to the mean of the layer's inputs, so that the tokens are evidence for both sides.
                found: list[torch.Tensor] = []
                handle = ffn.register_forward_pre_hook(lambda _, args, found=found: found.append(args[0]))
                model(tokens(8, 16, seed=2))
                handle.remove()
                mean = torch.nn.functional.normalize(found[0].flatten(0, -2).mean(0), dim=0)
                weight = torch.randn_like(ffn.classifier.weight)
                ffn.classifier.weight.copy_(weight - (weight @ mean).unsqueeze(-1) * mean)
    return model


def classes(model, *args, **kwargs):
    """The gates' classes by layer, `[layers, T]`, and the output."""
    with torch.no_grad(), model.capture_routing() as routing:
        output = model(*args, **kwargs)
    return torch.stack([layer.token_classes for layer in routing if layer.classifier_logits is not None]), output


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))


def slow_sums(evidence, keep):
    """The recurrence, one token after the other."""
    found = torch.zeros_like(evidence)
    state = torch.zeros_like(evidence[:, 0])
    for t in range(evidence.shape[1]):
        state = keep[:, t, None] * state + evidence[:, t]
        found[:, t] = state
    return found


@pytest.mark.parametrize("length", [1, 2, 3, 31, 64, 100])
def test_running_sums_are_the_recurrence(length):
    evidence = torch.randn(3, length, 2, dtype=torch.double)
    keep = torch.rand(3, length, dtype=torch.double).masked_fill(torch.rand(3, length) < 0.1, 0)
    torch.testing.assert_close(running_sums(evidence, keep), slow_sums(evidence, keep))


def test_what_follows_a_token_changes_no_bit_of_its_sum():
    evidence, keep = torch.randn(2, 77, 3), torch.rand(2, 77)
    whole = running_sums(evidence, keep)
    for length in range(1, 77):
        assert torch.equal(running_sums(evidence[:, :length], keep[:, :length]), whole[:, :length])


@pytest.mark.parametrize("length", [1, 2, 3, 31, 64, 100])
def test_the_last_sum_alone_has_the_same_bits(length):
    evidence, keep = torch.randn(3, length, 2), torch.rand(3, length).masked_fill(torch.rand(3, length) < 0.1, 0)
    assert torch.equal(_last_sum(evidence, _products_of_last(keep)), running_sums(evidence, keep)[:, -1:])


def test_evidence_is_the_bounded_log_odds_against_the_base_languages():
    logits = torch.tensor([[1.0, 2.0, -30.0]])
    assert bounded_log_odds(logits, 4.0).tolist() == [
        pytest.approx([4 * math.tanh(1 / 4), 4 * math.tanh(-31 / 4)], rel=1e-6)
    ]


def test_padding_is_no_evidence_and_position_zero_begins_a_text():
    rule, logits = PrefixRule(0.9, 2.0), torch.randn(12, 2)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 1]])
    positions = torch.tensor([[0, 0, 0, 1, 2, 3], [0, 1, 0, 1, 1, 2]])
    found = RunningText(rule, TextMarks.of((2, 6), "cpu", mask, positions)).judge(0, logits).view(2, 6, 2)
    e = bounded_log_odds(logits, 2.0).view(2, 6)
    assert torch.equal(found[..., 0], torch.zeros(2, 6))
    s = found[..., 1]
    torch.testing.assert_close(s[0, :3], torch.stack([torch.tensor(0.0), torch.tensor(0.0), e[0, 2]]))
    torch.testing.assert_close(s[0, 3], 0.9 * e[0, 2] + e[0, 3])
    torch.testing.assert_close(s[1, 2:5], torch.stack([e[1, 2], 0.9 * e[1, 2] + e[1, 3], 0.9 * e[1, 2] + e[1, 3]]))


@pytest.mark.parametrize("cuts", [[1] * 20, [7, 1, 12], [19, 1]])
def test_in_pieces_the_log_odds_are_the_same_bits(cuts):
    rule, logits = PrefixRule(0.95, 3.0), torch.randn(2, 20, 3)
    whole = RunningText(rule, TextMarks.of((2, 20), "cpu")).judge(4, logits.flatten(0, 1)).view(2, 20, 3)
    seen, start = SeenText(), 0
    for size in cuts:
        piece = logits[:, start : start + size]
        text = RunningText(rule, TextMarks.of((2, size), "cpu"), seen)
        assert torch.equal(text.judge(4, piece.flatten(0, 1)).view(2, size, 3), whole[:, start : start + size])
        seen.keep, seen.evidence, start = text.keep, text.evidence, start + size


GATED = (
    replace(
        CONFIGURATIONS[0], name="prefix-gates", plan=changed(CONFIGURATIONS[0].plan, prefix_gate=PrefixRule(0.9, 2.0))
    ),
)


@pytest.mark.parametrize("reach", ["layer", "later"])
@matrix(GATED, GATED)
def test_cached_generation_is_the_full_forward(configuration, backbone, reach):
    """Greedy, batched with left padding, and with beams."""
    model = gated_model(backbone, {**RULE, "reach": reach}, layers=(0,))
    ids = tokens(2, 10)
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, eos_token_id=None
    )
    full = ids
    for _ in range(8):
        full = torch.cat([full, model(full, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(found, full)
    gates, _ = classes(model, tokens(8, 16, seed=2))
    assert 0 < gates.float().mean() < 1
    beams = [
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, num_beams=3, do_sample=False, use_cache=cached,
            eos_token_id=None,
        )
        for cached in (True, False)
    ]  # fmt: skip
    assert torch.equal(*beams)
    padded = torch.cat([torch.full((2, 4), 256), ids], 1)
    padded[0, :4] = tokens(4, seed=9)
    mask = (padded != 256).long()
    together = model.generate(padded, attention_mask=mask, max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert torch.equal(together[1, 4:], found[1, :16])


def test_reach_later_decides_for_the_layers_after_the_gate():
    model = gated_model(rule={**RULE, "reach": "later"}, layers=(0,))
    with model.capture_routing() as routing:
        model(tokens(2, 12))
    first, last = routing.layers[0], routing.layers[2]
    assert torch.equal(first.allowed.sum(-1), torch.where(first.token_classes == 0, 1, 3))
    assert torch.equal(last.allowed.sum(-1), torch.where(first.token_classes == 0, 1, 2))
    own = gated_model(layers=(0,))
    with own.capture_routing() as routing:
        own(tokens(2, 12))
    assert routing.layers[0].allowed is not None
    assert routing.layers[2].allowed is None


def test_a_static_cache_gives_the_same_tokens():
    model, ids = gated_model(), tokens(2, 9)
    ids[0, :3] = 256
    options = {"attention_mask": (ids != 256).long(), "max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(ids, cache_implementation="static", **options), model.generate(ids, **options))


@pytest.mark.parametrize("reach", ["layer", "later"])
def test_compiled_with_a_static_cache_a_pass_is_one_graph_that_gives_logits_alone(reach):
    """What the gates keep lies in tensors that each pass changes in place, as keys and values do: on a GPU, CUDA graphs
    may not leave it elsewhere."""
    model, ids = gated_model(rule=RULE | {"reach": reach}), tokens(2, 9)
    ids[0, :3] = 256
    graphs = []

    def backend(graph, inputs):
        (output,) = (node for node in graph.graph.nodes if node.op == "output")
        graphs.append([value.name for value in output.args[0]])
        return graph.forward

    options = {"attention_mask": (ids != 256).long(), "max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, **options)
    compiling = CompileConfig(backend=backend, mode=None)
    compiling._compile_all_devices = True
    torch.compiler.reset()
    found = model.generate(ids, cache_implementation="static", compile_config=compiling, **options)
    assert torch.equal(found, expected)
    assert graphs == [["logits"]]


def test_a_static_cache_of_windows_alone_is_not_compiled():
    model, ids = gated_model("mistral", sliding_window=4), tokens(2, 9)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    compiling = CompileConfig(backend="eager", mode=None)
    compiling._compile_all_devices = True
    torch.compiler.reset()
    counters.clear()
    found = model.generate(ids, cache_implementation="static", compile_config=compiling, **options)
    assert torch.equal(found, model.generate(ids, **options))
    assert not counters["frames"]


def test_a_static_cache_that_is_used_again_begins_a_new_text():
    model = gated_model()
    cache = StaticCache(config=model.config, max_cache_len=32)
    first, _ = classes(model, tokens(1, 8), past_key_values=cache)
    kept = cache.layers[-1]
    marks = [getattr(of, "_dynamo_static_input_type", None) for of in (kept.keep, kept.judged, *kept.evidence.values())]
    assert marks == [cache.layers[0].keys._dynamo_static_input_type] * 4  # CUDA graphs leave them where they lie
    cache.reset()
    other, _ = classes(model, tokens(1, 8, seed=5), past_key_values=cache)
    alone, _ = classes(model, tokens(1, 8, seed=5))
    assert torch.equal(other, alone)
    assert not torch.equal(first, other)


@torch.no_grad()
@pytest.mark.parametrize("make", [DynamicCache, partial(StaticCache, max_cache_len=32)])
def test_tokens_that_one_expert_ran_on_are_evidence_for_those_that_follow(make):
    model, ids, more = gated_model(), tokens(1, 8), tokens(1, 8, seed=4)

    def follow(run):
        cache = make(config=model.config)
        with model.use_expert(0):
            run(model, ids, past_key_values=cache)
        return classes(model, more, past_key_values=cache)[0]

    found = follow(lambda model, ids, **cache: model(ids, **cache))
    assert torch.equal(found, follow(classes))  # which captures the routing, for which the gates judge
    assert not torch.equal(found, classes(model, more)[0])


def test_assisted_generation_gives_the_same_tokens():
    model, helper = gated_model(), tiny_dense("qwen2", seed=3)
    ids = tokens(1, 8)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    alone = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, assistant_model=helper, **options), alone)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, **options), alone)


def test_a_cropped_cache_forgets_what_was_cut_off():
    model, ids = gated_model(), tokens(1, 20)
    cache = DynamicCache(config=model.config)
    classes(model, ids, past_key_values=cache)
    cache.crop(-8)
    assert cache.get_seq_length() == 12
    again, _ = classes(model, tokens(1, 5, seed=4), past_key_values=cache)
    whole, _ = classes(model, torch.cat([ids[:, :12], tokens(1, 5, seed=4)], 1))
    assert torch.equal(again, whole[:, 12:])


def test_rows_of_a_cache_that_are_repeated_and_selected_keep_their_texts():
    model, ids = gated_model(), tokens(2, 12)
    cache = DynamicCache(config=model.config)
    classes(model, ids, past_key_values=cache)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    more = tokens(2, 4, seed=7)
    found, _ = classes(model, more, past_key_values=copy.deepcopy(cache))
    whole, _ = classes(model, torch.cat([ids[[1, 0]], more], 1))
    assert torch.equal(found.view(2, 2, 4), whole.view(2, 2, 16)[:, :, 12:])


def test_a_cache_is_kept_on_disk_with_its_texts(tmp_path):
    """As a prompt's cache is; also where the checkpoint's own code runs instead of the package."""
    model, ids, more = gated_model(), tokens(1, 12), tokens(1, 5, seed=4)
    model.save_pretrained(tmp_path / "model")
    cache = DynamicCache(config=model.config)
    classes(model, ids, past_key_values=cache)
    torch.save({"cache": cache, "more": more}, tmp_path / "cache.pt")
    whole, output = classes(model, torch.cat([ids, more], 1))
    for again in (pickle.loads(pickle.dumps(cache)), torch.load(tmp_path / "cache.pt", weights_only=False)["cache"]):
        found, _ = classes(model, more, past_key_values=again)
        assert torch.equal(found, whole[:, 12:])
        again.crop(-5)
        assert again.get_seq_length() == len(text_seen(again)) == 12
    code = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1] + "/model", trust_remote_code=True)
from transformers import DynamicCache
cache = DynamicCache(config=model.config)
with torch.no_grad():
    model(torch.tensor([%s]), past_key_values=cache)
    torch.save(cache, sys.argv[1] + "/own.pt")
    again = torch.load(sys.argv[1] + "/own.pt", weights_only=False)
    print(model(torch.tensor([%s]), past_key_values=again).logits[0, -1, :4].tolist())
"""
    said = run_fresh(code % (ids[0].tolist(), more[0].tolist()), str(tmp_path))
    torch.testing.assert_close(torch.tensor(json.loads(said)), output.logits[0, -1, :4])


@pytest.mark.parametrize("make", [DynamicCache, StaticCache])
def test_a_cache_that_was_changed_behind_the_gates_is_refused(make):
    model = gated_model()
    cache = make(config=model.config, **({"max_cache_len": 16} if make is StaticCache else {}))
    model(tokens(1, 6), past_key_values=cache)
    for layer in cache.layers[:-1]:
        layer.keys, layer.values = layer.keys[:, :, :3], layer.values[:, :, :3]
        layer.cumulative_length = torch.tensor(3)
    with pytest.raises(ValueError, match="holds 3 tokens, but the model's prefix gates know 6"):
        model(tokens(1, 2), past_key_values=cache)


def test_packed_documents_are_judged_apart():
    model, ids = gated_model(), tokens(1, 26)
    positions = torch.cat([torch.arange(9), torch.arange(17)]).unsqueeze(0)
    found, _ = classes(model, ids, position_ids=positions)
    own = own_logits(model, ids, positions)
    rule = PrefixRule.of(model.config)
    for judged, logits in zip(found, own, strict=True):
        parts = [
            RunningText(rule, TextMarks.of((1, len(part)), "cpu")).judge(0, part) for part in logits.split([9, 17])
        ]
        assert torch.equal(judged, (torch.cat(parts)[:, 1] >= 0).long())
        whole = RunningText(rule, TextMarks.of((1, 26), "cpu")).judge(0, logits)
        assert not torch.equal(judged, (whole[:, 1] >= 0).long())


def own_logits(model, ids, positions):
    """Each token's own logits in the gated layers, where the routing is the gates'."""
    found = []
    handles = [
        ffn.classifier.register_forward_hook(lambda module, args, output: found.append(output))
        for ffn in model.expanded_ffns().values()
    ]
    with torch.no_grad():
        model(ids, position_ids=positions)
    for handle in handles:
        handle.remove()
    return found


def test_a_mask_of_four_dimensions_needs_position_ids():
    model, ids = gated_model(), tokens(1, 5)
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match="give one of"):
        model(ids, attention_mask=mask)
    found, _ = classes(model, ids, attention_mask=mask, position_ids=torch.arange(5).unsqueeze(0))
    assert torch.equal(found, classes(model, ids)[0])


def test_copies_of_the_model_gate_as_it_does():
    model, ids = gated_model(), tokens(1, 12)
    before, output = classes(model, ids)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        found, again = classes(other, ids)
        assert torch.equal(found, before)
        assert torch.equal(again.logits, output.logits)
        with other.capture_routing() as routing:
            other.base_model(ids)
        assert other.routing_control is not model.routing_control
        assert len(routing) == 2


def test_the_decoder_alone_is_gated_too():
    model, ids = gated_model(), tokens(1, 12)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model.model(ids[:, :7], past_key_values=cache)
        found = model.model(ids[:, 7:], past_key_values=cache).last_hidden_state
        whole = model.model(ids).last_hidden_state
    torch.testing.assert_close(found, whole[:, 7:])


def test_in_training_the_loss_adds_up_the_evidence():
    model, ids = gated_model().train(), tokens(2, 8)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[0, :3] = 0
    with model.capture_routing() as routing:
        model(ids, attention_mask=mask)
    layer = routing.layers[0]
    assert layer.prefix_rule is not None
    assert layer.allowed is None
    judged = judged_by_text(layer, {"input_ids": ids, "attention_mask": mask})
    evidence = bounded_log_odds(layer.classifier_logits, 2.0).view(2, 8, 1) * mask.unsqueeze(-1)
    keep = torch.where(mask == 1, 0.9, 1.0)
    slow = slow_sums(evidence.double(), keep.double())
    torch.testing.assert_close(judged.classifier_logits[:, 1].view(2, 8).double(), slow[..., 0])
    assert judged.prefix_rule is None
    judged.classifier_logits[:, 1].sum().backward()
    assert model.expanded_ffns()[0].classifier.weight.grad.abs().sum() > 0
    model.eval()
    with model.capture_routing() as routing:
        model(ids, attention_mask=mask)
    torch.testing.assert_close(routing.layers[0].classifier_logits, judged.classifier_logits)


def test_an_untrained_gate_has_no_effect():
    model, ids = gated_model(), tokens(1, 12)
    for ffn in model.expanded_ffns().values():
        ffn.classifier.weight.data.zero_()
    gated = model(ids).logits
    for ffn in model.expanded_ffns().values():
        ffn.classifier = None
    assert torch.equal(model(ids).logits, gated)


@pytest.mark.parametrize(
    ("gate", "said"),
    [
        ({"decay": 0, "bound": 1}, "decay is 0: must be above 0"),
        ({"decay": 1.5, "bound": 1}, "decay is 1.5"),
        ({"decay": "0.9", "bound": 1}, "must be numbers"),
        ({"decay": 0.9, "bound": 0}, "bound is 0"),
        ({"decay": 0.9, "bound": math.inf}, "bound is inf"),
        ({"decay": 0.9, "bound": 1, "reach": "all"}, "known: layer, later"),
        ({"decay": 0.9}, "decay and bound are missing"),
        ({"decay": 0.9, "bound": 1, "more": 1}, "must be an object with decay, bound, reach"),
        ([], "must be an object"),
    ],
)
def test_a_wrong_rule_is_refused(gate, said):
    dense = tiny_dense("qwen2").config
    with pytest.raises(ValueError, match=said):
        LayerMoEConfig.from_dense(dense, num_experts_per_layer=[2, 1, 2], classifier_layers=[0], prefix_gate=gate)


def test_gates_without_classifiers_and_in_a_dmoe_are_refused():
    dense = tiny_dense("qwen2").config
    with pytest.raises(ValueError, match="classifier_layers names no layer"):
        LayerMoEConfig.from_dense(dense, num_experts_per_layer=[2, 1, 2], prefix_gate=RULE)
    groups = [["en"], ["el"]]
    with pytest.raises(ValueError, match="prefix_gate"):
        DMoEConfig.from_dense(dense, num_experts_per_layer=[2, 1, 2], language_groups=groups, prefix_gate=RULE)
    with pytest.raises(InputError, match="no classifiers and no prefix gates"):
        Plan("dmoe", [2, 1, 2], groups=groups, prefix_gate=PrefixRule(0.9, 2.0))
    with pytest.raises(InputError, match="no layer has a classifier"):
        Plan("layer-moe", [2, 1, 2], prefix_gate=PrefixRule(0.9, 2.0))


def test_the_step_is_the_same_cut_padded_and_recomputed(tmp_path):
    options = {"classifier": 0.7, "prior": 0.0, "fields": {"prefix_gate": RULE}}
    logs: dict[str, float] = {}
    whole = train(tmp_path / "whole", logs=logs, **options)
    cut = train(tmp_path / "cut", batch=2, steps=4, padded=True, **options)
    recomputed = train(tmp_path / "recomputed", checkpointing=True, **options)
    single = train(tmp_path / "single", classifier=0.7, prior=0.0)
    for name, value in whole.items():
        torch.testing.assert_close(cut[name], value, rtol=1e-4, atol=1e-5, msg=name)
        torch.testing.assert_close(recomputed[name], value, rtol=1e-4, atol=1e-5, msg=name)
    gate = "model.layers.0.mlp.classifier.weight"
    assert not torch.allclose(whole[gate], single[gate], rtol=1e-2)
    ids, languages = rows()
    model = build(prefix_gate=RULE).train()
    with model.capture_routing() as routing:
        model(ids)
    known = languages.flatten() >= 0
    slow = []
    for layer in (0, 2):
        evidence = bounded_log_odds(routing.layers[layer].classifier_logits, 2.0).view(8, 12, 1)
        state = slow_sums(evidence, torch.full((8, 12), 0.9)).flatten()[known]
        wanted = torch.where(languages.flatten()[known] == 0, -state, state)
        slow.append(-torch.nn.functional.logsigmoid(wanted).mean())
    assert logs["classifier_loss"] == pytest.approx(torch.stack(slow).mean().item(), rel=1e-4)


def test_text_that_changes_its_language_changes_its_class():
    """Each token is evidence of `e` nats: the gate switches once the new language's evidence outweighs what is left."""
    rule, e = PrefixRule(0.9, 4.0), 1.0
    raw = 4.0 * math.atanh(e / 4.0)
    own = torch.tensor([[0.0, -raw]] * 40 + [[0.0, raw]] * 20)
    found = RunningText(rule, TextMarks.of((1, 60), "cpu")).judge(0, own)[:, 1]
    assert (found[:40] < 0).all()
    before = e * (1 - 0.9**40) / 0.1
    needed = next(n for n in range(1, 20) if e * (1 - 0.9**n) / 0.1 >= before * 0.9**n)
    assert (found[40 : 40 + needed - 1] < 0).all()
    assert (found[40 + needed - 1 :] >= 0).all()
    assert needed == 7

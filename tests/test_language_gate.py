"""The language gate: sums over a window, the same bits however a text comes in pieces, and caches that keep them."""

import copy
import json
import math
import pickle
from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import CONFIGURATIONS, matrix, run_fresh, tiny_dense
from gated_models import (
    GREEDY,
    ONE,
    TWO,
    classes,
    classes_of_rows,
    decisions,
    evidence_of,
    gated_model,
    give_evidence,
    kept,
    slow_classes,
    tokens,
)
from torch._dynamo.utils import counters
from transformers import CompileConfig, DynamicCache, StaticCache

from hf_moe_expand import DMoEConfig, LayerMoEConfig
from hf_moe_expand.modeling.language_gate import (
    GateMemory,
    GatePass,
    GateRule,
    classes_of_sums,
    token_evidence,
    window_sums,
)

RULE = {"layer": 1, "languages": [["en"], ["el"]], "bound": 2.0, "window": 5}
UNJUDGED = {**GREEDY, "judge_prompt": False}


def rows_of(counted):
    return torch.tensor([[mark == "1" for mark in row] for row in counted])


@pytest.mark.parametrize("window", [1, 3, 64])
@pytest.mark.parametrize("count", [1, 3], ids=["two classes", "four classes"])
def test_sums_over_a_window_are_those_of_a_slow_loop(window, count):
    """With padding on the left and in the middle, and texts that follow one another."""
    draw = torch.Generator().manual_seed(window)
    counted = rows_of(["000111111111", "110011101111", "111111111111", "000000000000"])
    starts = rows_of(["000100000000", "100000010000", "100010000100", "100000000000"])
    evidence = torch.randint(-3, 4, (4, 12, count), generator=draw, dtype=torch.int32)
    evidence = evidence.masked_fill(~counted.unsqueeze(-1), 0)
    found = classes_of_sums(window_sums(evidence, counted, starts, window))
    slow = [slow_classes(evidence[b], counted[b].tolist(), starts[b].tolist(), window) for b in range(4)]
    assert found.tolist() == slow
    assert len(found.unique()) == count + 1  # small numbers, so that there are ties too


def test_ties_go_home_or_to_the_earlier_class():
    sums = torch.tensor([[[0, 0], [-1, -5], [7, 7], [7, 8], [0, 3], [1, 1]]])
    assert classes_of_sums(sums).tolist() == [[0, 0, 1, 2, 2, 1]]


def test_evidence_is_the_bounded_log_odds_of_classes_in_whole_numbers():
    logits = torch.tensor([[1.0, 2.0, -30.0, 0.5, 0.5]])
    found = token_evidence(logits, [2, 1, 2], 4.0, has_template=False)
    home = math.log(math.exp(1) + math.exp(2))
    raw = [-30 - home, 0.5 + math.log(2) - home]
    assert found.tolist() == [[round(1024 * 4 * math.tanh(value / 4)) for value in raw]]
    assert found.dtype == torch.int32
    shares = logits.double().exp() / logits.double().exp().sum()
    weighed = [[round(1024 * (1 - float(shares[0, 0])) * 4 * math.tanh(value / 4)) for value in raw]]
    assert token_evidence(logits, [2, 1, 2], 4.0, has_template=True).tolist() == weighed


def test_a_chat_templates_own_words_are_no_evidence():
    logits = torch.tensor([[30.0, 0.0, 0.0], [-30.0, 9.0, 0.0], [-30.0, 0.0, 9.0]])
    found = token_evidence(logits, [2, 1], 4.0, has_template=True)
    assert found[0].item() == 0
    assert found[1].item() < -3000 < 3000 < found[2].item()


def judged(rule, evidence, memory=None, **inputs):
    """The classes of one pass by its evidence `[B, S, E]`, and what is kept after it."""
    made = GatePass.of_inputs(rule, evidence.shape[:2], "cpu", memory=memory, **inputs)
    found = made.judge(evidence.flatten(0, 1))
    after = GateMemory()
    after.kept = made.kept
    return found, after


@pytest.mark.parametrize("cuts", [[1] * 20, [7, 1, 12], [19, 1]])
def test_in_pieces_classes_and_what_is_kept_are_the_same_bits(cuts):
    rule = GateRule(1, [["en"], ["el"], ["hu"]], 2.0, 6)
    evidence = torch.randint(-9, 10, (2, 20, 2), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    whole, expected = judged(rule, evidence)
    memory, parts = None, []
    for piece in evidence.split(cuts, 1):
        found, memory = judged(rule, piece, memory)
        parts.append(found)
    assert torch.equal(torch.cat(parts, 1), whole)
    assert torch.equal(memory.kept, expected.kept)


def test_what_follows_a_token_changes_nothing_of_its_class():
    rule = GateRule(1, [["en"], ["el"]], 2.0, 4)
    evidence = torch.randint(-9, 10, (3, 40, 1), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    whole, _ = judged(rule, evidence)
    for length in range(1, 40):
        assert torch.equal(judged(rule, evidence[:, :length])[0], whole[:, :length])


def test_text_that_changes_its_language_changes_its_class():
    """Of a window of 8 tokens, 5 of the new language outweigh the 3 that are left of the old one."""
    evidence = torch.tensor([-100] * 40 + [100] * 20, dtype=torch.int32).view(1, 60, 1)
    found, _ = judged(GateRule(1, [["en"], ["el"]], 2.0, 8), evidence)
    assert found.tolist() == [[0] * 44 + [1] * 16]
    back, _ = judged(GateRule(1, [["en"], ["el"]], 2.0, 8), -evidence)
    assert back.tolist() == [[1] * 43 + [0] * 17]  # at the 44th token the sum is 0: home


KINDS = [(ONE, False), (TWO, False), (ONE, True), (TWO, True)]
BOTH_KINDS = pytest.mark.parametrize(("expansions", "exclusive"), KINDS, ids=["one", "two", "exclusive", "2 exclusive"])


@BOTH_KINDS
def test_however_a_text_is_read_its_tokens_have_the_same_classes(expansions, exclusive):
    """In one pass, token by token, in chunks, after a crop, padded, in a static cache; logits are close."""
    model = gated_model(expansions=expansions, exclusive=exclusive)
    table, ids = evidence_of(classes=len(expansions) + 1), tokens(3, 14)
    give_evidence(model, table)
    whole, output = classes(model, ids, use_cache=True)
    assert torch.equal(whole, classes_of_rows(table, ids))
    assert len(whole.unique()) == len(expansions) + 1
    assert torch.equal(kept(output)[..., 2:], table[ids])
    with torch.no_grad():
        for make in (DynamicCache, partial(StaticCache, max_cache_len=20)):
            for cuts in ([1] * 14, [5, 1, 8]):
                cache = make(config=model.config)
                parts = [classes(model, piece, past_key_values=cache) for piece in ids.split(cuts, 1)]
                assert torch.equal(torch.cat([found for found, _ in parts], 1), whole)
                logits = torch.cat([piece.logits for _, piece in parts], 1)
                torch.testing.assert_close(logits, output.logits, rtol=1e-4, atol=1e-5)
                assert torch.equal(kept(parts[-1][1])[:, :14, 2:], kept(output)[..., 2:])
        padded = torch.cat([torch.full((3, 4), 256), ids], 1)
        mask = (padded != 256).long()
        places = (mask.cumsum(1) - 1).clamp(min=0)
        for positions in (None, places):
            found, again = classes(model, padded, attention_mask=mask, position_ids=positions)
            assert torch.equal(found[:, 4:], whole)
        torch.testing.assert_close(again.logits[:, 4:], output.logits, rtol=1e-4, atol=1e-5)


GATED = (replace(CONFIGURATIONS[0], name="gate"), replace(CONFIGURATIONS[0], name="exclusive"))


@matrix(GATED, GATED[1:])
def test_cached_generation_is_the_full_forward(configuration, backbone):
    """Greedy, batched with left padding, and with beams."""
    exclusive = configuration.name == "exclusive"
    model = gated_model(backbone, TWO, exclusive)
    give_evidence(model, evidence_of(classes=3))
    ids = tokens(2, 10)
    options = {"attention_mask": torch.ones_like(ids), **UNJUDGED}
    with decisions() as read:
        found = model.generate(ids, **options)
    assert len(torch.cat(read, 1).unique()) > 1
    full = ids
    for _ in range(8):
        full = torch.cat([full, model(full, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(found, full)
    beams = [model.generate(ids, num_beams=3, use_cache=cached, **options) for cached in (True, False)]
    assert torch.equal(*beams)
    padded = torch.cat([torch.full((2, 4), 256), ids], 1)
    padded[0, :4] = tokens(4, seed=9)
    together = model.generate(padded, **{**options, "attention_mask": (padded != 256).long()})
    assert torch.equal(together[1, 4:], found[1])


@BOTH_KINDS
def test_a_static_cache_gives_the_same_tokens(expansions, exclusive):
    model, ids = gated_model(expansions=expansions, exclusive=exclusive), tokens(2, 9)
    ids[0, :3] = 256
    options = {"attention_mask": (ids != 256).long(), **GREEDY}
    assert torch.equal(model.generate(ids, cache_implementation="static", **options), model.generate(ids, **options))


@pytest.mark.parametrize("exclusive", [False, True], ids=["copies", "exclusive"])
def test_compiled_with_a_static_cache_a_pass_is_one_graph_that_gives_logits_alone(exclusive):
    """What the gate keeps lies in tensors that each pass changes in place, as keys and values do: on a GPU, CUDA graphs
    may not leave it elsewhere."""
    model, ids = gated_model(expansions=TWO, exclusive=exclusive), tokens(2, 9)
    ids[0, :3] = 256
    graphs = []

    def backend(graph, inputs):
        (output,) = (node for node in graph.graph.nodes if node.op == "output")
        graphs.append([value.name for value in output.args[0]])
        return graph.forward

    options = {"attention_mask": (ids != 256).long(), **GREEDY, "max_new_tokens": 20}
    with decisions() as read:
        expected = model.generate(ids, **options)
    assert len(torch.cat(read[1:]).unique()) > 1
    compiling = CompileConfig(backend=backend, mode=None)
    compiling._compile_all_devices = True
    torch.compiler.reset()
    found = model.generate(ids, cache_implementation="static", compile_config=compiling, **options)
    assert torch.equal(found, expected)
    ((name,),) = graphs
    assert name.startswith("logits")


def test_a_static_cache_of_windows_alone_is_not_compiled():
    model, ids = gated_model("mistral", sliding_window=4), tokens(2, 9)
    options = {"attention_mask": torch.ones_like(ids), **GREEDY, "max_new_tokens": 12}
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
    memory = cache.layers[-1]
    marks = [getattr(of, "_dynamo_static_input_type", None) for of in (memory.kept, memory.judged)]
    assert marks == [cache.layers[0].keys._dynamo_static_input_type] * 2  # CUDA graphs leave them where they lie
    cache.reset()
    other, _ = classes(model, tokens(1, 8, seed=5), past_key_values=cache)
    alone, _ = classes(model, tokens(1, 8, seed=5))
    assert torch.equal(other, alone)
    assert not torch.equal(first, other)


@torch.no_grad()
@pytest.mark.parametrize("make", [DynamicCache, partial(StaticCache, max_cache_len=32)])
def test_tokens_that_one_expert_ran_on_are_evidence_for_those_that_follow(make):
    model, ids, more = gated_model(window=12), tokens(1, 8), tokens(1, 8, seed=6)
    table = evidence_of()
    give_evidence(model, table)
    for run in (partial(model.use_expert, 0), partial(model.use_expansion, 0), partial(model.use_languages, "en")):
        cache = make(config=model.config)
        with run():
            model(ids, past_key_values=cache)
        found, _ = classes(model, more, past_key_values=cache)
        assert torch.equal(found, classes_of_rows(table, torch.cat([ids, more], 1), 12)[:, 8:])
    assert not torch.equal(found, classes(model, more)[0])


def test_a_cropped_cache_forgets_what_was_cut_off():
    model, ids, more = gated_model(), tokens(1, 20), tokens(1, 8, seed=6)[:, :5]
    table = evidence_of()
    give_evidence(model, table)
    cache = DynamicCache(config=model.config)
    classes(model, ids, past_key_values=cache)
    cache.crop(-8)
    assert cache.get_seq_length() == len(cache.layers[-1]) == 12
    again, _ = classes(model, more, past_key_values=cache)
    assert torch.equal(again, classes_of_rows(table, torch.cat([ids[:, :12], more], 1))[:, 12:])
    assert not torch.equal(again, classes_of_rows(table, torch.cat([ids, more], 1))[:, 20:])


def test_rows_of_a_cache_that_are_repeated_selected_and_reordered_keep_their_texts():
    model, ids, more = gated_model(), tokens(2, 12), tokens(2, 4, seed=7)
    table = evidence_of()
    give_evidence(model, table)
    cache = DynamicCache(config=model.config)
    classes(model, ids, past_key_values=cache)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    found, _ = classes(model, more, past_key_values=copy.deepcopy(cache))
    assert torch.equal(found, classes_of_rows(table, torch.cat([ids[[1, 0]], more], 1))[:, 12:])
    cache.reorder_cache(torch.tensor([1, 1]))
    found, _ = classes(model, more, past_key_values=cache)
    assert torch.equal(found, classes_of_rows(table, torch.cat([ids[[0, 0]], more], 1))[:, 12:])


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
        assert again.get_seq_length() == len(again.layers[-1]) == 12
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
def test_a_cache_that_was_changed_behind_the_gate_is_refused(make):
    model = gated_model()
    cache = make(config=model.config, **({"max_cache_len": 16} if make is StaticCache else {}))
    model(tokens(1, 6), past_key_values=cache)
    for layer in cache.layers[:-1]:
        layer.keys, layer.values = layer.keys[:, :, :3], layer.values[:, :, :3]
        layer.cumulative_length = torch.tensor(3)
    with pytest.raises(ValueError, match="holds 3 tokens, but the model's language gate knows 6"):
        model(tokens(1, 2), past_key_values=cache)


def test_a_pass_that_goes_on_without_its_cache_is_refused():
    model = gated_model()
    with pytest.raises(ValueError, match=r"do not begin at 0.*knows nothing of the tokens before"):
        model(torch.arange(5)[None], position_ids=torch.arange(7, 12)[None])
    model(torch.arange(5)[None], position_ids=torch.arange(5)[None])
    padded = torch.tensor([[0, 0, 1, 1, 1]])
    model(torch.arange(5)[None], attention_mask=padded, position_ids=torch.tensor([[1, 1, 0, 1, 2]]))


@BOTH_KINDS
def test_packed_documents_are_judged_apart(expansions, exclusive):
    model, ids = gated_model(expansions=expansions, exclusive=exclusive, window=30), tokens(1, 26)
    table = evidence_of(classes=len(expansions) + 1)
    give_evidence(model, table)
    positions = torch.cat([torch.arange(9), torch.arange(17)]).unsqueeze(0)
    found, _ = classes(model, ids, position_ids=positions)
    parts = [classes_of_rows(table, part, 30) for part in ids.split([9, 17], 1)]
    assert torch.equal(found, torch.cat(parts, 1))
    assert not torch.equal(found, classes(model, ids)[0])


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
        assert other.routing_control is not model.routing_control
        decoder = classes(other.base_model, ids)[0]
        assert torch.equal(decoder, before)


def test_the_decoder_alone_is_gated_too():
    model, ids = gated_model(), tokens(1, 12)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model.model(ids[:, :7], past_key_values=cache)
        found = model.model(ids[:, 7:], past_key_values=cache).last_hidden_state
        whole = model.model(ids).last_hidden_state
    assert len(cache.layers[-1]) == 12
    torch.testing.assert_close(found, whole[:, 7:])


@pytest.mark.parametrize(
    ("gate", "said"),
    [
        ({"layer": 0}, "layer is 0, which has no experts"),
        ({"layer": -1}, "layer is -1"),
        ({"layer": 3}, "layer is 3"),
        ({"layer": True}, "layer is True: must be a number"),
        ({"window": 0}, "window 0"),
        ({"window": 2.5}, "window is 2.5: must be a number"),
        ({"bound": 0}, "bound 0"),
        ({"bound": math.inf}, "bound inf"),
        ({"bound": "2"}, "bound is '2': must be a number"),
        ({"languages": [["en"]]}, "must name the languages of class 0 and of each"),
        ({"languages": [["en"], []]}, "must name the languages"),
        ({"languages": [["en"], ["el", "en"]]}, "each language once"),
        ({"languages": [["en"], [""]]}, "each language once"),
        ({"languages": [["en"], ["el"], ["hu"]]}, "has 3 classes, but the model has 2"),
        ({"decay": 0.9}, "must be an object with layer, languages, bound, window"),
    ],
)
def test_a_wrong_rule_is_refused(gate, said):
    dense = tiny_dense("qwen2").config
    with pytest.raises(ValueError, match=said):
        LayerMoEConfig.from_dense(dense, num_experts_per_layer=[1, 2, 2], language_gate=RULE | gate)


@pytest.mark.parametrize("gate", [{"layer": 1}, {"languages": [["en"], ["el"]]}, [], "gate"])
def test_a_rule_of_another_form_is_refused(gate):
    with pytest.raises(ValueError, match="must be an object"):
        LayerMoEConfig.from_dense(tiny_dense("qwen2").config, num_experts_per_layer=[1, 2, 2], language_gate=gate)


def test_a_gate_beside_classifiers_in_a_dmoe_and_in_an_encoder_decoder_is_refused():
    dense = tiny_dense("qwen2").config
    counts = {"num_experts_per_layer": [1, 2, 2], "language_gate": RULE}
    with pytest.raises(ValueError, match="leave classifier_layers out"):
        LayerMoEConfig.from_dense(dense, classifier_layers=[1], **counts)
    with pytest.raises(ValueError, match="all experts of a DMoE train"):
        DMoEConfig.from_dense(dense, language_groups=[["en"], ["el"]], **counts)

"""What the language gate's decision does: tokens sent home, told languages, layers below it, prompts judged whole."""

import sys
from functools import partial

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from conftest import COMMON_BACKBONES, tiny_dense
from gated_models import (
    GREEDY,
    ONE,
    TWO,
    all_go_to,
    classes,
    classes_of_rows,
    decisions,
    dense_of,
    evidence_of,
    gated_model,
    give_evidence,
    tokens,
)
from transformers import DynamicCache, StaticCache

THREE = [(1, 4, 3), (1, 5, 5)]  # more experts than the two that a token takes
BELOW = [(2, 2, 2), (3, 3, 3)]
EVERY_KIND = pytest.mark.parametrize(
    ("expansions", "exclusive"),
    [(ONE, False), (TWO, False), (THREE, False), (ONE, True), (TWO, True), (THREE, True)],
    ids=["one", "two", "top-k", "exclusive", "2 exclusive", "exclusive of several"],
)


def ffn_calls(model, run):
    """For each expanded layer, the inputs and outputs `[B, S, h]` of its FFN, and of its expert 0 on all tokens."""
    found = {}
    handles = [
        ffn.register_forward_hook(lambda ffn, args, y, layer=layer: found.update({layer: (args[0], y)}))
        for layer, ffn in model.expanded_ffns().items()
    ]
    with torch.no_grad():
        run()
        for handle in handles:
            handle.remove()
        return {layer: (y, model.expanded_ffns()[layer].experts[0](x)) for layer, (x, y) in found.items()}


@EVERY_KIND
def test_in_a_mixed_batch_a_token_sent_home_gets_its_ffns_base_output_bit_for_bit(expansions, exclusive):
    model, ids = gated_model(expansions=expansions, exclusive=exclusive), tokens(3, 14)
    table = evidence_of(classes=len(expansions) + 1)
    give_evidence(model, table)
    home = classes_of_rows(table, ids) == 0
    assert 0 < home.sum() < home.numel()
    found = ffn_calls(model, lambda: model(ids))
    assert sorted(found) == [1, 2]
    for y, base in found.values():
        assert torch.equal(y[home], base[home])
        assert not (y[~home] == base[~home]).all(-1).any()


@pytest.mark.parametrize("backbone", COMMON_BACKBONES)
@pytest.mark.parametrize("exclusive", [False, True], ids=["copies", "exclusive"])
def test_a_pass_whose_tokens_all_go_home_is_the_base_models_bit_for_bit(backbone, exclusive):
    model = gated_model(backbone, THREE if not exclusive else TWO, exclusive)
    ids = tokens(2, 9)
    assert classes(model, ids)[0].any()
    all_go_to(model, 0)
    dense = dense_of(model)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, dense(ids).logits)
    options = {"attention_mask": torch.ones_like(ids), **GREEDY}
    assert torch.equal(model.generate(ids, **options), dense.generate(ids, **options))
    assert torch.equal(model.generate(ids, num_beams=2, **options), dense.generate(ids, num_beams=2, **options))


@EVERY_KIND
def test_the_languages_that_the_user_tells_go_before_the_gate(expansions, exclusive):
    model, ids = gated_model(expansions=expansions, exclusive=exclusive), tokens(3, 12)
    with torch.no_grad():
        judged = model(ids).logits
        told = model(ids, languages=["de", "el", None]).logits
        assert torch.equal(told[0], dense_of(model)(ids).logits[0])
        torch.testing.assert_close(told[1], model(ids[1:2], languages="el").logits[0])
        torch.testing.assert_close(told[2], judged[2])
        all_go_to(model, 1)
        assert torch.equal(model(ids, languages="el").logits, model(ids).logits)
        assert not torch.equal(model(ids, languages="en").logits, model(ids).logits)
    with pytest.raises(ValueError, match=r"does not know 'fr'; it knows en, de, el"):
        model(ids, languages="fr")


def test_each_class_may_use_the_experts_of_its_expansion_and_those_before():
    model, ids = gated_model(expansions=THREE), tokens(3, 14)
    table = evidence_of(classes=3)
    give_evidence(model, table)
    of_tokens = classes_of_rows(table, ids).flatten()
    with torch.no_grad(), model.capture_routing() as routing:
        model(ids)
    for layer, counts in ((1, [1, 4, 5]), (2, [1, 3, 5])):
        assert torch.equal(routing.layers[layer].token_classes, of_tokens)
        assert torch.equal(routing.layers[layer].allowed.sum(-1), torch.tensor(counts)[of_tokens])


@pytest.mark.parametrize("exclusive", [False, True], ids=["copies", "exclusive"])
def test_layers_below_the_gate_run_their_experts_where_the_user_tells_the_language(exclusive):
    model, ids = gated_model(expansions=BELOW, exclusive=exclusive), tokens(2, 8)
    all_go_to(model, 2)
    found = ffn_calls(model, lambda: model(ids))
    equal = [torch.equal(y, base) for y, base in found.values()]
    assert equal == [True, False, False]
    told = ffn_calls(model, lambda: model(ids, languages="hu"))
    assert not any(torch.equal(y, base) for y, base in told.values())
    mixed = ffn_calls(model, lambda: model(ids, languages=["hu", None]))
    assert torch.equal(mixed[0][0][1], mixed[0][1][1]) != torch.equal(mixed[0][0][0], mixed[0][1][0])


@pytest.mark.parametrize("exclusive", [False, True], ids=["copies", "exclusive"])
def test_one_expert_or_an_earlier_expansion_may_be_used(exclusive):
    model, ids = gated_model(expansions=TWO, exclusive=exclusive), tokens(2, 10)
    all_go_to(model, 2)
    with torch.no_grad():
        whole = model(ids).logits
        with model.use_expert(2):
            forced = model(ids).logits
        with model.use_expansion(1):
            earlier = model(ids).logits
        for setting in (partial(model.use_expert, 0), partial(model.use_expansion, 0)):
            with setting():
                assert torch.equal(model(ids).logits, dense_of(model)(ids).logits)
        if exclusive:
            assert torch.equal(forced, whole)
            assert torch.equal(forced, dense_of(model, [0, 2, 2])(ids).logits)
            assert torch.equal(earlier, dense_of(model, [0, 1, 1])(ids).logits)
        else:
            assert not torch.equal(forced, whole)
            all_go_to(model, 1)
            torch.testing.assert_close(earlier, model(ids).logits)


def reads_of(run) -> list[str]:
    """The methods by which a model's own layers and its gate ask for a tensor's value."""
    found = []

    def counting(name):
        own = getattr(torch.Tensor, name)

        def counted(self, *args):
            frame, own_code = sys._getframe(1), ("language_gate.py", "expanded_ffn.py", "dispatch.py", "routing.py")
            if frame.f_code.co_filename.endswith(own_code):
                found.append(name)
            return own(self, *args)

        return counted

    with pytest.MonkeyPatch.context() as patched, torch.no_grad():
        for name in ("tolist", "item", "__bool__", "__int__", "__index__", "__float__", "nonzero", "cpu"):
            patched.setattr(torch.Tensor, name, counting(name))
        run()
    return found


@pytest.mark.parametrize(
    ("expansions", "exclusive", "top_k"), [(ONE, False, 2), (TWO, False, 3), (ONE, True, 2), (TWO, True, 2)]
)
def test_a_pass_reads_one_value_on_the_host(expansions, exclusive, top_k):
    """Where all experts run on all tokens, or each class has one: on a device a read waits for all that came before."""
    model, ids = gated_model(expansions=expansions, exclusive=exclusive, top_k=top_k), tokens(3, 14)
    assert reads_of(lambda: model(ids, use_cache=False)) == ["tolist"]
    cache = DynamicCache(config=model.config)
    assert reads_of(lambda: model(ids, past_key_values=cache)) == ["tolist"]
    assert reads_of(lambda: model(ids[:, :1], past_key_values=cache)) == ["tolist"]
    assert reads_of(lambda: model(ids, languages="el")) == []
    padded = {"attention_mask": torch.ones_like(ids), "position_ids": torch.arange(14)[None]}
    assert reads_of(lambda: model(ids, **padded)) == ["tolist"]


# --- prompts -------------------------------------------------------------------------------------------------------


def test_all_tokens_of_a_prompt_take_the_class_of_its_end():
    model, table = gated_model(expansions=TWO), evidence_of(classes=3)
    give_evidence(model, table)
    ids = tokens(8, 12)
    options = {"attention_mask": torch.ones_like(ids), **GREEDY}
    own = classes_of_rows(table, ids)
    assert len(own[:, -1].unique()) == 3
    with decisions() as read, model.capture_routing() as routing:
        model.generate(ids, **{**options, "max_new_tokens": 1})
    (prompt,) = read
    assert torch.equal(prompt, own[:, -1:].expand_as(own))
    assert torch.equal(routing.layers[2].token_classes.view(8, 12), prompt)
    with decisions() as read:
        written = model.generate(ids, **options)
    assert torch.equal(torch.cat(read[1:], 1), classes_of_rows(table, written)[:, 12:-1])  # the sum goes on
    padded = torch.cat([torch.full((8, 3), 256), ids], 1)
    with decisions() as read:
        model.generate(padded, attention_mask=(padded != 256).long(), **{**GREEDY, "max_new_tokens": 1})
    assert torch.equal(read[0][:, 3:], prompt)


def test_an_exclusive_prompt_in_a_new_language_runs_its_expert_from_the_first_token_on():
    model, table = gated_model(expansions=TWO, exclusive=True), evidence_of(classes=3)
    give_evidence(model, table)
    ids = tokens(8, 12)
    own = classes_of_rows(table, ids)
    row = next(n for n in range(8) if own[n, -1] == 2 and own[n].unique().numel() > 1)
    found = model.generate(ids[row : row + 1], **{**GREEDY, "max_new_tokens": 1})
    dense = dense_of(model, [0, 2, 2])
    assert torch.equal(found, dense.generate(ids[row : row + 1], **{**GREEDY, "max_new_tokens": 1}))
    with torch.no_grad(), model.use_expert(2):
        expected = ffn_calls(model, lambda: model(ids[row : row + 1]))
    given = ffn_calls(model, lambda: model.generate(ids[row : row + 1], **{**GREEDY, "max_new_tokens": 1}))
    assert all(torch.equal(given[layer][0], expected[layer][0]) for layer in (1, 2))


def test_each_message_of_a_list_is_judged_by_its_own_end():
    model, table = gated_model(window=4), evidence_of()
    give_evidence(model, table)
    ids = tokens(3, 15)
    own = classes_of_rows(table, ids, 4)
    with decisions() as read:
        model.generate(ids, judge_prompt=[4, 9, 15], **{**GREEDY, "max_new_tokens": 1})
    ends = torch.tensor([3] * 4 + [8] * 5 + [14] * 6)
    assert torch.equal(read[0], own[:, ends])
    assert not torch.equal(read[0], own[:, 14:].expand_as(own))
    with decisions() as read:  # what follows the last end is no message: each token by itself
        model.generate(ids, judge_prompt=[4], **{**GREEDY, "max_new_tokens": 1})
    assert torch.equal(read[0], torch.cat([own[:, [3] * 4], own[:, 4:]], 1))


def test_a_chat_goes_on_with_the_cache_of_its_earlier_messages():
    model, table = gated_model(window=4), evidence_of()
    give_evidence(model, table)
    ids = tokens(2, 15)
    own = classes_of_rows(table, ids, 4)
    for make in (DynamicCache, partial(StaticCache, max_cache_len=32)):
        cache = make(config=model.config)
        with torch.no_grad():
            model(ids[:, :6], past_key_values=cache)
        with decisions() as read:
            model.generate(ids, past_key_values=cache, judge_prompt=[9, 15], **{**GREEDY, "max_new_tokens": 1})
        assert torch.equal(read[0], own[:, [8] * 3 + [14] * 6])


@pytest.mark.parametrize("exclusive", [False, True], ids=["copies", "exclusive"])
def test_not_judged_a_prompt_is_the_forward_pass(exclusive):
    model, table = gated_model(expansions=TWO, exclusive=exclusive), evidence_of(classes=3)
    give_evidence(model, table)
    ids = tokens(3, 10)
    with decisions() as read:
        written = model.generate(ids, judge_prompt=False, **GREEDY)
    assert torch.equal(torch.cat(read, 1), classes_of_rows(table, written)[:, :-1])
    full = ids
    for _ in range(8):
        with torch.no_grad():
            full = torch.cat([full, model(full, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(written, full)


def test_a_prompt_that_is_read_in_chunks_is_judged_as_far_as_each_reaches():
    model, table = gated_model(), evidence_of()
    give_evidence(model, table)
    ids = tokens(2, 14)
    own = classes_of_rows(table, ids)
    options = {"attention_mask": torch.ones_like(ids), "prefill_chunk_size": 5, **GREEDY}
    with decisions() as read:
        model.generate(ids, **options)
    assert [part.shape[1] for part in read[:3]] == [5, 5, 4]
    assert torch.equal(torch.cat(read[:3], 1), own[:, [4] * 5 + [9] * 5 + [13] * 4])
    whole = model.generate(ids, judge_prompt=False, **GREEDY)
    assert torch.equal(model.generate(ids, judge_prompt=False, **options), whole)


@pytest.mark.parametrize("exclusive", [False, True], ids=["copies", "exclusive"])
def test_assisted_generation_gives_the_same_tokens(exclusive):
    model, helper = gated_model(expansions=TWO, exclusive=exclusive), tiny_dense("qwen2", seed=3)
    ids = tokens(1, 8)
    options = {"attention_mask": torch.ones_like(ids), "judge_prompt": False, **GREEDY, "max_new_tokens": 12}
    with decisions() as read:
        alone = model.generate(ids, **options)
    assert len(torch.cat(read, 1).unique()) > 1
    assert torch.equal(model.generate(ids, assistant_model=helper, **options), alone)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, **options), alone)


@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_a_server_that_keeps_no_evidence_is_refused(server):
    model = gated_model()
    model.config._attn_implementation_internal = server
    with pytest.raises(ValueError, match=r"which (vLLM|SGLang) does not keep beside its cache.*export --language"):
        model(torch.arange(5)[None])


def test_continuous_batching_keeps_no_evidence_either():
    model = gated_model()
    with pytest.raises(ValueError, match=r"which continuous batching does not keep.*transformers' generate"):
        model.generate_batch([[1, 2, 3]])
    with pytest.raises(ValueError, match="which continuous batching does not keep"):
        model.generate(tokens(1, 3), cache_implementation="paged", **GREEDY)


def test_generated_in_training_mode_a_text_is_not_judged_which_is_said():
    model, ids = gated_model(exclusive=True), tokens(2, 8)
    all_go_to(model, 0)
    home = model.generate(ids, **GREEDY)
    model.train()
    with pytest.warns(UserWarning, match=r"the language gate judges nothing.*call model.eval\(\) first"):
        assert not torch.equal(model.generate(ids, **GREEDY), home)


@pytest.mark.parametrize("kind", ["copies", "exclusive"])
def test_layers_behind_the_gate_may_lie_on_another_device(kind, monkeypatch):
    """As `device_map` spreads them; the meta device stands for a second one."""
    model = gated_model(exclusive=kind == "exclusive")
    give_evidence(model, evidence_of())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device=None: False)  # which meta does not have
    place = model.config.language_gate["layer"] + 1
    for part in (*model.model.layers[place:], model.model.norm, model.lm_head):
        add_hook_to_module(part.to("meta"), AlignDevicesHook(execution_device="meta"))
    with decisions() as read:
        assert model(tokens(2, 12), use_cache=False).logits.shape == (2, 12, 257)
    assert len(read[0].unique()) == 2  # a mixed pass


def test_in_training_the_gate_decides_nothing():
    model, ids = gated_model().train(), tokens(2, 8)
    with decisions() as read, model.capture_routing() as routing:
        model(ids).logits.sum().backward()
    assert read == []
    assert all(layer.allowed is None and layer.token_classes is None for layer in routing)
    assert model.expanded_ffns()[1].language_gate.weight.grad is None

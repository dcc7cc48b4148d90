"""Caches whose tokens the language gate has not judged: refused, unless they are told to be virtual."""

import copy
import pickle
from functools import partial

import pytest
import torch
from gated_models import (
    GREEDY,
    TWO,
    classes,
    classes_of_rows,
    decisions,
    dense_of,
    evidence_of,
    gated_model,
    give_evidence,
    tokens,
)
from peft import PrefixTuningConfig, get_peft_model
from transformers import DynamicCache, StaticCache

UNJUDGED = {**GREEDY, "judge_prompt": False}


def plain(cache):
    """The keys and values of a cache, as prompt caches keep them."""
    return [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers if layer.keys is not None]


def filled(model, ids, make=DynamicCache):
    cache = make(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return cache


def by_hand(model, ids):
    """A static cache with the keys and values of another one."""
    cache = StaticCache(config=model.config, max_cache_len=32)
    for number, (keys, values) in enumerate(plain(filled(model, ids))):
        cache.update(keys, values, number)
    return cache


def without_the_gates_layer(model, ids):
    cache = filled(model, ids)
    cache.layers = cache.layers[:-1]
    return cache


def used_again(model, ids):
    """A static cache that was reset, and then filled by hand."""
    cache = filled(model, ids, partial(StaticCache, max_cache_len=32))
    cache.reset()
    for number, (keys, values) in enumerate(plain(filled(model, ids))):
        cache.update(keys, values, number)
    return cache


def in_training(model, ids):
    cache = filled(model.train(), ids)
    model.eval()
    return cache


def changed(change):
    def make(model, ids):
        cache = DynamicCache(plain(filled(model, ids)))
        return change(cache) or cache

    return make


UNSEEN = {
    "rebuilt": changed(lambda cache: None),
    "rebuilt by its configuration": lambda model, ids: DynamicCache(plain(filled(model, ids)), config=model.config),
    "iterated": lambda model, ids: DynamicCache(filled(model, ids)),
    "cropped": changed(lambda cache: cache.crop(-2)),
    "selected": changed(lambda cache: cache.batch_select_indices(torch.tensor([1, 0]))),
    "reordered": changed(lambda cache: cache.reorder_cache(torch.tensor([1, 0]))),
    "copied": changed(copy.deepcopy),
    "pickled": changed(lambda cache: pickle.loads(pickle.dumps(cache))),
    "of the base": lambda model, ids: filled(dense_of(model), ids),
    "without the gate's layer": without_the_gates_layer,
    "static": by_hand,
    "static, used again": used_again,
    "in training": in_training,
}


@pytest.mark.parametrize("make", UNSEEN.values(), ids=UNSEEN)
def test_a_cache_with_tokens_that_the_gate_has_not_judged_is_refused(make):
    model, ids = gated_model(), tokens(2, 6)
    cache = make(model, ids)
    held = int(cache.get_seq_length())
    message = rf"holds {held} tokens that .* has not judged.*`with model\.use_virtual_tokens\({held}\):`\.$"
    for ask in (partial(model, tokens(2, 2)), partial(model.generate, tokens(2, held + 2), **GREEDY)):
        with pytest.raises(ValueError, match=message) as refused, torch.no_grad():
            ask(past_key_values=copy.deepcopy(cache))
        assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match=message), model.use_virtual_tokens(held - 1):
        model(tokens(2, 2), past_key_values=cache)


@pytest.mark.parametrize("kind", [tuple, list])
def test_keys_and_values_without_a_cache_are_refused(kind):
    model, ids = gated_model(), tokens(2, 6)
    with pytest.raises(ValueError, match=f"past_key_values is a {kind.__name__}: pass a Cache that a model filled"):
        model(tokens(2, 2), past_key_values=kind(plain(filled(model, ids))))


def test_a_cache_of_a_model_with_another_gate_is_refused():
    ids = tokens(2, 6)
    for other in (gated_model(expansions=TWO), gated_model(window=9)):
        with pytest.raises(ValueError, match="Another model's language gate judged the cache's tokens"):
            gated_model()(tokens(2, 2), past_key_values=filled(other, ids))


def test_rows_that_were_selected_behind_the_gate_are_refused():
    model, ids = gated_model(), tokens(2, 6)
    cache = filled(model, ids)
    for layer in cache.layers[:-1]:
        layer.batch_select_indices(torch.tensor([0]))
    with pytest.raises(ValueError, match="knows 2 sequences of the cache, but the pass has 1"):
        model(tokens(1, 2), past_key_values=cache)


@torch.no_grad()
@pytest.mark.parametrize("make", [lambda model, ids: DynamicCache(plain(filled(model, ids))), by_hand])
def test_virtual_tokens_that_are_told_are_no_text(make):
    """Also in the passes that follow, after a crop to them alone, and in a copy; a model that gets none is as ever."""
    model, ids, virtual = gated_model(), tokens(2, 9), tokens(2, 4, seed=8)
    table = evidence_of()
    give_evidence(model, table)
    cache = make(model, virtual)
    with model.use_virtual_tokens(4):
        found, _ = classes(model, ids[:, :5], past_key_values=cache)
        assert torch.equal(classes(model, ids)[0], classes_of_rows(table, ids))
    cache = copy.deepcopy(cache)
    later, _ = classes(model, ids[:, 5:], past_key_values=cache)
    assert torch.equal(torch.cat([found, later], 1), classes_of_rows(table, ids))
    if isinstance(cache, DynamicCache):
        cache.crop(-9)
        assert torch.equal(classes(model, ids, past_key_values=cache)[0], classes_of_rows(table, ids))


def test_prefix_tuning_tells_its_virtual_tokens():
    model, ids = gated_model(), tokens(2, 9)
    table = evidence_of()
    give_evidence(model, table)
    tuned = get_peft_model(model, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    with pytest.raises(ValueError, match=r"holds 4 tokens .*use_virtual_tokens\(4\)"):
        tuned(ids)
    with tuned.use_virtual_tokens(4):
        assert torch.equal(classes(tuned, ids)[0], classes_of_rows(table, ids))
        with decisions() as read:
            found = tuned.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **UNJUDGED)
    assert torch.equal(torch.cat(read, 1), classes_of_rows(table, found[:, :-1]))

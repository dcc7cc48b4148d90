"""Similarity analysis against the Q x Q definition, on random models and real text."""

import pytest
import torch
from conftest import byte_tokenizer, refused, tiny_dense

from hf_moe_expand import Plan, expand_model, measure_similarity
from hf_moe_expand.analysis.reading import ffn_inputs

TEXTS = {
    "en": ["A plain sentence.", "Another one, a little longer than the first."] * 4,
    "el": ["Μια απλή πρόταση.", "Και μία ακόμα, λίγο πιο μεγάλη."] * 4,
    "hu": ["Egy egyszerű mondat.", "Még egy, kicsit hosszabb."] * 6,
}
SETTINGS = {"tokens": 150, "block_size": 16, "batch_size": 3}


def slow_similarity(model, tokenizer, a, b, settings):
    """Every state of `a` with every state of `b`, straight from Eq. 8, no batching and so no padding."""

    def states(texts):
        collected = {}
        left = settings["tokens"]
        with ffn_inputs(model, lambda layer, x: collected.setdefault(layer, []).append(x[0])), torch.no_grad():
            for text in texts:
                ids = tokenizer(text).input_ids[:left]
                left -= len(ids)
                for start in range(0, len(ids), settings["block_size"]):
                    model(torch.tensor([ids[start : start + settings["block_size"]]]))
                if not left:
                    break
        return [torch.cat(collected[layer]).double() for layer in sorted(collected)]

    found = []
    for u, v in zip(states(a), states(b), strict=True):
        assert len(u) == len(v) == settings["tokens"]
        found.append(torch.nn.functional.cosine_similarity(u[:, None], v[None], dim=-1).mean().item())
    return found


@pytest.mark.parametrize("backbone", ["qwen2", "bloom", "gemma3_text", "llama"])
def test_similarity_is_the_mean_of_all_pairs(backbone):
    model, tokenizer = tiny_dense(backbone), byte_tokenizer()
    result = measure_similarity(model, tokenizer, TEXTS, ["en"], ["el", "hu"], **SETTINGS)
    assert sorted(result.pairs) == ["el-el", "el-en", "el-hu", "en-en", "hu-en", "hu-hu"]
    for pair, values in result.pairs.items():
        a, b = pair.split("-")
        assert values == pytest.approx(slow_similarity(model, tokenizer, TEXTS[a], TEXTS[b], SETTINGS), abs=1e-6)
    for layer in range(3):
        new_old = (result.pairs["el-en"][layer] + result.pairs["hu-en"][layer]) / 2
        assert result.new_old[layer] == pytest.approx(new_old)
        assert result.similarity[layer] == pytest.approx((new_old + result.pairs["el-hu"][layer]) / 2)


def test_an_expanded_model_is_measured_at_the_same_place():
    expanded = expand_model(tiny_dense("qwen2"), Plan("moe-lpr", [3, 1, 2]))
    before, after = (
        measure_similarity(model, byte_tokenizer(), TEXTS, ["en"], ["el"], **SETTINGS).similarity
        for model in (tiny_dense("qwen2"), expanded)
    )
    assert after == pytest.approx(before, abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens": 9000}, r"Language 'e[nl]' has \d+ tokens, but 9,000 were asked for"),
        *(
            ({name: value}, "must be at least 1")
            for name, value in (("tokens", 0), ("block_size", -4), ("batch_size", 0))
        ),
        ({"old": []}, "Similarity needs two languages"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes, said):
    given = {"old": ["en"], "new": ["el"], **SETTINGS, **changes}
    refused(measure_similarity, tiny_dense("qwen2"), byte_tokenizer(), TEXTS, **given, says=said)


def test_old_languages_are_compared_with_each_other():
    """LayerMoE's figure 1: en&en, en&es, and pairs with and of new languages."""
    model, tokenizer = tiny_dense("qwen2"), byte_tokenizer()
    found = measure_similarity(model, tokenizer, TEXTS, ["en", "hu"], ["el"], **SETTINGS)
    assert [*found.pairs] == ["el-el", "el-en", "el-hu", "en-en", "en-hu", "hu-hu"]
    for pair in ("en-hu", "en-en"):
        a, b = pair.split("-")
        slow = slow_similarity(model, tokenizer, TEXTS[a], TEXTS[b], SETTINGS)
        assert found.pairs[pair] == pytest.approx(slow, abs=1e-6)
    assert found.new_new is None
    assert found.new_old == [(a + b) / 2 for a, b in zip(found.pairs["el-en"], found.pairs["el-hu"], strict=True)]
    assert found.similarity == found.new_old


def test_without_an_old_language_the_new_ones_are_compared():
    model, tokenizer = tiny_dense("qwen2"), byte_tokenizer()
    found = measure_similarity(model, tokenizer, TEXTS, [], ["el", "hu"], **SETTINGS)
    assert found.new_old is None
    assert found.similarity == found.new_new == found.pairs["el-hu"]
    assert found.between(["hu", "el"])[0][1] == pytest.approx(sum(found.pairs["el-hu"]) / 3)

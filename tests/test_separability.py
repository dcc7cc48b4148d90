"""Separability against a slow, obvious definition; separable and inseparable text; what is held out; refusals."""

import math
import random
import re

import pytest
import torch
from conftest import byte_tokenizer, invoke, save_dense, tiny_dense, write_texts

from hf_moe_expand import LayerMoEForCausalLM, Plan, expand_checkpoint, measure_separability
from hf_moe_expand.analysis import separability
from hf_moe_expand.analysis.reading import document_blocks, ffn_inputs, token_blocks
from hf_moe_expand.analysis.separability import BOUND, LENGTHS, ClassMoments, called_right, split
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.planning.results import SeparabilityResult

TEXTS = {
    "en": [f"A plain sentence, and another, number {i} of them." for i in range(12)],
    "zh": [f"{i}: 一个简单的句子。还有一个。" for i in range(12)],
    "el": [f"Μια απλή πρόταση, η {i}." for i in range(12)],
    "hu": [f"Egy egyszerű mondat, {i} szóval." for i in range(12)],
}
SETTINGS = {"tokens": 200, "block_size": 24, "batch_size": 3}


def letters(alphabet, documents=40, length=64, seed=0):
    draw = random.Random(seed)
    return ["".join(draw.choices(alphabet, k=length)) for _ in range(documents)]


def states_of(model, blocks):
    """`[tokens][h]` of each layer, block by block without padding."""
    found = {}
    with ffn_inputs(model, lambda layer, x: found.setdefault(layer, []).append(x[0])), torch.no_grad():
        for block in blocks:
            model(torch.tensor([block]))
    return [torch.cat(found[layer]).double() for layer in sorted(found)]


def slow_separability(model, tokenizer, old, new, seed, settings):
    """Accuracies of layers by lists of tokens: every state is held, every token is judged alone."""
    parts = {}
    for code in (*old, *new):
        documents = document_blocks(code, TEXTS[code], tokenizer, settings["tokens"], settings["block_size"])
        parts[code] = [states_of(model, part) for part in split(code, documents, seed)]
    results = []
    for layer in range(3):
        means, covariances, count = [], [], 0
        for codes in (old, new):
            mean = sum(parts[code][0][layer].mean(0) for code in codes) / len(codes)
            covariance = torch.zeros(32, 32, dtype=torch.float64)
            for code in codes:
                states = parts[code][0][layer]
                count += len(states)
                covariance += (states - mean).T @ (states - mean) / len(states) / len(codes)
            means.append(mean)
            covariances.append(covariance)
        within = sum(covariances) / 2
        share = count / (count + 32)  # of a correlation that is kept
        for i in range(32):
            for j in range(32):
                within[i, j] *= 1 if i == j else share
        weight = torch.linalg.inv(within) @ (means[1] - means[0])
        threshold = weight @ (means[0] + means[1]) / 2
        by_language = {}
        for code in (*old, *new):
            odds = [float(weight @ state - threshold) for state in parts[code][1][layer]]
            right = [(value > 0) == (code in new) for value in odds]
            shares = [sum(right) / len(right)]
            for length in LENGTHS:
                said = []
                for start in range(0, len(odds) - 31, 32):
                    total = sum(max(-4.0, min(4.0, value)) for value in odds[start : start + length])
                    said.append((total > 0) == (code in new))
                shares.append(sum(said) / len(said))
            by_language[code] = shares
        kinds = [[by_language[code] for code in codes] for codes in (old, new)]
        means_of_kinds = [[sum(values) / len(values) for values in zip(*kind, strict=True)] for kind in kinds]
        balanced = [sum(values) / 2 for values in zip(*means_of_kinds, strict=True)]
        results.append((balanced, {code: shares[-1] for code, shares in by_language.items()}))
    return results


@pytest.mark.parametrize("backbone", ["qwen2", "bloom", "gemma3_text"])
def test_separability_is_the_accuracy_of_a_linear_discriminant(backbone):
    model, tokenizer = tiny_dense(backbone), byte_tokenizer()
    found = measure_separability(model, tokenizer, TEXTS, ["en"], ["el", "hu"], **SETTINGS, seed=3)
    slow = slow_separability(model, tokenizer, ["en"], ["el", "hu"], 3, SETTINGS)
    for layer, (balanced, by_language) in enumerate(slow):
        values = [found.token[layer], *(found.running[str(length)][layer] for length in LENGTHS)]
        assert values == pytest.approx(balanced, abs=1e-9)
        assert {code: shares[layer] for code, shares in found.by_language.items()} == pytest.approx(by_language)
    assert found.separability == found.running["32"]
    assert any(0.5 < value < 1 for value in found.token)  # else this would prove little


def test_padding_and_batches_do_not_matter():
    model = tiny_dense("llama")
    results = [
        measure_separability(model, byte_tokenizer(), TEXTS, ["en"], ["el"], tokens=200, block_size=24, batch_size=size)
        for size in (1, 2, 7)
    ]
    assert results[0] == results[1] == results[2]


def test_an_expanded_model_is_measured_at_the_same_place(tmp_path):
    base = save_dense(tmp_path / "base")
    expand_checkpoint(base, tmp_path / "out", Plan("moe-lpr", [3, 1, 2]))
    expanded = LayerMoEForCausalLM.from_pretrained(tmp_path / "out")
    models = (tiny_dense("qwen2"), expanded)
    before, after = (measure_separability(m, byte_tokenizer(), TEXTS, ["en"], ["el"], **SETTINGS) for m in models)
    assert after.token == pytest.approx(before.token, abs=0.02)


def test_other_letters_are_told_apart_and_the_same_text_is_not():
    model, tokenizer = tiny_dense("qwen2"), byte_tokenizer()
    settings = {"tokens": 2000, "block_size": 32, "batch_size": 8}
    texts = {"en": letters("abcdef"), "el": letters("UVWXYZ"), "hu": letters("abcdef", seed=1), "tr": letters("abcdef")}
    apart = measure_separability(model, tokenizer, texts, ["en"], ["el"], **settings)
    assert min(apart.token) > 0.99
    assert set(map(tuple, apart.running.values())) == {(1.0, 1.0, 1.0)}
    alike = measure_separability(model, tokenizer, texts, ["en"], ["hu"], **settings)
    assert all(0.35 < value < 0.65 for value in [*alike.token, *alike.separability])
    # The very same text: the classes have the same mean, so every token is a tie.
    same = measure_separability(model, tokenizer, texts, ["en"], ["tr"], **settings)
    assert same.token == same.separability == [0.5] * 3


def test_a_longer_stretch_tells_more():
    """Some letters are more frequent, and blocks have two tokens: one token is little help, 32 together are."""
    texts = {"en": letters("aaabcdef", 160), "el": letters("abcdefff", 160, seed=1)}
    settings = {"tokens": 10_000, "block_size": 2, "batch_size": 500}
    found = measure_separability(tiny_dense("qwen2"), byte_tokenizer(), texts, ["en"], ["el"], **settings)
    for layer in range(3):
        assert 0.55 < found.token[layer] < found.running["8"][layer] < found.running["16"][layer]
        assert found.running["16"][layer] < found.separability[layer]


def test_each_language_counts_equally_within_its_kind():
    """A language with fewer fitted tokens weighs as much as the other in the probe."""
    moments = ClassMoments(2)
    moments.add(torch.tensor([[1.0, 0.0], [3.0, 0.0]]), False, 1 / 2)
    moments.add(torch.tensor([[0.0, 4.0]]), True, 1 / 2)
    moments.add(torch.tensor([[0.0, 0.0], [0.0, 2.0], [0.0, 4.0]]), True, 1 / 6)
    assert moments.means.tolist() == [[2.0, 0.0], [0.0, pytest.approx(3.0)]]
    assert moments.tokens == 6


def test_a_feature_that_never_changes_does_no_harm():
    draw = torch.Generator().manual_seed(0)
    moments = ClassMoments(3)
    for is_new in (False, True):
        states = torch.randn(500, 3, generator=draw) * torch.tensor([1.0, 0.0, 1e-3])
        states[:, 2] += 1e-3 * is_new
        states[:, 1] = 7.0
        moments.add(states, is_new, 1 / 500)
    probe = moments.probe()
    assert probe.weight_h.isfinite().all()
    odds = probe.weight_h @ torch.tensor([0.0, 7.0, 1e-3], dtype=torch.float64) + probe.bias
    assert float(odds) == pytest.approx(0.5, abs=0.15)  # unit variance, means 1 apart: (1 - 1/2) nats
    # Constant within each class, but not the same constant.
    apart = ClassMoments(2)
    for is_new in (False, True):
        apart.add(torch.full((4, 2), float(is_new)), is_new, 1 / 4)
    probe = apart.probe()
    assert float(probe.weight_h.sum()) + probe.bias > 0 > probe.bias


def test_sums_are_bounded_and_ties_are_half_right():
    odds = torch.full((1, 70), -1.0, dtype=torch.float64)
    odds[0, 0] = 100.0  # one token that is very sure and wrong
    shares = called_right(odds, is_new=False)
    assert shares[1].tolist() == [69 / 70]
    # 4 - 7 < 0: bounded, the 7 others decide; both stretches of 32 are right.
    assert [shares[length].tolist() for length in LENGTHS] == [[1.0]] * 3
    assert {n: shares[n].tolist() for n in shares} == {
        n: pytest.approx([1 - value]) for n, (value,) in ((n, called_right(odds, True)[n].tolist()) for n in shares)
    }
    assert BOUND == 4.0
    assert all(share.tolist() == [0.5] for share in called_right(torch.zeros(1, 64), is_new=True).values())


@pytest.mark.parametrize(
    ("sizes", "by_document"),
    [
        ([60] * 4, True), ([60] * 9, True), ([20] * 40, True),
        ([30, 200, 90, 60, 150, 60, 80, 100], True), ([60, 60], True),
        ([600], False),  # one document
        ([20] * 3 + [900], False),  # the small ones are less than a quarter, the large one more than half
    ],
)  # fmt: skip
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_document_is_fitted_and_scored(sizes, by_document, seed):
    """A token is its document's number and its place there; blocks have up to 20 tokens."""
    documents = [
        [[(number, i) for i in range(start, min(start + 20, size))] for start in range(0, size, 20)]
        for number, size in enumerate(sizes)
    ]
    fitted, held = split("el", documents, seed)
    assert sorted(fitted + held) == sorted(block for document in documents for block in document)
    assert sum(sizes) / 4 <= sum(map(len, held)) <= sum(sizes) / 2
    numbers = [{block[0][0] for block in part} for part in (fitted, held)]
    assert (not numbers[0] & numbers[1]) == by_document
    assert split("el", documents, seed) == (fitted, held)
    if len(documents) > 5:
        assert any(split("el", documents, other) != (fitted, held) for other in range(10, 20))


def test_the_seed_decides_what_is_held_out():
    model, tokenizer = tiny_dense("qwen2"), byte_tokenizer()
    first, again, other = (
        measure_separability(model, tokenizer, TEXTS, ["en"], ["el"], **SETTINGS, seed=seed) for seed in (0, 0, 5)
    )
    assert first == again
    assert first.seed != other.seed
    assert first.token != other.token


def test_documents_have_the_blocks_of_the_similarity():
    documents = document_blocks("en", ["", *TEXTS["en"]], byte_tokenizer(), 101, 16)
    assert [block for blocks in documents for block in blocks] == token_blocks(
        "en", TEXTS["en"], byte_tokenizer(), 101, 16
    )
    assert all(documents)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"old": []}, "No old language is given"),
        ({"new": []}, "No new language is given"),
        ({"tokens": 9000}, r"Language 'en' has \d+ tokens, but 9,000 were asked for"),
        ({"tokens": 30, "block_size": 64}, "Language 'en' has one block of text, so none can be held out"),
        ({"tokens": 20, "block_size": 8}, r"Language 'en' has \d+ held-out tokens, but a score needs at least 32"),
        ({"tokens": 0}, "must be at least 1"),
        ({"block_size": -4}, "must be at least 1"),
        ({"batch_size": 0}, "must be at least 1"),
    ],
)
def test_wrong_input_is_refused(changes, message):
    given = {"old": ["en"], "new": ["el"], "seed": 1, **SETTINGS, **changes}
    with pytest.raises(InputError, match=message):
        measure_separability(tiny_dense("qwen2"), byte_tokenizer(), TEXTS, **given)


def test_hidden_states_that_are_not_finite_are_refused_by_layer():
    model = tiny_dense("qwen2")
    with torch.no_grad():
        model.model.layers[1].post_attention_layernorm.weight[3] = math.inf
    with pytest.raises(InputError, match="Layer 1: the hidden states are not finite"):
        measure_separability(model, byte_tokenizer(), TEXTS, ["en"], ["el"], **SETTINGS)


def test_no_states_of_all_tokens_are_held(monkeypatch):
    """The sums see a batch's tokens at most; only one number a layer is kept for a held-out token."""
    seen, add = [], ClassMoments.add
    monkeypatch.setattr(
        separability.ClassMoments,
        "add",
        lambda self, states, *how: (seen.append(len(states)), add(self, states, *how))[1],
    )
    measure_separability(tiny_dense("qwen2"), byte_tokenizer(), TEXTS, ["en"], ["el"], **SETTINGS)
    assert max(seen) <= SETTINGS["block_size"] * SETTINGS["batch_size"]


def test_json_round_trip_and_table(tmp_path):
    found = measure_separability(tiny_dense("qwen2"), byte_tokenizer(), TEXTS, ["en"], ["el"], **SETTINGS)
    found.to_json(tmp_path / "separability.json")
    assert SeparabilityResult.from_json(tmp_path / "separability.json") == found
    header, rows = found.rows()
    assert header == ["layer", "1 token", "8 tokens", "16 tokens", "32 tokens"]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    assert rows[1][-1] == f"{found.separability[1]:.3f}"
    some = found.of_layers([2, 0])
    assert some.separability == [found.separability[2], found.separability[0]]
    assert some.token == [found.token[2], found.token[0]]
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(InputError, match="not a separability analysis: `old` is missing"):
        SeparabilityResult.from_json(tmp_path / "plan.json")


def test_on_the_command_line(tmp_path):
    base = save_dense(tmp_path / "base")
    texts = [
        f"--{kind}={code}={write_texts(tmp_path / f'{code}.jsonl', TEXTS[code])}"
        for kind, code in (("old", "en"), ("new", "el"))
    ]
    out, figure = tmp_path / "separability.json", tmp_path / "s.svg"
    measure = ["analyze", "separability", base, *texts, "--tokens", "200", "--block-size", "24", "--out", out]
    said = invoke(*measure, "--figure", figure)
    rows = [re.findall(r"\d+(?:\.\d+)?", line) for line in said.splitlines() if re.search(r"\d\.\d{3}", line)]
    assert rows == SeparabilityResult.from_json(out).rows()[1]
    assert "32 tokens" in figure.read_text()
    with pytest.raises(InputError, match="exists already"):
        invoke(*measure)


def test_real_text(help_text):
    texts = {code: help_text(code, "test", 10) for code in ("en", "el", "hu")}
    found = measure_separability(
        tiny_dense("qwen2"), byte_tokenizer(), texts, ["en"], ["el", "hu"], tokens=2000, block_size=64, batch_size=8
    )
    assert min(found.separability) > 0.7
    assert min(found.by_language["el"]) > 0.9

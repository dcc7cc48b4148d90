"""What routers do and how alike languages are: every figure against a slow definition, one token at a time."""

import json
import math
import statistics
from itertools import pairwise, product
from types import SimpleNamespace

import pytest
import torch
from conftest import byte_tokenizer, invoke, refused, save_dense, shaken, tiny_config, tiny_dense, write_texts

from hf_moe_expand import DMoEConfig, DMoEForCausalLM, LayerMoEConfig, LayerMoEForCausalLM, Plan, expand_checkpoint
from hf_moe_expand.analysis import routers
from hf_moe_expand.analysis.reading import ffn_inputs
from hf_moe_expand.analysis.routers import (
    experts_for_half,
    has_choice,
    language_classes,
    measure_routing,
    nearest_experts,
    random_experts,
    random_routing,
)
from hf_moe_expand.analysis.similarity import measure_similarity
from hf_moe_expand.planning.results import NO_CHOICE, RoutingResult

TEXTS = {
    "en": ["A plain sentence.", "Another one, a little longer than the first."] * 3,
    "el": ["Μια απλή πρόταση.", "Και μία ακόμα, λίγο πιο μεγάλη."] * 3,
    "hu": ["Egy egyszerű mondat.", "Még egy, kicsit hosszabb."] * 4,
}
CLASSES = {"old": ["en"], "new": ["el", "hu"]}
SETTINGS = {"tokens": 101, "block_size": 16, "batch_size": 3, **CLASSES}


def build(backbone, config_class=LayerMoEConfig, counts=(3, 1, 2, 4), **fields):
    """Layers with 3, 1, 2 and 4 experts, a classifier in the last; random weights, none of them special."""
    torch.manual_seed(0)
    layers = {"n_layer": 4} if backbone == "bloom" else {"num_hidden_layers": 4}
    fields = {"classifier_layers": [3], **fields} if config_class is LayerMoEConfig else fields
    config = config_class.from_dense(tiny_config(backbone, **layers), num_experts_per_layer=list(counts), **fields)
    return shaken((LayerMoEForCausalLM if config_class is LayerMoEConfig else DMoEForCausalLM)(config).eval(), 0.2)


def blocks(tokenizer, texts, settings):
    """The first tokens of texts, in blocks, of which none has two texts."""
    left, size = settings["tokens"], settings["block_size"]
    for text in texts:
        ids = tokenizer(text).input_ids[:left]
        left -= len(ids)
        yield from (ids[start : start + size] for start in range(0, len(ids), size))
    assert not left


def slow_tokens(model, tokenizer, texts, settings):
    """For each token by itself: by layer, its weight of each expert, its score of expert 0, its class; and the nats."""
    rows, nats = [], []
    for block in blocks(tokenizer, texts, settings):
        with torch.no_grad(), model.capture_routing() as routing:
            log_probs = model(torch.tensor([block])).logits[0].log_softmax(-1)
        nats += [-log_probs[i, token].item() for i, token in enumerate(block[1:])]
        rows += [{layer: slow_choice(found, at) for layer, found in routing.layers.items()} for at in range(len(block))]
    return rows, nats


def slow_choice(found, position):
    scores = found.router_logits[position].double().softmax(-1).tolist()
    best = sorted(range(len(scores)), key=lambda e: -scores[e])[:2]
    weights = [scores[e] / sum(scores[i] for i in best) if e in best else 0.0 for e in range(len(scores))]
    kind = None
    if found.classifier_logits is not None:
        old, new = found.classifier_logits[position].tolist()
        kind = int(new >= old)
        weights = weights if kind else [1.0] + [0.0] * (len(scores) - 1)
    return weights, scores[0], kind


def mean(values):
    return sum(values) / len(values)


@pytest.mark.parametrize("backbone", ["qwen2", "bloom"])
def test_every_figure_is_what_it_says(backbone, tmp_path):
    model, tokenizer = build(backbone), byte_tokenizer()
    result = measure_routing(model, tokenizer, TEXTS, **SETTINGS)
    assert result.layers == [0, 2, 3]
    assert result.classes == {"en": 0, "el": 1, "hu": 1}
    everything, shares = [], {}
    for language, texts in TEXTS.items():
        rows, nats = slow_tokens(model, tokenizer, texts, SETTINGS)
        assert len(rows) == SETTINGS["tokens"]
        everything += rows
        assert result.perplexity[language] == pytest.approx(math.exp(mean(nats)), rel=1e-4)
        for index, layer in enumerate(result.layers):
            weights = [row[layer][0] for row in rows]
            top1 = [max(range(len(w)), key=w.__getitem__) for w in weights]
            share = [top1.count(e) / len(rows) for e in range(len(weights[0]))]
            shares[language, index] = share
            assert result.top1_share[language][index] == pytest.approx(share, abs=1e-12)
            expected = [mean(column) for column in zip(*weights, strict=True)]
            assert result.weight_share[language][index] == pytest.approx(expected, abs=1e-6)
            expected = mean([row[layer][1] for row in rows])
            assert result.expert_0_score[language][index] == pytest.approx(expected, abs=1e-6)
            kinds = [row[layer][2] for row in rows]
            right = None if kinds[0] is None else kinds.count(result.classes[language]) / len(rows)
            assert result.classifier_accuracy[language][index] == (right if right is None else pytest.approx(right))
            needed = next(n for n in range(1, 5) if sum(sorted(share, reverse=True)[:n]) >= 0.5 - 1e-12)
            assert result.experts_for_half[language][index] == needed
    assert [*map(experts_for_half, ([10, 0, 0], [5, 3, 2], [2, 3, 4]))] == [1, 1, 2]  # one has exactly half
    result.to_json(tmp_path / "routing.json")
    assert RoutingResult.from_json(tmp_path / "routing.json") == result
    assert 0 < result.classifier_accuracy["en"][2] < 1  # neither all nor none: the figure can be wrong
    for index in range(3):
        for (i, a), (j, b) in product(enumerate(TEXTS), repeat=2):
            u, v = shares[a, index], shares[b, index]
            cosine = sum(x * y for x, y in zip(u, v, strict=True)) / (math.hypot(*u) * math.hypot(*v))
            assert result.similarity[index][i][j] == pytest.approx(cosine, abs=1e-9)
    for (here, there), found in zip(pairwise(result.layers), result.colocation, strict=True):
        columns = [list(zip(*(row[layer][0] for row in everything), strict=True)) for layer in (here, there)]
        largest = max(statistics.correlation(xs, ys) for xs in columns[0] for ys in columns[1] if len(set(ys)) > 1)
        assert found == pytest.approx(largest, abs=1e-6)


def constant_inputs(model):
    """Every FFN sees a vector of ones, so that routers and classifiers can be told what to say."""
    for block in model.transformer.h:
        torch.nn.init.zeros_(block.post_attention_layernorm.weight)
        torch.nn.init.ones_(block.post_attention_layernorm.bias)
    return model


def say(scores, values):
    with torch.no_grad():
        scores.weight.copy_(torch.tensor(values)[:, None].expand_as(scores.weight) / scores.weight.shape[1])


def test_a_model_forced_to_an_expert_has_share_one_there():
    model = constant_inputs(build("bloom"))
    ffns = model.expanded_ffns()
    say(ffns[0].router, [0.0, 50.0, 0.0])
    say(ffns[2].router, [math.log(3), 0.0])
    say(ffns[3].router, [0.0, 0.0, 0.0, 50.0])
    say(ffns[3].classifier, [1.0, 0.0])  # all old: home, whatever the router says
    result = measure_routing(model, byte_tokenizer(), TEXTS, **SETTINGS)
    assert result.top1_share["el"] == [[0, 1, 0], [1, 0], [1, 0, 0, 0]]
    assert result.weight_share["el"][1] == pytest.approx([0.75, 0.25])
    assert result.weight_share["el"][2] == [1, 0, 0, 0]
    assert result.expert_0_score["el"] == pytest.approx([0, 0.75, 0], abs=1e-6)  # of the router, not the classifier
    assert result.classifier_accuracy == {"en": [None, None, 1], "el": [None, None, 0], "hu": [None, None, 0]}
    assert result.colocation == [None, None]  # nothing varies
    say(ffns[3].classifier, [0.0, 0.0])  # a tie is the router's
    result = measure_routing(model, byte_tokenizer(), TEXTS, **SETTINGS)
    assert result.top1_share["en"][2] == [0, 0, 0, 1]
    assert result.classifier_accuracy == {"en": [None, None, 0], "el": [None, None, 1], "hu": [None, None, 1]}


def test_blocks_of_unlike_length_share_no_batch_and_logits_are_bounded(monkeypatch):
    model, tokenizer, texts = build("qwen2"), byte_tokenizer(), {"el": ["a" * 15, *["bc"] * 7, "d" * 16]}
    whole = measure_routing(model, tokenizer, texts, tokens=45, block_size=16, batch_size=4, new=["el"])
    shapes = []
    model.register_forward_pre_hook(lambda *given: shapes.append((*given[-1]["input_ids"].shape,)), with_kwargs=True)
    for most, expected in ((45, [(2, 16), (4, 2), (3, 2)]), (18, [(1, 16), (1, 15), (4, 2), (3, 2)])):
        monkeypatch.setattr(routers, "_MOST_LOGITS", (0, most * tokenizer.vocab_size))
        shapes.clear()
        found = measure_routing(model, tokenizer, texts, tokens=45, block_size=16, batch_size=4, new=["el"])
        assert shapes[: len(expected)] == expected
        assert found.perplexity == pytest.approx(whole.perplexity, rel=1e-4)


def test_a_dmoe_models_experts_are_its_groups():
    model = build("qwen2", DMoEConfig, (2, 1, 1, 2), language_groups=[["en"], ["el", "hu"]])
    model.config.expansions = [{"method": "dmoe", "old_languages": [], "new_languages": ["en", "el", "hu"]}]
    result = measure_routing(model, byte_tokenizer(), TEXTS, tokens=60, block_size=16, batch_size=2)
    assert result.classes == {"en": 1, "el": 1, "hu": 1}
    assert result.classifier_accuracy["en"] == [None, None]
    header, rows = result.rows()
    both = [f"{figure} {kind}" for figure in ("expert 0", "classifier", "E_50%") for kind in ("old", "new")]
    assert header == ["layer", "experts", *both]
    assert [row[:3] + row[4:7] for row in rows] == [["0", "2", "-", "-", "-", "-"], ["3", "2", "-", "-", "-", "-"]]
    expected = mean([result.expert_0_score[code][1] for code in TEXTS])
    assert rows[1][3] == f"{expected:.3f}"
    assert result.colocation_rows() == (["layers", "co-location"], [["0, 3", f"{result.colocation[0]:.2f}"]])


@pytest.mark.parametrize(("gate", "share"), [(-50.0, 1.0), (50.0, 0.0), (math.log(3), 0.25)])
def test_the_shared_ffn_of_conditional_routing_counts_as_expert_0_with_its_weight(gate, share):
    model = constant_inputs(build("bloom", conditional_routing=True, classifier_layers=[]))
    for ffn in model.expanded_ffns().values():
        say(ffn.conditional_gate, [gate])
    result = measure_routing(model, byte_tokenizer(), TEXTS, **SETTINGS)
    for language in TEXTS:
        assert [layer[0] for layer in result.weight_share[language]] == pytest.approx([share] * 3, abs=1e-6)
        if share != 0.25:
            assert [layer[0] for layer in result.top1_share[language]] == [share] * 3
        assert result.perplexity[language] == pytest.approx(result.random_perplexity[language], rel=1e-4) or gate > 0


def test_random_experts_are_uniform_seeded_and_keep_the_routers_weights():
    logits = torch.tensor([[3.0, 1.0, 0.0, -60.0]]).expand(4000, 4)
    drawn, again, other = (random_experts(seed, logits.device)(logits, 2) for seed in (1, 1, 2))
    kept = drawn.isfinite()
    assert kept.sum(-1).eq(2).all()
    assert torch.equal(drawn[kept], logits[kept])
    assert all(abs(count - 2000) < 5 * math.sqrt(4000) / 2 for count in kept.sum(0).tolist())
    assert torch.equal(drawn, again)
    assert not torch.equal(drawn, other)


def test_perplexity_under_random_routing():
    model, tokenizer = build("qwen2"), byte_tokenizer()
    ids = torch.tensor([tokenizer("Ένα παράδειγμα").input_ids])
    with torch.no_grad():
        before = model(ids).logits
        with random_routing(model, 3):
            drawn = model(ids).logits
        assert not torch.allclose(drawn, before, atol=1e-3)
        assert torch.equal(model(ids).logits, before)
    first, again, other, both = (
        measure_routing(model, tokenizer, TEXTS, **SETTINGS, random_seeds=seeds).random_perplexity
        for seeds in ([0], [0], [1], [0, 1])
    )
    assert first == again
    for language in TEXTS:
        assert first[language] != other[language]
        assert both[language] == pytest.approx((first[language] + other[language]) / 2)


def test_the_models_provenance_says_which_languages_are_old():
    added = [{"old_languages": ["en"], "new_languages": ["el"]}, {"old_languages": ["en"], "new_languages": ["hu"]}]
    config = SimpleNamespace(expansions=[{"method": "moe-lpr", **one} for one in added])
    assert language_classes(config, ["hu", "de", "tr", "el"], ["de"], ["tr"]) == {"hu": 2, "de": 0, "tr": 2, "el": 1}
    refused(language_classes, config, ["tr", "en", "de"], [], [], says="de, tr: not a known language of this model")
    refused(language_classes, config, ["de"], ["de"], ["de"], says="de: given as an old and as a new language")


def test_the_nearest_expert_has_most_of_the_weight():
    model, tokenizer = build("qwen2"), byte_tokenizer()
    result = measure_routing(model, tokenizer, TEXTS, **SETTINGS)
    for codes in (["en"], ["el"], ["el", "hu"]):
        texts = {code: TEXTS[code] for code in codes}
        found = nearest_experts(model, tokenizer, texts, tokens=101, block_size=16, batch_size=3)
        assert [*found] == result.layers
        for index, nearest in enumerate(found.values()):
            shares = [mean(column) for column in zip(*(result.weight_share[c][index] for c in codes), strict=True)]
            assert nearest == shares.index(max(shares))
    assert any(found.values())  # not expert 0 everywhere


TOO_MANY = r"Language '\w\w' has \d+ tokens, but 9,000 were asked for"


@pytest.mark.parametrize(
    ("measure", "changes", "said"),
    [
        (measure_routing, {"model": tiny_dense("qwen2")}, "Qwen2ForCausalLM: no layer has experts; give an expanded"),
        (measure_routing, {"texts": {}}, "No language was given"),
        (measure_routing, {"tokens": 9000}, TOO_MANY),
        (measure_routing, {"texts": {"el": ["a", "b"]}, "tokens": 2}, "Language 'el': no token follows another"),
        (measure_similarity, {"tokens": 9000}, TOO_MANY),
        (measure_similarity, {"old": [], "new": ["el"]}, "Similarity needs two languages"),
    ],
)
def test_bad_input_is_refused(measure, changes, said):
    given = {"model": build("qwen2"), "tokenizer": byte_tokenizer(), "texts": TEXTS, **SETTINGS, **changes}
    refused(measure, **given, says=said)


@pytest.mark.parametrize(
    ("counts", "fields", "choice"),
    [
        ([2, 1, 2, 2], {"classifier_layers": []}, False),
        ([2, 1, 2, 2], {"classifier_layers": [3]}, True),
        ([2, 1, 3, 2], {"classifier_layers": []}, True),
        ([2, 1, 2, 2], {"classifier_layers": [], "router_top_k": 1}, True),
        ([2, 1, 3, 2], {"classifier_layers": [], "conditional_routing": True}, False),  # expert 0 is none to choose
    ],
)
def test_where_no_router_can_choose_random_experts_are_its_own(counts, fields, choice):
    model, tokenizer = build("qwen2", counts=counts, **fields), byte_tokenizer()
    gate = {"layer": 0, "languages": [["en"], ["el"]], "window": 5, "bound": 2.0}
    with_gate = model.config.to_dict() | {"language_gate": gate, "classifier_layers": []}
    assert has_choice(LayerMoEConfig.from_dict(with_gate))
    result = measure_routing(model, tokenizer, TEXTS, **SETTINGS)
    assert result.has_choice is has_choice(model.config) is choice
    if not choice:
        assert result.random_perplexity == result.perplexity
        with random_routing(model, 0):  # by the slow way
            _, nats = slow_tokens(model, tokenizer, TEXTS["en"], SETTINGS)
        assert result.random_perplexity["en"] == pytest.approx(math.exp(mean(nats)), rel=1e-4)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A checkpoint whose experts are copies of one FFN, one without a choice, and text."""
    root = tmp_path_factory.mktemp("routing")
    save_dense(root / "dense")
    for name, counts, classifiers in (("expanded", [3, 1, 2], [2]), ("no-choice", [2, 1, 2], [])):
        expand_checkpoint(root / "dense", root / name, Plan("own", counts, classifiers, old=["en"], new=["el"]))
    for code in ("en", "el"):
        write_texts(root / f"{code}.jsonl", TEXTS[code])
    return root


@pytest.mark.parametrize("model", ["expanded", "no-choice"])
def test_the_command_line(root, tmp_path, model, monkeypatch):
    bars, make = [], routers.token_bar
    monkeypatch.setattr(routers, "token_bar", lambda *given: bars.append(make(*given)) or bars[-1])
    data = [word for code in ("en", "el") for word in ("--data", f"{code}={root / code}.jsonl")]
    out = ["--out", tmp_path / "routing.json"]
    small = ["--tokens", 60, "--block-size", 16, "--batch-size", 2]
    said = invoke("analyze", "routing", root / model, *data, *out, *small)
    shown = bars[0].format_dict
    assert shown["prefix"] == f"routing of {model}: el: "
    assert shown["n"] == shown["total"]  # all tokens
    assert all(word in said for word in ("E_50%", "random experts", "co-location"))
    assert (NO_CHOICE in said) == (model == "no-choice")
    found = json.loads((tmp_path / "routing.json").read_text())
    assert (found["classes"], found["layers"], found["tokens"]) == ({"en": 0, "el": 1}, [0, 2], 60)
    assert found["has_choice"] == (model == "expanded")
    assert found["random_perplexity"] == pytest.approx(found["perplexity"], rel=1e-4)
    refused(invoke, "analyze", "routing", root / model, *data, *out, says=r"routing.json: exists already")


SIMILAR = {code: texts * 2 for code, texts in TEXTS.items()}
MEASURED = {"tokens": 150, "block_size": 16, "batch_size": 3}


def slow_similarity(model, tokenizer, a, b):
    """Every state of `a` with every state of `b`, straight from Eq. 8, no batching and so no padding."""

    def states(texts):
        collected = {}
        with ffn_inputs(model, lambda layer, x: collected.setdefault(layer, []).append(x[0])), torch.no_grad():
            for block in blocks(tokenizer, texts, MEASURED):
                model(torch.tensor([block]))
        return [torch.cat(collected[layer]).double() for layer in sorted(collected)]

    pairs = zip(states(a), states(b), strict=True)
    return [torch.nn.functional.cosine_similarity(u[:, None], v[None], dim=-1).mean().item() for u, v in pairs]


@pytest.mark.parametrize(
    ("backbone", "old", "new"),
    [("qwen2", ["en"], ["el", "hu"]), ("bloom", ["en"], ["el", "hu"]), ("gemma3_text", ["en", "hu"], ["el"])],
)
def test_similarity_is_the_mean_of_all_pairs(backbone, old, new):
    """Old languages are compared with each other, too, as in LayerMoE's figure 1."""
    model, tokenizer = tiny_dense(backbone), byte_tokenizer()
    result = measure_similarity(model, tokenizer, SIMILAR, old, new, **MEASURED)
    assert sorted(result.pairs) == ["el-el", "el-en", "el-hu", "en-en", "hu-en" if new[1:] else "en-hu", "hu-hu"]
    for pair, values in result.pairs.items():
        a, b = pair.split("-")
        assert values == pytest.approx(slow_similarity(model, tokenizer, SIMILAR[a], SIMILAR[b]), abs=1e-6)
    between = ["el-en", "hu-en"] if new[1:] else ["el-en", "el-hu"]
    for layer in range(3):
        new_old = sum(result.pairs[pair][layer] for pair in between) / 2
        assert result.new_old[layer] == pytest.approx(new_old)
        wanted = (new_old + result.pairs["el-hu"][layer]) / 2 if new[1:] else new_old
        assert result.similarity[layer] == pytest.approx(wanted)
    assert (result.new_new is None) == (not new[1:])


def test_after_two_expansions_there_are_three_classes():
    fields = {"earlier_experts_per_layer": [[2, 1, 2, 3]], "classifier_layers": [0, 3]}
    model = constant_inputs(build("bloom", **fields))
    model.config.expansions = [
        {"method": "moe-lpr", "old_languages": ["en"], "new_languages": ["el"]},
        {"method": "moe-lpr", "old_languages": ["en", "el"], "new_languages": ["hu"]},
    ]
    ffns = model.expanded_ffns()
    say(ffns[0].classifier, [0.0, 1.0, 0.0])
    say(ffns[0].router, [0.0, 1.0, 9.0])  # the best one came later than class 1 may see
    say(ffns[3].classifier, [0.0, 0.0, 1.0])
    result = measure_routing(model, byte_tokenizer(), TEXTS, tokens=60, block_size=16, batch_size=2)
    assert result.classes == {"en": 0, "el": 1, "hu": 2}
    assert result.classifier_accuracy == {"en": [0, None, 0], "el": [1, None, 0], "hu": [0, None, 1]}
    assert result.weight_share["hu"][0] == pytest.approx([1 / (1 + math.e), math.e / (1 + math.e), 0])

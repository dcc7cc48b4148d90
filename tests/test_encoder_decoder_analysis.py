"""Analyses and scores of encoder-decoders: similarity, routing, perplexity and translations, against slow loops."""

import json
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import invoke, move, refused
from encoder_decoders import PLAN, SENTENCES, mbart_tokenizer, save_tiny, tiny
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_moe_expand import Plan, expand_checkpoint
from hf_moe_expand.analysis.deviation import measure_deviation
from hf_moe_expand.analysis.reading import ffn_inputs
from hf_moe_expand.analysis.routers import experts_for_half, measure_routing
from hf_moe_expand.analysis.similarity import measure_similarity
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.data.pairs import PairEncoder, SentencePair
from hf_moe_expand.evaluation import report
from hf_moe_expand.evaluation.perplexity import evaluate_model
from hf_moe_expand.evaluation.scoring_settings import EvaluationSettings, TranslationSettings
from hf_moe_expand.evaluation.translation import evaluate_translation, translate_pairs
from hf_moe_expand.hub.card import make_card
from hf_moe_expand.planning.results import RoutingResult, SimilarityResult
from hf_moe_expand.runs.pipeline import run_recipe, validate_recipe
from hf_moe_expand.runs.recipe import Recipe
from hf_moe_expand.trainers.encoder_decoder import with_decoder_inputs

ENCODER = 3
TOKENS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("analysis")
    save_tiny(root / "base")
    expand_checkpoint(root / "base", root / "expanded", PLAN, seed=4)
    move(root / "expanded")
    for code in ("es", "el"):
        rows = [{"translation": {"en": b, code: a}} for a, b in zip(SENTENCES[code], SENTENCES["en"], strict=True)]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (root / f"{code}.jsonl").write_text(text, "utf-8")
    for code, sentences in SENTENCES.items():
        (root / f"{code}.txt").write_text("\n".join(sentences) + "\n", "utf-8")
    return root


@pytest.fixture(scope="module")
def loaded(folder):
    """`loaded("base")`: the model and its tokenizer."""
    return lambda name: (
        AutoModelForSeq2SeqLM.from_pretrained(folder / name).eval(),
        AutoTokenizer.from_pretrained(folder / name),
    )


def pairs():
    """The sentence pairs of each language, to and from it."""
    found = {}
    for code, other in (("en", "es"), ("es", "en"), ("el", "en")):
        both = list(zip(SENTENCES[code], SENTENCES[other], strict=True))
        found[code] = [
            row for a, b in both for row in (SentencePair(b, a, other, code), SentencePair(a, b, code, other))
        ]
    return found


def slow_sides(model, tokenizer, language):
    """For each side, runs of single pairs that hold the language's first `TOKENS` tokens: inputs, labels, count."""
    encoder, runs = PairEncoder(tokenizer), {0: [], 1: []}
    for side in runs:
        left = TOKENS
        for pair in pairs()[language]:
            if pair.direction[side] == language and left:
                ((source,), (target,)) = encoder.encode([pair])
                batch = {"input_ids": torch.tensor([source]), "labels": torch.tensor([target])}
                inputs = with_decoder_inputs(model, batch)
                labels = inputs.pop("labels")
                count = min(left, len((source, target)[side]))
                left -= count
                runs[side].append((inputs, labels, count))
    return runs


def test_similarity_is_the_mean_cosine_of_all_pairs_of_states(loaded):
    model, tokenizer = loaded("base")
    found = measure_similarity(model, tokenizer, pairs(), ["en", "es"], ["el"], tokens=TOKENS, batch_size=3)
    assert found.encoder_layers == ENCODER
    states = {}
    for language in ("en", "es", "el"):
        states[language] = [[] for _ in range(5)]
        for side, runs in slow_sides(model, tokenizer, language).items():
            for inputs, _, count in runs:
                seen = {}
                with torch.no_grad(), ffn_inputs(model, seen.__setitem__):
                    model(**inputs)
                for layer in range(5):
                    if (layer >= ENCODER) == bool(side):
                        states[language][layer].append(seen[layer].flatten(0, -2)[:count])
    for layer in range(5):
        units = {code: F.normalize(torch.cat(found_[layer]).double(), dim=-1) for code, found_ in states.items()}
        slow = [(units["el"] @ units[old].T).mean().item() for old in ("en", "es")]
        assert found.new_old[layer] == pytest.approx(sum(slow) / 2, abs=1e-5)


def test_routing_is_that_of_single_pairs(loaded):
    model, tokenizer = loaded("expanded")
    found = measure_routing(model, tokenizer, pairs(), tokens=TOKENS, batch_size=4)
    assert (found.layers, found.encoder_layers) == ([0, 2, 4], ENCODER)
    assert found.names == ["encoder.0", "encoder.2", "decoder.1"]
    for language in ("en", "es", "el"):
        weights, nats = {layer: [] for layer in found.layers}, 0.0
        for side, runs in slow_sides(model, tokenizer, language).items():
            for inputs, labels, count in runs:
                with torch.no_grad(), model.capture_routing() as routing:
                    logits = model(**inputs).logits
                for layer, one in routing.layers.items():
                    if (layer >= ENCODER) == bool(side):
                        weights[layer].append(one.weight_of_each_expert()[:count])
                if side:
                    nats += F.cross_entropy(logits[0, :count], labels[0, :count], reduction="sum").item()
        assert found.perplexity[language] == pytest.approx(torch.tensor(nats / TOKENS).exp().item(), rel=1e-4)
        for index, layer in enumerate(found.layers):
            use = torch.cat(weights[layer])
            torch.testing.assert_close(
                torch.tensor(found.weight_share[language][index]), use.mean(0), rtol=1e-4, atol=1e-5
            )
            top1 = use.argmax(-1).bincount(minlength=use.shape[1]).tolist()
            assert found.experts_for_half[language][index] == experts_for_half(top1)
    assert [value is None for value in found.colocation] == [False, True]  # between the stacks, whose tokens differ


def test_experts_by_direction_are_those_of_its_sources_and_targets(loaded):
    """Elbayad et al. D.1; the same pairs stand in the text of both languages, and count once."""
    model, tokenizer = loaded("expanded")
    rows = pairs()["el"]
    found = measure_routing(
        model, tokenizer, {"el": rows, "en": list(reversed(rows))}, tokens=TOKENS, batch_size=4, by_direction=True
    )
    assert [*found.classes] == ["en-el", "el-en"]
    assert set(found.classes.values()) == {1}
    for name, index, layer in product(found.classes, range(3), [0, 2, 4]):
        if found.layers[index] != layer:
            continue
        side, left, weights = int(layer >= ENCODER), TOKENS, []
        for pair in rows:
            if "-".join(pair.direction) != name or not left:
                continue
            ((source,), (target,)) = PairEncoder(tokenizer).encode([pair])
            batch = {"input_ids": torch.tensor([source]), "labels": torch.tensor([target])}
            inputs = with_decoder_inputs(model, batch)
            inputs.pop("labels")
            count = min(left, len((source, target)[side]))
            left -= count
            with torch.no_grad(), model.capture_routing() as routing:
                model(**inputs)
            weights.append(routing.layers[layer].weight_of_each_expert()[:count])
        expected = torch.cat(weights).mean(0)
        torch.testing.assert_close(torch.tensor(found.weight_share[name][index]), expected, rtol=1e-4, atol=1e-5)


def test_the_code_that_ends_a_target_is_not_scored():
    """The first mBART's, with which the decoder starts: after the end of the sentence there is nothing to predict."""
    tokenizer, pair = mbart_tokenizer(), SentencePair("the sea", "el mar", "en", "es")
    model = tiny("mbart", vocabulary=len(tokenizer))
    score = evaluate_model(model, tokenizer, {"es": [pair, pair._replace(target="el mar es azul")]}, batch_size=2)["es"]
    nats, tokens = 0.0, 0
    for target in ("el mar", "el mar es azul"):
        ((source,), (labels,)) = PairEncoder(tokenizer).encode([pair._replace(target=target)])
        assert tokenizer.convert_ids_to_tokens(labels)[-2:] == ["</s>", "es_XX"]
        batch = {"input_ids": torch.tensor([source]), "labels": torch.tensor([labels])}
        inputs = with_decoder_inputs(model, batch)
        assert inputs["decoder_input_ids"][0, 0] == labels[-1]
        with torch.no_grad():
            logits = model(**inputs).logits
        nats += F.cross_entropy(logits[0, :-1], batch["labels"][0, :-1], reduction="sum").item()
        tokens += len(labels) - 1
    assert score.tokens == tokens
    assert score.perplexity == pytest.approx(torch.tensor(nats / tokens).exp().item(), rel=1e-4)


@pytest.mark.parametrize("side", [0, 1])
def test_pairs_longer_than_the_model_s_positions_are_left_out(loaded, side):
    model, tokenizer = loaded("base")
    long = SentencePair(
        *[text * (80 if place == side else 1) for place, text in enumerate(("sea ", "mar "))], "en", "es"
    )
    short = pairs()["es"]
    assert max(map(len, PairEncoder(tokenizer).encode([long])[side])) > model.config.max_position_embeddings
    assert evaluate_model(model, tokenizer, {"es": [long, *short]}) == evaluate_model(model, tokenizer, {"es": short})
    texts = pairs()
    plain = measure_similarity(model, tokenizer, texts, ["en", "es"], ["el"], tokens=TOKENS)
    more = {**texts, "es": [long, *texts["es"]]}
    assert measure_similarity(model, tokenizer, more, ["en", "es"], ["el"], tokens=TOKENS) == plain


def test_a_translation_may_fill_the_model_s_positions(loaded):
    model, tokenizer = loaded("base")
    assert translate_pairs(model, tokenizer, [], ("en", "el")) == ([], 0)
    # A start, the language's code and 62 further tokens are the model's 64 positions.
    assert len(translate_pairs(model, tokenizer, ["the sea"], ("en", "el"), max_new_tokens=62)[0]) == 1
    said = "a translation of 63 do not fit the model's 64 positions"
    refused(translate_pairs, model, tokenizer, ["the sea"], ("en", "el"), max_new_tokens=63, says=said)


@pytest.mark.parametrize("beams", [1, 3])
def test_translations_are_those_of_single_sentences(loaded, beams):
    model, tokenizer = loaded("expanded")
    found, cut = translate_pairs(model, tokenizer, SENTENCES["en"], ("en", "el"), 2, 6, beams)
    greek, ends = tokenizer.convert_tokens_to_ids("ell_Grek"), 0
    for sentence, translation in zip(SENTENCES["en"], found, strict=True):
        (source,) = PairEncoder(tokenizer).sources([sentence], ("en", "el"))
        (written,) = model.generate(
            torch.tensor([source]), forced_bos_token_id=greek, num_beams=beams, max_new_tokens=6, do_sample=False
        ).tolist()
        assert written[1] == greek
        assert translation == " ".join(tokenizer.decode(written, skip_special_tokens=True).split())
        ends += tokenizer.eos_token_id in written[1:]
    assert cut == len(found) - ends


def test_a_trained_model_s_scores_and_bad_requests(loaded):
    model, tokenizer = loaded("base")
    scores = evaluate_translation(
        model, tokenizer, SENTENCES, [("en", "el"), ("el", "en")], TranslationSettings(max_new_tokens=5)
    )
    assert {pair: score.sentences for pair, score in scores.items()} == {"en-el": 5, "el-en": 5}
    for settings, said in (
        ({"shots": 1}, "shots is 1, but an encoder-decoder translates without examples"),
        ({"max_new_tokens": 64}, "do not fit the model's 64 positions"),
    ):
        given = (model, tokenizer, SENTENCES, [("en", "el")], TranslationSettings(**settings))
        refused(evaluate_translation, *given, says=said)
    few = {**pairs(), "en": pairs()["en"][8:]}
    said = "Language 'en' has 4 tokens as a source, but 20 were asked for"
    refused(measure_similarity, model, tokenizer, few, ["en"], ["el"], tokens=TOKENS, says=said)
    refused(measure_deviation, model, tokenizer, {}, says="is an encoder-decoder, but", work_dir=Path("none"))


def test_every_direction_is_checked_before_the_first_is_translated(loaded, monkeypatch):
    model, tokenizer = loaded("base")
    monkeypatch.setattr(model, "generate", lambda **_: pytest.fail("a sentence was translated"))
    texts = {**SENTENCES, "hi": SENTENCES["en"], "es": [*SENTENCES["es"][1:], "la casa " * 40]}
    for wrong, message in ((("en", "hi"), "has no code for 'hi'"), (("es", "en"), "do not fit the model's 64")):
        with pytest.raises(InputError, match=message):
            evaluate_translation(model, tokenizer, texts, [("en", "el"), wrong], TranslationSettings(max_new_tokens=5))


def test_a_recipe_says_before_it_runs_what_text_it_lacks(folder, tmp_path):
    (tmp_path / "plain.jsonl").write_text('{"text": "η θάλασσα"}\n', "utf-8")
    pair = {"translation": {"en": "the sea", "hi": "समुद्र"}}
    (tmp_path / "hi.jsonl").write_text(json.dumps(pair, ensure_ascii=False) + "\n", "utf-8")

    def recipe(**texts):
        plan = {"method": "moe-lpr", "experts": 2, "only_layers": "encoder.1"}
        return Recipe(base=str(folder / "base"), output=str(tmp_path / "run"), plan=plan, **{"review": None, **texts})

    with pytest.raises(InputError, match=r"new.el: .*plain.jsonl:1: holds `text`, but the model is an encoder-decoder"):
        validate_recipe(recipe(new={"el": str(tmp_path / "plain.jsonl")}))
    with pytest.raises(InputError, match=r"new.hi: the tokenizer \(NllbTokenizer\) has no code for 'hi'"):
        validate_recipe(recipe(new={"hi": str(tmp_path / "hi.jsonl")}))
    refused(invoke, "sample", folder / "base", "--out", tmp_path / "und.jsonl", says=r"is an encoder-decoder, but")
    el, es = ({code: str(folder / f"{code}.jsonl")} for code in ("el", "es"))
    review = {"distillation_coef": 0.1, "block_size": 32}
    with pytest.raises(InputError, match="review: distillation_coef: keeps the base's predictions of the next token"):
        validate_recipe(recipe(new=el, old=es, post_pretrain={"block_size": 32}, review=review))
    for name, message in (("plain", "holds `text`, but the model is an encoder"), ("hi", "has no code for 'hi'")):
        held_out = {"block_size": 32, "validation": {"texts": {"el": str(tmp_path / f"{name}.jsonl")}}}
        (tmp_path / "hi.jsonl").write_text('{"translation": {"el": "x", "hi": "y"}}')
        with pytest.raises(InputError, match=rf"post_pretrain: validation\.texts\.el: .*{message}"):
            validate_recipe(recipe(new=el, post_pretrain=held_out))
    smooth = {"block_size": 32, "label_smoothing_factor": 0.1}
    assert validate_recipe(recipe(new=el, post_pretrain=smooth))


def test_on_the_command_line_with_its_page_and_its_card(folder, tmp_path):
    data = [f"--data={code}={folder / name}.jsonl" for code, name in (("en", "es"), ("es", "es"), ("el", "el"))]
    routing = ("analyze", "routing", folder / "expanded", *data, "--tokens", 10, "--seed", 4)
    assert "en-el" in invoke(*routing, "--by-direction", "--out", tmp_path / "directions.json")
    assert RoutingResult.from_json(tmp_path / "directions.json").random_seeds == [4, 5]
    assert "encoder.0, encoder.2" in invoke(*routing, "--out", tmp_path / "r.json")
    assert RoutingResult.from_json(tmp_path / "r.json").encoder_layers == ENCODER
    texts = [f"--data={code}={folder / code}.txt" for code in ("en", "el")]
    said = invoke(
        "evaluate", folder / "base", folder / "expanded", *texts, "--pairs", "all", "--max-new-tokens", 6, "--beams", 2,
        "--out", tmp_path / "translation.json",
    )  # fmt: skip
    assert "en-el" in said
    assert json.loads((tmp_path / "translation.json").read_text())["beams"] == 2
    for code in ("es", "el"):
        rows = [json.loads(line)["translation"] for line in (folder / f"{code}.jsonl").read_text("utf-8").splitlines()]
        held_out = [{"translation": {code: f"{text} {text}" for code, text in row.items()}} for row in rows]
        (tmp_path / f"{code}.jsonl").write_text("\n".join(map(json.dumps, held_out)), "utf-8")
    recipe = Recipe(
        base=str(folder / "base"), output=str(tmp_path / "run"), old={"es": str(folder / "es.jsonl")},
        new={"el": str(folder / "el.jsonl")}, test={code: str(tmp_path / f"{code}.jsonl") for code in ("es", "el")},
        analysis={"tokens": TOKENS}, plan={"method": "layer-moe", "total_experts": 12, "classifier_layers": 2},
        post_pretrain={"block_size": 32, "max_steps": 2},
        review={"block_size": 32, "max_steps": 2},
    )  # fmt: skip
    run_recipe(recipe)
    assert SimilarityResult.from_json(tmp_path / "run" / "analysis.json").encoder_layers == ENCODER
    assert Plan.load(tmp_path / "run" / "plan.json").total_experts == 12
    (tmp_path / "r.json").rename(tmp_path / "run" / "routing.json")
    invoke("report", tmp_path / "run")
    page = (tmp_path / "run" / "report.html").read_text("utf-8")
    for stack, layer in product(("encoder", "decoder"), (0, 1)):
        assert f"{stack}.{layer}" in page
    card = str(make_card(tmp_path / "run" / "review", "me/el"))
    assert "AutoModelForSeq2SeqLM.from_pretrained" in card
    assert "pipeline_tag: translation" in card
    assert "| encoder.0" in card


def test_tokens_that_the_checkpoint_forbids_are_forbidden(loaded, monkeypatch):
    """Marian's padding, with which its decoder starts."""
    model, tokenizer = loaded("base")
    model.generation_config.bad_words_ids = [[1]]
    used = []
    with monkeypatch.context() as patched:
        patched.setattr(model, "generate", lambda **_: used.append(model.generation_config) or torch.zeros(1, 2).long())
        translate_pairs(model, tokenizer, ["the sea"], ("en", "el"), max_new_tokens=5)
    assert used[0].bad_words_ids == [[1]]


def test_what_is_for_decoders_is_refused_before_any_score(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "load_for_inference", lambda *_: pytest.fail("a model was loaded"))
    data = ["--data", f"el={folder / 'el.jsonl'}", "--new", "el"]
    with pytest.raises(InputError, match="base: is an encoder-decoder, but ensembles are for decoders"):
        invoke("evaluate", folder / "base", *data, "--ensemble", 1, "--out", tmp_path / "evaluation.json")
    with pytest.raises(InputError, match="base: is an encoder-decoder, but tasks of lm-evaluation-harness are"):
        report.score_models(
            {"base": (str(folder / "base"), None)}, {}, [["en"], ["el"]], EvaluationSettings(), tasks=object()
        )

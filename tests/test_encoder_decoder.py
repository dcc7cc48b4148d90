"""Encoder-decoders: the promises on each shape, surgery, training on sentence pairs, analyses and scores, against slow
loops."""

import json
import re
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import invoke, move, refused, save_dense
from datasets import Dataset
from encoder_decoders import PLAN, SENTENCES, batch, mbart_tokenizer, nllb_tokenizer, save_tiny, tiny
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer, Seq2SeqTrainer, Seq2SeqTrainingArguments

from hf_moe_expand import (
    ClassifierLoss,
    DistillationLoss,
    DMoEConfig,
    LanguagePriorLoss,
    LanguageText,
    LayerMoEConfig,
    LayerMoEForCausalLM,
    LayerMoEForSeq2SeqLM,
    PairCollator,
    Plan,
    PostPretrainConfig,
    PostPretrainTrainer,
    ReviewConfig,
    RouterLossMixin,
    expand_checkpoint,
    expand_model,
    pack_pairs,
    train_stage,
)
from hf_moe_expand.analysis.deviation import measure_deviation
from hf_moe_expand.analysis.routers import experts_for_half, measure_routing
from hf_moe_expand.analysis.similarity import measure_similarity
from hf_moe_expand.data.pairs import PairEncoder, SentencePair
from hf_moe_expand.evaluation import report
from hf_moe_expand.evaluation.perplexity import evaluate_model
from hf_moe_expand.evaluation.scoring_settings import EvaluationSettings, TranslationSettings
from hf_moe_expand.evaluation.translation import evaluate_translation, translate_pairs
from hf_moe_expand.hub.card import make_card
from hf_moe_expand.modeling import decoder_ffns, layer_names
from hf_moe_expand.planning.layers import layers_in
from hf_moe_expand.planning.results import RoutingResult, SimilarityResult
from hf_moe_expand.runs.pipeline import run_recipe, validate_recipe
from hf_moe_expand.runs.recipe import Recipe
from hf_moe_expand.trainers.encoder_decoder import target_loss, with_decoder_inputs

ENCODER, TOKENS = 3, 20


def write_rows(path, rows):
    path.write_text("".join(json.dumps({"translation": row}, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A dense base, its expansion, that after something like training, and parallel text of Greek and Spanish."""
    root = tmp_path_factory.mktemp("models")
    save_tiny(root / "base")
    expand_checkpoint(root / "base", root / "expanded", PLAN, seed=4)
    move(root / "expanded", root / "moved")
    for code, sentences in SENTENCES.items():
        rows = [{"en": b, code: a} for a, b in zip(sentences, SENTENCES["en"], strict=True)]
        write_rows(root / f"{code}.jsonl", rows)
    return root


def load(folder):
    return AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def loaded(folder):
    """`loaded("base")`: the model and its tokenizer."""
    return lambda name: (load(folder / name), AutoTokenizer.from_pretrained(folder / name))


# --- the model --------------------------------------------------------------------------------------------------------


def test_layers_are_one_list_the_encoders_first():
    for shape, places in {
        "m2m_100": ["model.encoder.layers.0.fc1", "model.decoder.layers.1.fc1"],
        "t5": ["encoder.block.0.layer.1.DenseReluDense", "decoder.block.1.layer.2.DenseReluDense"],
    }.items():
        model = expand_model(tiny(shape), PLAN).eval()
        found = decoder_ffns(model)
        assert [found[0].place, found[4].place] == places
        assert layer_names(model.config) == ["encoder.0", "encoder.1", "encoder.2", "decoder.0", "decoder.1"]
        assert {layer: len(ffn.experts) for layer, ffn in model.expanded_ffns().items()} == {0: 3, 2: 2, 4: 4}
        assert [layer for layer, ffn in model.expanded_ffns().items() if ffn.classifier is not None] == [0, 4]
        with torch.no_grad(), model.capture_routing() as routing:
            model(**batch())
        assert [routing.layers[layer].router_logits.shape[0] for layer in (0, 2, 4)] == [27, 27, 18]
    model = expand_model(tiny("m2m_100", encoder_layerdrop=0.05), PLAN)
    assert {module.layerdrop for module in model.modules() if hasattr(module, "layerdrop")} == {0.0}  # none is left out


def test_random_experts_of_t5_are_drawn_as_t5_draws_its_ffn():
    model = expand_model(tiny("t5"), PLAN, expert_init="random", seed=1)
    weight = model.get_submodule("encoder.block.0.layer.1.DenseReluDense.experts.1.wo").weight
    assert weight.std().item() == pytest.approx(48**-0.5, rel=0.1)  # d_ff ** -0.5, not initializer_range


def test_plans_name_layers_by_their_stack(folder, tmp_path):
    out = tmp_path / "plan.json"
    said = invoke(
        "plan", "moe-lpr", "--layers", folder / "base", "--experts", 3, "--only-layers", "encoder.0-2/2,decoder.1",
        "--new", "el", "--classifiers-in", "decoder.1", "--out", out,
    )  # fmt: skip
    assert "experts per layer  encoder 3 1 3, decoder 1 3 (total 11)" in said
    assert "classifier layers  decoder.1" in said
    plan = Plan.load(out)
    assert (plan.encoder_layers, plan.experts_per_layer, plan.classifier_layers) == (3, [3, 1, 3, 1, 3], [4])
    random = ("plan", "random", "--total-experts", 12, "--new", "el", "--out", tmp_path / "random.json")
    refused(invoke, *random, "--layers", "3+0", says=r"--layers is 3\+0: must be at least 1, or a checkpoint")
    invoke(*random, "--layers", "3+2")
    assert Plan.load(tmp_path / "random.json").encoder_layers == 3
    Plan("own", [2, 2]).save(tmp_path / "decoder.json")
    assert "encoder_layers" not in json.loads((tmp_path / "decoder.json").read_text())
    for count in (-1, 5, 6):
        said = rf"encoder_layers is {count}: must be at least 0 and below 5"
        refused(Plan, "own", [2] * 5, encoder_layers=count, says=said)
    assert layers_in("encoder.1-11/2,decoder.1-11/2", 24, encoder_layers=12) == list(range(1, 24, 2))


def test_layers_that_the_model_has_not_are_refused():
    for text, encoder, said in (
        ("1-3", 2, r"1-3: the model is an encoder-decoder: encoder\.0 or decoder\.0 name its"),
        ("encoder.1", 0, r"encoder\.1: the model is a decoder: numbers alone name its layers"),
        ("decoder.3", 2, r"the model has no layer decoder\.3; its layers are decoder\.0-2"),
        ("encoder.2", 2, r"the model has no layer encoder\.2; its layers are encoder\.0-1"),
        ("decoder.2-1", 2, r"decoder\.2-1 has no layer"),
        ("middle.1", 2, "give layers and ranges of layers from 0"),
        ("0-4/0", 0, "0-4/0 has no layer"),
    ):
        refused(layers_in, text, 5, says=said, encoder_layers=encoder)


def test_the_wrong_auto_class_is_named(folder, tmp_path):
    expand_checkpoint(save_dense(tmp_path / "decoder"), tmp_path / "qwen", Plan("own", [2, 1, 2], new=["el"]))
    for auto, model, said in (
        (LayerMoEForCausalLM, folder / "expanded", "m2m_100 backbone: load it with AutoModelForSeq2SeqLM"),
        (LayerMoEForSeq2SeqLM, tmp_path / "qwen", "qwen2 backbone: load it with AutoModelForCausalLM"),
    ):
        refused(auto.from_pretrained, model, says=said, raises=ValueError)


def test_bases_and_plans_that_do_not_fit_are_refused(folder, tmp_path):
    decoder = {"is_encoder_decoder": False, "is_decoder": True}
    for name, fields in (("bert", {}), ("bart", decoder)):
        AutoConfig.for_model(name, **fields).save_pretrained(tmp_path / name)
    base = folder / "base"
    for at, plan, said in (
        (base, Plan("own", [2] * 5), r"The plan is for 5 layers, but .* has 5 layers, 3 of them an encoder's"),
        (base, Plan("own", [2] * 5, encoder_layers=2), "The plan is for 5 layers, 2 of them an encoder's"),
        (base, Plan("own", [2] * 6, encoder_layers=3), "The plan is for 6 layers, .*, but .* has 5"),
        (tmp_path / "bert", PLAN, "a bert checkpoint cannot be expanded: it is an encoder, or"),
        (tmp_path / "bart", PLAN, "it is the decoder of an encoder-decoder"),
    ):
        refused(expand_checkpoint, at, tmp_path / "out", plan, says=said)
        assert not (tmp_path / "out").exists()


def test_configurations_that_do_not_fit_are_refused(folder):
    config, gate = AutoConfig.from_pretrained(folder / "base"), {"layer": 0, "languages": [["en"], ["el"]]}
    for counts, fields, said in (
        ([2] * 5, {"language_gate": gate}, "its translation have a language"),
        ([2] * 5, {"exclusive_experts": True}, r"encoder_decoder beside exclusive: .*an encoder-decoder"),
        ([2, 2], {}, "for each of the 5 layers"),
        ([2, 1, 2, 2, 2], {"classifier_layers": [1]}, "classifier_layers names layer 1, which has no router"),
    ):
        fields["num_experts_per_layer"] = counts
        refused(LayerMoEConfig.from_dense, config, says=said, raises=ValueError, **fields)
    said = "encoder_decoder beside dmoe"
    refused(DMoEConfig.from_dense, config, num_experts_per_layer=[2] * 5, says=said, raises=ValueError)


# --- training ---------------------------------------------------------------------------------------------------------


def texts(folder, **sources):
    return {code: LanguageText(code, str(folder / f"{name}.jsonl")) for code, name in sources.items()}


def packed(folder, **options):
    pairs = {code: source.load_pairs() for code, source in texts(folder, es="es", el="el").items()}
    return pack_pairs(pairs, nllb_tokenizer(), 32, 0, languages=["en", "es", "el"], **options)


def sizes_of(rows):
    return [len(a) + len(b) for a, b in zip(rows["input_ids"], rows["labels"], strict=True)]


def test_pairs_go_both_ways_and_keep_their_languages(folder):
    found = packed(folder)
    assert (found.documents, found.blocks, found.languages) == ({"es": 10, "el": 10}, (10, 10), ("en", "es", "el"))
    rows = found.dataset
    assert sorted({tuple(ids) for ids in rows["language_ids"][:10]}) == [(0, 1), (1, 0)]
    assert sorted({tuple(ids) for ids in rows["language_ids"][10:]}) == [(0, 2), (2, 0)]
    assert found.tokens == {"es": sum(sizes_of(rows)[:10]), "el": sum(sizes_of(rows)[10:])}
    batch = PairCollator(1)([rows[0], rows[10], rows[11]])
    for ids, tokens, filler in (("language_ids", "input_ids", 1), ("decoder_language_ids", "labels", -100)):
        assert ((batch[ids] < 0) == (batch[tokens] == filler)).all()
    assert torch.equal(batch["attention_mask"], (batch["input_ids"] != 1).long())
    assert packed(folder, documents={"es": 3, "el": 5}).documents == {"es": 3, "el": 5}
    el = {"el": texts(folder, el="el")["el"].load_pairs()}
    refused(pack_pairs, el, nllb_tokenizer(), 2, 0, says="each of its 10 sentence pairs is longer than block_size, 2")


def test_pairs_that_are_too_long_are_made_up_for(tmp_path):
    short, long = ({"en": "the sea", "el": "η θάλασσα" + " η θάλασσα" * times} for times in (0, 30))
    pairs = {"el": LanguageText("el", write_rows(tmp_path / "el.jsonl", [long, short, long] * 6)).load_pairs()}
    assert len(pairs["el"]) == 36
    for wanted in (1, 5, 12, 20, None):
        made = pack_pairs(pairs, nllb_tokenizer(), 24, 0, documents=None if wanted is None else {"el": wanted})
        assert made.documents == {"el": min(wanted or 12, 12)}
        assert made.tokens == {"el": sum(sizes_of(made.dataset))}
        assert max(sizes_of(made.dataset)) < 48
    made = pack_pairs(pairs, nllb_tokenizer(), 24, 0, tokens_per_language=30)
    assert made.documents["el"] == len(made.dataset) < 12
    assert 30 <= made.tokens["el"] < 30 + 24


class Plain(RouterLossMixin, Seq2SeqTrainer):
    """What a user writes."""


def trainer(folder, out, rows, batch, losses=None, collator=None, **options):
    torch.manual_seed(0)
    arguments = Seq2SeqTrainingArguments(
        str(out), per_device_train_batch_size=batch, max_steps=1, learning_rate=1.0, optim="sgd", max_grad_norm=0.0,
        lr_scheduler_type="constant", report_to="none", save_strategy="no", logging_steps=1, use_cpu=True,
        disable_tqdm=True, **options,
    )  # fmt: skip
    return Plain(
        load(folder / "expanded"), arguments, train_dataset=rows, data_collator=collator or PairCollator(1),
        router_losses=losses or [LanguagePriorLoss(0.1), ClassifierLoss(0.2)], language_classes=[0, 0, 1],
    )  # fmt: skip


def test_a_padded_step_is_that_of_the_pairs_alone(folder, tmp_path):
    """That it is the gradient of the definition, the matrix shows of one loss."""
    rows, moved = packed(folder).dataset, []
    for cut in ({"batch": 20}, {"batch": 1, "gradient_accumulation_steps": 20}):
        made, before = trainer(folder, tmp_path, rows, **cut), dict(load(folder / "expanded").named_parameters())
        made.train()
        moved.append({name: (value - before[name]).detach() for name, value in made.model.named_parameters()})
    for name, value in moved[0].items():
        torch.testing.assert_close(moved[1][name], value, rtol=2e-3, atol=2e-5, msg=name)
        assert value.any() or not ("router" in name or "classifier" in name)


def test_the_loss_of_a_batch_is_the_mean_over_its_tokens():
    """Padding does not count; smoothing spreads its share evenly over the vocabulary."""
    logits = torch.randn(3, 4, 7, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[1, 2, -100, -100], [3, 4, 5, 6], [0, -100, -100, -100]])
    for share in (0.0, 0.3):
        nats = []
        for scores, target in zip(logits.log_softmax(-1).flatten(0, 1), labels.flatten(), strict=True):
            if target != -100:
                nats.append(-((1 - share) * scores[target] + share * scores.mean()))
        found = [target_loss({"logits": logits}, labels, count, share) for count in (None, 20)]
        torch.testing.assert_close(found, [sum(nats) / 7, sum(nats) / 20])


def test_what_cannot_be_is_refused(folder, tmp_path):
    rows, given = packed(folder).dataset, {"raises": ValueError}
    losses = [DistillationLoss(0.1)]
    refused(trainer, folder, tmp_path, rows, 4, losses=losses, says="The distillation loss is for decoders", **given)

    def bare(batch):
        made = PairCollator(1)(batch)
        del made["decoder_language_ids"]
        return made

    train = trainer(folder, tmp_path, rows, 4, collator=bare).train
    refused(train, says="batches with language_ids and decoder_language_ids", **given)


LENGTH = {
    "max_steps": 3, "per_device_train_batch_size": 5, "learning_rate": 1e-2, "use_cpu": True, "block_size": 32,
    "disable_tqdm": True,
}  # fmt: skip


def test_the_trainer_takes_translations_in_memory(folder, tmp_path):
    model, config = load(folder / "expanded"), PostPretrainConfig(str(tmp_path), **LENGTH)
    data = Dataset.from_list([{"translation": {"en": "the sea", "el": "η θάλασσα"}}] * 6)
    made = PostPretrainTrainer(model, config, train_dataset=data, processing_class=nllb_tokenizer())
    made.train()
    assert made.record.documents == {"el": 12}
    given = {"train_dataset": Dataset.from_dict({"text": ["η θάλασσα"]}), "processing_class": nllb_tokenizer()}
    refused(PostPretrainTrainer, model, config, says="has no column `translation`: this model", **given)


def test_a_repeated_pair_counts_once_in_evaluation(folder, tmp_path, monkeypatch):
    """A batch of which the first pair counts has that pair's scores."""
    rows = packed(folder).dataset
    made = trainer(folder, tmp_path / "out", rows, 1, per_device_eval_batch_size=2)

    def scores(count):
        made.evaluate(rows.select(range(count)))
        found = made.state.log_history.pop().items()
        return {name: value for name, value in found if name.startswith("eval_") and not re.search("time|second", name)}

    one, two = scores(1), scores(2)
    monkeypatch.setattr(made, "_rows_that_count", lambda inputs: 1)
    assert scores(2) == pytest.approx(one, abs=2e-5)
    assert {"eval_loss", "eval_next_token_loss", "eval_expert_1_share"} <= one.keys()
    assert two["eval_next_token_loss"] != pytest.approx(one["eval_next_token_loss"], abs=1e-3)


def test_text_that_does_not_fit_is_refused(folder, tmp_path):
    given = (folder / "expanded", tmp_path / "out")
    config, review = (kind(str(tmp_path / "w"), **LENGTH) for kind in (PostPretrainConfig, ReviewConfig))
    for said, row in (
        ("no sentence pair in language 'el'", {"en": "the sea", "es": "el mar"}),
        ("must hold it and another language", {"el": "η θάλασσα", "en": None, "es": " "}),
    ):
        source = {"el": LanguageText("el", write_rows(tmp_path / "text.jsonl", [row]))}
        refused(train_stage, *given, source, config, says=said)
    review.distillation_coef = 0.1
    everything = texts(folder, en="es", es="es", el="el")
    refused(train_stage, *given, everything, review, says="distillation_coef: keeps the base's predictions of the next")
    dense = ("train", "dense", folder / "base", tmp_path / "out", "--data", f"el={folder / 'el.jsonl'}")
    refused(invoke, *dense, says="is an encoder-decoder: use Seq2SeqTrainer")
    assert not (tmp_path / "out").exists()


def test_predictions_with_generation_and_losses_without(folder, tmp_path):
    rows = packed(folder).dataset
    made = trainer(folder, tmp_path, rows, 4, predict_with_generate=True, generation_max_length=8)
    assert made.predict(rows.select(range(4))).predictions.shape[0] == 4
    made.args.predict_with_generate = False
    found = made.evaluate(rows)
    assert {"eval_loss", "eval_language_prior_loss", "eval_old_tokens_right", "eval_new_tokens_right"} <= {*found}


# --- analyses and scores ----------------------------------------------------------------------------------------------


def pairs():
    """The sentence pairs of each language, to and from it."""
    found = {}
    for code, other in (("en", "es"), ("es", "en"), ("el", "en")):
        both = zip(SENTENCES[code], SENTENCES[other], strict=True)
        ways = [(SentencePair(b, a, other, code), SentencePair(a, b, code, other)) for a, b in both]
        found[code] = [row for way in ways for row in way]
    return found


def encoded(model, tokenizer, pair):
    """A pair alone: what the model is given, and its labels."""
    ((source,), (target,)) = PairEncoder(tokenizer).encode([pair])
    labels = torch.tensor([target])
    inputs = with_decoder_inputs(model, {"input_ids": torch.tensor([source]), "labels": labels})
    return {name: value for name, value in inputs.items() if name != "labels"}, labels


@torch.no_grad()
def slow_routing(model, tokenizer, rows, of_side):
    """Weights of a side's first `TOKENS` tokens, by layer; and the perplexity of the targets. One pair at a time."""
    weights, nats = {layer: [] for layer in model.expanded_ffns()}, 0.0
    for side in (0, 1):
        left = TOKENS
        for inputs, labels in (encoded(model, tokenizer, pair) for pair in rows if of_side(pair, side)):
            count = min(left, (labels if side else inputs["input_ids"]).shape[1])
            left -= count
            with model.capture_routing() as routing:
                logits = model(**inputs).logits
            for layer, one in routing.layers.items():
                if (layer >= ENCODER) == bool(side):
                    weights[layer].append(one.weight_of_each_expert()[:count])
            if side:
                nats += F.cross_entropy(logits[0, :count], labels[0, :count], reduction="sum").item()
    return [torch.cat(found) for found in weights.values()], torch.tensor(nats / TOKENS).exp().item()


def test_routing_is_that_of_single_pairs(loaded):
    model, tokenizer = loaded("moved")
    found = measure_routing(model, tokenizer, pairs(), tokens=TOKENS, batch_size=4)
    assert (found.layers, found.encoder_layers) == ([0, 2, 4], ENCODER)
    assert found.names == ["encoder.0", "encoder.2", "decoder.1"]
    for code, rows in pairs().items():
        of_side = lambda pair, side, code=code: pair.direction[side] == code  # noqa: E731
        weights, perplexity = slow_routing(model, tokenizer, rows, of_side)
        assert found.perplexity[code] == pytest.approx(perplexity, rel=1e-4)
        for index, use in enumerate(weights):
            share = torch.tensor(found.weight_share[code][index])
            torch.testing.assert_close(share, use.mean(0), rtol=1e-4, atol=1e-5)
            top1 = use.argmax(-1).bincount(minlength=use.shape[1]).tolist()
            assert found.experts_for_half[code][index] == experts_for_half(top1)
    assert [value is None for value in found.colocation] == [False, True]  # between the stacks, whose tokens differ


def test_experts_by_direction_are_those_of_its_sources_and_targets(loaded):
    """Elbayad et al. D.1; the same pairs stand in the text of both languages, and count once."""
    model, tokenizer = loaded("moved")
    rows = pairs()["el"]
    given = {"el": rows, "en": list(reversed(rows))}
    found = measure_routing(model, tokenizer, given, tokens=TOKENS, batch_size=4, by_direction=True)
    assert found.classes == {"en-el": 1, "el-en": 1}
    for name in found.classes:
        weights, _ = slow_routing(model, tokenizer, rows, lambda pair, _, name=name: "-".join(pair.direction) == name)
        for index, use in enumerate(weights):
            share = torch.tensor(found.weight_share[name][index])
            torch.testing.assert_close(share, use.mean(0), rtol=1e-4, atol=1e-5)


def test_the_code_that_ends_a_target_is_not_scored():
    """The first mBART's, with which the decoder starts: after the end of the sentence there is nothing to predict."""
    tokenizer, pair = mbart_tokenizer(), SentencePair("the sea", "el mar", "en", "es")
    model = tiny("mbart", vocabulary=len(tokenizer))
    both = [pair, pair._replace(target="el mar es azul")]
    score = evaluate_model(model, tokenizer, {"es": both}, batch_size=2)["es"]
    nats, tokens = 0.0, 0
    for one in both:
        inputs, labels = encoded(model, tokenizer, one)
        assert tokenizer.convert_ids_to_tokens(labels[0].tolist())[-2:] == ["</s>", "es_XX"]
        assert inputs["decoder_input_ids"][0, 0] == labels[0, -1]
        with torch.no_grad():
            logits = model(**inputs).logits
        nats += F.cross_entropy(logits[0, :-1], labels[0, :-1], reduction="sum").item()
        tokens += labels.shape[1] - 1
    assert score.tokens == tokens
    assert score.perplexity == pytest.approx(torch.tensor(nats / tokens).exp().item(), rel=1e-4)


@pytest.mark.parametrize("side", [0, 1])
def test_pairs_longer_than_the_model_s_positions_are_left_out(loaded, side):
    model, tokenizer = loaded("base")
    long = SentencePair(*("sea " * (80 if place == side else 1) for place in (0, 1)), "en", "es")
    short, given = pairs(), (["en", "es"], ["el"], TOKENS)
    assert max(map(len, PairEncoder(tokenizer).encode([long])[side])) > model.config.max_position_embeddings
    more = {**short, "es": [long, *short["es"]]}
    assert evaluate_model(model, tokenizer, {"es": more["es"]}) == evaluate_model(model, tokenizer, {"es": short["es"]})
    found = [measure_similarity(model, tokenizer, rows, *given) for rows in (short, more)]
    assert found[0] == found[1]


@pytest.mark.parametrize("beams", [1, 3])
def test_translations_are_those_of_single_sentences(loaded, beams):
    model, tokenizer = loaded("moved")
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


def test_a_translation_may_fill_the_model_s_positions_and_bad_requests_are_refused(loaded, monkeypatch):
    model, tokenizer = loaded("base")
    assert translate_pairs(model, tokenizer, [], ("en", "el")) == ([], 0)
    # A start, the language's code and 62 further tokens are the model's 64 positions.
    assert len(translate_pairs(model, tokenizer, ["the sea"], ("en", "el"), max_new_tokens=62)[0]) == 1
    few = {**pairs(), "en": pairs()["en"][8:]}
    said = "Language 'en' has 4 tokens as a source, but 20 were asked for"
    refused(measure_similarity, model, tokenizer, few, ["en"], ["el"], tokens=TOKENS, says=said)
    refused(measure_deviation, model, tokenizer, {}, says="is an encoder-decoder, but", work_dir=Path("none"))
    # Every direction is checked before the first is translated.
    monkeypatch.setattr(model, "generate", lambda **_: pytest.fail("a sentence was translated"))
    given = {**SENTENCES, "hi": SENTENCES["en"], "es": [*SENTENCES["es"][1:], "la casa " * 40]}
    for settings, direction, said in (
        ({"shots": 1}, ("el", "en"), "shots is 1, but an encoder-decoder translates without examples"),
        ({"max_new_tokens": 63}, ("el", "en"), "and 63 new ones do not fit the model's 64 positions"),
        ({"max_new_tokens": 5}, ("en", "hi"), "has no code for 'hi'"),
        ({"max_new_tokens": 5}, ("es", "en"), "do not fit the model's 64"),
    ):
        asked = (given, [("en", "el"), direction], TranslationSettings(**settings))
        refused(evaluate_translation, model, tokenizer, *asked, says=said)


def test_a_recipe_says_before_it_runs_what_text_it_lacks(folder, tmp_path):
    (tmp_path / "plain.jsonl").write_text('{"text": "η θάλασσα"}\n', "utf-8")
    hindi = write_rows(tmp_path / "hi.jsonl", [{"en": "the sea", "hi": "समुद्र"}])
    greek_to_hindi = write_rows(tmp_path / "el-hi.jsonl", [{"el": "x", "hi": "y"}])
    plain, el, es = str(tmp_path / "plain.jsonl"), str(folder / "el.jsonl"), str(folder / "es.jsonl")
    stage = {"block_size": 32}

    def check(validation=None, **texts):
        held_out = {"validation": {"texts": {"el": validation}}} if validation else {}
        plan = {"method": "moe-lpr", "experts": 2, "only_layers": "encoder.1"}
        texts = {"review": None, "post_pretrain": {**stage, **held_out}, **texts}
        return validate_recipe(Recipe(base=str(folder / "base"), output=str(tmp_path / "run"), plan=plan, **texts))

    plain_text = r"plain.jsonl:1: holds `text`, but the model is an encoder-decoder"
    for said, given in (
        (rf"new.el: .*{plain_text}", {"new": {"el": plain}}),
        (r"new.hi: the tokenizer \(NllbTokenizer\) has no code for 'hi'", {"new": {"hi": hindi}}),
        (
            "review: distillation_coef: keeps the base's predictions of the next token",
            {"new": {"el": el}, "old": {"es": es}, "review": {"distillation_coef": 0.1, **stage}},
        ),
        (rf"post_pretrain: validation\.texts\.el: .*{plain_text}", {"new": {"el": el}, "validation": plain}),
        (r"validation\.texts\.el: .*has no code for 'hi'", {"new": {"el": el}, "validation": greek_to_hindi}),
    ):
        refused(check, says=said, **given)
    assert check(new={"el": el}, post_pretrain={**stage, "label_smoothing_factor": 0.1})
    refused(invoke, "sample", folder / "base", "--out", tmp_path / "und.jsonl", says=r"is an encoder-decoder, but")


def test_a_recipe_with_its_page_and_its_card(folder, tmp_path):
    data = [f"--data={code}={folder / name}.jsonl" for code, name in (("en", "es"), ("es", "es"), ("el", "el"))]
    routing = ("analyze", "routing", folder / "moved", *data, "--tokens", 10, "--out", tmp_path / "routing.json")
    assert "encoder.0, encoder.2" in invoke(*routing)
    held_out = {}
    for code in ("es", "el"):
        both = zip(SENTENCES[code], SENTENCES["en"], strict=True)
        held_out[code] = write_rows(tmp_path / f"{code}.jsonl", [{code: f"{a} {a}", "en": f"{b} {b}"} for a, b in both])
    recipe = Recipe(
        base=str(folder / "base"), output=str(tmp_path / "run"), old={"es": str(folder / "es.jsonl")},
        new={"el": str(folder / "el.jsonl")}, test=held_out, analysis={"tokens": TOKENS},
        plan={"method": "layer-moe", "total_experts": 12, "classifier_layers": 2},
        post_pretrain={"block_size": 32, "max_steps": 2},
        review={"block_size": 32, "max_steps": 2},
    )  # fmt: skip
    run_recipe(recipe)
    analysis = SimilarityResult.from_json(tmp_path / "run" / "analysis.json")
    assert analysis.encoder_layers == RoutingResult.from_json(routing[-1]).encoder_layers == ENCODER
    assert Plan.load(tmp_path / "run" / "plan.json").total_experts == 12
    (tmp_path / "routing.json").rename(tmp_path / "run" / "routing.json")
    invoke("report", tmp_path / "run")
    page = (tmp_path / "run" / "report.html").read_text("utf-8")
    for stack, layer in product(("encoder", "decoder"), (0, 1)):
        assert f"{stack}.{layer}" in page
    card = str(make_card(tmp_path / "run" / "review", "me/el"))
    for said in ("AutoModelForSeq2SeqLM.from_pretrained", "pipeline_tag: translation", "| encoder.0"):
        assert said in card


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
    data = ["--data", f"el={folder / 'el.jsonl'}", "--new", "el", "--out", tmp_path / "evaluation.json"]
    ensemble = ("evaluate", folder / "base", *data, "--ensemble", 1)
    refused(invoke, *ensemble, says="base: is an encoder-decoder, but ensembles are for decoders")
    given = ({"base": (str(folder / "base"), None)}, {}, [["en"], ["el"]], EvaluationSettings())
    said = "base: is an encoder-decoder, but tasks of lm-evaluation-harness are"
    refused(report.score_models, *given, tasks=object(), says=said)

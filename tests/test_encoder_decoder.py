"""Encoder-decoders: the promises on each shape, every surgery, and training on sentence pairs, from file to folder."""

import copy
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import invoke, move, refused, save_dense
from datasets import Dataset
from encoder_decoders import PLAN, SENTENCES, batch, nllb_tokenizer, save_tiny, tiny
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from hf_moe_expand import (
    BalanceLoss,
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
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.modeling import decoder_ffns, layer_names
from hf_moe_expand.planning.layers import layers_in
from hf_moe_expand.trainers.encoder_decoder import target_loss, with_decoder_inputs

CONFIGURATIONS = {
    "layer-moe": (PLAN, {}),
    "conditional": (Plan("moe-lpr", [3] * 5, new=["el"], encoder_layers=3), {"conditional_routing": True}),
    "lora": (PLAN, {"expert_kind": "lora", "lora_rank": 4, "lora_alpha": 6.0}),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """`made(shape, configuration)`: folders of the dense checkpoint and of its expansion, and their models."""
    root, found = tmp_path_factory.mktemp("models"), {}

    def make(shape, configuration="layer-moe"):
        dense = root / shape / "dense"
        if not dense.exists():
            tiny(shape).save_pretrained(dense)
        if (shape, configuration) not in found:
            out = root / shape / configuration
            plan, options = CONFIGURATIONS[configuration]
            expand_checkpoint(dense, out, plan, **options)
            models = [copy.deepcopy(AutoModelForSeq2SeqLM.from_pretrained(path).eval()) for path in (dense, out)]
            found[shape, configuration] = (dense, out, *models)
        return found[shape, configuration]

    return make


@torch.no_grad()
def logits(model, **changes):
    return model(**{**batch(), **changes}).logits


def test_layers_are_one_list_the_encoders_first(made):
    for shape, places in {
        "m2m_100": ["model.encoder.layers.0.fc1", "model.decoder.layers.1.fc1"],
        "t5": ["encoder.block.0.layer.1.DenseReluDense", "decoder.block.1.layer.2.DenseReluDense"],
    }.items():
        model = made(shape)[3]
        found = decoder_ffns(model)
        assert [found[0].place, found[4].place] == places
        assert layer_names(model.config) == ["encoder.0", "encoder.1", "encoder.2", "decoder.0", "decoder.1"]
        assert {layer: len(ffn.experts) for layer, ffn in model.expanded_ffns().items()} == {0: 3, 2: 2, 4: 4}
        assert [layer for layer, ffn in model.expanded_ffns().items() if ffn.classifier is not None] == [0, 4]
        with torch.no_grad(), model.capture_routing() as routing:
            model(**batch())
        assert [routing.layers[layer].router_logits.shape[0] for layer in (0, 2, 4)] == [27, 27, 18]


def test_training_draws_the_dropout_inside_the_ffn_as_the_base_does():
    dense = tiny("bart", activation_dropout=0.3).train()
    model = expand_model(copy.deepcopy(dense), Plan("own", [2] * 5, old=["en"], new=["el"], encoder_layers=3)).train()
    drawn = []
    for network, seed in ((dense, 0), (model, 0), (model, 1)):
        torch.manual_seed(seed)
        with model.use_expert(0):
            drawn.append(logits(network))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.allclose(drawn[1], drawn[2])


def test_a_layer_is_never_left_out_at_random(made):
    model = made("m2m_100")[3].train()
    assert model.config.encoder_layerdrop == 0.05
    assert {module.layerdrop for module in model.modules() if hasattr(module, "layerdrop")} == {0.0}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def el(base):
    expand_checkpoint(base, base.with_name("el"), PLAN, seed=1)
    return move(base.with_name("el"))


def test_plans_name_layers_by_their_stack(base, tmp_path):
    out = tmp_path / "plan.json"
    said = invoke(
        "plan", "moe-lpr", "--layers", base, "--experts", 3, "--only-layers", "encoder.0-2/2,decoder.1", "--new", "el",
        "--classifiers-in", "decoder.1", "--out", out,
    )  # fmt: skip
    assert "experts per layer  encoder 3 1 3, decoder 1 3 (total 11)" in said
    assert "classifier layers  decoder.1" in said
    plan = Plan.load(out)
    assert (plan.encoder_layers, plan.experts_per_layer, plan.classifier_layers) == (3, [3, 1, 3, 1, 3], [4])
    invoke("plan", "random", "--layers", "3+2", "--total-experts", 12, "--new", "el", "--out", tmp_path / "random.json")
    assert Plan.load(tmp_path / "random.json").encoder_layers == 3
    with pytest.raises(InputError, match=r"--layers is 3\+0: must be at least 1, or a checkpoint"):
        invoke("plan", "random", "--layers", "3+0", "--total-experts", 12, "--out", tmp_path / "none.json")
    Plan("own", [2, 2]).save(tmp_path / "decoder.json")
    assert "encoder_layers" not in json.loads((tmp_path / "decoder.json").read_text())


@pytest.mark.parametrize("encoder_layers", [-1, 5, 6])
def test_a_plan_s_decoder_begins_within_the_list(encoder_layers):
    with pytest.raises(InputError, match=rf"encoder_layers is {encoder_layers}: must be at least 0 and below 5"):
        Plan("own", [2] * 5, encoder_layers=encoder_layers)


@pytest.mark.parametrize(
    ("text", "encoder", "message"),
    [
        ("1-3", 2, r"1-3: the model is an encoder-decoder; name its layers by encoder\.0 or decoder\.0"),
        ("encoder.1", 0, r"encoder\.1: the model is a decoder; name its layers by their numbers alone"),
        ("decoder.3", 2, r"the model has no layer decoder\.3; its layers are decoder\.0-2"),
        ("encoder.2", 2, r"the model has no layer encoder\.2; its layers are encoder\.0-1"),
        ("decoder.2-1", 2, r"decoder\.2-1 runs backwards"),
        ("middle.1", 2, "give layers and ranges of layers from 0"),
        ("0-4/0", 0, "has a step of 0"),
    ],
)
def test_layers_that_the_model_has_not_are_refused(text, encoder, message):
    refused(layers_in, text, 5, says=message, encoder_layers=encoder)


def test_the_wrong_auto_class_is_named(el, tmp_path):
    save_dense(tmp_path / "decoder")
    expand_checkpoint(tmp_path / "decoder", tmp_path / "qwen", Plan("own", [2, 1, 2], new=["el"]))
    with pytest.raises(ValueError, match=r"m2m_100, is an encoder-decoder: load it with AutoModelForSeq2SeqLM"):
        LayerMoEForCausalLM.from_pretrained(el)
    with pytest.raises(ValueError, match=r"qwen2, is a decoder: load it with AutoModelForCausalLM"):
        LayerMoEForSeq2SeqLM.from_pretrained(tmp_path / "qwen")
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        AutoModelForCausalLM.from_pretrained(el)
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "qwen")


def test_bases_and_plans_that_do_not_fit_are_refused(base, tmp_path):
    decoder = {"is_encoder_decoder": False, "is_decoder": True}
    for name, fields in (("bert", {}), ("bart", decoder)):
        AutoConfig.for_model(name, **fields).save_pretrained(tmp_path / name)
    for folder, plan, said in (
        (base, Plan("own", [2] * 5), r"The plan is for 5 layers, but .* has 5 layers, 3 of them an encoder's"),
        (base, Plan("own", [2] * 5, encoder_layers=2), "The plan is for 5 layers, 2 of them an encoder's"),
        (base, Plan("own", [2] * 6, encoder_layers=3), "The plan is for 6 layers, .*, but .* has 5"),
        (base, Plan("dmoe", [2] * 5, groups=[["en"], ["el"]]), "The plan is for 5 layers, but"),
        (base, Plan("own", [2] * 5, [0], new=["el"], exclusive=True), "The plan is for 5 layers, but"),
        (tmp_path / "bert", PLAN, "a bert checkpoint cannot be expanded: it is an encoder, or"),
        (tmp_path / "bart", PLAN, "it is the decoder of an encoder-decoder"),
    ):
        refused(expand_checkpoint, folder, tmp_path / "out", plan, says=said)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("counts", "fields", "said"),
    [
        ([2] * 5, {"language_gate": {"layer": 0, "languages": [["en"], ["el"]]}}, "its translation have a language"),
        ([2] * 5, {"exclusive_experts": True}, r"encoder_decoder beside exclusive: .*an encoder-decoder"),
        ([2, 2], {}, r"2 entries, but the m2m_100 backbone has 5 layers \(encoder 3, decoder 2"),
        ([2, 1, 2, 2, 2], {"classifier_layers": [1]}, r"classifier_layers names layer encoder\.1, which is dense"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(base, counts, fields, said):
    config = AutoConfig.from_pretrained(base)
    refused(LayerMoEConfig.from_dense, config, says=said, raises=ValueError, num_experts_per_layer=counts, **fields)
    with pytest.raises(ValueError, match="encoder_decoder beside dmoe"):
        DMoEConfig.from_dense(config, num_experts_per_layer=[2] * 5)


def write_pairs(path: Path, language: str, other: str = "en", times: int = 1) -> Path:
    rows = [
        {"translation": {other: b, language: a}}
        for a, b in zip(SENTENCES[language], SENTENCES[other], strict=True)
        for _ in range(times)
    ]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A dense base, its expansion, and parallel text of Greek and of Spanish with English."""
    root = tmp_path_factory.mktemp("training")
    save_tiny(root / "base")
    expand_checkpoint(root / "base", root / "expanded", PLAN, seed=1)
    for code in ("es", "el"):
        write_pairs(root / f"{code}.jsonl", code)
    return root


def texts(folder, **sources):
    return {code: LanguageText(code, str(folder / f"{name}.jsonl")) for code, name in sources.items()}


def packed(folder, **options):
    pairs = {code: source.load_pairs() for code, source in texts(folder, es="es", el="el").items()}
    return pack_pairs(pairs, nllb_tokenizer(), 32, 0, languages=["en", "es", "el"], **options)


def test_pairs_go_both_ways_and_keep_their_languages(folder):
    found = packed(folder)
    assert (found.documents, found.blocks, found.languages) == ({"es": 10, "el": 10}, (10, 10), ("en", "es", "el"))
    rows = found.dataset
    assert sorted({tuple(ids) for ids in rows["language_ids"][:10]}) == [(0, 1), (1, 0)]
    assert sorted({tuple(ids) for ids in rows["language_ids"][10:]}) == [(0, 2), (2, 0)]
    sizes = [len(a) + len(b) for a, b in zip(rows["input_ids"], rows["labels"], strict=True)]
    assert found.tokens == {"es": sum(sizes[:10]), "el": sum(sizes[10:])}
    batch = PairCollator(1)([rows[0], rows[10], rows[11]])
    for ids, tokens, filler in (("language_ids", "input_ids", 1), ("decoder_language_ids", "labels", -100)):
        assert ((batch[ids] < 0) == (batch[tokens] == filler)).all()
    assert torch.equal(batch["attention_mask"], (batch["input_ids"] != 1).long())
    assert packed(folder, documents={"es": 3, "el": 5}).documents == {"es": 3, "el": 5}
    with pytest.raises(InputError, match="each of its 10 sentence pairs is longer than block_size, 2"):
        pack_pairs({"el": texts(folder, el="el")["el"].load_pairs()}, nllb_tokenizer(), 2, 0)


def test_pairs_that_are_too_long_are_made_up_for(tmp_path):
    short, long = ({"en": "the sea", "el": "η θάλασσα" + " η θάλασσα" * times} for times in (0, 30))
    (tmp_path / "el.jsonl").write_text(
        "".join(json.dumps({"translation": row}) + "\n" for row in [long, short, long] * 6)
    )
    pairs = {"el": LanguageText("el", str(tmp_path / "el.jsonl")).load_pairs()}
    assert len(pairs["el"]) == 36
    for wanted, found in ((1, 1), (5, 5), (12, 12), (20, 12)):
        made = pack_pairs(pairs, nllb_tokenizer(), 24, 0, documents={"el": wanted})
        assert made.documents == {"el": found}
        sizes = [len(a) + len(b) for a, b in zip(made.dataset["input_ids"], made.dataset["labels"], strict=True)]
        assert made.tokens == {"el": sum(sizes)}
        assert max(sizes) < 48
    assert pack_pairs(pairs, nllb_tokenizer(), 24, 0).documents == {"el": 12}
    made = pack_pairs(pairs, nllb_tokenizer(), 24, 0, tokens_per_language=30)
    assert made.documents["el"] == len(made.dataset) < 12
    assert 30 <= made.tokens["el"] < 30 + 24


class Plain(RouterLossMixin, Seq2SeqTrainer):
    """What a user writes."""


LOSSES = [BalanceLoss(0.01), LanguagePriorLoss(0.1), ClassifierLoss(0.2)]


def trainer(folder, out, rows, batch, accumulation=1, losses=LOSSES, collator=None, **options):
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder / "expanded", dtype=torch.float32)
    arguments = Seq2SeqTrainingArguments(
        str(out), per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, max_steps=1, seed=0,
        learning_rate=1.0, optim="sgd", lr_scheduler_type="constant", max_grad_norm=0.0, report_to="none",
        save_strategy="no", logging_steps=1, use_cpu=True, disable_tqdm=True, **options,
    )  # fmt: skip
    return Plain(
        model, arguments, train_dataset=rows, data_collator=collator or PairCollator(1), router_losses=losses,
        language_classes=[0, 0, 1],
    )  # fmt: skip


def moved_by(made):
    """The change of every parameter in one step of plain gradient descent."""
    before = {name: value.detach().clone() for name, value in made.model.named_parameters()}
    made.train()
    return {name: value.detach() - before[name] for name, value in made.model.named_parameters()}


def slow_gradient(folder, rows):
    """The step's loss by its definition: a loop over pairs, layers and tokens, without padding."""
    model = AutoModelForSeq2SeqLM.from_pretrained(folder / "expanded", dtype=torch.float32).train()
    classes, nats, targets = [0, 0, 1], [], 0
    found = {layer: [] for layer in model.expanded_ffns()}
    for row in rows:
        labels = torch.tensor([row["labels"]])
        inputs = with_decoder_inputs(model, {"input_ids": torch.tensor([row["input_ids"]]), "labels": labels})
        with model.capture_routing() as routing:
            logits = model(input_ids=inputs["input_ids"], decoder_input_ids=inputs["decoder_input_ids"]).logits
        nats.append(F.cross_entropy(logits[0], labels[0], reduction="sum"))
        targets += labels.numel()
        for layer, one in routing.layers.items():
            of = classes[row["language_ids"][int(layer >= 3)]]
            found[layer].append((one, torch.full((one.router_logits.shape[0],), of)))
    total = torch.stack(nats).sum() / targets
    classifiers = [layer for layer, ones in found.items() if ones[0][0].classifier_logits is not None]
    for layer, ones in found.items():
        logits, class_T = torch.cat([one.router_logits for one, _ in ones]), torch.cat([of for _, of in ones])
        prior = -logits.log_softmax(-1)[class_T == 0, 0].mean()
        T, N = logits.shape
        K = ones[0][0].top_k
        f = torch.zeros(N).scatter_add(0, logits.topk(K).indices.flatten(), torch.ones(T * K)) * N / (K * T)
        total = total + (0.1 * prior + 0.01 * (f * logits.softmax(-1).mean(0)).sum()) / len(found)
        if layer in classifiers:
            judged = torch.cat([one.classifier_logits for one, _ in ones])
            total = total + 0.2 * F.cross_entropy(judged, class_T) / len(classifiers)
    total.backward()
    return {name: value.grad for name, value in model.named_parameters()}


def test_a_step_is_the_gradient_of_the_definition(folder, tmp_path):
    rows = packed(folder).dataset
    moved = moved_by(trainer(folder, tmp_path, rows, 20))
    for name, gradient in slow_gradient(folder, rows).items():
        expected = torch.zeros_like(moved[name]) if gradient is None else -gradient
        torch.testing.assert_close(moved[name], expected, rtol=2e-3, atol=2e-5, msg=name)
    assert all(moved[name].any() for name in moved if "router" in name or "classifier" in name)


def test_the_loss_of_a_batch_is_the_mean_over_its_tokens():
    """Padding does not count; smoothing spreads its share evenly over the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, 7, generator=generator)
    labels = torch.tensor([[1, 2, -100, -100], [3, 4, 5, 6], [0, -100, -100, -100]])
    for share in (0.0, 0.3):
        nats = []
        for row, targets in zip(logits.log_softmax(-1), labels, strict=True):
            for scores, target in zip(row, targets, strict=True):
                if target != -100:
                    nats.append(-((1 - share) * scores[target] + share * scores.mean()))
        found = [target_loss({"logits": logits}, labels, count, share) for count in (None, 20)]
        torch.testing.assert_close(found, [sum(nats) / 7, sum(nats) / 20])


def test_what_cannot_be_is_refused(folder, tmp_path):
    rows = packed(folder).dataset
    losses = [DistillationLoss(0.1)]
    with pytest.raises(ValueError, match="The distillation loss is for decoders"):
        trainer(folder, tmp_path, rows, 4, losses=losses)

    def bare(batch):
        made = PairCollator(1)(batch)
        del made["decoder_language_ids"]
        return made

    with pytest.raises(ValueError, match="batches with language_ids and decoder_language_ids"):
        trainer(folder, tmp_path, rows, 4, collator=bare).train()


LENGTH = {
    "max_steps": 3, "per_device_train_batch_size": 5, "learning_rate": 1e-2, "use_cpu": True, "block_size": 32,
    "disable_tqdm": True,
}  # fmt: skip


def test_the_trainer_takes_translations_in_memory(folder, tmp_path):
    model = AutoModelForSeq2SeqLM.from_pretrained(folder / "expanded", dtype=torch.float32)
    data = Dataset.from_list([{"translation": {"en": "the sea", "el": "η θάλασσα"}}] * 6)
    config = PostPretrainConfig(str(tmp_path), **LENGTH)
    made = PostPretrainTrainer(model, config, train_dataset=data, processing_class=nllb_tokenizer())
    made.train()
    assert made.record.documents == {"el": 12}
    with pytest.raises(InputError, match="train_dataset has no column `translation`: an encoder-decoder learns"):
        PostPretrainTrainer(
            model, config, train_dataset=Dataset.from_dict({"text": ["η θάλασσα"]}), processing_class=nllb_tokenizer()
        )


def test_a_repeated_pair_counts_once_in_evaluation(folder, tmp_path, monkeypatch):
    """A batch of which the first pair counts has that pair's scores."""
    rows = packed(folder).dataset
    made = trainer(folder, tmp_path / "out", rows, 1, per_device_eval_batch_size=2)

    def scores(count):
        made.evaluate(rows.select(range(count)))
        found = made.state.log_history.pop().items()
        return {name: value for name, value in found if name.startswith("eval_") and "second" not in name}

    one, two = scores(1), scores(2)
    monkeypatch.setattr(made, "_rows_that_count", lambda inputs: 1)
    first = scores(2)
    assert {"eval_loss", "eval_next_token_loss", "eval_expert_1_share"} <= one.keys()
    for name in one.keys() - {"eval_runtime", "eval_model_preparation_time"}:
        assert first[name] == pytest.approx(one[name], abs=2e-5), name
    assert two["eval_next_token_loss"] != pytest.approx(one["eval_next_token_loss"], abs=1e-3)


def test_text_that_does_not_fit_is_refused(folder, tmp_path):
    def refused(message, lines):
        (tmp_path / "text.jsonl").write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
        source = {"el": LanguageText("el", str(tmp_path / "text.jsonl"))}
        config = PostPretrainConfig(str(tmp_path / "w"), **LENGTH)
        with pytest.raises(InputError, match=message):
            train_stage(folder / "expanded", tmp_path / "out", source, config)
        assert not (tmp_path / "out").exists()

    refused(r"text\.jsonl:1: holds `text`, but the model is an encoder-decoder", [{"text": "η θάλασσα"}])
    pair = {"translation": {"hi": "समुद्र", "el": "η θάλασσα"}}
    refused(r"the tokenizer \(NllbTokenizer\) has no code for 'hi'", [pair])
    refused("no sentence pair in language 'el'", [{"translation": {"en": "the sea", "es": "el mar"}}])
    refused("must hold it and another language", [{"translation": {"el": "η θάλασσα", "en": None, "es": " "}}])
    config = ReviewConfig(str(tmp_path / "w"), **LENGTH, distillation_coef=0.1)
    everything = texts(folder, en="es", es="es", el="el")
    with pytest.raises(InputError, match="distillation_coef: keeps the base's predictions of the next token"):
        train_stage(folder / "expanded", tmp_path / "out", everything, config)


def test_predictions_with_generation_and_losses_without(folder, tmp_path):
    rows = packed(folder).dataset
    made = trainer(folder, tmp_path, rows, 4, predict_with_generate=True, generation_max_length=8)
    found = made.predict(rows.select(range(4)))
    assert found.predictions.shape[0] == 4
    made.args.predict_with_generate = False
    assert {"eval_loss", "eval_language_prior_loss", "eval_old_tokens_right", "eval_new_tokens_right"} <= set(
        made.evaluate(rows)
    )


def test_the_dense_baselines_are_for_decoders(folder, tmp_path):
    given = ("train", "dense", folder / "base", tmp_path / "out", "--data", f"el={folder / 'el.jsonl'}")
    refused(invoke, *given, says="which the dense baselines do not train")


def test_random_experts_of_t5_are_drawn_as_t5_draws_its_ffn(made, tmp_path):
    dense = made("t5")[0]
    expand_checkpoint(dense, tmp_path / "a", PLAN, expert_init="random", seed=1)
    expand_model(AutoModelForSeq2SeqLM.from_pretrained(dense), PLAN, expert_init="random", seed=1).save_pretrained(
        tmp_path / "b"
    )
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert all(torch.equal(a[name], b[name]) for name in a)
    weight = a["encoder.block.0.layer.1.DenseReluDense.experts.1.wo.weight"]
    assert weight.std().item() == pytest.approx(48**-0.5, rel=0.1)  # d_ff ** -0.5, not initializer_range


def test_every_second_layer():
    assert layers_in("encoder.1-11/2,decoder.1-11/2", 24, encoder_layers=12) == list(range(1, 24, 2))
    assert layers_in("1-4/3,0", 6) == [0, 1, 4]

"""TRL on expanded models: MoESFTTrainer, the router losses in DPO, and their part of docs/trainers.md."""

import json
import math
import re
from pathlib import Path

import datasets
import pytest
import torch
import torch.nn.functional as F
import trl
from conftest import byte_tokenizer, checkpointed, fork_ranks, refused
from datasets import Dataset
from gated_models import gated_model
from one_sft_step import LANGUAGES, NEW_EXPERTS, ROWS, lora, save_expanded, settings, train
from one_step import assert_same, build, largest_difference
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer

from hf_moe_expand import BalanceLoss, DistillationLoss, GroupLoss, LanguagePriorLoss, MoESFTTrainer, RouterLossMixin
from hf_moe_expand.trainers import load_balance_loss
from hf_moe_expand.trainers.losses import distillation_loss

# TRL and PEFT themselves use old names of transformers.
pytestmark = pytest.mark.filterwarnings(r"ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
DOCUMENT = Path(__file__).parents[1] / "docs" / "trainers.md"


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("CI", "true")  # TRL sends no telemetry
    datasets.disable_progress_bars()


def obvious_losses(model, completion_only):
    """The losses of one batch, row by row, without padding: next token, balance, language prior, classifier."""
    tokenizer = byte_tokenizer()
    predicted, classes, layers = [], [], {index: [] for index in model.expanded_ffns()}
    for row in ROWS:
        prompt = tokenizer(row["prompt"])["input_ids"]
        ids = torch.tensor(prompt + tokenizer(row["completion"])["input_ids"] + [256])
        with model.capture_routing() as routing:
            logits = model(ids[None]).logits[0]
        start = len(prompt) if completion_only else 1
        predicted += [-logits[place - 1].log_softmax(-1)[ids[place]] for place in range(start, len(ids))]
        kind = {"en": 0, "el": 1, "tr": 1, None: -1}[row["language"]]
        classes += [kind] * len(ids)
        for index, layer in routing.layers.items():
            layers[index].append(layer)
    classes, balance, prior, classifier = torch.tensor(classes), [], [], []
    for found in layers.values():
        logits = torch.cat([layer.router_logits for layer in found])
        balance.append(load_balance_loss(logits, 2))
        prior.append(-logits.log_softmax(-1)[classes == 0, 0].mean())
        if found[0].classifier_logits is not None:
            scores = torch.cat([layer.classifier_logits for layer in found])
            classifier.append(F.cross_entropy(scores[classes >= 0], classes[classes >= 0]))
    return [torch.stack(losses).mean() for losses in (predicted, balance, prior, classifier)]


@pytest.mark.parametrize("completion_only", [True, False])
def test_a_step_and_its_log_are_those_of_the_obvious_losses(tmp_path, completion_only):
    weights, logs = {"balance": 0.5, "prior": 1.0, "classifier": 0.7}, {}
    after = train(tmp_path, logs=logs, completion_only_loss=completion_only, **weights)
    model = build().train()
    parts = obvious_losses(model, completion_only)
    loss = parts[0] + 0.5 * parts[1] + parts[2] + 0.7 * parts[3]
    loss.backward()
    expected = {name: (p - (p.grad if p.grad is not None else 0)).detach() for name, p in model.named_parameters()}
    assert_same(after, expected)
    assert largest_difference(after, dict(build().named_parameters())) > 0.1
    for name, part in zip(("next_token", "balance", "language_prior", "classifier"), parts, strict=True):
        assert logs[f"{name}_loss"] == pytest.approx(part.item(), abs=1e-5), name
    assert logs["loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_p6_a_step_does_not_depend_on_how_it_is_cut(tmp_path):
    # Completions alone count: the batches differ in padding and in the number of labels.
    cut = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "pad_to_multiple_of": 64}
    whole = train(tmp_path, prior=1.0, classifier=1.0)
    for change in ({**cut, **checkpointed()}, {"packing": True}, {"padding_free": True, "max_length": None}):
        assert_same(train(tmp_path, prior=1.0, classifier=1.0, **change), whole, rtol=1e-4, atol=1e-5)
    assert largest_difference(train(tmp_path, prior=1.1, classifier=1.0), whole) > 1e-3


@pytest.mark.parametrize("adapter", [None, lora(**NEW_EXPERTS, modules_to_save=["router"])], ids=["whole", "lora"])
def test_p6_accumulation_does_not_multiply_the_balance_weight(tmp_path, adapter):
    rows = [{key: row[key] for key in ("prompt", "completion")} for row in ROWS[:2] * 4]  # no languages at all
    given = {"rows": rows, "adapter": adapter, "per_device_train_batch_size": 2}
    one = train(tmp_path, balance=1.0, **given)
    four = train(tmp_path, balance=1.0, **given, gradient_accumulation_steps=4)
    assert_same(one, four)
    assert largest_difference(one, train(tmp_path, **given)) > 1e-3


def test_p6_two_ranks_make_the_step_of_one(tmp_path):
    options = {"balance": 1.0, "prior": 1.0, "classifier": 1.0}
    cut = {**options, "per_device_train_batch_size": 4}
    fork_ranks("one_sft_step.py", str(tmp_path / "two.pt"), json.dumps(cut))
    assert_same(torch.load(tmp_path / "two.pt"), train(tmp_path / "one", **options))


def collated(one):
    """The tokens of a trainer's data with their language ids, padding left out."""
    rows = list(one.train_dataset)
    batch = one.data_collator(rows)
    assert batch["language_ids"].shape == batch["input_ids"].shape
    real = batch["attention_mask"].bool() if "attention_mask" in batch else torch.ones_like(batch["input_ids"]).bool()
    assert (batch["language_ids"][~real] == -1).all()
    return batch["input_ids"][real].tolist(), batch["language_ids"][real].tolist()


# The letter tells the language: a is old, b and d are new, c is unknown.
LETTERS = [
    {"language": language, "text": letter * count}
    for language, letter, count in (("en", "a", 5), ("el", "b", 30), (None, "c", 2), ("tr", "d", 9), ("en", "a", 17))
]
CLASS_OF_LETTER = {64: 0, 65: 1, 66: -1, 67: 1}


def check_letters(ids, languages):
    before = None
    for token, language in zip(ids, languages, strict=True):
        before = CLASS_OF_LETTER.get(token, before)  # an end of text belongs to what it ends
        assert language == before
    return sum(language >= 0 for language in languages)


CUTS = [
    ({"max_length": 12}, 6 + 12 + 10 + 12),
    ({"max_length": 12, "packing": True}, 6 + 12 + 10 + 12),
    ({"max_length": 12, "packing": True, "packing_strategy": "bfd_split"}, 65),
    ({"max_length": 12, "packing": True, "packing_strategy": "wrapped"}, 65),
    ({"max_length": 12, "packing": True, "shuffle_dataset": True}, 6 + 12 + 10 + 12),
    ({"max_length": None, "padding_free": True}, 65),
    ({"max_length": 64, "pad_to_multiple_of": 16}, 65),
]


def sft(folder, *losses, data=None, classes=LANGUAGES, **options):
    data = Dataset.from_list(ROWS) if data is None else data
    given = {"processing_class": byte_tokenizer(), "router_losses": list(losses), "language_classes": classes}
    return MoESFTTrainer(build(), settings(folder, **options), train_dataset=data, **given)


@pytest.mark.parametrize(("cut", "tagged"), CUTS, ids=str)
def test_every_token_keeps_its_language(tmp_path, cut, tagged):
    data = Dataset.from_list(LETTERS)
    for rows in (data, data.to_iterable_dataset())[: 1 + (cut.keys() <= {"max_length", "packing"})]:
        assert check_letters(*collated(sft(tmp_path, LanguagePriorLoss(0.1), data=rows, **cut))) == tagged


TOKENISED = [([64] * 5 + [65] * 30 + [256], [4] * 5 + [2] * 31), ([66] * 3 + [67] * 2, [-1] * 3 + [0] * 2)]


def tokenised_trainer(folder, **cut):
    data = Dataset.from_list([{"input_ids": ids, "language_ids": languages} for ids, languages in TOKENISED])
    return sft(folder, LanguagePriorLoss(0.1), data=data, classes=[1, 0, 1, 0, 0], **cut)


def check_tokenised(one, count):
    ids, languages = collated(one)
    assert languages == [{64: 4, 65: 2, 66: -1, 67: 0, 256: 2}[token] for token in ids]
    assert len(ids) == count


def test_language_ids_of_tokenised_text_stay_beside_their_tokens(tmp_path):
    one = tokenised_trainer(tmp_path)
    check_tokenised(one, 41)
    assert one._language_classes.tolist() == [1, 0, 1, 0, 0]
    one.train()
    check_tokenised(tokenised_trainer(tmp_path, max_length=12), 17)
    check_tokenised(tokenised_trainer(tmp_path, max_length=12, packing=True, packing_strategy="bfd_split"), 41)
    with pytest.warns(FutureWarning, match="keep_end"):  # going from TRL
        one = tokenised_trainer(tmp_path, max_length=12, truncation_mode="keep_end")
    check_tokenised(one, 17)
    assert one.train_dataset["language_ids"][0] == [2] * 12


@pytest.fixture(scope="module")
def expanded(tmp_path_factory):
    return save_expanded(tmp_path_factory.mktemp("expanded"))


def test_languages_are_those_that_the_checkpoint_records(tmp_path, expanded):
    data = Dataset.from_list(LETTERS)
    for model in (str(expanded), AutoModelForCausalLM.from_pretrained(expanded)):
        one = MoESFTTrainer(model, settings(tmp_path), train_dataset=data, router_losses=[LanguagePriorLoss(0.1)])
        assert check_letters(*collated(one)) == 65
    other = {"el": 0, "en": 1, "tr": 1}
    anew = MoESFTTrainer(model, settings(tmp_path), train_dataset=data, language_classes=other)
    assert dict(zip(*collated(anew), strict=True)) | {256: None} == {64: 1, 65: 0, 66: -1, 67: 1, 256: None}
    # A grown model: class g is what expansion g brought.
    model.config.expansions = [
        {"method": "moe-lpr", "old_languages": ["en"], "new_languages": ["el"]},
        {"method": "moe-lpr", "old_languages": ["en", "el"], "new_languages": ["tr"]},
    ]
    model.config.earlier_experts_per_layer = [model.config.num_experts_per_layer]
    grown = MoESFTTrainer(model, settings(tmp_path), train_dataset=data, router_losses=[LanguagePriorLoss(0.1)])
    assert dict(zip(*collated(grown), strict=True)) | {256: None} == {64: 0, 65: 1, 66: -1, 67: 2, 256: None}
    assert grown._language_classes.tolist() == [0, 1, 2]
    # Without a loss that needs them, a column `language` may hold anything.
    unused = MoESFTTrainer(model, settings(tmp_path), train_dataset=data.map(lambda row: {"language": "?"}))
    assert "language_ids" not in unused.data_collator(list(unused.train_dataset))
    unused.train()


REFUSED = [
    (LETTERS, {}, "records no languages: pass language_classes"),
    (LETTERS, {"language_classes": {"en": 0, "el": 1}}, r"language 'tr'; known: en, el\. Pass language_classes"),
    ([{"text": "abc"}], {"language_classes": LANGUAGES}, "train data set has no column `language` .*nor"),
    (LETTERS, {"language_classes": [0, 1, 1]}, "list of language_classes is for a column `language_ids`: pass"),
    (LETTERS, {"packing": True, "max_length": None, "language_classes": LANGUAGES}, "packing=True needs max_length"),
    ([{"text": "abc", "language_ids": [0, 0, 0]}], {"language_classes": [0]}, "0 input_ids with 3 language_ids"),
    ([{"input_ids": [1, 2, 3], "language_ids": [0, 0]}], {"language_classes": [0]}, "3 input_ids with 2 language_ids"),
    ([{"input_ids": [1], "language_ids": [2]}], {"language_classes": [0, 1]}, r"language id 2, .* of the ids 0\.\.1"),
    ([{"input_ids": [1, 2], "language_ids": [0, 1]}], {}, "need language_classes"),
    (LETTERS, {"losses": [GroupLoss(1.0)], "model": "recorded"}, "group loss needs the group of each code of"),
    (LETTERS, {**checkpointed(reentrant=True), "language_classes": LANGUAGES}, "reentrant gradient checkpointing"),
    (
        LETTERS, {"eval_dataset": Dataset.from_dict({"text": ["abc"]}), "language_classes": LANGUAGES},
        "eval data set has no column `language`",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "given", "said"), REFUSED)
def test_refusals_say_what_to_set(tmp_path, expanded, rows, given, said):
    of_trainer = {name: given[name] for name in ("language_classes", "eval_dataset") if name in given}
    own = {name: value for name, value in given.items() if name not in (*of_trainer, "losses", "model")}
    losses = given.get("losses", [LanguagePriorLoss(0.1)])
    model = str(expanded) if "model" in given else build()
    of_trainer |= {"processing_class": byte_tokenizer(), "router_losses": losses}
    of_trainer["train_dataset"] = Dataset.from_list(rows)
    refused(MoESFTTrainer, model, settings(tmp_path, **own), **of_trainer, says=said, raises=ValueError)


PREFERENCES = [
    {"prompt": "Good day. ", "chosen": "Hello!", "rejected": "No."},
    {"prompt": "Καλημέρα. ", "chosen": "Γεια!", "rejected": "Όχι, δεν θέλω."},
]


class MoEDPOTrainer(RouterLossMixin, DPOTrainer):
    pass


def dpo(folder, kind=DPOTrainer, rows=PREFERENCES, balance=None, steps=1, model=None, **options):
    losses = {} if balance is None else {"router_losses": [BalanceLoss(balance)]}
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": steps}
    return kind(
        build() if model is None else model, args=settings(folder, DPOConfig, **sizes), **losses, **options,
        train_dataset=Dataset.from_list(rows), processing_class=byte_tokenizer(),
    )  # fmt: skip


def parameters_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def balance_gradients(model):
    """Gradients of the balance loss over both answers of each row."""
    tokenizer, layers = byte_tokenizer(), {}
    for row in PREFERENCES:
        for answer in (row["chosen"], row["rejected"]):
            with model.train().capture_routing() as routing:
                model(torch.tensor([tokenizer(row["prompt"] + answer)["input_ids"] + [256]]))
            for index, layer in routing.layers.items():
                layers.setdefault(index, []).append(layer.router_logits)
    loss = sum(load_balance_loss(torch.cat(logits), 2) for logits in layers.values()) / len(layers)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    gradients = torch.autograd.grad(loss, trained.values(), allow_unused=True)
    return {name: found for name, found in zip(trained, gradients, strict=True) if found is not None}


@pytest.mark.parametrize("reference", ["a model of its own", "the model without its adapter"])
def test_router_losses_in_dpo_count_the_trained_model_alone(tmp_path, reference):
    adapter = lora(target_modules="all-linear", modules_to_save=["router"])
    options = {"ref_model": build()} if reference == "a model of its own" else {"peft_config": adapter}
    with_loss, plain = dpo(tmp_path, MoEDPOTrainer, balance=1.0, **options), dpo(tmp_path, **options)
    expected = balance_gradients(with_loss.model)
    for one in (with_loss, plain):
        one.train()
    after, without = parameters_of(with_loss.model), dict(plain.model.named_parameters())
    for name, gradient in expected.items():
        torch.testing.assert_close(without[name] - after[name], gradient, rtol=1e-3, atol=1e-5, msg=name)
    assert min(gradient.abs().max() for name, gradient in expected.items() if ".router." in name) > 1e-2
    logged = with_loss.state.log_history[0]
    assert logged["loss"] == pytest.approx(plain.state.log_history[0]["loss"] + logged["balance_loss"], abs=1e-4)


def test_p6_accumulation_does_not_multiply_the_balance_weight_in_dpo(tmp_path):
    steps = []
    for count in (1, 4):
        one = dpo(tmp_path, MoEDPOTrainer, PREFERENCES * count, 1.0, count, ref_model=build())
        one.train()
        steps.append(parameters_of(one.model))
    assert_same(*steps)


def test_the_documents_python_runs_without_a_gpu(tmp_path, monkeypatch, expanded):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen-el-2").symlink_to(expanded)
    for name, rows in (("chat", ROWS), ("preferences", PREFERENCES)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    small = {"max_steps": 1, "per_device_train_batch_size": 2, "report_to": "none", "max_length": 64}
    for name in ("SFTConfig", "DPOConfig"):
        real = getattr(trl, name)
        monkeypatch.setattr(trl, name, lambda folder, real=real, **given: real(folder, **{**given, **small}))
    namespace = {}
    found = re.findall(r"```python\n(?!# )(.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL)  # the others have a name
    assert len(found) == 6
    for block in found:
        exec(block, namespace)
    merged = AutoModelForCausalLM.from_pretrained("qwen-el-merged").eval()
    ids = torch.arange(24)[None]
    torch.testing.assert_close(merged(ids).logits, namespace["merged"].eval()(ids).logits)
    assert (merged(ids).logits - AutoModelForCausalLM.from_pretrained(expanded).eval()(ids).logits).abs().max() > 0
    assert any("router_z_loss" in entry for entry in namespace["trainer"].state.log_history)


@pytest.mark.parametrize("exclusive", [False, True], ids=["copies", "exclusive"])
def test_a_reference_model_behind_a_gate_is_routed_as_the_one_that_trains(tmp_path, exclusive):
    """At first both are equal; the gate decides in neither."""
    model, reference = gated_model(exclusive=exclusive), gated_model(exclusive=exclusive)
    one = dpo(tmp_path, MoEDPOTrainer, balance=0.0, model=model, ref_model=reference)
    assert not model.language_gate.weight.requires_grad  # no pass of a training computes it
    assert one.train().training_loss == pytest.approx(math.log(2), abs=1e-6)


def test_self_distillation_trains_beside_trls_loss_without_logits(tmp_path):
    """TRL returns logits without gradient."""
    config = {"per_device_train_batch_size": 8, "completion_only_loss": False}
    steps = {}
    for coef in (0.0, 2.0):
        one = sft(tmp_path, *([DistillationLoss(coef)] if coef else []), **config)
        before = parameters_of(one.model)
        one.train()
        steps[coef] = {name: before[name] - value for name, value in parameters_of(one.model).items()}, one
    batch = one.data_collator([one.train_dataset[row] for row in range(len(one.train_dataset))])
    model = build().train()
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    with torch.no_grad(), model.use_expert(0):
        base = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    (old_T,) = (masks.old_T for masks in one._tokens(batch))
    (2.0 * distillation_loss(logits.flatten(0, 1), base.flatten(0, 1), old_T)).backward()
    for name, parameter in model.named_parameters():
        wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(steps[2.0][0][name] - steps[0.0][0][name], wanted, rtol=1e-3, atol=1e-5, msg=name)
    refused(sft, tmp_path, DistillationLoss(1.0), says="loss_type is 'dft': a loss that", loss_type="dft", **config)

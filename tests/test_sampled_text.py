"""Text that the base writes: its distribution, its provenance, and a run that reads nothing else as old text."""

import json
from collections import Counter

import pytest
import torch
from conftest import invoke, refused, save_dense, write_texts
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from hf_moe_expand import Plan, expand_checkpoint, run_recipe
from hf_moe_expand.checkpoint.records import History
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.data.sources import LanguageText
from hf_moe_expand.evaluation.report import Evaluation
from hf_moe_expand.evaluation.samples import begin_samples
from hf_moe_expand.hub.card import make_card
from hf_moe_expand.inference.asking import Answering, ChatModel
from hf_moe_expand.inference.models import load_for_inference
from hf_moe_expand.inference.sampling import write_documents, writer_of
from hf_moe_expand.inference.writing import SampleSettings
from hf_moe_expand.report.inspection import inspect_checkpoint
from hf_moe_expand.report.page import make_page
from hf_moe_expand.runs.recipe import Recipe


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("written")
    expand_checkpoint(save_dense(root / "base"), root / "expanded", Plan("moe-lpr", [2, 1, 2], old=["en"], new=["el"]))
    weights = load_file(root / "expanded" / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, value in weights.items():
        if "experts.1." in name or "router" in name:
            weights[name] = value + torch.randn(value.shape, generator=generator)
    save_file(weights, root / "expanded" / "model.safetensors", {"format": "pt"})
    write_texts(root / "el.jsonl", [f"η γάτα {number} κάθεται" for number in range(30)])
    return root


@pytest.fixture(scope="module")
def base(root):
    return load_for_inference(root / "base")


def texts(loaded, **options):
    return [
        row["text"] for row in write_documents(*loaded, SampleSettings(**{"documents": 6, "tokens": 12, **options}))
    ]


def test_as_many_documents_as_asked_for_and_the_same_with_the_same_seed(base):
    found = texts(base, batch_size=4)
    assert len(found) == 6
    assert all(text.strip() for text in found)
    assert found == texts(base, batch_size=4)
    assert found != texts(base, batch_size=4, seed=1)


def test_prompts_are_taken_in_turn_and_begin_the_documents(base):
    rows = list(write_documents(*base, SampleSettings(documents=7, tokens=8, prompts=["The city", "In 1990"])))
    assert Counter(row["prompt"] for row in rows) == {"The city": 4, "In 1990": 3}
    assert all(row["text"].startswith(row["prompt"]) for row in rows)


def test_first_tokens_follow_the_models_distribution(base):
    """Of many documents of one token, each byte comes as often as the model says, words that are none aside."""
    model, tokenizer = base
    with torch.no_grad():
        logits = model(torch.tensor([[tokenizer.eos_token_id]])).logits[0, -1]
    for temperature in (1.0, 0.3):
        scores = (logits / temperature).softmax(-1)
        counted = Counter(texts(base, documents=3000, tokens=1, batch_size=500, temperature=temperature))
        ids = [i for i in range(256) if tokenizer.decode([i]).strip() and len(tokenizer.decode([i])) == 1 and i < 128]
        ids = [i for i in ids if tokenizer(tokenizer.decode([i])).input_ids == [i]]
        most = sorted(ids, key=lambda i: -scores[i])[:5]
        whole = sum(counted.values())
        spoken = scores[[i for i in range(256) if tokenizer.decode([i]).strip()]].sum()
        for i in most:
            p = float(scores[i] / spoken)
            spread = 5 * (p * (1 - p) / whole) ** 0.5
            assert counted[tokenizer.decode([i])] / whole == pytest.approx(p, abs=spread)


def test_a_small_top_p_takes_the_likeliest_token_each_time(base):
    model, tokenizer = base
    (found,) = set(texts(base, top_p=1e-6, tokens=5))
    ids = torch.tensor([[tokenizer.eos_token_id]])
    likeliest = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=5, pad_token_id=256
    )
    assert found == tokenizer.decode(likeliest[0, 1:], skip_special_tokens=True)


def test_of_an_expanded_model_the_base_inside_writes(base, root):
    assert texts(load_for_inference(root / "expanded")) == texts(base)


def test_the_file_says_where_it_comes_from(root, tmp_path):
    out = tmp_path / "en.jsonl"
    options = ("--language", "en", "--documents", "8", "--tokens", "20", "--seed", "3", "--temperature", "0.9")
    said = invoke("sample", root / "base", *options, "--prompt", "a b", "--out", out)
    assert f"wrote {out}: 8 documents" in said
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert {(row["language"], row["written_by"], row["seed"], row["temperature"]) for row in rows} == {
        ("en", "base", 3, 0.9)
    }
    assert rows[0]["versions"].keys() == {"hf_moe_expand", "transformers", "torch"}


def test_a_recipe_keeps_what_the_base_writes(root, tmp_path):
    out, run = tmp_path / "und.jsonl", tmp_path / "run"
    invoke("sample", root / "base", "--documents", "12", "--tokens", "40", "--out", out)
    assert {json.loads(line)["language"] for line in out.read_text("utf-8").splitlines()} == {"und"}
    training = {"block_size": 32, "max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-2}
    for code, words in {"en": "the cat sat", "el": "η γάτα"}.items():
        write_texts(tmp_path / f"{code}.jsonl", [f"{words} {number} {words}" for number in range(60)])
    recipe = Recipe(
        base=str(root / "base"), output=str(run), old={"und": str(out)}, new={"el": str(root / "el.jsonl")},
        test={code: str(tmp_path / f"{code}.jsonl") for code in ("en", "el")},
        plan={"method": "moe-lpr", "experts": 2}, post_pretrain=training, review={"distillation_coef": 1.0, **training},
    )  # fmt: skip
    final = run_recipe(recipe, lambda line: None)
    history = History.of(json.loads((final / "config.json").read_text("utf-8")))
    review = history.last.stages[-1]
    assert (history.last.old_languages, history.classes) == (["und"], {"und": 0, "el": 1})
    assert (review.documents["und"], review.written_by) == (12, {"und": "base"})
    assert history.last.stages[0].written_by is None
    # Reports name it, and no language `und` among the scores or in the card's metadata.
    assert "12 documents of und that base wrote" in "\n".join(inspect_checkpoint(final).lines())
    card = make_card(final)
    assert "It read 12 documents of und that base wrote." in str(card)
    assert card.data.language == ["el"]
    assert "It read 12 documents of und that base wrote." in make_page(run)
    evaluation = json.loads((run / "evaluation.json").read_text())
    assert (evaluation["old"], evaluation["new"]) == (["en"], ["el"])


def test_text_counts_as_written_only_if_a_model_wrote_every_row_of_it(tmp_path):
    own, other = {"text": "a", "written_by": "base"}, {"text": "a", "written_by": "another"}
    files = {
        "own": [own, own], "two": [own, other], "mixed": [own, {"text": "b"}], "plain": [{"text": "b"}, own],
        "odd": [{"text": "a", "written_by": ["base"]}],
    }  # fmt: skip
    for name, found in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found), "utf-8")
    (tmp_path / "lines.txt").write_text("a\n", "utf-8")
    names = [*(f"{name}.jsonl" for name in files), "lines.txt"]
    assert [writer_of(LanguageText("en", str(tmp_path / name))) for name in names] == ["base", *[None] * 5]
    assert writer_of(LanguageText("en", "hub:some/dataset")) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 64}, "tokens is 64, and a prompt has up to 1, but the model takes 64 positions: lower tokens"),
        ({"top_p": 0.0}, "top_p: Input should be greater than 0"),
        ({"prompts": ["  "]}, "prompts: a prompt is empty"),
    ],
)
def test_refusals(base, options, message):
    refused(texts, base, **options, says=message)


def test_defaults_of_the_checkpoint_do_not_bend_the_distribution(base, monkeypatch):
    model, _ = base
    expected = texts(base)
    bent = GenerationConfig(repetition_penalty=5.0, min_p=0.5, suppress_tokens=list(range(200)), eos_token_id=256)
    monkeypatch.setattr(model, "generation_config", bent)
    assert texts(base) == expected
    assert model.generation_config is bent


def test_a_base_that_was_trained_neither_writes_nor_teaches(root, tmp_path):
    config = {"block_size": 16, "everything": True, "max_steps": 1, "per_device_train_batch_size": 2}
    (tmp_path / "all.json").write_text(json.dumps(config))
    text = ("--data", f"el={root / 'el.jsonl'}")
    invoke("train", "post-pretrain", root / "expanded", tmp_path / "all", *text, "--config", tmp_path / "all.json")
    with pytest.raises(InputError, match="is not the base any more, since `everything` trained it: give the base"):
        texts(load_for_inference(tmp_path / "all"))
    (tmp_path / "review.json").write_text(json.dumps({"block_size": 16, "distillation_coef": 1.0}))
    write_texts(tmp_path / "en.jsonl", ["one line of text"] * 30)
    text = (*text, "--data", f"en={tmp_path / 'en.jsonl'}", "--config", tmp_path / "review.json")
    with pytest.raises(InputError, match="distillation_coef: expert 0 of this model is not the base any more"):
        invoke("train", "review", tmp_path / "all", tmp_path / "out", *text)


def test_the_first_language_of_each_group_with_text_begins_a_sample():
    texts = {
        "de": ["eins zwei drei vier fünf sechs sieben acht"],
        "el": ["  ένα\nδύο "],
        "hu": ["egy"],
        "zh": ["字" * 90],
    }
    found = begin_samples(texts, (["en", "de"], ["el", "hu"]))
    assert [(sample.language, sample.prompt) for sample in found] == [
        ("de", "eins zwei drei vier fünf sechs sieben"), ("el", "ένα δύο"),
    ]  # fmt: skip
    assert [sample.prompt for sample in begin_samples(texts, ([], ["zh"]))] == ["字" * 40]
    assert begin_samples({"en": [" "], "el": []}, (["en"], ["el"])) == []


def test_an_evaluation_keeps_what_each_decoder_writes(tmp_path):
    for code, text in (("en", "A short text. "), ("el", "Ένα κείμενο. ")):
        write_texts(tmp_path / f"{code}.jsonl", [text * 6])
    models = [save_dense(tmp_path / "one"), save_dense(tmp_path / "two", seed=1)]
    data = [f"--data={code}={tmp_path / code}.jsonl" for code in ("en", "el")]
    invoke("evaluate", *models, *data, "--old", "en", "--new", "el", "--out", tmp_path / "e.json")
    samples = {sample["language"]: sample for sample in json.loads((tmp_path / "e.json").read_text())["samples"]}
    assert list(samples) == ["en", "el"]
    prompt = samples["en"]["prompt"]
    assert prompt == "A short text. A short text. A short"
    expected = {m.name: ChatModel.load(m).answer(prompt, Answering(max_new_tokens=24)).split() for m in models}
    assert {name: text.split() for name, text in samples["en"]["continued"].items()} == expected
    header, rows = Evaluation.from_json(tmp_path / "e.json").sample_rows()
    assert header == ["language", "held-out text begins", "one", "two"]
    assert rows[0] == ["en", prompt, *samples["en"]["continued"].values()]

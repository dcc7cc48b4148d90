"""The ensemble of dense models against a definition that mixes whole distributions, one position at a time."""

import math

import pytest
import torch
from conftest import byte_tokenizer, invoke, refused, save_dense, tiny_dense, write_texts
from tokenizers import AddedToken

from hf_moe_expand import evaluate_ensemble
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.evaluation.report import Evaluation

TEXTS = {"en": ["One short text.", "And a second one, longer than a window of eight."], "el": ["Ένα", "δύο τρία"]}


def slow_nats(models, tokenizer, texts, block_size, top_m):
    """Negative log-likelihood of the texts: at each position every model's distribution over the vocabulary."""
    stream, of_text = [], []
    for text in texts:
        ids = tokenizer(text).input_ids
        stream += [tokenizer.eos_token_id, *ids]
        of_text += [False] + [True] * len(ids)
    nats = 0.0
    for position in range(1, len(stream)):
        start = (position - 1) // block_size * block_size
        if position == start + 1:
            likelihoods = [1.0] * len(models)  # of what the window holds so far
        logits = [model(torch.tensor([stream[start:position]])).logits[0, -1].double() for model in models]
        distributions = [x.softmax(-1) for x in logits]
        best = sorted(range(len(models)), key=lambda j: -likelihoods[j])[:top_m]
        total = sum(likelihoods[j] for j in best)
        mixture = sum(likelihoods[j] / total * distributions[j] for j in best)
        assert mixture.sum().item() == pytest.approx(1)
        if of_text[position]:
            nats -= mixture[stream[position]].log().item()
            likelihoods = [
                likelihood * distribution[stream[position]].item()
                for likelihood, distribution in zip(likelihoods, distributions, strict=True)
            ]
    return nats


@pytest.fixture(scope="module")
def models():
    return [tiny_dense("qwen2", seed=0), tiny_dense("bloom", seed=1), tiny_dense("qwen2", seed=2)]


@pytest.mark.parametrize(("top_m", "block_size"), [(1, 8), (2, 8), (3, 8), (2, 40)])
def test_it_mixes_probabilities_by_the_posterior_of_the_prefix(models, top_m, block_size):
    tokenizer = byte_tokenizer()
    found = evaluate_ensemble(models, tokenizer, TEXTS, top_m, block_size, batch_size=3)
    for code, texts in TEXTS.items():
        with torch.no_grad():
            nats = slow_nats(models, tokenizer, texts, block_size, top_m)
        size = sum(len(text.encode()) for text in texts)
        assert (found[code].tokens, found[code].bytes) == (size, size)  # a token is a byte
        assert found[code].bits_per_byte == pytest.approx(nats / math.log(2) / size, rel=1e-5)
        assert found[code].perplexity == pytest.approx(math.exp(nats / size), rel=1e-4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("ensemble")
    save_dense(root / "a")
    save_dense(root / "b", seed=1, max_position_embeddings=16)
    save_dense(root / "c", "bloom", seed=2)
    for code, texts in TEXTS.items():
        write_texts(root / f"{code}.jsonl", texts)
    return root


def test_folders_are_loaded_one_by_one(folders):
    loaded = [tiny_dense("qwen2"), tiny_dense("qwen2", seed=1, max_position_embeddings=16)]
    tokenizer = byte_tokenizer()
    found = evaluate_ensemble([folders / "a", str(folders / "b")], tokenizer, TEXTS, 2, 64, 2)
    assert found == evaluate_ensemble(loaded, tokenizer, TEXTS, 2, 16, 2)  # windows as short as one member's
    refused(evaluate_ensemble, [folders], tokenizer, TEXTS, 1, says="not a checkpoint")


def test_bad_input_is_refused(models, folders, tmp_path):
    tokenizer = byte_tokenizer()
    for top_m in (0, 4):
        with pytest.raises(InputError, match=f"top_m is {top_m}; an ensemble of 3 models mixes 1 to 3 of them"):
            evaluate_ensemble(models, tokenizer, TEXTS, top_m)
    refused(evaluate_ensemble, models, tokenizer, {**TEXTS, "el": []}, says="Language 'el': no text to score")
    save_dense(tmp_path / "other", vocab_size=258)
    other = byte_tokenizer()
    other.add_tokens([AddedToken("short")])
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(InputError, match="other: its tokenizer gives other tokens for the text in 'en'"):
        evaluate_ensemble([folders / "a", tmp_path / "other"], tokenizer, TEXTS)


def evaluate(folders, *arguments):
    data = [word for code in TEXTS for word in ("--data", f"{code}={folders / f'{code}.jsonl'}")]
    models = [folders / name for name in "abc"]
    return invoke("evaluate", *models, *data, "--out", folders / "evaluation.json", "--block-size", 16, *arguments)


def test_the_command_line_adds_a_column(folders):
    evaluate(folders, "--ensemble", 2)
    result = Evaluation.from_json(folders / "evaluation.json")
    assert list(result.models) == ["a", "b", "c", "ensemble of 3, top 2"]
    members = [folders / name for name in "abc"]
    assert result.models["ensemble of 3, top 2"] == evaluate_ensemble(members, byte_tokenizer(), TEXTS, 2, 16)
    for wrong in (0, 4):
        with pytest.raises(InputError, match=f"--ensemble is {wrong}: must be from 1 to 3, the number of models given"):
            evaluate(folders, "--ensemble", wrong, "--overwrite")

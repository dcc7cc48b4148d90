"""Perplexity and bits per byte against a slow definition, and the table."""

import json
import math

import pytest
import torch
from conftest import BEGIN, beginning_tokenizer, byte_tokenizer, refused, save_dense, tiny_config, tiny_dense
from gated_models import KINDS, gated_model, tokens
from matrix.oracles import bits_per_byte
from transformers import AutoModelForCausalLM

from hf_moe_expand.evaluation import perplexity, report
from hf_moe_expand.evaluation.perplexity import LanguageScore, ScoredText, evaluate_model, text_stream
from hf_moe_expand.evaluation.report import Evaluation, in_time
from hf_moe_expand.evaluation.scoring_settings import EvaluationSettings
from hf_moe_expand.inference.models import longest_block

TEXTS = {"en": ["One short text.", "And a second one, longer than a window of eight."], "el": ["Ένα", "δύο τρία"]}


@pytest.mark.parametrize(("block_size", "batch_size"), [(8, 3), (5, 1), (60, 4)])
def test_every_token_is_scored_once_and_bytes_are_the_texts(block_size, batch_size):
    model, tokenizer = tiny_dense("qwen2"), byte_tokenizer()
    found = evaluate_model(model, tokenizer, TEXTS, block_size, batch_size)
    for code, texts in TEXTS.items():
        slow, size = bits_per_byte(model, tokenizer, texts, block_size, None), len("".join(texts).encode())
        assert (found[code].tokens, found[code].bytes) == (size, size)  # a byte is a token
        assert found[code].bits_per_byte == pytest.approx(slow, rel=1e-5)
        assert found[code].perplexity == pytest.approx(2**slow, rel=1e-4)


@pytest.mark.parametrize("text", ["abcdefghijk", "abc", "a"])
@pytest.mark.parametrize("block_size", [2, 3, 30])
def test_every_window_begins_with_begin_of_text_where_the_tokenizer_adds_one(text, block_size):
    """Against each token's probability from a pass of its own; the context has `block_size` tokens with the begin."""
    model, texts = tiny_dense("qwen2"), [text, "déf"]
    nats, tokens = 0.0, 0
    stream = [token for one in texts for token in beginning_tokenizer()(one).input_ids]
    context: list[int] = []
    for token in stream:
        if token != BEGIN:
            nats -= model(torch.tensor([context])).logits[0, -1].log_softmax(-1)[token].item()
            tokens += 1
        context.append(token)
        if len(context) > block_size:
            context = [BEGIN] if token == BEGIN else [BEGIN, token]
    found = evaluate_model(model, beginning_tokenizer(), {"hu": texts}, block_size, 2)["hu"]
    assert (found.tokens, found.bytes) == (tokens, sum(len(one.encode()) for one in texts))
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / found.bytes, rel=1e-5)


def test_a_first_document_that_is_too_long_is_cut_and_this_is_said_once(capfd):
    tokenizer, text = byte_tokenizer(), "ένα δύο τρία τέσσερα"
    for most in range(2, 2 * len(text)):
        stream = text_stream([text, "xy"], tokenizer, max_tokens=most)
        beginning = tokenizer.decode(stream.ids[1:])
        assert text.startswith(beginning)
        assert (len(beginning.encode()), sum(stream.scored)) == (stream.size, len(stream.ids) - 1)
        whole = len(text.encode()) <= most
        # Another character, of at most two tokens, would be too long; and nothing is taken behind a cut.
        assert beginning == text if whole else most - 2 < sum(stream.scored) <= most
    capfd.readouterr()
    model = tiny_dense("qwen2")
    score = evaluate_model(model, tokenizer, {"hu": ["egy kettő három", "négy"]}, 16, max_tokens=9)["hu"]
    assert score == evaluate_model(model, tokenizer, {"hu": ["egy kett"]}, 16)["hu"]
    evaluate_model(model, tokenizer, {"hu": ["egy kettő három", "négy"]}, 16, max_tokens=9)
    said = capfd.readouterr().err
    assert said.count("language 'hu': its first document is longer than max_tokens 9; it is cut to 8 characters\n") == 1


@pytest.mark.parametrize("most", [None, 500, 4001])
def test_documents_tokenised_in_batches_give_the_same_stream(most):
    """Against one document at a time; more documents than a batch has."""
    tokenizer = byte_tokenizer()
    texts = [f"{number} ένα" * (number % 7) for number in range(1300)]
    ids, scored, size = [], [], 0
    for text in texts:
        tokens = tokenizer(text).input_ids
        if most is not None and len(ids) + len(tokens) > most:
            break
        ids += [tokenizer.eos_token_id, *tokens]
        scored += [False, *[True] * len(tokens)]
        size += len(text.encode())
    assert text_stream(iter(texts), tokenizer, most) == ScoredText(ids, scored, size)


def scores(**bits):
    return {code: LanguageScore(2.0**b, b, 10, 10) for code, b in bits.items()}


def read_back(result, path):
    """What the written evaluation holds, after it was read as it was."""
    result.to_json(path)
    assert Evaluation.from_json(path) == result
    return json.loads(path.read_text())


def test_table_and_json(tmp_path):
    models = {"base": scores(en=1.0, es=2.0, el=4.0), "after": scores(en=1.1, es=2.0, el=3.0)}
    result = Evaluation(["en", "es"], ["el"], models)
    assert result.markdown().splitlines() == [
        "| language | base | after | after vs base |",
        "| --- | ---: | ---: | ---: |",
        "| en (old) | 1.000 | 1.100 | +10.0 % |",
        "| es (old) | 2.000 | 2.000 | +0.0 % |",
        "| mean of old | 1.500 | 1.550 | +3.3 % |",
        "| el (new) | 4.000 | 3.000 | -25.0 % |",
    ]
    assert result.rows("perplexity")[1][0] == ["en (old)", "2.000", "2.144", "+7.2 %"]
    certain = Evaluation(["en"], [], {name: {"en": LanguageScore(1.0, 0.0, 9, 9)} for name in ("base", "after")})
    assert certain.rows()[1] == [["en (old)", "0.000", "0.000", "-"]]  # no share of nothing
    read_back(result, tmp_path / "evaluation.json")
    (tmp_path / "other.json").write_text("{}")
    refused(Evaluation.from_json, tmp_path / "other.json", says="not an evaluation")


def test_the_tokens_that_leave_home_are_counted():
    model, ids = gated_model(**KINDS["exclusive"]), tokens(40, 16)
    stream = ScoredText(ids.flatten().tolist(), [True] * ids.numel(), 100)
    windows = stream.windows(8, 1)
    wanted = sum(int((targets != -100).sum()) for inputs, targets in windows if model.judge(inputs).item())
    score = perplexity.score_stream(model, stream, 8, 4)
    assert 0 < score.away == wanted < stream.tokens
    with model.use_languages("en"):  # nothing is judged
        assert perplexity.score_stream(model, stream, 8, 4).away is None
    models = {"base": scores(en=1.0), "after": {"en": score, "el": score}}
    line = Evaluation(["en"], ["el"], models).notes()[-1]
    assert line == f"tokens that the gate of after sends to new experts: en {score.away:,} of {score.tokens:,}"


def test_several_expansions_are_groups_of_their_own(tmp_path):
    base, after = scores(en=1.0, el=4.0, hu=2.0, tr=8.0), scores(en=1.5, el=2.0, hu=1.0, tr=6.0)
    models, path = {"base": base, "after": after}, tmp_path / "evaluation.json"
    result = Evaluation(["en"], ["el", "hu", "tr"], models, [["el", "hu"], ["tr"]])
    assert result.markdown().splitlines()[2:] == [
        "| en (old) | 1.000 | 1.500 | +50.0 % |",
        "| el (expansion 1) | 4.000 | 2.000 | -50.0 % |",
        "| hu (expansion 1) | 2.000 | 1.000 | -50.0 % |",
        "| mean of expansion 1 | 3.000 | 1.500 | -50.0 % |",
        "| tr (expansion 2) | 8.000 | 6.000 | -25.0 % |",
    ]
    found = read_back(result, path)
    assert found["mean_bits_per_byte"]["after"] == {"old": 1.5, "new": 3.0, "expansion 1": 1.5, "expansion 2": 6.0}
    # One expansion is "new"; so are those of a file that says nothing of expansions.
    result.expansions = [["el", "hu", "tr"]]
    assert "| mean of new | 4.667 | 3.000 | -35.7 % |" in result.markdown()
    del found["expansions"]
    path.write_text(json.dumps(found))
    assert Evaluation.from_json(path).markdown() == result.markdown()


def test_unnamed_languages_are_a_group_of_their_own(tmp_path):
    base, after = scores(en=1.0, el=4.0, it=2.0, fr=8.0), scores(en=1.0, el=2.0, it=2.0, fr=8.8)
    result = Evaluation(["en"], ["el"], {"base": base, "after": after}, unnamed=["it", "fr"])
    assert result.markdown().splitlines()[2:] == [
        "| en (old) | 1.000 | 1.000 | +0.0 % |",
        "| el (new) | 4.000 | 2.000 | -50.0 % |",
        "| it (unnamed) | 2.000 | 2.000 | +0.0 % |",
        "| fr (unnamed) | 8.000 | 8.800 | +10.0 % |",
        "| mean of unnamed | 5.000 | 5.400 | +8.0 % |",
        "",
        "unnamed languages are neither old nor new: no training named them",
    ]
    assert read_back(result, tmp_path / "evaluation.json")["mean_bits_per_byte"]["after"]["unnamed"] == 5.4
    this = result.of_this(["after"], "here")
    assert this.unnamed == ["it", "fr"]
    assert "fr (unnamed)" in this.markdown()


def test_logits_come_in_pieces_of_a_bounded_size(monkeypatch):
    model, tokenizer = tiny_dense("qwen2"), byte_tokenizer()
    stream = text_stream(["a text of some length"] * 9, tokenizer)
    whole = torch.cat([nats.flatten() for nats, _ in perplexity.target_nats(model, stream, 16, 4)])
    rows = []
    model.register_forward_pre_hook(lambda *given: rows.append(len(given[-1]["input_ids"])), with_kwargs=True)
    monkeypatch.setattr(perplexity, "_TOKENS", 5)
    monkeypatch.setattr(perplexity, "_LOGITS", 2 * 16 * 257)
    pieces = torch.cat([nats.flatten() for nats, _ in perplexity.target_nats(model, stream, 16, 4)])
    assert max(rows) == 2
    torch.testing.assert_close(pieces, whole, rtol=1e-5, atol=1e-6)
    monkeypatch.setattr(perplexity, "_LOGITS", 1)
    rows.clear()
    list(perplexity.target_nats(model, stream, 16, 4))
    assert set(rows) == {1}


def test_an_evaluation_takes_two_minutes_unless_it_is_told_otherwise(tmp_path, monkeypatch, capsys):
    model, asked = {"base": (str(save_dense(tmp_path / "base")), None)}, EvaluationSettings()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    parameters = AutoModelForCausalLM.from_pretrained(tmp_path / "base").num_parameters()
    for share in (1000, 100):
        monkeypatch.setattr(report, "_WORK", parameters * share * 25)
        assert in_time(asked, model, {"en": 1, "el": 2}).max_tokens == max(1000, share * 25 // 2 // 100 * 100)
    assert "scores up to 12,500 tokens of each language" in capsys.readouterr().err
    given = EvaluationSettings(max_tokens=5)
    assert in_time(given, model, {"en": 1}) == given
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert in_time(asked, model, {"en": 1}) == asked


def test_the_longest_block_is_found_under_any_name():
    assert [longest_block(tiny_config(name)) for name in ("qwen2", "gpt2", "mpt", "bloom")] == [64, 64, 64, None]


def test_a_mean_over_fewer_languages_than_another_columns_is_none(tmp_path):
    models = {"model": scores(el=2.0, hu=4.0), "model, told": scores(el=2.0)}
    result = Evaluation([], ["el", "hu"], models)
    assert result.rows()[1][-1] == ["mean of new", "3.000", "-", "-"]
    means = read_back(result, tmp_path / "evaluation.json")["mean_bits_per_byte"]
    assert (means["model"]["new"], means["model, told"]["new"]) == (3.0, None)

"""What tokenizers put around a text, in documents, blocks, windows and prompts; and special tokens that texts name."""

import pytest
import torch
from conftest import byte_tokenizer, tiny_dense
from datasets import Dataset
from tokenizers import AddedToken, processors
from transformers import PreTrainedTokenizerFast

from hf_moe_expand.analysis.deviation import _blocks
from hf_moe_expand.analysis.gate_text import gate_examples
from hf_moe_expand.analysis.reading import token_blocks
from hf_moe_expand.core.saying import say_once
from hf_moe_expand.data.packing import pack_texts
from hf_moe_expand.data.tokens import encode_documents, frame, prompt_tokens, without_end
from hf_moe_expand.evaluation.perplexity import evaluate_model, text_stream
from hf_moe_expand.evaluation.translation import translate
from hf_moe_expand.inference.asking import Answering, ChatModel
from hf_moe_expand.inference.sampling import _begin

END, BOS, SEP, MASK = range(256, 260)
TEMPLATES = {
    "nothing": ("$A", [], []),
    "a beginning": ("<s> $A", [BOS], []),
    "an end": ("$A <end>", [], [END]),
    "both": ("<s> $A <end>", [BOS], [END]),
    "a separator": ("<s> $A [SEP]", [BOS], [SEP]),
    "two beginnings": ("[MASK] <s> $A", [MASK, BOS], []),
    "the same one twice": ("<s> <s> $A [SEP] <end>", [BOS, BOS], [SEP, END]),
}
CASES = pytest.mark.parametrize(("template", "before", "after"), TEMPLATES.values(), ids=TEMPLATES)


def framing(template: str, bos: str | None = "<s>") -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "[SEP]", "[MASK]")])
    special = [("<end>", END), ("<s>", BOS), ("[SEP]", SEP), ("[MASK]", MASK)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, bos_token=bos, eos_token="<end>", pad_token="<end>"
    )


def plain(text: str) -> list[int]:
    return byte_tokenizer()(text).input_ids


def model():
    return tiny_dense("llama", vocab_size=260)


@CASES
def test_documents_have_both_sides_and_an_end_and_prompts_the_beginning_alone(template, before, after):
    tokenizer = framing(template)
    assert frame(tokenizer) == (before, after)
    end = after if after[-1:] == [END] else [*after, END]
    assert encode_documents(["ab", ""], tokenizer) == [[*before, *plain("ab"), *end], [*before, *end]]
    assert prompt_tokens("ab", tokenizer) == [*before, *plain("ab")]
    assert _begin("ab", tokenizer) == [*(before or [BOS]), *plain("ab")]
    assert without_end(tokenizer)("ab").input_ids == [*before, *plain("ab")]
    assert tokenizer("ab").input_ids == [*before, *plain("ab"), *after]  # which stays as it was


@CASES
def test_a_text_that_a_template_has_begun_or_ended_is_not_begun_or_ended_again(template, before, after):
    tokenizer = framing(template)
    end = after if after[-1:] == [END] else [*after, END]
    text = f"{tokenizer.decode(before)}ab{tokenizer.decode(end)}"
    assert encode_documents([text], tokenizer) == [[*before, *plain("ab"), *end]]
    assert prompt_tokens(f"{tokenizer.decode(before)}ab", tokenizer) == [*before, *plain("ab")]


@CASES
def test_blocks_and_windows_begin_as_the_tokenizer_begins_texts(template, before, after):
    tokenizer, texts = framing(template), [f"document {number}" for number in range(30)]
    packed = pack_texts({"en": Dataset.from_dict({"text": texts})}, tokenizer, 16, 0).dataset["input_ids"]
    deviation = _blocks({"en": texts}, tokenizer, 4, 16, 0)["en"].tolist()
    read = token_blocks("en", texts, tokenizer, 64, 8)
    stream = text_stream(texts, tokenizer)
    windows = [row[row.ne(0)].tolist() for inputs, _ in stream.windows(16, 4) for row in inputs]
    for row in (*packed, *deviation, *read, *windows):
        assert list(row[: len(before)]) == before
    assert not {*after} - {END} & {*stream.ids}  # a window holds texts, not what ends them
    assert [token for token, one in zip(stream.ids, stream.scored, strict=True) if one] == plain("".join(texts))
    scored = [target for _, wanted in stream.windows(16, 4) for target in wanted[wanted.ne(-100)].tolist()]
    assert scored == plain("".join(texts))  # each once


@CASES
def test_what_generates_gets_no_end(template, before, after, monkeypatch):
    tokenizer, asked = framing(template), model()
    given = []

    def generate(input_ids=None, **options):
        given.append(input_ids.tolist())
        return torch.cat([input_ids, torch.full((len(input_ids), 1), END)], 1)

    monkeypatch.setattr(asked, "generate", generate)
    ChatModel(asked, tokenizer, "model").answer("ab", Answering())
    translate(asked, tokenizer, ["ab"], 8, 8)
    assert given == [[[*before, *plain("ab")]]] * 2


@CASES
def test_a_chat_begins_once_and_is_ended_by_its_template_alone(template, before, after, monkeypatch):
    tokenizer, asked = framing(template), model()
    tokenizer.chat_template = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    given = []
    monkeypatch.setattr(asked, "generate", lambda input_ids=None, **options: given.append(input_ids) or input_ids)
    ChatModel(asked, tokenizer, "model").reply([{"role": "user", "content": "ab"}], Answering())
    assert given[0].tolist() == [[BOS, *plain("ab")]]
    text = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    (document,) = encode_documents([text], tokenizer)
    assert document.count(BOS) == max(1, before.count(BOS))


def test_the_gates_texts_have_no_end():
    tokenizer = framing("<s> <s> $A [SEP]")
    for example in gate_examples({"en": ["a text of a few words"] * 40}, tokenizer, 200, 64)["en"]:
        assert example.ids[0] == BOS != example.ids[1]  # the other one stands before every text
        assert (example.start, example.end) == (1, len(example.ids))
        assert SEP not in example.ids


def test_a_beginning_counts_whatever_its_name():
    tokenizer = framing("[MASK] $A", bos=None)
    assert prompt_tokens("a", tokenizer) == [MASK, *plain("a")]
    assert text_stream(["a"], tokenizer).ids == [MASK, *plain("a")]


SAID = "the text has special tokens, which are read as such: "


@CASES
def test_special_tokens_that_a_text_names_are_counted_and_said(template, before, after, capfd):
    say_once.cache_clear()
    tokenizer = framing(template)
    texts = ["a<end>b", "b[MASK]<end>", "plain text of some length"] * 4
    pack_texts({"el": Dataset.from_dict({"text": texts})}, tokenizer, 8, 0)
    # At the end of a text, the token stands where the tokenizer would put it.
    assert f"language 'el': {SAID}<end> 4 times, [MASK] 4 times\n" in capfd.readouterr().err
    evaluate_model(model(), tokenizer, {"tr": texts}, 16)
    evaluate_model(model(), tokenizer, {"tr": texts}, 16)
    assert capfd.readouterr().err.count(f"language 'tr': {SAID}<end> 8 times, [MASK] 4 times") == 1


@CASES
def test_nothing_is_said_of_what_the_tokenizer_puts_around_texts(template, before, after, capfd):
    say_once.cache_clear()
    tokenizer = framing(template)
    texts = ["a text", "another one", ""] * 6
    pack_texts({"el": Dataset.from_dict({"text": texts})}, tokenizer, 8, 0)
    text_stream(texts, tokenizer)
    assert "special tokens" not in capfd.readouterr().err

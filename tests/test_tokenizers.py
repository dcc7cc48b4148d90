"""A new checkpoint's tokenizer is its base's; what tokenizers put around a text, and special tokens that texts name."""

import json
from pathlib import Path

import pytest
import torch
from bpe import bpe_tokenizer
from conftest import byte_tokenizer, refused, run_fresh, tiny_dense
from datasets import Dataset
from tokenizers import AddedToken, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hf_moe_expand import Plan, expand_checkpoint, graft_delta, grow_checkpoint
from hf_moe_expand.analysis.deviation import _blocks
from hf_moe_expand.analysis.gate_text import gate_examples
from hf_moe_expand.analysis.reading import token_blocks
from hf_moe_expand.baselines.depth import expand_depth
from hf_moe_expand.checkpoint.export import export_dense
from hf_moe_expand.checkpoint.merge import average_checkpoints
from hf_moe_expand.checkpoint.tokenizer import load_tokenizer
from hf_moe_expand.core.saying import say_once
from hf_moe_expand.data.packing import pack_texts
from hf_moe_expand.data.tokens import encode_documents, frame, prompt_tokens, without_end
from hf_moe_expand.evaluation.perplexity import evaluate_model, text_stream
from hf_moe_expand.evaluation.translation import translate
from hf_moe_expand.inference.asking import Answering, ChatModel
from hf_moe_expand.inference.sampling import _begin

PLAN = Plan("moe-lpr", [2, 1, 2], old=["en"], new=["el"])
TEXT = "Don't  say 12,345 — «η θάλασσα»\n\n  <end> <|im_start|>user\n x"
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}{% endfor %}"


def same(one, other) -> None:
    assert type(one) is type(other)
    for text in (TEXT, *TEXT.split()):
        assert one(text).input_ids == other(text).input_ids
    for name in ("special_tokens_map", "all_special_ids", "chat_template", "padding_side", "model_max_length"):
        assert getattr(one, name) == getattr(other, name)
    assert one.get_vocab() == other.get_vocab()
    assert one.decode(one(TEXT).input_ids) == other.decode(other(TEXT).input_ids)


def change(file: Path, **fields) -> None:
    fields = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))


def vocabulary_and_merges(folder: Path) -> None:
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "".join(f"{' '.join(pair)}\n" for pair in model["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}")
    (folder / "tokenizer.json").unlink()


# What becomes of the files beside tokenizer.json, whose configuration goes, or has other fields.
FILES = {
    "without a configuration": lambda folder: None,
    "a class in config.json": lambda folder: change(folder / "config.json", tokenizer_class="GPT2Tokenizer"),
    "vocabulary and merges": vocabulary_and_merges,
    "no class": {"tokenizer_class": None},
    "another class": {"tokenizer_class": "LlamaTokenizerFast", "padding_side": "left"},
    "an unknown class": {"tokenizer_class": "NoSuchTokenizer", "model_max_length": 77},
}


def save(folder: Path, backbone: str, files: str | None = None) -> Path:
    """A base, whose tokenizer has the token that the library's classes give it where no file names one."""
    tokenizer, edit = bpe_tokenizer(), FILES.get(files)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|endoftext|>", "<|im_start|>"]})
    tokenizer.chat_template = TEMPLATE
    tiny_dense(backbone, vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if isinstance(edit, dict):
        change(folder / "tokenizer_config.json", **edit)
    elif edit is not None:
        (folder / "tokenizer_config.json").unlink()
        edit(folder)
    return folder


@pytest.mark.parametrize("files", FILES)
@pytest.mark.parametrize("backbone", ["gpt2", "llama", "qwen2"])
def test_an_expanded_checkpoint_has_the_bases_tokenizer(tmp_path, backbone, files):
    base = save(tmp_path / "base", backbone, files)
    try:
        wanted = AutoTokenizer.from_pretrained(base)
        assert wanted("a").input_ids
    except Exception:  # the base's own does not load: the refusal names it
        refused(expand_checkpoint, base, tmp_path / "out", PLAN, says=r"base: has no tokenizer that loads")
        assert not (tmp_path / "out").exists()
        return
    expand_checkpoint(base, tmp_path / "out", PLAN)
    same(AutoTokenizer.from_pretrained(tmp_path / "out"), wanted)


def test_it_is_the_same_for_who_has_transformers_alone_with_and_without_remote_code(tmp_path):
    base = save(tmp_path / "base", "gpt2", "without a configuration")
    wanted = AutoTokenizer.from_pretrained(base)
    assert type(wanted).__name__ == "GPT2Tokenizer"
    expand_checkpoint(base, tmp_path / "out", PLAN)
    code = "from transformers import AutoTokenizer\nfor trusted in (False, True):\n"
    code += "    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=trusted)\n"
    code += "    print(type(tokenizer).__name__, tokenizer.eos_token_id, *tokenizer(sys.argv[2]).input_ids)"
    said = run_fresh(code, str(tmp_path / "out"), TEXT).splitlines()
    ids = " ".join(map(str, wanted(TEXT).input_ids))
    assert said == [f"GPT2Tokenizer {wanted.eos_token_id} {ids}"] * 2


@pytest.mark.parametrize("files", ["without a configuration", "vocabulary and merges"])
def test_every_verb_keeps_it(tmp_path, files):
    base = save(tmp_path / "base", "qwen2", files)
    wanted = AutoTokenizer.from_pretrained(base)
    expand_checkpoint(base, tmp_path / "out", PLAN)
    more = Plan("moe-lpr", [3, 1, 3], old=["en", "el"], new=["tr"], grows_from=[2, 1, 2])
    made = {
        "grown": lambda out: grow_checkpoint(tmp_path / "out", out, more),
        "averaged": lambda out: average_checkpoints([tmp_path / "out", base], out),
        "grafted": lambda out: graft_delta(tmp_path / "out", out, base, base),
        "kept": lambda out: graft_delta(tmp_path / "out", out, base, base, keep_tokenizer=True),
        "deeper": lambda out: expand_depth(base, out, 1),
        "expert": lambda out: export_dense(tmp_path / "out", out, expert=0),
    }
    for name, make in made.items():
        make(tmp_path / name)
        same(AutoTokenizer.from_pretrained(tmp_path / name), wanted)


def test_files_that_load_alike_stay_byte_for_byte(tmp_path):
    base = save(tmp_path / "base", "llama")
    expand_checkpoint(base, tmp_path / "out", PLAN)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (base / name).read_bytes()


def test_a_base_without_a_tokenizer_expands_and_a_broken_one_is_refused(tmp_path):
    tiny_dense("llama").save_pretrained(tmp_path / "base")
    expand_checkpoint(tmp_path / "base", tmp_path / "bare", PLAN)
    for text in ("{", "[]", '{"model": null}'):
        (tmp_path / "base" / "tokenizer.json").write_text(text)
        refused(expand_checkpoint, tmp_path / "base", tmp_path / "out", PLAN, says=r"base: has no tokenizer that")
    assert not (tmp_path / "out").exists()


def added(*tokens, special=True, **roles) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    if tokens:
        tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token in tokens])
    if roles:
        tokenizer.add_special_tokens(roles)
    return tokenizer


def framing() -> PreTrainedTokenizerFast:
    tokenizer = added("[SEP]")
    backend = tokenizer.backend_tokenizer
    backend.post_processor = processors.TemplateProcessing(single="$A [SEP]", special_tokens=[("[SEP]", 257)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<end>")


BEYOND = {
    "a word": (added("bir", special=False), "'bir' has number 257"),
    "many": (added("bir", "iki", "üç", special=False), "'bir' has number 257"),
    "an end": (added(eos_token="</s>"), "'</s>' has number 257"),
    "a beginning": (added(bos_token="<s>"), "'<s>' has number 257"),
    "one put after texts": (framing(), r"'\[SEP\]' has number 257"),
}


@pytest.mark.parametrize(("tokenizer", "message"), BEYOND.values(), ids=BEYOND)
@pytest.mark.parametrize("backbone", ["llama", "gemma3_text"])
def test_tokens_without_rows_are_refused_by_name_before_anything_is_written(tmp_path, backbone, tokenizer, message):
    tiny_dense(backbone).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    refused(expand_checkpoint, tmp_path / "base", tmp_path / "out", PLAN, says=r"base: the tokenizer's token")
    refused(ChatModel.load, tmp_path / "base", says="resize_token_embeddings")
    assert not (tmp_path / "out").exists()
    model = tiny_dense(backbone, vocab_size=len(tokenizer))  # as the message says
    model.save_pretrained(tmp_path / "base")
    expand_checkpoint(tmp_path / "base", tmp_path / "out", PLAN)


@pytest.mark.parametrize("backbone", ["llama", "gemma3_text", "qwen2"])
def test_special_tokens_that_only_a_text_names_may_lie_beyond_the_rows_and_are_text(tmp_path, backbone):
    tokenizer = added("<image>", "<sound>")
    tiny_dense(backbone).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    expand_checkpoint(tmp_path / "base", tmp_path / "out", PLAN)
    files = [(folder / "tokenizer.json").read_bytes() for folder in (tmp_path / "base", tmp_path / "out")]
    assert backbone == "qwen2" or files[0] == files[1]
    asked = ChatModel.load(tmp_path / "out")
    ids = encode_documents(["an <image> and <sound>"], load_tokenizer(tmp_path / "out", "out"))[0]
    assert max(ids) == 256
    assert asked.tokenizer.decode(ids[:-1]) == "an <image> and <sound>"
    assert asked.tokenizer.eos_token_id == 256
    assert asked.tokenizer.all_special_tokens
    assert isinstance(asked.answer("an <image>", Answering(max_new_tokens=2)), str)


END, BOS, SEP, MASK = range(256, 260)
TEMPLATES = {
    "nothing": ("$A", [], []),
    "a beginning": ("<s> $A", [BOS], []),
    "an end": ("$A <end>", [], [END]),
    "both": ("<s> $A <end>", [BOS], [END]),
    "a separator": ("<s> $A [SEP]", [BOS], [SEP]),
    "the same one twice": ("<s> <s> $A [SEP] <end>", [BOS, BOS], [SEP, END]),
}
CASES = pytest.mark.parametrize(("template", "before", "after"), TEMPLATES.values(), ids=TEMPLATES)


def framed(template: str, bos: str | None = "<s>") -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "[SEP]", "[MASK]")])
    special = [("<end>", END), ("<s>", BOS), ("[SEP]", SEP), ("[MASK]", MASK)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, bos_token=bos, eos_token="<end>", pad_token="<end>"
    )


def plain(text: str) -> list[int]:
    return byte_tokenizer()(text).input_ids


@CASES
def test_documents_have_both_sides_and_an_end_and_prompts_the_beginning_alone(template, before, after):
    tokenizer = framed(template)
    assert frame(tokenizer) == (before, after)
    end = after if after[-1:] == [END] else [*after, END]
    assert encode_documents(["ab", ""], tokenizer) == [[*before, *plain("ab"), *end], [*before, *end]]
    assert prompt_tokens("ab", tokenizer) == [*before, *plain("ab")]
    assert _begin("ab", tokenizer) == [*(before or [BOS]), *plain("ab")]
    assert without_end(tokenizer)("ab").input_ids == [*before, *plain("ab")]
    assert tokenizer("ab").input_ids == [*before, *plain("ab"), *after]  # which stays as it was
    # What a template has begun or ended is not begun or ended again.
    text = f"{tokenizer.decode(before)}ab{tokenizer.decode(end)}"
    assert encode_documents([text], tokenizer) == [[*before, *plain("ab"), *end]]
    assert prompt_tokens(f"{tokenizer.decode(before)}ab", tokenizer) == [*before, *plain("ab")]


@CASES
def test_blocks_and_windows_begin_as_the_tokenizer_begins_texts(template, before, after):
    tokenizer, texts = framed(template), [f"document {number}" for number in range(30)]
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
def test_what_generates_gets_no_end_and_a_chat_begins_once(template, before, after, monkeypatch):
    tokenizer, asked, given = framed(template), tiny_dense("llama", vocab_size=260), []

    def generate(input_ids=None, **options):
        given.append(input_ids.tolist())
        return torch.cat([input_ids, torch.full((len(input_ids), 1), END)], 1)

    monkeypatch.setattr(asked, "generate", generate)
    ChatModel(asked, tokenizer, "model").answer("ab", Answering())
    translate(asked, tokenizer, ["ab"], 8, 8)
    tokenizer.chat_template = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    ChatModel(asked, tokenizer, "model").reply([{"role": "user", "content": "ab"}], Answering())
    assert given == [[[*before, *plain("ab")]], [[*before, *plain("ab")]], [[BOS, *plain("ab")]]]
    text = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    (document,) = encode_documents([text], tokenizer)
    assert document.count(BOS) == max(1, before.count(BOS))


SAID = "the text has special tokens, which are read as such: "


@CASES
def test_special_tokens_that_a_text_names_are_counted_and_said(template, before, after, capfd):
    say_once.cache_clear()
    tokenizer = framed(template)
    texts = ["a<end>b", "b[MASK]<end>", "plain text of some length"] * 4
    pack_texts({"el": Dataset.from_dict({"text": texts})}, tokenizer, 8, 0)
    # At the end of a text, the token stands where the tokenizer would put it.
    assert f"language 'el': {SAID}<end> 4 times, [MASK] 4 times\n" in capfd.readouterr().err
    for _ in range(2):
        evaluate_model(tiny_dense("llama", vocab_size=260), tokenizer, {"tr": texts}, 16)
    assert capfd.readouterr().err.count(f"language 'tr': {SAID}<end> 8 times, [MASK] 4 times") == 1
    texts = ["a text", "another one", ""] * 6  # of what the tokenizer puts around them nothing is said
    pack_texts({"el": Dataset.from_dict({"text": texts})}, tokenizer, 8, 0)
    text_stream(texts, tokenizer)
    assert "special tokens" not in capfd.readouterr().err


def test_the_gates_texts_have_no_end():
    tokenizer = framed("<s> <s> $A [SEP]")
    for example in gate_examples({"en": ["a text of a few words"] * 40}, tokenizer, 200, 64)["en"]:
        assert example.ids[0] == BOS != example.ids[1]  # the other one stands before every text
        assert (example.start, example.end) == (1, len(example.ids))
        assert SEP not in example.ids

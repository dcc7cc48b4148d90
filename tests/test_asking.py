"""Models that are asked: the same tokens as `generate`, the template, the language, and the base beside the result."""

import io
import json

import pytest
import torch
from conftest import byte_tokenizer, invoke, save_dense
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_moe_expand import Plan, cli, expand_checkpoint
from hf_moe_expand.cli import asking
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.inference.asking import Answer, Answering, ChatModel, ask

TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
SHORT = Answering(max_new_tokens=6)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("asking")
    save_dense(home / "base")
    expand_checkpoint(home / "base", home / "el", Plan("layer-moe", [3, 1, 2], [2], old=["en"], new=["el"]))
    model = AutoModelForCausalLM.from_pretrained(home / "el")
    torch.manual_seed(0)
    with torch.no_grad():
        for ffn in model.expanded_ffns().values():
            for part in (*ffn.experts[1:].parameters(), ffn.router.weight):
                part.normal_(std=0.5)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    model.save_pretrained(home / "chat")
    tokenizer.save_pretrained(home / "chat")
    model.save_pretrained(home / "el")
    return home


def generated(folder, text, **options):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), byte_tokenizer()
    inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        written = model.generate(**inputs, max_new_tokens=6, pad_token_id=256, **options)
    return tokenizer.decode(written[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_answers_are_those_of_generate(home):
    asked = ChatModel.load(home / "el")
    assert asked.answer("the cat", SHORT).text == generated(home / "el", "the cat", do_sample=False)
    said = asked.answer("the cat", SHORT, "en")
    assert said.text == generated(home / "el", "the cat", do_sample=False, languages="en")
    assert said.text == generated(home / "base", "the cat", do_sample=False)
    assert said.text != asked.answer("the cat", SHORT, "el").text
    assert asked.base_inside().answer("the cat", SHORT) == said
    assert (said.tokens, said.ended) == (6, False)


def test_the_checkpoints_own_generation_settings_do_not_count(home):
    """But for the tokens that end a text; beams could not stream."""
    asked = ChatModel.load(home / "el")
    plain = asked.answer("the cat", SHORT)
    asked.model.generation_config.update(repetition_penalty=9.0, num_beams=3, min_new_tokens=2)
    assert asked.answer("the cat", SHORT) == plain
    asked.model.generation_config.eos_token_id = byte_tokenizer()(plain.text[0]).input_ids[0]
    assert asked.answer("the cat", SHORT) == Answer(plain.text[0], 1, True)


def test_the_template_wraps_the_conversation(home):
    chat, plain = ChatModel.load(home / "chat"), Answering(max_new_tokens=6)
    talk = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "so"},
    ]
    said = chat.reply(talk, Answering(max_new_tokens=6, chat=True, system="be brief"))
    assert said == chat.answer("<s>be brief<u>hi<a>yes<u>so<a>", plain)
    assert chat.answer("hi", Answering(max_new_tokens=6, chat=True)) == chat.answer("<u>hi<a>", plain)


def test_drawn_answers_depend_on_the_seed_alone(home):
    asked = ChatModel.load(home / "el")
    how = Answering(max_new_tokens=12, temperature=1.0, top_p=0.9, seed=3)
    assert asked.answer("a", how) == asked.answer("a", how)
    assert asked.answer("a", how) != asked.answer("a", Answering(max_new_tokens=12, temperature=1.0, seed=4))


def test_an_answer_that_ends_by_itself_says_so(home):
    asked = ChatModel.load(home / "el")
    first = asked.tokenizer(asked.answer("the cat", SHORT).text).input_ids
    asked.model.generation_config.eos_token_id = first[0] if first else 256
    said = asked.answer("the cat", SHORT)
    assert (said.tokens, said.ended) == (1, True)


def test_models_are_asked_side_by_side(home):
    questions = ["the cat", "η γάτα"]
    found = ask([home / "el", "inside", home / "base"], questions, SHORT, ["en", "el"])
    assert list(found) == ["el", "el: base inside", "base"]
    assert found["el: base inside"] == found["base"]
    assert found["el"][0] == found["base"][0]
    assert found["el"][1] != found["base"][1]
    assert ask([ChatModel.load(home / "el")], questions[:1], SHORT, "el")["el"] == [
        ChatModel.load(home / "el").answer(questions[0], SHORT, "el")
    ]


def test_what_cannot_be_asked_is_refused(home, tmp_path):
    asked = ChatModel.load(home / "el")
    with pytest.raises(InputError, match="has no chat template, so it cannot chat"):
        asked.answer("hi", Answering(chat=True))
    with pytest.raises(InputError, match="does not know 'xx'; it knows en, el"):
        asked.answer("hi", SHORT, "xx")
    with pytest.raises(InputError, match="takes 64 positions"):
        asked.answer("x" * 64, SHORT)
    assert asked.answer("x" * 60, SHORT).tokens == 4
    with pytest.raises(InputError, match="The prompt is empty"):
        asked.answer("", SHORT)
    with pytest.raises(InputError, match="2 questions have 1 languages"):
        ask([home / "el"], ["a", "b"], SHORT, ["el"])
    with pytest.raises(InputError, match="comes first"):
        ask(["inside"], ["a"], SHORT)
    with pytest.raises(InputError, match="two models have this name"):
        ask([home / "el", home / "el"], ["a"], SHORT)
    with pytest.raises(InputError, match="is a dense model, which has no base inside"):
        ChatModel.load(home / "base").base_inside()
    groups = Plan("dmoe", [2, 1, 2], groups=[["en"], ["el"]])
    expand_checkpoint(home / "base", tmp_path / "dmoe", groups)
    with pytest.raises(InputError, match="its base is not inside"):
        ChatModel.load(tmp_path / "dmoe").base_inside()
    for wrong in ({"max_new_tokens": 0}, {"temperature": -1}, {"top_p": 0}, {"system": "x"}):
        with pytest.raises(InputError):
            Answering(**wrong)


def test_generate_on_the_command_line(home, tmp_path):
    command = [
        "generate", home / "el", "the cat", "η γάτα", "--languages", "en,el", "--base", "inside",
        "--max-new-tokens", 6, "--out", tmp_path / "out.json",
    ]  # fmt: skip
    said = CliRunner().invoke(cli.app, [str(word) for word in command]).stdout
    assert said.startswith("the cat\n  el:")
    english = said.split("\nη γάτα\n")[0].removeprefix("the cat\n")
    result, inside = english.split("  el: base inside:")
    assert result.split(":", 1)[1].split() == inside.split()
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["prompts"] == ["the cat", "η γάτα"]
    answers = {name: [Answer(**one) for one in found] for name, found in written["answers"].items()}
    assert answers == ask([home / "el", "inside"], ["the cat", "η γάτα"], SHORT, ["en", "el"])
    result = CliRunner().invoke(cli.app, ["generate", str(home / "base"), "--max-new-tokens", "3"], input="a\n\nb\n")
    assert [line for line in result.stdout.splitlines() if not line.startswith(" ")][:1] == ["a"]
    with pytest.raises(InputError, match="has no chat template"):
        invoke("generate", home / "el", "hi", "--chat")


def test_chat_on_the_command_line(home):
    command = ["chat", str(home / "chat"), "--base", "inside", "--max-new-tokens", "4", "--languages", "el"]
    lines = "hi\nand\n/new\nhi\n/languages en\n/new\nhi\n/exit\nnever\n"
    said = CliRunner().invoke(cli.app, command, input=lines).stdout
    assert "never" not in said
    turns = said.split("> hi\n")[1:]
    assert len(turns) == 3
    assert turns[0].split("> and")[0] == turns[1].split("> /languages")[0]
    replies = turns[2].split("> /exit")[0].split("chat: base inside:\n")
    assert replies[0].removeprefix("chat:\n") == replies[1]  # in an old language
    with pytest.raises(InputError, match="has no chat template"):
        invoke("chat", home / "el")


@pytest.mark.parametrize("command", [["generate", "el"], ["chat", "chat"]], ids=["generate", "chat"])
def test_an_input_that_is_not_utf_8_is_said(home, command, monkeypatch):
    verb, folder = command
    found = CliRunner().invoke(cli.app, [verb, str(home / folder)], input=b"hi\ncaf\xe9\nmore\n")
    assert isinstance(found.exception, InputError)
    assert str(found.exception) == "The input is not UTF-8 (byte 0xe9)."
    # Where the locale is C, such bytes come as surrogates.
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"hi\ncaf\xe9\n"), "utf-8", "surrogateescape"))
    with pytest.raises(InputError, match="the input is not UTF-8"):
        list(asking._lines())


@pytest.mark.parametrize(("line", "is_sent"), [("/foo", False), ("/help me", False), ("/", False), ("/etc/x ?", True)])
def test_an_unknown_command_is_not_sent(home, line, is_sent):
    found = CliRunner().invoke(cli.app, ["chat", str(home / "chat"), "--max-new-tokens", "2"], input=f"{line}\n")
    assert ("unknown command; known: /new, /languages el, /exit." in found.stderr) != is_sent
    assert (found.stdout == f"> {line}\n") != is_sent
    assert found.exit_code == 0

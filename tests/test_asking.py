"""Models that are asked, beside their base: the tokens of `generate`, the template, the share of equal answers."""

import io
import json

import pytest
from conftest import CHAT, byte_tokenizer, invoke, load, move, refused, save_dense, write_texts
from gated_models import gated_model
from typer.testing import CliRunner

from hf_moe_expand import Plan, cli, expand_checkpoint
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.evaluation import chat, report
from hf_moe_expand.evaluation.chat import QUESTIONS, check_chat
from hf_moe_expand.evaluation.report import Evaluation
from hf_moe_expand.inference import verbs_writing as verb
from hf_moe_expand.inference.asking import Answering, ChatModel

SHORT = Answering(max_new_tokens=6)
GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 256}


@pytest.fixture(scope="module")
def home(base, tmp_path_factory):
    home = tmp_path_factory.mktemp("asking")
    expand_checkpoint(base, home / "el", Plan("layer-moe", [3, 1, 2], [2], old=["en"], new=["el"]))
    move(move(home / "el", seed=0), home / "chat", seed=3)
    byte_tokenizer(CHAT).save_pretrained(home / "chat")
    return home


def generated(folder, text, **options):
    inputs = byte_tokenizer()(text, return_tensors="pt", return_token_type_ids=False)
    written = load(folder).generate(**inputs, **GREEDY, **options)
    return byte_tokenizer().decode(written[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_answers_are_those_of_generate(base, home):
    asked = ChatModel.load(home / "el")
    assert asked.answer("the cat", SHORT) == generated(home / "el", "the cat")
    said = asked.answer("the cat", SHORT, "en")
    assert said == generated(home / "el", "the cat", languages="en") == generated(base, "the cat")
    assert said != asked.answer("the cat", SHORT, "el")
    assert asked.base_inside().answer("the cat", SHORT) == said


def test_a_chat_is_judged_by_its_newest_message_alone_in_the_template():
    model, tokenizer = gated_model(exclusive=True, max_position_embeddings=512), byte_tokenizer(CHAT)
    asked, differing = ChatModel(model, tokenizer, "gated"), 0
    for number in range(24):
        newest = "".join(chr(33 + (7 * number * n + number) % 90) for n in range(20))
        messages = [{"role": "user", "content": "One."}, {"role": "assistant", "content": "Two."}]
        messages += [{"role": "user", "content": newest}]
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).input_ids
        ids = [model.generate(prompt, languages=code, **GREEDY)[0, prompt.shape[1] :] for code in ("en", "el")]
        told = [tokenizer.decode(one, skip_special_tokens=True) for one in ids]
        alone = tokenizer.apply_chat_template(messages[-1:], add_generation_prompt=True, return_tensors="pt")
        judged = int(model.judge(alone["input_ids"]))
        assert asked.reply(messages, SHORT) == told[judged]
        differing += told[judged] != told[int(model.judge(prompt))]
    assert differing


def test_the_checkpoints_own_generation_settings_do_not_count(home):
    """But for the tokens that end a text; beams could not stream."""
    asked = ChatModel.load(home / "el")
    plain = asked.answer("the cat", SHORT)
    asked.model.generation_config.update(repetition_penalty=9.0, num_beams=3, min_new_tokens=2)
    assert asked.answer("the cat", SHORT) == plain
    asked.model.generation_config.eos_token_id = byte_tokenizer()(plain[0]).input_ids[0]
    assert asked.answer("the cat", SHORT) == plain[0]


def test_the_template_wraps_the_conversation(home):
    chat = ChatModel.load(home / "chat")
    talk = [{"role": role, "content": text} for role, text in (("user", "hi"), ("assistant", "yes"), ("user", "so"))]
    said = chat.reply(talk, Answering(max_new_tokens=6, system="be brief"))
    assert said == chat.answer("<s>be brief<u>hi<a>yes<u>so<a>", SHORT)
    assert chat.reply(talk[:1], SHORT) == chat.answer("<u>hi<a>", SHORT)


def test_what_cannot_be_asked_is_refused(base, home, tmp_path):
    asked = ChatModel.load(home / "el")
    talk = [{"role": "user", "content": "hi"}]
    refused(asked.reply, talk, SHORT, says="has no chat template, so it cannot chat")
    refused(asked.answer, "hi", SHORT, "xx", says="does not know 'xx'; it knows en, el")
    refused(asked.answer, "x" * 64, SHORT, says="takes 64 positions")
    refused(asked.answer, "hi", Answering(system="be brief"), says="A system message belongs to a chat")
    refused(asked.answer, "", SHORT, says="The prompt is empty")
    refused(ChatModel.load(base).base_inside, says="is a dense model, which has no base inside")
    expand_checkpoint(base, tmp_path / "dmoe", Plan("dmoe", [2, 1, 2], groups=[["en"], ["el"]]))
    refused(ChatModel.load(tmp_path / "dmoe").base_inside, says="its base is not inside")
    for wrong in ({"max_new_tokens": 0}, {"temperature": -1}, {"top_p": 0}):
        refused(Answering, **wrong)


def chatted(*command, **given):
    return CliRunner().invoke(cli.app, ["chat", *map(str, command)], **given)


def test_a_prompt_is_answered_once_beside_the_base_inside(base, home):
    short = ("--max-new-tokens", 6)
    plain = ChatModel.load(base).answer("the cat", SHORT)  # no template: it goes on from the prompt
    found = chatted(home / "el", "--prompt", "the cat", "--languages", "en", "--base", "inside", *short)
    assert found.stdout == f"el:\n{plain}\nel: base inside:\n{plain}\n"
    chat = ChatModel.load(home / "chat")
    for more, prompt in (((), "<u>hi<a>"), (("--plain",), "hi")):
        said = chatted(home / "chat", "--prompt", "hi", *more, *short).stdout
        assert said == chat.answer(prompt, SHORT) + "\n"
    refused(invoke, "chat", home / "chat", "--plain", says="--plain belongs to --prompt")


def test_chat_on_the_command_line(home):
    lines = "hi\nand\n/new\nhi\n/languages en\n/new\nhi\n/exit\nnever\n"
    command = ("--base", "inside", "--max-new-tokens", 4, "--languages", "el")
    said = chatted(home / "chat", *command, input=lines).stdout
    assert "never" not in said
    turns = said.split("> hi\n")[1:]
    assert len(turns) == 3
    assert turns[0].split("> and")[0] == turns[1].split("> /languages")[0]
    replies = turns[2].split("> /exit")[0].split("chat: base inside:\n")
    assert replies[0].removeprefix("chat:\n") == replies[1]  # in an old language


def test_an_input_that_is_not_utf_8_is_said(home, monkeypatch):
    found = chatted(home / "chat", input=b"hi\ncaf\xe9\nmore\n")
    assert isinstance(found.exception, InputError)
    assert str(found.exception) == "The input is not UTF-8 (byte 0xe9)."
    # Where the locale is C, such bytes come as surrogates.
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), "utf-8", "surrogateescape"))
    refused(verb._read, says="the input is not UTF-8")


@pytest.mark.parametrize(("line", "is_sent"), [("/foo", False), ("/help me", False), ("/", False), ("/etc/x ?", True)])
def test_an_unknown_command_is_not_sent(home, line, is_sent):
    found = chatted(home / "chat", "--max-new-tokens", 2, input=f"{line}\n")
    assert ("unknown command; known: /new, /languages el, /exit." in found.stderr) != is_sent
    assert (found.stdout == f"> {line}\n> \n") != is_sent
    assert found.exit_code == 0


def test_a_language_that_no_model_knows_is_refused_before_one_is_loaded(home, tmp_path):
    (tmp_path / "el").mkdir()
    (tmp_path / "el" / "config.json").write_bytes((home / "el" / "config.json").read_bytes())
    for models in ([tmp_path / "el"], [home / "el", "--base", tmp_path / "el"]):
        refused(invoke, "chat", *models, "--prompt", "a", "--languages", "de", says=r"el: .*'de'")


ASKED = ["What is water?", "Who are you?"]


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """A base with a chat template, an expansion of it whose new experts changed, and a base without a template."""
    chats = tmp_path_factory.mktemp("chat")
    for name in ("plain", "base"):
        save_dense(chats / name)
    byte_tokenizer(CHAT).save_pretrained(chats / "base")
    expand_checkpoint(chats / "base", chats / "same", Plan("moe-lpr", [2, 2, 2], old=["en"], new=["el"]))
    move(chats / "same", chats / "other")
    return chats


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(chat, "_TOKENS", 6)


def test_a_model_answers_as_its_base_before_training_and_told_its_language(chats):
    found = check_chat(str(chats / "base"), str(chats / "same"), "en", ASKED)
    assert found.base == found.result == found.told
    assert found.equal == 1.0
    found = check_chat(str(chats / "base"), str(chats / "other"), "en", ASKED)
    assert found.told == found.base != found.result
    assert found.equal == sum(a == b for a, b in zip(found.base, found.result, strict=True)) / 2 < 1
    assert check_chat(str(chats / "base"), str(chats / "base"), "en", ASKED).told is None
    assert check_chat(str(chats / "base"), str(chats / "other"), "de", ASKED).told is None


def test_a_base_without_a_template_cannot_be_asked(chats, tmp_path, monkeypatch):
    assert check_chat(str(chats / "plain"), str(chats / "other"), "en", ASKED) is None
    assert check_chat(str(chats / "base"), str(chats / "plain"), "en", ASKED) is None
    monkeypatch.setattr(report, "score_models", None)  # nothing is scored
    with pytest.raises(InputError, match=r"plain: its tokenizer has no chat template, so it cannot answer --questions"):
        invoke("evaluate", chats / "plain", chats / "other", "--questions", "en", "--out", tmp_path / "e.json")


def test_scores_are_kept_where_a_question_fails(chats, tmp_path):
    write_texts(tmp_path / "en.jsonl", ["the cat sat on the mat"])
    asked = write_texts(tmp_path / "asked.jsonl", ["long " * 400])
    with pytest.raises(InputError, match="the prompt has"):
        invoke("evaluate", chats / "base", chats / "other", "--data", f"en={tmp_path / 'en.jsonl'}",
               "--questions", f"en={asked}", "--block-size", 32, "--out", tmp_path / "e.json")  # fmt: skip
    assert Evaluation.from_json(tmp_path / "e.json").models["base"]["en"].bits_per_byte > 0


def test_evaluate_asks_from_a_file_or_the_ten_of_ours(chats, tmp_path):
    write_texts(tmp_path / "asked.jsonl", ASKED)
    out = tmp_path / "e.json"
    said = invoke(
        "evaluate", chats / "base", chats / "other", "--questions", f"en={tmp_path / 'asked.jsonl'}", "--out", out
    )
    kept = json.loads(out.read_text())
    assert kept["chats"][0]["questions"] == ASKED
    assert kept["equal_answers"] == {"en": Evaluation.from_json(out).chats[0].equal}
    assert ASKED[1] in said
    assert "chat in en: 0% of the answers are the base's own" in said
    invoke("evaluate", chats / "base", chats / "same", "--questions", "en", "--out", out, "--overwrite")
    assert Evaluation.from_json(out).chats[0].questions == list(QUESTIONS["en"])
    assert json.loads(out.read_text())["equal_answers"] == {"en": 1.0}
    with pytest.raises(InputError, match="--questions fr: there are questions in en; give fr=FILE"):
        invoke("evaluate", chats / "base", chats / "same", "--questions", "fr", "--out", tmp_path / "f.json")
    with pytest.raises(InputError, match="--questions compares answers: give the base first"):
        invoke("evaluate", chats / "base", "--questions", "en", "--out", tmp_path / "f.json")

"""The chat check: a base and the model made of it answer the same questions; the share of equal answers is a number."""

import json

import pytest
from conftest import CHAT, byte_tokenizer, invoke, move, save_dense, write_texts

from hf_moe_expand import Plan, expand_checkpoint
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.evaluation import chat, report
from hf_moe_expand.evaluation.chat import QUESTIONS, ChatCheck, check_chat
from hf_moe_expand.evaluation.report import Evaluation
from hf_moe_expand.report.page import make_page

ASKED = ["What is water?", "Who are you?"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A base with a chat template, an expansion of it whose new experts changed, and a base without a template."""
    home = tmp_path_factory.mktemp("chat")
    for name in ("plain", "base"):
        save_dense(home / name)
    byte_tokenizer(CHAT).save_pretrained(home / "base")
    expand_checkpoint(home / "base", home / "same", Plan("moe-lpr", [2, 2, 2], old=["en"], new=["el"]))
    move(home / "same", home / "other")
    return home


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(chat, "_TOKENS", 6)


def test_a_model_answers_as_its_base_before_training_and_told_its_language(home):
    found = check_chat(str(home / "base"), str(home / "same"), "en", ASKED)
    assert found.base == found.result == found.told
    assert found.equal == 1.0
    found = check_chat(str(home / "base"), str(home / "other"), "en", ASKED)
    assert found.told == found.base != found.result
    assert found.equal == sum(a == b for a, b in zip(found.base, found.result, strict=True)) / 2 < 1
    assert check_chat(str(home / "base"), str(home / "base"), "en", ASKED).told is None
    assert check_chat(str(home / "base"), str(home / "other"), "de", ASKED).told is None


def test_a_base_without_a_template_cannot_be_asked(home, tmp_path, monkeypatch):
    assert check_chat(str(home / "plain"), str(home / "other"), "en", ASKED) is None
    assert check_chat(str(home / "base"), str(home / "plain"), "en", ASKED) is None
    monkeypatch.setattr(report, "score_models", None)  # nothing is scored
    with pytest.raises(InputError, match=r"plain: its tokenizer has no chat template, so it cannot answer --questions"):
        invoke("evaluate", home / "plain", home / "other", "--questions", "en", "--out", tmp_path / "e.json")


def test_scores_are_kept_where_a_question_fails(home, tmp_path):
    write_texts(tmp_path / "en.jsonl", ["the cat sat on the mat"])
    asked = write_texts(tmp_path / "asked.jsonl", ["long " * 400])
    with pytest.raises(InputError, match="the prompt has"):
        invoke("evaluate", home / "base", home / "other", "--data", f"en={tmp_path / 'en.jsonl'}",
               "--questions", f"en={asked}", "--block-size", 32, "--out", tmp_path / "e.json")  # fmt: skip
    assert Evaluation.from_json(tmp_path / "e.json").models["base"]["en"].bits_per_byte > 0


def test_evaluate_asks_from_a_file_or_the_ten_of_ours(home, tmp_path):
    write_texts(tmp_path / "asked.jsonl", ASKED)
    out = tmp_path / "e.json"
    said = invoke(
        "evaluate", home / "base", home / "other", "--questions", f"en={tmp_path / 'asked.jsonl'}", "--out", out
    )
    kept = json.loads(out.read_text())
    assert kept["chats"][0]["questions"] == ASKED
    assert kept["equal_answers"] == {"en": Evaluation.from_json(out).chats[0].equal}
    assert ASKED[1] in said
    assert "chat in en: 0% of the answers are the base's own" in said
    invoke("evaluate", home / "base", home / "same", "--questions", "en", "--out", out, "--overwrite")
    assert Evaluation.from_json(out).chats[0].questions == list(QUESTIONS["en"])
    assert json.loads(out.read_text())["equal_answers"] == {"en": 1.0}
    with pytest.raises(InputError, match="--questions fr: there are questions in en; give fr=FILE"):
        invoke("evaluate", home / "base", home / "same", "--questions", "fr", "--out", tmp_path / "f.json")
    with pytest.raises(InputError, match="--questions compares answers: give the base first"):
        invoke("evaluate", home / "base", "--questions", "en", "--out", tmp_path / "f.json")


def test_the_page_shows_the_answers_side_by_side(tmp_path):
    (tmp_path / "run").mkdir()
    check = ChatCheck("en", ["Who?", "What?"], ["I.", "<b>it</b>"], ["I.", "that"], ["I.", "<b>it</b>"])
    Evaluation(["en"], ["el"], chats=[check]).to_json(tmp_path / "run" / "evaluation.json")
    page = make_page(tmp_path / "run")
    assert "In en, 50 % of the result’s answers are the base’s own" in page
    assert '<th scope="col">told en</th>' in page
    assert "<td>&lt;b&gt;it&lt;/b&gt;</td>" in page
    assert "<b>it</b>" not in page

"""Translations against a slow, unbatched greedy loop; chrF++ and the prompts of known text."""

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import byte_tokenizer, invoke, refused, save_dense, tiny_dense, write_texts
from transformers import GenerationConfig, Qwen2Config

from hf_moe_expand import Plan, expand_checkpoint
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.data.sources import LanguageText, language_name
from hf_moe_expand.evaluation import translation
from hf_moe_expand.evaluation.scoring_settings import TranslationSettings
from hf_moe_expand.evaluation.translation import (
    evaluate_translation,
    load_parallel,
    parse_pairs,
    translate,
    translation_prompt,
)

pytest.importorskip("sacrebleu", reason="the extra `eval` is not installed")
pytest.importorskip("language_data", reason="the extra `eval` is not installed")

PROMPTS = ["one", "a longer prompt than the others\nof two lines", "two and three", "έξι", "7"]
END = 256
AMOUNTS = {"newline": 1.0, "end of text": 1.5}  # of an end's likelihood: some texts end within 12 tokens, some do not


def newline_id() -> int:
    return byte_tokenizer()("\n").input_ids[0]


def slow_continuation(model, tokenizer, prompt, count):
    """One token after the other, each from a forward pass of its own; the text up to a newline or an end of text."""
    ids, new = tokenizer(prompt).input_ids, []
    while len(new) < count:
        with torch.no_grad():
            token = model(torch.tensor([ids + new])).logits[0, -1].argmax().item()
        if token == tokenizer.eos_token_id:
            break
        new.append(token)
        if "\n" in tokenizer.decode(new):
            break
    return tokenizer.decode(new).split("\n")[0].strip(), len(new) == count and "\n" not in tokenizer.decode(new)


def letters_until(token: int, amount: float):
    """A tiny model that writes ASCII letters, and a token that ends the text the likelier the larger `amount` is."""
    model = tiny_dense("qwen2", tie_word_embeddings=False, max_position_embeddings=256)
    head = torch.nn.Linear(32, 257)
    with torch.no_grad():
        head.weight.copy_(model.lm_head.weight)
        head.bias.fill_(-1e4)
        head.bias[byte_tokenizer()("abcdefghijklmnopqrstuvwxyz").input_ids] = 0
        head.bias[token] = amount
    model.lm_head = head
    return model


@pytest.mark.parametrize("ending", ["newline", "end of text"])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_batches_give_what_one_token_after_the_other_gives(ending, batch_size):
    tokenizer = byte_tokenizer()
    model = letters_until(newline_id() if ending == "newline" else END, AMOUNTS[ending])
    expected = [slow_continuation(model, tokenizer, prompt, 12) for prompt in PROMPTS]
    assert len({text for text, _ in expected}) > 2
    assert 0 < sum(cut for _, cut in expected) < len(PROMPTS)  # both kinds of end occur
    found, cut = translate(model, tokenizer, PROMPTS, batch_size, max_new_tokens=12)
    assert found == [text for text, _ in expected]
    assert cut == sum(cut for _, cut in expected)


def test_the_checkpoints_own_generation_settings_do_not_count():
    tokenizer, model = byte_tokenizer(), letters_until(END, AMOUNTS["end of text"])
    plain, _ = translate(model, tokenizer, PROMPTS, 2, 12)
    own = GenerationConfig(do_sample=True, temperature=5.0, repetition_penalty=3.0, num_beams=2, eos_token_id=END)
    model.generation_config = own
    assert translate(model, tokenizer, PROMPTS, 2, 12)[0] == plain
    assert model.generation_config is own
    # But what ends a text does: here the token that the first continuation begins with.
    first = max(plain, key=len)
    model.generation_config = GenerationConfig(eos_token_id=[END, tokenizer(first).input_ids[0]])
    assert translate(model, tokenizer, PROMPTS, 2, 12)[0][plain.index(first)] == ""


def test_prompts():
    names = {"el": "Greek", "zho_Hans": "Chinese (Simplified)", "pt-BR": "Portuguese (Brazil)"}
    assert {code: language_name(code) for code in names} == names
    assert translation_prompt(("en", "el"), "Two.") == "English: Two. → Greek:"
    assert translation_prompt(("el", "en"), "Δύο.", [("Ένα.", "One."), ("Μηδέν.", "Nil.")]) == (
        "Greek: Ένα. → English: One.\nGreek: Μηδέν. → English: Nil.\nGreek: Δύο. → English:"
    )
    refused(language_name, "qx", says="'qx' is not a language code")


MODEL = SimpleNamespace(config=Qwen2Config(max_position_embeddings=512))  # for `rigged`


@pytest.fixture
def rigged(monkeypatch):
    """`translate` that answers from a list, and the prompts it was given."""
    seen = SimpleNamespace(prompts=[], answers=[])

    def answer(model, tokenizer, prompts, batch_size, max_new_tokens):
        seen.prompts.append(prompts)
        return seen.answers[: len(prompts)], 0

    monkeypatch.setattr(translation, "translate", answer)
    return seen


def test_examples_are_in_the_prompt_and_not_scored(rigged):
    texts = {"en": ["zero", "one", "two", "three"], "el": ["μηδέν", "ένα", "δύο", "τρία"]}
    rigged.answers = ["δύο", "τρία"]
    score = evaluate_translation(MODEL, byte_tokenizer(), texts, [("en", "el")], TranslationSettings(shots=2))["en-el"]
    shown = "English: zero → Greek: μηδέν\nEnglish: one → Greek: ένα\n"
    assert rigged.prompts == [[shown + "English: two → Greek:", shown + "English: three → Greek:"]]
    assert (score.chrf, score.sentences) == (pytest.approx(100), 2)
    evaluate_translation(MODEL, byte_tokenizer(), texts, [("en", "el")], TranslationSettings(shots=1, limit=1))
    assert rigged.prompts[-1] == ["English: zero → Greek: μηδέν\nEnglish: one → Greek:"]
    with pytest.raises(InputError, match="4 of 4 sentences are examples"):
        evaluate_translation(MODEL, byte_tokenizer(), texts, [("en", "el")], TranslationSettings(shots=4))
    for wrong in ({"shots": -1}, {"limit": 0}, {"batch_size": 0}, {"max_new_tokens": 0}):
        refused(TranslationSettings, **wrong, says="greater than or equal to")


def test_chrf_plus_plus_by_hand(rigged):
    # Characters without spaces `abc` against `abd`: precision and recall are 2/3, 1/2 and 0 for one, two and three
    # characters; the one word is wrong: 0. Longer n-grams do not occur and do not count.
    rigged.answers = ["abc"]
    texts = {"en": ["x"], "el": ["abd"]}
    score = evaluate_translation(MODEL, byte_tokenizer(), texts, [("en", "el")], TranslationSettings())["en-el"]
    assert score.chrf == pytest.approx(100 * (2 / 3 + 1 / 2 + 0 + 0) / 4, abs=1e-6)
    assert "nc:6|nw:2" in score.signature
    assert "version:" in score.signature


def test_parallel_text(tmp_path):
    def source(code, name, content):
        (tmp_path / name).write_text(content, "utf-8")
        return LanguageText(code, str(tmp_path / name))

    en = source("en", "en.txt", "One.\nTwo  words.\n")
    texts = load_parallel({"en": en, "el": source("el", "el.jsonl", '{"text": "Ένα."}\n{"text": "Δύο\\nλέξεις."}\n')})
    assert texts == {"en": ["One.", "Two words."], "el": ["Ένα.", "Δύο λέξεις."]}
    both = '{"translation": {"en": "One.", "el": "Ένα."}}\n{"translation": {"en": "Two.", "el": "Δύο."}}\n'
    with pytest.raises(InputError, match="rows with `translation`, which make documents of both directions"):
        load_parallel({"en": en, "el": source("el", "both.jsonl", both)})
    with pytest.raises(InputError, match=r"en.txt has 2 sentences, \S*el.txt has 3"):
        load_parallel({"en": en, "el": source("el", "el.txt", "a\nb\nc\n")})
    with pytest.raises(InputError, match=r"el.txt: 2 of 3 lines are text in 'el'"):
        load_parallel({"en": en, "el": source("el", "el.txt", "a\n\nc\n")})
    refused(load_parallel, {"en": en, "el": source("el", "el.txt", "")}, says="el.txt: empty")


def test_pairs():
    languages = ["en", "zh-Hant", "el"]
    assert parse_pairs([], languages) == [("en", "zh-Hant"), ("zh-Hant", "en"), ("en", "el"), ("el", "en")]
    assert parse_pairs(["zh-Hant-el", "en-el"], languages) == [("zh-Hant", "el"), ("en", "el")]
    for arguments, known, message in [
        (["en-tr"], languages, "'en-tr' is not a pair of two of the languages en, zh-Hant, el, such as en-zh-Hant"),
        (["en-en"], languages, "'en-en' is not a pair"),
        (["en-el", "en-el"], languages, "given twice"),
        ([], ["en"], "at least two languages"),
    ]:
        refused(parse_pairs, arguments, known, says=message)


def test_each_model_is_checked_before_the_first_translates(tmp_path, monkeypatch):
    monkeypatch.setattr(translation, "translate", lambda *_: pytest.fail("has translated"))
    long, short = (save_dense(tmp_path / str(size), max_position_embeddings=size) for size in (512, 64))
    data = [f"{code}={write_texts(tmp_path / f'{code}.jsonl', ['the sea'])}" for code in ("en", "el")]
    with pytest.raises(InputError, match=r"64: A prompt of .* and 60 new ones do not fit the model's 64 positions"):
        invoke("evaluate", long, short, "--pairs", "all", "--data", data[0], "--data", data[1], "--max-new-tokens",
               "60", "--out", tmp_path / "scores.json")  # fmt: skip


def test_the_command(tmp_path):
    base, folder, out = save_dense(tmp_path / "base", max_position_embeddings=1024), tmp_path / "texts", "scores.json"
    expand_checkpoint(base, tmp_path / "el", Plan("moe-lpr", [3, 3, 3], [0], old=["en"], new=["el"]))
    texts = {"en": ["The sea.", "A cat sits.", "Two."], "el": ["Η θάλασσα.", "Μια γάτα.", "Δύο."]}
    data = [f"--data={code}={write_texts(tmp_path / f'{code}.jsonl', of)}" for code, of in texts.items()]
    more = ["--shots", 1, "--limit", 2, "--max-new-tokens", 5, "--batch-size", 2, "--texts", folder]
    said = invoke("evaluate", base, tmp_path / "el", "--pairs", "all", *data, *more, "--out", tmp_path / out)
    assert "en-el" in said
    assert "mean" in said
    written = json.loads((tmp_path / out).read_text("utf-8"))
    assert (written["metric"], written["shots"], written["max_new_tokens"]) == ("chrF++", 1, 5)
    assert list(written["models"]) == ["base", "el"]
    files = {str(file.relative_to(folder)): file.read_text("utf-8").splitlines() for file in folder.rglob("*.txt")}
    pairs = {"en-el": ("en", "el"), "el-en": ("el", "en")}
    expected = {f"{pair}.source.txt": texts[source][1:] for pair, (source, _) in pairs.items()}
    expected |= {f"{pair}.reference.txt": texts[target][1:] for pair, (_, target) in pairs.items()}
    for model, scores in written["models"].items():
        assert list(scores) == list(pairs)
        assert all("nw:2" in score["signature"] for score in scores.values())
        expected |= {f"{model}/{pair}.txt": score["translations"] for pair, score in scores.items()}
    assert files == expected
    again = (base, "--pairs", "en-el", *data, *more, "--out", tmp_path / "again.json")
    refused(invoke, "evaluate", *again, says=r"source.txt: exists already")
    # Right after expansion the model computes what the base did, greedy continuations included.
    assert written["models"]["el"] == written["models"]["base"]

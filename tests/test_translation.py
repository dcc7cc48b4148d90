"""Translations against a slow, unbatched greedy loop; chrF++; sentences as tokens for each kind of model."""

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import TABLES, byte_tokenizer, invoke, refused, save_dense, tiny_dense, write_texts
from datasets import Dataset
from encoder_decoders import (
    SENTENCES,
    byt5_tokenizer,
    mbart50_tokenizer,
    mbart_tokenizer,
    nllb_tokenizer,
    plain_tokenizer,
    t5_tokenizer,
)
from transformers import GenerationConfig, Qwen2Config

from hf_moe_expand import Plan, expand_checkpoint, pack_pairs
from hf_moe_expand.analysis.reading import side_batches
from hf_moe_expand.data.pairs import PairEncoder, SentencePair, check_pairs, pairs_of, sentence_pairs
from hf_moe_expand.data.rows import language_name
from hf_moe_expand.data.sources import LanguageText
from hf_moe_expand.evaluation import translation
from hf_moe_expand.evaluation.perplexity import pair_stream
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
END, NEWLINE = 256, byte_tokenizer()("\n").input_ids[0]
AMOUNTS = {NEWLINE: 1.0, END: 1.5}  # of an end's likelihood: some texts end within 12 tokens, some do not


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


def letters_until(token: int):
    """A tiny model that writes ASCII letters, and a token that ends the text."""
    model = tiny_dense("qwen2", tie_word_embeddings=False, max_position_embeddings=256)
    head = torch.nn.Linear(32, 257)
    with torch.no_grad():
        head.weight.copy_(model.lm_head.weight)
        head.bias.fill_(-1e4)
        head.bias[byte_tokenizer()("abcdefghijklmnopqrstuvwxyz").input_ids] = 0
        head.bias[token] = AMOUNTS[token]
    model.lm_head = head
    return model


@pytest.mark.parametrize("ending", AMOUNTS, ids=["newline", "end of text"])
def test_batches_give_what_one_token_after_the_other_gives(ending):
    tokenizer, model = byte_tokenizer(), letters_until(ending)
    expected = [slow_continuation(model, tokenizer, prompt, 12) for prompt in PROMPTS]
    assert len({text for text, _ in expected}) > 2
    assert 0 < sum(cut for _, cut in expected) < len(PROMPTS)  # both kinds of end occur
    for batch_size in (1, 2, 5):
        found, count = translate(model, tokenizer, PROMPTS, batch_size, max_new_tokens=12)
        assert found == [text for text, _ in expected]
        assert count == sum(cut for _, cut in expected)


def test_the_checkpoints_own_generation_settings_do_not_count():
    tokenizer, model = byte_tokenizer(), letters_until(END)
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
    wanted = "Greek: Ένα. → English: One.\nGreek: Μηδέν. → English: Nil.\nGreek: Δύο. → English:"
    assert translation_prompt(("el", "en"), "Δύο.", [("Ένα.", "One."), ("Μηδέν.", "Nil.")]) == wanted
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

    def score(**given):
        found = evaluate_translation(MODEL, byte_tokenizer(), texts, [("en", "el")], TranslationSettings(**given))
        return found["en-el"]

    whole = score(shots=2)
    shown = "English: zero → Greek: μηδέν\nEnglish: one → Greek: ένα\n"
    assert rigged.prompts == [[shown + "English: two → Greek:", shown + "English: three → Greek:"]]
    assert (whole.chrf, whole.sentences) == (pytest.approx(100), 2)
    score(shots=1, limit=1)
    assert rigged.prompts[-1] == ["English: zero → Greek: μηδέν\nEnglish: one → Greek:"]
    refused(score, shots=4, says="4 of 4 sentences are examples")
    for wrong in ({"shots": -1}, {"limit": 0}):
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
    for name, content, said in (
        ("both.jsonl", both, r"4 texts in 'el' on 2 lines: .* no rows with `translation`"),
        ("el.txt", "a\nb\nc\n", r"en.txt has 2 sentences, \S*el.txt has 3"),
        ("el.txt", "a\n\nc\n", "el.txt: 2 texts in 'el' on 3 lines"),
        ("el.txt", "", r"el.txt: holds no text.*\(empty\)"),
    ):
        refused(load_parallel, {"en": en, "el": source("el", name, content)}, says=said)


def test_pairs():
    languages = ["en", "zh-Hant", "el"]
    assert parse_pairs([], languages) == [("en", "zh-Hant"), ("zh-Hant", "en"), ("en", "el"), ("el", "en")]
    assert parse_pairs(["zh-Hant-el", "en-el"], languages) == [("zh-Hant", "el"), ("en", "el")]
    for arguments, known, message in [
        (["en-tr"], languages, "'en-tr' is not a pair of the languages en, zh-Hant, el"),
        (["en-en"], languages, "'en-en' is not a pair"),
        (["en-el", "en-el"], languages, "given twice"),
        ([], ["en"], "at least two languages"),
    ]:
        refused(parse_pairs, arguments, known, says=message)


def test_each_model_is_checked_before_the_first_translates(tmp_path, monkeypatch):
    monkeypatch.setattr(translation, "translate", lambda *_: pytest.fail("has translated"))
    long, short = (save_dense(tmp_path / str(size), max_position_embeddings=size) for size in (512, 64))
    data = [f"{code}={write_texts(tmp_path / f'{code}.jsonl', ['the sea'])}" for code in ("en", "el")]
    command = ("evaluate", long, short, "--pairs", "all", *(f"--data={one}" for one in data), "--max-new-tokens", "60")
    said = "64: .* tokens and 60 new ones do not fit the model's 64 positions"
    refused(invoke, *command, "--out", tmp_path / "scores.json", says=said)


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
    refused(invoke, "evaluate", *again, says=r"texts: exists already")
    # Right after expansion the model computes what the base did, greedy continuations included.
    assert written["models"]["el"] == written["models"]["base"]


PAIR = SentencePair("the sea", "η θάλασσα", "en", "el")


def test_the_tokenizer_s_own_codes_stand_where_it_puts_them():
    tokenizer = nllb_tokenizer()
    encoder = PairEncoder(tokenizer)
    ((source,), (target,)) = encoder.encode([PAIR])
    assert tokenizer.convert_ids_to_tokens([source[0], target[0], target[-1]]) == ["eng_Latn", "ell_Grek", "</s>"]
    assert encoder.start(("en", "el")) == {"forced_bos_token_id": tokenizer.convert_tokens_to_ids("ell_Grek")}
    assert encoder.start(("el", "en")) == {"forced_bos_token_id": tokenizer.convert_tokens_to_ids("eng_Latn")}
    tokenizer = mbart50_tokenizer()
    ((source,), (target,)) = PairEncoder(tokenizer).encode([SentencePair("the sea", "el mar", "en", "es")])
    assert tokenizer.convert_ids_to_tokens([source[0], target[0]]) == ["en_XX", "es_XX"]


@pytest.mark.parametrize("made", [nllb_tokenizer, mbart_tokenizer, mbart50_tokenizer])
def test_the_tokenizer_keeps_its_own_languages(made, tmp_path):
    """Else a tokenizer that is saved after a training would read every text as the last pair's language."""
    tokenizer = made()
    before = tokenizer("the sea").input_ids
    encoder = PairEncoder(tokenizer)
    encoder.encode([SentencePair("el mar", "the sea", "es", "en")])
    encoder.start(("es", "en"))
    assert tokenizer("the sea").input_ids == before
    tokenizer.save_pretrained(tmp_path / "after")
    made().save_pretrained(tmp_path / "before")
    after, before = (tmp_path / name / "tokenizer_config.json" for name in ("after", "before"))
    assert after.read_bytes() == before.read_bytes()


def test_without_codes_the_task_stands_in_the_text():
    for tokenizer in (t5_tokenizer(), byt5_tokenizer()):
        encoder = PairEncoder(tokenizer)
        ((source,), (target,)) = encoder.encode([PAIR])
        assert source == tokenizer("translate English to Greek: the sea").input_ids
        assert target == tokenizer("η θάλασσα").input_ids
        assert encoder.start(("en", "el")) == {}


def test_marian_takes_the_target_s_code_or_none():
    tokenizer = plain_tokenizer()
    tokenizer.supported_language_codes = []
    assert PairEncoder(tokenizer).encode([PAIR])[0] == [tokenizer("the sea").input_ids]
    tokenizer.supported_language_codes = [">>el<<", ">>ell<<"]
    assert PairEncoder(tokenizer).encode([PAIR])[0] == [tokenizer(">>el<< the sea").input_ids]
    PairEncoder(tokenizer).check([("hi", "el")])  # a source needs no code
    refused(PairEncoder(tokenizer).check, [("hi", "el"), ("el", "hi")], says="has no code for 'hi'")


def english_and_greek():
    rows = zip(SENTENCES["en"], SENTENCES["el"], strict=True)
    return pairs_of([{"en": english, "el": greek} for english, greek in rows], "el")


def one_way_tokenizer(reads, writes, codes=()):
    tokenizer = plain_tokenizer()
    tokenizer.supported_language_codes = list(codes)
    tokenizer.source_lang, tokenizer.target_lang = reads, writes
    return tokenizer


@pytest.mark.parametrize(("reads", "writes", "codes", "kept"), TABLES["directions"])
def test_marian_trains_and_scores_only_the_directions_of_the_model(reads, writes, codes, kept):
    tokenizer = one_way_tokenizer(reads, writes, codes)
    pairs = english_and_greek()
    found = pack_pairs({"el": pairs}, tokenizer, 64, 0, languages=["en", "el"]).dataset
    names = {(0, 1): ("en", "el"), (1, 0): ("el", "en")}
    assert {names[tuple(ids)] for ids in found["language_ids"]} == {tuple(pair) for pair in kept}
    assert len(found) == len(pairs) * len(kept) // 2
    stream = pair_stream("el", sentence_pairs(pairs), tokenizer, None)
    assert len(stream.pairs) == len(found)


def test_a_direction_that_marian_does_not_translate_is_refused():
    tokenizer = one_way_tokenizer("en", "de")
    assert PairEncoder(tokenizer).translates(("el", "de"))
    said = "de-en is not a direction of this model: the model reads 'en' and writes 'de'"
    refused(PairEncoder(tokenizer).check, [("en", "de"), ("de", "en")], says=said)
    wrong = Dataset.from_list([SentencePair("das Meer", "the sea", "de", "en")._asdict()])
    refused(pack_pairs, {"de": wrong}, tokenizer, 64, 0, says="Language 'de': no sentence pair in a direction of the")
    said = "Language 'el' has no sentence as a source, and both sides are measured: the mo"
    refused(side_batches, "el", sentence_pairs(english_and_greek()), tokenizer, 4, 2, None, says=said)


def test_codes_in_front_of_the_source_name_the_target():
    """MADLAD-400's tokenizer."""
    tokenizer = plain_tokenizer()
    tokenizer.add_tokens(["<2el>", "<2zh_Latn>"])
    encoder = PairEncoder(tokenizer)
    ((source,), (target,)) = encoder.encode([PAIR])
    assert source == tokenizer("<2el> the sea").input_ids
    assert target == tokenizer("η θάλασσα").input_ids
    refused(encoder.check, [("el", "hi")], says="has no code for 'hi'")


def test_codes_are_found_by_language_and_script():
    norwegian = PairEncoder(nllb_tokenizer(["nob_Latn", "nno_Latn"]))
    assert [norwegian._name(code) for code in ("no", "nb", "nn")] == ["nob_Latn", "nob_Latn", "nno_Latn"]
    encoder = PairEncoder(nllb_tokenizer())
    assert [encoder._name(code) for code in ("zh", "zh-Hant", "zho_Hans", "en", "es", "ell_Grek")] == [
        "zho_Hans", "zho_Hant", "zho_Hans", "eng_Latn", "spa_Latn", "ell_Grek",
    ]  # fmt: skip
    refused(encoder.check, [("hi", "en")], says=r"has no code for 'hi', so the model cannot be told .* it has ell_Grek")


@pytest.mark.parametrize("row", [{"en": "the sea", "de": "das Meer"}, {"de": "das Meer", "en": "the sea"}])
def test_a_recipe_s_text_is_checked_in_the_model_s_direction(tmp_path, row):
    """A row gives both directions, and the one that the model does not translate is no reason to refuse it."""
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"translation": row}))
    for language in ("en", "de"):
        text = LanguageText(language, str(tmp_path / "pairs.jsonl"))
        check_pairs(text, one_way_tokenizer("de", "en"))

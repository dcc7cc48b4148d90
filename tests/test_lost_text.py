"""Text that a tokenizer loses: what counts, and where it is said, marked and refused."""

import gzip
import json
import re
import unicodedata

import pytest
from conftest import byte_tokenizer, refused, tiny_dense, write_texts
from datasets import Dataset
from encoder_decoders import SENTENCES, byt5_tokenizer, mbart50_tokenizer, mbart_tokenizer, nllb_tokenizer, t5_tokenizer
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from hf_moe_expand import Plan, PostPretrainConfig, expand_checkpoint, train_stage
from hf_moe_expand.data.lost import check_lost, lost_text, token_line
from hf_moe_expand.data.packing import pack_texts
from hf_moe_expand.data.pairs import PairEncoder, SentencePair
from hf_moe_expand.data.sources import LanguageText
from hf_moe_expand.evaluation.perplexity import LanguageScore, text_stream
from hf_moe_expand.evaluation.report import Evaluation
from hf_moe_expand.runs.pipeline import validate_recipe
from hf_moe_expand.runs.recipe import Recipe

ENGLISH = "the quick brown fox jumps over the lazy dog"
GREEK = "ξεσκεπάζω την ψυχοφθόρα βδελυγμία"


def unigram(known=ENGLISH, normalizer=None, pieces=()):
    """SentencePiece's kind, of single characters: no bytes to fall back on."""
    letters = dict.fromkeys("▁" + known.replace(" ", ""))
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("</s>", 0.0), *((one, -1.0) for one in letters)], 0))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


def fallback():
    """Llama's kind, with bytes to fall back on and a space in front."""
    tokens = ["<unk>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *dict.fromkeys(ENGLISH.replace(" ", ""))]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    ])  # fmt: skip
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


def wordpiece(**options):
    """BERT's kind."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(**options)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator([f"{ENGLISH} {GREEK} {ENGLISH.upper()} Ξ é café È"] * 5, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


def dropping():
    """BPE without an unknown token, which drops what it does not know."""
    vocabulary = {one: number for number, one in enumerate(dict.fromkeys(ENGLISH))}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocabulary, [])))


def normalised(normalizer):
    tokenizer = byte_tokenizer().backend_tokenizer
    tokenizer.normalizer = normalizer
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


nfd = lambda text: unicodedata.normalize("NFD", text)  # noqa: E731
KEPT = {
    "bytes": (byte_tokenizer, GREEK), "a space in front, bytes to fall back on": (fallback, f"{GREEK} 👍 ไทย"),
    "ByT5, a slow tokenizer": (ByT5Tokenizer, GREEK), "known letters": (unigram, ENGLISH),
    "NFC": (lambda: normalised(normalizers.NFC()), nfd(GREEK)), "NFD": (lambda: normalised(normalizers.NFD()), GREEK),
    "NFKC": (lambda: normalised(normalizers.NFKC()), "ﬁne ① ｆｕｌｌ … x²"),
    "white space": (lambda: normalised(normalizers.Replace(Regex(r"\s+"), " ")), "one\n\n  two\tthree\u00a0four"),
    "control characters": (lambda: normalised(normalizers.Replace("\x00", "")), "a\x00b"),
    "cased BERT": (lambda: wordpiece(lowercase=False), f"{GREEK} café"),
    "a text that writes the unknown token": (unigram, "the <unk> fox"),
    "special tokens in a text": (byte_tokenizer, "one<end>two"),
}  # fmt: skip
# The bytes that are lost, of all.
LOST = {
    "unknown letters": (unigram, f"fox {GREEK}", (60, 63)), "one letter": (unigram, "fox é", (2, 5)),
    "dropped letters": (dropping, "fox éé", (4, 7)),
    "accents": (lambda: wordpiece(lowercase=False, strip_accents=True), "café é", (4, 7)),
    "marks": (lambda: normalised(normalizers.StripAccents()), "कु कि", (6, 12)),
    "capitals": (lambda: normalised(normalizers.Lowercase()), "Fox FOX", (4, 6)),
    "Greek capitals": (lambda: normalised(normalizers.Lowercase()), "Ξένος", (2, 10)),
    "a script": (lambda: wordpiece(lowercase=False), "ไทย", (9, 9)),
    "joiners": (lambda: normalised(normalizers.Replace("\u200d", "")), "क\u200dष", (3, 9)),
    "a replaced letter": (lambda: normalised(normalizers.Replace("ß", "ss")), "groß", (2, 5)),
}  # fmt: skip


@pytest.mark.parametrize("case", KEPT)
def test_what_only_another_form_has_is_not_lost(case):
    make, text = KEPT[case]
    assert lost_text([text], make()).lost == 0


@pytest.mark.parametrize("case", LOST)
def test_lost_bytes_are_counted(case):
    make, text, (lost, size) = LOST[case]
    found = lost_text([text], make())
    assert (found.lost, found.size) == (lost, size)
    assert found.share == lost / size
    assert found.named


def test_a_sample_ends_and_tokens_a_byte_are_counted():
    found = lost_text(iter([ENGLISH] * 1000), byte_tokenizer(), size=100)
    assert 100 <= found.size < 200
    assert lost_text([], byte_tokenizer()).share == 0
    counted = {"el": lost_text(["δύο τρία"], byte_tokenizer()), "en": lost_text(["a fox"], unigram())}
    counted["none"] = lost_text([], byte_tokenizer())
    assert [(one.tokens, one.bytes) for one in counted.values()] == [(15, 15), (6, 5), (0, 0)]
    assert token_line(counted) == ["tokens a byte: el 1.000, en 1.200"]
    assert token_line({}) == []


def test_more_than_two_percent_is_refused():
    check_lost({"el": lost_text(["a" * 98 + "é"], unigram("ae"))})
    lossy = {"en": lost_text(["ab"], unigram("ab")), "el": lost_text(["a" * 97 + "é"], unigram("ae"))}
    refused(check_lost, lossy, says=r"^el: the tokenizer loses 2\.0 % .*most often é.*--allow-lost-text")
    check_lost(lossy, allowed=True)


def test_text_and_pairs_know_what_is_lost_of_each_language():
    texts = {"en": [ENGLISH] * 9, "el": [GREEK] * 9}
    packed = pack_texts({code: Dataset.from_dict({"text": t}) for code, t in texts.items()}, unigram(), 8, 0)
    assert {code: found.share for code, found in packed.lost.items()} == {"en": 0, "el": 1}
    found = PairEncoder(unigram()).lost([SentencePair(ENGLISH, GREEK, "en", "el")])
    assert (found["en"].share, found["el"].share) == (0, 1)


@pytest.mark.parametrize("made", [nllb_tokenizer, mbart_tokenizer, mbart50_tokenizer, t5_tokenizer, byt5_tokenizer])
def test_translation_models_lose_what_their_tokenizers_do_not_know(made):
    tokenizer = made()
    encoder, before = PairEncoder(tokenizer), tokenizer("the sea").input_ids
    known = [SentencePair(*pair, "en", "es") for pair in zip(SENTENCES["en"], SENTENCES["es"], strict=True)]
    assert {code: found.share for code, found in encoder.lost(known).items()} == {"en": 0, "es": 0}
    foreign = encoder.lost([SentencePair("the sea", "море", "en", "es")])
    assert foreign["en"].share == 0
    assert (foreign["es"].share > 0.4) is (made is not byt5_tokenizer)
    assert tokenizer("the sea").input_ids == before


def test_scores_of_lost_text_are_marked_as_no_bound():
    stream = text_stream([f"{ENGLISH} {GREEK}"], unigram())
    assert 0.6 < stream.lost < 0.7
    both = {"en": LanguageScore(8.0, 3.0, 9, 9, 0.0), "el": LanguageScore(2.0, 0.4, 9, 9, stream.lost)}
    whole = {"en": LanguageScore(8.0, 3.0, 9, 9, 0.0), "el": LanguageScore(2.0, 0.8, 9, 9, 0.0)}
    result = Evaluation(["en"], ["el"], {"base": both, "after": whole})
    assert [row[1:] for row in result.rows()[1]] == [["3.000", "3.000", "+0.0 %"], ["0.400*", "0.800", "+100.0 %*"]]
    assert result.rows("perplexity")[1][1][1] == "2.000*"
    first, second, mark = result.notes()
    assert first == f"bytes that the tokenizer of base loses: en 0 %, el {100 * stream.lost:.1f} %"
    assert second == "bytes that the tokenizer of after loses: en 0 %, el 0 %"
    assert mark.startswith("scores with * are no bound")
    assert mark in result.markdown()
    assert not any("*" in cell for row in Evaluation(["en"], ["el"], {"base": whole}).rows()[1] for cell in row)
    assert Evaluation(["en"], [], {"base": {"en": LanguageScore(8.0, 3.0, 9, 9)}}).notes() == []  # an earlier release's


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A base of English letters alone, and text."""
    folder = tmp_path_factory.mktemp("lossy")
    tokenizer = unigram(ENGLISH + "αβγ")
    tokenizer.save_pretrained(folder / "base")
    model = tiny_dense("qwen2", vocab_size=len(tokenizer), eos_token_id=1, pad_token_id=1)
    model.save_pretrained(folder / "base")
    write_texts(folder / "en.jsonl", [ENGLISH] * 60)
    write_texts(folder / "el.jsonl", [f"{GREEK} {ENGLISH}"] * 60)
    write_texts(folder / "test.jsonl", [f"{ENGLISH} {GREEK}"] * 60)
    write_texts(folder / "english.jsonl", [f"{ENGLISH} {ENGLISH}"] * 3)
    expand_checkpoint(folder / "base", folder / "expanded", Plan("moe-lpr", [2, 1, 2], old=["en"], new=["el"]))
    return folder


def recipe(home, allowed):
    return Recipe.of_text(
        json.dumps({
            "base": f"{home}/base", "output": f"{home}/run", "old": {"en": f"{home}/en.jsonl"},
            "new": {"el": f"{home}/el.jsonl"}, "test": {"el": f"{home}/test.jsonl"},
            "plan": {"method": "moe-lpr", "experts": 2}, "allow_lost_text": allowed,
            "post_pretrain": {"block_size": 16, "max_steps": 1}, "review": None,
        }),
        "recipe.yaml",
    )  # fmt: skip


def test_a_recipe_of_lost_text_is_refused_unless_it_allows_it(home):
    refused(validate_recipe, recipe(home, False), says=r"^new\.el: the tokenizer loses 63\.\d % of the text's bytes")
    lines = validate_recipe(recipe(home, True))
    (tokens,) = (line for line in lines if line.startswith("tokens a byte: "))
    assert re.fullmatch(r"tokens a byte: old\.en 0\.\d{3}, new\.el 0\.\d{3}, test\.el 0\.\d{3}", tokens), tokens
    shares = next(line for line in lines if line.startswith("bytes that the tokenizer loses"))
    assert "old.en 0 %, new.el 63." in shares
    assert any(line.startswith("warning: test.el: the tokenizer loses") for line in lines)


def test_validate_says_what_is_left_out_of_a_text(home, tmp_path):
    rows = [{"text": ENGLISH}] * 20 + [{"text": ENGLISH, "language": "grc"}] * 2 + [{"text": None}]
    (tmp_path / "el.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    (tmp_path / "README.txt").write_text("about")
    text = recipe(home, False).text.replace(f"{home}/el.jsonl", str(tmp_path))
    text = text.replace(f"{home}/test.jsonl", f"{home}/english.jsonl")
    for offline in (False, True):
        lines = validate_recipe(Recipe.of_text(text, "recipe.yaml"), offline)
        said = next(line for line in lines if line.startswith(f"new.el: {tmp_path}, 1 file(s); "))
        assert "files left out: README.txt (about the data, by its name); 20 documents kept" in said
        assert said.endswith("3 rows left out: 2 tagged 'grc', 1 without text")


def test_a_training_on_lost_text_is_refused_unless_allowed(home, capsys):
    texts, config = {"el": LanguageText("el", f"{home}/el.jsonl")}, PostPretrainConfig(block_size=16, max_steps=1)
    refused(train_stage, home / "expanded", home / "trained", texts, config, says=r"^el: the tokenizer loses 63\.")
    assert not (home / "trained").exists()
    train_stage(home / "expanded", home / "trained", texts, config, allow_lost_text=True)
    said = capsys.readouterr().out
    assert "bytes that the tokenizer loses: el 63." in said
    assert "warning: el: the tokenizer loses" in said


def test_the_first_file_of_a_folder_does_not_stand_for_the_others(home, tmp_path):
    write_texts(tmp_path / "a.jsonl", [ENGLISH] * 12_000)
    write_texts(tmp_path / "b.jsonl", [GREEK] * 3_000)
    mixed = Recipe.of_text(recipe(home, False).text.replace(f"{home}/el.jsonl", str(tmp_path)), "recipe.yaml")
    refused(validate_recipe, mixed, says=r"new\.el: the tokenizer loses")

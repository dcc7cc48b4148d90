"""Sentences as tokens for each kind of translation model: language codes, directions, the task in words."""

import pytest
from conftest import TABLES, refused
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

from hf_moe_expand import pack_pairs
from hf_moe_expand.analysis.reading import side_batches
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.data.pairs import PairEncoder, SentencePair, pairs_of, sentence_pairs
from hf_moe_expand.evaluation.perplexity import pair_stream


def words(tokenizer, ids):
    return tokenizer.convert_ids_to_tokens(ids)


def test_the_tokenizer_s_own_codes_stand_where_it_puts_them():
    pair = SentencePair("the sea", "η θάλασσα", "en", "el")
    tokenizer = nllb_tokenizer()
    encoder = PairEncoder(tokenizer)
    ((source,), (target,)) = encoder.encode([pair])
    assert words(tokenizer, source)[0] == "eng_Latn"
    assert words(tokenizer, target)[0] == "ell_Grek"
    assert words(tokenizer, target)[-1] == "</s>"
    assert encoder.start(("en", "el")) == {"forced_bos_token_id": tokenizer.convert_tokens_to_ids("ell_Grek")}
    assert encoder.start(("el", "en")) == {"forced_bos_token_id": tokenizer.convert_tokens_to_ids("eng_Latn")}
    tokenizer = mbart50_tokenizer()
    ((source,), (target,)) = PairEncoder(tokenizer).encode([SentencePair("the sea", "el mar", "en", "es")])
    assert [words(tokenizer, source)[0], words(tokenizer, target)[0]] == ["en_XX", "es_XX"]


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
    assert (tmp_path / "after" / "tokenizer_config.json").read_bytes() == (
        tmp_path / "before" / "tokenizer_config.json"
    ).read_bytes()


def test_without_codes_the_task_stands_in_the_text():
    for tokenizer in (t5_tokenizer(), byt5_tokenizer()):
        encoder = PairEncoder(tokenizer)
        ((source,), (target,)) = encoder.encode([SentencePair("good night", "καληνύχτα", "en", "el")])
        same = tokenizer("translate English to Greek: good night").input_ids
        assert source == same
        assert target == tokenizer("καληνύχτα").input_ids
        assert encoder.start(("en", "el")) == {}


def test_marian_takes_the_target_s_code_or_none():
    tokenizer = plain_tokenizer()
    tokenizer.supported_language_codes = []
    pair = SentencePair("the sea", "η θάλασσα", "en", "el")
    assert PairEncoder(tokenizer).encode([pair])[0] == [tokenizer("the sea").input_ids]
    tokenizer.supported_language_codes = [">>el<<", ">>ell<<"]
    assert PairEncoder(tokenizer).encode([pair])[0] == [tokenizer(">>el<< the sea").input_ids]
    PairEncoder(tokenizer).check([("hi", "el")])  # a source needs no code
    with pytest.raises(InputError, match="has no code for 'hi'"):
        PairEncoder(tokenizer).check([("hi", "el"), ("el", "hi")])


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
    with pytest.raises(
        InputError, match="de-en is not a direction of this model: the model reads 'en' and writes 'de'"
    ):
        PairEncoder(tokenizer).check([("en", "de"), ("de", "en")])
    wrong = Dataset.from_list([SentencePair("das Meer", "the sea", "de", "en")._asdict()])
    with pytest.raises(InputError, match="Language 'de': no sentence pair in a direction of the model"):
        pack_pairs({"de": wrong}, tokenizer, 64, 0)
    said = "Language 'el' has no sentence as a source, and both sides are measured: the mo"
    refused(side_batches, "el", sentence_pairs(english_and_greek()), tokenizer, 4, 2, None, says=said)


def test_codes_in_front_of_the_source_name_the_target():
    """MADLAD-400's tokenizer."""
    tokenizer = plain_tokenizer()
    tokenizer.add_tokens(["<2el>", "<2zh_Latn>"])
    encoder = PairEncoder(tokenizer)
    ((source,), (target,)) = encoder.encode([SentencePair("the sea", "η θάλασσα", "en", "el")])
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

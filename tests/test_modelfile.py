"""Ollama's Modelfile: what `generate` would do with the checkpoint, in Ollama's words."""

import json

import pytest
from bpe import bpe_tokenizer
from conftest import tiny_config

from hf_moe_expand.checkpoint.modelfile import MOST_CONTEXT, modelfile_text
from hf_moe_expand.core.errors import InputError

GREEDY = ["temperature 0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = bpe_tokenizer()
    tokenizer.save_pretrained(folder)
    tiny_config("llama", vocab_size=len(tokenizer)).save_pretrained(folder)
    return folder


def lines_of(folder, settings, **changes):
    """The lines without the first, parameters without the word."""
    file = folder / "generation_config.json"
    file.write_text(json.dumps(settings)) if settings is not None else file.unlink(missing_ok=True)
    config = tiny_config("llama", **{"eos_token_id": None, **changes})
    first, *lines = modelfile_text("out.gguf", config, folder).splitlines()
    assert first == "FROM ./out.gguf"
    return [line.removeprefix("PARAMETER ") for line in lines]


def test_a_long_context_is_capped_and_the_file_says_so(folder):
    for longest, comments in ((64, 0), (MOST_CONTEXT, 0), (131_072, 1)):
        lines = lines_of(folder, None, max_position_embeddings=longest)
        assert lines[comments] == f"num_ctx {min(longest, MOST_CONTEXT)}"
        assert [line for line in lines if line.startswith("#")] == lines[:comments]
        assert all(str(longest) in line for line in lines[:comments])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (None, GREEDY),
        ({}, GREEDY),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1}, GREEDY),
        ({"do_sample": None, "temperature": 0.6}, GREEDY),
        ({"temperature": 0.6}, GREEDY),  # transformers samples only if told to
        ({"do_sample": True}, ["temperature 1.0", "top_k 50", "top_p 1.0"]),
        ({"do_sample": True, "temperature": None, "top_k": 0}, ["temperature 1.0", "top_k 0", "top_p 1.0"]),
        ({"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.05},
         ["temperature 0.7", "top_k 20", "top_p 0.8", "min_p 0.05"]),
        ({"repetition_penalty": 1.05}, [*GREEDY, "repeat_penalty 1.05", "repeat_last_n -1"]),
        ({"repetition_penalty": 1.0, "max_new_tokens": 2048}, [*GREEDY, "num_predict 2048"]),
        ({"max_length": 20, "use_cache": True, "pad_token_id": 3, "transformers_version": "5.0.0"}, GREEDY),
    ],
)  # fmt: skip
def test_what_generate_would_do_is_written(folder, settings, expected):
    assert lines_of(folder, settings) == ["num_ctx 64", *expected, 'stop "<end>"']


@pytest.mark.parametrize(
    ("settings", "stops"),
    [
        ({"eos_token_id": [256, 1, 256]}, ['"<end>"', '"""""""']),
        ({"eos_token_id": 9_999}, ['"<end>"']),
        ({"eos_token_id": None}, ['"<end>"']),
        ({"stop_strings": "User:"}, ['"<end>"', '"User:"']),
        ({"stop_strings": ['say "no"', "<end>"]}, ['"<end>"', '"""say "no""""']),
    ],
)
def test_each_text_that_ends_an_answer_is_a_stop(folder, settings, stops):
    assert lines_of(folder, settings)[2:] == [f"stop {text}" for text in stops]


def test_a_line_end_in_a_stop_is_written_as_it_is(folder):
    """Ollama reads quotes over lines, and no escapes."""
    assert lines_of(folder, {"stop_strings": ["\n\n"]})[3:] == ['stop "', "", '"']


def test_ends_are_the_configurations_where_no_file_names_them(folder):
    assert lines_of(folder, None, eos_token_id=3)[3:] == ['stop "$"']
    assert lines_of(folder, {"eos_token_id": 4}, eos_token_id=3)[3:] == ['stop "%"']


def test_settings_that_ollama_lacks_are_named(folder):
    *_, said = lines_of(folder, {"no_repeat_ngram_size": 3, "suppress_tokens": [1], "bad_words_ids": None})
    assert said == "# In generation_config.json, but no parameter of Ollama: no_repeat_ngram_size, suppress_tokens."


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"do_sample": "yes"}, "do_sample: expected true or false, found 'yes'"),
        ({"temperature": "hot"}, "temperature: expected a number, found 'hot'"),
        ({"temperature": -1}, "temperature is -1: must be at least 0"),
        ({"top_p": 1.5}, "top_p is 1.5: must be at most 1"),
        ({"top_k": [1]}, "top_k: expected an integer, found list"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0: must be larger than 0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0: must be at least 1"),
        ({"eos_token_id": "</s>"}, "eos_token_id: expected an integer or a list, found '</s>'"),
    ],
)
def test_a_wrong_value_is_refused_with_its_place(folder, settings, message):
    with pytest.raises(InputError, match=rf"generation_config\.json: {message}"):
        lines_of(folder, settings)

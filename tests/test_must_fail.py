"""`validate` refuses what `run` must refuse, or what makes its results say nothing."""

import json
import shutil

import pytest
from conftest import save_dense, write_texts

from hf_moe_expand import validate_recipe
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.data import held_out
from hf_moe_expand.data.held_out import check_held_out
from hf_moe_expand.data.sources import LanguageText
from hf_moe_expand.evaluation import known
from hf_moe_expand.evaluation.perplexity import LanguageScore
from hf_moe_expand.runs.recipe import Recipe
from hf_moe_expand.runs.steps import stage as stage_steps

LONG = [f"text number {number} of a language, which has some words" for number in range(200)]
HELD_OUT = [f"held-out text {number} of a language, which has other words" for number in range(200)]
RECIPE = """
base: {root}/base
output: {root}/run
old: {{en: {root}/en.jsonl}}
new: {{el: {root}/el.jsonl}}
test: {{el: {root}/test.jsonl}}
plan: {{method: moe-lpr, experts: 2, exclusive: true}}
post_pretrain: {{block_size: 64, max_steps: 2}}
"""


@pytest.fixture
def root(tmp_path):
    save_dense(tmp_path / "base", max_position_embeddings=128)
    for name, texts in (("en", LONG[:100]), ("el", LONG[100:]), ("test", HELD_OUT)):
        write_texts(tmp_path / f"{name}.jsonl", texts)
    return tmp_path


def check(root, text=RECIPE, **options):
    return validate_recipe(Recipe.of_text(text.format(root=root), "recipe.yaml"), **options)


def refused(root, match, text=RECIPE, **options):
    with pytest.raises(InputError, match=match):
        check(root, text, **options)


def test_a_good_recipe_is_good(root):
    assert not [line for line in check(root) if "warning" in line]


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "wrong"), [(1 / 1.4, False), (1 / 1.6, True)])
def test_a_forecast_of_far_too_much_memory(root, monkeypatch, share, wrong):
    def memory():
        return int(share * needed)

    found = []
    forecast = stage_steps.prepare.__globals__["Prepared"].forecast
    with monkeypatch.context() as patched:
        patched.setattr(
            stage_steps.prepare.__globals__["Prepared"], "forecast",
            lambda *given: found.append(forecast(*given)) or found[-1],
        )  # fmt: skip
        check(root)
    needed = found[0].memory
    for name in ("device_memory", "memory_of_all"):
        monkeypatch.setattr(stage_steps, name, memory)
    if wrong:
        refused(root, r"post_pretrain: takes about .* of memory, but .* are here: lower per_device_.*--offline")
    # Another machine may be the one that trains.
    for options in ({"here": False}, {"offline": True}, *([] if wrong else [{}])):
        assert any("warning: too much" in line for line in check(root, **options))
    monkeypatch.setattr(stage_steps, "memory_of_all", lambda: None)  # a device of which it is not known
    assert check(root)


def test_the_memory_of_other_devices(monkeypatch):
    from hf_moe_expand.inference import memory

    torch = memory.torch
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1, 80))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert memory.memory_of_all() == 320  # over which a launch may split the model
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert memory.memory_of_all() is None


# --- too little text --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "short", "message"),
    [
        ("", "", "el", "post_pretrain: All text of el together is .* less than one block of 64"),
        ("max_steps: 2}}", "tokens_per_language: 100000}}", None, "post_pretrain: Language 'el' has .* but 100,000"),
        ("max_steps: 2}}", "tokens_per_language: 5}}\n#", "el", "post_pretrain: All text of el together"),
        ("true}}", "false}}\nreview: {{block_size: 64}}", "en", "review: All text of en, el together is"),
        ("true}}", "false}}\nreview: {{block_size: 128, old_documents: 1}}", None, ""),
        ("true}}", "false}}\nreview: {{block_size: 128, old_documents: 1, new_per_old: 1}}", None, "review: All text"),
        ("plan: ", "gates: {{}}\nplan: ", "en", "gates: en has .* tokens of text, but .* at least 100"),
        ("plan: ", "gates: {{}}\nplan: ", "el", "gates: el has .* tokens of text, but .* at least 100"),
        ("plan: ", "gates: {{}}\nanchors: {{de: {root}/short.jsonl, fr: {root}/en.jsonl, it: {root}/en.jsonl}}\nplan: ",
         None, "gates: de has .* tokens of text, but .* at least 100"),
    ],
)  # fmt: skip
def test_too_little_text(root, old, new, short, message):
    write_texts(root / "short.jsonl", ["short text"])
    for code in ("en", "el"):
        if short == code:
            write_texts(root / f"{code}.jsonl", [f"{code} text"])
    text = RECIPE.replace(old, new, 1)
    if message:
        refused(root, message, text)
        assert check(root, text, offline=True)
    else:
        check(root, text)


def test_text_that_is_long_enough_in_one_of_two_files(root):
    (root / "folder").mkdir()
    write_texts(root / "folder" / "a.jsonl", ["short"])
    shutil.copy(root / "el.jsonl", root / "folder" / "b.jsonl")
    assert check(root, RECIPE.replace("el: {root}/el.jsonl", "el: {root}/folder"))


def test_a_group_of_languages_with_too_little_text(root):
    text = RECIPE.partition("plan:")[0] + (
        "plan: {{method: dmoe, groups: [[el], [hu]], ratio: 0.5}}\n"
        "group: {{block_size: 64}}\njoint: {{block_size: 64}}\n"
        "deviation: {{steps: 1, batch_size: 1, block_size: 4}}\n"
    )
    write_texts(root / "hu.jsonl", ["short text"])
    text = text.replace("new: {{el: {root}/el.jsonl}}", "new: {{el: {root}/el.jsonl, hu: {root}/hu.jsonl}}")
    text = text.replace("old: {{en: {root}/en.jsonl}}\n", "")
    refused(root, "group: All text of hu together is .* less than one block", text)


# --- held-out text that is trained on ---------------------------------------------------------------------------------


def same_file(root):
    return "el.jsonl", "el.jsonl"


def a_copy(root):
    shutil.copy(root / "el.jsonl", root / "copy.jsonl")
    return "el.jsonl", "copy.jsonl"


def a_link(root):
    (root / "link.jsonl").symlink_to(root / "el.jsonl")
    return "el.jsonl", "link.jsonl"


def some_documents(root):
    write_texts(root / "some.jsonl", [*HELD_OUT[:40], LONG[150]])
    return "el.jsonl", "some.jsonl"


def a_folder_with_both(root):
    (root / "folder").mkdir()
    for name, file in (("el", "train"), ("test", "test")):
        shutil.copy(root / f"{name}.jsonl", root / "folder" / f"{file}.jsonl")
    return "folder", "folder/test.jsonl"


def a_folder_with_its_documents(root):
    (root / "folder").mkdir()
    write_texts(root / "folder" / "all.jsonl", [*LONG, *HELD_OUT])
    return "folder", "test.jsonl"


def other_rows_and_white_space(root):
    rows = [
        {"id": n, "language": "el", "text": f"  {text.replace(' ', chr(10))} "} for n, text in enumerate(LONG[100:])
    ]
    (root / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return "el.jsonl", "rows.jsonl"


def lines_of_text(root):
    (root / "lines.txt").write_text("\n".join(LONG[100:]))
    return "el.jsonl", "lines.txt"


@pytest.mark.parametrize("key", ["new", "old", "validation"])
@pytest.mark.parametrize(
    "make", [same_file, a_copy, a_link, some_documents, a_folder_with_both, a_folder_with_its_documents,
             other_rows_and_white_space, lines_of_text],
)  # fmt: skip
def test_held_out_text_that_is_training_text(root, make, key):
    training, test = make(root)
    text = RECIPE
    if key == "old":
        text = text.replace("en: {root}/en.jsonl", f"en: {{root}}/{training}").replace("el.jsonl}}\nt", "en.jsonl}}\nt")
    else:
        text = text.replace("el: {root}/el.jsonl", f"el: {{root}}/{training}")
    if key == "validation":
        scored = f"validation: {{{{texts: {{{{el: {{root}}/{test}}}}}}}}}"
        text = text.replace("max_steps: 2", f"max_steps: 2, {scored}").replace("test: ", "# test: ")
        refused(root, r"post_pretrain\.validation\.texts\.el: .*training text, too", text)
    else:
        text = text.replace("{root}/test.jsonl", f"{{root}}/{test}")
        refused(root, rf"test\.el: .*{test}: .*training text, too \({key}\..*{training}\): .*hold some text out", text)


def test_a_document_or_two_are_a_warning(root):
    write_texts(root / "test.jsonl", [*HELD_OUT, LONG[150]])
    (line,) = [line for line in check(root) if "warning" in line]
    assert line == (
        f"warning: test.el: {root}/test.jsonl: 1 of its 201 documents are training text, too (new.el: {root}/el.jsonl)"
    )


def test_of_long_text_a_part_is_compared_and_said(root, monkeypatch):
    monkeypatch.setattr(held_out, "MOST_READ", 1000)
    write_texts(root / "test.jsonl", LONG[190:])  # at the end of the training text
    lines = check(root)
    assert [line for line in lines if "compared with the held-out text" in line]
    monkeypatch.undo()
    refused(root, "10 of its 10 documents are training text", RECIPE)


def hub(source):
    return LanguageText("el", source)


def test_text_on_the_hub_is_told_by_its_name():
    check_held_out({"test.el": hub("hub:a/b:el:test")}, {"new.el": hub("hub:a/b:el:train")})
    for one, other in (("train", "train"), ("train[:100]", "train"), ("train", "train[:5]")):
        with pytest.raises(InputError, match="is training text, too"):
            check_held_out({"test.el": hub(f"hub:a/b:el:{one}")}, {"new.el": hub(f"hub:a/b:el:{other}")})


def test_sentence_pairs_of_an_encoder_decoder(tmp_path):
    def pairs(name, rows):
        lines = [json.dumps({"translation": {"en": en, "el": el}}) for en, el in rows]
        (tmp_path / name).write_text("\n".join(lines))
        return {name: LanguageText("el", str(tmp_path / name))}

    training = pairs("train.jsonl", [(f"word {n}", f"mot {n}") for n in range(9)])
    other = pairs("test.jsonl", [(f"word {n}", f"autre {n}") for n in range(9)])  # the same sentence, translated anew
    assert check_held_out(other, training, as_pairs=True) == []
    with pytest.raises(InputError, match=r"test\.jsonl: 2 of its 8 documents"):
        check_held_out(
            pairs("test.jsonl", [("word 3", "mot 3"), *((f"x {n}", f"y {n}") for n in range(3))]), training, True
        )


# --- old and new swapped ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bits", "warned"),
    [
        ({"en": 1.0, "el": 2.0}, False), ({"en": 2.0, "el": 1.0}, True), ({"en": 1.2, "el": 1.1}, False),
        # A new language of 3 bytes a character has few bits a byte: by the character the base does not know it better.
        ({"en": 1.0, "el": 0.7}, False),
    ],
)  # fmt: skip
def test_a_base_that_knows_the_new_languages_better(root, monkeypatch, bits, warned):
    if bits["el"] == 0.7:
        write_texts(root / "el.jsonl", ["한국어 문장" * 20 + str(n) for n in range(40)])

    def scored(model, tokenizer, texts, *sizes):
        return {code: LanguageScore(1.0, bits[code], 9, 9) for code in texts}

    monkeypatch.setattr(known, "evaluate_model", scored)
    found = [line for line in check(root) if "swapped?" in line]
    assert len(found) == warned
    if warned:
        assert "(old: en 2.00; new: el 1.00): are `old` and `new` swapped?" in found[0]
    assert not [line for line in check(root, offline=True) if "swapped" in line]


def test_a_base_that_takes_long_is_not_asked(root, monkeypatch):
    monkeypatch.setattr(known, "training_speed", lambda dtype: 1.0)
    monkeypatch.setattr(known, "load_for_inference", lambda *_: pytest.fail("loaded"))
    assert any(line.startswith("skipped: whether old and new are swapped") for line in check(root))

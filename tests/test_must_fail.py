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


def test_more_memory_than_there_is(root, monkeypatch):
    monkeypatch.setattr(stage_steps, "memory_of_all", lambda: 1000)
    refused(root, r"post_pretrain: takes at least .* of memory, but 1 kB are here: lower per_device_.*--offline")
    # Another machine may be the one that trains, or split the model.
    split = RECIPE.replace("max_steps: 2", "max_steps: 2, distributed_config: {{fsdp_size: 2}}")
    for text, options in ((RECIPE, {"here": False}), (RECIPE, {"offline": True}), (split, {})):
        assert check(root, text, **options)
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


def test_text_that_is_long_enough_in_one_of_two_files(root):
    (root / "folder").mkdir()
    write_texts(root / "folder" / "a.jsonl", ["short"])
    shutil.copy(root / "el.jsonl", root / "folder" / "b.jsonl")
    assert check(root, RECIPE.replace("el: {root}/el.jsonl", "el: {root}/folder"))


def test_of_long_text_a_part_is_compared_and_said(root, monkeypatch):
    monkeypatch.setattr(held_out, "MOST_READ", 1000)
    write_texts(root / "test.jsonl", LONG[190:])  # at the end of the training text
    lines = check(root)
    assert [line for line in lines if "compared with the held-out text" in line]
    monkeypatch.undo()
    refused(root, "10 of its 10 documents are training text", RECIPE)


def test_a_document_or_two_are_a_warning(root):
    write_texts(root / "test.jsonl", [*HELD_OUT, LONG[150]])
    (line,) = [line for line in check(root) if "warning" in line]
    assert "test.jsonl: 1 of its 201 documents are training text, too (new.el: " in line


def test_text_on_the_hub_is_told_by_its_name():
    test, train, part = (LanguageText("el", f"hub:a/b:el:{split}") for split in ("test", "train", "train[:100]"))
    check_held_out({"test.el": test}, {"new.el": train})
    for one in (train, part):
        with pytest.raises(InputError, match="is training text, too"):
            check_held_out({"test.el": one}, {"new.el": train})


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


def test_a_base_that_takes_long_is_not_asked(root, monkeypatch):
    monkeypatch.setattr(known, "_MOST", 1)
    monkeypatch.setattr(known, "load_for_inference", lambda *_: pytest.fail("loaded"))
    assert any(line.startswith("skipped: whether old and new are swapped") for line in check(root))

"""Wrong settings, plans and recipes: each is refused in one line, which tests/wrong_settings.yaml keeps."""

from pathlib import Path

import pytest
import yaml
from conftest import save_dense, write_texts

import hf_moe_expand
from hf_moe_expand import Recipe, train_stage, validate_recipe
from hf_moe_expand.checkpoint.expand import expand_checkpoint
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.data.sources import LanguageText
from hf_moe_expand.planning.methods import read_plan_settings
from hf_moe_expand.planning.plan import Plan

CASES = yaml.safe_load((Path(__file__).parent / "wrong_settings.yaml").read_text("utf-8"))
GOOD = """
base: ROOT/base
output: ROOT/run
old: {en: ROOT/en.jsonl}
new: {el: ROOT/el.jsonl}
analysis: {tokens: 30}
plan: {total_experts: 7, classifier_layers: 1}
post_pretrain: {block_size: 32, max_steps: 2}
review: {block_size: 32, max_steps: 2}
"""
DMOE = """
base: ROOT/base
output: ROOT/run
new: {el: ROOT/el.jsonl, tr: ROOT/tr.jsonl, en: ROOT/en.jsonl}
deviation: {steps: 1, batch_size: 1, block_size: 16}
plan: {method: dmoe, groups: 2, ratio: 0.5}
group: {block_size: 32, max_steps: 2}
joint: {block_size: 32, max_steps: 2}
"""


def make(root):
    save_dense(root / "base")
    for code, text in {"en": "a text", "el": "ένα κείμενο", "tr": "bir metin"}.items():
        write_texts(root / f"{code}.jsonl", [text] * 20)
    (root / "curriculum.json").write_text('{"steps": 9, "entry": {"el": 0, "hi": 4}}')
    plan = Plan("moe-lpr", [2, 1, 2], old=["en"], new=["el"])
    expand_checkpoint(root / "base", root / "expanded", plan)
    expand_checkpoint(root / "base", root / "dmoe", Plan("dmoe", [2, 1, 2], groups=[["en"], ["el"]]))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("wrong")
    make(root)
    return root


def merged(one, other):
    """`other`'s keys in `one`; null takes a key out, and `"null"` is null."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return None if other == "null" else other
    both = {key: merged(one.get(key), other[key]) if key in other else one[key] for key in {**one, **other}}
    return {key: value for key, value in both.items() if other.get(key, 0) is not None}


def try_case(case, root, number):
    """Does what the case asks for, in the folder `root`."""
    case = yaml.safe_load(yaml.safe_dump(case).replace("ROOT", str(root)))
    if "recipe" in case:
        good = yaml.safe_load((DMOE if case.get("dmoe") else GOOD).replace("ROOT", str(root)))
        path, offline = root / f"{number}.yaml", bool(case.get("offline"))
        path.write_text(yaml.safe_dump(merged(good, case["recipe"])), "utf-8")
        validate_recipe(Recipe.load(path, unset_ok=offline), offline)
    elif "stage" in case:
        config = getattr(hf_moe_expand, case["stage"])(**case["keywords"])
        texts = {code: LanguageText(code, str(root / f"{code}.jsonl")) for code in case.get("texts", ["el"])}
        train_stage(root / case.get("model", "expanded"), root / f"out{number}", texts, config)
    else:
        read_plan_settings(case["plan"])


def line_of(case, root, number):
    """The error line of a case."""
    with pytest.raises(InputError) as error:
        try_case(case, root, number)
    return str(error.value).replace(str(root), "ROOT").replace(f"{number}.yaml", "recipe.yaml")


@pytest.mark.parametrize("number", range(len(CASES)), ids=[str(number) for number in range(len(CASES))])
def test_the_line_says_what_is_wrong_and_where(root, number):
    line = line_of(CASES[number], root, number)
    assert "\n" not in line
    # A line that lists what the library knows is kept as far as the list.
    wanted = CASES[number]["line"]
    assert line.startswith(wanted[:-3]) if wanted.endswith("...") else line == wanted


def test_the_good_recipes_are_good(root):
    for number, text in enumerate((GOOD, DMOE)):
        (root / f"good{number}.yaml").write_text(text.replace("ROOT", str(root)), "utf-8")
        assert validate_recipe(Recipe.load(root / f"good{number}.yaml"))

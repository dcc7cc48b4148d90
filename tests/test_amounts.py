"""Counts and amounts that are too large for anything: each is refused by its key or its option, in one sentence."""

import pytest
import yaml
from conftest import invoke, refused, save_dense, write_texts

from hf_moe_expand.core.errors import InputError
from hf_moe_expand.core.schema import MOST
from hf_moe_expand.planning.make import make_plan
from hf_moe_expand.planning.methods import METHODS, plan_settings
from hf_moe_expand.planning.results import SimilarityResult
from hf_moe_expand.runs.pipeline import validate_recipe
from hf_moe_expand.runs.recipe import Recipe

DIGITS_27 = 10**26 + 1
LARGE = [DIGITS_27, 1e27, 10**400]
IS_TOO_LARGE = r"(must be at most|at most 65,536 experts|expected a number|must be less than|below 2 \*\* 32)"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("amounts")
    save_dense(folder / "base")
    for code in ("en", "el"):
        write_texts(folder / f"{code}.jsonl", ["some text of a language"] * 40)
    write_texts(folder / "test.jsonl", ["held-out text of a language"])
    return folder


def recipe(home, *path, value=None):
    """A recipe in which the key at `path` has a value."""
    mapping = {
        "base": f"{home}/base", "output": f"{home}/run", "old": {"en": f"{home}/en.jsonl"},
        "new": {"el": f"{home}/el.jsonl"}, "test": {"el": f"{home}/test.jsonl"},
        "plan": {"method": "moe-lpr", "experts": 2},
        "post_pretrain": {"block_size": 16, "max_steps": 1},
        "review": {"block_size": 16, "old_documents": 5, "max_steps": 1},
    }  # fmt: skip
    inner = mapping
    for key in path[:-1]:
        inner = inner.setdefault(key, {})
    if path:
        inner[path[-1]] = value
    return Recipe.of_text(yaml.safe_dump(mapping), "recipe.yaml")


@pytest.mark.parametrize("value", LARGE[:2], ids=["27 digits", "1e27"])  # YAML refuses more than 100 digits
@pytest.mark.parametrize(
    "path",
    [
        ("seed",), ("review", "new_per_old"), ("review", "old_documents"), ("review", "block_size"),
        ("review", "validation", "every"), ("post_pretrain", "tokens_per_language"),
        ("post_pretrain", "max_steps"), ("post_pretrain", "num_train_epochs"),
        ("post_pretrain", "per_device_train_batch_size"), ("post_pretrain", "save_total_limit"),
        ("evaluation", "max_tokens"), ("evaluation", "batch_size"), ("analysis", "tokens"), ("deviation", "steps"),
        ("plan", "experts"), ("plan", "top_k"), ("expand", "expert_width"), ("expand", "copy_from"),
        ("gates", "tokens"),
    ],
    ids=".".join,
)  # fmt: skip
def test_a_recipe_refuses_a_count_that_nothing_takes(home, path, value):
    with pytest.raises(InputError, match=path[-1]) as refused:
        validate_recipe(recipe(home, *path, value=value))
    refused.match(IS_TOO_LARGE if path[-1] != "copy_from" else "copy_from")


def test_the_largest_count_and_the_smallest_share_overflow_nothing(home):
    validate_recipe(recipe(home))
    validate_recipe(recipe(home, "post_pretrain", "save_steps", value=5e-324))
    for path in (("review", "new_per_old"), ("review", "old_documents")):
        with pytest.raises(InputError, match=r"has 40 documents, but the mix asks for \d+: give more text"):
            validate_recipe(recipe(home, *path, value=MOST))
    both = recipe(home, "review", value={"old_documents": MOST, "new_per_old": MOST, "block_size": 16})
    refused(validate_recipe, both, says="but the mix asks for")
    validate_recipe(recipe(home, "post_pretrain", "num_train_epochs", value=MOST))


@pytest.mark.parametrize("method", [name for name, cls in METHODS.items() if "total_experts" in cls.model_fields])
def test_a_plan_of_more_experts_than_a_model_has_is_refused_before_it_is_made(method):
    settings = plan_settings(method, total_experts=MOST)
    row = [0.5] * 4
    result = SimilarityResult(["en"], ["el"], 9, {"en-el": row}, None, row, row)
    similarity = result if settings.needs else None
    refused(make_plan, settings, 4, ["en"], ["el"], similarity, says="may have at most 65,536 experts")
    with pytest.raises(InputError, match="1000000000 layers are too many"):
        make_plan(plan_settings("moe-lpr", experts=2), 10**9, ["en"], ["el"])


SIMILARITY = ["analyze", "similarity", "HOME/base", "--old", "en=HOME/en.jsonl", "--new", "el=HOME/el.jsonl"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["curriculum", "counts", "--counts", "el=1", "--steps", DIGITS_27], "--steps is 1"),
        (["curriculum", "derive", "somewhere", "--bins", DIGITS_27], "--bins is 1"),
        (["plan", "moe-lpr", "--experts", 2, "--layers", DIGITS_27, "--new", "el"], "layers are too many"),
        ([*SIMILARITY, "--seed", DIGITS_27], "seed is 1"),
        ([*SIMILARITY, "--seed", -1], "seed is -1"),
    ],
    ids=lambda value: value[1] if isinstance(value, list) else None,
)  # fmt: skip
def test_an_option_refuses_it(command, said, home, tmp_path):
    command = [str(word).replace("HOME", str(home)) for word in command]
    refused(invoke, *command, "--out", tmp_path / "out.json", says=said)

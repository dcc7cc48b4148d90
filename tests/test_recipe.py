"""Recipes and settings: what is refused, and that the message helps."""

import pytest
from conftest import save_dense, write_texts

from hf_moe_expand.errors import InputError
from hf_moe_expand.pipeline import validate_recipe
from hf_moe_expand.recipe import Recipe
from hf_moe_expand.settings import PlanSettings, PostPretrainSettings, ReviewSettings, from_mapping

GOOD = """
base: {root}/base
output: {root}/run
old: {{en: {root}/en.jsonl}}
new: {{el: {root}/el.jsonl}}
plan: {{total_experts: 7, classifier_layers: 1}}
post_pretrain: {{block_size: 32, training: {{max_steps: 2, learning_rate: 5e-5}}}}
review: {{block_size: 32, training: {{max_steps: 2}}}}
"""


@pytest.fixture
def root(tmp_path):
    save_dense(tmp_path / "base")
    write_texts(tmp_path / "en.jsonl", ["a text"] * 5)
    write_texts(tmp_path / "el.jsonl", ["ένα κείμενο"] * 5)
    return tmp_path


def recipe(root, text=GOOD, **changes):
    text = text.format(root=root)
    for old, new in changes.values():
        assert old in text
        text = text.replace(old, new)
    (root / "recipe.yaml").write_text(text, "utf-8")
    return Recipe.load(root / "recipe.yaml")


def test_a_good_recipe_is_found_good_and_numbers_are_numbers(root):
    loaded = recipe(root)
    assert loaded.post_pretrain.training["learning_rate"] == 5e-5
    assert loaded.review == ReviewSettings(block_size=32, training={"max_steps": 2})
    assert any("7 experts, 1 classifiers" in line for line in validate_recipe(loaded))
    assert recipe(root, a=("review: {block_size: 32, training: {max_steps: 2}}", "review: null")).review is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("plan:", "plann:", "unknown key `plann`; did you mean `plan`?"),
        ("total_experts", "total_expert", "plan: unknown key `total_expert`; did you mean `total_experts`?"),
        ("n: {block_size: 32, training: {m", "n: {blok_size: 32, training: {m", "did you mean `block_size`"),
        ("total_experts: 7", "total_experts: many", "plan.total_experts: 'many' is not int or nothing"),
        ("total_experts: 7", "total_experts: true", "plan.total_experts: True is not int"),
        ("new: {el: ", "new: {en: ", "en: given as an old and as a new language"),
        ("output: ", "# output: ", "`output` is missing"),
        ("old: {en", "test: {hu", "hu is neither an old nor a new language"),
        ("old: {en", "old: {no", "put language codes in quotes"),
        ("/en.jsonl}", "/en.jsonl", "not YAML"),
        ("{root}/en.jsonl", "$NOT_SET/en.jsonl", "environment variable $NOT_SET is not set"),
        ("old: {en", "# old: {en", "no old language"),
    ],
)  # fmt: skip
def test_mistakes_in_the_file(root, old, new, message):
    with pytest.raises(InputError) as error:
        recipe(root, change=(old.replace("{root}", str(root)), new))
    assert message in str(error.value)
    assert "recipe.yaml" in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("/base", "/nowhere", "no such folder"),
        ("/en.jsonl", "/none.jsonl", "no such file"),
        ("total_experts: 7", "total_experts: 5", "3 layers with at least 2 each .* need 6 or more"),
        ("total_experts: 7", "method: mola, shape: star", "Unknown MoLA shape 'star'"),
        ("total_experts: 7", "method: lora", "Unknown plan method 'lora'"),
        ("classifier_layers: 1", "classifier_layers: 4", "4 classifier layers were asked for, but 3"),
        ("learning_rate", "learning_rat", "post_pretrain.training: .*`learning_rat`; did you mean `learning_rate`"),
        ("learning_rate: 5e-5", "output_dir: x", "`output_dir` is set by hf-moe-expand"),
        ("learning_rate: 5e-5", "label_smoothing_factor: 0.1", "label_smoothing_factor is not supported"),
        (
            "learning_rate: 5e-5",
            "activation_checkpointing: true, activation_checkpointing_kwargs: {use_reentrant: true}",
            "reentrant gradient checkpointing silently drops",
        ),
        ("post_pretrain: {block_size: 32", "post_pretrain: {block_size: 128", "is 128, but the base takes 64"),
    ],
)  # fmt: skip
def test_mistakes_that_validate_finds_without_weights(root, old, new, message):
    loaded = recipe(root, change=(old, new))
    with pytest.raises(InputError, match=message):
        validate_recipe(loaded)


def test_settings_from_mappings():
    assert from_mapping(PlanSettings, {"total_experts": 7.0, "similarity_floor": 1}, "plan").total_experts == 7
    with pytest.raises(InputError, match="must hold `key: value` lines, found list"):
        from_mapping(PostPretrainSettings, ["x"], "stage1.yaml")
    with pytest.raises(InputError, match="known: block_size, tokens_per_language"):
        from_mapping(PostPretrainSettings, {"zzz": 1}, "stage1.yaml")

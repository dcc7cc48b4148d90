"""The JSON schema of a recipe knows what `Recipe.load` knows, and takes the recipes that come with the repository."""

import json
import re
from pathlib import Path

import pytest
from conftest import invoke, refused
from jsonschema import Draft202012Validator
from tables import TABLES

from hf_moe_expand.core.schema import keys_of, settings_in
from hf_moe_expand.core.yamlfile import parse_mapping, read_yaml
from hf_moe_expand.planning.methods import METHODS, PlanSettings
from hf_moe_expand.runs.keys import _recipe_stages, _stage_fields, check_recipe_keys
from hf_moe_expand.runs.recipe import Recipe, recipe_schema
from hf_moe_expand.runs.recipes import packaged_files
from hf_moe_expand.stages import all_stages, recipe_stages

ROOT = Path(__file__).resolve().parents[1]
METHODS_FILES = packaged_files("methods")
FILES = packaged_files() | {name: METHODS_FILES[name] for name in ("deltamoe", "layermoe")}  # which inherit


def options(node, schema):
    """The schemas that a node may be, without references and `anyOf`."""
    if "$ref" in node:
        yield from options(schema["$defs"][node["$ref"].rpartition("/")[2]], schema)
    elif inner := node.get("anyOf") or node.get("oneOf") or node.get("allOf"):
        for part in inner:
            yield from options(part, schema)
    else:
        yield node


def compare(cls, node, schema, path=""):
    """Checks that every settings class below `cls` has its keys, and no others, in the schema."""
    (mapping,) = [part for part in options(node, schema) if "properties" in part]
    keys = keys_of(cls)
    assert set(mapping["properties"]) == set(keys), path
    assert mapping["additionalProperties"] is False, path
    compared = 1
    for key, hint in keys.items():
        inner = mapping["properties"][key]
        assert any("description" in part for part in (inner, *options(inner, schema))), f"{path}.{key}"
        for found in settings_in(hint):
            if found is PlanSettings:
                continue
            compared += compare(found, inner, schema, f"{path}.{key}")
    return compared


def test_the_schema_knows_every_key_that_a_recipe_may_have():
    schema = recipe_schema()
    assert compare(Recipe, schema, schema) >= 12
    items = schema["properties"]["expansions"]["items"]
    (expansion,) = options(items, schema)
    whole = {"base", "output", "old", "test", "anchors", "revision", "seed", "expansions", "join"}
    whole |= {"evaluation", "allow_lost_text", "inherits"}
    assert set(expansion["properties"]) == set(schema["properties"]) - whole
    plans = {}
    for part in options(schema["properties"]["plan"], schema):
        plans[part.get("properties", {}).get("method", {}).get("const")] = set(part.get("properties", ()))
    for name, method in METHODS.items():
        assert plans[name] == {"method", *method.all_keys()}, name


def test_the_command_prints_it(tmp_path):
    printed = invoke("recipes", "schema")
    assert json.loads(printed) == json.loads(json.dumps(recipe_schema()))
    assert f"wrote {tmp_path / 'schema.json'}" in invoke("recipes", "schema", "--out", tmp_path / "schema.json")
    assert (tmp_path / "schema.json").read_text("utf-8") == printed


@pytest.fixture(scope="module")
def validator():
    kind = Draft202012Validator
    kind.check_schema(recipe_schema())
    return kind(recipe_schema())


@pytest.mark.parametrize("name", FILES)
def test_recipes_of_the_repository_pass_it(validator, name):
    assert [error.message for error in validator.iter_errors(read_yaml(FILES[name]))] == []


@pytest.mark.parametrize(("recipe", "good"), TABLES["recipes and the schema"])
def test_which_recipes_pass_it(validator, recipe, good):
    """One that inherits may lack keys and take them out."""
    assert validator.is_valid(recipe) is good


def test_the_readmes_recipe_passes_it(validator):
    (text,) = re.findall(r"```yaml\n# recipe.yaml\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    assert validator.is_valid(parse_mapping(text, "x"))


def test_the_keys_in_the_source_are_those_of_the_classes():
    assert {*_recipe_stages()} == {*recipe_stages()}
    for key, stage in all_stages().items():
        fields, own = _stage_fields(key)
        assert {*keys_of(stage.settings)} <= {*fields}
        assert (own and hasattr(stage.settings, "shown_keys")) == bool(own)
        if own:
            assert {*[*fields][:own]} == {*[*keys_of(stage.settings)][:own]}
            assert own == stage.settings.shown_keys()[0]


@pytest.mark.parametrize("name", packaged_files())
def test_the_recipes_that_come_with_the_package_have_keys_of_recipes(name):
    check_recipe_keys(packaged_files()[name])


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ("bsae: x", "unknown key `bsae`; did you mean `base`?"),
        ("review: {lr_schedler_type: x}", "review: unknown key `lr_schedler_type`; did you mean `lr_scheduler_type`?"),
        ("review: {blok_size: 8}", "review: unknown key `blok_size`; did you mean `block_size`?"),
        ("gates: {unseenshare: 1}", "gates: unknown key `unseenshare`; did you mean `unseen_share`?"),
        ("analysis: {token: 1}", "analysis: unknown key `token`; did you mean `tokens`?"),
        ("plan: {method: mola, experts: 3}", "plan: `experts` is a key of moe-lpr; this plan is mola."),
        ("expansions: [{new: {el: x}, revew: {}}]", "expansions[0]: unknown key `revew`; did you mean `review`?"),
        ("expansions: [{new: {el: x}, expand: {lora_rnk: 1}}]",
         "expansions[0].expand: unknown key `lora_rnk`; did you mean `lora_rank`?"),
    ],
)  # fmt: skip
def test_a_misspelt_key_is_refused_before_torch_as_after(tmp_path, lines, sentence):
    file = tmp_path / "a.yaml"
    file.write_text(f"base: x\noutput: y\nold: {{en: x}}\n{lines}\n")
    assert refused(check_recipe_keys, file) == refused(Recipe.load, file) == f"{file}: {sentence}"

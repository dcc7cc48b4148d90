"""The JSON schema of a recipe knows what `Recipe.load` knows, and takes the recipes that come with the repository."""

import json
import re
from pathlib import Path

import pytest
from conftest import invoke
from jsonschema import Draft202012Validator
from tables import TABLES

from hf_moe_expand.core.schema import keys_of, settings_in
from hf_moe_expand.core.yamlfile import parse_mapping, read_yaml
from hf_moe_expand.planning.methods import METHODS, PlanSettings
from hf_moe_expand.runs.recipe import Recipe, recipe_schema
from hf_moe_expand.runs.recipes import packaged_files

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

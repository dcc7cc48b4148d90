"""Recipes and settings: what is refused, and that the message helps."""

import json

import pytest
from conftest import TABLES, invoke, keywords, refused, save_dense, write_texts
from jsonschema import Draft202012Validator

from hf_moe_expand import ReviewConfig, validate_recipe
from hf_moe_expand.core.schema import changed, settings_in
from hf_moe_expand.core.yamlfile import read_yaml
from hf_moe_expand.planning.methods import METHODS, plan_settings
from hf_moe_expand.runs.misspelt import KEYS, check_keys_of
from hf_moe_expand.runs.recipe import Expansion, Recipe, recipe_schema
from hf_moe_expand.runs.recipes import packaged_files
from hf_moe_expand.stages import recipe_stages
from hf_moe_expand.stages.config import StageConfig
from hf_moe_expand.stages.keywords import own_fields
from hf_moe_expand.stages.kinds.graft import GraftSettings

GOOD = """
base: {root}/base
output: {root}/run
old: {{en: {root}/en.jsonl}}
new: {{el: {root}/el.jsonl}}
analysis: {{tokens: 30}}
plan: {{total_experts: 7, classifier_layers: 1}}
post_pretrain: {{block_size: 32, max_steps: 2, learning_rate: 5e-5}}
review: {{block_size: 32, max_steps: 2}}
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
    assert loaded.post_pretrain.learning_rate == 5e-5
    assert loaded.review == keywords(ReviewConfig, block_size=32, max_steps=2)
    lines = validate_recipe(loaded)
    assert "analysis: en el have enough text" in lines
    assert not any("fewer documents" in line for line in lines)
    said = next(line for line in lines if "7 experts, 1 classifier, placed after stage 1" in line)
    assert said.endswith("; the analysis says in which layers, and these are the most")
    assert recipe(root, a=("review: {block_size: 32, max_steps: 2}", "review: null")).review is None


UNIFORM = ("plan: {total_experts: 7, classifier_layers: 1}", "plan: {method: moe-lpr, experts: 2}")


def test_parts_that_no_step_reads_are_named(root, monkeypatch):
    monkeypatch.chdir(root)
    write_texts(root / "held.jsonl", ["another text"])
    analysis = "analysis: {tokens: 30}"
    for unread, *changes in (
        [""],
        ["analysis", UNIFORM],
        ["evaluation", (analysis, f"{analysis}\nevaluation: {{}}")],
        ["deviation", UNIFORM, (analysis, "evaluation: {}\ndeviation: {}\ntest: {en: held.jsonl}")],
    ):
        loaded = recipe(root, **dict(zip("ab", changes, strict=False)))
        assert "".join(line.split("`")[1] for line in loaded.unread()) == unread
        assert [line for line in validate_recipe(loaded) if line.startswith("no step reads")] == loaded.unread()


def test_validate_says_which_text_is_fewer_than_asked_for(root):
    fewer = recipe(root, a=("review: {", "review: {old_documents: 3, fewer_documents: true, "))
    assert "review: fewer documents than asked for: 2 of 3 in en, 4 of 6 in el" in validate_recipe(fewer)


LAYER_MOE = """analysis: {tokens: 30}
plan: {total_experts: 7, classifier_layers: 1}
post_pretrain: {block_size: 32}
review: {block_size: 32}
"""


def test_what_trainingarguments_takes_is_not_refused(root):
    """Values whose types the library's annotations do not tell, its own defaults, and keys of another machine."""
    for given in (
        "save_steps: 0.5, learning_rate: 1, eval_strategy: no, push_to_hub: false, report_to: null, tf32: true",
        "fsdp: true, hub_strategy: every_save", "fsdp: full_shard, fsdp_config: {fsdp_version: 2}",
        "fsdp: [full_shard, auto_wrap]",
    ):  # fmt: skip
        loaded = recipe(root, a=("learning_rate: 5e-5", given))
        before = loaded.model_dump()
        assert validate_recipe(loaded)
        assert loaded.model_dump() == before
    loaded = recipe(root, a=("learning_rate: 5e-5", "deepspeed: /far/away.json"))
    found = validate_recipe(loaded, offline=True)
    assert "post_pretrain: skipped: deepspeed: /far/away.json is not on this machine" in found


def test_a_stage_sees_what_the_stages_before_it_leave(root):
    """Which `validate` does not write to the output, nor leaves elsewhere."""
    trained = ("post_pretrain: {", "post_pretrain: {everything: true, ")
    distilled = ("review: {", "review: {distillation_coef: 1, ")
    assert validate_recipe(recipe(root, a=distilled))
    before = sorted(root.rglob("*"))
    refused(
        validate_recipe, recipe(root, a=distilled, b=trained),
        says=r"^review: distillation_coef: expert 0 is not the base any more: `everything` trained",
    )  # fmt: skip
    assert sorted(root.rglob("*")) == before


def test_a_growth_in_some_layers_leaves_out_others(root):
    """After it, no layer is certain to have more experts than before, so a third expansion cannot copy them."""
    some = LAYER_MOE.replace("total_experts: 7, classifier_layers: 1", "total_experts: 3, only_layers: 1")
    rounds = [{"new": {code: str(root / "el.jsonl")}} for code in ("el", "tr", "hu")]
    rounds[0]["plan"] = {"method": "moe-lpr", "experts": 2}
    rounds[2]["expand"] = {"copy_from": 2}
    text = f"base: {root}/base\noutput: {root}/run\nold: {{en: {root}/en.jsonl}}\n{some}expansions: {rounds}\n"
    refused(validate_recipe, Recipe.of_text(text, "r"), says="copy_from is 2: a layer may have only 0")
    assert validate_recipe(Recipe.of_text(text.replace("'copy_from': 2", "'copy_from': 1"), "r"))


def test_a_graft_is_checked_before_anything_runs(root):
    """A fine-tune of another size is refused by `validate`, not after the days of stage 1."""
    save_dense(root / "instruct", seed=1)
    graft = ("plan:", f"graft: {{instruct: {root}/instruct, scale: 0.5}}\nplan:")
    loaded = recipe(root, a=graft)
    assert loaded.graft == GraftSettings(f"{root}/instruct", 0.5)
    with pytest.warns(UserWarning, match=r"instruct \(instruct\) look unrelated: the cosine"):
        assert any(line.startswith("graft: ") for line in validate_recipe(loaded))
    save_dense(root / "instruct", intermediate_size=40)
    refused(validate_recipe, loaded, says="has shape")
    save_dense(root / "instruct", num_hidden_layers=2)
    refused(validate_recipe, loaded, says=r"layers is 3 in .*, but 2 in")


LIFELONG = """
base: {root}/base
output: {root}/run
old: {{en: {root}/en.jsonl}}
graft: {{instruct: {root}/instruct}}
expansions:
  - new: {{el: {root}/el.jsonl}}
  - new: {{tr: {root}/el.jsonl}}
"""


def test_of_several_expansions_each_ones_text_is_counted_and_the_last_is_grafted(root):
    found = validate_recipe(recipe(root, LIFELONG, a=("graft:", LAYER_MOE + "# ")))
    assert f"expansions[1].new.tr: {root}/el.jsonl, 1 file(s)" in found
    assert "analysis: en el tr have enough text" in found
    plan = "plan: {{total_experts: 9}}\n"
    loaded = recipe(root, LIFELONG + plan)
    assert [expansion.graft for expansion in loaded.all_expansions] == [None, GraftSettings(f"{root}/instruct")]
    both = LIFELONG.replace("/el.jsonl}}\n  - new", "/el.jsonl}}\n    graft: {{instruct: x}}\n  - new")
    refused(recipe, root, both + plan, says="expansion 1: graft: is for the last expansion")


def test_offline_needs_neither_base_nor_variables(root, monkeypatch):
    text = GOOD.format(root=root).replace(f"{root}/base", "org/base").replace(f"{root}/el", "$NOT_SET/el")
    (root / "recipe.yaml").write_text(text)
    monkeypatch.setattr("hf_moe_expand.checkpoint.source.snapshot_download", None)
    loaded = Recipe.load(root / "recipe.yaml", unset_ok=True)
    found = validate_recipe(loaded, offline=True)
    assert "skipped: architecture, plans, stages and disk: org/base is not on this machine" in found
    assert "skipped: new.el: $NOT_SET/el.jsonl: $NOT_SET is not set" in found
    assert f"old.en: {root}/en.jsonl, 1 file(s)" in found
    # What needs neither is checked.
    wrong = changed(loaded, old={"en": str(root / "none.jsonl")})
    refused(validate_recipe, wrong, offline=True, says="no such file")
    # A base in the hub's cache is used.
    cached = root / "base" / "config.json"
    monkeypatch.setattr("hf_moe_expand.checkpoint.source.try_to_load_from_cache", lambda *args, **rest: str(cached))
    assert any("expansion 1: layer-moe, 7 experts" in line for line in validate_recipe(loaded, offline=True))
    few = changed(loaded, plan=plan_settings(total_experts=5))
    refused(validate_recipe, few, offline=True, says="too few")


def test_variables_are_filled_in_and_the_text_is_the_files(root, monkeypatch):
    monkeypatch.setenv("ROOT", str(root))
    held_out = "validation: {{texts: {{el: $ROOT/el.jsonl}}}}, curriculum: $ROOT/curriculum.json"
    text = GOOD.replace("{root}", "$ROOT").replace("n: {{block_size: 32, m", f"n: {{{{{held_out}, m")
    loaded = recipe(root, text)
    assert (loaded.base, loaded.post_pretrain.curriculum) == (f"{root}/base", f"{root}/curriculum.json")
    assert "base: $ROOT/base" in loaded.text
    assert str(root) not in loaded.text
    assert "text" not in loaded.model_dump()
    assert changed(loaded, seed=1).text is None


FILES = packaged_files() | {name: packaged_files("methods")[name] for name in ("deltamoe", "layermoe")}


def keyed(node):
    """The part of a schema that has keys."""
    return node if "properties" in node else next(filter(None, map(keyed, node.get("anyOf", []))), None)


def test_the_schema_knows_every_key_that_a_recipe_may_have(tmp_path):
    assert f"wrote {tmp_path / 'schema.json'}" in invoke("recipes", "schema", "--out", tmp_path / "schema.json")
    schema = json.loads((tmp_path / "schema.json").read_text("utf-8"))
    classes = [Expansion, *METHODS.values()]
    wanted = [(schema, Recipe.model_fields)] + [(schema["$defs"][one.__name__], one.model_fields) for one in classes]
    for key, stage in recipe_stages().items():
        if issubclass(stage.settings, StageConfig):
            wanted.append((keyed(schema["properties"][key]), stage.settings.keyword_types()))
    for found, keys in wanted:
        assert found["properties"].keys() == keys.keys()
        assert found["additionalProperties"] in (False, {"type": "null"})  # null takes out a key of another method


@pytest.fixture(scope="module")
def validator():
    Draft202012Validator.check_schema(schema := recipe_schema())
    return Draft202012Validator(schema)


@pytest.mark.parametrize("name", FILES)
def test_recipes_of_the_repository_pass_it(validator, name):
    assert [error.message for error in validator.iter_errors(read_yaml(FILES[name]))] == []


def test_which_recipes_pass_it(validator):
    """One that inherits may lack keys and take them out."""
    for recipe, good in TABLES["recipes and the schema"]:
        assert validator.is_valid(recipe) is good, recipe


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ("bsae: x", "unknown key `bsae`; did you mean `base`?"),
        ("review: {lr_schedler_type: x}", "review: unknown key `lr_schedler_type`; did you mean `lr_scheduler_type`?"),
        ("analysis: {token: 1}", "analysis: unknown key `token`; did you mean `tokens`?"),
        ("plan: {method: mola, experts: 3}", "plan: unknown key `experts`; known: top_k, only_layers, "
         "classifier_layers, classifier_choice, classifiers_in, exclusive, method, shape."),
        ("expansions: [{new: {el: x}, revew: {}}]", "expansions[0]: unknown key `revew`; did you mean `review`?"),
        ("expansions: [{new: {el: x}, expand: {lora_rnk: 1}}]",
         "expansions[0].expand: unknown key `lora_rnk`; did you mean `lora_rank`?"),
    ],
)  # fmt: skip
def test_a_misspelt_key_is_named(tmp_path, lines, sentence):
    """By the command line before torch is imported."""
    file = tmp_path / "a.yaml"
    file.write_text(f"base: x\noutput: y\nold: {{en: x}}\n{lines}\n")
    assert refused(Recipe.load, file) == f"{file}: {sentence}"
    assert refused(check_keys_of, file) == f"{file}: {sentence}"


def test_keys_under_training_are_read_with_a_warning(root):
    with pytest.warns(FutureWarning, match="write its keys beside the others .learning_rate: 0.5"):
        loaded = recipe(root, a=("learning_rate: 5e-5", "training: {learning_rate: 0.5}"))
    check_keys_of(root / "recipe.yaml")
    assert loaded.post_pretrain.learning_rate == 0.5


def test_the_keys_beside_the_recipes_are_those_of_the_classes():
    """What `runs/recipes/keys.json` must hold is what this prints where it fails."""
    stages, fields = recipe_stages(), Recipe.model_fields
    train = [key for key, stage in stages.items() if issubclass(stage.settings, StageConfig)]
    inside = {key: own_fields(stages[key].settings) for key in train}
    for key in (key for key in fields if key not in (*train, "plan")):
        for settings in settings_in(fields[key].annotation):
            inside[key] = settings.model_fields
    declared = {
        "recipe": [key for key in fields if key not in Expansion.model_fields], "expansion": [*Expansion.model_fields],
        "inside": {key: [*names] for key, names in inside.items()}, "train": train,
    }  # fmt: skip
    assert json.loads(KEYS.read_text("utf-8")) == declared, json.dumps(declared)


def test_later_experts_are_exclusive_as_earlier_ones_unless_the_plan_says():
    plans = {"el": {"experts": 2, "exclusive": True}, "tr": {"experts": 1}, "hu": {"experts": 1}}
    rounds = [{"new": {code: "x"}, "plan": {"method": "moe-lpr", **plan}} for code, plan in plans.items()]
    mapping = {"base": "b", "output": "o", "old": {"en": "x"}, "expansions": rounds}
    found = Recipe.of_text(json.dumps(mapping), "r").all_expansions
    assert [expansion.plan.exclusive for expansion in found] == [True] * 3
    assert not any(expansion.has("review") for expansion in found)

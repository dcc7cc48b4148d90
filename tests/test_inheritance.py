"""Recipes that inherit, and messages that name the right file; YAML's numbers, and one sentence for what is wrong."""

import json
import re
from pathlib import Path

import pytest
import yaml
from conftest import invoke, refused, save_dense, write_texts

from hf_moe_expand.core.yamlfile import parse_mapping, read_yaml, to_yaml
from hf_moe_expand.runs.pipeline import run_recipe
from hf_moe_expand.runs.recipe import Recipe
from hf_moe_expand.runs.recipes import WholeRecipe, packaged_files

DOCS = Path(__file__).resolve().parents[1] / "docs"
OWN = "base: b\noutput: o\nold: {en: en.txt}\nnew: {el: el.txt}\n"
GOOD = f"{OWN}plan: {{total_experts: 7}}\n"


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def loaded(child: str, **parents: str) -> Recipe:
        for name, text in {"child": child, **parents}.items():
            Path(f"{name}.yaml").write_text(text, "utf-8")
        return Recipe.load("child.yaml")

    return loaded


@pytest.mark.parametrize(
    ("child", "found"),
    [
        ("seed: 3\nplan: {top_k: 2}", {"seed": 3, "plan": {"total_experts": 7, "top_k": 2}}),
        ("plan: {classifier_layers: 1}", {"plan": {"total_experts": 7, "top_k": 1, "classifier_layers": 1}}),
        ("plan: {top_k: null}", {"plan": {"total_experts": 7}}),
        ("new: {hu: hu.txt}", {"new": {"el": "el.txt", "hu": "hu.txt"}}),
        ("new: {el: null, hu: hu.txt}", {"new": {"hu": "hu.txt"}}),
        ("post_pretrain: null", {"post_pretrain": None}),
        ("post_pretrain: {validation: {every: 3}}", {"post_pretrain": {
            "validation": {"texts": {"el": "el.txt"}, "every": 3}, "losses": {}, "block_size": 12}}),
        ("post_pretrain: {validation: null, block_size: null}", {"post_pretrain": {"losses": {}}}),
        ("deviation: {at_steps: [3]}", {"deviation": {"at_steps": [3]}}),
        # A null for a key that no parent has is a value.
        ("plan: {only_layers: null}", {"plan": {"total_experts": 7, "top_k": 1, "only_layers": None}}),
        ("revision: null", {"revision": None}),
    ],
)  # fmt: skip
def test_what_merges(load, child, found):
    parent = f"""{OWN}plan: {{total_experts: 7, top_k: 1}}
test: {{el: el.txt}}
post_pretrain: {{validation: {{texts: {{el: el.txt}}}}, losses: {{}}, block_size: 12}}
deviation: {{at_steps: [1, 2]}}
"""
    merged = load(f"inherits: parent.yaml\n{child}\n", parent=parent).values
    assert {key: merged.get(key) for key in found} == found
    assert "inherits" not in merged
    assert merged["base"] == "b"


def test_languages_join_lists_replace_and_expansions_take_what_is_inherited(load):
    merged = load("inherits: p.yaml\nnew: {bn: x, hi: y}\n", p=GOOD.replace("{el", "{tr: t, el"))
    assert list(merged.new) == ["tr", "el", "bn", "hi"]
    parent = f"{GOOD.replace('new:', '#')}expansions: [{{new: {{el: x}}}}]\npost_pretrain: {{block_size: 12}}\n"
    recipe = load("inherits: p.yaml\nexpansions: [{new: {hu: y}}, {new: {tr: z}, plan: {total_experts: 9}}]", p=parent)
    found = [(list(one.new), one.plan.total_experts, one.post_pretrain.block_size) for one in recipe.expansions]
    assert found == [(["hu"], 7, 12), (["tr"], 9, 12)]


@pytest.mark.parametrize("name", packaged_files("methods"))
def test_a_methods_settings_take_any_base_and_languages(load, name):
    more = {"layermoe": "plan: {total_experts: 9}", "dmoe": "plan: {groups: 1}", "deltamoe": "graft: {instruct: i}"}
    own = OWN.replace("old:", "#") if name == "dmoe" else OWN
    recipe = load(f"inherits: {name}\n{own}{more.get(name, '')}\n")
    assert (recipe.base, recipe.seed) == ("b", 0)
    assert recipe.plan.method == {"layermoe": "layer-moe", "dmoe": "dmoe"}.get(name, "moe-lpr")
    assert not {"base", "output", "old", "new", "test"} & set(WholeRecipe.load(packaged_files("methods")[name]).mapping)


def test_paths_of_parents_are_relative_to_the_file_that_names_them(tmp_path, monkeypatch):
    (tmp_path / "far" / "near").mkdir(parents=True)
    (tmp_path / "far" / "near" / "moe-lpr").write_text(GOOD)  # a file wins over a name
    (tmp_path / "far" / "mid.yaml").write_text("inherits: near/moe-lpr\nnew: {hu: hu.txt}\n")
    (tmp_path / "far" / "near" / "child.yaml").write_text("inherits: ../mid.yaml\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RECIPES", str(tmp_path / "far"))
    for recipe in (Recipe.load("far/near/child.yaml"), Recipe.of_text("inherits: $RECIPES/mid.yaml", "x")):
        assert recipe.plan.total_experts == 7
        assert dict(recipe.new) == {"el": "el.txt", "hu": "hu.txt"}  # relative to where it runs, as in every recipe


def test_a_deep_chain_and_what_show_prints(load):
    chain = {f"r{n}": f"inherits: r{n + 1}.yaml\nnew: {{el: {n}.txt}}\n" for n in range(50)}
    assert load("inherits: r0.yaml\nseed: 4\n", **chain, r50=GOOD).new == {"el": "0.txt"}
    recipe = load("inherits: parent.yaml\nseed: 4\nreview: null\n", parent=GOOD)
    assert parse_mapping(invoke("recipes", "show", "child.yaml"), "shown") == recipe.values


@pytest.mark.parametrize(
    ("child", "parent", "message"),
    [
        # in the parent
        ("", f"plann: {{}}\n{GOOD}", "child.yaml (inherits parent.yaml): unknown key `plann`; did you mean `plan`?"),
        ("plan: {top_k: 2}", f"{OWN}plan: {{total_expert: 7}}",
         "child.yaml (inherits parent.yaml): plan: unknown key `total_expert`; did you"),
        ("new: {hu: hu.txt}", GOOD.replace("{el:", "{greek:"),
         "child.yaml (inherits parent.yaml): new.greek: 'greek' is not a language code"),
        ("", "- a", "parent.yaml: must hold `key: value` lines, found list"),
        ("", "plan: 1\nplan: 2", "parent.yaml: not YAML: line 2: found duplicate key"),
        # in the child
        ("plan: {top_k: x}", GOOD, "child.yaml (inherits parent.yaml): plan: top_k: Input should be a valid integer"),
        # nulls that take nothing out
        ("new: {hu: null}", GOOD,
         "child.yaml (inherits parent.yaml): new.hu: None is not a file, a folder or hub:NAME."),
        ("plan: {top_k: null}", GOOD, "found None."),
    ],
)  # fmt: skip
def test_a_mistake_names_its_file_and_key(load, child, parent, message):
    refused(load, f"inherits: parent.yaml\n{child}\n", parent=parent, says=re.escape(message))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("moe-lpp", "moe-lpp: no such file, and no packaged recipe of that name (`hf-moe-expand recipes ls`)."),
        ("folder", "folder: is a folder; name a recipe's file in it."),
        ("$NOT_SET/x.yaml", "the environment variable $NOT_SET is not set"),
        ('"a\\0b"', "a.*: no such file"),
        *((value, "expected the path or the name of one recipe, found ")
          for value in ("[a]", "{a: b}", "3", "true", "''")),
    ],
)  # fmt: skip
def test_parents_that_are_none(load, value, message):
    Path("folder").mkdir()
    says = re.escape(f"child.yaml: inherits: {message}").replace(r"\.\*", ".*")
    refused(load, f"inherits: {value}\n{GOOD}", says=says)
    refused(invoke, "recipes", "show", "child.yaml", says=re.escape("child.yaml: inherits: "))


def test_a_circle_names_its_files(load):
    for files, circle in (
        ({"child": "child.yaml"}, "child.yaml -> child.yaml"),
        ({"child": "a.yaml", "a": "b.yaml", "b": "./a.yaml"}, "child.yaml -> a.yaml -> b.yaml -> a.yaml"),
    ):
        recipes = {name: f"inherits: {parent}\n" for name, parent in files.items()}
        refused(load, **recipes, says=re.escape(f"a recipe inherits from itself ({circle}): take `inherits` out"))
    text = f"inherits: null\n{GOOD}"
    assert load(text).text == text
    assert "inherits" not in load("inherits: parent.yaml\n", parent=text).values
    refused(Recipe, says=r"inherits: recipes inherit", base="b", output="o", new={"el": "el.txt"}, inherits="moe-lpr")


def test_a_run_keeps_the_file_and_all_values_and_a_later_change_of_the_parent_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_dense(tmp_path / "base")
    write_texts(tmp_path / "el.jsonl", ["ένα κείμενο"] * 8)
    parent = tmp_path / "parent.yaml"
    parent.write_text(
        "base: base\nplan: {method: moe-lpr, experts: 2}\npost_pretrain: {block_size: 32, max_steps: 1}\n"
    )
    child = "\ufeff# mine\r\ninherits: parent.yaml\noutput: $RUN\nnew: {el: el.jsonl}  # Greek\nreview: null\n".encode()
    monkeypatch.setenv("RUN", "run")
    Path("child.yaml").write_bytes(child)
    invoke("validate", "child.yaml")
    run_recipe(Recipe.load("child.yaml"), lambda line: None)
    assert Path("run/recipe.yaml").read_bytes() == child
    values = json.loads(Path("run/settings.json").read_text("utf-8"))
    assert values == {
        "base": "base", "plan": {"method": "moe-lpr", "experts": 2},
        "post_pretrain": {"block_size": 32, "max_steps": 1}, "output": "$RUN", "new": {"el": "el.jsonl"},
        "review": None,
    }  # fmt: skip
    parent.write_text(parent.read_text().replace("max_steps: 1", "max_steps: 2"))
    refused(run_recipe, Recipe.load("child.yaml"), lambda line: None, says="changed after step")
    said: list[str] = []
    run_recipe(Recipe.load("run/settings.json"), said.append)  # all values need no parent
    assert sum("done already" in line for line in said) == 3


def read(tmp_path, text, encoding="utf-8"):
    (tmp_path / "a.yaml").write_bytes(text.encode(encoding))
    return read_yaml(tmp_path / "a.yaml")


VALUES = {
    "3e-4": 3e-4, "3E-4": 3e-4, "-1e3": -1000.0, "1.": 1.0, ".5": 0.5, "+2": 2, "5e5": 5e5, "010": 10, "0o10": 8,
    "0x1F": 31, "-0": 0, "100_000": 100_000, ".inf": float("inf"), "1:30": "1:30", "2026-01-31": "2026-01-31",
    "2026-13-45": "2026-13-45", "1.2.3": "1.2.3", "1e": "1e", "'3e-4'": "3e-4", "true": True, "off": "off", "~": None,
    "": None, "[1, 3e-4]": [1, 3e-4], "{x: 3e-4}": {"x": 3e-4}, "1-2": "1-2", "e5": "e5",
}  # fmt: skip


def test_values(tmp_path):
    found = read(tmp_path, "".join(f"a{number}: {text}\n" for number, text in enumerate(VALUES))).values()
    assert [(value, type(value)) for value in found] == [(value, type(value)) for value in VALUES.values()]
    assert read(tmp_path, "new: {no: no.jsonl, on: x}\n") == {"new": {"no": "no.jsonl", "on": "x"}}  # Norwegian


def test_what_is_written_reads_back_as_it_was(tmp_path):
    value = {"b": "3e-4", "a": [3e-4, 1e-5, 10, None, True, {"x": "no: x"}], "é": "010", "text": "a\nb", "none": {}}
    assert [*read(tmp_path, to_yaml(value)).items()] == [*value.items()]  # in their order
    assert yaml.safe_load(to_yaml({"rate": 5e-5, "scale": -1e20})) == {"rate": 5e-5, "scale": -1e20}  # YAML 1.1


def test_windows_files_are_read_and_mappings_may_be_merged_and_used_twice(tmp_path):
    for encoding in ("utf-8", "utf-8-sig"):
        assert read(tmp_path, "a: 1\r\nb: |\r\n  x\r\n  y\r\n", encoding) == {"a": 1, "b": "x\ny\n"}
    found = read(tmp_path, "one: &a {x: 1, y: 2}\ntwo: &b {<<: *a, y: 3}\nthree: {<<: *b, z: 4}\nfour: *a\n")
    assert (found["three"], found["four"]) == ({"x": 1, "y": 3, "z": 4}, {"x": 1, "y": 2})


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", 'line 3: found duplicate key "a"'),
        (BOMB, "aliases that stand for over 1,000,000 values"),
        ("b: 1\na: &a [*a]\n", "aliases that stand for over 1,000,000 values"),
        ("a:\n" + "".join(" " * n + f"b{n}:\n" for n in range(1, 3000)), "recursion depth exceeded"),
        ("a: !!python/object/apply:os.system [ls]\n", "line 1: could not determine a constructor"),
        ("x: 1\na: \x07\n", "line 2: .*#x0007"),
        ('a: "\\ud800"\n', "surrogates not allowed"),
        ("", "found nothing"),
    ],
    ids=lambda text: text[:24],
)
def test_what_is_wrong_is_one_sentence(tmp_path, text, message):
    assert len(refused(read, tmp_path, text, says=rf"^{tmp_path}/a\.yaml: .*{message}")) < 400


def test_null_leaves_a_stage_out_as_in_every_recipe(load):
    parent, child = f"{GOOD}review: {{block_size: 12}}\n", "inherits: p.yaml\nreview: null\n"
    assert load(child, p=GOOD).review is None
    again = load("inherits: m.yaml\nreview: {old_documents: 3}\n", m=child, p=parent)
    assert again.review.changes() == {"old_documents": 3}
    assert load(child, p=parent).review is None
    assert "review: null" in invoke("recipes", "show", "child.yaml")

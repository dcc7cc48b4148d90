"""The registered methods: one declaration gives the plan, the keys of a recipe, the options and the card's words."""

import copy
import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

import pytest
import typer
from conftest import refused, save_dense, tiny_config, write_texts
from pydantic import Field, ValidationError
from tables import TABLES
from typer.testing import CliRunner

from hf_moe_expand import (
    LanguageText,
    Plan,
    PostPretrainConfig,
    ReviewConfig,
    expand_checkpoint,
    make_card,
    train_stage,
)
from hf_moe_expand.checkpoint.expand import check_dense_plan
from hf_moe_expand.cli import verbs_planning
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.core.jsonfile import write_json
from hf_moe_expand.core.schema import Count, Schema, changed, read
from hf_moe_expand.planning.make import make_plan
from hf_moe_expand.planning.methods import (
    METHODS,
    Allocation,
    AnyPlan,
    LayerPlan,
    method_title,
    plan_settings,
    read_plan_settings,
)
from hf_moe_expand.report.inspection import inspect_checkpoint
from hf_moe_expand.report.page import make_page

GOOD = {
    "layer-moe": {"total_experts": 7},
    "moe-lpr": {"experts": 3},
    "mola": {},
    "random": {"total_experts": 7},
    "dmoe": {"groups": 2},
    "exclusive": {},
}


class Holder(Schema):
    """A settings class with a plan, as a recipe is."""

    plan: AnyPlan


def options_of(name):
    return {option for parameter in typer.main.get_command(verbs_planning.plan).commands[name].params
            for option in parameter.opts}  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_every_key_has_a_type_a_help_and_an_option(name):
    method, options = METHODS[name], options_of(name)
    plain = {f"--{key.replace('_', '-')}" for key in method.all_keys()} - {"--grouping"}
    assert plain | {"--out", "--seed", "--overwrite"} <= options
    assert ("--from" in options) == method.grows
    assert ("--deviation" in options) == (method.analysis == "deviation")
    assert "--analysis" in options  # for DMoE in place of --deviation
    assert ("--layers" in options) == ("--new" in options) == (method.analysis is None)
    assert all(key.description for key in method.all_keys().values())


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_card_and_words(name):
    method = METHODS[name]
    template = (files("hf_moe_expand.model_cards") / f"{method.card}.md").read_text("utf-8")
    assert ("{{ words" in template) <= bool(method.words)
    assert method_title(name) == method.title != name
    assert set(METHODS) == set(GOOD)


def test_a_word_of_ones_own_is_no_method():
    assert "my-rule" not in METHODS
    assert method_title("my-rule") == "my-rule"


@pytest.mark.parametrize("name", METHODS)
def test_settings_are_values(name):
    made = plan_settings(name, **GOOD[name])
    assert made == read_plan_settings({"method": name, **GOOD[name]}) == read_plan_settings(made)
    assert read_plan_settings(json.loads(json.dumps(made.model_dump()))) == made
    assert copy.deepcopy(made) == made == changed(made) != changed(made, top_k=5)
    assert type(made) is METHODS[name]
    assert set(made.model_dump()) == {"method", *METHODS[name].all_keys()}
    assert read(Holder, {"plan": {"method": name, **GOOD[name]}}).plan == Holder(plan=made).plan == made
    with pytest.raises(ValidationError, match="frozen"):
        made.top_k = 3


def test_the_analysis_that_a_plan_needs():
    assert {name: plan_settings(name, **keys).needs for name, keys in GOOD.items()} == {
        "layer-moe": "similarity", "moe-lpr": None, "mola": None, "random": None,
        "dmoe": "deviation", "exclusive": None,
    }  # fmt: skip
    assert plan_settings("mola", classifier_layers=2).needs == "similarity"
    assert plan_settings("mola", classifier_layers=2, classifier_choice="last").needs == "similarity"
    assert plan_settings("mola", classifier_layers=2, classifier_choice="random").needs is None


@pytest.mark.parametrize(("mapping", "message"), TABLES["wrong plan settings"])
def test_a_wrong_plan_is_refused_by_key(mapping, message):
    for where, do in (("", lambda: read_plan_settings(mapping)),
                      ("a.yaml: plan: ", lambda: read(Holder, {"plan": mapping}, "a.yaml"))):  # fmt: skip
        with pytest.raises(InputError) as error:
            do()
        assert str(error.value).startswith(where + message)
    if isinstance(mapping, dict) and "method" in mapping:
        with pytest.raises(InputError) as error:
            plan_settings(**mapping)
        assert str(error.value).startswith(message)


def test_a_new_method_is_one_class(monkeypatch, tmp_path):
    app = typer.Typer()
    monkeypatch.setattr(verbs_planning, "plan", app)

    try:

        class EndsPlan(LayerPlan):
            """More experts at both ends.

            Example: hf-moe-expand plan ends --most 4 --out plan.json
            """

            title = "Ends"
            card = "layer_moe"
            tag = "ends"

            method: Literal["ends"]
            most: Annotated[Count, Field(description="Experts of the first and last layer.")] = 4

            def allocate(self, target):
                last = target.num_layers - 1
                return Allocation([self.most if layer in (0, last) else target.least for layer in range(last + 1)])

        verbs_planning._add_method(METHODS["ends"], "ends")
        app.command("other")(lambda: None)
        path = tmp_path / "plan.json"
        run = CliRunner().invoke(app, ["ends", "--most", "3", "--layers", "4", "--new", "el", "--out", str(path)])
        assert run.exit_code == 0, run.output
        assert Plan.load(path) == Plan("ends", [3, 2, 2, 3], new=["el"])
        assert make_plan(plan_settings("ends"), 3, [], ["el"], grows_from=[2, 2, 2]).experts_per_layer == [6, 3, 6]
        assert "Experts of the first and last layer." in CliRunner().invoke(app, ["ends", "--help"]).output
        refused(plan_settings, "ends", most=0, says="most is 0: must be at least 1")
        refused(plan_settings, "mola", most=3, says="`most` is a key of ends")
    finally:
        METHODS.pop("ends", None)


def test_a_plan_of_ones_own_works_to_the_end(tmp_path):
    base = save_dense(tmp_path / "base")
    run = tmp_path / "run"
    plan = Plan("my <rule>", [3, 1, 2], old=["en"], new=["el"])
    plan.save(run / "plan.json")
    expand_checkpoint(base, run / "expanded", Plan.load(run / "plan.json"))
    documents = [f"some text {number} " * 20 for number in range(4)]
    files = {code: write_texts(tmp_path / f"{code}.jsonl", documents) for code in ("en", "el")}
    text = {code: LanguageText(code, str(path)) for code, path in files.items()}
    training = {"block_size": 16, "max_steps": 1, "per_device_train_batch_size": 1, "disable_tqdm": True}
    train_stage(run / "expanded", run / "post_pretrain", {"el": text["el"]}, PostPretrainConfig(**training))
    train_stage(run / "post_pretrain", run / "review", text, ReviewConfig(**training))
    assert "my <rule> on base" in "\n".join(inspect_checkpoint(run / "review").lines())
    card = make_card(run / "review")
    assert "as many in each layer as its plan, `my &lt;rule>`, says" in " ".join(str(card).split())
    assert "layer-moe" in card.data.tags
    assert "my &lt;rule&gt;" in make_page(run)


def test_groups_decide_what_a_plan_makes(tmp_path):
    base = save_dense(tmp_path / "base")
    plan = Plan("my-groups", [2, 1, 2], new=["el", "tr"], groups=[["el"], ["tr"]])
    plan.save(tmp_path / "run" / "plan.json")
    expand_checkpoint(base, tmp_path / "run" / "expanded", plan)
    assert "dmoe" in make_card(tmp_path / "run" / "expanded").data.tags
    (tmp_path / "run" / "group").mkdir()
    config = (tmp_path / "run" / "expanded" / "config.json").read_text()
    assert json.loads(config)["model_type"] == "dmoe"
    (tmp_path / "run" / "group" / "config.json").write_text(config)
    (tmp_path / "run" / "group" / "model.safetensors").symlink_to(tmp_path / "run" / "expanded" / "model.safetensors")
    assert "Group training" in make_page(tmp_path / "run")


WRONG_LANGUAGES = {
    "both": (["en", "el"], ["el"], "el: given as an old and as a new language"),
    "none": (["en"], ["greek"], "'greek' is not a language code"),
    "twice": (["en", "en"], ["el"], "en: given twice among the old languages"),
}


@pytest.mark.parametrize("name", [*METHODS, "my-own"])
@pytest.mark.parametrize("wrong", WRONG_LANGUAGES)
def test_wrong_languages_pass_no_door(tmp_path, name, wrong):
    old, new, message = WRONG_LANGUAGES[wrong]
    groups = [["en"], ["el"]] if name == "dmoe" else []
    with pytest.raises(InputError, match=message):  # every method makes its plan so
        Plan(name, [2, 2, 2], old=old, new=new, groups=groups)
    plan = Plan(name, [2, 2, 2], old=["en"], new=["el"], groups=groups)
    written = {**plan.model_dump(), "old": old, "new": new}
    write_json(tmp_path / "plan.json", written)
    refused(Plan.load, tmp_path / "plan.json", says=message)
    plan.old[:], plan.new[:] = old, new  # lists change, however frozen the plan
    refused(check_dense_plan, plan, tiny_config("qwen2"), "base", says=message)


def test_the_guides_own_plan_is_a_plan(tmp_path):
    guide = (Path(__file__).parents[1] / "docs" / "choose.md").read_text("utf-8")
    (block,) = re.findall(r"```json\n(.*experts_per_layer.*)\n```", guide)
    (tmp_path / "plan.json").write_text(block)
    plan = Plan.load(tmp_path / "plan.json")
    assert (METHODS.get(plan.method), plan.total_experts) == (None, 12)


def test_settings_take_positions_in_the_order_of_their_fields():
    assert Plan("own", [1, 2], [1]) == Plan(method="own", experts_per_layer=[1, 2], classifier_layers=[1])
    with pytest.raises(TypeError, match="takes at most 11 arguments, but 12 were given"):
        Plan("own", [1, 2], *[None] * 10)
    with pytest.raises(TypeError, match="multiple values for keyword argument 'method'"):
        Plan("own", [1, 2], method="twice")

"""The registered methods: one declaration gives the plan, the keys of a recipe, the options and the card's words."""

import copy
import json
import re
from pathlib import Path

import pytest
from conftest import refused, save_dense, tiny_config, write_texts
from pydantic import ValidationError
from tables import TABLES

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
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.core.jsonfile import write_json
from hf_moe_expand.core.schema import Schema, changed, read
from hf_moe_expand.planning.methods import (
    METHODS,
    AnyPlan,
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

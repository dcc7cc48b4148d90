"""Model cards: valid metadata, figures that were measured, and nothing else."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from conftest import refused, save_dense
from hub_server import metadata_errors
from huggingface_hub import ModelCard

from hf_moe_expand import Plan, expand_checkpoint, grow_checkpoint, join_expansions, make_card
from hf_moe_expand.checkpoint.gate import Gate
from hf_moe_expand.core.schema import changed
from hf_moe_expand.evaluation.perplexity import LanguageScore
from hf_moe_expand.evaluation.report import Evaluation
from hf_moe_expand.modeling.language_gate import GateRule
from hf_moe_expand.report.inspection import inspect_checkpoint

PLANS = {
    "layer-moe": Plan("layer-moe", [3, 3, 2], [0], old=["en", "zh"], new=["el", "hu"]),
    "classified": Plan("moe-lpr", [3, 3, 3], [0, 1], old=["en"], new=["el"]),
    "gated": Plan("moe-lpr", [2, 2, 2], old=["en"], new=["el"]),
    "mola": Plan("mola", [2, 3, 4], old=["en"], new=["el"]),
    "moe-lpr": Plan("moe-lpr", [2, 2, 2], old=["en"], new=["el"]),
    "my-rule": Plan("my-rule", [2, 1, 5], old=["en"], new=["el"]),
    "my-groups": Plan("my-groups", [2, 1, 2], new=["el", "hu"], groups=[["el"], ["hu"]]),
    "dmoe": Plan("dmoe", [2, 1, 2], new=["el", "hu"], groups=[["el"], ["hu"]]),
}
TRAINING = {"learning_rate": 5e-5, "deepspeed": "/home/me/ds.json", "files": ["C:\\me\\el.jsonl"]}
STAGE = {
    "stage": "post-pretrain", "steps": 1200, "documents": {"el": 100}, "tokens": {"el": 123456}, "seed": 3,
    "settings": {"block_size": 32, "tokens_per_language": None, "training": TRAINING},
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    save_dense(folder / "tiny")
    for name, plan in PLANS.items():
        gate = Gate(GateRule(0, [["en"], ["el"]]), torch.zeros(2, 32), torch.zeros(2)) if name == "gated" else None
        expand_checkpoint(folder / "tiny", folder / name, plan, gate=gate)
    return folder


@pytest.fixture
def checkpoint(saved, tmp_path):
    return Path(shutil.copytree(saved / "layer-moe", tmp_path / "tiny-el"))


def edit(folder, **fields):
    """Changes fields of the last expansion in config.json."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["expansions"][-1] |= fields
    file.write_text(json.dumps(config))


def score(bits):
    return LanguageScore(perplexity=8 * bits, bits_per_byte=bits, tokens=100, bytes=250)


@pytest.fixture
def evaluation(tmp_path):
    models = {
        "tiny": {"en": score(1.0), "zh": score(2.0), "el": score(3.0), "hu": score(4.0)},
        "between": {"en": score(9.0)},
        "tiny-el": {"en": score(1.01), "zh": score(2.0), "el": score(1.5)},
    }
    Evaluation(["en", "zh"], ["el", "hu"], models).to_json(tmp_path / "evaluation.json")
    return tmp_path / "evaluation.json"


@pytest.mark.parametrize("name", PLANS)
def test_every_method_has_a_valid_card(saved, name):
    card = make_card(saved / name)
    text = str(card)
    assert metadata_errors(text) == []
    assert ModelCard(text).data.to_dict() == card.data.to_dict()
    assert not re.search(r"[{}]{2}(?!MoE-LPR|LLM)|{%|None|Undefined", text.replace("}},", "").replace("{{MoE", ""))
    methods = {"dmoe": ("dmoe", "my-groups"), "moe-lpr": ("moe-lpr", "classified", "gated")}
    method = next((method for method, names in methods.items() if name in names), "layer-moe")
    assert method in card.data.tags
    for said, names in {
        "2408.11396": PLANS.keys() - {"dmoe", "my-groups"},
        "2505.22582": PLANS.keys() - {"dmoe", "my-groups", "moe-lpr", "gated"},
        "[LayerMoE]": {"layer-moe", "mola", "my-rule"},
        "`my-rule`": {"my-rule"},
        "fewer where": {"layer-moe"},
        "routing classifier": {"layer-moe", "classified"},
        "the output of expert 0 alone": {"layer-moe", "classified"},
        "A language gate in layer 0 judges the text so far": {"gated"},
        "No evaluation was recorded": PLANS.keys(),
        "Not at all yet.": PLANS.keys(),
        f"| active for a token | {inspect_checkpoint(saved / name).active:,} (top-2) |": PLANS.keys(),
    }.items():
        assert (said in text) == (name in names), said


def test_metadata(checkpoint, evaluation):
    card = make_card(checkpoint, "me/tiny-el", evaluation, license="mit", base="org/tiny")
    assert metadata_errors(str(card)) == []
    data = yaml.safe_load(str(card).split("---")[1])
    (index,) = data.pop("model-index")
    assert "layer-moe" in data.pop("tags")
    assert data == {
        "language": ["en", "zh", "el", "hu"], "license": "mit", "library_name": "transformers",
        "pipeline_tag": "text-generation", "base_model": "org/tiny", "base_model_relation": "finetune",
    }  # fmt: skip
    assert index["name"] == "tiny-el"
    found = [(of["dataset"]["config"], one["type"], one["value"]) for of in index["results"] for one in of["metrics"]]
    bits = {"en": 1.01, "zh": 2.0, "el": 1.5}
    expected = [(code, "bits_per_byte", value) for code, value in bits.items()]
    assert sorted(found) == sorted(expected + [(code, "perplexity", 8 * value) for code, value in bits.items()])
    # Of a local folder as base there is no id, and no card that names a license.
    plain = yaml.safe_load(str(make_card(checkpoint)).split("---")[1])
    assert set(plain) == {"language", "library_name", "pipeline_tag", "tags"}


def test_results_put_old_languages_first_and_compare_with_the_base(checkpoint, evaluation):
    text = str(make_card(checkpoint, evaluation=evaluation))
    assert "| language | tiny | this model | this model vs tiny |" in text
    assert "| mean of old | 1.500 | 1.505 | +0.3 % |\n| el (new) | 3.000 | 1.500 | -50.0 % |" in text
    assert "| el (new) | 24.000 | 12.000 | -50.0 % |" in text
    assert "between" not in text
    assert "Text in hu. Following instructions" in text.replace("\n", " ")


def test_training_is_told_without_folders(checkpoint):
    edit(checkpoint, stages=[STAGE, {"stage": "average", "settings": {"models": ["a@1", "b@2"]}}])
    text = str(make_card(checkpoint))
    assert "Stage `post-pretrain`, 1,200 steps, seed 3." in text
    assert "| el | 100 | 123,456 |" in text
    assert "saw" not in text  # as in older histories
    settings = yaml.safe_load(text.split("```yaml")[1].split("```")[0])
    assert settings == {
        "block_size": 32,
        "training": {"learning_rate": 5e-5, "deepspeed": "ds.json", "files": ["el.jsonl"]},
    }
    assert "Stage `average`.\n\n```yaml\nmodels:\n- a@1\n- b@2\n```" in text
    assert "Not at all yet" not in text
    assert "/home" not in text
    edit(checkpoint, stages=[{**STAGE, "settings": {"note": "a\n```\n## Results"}}])
    assert "## Results" in str(make_card(checkpoint)).split("```yaml")[1].split("```")[0]  # no setting ends its block


def test_settings_are_those_of_what_the_model_has(saved, tmp_path):
    stage = {**STAGE, "settings": {"balance_coef": 0.01, "classifier_coef": 0.1, "gate_budget": 0.3, "block_size": 32}}
    for name, shown in (("layer-moe", {"balance_coef", "classifier_coef"}), ("gated", {"balance_coef"})):
        folder = Path(shutil.copytree(saved / name, tmp_path / name))
        edit(folder, stages=[stage])
        text = str(make_card(folder)).split("```yaml")[1].split("```")[0]
        assert yaml.safe_load(text).keys() == {"block_size", *shown}


def test_what_training_saw_stands_beside_what_was_at_hand(checkpoint):
    seen = {"blocks_seen": 48, "tokens_seen": 12_288}
    edit(checkpoint, stages=[{**STAGE, **seen, "tokens_seen_by_language": {"el": 12_288}}, {**STAGE, **seen}])
    text = str(make_card(checkpoint))
    assert text.count("1,200 steps, seed 3. It saw 12,288 tokens in 48 blocks.\n") == 2
    assert "| language | documents at hand | tokens at hand | tokens seen |\n| --- | ---: | ---: | ---: |\n" in text
    assert "| el | 100 | 123,456 | 12,288 |\n" in text
    assert "| language | documents at hand | tokens at hand |\n| --- | ---: | ---: |\n| el | 100 | 123,456 |\n" in text
    lines = inspect_checkpoint(checkpoint).lines()
    assert sum("1,200 steps, seed 3, 12,288 tokens seen of 123,456 at hand" in line for line in lines) == 2


def test_every_method_that_was_used_is_cited(checkpoint):
    own, fom = {"zhang2025lessbutbetter", "zhou2024moelpr"}, "elbayad2022fixing"
    for stage, papers in (
        (STAGE, set()),
        ({"stage": "graft", "settings": {"scale": 1.0}}, {"zhou2026dataefficient"}),
        ({**STAGE, "settings": {"masking": {"expert_output": 0.1}}}, {fom}),
        ({**STAGE, "settings": {"masking": {"expert_output": 0.0}, "curriculum": None}}, set()),
        ({**STAGE, "settings": {"curriculum": {"steps": 9}}}, {fom}),
    ):
        edit(checkpoint, stages=[STAGE, stage])
        text = str(make_card(checkpoint))
        assert set(re.findall(r"^@\w+\{(\w+),", text, re.M)) == own | papers
        assert text.count("```") % 2 == 0


def test_names_add_no_markup_to_the_card(saved, tmp_path, evaluation):
    """Of a pack, a base, a stage and a model in the evaluation."""
    for number, code in enumerate(("el", "hu")):
        plan = Plan("moe-lpr", [2, 2, 2], old=["en", "zh"], new=[code], exclusive=True)
        expand_checkpoint(saved / "tiny", tmp_path / code, plan, seed=number)
    joined = tmp_path / "tiny-el"
    join_expansions([tmp_path / "el", tmp_path / "hu"], joined)
    plain = str(make_card(joined, evaluation=evaluation))
    scores = json.loads(evaluation.read_text())
    old, new = scores["models"]["tiny"], scores["models"]["tiny-el"]
    scores.pop("mean_bits_per_byte")
    for name in ("[x](javascript:alert(1)) `x", "a | b | <img src=x>", "x\n\n## Results\n\nbest"):
        fields = json.loads((joined / "config.json").read_text())
        stage = {**STAGE, "stage": name, "tokens": {name: 3}, "documents": {name: 1}}
        fields["expansions"][0] |= {"pack": name, "base_model": name, "method": "moe-lpr", "stages": [stage]}
        (joined / "config.json").write_text(json.dumps(fields))
        evaluation.write_text(json.dumps({**scores, "models": {name: old, "tiny-el": new}}))
        text = str(make_card(joined, evaluation=evaluation))
        assert re.findall(r"^#+ .*", text, re.M)[:4] == re.findall(r"^#+ .*", plain, re.M)[:4]
        body = text.split("## Citation")[0]
        assert "](javascript" not in body
        assert "<img" not in body
        tables = [line for line in body.splitlines() if line.startswith("|")]
        assert {line.count("|") for line in tables} <= {3, 4, 5, 7}
        assert text.count("```") % 2 == 0


def test_the_history_of_several_expansions(checkpoint, tmp_path):
    second = Plan("moe-lpr", [4, 5, 2], [0, 2], old=["en", "zh", "el", "hu"], new=["tr"], grows_from=[3, 3, 2])
    grow_checkpoint(checkpoint, tmp_path / "second", second, copy_from={0: 2, 1: 1, 2: 1})
    third = changed(second, method="layer-moe", experts_per_layer=[4, 6, 3], new=["hi", "ro"], grows_from=[4, 5, 2])
    grow_checkpoint(tmp_path / "second", tmp_path / "third", third)
    card = make_card(tmp_path / "third")
    text = str(card)
    assert card.data.language == ["en", "zh", "el", "hu", "tr", "hi", "ro"]
    table = text.split("It was expanded 3 times:")[1].split("##")[0].strip().splitlines()
    assert table[2:] == [
        "| 1 | el, hu | layer-moe | 2 2 1 | copies of expert 0 | 0 |",
        "| 2 | tr | moe-lpr | 1 2 0 | copies of experts 2 1 - | 0 2 |",
        "| 3 | hi, ro | layer-moe | 0 1 1 | copies of expert 0 | 0 2 |",
    ]
    assert metadata_errors(text) == []
    assert "It was expanded" not in str(make_card(checkpoint))


def test_codes_become_those_of_the_hub_and_what_has_no_card(checkpoint):
    for code, wanted in (("zh-Hant", "zh"), ("yue", "yue"), ("ell", "el"), ("iw", "he")):
        edit(checkpoint, old_languages=[], new_languages=[code])
        assert make_card(checkpoint).data.language == [wanted]
    for code in ("xx", "greek", "e", ""):
        edit(checkpoint, new_languages=["hu", code])
        refused(make_card, checkpoint, says=rf"config.json: expansions: '{code}' is not a language code of ISO 639")
    secret = {**STAGE, "settings": {"training": {"hub_token": "hf_" + "x" * 30}}}
    edit(checkpoint, new_languages=["hu"], stages=[secret])
    refused(make_card, checkpoint, says="an access token")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "expansions": None}))
    refused(make_card, checkpoint, says="records no expansion")


def test_an_expansion_only_card_names_the_base_that_is_fetched(checkpoint):
    card = make_card(checkpoint, "me/x", license="mit", base="org/tiny", expansion_only=True)
    assert card.data.base_model_relation == "adapter"
    assert "holds only what the expansion added" in card.text
    assert "[org/tiny](https://huggingface.co/org/tiny)" in card.text


def test_the_name_in_the_evaluation(checkpoint, evaluation):
    renamed = checkpoint.rename(checkpoint.with_name("other"))
    said = r"has scores of tiny, between, tiny-el, but none of other; name this .*evaluated"
    refused(make_card, renamed, evaluation=evaluation, says=said)
    assert "1.010" in str(make_card(renamed, evaluation=evaluation, evaluated_as="tiny-el"))
    assert "1.010" in str(make_card(renamed, "tiny-el", evaluation))
    assert list(Evaluation.from_json(evaluation).of_this(["tiny"], evaluation).models) == ["this model"]

"""Plans: allocation and classifier layers against published figures; classifiers that the review stage places."""

import json
import math
import re
from pathlib import Path

import pytest
from conftest import TABLES, interrupted, load, refused, write_texts
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_moe_expand import Plan, ReviewConfig, ReviewTrainer, expand_checkpoint, train_stage
from hf_moe_expand.analysis.similarity import measure_similarity
from hf_moe_expand.core.jsonfile import write_json
from hf_moe_expand.core.schema import read
from hf_moe_expand.data.sources import LanguageText
from hf_moe_expand.evaluation.perplexity import LanguageScore
from hf_moe_expand.evaluation.report import Evaluation
from hf_moe_expand.inference.models import load_for_inference
from hf_moe_expand.planning.layers import classifier_layers, layers_in
from hf_moe_expand.planning.make import make_plan
from hf_moe_expand.planning.methods import METHODS, plan_settings, read_plan_settings
from hf_moe_expand.planning.methods.layer_moe import allocate_experts
from hf_moe_expand.planning.results import DeviationResult, RoutingResult, SimilarityResult
from hf_moe_expand.runs.recipe import Recipe
from hf_moe_expand.stages.run import check_frozen


def counts_of(layers, *method, seed=0, **keys):
    return make_plan(plan_settings(*method, **keys), layers, ["en"], ["el"], seed=seed).experts_per_layer


def test_published_similarities_allocations_and_classifiers(published):
    sheet = published["layermoe_llama32_3b_g1"]
    result = SimilarityResult.from_pairs(sheet["pairs"], sheet["old"], sheet["new"], 100_000)
    for name in ("new_new", "new_old", "similarity"):
        assert getattr(result, name) == pytest.approx(sheet[name], rel=1e-12), name
    assert allocate_experts(sheet["similarity"], sheet["total_experts"]) == sheet["experts_per_layer"]
    # The published last 7 are the layers of lowest similarity.
    assert classifier_layers("last", 7, range(28), sheet["new_old"]) == [0, 1, 2, 3, 24, 26, 27]
    # Qwen 1.5 1.8B: 72 on 24 layers is 48 new experts, the parameters of uniform 3 x 24.
    assert sum(published["layermoe_qwen15_1b8"]["g1"]) == 72 == sum(counts_of(24, "moe-lpr", experts=3))


@given(st.lists(st.floats(0.001, 1.0), min_size=1, max_size=12), st.integers(0, 40))
def test_allocation_spends_the_total_and_less_similar_layers_never_get_fewer_experts(similarity, extra):
    total = 2 * len(similarity) + extra
    counts = allocate_experts(similarity, total)
    assert sum(counts) == total
    assert min(counts) >= 2
    for a, of_a in zip(similarity, counts, strict=True):
        assert all(of_a >= of_b for b, of_b in zip(similarity, counts, strict=True) if a < b)
    # House monotonicity: no layer loses an expert because the total grew.
    larger = allocate_experts(similarity, total + 1)
    assert sorted(b - a for a, b in zip(counts, larger, strict=True)) == [0] * (len(similarity) - 1) + [1]


def test_allocation_is_the_ceiling_of_eq_10_for_some_divisor():
    # Adams' method: counts are ceil(share * delta') for one delta', the paper's ceiling with the total fixed.
    similarity = [0.0517, 0.0839, 0.1137, 0.2113, 0.3141]  # no ties
    counts = allocate_experts(similarity, 23, minimum=1)
    shares = [1 / s / sum(1 / s for s in similarity) for s in similarity]
    found = [[math.ceil(share * delta / 1000) for share in shares] for delta in range(1, 40_000)]
    assert counts in found


def test_a_similarity_that_is_not_positive_is_refused_by_layer_and_a_floor_helps():
    for bad in (0.0, -0.02, math.nan):
        refused(allocate_experts, [0.1, 0.2, bad, 0.1], 10, says=r"layer 2.*--similarity-floor")
    assert sum(allocate_experts([0.1, 0.2, -0.02, 0.1], 10, floor=0.05)) == 10


@pytest.mark.parametrize(("keys", "message"), TABLES["plans that cannot be made"])
def test_plans_that_cannot_be_made(keys, message):
    given = {"method": "moe-lpr", **keys} if "experts" in keys else keys
    refused(lambda: make_plan(plan_settings(**given), 3, [], []), says=message)


def test_allocations_that_need_no_analysis():
    """The same number in every layer, MoLA's shapes by quarters, and at random by the seed."""
    assert counts_of(3, "moe-lpr", experts=4) == [4, 4, 4]
    assert counts_of(8, "mola") == [2, 2, 4, 4, 6, 6, 8, 8]
    assert counts_of(8, "mola", shape="triangle") == [8, 8, 6, 6, 4, 4, 2, 2]
    assert counts_of(8, "mola", shape="hourglass") == [8, 8, 2, 2, 2, 2, 8, 8]
    assert counts_of(6, "mola") == [2, 2, 4, 6, 6, 8]
    one, again, other = (counts_of(24, "random", total_experts=72, seed=seed) for seed in (1, 1, 2))
    assert (sum(one), min(one) >= 2) == (72, True)
    assert one == again != other


def test_classifier_layers():
    new_old = [0.3, 0.1, 0.5, 0.5, 0.2]
    expanded = [0, 1, 2, 3, 4]
    assert classifier_layers("similarity", 3, expanded, new_old) == [0, 2, 3]
    assert classifier_layers("similarity", 2, [0, 1, 4], new_old) == [0, 4]
    assert classifier_layers("last", 2, expanded, new_old) == [1, 4]  # those where languages are least alike
    assert classifier_layers("last", 0, expanded) == []
    assert classifier_layers("all", 0, expanded) == expanded
    assert classifier_layers("none", 3, expanded) == []
    assert len(classifier_layers("random", 3, expanded, seed=4)) == 3
    refused(classifier_layers, "last", 6, expanded, new_old, says="6 classifier layers")


def test_classifiers_in_only_some_layers_and_analyses_of_other_models():
    only = plan_settings(method="moe-lpr", experts=2, only_layers="1-2", classifier_layers=1)
    assert make_plan(only, 5, ["en"], ["el"], LAYERS).classifier_layers == [2]
    refused(make_plan, only, 4, ["en"], ["el"], LAYERS, says="analysis has 5 layers, but the model has 4")


def test_plan_round_trip(tmp_path):
    plan = make_plan(plan_settings(experts=3, method="moe-lpr"), 4, ["en"], ["el"])
    assert plan.method == "moe-lpr"
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    (tmp_path / "plan.json").write_text('{"method": "a word", "experts_per_layer": [3.0, 1], "top_k": 1.0}')
    assert Plan.load(tmp_path / "plan.json") == Plan("a word", [3, 1], top_k=1)
    refused(Plan.load, tmp_path / "none.json", says="no such file")


@pytest.mark.parametrize(("changes", "message"), TABLES["wrong plans"])
def test_a_plan_that_is_wrong_is_refused_by_key(tmp_path, changes, message):
    (tmp_path / "plan.json").write_text(json.dumps({"method": "uniform", "experts_per_layer": [3, 1], **changes}))
    refused(Plan.load, tmp_path / "plan.json", says=re.escape(message))


# Each kind of file of results, as it is right, then one wrong key and what is said.
SIMILARITY = SimilarityResult(["en"], ["el"], 9, {}, None, [0.1, 0.2], [0.1, 0.2])
DEVIATION = DeviationResult(["el"], [0.1, 0.2], {}, [[1.0]], [1], 1, 1e-3, 1, 2, 0)
EVALUATION = Evaluation(["en"], ["el"], {"a": {"en": LanguageScore(8.0, 3.0, 10, 10)}})


@pytest.mark.parametrize(
    ("result", "changes", "message"),
    [
        (SIMILARITY, {"tokens": "many"}, "not a similarity analysis: tokens: Input should be a valid integer"),
        (SIMILARITY, {"new_old": [0.1]}, "new_old has 1 entries for 2 layers"),
        (SIMILARITY, {"pairs": {"el-en": [0.1]}}, "pairs.el-en has 1 entries for 2 layers"),
        (DEVIATION, {"by_language": {"el": [0.1]}}, "by_language.el has 1 entries for 2 layers"),
        (EVALUATION, {"tasks": 7}, "tasks: Input should be a valid dictionary"),
        (EVALUATION, {"models": {"a": {"en": {}}}}, r"models\.a\.en\.perplexity: Field required"),
    ],
)
def test_results_that_are_wrong_are_refused_by_key(tmp_path, result, changes, message):
    file = tmp_path / "result.json"
    result.to_json(file)
    assert type(result).from_json(file) == result
    write_json(file, json.loads(file.read_text()) | changes)
    refused(type(result).from_json, file, says=message)
    refused(RoutingResult.from_json, file, says="not a routing analysis: ")


LAYERS = SimilarityResult(["en"], ["el"], 0, {}, None, *([[0.9, 0.2, 0.4, 0.8, 0.3]] * 2))
KEYS = {"moe-lpr": {"experts": 3}, "layer-moe": {"total_experts": 11}, "random": {"total_experts": 11}, "mola": {}}


@pytest.mark.parametrize("keys", [{"method": name, **keys} for name, keys in KEYS.items()], ids=KEYS)
def test_only_some_layers_are_planned_and_the_others_stay_dense(keys):
    for text, layers in (("4-11", [*range(4, 12)]), ("0", [0]), ("6-8, 0", [0, 6, 7, 8]), ("1-3,2-4", [1, 2, 3, 4])):
        assert layers_in(text, 12) == layers
    chosen = layers_in("1,3-4", 5)
    assert chosen == [1, 3, 4]
    plan = make_plan(plan_settings(**keys, only_layers="1,3-4"), 5, ["en"], ["el"], LAYERS, seed=3)
    counts = plan.experts_per_layer
    assert [counts[0], counts[2]] == [1, 1]
    assert min(counts[layer] for layer in chosen) >= 2
    # The obvious definition: the plan of a model that has these layers alone.
    alone = {**keys, **({"total_experts": 9} if "total_experts" in keys else {})}
    analysis = SimilarityResult(["en"], ["el"], 0, {}, None, *([[LAYERS.similarity[i] for i in chosen]] * 2))
    small = make_plan(plan_settings(**alone), 3, ["en"], ["el"], analysis, seed=3)
    assert [counts[layer] for layer in chosen] == small.experts_per_layer
    assert plan.settings["only_layers"] == "1,3-4"
    if "total_experts" in keys:
        assert plan.total_experts == 11
    if keys["method"] == "layer-moe":
        assert plan.settings["similarity"] == LAYERS.similarity


def test_layers_that_are_dense_do_not_grow():
    settings = plan_settings(method="moe-lpr", experts=1)
    plan = make_plan(settings, 5, ["en"], ["tr"], grows_from=[2, 1, 3, 1, 2])
    assert plan.experts_per_layer == [3, 1, 4, 1, 3]
    some = plan_settings(method="moe-lpr", experts=1, only_layers="2")
    assert make_plan(some, 5, ["en"], ["tr"], grows_from=[2, 1, 3, 1, 2]).experts_per_layer == [2, 1, 4, 1, 2]
    total = plan_settings(total_experts=4)
    assert sum(make_plan(total, 5, ["en"], ["tr"], LAYERS, grows_from=[2, 1, 3, 1, 2]).experts_per_layer) == 9 + 4
    dense = plan_settings(method="moe-lpr", experts=1, only_layers="0-2")
    said = "only_layers names layer 1, which is dense in the model that grows"
    refused(make_plan, dense, 5, [], [], says=said, grows_from=[2, 1, 3, 1, 2])
    refused(Plan, "x", [2, 2], says="layer 1 is dense in the model that grows, so it gets no", grows_from=[2, 1])


def test_the_analysis_that_a_plan_needs():
    keys = {**KEYS, "dmoe": {"groups": 2}, "exclusive": {}}
    needs = {name: needed for name, of in keys.items() if (needed := plan_settings(name, **of).needs)}
    assert needs == {"layer-moe": "similarity", "dmoe": "deviation"}
    for choice, needed in {"similarity": "similarity", "last": "similarity", "random": None}.items():
        assert plan_settings("mola", classifier_layers=2, classifier_choice=choice).needs == needed


@pytest.mark.parametrize(("mapping", "message"), TABLES["wrong plan settings"])
def test_a_wrong_plan_is_refused_by_key(mapping, message):
    assert refused(read_plan_settings, mapping).startswith(message)
    recipe = {"base": "b", "output": "o", "old": {"en": "x"}, "new": {"el": "x"}, "plan": mapping}
    assert refused(read, Recipe, recipe, "a.yaml").startswith(f"a.yaml: plan: {message}")
    if isinstance(mapping, dict) and "method" in mapping:
        assert refused(plan_settings, **mapping).startswith(message)


def test_the_guides_own_plan_is_a_plan(tmp_path):
    guide = (Path(__file__).parents[1] / "docs" / "choose.md").read_text("utf-8")
    (block,) = re.findall(r"```json\n(.*experts_per_layer.*)\n```", guide)
    (tmp_path / "plan.json").write_text(block)
    plan = Plan.load(tmp_path / "plan.json")
    assert (METHODS.get(plan.method), plan.total_experts) == (None, 12)


QUICK = {"block_size": 16, "max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 2, "disable_tqdm": True}


@pytest.fixture(scope="module")
def root(base, tmp_path_factory):
    root = tmp_path_factory.mktemp("placement")
    write_texts(root / "el.jsonl", [f"η γάτα {i} κάθεται" for i in range(30)])
    write_texts(root / "en.jsonl", [f"the cat {i} sits" for i in range(20)])
    for name, layers in {"plain": [], "classified": [2]}.items():
        expand_checkpoint(base, root / name, Plan("own", [2, 1, 2], layers, old=["en"], new=["el"]))
    return root


@pytest.fixture
def data(root):
    return {code: LanguageText(code, str(root / f"{code}.jsonl")) for code in ("en", "el")}


@pytest.mark.parametrize(("choice", "nearest"), [("similarity", max), ("last", min)])
def test_review_places_and_trains_them(root, data, tmp_path, choice, nearest, caplog):
    config = ReviewConfig(classifier_layers=1, classifier_choice=choice, classifier_tokens=200, **QUICK)
    record = train_stage(root / "plain", tmp_path / "out", data, config)
    assert "MISSING" not in caplog.text  # the library would advise to train what this stage is about to train
    model, tokenizer = load_for_inference(root / "plain")
    texts = {code: text.load().shuffle(seed=0)["text"] for code, text in data.items()}
    new_old = measure_similarity(model, tokenizer, texts, ["en"], ["el"], 200, 16).new_old
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert fields["expansions"][-1]["classifier_layers"] == fields["classifier_layers"]
    (layer,) = fields["classifier_layers"]
    assert new_old[layer] == nearest(new_old[0], new_old[2])
    assert record.settings["classifier_layers"] == 1
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert weights[f"model.layers.{layer}.mlp.classifier.weight"].any()  # which begins at zero
    assert check_frozen(root / "plain", tmp_path / "out", ReviewConfig())  # P3 knows what was added
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info


def test_what_cannot_have_them_is_refused_before_anything_runs(root, data, tmp_path):
    config = ReviewConfig(str(tmp_path / "run"), classifier_layers=1, **QUICK)
    said = "classifiers already, in layers 2: leave it out"
    refused(train_stage, root / "classified", tmp_path / "out", data, config, says=said)
    said = "`train_stage` measures and places"
    refused(ReviewTrainer, load(root / "plain"), config, says=said)
    assert not list(tmp_path.iterdir())


def test_an_interrupted_review_goes_on_with_the_layers_that_it_chose(root, data, tmp_path, monkeypatch):
    config = ReviewConfig(classifier_layers=1, **QUICK)
    train_stage(root / "plain", tmp_path / "whole", data, config)
    with interrupted(3), pytest.raises(KeyboardInterrupt):
        train_stage(root / "plain", tmp_path / "out", data, config)
    monkeypatch.setattr(ReviewConfig, "_chosen", lambda *_: pytest.fail("measured again"))
    train_stage(root / "plain", tmp_path / "out", data, config)
    whole, out = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "out"))
    assert whole == out

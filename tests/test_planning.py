"""Allocation, classifier layers and plans, against published figures and properties."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_moe_expand.analysis.result import SimilarityResult
from hf_moe_expand.errors import InputError
from hf_moe_expand.planning.allocation import allocate_experts, mola_experts, random_experts, uniform_experts
from hf_moe_expand.planning.layers import classifier_layers
from hf_moe_expand.planning.make import make_plan
from hf_moe_expand.planning.plan import Plan
from hf_moe_expand.settings import PlanSettings

similarities = st.lists(st.floats(0.001, 1.0), min_size=1, max_size=12)


def test_published_similarities_of_llama_3_2_3b(published):
    sheet = published["layermoe_llama32_3b_g1"]
    result = SimilarityResult.from_pairs(sheet["pairs"], sheet["old"], sheet["new"], 100_000)
    for name in ("new_new", "new_old", "similarity"):
        assert getattr(result, name) == pytest.approx(sheet[name], rel=1e-12), name


def test_published_allocation_of_llama_3_2_3b(published):
    sheet = published["layermoe_llama32_3b_g1"]
    assert allocate_experts(sheet["similarity"], sheet["total_experts"]) == sheet["experts_per_layer"]


def test_published_totals_of_qwen_1_5_1_8b(published):
    # 72 on 24 layers is 48 new experts, the parameters of uniform 3 x 24.
    sheet = published["layermoe_qwen15_1b8"]
    assert sum(sheet["g1"]) == 72 == sum(uniform_experts(24, 3))


@given(similarities, st.integers(0, 40))
def test_allocation_spends_the_total_and_keeps_the_minimum(similarity, extra):
    total = 2 * len(similarity) + extra
    counts = allocate_experts(similarity, total)
    assert sum(counts) == total
    assert min(counts) >= 2


@given(similarities, st.integers(0, 40))
def test_less_similar_layers_never_get_fewer_experts(similarity, extra):
    counts = allocate_experts(similarity, 2 * len(similarity) + extra)
    for i, a in enumerate(similarity):
        for j, b in enumerate(similarity):
            if a < b:
                assert counts[i] >= counts[j]


@given(similarities, st.integers(1, 40))
def test_one_more_expert_changes_one_layer(similarity, extra):
    # House monotonicity: no layer loses an expert because the total grew.
    total = 2 * len(similarity) + extra
    smaller, larger = allocate_experts(similarity, total - 1), allocate_experts(similarity, total)
    assert sorted(b - a for a, b in zip(smaller, larger, strict=True)) == [0] * (len(similarity) - 1) + [1]


def test_allocation_is_the_ceiling_of_eq_10_for_some_divisor():
    # Adams' method: counts are ceil(share * delta') for one delta', the paper's ceiling with the total fixed.
    similarity = [0.0517, 0.0839, 0.1137, 0.2113, 0.3141]  # no ties
    counts = allocate_experts(similarity, 23, minimum=1)
    shares = [1 / s / sum(1 / s for s in similarity) for s in similarity]
    found = [[math.ceil(share * delta / 1000) for share in shares] for delta in range(1, 40_000)]
    assert counts in found


@pytest.mark.parametrize("bad", [0.0, -0.02, float("nan")])
def test_a_similarity_that_is_not_positive_is_refused_by_layer_and_a_floor_helps(bad):
    with pytest.raises(InputError, match=r"layer 2.*--similarity-floor"):
        allocate_experts([0.1, 0.2, bad, 0.1], 10)
    if bad == bad:
        assert sum(allocate_experts([0.1, 0.2, bad, 0.1], 10, floor=0.05)) == 10


def test_a_total_below_the_minimum_is_refused():
    with pytest.raises(InputError, match="need 8 or more"):
        allocate_experts([0.1] * 4, 7)


def test_mola_shapes_by_quarters():
    assert mola_experts(8) == [2, 2, 4, 4, 6, 6, 8, 8]
    assert mola_experts(8, "triangle") == [8, 8, 6, 6, 4, 4, 2, 2]
    assert mola_experts(8, "hourglass") == [8, 8, 2, 2, 2, 2, 8, 8]
    assert mola_experts(6) == [2, 2, 4, 6, 6, 8]
    with pytest.raises(InputError, match="Unknown MoLA shape"):
        mola_experts(8, "circle")


def test_random_allocation_has_the_total_and_follows_the_seed():
    assert sum(random_experts(24, 72, seed=1)) == 72
    assert random_experts(24, 72, seed=1) == random_experts(24, 72, seed=1) != random_experts(24, 72, seed=2)


def test_classifier_layers():
    new_old = [0.3, 0.1, 0.5, 0.5, 0.2]
    expanded = [0, 1, 2, 3, 4]
    assert classifier_layers("similarity", 3, expanded, new_old) == [0, 2, 3]
    assert classifier_layers("similarity", 2, [0, 1, 4], new_old) == [0, 4]
    assert classifier_layers("last", 2, expanded) == [3, 4]
    assert classifier_layers("last", 0, expanded) == []
    assert classifier_layers("all", 0, expanded) == expanded
    assert classifier_layers("none", 3, expanded) == []
    assert len(classifier_layers("random", 3, expanded, seed=4)) == 3
    with pytest.raises(InputError, match="6 classifier layers"):
        classifier_layers("last", 6, expanded)


def test_plan_round_trip_and_errors(tmp_path):
    plan = make_plan(PlanSettings(experts=3, method="uniform"), 4, ["en"], ["el"])
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    (tmp_path / "bad.json").write_text('{"method": "uniform", "experts_per_layer": [3], "classifer_layers": []}')
    with pytest.raises(InputError, match="classifer_layers"):
        Plan.load(tmp_path / "bad.json")
    with pytest.raises(InputError, match="no such file"):
        Plan.load(tmp_path / "none.json")
    with pytest.raises(InputError, match="no router"):
        Plan("uniform", [3, 1], classifier_layers=[1])
    with pytest.raises(InputError, match="needs `total_experts`"):
        make_plan(
            PlanSettings(), 2, ["en"], ["el"], SimilarityResult.from_pairs({"el-en": [0.1, 0.2]}, ["en"], ["el"], 9)
        )

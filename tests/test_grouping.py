"""Language groups, layer choice and dmoe plans, against published figures and obvious definitions."""

import json
from itertools import combinations

import numpy as np
import pytest
from conftest import refused
from hypothesis import given
from hypothesis import strategies as st

from hf_moe_expand import Plan, group_languages, select_layers
from hf_moe_expand.core.schema import changed
from hf_moe_expand.planning import grouping
from hf_moe_expand.planning.grouping import _grown_set, random_groups, vector_similarity
from hf_moe_expand.planning.make import make_plan
from hf_moe_expand.planning.methods import plan_settings, read_plan_settings
from hf_moe_expand.planning.results import DeviationResult, SimilarityResult

EYE = [[1, 0], [0, 1]]


@st.composite
def similarities(draw, largest=7):
    """Names in no order, a symmetric matrix with many ties, and a number of groups."""
    n = draw(st.integers(1, largest))
    names = draw(st.permutations([f"l{i}" for i in range(n)]))
    matrix = [[9.0] * n for _ in range(n)]
    for i, j in combinations(range(n), 2):
        matrix[i][j] = matrix[j][i] = draw(st.integers(-3, 3)) / 3
    return matrix, names, draw(st.integers(1, n))


def least(matrix, names, group):
    return min((matrix[names.index(a)][names.index(b)] for a, b in combinations(group, 2)), default=0.0)


def slow_groups(matrix, names, number):
    """Algorithm 1: every set of the size is looked at, in alphabetical order, and the first of the best ones taken."""
    remaining, found = sorted(names), []
    for part in np.array_split(range(len(names)), number):  # the larger ones first
        group = max(combinations(remaining, len(part)), key=lambda group: least(matrix, names, group))
        found.append(list(group))
        remaining = [name for name in remaining if name not in group]
    return found


def slow_grown_set(matrix, names, size):
    group = list(max(combinations(names, 2), key=lambda pair: least(matrix, names, pair)))  # the first of equal ones
    while len(group) < size:
        others = [name for name in names if name not in group]
        group.append(max(others, key=lambda name: min(least(matrix, names, (name, one)) for one in group)))
    return sorted(group)


def test_published_groups_and_layers_of_bloom_560m(published):
    sheet = published["dmoe_bloom_560m_grouping"]
    for number in (9, 6):
        found = group_languages(sheet["similarity_rank"], sheet["languages"], number)
        assert found == sheet[f"groups_{number}"]
    sheet = published["dmoe_bloom_560m_deviation"]
    assert select_layers(sheet["ffn_deviation"], ratio=0.4) == sheet["moe_layers_ratio_0.4"]
    assert select_layers(sheet["ffn_deviation"], threshold=0.6) == sheet["moe_layers_threshold_0.6"]


@given(similarities(), st.data())
def test_groups_are_the_best_of_all_sets_and_beyond_the_bound_a_group_grows_one_by_one(drawn, data):
    assert group_languages(*drawn) == slow_groups(*drawn)
    matrix, names, _ = drawn
    names = sorted(names)
    if len(names) > 1:
        size = data.draw(st.integers(2, len(names)))
        found = _grown_set(matrix, list(range(len(names))), size)
        assert [names[i] for i in found] == slow_grown_set(matrix, names, size)


def test_the_two_forms_can_differ_and_both_find_planted_families():
    # The closest pair of all, a-b, has no good third; c, d and e are better together.
    names, close = list("abcdef"), {"ab": 0.9, "cd": 0.7, "ce": 0.7, "de": 0.7}
    matrix = [[close.get(x + y, close.get(y + x, 0.0)) for y in names] for x in names]
    assert group_languages(matrix, names, 2) == [["c", "d", "e"], ["a", "b", "f"]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouping, "MOST_SETS", 0)
        assert group_languages(matrix, names, 2) == [["a", "b", "c"], ["d", "e", "f"]]
    generator = np.random.default_rng(0)
    families = generator.normal(size=(16, 40))[np.arange(128) % 16]
    vectors = families + 0.1 * generator.normal(size=(128, 40))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    names = [f"{i:03d}" for i in range(128)]
    found = group_languages(vectors @ vectors.T, names, 16)
    assert sorted(found) == sorted([f"{i:03d}" for i in range(family, 128, 16)] for family in range(16))


def test_wrong_similarities_and_a_choice_of_layers_that_selects_none_are_refused():
    for message, *similarities in (
        ("groups is 3: must be from 1 to 2", EYE, ["a", "b"], 3),
        ("a is named twice", EYE, ["a", "a"], 1),
        (r"shape \[2, 2\], but 3 languages need \[3, 3\]", EYE, ["a", "b", "c"], 1),
        ("must be a symmetric matrix", [[1, 0.5], [0, 1]], ["a", "b"], 1),
        ("finite", [[1, float("nan")], [float("nan"), 1]], ["a", "b"], 1),
    ):
        refused(group_languages, *similarities, says=message)
    assert len(select_layers([float(i) for i in range(100)], ratio=0.29)) == 29  # 0.29 * 100 < 29 in floating point
    for message, deviation, choice in (
        ("exactly one", [1, 2, 3], {}),
        ("ratio of 0.3 selects no layer", [1, 2, 3], {"ratio": 0.3}),
        ("deviate equally", [2, 2, 2], {"threshold": 0.5}),
        ("finite", [1, float("nan")], {"ratio": 0.5}),
    ):
        refused(select_layers, deviation, says=message, **choice)


def test_random_groups_are_balanced_and_follow_the_seed():
    names = [f"l{i}" for i in range(11)]
    found = random_groups(names, 4, seed=3)
    assert sorted(name for group in found for name in group) == sorted(names)
    assert [len(group) for group in found] == [3, 3, 3, 2]
    assert found == random_groups(names[::-1], 4, seed=3) != random_groups(names, 4, seed=4)
    refused(random_groups, names, 12, says="groups is 12")


def test_wrong_dmoe_settings_are_refused():
    """Groups by hand name every language once."""
    for message, settings in (
        ("de is named twice", {"groups": [["en", "de"], ["de", "el", "tr"]]}),
        ("tr is in no group", {"groups": [["en", "de"], ["el"]]}),
        ("fr was not measured; known: en, de, el, tr", {"groups": [["en", "de", "el", "tr"], ["fr"]]}),
        ("not a language code", {"groups": [["en", False], ["el"]]}),
        ("so leave out grouping `random`", {"groups": [["en", "de"], ["el", "tr"]], "grouping": "random"}),
        ("run `analyze deviation` first", {"groups": 2, "deviation": None}),
    ):
        refused(dmoe, says=message, **settings)


def test_groups_by_vectors_are_by_their_cosines(tmp_path):
    vectors = {"el": [1.0, 0.0], "hu": [3.0, 4.0], "xx": [1.0], "tr": [0.0, -2.0]}
    (tmp_path / "v.json").write_text(json.dumps(vectors))
    found = vector_similarity(tmp_path / "v.json", ["tr", "el", "hu"])
    assert np.allclose(found, [[1, 0, -0.8], [0, 1, 0.6], [-0.8, 0.6, 1]])


def test_wrong_vectors_are_refused(tmp_path):
    for text, message in (
        ('{"el": [1, 2]}', "no vector for hu"),
        ('{"el": [1, 2], "hu": [0, 0]}', "vector of hu is all zeros"),
        ('{"el": [1, 2], "hu": [1, "--"]}', r"vectors.hu\[1\]: Input should be a valid number.*, found '--'"),
        ("el,1,2\nhu,--,1\n", r"v\.json: "),
    ):
        (tmp_path / "v.json").write_text(text)
        refused(vector_similarity, tmp_path / "v.json", ["el", "hu"], says=message)
    refused(vector_similarity, tmp_path / "none.json", ["el", "hu"], says="no such file")


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.integers(1, 12))
def test_a_ratio_takes_the_layers_that_deviate_most(deviation, tenths):
    count = len(deviation) * min(tenths, 10) // 10
    if count == 0:
        refused(select_layers, deviation, says="selects no layer", ratio=min(tenths, 10) / 10)
        return
    chosen = select_layers(deviation, ratio=min(tenths, 10) / 10)
    assert len(chosen) == count
    assert chosen == sorted(set(chosen))
    for layer in chosen:
        # Fewer layers than are chosen come before it: deviate more, or as much and lie earlier.
        assert sum((-d, i) < (-deviation[layer], layer) for i, d in enumerate(deviation)) < count


@given(st.lists(st.integers(0, 8), min_size=2, max_size=12).filter(lambda d: len(set(d)) > 1), st.integers(0, 8))
def test_a_threshold_is_on_the_scaled_deviation(deviation, eighths):
    scaled = [(d - min(deviation)) / (max(deviation) - min(deviation)) for d in deviation]
    expected = [layer for layer, value in enumerate(scaled) if value >= eighths / 8]
    assert select_layers(deviation, threshold=eighths / 8) == expected


FOUND = DeviationResult(
    languages=["en", "de", "el", "tr"], deviation=[5.0, 1.0, 2.0, 4.0, 3.0], by_language={},
    similarity=[[1, 0.9, 0.1, 0.2], [0.9, 1, 0.1, 0.2], [0.1, 0.1, 1, 0.3], [0.2, 0.2, 0.3, 1]],
    layers=[2, 3, 4], steps=10, learning_rate=8e-6, batch_size=8, block_size=64, seed=0,
)  # fmt: skip


def dmoe(deviation=FOUND, seed=0, **settings):
    return make_plan(plan_settings("dmoe", **settings), 5, [], [], seed=seed, analysis=deviation)


def test_a_dmoe_plan_has_one_expert_a_group_in_the_layers_that_deviate_most(tmp_path):
    plan = dmoe(groups=2)
    assert plan.groups == [["de", "en"], ["el", "tr"]]
    assert plan.experts_per_layer == [2, 1, 1, 2, 1]  # 0.4 of 5 layers
    assert (plan.method, plan.old, plan.new, plan.classifier_layers) == ("dmoe", [], [], [])
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert dmoe(groups=3, threshold=0.5).experts_per_layer == [3, 1, 1, 3, 3]
    assert dmoe(groups=2, ratio=1.0).experts_per_layer == [2] * 5


def test_groups_by_hand_at_random_and_from_vectors(tmp_path):
    by_hand = [["en", "tr"], ["el"], ["de"]]
    plan = make_plan(read_plan_settings({"method": "dmoe", "groups": by_hand}), 5, [], [], FOUND)
    assert (plan.groups, plan.experts_per_layer) == (by_hand, [3, 1, 1, 3, 1])
    drawn = dmoe(groups=2, grouping="random", seed=5)
    assert (drawn.groups, drawn.settings["seed"]) == (random_groups(FOUND.languages, 2, 5), 5)
    vectors = tmp_path / "vectors.json"
    vectors.write_text(json.dumps({"en": [1, 0], "tr": [1, 0.1], "de": [0, 1], "el": [0.2, 1]}))
    plan = dmoe(groups=2, grouping=str(vectors))
    assert plan.groups == [["en", "tr"], ["de", "el"]]
    assert str(tmp_path) not in json.dumps(plan.settings)


# En and de are alike, and el and tr; layers 1 and 3 tell languages apart best.
ALIKE = SimilarityResult.from_pairs(
    {
        f"{one}-{other}": [value * of_layer for of_layer in (0.9, 0.2, 0.8, 0.3, 0.7)]
        for one, other, value in [
            ("en", "de", 1.0), ("en", "el", 0.1), ("en", "tr", 0.2), ("de", "el", 0.1), ("de", "tr", 0.2),
            ("el", "tr", 0.4),
        ]
    },
    [], ["en", "de", "el", "tr"], 9,
)  # fmt: skip


def test_one_pass_gives_groups_and_layers_in_place_of_a_training_for_each_language():
    plan = make_plan(plan_settings("dmoe", groups=2, grouping="similarity"), 5, [], [], ALIKE)
    assert plan.groups == [["de", "en"], ["el", "tr"]]
    assert plan.experts_per_layer == [1, 2, 1, 2, 1]
    assert plan.settings["similarity"] == ALIKE.similarity
    by_hand = plan_settings("dmoe", groups=[["en", "tr"], ["de", "el"]], grouping="similarity", ratio=0.2)
    assert make_plan(by_hand, 5, [], [], ALIKE).experts_per_layer == [1, 2, 1, 1, 1]
    settings = plan_settings("dmoe", groups=2, grouping="similarity")
    refused(make_plan, settings, 5, [], [], FOUND, says="run `analyze similarity` first")
    earlier = changed(ALIKE, pairs={name: values for name, values in ALIKE.pairs.items() if name != "en-de"})
    refused(make_plan, settings, 5, [], [], earlier, says="lacks the pair en-de: run `analyze similarity` again")


def test_a_plan_whose_groups_do_not_fit_is_refused():
    plan = dmoe(groups=2)
    for message, changes in (
        ("layer 0, 3 must have 1 expert, or 3, one for each group", {"groups": [["en"], ["de"], ["el"]]}),
        ("en is named twice", {"groups": [["en"], ["de", "en"]]}),
        ("a group is empty", {"groups": [["en"], []]}),
        ("a dmoe plan must name the languages", {"groups": []}),
        ("no classifiers", {"classifier_layers": [0]}),
        ("for a dense model", {"grows_from": [1, 1, 1, 1, 1]}),
    ):
        refused(changed, plan, says=message, **changes)


def test_random_layers_are_as_many_as_those_that_deviate_most_and_follow_the_seed():
    """DMoE figure 5."""
    plans = [dmoe(groups=2, ratio=0.6, layers_by="random", seed=seed) for seed in range(8)]
    assert {sum(count > 1 for count in plan.experts_per_layer) for plan in plans} == {3}
    assert len({tuple(plan.experts_per_layer) for plan in plans}) > 1
    assert plans[3] == dmoe(groups=2, ratio=0.6, layers_by="random", seed=3)
    assert plans[3].groups == dmoe(groups=2, ratio=0.6).groups
    assert (plans[3].settings["layers_by"], plans[3].settings["seed"]) == ("random", 3)
    by_threshold = dmoe(groups=2, threshold=0.5, layers_by="random")
    assert sorted(by_threshold.experts_per_layer) == [1, 1, 2, 2, 2]

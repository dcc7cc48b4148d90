"""When languages enter, how often they are drawn, and that neither interruption nor ranks change the order."""

import json
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from accelerate.data_loader import BatchSamplerShard, skip_first_batches
from conftest import invoke, refused, write_texts
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader
from transformers import Trainer

from hf_moe_expand import GroupConfig, JointConfig, Plan, PostPretrainConfig, expand_checkpoint, train_stage
from hf_moe_expand.data.curriculum import Curriculum, count_based, step_based
from hf_moe_expand.data.sources import LanguageText
from hf_moe_expand.evaluation.validation import ValidationCurves
from hf_moe_expand.trainers import CurriculumSampler, LanguageMix
from hf_moe_expand.trainers.samplers import apportion


def test_count_based_bins_are_the_papers():
    counts = {"fr": 180e6, "is": 5e6, "sw": 4_999_999, "ta": 800_000, "wo": 799_999, "hi": 40_000}
    found = count_based(counts, 100_000)
    assert found.entry == {"fr": 0, "is": 0, "sw": 60_000, "ta": 60_000, "wo": 80_000, "hi": 80_000}
    assert count_based(counts, 500).entry == {"fr": 0, "is": 0, "sw": 300, "ta": 300, "wo": 400, "hi": 400}
    assert count_based({"sw": 900_000, "wo": 10}, 100).entry == {"sw": 0, "wo": 80}  # the first bin is empty
    assert count_based({"a": 10, "b": 3}, 40, thresholds=[5], shares=[1, 0.25]).entry == {"a": 0, "b": 30}
    refused(count_based, counts, 100, says="2 thresholds make 3 bins, but 2 shares", shares=[1, 0.5])
    refused(count_based, counts, 100, says="finite numbers, from large to small", thresholds=[1, 2])
    refused(count_based, counts, 100, says="must be finite numbers above 0 and at most 1", shares=[2, 1, 0.5])


def test_step_based_is_algorithm_1_by_hand():
    # s_max 100, s_min 20, n = 5: delta 20, k = 100, 80, 60, 40, 20.
    best = {"a": 100, "b": 91, "c": 90, "d": 65, "e": 45, "f": 29, "g": 20}
    # Nearest: a, b, and c (a tie, of which the first) to 100; d to 60; e to 40; f and g to 20 (29 is 9 away).
    found = step_based(best, 5, 100)
    assert found.entry == {"a": 0, "b": 0, "c": 0, "d": 40, "e": 60, "f": 80, "g": 80}
    # The paper's: the first three of five are one bin.
    assert step_based(best, 5, 100, merge_first=3).entry == {**found.entry, "d": 0}
    assert step_based(best, 1, 100).entry == dict.fromkeys(best, 0)
    assert step_based({"a": 50, "b": 50}, 3, 100).entry == {"a": 0, "b": 0}
    # The best of all comes before the end: nothing else would train before U - s_max.
    assert step_based({"a": 80, "b": 30}, 2, 100).entry == {"a": 0, "b": 70}
    assert step_based({"a": 80, "b": 30}, 2, 100, new_steps=50).entry == {"a": 0, "b": 35}
    refused(step_based, {"a": 101}, 2, 100, says="best step of 'a' is 101, but the run had only the steps 1 to 100")
    refused(step_based, best, 2, 100, says="merge_first at most bins", merge_first=3)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 60), min_size=1), st.integers(1, 7))
def test_step_based_is_algorithm_1(best, bins):
    largest, smallest = max(best.values()), min(best.values())
    delta = Fraction(largest - smallest, bins - 1) if bins > 1 else Fraction(0)
    k = [largest - i * delta for i in range(bins)]
    found = step_based(best, bins, 60)
    for language, step in best.items():
        nearest = min(range(bins), key=lambda i: (abs(step - k[i]), i))
        expected = 0 if k[nearest] == largest else 60 - k[nearest]
        assert abs(found.entry[language] - expected) <= Fraction(1, 2)
    assert 0 in found.entry.values()


def test_curriculum_files(tmp_path):
    path = tmp_path / "curriculum.json"
    Curriculum(10, {"el": 0, "hi": 8}).save(path)
    assert json.loads(path.read_text()) == {"steps": 10, "entry": {"el": 0, "hi": 8}}
    found = Curriculum.load(path)
    assert found == Curriculum(10, {"el": 0, "hi": 8})
    found.check_languages(["hi", "el"])
    refused(found.check_languages, ["el", "tr"], says=r"hi does not train here; known: el, tr")
    refused(found.check_languages, ["el", "hi", "tr"], says="the step at which tr enters is missing")
    for value, message in (
        ({"steps": 10, "entry": {"el": 0, "hi": 10}}, "'hi' enters at step 10, but the training has only the steps"),
        ({"steps": 10, "entry": {"el": 0, "hi": -1}}, "'hi' enters at step -1"),
        ({"steps": 10, "entry": {"el": 2}}, r"no language trains from the start \(the first enters at step 2\)"),
        ({"steps": 10, "enter": {}}, "unknown key `enter`; did you mean `entry`"),
        ({"steps": 10}, "entry: Field required"),
    ):
        path.write_text(json.dumps(value))
        refused(Curriculum.load, path, says=rf"curriculum\.json: .*{message}")
    refused(Curriculum.load, tmp_path / "none.json", says="no such file")


def languages_of(mix, rows):
    ends = np.cumsum(mix.rows)
    return [int(np.searchsorted(ends, row, side="right")) for row in rows]


@given(st.integers(0, 50), st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any))
def test_apportion_is_largest_remainders(total, weights):
    shares = [Fraction(total * weight, sum(weights)) for weight in weights]
    expected = [share.numerator // share.denominator for share in shares]
    while sum(expected) < total:
        left = [share - count for share, count in zip(shares, expected, strict=True)]
        expected[left.index(max(left))] += 1
    found = apportion(total, weights)
    assert sum(found) == total
    assert all(abs(count - share) < 1 for count, share in zip(found, shares, strict=True))
    # Ties may fall either way: what is left over has the same remainders.
    left = [sorted(c - s for c, s in zip(counts, shares, strict=True)) for counts in (found, expected)]
    assert left[0] == left[1]


@pytest.mark.parametrize("temperature", [1.0, 3.0, 0.5, float("inf")])
def test_how_often_each_language_is_drawn_at_each_step(temperature):
    mix = LanguageMix([60, 12, 5, 3], temperature, entry=[0, 0, 7, 12])
    sampler = CurriculumSampler(mix, 20, 6, seed=5)
    rows = list(sampler)
    assert len(rows) == len(sampler) == 120
    drawn = languages_of(mix, rows)
    for start, end in ((0, 7), (7, 12), (12, 20)):  # the definition, slowly
        powers = [n ** (1 / temperature) * (entry <= start) for n, entry in zip(mix.rows, mix.entry, strict=True)]
        found = Counter(drawn[start * 6 : end * 6])
        for language, power in enumerate(powers):
            assert abs(found[language] - power / sum(powers) * (end - start) * 6) < 1
            assert not found[language] or mix.entry[language] <= start
    for language in range(4):  # no row comes again before all others of its language have come
        own = [row for row, code in zip(rows, drawn, strict=True) if code == language]
        size = mix.rows[language]
        for first in range(0, len(own), size):
            assert len(set(own[first : first + size])) == len(own[first : first + size])
    seen = np.zeros((20, 4))
    for seed in range(300):
        for position, language in enumerate(languages_of(mix, CurriculumSampler(mix, 20, 6, seed))):
            seen[position // 6, language] += 1 / 300
    powers = np.array(mix.rows) ** (1 / temperature) * (np.array(mix.entry) <= np.arange(20)[:, None])
    np.testing.assert_allclose(seen, 6 * powers / powers.sum(1, keepdims=True), atol=0.4)


MIX = LanguageMix([30, 11, 5], 2.0, entry=[0, 3, 7])


@pytest.mark.parametrize("skipped", [0, 1, 5, 13, 24])
def test_after_an_interruption_the_rest_is_the_same(skipped):
    def loader():
        return DataLoader(range(46), batch_size=2, sampler=CurriculumSampler(MIX, 12, 4, seed=2))

    whole = [batch.tolist() for batch in loader()]
    assert [batch.tolist() for batch in skip_first_batches(loader(), skipped)] == whole[skipped:]


@pytest.mark.parametrize(("ranks", "batch", "accumulation"), [(2, 4, 1), (2, 2, 2), (4, 1, 2), (1, 4, 2), (1, 2, 4)])
def test_ranks_together_see_what_one_sees(ranks, batch, accumulation):
    def steps(ranks, batch, accumulation):
        parts = [
            list(BatchSamplerShard(BatchSampler(CurriculumSampler(MIX, 12, 8, seed=2), batch, False), ranks, rank))
            for rank in range(ranks)
        ]
        assert {len(part) for part in parts} == {12 * accumulation}
        return [
            sorted(row for part in parts for rows in part[s * accumulation : (s + 1) * accumulation] for row in rows)
            for s in range(12)
        ]

    assert steps(ranks, batch, accumulation) == steps(1, 8, 1)


def test_batches_of_one_group_each():
    mix = LanguageMix([20, 10, 6, 4], 1.0, entry=[0, 4, 0, 8], groups=[0, 0, 1, 2])
    rows = list(CurriculumSampler(mix, 20, 4, seed=1, batch_size=2))
    drawn = languages_of(mix, rows)
    batches = [drawn[i : i + 2] for i in range(0, 80, 2)]
    assert all(mix.groups[a] == mix.groups[b] for a, b in batches)
    assert {tuple(sorted(batch)) for batch in batches} >= {(0, 1), (2, 2), (3, 3)}  # languages of a group share batches
    for start, end, sizes in ((0, 4, [20, 0, 6, 0]), (4, 8, [20, 10, 6, 0]), (8, 20, [20, 10, 6, 4])):
        found = Counter(mix.groups[code] for code in drawn[start * 4 : end * 4])
        for group in range(3):
            share = sum(n for n, g in zip(sizes, mix.groups, strict=True) if g == group) / sum(sizes)
            assert abs(found[group] / 2 - share * (end - start) * 2) < 1
    for wrong in ((mix, 20, 4, 1, 3), (LanguageMix([2, 2], 1.0, [1, 2]), 4, 2, 0)):
        refused(CurriculumSampler, *wrong, raises=ValueError, says="whole batches of 3|trains from the start")


WORDS = {"el": ("η γάτα κά", 60), "tr": ("kedi otur", 30), "hu": ("a macska ", 12)}
TRAINING = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "disable_tqdm": True, "save_steps": 4}


@pytest.fixture(scope="module")
def root(base, tmp_path_factory):
    root = tmp_path_factory.mktemp("curriculum")
    for code, (words, count) in WORDS.items():
        write_texts(root / f"{code}.jsonl", [f"{words} {i} {words}" for i in range(count)])
    expand_checkpoint(base, root / "expanded", Plan("moe-lpr", [2, 1, 1], old=["en"], new=list(WORDS)))
    expand_checkpoint(base, root / "dmoe", Plan("dmoe", [2, 1, 1], groups=[["el", "hu"], ["tr"]]))
    Curriculum(7, {"el": 0, "tr": 3, "hu": 5}).save(root / "curriculum.json")
    return root


class Watch:
    """The languages and tokens of each step, as they reach the model; stops where it is told to."""

    def __init__(self, monkeypatch, stop=None):
        self.steps, self.ids = {}, {}
        step_of = Trainer.training_step

        def training_step(trainer, model, inputs, *rest):
            step = trainer.state.global_step
            if step == stop:
                raise KeyboardInterrupt
            self.steps.setdefault(step, []).append(inputs["language_ids"][:, 0].tolist())
            self.ids.setdefault(step, []).append(inputs["input_ids"].tolist())
            assert all(len(set(row)) == 1 for row in inputs["language_ids"].tolist())  # packed language by language
            return step_of(trainer, model, inputs, *rest)

        monkeypatch.setattr(Trainer, "training_step", training_step)


def stage(root, name, kind=PostPretrainConfig, model="expanded", training=TRAINING, **changes):
    data = {code: LanguageText(code, str(root / f"{code}.jsonl")) for code in WORDS}
    return train_stage(root / model, root / name, data, kind(block_size=16, **training, **changes))


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


def test_a_stage_follows_its_curriculum_also_when_interrupted(root, monkeypatch):
    with monkeypatch.context() as patch:
        whole = Watch(patch)
        record = stage(root, "whole", curriculum=str(root / "curriculum.json"), temperature=2.0)
    assert record.steps == 7
    assert record.settings["curriculum"] == {"steps": 7, "entry": {"el": 0, "tr": 3, "hu": 5}}
    assert str(root) not in (root / "whole" / "config.json").read_text()
    drawn = [{code for batch in whole.steps[step] for code in batch} for step in range(7)]
    assert drawn[:3] == [{1}] * 3  # language ids: en 0, el 1, tr 2, hu 3
    assert set().union(*drawn[3:5]) == {1, 2}
    assert set().union(*drawn[5:]) == {1, 2, 3}
    with monkeypatch.context() as patch:
        broken = Watch(patch, stop=5)
        with pytest.raises(KeyboardInterrupt):
            stage(root, "broken", curriculum=str(root / "curriculum.json"), temperature=2.0)
    assert (root / "broken.training" / "checkpoint-4").is_dir()
    with monkeypatch.context() as patch:
        resumed = Watch(patch)
        stage(root, "broken", curriculum=str(root / "curriculum.json"), temperature=2.0)
    assert min(resumed.ids) == 4
    assert {**broken.ids, **resumed.ids} == whole.ids
    assert weights(root / "broken") == weights(root / "whole")


@pytest.mark.parametrize("kind", [GroupConfig, JointConfig])
def test_the_stages_of_dmoe(root, monkeypatch, kind):
    watch = Watch(monkeypatch)
    stage(root, kind.__name__, kind, "dmoe", curriculum=str(root / "curriculum.json"))
    drawn = [batch for step in sorted(watch.steps) for batch in watch.steps[step]]
    group_of = {0: 0, 1: 0, 2: 1}  # language ids in the order of the groups: el, hu, tr
    assert {code for batch in drawn[:6] for code in batch} == {0}
    assert 2 in {code for batch in drawn[6:] for code in batch}
    if kind is GroupConfig:
        assert all(len({group_of[code] for code in batch}) == 1 for batch in drawn)


def test_bad_settings(root, tmp_path):
    path = str(tmp_path / "curriculum.json")
    Curriculum(7, {"el": 0, "tr": 3}).save(path)
    refused(stage, root, "refused", curriculum=path, says="the step at which hu enters is missing")
    Curriculum(7, {"el": 0, "tr": 3, "hu": 5}).save(path)
    for length in ({"max_steps": 5}, {"num_train_epochs": 2}):
        said = "is for 7 steps, but the configuration sets another length"
        refused(stage, root, "refused", curriculum=path, training={**TRAINING, **length}, says=said)
    write_texts(tmp_path / "short.jsonl", ["ab"])
    data = {code: LanguageText(code, str(root / f"{code}.jsonl")) for code in ("el", "tr")}
    data["hu"] = LanguageText("hu", str(tmp_path / "short.jsonl"))
    config = PostPretrainConfig(block_size=16, temperature=2.0)
    refused(train_stage, root / "expanded", root / "refused", data, config, says="All text of hu together is 3")


def test_commands(root, tmp_path):
    curves = ValidationCurves(["el", "hi"], 100, [0, 50, 75, 100])
    curves.loss = {"el": [4.0, 3.0, 2.0, 2.0], "hi": [1.0, 2.0, 3.0, 4.0], "en": [1.0, 1.0, 1.0, 1.0]}
    assert curves.best_steps() == {"el": 100, "hi": 50}  # the last of several; step 0 does not count
    curves.save(tmp_path / "validation.json")
    out = tmp_path / "curriculum.json"
    said = invoke("curriculum", "derive", tmp_path, "--bins", "3", "--out", out)
    assert "enters at step" in said
    assert Curriculum.load(out) == Curriculum(100, {"el": 0, "hi": 50})
    refused(invoke, "curriculum", "derive", tmp_path, "--out", out, says="exists already")
    invoke("curriculum", "derive", tmp_path / "validation.json", "--steps", "10", "--out", out, "--overwrite")
    assert Curriculum.load(out) == Curriculum(10, {"el": 0, "hi": 5})
    for steps, loss, said in (
        ([0, 5], {"hi": [1.0, float("nan")]}, "The loss of 'hi' was never finite: the training diverged"),
        ([0], {"hi": [1.0]}, "'hi' was scored at no step of the training"),
        ([5], {"el": [1.0]}, "hi trained, but was not scored"),
    ):
        refused(ValidationCurves(["hi"], 10, steps, {}, loss).best_steps, says=said)
    ValidationCurves(["hi"], 10, [0, 5], {}, {"hi": [1.0]}).save(tmp_path / "cut.json")
    derive = ("curriculum", "derive", "--out", out, "--overwrite")
    refused(invoke, *derive, tmp_path / "cut.json", says=r"cut\.json: 'hi' has 1 scores for 2 steps")
    refused(invoke, *derive, root / "expanded", says=r"validation\.json: no such file \(the validation of a training")
    data = [part for code in ("el", "tr") for part in ("--data", f"{code}={root / code}.jsonl")]
    invoke(
        "curriculum", "counts", *data, "--counts", "hu=3,en=70", "--thresholds", "60,30", "--steps", "50", "--out", out,
        "--overwrite",
    )  # fmt: skip
    assert Curriculum.load(out) == Curriculum(50, {"el": 0, "en": 0, "tr": 30, "hu": 40})
    for arguments, message in (
        (["--counts", "el=many"], "--counts el=many: could not convert"),
        (["--counts", "el=1,el=2"], "'el' is given twice"),
        (["--counts", "el=nan"], "'el' has nan examples"),
        (["--counts", "el=-4"], "'el' has -4 examples"),
        (["--counts", "el=4", "--thresholds", "nan,1"], "thresholds nan, 1: must be finite numbers"),
        (["--counts", "el=1", "--data", f"el={root}/el.jsonl"], "given with --counts and with --data"),
        ([], "No language was given"),
    ):
        refused(invoke, "curriculum", "counts", *arguments, "--steps", "50", "--out", tmp_path / "no", says=message)


def test_temperature_alone_trains_as_long_as_the_data_lasts(root, monkeypatch):
    watch = Watch(monkeypatch)
    record = stage(root, "even", temperature=float("inf"), training={**TRAINING, "num_train_epochs": 0.5})
    blocks = sum(tokens // 16 for tokens in record.tokens.values())
    assert record.steps == -(-blocks // 8)  # half an epoch, four blocks a step
    found = Counter(code for batches in watch.steps.values() for batch in batches for code in batch)
    assert max(found.values()) - min(found.values()) <= 1

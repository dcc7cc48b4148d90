"""When languages enter, how often they are drawn, and that neither interruption nor ranks change the order."""

import json
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, skip_first_batches
from conftest import invoke, refused, tensors, write_texts
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader
from transformers import Trainer

from hf_moe_expand import GroupConfig, Plan, PostPretrainConfig, expand_checkpoint, train_stage
from hf_moe_expand.data.curriculum import Curriculum, count_based, step_based
from hf_moe_expand.data.sources import LanguageText
from hf_moe_expand.evaluation.validation import ValidationCurves
from hf_moe_expand.trainers import CurriculumSampler, LanguageMix


def test_count_based_bins_are_the_papers():
    counts = {"fr": 180e6, "is": 5e6, "sw": 4_999_999, "ta": 800_000, "wo": 799_999, "hi": 40_000}
    found = count_based(counts, 100_000)
    assert found.entry == {"fr": 0, "is": 0, "sw": 60_000, "ta": 60_000, "wo": 80_000, "hi": 80_000}
    assert count_based(counts, 500).entry == {"fr": 0, "is": 0, "sw": 300, "ta": 300, "wo": 400, "hi": 400}
    assert count_based({"sw": 900_000, "wo": 10}, 100).entry == {"sw": 0, "wo": 80}  # the first bin is empty
    for steps, last in ((40, 30), (1, 0)):  # at the latest at the last step
        assert count_based({"a": 10, "b": 3}, steps, thresholds=[5], shares=[1, 0.25]).entry == {"a": 0, "b": last}
    refused(count_based, counts, 100, says="2 thresholds make 3 bins, but 2 shares", shares=[1, 0.5])
    refused(count_based, counts, 100, says="must be finite numbers above 0 and at most 1", shares=[2, 1, 0.5])


def test_step_based_merges_the_first_bins_and_rescales():
    best = {"a": 100, "b": 91, "c": 90, "d": 65, "e": 45, "f": 29, "g": 20}  # k = 100, 80, 60, 40, 20
    assert step_based(best, 5, 100).entry == {"a": 0, "b": 0, "c": 0, "d": 40, "e": 60, "f": 80, "g": 80}
    assert step_based(best, 5, 100, merge_first=3).entry == {"a": 0, "b": 0, "c": 0, "d": 0, "e": 60, "f": 80, "g": 80}
    # The best of all comes before the end: nothing else would train before U - s_max.
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
    path, made = tmp_path / "curriculum.json", Curriculum(10, {"el": 0, "hi": 8})
    made.save(path)
    assert json.loads(path.read_text()) == {"steps": 10, "entry": {"el": 0, "hi": 8}}
    assert Curriculum.load(path) == made
    made.check_languages(["hi", "el"])
    refused(made.check_languages, ["el", "tr"], says=r"hi does not train here; known: el, tr")
    refused(made.check_languages, ["el", "hi", "tr"], says="the step at which tr enters is missing")
    for value, message in (
        ({"steps": 10, "entry": {"el": 0, "hi": 10}}, "'hi' enters at step 10, but the training has only the steps"),
        ({"steps": 10, "entry": {"el": 0, "hi": -1}}, "'hi' enters at step -1"),
        ({"steps": 10, "entry": {"el": 2}}, "no language trains from the start: let one"),
        ({"steps": 10, "enter": {}}, "unknown key `enter`; did you mean `entry`"),
    ):
        path.write_text(json.dumps(value))
        refused(Curriculum.load, path, says=rf"curriculum\.json: .*{message}")
    refused(Curriculum.load, tmp_path / "none.json", says="no such file")


def languages_of(mix, rows):
    ends = np.cumsum(mix.rows)
    return [int(np.searchsorted(ends, row, side="right")) for row in rows]


@pytest.mark.parametrize("temperature", [1.0, 3.0, float("inf")])
def test_how_often_each_language_is_drawn_at_each_step(temperature):
    mix = LanguageMix([60, 12, 5, 3], temperature, entry=[0, 0, 7, 12])
    sampler = CurriculumSampler(mix, 20, 6, seed=5)
    rows = list(sampler)
    assert len(rows) == len(sampler) == 120
    drawn = languages_of(mix, rows)
    powers = np.array(mix.rows) ** (1 / temperature) * (np.array(mix.entry) <= np.arange(20)[:, None])
    expected = 6 * powers / powers.sum(1, keepdims=True)  # of each language at each step: the definition
    for start, end in ((0, 7), (7, 12), (12, 20)):
        found = Counter(drawn[start * 6 : end * 6])
        for language, count in enumerate(expected[start:end].sum(0)):
            assert abs(found[language] - count) < 1
            assert not found[language] or mix.entry[language] <= start
    for language, size in enumerate(mix.rows):  # no row comes again before all others of its language have come
        own = [row for row, code in zip(rows, drawn, strict=True) if code == language]
        passes = [own[first : first + size] for first in range(0, len(own), size)]
        assert all(len({*one}) == len(one) for one in passes)
    seen = np.zeros((20, 4))
    for seed in range(200):
        for position, language in enumerate(languages_of(mix, CurriculumSampler(mix, 20, 6, seed))):
            seen[position // 6, language] += 1 / 200
    np.testing.assert_allclose(seen, expected, atol=0.4)


MIX = LanguageMix([30, 11, 5], 2.0, entry=[0, 3, 7])


def test_after_an_interruption_the_rest_is_the_same():
    def loader():
        return DataLoader(range(46), batch_size=2, sampler=CurriculumSampler(MIX, 12, 4, seed=2))

    whole = [batch.tolist() for batch in loader()]
    for skipped in (0, 1, 5, 13, 24):
        assert [batch.tolist() for batch in skip_first_batches(loader(), skipped)] == whole[skipped:]


@pytest.mark.parametrize(("ranks", "batch", "accumulation"), [(2, 4, 1), (2, 2, 2), (4, 1, 2), (1, 2, 4)])
def test_ranks_together_see_what_one_sees(ranks, batch, accumulation):
    def steps(ranks, batch, accumulation):
        batches = BatchSampler(CurriculumSampler(MIX, 12, 8, seed=2), batch, False)
        parts = [list(BatchSamplerShard(batches, ranks, rank)) for rank in range(ranks)]
        assert {len(part) for part in parts} == {12 * accumulation}
        cuts = [slice(step * accumulation, (step + 1) * accumulation) for step in range(12)]
        return [sorted(row for part in parts for rows in part[cut] for row in rows) for cut in cuts]

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
    assert all(torch.equal(value, tensors(root / "whole")[name]) for name, value in tensors(root / "broken").items())


def test_the_groups_of_a_dmoe_share_no_batch(root, monkeypatch):
    watch = Watch(monkeypatch)
    stage(root, "group", GroupConfig, "dmoe", curriculum=str(root / "curriculum.json"))
    drawn = [batch for step in sorted(watch.steps) for batch in watch.steps[step]]
    group_of = {0: 0, 1: 0, 2: 1}  # language ids in the order of the groups: el, hu, tr
    assert {code for batch in drawn[:6] for code in batch} == {0}
    assert 2 in {code for batch in drawn[6:] for code in batch}
    assert all(len({group_of[code] for code in batch}) == 1 for batch in drawn)


def test_bad_settings(root, tmp_path):
    path = str(tmp_path / "curriculum.json")
    Curriculum(7, {"el": 0, "tr": 3}).save(path)
    refused(stage, root, "refused", curriculum=path, says="the step at which hu enters is missing")
    said = "is for 7 steps: leave other lengths out"
    for length in ({"max_steps": 5}, {"num_train_epochs": 2}):
        given = {"curriculum": str(root / "curriculum.json"), "training": {**TRAINING, **length}}
        refused(stage, root, "refused", says=said, **given)
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
    derive, counts = (("curriculum", name, "--out", out, "--overwrite") for name in ("derive", "counts"))
    assert "enters at step" in invoke(*derive, tmp_path, "--bins", "3")
    assert Curriculum.load(out) == Curriculum(100, {"el": 0, "hi": 50})
    refused(invoke, *derive[:-1], tmp_path, says="exists already")
    invoke(*derive, tmp_path / "validation.json", "--steps", "10")
    assert Curriculum.load(out) == Curriculum(10, {"el": 0, "hi": 5})
    for steps, loss, said in (
        ([0, 5], {"hi": [1.0, float("nan")]}, "'hi' has no finite loss at any step"),
        ([0], {"hi": [1.0]}, "'hi' has no finite loss at any step"),
        ([5], {"el": [1.0]}, "hi trained, but was not scored"),
    ):
        refused(ValidationCurves(["hi"], 10, steps, {}, loss).best_steps, says=said)
    ValidationCurves(["hi"], 10, [0, 5], {}, {"hi": [1.0]}).save(tmp_path / "cut.json")
    refused(invoke, *derive, tmp_path / "cut.json", says=r"cut\.json: 'hi' has 1 scores for 2 steps")
    refused(invoke, *derive, root / "expanded", says=r"validation\.json: no such file \(the validation of a training")
    invoke(*counts, "--counts", "hu=3,en=70,el=60,tr=30", "--thresholds", "60,30", "--steps", "50")
    assert Curriculum.load(out) == Curriculum(50, {"el": 0, "en": 0, "tr": 30, "hu": 40})
    for words, said in (
        ("--counts el=many", "--counts el=many: could not convert"),
        ("--counts el=1,el=2", "'el' is given twice"),
        ("--counts el=nan", "'el' has nan examples"),
        ("--counts el=-4", "'el' has -4 examples"),
        ("--counts el=4 --thresholds nan,1", "thresholds nan, 1: must be finite numbers"),
    ):
        refused(invoke, *counts, *words.split(), "--steps", "50", says=said)


def test_temperature_alone_trains_as_long_as_the_data_lasts(root, monkeypatch):
    watch = Watch(monkeypatch)
    record = stage(root, "even", temperature=float("inf"), training={**TRAINING, "num_train_epochs": 0.5})
    blocks = sum(tokens // 16 for tokens in record.tokens.values())
    assert record.steps == -(-blocks // 8)  # half an epoch, four blocks a step
    found = Counter(code for batches in watch.steps.values() for batch in batches for code in batch)
    assert max(found.values()) - min(found.values()) <= 1

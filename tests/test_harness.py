"""Tasks of lm-evaluation-harness: own tasks on tiny models, against likelihoods computed one by one."""

import functools
import json
import math
from itertools import pairwise

import numpy
import pytest
import torch
import yaml
from conftest import byte_tokenizer, invoke, refused, save_dense, write_texts
from gated_models import gated_model

from hf_moe_expand import Plan, expand_checkpoint
from hf_moe_expand.evaluation import harness, report
from hf_moe_expand.evaluation.harness import _metrics
from hf_moe_expand.evaluation.report import Evaluation
from hf_moe_expand.hub.card import make_card
from hf_moe_expand.inference import models

pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")

import lm_eval.tasks
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from hf_moe_expand.evaluation.benchmarks import benchmark_means, task_list
from hf_moe_expand.evaluation.harness import HarnessTasks, Metric, TaskScore
from hf_moe_expand.evaluation.scoring_settings import HarnessSettings

QUESTIONS = {
    "el": [("Η γάτα πίνει", ["γάλα", "ουρανό"], 0), ("Ο ήλιος είναι", ["κρύος", "ζεστός", "βιβλίο"], 1)] * 3,
    "hu": [("A macska", ["iszik", "tejet a napon"], 0), ("A nap", ["hideg", "meleg"], 1)] * 2,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A base model, its expansion, and a folder of tasks: two, and a group of both."""
    root = tmp_path_factory.mktemp("harness")
    save_dense(root / "base", max_position_embeddings=512)
    expand_checkpoint(root / "base", root / "moe", Plan("moe-lpr", [2, 2, 2], old=["en"], new=["el", "hu"]))
    (root / "tasks").mkdir()
    for code, questions in QUESTIONS.items():
        for split, rows in (("test", questions), ("train", questions[:2])):
            lines = [json.dumps({"question": q, "choices": c, "label": label}) for q, c, label in rows]
            (root / f"{code}.{split}.jsonl").write_text("\n".join(lines))
        task = {
            "task": f"pick_{code}", "dataset_path": "json", "output_type": "multiple_choice", "test_split": "test",
            "dataset_kwargs": {"data_files": {s: str(root / f"{code}.{s}.jsonl") for s in ("train", "test")}},
            "fewshot_split": "train", "fewshot_config": {"sampler": "first_n"}, "doc_to_text": "{{question}}",
            "doc_to_choice": "{{choices}}", "doc_to_target": "{{label}}", "metadata": {"version": 1.0},
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        }  # fmt: skip
        (root / "tasks" / f"{code}.yaml").write_text(yaml.safe_dump(task))
    group = {
        "group": "pick", "task": ["pick_el", "pick_hu"], "metadata": {"version": 2.0},
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
    }  # fmt: skip
    (root / "tasks" / "pick.yaml").write_text(yaml.safe_dump(group))
    return root


@pytest.fixture(autouse=True)
def own_tasks(monkeypatch):
    """The harness's own thousands of tasks take it half a minute to list."""
    manager = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", manager)


def likelihood(model, tokenizer, context, continuation):
    ids, tail = tokenizer(context).input_ids, tokenizer(continuation).input_ids
    with torch.no_grad():
        logs = model(torch.tensor([ids + tail])).logits[0].log_softmax(-1)
    return sum(logs[len(ids) + i - 1, token].item() for i, token in enumerate(tail))


def examples(code, shots):
    return "".join(f"{question} {choices[label]}\n\n" for question, choices, label in QUESTIONS[code][:shots])


def slow_accuracy(model, tokenizer, code, shots):
    questions, shown, right = QUESTIONS[code], examples(code, shots), 0
    for question, choices, label in questions:
        scores = [likelihood(model, tokenizer, shown + question, f" {choice}") for choice in choices]
        right += max(range(len(scores)), key=scores.__getitem__) == label
    return right / len(questions)


def test_accuracy_is_that_of_likelihoods_one_by_one(root, monkeypatch):
    model, tokenizer = models.load_for_inference(root / "moe")
    asked, score_all = [], HFLM.loglikelihood
    score = lambda self, requests: (asked.extend(requests), score_all(self, requests))[1]  # noqa: E731
    monkeypatch.setattr(HFLM, "loglikelihood", score)
    tasks = HarnessTasks(["pick_el@2", "pick_hu"], HarnessSettings(num_fewshot=0, include_path=root / "tasks"))
    found = tasks.evaluate(model, tokenizer, batch_size=4)
    assert list(found) == ["pick_el", "pick_hu"]
    prompts = [examples(code, count) + question + f"| {choice}" for code, count in (("el", 2), ("hu", 0))
               for question, choices, _ in QUESTIONS[code] for choice in choices]  # fmt: skip
    assert sorted("|".join(request.args) for request in asked) == sorted(prompts)
    for code, shots, documents in (("el", 2, 6), ("hu", 0, 4)):
        score, accuracy = found[f"pick_{code}"], slow_accuracy(model, tokenizer, code, shots)
        assert 0 < accuracy < 1
        assert (score.metrics["acc"].value, score.shots) == (pytest.approx(accuracy), shots)
        assert (score.samples, score.total, score.group) == (documents, documents, None)
        # The sample's own deviation over the root of its size.
        error = (accuracy * (1 - accuracy) / (documents - 1)) ** 0.5
        assert score.metrics["acc"].stderr == pytest.approx(error)
        assert score.metrics["acc"].higher_is_better
        assert (score.version, score.harness) == ("1.0", lm_eval.__version__)


def test_the_choices_of_a_question_take_the_model_of_its_context(root):
    """With a gate; where the contexts are empty, that of the choices together."""
    tokenizer = byte_tokenizer()
    model = gated_model(exclusive=True, max_position_embeddings=512)
    words = ["".join(chr(97 + (7 * i * n + i) % 26) for n in range(8)) for i in range(1, 13)]
    pairs = [*pairwise(words)]
    questions = [(f"Context {number}", ["a b", "c d"]) for number in range(8)] + [("", pair) for pair in pairs]
    requests = [
        Instance("loglikelihood", {}, (context, f" {choice}"), number, metadata=("task", number, 1))
        for number, (context, choices) in enumerate(questions)
        for choice in choices
    ]
    wrapped = harness._judging(HFLM)(pretrained=model, tokenizer=tokenizer, batch_size=3)
    found = wrapped.loglikelihood(requests)
    classes = []
    for request, (likelihood_, _) in zip(requests, found, strict=True):
        context, choice = request.args
        of_question = [one.args[1] for one in requests if one.doc_id == request.doc_id]
        ids = torch.tensor([wrapped.tok_encode(context or " ".join(of_question))])
        classes.append(int(model.judge(ids)))
        with model.use_languages("el" if classes[-1] else "en"):
            begin = context or tokenizer.decode([wrapped.prefix_token_id])
            assert likelihood_ == pytest.approx(likelihood(model, tokenizer, begin, choice), abs=1e-3)
    assert 0 < sum(classes) < len(classes)
    # Some first choice alone would be judged otherwise.
    judged = [[int(model.judge(torch.tensor([wrapped.tok_encode(text)]))) for text in (f" {a}", f" {a}  {b}")]
              for a, b in pairs]  # fmt: skip
    assert any(alone != together for alone, together in judged)


def test_a_group_and_its_parts(root):
    model, tokenizer = models.load_for_inference(root / "moe")
    found = HarnessTasks(["pick"], HarnessSettings(limit=3, include_path=root / "tasks")).evaluate(model, tokenizer)
    assert {name: (score.group, score.samples, score.total) for name, score in found.items()} == {
        "pick": (None, 6, 10), "pick_el": ("pick", 3, 6), "pick_hu": ("pick", 3, 4)
    }  # fmt: skip
    mean = sum(found[name].metrics["acc"].value for name in ("pick_el", "pick_hu")) / 2
    assert found["pick"].metrics["acc"].value == pytest.approx(mean)
    assert found["pick"].version == "2.0"
    table = Evaluation([], [], tasks={"moe": found})
    assert [row[0] for row in table.task_rows()[1]] == ["pick (0-shot, 6 of 10)"]  # a group speaks for its parts


def test_the_command_loads_each_checkpoint_once_and_the_card_says_what_came_out(root, monkeypatch):
    loaded, load = [], models.load_for_inference
    monkeypatch.setattr(report, "load_for_inference", lambda *name: (loaded.append(str(name[0])), load(*name))[1])
    text = write_texts(root / "text.jsonl", ["one two three", "ένα δύο τρία"])
    data = [word for code in ("en", "el", "hu") for word in ("--data", f"{code}={text}")]
    said = invoke(
        "evaluate", root / "base", root / "moe", *data, "--tasks", "pick_el@2,pick_hu", "--num-fewshot", 1,
        "--limit", 5, "--include-path", root / "tasks", "--block-size", 32, "--out", root / "evaluation.json",
    )  # fmt: skip
    assert loaded == [str(root / "base"), str(root / "moe")]
    assert "tasks" in said.splitlines()
    written = json.loads((root / "evaluation.json").read_text())
    assert list(written["models"]["moe"]) == ["en", "el", "hu"]
    assert written["tasks"]["moe"] == written["tasks"]["base"]  # right after expansion: the same model
    score = written["tasks"]["moe"]["pick_hu"]
    assert (score["shots"], score["samples"], score["total"]) == (1, 4, 4)
    value, error = score["metrics"]["acc"]["value"], score["metrics"]["acc"]["stderr"]
    assert value == pytest.approx(slow_accuracy(*load(root / "base"), "hu", 1))
    Evaluation.from_json(root / "evaluation.json").to_json(root / "again.json")
    assert (root / "again.json").read_bytes() == (root / "evaluation.json").read_bytes()
    card = make_card(root / "moe", "me/moe", evaluation=root / "evaluation.json")
    assert f"| pick_hu (1-shot) | acc | {value:.4f} ± {error:.4f} | {value:.4f} ± {error:.4f} | +0.0000 |" in str(card)
    assert "| pick_el (2-shot, 5 of 6) |" in str(card)
    results = [result for result in card.data.eval_results if result.dataset_type == "pick_hu"]
    assert [(result.metric_type, result.metric_value) for result in results] == [("acc", round(value, 4))]


def test_a_task_list_gives_means_over_old_new_and_unnamed_languages(root, tmp_path):
    listed = {"pick": {"el": "pick_el@1", "hu": "pick_hu", "tr": "pick_tr"}, "again": {"en": "own_en", "fr": "own_fr"}}
    for name, like in {"own_en": "el", "own_fr": "hu", "pick_el": "el", "pick_hu": "hu"}.items():
        task = yaml.safe_load((root / "tasks" / f"{like}.yaml").read_text()) | {"task": name}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(task))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "list.yaml").write_text(yaml.safe_dump(listed))
    out = tmp_path / "tasks.json"
    said = invoke(
        "evaluate", root / "base", root / "moe", "--tasks", tmp_path / "mine" / "list.yaml", "--unnamed", "fr",
        "--include-path", tmp_path, "--out", out,
    )  # fmt: skip
    assert {"no task in en: pick", "no task in el: again", "no task in fr: pick"} <= set(said.splitlines())
    found = Evaluation.from_json(out)
    assert (found.old, found.new, found.unnamed) == (["en"], ["el", "hu"], ["fr"])
    assert set(found.tasks["moe"]) == {"own_en", "own_fr", "pick_el", "pick_hu"}
    assert found.tasks["moe"]["pick_el"].shots == 1
    one, other = (found.tasks["moe"][f"pick_{code}"].metrics["acc"] for code in ("el", "hu"))
    mean = Metric((one.value + other.value) / 2, (one.stderr**2 + other.stderr**2) ** 0.5 / 2)
    header, rows = found.benchmark_rows()
    assert header == ["mean over languages", "base", "moe", "moe vs base"]
    shown = {name: cells for name, *cells in rows}
    assert list(shown) == [
        "again (old)", "mean (old)", "pick (new)", "mean (new)", "again (unnamed)", "mean (unnamed)",
    ]  # fmt: skip
    assert shown["pick (new)"] == [f"{mean.value:.4f} ± {mean.stderr:.4f}"] * 2 + ["+0.0000"]
    assert "pick (new)" in said


PAPERS = {
    "moe-lpr": {"arc", "mmlu", "hellaswag", "belebele"},
    "layermoe": {"arc", "mmlu", "hellaswag", "belebele"},
    "dmoe": {"xnli", "pawsx", "xcopa", "xstorycloze", "xwinograd"},
    "deltamoe": {"mgsm", "mifeval", "belebele", "mmlu"},
}


def test_each_paper_has_its_benchmarks():
    for paper, names in PAPERS.items():
        listed = task_list(paper)
        assert set(listed) == names
        tasks = [task for of in listed.values() for task in of.values()]
        assert len(tasks) == len(set(tasks))
    assert set(task_list("moe-lpr")["belebele"]) == {"en", "zh", "es", "el", "hu", "tr", "fr", "pt"}
    assert task_list("arc_hu@25") is None


@pytest.mark.guides  # the harness takes half a minute to list its tasks
def test_the_harness_has_the_tasks_of_each_paper(monkeypatch):
    monkeypatch.undo()
    known = set(lm_eval.tasks.TaskManager().all_tasks)
    for paper in PAPERS:
        for of in task_list(paper).values():
            assert {task.partition("@")[0] for task in of.values()} <= known


def test_bad_input(root, tmp_path, monkeypatch):
    here = {"include_path": root / "tasks"}
    for arguments, options, message in [
        (["pick_eu"], here, r"'pick_eu' is not a task of lm_eval \S+ or of --include-path"),
        (["pick_el", "pick_el@2"], here, "pick_el: given twice"),
        (["pick_el@few"], here, "'pick_el@few' is not TASK@EXAMPLES"),
        (["pick_el"], {"include_path": tmp_path / "none"}, "none: no such folder"),
    ]:
        refused(HarnessTasks, arguments, HarnessSettings(**options), says=message)
    lost = yaml.safe_load((root / "tasks" / "el.yaml").read_text()) | {
        "task": "lost", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "lost.jsonl")}}
    }  # fmt: skip
    (tmp_path / "lost.yaml").write_text(yaml.safe_dump(lost))
    here = HarnessSettings(include_path=tmp_path)
    refused(HarnessTasks, ["lost"], here, says="lost: its data cannot be loaded")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.yaml").write_text("arc: {xyzzy: arc_x}")
    monkeypatch.setattr(report, "load_for_inference", lambda *name: pytest.fail("loaded"))
    for message, *options in (
        ("give text with --data, tasks with --tasks",),
        ("--limit belongs to --tasks, which", "--data", f"en={root / 'el.test.jsonl'}", "--limit", 3),
        ("is not a task", "--tasks", "nothing"),
        ("--unnamed: el is an old or a new", "--tasks", "dmoe", "--old", "en", "--new", "el", "--unnamed", "el"),
        ("The task list has no task in la; it has ar, bg, ", "--tasks", "dmoe", "--old", "la"),
        ("wrong.yaml: .*xyzzy", "--tasks", "wrong.yaml"),
    ):
        refused(invoke, "evaluate", root / "moe", *options, "--out", "out.json", says=message)
    assert not (tmp_path / "out.json").exists()


def score(value, stderr=0.0, name="acc", **more):
    return TaskScore({name: Metric(value, stderr), **more}, 0, 9, 9, None, "0")


def test_a_mean_is_over_languages_then_over_benchmarks_and_of_finite_numbers():
    listed = {"a": {"el": "a_el", "hu": "a_hu"}, "b": {"el": "b_el"}, "c": {"tr": "c_tr"}}
    scores = {
        "a_el": score(0.2, 0.03, acc_norm=Metric(0.4, 0.03)), "a_hu": score(0.3, 0.04, acc_norm=Metric(0.6, 0.04)),
        "b_el": score(0.9, None, "exact_match"),
    }  # fmt: skip
    means = benchmark_means(scores, listed, ["el", "hu"])
    assert means["a"].value == pytest.approx(0.5)
    assert means["a"].stderr == pytest.approx(0.025)
    assert (means["b"].value, means["b"].stderr, means["c"]) == (0.9, None, None)
    assert means["mean"].value == pytest.approx(0.7)
    assert means["mean"].stderr is None
    values = {"acc,none": numpy.float32(0.5), "acc_stderr,none": "N/A", "answer,none": "a text", "bleu,none": None}
    for found in (values, {"acc,none": 0.5, "acc_stderr,none": math.nan, "bleu,none": math.nan}):
        assert _metrics(found, {}) == {"acc": Metric(0.5)}

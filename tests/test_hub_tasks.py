"""The tasks of grammar, reading and exams in docs/evaluation.md, with lm-eval's own configurations."""

import functools
import json
import re
import shlex
from pathlib import Path

import pytest
from conftest import invoke, save_dense

DOCS = Path(__file__).resolve().parents[1] / "docs"
QUESTION = {f"option_{letter}": letter for letter in "abcd"}
ANSWERS = {f"mc_answer{number}": f"answer {number}" for number in range(1, 5)}


def command():
    """The guide's command, as words without the program's name."""
    (line,) = re.findall(
        r"^hf-moe-expand (evaluate .*--tasks multiblimp.*)$", (DOCS / "evaluation.md").read_text("utf-8"), re.MULTILINE
    )
    return shlex.split(line)


def put(folder: Path, split: str, rows: dict[str, list[dict]]) -> None:
    """A data set as the hub has it: a file for each configuration, which its README names."""
    folder.mkdir(parents=True)
    lines = []
    for name, found in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in found), "utf-8")
        files = f"\n  data_files:\n  - split: {split}\n    path: {name}.jsonl"
        lines.append(f"- config_name: {name}{files}")
    (folder / "README.md").write_text("---\nconfigs:\n" + "\n".join(lines) + "\n---\n", "utf-8")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a base, an expanded model and the three data sets, and a harness that knows their tasks alone."""
    tasks = pytest.importorskip("lm_eval.tasks", reason="the extra `eval` is not installed")
    own = Path(tasks.__file__).parent
    places = ["multiblimp", "belebele", "include/default/Hungarian", "include/default/Turkish"]
    manager = functools.partial(tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(tasks, "TaskManager", lambda include_path: manager(include_path=[str(own / p) for p in places]))
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # it calls many programs
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    agreement = {"sen": "Sono qui.", "wrong_sen": "Sono quo."}
    put(Path("jumelet/multiblimp"), "train", {code: [agreement] * 3 for code in ("eng", "spa", "hun", "tur")})
    belebele = [
        {"flores_passage": "A cat.", "question": f"Who {number}?", "correct_answer_num": "2", **ANSWERS}
        for number in range(8)
    ]
    codes = ("eng_Latn", "spa_Latn", "hun_Latn", "tur_Latn")
    put(Path("facebook/belebele"), "test", dict.fromkeys(codes, belebele))
    domains = ["STEM", "Social Science", "Applied Science", "Business & Commerce", "Arts & Humanities"]
    include = [{"question": "Who?", "answer": 2, "domain": domain, **QUESTION} for domain in domains * 2]
    put(Path("CohereForAI/include-base-44"), "test", dict.fromkeys(("Hungarian", "Turkish"), include))
    return tmp_path


def test_the_guides_tasks_run_on_files_of_their_form(place):
    words = command()
    models = words[1 : next(number for number, word in enumerate(words) if word.startswith("--"))]
    for name in models:
        save_dense(place / name, max_position_embeddings=2048, num_hidden_layers=1)
    said = invoke(*words)
    out = words[words.index("--out") + 1]
    found = json.loads((place / out).read_text("utf-8"))
    scores = next(iter(found["tasks"].values()))
    named = re.sub(r"@\d+", "", words[words.index("--tasks") + 1]).split(",")
    assert set(named) <= set(scores)
    assert {"multiblimp_hun", "belebele_tur_Latn", "include_base_44_hungarian"} <= set(named)
    for name, score in scores.items():
        assert 0 <= score["metrics"]["acc"]["value"] <= 1
        assert score["metrics"]["acc"]["stderr"] is not None, name
        assert score["samples"] == score["total"]
    assert scores["multiblimp_hun"]["total"] == 3
    assert scores["belebele_hun_Latn"]["shots"] == 5
    assert f"wrote {out}" in said

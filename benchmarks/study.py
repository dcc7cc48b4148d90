"""Is it worth it? Every method of this library against the plain alternatives, at equal training tokens.

    python benchmarks/study.py base --data DIR --out runs/study/small
    python benchmarks/study.py run --data DIR --out runs/study/small --seeds 0 1 2
    python benchmarks/study.py row "25 % replay" --seed 1 --data DIR --out runs/study/small
    python benchmarks/study.py speed --data DIR --out runs/study/small
    python benchmarks/study.py report --out runs/study/small --json study_small.json --table table.md --figures .

DIR holds help/LANGUAGE.train.jsonl, help/LANGUAGE.test.jsonl and flores/LANGUAGE.dev.jsonl (objects with `text`), and
minimal_pairs/LANGUAGE.jsonl (objects with `good` and `bad`). `--settings` names the languages, the training and the
rows: studies/study.yaml by default. `base` makes the small base; for another one give `--base` to the others.

Each row trains the same number of tokens, and takes its learning rate from the same sweep: with seed 0, judged on
documents of the training text that no row trains on, and extended where the best rate is at an end. Finished parts are
kept: run a command again to continue. `--part 1/2` and `--part 2/2` share the rows of `run` between two processes;
`--rows` names some of them.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from small_base import make_small_base
from study_changes import file_name
from study_models import Models
from study_report import write_report
from study_scores import MinimalPairs, bits_per_byte, generation_speed, parameters, read_texts
from study_settings import read_settings
from tqdm.auto import tqdm

from hf_moe_expand.errors import DivergedError, InputError
from hf_moe_expand.jsonfile import read_json, write_json
from hf_moe_expand.models import load_for_inference

SETTINGS = Path(__file__).with_name("studies") / "study.yaml"


def sweep(rates: list[float], score: Callable[[float], float]) -> dict[str, float]:
    """The scores of the middle three of `rates`, and of the next one outwards while the best is at an end."""
    if len(rates) == 1:
        return {str(rates[0]): 0.0}
    first = max(0, (len(rates) - 3) // 2)
    last = min(first + 3, len(rates))
    scores = [score(rate) for rate in rates[first:last]]
    while True:
        best = scores.index(min(scores))
        if best == 0 and first > 0:
            first -= 1
            scores.insert(0, score(rates[first]))
        elif best == len(scores) - 1 and last < len(rates):
            scores.append(score(rates[last]))
            last += 1
        else:
            return dict(zip(map(str, rates[first:last]), scores, strict=True))


class Study:
    """The rows of a settings file on one base, and their results."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.settings, self.out, self.data = read_settings(options.settings), options.out, options.data
        self.base = options.base or self.out / "base"
        trained = [*self.settings["old"]["reviewed"], *self.settings["new"]]
        files = [self.data / "help" / f"{code}.{split}.jsonl" for code in trained for split in ("train", "test")]
        if missing := next((file for file in (self.base / "config.json", *files) if not file.is_file()), None):
            raise InputError(
                f"{missing}: no such file; --data names a folder with help, flores and minimal_pairs, --base a model."
            )
        self.models = Models(self.settings, self.base, self.data / "help", self.out)
        self.old = [code for codes in self.settings["old"].values() for code in codes]
        self._pairs: MinimalPairs | None = None

    def rate(self, name: str) -> float:
        """The learning rate of a row: the best one of the sweep."""
        kept = self.out / "sweep" / f"{file_name(name)}.json"
        if not self.settings["rows"][name]:
            return 0.0
        if not kept.exists():
            write_json(kept, sweep(self.settings["rates"], lambda rate: self.tuning_score(name, rate)))
        scores = read_json(kept, "a sweep")
        return float(min(scores, key=scores.__getitem__))

    def tuning_score(self, name: str, rate: float) -> float:
        """The mean over reviewed old languages and that over new ones, together: bits per byte of held-out documents of
        the training text."""
        try:
            made = self.models.make(self.settings["rows"][name], 0, rate)
        except DivergedError as error:
            print(f"{name}, rate {rate:g}: {error}")
            return 1e9
        model, tokenizer = load_for_inference(made.path)
        groups = [self.models.reviewed, self.models.new]
        texts = {code: self.models.text.tuning(code) for codes in groups for code in codes}
        found = bits_per_byte(model, tokenizer, texts, {**self.settings["evaluation"], "max_tokens": 3000})
        return mean(mean(found[code] for code in codes) for codes in groups)

    def check_row(self, name: str) -> None:
        """Raises InputError if the settings have no such row."""
        if name not in self.settings["rows"]:
            raise InputError(f"{name!r} is not a row; known: {', '.join(self.settings['rows'])}.")

    def result(self, name: str, seed: int) -> dict[str, Any]:
        """Costs and scores of a row, kept."""
        self.check_row(name)
        kept = self.kept(name, seed)
        if not kept.exists():
            rate = self.rate(name)
            made = self.models.make(self.settings["rows"][name], seed, rate)
            found = {"rate": rate, "scores": self.scores(made.path), **parameters(made.path), **asdict(made)}
            write_json(kept, {**found, "path": str(made.path)})
            self.models.prune([Path(read_json(path, "a result")["path"]) for path in self.out.glob("results/*.0.json")])
        return read_json(kept, "a result")

    def kept(self, name: str, seed: int) -> Path:
        return self.out / "results" / f"{file_name(name)}.{seed}.json"

    def scores(self, path: Path) -> dict[str, dict[str, float]]:
        model, tokenizer = load_for_inference(path)
        codes = [*self.old, *self.models.new]
        domains = {"help": ("help", "test"), "flores": ("flores", "dev")}
        found = {
            name: bits_per_byte(
                model, tokenizer, read_texts(self.data / folder, split, codes), self.settings["evaluation"]
            )
            for name, (folder, split) in domains.items()
        }
        if size := self.settings.get("document_sentences"):
            texts = read_texts(self.data / "flores", "dev", codes)
            joined = {code: [" ".join(t[i : i + size]) for i in range(0, len(t), size)] for code, t in texts.items()}
            found["documents"] = bits_per_byte(model, tokenizer, joined, self.settings["evaluation"])
        if self._pairs is None:
            folder, out = self.data / "minimal_pairs", self.out / "tasks"
            self._pairs = MinimalPairs(folder, out, codes, self.settings["pairs"])
        size = self.settings["evaluation"]["batch_size"]
        return {**found, "pairs": self._pairs.accuracy(model, tokenizer, size)}

    def run(self, seeds: list[int], part: str, rows: list[str]) -> None:
        number, parts = map(int, part.split("/"))
        for name in rows:
            self.check_row(name)
        for seed in seeds:
            for name in (rows or list(self.settings["rows"]))[number - 1 :: parts]:
                tqdm.write(f"== {name}, seed {seed}")
                self.result(name, seed if self.settings["rows"][name] else 0)  # the base is the same with any seed

    def speed(self) -> None:
        """Tokens a second of the rows whose model of seed 0 is at hand."""
        paths = {
            name: Path(self.result(name, 0)["path"]) for name in self.settings["rows"] if self.kept(name, 0).exists()
        }
        models = {name: load_for_inference(path) for name, path in paths.items() if path.exists()}
        texts = read_texts(self.data / "help", "test", self.models.new[:1])[self.models.new[0]]
        write_json(self.out / "speed.json", generation_speed(models, texts, self.settings["generation"]))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True, metavar="COMMAND")

    def verb(name: str, work: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
        found = verbs.add_parser(name, help=text, description=text)
        found.set_defaults(work=work)
        found.add_argument("--out", type=Path, default=Path("runs/study/small"))
        found.add_argument("--settings", type=Path, default=SETTINGS)
        found.add_argument("--threads", type=int)
        if name != "report":
            found.add_argument("--data", type=Path, required=True, help="folder with help, flores and minimal_pairs")
            found.add_argument("--base", type=Path, help="dense checkpoint (OUT/base)")
        return found

    base = verb(
        "base", lambda o: make_small_base(o.data / "help", o.base or o.out / "base", o.steps), "makes the small base"
    )
    base.add_argument("--steps", type=int, default=700)
    run = verb("run", lambda o: Study(o).run(o.seeds, o.part, o.rows), "makes and scores every row")
    run.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    run.add_argument("--rows", nargs="+", default=[], metavar="ROW", help="the rows to run (all)")
    run.add_argument("--part", default="1/1", help="rows of this process, such as 1/2 and 2/2 (%(default)s)")
    row = verb(
        "row", lambda o: print(json.dumps(Study(o).result(o.name, o.seed), indent=1)), "makes and scores one row"
    )
    row.add_argument("name")
    row.add_argument("--seed", type=int, default=0)
    verb("speed", lambda o: Study(o).speed(), "measures generation; on an idle machine")
    report = verb("report", lambda o: write_report(o), "writes the tables, the JSON and the figures")
    report.add_argument("--json", type=Path)
    report.add_argument("--table", type=Path)
    report.add_argument("--figures", type=Path, help="folder for NAME_pareto.svg and NAME_loss.svg")
    report.add_argument("--name", default="study_small", help="first part of the figures' names (%(default)s)")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        options.work(options)
    except InputError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()

"""Is it worth it? Every method of this library against the plain alternatives, at equal training tokens.

    python benchmarks/study.py base --data DIR --out runs/study/small
    python benchmarks/study.py forecast --data DIR --out runs/study/small --seeds 0 1 2
    python benchmarks/study.py run --data DIR --out runs/study/small --seeds 0 1 2
    python benchmarks/study.py row "25 % replay" --seed 1 --data DIR --out runs/study/small
    python benchmarks/study.py speed --data DIR --out runs/study/small
    python benchmarks/study.py report --out runs/study/small --json study_small.json --table table.md --figures .
    python benchmarks/study.py restore --json study_small.json --data DIR --out runs/study/small

DIR holds help/LANGUAGE.train.jsonl, help/LANGUAGE.test.jsonl and flores/LANGUAGE.dev.jsonl (objects with `text`), and
minimal_pairs/LANGUAGE.jsonl (objects with `good` and `bad`). `--settings` names the languages, the training and the
rows: studies/study.yaml by default. `base` makes the small base; for another one give `--base` to the others.

Where the settings have `lengths`, each row is trained once for each, with a schedule of its own, and `report` shows
them one after the other, and as curves.

Each row of a length trains the same number of tokens, and takes its rates from the same sweep: with seed 0, judged on
documents of the training text that no row trains on and on sentences in old languages that no row reads, and extended
where the best rate is at an end. Finished parts are kept: stop a command with Ctrl-C, and run it again to continue.
`--part 1/2` and `--part 2/2` share the rows of `run` between two processes, each on its `--device`; `--rows` names some
of them. `restore` takes up a study from the JSON of a report, on a machine that lacks its folder.
"""

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from small_base import make_small_base
from study_changes import file_name, kept_results, row_folder
from study_forecast import TUNING_TOKENS, Job, Progress, forecast
from study_models import Models
from study_report import write_report
from study_restore import restore
from study_scores import MinimalPairs, bits_per_byte, generation_speed, parameters, read_texts
from study_settings import at_length, lengths_of, read_settings, row_digest
from study_tuning import Choice, Tried, tune

from hf_moe_expand.core.errors import DivergedError, InputError
from hf_moe_expand.core.jsonfile import read_json, write_json
from hf_moe_expand.data.anchors import shipped_sentences
from hf_moe_expand.inference.models import load_for_inference

SETTINGS = Path(__file__).with_name("studies") / "study.yaml"


class Study:
    """The rows of a settings file on one base at one length, and their results.

    Args:
        tokens: one of the settings' `lengths`; None where they have none.
    """

    def __init__(self, options: argparse.Namespace, tokens: int | None = None) -> None:
        settings = read_settings(options.settings)
        self.settings, self.tokens = at_length(settings, tokens), tokens
        self.longest = tokens == lengths_of(settings)[-1]
        self.out, self.data = options.out, options.data
        self.base = options.base or self.out / "base"
        trained = [*self.settings["old"]["reviewed"], *self.settings["new"]]
        files = [self.data / "help" / f"{code}.{split}.jsonl" for code in trained for split in ("train", "test")]
        if missing := next((file for file in (self.base / "config.json", *files) if not file.is_file()), None):
            raise InputError(
                f"{missing}: no such file; --data names a folder with help, flores and minimal_pairs, --base a model."
            )
        self.models = Models(self.settings, self.base, self.data / "help", self.out)
        self.old = [code for codes in self.settings["old"].values() for code in codes]
        self.kept = kept_results(settings, self.out)  # refuses results of other settings before any work

    def choice(self, name: str) -> Choice:
        """The rates and the weight of a row: the best ones of the sweep."""
        row = self.settings["rows"][name]
        if not row:
            return Choice(0.0)
        tried = Tried(self.sweep_file(name), row_digest(self.settings, name), self.scored(name))
        return tune(row, self.settings, tried)

    def sweep_file(self, name: str) -> Path:
        return row_folder(self.settings, self.out, self.tokens, name) / "sweep" / f"{file_name(name)}.json"

    def scored(self, name: str) -> Callable[[Choice], float]:
        """The score of a choice for a row: the mean over reviewed old languages, that over old languages that no row
        reads and that over new ones, together: bits per byte of held-out documents of the training text, and of the
        package's own sentences in the second group."""

        def score(choice: Choice) -> float:
            try:
                made = self.models.make(self.settings["rows"][name], 0, choice)
            except DivergedError as error:
                print(f"{name}, {choice}: {error}")
                return 1e9
            model, tokenizer = load_for_inference(made.path)
            texts = self.tuning_texts()
            flat = {code: text for group in texts for code, text in group.items()}
            found = bits_per_byte(model, tokenizer, flat, {**self.settings["evaluation"], "max_tokens": TUNING_TOKENS})
            self.prune([made.path])
            return mean(mean(found[code] for code in group) for group in texts)

        return score

    def tuning_texts(self) -> list[dict[str, list[str]]]:
        """The text of each group of languages on which the sweep is judged."""
        named = (self.models.reviewed, self.models.new)
        groups = [{code: self.models.text.tuning(code) for code in codes} for codes in named]
        unnamed = {code: shipped_sentences(code) for code in self.settings.get("tuning_unnamed", [])}
        return [*groups, unnamed] if unnamed else groups

    def prune(self, keep: Sequence[Path] = ()) -> None:
        """Removes models that are not needed any more, but for those of seed 0 at the longest length."""
        folder = self.out if self.tokens is None else self.out / str(lengths_of(self.settings)[-1])
        results = [read_json(path, "a result") for path in folder.glob("results/*.0.json")]
        self.models.prune([*keep, *(Path(result["path"]) for result in results)])

    def check_row(self, name: str) -> None:
        """Raises InputError if the settings have no such row."""
        if name not in self.settings["rows"]:
            raise InputError(f"{name!r} is not a row; known: {', '.join(self.settings['rows'])}.")

    def result(self, name: str, seed: int) -> dict[str, Any]:
        """Costs and scores of a row, kept.

        Raises:
            InputError: the folder has results that do not say of which settings they are.
        """
        self.check_row(name)
        kept = self.result_file(name, seed)
        if not kept.exists():
            if any(one.get("settings") is None for one in self.kept):
                raise InputError(
                    f"{self.out}: has results that do not name their settings, as earlier versions wrote them; new "
                    "ones must not stand beside them: give another --out."
                )
            choice = self.choice(name)
            made = self.models.make(self.settings["rows"][name], seed, choice)
            scores = self.scores(made.path)
            digest = row_digest(self.settings, name)
            found = {
                "settings": digest,
                "seed": seed,
                **asdict(choice),
                "scores": scores,
                **parameters(made.path),
                **asdict(made),
            }
            write_json(kept, {**found, "path": str(made.path)})
            self.prune()
        return read_json(kept, "a result")

    def result_file(self, name: str, seed: int) -> Path:
        folder = row_folder(self.settings, self.out, self.tokens, name)
        return folder / "results" / f"{file_name(name)}.{seed}.json"

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
        count = self.settings["pairs"]
        folder, limit = self.data / "minimal_pairs", None if count == "all" else count
        pairs = minimal_pairs(folder, self.out / "tasks", (*codes,), limit)
        judged = pairs.accuracy(model, tokenizer, self.settings["evaluation"]["batch_size"])
        found["pairs"] = {code: one.value for code, one in judged.items()}
        found["pairs_stderr"] = {code: one.stderr for code, one in judged.items() if one.stderr is not None}
        return found

    def jobs(self, seeds: Sequence[int], rows: Sequence[str]) -> list[Job]:
        """Rows to make, with their seeds; the base is the same with any seed."""
        of_all = self.settings["rows"]
        first = self.tokens == lengths_of(self.settings)[0]  # and so it is with any length
        named = [name for name in rows if of_all[name] or first]
        pairs = [(name, seed if of_all[name] else 0) for seed in seeds for name in named]
        return [
            Job(self, name, seed, not self.result_file(name, seed).exists(), not self.sweep_file(name).exists())
            for name, seed in dict.fromkeys(pairs)
        ]

    def speed(self) -> None:
        """Tokens a second of the rows whose model of seed 0 is at hand."""
        rows = [name for name in self.settings["rows"] if self.result_file(name, 0).exists()]
        paths = {name: Path(self.result(name, 0)["path"]) for name in rows}
        models = {name: load_for_inference(path) for name, path in paths.items() if path.exists()}
        texts = read_texts(self.data / "help", "test", self.models.new[:1])[self.models.new[0]]
        write_json(self.out / "speed.json", generation_speed(models, texts, self.settings["generation"]))


@cache
def minimal_pairs(folder: Path, out: Path, codes: tuple[str, ...], count: int | None) -> MinimalPairs:
    """The tasks, once: the harness takes half a minute to list its own."""
    return MinimalPairs(folder, out, list(codes), count)


def studies(options: argparse.Namespace) -> list[Study]:
    """The study at each of its lengths, the shortest first."""
    return [Study(options, tokens) for tokens in lengths_of(read_settings(options.settings))]


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """The rows of this process at all lengths and with all seeds: every second one, say.

    Raises:
        InputError: the settings lack a row.
    """
    settings, found = read_settings(options.settings), studies(options)
    for name in options.rows:
        found[0].check_row(name)
    number, parts = map(int, options.part.split("/"))
    rows = (options.rows or list(settings["rows"]))[number - 1 :: parts]
    return [job for study in found for job in study.jobs(options.seeds or settings["seeds"], rows)]


def run(options: argparse.Namespace) -> None:
    """Makes and scores every row, after saying how long that takes."""
    jobs = jobs_of(options)
    progress = Progress(jobs)
    if progress.open:
        print("\n".join(forecast(jobs)), flush=True)
    for job in jobs:
        progress.begin(job)
        job.study.result(job.name, job.seed)
        progress.done(job)


def one_row(options: argparse.Namespace) -> None:
    """Makes and scores one row at each length, and prints its results."""
    for study in studies(options):
        print(json.dumps(study.result(options.name, options.seed), indent=1))


def use_device(name: str | None) -> None:
    """Hides all devices but one from torch, before it looks for them: a Trainer would give each of several a batch.

    Raises:
        InputError: the name is no device, or there is no such device.
    """
    if name is None:
        if torch.backends.cuda.is_built():
            os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
        return
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdecimal()) or (kind == "cpu" and number):
        raise InputError(f"--device {name}: must be cpu, cuda or cuda:N.")
    if kind == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return
    seen = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
    chosen = int(number or 0)
    if seen and chosen >= len(seen):
        raise InputError(f"--device {name}: CUDA_VISIBLE_DEVICES shows {len(seen)} devices.")
    os.environ["CUDA_VISIBLE_DEVICES"] = seen[chosen] if seen else str(chosen)
    if not torch.cuda.is_available():
        raise InputError(f"--device {name}: torch {torch.__version__} finds no such device.")


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
            found.add_argument("--device", help="cpu, cuda or cuda:N (the first GPU, or the CPU where there is none)")
        return found

    def rows(found: argparse.ArgumentParser) -> None:
        found.add_argument("--seeds", type=int, nargs="+", help="seeds of each row (those of the settings)")
        found.add_argument("--rows", nargs="+", default=[], metavar="ROW", help="the rows to run (all)")
        found.add_argument("--part", default="1/1", help="rows of this process, such as 1/2 and 2/2 (%(default)s)")

    base = verb(
        "base", lambda o: make_small_base(o.data / "help", o.base or o.out / "base", o.steps), "makes the small base"
    )
    base.add_argument("--steps", type=int, default=700)
    rows(verb("run", run, "says how long it takes, then makes and scores every row"))
    rows(verb("forecast", lambda o: print("\n".join(forecast(jobs_of(o)))), "says how long `run` takes and its disk"))
    row = verb("row", one_row, "makes and scores one row, at each length")
    row.add_argument("name")
    row.add_argument("--seed", type=int, default=0)
    verb("speed", lambda o: studies(o)[-1].speed(), "measures generation; on an idle machine")
    taken_up = verb(
        "restore", lambda o: restore(studies(o), o.json, o.retrained), "takes up the finished rows of a report's JSON"
    )
    taken_up.add_argument("--json", type=Path, required=True, help="JSON of `report`")
    taken_up.add_argument("--retrained", action="store_true", help="the base here may be another training of its base")
    report = verb("report", lambda o: write_report(o), "writes the tables, the JSON and the figures")
    report.add_argument("--json", type=Path)
    report.add_argument("--table", type=Path)
    report.add_argument("--figures", type=Path, help="folder for NAME_pareto.svg, NAME_loss.svg and NAME_lengths.svg")
    report.add_argument("--name", default="study_small", help="first part of the figures' names (%(default)s)")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        use_device(getattr(options, "device", None))
        options.work(options)
    except InputError as error:
        parser.exit(1, f"{error}\n")
    except KeyboardInterrupt:
        parser.exit(130, "\nStopped. Finished parts are kept: the same command goes on.\n")


if __name__ == "__main__":
    main()

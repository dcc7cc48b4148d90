"""Is it worth it? Methods of this library beside the plain alternatives, at equal training tokens.

    python benchmarks/study_bases.py --out runs/bases
    python benchmarks/study.py run smollm2 --base runs/bases/smollm2 --data DIR --out runs/study --workers 5
    python benchmarks/study.py left smollm2 --out runs/study
    python benchmarks/study.py report --csv docs/study.csv --figure docs/study.svg

DIR holds help/LANGUAGE.train.jsonl, help/LANGUAGE.test.jsonl and flores/LANGUAGE.dev.jsonl (objects with `text`).
`study.yaml` has the rows, each a recipe's fragment, the bases, and the claims that `report` judges. `run` trains and
scores what is left and writes OUT/study.csv after each row, a line a model; stop it with Ctrl-C, and the same command
goes on; other settings take another OUT. `--workers N` runs N rows side by side on one device. `report` takes several
CSVs, such as docs/study.csv and one of further seeds.

Text is scored in float32 (on a GPU with products of 19 bits, TF32): bits per byte, judged first where a model has a
gate, and told the language where it is a new one; and the share of texts that go to new languages. `averages: best`
takes the weight, of `weights`, by which told sentences and documents of FLORES score best that are scored nowhere else;
`thirds` also one for each third of the layers, one after the other. A row with `tuned` joins full fine-tunes, one for
each new language, which all such rows share; one with `rate` has another than its kind's. Seconds a step of rows
that ran side by side are upper bounds (`workers` says how many ran).
"""

import argparse
import gc
import json
import math
import re
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pandas
import torch
import yaml
from filelock import FileLock, Timeout
from safetensors.torch import load_file, save_file
from study_report import report
from study_scores import chat, lines_of, scores, texts_of
from timing import reset_peak, resident_bytes
from transformers import AutoTokenizer

import hf_moe_expand as moe
from hf_moe_expand.analysis import gating
from hf_moe_expand.analysis.settings import GateSettings
from hf_moe_expand.checkpoint.merge import average_checkpoints, average_experts
from hf_moe_expand.checkpoint.source import load_config
from hf_moe_expand.core.jsonfile import write_text
from hf_moe_expand.data.anchors import shipped_anchors
from hf_moe_expand.trainers.bfloat16 import has_bfloat16

SETTINGS = Path(__file__).with_name("study.yaml")


class Study:
    """The rows of one base.

    Args:
        options: of the command line: `name` of the base, `base`, `data` and `out`.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        settings = yaml.safe_load(options.settings.read_text("utf-8"))
        self.options, self.out = options, options.out.resolve()
        if options.name not in settings["bases"]:
            sys.exit(f"{options.name}: no such base in {options.settings}; it has {', '.join(settings['bases'])}.")
        own = settings["bases"][options.name]
        self.settings = settings | own
        self.rows: dict[str, dict[str, Any]] = settings["rows"] | own.get("rows", {})
        self.languages: dict[str, list[str]] = self.settings["languages"]
        self.new = self.languages["new"]

    def jobs(self) -> list[tuple[str, int, int]]:
        """Row, tokens and seed of each run, the most wanted first."""
        options, found = self.options, [("base", 0, 0)]
        names = options.rows or list(self.rows)
        if unknown := [name for name in names if name not in self.rows]:
            sys.exit(f"{', '.join(unknown)}: no such row in {options.settings}; it has {', '.join(self.rows)}.")
        for tokens in options.tokens or self.settings["tokens"]:
            for seed in options.seeds or self.settings["tokens"].get(tokens, [0]):
                found += [(name, tokens, seed) for name in names if name != "base"]
        return found

    def result_file(self, job: tuple[str, int, int]) -> Path:
        name = re.sub(r"\W+", "-", job[0])
        return self.out / "results" / f"{self.options.name}.{job[1]}.{job[2]}.{name}.json"

    def left(self) -> list[tuple[str, int, int]]:
        return [job for job in self.jobs() if not self.result_file(job).exists()]

    def run(self) -> bool:
        """Makes and scores what is left; returns whether all went well. Other workers take other rows."""
        is_well = True
        for job in self.left():
            if time.time() > self.options.deadline:
                print(f"no time is left for {job}", flush=True)
                continue
            try:
                self.result(job, timeout=0)
            except Timeout:
                continue  # another worker has it
            except Exception:  # the other rows go on
                is_well = False
                print(f"{job}: failed\n{traceback.format_exc()}", flush=True)
            free()
        return is_well

    def result(self, job: tuple[str, int, int], timeout: float = -1) -> list[dict[str, Any]]:
        """The lines of a row, kept; the trained models are removed."""
        kept = self.result_file(job)
        kept.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{kept}.lock", timeout=timeout):
            if not kept.exists():
                begun, folder = time.time(), self.out / "models" / kept.stem
                shutil.rmtree(folder, ignore_errors=True)
                homes: dict[tuple[str, str, int], float] = {}
                lines: list[dict[str, Any]] = []
                for weight, model, cost in self.made(job, folder):
                    is_same = lambda one: (one["weight"], one.get("thirds")) == (weight, cost.get("thirds"))  # noqa: E731, B023
                    same = next(filter(is_same, lines), None)
                    lines.append(same | cost if same else self.scored(job, weight, model, cost, homes))
                write_text(kept, json.dumps(lines, ensure_ascii=False, indent=1))
                shutil.rmtree(folder, ignore_errors=True)
                self.write_csv()
                print(f"{job}: {time.time() - begun:.0f} s", flush=True)
        return json.loads(kept.read_text("utf-8"))

    def made(self, job: tuple[str, int, int], folder: Path) -> Iterator[tuple[float, Path, dict[str, Any]]]:
        """Trains a row: weight of the average with the base, model and cost of each model that is scored."""
        name, tokens, seed = job
        row, base = self.rows[name], self.options.base
        if name == "base":
            yield 1.0, base, {"held.0": self.held_out(base)}
            return
        folder.mkdir(parents=True)
        free()
        if "tuned" in row:
            tuned = self.fine_tunes(row, tokens, seed)
            cost = json.loads((tuned / "cost.json").read_text("utf-8"))
        else:
            trained = (self.train_dense if "dense" in row else self.run_recipe)(row, tokens, seed, folder)
            cost = step_cost(folder)

        def averaged(weight: float) -> Path:
            out = folder / f"weight-{weight}"
            if out.exists():
                return out
            if "tuned" in row:
                begun = time.time()
                models = {code: tuned / code for code in self.new}
                numbers = {code: number for number, code in enumerate(self.new, start=1)}
                gate, _ = moe.gate_from_file(tuned / "gate.safetensors", base, numbers)
                moe.expand_tuned(base, models, out, self.languages["kept"], weight=weight, gate=gate, **row["tuned"])
                cost["made_in"] = round(time.time() - begun, 1)
            elif weight == 1:
                return trained
            elif "dense" in row:
                average_checkpoints([trained, base], out, [weight, 1 - weight])
            else:
                average_experts(trained, out, weight)
            return out

        yield 1.0, averaged(1.0), dict(cost)
        weights = row.get("averages", [])
        if weights in ("best", "thirds"):
            held = {weight: self.held_out(averaged(weight)) for weight in self.settings["weights"]}
            best = min(held, key=lambda weight: held[weight])
            cost |= {"is_best": 1} | {f"held.{weight:g}": bits for weight, bits in held.items()}
            if weights == "thirds":
                found = self.best_thirds(trained, folder / "thirds", best)
                yield best, folder / "thirds", cost | {"thirds": " ".join(map("{:g}".format, found))}
            weights = [best]
        for weight in weights:
            yield weight, averaged(weight), dict(cost)

    def best_thirds(self, trained: Path, out: Path, weight: float) -> list[float]:
        """Averages a dense model with the base: each third of the layers at the weight that is best on held-out text,
        one third after the other, all else at `weight`."""
        found = [weight] * 3

        def bits(third: int, weight: float) -> float:
            return self.held_out(
                in_thirds(trained, self.options.base, out, [*found[:third], weight, *found[third + 1 :]])
            )

        for third in range(3):
            found[third] = min(self.settings["weights"], key=lambda weight: bits(third, weight))
        in_thirds(trained, self.options.base, out, found)
        return found

    def fine_tunes(self, row: Mapping[str, Any], tokens: int, seed: int) -> Path:
        """A folder with a full fine-tune of each new language, on its share of the tokens, and the gate; kept."""
        folder = self.out / "tuned" / f"{self.options.name}.{tokens}.{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not (folder / "cost.json").exists():
                each = tokens / len(self.new)
                files = {c: self.text(c) for c in self.languages["kept"]}
                files |= {c: self.text(c, max(each, 4000)) for c in self.new}  # what a gate reads
                for code in self.new:
                    if not (folder / code).exists():
                        work = folder / f"work-{code}"
                        shutil.rmtree(work, ignore_errors=True)
                        self.train_dense({"dense": {"method": "full"}}, each, seed, work, [code]).rename(folder / code)
                begun = time.time()
                with self.without_anchors():
                    moe.fit_base_gate(
                        self.options.base, folder / "gate.safetensors",
                        {code: lines_of(Path(file)) for code, file in files.items()}, self.new,
                        settings=GateSettings(**row["gates"]), overwrite=True,
                    )  # fmt: skip
                cost = step_cost(folder) | {"gate_in": round(time.time() - begun, 1)}
                write_text(folder / "cost.json", json.dumps(cost))
        return folder

    def held_out(self, model_folder: Path) -> float:
        """Bits per byte of the new languages' told text that chooses a weight: the mean over languages and kinds."""
        begin, count = self.settings["sentences"], self.settings["held_out"]
        texts = {code: texts_of(self.options.data, code, count, begin) for code in self.new}
        for kinds in texts.values():
            kinds.pop("pages", None)
        found = scores(*loaded(model_folder), texts, self.new)
        told = [bits for name, bits in found.items() if name.startswith("told.")]  # none of the base
        return round(statistics.mean(told or found.values()), 5)

    def train_dense(
        self, row: Mapping[str, Any], tokens: float, seed: int, folder: Path, new: Sequence[str] = ()
    ) -> Path:
        replay, out, new = row.get("replay", 0.0), folder / "dense", new or self.new
        shares = dict.fromkeys(new, (1 - replay) / len(new))
        shares |= dict.fromkeys(self.languages["kept"] if replay else [], replay / len(self.languages["kept"]))
        data = {code: moe.LanguageText(code, self.text(code, tokens * share)) for code, share in shares.items()}
        rate = "lora" if row["dense"].get("method") == "lora" else "dense"
        config = moe.DenseConfig(str(folder / "work"), **self.stage(rate, tokens, row), **row["dense"])
        moe.train_stage(self.options.base, out, data, config, seed)
        return out

    def run_recipe(self, row: Mapping[str, Any], tokens: int, seed: int, folder: Path) -> Path:
        """Runs a row's recipe, or those of its packs and of their join."""

        def run(name: str, new: Sequence[str], share: float, recipe: dict[str, Any]) -> Path:
            old = self.languages["kept"]
            each = max(tokens * share / len(new), 4000)  # what a gate reads
            texts = {"old": {c: self.text(c) for c in old}, "new": {c: self.text(c, each) for c in new}}
            whole = {"base": str(self.options.base), "output": str(folder / name), "seed": seed, **texts, **recipe}
            file = folder / f"{name}.yaml"
            file.write_text(yaml.safe_dump(whole, allow_unicode=True), "utf-8")
            say = lambda line: print(f"  {folder.name}: {line}", flush=True)  # noqa: E731
            with self.without_anchors():
                return moe.run_recipe(moe.Recipe.load(file), say=say)

        recipe = {key: value for key, value in row.items() if key not in ("averages", "packs", "rate")}
        reviewed = self.settings["review_share"] if recipe.get("review") is not None else 0.0
        parts = len(self.new) if row.get("packs") else 1
        kind = "lora" if recipe.get("expand", {}).get("expert_kind") == "adapter" else "post_pretrain"
        recipe["post_pretrain"] = self.stage(kind, tokens * (1 - reviewed) / parts, row)
        if reviewed:
            recipe["review"] = self.stage("review", tokens * reviewed, {}) | recipe["review"]
        if recipe["plan"]["method"] == "layer-moe":
            recipe["analysis"] = self.settings["analysis"]
        if not row.get("packs"):
            return run("run", self.new, 1.0, recipe)
        packs = [str(run(f"pack-{code}", [code], 1 / parts, recipe)) for code in self.new]
        return run("joined", self.new, 1.0, {"join": {"packs": packs}})

    def without_anchors(self) -> Any:
        """Inside, the package has no anchors in languages that no gate may read any of."""
        codes = [code for part in ("kept", "unnamed", "new") for code in self.languages[part]]
        return patch.object(gating, "shipped_anchors", lambda leave_out: shipped_anchors([*codes, *leave_out]))

    def stage(self, kind: str, tokens: float, row: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a stage on a number of tokens, at the row's `rate` or that of its kind."""
        settings = self.settings
        steps = max(1, round(tokens / (settings["block"] * settings["batch"])))
        found = {
            "learning_rate": row.get("rate", settings["rates"][kind]),
            "max_steps": steps, "block_size": settings["block"],
            "per_device_train_batch_size": settings["batch"], "lr_scheduler_type": "cosine", "warmup_steps": 0.05,
            "save_strategy": "no", "logging_steps": 20, "disable_tqdm": True,
        }  # fmt: skip
        return found | ({"bf16": True} if settings["bf16"] and has_bfloat16() else {})

    def text(self, code: str, tokens: float = math.inf) -> str:
        """A file with a language's first documents, of together at least this many tokens."""
        source = self.options.data / "help" / f"{code}.train.jsonl"
        if tokens == math.inf:
            return str(source.resolve())
        file = self.out / "text" / self.options.name / f"{code}.{int(tokens)}.jsonl"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            tokenizer, taken, size = AutoTokenizer.from_pretrained(self.options.base), [], 0
            for line in source.read_text("utf-8").splitlines(keepends=True):
                taken.append(line)
                size += len(tokenizer(json.loads(line)["text"]).input_ids) + 1
                if size >= tokens:
                    break
            write_text(file, "".join(taken))
        return str(file)

    def scored(
        self, job: tuple[str, int, int], weight: float, model_folder: Path, cost: dict, homes: dict
    ) -> dict[str, Any]:
        """A line of the CSV, and the answers of the chat."""
        on_gpu, (name, tokens, seed) = torch.cuda.is_available(), job
        device = torch.cuda.get_device_name() if on_gpu else f"CPU {torch.backends.cpu.get_cpu_capability()}"
        line = {
            "base": self.options.name, "row": name, "weight": weight, "tokens": tokens, "seed": seed, "device": device,
            "workers": self.options.beside, **cost,
        }  # fmt: skip
        model, tokenizer = loaded(model_folder)
        line["parameters"] = sum(one.numel() for one in model.parameters())
        codes = [code for group in self.languages.values() for code in group]
        texts = {code: texts_of(self.options.data, code, self.settings["sentences"]) for code in codes}
        torch.set_float32_matmul_precision("high")
        line |= scores(model, tokenizer, texts, self.new, homes)
        torch.set_float32_matmul_precision("highest")
        answers = {code: chat(model, tokenizer, asked) for code, asked in self.settings["questions"].items()}
        line["answers"] = answers
        if name != "base":
            (base,) = self.result(("base", 0, 0))
            line["chat.en"] = statistics.mean(map(str.__eq__, base["answers"]["en"], answers["en"]))
        return line

    def write_csv(self) -> None:
        """Writes the lines of all finished rows, in the order of the rows."""
        lines = [one for file in (self.out / "results").glob("*.json") for one in json.loads(file.read_text("utf-8"))]
        order = list(self.rows)
        lines.sort(key=lambda one: (one["base"], -one["tokens"], order.index(one["row"]), -one["weight"], one["seed"]))
        frame = pandas.DataFrame(lines).drop(columns="answers", errors="ignore")
        write_text(self.out / "study.csv", frame.to_csv(index=False))


def in_thirds(trained: Path, base: Path, out: Path, weights: Sequence[float]) -> Path:
    """Writes the average of a dense model with its base, at a weight for each third of the layers; what is in no layer
    has the middle third's."""
    shutil.copytree(trained, out, dirs_exist_ok=True)
    theirs, ours = load_file(base / "model.safetensors"), load_file(trained / "model.safetensors")
    layers = load_config(base).num_hidden_layers
    for name in ours:
        number = re.search(r"\.(\d+)\.", name)
        third = 3 * int(number[1]) // layers if number else 1
        ours[name] = torch.lerp(theirs[name], ours[name], weights[third])
    save_file(ours, out / "model.safetensors", {"format": "pt"})
    return out


def step_cost(folder: Path) -> dict[str, Any]:
    """Seconds and peak memory of a training step: of a row with two stages, of the one that has more steps."""
    states = [json.loads(file.read_text("utf-8")) for file in folder.rglob("trainer_state.json")]
    times = [(of["global_step"], log.get("train_runtime")) for of in states for log in of["log_history"]]
    steps, seconds = max(pair for pair in times if pair[1])
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else resident_bytes(peak=True)
    return {"seconds_a_step": round(seconds / steps, 4), "peak_gigabytes": round(peak / 1e9, 2)}


def free() -> None:
    """Frees memory, and forgets how much was taken."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    else:
        reset_peak()


def loaded(folder: Path) -> tuple[Any, Any]:
    """The model of a folder, in float32, and its tokenizer."""
    free()
    model, tokenizer = moe.load_for_inference(folder)
    return model.float().eval(), tokenizer


def run(options: argparse.Namespace) -> None:
    """Trains and scores what is left."""
    study = Study(options)
    if not (options.base / "config.json").is_file():
        sys.exit(f"{options.base}: no checkpoint; study_bases.py and small_base.py make the bases.")
    trained = [*study.languages["kept"], *study.new]
    files = [options.data / "help" / f"{code}.train.jsonl" for code in trained]
    if missing := [str(file) for file in files if not file.is_file()]:
        sys.exit(f"{', '.join(missing)}: no such file; --data names a folder with help and flores.")
    codes = [code for group in study.languages.values() for code in group]
    if missing := [code for code in codes if not texts_of(options.data, code, 6)]:
        sys.exit(f"{options.data}: no test text of {', '.join(missing)} (help/CODE.test.jsonl, flores/CODE.dev.jsonl).")
    if options.workers > 1:
        again = [sys.executable, __file__, *options.words, "--workers", "1", "--beside", str(options.workers)]
        workers = [subprocess.Popen(again) for _ in range(options.workers)]
        is_well = not sum(worker.wait() for worker in workers)
    else:
        is_well = study.run()
    left(options)
    if not is_well:
        sys.exit("A row failed: the messages above say which.")


def left(options: argparse.Namespace) -> None:
    """Prints the rows that are left."""
    rows = [f"{name}, {tokens:,} tokens, seed {seed}" for name, tokens, seed in Study(options).left()]
    print(f"{len(rows)} rows are left", *rows, sep="\n  ")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True, metavar="COMMAND")
    settings = argparse.ArgumentParser(add_help=False)
    settings.add_argument("--settings", type=Path, default=SETTINGS, help="(study.yaml)")
    chosen = argparse.ArgumentParser(add_help=False, parents=[settings])
    chosen.add_argument("name", help="a base of the settings")
    chosen.add_argument("--out", type=Path, default=Path("runs/study"), help="folder of all that is made (%(default)s)")
    chosen.add_argument("--rows", nargs="+", help="names of rows (all)")
    chosen.add_argument("--tokens", type=int, nargs="+", help="lengths (those of the settings)")
    chosen.add_argument("--seeds", type=int, nargs="+", help="(those of the settings)")
    verbs.add_parser("left", parents=[chosen], help="prints the rows that are left").set_defaults(work=left)
    verb = verbs.add_parser("run", parents=[chosen], help="trains and scores the rows that are left")
    verb.set_defaults(work=run)
    verb.add_argument("--base", type=Path, required=True, help="dense checkpoint")
    verb.add_argument("--data", type=Path, required=True, help="folder with help and flores")
    verb.add_argument("--workers", type=int, default=1, help="rows side by side (%(default)s)")
    verb.add_argument("--beside", type=int, default=1, help=argparse.SUPPRESS)
    verb.add_argument("--seconds", type=float, default=math.inf, help="after these no row begins")
    page = verbs.add_parser("report", parents=[settings], help="tables, judged claims and the figure")
    page.set_defaults(work=report)
    page.add_argument("--csv", type=Path, nargs="+", required=True, help="of one run or of several")
    page.add_argument("--figure", type=Path, help="draw it here (SVG)")
    options = parser.parse_args(arguments)
    options.words = sys.argv[1:] if arguments is None else list(arguments)
    options.deadline = time.time() + getattr(options, "seconds", 0)
    try:
        options.work(options)
    except KeyboardInterrupt:
        sys.exit("\nStopped. Finished rows are kept: the same command goes on.")


if __name__ == "__main__":
    main()

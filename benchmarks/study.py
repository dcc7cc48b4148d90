"""Is it worth it? Methods of this library beside the plain alternatives, at equal training tokens.

    python benchmarks/study_bases.py --out runs/bases
    python benchmarks/study.py run smollm2 --base runs/bases/smollm2 --data DIR --out runs/study --workers 5
    python benchmarks/study.py left smollm2 --out runs/study
    python benchmarks/study.py report --csv docs/study.csv --figure docs/study.svg

DIR holds help/LANGUAGE.train.jsonl, help/LANGUAGE.test.jsonl and flores/LANGUAGE.dev.jsonl (objects with `text`).
`study.yaml` has the rows, each a recipe's fragment, the bases, and the claims that `report` judges. `run` trains and
scores what is left and writes OUT/study.csv after each row, a line a model; stop it with Ctrl-C, and the same command
goes on; other settings take another OUT. py3langid, if installed, judges the language of answers. `--workers N` runs N
rows side by side on one device. `report` takes several CSVs, such as docs/study.csv and one of further seeds.

Text is scored in float32 (on a GPU with products of 19 bits, TF32): bits per byte token by token, judged by the
text's end where a model has a gate, and told the language where it is a new one; and the share of tokens that go to
new experts. Seconds a step of rows that ran side by side are upper bounds (`workers` says how many ran).
"""

import argparse
import gc
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pandas
import torch
import yaml
from filelock import FileLock, Timeout
from study_report import report
from timing import reset_peak, resident_bytes
from transformers import AutoTokenizer

import hf_moe_expand as moe
from hf_moe_expand.analysis import gating
from hf_moe_expand.checkpoint.average import average_checkpoints, average_experts
from hf_moe_expand.data.anchors import shipped_anchors
from hf_moe_expand.evaluation.perplexity import batch_nats
from hf_moe_expand.trainers.bfloat16 import has_bfloat16

SETTINGS = Path(__file__).with_name("study.yaml")
LONGEST = 512  # tokens of a text that is scored
AT_ONCE = {"cuda": 8192, "cpu": 1024}  # tokens of a scored batch, padding counted


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
                lines = [self.scored(job, weight, model, cost) for weight, model, cost in self.made(job, folder)]
                write(kept, json.dumps(lines, ensure_ascii=False, indent=1))
                shutil.rmtree(folder, ignore_errors=True)
                self.write_csv()
                print(f"{job}: {time.time() - begun:.0f} s", flush=True)
        return json.loads(kept.read_text("utf-8"))

    def made(self, job: tuple[str, int, int], folder: Path) -> Iterator[tuple[float, Path, dict[str, Any]]]:
        """Trains a row: weight of the average with the base, model and cost of each model that is scored."""
        name, tokens, seed = job
        row, base = self.rows[name], self.options.base
        if name == "base":
            yield 1.0, base, {}
            return
        folder.mkdir(parents=True)
        reset_memory()
        trained = (self.train_dense if "dense" in row else self.run_recipe)(row, tokens, seed, folder)
        cost = step_cost(folder)
        yield 1.0, trained, cost
        for weight in row.get("averages", []):
            averaged = folder / f"averaged-{weight}"
            if "dense" in row:
                average_checkpoints([trained, base], averaged, [weight, 1 - weight])
            else:
                average_experts(trained, averaged, weight)
            yield weight, averaged, cost

    def train_dense(self, row: Mapping[str, Any], tokens: int, seed: int, folder: Path) -> Path:
        replay, out = row.get("replay", 0.0), folder / "dense"
        shares = dict.fromkeys(self.new, (1 - replay) / len(self.new))
        shares |= dict.fromkeys(self.languages["kept"] if replay else [], replay / len(self.languages["kept"]))
        data = {code: moe.LanguageText(code, self.text(code, tokens * share)) for code, share in shares.items()}
        rate = "lora" if row["dense"].get("method") == "lora" else "dense"
        config = moe.DenseConfig(str(folder / "work"), **self.stage(rate, tokens), **row["dense"])
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
            with without_anchors([code for part in ("kept", "unnamed", "new") for code in self.languages[part]]):
                return moe.run_recipe(moe.Recipe.load(file), say=say)

        recipe = {key: value for key, value in row.items() if key not in ("averages", "packs")}
        reviewed = self.settings["review_share"] if recipe.get("review") is not None else 0.0
        parts = len(self.new) if row.get("packs") else 1
        has_adapters = recipe.get("expand", {}).get("expert_kind") == "adapter"
        kind = "lora" if has_adapters else "post_pretrain"
        recipe["post_pretrain"] = self.stage(kind, tokens * (1 - reviewed) / parts)
        if reviewed:
            recipe["review"] = self.stage("review", tokens * reviewed) | recipe["review"]
        if recipe["plan"]["method"] == "layer-moe":
            recipe["analysis"] = self.settings["analysis"]
        if not row.get("packs"):
            return run("run", self.new, 1.0, recipe)
        packs = [str(run(f"pack-{code}", [code], 1 / parts, recipe)) for code in self.new]
        return run("joined", self.new, 1.0, {"join": {"packs": packs}})

    def stage(self, kind: str, tokens: float) -> dict[str, Any]:
        """The settings of a stage on a number of tokens."""
        settings = self.settings
        steps = max(1, round(tokens / (settings["block"] * settings["batch"])))
        found = {
            "learning_rate": settings["rates"][kind], "max_steps": steps, "block_size": settings["block"],
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
            write(file, "".join(taken))
        return str(file)

    def scored(self, job: tuple[str, int, int], weight: float, model_folder: Path, cost: dict) -> dict[str, Any]:
        """A line of the CSV, and the answers of the chat."""
        device = f"CPU {torch.backends.cpu.get_cpu_capability()}"
        if torch.cuda.is_available():
            device = torch.cuda.get_device_name()
        name, tokens, seed = job
        line = {
            "base": self.options.name, "row": name, "weight": weight, "tokens": tokens, "seed": seed, "device": device,
            "workers": self.options.beside, **cost,
        }  # fmt: skip
        free()
        model, tokenizer = moe.load_for_inference(model_folder)
        model.float().eval()
        line["parameters"] = sum(one.numel() for one in model.parameters())
        codes = [code for group in self.languages.values() for code in group]
        texts = {code: texts_of(self.options.data, code, self.settings["sentences"]) for code in codes}
        torch.set_float32_matmul_precision("high")
        line |= scores(model, tokenizer, texts, self.new)
        torch.set_float32_matmul_precision("highest")
        answers = {code: chat(model, tokenizer, asked) for code, asked in self.settings["questions"].items()}
        line["answers"] = answers
        if name != "base":
            (base,) = self.result(("base", 0, 0))
            line["chat.en"] = statistics.mean(map(str.__eq__, base["answers"]["en"], answers["en"]))
        line["chat.hu"] = share_in("hu", answers["hu"])
        line["tokens_a_second"] = generation_speed(model)
        return line

    def write_csv(self) -> None:
        """Writes the lines of all finished rows, in the order of the rows."""
        lines = [one for file in (self.out / "results").glob("*.json") for one in json.loads(file.read_text("utf-8"))]
        order = list(self.rows)
        lines.sort(key=lambda one: (one["base"], -one["tokens"], order.index(one["row"]), -one["weight"], one["seed"]))
        frame = pandas.DataFrame(lines).drop(columns="answers", errors="ignore")
        write(self.out / "study.csv", frame.to_csv(index=False))


def step_cost(folder: Path) -> dict[str, Any]:
    """Seconds and peak memory of a training step: of a row with two stages, of the one that has more steps."""
    states = [json.loads(file.read_text("utf-8")) for file in folder.rglob("trainer_state.json")]
    times = [(of["global_step"], log.get("train_runtime")) for of in states for log in of["log_history"]]
    steps, seconds = max(pair for pair in times if pair[1])
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else resident_bytes(peak=True)
    return {"seconds_a_step": round(seconds / steps, 4), "peak_gigabytes": round(peak / 1e9, 2)}


def reset_memory() -> None:
    free()
    if torch.cuda.is_available():
        torch.cuda.init()
        torch.cuda.reset_peak_memory_stats()
    else:
        reset_peak()


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def without_anchors(codes: Sequence[str]) -> Any:
    """Inside, the package has no anchors in these languages, of which no gate may read any."""
    return patch.object(gating, "shipped_anchors", lambda leave_out: shipped_anchors([*codes, *leave_out]))


def write(file: Path, text: str) -> None:
    """Writes a file whole, or not at all."""
    partial = file.with_name(f"{file.name}.{os.getpid()}")
    partial.write_text(text, "utf-8")
    partial.rename(file)


def lines_of(file: Path) -> list[str]:
    return [json.loads(line)["text"] for line in file.read_text("utf-8").splitlines()] if file.is_file() else []


def texts_of(data: Path, code: str, count: int) -> dict[str, list[str]]:
    """A language's test text by kind; documents are six sentences each."""
    sentences = lines_of(data / "flores" / f"{code}.dev.jsonl")[:count]
    pages = [text[:2000] for text in lines_of(data / "help" / f"{code}.test.jsonl")[: count // 6]]
    documents = [" ".join(sentences[i : i + 6]) for i in range(0, len(sentences), 6)]
    kinds = {"pages": pages, "documents": documents, "sentences": sentences}
    return {kind: texts for kind, texts in kinds.items() if texts}


def batches(texts: Sequence[str], tokenizer: Any, device: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """Left-padded tokens and masks, and the bytes of the scored text; texts of like lengths together."""
    begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    rows = [[begin, *tokenizer(text, add_special_tokens=False).input_ids[: LONGEST - 1]] for text in texts]
    rows.sort(key=len)
    while rows:
        longest = len(rows[-1])
        count = max(1, AT_ONCE[device.type] // longest)
        rows, part = rows[:-count], rows[-count:]
        ids = torch.tensor([[begin] * (longest - len(row)) + row for row in part])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in part])
        yield ids.to(device), mask.to(device), sum(len(tokenizer.decode(row[1:]).encode()) for row in part)


@torch.no_grad()
def scores(model: Any, tokenizer: Any, texts: Mapping[str, Any], new: Sequence[str]) -> dict[str, float]:
    """Bits per byte by way, kind of text and language, and the share of texts that go to new experts."""
    rule = getattr(model.config, "language_gate", None)
    found: dict[str, float] = {}
    control = getattr(model, "routing_control", None)
    for code, kinds in texts.items():
        ways = ["read", *(["told"] if control and code in new else [])]
        for kind, some in kinds.items():
            taken = [0, 0]
            for way in ways:
                nats, size = 0.0, 0
                for ids, mask, width in batches(some, tokenizer, model.device):
                    size += width
                    positions = (mask.cumsum(1) - 1).clamp(min=0)
                    wanted = (mask[:, 1:] > 0) & (positions[:, 1:] > 0)
                    targets = torch.where(wanted, ids[:, 1:], -100)
                    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
                    with model.use_languages(code) if way == "told" else nullcontext():
                        nats += batch_nats(model, targets, **inputs).sum().item()
                    if rule and way == "read":
                        taken[0] += int((model.judge(ids, mask) > 0).sum())
                        taken[1] += len(ids)
                found[f"{way}.{kind}.{code}"] = round(nats / math.log(2) / size, 5)
            if rule:  # a text is judged by its end before it is read
                found[f"end.{kind}.{code}"] = found[f"read.{kind}.{code}"]
                found[f"new.{kind}.{code}"] = round(taken[0] / max(taken[1], 1), 5)
    return found


def in_template(tokenizer: Any, asked: Sequence[str]) -> list[str]:
    """Questions as prompts of the chat template, where there is one."""
    if not tokenizer.chat_template:
        return list(asked)
    messages = [[{"role": "user", "content": question}] for question in asked]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


@torch.no_grad()
def chat(model: Any, tokenizer: Any, asked: Sequence[str], tokens: int = 24) -> list[str]:
    """Greedy answers to questions; without a chat template, how the model goes on."""
    asked = in_template(tokenizer, asked)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    batch = tokenizer(asked, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    ids = model.generate(**inputs, max_new_tokens=tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    return tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def share_in(code: str, answers: Sequence[str]) -> float | None:
    """The share of answers in a language; None without py3langid."""
    try:
        import py3langid
    except ImportError:
        print("py3langid is not installed: the language of the answers is not judged", flush=True)
        return None
    return statistics.mean(py3langid.classify(one)[0] == code for one in answers)


@torch.no_grad()
def generation_speed(model: Any, batch: int = 8, tokens: int = 48) -> float:
    """Generated tokens a second, greedy, of prompts of 32 tokens; the second of two runs."""
    ids = torch.randint(100, 250, (batch, 32), generator=torch.Generator().manual_seed(0)).to(model.device)
    for _ in range(2):
        begun = time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
            pad_token_id=0,
        ).tolist()  # fmt: skip
    return round(batch * tokens / (time.perf_counter() - begun), 1)


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
        sys.exit(
            f"{options.data}: has no test text of {', '.join(missing)} (help/CODE.test.jsonl, flores/CODE.dev.jsonl)."
        )
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
    jobs = Study(options).left()
    print(
        f"{len(jobs)} rows are left", *(f"{n}, {tokens:,} tokens, seed {seed}" for n, tokens, seed in jobs), sep="\n  "
    )


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
    page.add_argument("--table", type=Path, help="also write the tables here")
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

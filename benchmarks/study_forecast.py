"""Says how long the rows of a study will take on this machine, how much disk, and how far they are."""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from study_models import in_float32
from study_settings import trained_tokens
from study_tuning import ladder
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM

from hf_moe_expand.checkpoint.reader import CheckpointReader
from hf_moe_expand.checkpoint.source import load_base_config
from hf_moe_expand.checkpoint.stored import network_of
from hf_moe_expand.modeling import decoder_ffns

# A mixture's training time against full fine-tuning's, by the largest in docs/study.md; and an allowance of seconds
# around a training or a scoring, for loading, packing and writing.
_MIXTURE, _AROUND = 1.4, 15.0
TUNING_TOKENS = 3000  # of each language, on which a choice of the sweep is judged
_BYTES_A_TOKEN = 3  # of a minimal pair


@dataclass(frozen=True)
class Job:
    """A row to make, for one seed.

    Attributes:
        study: the study at one length.
        open: whether it is still to be made.
        untuned: whether its sweep is still to be made.
    """

    study: Any
    name: str
    seed: int
    open: bool
    untuned: bool

    def __str__(self) -> str:
        return f"{self.name}, seed {self.seed}, {trained_tokens(self.study.settings):,} tokens"


@dataclass(frozen=True)
class Work:
    """Work of jobs: trainings and scorings, and tokens of each; a mixture's tokens count `_MIXTURE` times."""

    runs: float = 0.0
    trained: float = 0.0
    scored: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.runs + other.runs, self.trained + other.trained, self.scored + other.scored)

    def seconds(self, training: float, scoring: float) -> float:
        """The time at so many tokens a second of training and scoring."""
        return self.runs * _AROUND + self.trained / training + self.scored / scoring


def work_of(job: Job, tunes: bool) -> Work:
    """What a job takes at least.

    Args:
        tunes: whether it makes the row's sweep.
    """
    settings, row = job.study.settings, job.study.settings["rows"][job.name]
    scoring = Work(1, 0, _scored_tokens(job.study))
    if not row:
        return scoring
    others = [_training(other) for name, other in settings["rows"].items() if name != job.name]
    shared = "average" in row and _training(row) in others
    tokens = 0.0 if shared else trained_tokens(settings) * (1.0 if "dense" in row else _MIXTURE)
    rates, weights = min(3, len(ladder(row, settings, "rates"))), len(row.get("average", [None]))
    reviews = min(3, len(ladder(row, settings, "review_rates"))) if row.get("review") is not None else 1
    choices = rates * weights + reviews - 1
    if not tunes or choices == 1:
        return scoring + Work(1, tokens, 0)
    share = settings["review_steps"] / settings["steps"]
    judged = sum(len(group) for group in job.study.tuning_texts()) * TUNING_TOKENS
    # Seed 0 at the best rates is one of the sweep's own models.
    trainings = rates + (reviews - 1) * share + (job.seed != 0)
    return scoring + Work(2 * choices, tokens * trainings, judged * choices)


def _training(row: Mapping[str, Any]) -> dict[str, Any]:
    """What decides a row's training."""
    return {key: value for key, value in row.items() if key not in ("average", "rates", "review_rates")}


def _scored_tokens(study: Any) -> float:
    settings, codes = study.settings, [*study.old, *study.models.new]
    domains = 3 if settings.get("document_sentences") else 2
    found = domains * len(codes) * settings["evaluation"]["max_tokens"]
    for file in (study.data / "minimal_pairs" / f"{code}.jsonl" for code in codes):
        if file.is_file():
            lines = len(file.read_text("utf-8").splitlines())
            count = lines if settings["pairs"] == "all" else min(lines, settings["pairs"])
            found += count / max(1, lines) * file.stat().st_size / _BYTES_A_TOKEN
    return found


def work_by_job(jobs: Sequence[Job]) -> dict[int, Work]:
    """The work of each open job by its number; a row's first open job makes the sweep."""
    found, tuned = {}, set()
    for number, job in enumerate(jobs):
        if job.open:
            key = (id(job.study), job.name)
            found[number] = work_of(job, job.untuned and key not in tuned)
            tuned.add(key)
    return found


def forecast(jobs: Sequence[Job]) -> list[str]:
    """One line on the time that the open jobs take here, one on their disk, and one where they train in float32."""
    work = work_by_job(jobs)
    if not work:
        return [f"all {len(jobs)} rows are made"]
    study = jobs[0].study
    training, scoring = measure_speed(study)
    total = sum(work.values(), Work())
    needed, free = disk_bytes(jobs), free_bytes(study.out)
    takes = spoken(total.seconds(training, scoring))
    float32 = ["this processor has no bfloat16: rows train in float32, and the report says so"]
    return [
        f"{len(work)} of {len(jobs)} rows are to be made: about {takes} on this machine, which trains {training:,.0f} "
        f"tokens a second and scores {scoring:,.0f}; longer where a sweep goes on outwards",
        f"disk: at most {needed / 1e9:.1f} GB ({free / 1e9:.1f} GB are free)",
        *float32 * in_float32(study.settings),
    ]


def measure_speed(study: Any) -> tuple[float, float]:
    """Tokens a second of the base in full fine-tuning and in scoring, on the device that the study uses."""
    settings = study.settings
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(study.base, dtype=torch.float32, trust_remote_code=False).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)

    def step(batch: int, block: int, trains: bool) -> None:
        ids = torch.randint(model.config.vocab_size, (batch, block), device=device)
        bf16 = trains and settings["training"].get("bf16", False) and not in_float32(settings)
        with torch.set_grad_enabled(trains), torch.autocast(device, torch.bfloat16, enabled=bf16):
            loss = model(input_ids=ids, labels=ids).loss
        if trains:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def speed(batch: int, block: int, trains: bool) -> float:
        step(batch, block, trains)  # the first one is slower
        begun, rounds = time.perf_counter(), 2
        for _ in range(rounds):
            step(batch, block, trains)
        if device == "cuda":
            torch.cuda.synchronize()
        return rounds * batch * block / (time.perf_counter() - begun)

    own = settings["evaluation"]
    training = speed(settings["batch_size"], settings["block_size"], True)
    return training, speed(own["batch_size"], own["block_size"], False)


def disk_bytes(jobs: Sequence[Job]) -> float:
    """The most that the models of the jobs take: those that are kept for `speed`, those that further rows may need, and
    two that are at work."""
    study = jobs[0].study
    base = sum(info.nbytes for info in CheckpointReader(study.base).tensors.values())
    network: Any = network_of(load_base_config(study.base))
    ffns = [sum(parameter.numel() for parameter in ffn.module.parameters()) for ffn in decoder_ffns(network)]
    each, rows = 4 * sum(ffns) / len(ffns), study.settings["rows"]
    sizes = {name: base + each * new_ffns(row, len(ffns), len(study.models.new)) for name, row in rows.items() if row}
    kept = sum(sizes[name] for name in {job.name for job in jobs if job.seed == 0 and job.study.longest} & set(sizes))
    return kept + study.settings["keep_gigabytes"] * 1e9 + 2 * max(sizes.values(), default=0.0)


def new_ffns(row: dict[str, Any], layers: int, new: int) -> float:
    """About the number of FFNs of one layer that a row's model has more than the base; LoRA experts count as none."""
    if "blocks" in row:
        return 2.0 * row["blocks"]  # a block's attention is no larger than its FFN
    if "branches" in row:
        return layers * (len(row["branches"]) - 1)
    plan = row.get("plan")
    if plan is None or row.get("expand", {}).get("expert_kind") == "lora":
        return 0.0
    if "packs" in row:
        return layers * new * (plan["experts"] - 1)
    if "expansions" in row:
        first, further = plan["experts"]
        return layers * (first - 1 + further * (len(row["expansions"]) - 1))
    if plan["method"] == "dmoe":
        return layers * (plan["groups"] - 1)
    return plan["total_experts"] - layers if "total_experts" in plan else layers * (plan["experts"] - 1)


def free_bytes(out: Path) -> int:
    """The room on the disk of a folder that need not exist."""
    return shutil.disk_usage(next(folder for folder in (out, *out.resolve().parents) if folder.exists())).free


class Progress:
    """Says before each row which it is, and after it how long the others will take, by those that are done."""

    def __init__(self, jobs: Sequence[Job], clock: Callable[[], float] = time.monotonic) -> None:
        self.jobs, self.clock = list(jobs), clock
        self.open = {id(jobs[number]): work for number, work in work_by_job(jobs).items()}
        self.begun, self.finished = clock(), 0.0

    def begin(self, job: Job) -> None:
        number = self.jobs.index(job) + 1
        made = "" if id(job) in self.open else ": made already"
        tqdm.write(f"== {number} of {len(self.jobs)}: {job}{made}")

    def done(self, job: Job) -> None:
        work = self.open.pop(id(job), None)
        if work is None:
            return
        self.finished += _weight(work)
        left, spent = sum(map(_weight, self.open.values())), self.clock() - self.begun
        said = f"about {spoken(spent * left / self.finished)} left" if self.open else "all rows are made"
        tqdm.write(f"   {spoken(spent)} so far, {said}")


def _weight(work: Work) -> float:
    return work.seconds(1000.0, 3000.0)  # only the ratio of two jobs matters


def spoken(seconds: float) -> str:
    """A time such as `40 s`, `12 min` or `3.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"

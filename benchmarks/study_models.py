"""The models of the study: each row of a settings file, for a seed and a learning rate.

Every step of a row (an expansion, a stage) is kept under the hash of all that decides it, so that rows which begin
alike share their beginning.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from filelock import FileLock, Timeout
from peft import LoraConfig, get_peft_model
from study_tuning import Choice
from transformers import AutoTokenizer

from hf_moe_expand import (
    DenseConfig,
    GroupConfig,
    JointConfig,
    PostPretrainConfig,
    ReviewConfig,
    expand_checkpoint,
    grow_checkpoint,
    train_stage,
)
from hf_moe_expand.analysis.calibration import join_calibrated
from hf_moe_expand.analysis.deviation import measure_deviation
from hf_moe_expand.analysis.gating import fit_gates
from hf_moe_expand.analysis.settings import GateSettings
from hf_moe_expand.analysis.similarity import measure_similarity
from hf_moe_expand.baselines.branches import expand_branches
from hf_moe_expand.baselines.depth import expand_depth
from hf_moe_expand.checkpoint.merge import average_checkpoints
from hf_moe_expand.checkpoint.source import load_base_config
from hf_moe_expand.checkpoint.stored import network_of
from hf_moe_expand.core.disk import folder_bytes
from hf_moe_expand.core.jsonfile import read_json, write_json, write_text
from hf_moe_expand.data.anchors import shipped_anchors
from hf_moe_expand.data.packing import encode_documents
from hf_moe_expand.data.sources import LanguageText
from hf_moe_expand.inference.memory import has_bfloat16
from hf_moe_expand.inference.models import load_for_inference
from hf_moe_expand.planning.make import make_plan
from hf_moe_expand.planning.methods import read_plan_settings
from hf_moe_expand.planning.plan import Plan
from hf_moe_expand.planning.results import DeviationResult, SimilarityResult
from hf_moe_expand.stages.config import StageConfig

CONFIGS: dict[str, type[StageConfig]] = {
    "dense": DenseConfig, "post_pretrain": PostPretrainConfig, "group": GroupConfig, "joint": JointConfig,
    "review": ReviewConfig,
}  # fmt: skip


class StudyText:
    """The training text of a study, without the documents held out for the sweep, in pieces of a number of tokens."""

    def __init__(self, pages: Path, out: Path, base: Path, held: int) -> None:
        self.pages, self.out, self.held = pages, out, held
        self.tokenizer = AutoTokenizer.from_pretrained(base)

    def lines(self, code: str) -> list[str]:
        return (self.pages / f"{code}.train.jsonl").read_text("utf-8").splitlines(keepends=True)

    def tuning(self, code: str) -> list[str]:
        """The documents that no row trains on."""
        return [json.loads(line)["text"] for line in self.lines(code)[: self.held]]

    def documents(self, code: str) -> list[str]:
        return [json.loads(line)["text"] for line in self.lines(code)[self.held :]]

    def piece(self, code: str, tokens: int) -> LanguageText:
        """The first documents with together at least `tokens` tokens; all if there are fewer."""
        file = self.out / f"{code}.{tokens}.jsonl"
        if not file.exists():
            taken, held = [], 0
            for line in self.lines(code)[self.held :]:
                taken.append(line)
                held += len(encode_documents([json.loads(line)["text"]], self.tokenizer)[0])
                if held >= tokens:
                    break
            write_text(file, "".join(taken))
        return LanguageText(code, str(file))


@dataclass(frozen=True)
class Made:
    """A model of the study.

    Attributes:
        trained: parameters that train in its main stage, or in the largest of several.
        seconds: processor time of all its training steps and expansions.
        losses: training loss of the main stage: tokens, and nats a token.
        float32: whether it trained in float32 for want of bfloat16.
    """

    path: Path
    trained: int
    seconds: float
    losses: list[tuple[int, float]]
    float32: bool = False


class Models:
    """Makes the models of a study's rows.

    Args:
        settings: the settings file of the study.
        pages: folder with the training text.
        out: folder for all that is made.
    """

    def __init__(self, settings: Mapping[str, Any], base: Path, pages: Path, out: Path) -> None:
        self.settings, self.base, self.out = settings, base, out
        self.text = StudyText(pages, out / "text", base, settings["tuning_documents"])
        self.reviewed: list[str] = settings["old"]["reviewed"]
        self.new: list[str] = settings["new"]
        self.layers = load_base_config(base).num_hidden_layers
        self.tokens_per_step = settings["block_size"] * settings["batch_size"]

    def make(self, row: Mapping[str, Any], seed: int, choice: Choice) -> Made:
        """The model of a row."""
        return _Row(self, row, seed, choice).made()

    def unnamed(self) -> list[str]:
        """The languages of the test, and those of the sweep, that no row may read text of."""
        settings = self.settings
        return [*settings["old"]["not reviewed"], *settings.get("tuning_unnamed", [])]

    def similarity(self) -> SimilarityResult:
        def measure(model: Any, tokenizer: Any, texts: Any, work: Path) -> SimilarityResult:
            return measure_similarity(model, tokenizer, texts, self.reviewed, self.new, **self.settings["analysis"])

        return SimilarityResult.from_json(self._analysis("similarity", measure))

    def deviation(self) -> DeviationResult:
        def measure(model: Any, tokenizer: Any, texts: Any, work: Path) -> DeviationResult:
            return measure_deviation(model, tokenizer, texts, work_dir=work, **self.settings["deviation"])

        return DeviationResult.from_json(self._analysis("deviation", measure))

    def _analysis(self, name: str, measure: Callable[[Any, Any, dict[str, list[str]], Path], Any]) -> Path:
        """The file of an analysis of the base on all text that is trained on, measured once."""
        path = self.out / "analyses" / f"{name}.json"
        with FileLock(f"{self._locked(path)}.lock"):
            if not path.exists():
                texts = {code: self.text.documents(code) for code in (*self.reviewed, *self.new)}
                with TemporaryDirectory(dir=path.parent) as work:
                    measure(*load_for_inference(self.base), texts, Path(work) / name).to_json(path)
        return path

    def step(self, name: str, about: Mapping[str, Any], work: Callable[[Path], Mapping[str, Any] | None]) -> Path:
        """A step's model, and beside it a `.json` with its processor time and what `work` returns.

        Args:
            about: all that decides the step's result.
            work: makes the model.
        """
        digest = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:12]
        model = self.out / "steps" / f"{name}-{digest}"
        with FileLock(f"{self._locked(model)}.lock"):
            if not (model.exists() and facts_of(model).exists()):
                shutil.rmtree(model, ignore_errors=True)
                begun = time.process_time()
                facts = work(model) or {}
                seconds = time.process_time() - begun
                told = json.loads(json.dumps(about, default=str))
                write_json(facts_of(model), {"about": told, "seconds": seconds, **facts})
            facts_of(model).touch()
        return model

    def prune(self, keep: Sequence[Path]) -> None:
        """Removes the models that were used longest ago, but for `keep`, until the others fit into the limit."""
        limit, held = self.settings["keep_gigabytes"] * 1e9, 0.0
        last_used = sorted((self.out / "steps").glob("*.json"), key=lambda path: -path.stat().st_mtime)
        for model in (path.with_suffix("") for path in last_used):
            if model in keep or not model.exists():
                continue
            with suppress(Timeout, FileNotFoundError), FileLock(f"{model}.lock", timeout=0):  # else another part has it
                held += folder_bytes(model)
                if held > limit:
                    gone = model.with_suffix(".removed")  # a model that is half removed is never taken for whole
                    shutil.rmtree(gone, ignore_errors=True)
                    model.rename(gone)
                    shutil.rmtree(gone)

    @staticmethod
    def _locked(path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


class _Row:
    """One row for one seed and one choice of its tuned numbers."""

    def __init__(self, models: Models, row: Mapping[str, Any], seed: int, choice: Choice) -> None:
        self.models, self.row, self.seed, self.choice = models, row, seed, choice
        self.rate = choice.rate
        self.steps = models.settings["steps"]
        self.review_steps = models.settings["review_steps"]
        self.taken: list[Path] = []  # the models of its steps

    def made(self) -> Made:
        row, models = self.row, self.models
        if not row:
            return Made(models.base, 0, 0.0, [])
        if "dense" in row:
            path = self.dense()
        elif "branches" in row:
            path = self.branch_train_mix()
        elif "packs" in row:
            path = self.packs()
        elif "expansions" in row:
            path = self.lifelong()
        elif row["plan"]["method"] == "dmoe":
            path = self.dmoe()
        else:
            path = self.expansion(models.new, self.steps, self.review_steps, row["plan"])
        if self.choice.weight is not None:
            path = self.averaged(path, self.choice.weight)
        facts = [read_json(facts_of(model), "facts") for model in self.taken]
        main = max(facts, key=lambda found: found.get("trained", 0))
        seconds = sum(found["seconds"] for found in facts)
        return Made(path, main["trained"], seconds, main["losses"], in_float32(models.settings))

    def dense(self) -> Path:
        models, replay = self.models, self.row.get("replay", 0.0)
        start = models.base
        if blocks := self.row.get("blocks"):
            start = self.step("depth", {"blocks": blocks}, lambda out: expand_depth(models.base, out, blocks) and None)
        text = self.mixed(models.new, self.steps, replay)
        return self.train("dense", start, text, self.steps, self.rate, self.row["dense"])

    def averaged(self, trained: Path, weight: float) -> Path:
        """The average of a trained model and the base."""
        models = [trained, self.models.base]

        def work(out: Path) -> None:
            average_checkpoints(models, out, [weight, 1 - weight])

        return self.step("averaged", {"trained": trained.name, "weight": weight}, work)

    def expansion(self, new: Sequence[str], steps: int, review_steps: int, plan: Mapping[str, Any]) -> Path:
        """One expansion of the base: stage 1, and review if the row has one."""
        reviews = "review" in self.row
        start = self.expanded(new, plan)
        return self.stages(start, self.models.reviewed, new, steps, review_steps if reviews else 0)

    def stages(self, start: Path, known: Sequence[str], new: Sequence[str], steps: int, review_steps: int) -> Path:
        replay, own = self.row.get("replay", 0.0), dict(self.row["post_pretrain"])
        if replay:
            own["replay"] = True
        first = self.train(
            "post_pretrain", start, self.mixed(new, steps - review_steps, replay), steps - review_steps, self.rate, own
        )
        if "gates" in self.row:
            first = self.gates(first, [*known, *new])
        reviews = review_steps and self.row["review"] is not None  # null: the steps are left out
        return self.review(first, [*known, *new], review_steps) if reviews else first

    def gates(self, start: Path, codes: Sequence[str]) -> Path:
        """Fitted gates; no language that the study leaves unnamed is an anchor."""
        models, settings = self.models, GateSettings(**self.row["gates"])
        unnamed = models.unnamed()
        texts = {code: models.text.documents(code) for code in codes}

        def work(out: Path) -> None:
            fit_gates(start, out, texts, shipped_anchors([*codes, *unnamed]), settings)

        about = {"gates": self.row["gates"], "start": start.name, "texts": list(codes), "unnamed": unnamed}
        return self.step("gates", about, work)

    def review(self, start: Path, codes: Sequence[str], steps: int) -> Path:
        """Review on text of all languages; it takes its own mix of documents."""
        models = self.models
        tokens = max(4 * steps * models.tokens_per_step, 5000)  # enough documents for its mix
        text = {code: models.text.piece(code, tokens) for code in codes}
        # The papers' rows count documents; with fitted gates review has its default, equally many tokens.
        own = {**({} if "gates" in self.row else {"fewer_documents": True}), **self.row["review"]}
        return self.train("review", start, text, steps, self.choice.review_rate, own)

    def expanded(self, new: Sequence[str], plan: Mapping[str, Any]) -> Path:
        models, options = self.models, self.row.get("expand", {})
        settings = read_plan_settings(plan)
        about = {"plan": plan, "old": models.reviewed, "new": new, "expand": options, "seed": self.seed}

        # Before the step, whose time they are no part of.
        similarity = models.similarity() if settings.needs == "similarity" else None
        deviation = models.deviation() if settings.needs == "deviation" else None

        def work(out: Path) -> None:
            grouped = settings.makes_groups
            made = make_plan(
                settings, models.layers, [] if grouped else models.reviewed,
                [*models.reviewed, *new] if grouped else new, similarity, self.seed, deviation,
            )  # fmt: skip
            expand_checkpoint(models.base, out, made, seed=self.seed, **options)

        return self.step("expanded", about, work)

    def dmoe(self) -> Path:
        """DMoE trains every language of which it has text: old ones that are reviewed elsewhere, and new ones."""
        models = self.models
        codes = [*models.reviewed, *models.new]
        start = self.expanded(models.new, self.row["plan"])
        half = self.steps // 2
        grouped = self.train("group", start, self.equal(codes, half), half, self.rate, self.row["group"])
        rest = self.steps - half
        return self.train("joint", grouped, self.equal(codes, rest), rest, self.rate, self.row["joint"])

    def branch_train_mix(self) -> Path:
        models, groups = self.models, self.row["branches"]
        each = (self.steps - self.review_steps) // len(groups)
        branches = [
            self.train("dense", models.base, self.equal(group, each), each, self.rate, {"method": "full"})
            for group in groups
        ]
        codes = [*models.reviewed, *models.new]
        plan = Plan("dmoe", [len(groups)] * models.layers, new=codes, groups=groups)
        about = {"branches": [branch.name for branch in branches], "seed": self.seed}
        start = self.step("mixed", about, lambda out: expand_branches(branches, out, plan, seed=self.seed) and None)
        text = self.equal(codes, self.review_steps)
        return self.train("joint", start, text, self.review_steps, self.rate, self.row["joint"])

    def packs(self) -> Path:
        """A pack for each new language, each with its share of the steps; joined with fitted gates, for which no
        language that the study leaves unnamed is an anchor."""
        models, tokens = self.models, self.row["packs"]["tokens"]
        shares = [part // len(models.new) for part in (self.steps, self.review_steps)]
        packs = [self.expansion([code], *shares, self.row["plan"]) for code in models.new]
        texts, unnamed = (
            {code: models.text.documents(code) for code in (*models.reviewed, *models.new)},
            models.unnamed(),
        )
        about = {"packs": [pack.name for pack in packs], "tokens": tokens, "unnamed": unnamed}

        def work(out: Path) -> None:
            join_calibrated(packs, out, texts, tokens=tokens, anchors=shipped_anchors([*texts, *unnamed]))

        return self.step("joined", about, work)

    def lifelong(self) -> Path:
        """Expansion after expansion; each has its share of the steps, by its languages."""
        models, groups, row_plan = self.models, self.row["expansions"], dict(self.row["plan"])
        first, further = row_plan.pop("experts")
        known, counts, path = list(models.reviewed), [first] * models.layers, None
        for group in groups:
            steps, reviews = (round(part * len(group) / len(models.new)) for part in (self.steps, self.review_steps))
            if path is None:
                start = self.expanded(group, {**row_plan, "experts": first})
            else:
                grown = [count + further for count in counts]
                plan = Plan(row_plan["method"], grown, old=known, new=group, grows_from=counts)
                model, counts = path, grown
                about = {"grown": model.name, "plan": row_plan, "new": group, "seed": self.seed}
                start = self.step(
                    "grown", about, lambda out, m=model, p=plan: grow_checkpoint(m, out, p, seed=self.seed) and None
                )
            path = self.stages(start, known, group, steps, reviews)
            known += group
        return path

    def mixed(self, new: Sequence[str], steps: int, replay: float) -> dict[str, LanguageText]:
        """Text for some steps: the new languages alike, and a share of the reviewed old ones."""
        models = self.models
        tokens = steps * models.tokens_per_step
        shares = dict.fromkeys(new, (1 - replay) / len(new))
        if replay:
            shares |= dict.fromkeys(models.reviewed, replay / len(models.reviewed))
        return {code: models.text.piece(code, int(tokens * share)) for code, share in shares.items()}

    def equal(self, codes: Sequence[str], steps: int) -> dict[str, LanguageText]:
        tokens = steps * self.models.tokens_per_step // len(codes)
        return {code: self.models.text.piece(code, tokens) for code in codes}

    def train(
        self,
        key: str,
        start: Path,
        text: dict[str, LanguageText],
        steps: int,
        rate: float | None,
        own: Mapping[str, Any],
    ) -> Path:
        """A stage of `steps` steps."""
        settings = self.models.settings
        arguments = {
            "block_size": settings["block_size"], "per_device_train_batch_size": settings["batch_size"],
            "max_steps": steps, "learning_rate": rate, "warmup_steps": max(1, steps // 10), **settings["training"],
            **own,
        }  # fmt: skip
        if in_float32(settings):
            arguments["bf16"] = False
        about = {"stage": key, "start": start.name, "text": {c: Path(t.source).name for c, t in text.items()}}

        def work(out: Path) -> dict[str, Any]:
            config = CONFIGS[key](str(out.with_name(f"{out.name}.work")), **arguments)
            trained = trained_parameters(start, config)
            train_stage(start, out, text, config, self.seed)
            state = json.loads((out / "trainer_state.json").read_text("utf-8"))
            tokens = self.models.tokens_per_step
            losses = [(log["step"] * tokens, log["loss"]) for log in state["log_history"] if "loss" in log]
            return {"trained": trained, "losses": losses}

        return self.step(key, {**about, "arguments": arguments, "seed": self.seed}, work)

    def step(self, name: str, about: Mapping[str, Any], work: Callable[[Path], Mapping[str, Any] | None]) -> Path:
        self.taken.append(self.models.step(name, about, work))
        return self.taken[-1]


def in_float32(settings: Mapping[str, Any]) -> bool:
    """Whether rows train in float32 though the settings ask for bfloat16: this processor takes up to thirty
    times as long in it."""
    return settings["training"].get("bf16", False) and not has_bfloat16()


def facts_of(model: Path) -> Path:
    """The file with the facts about a step."""
    return model.with_name(f"{model.name}.json")


def trained_parameters(start: Path, config: Any) -> int:
    """The number of parameters that a stage trains."""
    network: Any = network_of(config.load_config(start))
    if isinstance(config, DenseConfig) and config.method == "lora":
        lora: Any = config.lora
        adapters = LoraConfig(r=lora.r, lora_alpha=lora.alpha, target_modules=lora.target_modules)
        with torch.device("meta"):
            return get_peft_model(network, adapters).get_nb_trainable_parameters()[0]
    return config.saved_parameters(network)[1]

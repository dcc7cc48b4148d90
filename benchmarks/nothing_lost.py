"""Reviews that should lose nothing: the LPR loss, self-distillation, text that the base writes, prefix gates.

    python benchmarks/nothing_lost.py --base runs/study/small/base --help-pages DIR --flores DIR --seeds 0 1 2

DIR of the help pages holds LANGUAGE.train.jsonl and LANGUAGE.test.jsonl, DIR of FLORES LANGUAGE.dev.jsonl (objects with
`text`). `studies/nothing_lost.yaml` has the languages, the stages and the reviews; `--settings` takes another file,
such as `nothing_lost_smollm2.yaml` beside it. For each seed one stage 1 is trained, and every review starts from it.
The first `tuning_documents` of the training text are not trained on: `--tuning` scores them in place of the test text.
Finished parts are kept: run it again to continue.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from itertools import zip_longest
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from matplotlib.figure import Figure
from tables import markdown_table
from tqdm.auto import tqdm

from hf_moe_expand import PostPretrainConfig, ReviewConfig, expand_checkpoint
from hf_moe_expand.checkpoint.source import load_base_config
from hf_moe_expand.data.sources import LanguageText
from hf_moe_expand.evaluation.perplexity import evaluate_model
from hf_moe_expand.jsonfile import read_json, write_json, write_text
from hf_moe_expand.models import load_for_inference
from hf_moe_expand.planning.make import make_plan
from hf_moe_expand.planning.methods import read_plan_settings
from hf_moe_expand.self_written import SampleSettings, write_documents
from hf_moe_expand.stages.run import train_stage
from hf_moe_expand.yamlfile import read_yaml

# Bits per byte: [domain][language].
Scores = dict[str, dict[str, float]]


class Study:
    """The models of one settings file, and their scores."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.settings = read_yaml(options.settings)
        self.base, self.out = options.base, options.out
        self.sources = {"help": options.help_pages, "flores": options.flores}
        self.reviewed: list[str] = self.settings["old"]["reviewed"]
        self.unreviewed: list[str] = self.settings["old"]["not reviewed"]
        self.new: list[str] = self.settings["new"]
        self.domains = ("tuning",) if options.tuning else ("help", "flores")

    def split(self) -> None:
        """Writes the training text without the first documents, and these documents for tuning."""
        held = self.settings["tuning_documents"]
        for code in (*self.reviewed, *self.unreviewed, *self.new):
            source = self.sources["help"] / f"{code}.train.jsonl"
            if source.is_file() and not (self.out / "text" / f"{code}.train.jsonl").exists():
                lines = source.read_text("utf-8").splitlines(keepends=True)
                write_text(self.out / "text" / f"{code}.tuning.jsonl", "".join(lines[:held]))
                write_text(self.out / "text" / f"{code}.train.jsonl", "".join(lines[held:]))

    def trained(self, codes: list[str]) -> dict[str, LanguageText]:
        return {code: LanguageText(code, str(self.out / "text" / f"{code}.train.jsonl")) for code in codes}

    def written(self) -> dict[str, LanguageText]:
        """Text that the base writes, dealt out to the reviewed languages in turn."""
        files = {code: self.out / "text" / f"{code}.self-written.jsonl" for code in self.reviewed}
        if not all(file.exists() for file in files.values()):
            model, tokenizer = load_for_inference(self.base)
            rows = list(write_documents(model, tokenizer, SampleSettings(**self.settings["self_written"])))
            for number, (_, file) in enumerate(files.items()):
                write_text(file, "".join(json.dumps(row) + "\n" for row in rows[number :: len(files)]))
        return {code: LanguageText(code, str(file)) for code, file in files.items()}

    def old_text(self, kinds: list[str]) -> dict[str, LanguageText]:
        """Text of the reviewed languages: `real`, `self-written`, or both."""
        sources = {"real": self.trained(self.reviewed)}
        if "self-written" in kinds:
            sources["self-written"] = self.written()
        if len(kinds) == 1:
            return sources[kinds[0]]
        both = {code: self.out / "text" / f"{code}.both.jsonl" for code in self.reviewed}
        for code, file in both.items():
            rows = [Path(sources[kind][code].source).read_text("utf-8").splitlines(keepends=True) for kind in kinds]
            write_text(file, "".join(line for pair in zip_longest(*rows, fillvalue="") for line in pair))
        return {code: LanguageText(code, str(file)) for code, file in both.items()}

    def stage_1(self, seed: int) -> Path:
        """The model after stage 1. Its prefix gates are zero, and have no effect before a review trains them."""
        folder = self.out / f"seed-{seed}"
        if not (folder / "stage-1").exists():
            settings = read_plan_settings(self.settings["plan"])
            layers = load_base_config(self.base).num_hidden_layers
            plan = make_plan(settings, layers, self.reviewed, self.new, seed=seed)
            expand_checkpoint(self.base, folder / "expanded", plan, seed=seed, overwrite=True)
            config = PostPretrainConfig(str(folder / "work"), **self.settings["post_pretrain"])
            train_stage(folder / "expanded", folder / "stage-1", self.trained(self.new), config, seed)
        return folder / "stage-1"

    def review(self, name: str, seed: int) -> Path:
        out = self.out / f"seed-{seed}" / name.replace(" ", "-")
        if not out.exists():
            own = dict(self.settings["reviews"][name])
            old = self.old_text(own.pop("old_text", ["real"]))
            settings = {**self.settings["review"], "fewer_documents": True, **own}
            config = ReviewConfig(str(out.with_name("work")), **settings)
            train_stage(self.stage_1(seed), out, {**old, **self.trained(self.new)}, config, seed)
        return out

    def texts(self, domain: str) -> dict[str, list[str]]:
        found = {}
        for code in (*self.reviewed, *self.unreviewed, *self.new):
            place, split = (self.out / "text", "tuning") if domain == "tuning" else (self.sources[domain], "test")
            file = place / f"{code}.{'dev' if domain == 'flores' else split}.jsonl"
            if file.is_file():
                found[code] = [json.loads(line)["text"] for line in file.read_text("utf-8").splitlines()]
        return found

    def scores(self, path: Path, word: bool = False) -> Scores:
        """Scores of a checkpoint, kept beside it.

        Args:
            word: whether the model is told the language; of a base language that the checkpoint does not list, that of
                one that it does.
        """
        found: Scores = {}
        for domain in self.domains:
            kept = self.out / "scores" / f"{path.parent.name}-{path.name}{'-word' if word else ''}-{domain}.json"
            if not kept.exists():
                model, tokenizer = load_for_inference(path)
                numbers = {}
                for code, texts in self.texts(domain).items():
                    known = code if code in (*self.reviewed, *self.new) else self.reviewed[0]
                    with model.use_languages(known) if word else nullcontext():
                        scored = evaluate_model(model, tokenizer, {code: texts}, **self.settings["evaluation"])
                    numbers[code] = scored[code].bits_per_byte
                write_json(kept, numbers)
            found[domain] = read_json(kept, "scores")
        return found

    def rows(self, seeds: list[int]) -> Iterator[tuple[str, list[Scores]]]:
        yield "base", [self.scores(self.base)]
        yield "stage 1", [self.scores(self.stage_1(seed)) for seed in seeds]
        for name in self.settings["reviews"]:
            yield name, [self.scores(self.review(name, seed)) for seed in seeds]
        last = list(self.settings["reviews"])[-1]
        yield f"{last}, and a language hint", [self.scores(self.review(last, seed), word=True) for seed in seeds]

    def render(self, rows: Mapping[str, list[Scores]]) -> str:
        """Bits per byte against the base (old languages, in %) and as they are (new ones): mean and spread of seeds."""
        groups = {"reviewed": self.reviewed, "not reviewed": self.unreviewed, "new": self.new}
        base = rows["base"][0]
        head = [""]
        for domain in self.domains:
            head += [f"{domain}: {', '.join(c for c in codes if c in base[domain])}" for codes in groups.values()]
        lines = []
        for name, found in rows.items():
            cells = [name]
            for domain in self.domains:
                for kind, codes in groups.items():
                    known = [code for code in codes if code in base[domain]]
                    values = [mean(scores[domain][code] for code in known) for scores in found]
                    if kind == "new" or name == "base":
                        cells.append(_spread(values, "{:.3f}"))
                    else:
                        of_base = mean(base[domain][code] for code in known)
                        cells.append(_spread([100 * (value / of_base - 1) for value in values], "{:+.2f} %"))
            lines.append(cells)
        return markdown_table(head, lines)


def _spread(values: list[float], form: str) -> str:
    said = form.format(mean(values))
    return said if len(values) < 2 else f"{said} ± {stdev(values):.2g}"


@torch.no_grad()
def gate_accuracy(study: Study, path: Path, length: int) -> list[float]:
    """How many tokens the gates need: the share of texts whose class the gates have right after each token, over all
    gated layers. The first half of each text is in one language, the second in a language of the other class.

    Args:
        length: tokens of each half.
    """
    model, tokenizer = load_for_inference(path)
    pieces = {code: _pieces(texts, tokenizer, length) for code, texts in study.texts("flores").items()}
    right, count = torch.zeros(2 * length), 0
    old = [code for code in (*study.reviewed, *study.unreviewed) if code in pieces]
    pairs = [pair for one in old for other in study.new for pair in ((one, other), (other, one))]
    for first, second in tqdm(pairs, desc="gates", unit="pair"):
        ids = torch.tensor([one + other for one, other in zip(pieces[first], pieces[second], strict=True)])
        with model.capture_routing() as routing:
            model(ids, use_cache=False)
        wanted = torch.tensor([first in study.new] * length + [second in study.new] * length).long()
        for layer in routing:
            if layer.classifier_logits is not None:
                right += (layer.token_classes.view(ids.shape) == wanted).float().mean(0)
                count += 1
    return (right / count).tolist()


def gate_table(shares: list[float]) -> str:
    """The share at some tokens since the text began, and since it changed its language."""
    half = len(shares) // 2
    shown = [token for token in (1, 2, 4, 8, 16, 32, 64) if token <= half]
    rows = [
        [name, *(f"{part[token - 1]:.3f}" for token in shown)]
        for name, part in (("the text began", shares[:half]), ("the language changed", shares[half:]))
    ]
    return markdown_table(["tokens since", *map(str, shown)], rows)


def draw_gates(shares: list[float], path: Path) -> None:
    """The same as a curve."""
    half = len(shares) // 2
    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.subplots()
    tokens = range(1, half + 1)
    axes.plot(tokens, shares[:half], "-", color="black", label="since the text began")
    axes.plot(tokens, shares[half:], "--", color="black", label="since the language changed")
    axes.set(xlabel="tokens", ylabel="share of texts judged right", ylim=(0, 1.02), xlim=(0, half))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path)


def _pieces(texts: list[str], tokenizer: Any, length: int) -> list[list[int]]:
    """Twenty stretches of text of `length` tokens."""
    ids = tokenizer("\n".join(texts[:400]), add_special_tokens=False, verbose=False).input_ids
    return [ids[start : start + length] for start in range(0, 20 * length, length)]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--help-pages", type=Path, required=True)
    parser.add_argument("--flores", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/nothing_lost"))
    parser.add_argument("--settings", type=Path, default=Path(__file__).with_name("studies") / "nothing_lost.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--tuning", action="store_true", help="score the held-out slice of the training text")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--figure", type=Path, help="also draw how many tokens the gates need")
    parser.add_argument("--table", type=Path, help="also write the tables here")
    options = parser.parse_args(arguments)
    study = Study(options)
    if options.threads:
        torch.set_num_threads(options.threads)
    study.split()
    table = study.render(dict(study.rows(options.seeds)))
    shares = gate_accuracy(study, study.review(study.settings["gated"], options.seeds[0]), 64)
    table += "\n\n" + gate_table(shares)
    if options.figure:
        draw_gates(shares, options.figure)
    print(table)
    if options.table:
        options.table.write_text(table + "\n", "utf-8")


if __name__ == "__main__":
    main()

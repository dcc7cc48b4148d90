"""Language packs made apart and joined, against one expansion for all languages and one after the other.

    python benchmarks/packs.py --base runs/study/small/base --help-pages DIR --out runs/packs --seeds 0 1 2

DIR holds LANGUAGE.train.jsonl and LANGUAGE.test.jsonl (objects with `text`). `studies/packs.yaml` has the languages and
the stages; `--settings` takes another file. Every way ends with the same number of experts, trains each new
language for the same number of steps, and reviews with the same settings. Finished parts are kept: run it again to
continue.
"""

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, stdev

import torch
from tables import markdown_table

from hf_moe_expand import (
    PostPretrainConfig,
    ReviewConfig,
    expand_checkpoint,
    grow_checkpoint,
    join_expansions,
)
from hf_moe_expand.analysis.calibration import join_calibrated
from hf_moe_expand.checkpoint.source import load_base_config, load_config
from hf_moe_expand.data.sources import LanguageText
from hf_moe_expand.evaluation.perplexity import evaluate_model
from hf_moe_expand.jsonfile import read_json, write_json
from hf_moe_expand.models import load_for_inference
from hf_moe_expand.planning.plan import Plan
from hf_moe_expand.stages.run import train_stage
from hf_moe_expand.yamlfile import read_yaml

Scores = Mapping[str, float]  # bits per byte by language


class Study:
    """The models of one settings file and seed, and their scores."""

    def __init__(self, options: argparse.Namespace, seed: int) -> None:
        self.settings = read_yaml(options.settings)
        self.base, self.data, self.seed = options.base, options.help_pages, seed
        self.folder = options.out / f"seed-{seed}"
        self.old, self.new = self.settings["old"], self.settings["new"]
        self.layers = load_base_config(self.base).num_hidden_layers

    def text(self, codes: list[str]) -> dict[str, LanguageText]:
        return {code: LanguageText(code, str(self.data / f"{code}.train.jsonl")) for code in codes}

    def trained(self, start: Path, name: str, new: list[str], reviewed: list[str], languages: int) -> Path:
        """Stage 1 on `new`, for the steps of `languages` languages, then review with text of `reviewed` too."""
        out = self.folder / name
        if not out.exists():
            first = self.folder / f"{name}-1"
            stage = dict(self.settings["post_pretrain"])
            stage["max_steps"] *= languages
            if not first.exists():
                config = PostPretrainConfig(str(self.folder / "work"), **stage)
                train_stage(start, first, self.text(new), config, self.seed)
            self.review(first, name, reviewed)
        return out

    def review(self, start: Path, name: str, old: list[str], new: list[str] | None = None) -> Path:
        out = self.folder / name
        if not out.exists():
            codes = [*old, *(new or load_config(start).expansions[-1]["new_languages"])]
            config = ReviewConfig(str(self.folder / "work"), **self.settings["review"], fewer_documents=True)
            train_stage(start, out, self.text(codes), config, self.seed)
        return out

    def expanded(self, name: str, new: list[str], experts: int) -> Path:
        out = self.folder / f"{name}-0"
        plan = Plan("moe-lpr", [experts] * self.layers, old=self.old, new=new)
        expand_checkpoint(self.base, out, plan, seed=self.seed, overwrite=True)
        return out

    def pack(self, code: str) -> Path:
        name = f"pack-{code}"
        done = self.folder / name
        return done if done.exists() else self.trained(self.expanded(name, [code], 2), name, [code], self.old, 1)

    def joined(self) -> Path:
        out = self.folder / "joined"
        if not out.exists():
            join_expansions([self.pack(code) for code in self.new], out)
        return out

    def calibrated(self) -> Path:
        out = self.folder / "gated"
        if not out.exists():
            texts = {code: source.load()["text"] for code, source in self.text([*self.old, *self.new]).items()}
            packs = [self.pack(code) for code in self.new]
            join_calibrated(packs, out, texts, tokens=self.settings["calibration_tokens"])
        return out

    def joint(self) -> Path:
        done = self.folder / "joint"
        start = done if done.exists() else self.expanded("joint", self.new, 1 + len(self.new))
        return done if done.exists() else self.trained(start, "joint", self.new, self.old, len(self.new))

    def lifelong(self) -> Path:
        """The new languages one after the other; the first is the pack's own expansion."""
        model, known = self.pack(self.new[0]), [*self.old, self.new[0]]
        for number, code in enumerate(self.new[1:], start=2):
            name = f"lifelong-{number}"
            if not (self.folder / name).exists():
                counts = [[count] * self.layers for count in (number, number + 1)]
                plan = Plan("moe-lpr", counts[1], old=known, new=[code], grows_from=counts[0])
                grown = self.folder / f"{name}-0"
                grow_checkpoint(model, grown, plan, seed=self.seed, overwrite=True)
                self.trained(grown, name, [code], known, 1)
            model, known = self.folder / name, [*known, code]
        return model

    def score(self, path: Path) -> Scores:
        kept = self.folder / "scores" / f"{path.name}.json"
        if not kept.exists():
            model, tokenizer = load_for_inference(path)
            texts = {}
            for code in (*self.old, *self.new):
                lines = (self.data / f"{code}.test.jsonl").read_text("utf-8").splitlines()
                texts[code] = [json.loads(line)["text"] for line in lines]
            scores = evaluate_model(model, tokenizer, texts, **self.settings["evaluation"])
            write_json(kept, {code: score.bits_per_byte for code, score in scores.items()})
        return read_json(kept, "scores")

    def results(self) -> dict[str, Scores]:
        found = {"base": self.score(self.base)}
        found |= {f"pack {code}": self.score(self.pack(code)) for code in self.new}
        found["joined"] = self.score(self.joined())
        found["joined, gates"] = self.score(self.calibrated())
        found["joined, reviewed"] = self.score(self.review(self.joined(), "joined-reviewed", self.old, self.new))
        found["one joint expansion"] = self.score(self.joint())
        found["lifelong"] = self.score(self.lifelong())
        for folder in self.folder.glob("*-[01]"):  # what stands between finished models
            shutil.rmtree(folder)
        return found


def render(results: list[dict[str, Scores]], old: list[str], new: list[str]) -> str:
    """Old languages against the base, new ones in bits per byte, and the mean gain against that of the joint
    expansion; mean and spread over the seeds."""

    def gain(found: dict[str, Scores], name: str) -> float:
        return mean(found["base"][code] - found[name][code] for code in new)

    rows = []
    for name in results[0]:
        above = [100 * (mean(f[name][c] for c in old) / mean(f["base"][c] for c in old) - 1) for f in results]
        shares = [100 * gain(found, name) / gain(found, "one joint expansion") for found in results]
        by_language = [_spread([found[name][code] for found in results], "{:.3f}") for code in new]
        is_whole = not name.startswith(("base", "pack"))
        rows.append([name, _spread(above, "{:+.2f} %"), *by_language, _spread(shares, "{:.1f} %") if is_whole else ""])
    return markdown_table(["", f"old: {', '.join(old)}", *new, "gain, of the joint one's"], rows)


def _spread(values: list[float], form: str) -> str:
    said = form.format(mean(values))
    return said if len(values) < 2 else f"{said} ± {stdev(values):.2g}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--help-pages", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/packs"))
    parser.add_argument("--settings", type=Path, default=Path(__file__).with_name("studies") / "packs.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--table", type=Path, help="also write the table here")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    studies = [Study(options, seed) for seed in options.seeds]
    table = render([study.results() for study in studies], studies[0].old, studies[0].new)
    print(table)
    if options.table:
        options.table.write_text(table + "\n", "utf-8")


if __name__ == "__main__":
    main()

"""Elbayad et al.'s regularisers and curriculum in their own setting: an encoder-decoder, and translation.

    python benchmarks/translation.py --help-pages DIR --out runs/translation --seeds 0 1 2 --table table.md

DIR holds LANGUAGE.train.jsonl and LANGUAGE.test.jsonl (objects with `id` and `text`; the same id is the same page).
`studies/translation.yaml` has the languages, the base and the stage; `--settings` takes another file. A small M2M100
learns to translate to and from the base's language, and a little of the others. Then every other layer gets experts,
and stage 1 trains them on the new languages: plain, with each kind of masking, and with the curriculum that follows
from the plain run. Scored are the held-out targets by step, and chrF++ at the end. Finished parts are kept: run it
again to continue.
"""

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from aligned_pages import aligned
from datasets import concatenate_datasets
from regularisers import CURRICULUM, MASKING, PLAIN
from tables import markdown_table
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    M2M100Config,
    M2M100ForConditionalGeneration,
    NllbTokenizer,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)

from hf_moe_expand import LanguageText, Plan, PostPretrainConfig, expand_checkpoint, train_stage
from hf_moe_expand.checkpoint.writer import new_folder
from hf_moe_expand.data.curriculum import step_based
from hf_moe_expand.data.pairs import PairCollator, pack_pairs
from hf_moe_expand.evaluation.translation import evaluate_translation, pair_name
from hf_moe_expand.evaluation.validation import ValidationCurves
from hf_moe_expand.jsonfile import read_json, write_json
from hf_moe_expand.models import load_for_inference
from hf_moe_expand.planning.layers import layers_in
from hf_moe_expand.settings import TranslationSettings
from hf_moe_expand.stages.config import ValidationSettings
from hf_moe_expand.yamlfile import read_yaml

Found = dict[str, Any]  # of one run: `loss` by language and step, `steps`, `chrf` by direction


class Study:
    """The text, the base, and the runs of one settings file."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.settings = read_yaml(options.settings)
        self.pages, self.out = options.help_pages, options.out
        self.pivot, self.new, self.low = (self.settings[name] for name in ("pivot", "new", "low"))
        self.base = self.out / "base"
        self.texts = {split: self._write_pairs(split) for split in ("train", "test")}

    def _write_pairs(self, split: str) -> dict[str, LanguageText]:
        """Files of sentence pairs of each language with the pivot."""
        found = {}
        for code in (*self.settings["old"], *self.new):
            file = self.out / "pairs" / f"{code}.{split}.jsonl"
            if not file.exists():
                pairs = aligned(self.pages, split, self.pivot, code)
                if split == "train" and code == self.low:
                    pairs = pairs[: self.settings["low_pairs"]]
                rows = [{"translation": {self.pivot: a, code: b}} for a, b in pairs]
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
            found[code] = LanguageText(code, str(file))
        return found

    def make_base(self) -> None:
        """Trains the tokenizer and the dense model."""
        settings = self.settings["base"]
        set_seed(0)
        tokenizer = self._tokenizer(settings["vocabulary"])
        packed = {
            code: pack_pairs({code: source.load_pairs()}, tokenizer, self.settings["longest"], 0).dataset
            for code, source in self.texts["train"].items()
        }
        # The most text counts once; the others as often as their shares ask for, whole times or a part.
        shares = settings["shares"]
        whole = max(len(packed[code]) / share for code, share in shares.items() if share == max(shares.values()))
        rows = [
            packed[code].select([number % len(packed[code]) for number in range(round(whole * share))])
            for code, share in shares.items()
        ]
        config = M2M100Config(
            vocab_size=len(tokenizer), max_position_embeddings=4 * self.settings["longest"], encoder_layerdrop=0.0,
            decoder_layerdrop=0.0, pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id, decoder_start_token_id=tokenizer.eos_token_id, **settings["sizes"],
        )  # fmt: skip
        model = M2M100ForConditionalGeneration(config)
        with new_folder(self.base) as partial:
            arguments = Seq2SeqTrainingArguments(
                str(self.out / "work"), seed=0, save_strategy="no", report_to="none", logging_steps=100,
                use_cpu=not torch.accelerator.is_available(), remove_unused_columns=False, **settings["training"],
            )  # fmt: skip
            collate = PairCollator(tokenizer.pad_token_id)
            Seq2SeqTrainer(
                model, arguments, train_dataset=concatenate_datasets(rows),
                data_collator=lambda batch: without_languages(collate(batch)),
            ).train()  # fmt: skip
            model.generation_config = GenerationConfig.from_model_config(config)
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)

    def _tokenizer(self, vocabulary: int) -> NllbTokenizer:
        """Pieces of all languages' text, and a token for each language."""
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary, special_tokens=["<s>", "<pad>", "</s>", "<unk>"], show_progress=False
        )
        tokenizer.train_from_iterator(self._sentences(), trainer)
        fields = json.loads(tokenizer.to_str())["model"]
        codes = list(self.settings["codes"].values())
        merges = [tuple(pair) for pair in fields["merges"]]
        return NllbTokenizer(vocab=fields["vocab"], merges=merges, extra_special_tokens=codes)

    def _sentences(self) -> Iterable[str]:
        for source in self.texts["train"].values():
            for row in Path(source.source).read_text("utf-8").splitlines():
                yield from json.loads(row)["translation"].values()

    def run(self, name: str, seed: int) -> Found:
        """One run's curves and scores; trains and translates what is missing."""
        if not self.base.exists():
            self.make_base()
        folder = self.out / f"seed-{seed}" / name.replace(" ", "-")
        if not folder.exists():
            self._train(name, seed, folder)
        kept = folder.with_name(f"{folder.name}.chrf.json")
        if not kept.exists():
            write_json(kept, self._translate(folder))
        curves = ValidationCurves.load(folder)
        return {"steps": curves.steps, "loss": curves.loss, "chrf": read_json(kept, "the scores of a run")}

    def _train(self, name: str, seed: int, folder: Path) -> None:
        stage, sizes = self.settings["post_pretrain"], self.settings["base"]["sizes"]
        layers, encoder = sizes["encoder_layers"] + sizes["decoder_layers"], sizes["encoder_layers"]
        counts = [1] * layers
        for layer in layers_in(self.settings["plan"]["only_layers"], layers, encoder_layers=encoder):
            counts[layer] = self.settings["plan"]["experts"]
        old = [self.pivot, *self.settings["old"]]
        plan = Plan("moe-lpr", counts, old=old, new=self.new, encoder_layers=encoder)
        masking, training = MASKING[name], dict(stage["training"])
        start = folder.with_name("expanded-with-gates" if masking.conditional_routing else "expanded")
        if not start.exists():
            gates = bool(masking.conditional_routing)
            expand_checkpoint(self.base, start, plan, conditional_routing=gates, seed=seed)
        validation = ValidationSettings(
            {code: self.texts["test"][code].source for code in self.new}, self.settings["every"],
            self.settings["validation_tokens"],
        )  # fmt: skip
        curriculum = None
        if name == CURRICULUM:
            best = ValidationCurves.load(folder.with_name(PLAIN)).best_steps()
            curriculum = str(folder.with_name("curriculum.json"))
            step_based(best, self.settings["curriculum_bins"], training.pop("max_steps")).save(curriculum)
        config = PostPretrainConfig(
            str(self.out / "work"), block_size=self.settings["longest"], temperature=stage["temperature"],
            masking=masking, validation=validation, curriculum=curriculum, seed=seed, save_strategy="no", **training,
        )  # fmt: skip
        train_stage(start, folder, {code: self.texts["train"][code] for code in self.new}, config, seed)

    def _translate(self, folder: Path) -> dict[str, float]:
        """chrF++ of the held-out sentences in each direction."""
        model, tokenizer = load_for_inference(folder)
        found = {}
        for code in self.new:
            rows = [json.loads(row) for row in Path(self.texts["test"][code].source).read_text("utf-8").splitlines()]
            some = [row["translation"] for row in rows if max(map(len, row["translation"].values())) < 200]
            some = some[: self.settings["translated"]]
            texts = {name: [row[name] for row in some] for name in (self.pivot, code)}
            pairs = [(self.pivot, code), (code, self.pivot)]
            settings = TranslationSettings(batch_size=16, max_new_tokens=self.settings["new_tokens"])
            scores = evaluate_translation(model, tokenizer, texts, pairs, settings)
            found |= {name: score.chrf for name, score in scores.items()}
        return found


def without_languages(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A batch for a dense model."""
    return {name: value for name, value in batch.items() if "language" not in name}


def render(found: Mapping[str, list[Found]], study: Study) -> str:
    """The table: of the language with little text and of the mean of the others, the best held-out loss, its step, what
    was lost since, and chrF++ from and to the pivot; mean and spread over the seeds."""
    high = [code for code in study.new if code != study.low]
    rows = []
    for name, runs in found.items():
        row = [name]
        for codes in ([study.low], high):
            curves = [
                [mean(run["loss"][code][at] for code in codes) for at in range(len(run["steps"]))] for run in runs
            ]
            best = [min(curve[1:]) for curve in curves]
            steps = [run["steps"][curve.index(least)] for run, curve, least in zip(runs, curves, best, strict=True)]
            lost = [curve[-1] - least for curve, least in zip(curves, best, strict=True)]
            row += [_spread(best, 3), _spread(steps, 0), _spread(lost, 3)]
            for pair in ("from", "to"):
                names = [pair_name((study.pivot, c) if pair == "from" else (c, study.pivot)) for c in codes]
                row.append(_spread([mean(run["chrf"][one] for one in names) for run in runs], 2))
        rows.append(row)
    columns = [
        f"{kind}: {what}"
        for kind in (study.low, ", ".join(high))
        for what in ("best loss", "at step", "lost", f"chrF++ from {study.pivot}", f"to {study.pivot}")
    ]
    return markdown_table(["nats a token, held out", *columns], rows)


def _spread(values: list[float], digits: int) -> str:
    said = f"{mean(values):.{digits}f}"
    return said if len(values) < 2 else f"{said} ± {stdev(values):.{digits}f}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--help-pages", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/translation"))
    parser.add_argument("--settings", type=Path, default=Path(__file__).with_name("studies") / "translation.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--runs", nargs="+", choices=list(MASKING), default=list(MASKING))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--table", type=Path, help="also write the table here")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    if CURRICULUM in options.runs and PLAIN not in options.runs:
        parser.error(f"{CURRICULUM} follows from the run {PLAIN}: name it too.")
    study = Study(options)
    table = render({name: [study.run(name, seed) for seed in options.seeds] for name in options.runs}, study)
    print(table)
    if options.table:
        options.table.write_text(table + "\n", "utf-8")


if __name__ == "__main__":
    main()

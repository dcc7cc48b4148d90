"""DeltaMoE on real text: grafts the change of an instruction-tuned small base onto its expansion with new languages.

    python benchmarks/delta_moe.py --data DIR --base runs/study/small/base --out runs/delta_moe --table table.md

DIR holds LANGUAGE.train.jsonl and LANGUAGE.test.jsonl for en es zh el hu tr; `study.py base` makes the base, and
benchmarks/delta_moe.yaml has the settings. The instructions (benchmarks/instructions.py) are in English,
about English text; they are tested on text of the new languages too. The paper's comparisons run as well, all with the
same number of steps on the same new-language text. Finished parts are kept: run it again to continue.
"""

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from instructions import CHAT_TEMPLATE, FORMATS, Example, check, make_examples, messages
from small_base import NEW, OLD, load
from tables import markdown_table
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import SFTConfig, SFTTrainer

from hf_moe_expand import DenseConfig, train_stage
from hf_moe_expand.baselines.depth import expand_depth
from hf_moe_expand.checkpoint.merge import average_checkpoints, merge_delta
from hf_moe_expand.checkpoint.writer import new_folder
from hf_moe_expand.evaluation.perplexity import evaluate_model
from hf_moe_expand.jsonfile import read_json, write_json
from hf_moe_expand.models import load_for_inference
from hf_moe_expand.pipeline import run_recipe
from hf_moe_expand.recipe import Recipe
from hf_moe_expand.schema import changed
from hf_moe_expand.stages.kinds.graft import GraftSettings
from hf_moe_expand.trainers.router_losses import CHECKPOINTING

# A third of the base's learning rate: a dense model has no frozen weights that keep its languages.
DENSE_LEARNING_RATE = 1e-3
SFT_LEARNING_RATE = 5e-4
SFT_BATCH = 32
NEW_BLOCKS = 2
FOR_EACH_FORMAT = {"en": 40, **dict.fromkeys(NEW, 20)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/delta_moe"))
    parser.add_argument("--table", type=Path, help="also write the table here")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200, help="steps of each continued pre-training")
    parser.add_argument("--sft-steps", type=int, default=200, help="steps of instruction tuning")
    parser.add_argument("--review-steps", type=int, default=60, help="steps of router tuning")
    parser.add_argument("--test-tokens", type=int, default=30_000, help="tokens to score in each language's test split")
    options = parser.parse_args(arguments)
    os.environ |= {"DATA": str(options.data), "BASE": str(options.base), "OUT": str(options.out)}
    recipe = Recipe.load(Path(__file__).with_suffix(".yaml"))
    recipe = changed(recipe, seed=options.seed)
    table = render(Work(options, recipe).results(), options, recipe.post_pretrain)
    print(table)
    if options.table:
        options.table.write_text(table + "\n", "utf-8")


@dataclass(frozen=True)
class Work:
    """Makes each model in `options.out` once."""

    options: Any
    recipe: Recipe

    def results(self) -> dict[str, dict[str, Any]]:
        """Scores of each model, in the table's order."""
        base, out = self.options.base, self.options.out
        instruct = self.once("instruct", lambda out: self.tune_instructions(out))
        delta = {"base": base, "instruct": instruct}
        self.expand("moe", base, GraftSettings(str(instruct)))
        self.expand("moe-instruct", instruct)
        moe_instruct = out / "moe-instruct" / "post_pretrain"
        dense = self.continued("dense", base)
        dense_instruct = self.continued("dense-instruct", instruct)
        deeper = self.once("deeper", lambda out: expand_depth(base, out, NEW_BLOCKS))
        rate = self.recipe.post_pretrain.training["learning_rate"]
        pro = self.continued("deeper-trained", deeper, "new-blocks", rate)
        models = {
            "base": base,
            "instruct": instruct,
            "MoE, stage 1": out / "moe" / "post_pretrain",
            "DeltaMoE": out / "moe" / "graft",
            "DeltaMoE, router tuning": out / "moe" / "review",
            "MoE-CPT-Avg": self.once("moe-avg", lambda out: average_checkpoints([moe_instruct, instruct], out)),
            "Dense-FT": dense,
            "Dense-FT-Delta": self.once("dense-delta", lambda out: merge_delta(dense, out, **delta)),
            "Dense-FT-Avg": self.once("dense-avg", lambda out: average_checkpoints([dense_instruct, instruct], out)),
            "LLaMA-Pro": self.once("llama-pro", lambda out: merge_delta(pro, out, **delta)),
        }
        tests = self.tests()
        return {name: self.scored(name, path, tests, instruct) for name, path in models.items()}

    def once(self, name: str, make: Callable[[Path], object]) -> Path:
        out = self.options.out / name
        if not out.exists():
            print(f"{name} ...", flush=True)
            make(out)
        return out

    def schedule(self, training: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
        return {**training, "max_steps": self.options.steps, "save_steps": 100, **changes}

    def expand(self, name: str, start: Path, graft: GraftSettings | None = None) -> None:
        """MoE-LPR's stage 1 from a dense model; with a graft, DeltaMoE and its router tuning too."""
        stage, review = self.recipe.post_pretrain, self.recipe.review
        settings: dict[str, Any] = {"post_pretrain": changed(stage, training=self.schedule(stage.training))}
        training = self.schedule(review.training, max_steps=self.options.review_steps)
        settings |= {"graft": graft, "review": changed(review, training=training) if graft else None}
        run_recipe(changed(self.recipe, base=str(start), output=str(self.options.out / name), **settings))

    def continued(self, name: str, start: Path, method: str = "full", rate: float = DENSE_LEARNING_RATE) -> Path:
        """Continued pre-training of a dense model on the text of stage 1."""
        stage = self.recipe.post_pretrain
        training = self.schedule(stage.training, learning_rate=rate)
        config = DenseConfig(block_size=stage.block_size, method=method, seed=self.options.seed, **training)
        sources = {code: self.recipe.training_sources[code] for code in self.recipe.new}
        return self.once(name, lambda out: train_stage(start, out, sources, config))

    def tune_instructions(self, out: Path) -> None:
        """Fine-tunes all parameters of the base on English instructions about English text."""
        options = self.options
        set_seed(options.seed)
        tokenizer = AutoTokenizer.from_pretrained(options.base)
        tokenizer.chat_template = CHAT_TEMPLATE
        documents = load(options.data, "en", "train")["text"]
        examples = make_examples(documents, options.sft_steps * SFT_BATCH, options.seed)
        chats = [messages(example) for example in examples]
        rows = Dataset.from_list([{"prompt": prompt, "completion": completion} for prompt, completion in chats])
        model = AutoModelForCausalLM.from_pretrained(options.base, dtype=torch.float32)
        with TemporaryDirectory() as scratch:
            settings = SFTConfig(
                scratch, seed=options.seed, max_steps=options.sft_steps, per_device_train_batch_size=SFT_BATCH,
                learning_rate=SFT_LEARNING_RATE, lr_scheduler_type="cosine", warmup_steps=20, bf16=False,
                use_cpu=not torch.accelerator.is_available(), save_strategy="no",
                report_to="none", logging_steps=50, **{CHECKPOINTING: False},
            )  # fmt: skip
            SFTTrainer(model, settings, train_dataset=rows, processing_class=tokenizer).train()
        with new_folder(out) as partial:
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)

    def tests(self) -> dict[str, list[Example]]:
        """Instructions about text that no model saw, different from the trained instructions."""
        options = self.options
        train = make_examples(load(options.data, "en", "train")["text"], options.sft_steps * SFT_BATCH, options.seed)
        seen = {example.prompt for example in train}
        return {
            code: make_examples(load(options.data, code, "test")["text"], count * len(FORMATS), options.seed, seen)
            for code, count in FOR_EACH_FORMAT.items()
        }

    def scored(self, name: str, path: Path, tests: Mapping[str, list[Example]], chat: Path) -> dict[str, Any]:
        """A model's answers and bits per byte, kept in `results`; `chat` is the model with the chat template."""
        kept = self.options.out / "results" / f"{name}.json"
        if not kept.exists():
            print(f"scoring {name} ...", flush=True)
            model, tokenizer = load_for_inference(path)
            texts = {code: load(self.options.data, code, "test")["text"] for code in (*OLD, *NEW)}
            scores = evaluate_model(model, tokenizer, texts, 256, 16, self.options.test_tokens)
            asking = AutoTokenizer.from_pretrained(chat)
            result = {
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "bits_per_byte": {code: score.bits_per_byte for code, score in scores.items()},
                "answers": {code: answers(model, asking, examples) for code, examples in tests.items()},
            }
            write_json(kept, result)
        return read_json(kept, "results")


@torch.inference_mode()
def answers(model: Any, tokenizer: Any, examples: list[Example], batch_size: int = 50) -> list[dict[str, Any]]:
    """Greedy answers, with room for the longest correct answer and 8 more tokens."""
    tokenizer.padding_side = "left"
    end = tokenizer.eos_token_id
    room = max(len(tokenizer(example.answer).input_ids) for example in examples) + 8
    rows = []
    for first in range(0, len(examples), batch_size):
        batch = examples[first : first + batch_size]
        prompts = [
            tokenizer.apply_chat_template(messages(example)[0], tokenize=False, add_generation_prompt=True)
            for example in batch
        ]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        output = model.generate(
            input_ids=inputs.input_ids.to(model.device),
            attention_mask=inputs.attention_mask.to(model.device),
            max_new_tokens=room,
            do_sample=False,
            use_cache=True,
            eos_token_id=end,
            pad_token_id=end,
        )
        for example, ids in zip(batch, output[:, inputs.input_ids.shape[1] :].tolist(), strict=True):
            stopped = end in ids
            said = tokenizer.decode(ids[: ids.index(end)] if stopped else ids)
            frame, exact = check(example, said, stopped)
            rows.append({"kind": example.kind, "said": said, "answer": example.answer, "frame": frame, "exact": exact})
    return rows


def render(results: Mapping[str, dict[str, Any]], options: Any, stage: Any) -> str:
    """Three tables with one row for each model: the main scores, bits per byte by language, right answers by format."""

    def share(result: dict[str, Any], codes: tuple[str, ...], what: str, kind: str | None = None) -> str:
        rows = [row for code in codes for row in result["answers"][code] if kind in (None, row["kind"])]
        return f"{100 * mean(row[what] for row in rows):.0f}"

    def bits(result: dict[str, Any], codes: tuple[str, ...]) -> float:
        return mean(result["bits_per_byte"][code] for code in codes)

    main_rows, language_rows, format_rows = [], [], []
    for name, result in results.items():
        shares = [share(result, codes, what) for what in ("frame", "exact") for codes in (("en",), NEW)]
        million = f"{result['parameters'] / 1e6:.1f}"
        main_rows.append([name, million, *shares, f"{bits(result, OLD):.3f}", f"{bits(result, NEW):.3f}"])
        language_rows.append([name, *(f"{bits(result, (code,)):.3f}" for code in (*OLD, *NEW))])
        format_rows.append(
            [name, *(" / ".join(share(result, c, "exact", kind) for c in (("en",), NEW)) for kind in FORMATS)]
        )
    new = " ".join(NEW)
    head = ["model", "M parameters", "frame, en", f"frame, {new}", "right, en", f"right, {new}", "bits/byte old", "new"]
    batch = stage.training["per_device_train_batch_size"] * stage.block_size
    counts = ", ".join(f"{count * len(FORMATS)} {code}" for code, count in FOR_EACH_FORMAT.items())
    notes = f"""\
- frame, right: percent of answers in the asked frame that end by themselves, and of those that are right word for word.
  Instructions are English; the language is that of the text in them. Tested: {counts}, from the test split.
- bits/byte: means over {" ".join(OLD)} and {new}, the first {options.test_tokens:,} tokens of each test split.
- Every model but base and instruct saw {options.steps} steps of {batch} tokens ({new}, batches the same). Of these
  DeltaMoE's router tuning had {options.review_steps} more, old and new; instruct had {options.sft_steps} steps of
  {SFT_BATCH} English examples.
- Learning rates: experts, and LLaMA-Pro's {NEW_BLOCKS} new blocks, {stage.training["learning_rate"]:g}; dense models
  {DENSE_LEARNING_RATE:g}; instruction tuning {SFT_LEARNING_RATE:g}. Seed {options.seed}.
- MoE-CPT-Avg: stage 1 from instruct, averaged with instruct in every expert; routers are those trained, since instruct
  has none. LLaMA-Pro: new blocks trained alone, then the delta on the old layers, embeddings and norms."""
    return "\n\n".join(
        [
            markdown_table(head, main_rows),
            notes,
            markdown_table(["bits per byte", *OLD, *NEW], language_rows),
            markdown_table([f"right, en / {new}", *FORMATS], format_rows),
        ]
    )


if __name__ == "__main__":
    main()

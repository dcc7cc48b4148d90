"""The measures of the study: bits per byte, grammatical minimal pairs, parameters, tokens a second in generation."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from timing import time_in_turn

from hf_moe_expand.checkpoint.source import load_config
from hf_moe_expand.checkpoint.stored import network_of
from hf_moe_expand.core.jsonfile import write_text
from hf_moe_expand.evaluation.harness import HarnessTasks, Metric
from hf_moe_expand.evaluation.perplexity import evaluate_model
from hf_moe_expand.modeling import ExpandedConfig
from hf_moe_expand.report.inspection import inspect_config

Texts = Mapping[str, list[str]]


def read_texts(folder: Path, split: str, codes: list[str]) -> dict[str, list[str]]:
    """The documents of `CODE.SPLIT.jsonl`, of the languages that have the file."""
    files = {code: folder / f"{code}.{split}.jsonl" for code in codes}
    return {
        code: [json.loads(line)["text"] for line in file.read_text("utf-8").splitlines()]
        for code, file in files.items()
        if file.is_file()
    }


def bits_per_byte(model: Any, tokenizer: Any, texts: Texts, settings: Mapping[str, Any]) -> dict[str, float]:
    scores = evaluate_model(model, tokenizer, texts, **settings)
    return {code: score.bits_per_byte for code, score in scores.items()}


class MinimalPairs:
    """Tasks of lm-evaluation-harness: which of two sentences a model finds likelier, as BLiMP defines it.

    Args:
        folder: `CODE.jsonl`, objects with `good` and `bad`.
        out: folder for the tasks' files.
        count: pairs of each language, at even distances, so that every phenomenon has its share; None takes all.
    """

    def __init__(self, folder: Path, out: Path, codes: list[str], count: int | None) -> None:
        self.codes = [code for code in codes if (folder / f"{code}.jsonl").is_file()]
        for code in self.codes:
            lines = (folder / f"{code}.jsonl").read_text("utf-8").splitlines(keepends=True)
            every = max(1, len(lines) // (count or len(lines)))
            chosen = out / f"{code}.jsonl"
            write_text(chosen, "".join(lines[::every][:count]))
            task = {
                "task": f"minimal_pairs_{code}", "dataset_path": "json",
                "dataset_kwargs": {"data_files": {"test": str(chosen.resolve())}}, "test_split": "test",
                "output_type": "multiple_choice", "doc_to_text": "", "doc_to_target": 0,
                "doc_to_choice": "{{[good, bad]}}", "num_fewshot": 0,
                "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
                "metadata": {"version": 1},
            }  # fmt: skip
            write_text(out / f"{code}.yaml", yaml.safe_dump(task))
        self.tasks = HarnessTasks([f"minimal_pairs_{code}" for code in self.codes], include_path=out)

    def accuracy(self, model: Any, tokenizer: Any, batch_size: int) -> dict[str, Metric]:
        """The share of pairs judged right, by language, with its standard error."""
        scores = self.tasks.evaluate(model, tokenizer, batch_size)
        return {code: scores[f"minimal_pairs_{code}"].metrics["acc"] for code in self.codes}


def parameters(path: Path) -> dict[str, int]:
    """The number of all parameters of a checkpoint, and of those active for a token."""
    config = load_config(path)
    if isinstance(config, ExpandedConfig):
        found = inspect_config(config)
        return {"total": found.total, "active": found.active}
    network: Any = network_of(config)
    total = sum(parameter.numel() for parameter in network.parameters())
    return {"total": total, "active": total}


def generation_speed(models: Mapping[str, Any], texts: list[str], settings: Mapping[str, Any]) -> dict[str, float]:
    """Tokens a second of greedy generation with a cache, of each model; all take turns, and each one's
    fastest round counts, since whatever else the machine does only slows it.

    Args:
        models: model and tokenizer by name.
        texts: text whose first tokens are the prompts.
    """
    calls = {}
    for name, (model, tokenizer) in models.items():
        ids = tokenizer("\n".join(texts), verbose=False).input_ids
        size = settings["batch"] * settings["prompt"]
        prompts = torch.tensor(ids[:size], device=model.device).view(settings["batch"], -1)
        options = {
            "attention_mask": torch.ones_like(prompts), "do_sample": False, "use_cache": True,
            "max_new_tokens": settings["tokens"], "min_new_tokens": settings["tokens"],
        }  # fmt: skip
        calls[name] = lambda model=model, prompts=prompts, options=options: model.generate(prompts, **options)
    made = settings["batch"] * settings["tokens"]
    device = next(iter(models.values()))[0].device.type
    times = time_in_turn(calls, settings["repeats"], device)
    return {name: made / min(found) for name, found in times.items()}

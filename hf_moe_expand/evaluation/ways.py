"""Bits per byte of an expanded model by who knows the language of a text: nobody, its reader, or the gate."""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..checkpoint.facts import Facts
from ..inference.models import load_for_inference
from .perplexity import LanguageScore, evaluate_model
from .scoring_settings import EvaluationSettings


def score_ways(
    model: str | os.PathLike, sources: Mapping[str, Any], settings: EvaluationSettings | None = None
) -> tuple[list[str], list[list[str]]]:
    """A table, header and rows: bits per byte of text with the base inside, with each expansion alone, told its
    language, and behind the gate if there is one. Text that is told its language takes its expansion's experts, or the
    base where it is no new language. The experts of the model are exclusive.
    """
    loaded, tokenizer = load_for_inference(model)
    options = (settings or EvaluationSettings()).model_dump(exclude={"questions"})
    texts = {code: source.load()["text"] for code, source in sources.items()}

    def scored(told: AbstractContextManager[Any]) -> dict[str, LanguageScore]:
        with told:
            return evaluate_model(loaded, tokenizer, texts, **options)

    history = Facts(loaded.config).history
    classes = {code: history.classes.get(code) for code in sorted(texts, key=lambda c: history.classes.get(c, 1 << 30))}
    alone = [scored(loaded.use_expert(0))]
    alone += [scored(loaded.use_languages(record.new_languages[0])) for record in history.expansions]
    scores = {"base": alone[0]}
    for record, of in zip(history.expansions, alone[1:], strict=True):
        scores[f"{', '.join(record.new_languages)} alone"] = of
    scores["told"] = {code: alone[number or 0][code] for code, number in classes.items()}
    if loaded.config.declares("judges"):
        scores["behind the gate"] = scored(nullcontext())
    kinds = {None: "unnamed", 0: "old"}
    heads = [f"{code} ({kinds.get(number, 'new')})" for code, number in classes.items()]
    return ["", *heads], [[way, *(f"{of[code].bits_per_byte:.4f}" for code in classes)] for way, of in scores.items()]

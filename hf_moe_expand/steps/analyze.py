"""The steps before a plan: similarity of languages (LayerMoE), separability of old and new text, deviation of layers
(DMoE)."""

import shutil
from dataclasses import dataclass
from typing import Any, ClassVar

from ..analysis.deviation import measure_deviation
from ..analysis.separability import measure_separability, split
from ..analysis.similarity import document_blocks, measure_similarity, token_blocks
from ..checkpoint.source import resolve_checkpoint
from ..errors import InputError
from ..models import load_for_inference, load_tokenizer
from ..schema import plain
from ..self_written import SelfWrittenText
from .base import Checks, Done, Round, Step


@dataclass
class AnalyzeSimilarity(Step):
    """Measures the similarity of languages in each layer."""

    round: Round

    def __post_init__(self) -> None:
        self.name, self.output = f"{self.round.prefix}analyze", self.round.folder / "analysis.json"

    def inputs(self) -> dict[str, Any]:
        codes = self.round.expansion.analyzed_languages(self.round.old, self.round.number > 1)
        return {
            "analysis": plain(self.round.expansion.analysis), "old": self.round.old, "new": self.round.new,
            "texts": self.round.contents(codes),
        }  # fmt: skip

    def check(self, checks: Checks) -> None:
        check_tokens(self.round, checks)

    def work(self) -> Done:
        round_, settings = self.round, self.round.expansion.analysis
        model, tokenizer = load_for_inference(round_.start, round_.revision)
        result = measure_similarity(
            model, tokenizer, round_.texts([*round_.old, *round_.new], model.config), round_.old, round_.new,
            tokens=settings.tokens, block_size=settings.block_size, batch_size=settings.batch_size,
        )  # fmt: skip
        result.to_json(self.output)
        low, high = min(result.similarity), max(result.similarity)
        return Done(f"similarity {low:.3f} to {high:.3f} over {len(result.similarity)} layers")


@dataclass
class AnalyzeSeparability(Step):
    """Measures how well each layer tells old text from new, with the settings of the similarity."""

    stands_for_earlier: ClassVar[bool] = False  # the plan needs the similarity too
    round: Round

    def __post_init__(self) -> None:
        self.name = f"{self.round.prefix}analyze separability"
        self.output = self.round.folder / "separability.json"

    def inputs(self) -> dict[str, Any]:
        return AnalyzeSimilarity(self.round).inputs()

    def check(self, checks: Checks) -> None:
        """Refuses local text of which nothing can be held out, as far as its order in the files shows."""
        check_tokens(self.round, checks)
        if checks.offline:
            return
        settings, recipe = self.round.expansion.analysis, checks.recipe
        tokenizer = load_tokenizer(resolve_checkpoint(recipe.base, recipe.revision), recipe.base)
        for code in (*self.round.old, *self.round.new):
            source = self.round.sources[code]
            if source.files():
                sizes = (tokenizer, settings.tokens, settings.block_size)
                split(code, document_blocks(code, source.documents(), *sizes), recipe.seed)

    def work(self) -> Done:
        round_, settings = self.round, self.round.expansion.analysis
        model, tokenizer = load_for_inference(round_.start, round_.revision)
        result = measure_separability(
            model, tokenizer, round_.texts([*round_.old, *round_.new], model.config), round_.old, round_.new,
            tokens=settings.tokens, block_size=settings.block_size, batch_size=settings.batch_size,
            seed=round_.recipe.seed,
        )  # fmt: skip
        result.to_json(self.output)
        low, high = min(result.separability), max(result.separability)
        return Done(f"accuracy after {result.length} tokens {low:.3f} to {high:.3f} over {len(result.token)} layers")


@dataclass
class AnalyzeDeviation(Step):
    """Measures how far training on each language moves each layer, and how similar these changes are."""

    round: Round

    def __post_init__(self) -> None:
        self.name, self.output = f"{self.round.prefix}analyze", self.round.folder / "analysis.json"

    def inputs(self) -> dict[str, Any]:
        new = self.round.new
        return {"deviation": plain(self.round.expansion.deviation), "new": new, "texts": self.round.contents(new)}

    def check(self, checks: Checks) -> None:
        """Refuses text with fewer bytes than the needed tokens, since a token has at least one byte."""
        if checks.offline:
            return
        settings = self.round.expansion.deviation
        needed = settings.steps * settings.batch_size * settings.block_size
        for code in self.round.new:
            source = self.round.sources[code]
            if not source.files():
                continue  # text on the hub is assumed to be enough
            size = 0
            for text in source.documents():
                size += len(text.encode()) + 1
                if size >= needed:
                    break
            if size < needed:
                raise InputError(
                    f"Language {code!r} has {size:,} bytes of text, but the deviation analysis reads {needed:,} tokens "
                    "(steps x batch_size x block_size): give more text, or smaller `deviation: {steps: ..., "
                    "batch_size: ...}`."
                )

    def work(self) -> Done:
        round_ = self.round
        model, tokenizer = load_for_inference(round_.start, round_.revision)
        work = round_.folder / "deviation.work"
        result = measure_deviation(
            model, tokenizer, round_.texts(round_.new, model.config), work_dir=work, seed=round_.recipe.seed,
            **plain(round_.expansion.deviation),
        )  # fmt: skip
        result.to_json(self.output)
        shutil.rmtree(work)
        low, high = min(result.deviation), max(result.deviation)
        return Done(f"deviation {low:.4g} to {high:.4g} over {len(result.deviation)} layers")


def check_tokens(round_: Round, checks: Checks) -> None:
    """Refuses local text with fewer tokens than the similarity or the search for the nearest experts needs."""
    if checks.offline or checks.config.is_encoder_decoder:  # the analysis itself counts sentence pairs at its start
        return
    settings, recipe = round_.expansion.analysis, checks.recipe
    tokenizer: Any = None
    for code in round_.expansion.analyzed_languages(round_.old, further=round_.number > 1):
        source = round_.sources[code]
        if isinstance(source, SelfWrittenText):
            if source.tokens_to_come < settings.tokens:
                raise InputError(
                    f"self_written: the base writes at most {source.tokens_to_come:,} tokens in {code}, but the "
                    f"analysis reads {settings.tokens:,} of each language: raise self_written.documents, or lower "
                    "`analysis: {tokens: ...}`."
                )
        elif source.files() and checks.counted.get(code, 0) < settings.tokens:
            tokenizer = tokenizer or load_tokenizer(resolve_checkpoint(recipe.base, recipe.revision), recipe.base)
            token_blocks(code, source.documents(), tokenizer, settings.tokens, settings.block_size)
            checks.counted[code] = settings.tokens

"""Scores held-out text of each language while a stage trains, to show where a language starts to over-fit."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from ..core.errors import InputError, errors_at
from ..core.jsonfile import read_json, write_json
from ..core.schema import checked, read
from ..data.pairs import texts_for
from ..data.sources import LanguageText
from ..trainers.freezing import evaluating
from .perplexity import LanguageScore, score_stream, stream_for

VALIDATION = "validation.json"


@dataclass
class ValidationCurves:
    """The content of `validation.json`.

    Attributes:
        trained: the languages that trained; other languages may be scored too.
        total_steps: steps of the training.
        steps: steps at which the model was scored; 0 is before the first step.
        tokens: scored tokens of each language.
        loss: loss of each language at each of `steps`, in nats a token.
        bits_per_byte: bits per byte of the same text, comparable across tokenizers.
        lost: the share of this text that the tokenizer loses; bits per byte of lossy text are no bound.
    """

    trained: list[str]
    total_steps: int = 0
    steps: list[int] = field(default_factory=list)
    tokens: dict[str, int] = field(default_factory=dict)
    loss: dict[str, list[float]] = field(default_factory=dict)
    bits_per_byte: dict[str, list[float]] = field(default_factory=dict)
    lost: dict[str, float | None] = field(default_factory=dict)

    @classmethod
    @checked
    def load(cls, path: str | Path) -> "ValidationCurves":
        """Reads the file, or the file in a stage's output folder."""
        path = Path(path)
        path = path / VALIDATION if path.is_dir() else path
        curves = read(cls, read_json(path, "the validation of a training stage"), str(path))
        for language, values in [*curves.loss.items(), *curves.bits_per_byte.items()]:
            if len(values) != len(curves.steps):
                raise InputError(f"{path}: {language!r} has {len(values)} scores for {len(curves.steps)} steps.")
        return curves

    def save(self, path: str | Path) -> None:
        write_json(path, asdict(self))

    def add(self, step: int, scores: Mapping[str, LanguageScore]) -> None:
        self.steps.append(step)
        for language, score in scores.items():
            self.tokens[language], self.lost[language] = score.tokens, score.lost
            self.loss.setdefault(language, []).append(math.log(score.perplexity))
            self.bits_per_byte.setdefault(language, []).append(score.bits_per_byte)

    def cut(self, step: int) -> None:
        count = sum(scored <= step for scored in self.steps)
        del self.steps[count:]
        for values in (*self.loss.values(), *self.bits_per_byte.values()):
            del values[count:]

    def best_steps(self) -> dict[str, int]:
        """The step with the lowest loss of each trained language, the last of several (Elbayad et al., Algorithm 1);
        step 0 precedes the training."""
        if missing := [language for language in self.trained if language not in self.loss]:
            raise InputError(f"{', '.join(missing)} trained, but was not scored: give validation text for it.")
        best = {}
        for language in self.trained:
            losses = zip(self.loss[language], self.steps, strict=True)
            finite = [(loss, -step) for loss, step in losses if step > 0 and math.isfinite(loss)]
            if not finite:
                raise InputError(f"{language!r} has no finite loss at any step: lower `every` in `validation`.")
            best[language] = -min(finite)[1]
        return best


class ValidationCallback(TrainerCallback):
    """Scores the text of a stage's `validation` before the first step, every `every` steps and after the last, without
    masking and with the routing of inference, and writes `path`. Does not affect the training.

    All ranks score the same text, since the model may be split over them; the first rank writes. A resumed training
    keeps its earlier scores.
    """

    def __init__(
        self, settings: Any, tokenizer: Any, path: Path, block_size: int, trained: Sequence[str], model_config: Any
    ) -> None:
        texts = texts_for(model_config, validation_sources(settings))
        self.streams = {code: stream_for(model_config, code, texts, tokenizer, settings.max_tokens) for code in texts}
        self.path, self.every, self.block_size = path, settings.every, block_size
        self.curves = ValidationCurves(list(trained))

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step and self.path.is_file():
            self.curves = ValidationCurves.load(self.path)
        self.curves.cut(state.global_step or -1)  # also what an attempt with a larger batch scored
        self.curves.total_steps = state.max_steps
        if not state.global_step:
            self._score(args, state, model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step % self.every == 0 or state.global_step >= state.max_steps:
            self._score(args, state, model)

    def _score(self, args: Any, state: Any, model: Any) -> None:
        scores = {}
        # Neither a module's mode nor the random numbers of the training change.
        with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []), evaluating(model):
            for language, stream in self.streams.items():
                with errors_at(f"validation at step {state.global_step}: language {language!r}"):
                    scores[language] = score_stream(model, stream, self.block_size, args.per_device_train_batch_size)
        self.curves.add(state.global_step, scores)
        if state.is_world_process_zero:
            self.curves.save(self.path)


def validation_sources(settings: Any) -> dict[str, LanguageText]:
    """The sources of the held-out text."""
    return {code: LanguageText(code, source) for code, source in settings.texts.items()}

"""Scores several models, for the verb `evaluate` and for runs."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..checkpoint.source import load_config, resolve_checkpoint
from ..data.pairs import texts_for
from ..data.sources import LanguageText
from ..errors import errors_at
from ..models import check_decoder, load_for_inference
from .pairs import evaluate_pairs
from .perplexity import evaluate_model
from .report import Evaluation


def score_models(
    models: Mapping[str, tuple[str, str | None]],
    sources: Mapping[str, LanguageText],
    languages: Sequence[Sequence[str]],
    block_size: int = 1024,
    batch_size: int = 8,
    max_tokens: int | None = None,
    tasks: Any = None,
) -> Evaluation:
    """Scores models on held-out text, one in memory at a time.

    Args:
        models: folder or hub id and revision of each model, by its name in the results.
        sources: held-out text of each language.
        languages: the old languages, then the languages of each expansion.
        tasks: `HarnessTasks` to run as well.

    Raises:
        InputError: a model cannot be loaded, a text does not fit its kind, or there are tasks for an encoder-decoder.
    """
    if tasks is not None:
        check_decoders(models, "tasks of lm-evaluation-harness")
    old, *expansions = (list(codes) for codes in languages)
    result = Evaluation(old, [code for new in expansions for code in new], expansions=expansions)
    texts: dict[bool, dict[str, Any]] = {}  # for encoder-decoders, and for decoders
    for name, (path, revision) in models.items():
        model, tokenizer = load_for_inference(path, revision)
        is_encoder_decoder = model.config.is_encoder_decoder
        if is_encoder_decoder not in texts:
            texts[is_encoder_decoder] = texts_for(model.config, sources)
        with errors_at(name):
            if is_encoder_decoder:
                result.models[name] = evaluate_pairs(model, tokenizer, texts[True], batch_size, max_tokens)
            else:
                result.models[name] = evaluate_model(model, tokenizer, texts[False], block_size, batch_size, max_tokens)
        if tasks is not None:
            result.tasks[name] = tasks.evaluate(model, tokenizer, batch_size)
        del model  # before the next one is loaded
    return result


def check_decoders(models: Mapping[str, tuple[str, str | None]], what: str) -> None:
    """Refuses encoder-decoders among models, before any of them is scored.

    Args:
        models: see `score_models`.
        what: see `check_decoder`.

    Raises:
        InputError: a model is an encoder-decoder.
    """
    for name, (path, revision) in models.items():
        check_decoder(load_config(resolve_checkpoint(path, revision)), name, what)

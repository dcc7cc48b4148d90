"""The ensemble of X-ELM and Branch-Train-Merge: several dense models, one for each language group, score as one.

At each target `x_t`, with the sum over the `top_m` models of the largest weight before renormalisation:

    p(x_t | x_<t) = sum_j w_j(t) p_j(x_t | x_<t),    w_j(t) = prod_{s<t} p_j(x_s | x_<s) / sum_i (the same of i)

The weights are Branch-Train-Merge's posterior over models, under a uniform prior; DMoE's paper says of X-ELM only that
the outputs of the top m = 2 models are ensembled. We choose the rest: the prefix is the window before the target;
separators of documents do not count; equal weights, as at a window's first target, rank in the order of the models.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..checkpoint.source import load_config, resolve_checkpoint
from ..core.errors import InputError, errors_at
from ..core.progress import Bar
from ..core.schema import checked
from ..evaluation.perplexity import LanguageScore, stream_for, target_nats, text_stream
from ..inference.models import check_decoder, load_for_inference, longest_block


def mix_models(log_probs_MWS: torch.Tensor, top_m: int) -> torch.Tensor:
    """The ensemble's log-probability of each target, `[windows, targets]`.

    Args:
        log_probs_MWS: `log p_j(x_t | x_<t)` of each model, window and target; 0 where a target is not scored.
        top_m: models mixed at each target.
    """
    evidence_MWS = log_probs_MWS.cumsum(-1).roll(1, dims=-1)
    evidence_MWS[..., 0] = 0
    best_mWS = evidence_MWS.argsort(dim=0, descending=True, stable=True)[:top_m]
    log_weights_mWS = evidence_MWS.gather(0, best_mWS).log_softmax(0)
    return (log_weights_mWS + log_probs_MWS.gather(0, best_mWS)).logsumexp(0)


@checked
def evaluate_ensemble(
    models: Sequence[str | os.PathLike | nn.Module],
    tokenizer: PreTrainedTokenizerBase,
    texts: Mapping[str, Iterable[str]],
    top_m: int = 2,
    block_size: int = 1024,
    batch_size: int = 8,
    max_tokens: int | None = None,
) -> dict[str, LanguageScore]:
    """Scores each language's documents as `evaluate_model` does, with the mixture of the models' probabilities; the
    module gives the formula. One model, or checkpoint, is in memory at a time; all have one `tokenizer`.

    Raises:
        InputError: `top_m` exceeds the models' number, a tokenizer differs, or a language has no text to score.
    """
    if not 1 <= top_m <= len(models):
        raise InputError(f"top_m is {top_m}; an ensemble of {len(models)} models mixes 1 to {len(models)} of them.")
    for model in models:
        config: Any = load_config(resolve_checkpoint(model)) if isinstance(model, str | os.PathLike) else model.config
        check_decoder(config, getattr(config, "name_or_path", "") or config.model_type, "ensembles")
        block_size = min(block_size, longest_block(config) or block_size)
    texts = {language: list(documents) for language, documents in texts.items()}
    streams: dict[str, Any] = {code: stream_for(config, code, texts, tokenizer, max_tokens) for code in texts}
    log_probs: dict[str, list[torch.Tensor]] = {language: [] for language in texts}
    tokens = sum(stream.tokens for stream in streams.values())
    with Bar(total=tokens * len(models), desc="ensemble", unit="token", unit_scale=True) as bar:
        for model in models:
            loaded, own = load_for_inference(model) if isinstance(model, (str, os.PathLike)) else (model, tokenizer)
            loaded.eval()
            for language, stream in streams.items():
                # Not the vocabularies: the loader may add tokens that no text has.
                if own is not tokenizer and text_stream(texts[language], own, max_tokens).ids != stream.ids:
                    raise InputError(
                        f"{model}: its tokenizer gives other tokens for the text in {language!r}; the models of an "
                        "ensemble must share one tokenizer."
                    )
                of_model: list[torch.Tensor] = []
                for part, scored in target_nats(loaded, stream, block_size, batch_size):
                    of_model.append(part)
                    bar.update(int(scored.sum()))
                log_probs[language].append(-torch.cat(of_model))
            del loaded
    scores = {}
    for language, stream in streams.items():
        nats = -mix_models(torch.stack(log_probs[language]), top_m).sum().item()
        with errors_at(f"ensemble: language {language!r}"):
            scores[language] = LanguageScore.from_nats(nats, stream.tokens, stream.size, stream.lost)
    return scores

"""Whether a base knows the new languages better than the old ones, as where a recipe has them swapped."""

from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch

from ..checkpoint.source import resolve_checkpoint
from ..checkpoint.stored import network_of
from ..data.sources import LanguageText
from ..inference.memory import device_memory
from ..inference.models import load_for_inference
from ..trainers.bfloat16 import has_bfloat16
from .perplexity import evaluate_model, shortened

_TOKENS, _DOCUMENTS = 256, 50  # of each language
# Weights, for each text, beyond which a base is not asked without a GPU: about a minute on two cores. The work in
# bfloat16 of a CPU that emulates it, as a multiple.
_MOST, _EMULATED = 4_000_000_000, 30
# Times the bits of the worst known new language that the best known old one has, by the byte or by the character.
_CLEARLY = 1.25


def swapped(
    base: str, revision: str | None, config: Any, old: Mapping[str, LanguageText], new: Mapping[str, LanguageText]
) -> list[str]:
    """A warning where a base finds the first words of all new languages clearly the likelier, by the byte and, since
    scripts have characters of 1 to 4 bytes, by the character; nothing where it does not, or was not asked: an
    encoder-decoder, a base that takes long here, and text on the hub."""
    texts = {code: list(islice(text.documents(), _DOCUMENTS)) for code, text in {**old, **new}.items() if text.files()}
    old, new = ({code: text for code, text in sources.items() if code in texts} for sources in (old, new))
    folder = resolve_checkpoint(base, revision, weights=False)
    if not old or not new or config.is_encoder_decoder or not any(folder.glob("*.safetensors")):
        return []
    network, memory = network_of(config), device_memory()
    dtype = config.dtype or network.dtype
    work = network.num_parameters() * len(texts) * (1 if dtype == torch.float32 or has_bfloat16() else _EMULATED)
    takes_long = work > _MOST and not torch.cuda.is_available()
    if takes_long or network.num_parameters() * dtype.itemsize > memory / 2:
        return ["skipped: whether old and new are swapped: the base takes too long here"]
    model, tokenizer = load_for_inference(base, revision)
    # The first document is cut here, where it is no setting of the user's that cuts it.
    cut = {code: [shortened(of[0], tokenizer, _TOKENS)[0], *of[1:]] for code, of in texts.items()}
    scores = evaluate_model(model, tokenizer, cut, _TOKENS, 1, _TOKENS)
    bits = {code: score.bits_per_byte for code, score in scores.items()}
    of_a_character = {code: bits[code] * len("".join(of).encode()) / len("".join(of)) for code, of in texts.items()}
    times = [min(of[code] for code in old) / max(of[code] for code in new) for of in (bits, of_a_character)]
    if min(times) < 1 or max(times) < _CLEARLY:
        return []
    shown = ["; ".join(f"{code} {bits[code]:.2f}" for code in codes) for codes in (old, new)]
    return [
        f"warning: the base knows the new languages better than the old ones, by the bits per byte of their first words"
        f" (old: {shown[0]}; new: {shown[1]}): are `old` and `new` swapped?"
    ]

"""`recipes new`: writes the recommended recipe for a base and text that are at hand."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from ..checkpoint.expand import planned_config
from ..checkpoint.promises import check_architecture
from ..checkpoint.source import load_base_config, own_name, resolve_checkpoint
from ..checkpoint.stored import network_of
from ..core.disk import readable_size
from ..core.errors import InputError, errors_at
from ..core.languages import check_old_and_new
from ..core.recipe_paths import filled_in
from ..core.rendering import render
from ..core.yamlfile import parse_yaml
from ..data.sources import LanguageText
from ..data.tokens import tokens_at_hand
from ..inference.memory import device_memory, least_memory
from ..inference.models import load_tokenizer, longest_block
from ..modeling import count_layers
from ..planning.plan import Plan
from ..stages import all_stages
from ..trainers.bfloat16 import has_bfloat16
from .recipe import Recipe

# The blocks of the study whose rates these are (docs/choose.md#learning-rates).
BLOCK = 512
_BLOCKS_A_STEP = 16
# A training of fewer steps takes smaller ones; one of more takes larger ones.
_FEWEST_STEPS, _MOST_STEPS = 100, 10_000
# Hidden states that a layer is taken to keep of a token, most of them its FFN's inner ones; the share of the device's
# memory that they may fill with the weights.
_KEPT, _ROOM = 32, 0.7


class Rates(NamedTuple):
    """The peak learning rate of stage 1, and where it comes from."""

    stage: str
    source: str


def rates_for(parameters: int, of_step: int = _BLOCKS_A_STEP * BLOCK) -> Rates:
    """The rates to start from, by the size of the base and the tokens of a step."""
    if parameters < 300_000_000:
        measured = "measured on SmolLM2, 135 million parameters, with steps of"
        return Rates("2e-3", f"{measured} 8,192 tokens") if of_step >= 4096 else Rates("1e-3", f"{measured} 512 tokens")
    if parameters < 1_000_000_000:
        return Rates("2e-4", "not measured for this size: between SmolLM2's and the paper's for 1.8 billion")
    return Rates("5e-5", "the paper's, for 1.8 billion parameters and 524,288 tokens a step")


def blocks_a_step(tokens: int | None) -> int:
    """Blocks of `BLOCK` tokens in a step of a training on so many tokens; 16 where their number is not known."""
    blocks = _BLOCKS_A_STEP
    while tokens is not None and blocks > 1 and tokens < _FEWEST_STEPS * blocks * BLOCK:
        blocks //= 2
    while tokens is not None and tokens > _MOST_STEPS * blocks * BLOCK and blocks < 1024:
        blocks *= 2
    return blocks


def new_recipe(
    base: str,
    old: Mapping[str, str],
    new: Mapping[str, str],
    test: Mapping[str, str],
    output: str | None = None,
    revision: str | None = None,
    seed: int = 0,
    allow_lost_text: bool = False,
    gpu: bool | None = None,
    tokens: int | None = None,
) -> str:
    """The text of the recommended recipe for a base and text.

    Args:
        old, new, test: the source of each language's text, as in a recipe.
        output: folder of the run; by default `runs/`, the base's name and the new languages.
        gpu: whether it will train on a GPU; by default, whether this machine has one.
        tokens: tokens to train on; by default one epoch of the text.
    """
    if tokens is not None and tokens < 1:
        raise InputError(f"--tokens is {tokens}: must be at least 1.")
    if not new:
        raise InputError("No new language is given: name its text with --new LANGUAGE=FILE.")
    check_old_and_new(list(old), list(new))
    texts = {}
    for option, sources in (("--old", old), ("--new", new), ("--test", test)):
        for code, source in sources.items():
            with errors_at(f"{option} {code}"):
                texts[option, code] = LanguageText(code, filled_in(source))
                texts[option, code].check()
    folder = resolve_checkpoint(base, revision, weights=False)
    dense = load_base_config(folder)
    check_architecture(dense, base)
    if dense.is_encoder_decoder:
        raise InputError(f"{base}: is an encoder-decoder, for which docs/backbones.md has the commands.")
    longest = longest_block(dense)
    if longest is not None and longest < BLOCK:
        raise InputError(f"{base}: takes {longest} positions, but this recipe's blocks have {BLOCK}: write your own.")
    tokenizer = load_tokenizer(folder, base)
    counts = {code: tokens_at_hand(text, tokenizer) for (option, code), text in texts.items() if option == "--new"}
    known = [count for count in counts.values() if count is not None]
    asked, tokens = tokens, tokens or (sum(known) if len(known) == len(counts) else None)
    blocks = blocks_a_step(tokens)
    steps = None if tokens is None else max(tokens // (blocks * BLOCK), 1)
    rates = rates_for(network_of(dense).num_parameters(), blocks * BLOCK)
    facts = {
        "base": base, "revision": revision, "seed": seed, "lossy": allow_lost_text,
        "old": old, "new": new, "test": test,
        "output": output or f"runs/{Path(own_name(base)).name}-{'-'.join(new)}", "rates": rates, "block": BLOCK,
        "blocks": blocks, "steps": steps, "tokens": tokens, "asked": asked,
        **_on_the_device(dense, old, new, blocks, gpu),
    }  # fmt: skip
    text = render("new_recipe.yaml", facts, {"yaml": _value, "count": "{:,}".format}) + "\n"
    Recipe.of_text(text, "the recipe")
    return text


def _on_the_device(
    dense: Any, old: Mapping[str, str], new: Mapping[str, str], most: int, gpu: bool | None
) -> dict[str, Any]:
    """What fits this machine, or a GPU elsewhere: blocks at a time and why so many, and mixed precision."""
    here = torch.cuda.is_available()
    if gpu and not here:
        why = "safe on a GPU that this machine does not know; with more memory take more, and fewer of the next line"
        return {"at_once": 1, "why": why, "half": True, "cpu": False}
    plan = Plan("exclusive", [2] * count_layers(dense), old=list(old), new=list(new), exclusive=True)
    network = network_of(planned_config(dense, plan))
    cpu = here and gpu is False
    memory = psutil.virtual_memory().total if cpu else device_memory()
    stage: Any = all_stages()["post_pretrain"]
    config = stage(per_device_train_batch_size=most, block_size=BLOCK)
    while config.per_device_train_batch_size > 1 and least_memory(network, config, _KEPT) > _ROOM * memory:
        config.per_device_train_batch_size //= 2
    at_once = config.per_device_train_batch_size
    why = "all of a step" if at_once == most else f"what fits into {readable_size(memory)} of memory"
    return {"at_once": at_once, "why": why, "half": here and not cpu and has_bfloat16(), "cpu": cpu}


def _value(text: str | os.PathLike) -> str:
    """A text as YAML has it: plain where that reads back as the same text."""
    plain = str(text)
    try:
        same = parse_yaml(plain, plain) == plain and parse_yaml(f"{{a: {plain}}}", plain) == {"a": plain}
    except InputError:
        same = False
    return plain if same else json.dumps(plain, ensure_ascii=False)

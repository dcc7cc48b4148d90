"""What can be known of a recipe before the first GPU hour: `validate`."""

from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from .analysis.result import DeviationResult, SimilarityResult
from .analysis.similarity import token_blocks
from .checkpoint.expand import check_kinds
from .checkpoint.graft import check_fine_tune
from .checkpoint.source import base_config_at_hand, load_base_config, resolve_checkpoint
from .checkpoint.writer import check_shard_size
from .data.mixing import review_documents
from .data.sources import LanguageText
from .errors import InputError
from .models import load_tokenizer, longest_block
from .planning.make import make_plan
from .recipe import Expansion, Recipe, unset_variable
from .training import (
    check_masking,
    check_mix,
    check_post_pretraining_data,
    check_training_arguments,
    training_arguments,
)


def validate_recipe(recipe: Recipe, offline: bool = False) -> list[str]:
    """Checks all that can be checked without loading weights; returns what was found to be right, one line each.

    Local text is read as far as it takes to know that there is enough of it; the hub's is not.

    Args:
        offline: download nothing, and leave out, with a line that says so, what needs a base that is not at hand or a
            variable that is not set.

    Raises:
        InputError: the first mistake found.
    """
    found = []
    if offline:
        config = None if unset_variable(recipe.base) else base_config_at_hand(recipe.base, recipe.revision)
    else:
        config = load_base_config(resolve_checkpoint(recipe.base, recipe.revision))
    if config is None:
        found.append(f"skipped: architecture, plans and block sizes: {recipe.base} is not on this machine")
    else:
        found.append(f"base: {recipe.base}, {config.model_type}, {config.num_hidden_layers} layers")
    for key, source in recipe.keyed_sources():
        if offline and (unset := unset_variable(source.source)):
            found.append(f"skipped: {key}: {source.source}: {unset} is not set")
            continue
        _named(key, source.check)
        files = source.files()
        found.append(f"{key}: {source.source}, {f'{len(files)} file(s)' if files else 'on the hub'}")
    found += _check_stages(recipe, offline)
    if config is not None:
        found += _check_plans(recipe, config)
    if not offline:
        found += _check_amounts(recipe)
    if (graft := recipe.rounds[-1].graft) is not None:
        if offline:
            found.append(f"skipped: whether {graft.instruct} is a fine-tune of {recipe.base}")
        else:
            check_fine_tune(recipe.base, graft.instruct, graft.keep_tokenizer, recipe.revision)
            found.append(f"graft: {graft.instruct}, of the base's shapes")
    return found


def _named(key: str, check: Callable[..., object], *arguments: Any) -> None:
    """Runs a check whose refusal says under which key of the recipe the mistake is."""
    try:
        check(*arguments)
    except InputError as error:
        raise InputError(f"{key}: {error}") from None


def _check_stages(recipe: Recipe, offline: bool) -> list[str]:
    """Training arguments, curricula and validation texts."""
    found, old = [], list(recipe.old)
    for expansion in recipe.rounds:
        expand = expansion.expand
        _named("expand", check_kinds, expand.expert_init, expand.expert_kind)
        _named("expand", check_shard_size, expand.max_shard_size)
        for name, settings in expansion.training_stages().items():
            check_training_arguments(settings.training, f"{name}.training")
            training = dict(settings.training)
            if not torch.accelerator.is_available():
                training.pop("tf32", None)  # refused on a machine without a GPU, which need not be the one to train on
            launcher = training.get("deepspeed")
            if offline and isinstance(launcher, str) and not Path(launcher).is_file():
                found.append(f"skipped: {name}: training.deepspeed: {launcher} is not on this machine")
                del training["deepspeed"]
            _named(name, training_arguments, training, Path(recipe.output), recipe.seed)
            check_masking(settings, recipe.rounds[0].expand.conditional_routing, name)
            if name == "post_pretrain":
                given = dict.fromkeys(expansion.trained_languages(name, old))
                _named(name, check_post_pretraining_data, given, old, list(expansion.new), settings)
            files = [*settings.validation.texts.values(), getattr(settings, "curriculum", None)]
            if offline and (unset := next(filter(None, map(unset_variable, filter(None, files))), None)):
                found.append(f"skipped: {name}: {unset} is not set")
            else:
                check_mix(settings, expansion.trained_languages(name, old), name)
        old += expansion.new
    return [*found, "training: TrainingArguments takes every setting"]


def _check_plans(recipe: Recipe, config: Any) -> list[str]:
    """Plans and block sizes against the base's configuration."""
    layers, found = config.num_hidden_layers, []
    counts: list[int] = []
    least = 0  # experts that every layer is sure to have
    for number, expansion in enumerate(recipe.rounds, start=1):
        copied = expansion.expand.copy_from
        if counts and isinstance(copied, int) and copied >= least:
            raise InputError(
                f"expansion {number}: expand.copy_from is {copied}, but a layer may have experts 0..{least - 1} only."
            )
        # A plan from equal numbers has the real one's totals and layer counts; only which layers get them is unknown.
        same = [1.0] * layers
        codes = list(expansion.new)
        similarity = SimilarityResult(list(recipe.old), codes, 0, {}, None, same, same)
        falling = [1 - layer / layers for layer in range(layers)]
        alike = [[float(a == b) for b in codes] for a in codes]
        deviation = DeviationResult(codes, falling, dict.fromkeys(codes, falling), alike, [], 0, 0.0, 0, 0, 0)
        plan = make_plan(
            expansion.plan, layers, list(recipe.old), codes, similarity, recipe.seed, deviation, grows_from=counts
        )
        counts = plan.experts_per_layer
        minimum = expansion.plan.own.get("minimum") or (1 if least else 2)
        least = min(counts) if expansion.plan.planner.fixed_counts else least + minimum
        with_classifier = len(plan.classifier_layers)
        found.append(
            f"expansion {number}: {plan.method}, {plan.total_experts} experts, "
            f"{with_classifier} classifier{'' if with_classifier == 1 else 's'}"
        )
        longest = longest_block(config)
        for name, settings in expansion.training_stages().items():
            if longest is not None and settings.block_size > longest:
                raise InputError(f"{name}.block_size is {settings.block_size}, but the base takes {longest} positions.")
    return found


def _check_amounts(recipe: Recipe) -> list[str]:
    """Whether local text is enough for the analyses and the review, which comes after days of stage 1."""
    sources = recipe.training_sources
    counted: dict[str, int] = {}
    tokenizer: Any = None
    old = list(recipe.old)
    for number, expansion in enumerate(recipe.rounds):
        new = list(expansion.new)
        tokens = expansion.analysis.tokens
        for code in expansion.analyzed_languages(old, further=number > 0):
            if sources[code].files() and counted.get(code, 0) < tokens:
                tokenizer = tokenizer or load_tokenizer(resolve_checkpoint(recipe.base, recipe.revision), recipe.base)
                token_blocks(code, sources[code].documents(), tokenizer, tokens, expansion.analysis.block_size)
                counted[code] = tokens
        review = expansion.training_stages().get("review")
        if review is not None and review.old_documents is not None:
            wanted = dict.fromkeys(old, review.old_documents)
            wanted |= dict.fromkeys(new, max(1, round(review.old_documents * review.new_per_old)))
            available = {code: _count(sources[code], count) for code, count in wanted.items()}
            review_documents(available, old, new, review.old_documents, review.new_per_old)
        if expansion.is_dmoe:
            _check_deviation_text(expansion, sources)
        old += new
    return [f"analysis: {' '.join(counted)} have as much text as it reads"] if counted else []


def _check_deviation_text(expansion: Expansion, sources: Mapping[str, LanguageText]) -> None:
    """Refuses text that is too little however it is cut: a token has a byte at least. The analysis counts tokens."""
    settings = expansion.deviation
    needed = settings.steps * settings.batch_size * settings.block_size
    for code in expansion.new:
        if not sources[code].files():
            continue  # the hub's text is taken for enough
        size = 0
        for text in sources[code].documents():
            size += len(text.encode()) + 1
            if size >= needed:
                break
        if size < needed:
            raise InputError(
                f"Language {code!r} has {size:,} bytes of text, but the deviation analysis reads {needed:,} tokens "
                "(steps x batch_size x block_size): give more text, or smaller `deviation: {steps: ..., batch_size: "
                "...}`."
            )


def _count(source: LanguageText, most: int) -> int:
    """Documents of a source, as far as `most`; the hub's text is taken for enough."""
    return sum(1 for _ in islice(source.documents(), most)) if source.files() else most

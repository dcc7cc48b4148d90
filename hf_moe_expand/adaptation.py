"""DMoE's adaptation to a new language: the nearest expert is copied, and only the copy learns."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from tqdm.auto import tqdm

from .checkpoint.expand import versions
from .checkpoint.grow import add_experts
from .checkpoint.source import load_expanded_config, resolve_checkpoint
from .checkpoint.writer import check_output
from .data.sources import LanguageText
from .distributed import launched
from .errors import InputError
from .evaluation.perplexity import evaluate_model
from .models import load_for_inference
from .settings import AdaptSettings
from .training import check_frozen, train_stage


@dataclass(frozen=True)
class Adaptation:
    """What `adapt_language` did.

    Attributes:
        perplexity: of the new language's sample through each expert alone.
        nearest: the expert that was copied, the one with the lowest perplexity.
        expert: the new expert's number.
        entry: the stage's entry in the provenance.
        frozen: tensors that were found byte-identical; of the routers all rows but the new one were, too.
    """

    perplexity: list[float]
    nearest: int
    expert: int
    entry: dict[str, Any]
    frozen: int


def expert_perplexities(
    model: Any, tokenizer: Any, language: str, texts: list[str], block_size: int, max_tokens: int
) -> list[float]:
    """Perplexity of a language's text through each expert alone (hard routing, DMoE section 3.3)."""
    found = []
    for expert in tqdm(range(len(model.config.language_groups)), desc="nearest expert", unit="expert"):
        with model.use_expert(expert):
            score = evaluate_model(model, tokenizer, {language: texts}, block_size, max_tokens=max_tokens)
        found.append(score[language].perplexity)
    return found


def adapt_language(
    model: str | os.PathLike,
    out: str | os.PathLike,
    source: LanguageText,
    settings: AdaptSettings | None = None,
    seed: int = 0,
    overwrite: bool = False,
) -> Adaptation:
    """Adds a language to a DMoE checkpoint and leaves every other byte of it unchanged.

    In each expanded layer the expert through which the language's text has the lowest perplexity is copied with its
    row of the router; the copies and their rows train on the language's text. Can be done again for further languages.

    Args:
        model: DMoE checkpoint.
        out: folder to write.
        source: text of the new language.

    Raises:
        InputError: the checkpoint is not DMoE's, or knows the language already.
    """
    settings = settings or AdaptSettings()
    folder = resolve_checkpoint(model)
    out = check_output(out, overwrite, folder)
    config = load_expanded_config(folder)
    groups = getattr(config, "language_groups", None)
    if not groups:
        raise InputError(f"{folder}: has no language groups; adaptation belongs to DMoE checkpoints.")
    language = source.language
    for number, group in enumerate(groups):
        if language in group:
            raise InputError(f"{folder}: knows {language!r} already (expert {number}: {', '.join(group)}).")
    state = launched()
    found: list[float] = []
    if state.is_main_process:
        network, tokenizer = load_for_inference(folder)
        texts = source.load().shuffle(seed=seed)["text"]
        found = expert_perplexities(network, tokenizer, language, texts, settings.block_size, settings.sample_tokens)
        del network
    (found,) = broadcast_object_list([found])
    nearest = min(range(len(found)), key=found.__getitem__)
    expanded = {layer: [nearest] for layer, count in enumerate(config.num_experts_per_layer) if count > 1}
    known = [code for group in groups for code in group]
    entry = {
        "method": "dmoe-adapt", "base_model": config.expansions[-1]["base_model"], "base_revision": None,
        "old_languages": known, "new_languages": [language], "copied_expert": nearest,
        "experts_per_layer": [count + (count > 1) for count in config.num_experts_per_layer],
        "classifier_layers": [], "seed": seed,
        "versions": versions(), "stages": [],
    }  # fmt: skip
    grown = Path(out).with_name(f"{out.name}.grown")
    changes = {"language_groups": [*groups, [language]]}
    if state.is_main_process:
        add_experts(folder, grown, expanded, entry, copy_router_rows=True, config_changes=changes, overwrite=True)
    state.wait_for_everyone()
    stage = train_stage(grown, out, {language: source}, settings, seed, overwrite)
    frozen = check_frozen(grown, out, stage["stage"])
    state.wait_for_everyone()
    if state.is_main_process:
        shutil.rmtree(grown)
    return Adaptation(found, nearest, len(groups), stage, frozen)

"""Add a language to a DMoE model: copy the nearest expert, and train only the copy.

Example: hf-moe-expand train adapt qwen-dmoe-2 qwen-dmoe-ro --data ro=ro.jsonl --test ro=ro.test.jsonl
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from accelerate.utils import broadcast_object_list
from pydantic import Field

from ...checkpoint.expand import add_experts, versions
from ...checkpoint.facts import Facts
from ...checkpoint.records import ExpansionRecord, StageRecord
from ...checkpoint.source import load_expanded_config, resolve_checkpoint
from ...checkpoint.stored import built_whole
from ...checkpoint.writer import check_output
from ...core.errors import InputError, named_as
from ...core.languages import check_language_code, same_language
from ...core.schema import Count, Positive, Whole, checked
from ...core.scratch import scratch_folder, sibling
from ...data.sources import LanguageText
from ...data.stream_reader import sample
from ...evaluation.perplexity import evaluate_model
from ...inference.models import load_for_inference
from ...trainers.freezing import Trained
from ..config import BlockSize, StageConfig
from ..distributed import launched
from ..keywords import setting
from ..run import check_frozen, train_stage
from ..streaming import is_streamed
from ..trainer import StageTrainer


@dataclass
class AdaptConfig(StageConfig):
    """DMoE's adaptation to a new language (section 3.3): `L = L_CLM`."""

    key = "adapt"
    name = "adapt"
    title = "Adaptation"
    result_name = "adapted"
    families = ("dmoe",)
    trains = Trained(experts="last", last_router_row=True)

    block_size: BlockSize = setting(2048, "tokens in a block")
    learning_rate: Positive = setting(2e-5, "highest learning rate")
    tokens_per_language: Count | None = setting(None, "tokens of the language to train on; all of its text by default")
    sample_tokens: Annotated[Whole, Field(ge=2)] = setting(
        100_000, "tokens of its text with which the expert to copy is chosen"
    )

    @classmethod
    def language_classes(cls, model_config: Any, languages: Any) -> None:
        """No loss needs them."""


class AdaptTrainer(StageTrainer):
    """DMoE's adaptation: trains the newest expert of each layer and its row of the router on one language. All other
    weights stay, bit for bit."""

    stage = AdaptConfig


@dataclass(frozen=True)
class Adaptation:
    """Result of `adapt_language`."""

    perplexity: list[float]  # of the new language's sample through each expert alone
    nearest: int  # the copied expert, which has the lowest perplexity
    expert: int  # the new expert's number
    record: StageRecord  # the stage's record in the history
    frozen: int  # number of tensors found byte-identical; all rows of the routers but the new one are too


@checked
def adapt_language(
    model: str | os.PathLike,
    out: str | os.PathLike,
    source: LanguageText,
    config: AdaptConfig | None = None,
    seed: int | None = None,
    overwrite: bool = False,
    allow_lost_text: bool = False,
) -> Adaptation:
    """Adds a language to a DMoE checkpoint, leaving all its other weights unchanged byte for byte.

    In each expanded layer the expert through which the language's text has the lowest perplexity is copied with its
    row of the router; the copies and their rows train on the language's text. Further languages can follow.

    Args:
        seed: random seed; by default the configuration's.
        allow_lost_text: train on text of which the tokenizer loses more than 2 %, too.

    Raises:
        InputError: it is no DMoE checkpoint, has the language already, or takes fewer positions than `block_size`.
    """
    config = config or AdaptConfig()
    seed = config.seed if seed is None else seed
    folder = resolve_checkpoint(model)
    out = check_output(out, overwrite, folder)
    expanded = load_expanded_config(folder)
    config.check(expanded, None)
    groups, language = Facts(expanded).groups, check_language_code(source.language)
    for number, group in enumerate(groups):
        if any(same_language(language, own) for own in group):
            raise InputError(f"{folder}: has {language!r} already (expert {number}: {', '.join(group)}).")
    state = launched()
    perplexities = expert_perplexities(folder, source, config, seed) if state.is_main_process else []
    perplexities, place = broadcast_object_list([perplexities, sibling(out, "grown")])
    nearest = min(range(len(perplexities)), key=perplexities.__getitem__)
    with scratch_folder(place, state.is_main_process) as scratch, named_as(place / "model", out):
        grown = scratch / "model"
        if state.is_main_process:
            counts = Facts(expanded).counts
            record = ExpansionRecord(
                method="dmoe-adapt", base_model=Facts(expanded).history.last.base_model, base_revision=None,
                old_languages=[*Facts(expanded).group_of], new_languages=[language], copied_expert=nearest,
                experts_per_layer=[count + (count > 1) for count in counts], seed=seed, versions=versions(),
            )  # fmt: skip
            add_experts(
                folder, grown, {layer: [nearest] for layer, count in enumerate(counts) if count > 1}, record,
                copy_router_rows=True, config_changes={"language_groups": [*groups, [language]]}, overwrite=True,
            )  # fmt: skip
        state.wait_for_everyone()
        trained = train_stage(grown, out, {language: source}, config, seed, overwrite, allow_lost_text)
        frozen = check_frozen(grown, out, config)
        state.wait_for_everyone()
    return Adaptation(perplexities, nearest, len(groups), trained, frozen)


def expert_perplexities(folder: Path, source: LanguageText, config: AdaptConfig, seed: int) -> list[float]:
    """The perplexity of a sample of the text through each expert alone (hard routing, section 3.3)."""
    with built_whole():
        network, tokenizer = load_for_inference(folder)
    language, perplexities = source.language, []
    if is_streamed(config, {language: source}, network.config):
        texts = sample(source, config.on_bad_shard, seed)
    else:
        texts = source.load().shuffle(seed=seed)["text"]
    for expert in range(len(Facts(network.config).groups)):
        with network.use_expert(expert):
            score = evaluate_model(
                network, tokenizer, {language: texts}, config.block_size, max_tokens=config.sample_tokens
            )
        perplexities.append(score[language].perplexity)
    return perplexities

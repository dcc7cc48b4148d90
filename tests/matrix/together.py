"""What does not go together: the features' own tables, in one, and as the table of docs/choose.md."""

from importlib import import_module

from hf_moe_expand.modeling import DMoEConfig
from hf_moe_expand.modeling.parts import PARTS

# The modules with a table `REFUSED`: why a feature does not stand beside another one, or is refused by an operation.
ROOMS = (
    "planning.plan",
    "checkpoint.new_experts", "checkpoint.gate", "checkpoint.join", "checkpoint.merge", "checkpoint.export",
    "checkpoint.peft", "trainers.sft", "stages.config", "stages.mixing", "stages.kinds.review",
)  # fmt: skip
_FEATURES = {"encoder_decoder": "encoder-decoder", "cmr": "conditional", "gate": "gated"}  # of parts
WORDS = {
    "adapters": "adapters", "added": "added experts", "average": "the average of checkpoints",
    "average-with-the-base": "averaged experts", "classifiers": "classifiers", "conditional": "conditional routing",
    "copies": "copies of the FFN", "distillation": "self-distillation", "dmoe": "a DMoE",
    "encoder-decoder": "an encoder-decoder",
    "exclusive": "exclusive experts", "export-language": "`export --language`", "export-to-peft": "`export --peft`",
    "gated": "the gate", "grown": "growth", "joined": "packs", "lora": "LoRA experts",
    "masking": "masking", "mixture": "a mixture as base", "random": "`expert_init: random`", "review": "a review",
    "routed": "experts that are not exclusive",
    "several": "several experts of one language", "sft-on-top": "`MoESFTTrainer`", "told": "a told language",
    "tuned": "a fine-tune",
}  # fmt: skip


def refusals() -> dict[tuple[str, str], str]:
    """Why two features, or a feature and an operation, do not go together, as their code says it."""
    found: dict[tuple[str, str], str] = {}
    for room in ROOMS:
        found |= import_module(f"hf_moe_expand.{room}").REFUSED
    found["dmoe", "told"] = DMoEConfig.not_told
    for part in PARTS.values():
        own = _FEATURES.get(part.name, part.name)
        # Kinds of experts are a choice of one.
        others = {other: why for other, why in part.not_beside.items() if not part.kind or not PARTS[other].kind}
        beside = {(_FEATURES.get(other, other), own): why for other, why in others.items()}
        found |= {pair: why for pair, why in beside.items() if pair[::-1] not in found}
        found |= {(own, "told"): part.not_told} if part.not_told else {}
    return found


def table() -> str:
    """The table, in Markdown: features that are refused for one reason share a row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for (one, other), why in refusals().items():
        rows.setdefault((WORDS[other], why), []).append(WORDS[one])
    lines = [f"| {', '.join(ones)} | {other} | {why} |" for (other, why), ones in rows.items()]
    return "\n".join(["| | not with | since |", "| --- | --- | --- |", *lines])

"""Expansion: a dense model's FFNs become experts, those of a checkpoint, streamed, or of a loaded model."""

import os
import re
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from transformers import PreTrainedConfig, PreTrainedModel

from .. import __version__
from ..core.errors import InputError
from ..core.schema import checked, shown_value
from ..modeling import (
    DMoEConfig,
    LayerMoEConfig,
    decoder_ffns,
    language_models,
    stack_sizes,
)
from ..planning.plan import Plan
from .compare import base_hashes
from .facts import ExpertKind
from .gate import Gate
from .new_experts import chosen_kind, new_weight, random_weight
from .operation_settings import NewExperts
from .promises import check_architecture
from .reader import TORCH_DTYPES
from .records import ExpansionRecord, History
from .source import (
    check_base_config,
    load_base_config,
    name_and_commit,
    resolve_checkpoint,
)
from .stored import LoadedModel, Place, Source, StoredModel
from .table import Copy, Given, New, Rule, rewrite
from .writer import DEFAULT_SHARD_SIZE, check_output

_FEW = 5
_PART = re.compile(r"(model\.)?[^.]+")
_SNAPSHOT = re.compile(r"models--([^/\\]+)[/\\]snapshots[/\\]([0-9a-f]{40})[/\\]?$")


@dataclass(frozen=True)
class ExpansionReport:
    """Result of `expand_checkpoint`: parameters before and after, and tensors unknown to the backbone, left out."""

    out: Path
    base_parameters: int
    parameters: int
    left_out: list[str]

    @property
    def left_out_parts(self) -> list[str]:
        """What was left out, in words: a few tensors by name, many by the part of the model that they belong to."""
        if len(self.left_out) <= _FEW:
            return self.left_out
        parts = Counter(_PART.match(name)[0] for name in self.left_out)  # type: ignore[index]
        return [f"{part} ({count} tensors)" for part, count in parts.items()]


@partial(checked, keywords=NewExperts)
def expand_checkpoint(
    base: str | os.PathLike,
    out: str | os.PathLike,
    plan: Plan,
    *,
    seed: int = 0,
    revision: str | None = None,
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
    gate: Gate | None = None,
    **experts: Any,
) -> ExpansionReport:
    """Writes the expanded checkpoint of a dense one.

    Args:
        base: folder or hub id of the dense checkpoint (safetensors).
        out: folder to write; appears whole or not at all.
        plan: experts and classifiers of each layer.
        experts: `expert_init`, `expert_kind` and the other settings of the new experts (`NewExperts`). All but
            `random` ones start as the dense model: copies, or updates and added FFNs whose output is zero.
        seed: random seed of the routers, of random experts and of updates.
        revision: revision of a hub id.
        max_shard_size: size of the largest weight file.
        overwrite: replace `out` if it exists.
        gate: the language gate of this base (`gating.gate_from_file`), for the plan's languages.

    Raises:
        InputError: the base cannot be expanded, the plan is for another model or gives experts to layers below the
            gate, or `out` cannot be written.
    """
    folder = resolve_checkpoint(base, revision)
    check_output(out, overwrite, folder)
    dense_config = load_base_config(folder)
    check_architecture(dense_config, base)
    dense, named = StoredModel(folder, dense_config), name_and_commit(base, folder)
    written: dict[str, Any] = {"out": out, "max_shard_size": max_shard_size, "overwrite": overwrite}
    _, record = _expanded(dense, base, plan, NewExperts(**experts), named, seed, gate, **written)
    return ExpansionReport(Path(out), record.base_parameters or 0, record.parameters or 0, dense.unknown)


@partial(checked, keywords=NewExperts)
def expand_model(dense: Any, plan: Plan, *, seed: int = 0, gate: Gate | None = None, **experts: Any) -> Any:
    """Returns the expanded model of a dense one, equal to that of `expand_checkpoint` and `from_pretrained`.

    All weights but new experts and routers share the dense model's memory: training one model changes the other. New
    weights are on the device and in the type of the layer's FFN. `save_pretrained`, with the tokenizer saved beside
    it, writes a checkpoint that every command takes.

    Args:
        dense: a `...ForCausalLM` or `...ForConditionalGeneration` of a supported backbone, on one device.
        plan, experts, seed, gate: see `expand_checkpoint`.

    Returns:
        A `LayerMoEForCausalLM`, a `LayerMoEForSeq2SeqLM` if `dense` is an encoder-decoder, or a `DMoEForCausalLM` if
        the plan has language groups.

    Raises:
        InputError: the model cannot be expanded, or the plan is for another model.
    """
    _check_dense(dense)
    source, named = LoadedModel(dense), base_of(dense)
    if source.unknown:
        raise InputError(
            f"{type(dense).__name__}: has tensors that the backbone does not know ({', '.join(source.unknown[:3])}); "
            "merge an adapter into the model before expanding it."
        )
    model, _ = _expanded(source, named[0], plan, NewExperts(**experts), named, seed, gate)
    return model


def _expanded(
    dense: Source, name: Any, plan: Plan, experts: NewExperts, base: tuple[str, str | None], seed: int,
    gate: Gate | None, **written: Any,
) -> tuple[Any, ExpansionRecord]:  # fmt: skip
    """The folder of the expanded model of a checkpoint, or that of a loaded model; and its record.

    Args:
        name: what messages call the dense model.
        base: its name and commit, for the record.
    """
    check_dense_plan(plan, dense.config, name)
    kind = chosen_kind(dense.network, plan, experts)
    config = planned_config(dense.config, plan, kind, gate, conditional_routing=experts.conditional_routing)
    record = planned_record(
        plan, old_languages=plan.old, base_model=base[0], base_revision=base[1], seed=seed,
        expert_init=experts.expert_init, base_parameters=sum(dense[key].numel for key in dense.tensors),
        language_gate=config.language_gate, base_hashes=base_hashes(dense),
    )  # fmt: skip
    rule = expansion_rule(dense, experts.expert_init, seed, gate)
    made = rewrite([dense], config, rule, record=History([record]), title="expand", **written)
    return made, History.of(config).last


def expansion_rule(dense: Source, expert_init: str, seed: int, gate: Gate | None = None) -> Rule:
    """Of what the tensors of an expanded model are made, right after its expansion: of copies of the dense model's, and
    new ones; `gate` has the rows of the language gate."""
    ffns, network = decoder_ffns(dense.network), dense.network

    def rule(place: Place) -> Copy | New | Given:
        if place.dense is None:
            # A router and the like have the type in which the layer's FFN is stored.
            ffn = ffns[place.layer]
            dtype = dense[f"{ffn.name}.{next(inner for inner, _ in ffn.module.named_parameters())}"].dtype
            if gate is not None and (place.layer, place.inner) in gate.rows:
                return Given(gate.rows[place.layer, place.inner].to(TORCH_DTYPES[dtype]))
            return New(partial(new_weight, place.inner, place.shape, (seed, place.layer)), dtype)
        if expert_init == "random" and place.expert:
            ffn = ffns[place.layer]
            rest = place.dense.removeprefix(f"{ffn.name}.")
            draw = partial(random_weight, network, ffn.module, rest, (seed, place.layer, place.expert))
            return New(draw, dense[place.dense].dtype)
        return Copy(place.dense)

    return rule


def check_layers(plan: Plan, config: PreTrainedConfig, name: str | os.PathLike) -> None:
    """Refuses a plan for another number of layers, or of an encoder's layers."""
    sizes = stack_sizes(config)
    needed, own = (sum(sizes.values()), sizes.get("encoder", 0)), (len(plan.experts_per_layer), plan.encoder_layers)
    if own != needed:
        made, there = (f"{count} layers" + f", {of} of them an encoder's" * (of > 0) for count, of in (own, needed))
        raise InputError(f"The plan is for {made}, but {name} has {there}: make a plan for this model.")


def check_dense_plan(plan: Plan, dense_config: PreTrainedConfig, name: str | os.PathLike) -> None:
    """Refuses a plan that does not expand this dense model; messages call the model `name`."""
    plan.checked()
    if plan.grows_from:
        raise InputError("The plan was made to grow an expanded checkpoint (--from): use `grow`.")
    check_layers(plan, dense_config, name)


def planned_config(
    dense_config: PreTrainedConfig, plan: Plan, kind: ExpertKind | None = None, gate: Gate | None = None, **fields: Any
) -> Any:
    """The configuration of a dense model expanded by `plan` with experts of a kind, FFNs by default, and a gate;
    `fields` are further ones of `ExpandedConfig`."""
    config_class: Any = DMoEConfig if plan.groups else LayerMoEConfig
    kind = kind or ExpertKind()
    try:
        config = config_class.from_dense(
            dense_config,
            num_experts_per_layer=plan.experts_per_layer,
            classifier_layers=plan.classifier_layers,
            router_top_k=plan.top_k,
            exclusive_experts=plan.exclusive,
            **kind.fields,
            **({"language_groups": plan.groups} if plan.groups else {}),
            **fields,
        )
    except ValueError as error:  # of code that checkpoints carry, which has no InputError
        raise InputError(str(error)) from None
    if gate is not None:
        check_plan_of_gate(plan)
        gate.set_in(config)
    return config


def check_plan_of_gate(plan: Plan) -> None:
    """Refuses a plan with what a gate takes the place of."""
    if plan.groups:
        raise InputError("A gate sends text home to a frozen base, but DMoE trains the base: leave the gate out.")
    if plan.classifier_layers:
        raise InputError(
            f"The gate takes the place of classifiers, but the plan has some, in layers {plan.classifiers_in_words}: "
            "plan without classifiers."
        )


def base_of(dense: PreTrainedModel) -> tuple[str, str | None]:
    """A loaded model's name and commit on the hub; the folder's name and None if it came from a folder; its class's
    name and None if it was made from a configuration."""
    name = str(dense.config._name_or_path or "")
    if not name:
        return type(dense).__name__, None
    if snapshot := _SNAPSHOT.search(name):  # a folder of the hub's cache
        return snapshot.group(1).replace("--", "/"), snapshot.group(2)
    path = Path(name)
    if path.is_dir() or path.is_absolute() or name.startswith((".", "~")) or len(path.parts) > 2:
        return path.resolve().name, None
    # Since 5.23 transformers does not keep the commit: it is that of the only one in the hub's cache.
    return name, getattr(dense.config, "_commit_hash", None) or _only_commit(name)


def _only_commit(name: str) -> str | None:
    try:
        file = try_to_load_from_cache(name, "config.json")
    except ValueError:  # no hub id
        return None
    folder = Path(file).parent if isinstance(file, str) else None
    return folder.name if folder is not None and len(list(folder.parent.iterdir())) == 1 else None


def _check_dense(dense: Any) -> None:
    name = type(dense).__name__
    if not isinstance(dense, PreTrainedModel):
        raise InputError(
            f"expand_model: dense is {shown_value(dense)}: not a model of transformers; for a PEFT model, give its "
            "`merge_and_unload()`."
        )
    check_base_config(dense.config, name)
    check_architecture(dense.config, name)
    wanted: Any = language_models(dense.config)[type(dense.config)]
    if not isinstance(dense, wanted):
        raise InputError(f"{name}: only a model with its language-model head is expanded; load a {wanted.__name__}.")


def planned_record(plan: Plan, **facts: Any) -> ExpansionRecord:
    """The record of an expansion by `plan`; `facts` are the fields that the plan does not decide."""
    grouped = [code for group in plan.groups for code in group]
    return ExpansionRecord(
        method=plan.method,
        new_languages=plan.new or [code for code in grouped if code not in plan.old],
        experts_per_layer=plan.experts_per_layer,
        classifier_layers=plan.classifier_layers,
        exclusive=plan.exclusive or None,
        versions=versions(),
        **facts,
    )


def versions() -> dict[str, str]:
    """The versions of the software that writes a checkpoint."""
    return {"hf_moe_expand": __version__, "transformers": transformers.__version__, "torch": torch.__version__}

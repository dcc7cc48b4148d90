"""The verbs that make a checkpoint from others without training."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from ..analysis.settings import AnalysisSettings, GateSettings
from ..checkpoint.arguments import (
    AverageSettings,
    Expanded,
    ExpandSettings,
    GraftSettings,
    Model,
    NewFolder,
    OldCodes,
    Places,
    PlanFile,
    Texts,
    TunedSettings,
    WriteSettings,
    codes,
    each,
    expanded,
)
from ..core.errors import InputError, library_errors_at
from ..core.printing import print_table
from ..core.verbs import Given, Group, Keys, Kind, belongs, flag, without_effect
from ..evaluation.scoring_settings import EvaluationSettings

_SCORES = tuple(key for key in EvaluationSettings.model_fields if key != "questions")
_LIKE_BASE = ("base", "out", *WriteSettings.model_fields)


def expand(
    base: Model,
    out: NewFolder,
    *,
    plan: PlanFile | None = None,
    settings: Annotated[ExpandSettings, Keys(without=("copy_from", "max_shard_size"))],
    gate: Path | None = None,
    tuned: Sequence[str] = (),
    how: TunedSettings,
    dtype: Literal["float32", "float16", "bfloat16"] | None = None,
    old: OldCodes = (),
    data: Texts | None = None,
    scores: Annotated[EvaluationSettings, Keys(without=("questions",))],
    branches: Sequence[str] = (),
    blocks: int | None = None,
    seed: int = 0,
    revision: str | None = None,
    written: WriteSettings,
    given: Given,
) -> None:
    """Write the expanded checkpoint of a dense one, or of a mixture of experts (--expert-kind added). Needs little
    memory, whatever the model's size.

    With --tuned, fine-tunes of the base, whole models or adapters of PEFT, become its languages, without a plan or any
    training, for text that is told its language or, after `gates`, recognised; --data then prints bits per byte of the
    base, of each language alone, of text that is told its language, and, with --gate, of text that nobody told. With
    --branches, dense models are the experts, and all other weights are averaged (Branch-Train-Mix); then `train joint`.
    With --blocks, the model stays dense: copied blocks are inserted that at first have no effect (LLaMA-Pro); then
    `train dense` with `method: new-blocks`.

    Example: hf-moe-expand expand Qwen/Qwen2.5-0.5B qwen-el --plan plan.json

    Example: hf-moe-expand expand Qwen/Qwen3-30B-A3B moe-el --plan plan.json --expert-kind added --expert-width 512

    Example: hf-moe-expand expand Qwen/Qwen2.5-0.5B qwen-el-hu --tuned el=me/qwen-el --tuned hu=lora-hu

    Args:
        plan: plan.json of `plan`; with --branches, of `plan dmoe`.
        gate: file of `gates BASE`: the language gate, for the plan's or the fine-tunes' languages.
        tuned: LANGUAGE=MODEL, a folder or hub id of a fine-tune of BASE, a whole model or a LoRA of PEFT; several
            languages of one by comma; repeat.
        dtype: with --tuned: the base's type, to which a fine-tune in another one is converted.
        old: with --tuned: codes of the old languages, e.g. en,es,zh.
        data: with --tuned: LANGUAGE=FILE of any language, to score; repeat.
        branches: dense model beside BASE, a fine-tune of the same base for the next group of languages; repeat.
        blocks: number of blocks to insert.
    """
    _check_mode(given, plan)
    if tuned:
        made = {"gate": gate, "dtype": dtype, "revision": revision, **dict(how), **dict(written)}
        _expand_tuned(base, tuned, out, old, data or {}, scores, **made)
    elif blocks is not None:
        from ..baselines.depth import expand_depth

        print(f"wrote {out}: layers {', '.join(map(str, expand_depth(base, out, blocks, **dict(written))))} are new")
    elif branches:
        from ..baselines.branches import expand_branches

        expand_branches([base, *branches], out, plan, seed=seed, **dict(written))  # type: ignore[arg-type]
        print(f"wrote {out}")
    else:
        options = {"revision": revision, "seed": seed, **dict(settings.experts), **dict(written)}
        _expand_by_plan(base, out, plan, gate, options)


def _check_mode(given: Given, plan: Any) -> None:
    of_tuned = ("old", "data", "dtype", *TunedSettings.model_fields)
    beside = {"tuned": ("gate", "revision", *of_tuned, *_SCORES), "blocks": (), "branches": ("plan", "seed")}
    chosen = [mode for mode in ("tuned", "branches", "blocks") if mode in given]
    if len(chosen) > 1:
        raise InputError(f"--{chosen[0]} and --{chosen[1]}: give only one of them.")
    belongs(given, "data", *_SCORES)
    if chosen != ["tuned"]:
        belongs(given, "tuned", *of_tuned)
    if plan is None and chosen not in (["tuned"], ["blocks"]):
        raise InputError("Give --plan (plan.json of `plan`), --tuned or --blocks: what the model gets.")
    for mode in chosen:
        without_effect(given, f"--{mode}", mode, *_LIKE_BASE, *beside[mode])


def _expand_by_plan(base: str, out: Path, plan: Any, gate: Path | None, options: dict[str, Any]) -> None:
    from ..checkpoint.expand import expand_checkpoint

    report = expand_checkpoint(base, out, plan, gate=_gate(gate, base, plan.new, options["revision"]), **options)
    if report.left_out:
        count = len(report.left_out)
        print(f"left out, since the backbone does not use them: {count} tensors, such as {report.left_out[0]}")
    print(f"wrote {out}: {report.base_parameters:,} -> {report.parameters:,} parameters")


def _gate(file: Path | None, base: str, languages: Any, revision: str | None) -> Any:
    """The gate of a file, whose report is printed; None without a file."""
    if file is None:
        return None
    from ..analysis.gating import gate_from_file

    gate, report = gate_from_file(file, base, languages, revision)
    print("\n".join(report.lines()))
    return gate


def _by_language(arguments: Sequence[str]) -> dict[str, str]:
    """The fine-tune of each language, or of several that commas join."""
    models: dict[str, str] = {}
    for argument in arguments:
        languages, _, place = argument.partition("=")
        if not place or not languages:
            raise InputError(f"--tuned {argument}: give LANGUAGE=MODEL, as in --tuned el=qwen-el.")
        if languages in models or place in models.values():
            raise InputError(f"--tuned {argument}: the language or the model is given twice; join languages by commas.")
        models[languages] = place
    return models


def _expand_tuned(
    base: str, tuned: Sequence[str], out: Path, old: Any, data: dict[str, Any], scores: Any, gate: Path | None = None,
    **others: Any,
) -> None:  # fmt: skip
    from ..checkpoint.tuned import expand_tuned

    models = _by_language(tuned)
    if gate is not None:
        classes = {code.strip(): number for number, codes in enumerate(models, 1) for code in codes.split(",")}
        others["gate"] = _gate(gate, base, classes, others["revision"])
    report = expand_tuned(base, models, out, old, **others)
    print("\n".join([*report.warnings, f"wrote {out}: {report.base_parameters:,} -> {report.parameters:,} parameters"]))
    if data:
        from ..evaluation.ways import score_ways

        print("bits per byte")
        print_table(*score_ways(out, data, scores))
    if gate is None:
        print(f"no gate            text that is told no language gets the base, until you run `gates {out} OUT`")


def grow(
    model: Expanded,
    out: NewFolder,
    *,
    plan: PlanFile | None = None,
    tuned: Sequence[str] = (),
    how: TunedSettings,
    settings: AnalysisSettings,
    copy_from: str = "0",
    data: Texts | None = None,
    seed: int = 0,
    written: WriteSettings,
    given: Given,
) -> None:
    """Expand an expanded model further, for more languages: adds the plan's new experts and their rows of the routers.

    With --copy-from nearest, --tokens of each language are measured, in blocks of --block-size. With --tuned,
    fine-tunes of the base become further languages of a model that `expand --tuned` made; nothing trains.

    Experts and router rows that exist stay byte for byte. Classifiers follow the plan: a layer that it names keeps its
    classifier, with one more class, or gets one; a layer that it does not name loses its classifier. Dense layers stay
    dense. The checkpoint then needs `train post-pretrain` on the new languages and `train review` on all.

    Example: hf-moe-expand grow qwen-el qwen-el-hi --plan plan2.json

    Example: hf-moe-expand grow qwen-el qwen-el-hu --tuned hu=me/qwen-hu

    Args:
        plan: plan.json of `plan ... --from MODEL`.
        tuned: LANGUAGE=MODEL, a fine-tune of the model's dense base; several languages of one by comma; repeat.
        copy_from: expert that new experts copy: a number, or nearest: the one that --data uses most.
        data: LANGUAGE=FILE of a new language, for nearest; repeat.
    """
    if tuned:
        own = (*WriteSettings.model_fields, *TunedSettings.model_fields)
        without_effect(given, "--tuned", "tuned", "model", "out", *own)
        _expand_tuned(model, tuned, out, (), {}, None, **dict(how), **dict(written))
        return
    belongs(given, "tuned", *TunedSettings.model_fields)
    if plan is None:
        raise InputError("Give --plan (plan.json of `plan ... --from MODEL`) or --tuned: what the model gets.")
    from ..checkpoint.expand import check_growth, grow_checkpoint
    from ..checkpoint.facts import Facts
    from ..checkpoint.source import resolve_checkpoint
    from ..checkpoint.writer import check_output
    from ..modeling import layer_names

    if copy_from == "nearest":
        check_output(out, written.overwrite, resolve_checkpoint(model, weights=False))
    before = Facts(check_growth(model, plan))
    if copy_from == "nearest":
        origin = _nearest_experts(model, plan.new, data or {}, seed, settings)
    else:
        origin = dict.fromkeys(range(len(plan.experts_per_layer)), _number(copy_from, given))
    grow_checkpoint(model, out, plan, copy_from=origin, seed=seed, **dict(written))
    if before.gate is not None:
        print("the language gate: removed; fit it again after stage 1 (`hf-moe-expand gates`)")
    names = layer_names(before.config)
    if lost := [names[layer] for layer in before.classifiers if layer not in plan.classifier_layers]:
        print(f"classifiers of layers {', '.join(lost)}: removed; the plan names none for these layers")
    print(f"wrote {out}")


def _number(copy_from: str, given: Given) -> int:
    if idle := sorted(given & {"data", *AnalysisSettings.model_fields}):
        raise InputError(f"{flag(idle[0])} belongs to --copy-from nearest, which is not given.")
    with library_errors_at("--copy-from", ValueError):
        return int(copy_from)


def _nearest_experts(
    model: str, new: list[str], sources: dict[str, Any], seed: int, settings: AnalysisSettings
) -> dict[int, int]:
    """Finds and prints, for each layer, the expert to which the new languages' text is routed most."""
    if {*sources} != {*new}:
        raise InputError(f"--copy-from nearest measures text in the plan's new languages: give {', '.join(new)} alone.")
    from ..analysis.routers import nearest_experts
    from ..data.pairs import texts_for
    from ..inference.models import load_for_inference
    from ..modeling import layer_names

    network, tokenizer = load_for_inference(model)
    texts = texts_for(network.config, sources, seed)
    nearest = nearest_experts(network, tokenizer, texts, **settings.model_dump())
    names = layer_names(network.config)
    print("nearest experts: " + ", ".join(f"layer {names[layer]}: {expert}" for layer, expert in nearest.items()))
    return nearest


def join(out: NewFolder, packs: Annotated[list[str], Kind(metavar="PACK...")], *, written: WriteSettings) -> None:
    """Join language packs, expansions of one frozen base that were made apart, into one model without training.

    A pack's experts are exclusive. The model has those of all packs, byte for byte, and no gate: fit one with `gates`.

    A pack has the name of its run's folder (`run`), else of its own; the card uses it.

    Example: hf-moe-expand join qwen-el-hu me/qwen-el qwen-hu

    Args:
        packs: expanded checkpoints of one base, whole or with the added tensors; NAME=PACK gives a name.
    """
    from ..checkpoint.source import pack_and_name

    for pack in packs:
        expanded(pack_and_name(pack)[0], {})
    from ..checkpoint.join import join_expansions

    report = join_expansions(packs, out, **dict(written))
    print("\n".join(report.lines()))
    print(f"no gate            text that is told no language gets the last pack, until you run `gates {out} OUT`")


def graft(model: Model, out: NewFolder, *, base: Model, settings: GraftSettings, written: WriteSettings) -> None:
    """Add the change of a fine-tune (instruct - base) to an expanded model, to every expert too (DeltaMoE).

    Example: hf-moe-expand graft qwen-el-1 qwen-el-chat --base Qwen/Qwen2.5-0.5B --instruct Qwen/Qwen2.5-0.5B-Instruct

    Args:
        base: the dense model from which both were made.
    """
    _add_delta(True, model, out, base, settings, written)


def _add_delta(
    to_experts: bool, model: str, out: Path, base: str, settings: GraftSettings, written: WriteSettings
) -> None:
    from ..checkpoint.merge import graft_delta
    from ..checkpoint.source import load_config, local_checkpoint, resolve_checkpoint
    from ..modeling import ExpandedConfig

    local_checkpoint(settings.instruct)
    folder = resolve_checkpoint(model, weights=False)
    if to_experts != isinstance(load_config(folder), ExpandedConfig):
        kind, other = ("a dense", "merge delta") if to_experts else ("an expanded", "graft")
        raise InputError(f"{folder}: is {kind} checkpoint; use `{other}`.")
    print("\n".join(graft_delta(model, out, base, **dict(settings), **dict(written)).lines()))


merge = Group("Merge checkpoints tensor by tensor.")


@merge.verb("delta")
def merge_delta_(model: Model, out: NewFolder, *, base: Model, settings: GraftSettings, written: WriteSettings) -> None:
    """Add the change of a fine-tune (instruct - base) to a dense model (Dense-FT-Delta) or to LLaMA-Pro's old blocks.

    Example: hf-moe-expand merge delta qwen-ft qwen-chat --base Qwen/Qwen2.5-0.5B --instruct Qwen/Qwen2.5-0.5B-Instruct

    Args:
        base: the dense model from which both were made.
    """
    _add_delta(False, model, out, base, settings, written)


@merge.verb("average")
def merge_average(
    models: Annotated[list[str], Kind(read=each, metavar="MODELS...")],
    *,
    out: NewFolder,
    weight: Sequence[float] = (),
    written: WriteSettings,
) -> None:
    """Average checkpoints (Dense-FT-Avg); a dense one joins the average of each expert (MoE-CPT-Avg).

    Of an expanded checkpoint alone, average each expert of its last expansion with the FFN from which it was copied;
    all else stays byte for byte. Configuration and tokenizer are those of the first checkpoint.

    Example: hf-moe-expand merge average qwen-el-2 --weight 0.8 --out qwen-el

    Example: hf-moe-expand merge average qwen-chat-ft Qwen/Qwen2.5-0.5B-Instruct --weight 0.5 --out qwen-average

    Args:
        models: two or more checkpoints; dense ones may follow an expanded first one. Or an expanded one alone.
        weight: weight of the first of two checkpoints, or one for each, with the sum 1; equal by default. Of one
            checkpoint, weight of its new experts; 0.8 by default.
    """
    from ..checkpoint.merge import average_checkpoints, average_experts

    if len(models) == 1:
        own, *more = weight or [AverageSettings().weight]
        if more:
            raise InputError("--weight: the experts of one checkpoint have one weight; give it once.")
        average_experts(models[0], out, own, **dict(written))
    else:
        weights = [weight[0], 1 - weight[0]] if len(weight) == 1 and len(models) == 2 else weight
        average_checkpoints(models, out, weights or None, **dict(written))
    print(f"wrote {out}")


def export(
    model: Expanded,
    out: NewFolder,
    *,
    expert: int | None = None,
    language: str | None = None,
    peft: bool = False,
    written: WriteSettings,
    given: Given,
) -> None:
    """Write the dense model of one language or of one expert, which every server takes; or adapters of PEFT.

    Example: hf-moe-expand export qwen-el-1 qwen-greek --language el

    Example: hf-moe-expand export qwen-el-1 adapter-el --peft --language el

    Args:
        expert: write the dense model with this expert as its FFNs.
        language: write the dense model of a language: the base's, or its exclusive experts'.
        peft: write the adapter of a language, or a folder for each, in PEFT's format.
    """
    if peft:
        without_effect(given, "--peft", "model", "out", "language", "peft", "overwrite")
        from ..checkpoint.peft import export_peft

        print("\n".join(export_peft(model, out, language=language, overwrite=written.overwrite).lines()))
        return
    from ..checkpoint.export import export_dense

    print(f"wrote {out}: {export_dense(model, out, expert=expert, language=language, **dict(written))}")


def gates(
    model: Model,
    folder: Annotated[Path, Kind(metavar="OUT")] | None = None,
    *,
    data: Places,
    settings: Annotated[GateSettings, Keys(without=("bound", "window"))],
    out: Path | None = None,
    new: str | None = None,
    anchors: Places | None = None,
    seed: int = 0,
    written: WriteSettings,
    given: Given,
) -> None:
    """Fit the gate: recognised new languages take the new experts, all other text goes home. Nothing is trained.

    Give text of every new language, and of the base's own as far as you have some. Anchors show the gate what is not
    new: some twenty sentences in each of many languages, which come with the package.

    Example: hf-moe-expand gates qwen-el-1 qwen-el-2 --data en=en.jsonl --data el=el.jsonl

    Example: hf-moe-expand gates Qwen/Qwen2.5-0.5B --data en=en.jsonl --data el=el.jsonl --new el --out gate.safetensors

    Args:
        folder: folder to write: the expanded model with its gate.
        out: of a dense base: file to write, for `expand --gate`.
        new: of a dense base: the languages of --data that will be new, by comma.
        anchors: LANGUAGE=FILE of a language that is not new; repeat. By default the package's own sentences.
    """
    if (out is None) == (folder is None):
        raise InputError("Give OUT, the folder of an expanded model's gate, or --out FILE, for a dense base.")
    if folder is not None:
        without_effect(given, "OUT", *(given - {"new"}))
    elif "max_shard_size" in given:
        without_effect(given, "--out", *(given - {"max_shard_size"}))
    known = None if anchors is None else documents_of(anchors)
    texts = documents_of(data, seed)
    from ..analysis.gating import fit_base_gate, fit_gates

    if out is not None:
        report = fit_base_gate(model, out, texts, codes(new or ""), known, settings, overwrite=written.overwrite)
    else:
        report = fit_gates(model, folder, texts, known, settings, seed=seed, **dict(written))
    print("\n".join(report.lines()))


def documents_of(sources: dict[str, Any], seed: int | None = None) -> dict[str, Any]:
    """The documents of texts, by language; with a seed shuffled, as a recipe's are."""
    loaded = {code: source.load() for code, source in sources.items()}
    return {code: (rows if seed is None else rows.shuffle(seed=seed))["text"] for code, rows in loaded.items()}

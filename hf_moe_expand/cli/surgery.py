"""Verbs that make a checkpoint from others, compare checkpoints and inspect them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ..analysis.settings import AnalysisSettings
from ..checkpoint.settings import AverageSettings, ExpandSettings, GraftSettings
from ..core.disk import DEFAULT_SHARD_SIZE
from ..core.errors import InputError
from . import options as opt
from .common import check_checkpoints, print_table, text_sources


@opt.app.command()
@opt.with_settings("copy_from")
def expand(
    base: opt.Model,
    out: opt.OutFolder,
    plan: Annotated[Path, typer.Option(help="plan.json of `plan`.")],
    settings: ExpandSettings,
    gate: Annotated[
        Path | None, typer.Option(help="File of `gates BASE`: the language gate, for the plan's languages.")
    ] = None,
    seed: opt.Seed = 0,
    revision: opt.Revision = None,
    overwrite: opt.Overwrite = False,
) -> None:
    """Write the expanded checkpoint of a dense one, or of a mixture of experts (--expert-kind added). Needs little
    memory, whatever the model's size.

    Example: hf-moe-expand expand Qwen/Qwen2.5-0.5B qwen-el --plan plan.json

    Example: hf-moe-expand expand Qwen/Qwen3-30B-A3B moe-el --plan plan.json --expert-kind added --expert-width 512
    """
    from ..planning.plan import Plan

    check_checkpoints(base, revision=revision)
    made = Plan.load(plan)
    from ..checkpoint.expand import expand_checkpoint

    fitted = None
    if gate is not None:
        from ..analysis.gating import gate_from_file

        fitted, of_gate = gate_from_file(gate, base, made.new, revision)
        print("\n".join(of_gate.lines()))
    report = expand_checkpoint(
        base, out, made, **settings.experts.model_dump(), seed=seed, revision=revision,
        max_shard_size=settings.max_shard_size, overwrite=overwrite, gate=fitted,
    )  # fmt: skip
    if report.left_out:
        print(f"left out, since the backbone does not use them: {', '.join(report.left_out_parts)}")
    print(f"wrote {out}: {report.base_parameters:,} -> {report.parameters:,} parameters")


@opt.app.command()
@opt.with_settings()
def grow(
    model: opt.Model,
    out: opt.OutFolder,
    plan: Annotated[Path, typer.Option(help="plan.json of `plan ... --from MODEL`.")],
    settings: AnalysisSettings,
    copy_from: Annotated[
        str, typer.Option(help="Expert that new experts copy: a number, or nearest: the one that --data uses most.")
    ] = "0",
    data: Annotated[
        list[str] | None, typer.Option("--data", help="LANGUAGE=FILE of a new language, for nearest; repeat.")
    ] = None,
    seed: opt.Seed = 0,
    max_shard_size: opt.ShardSize = DEFAULT_SHARD_SIZE,
    overwrite: opt.Overwrite = False,
) -> None:
    """Expand an expanded model further, for more languages: adds the plan's new experts and their rows of the routers.

    With --copy-from nearest, --tokens of each language are measured, in blocks of --block-size.

    Experts and router rows that exist stay byte for byte. Classifiers follow the plan: a layer that it names keeps its
    classifier, with one more class, or gets one; a layer that it does not name loses its classifier. Dense layers stay
    dense. The checkpoint then needs `train post-pretrain` on the new languages and `train review` on all.

    Example: hf-moe-expand grow qwen-el qwen-el-hi --plan plan2.json
    """
    from ..planning.plan import Plan

    check_checkpoints(model, expanded=True)
    growth = Plan.load(plan)
    from ..checkpoint.expand import check_growth, classifier_changes, grow_checkpoint
    from ..checkpoint.source import resolve_checkpoint
    from ..checkpoint.writer import check_output

    if copy_from == "nearest":
        check_output(out, overwrite, resolve_checkpoint(model, weights=False))
        check_growth(model, growth)
        origin = _nearest_experts(model, growth.new, data or [], seed, settings)
    elif data or settings != AnalysisSettings():
        what = "--data belongs" if data else "--tokens, --block-size and the like belong"
        raise InputError(f"{what} to --copy-from nearest, which is not given.")
    elif not copy_from.isdecimal():
        raise InputError(f"--copy-from is {copy_from!r}: must be an expert's number or `nearest`.")
    else:
        origin = dict.fromkeys(range(len(growth.experts_per_layer)), int(copy_from))
    grow_checkpoint(model, out, growth, copy_from=origin, seed=seed, max_shard_size=max_shard_size, overwrite=overwrite)
    for sentence in classifier_changes(model, growth):
        print(sentence)
    print(f"wrote {out}")


def _nearest_experts(
    model: str, new: list[str], data: list[str], seed: int, settings: AnalysisSettings
) -> dict[int, int]:
    """Finds and prints, for each layer, the expert to which the new languages' text is routed most."""
    sources = text_sources(data, look=True)
    if unknown := [code for code in sources if code not in new]:
        raise InputError(f"--data: {', '.join(unknown)}: not a new language of the plan ({', '.join(new)}).")
    if missing := [f"--data {code}=FILE" for code in new if code not in sources]:
        raise InputError(f"--copy-from nearest measures text in the plan's new languages: give {' '.join(missing)}.")
    from ..analysis.routing import nearest_experts
    from ..data.pairs import texts_for
    from ..inference.models import load_for_inference
    from ..modeling import layer_names

    network, tokenizer = load_for_inference(model)
    texts = texts_for(network.config, sources, seed)
    nearest = nearest_experts(network, tokenizer, texts, **settings.model_dump())
    names = layer_names(network.config)
    print("nearest experts: " + ", ".join(f"layer {names[layer]}: {expert}" for layer, expert in nearest.items()))
    return nearest


@opt.app.command("expand-branches")
def expand_branches_(
    branches: Annotated[list[str], typer.Argument(help="Dense fine-tunes of one base, one for each language group.")],
    plan: Annotated[Path, typer.Option(help="plan.json of `plan dmoe`.")],
    out: Annotated[Path, typer.Option("--out", help="Folder to write.")],
    seed: opt.Seed = 0,
    max_shard_size: opt.ShardSize = DEFAULT_SHARD_SIZE,
    overwrite: opt.Overwrite = False,
) -> None:
    """Make dense models the experts of one model, averaging all other weights (Branch-Train-Mix). Then `train joint`.

    Example: hf-moe-expand expand-branches qwen-el qwen-tr --plan plan.json --out qwen-mix
    """
    from ..planning.plan import Plan

    check_checkpoints(*branches)
    made = Plan.load(plan)
    from ..baselines.branches import expand_branches

    expand_branches(branches, out, made, seed=seed, max_shard_size=max_shard_size, overwrite=overwrite)
    print(f"wrote {out}")


@opt.app.command("expand-depth")
def expand_depth_(
    base: opt.Model,
    out: opt.OutFolder,
    blocks: Annotated[int, opt.whole_number("Number of blocks to insert.")],
    max_shard_size: opt.ShardSize = DEFAULT_SHARD_SIZE,
    overwrite: opt.Overwrite = False,
) -> None:
    """Insert copied blocks that at first have no effect (LLaMA-Pro). Then `train dense --only-new-blocks`.

    Example: hf-moe-expand expand-depth Qwen/Qwen2.5-0.5B qwen-pro --blocks 8
    """
    check_checkpoints(base)
    from ..baselines.depth import expand_depth

    new = expand_depth(base, out, blocks, max_shard_size=max_shard_size, overwrite=overwrite)
    print(f"wrote {out}: layers {', '.join(map(str, new))} are new")


def _delta_verb(dense: bool) -> Callable[..., None]:
    """The verb that adds the change of a fine-tune to a dense model, or to an expanded one."""

    @opt.with_settings()
    def verb(
        model: opt.Model,
        out: opt.OutFolder,
        base: opt.Base,
        settings: GraftSettings,
        max_shard_size: opt.ShardSize = DEFAULT_SHARD_SIZE,
        overwrite: opt.Overwrite = False,
    ) -> None:
        check_checkpoints(model, base, settings.instruct)
        from ..checkpoint.graft import graft_delta, merge_delta

        report = (merge_delta if dense else graft_delta)(
            model, out, base, **settings.model_dump(), max_shard_size=max_shard_size, overwrite=overwrite
        )
        print("\n".join(report.lines()))

    return verb


GRAFT = """Add the change of a fine-tune (instruct - base) to an expanded model, to every expert too (DeltaMoE).

Example: hf-moe-expand graft qwen-el-1 qwen-el-chat --base Qwen/Qwen2.5-0.5B --instruct Qwen/Qwen2.5-0.5B-Instruct
"""
MERGE_DELTA = """\
Add the change of a fine-tune (instruct - base) to a dense model (Dense-FT-Delta) or to LLaMA-Pro's old blocks.

Example: hf-moe-expand merge delta qwen-ft qwen-chat --base Qwen/Qwen2.5-0.5B --instruct Qwen/Qwen2.5-0.5B-Instruct
"""
opt.app.command("graft", help=GRAFT)(_delta_verb(dense=False))
opt.merge_app.command("delta", help=MERGE_DELTA)(_delta_verb(dense=True))


@opt.merge_app.command("average")
def merge_average(
    models: Annotated[
        list[str],
        typer.Argument(
            help="Two or more checkpoints; dense ones may follow an expanded first one. Or an expanded one alone."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder to write.")],
    weight: Annotated[
        list[float] | None,
        typer.Option(
            help="Weight of the first of two checkpoints, or one for each, with the sum 1; equal by default. Of one "
            f"checkpoint, weight of its new experts; {AverageSettings().weight} by default."
        ),
    ] = None,
    max_shard_size: opt.ShardSize = DEFAULT_SHARD_SIZE,
    overwrite: opt.Overwrite = False,
) -> None:
    """Average checkpoints (Dense-FT-Avg); a dense one joins the average of each expert (MoE-CPT-Avg).

    Of an expanded checkpoint alone, average each expert of its last expansion with the FFN from which it was copied;
    all else stays byte for byte. Configuration and tokenizer are those of the first checkpoint.

    Example: hf-moe-expand merge average qwen-el-2 --weight 0.8 --out qwen-el

    Example: hf-moe-expand merge average qwen-chat-ft Qwen/Qwen2.5-0.5B-Instruct --weight 0.5 --out qwen-average
    """
    check_checkpoints(*models)
    from ..checkpoint.average import average_checkpoints, average_experts

    written: dict[str, Any] = {"max_shard_size": max_shard_size, "overwrite": overwrite}
    if len(models) == 1:
        own, *more = weight or [AverageSettings().weight]
        if more:
            raise InputError("--weight: the experts of one checkpoint have one weight; give it once.")
        average_experts(models[0], out, own, **written)
    else:
        if weight and len(weight) == 1 and len(models) == 2:
            weight = [weight[0], 1 - weight[0]]
        average_checkpoints(models, out, weight or None, **written)
    print(f"wrote {out}")


@opt.app.command()
def export(
    model: opt.Model,
    out: opt.OutFolder,
    expert: Annotated[int | None, opt.whole_number("Write the dense model with this expert as its FFNs.")] = None,
    language: Annotated[
        str | None, typer.Option(help="Write the dense model of a language: the base's, or its exclusive experts'.")
    ] = None,
    peft: Annotated[
        bool, typer.Option("--peft", help="Write the adapter of a language, or a folder for each, in PEFT's format.")
    ] = False,
    max_shard_size: opt.ShardSize = DEFAULT_SHARD_SIZE,
    overwrite: opt.Overwrite = False,
) -> None:
    """Write the dense model of one language or of one expert, which every server takes; or adapters of PEFT.

    Example: hf-moe-expand export qwen-el-1 qwen-greek --language el

    Example: hf-moe-expand export qwen-el-1 adapter-el --peft --language el
    """
    if peft and expert is not None:
        raise InputError("--peft writes the adapters of languages: leave --expert out.")
    if peft and max_shard_size != DEFAULT_SHARD_SIZE:
        raise InputError("--max-shard-size: --peft writes one file: leave it out.")
    check_checkpoints(model, expanded=True)
    if peft:
        from ..checkpoint.peft import export_peft

        print("\n".join(export_peft(model, out, language=language, overwrite=overwrite).lines()))
        return
    from ..checkpoint.export import export_dense

    name = export_dense(
        model, out, expert=expert, language=language, max_shard_size=max_shard_size, overwrite=overwrite
    )
    print(f"wrote {out}: {name}")


@opt.app.command()
def diff(
    before: opt.Model,
    after: opt.Model,
    all_names: Annotated[bool, typer.Option("--all", help="Name every tensor that differs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with all names.")] = False,
) -> None:
    """Show which tensors differ between two checkpoints. Exit status 0: none differ; 1: some differ; 2: an error.

    Example: hf-moe-expand diff qwen-el qwen-el-1
    """
    check_checkpoints(before, after)
    from ..checkpoint.compare import compare_checkpoints
    from ..checkpoint.source import resolve_checkpoint

    difference = compare_checkpoints(resolve_checkpoint(before), resolve_checkpoint(after))
    parts = difference.by_part()
    if as_json:
        print(json.dumps({**vars(difference), "by_part": parts}, indent=2))
    else:
        rows = [[part, *map(str, counts.values())] for part, counts in parts.items()]
        print_table(["", *next(iter(parts.values()), {})], rows)
        for kind in ("changed", "removed", "added") if all_names else ():
            for name in getattr(difference, kind):
                print(f"{kind}  {name}")
    raise typer.Exit(0 if difference.same else 1)


@opt.app.command()
@opt.with_settings("expert_init", "copy_from", "conditional_routing", "max_shard_size")
def inspect(
    model: opt.Model,
    settings: ExpandSettings,
    plan: Annotated[
        Path | None, typer.Option(help="plan.json for the dense MODEL: show what it makes of it, before anything runs.")
    ] = None,
    revision: opt.Revision = None,
) -> None:
    """Show layers, experts, parameters (total, active, trained by each stage) and history of an expanded checkpoint.

    Example: hf-moe-expand inspect qwen-el-2

    Example: hf-moe-expand inspect Qwen/Qwen2.5-0.5B --plan plan.json
    """
    if plan is None and settings != ExpandSettings():
        raise InputError("settings of new experts belong to --plan, which is not given.")
    if plan is not None:
        from ..planning.plan import Plan

        check_checkpoints(model, revision=revision)
        made = Plan.load(plan)
        from ..report.inspection import inspect_plan

        print("\n".join(inspect_plan(model, made, revision, **settings.experts.model_dump()).lines()))
        return
    check_checkpoints(model, revision=revision, expanded=True)
    from ..report.inspection import inspect_checkpoint

    print("\n".join(inspect_checkpoint(model, revision).lines()))

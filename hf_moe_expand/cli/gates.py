"""Verbs that make a checkpoint without training and without a plan: `gates`, `from-peft` and `join`."""

from pathlib import Path
from typing import Annotated

import typer

from ..analysis.settings import GateSettings
from ..core.disk import DEFAULT_SHARD_SIZE
from ..core.errors import InputError
from ..evaluation.settings import EvaluationSettings
from .common import check_checkpoints, codes, print_table, text_sources, texts_of
from .options import (
    Data,
    Model,
    OldCodes,
    OutFolder,
    Overwrite,
    Revision,
    Seed,
    ShardSize,
    app,
    with_settings,
)

Anchors = Annotated[
    list[str] | None,
    typer.Option(
        "--anchors",
        help="LANGUAGE=FILE of a language that is not new; repeat. It stands beside the package's own sentences, or in "
        "the place of those of its language.",
    ),
]


@app.command()
@with_settings("bound", "window")
def gates(
    model: Model,
    data: Data,
    settings: GateSettings,
    folder: Annotated[
        Path | None, typer.Argument(metavar="OUT", help="Folder to write: the expanded model with its gate.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--out", help="Of a dense base: file to write, for `expand --gate`.")
    ] = None,
    new: Annotated[
        str | None, typer.Option(help="Of a dense base: the languages of --data that will be new, by comma.")
    ] = None,
    anchors: Anchors = None,
    seed: Seed = 0,
    max_shard_size: ShardSize = DEFAULT_SHARD_SIZE,
    overwrite: Overwrite = False,
) -> None:
    """Fit the gate: recognised new languages take the new experts, all other text goes home. Nothing is trained.

    Give text of every new language, and of the base's own as far as you have some. Anchors show the gate what is not
    new: some twenty sentences in each of many languages, which come with the package.

    Example: hf-moe-expand gates qwen-el-1 qwen-el-2 --data en=en.jsonl --data el=el.jsonl

    Example: hf-moe-expand gates Qwen/Qwen2.5-0.5B --data en=en.jsonl --data el=el.jsonl --new el --out gate.safetensors
    """
    known = None if anchors is None else texts_of(anchors)
    check_checkpoints(model)
    if file is not None and folder is None:
        if max_shard_size != DEFAULT_SHARD_SIZE:
            raise InputError("--max-shard-size: a gate is one file: leave it out.")
        from ..analysis.gating import fit_base_gate

        report = fit_base_gate(
            model, file, texts_of(data, seed), codes(new or ""), known, settings, overwrite=overwrite
        )
    elif folder is not None and file is None:
        if new is not None:
            raise InputError("--new is for a dense base: an expanded model's history names its new languages.")
        from ..analysis.gating import fit_gates

        report = fit_gates(
            model, folder, texts_of(data, seed), known, settings, seed=seed, max_shard_size=max_shard_size,
            overwrite=overwrite,
        )  # fmt: skip
    else:
        raise InputError("Give OUT, the folder of an expanded model's gate, or --out FILE, for a dense base.")
    print("\n".join(report.lines()))


@app.command("from-peft")
@with_settings("questions")
def from_peft(
    adapter: Annotated[str, typer.Argument(help="Folder or hub id of a LoRA in PEFT's format.")],
    out: OutFolder,
    base: Annotated[str, typer.Option("--base", help="Folder or hub id of the dense model that it was trained on.")],
    language: Annotated[
        list[str],
        typer.Option(
            "--language",
            help="The language of ADAPTER, or several by comma; CODE=ADAPTER2 takes another adapter too; repeat.",
        ),
    ],
    settings: EvaluationSettings,
    old: OldCodes = "",
    data: Annotated[
        list[str] | None,
        typer.Option("--data", help="LANGUAGE=FILE of any language, to score; repeat."),
    ] = None,
    gate: Annotated[
        Path | None, typer.Option(help="File of `gates BASE`: the language gate, for these languages.")
    ] = None,
    revision: Revision = None,
    max_shard_size: ShardSize = DEFAULT_SHARD_SIZE,
    overwrite: Overwrite = False,
) -> None:
    """Make an expansion of an adapter of PEFT, for text that is told or, after `gates`, recognised. Nothing is trained.

    With --data, print bits per byte of the base, of each adapter alone, of text that is told its language, and, with
    --gate, of text that nobody told.

    Example: hf-moe-expand from-peft me/qwen-el-lora qwen-el --base Qwen/Qwen2.5-0.5B --language el --old en

    Example: hf-moe-expand from-peft lora-el qwen-el-hu --base Qwen/Qwen2.5-0.5B --language el --language hu=lora-hu
    """
    adapters = _adapters(adapter, language)
    if not data and settings != EvaluationSettings():
        raise InputError("Settings of scores belong to --data, which is not given.")
    check_checkpoints(base, revision=revision)
    sources = text_sources(data or [], look=True)
    from ..checkpoint.peft import codes_of, expand_from_peft

    fitted = None
    if gate is not None:
        from ..analysis.gating import gate_from_file

        classes = {code: number for number, codes in enumerate(adapters, 1) for code in codes_of(codes)}
        fitted, of_gate = gate_from_file(gate, base, classes, revision)
        print("\n".join(of_gate.lines()))
    report = expand_from_peft(
        base, adapters, out, codes(old), revision=revision, max_shard_size=max_shard_size, overwrite=overwrite,
        gate=fitted,
    )  # fmt: skip
    print("\n".join([*report.warnings, f"wrote {out}: {report.base_parameters:,} -> {report.parameters:,} parameters"]))
    if sources:
        from ..evaluation.ways import score_ways

        print("bits per byte")
        print_table(*score_ways(out, sources, settings).rows())
    if gate is None:
        print(
            f"no gate            text that is told no language gets the newest adapter, until you run `gates {out} OUT`"
        )


def _adapters(adapter: str, arguments: list[str]) -> dict[str, str]:
    """The adapter of each `--language`."""
    adapters: dict[str, str] = {}
    for argument in arguments:
        code, equals, place = argument.partition("=")
        if code in adapters:
            raise InputError(
                f"--language {code} has two adapters ({adapters[code]}, {place or adapter}): give one of them."
            )
        if not equals and adapter in adapters.values():
            raise InputError(
                f"--language {argument}: ADAPTER has a language already; write {argument}=ADAPTER2 for another one, "
                "or join the languages of one by commas."
            )
        adapters[code] = place if equals else adapter
    if adapter not in adapters.values():
        raise InputError(
            "--language: name the language of ADAPTER itself, too, as in --language el --language hu=ADAPTER2."
        )
    return adapters


@app.command()
def join(
    out: OutFolder,
    packs: Annotated[
        list[str],
        typer.Argument(
            metavar="PACK...",
            help="Expanded checkpoints of one base, whole or with the added tensors; NAME=PACK gives a name.",
        ),
    ],
    name: Annotated[
        list[str] | None,
        typer.Option(help="Name of a pack, one for each PACK in order; by default that of its run's or own folder."),
    ] = None,
    max_shard_size: ShardSize = DEFAULT_SHARD_SIZE,
    overwrite: Overwrite = False,
) -> None:
    """Join language packs, expansions of one frozen base that were made apart, into one model without training.

    A pack's experts are exclusive. The model has those of all packs, byte for byte, and no gate: fit one with `gates`.

    A pack has the name of its run's folder (`run`), else of its own; the card uses it.

    Example: hf-moe-expand join qwen-el-hu me/qwen-el qwen-hu
    """
    if name:
        if len(name) != len(packs):
            raise InputError(
                f"--name: {len(name)} names were given for {len(packs)} packs; give one for each, in order."
            )
        packs = [f"{one}={pack}" for one, pack in zip(name, packs, strict=True)]
    from ..checkpoint.source import pack_and_name

    check_checkpoints(*(pack_and_name(pack)[0] for pack in packs), expanded=True)
    from ..checkpoint.join import join_expansions

    report = join_expansions(packs, out, max_shard_size=max_shard_size, overwrite=overwrite)
    print("\n".join(report.lines()))
    print(f"no gate            text that is told no language gets the last pack, until you run `gates {out} OUT`")

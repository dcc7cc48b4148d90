"""Verbs that train one stage."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import InputError
from .apps import train_app
from .common import evaluate_models, text_sources
from .options import (
    Config,
    Data,
    Model,
    OutFolder,
    Overwrite,
    Seed,
    Validation,
)


@train_app.command("post-pretrain")
def train_post_pretrain(
    model: Model,
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    data: Data,
    config: Config = None,
    validation: Validation = None,
    seed: Seed = 0,
    overwrite: Overwrite = False,
) -> None:
    """Stage 1: new experts and routers learn new-language text; the base model is frozen.

    Example: hf-moe-expand train post-pretrain qwen-el qwen-el-1 --data el=el.jsonl --config stage1.yaml
    """
    from ..settings import PostPretrainSettings

    _train(PostPretrainSettings, model, out, data, config, validation, seed, overwrite)


@train_app.command("review")
def train_review(
    model: Model,
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    data: Data,
    config: Config = None,
    validation: Validation = None,
    seed: Seed = 0,
    overwrite: Overwrite = False,
) -> None:
    """Stage 2: routers and classifiers learn, on old and new text, to send old-language tokens home.

    Example: hf-moe-expand train review qwen-el-1 qwen-el-2 --data en=en.jsonl --data el=el.jsonl --config stage2.yaml
    """
    from ..settings import ReviewSettings

    _train(ReviewSettings, model, out, data, config, validation, seed, overwrite)


@train_app.command("group")
def train_group(
    model: Model,
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    data: Data,
    config: Config = None,
    validation: Validation = None,
    seed: Seed = 0,
    overwrite: Overwrite = False,
) -> None:
    """DMoE, first: batches of one language group each train its expert alone; routers learn to tell groups apart.

    Example: hf-moe-expand train group qwen-dmoe qwen-dmoe-1 --data el=el.jsonl --data tr=tr.jsonl --config group.yaml
    """
    from ..settings import GroupSettings

    _train(GroupSettings, model, out, data, config, validation, seed, overwrite)


@train_app.command("normal")
def train_normal(
    model: Model,
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    data: Data,
    config: Config = None,
    validation: Validation = None,
    seed: Seed = 0,
    overwrite: Overwrite = False,
) -> None:
    """DMoE, then: everything trains on mixed batches, each token routed to its top experts.

    Example: hf-moe-expand train normal qwen-dmoe-1 qwen-dmoe-2 --data el=el.jsonl --data tr=tr.jsonl
    """
    from ..settings import NormalSettings

    _train(NormalSettings, model, out, data, config, validation, seed, overwrite)


@train_app.command("adapt")
def train_adapt(
    model: Model,
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    data: Annotated[str, typer.Option("--data", help="LANGUAGE=FILE of the new language.")],
    test: Annotated[
        list[str] | None, typer.Option("--test", help="LANGUAGE=FILE to score before and after; repeat.")
    ] = None,
    config: Config = None,
    seed: Seed = 0,
    overwrite: Overwrite = False,
) -> None:
    """DMoE, later: one more language; the nearest expert is copied, and only the copy learns.

    Example: hf-moe-expand train adapt qwen-dmoe-2 qwen-dmoe-ro --data ro=ro.jsonl --test ro=ro.test.jsonl
    """
    from ..adaptation import adapt_language
    from ..settings import AdaptSettings, from_mapping, read_yaml

    settings = from_mapping(AdaptSettings, {} if config is None else read_yaml(config), str(config or ""))
    (source,) = text_sources([data]).values()
    tests = text_sources(test or [])
    done = adapt_language(model, out, source, settings, seed, overwrite)
    print("expert  perplexity of the new language")
    for expert, perplexity in enumerate(done.perplexity):
        print(f"{expert:6d}  {perplexity:.2f}{'  copied' if expert == done.nearest else ''}")
    print(f"wrote {out}: expert {done.expert}, {done.entry['steps']} steps; {done.frozen} frozen tensors are "
          "byte-identical, and so are the routers' other rows")  # fmt: skip
    if tests:
        old = [code for code in tests if code != source.language]
        evaluate_models([model, str(out)], tests, [old, [code for code in tests if code == source.language]])


@train_app.command("dense")
def train_dense_(
    model: Model,
    out: OutFolder,
    data: Data,
    config: Config = None,
    only_new_blocks: Annotated[
        bool, typer.Option("--only-new-blocks", help="Train what `expand-depth` inserted (`method: new-blocks`).")
    ] = False,
    seed: Seed = 0,
    overwrite: Overwrite = False,
) -> None:
    """Train a dense model further, the plain baseline: all of it, LoRA, or new blocks alone.

    Example: hf-moe-expand train dense Qwen/Qwen2.5-0.5B qwen-ft --data el=el.jsonl --config dense.yaml
    """
    from ..settings import DenseSettings, from_mapping, read_yaml

    values = {} if config is None else read_yaml(config)
    if only_new_blocks and values.get("method", "new-blocks") != "new-blocks":
        raise InputError(f"{config}: method is {values['method']!r}, but --only-new-blocks was given.")
    settings = from_mapping(
        DenseSettings, {**values, "method": "new-blocks"} if only_new_blocks else values, str(config or "")
    )
    from ..dense import check_old_blocks, train_dense

    entry = train_dense(model, out, text_sources(data), settings, seed, overwrite)
    if int(os.environ.get("RANK", "0")) == 0:
        frozen = ""
        if settings.method == "new-blocks":
            frozen = f"; {check_old_blocks(model, out)} frozen tensors are byte-identical"
        print(f"wrote {out}: {entry['steps']} steps{frozen}")


def _train(
    settings: Any,
    model: str,
    out: Path,
    data: list[str],
    config: Path | None,
    validation: list[str] | None,
    seed: int,
    overwrite: bool,
) -> None:
    from ..settings import from_mapping, read_yaml

    values = from_mapping(settings, {} if config is None else read_yaml(config), str(config or ""))
    given = {code: text.source for code, text in text_sources(validation or []).items()}
    values = replace(values, validation=replace(values.validation, texts={**values.validation.texts, **given}))
    from ..training import check_frozen, train_stage

    entry = train_stage(model, out, text_sources(data), values, seed, overwrite)
    if int(os.environ.get("RANK", "0")) == 0:
        frozen = check_frozen(model, out, entry["stage"])
        print(f"wrote {out}: {entry['steps']} steps; {frozen} frozen tensors are byte-identical")

"""Verbs that train one stage, one verb for each stage."""

import os
import pydoc
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ..core.errors import InputError
from ..core.extensions import extension_points
from ..evaluation.settings import EvaluationSettings
from ..stages import kinds, stage_files
from .common import check_checkpoints, evaluate_models, text_sources
from .options import AllowLostText, Config, Data, Model, OutFolder, Overwrite, Seed, Validation, train_app


class _StageVerb(TyperCommand):
    """Its help is the docstring of the stage's file and the keys of its configuration; the import takes seconds, and
    only `--help` waits for it."""

    def get_help(self, ctx: Any) -> str:
        from ..runs.settings_page import stage_help

        self.help = stage_help((self.name or "").replace("-", "_"))
        return super().get_help(ctx)


def _add_verb(key: str, work: Callable[..., None], synopsis: str | None) -> None:
    train_app.command(key.replace("_", "-"), cls=_StageVerb, help="", short_help=synopsis)(work)


def _verb(key: str) -> Callable[..., None]:
    """The verb for a stage that trains an expanded model."""

    def train(
        model: Model,
        out: OutFolder,
        data: Data,
        config: Config = None,
        validation: Validation = None,
        seed: Seed = 0,
        overwrite: Overwrite = False,
        allow_lost_text: AllowLostText = False,
    ) -> None:
        _train(key, model, out, data, config, validation, seed, overwrite, allow_lost_text)

    return train


def train_review(
    model: Model,
    out: OutFolder,
    data: Data,
    config: Config = None,
    classifier_layers: Annotated[
        int | None,
        typer.Option(help="Place classifiers in so many layers, by the languages' similarity in this model."),
    ] = None,
    classifier_choice: Annotated[
        str | None, typer.Option(help="Choice of these layers: similarity, last, random, all or none.")
    ] = None,
    validation: Validation = None,
    seed: Seed = 0,
    overwrite: Overwrite = False,
    allow_lost_text: AllowLostText = False,
) -> None:
    given = {"classifier_layers": classifier_layers, "classifier_choice": classifier_choice}
    given = {name: value for name, value in given.items() if value is not None}
    _train("review", model, out, data, config, validation, seed, overwrite, allow_lost_text, **given)


def _train(
    key: str,
    model: str,
    out: Path,
    data: list[str],
    config: Path | None,
    validation: list[str] | None,
    seed: int,
    overwrite: bool,
    allow_lost_text: bool,
    **given: Any,
) -> None:
    check_checkpoints(model, expanded=True)
    held_out = {code: text.source for code, text in text_sources(validation or []).items()}
    settings = _settings(key, config, held_out).but(**given)
    from ..stages.run import check_frozen, train_stage

    record = train_stage(
        model, out, text_sources(data), settings.built(out, seed), overwrite=overwrite, allow_lost_text=allow_lost_text
    )
    if _is_first_rank():
        frozen = check_frozen(model, out, record.stage)
        print(f"wrote {out}: {record.steps} steps; {frozen} frozen tensors are byte-identical")


def train_adapt(
    model: Model,
    out: OutFolder,
    data: Annotated[str, typer.Option("--data", help="LANGUAGE=FILE of the new language.")],
    test: Annotated[
        list[str] | None, typer.Option("--test", help="LANGUAGE=FILE to score before and after; repeat.")
    ] = None,
    config: Config = None,
    seed: Seed = 0,
    overwrite: Overwrite = False,
    allow_lost_text: AllowLostText = False,
) -> None:
    check_checkpoints(model, expanded=True)
    from ..stages.kinds.adapt import adapt_language

    settings = _settings("adapt", config)
    (source,) = text_sources([data]).values()
    tests = text_sources(test or [])
    done = adapt_language(model, out, source, settings.built(out, seed), seed, overwrite, allow_lost_text)
    if not _is_first_rank():
        return
    print("expert  perplexity of the new language")
    for expert, perplexity in enumerate(done.perplexity):
        print(f"{expert:6d}  {perplexity:.2f}{'  copied' if expert == done.nearest else ''}")
    print(f"wrote {out}: expert {done.expert}, {done.record.steps} steps; {done.frozen} frozen tensors are "
          "byte-identical, and so are the routers' other rows")  # fmt: skip
    if tests:
        old = [code for code in tests if code != source.language]
        new = [code for code in tests if code == source.language]
        evaluate_models([model, str(out)], tests, [old, new], EvaluationSettings())


def train_dense(
    model: Model,
    out: OutFolder,
    data: Data,
    config: Config = None,
    only_new_blocks: Annotated[
        bool, typer.Option("--only-new-blocks", help="Train only the blocks of `expand-depth` (`method: new-blocks`).")
    ] = False,
    seed: Seed = 0,
    overwrite: Overwrite = False,
    allow_lost_text: AllowLostText = False,
) -> None:
    check_checkpoints(model)
    settings: Any = _settings("dense", config)
    if only_new_blocks:
        if settings.given.get("method", "new-blocks") != "new-blocks":
            raise InputError(f"{config}: method is {settings.method!r}, but --only-new-blocks was given; drop one.")
        settings = settings.but(method="new-blocks")
    from ..stages.kinds.dense import check_old_blocks
    from ..stages.run import train_stage

    record = train_stage(
        model, out, text_sources(data), settings.built(out, seed), overwrite=overwrite, allow_lost_text=allow_lost_text
    )
    if _is_first_rank():
        frozen = ""
        if settings.method == "new-blocks":
            frozen = f"; {check_old_blocks(model, out)} frozen tensors are byte-identical"
        print(f"wrote {out}: {record.steps} steps{frozen}")


def _settings(key: str, config: Path | None, held_out: dict[str, str] = {}) -> Any:  # noqa: B006 (is not changed)
    """The keywords of a stage from its file, and held-out text of the command line; the defaults without a file."""
    from ..core.schema import changed, read
    from ..core.yamlfile import read_yaml
    from ..runs.keys import check_stage_keys
    from ..stages import all_stages

    keys = {} if config is None else read_yaml(config)
    check_stage_keys(key, keys, str(config))
    stage = all_stages().get(key)
    if stage is None or not hasattr(stage, "built"):
        raise InputError(f"{key}: a stage that does not train an expanded model; it runs in a recipe alone.")
    settings: Any = read(stage.settings, keys, str(config or ""))
    if not held_out:
        return settings
    from ..stages.config import ValidationSettings

    if not hasattr(settings, "validation"):
        raise InputError(f"--validation: the stage {key} scores no held-out text: leave it out.")
    before = settings.validation or ValidationSettings()
    validation = changed(before, texts={**before.texts, **held_out})
    return settings.but(validation=validation)


def _synopsis_of(module: str) -> str:
    """The first line of an extension's module; empty for one that is broken, which its use will say."""
    try:
        return pydoc.synopsis(str(find_spec(module).origin)) or ""  # type: ignore[union-attr]
    except Exception:  # a package around it is imported, which may raise anything
        return ""


def _is_first_rank() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


_SPECIAL: dict[str, Callable[..., None]] = {"adapt": train_adapt, "dense": train_dense, "review": train_review}
for _key in stage_files():
    if _key not in ("graft", "gates", "average"):  # which do not train, and are verbs of their own
        _add_verb(_key, _SPECIAL.get(_key) or _verb(_key), pydoc.synopsis(str(Path(kinds.__path__[0]) / f"{_key}.py")))
for _key, _point in extension_points("stages").items():
    if _key not in stage_files():
        _add_verb(_key, _verb(_key), _synopsis_of(_point.module))

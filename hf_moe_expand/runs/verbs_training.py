"""`train STAGE`, a verb for each stage."""

import os
import pydoc
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from typer.core import TyperCommand

from ..checkpoint.arguments import Model, NewFolder, Places, expanded
from ..core.errors import InputError
from ..core.extensions import extension_points
from ..core.verbs import Group
from ..evaluation.scoring_settings import EvaluationSettings
from ..stages import kinds, stage_files

_NO_VERBS = ("graft", "gates", "average")  # which do not train, and are verbs of their own
# Options of one stage alone, and their values in others.
_OPTIONS: dict[str, Any] = {"classifier_layers": None, "test": None}
_OF_STAGE = {"adapt": ("test",), "review": ("classifier_layers",)}


train = Group("Train one stage.")


class _StageVerb(TyperCommand):
    """Its help is the docstring of the stage's file and the keys of its configuration; the import takes seconds, and
    only `--help` waits for it."""

    def get_help(self, ctx: Any) -> str:
        from .settings_page import stage_help

        self.help = stage_help((self.name or "").replace("-", "_"))
        return super().get_help(ctx)


def _train(
    model: Model,
    out: NewFolder,
    *,
    data: Places,
    config: Path | None = None,
    classifier_layers: int | None = None,
    test: Places | None = None,
    seed: int = 0,
    overwrite: bool = False,
    allow_lost_text: bool = False,
    key: str,
) -> None:
    """Trains a stage.

    Args:
        config: YAML file with the stage's settings; without it, one epoch at the papers' rate (5e-5; 2e-5 in DMoE's
            stages; cosine): a small base wants more (docs/choose.md#learning-rates).
        classifier_layers: place classifiers in so many layers, by the languages' similarity in this model.
        test: LANGUAGE=FILE to score before and after; repeat.
    """
    from ..core.schema import read
    from ..core.yamlfile import read_yaml

    mapping = {} if config is None else read_yaml(config)
    if key != "dense":
        expanded(model, {})
    from ..stages import all_stages
    from ..stages.config import StageConfig

    stage = all_stages().get(key)
    if stage is None or not issubclass(stage, StageConfig):
        raise InputError(f"{key}: a stage that does not train an expanded model; it runs in a recipe alone.")
    given = {} if classifier_layers is None else {"classifier_layers": classifier_layers}
    settings: Any = read(stage, {**mapping, **given}, str(config or ""))
    if key == "adapt":
        _adapt(model, out, data, settings, seed, overwrite, allow_lost_text, test or {})
        return
    from ..stages.run import check_frozen, train_stage

    record = train_stage(model, out, data, settings, seed, overwrite=overwrite, allow_lost_text=allow_lost_text)
    if not _is_first_rank():
        return
    all_train = key == "dense" and settings.method != "new-blocks"
    kept = "" if all_train else f"; {check_frozen(model, out, settings)} frozen tensors are byte-identical"
    print(f"wrote {out}: {record.steps} steps{kept}")


def _adapt(
    model: str, out: Path, data: Any, settings: Any, seed: int, overwrite: bool, allow_lost_text: bool, test: Any
) -> None:
    """Adds a language to a DMoE model, and scores it before and after."""
    from ..evaluation.report import evaluate_models, labels_of
    from ..stages.kinds.adapt import adapt_language

    if len(data) > 1:
        raise InputError("--data: one language is learned at a time: give it once.")
    (source,) = data.values()
    done = adapt_language(model, out, source, settings, seed, overwrite, allow_lost_text)
    if not _is_first_rank():
        return
    print("expert  perplexity of the new language")
    for expert, perplexity in enumerate(done.perplexity):
        print(f"{expert:6d}  {perplexity:.2f}{'  copied' if expert == done.nearest else ''}")
    print(f"wrote {out}: expert {done.expert}, {done.record.steps} steps; {done.frozen} frozen tensors are "
          "byte-identical, and so are the routers' other rows")  # fmt: skip
    if test:
        new = [code for code in test if code == source.language]
        old = [code for code in test if code not in new]
        evaluate_models(labels_of([model, str(out)]), test, [old, new], EvaluationSettings())


def _synopsis_of(module: str) -> str:
    """The first line of an extension's module; empty for one that is broken, which its use will say."""
    try:
        return pydoc.synopsis(str(find_spec(module).origin)) or ""  # type: ignore[union-attr]
    except Exception:  # a package around it is imported, which may raise anything
        return ""


def _is_first_rank() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


_SYNOPSES = {key: pydoc.synopsis(str(Path(kinds.__path__[0]) / f"{key}.py")) for key in stage_files()}
_SYNOPSES |= {key: _synopsis_of(at.module) for key, at in extension_points("stages").items() if key not in _SYNOPSES}
for _key, _synopsis in _SYNOPSES.items():
    if _key not in _NO_VERBS:
        _own = _OF_STAGE.get(_key, ())
        _fixed = {"key": _key, **{name: value for name, value in _OPTIONS.items() if name not in _own}}
        train.add(_train, _key.replace("_", "-"), _fixed, cls=_StageVerb, help="", short_help=_synopsis)

"""Writes docs/settings.md from the declarations of the settings."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from .planning.methods import DEFAULT_METHOD, METHODS, LayerPlan
from .recipe import Expansion, Recipe
from .schema import settings_in
from .stages import OTHER_STAGES, RECIPE_STAGES, stage_of

_HEAD = """\
# Every setting

`hf-moe-expand recipes settings` prints this page: the keys of a recipe, and of a stage's own file (`--config`). A
mistyped key is refused, with the nearest one. "–" is null: the key may be left out, and its description says what
happens then. "Below" is a section of its own, with defaults of its own.

## A recipe

{recipe}

A recipe also has the steps below, by their names. With several `expansions` ([lifelong](lifelong.md)), the recipe's
own steps apply to each expansion that lacks them. A text is a file, a folder or `hub:dataset:config:split`. Paths are
relative to the folder in which you run it, and may hold `$VARIABLES`.
"""

_PLAN = """\
## `plan`

The number of experts in each layer. Counts include each layer's original FFN; in a further expansion they count only
new experts. `method` says how they are chosen, {default} by default.
"""

_TRAINING = """\
## `training`

These keys are passed unchanged to
[`transformers.TrainingArguments`](https://huggingface.co/docs/transformers/main_classes/trainer).

- Our defaults are `num_train_epochs: 1`, `lr_scheduler_type: cosine`, `logging_steps: 10`, `save_total_limit: 1`,
  `report_to: none` and `seed: 0`. All other defaults are the library's.
- `report_to: tensorboard` draws every logged figure (`pip install tensorboard`). Set the variable
  `TENSORBOARD_LOGGING_DIR` to a folder, since the training's own is removed when the stage is done, and run
  `tensorboard --logdir` on it.
- The command sets `output_dir`, `seed`, `data_seed`, `remove_unused_columns` and `label_names` itself, and refuses them
  here.
- Also refused are `eval_strategy` and related keys (use `validation`), `push_to_hub` and related keys (use
  `hf-moe-expand push`), reentrant checkpointing and, for decoders,
  `label_smoothing_factor`.
- `distributed_config` is a key of ours, which is passed to `from_pretrained` ([several devices](distributed.md)).
"""


def settings_page() -> str:
    """The whole page, in Markdown."""
    steps = [key for key in Expansion.model_fields if key != "new"]
    own = {name: field for name, field in Recipe.model_fields.items() if name not in steps}
    parts = [_HEAD.format(recipe=_table(own))]
    inner: dict[str, type] = {}  # settings inside a stage's settings, by their key
    for key in (*steps, "join", "self_written", "evaluation"):
        if key == "plan":
            parts.append(_plan())
        elif key in RECIPE_STAGES:
            parts.append(_stage(f"`{key}`", key, inner))
        else:
            (cls,) = settings_in(Recipe.model_fields[key].annotation)
            parts.append(_section(f"`{key}`", [cls.__doc__ or ""], cls))
    parts += [_stage(f"A file of `train {stage_of(key).name}`", key, inner) for key in OTHER_STAGES]
    parts += [_section(f"`{key}`", [cls.__doc__ or ""], cls) for key, cls in inner.items()]
    return "\n".join([*parts, _TRAINING])


def _stage(title: str, key: str, inner: dict[str, type]) -> str:
    """A stage's section; the settings inside its settings are added to `inner`."""
    stage, settings = stage_of(key), stage_of(key).settings_class()
    for name, field in _fields(settings).items():
        inner.update((name, cls) for cls in settings_in(field.annotation))
    when = ""
    if key in RECIPE_STAGES and not stage.runs_unasked:
        when = " It runs where a recipe has the key."
    elif stage.optional:
        when = f" `{key}: null` leaves it out."
    about = [_first(_docstring(key)) + when, settings.__doc__ or ""]
    return _section(title, about, settings)


def stage_help(key: str) -> str:
    """The `--help` text of a stage that trains: its file's docstring, and the keys of its configuration."""
    fields = _fields(stage_of(key).settings_class())
    keys = [name for name in fields if name != "training"]
    width = max(map(len, keys))
    lines = [f"  {name.ljust(width)}  {_help(fields[name])}" for name in keys]
    # The first character keeps typer from joining the lines.
    return f"{_docstring(key)}\n\n\b\nKeys of --config, besides `training`:\n" + "\n".join(lines)


def _help(field: FieldInfo) -> str:
    default = _default(field)
    return (field.description or "") + ("" if default in ("–", "below") else f" ({default})")


def _docstring(key: str) -> str:
    """The docstring of a stage's file."""
    return inspect.getdoc(inspect.getmodule(stage_of(key))) or ""


def _plan() -> str:
    parts = [_PLAN.format(default=f"`{DEFAULT_METHOD}`")]
    for name, method in METHODS.items():
        parts.append(f"`method: {name}`. {_first(method.__doc__)}\n")
        parts.append(_table(method.own_keys()) + "\n")
    parts.append("Keys of every method; classifiers only for methods without language groups:\n")
    return "\n".join([*parts, _table(LayerPlan.all_keys()) + "\n"])


def _section(title: str, about: Iterable[str], cls: type) -> str:
    return "\n\n".join([f"## {title}", *filter(None, map(_first, about)), _table(_fields(cls))]) + "\n"


def _fields(cls: Any) -> Mapping[str, FieldInfo]:
    return cls.__pydantic_fields__


def _table(fields: Mapping[str, FieldInfo]) -> str:
    """Required keys first, `training` last."""
    order = sorted(fields, key=lambda name: (not fields[name].is_required(), name == "training"))
    rows = [f"| `{name}` | {_default(fields[name])} | {_about(fields[name])} |" for name in order]
    return "\n".join(["| key | default | |", "| --- | --- | --- |", *rows])


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "must be given"
    value = field.get_default(call_default_factory=True)
    if settings_in(type(value)):
        return "below"
    return "–" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _about(field: FieldInfo) -> str:
    """The description as a fragment, with those values of a choice that it does not mention."""
    text = (field.description or "").removesuffix(".")
    if not text[1:2].isupper():
        text = text[:1].lower() + text[1:]
    choices = [str(value) for value in get_args(field.annotation)] if get_origin(field.annotation) is Literal else []
    if any(choice not in text for choice in choices):
        text += f": {', '.join(f'`{choice}`' for choice in choices)}"
    return text.replace("|", "\\|")


def _first(text: str | None) -> str:
    """The first paragraph of a docstring, in one line."""
    return " ".join((text or "").partition("\n\n")[0].split())

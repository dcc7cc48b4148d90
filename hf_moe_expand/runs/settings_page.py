"""Writes docs/settings.md from the declarations of the settings."""

import inspect
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic import Field
from pydantic.fields import FieldInfo

from ..core.rendering import render
from ..core.schema import settings_in
from ..planning.methods import DEFAULT_METHOD, METHODS, LayerPlan
from ..stages import all_stages
from ..stages.config import StageConfig
from ..stages.keywords import default_value, own_fields
from .recipe import Expansion, Recipe

_SAVES = (
    "Ctrl-C and SIGTERM finish and save the step, from which the same command goes on. Without save_steps and "
    "save_strategy in --config, a training checkpoint is saved at least every ten minutes, too."
)


def settings_page() -> str:
    """The whole page, in Markdown."""
    commands = [key for key, stage in all_stages().items() if not stage.place]
    steps = [key for key in Expansion.model_fields if key != "new"]
    stages = [stage.settings for stage in all_stages().values()]
    inside = [item for settings in stages for item in _fields(settings).items()]
    inner = {name: cls for name, field in inside for cls in settings_in(field.annotation)}
    trained = [key for key, stage in all_stages().items() if issubclass(stage.settings, StageConfig)]
    facts = {
        "first": trained[0],
        "first_rows": _rows(_fields(all_stages()[trained[0]].settings)),
        "stages": [_section(key)[0] for key in trained],
        "recipe": {name: field for name, field in Recipe.model_fields.items() if name not in steps},
        "sections": [
            *map(_section, (*steps, "join", "evaluation", *commands)),
            *((f"`{name}`", [cls.__doc__], _fields(cls)) for name, cls in inner.items()),
        ],
        "methods": METHODS,
        "default_method": DEFAULT_METHOD,
    }
    return render("settings.md", facts, {"rows": _rows, "first_paragraph": _first}) + "\n"


def _section(key: str) -> tuple[str, list[str | None], Mapping[str, FieldInfo]]:
    """A section's title, paragraphs and fields: of a stage, or of another key of a recipe."""
    if key == "plan":
        return f"`{key}`", [], LayerPlan.all_keys()
    if key not in all_stages():
        (cls,) = settings_in(Recipe.model_fields[key].annotation)
        return f"`{key}`", [cls.__doc__], _fields(cls)
    stage = all_stages()[key]
    when = f" `{key}: null` leaves it out." if stage.optional else ""
    if stage.place and not stage.is_default:
        when = " It runs where a recipe has the key."
    title = f"`{key}`" if stage.place else f"A file of `train {stage.name}`"
    return title, [_first(_docstring(key)) + when, stage.settings.__doc__], _fields(stage.settings)


def stage_help(key: str) -> str:
    """The `--help` text of a stage that trains: its file's docstring, and the keys of its configuration."""
    fields = _fields(all_stages()[key].settings)
    width = max(map(len, fields))
    lines = []
    for name, field in fields.items():
        default = "" if _default(field) in ("–", "below") else f" ({_default(field)})"
        lines.append(f"  {name.ljust(width)}  {field.description or ''}{default}")
    # The first character keeps typer from joining the lines.
    keys = "\b\nKeys of --config, besides all of TrainingArguments:"
    return "\n".join([f"{_docstring(key)}\n\n{_SAVES}\n\n{keys}", *lines])


def _docstring(key: str) -> str:
    """The docstring of a stage's file."""
    return inspect.getdoc(inspect.getmodule(all_stages()[key])) or ""


def _fields(cls: Any) -> Mapping[str, FieldInfo]:
    """The fields of settings; of a stage that trains, those that it declares itself."""
    if not issubclass(cls, StageConfig):
        return cls.__pydantic_fields__
    types = cls.keyword_types()
    return {
        name: FieldInfo.from_annotated_attribute(types[name], Field(default_value(f), description=f.metadata["help"]))
        for name, f in own_fields(cls).items()
    }


def _rows(fields: Mapping[str, FieldInfo]) -> list[tuple[str, str, str]]:
    """Name, default and description of each key: required keys first."""
    order = sorted(fields, key=lambda name: not fields[name].is_required())
    return [(name, _default(fields[name]), _about(fields[name])) for name in order]


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
    if len(choices) < 8 and any(choice not in text for choice in choices):  # else they are the library's
        text += f": {', '.join(f'`{choice}`' for choice in choices)}"
    return text


def _first(text: str | None) -> str:
    """The first paragraph of a docstring, in one line."""
    return " ".join((text or "").partition("\n\n")[0].split())

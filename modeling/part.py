"""An optional part of an expanded model. The core asks each part in turn, and knows none by name; a checkpoint has the
files of its own parts alone.

A part `x` is the class `Part` in `part_x.py`, and `config.parts["x"]` has its settings. What it does to layers and to
the model it does by classes of its own, which go before the core's.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import nn
from transformers.dynamic_module_utils import get_relative_import_files

# Servers that run a model's code in place of transformers' generate, by the name of their attention.
SERVERS = {"vllm": "vLLM", "sglang": "SGLang"}
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
_HEAD = '"""The optional parts that this code has, in the order in which they are asked."""\n'


class BasePart:
    """A part that does nothing, of a model's configuration and with the part's own settings."""

    name: ClassVar[str]
    # The fields that configurations of earlier versions have for it, and their keys in the settings (None: all).
    flat: ClassVar[dict[str, str | None]] = {}
    was: ClassVar[str | None] = None  # its name in an earlier version
    kind: ClassVar[str | None] = None  # `expert_kind` of the experts that it makes; None where it makes none
    layer_class: ClassVar[type | None] = None  # goes before `ExpandedFFN` in the class of the expanded layers
    model_class: ClassVar[type | None] = None  # goes before the model's class
    # Why it cannot stand beside others, by their names, beside `exclusive` experts or in a type of model (`dmoe`).
    not_beside: ClassVar[dict[str, str]] = {}
    not_told: ClassVar[str | None] = None  # why languages cannot be told
    not_served: ClassVar[str | None] = None  # why servers (`{server}`) cannot run the model
    not_batched: ClassVar[str | None] = None  # why continuous batching cannot run it
    splits: ClassVar[str | None] = "*"  # the experts that tensor parallelism splits; None: every rank keeps them whole
    judges: ClassVar[bool] = False  # whether it judges what nobody tells
    shares_expert_0: ClassVar[bool] = False  # whether all tokens take expert 0, beside the routed experts
    beside_mixtures: ClassVar[bool] = False  # whether its experts can stand beside a mixture of the backbone's own
    is_saved: ClassVar[bool] = True  # whether a model that was loaded has it, and is saved with it

    def __init__(self, config: Any, settings: Any) -> None:
        self.config, self.settings = config, settings

    @classmethod
    def read(cls, fields: dict[str, Any], config: Any) -> Any:
        """The settings in the fields of an earlier version's configuration, or that its other fields imply; None where
        it does not use the part."""
        if cls.kind is not None and fields.get("expert_kind") != cls.kind:
            return None
        own = {key: fields.get(name) for name, key in cls.flat.items()}
        own = own.get(None, own)
        return (own or {}) if cls.kind else (own or None)

    @classmethod
    def written(cls, settings: Any) -> dict[str, Any]:
        """The fields of an earlier version's configuration with these settings, None where it does not use the part."""
        own = settings if isinstance(settings, dict) else {}
        flat = {name: settings if key is None else own.get(key) for name, key in cls.flat.items()}
        return flat | ({"expert_kind": cls.kind} if cls.kind else {})

    @classmethod
    def prepare(cls, made: type) -> None:
        """Changes a new class of configurations, that of one type of backbone."""

    @property
    def stays_home(self) -> str | None:
        """What is said once where text that nobody tells or judges is the base's; None where it is the newest
        expansion's."""
        return None

    def check(self) -> None:
        """Raises ValueError where the settings contradict the configuration."""

    def make_expert(self, layer: int, number: int) -> Callable[[nn.Module], nn.Module] | None:
        """How a new expert is made of the layer's FFN; None where the part does not make it."""
        return None

    def expand(self, model: Any, place: str, layer: int) -> bool:
        """Expands a layer, whose FFN stands at `place`, in its own way; returns whether it did."""
        return False

    def classes(self) -> dict[str, int]:
        """The class of each language that the part knows."""
        return {}

    def load(self, load: Callable, path: Any, config: Any) -> Callable:
        """`from_pretrained` of the backbone's class, as this part needs it."""
        return load


def read_parts(parts: dict[str, Any], settings: dict[str, Any] | None, fields: dict[str, Any], config: Any) -> dict:
    """A configuration's parts: those that it names, and those of an earlier version's fields, which are taken out;
    raises ValueError where this code does not have a part, or a field contradicts one."""
    now = {part.was: name for name, part in parts.items()}
    found = {now.get(name, name): own for name, own in (settings or {}).items() if own is not None and own is not False}
    kinds = ["ffn", *(part.kind for part in parts.values() if part.kind)]
    if missing := [str(name) for name in found if name not in parts]:
        raise ValueError(f"parts: {', '.join(missing)}: this code does not have it; the checkpoint's own does.")
    if (fields.get("expert_kind") or "ffn") not in kinds:
        raise ValueError(f"expert_kind is {fields['expert_kind']!r}; known: {', '.join(kinds)}.")
    for name, part in parts.items():
        for field, value in part.written(found[name]).items() if name in found else ():
            if fields.get(field) not in (None, False, value):
                raise ValueError(f"{field} is {fields[field]!r}, but parts.{name} says {value!r}: give one of them.")
        if name not in found and (own := part.read(fields, config)) is not None:
            found[name] = own
    for name in ("expert_kind", *(name for part in parts.values() for name in part.flat)):
        fields.pop(name, None)
    return {name: found[name] for name in parts if name in found}


def parts_text(names: Sequence[str]) -> str:
    """The text of `parts.py` in a checkpoint with these parts."""
    lines = [f"from .part_{name} import Part as {name}" for name in sorted(names)]
    listed = ", ".join(f'"{name}": {name}' for name in names)
    return "\n".join([_HEAD, *lines, *([""] if lines else []), f"PARTS: dict = {{{listed}}}", ""])


def keep_own_code(folder: Any, config: Any) -> None:
    """Leaves in a saved checkpoint the code of its own parts alone."""
    (Path(folder) / "parts.py").write_text(parts_text([*config.parts]), encoding="utf-8")
    places = config.auto_map.values()  # perhaps with a repository's name
    begins = [Path(folder) / f"{place.rpartition('--')[2].partition('.')[0]}.py" for place in places]
    read: Any = [[begin, *get_relative_import_files(begin)] for begin in begins if begin.is_file()]
    needed = {Path(file).name for files in read for file in files}
    for file in Path(__file__).parent.glob("[!_]*.py"):  # no checkpoint has an `__init__.py`, but a user's folder may
        if file.name not in needed:
            (Path(folder) / file.name).unlink(missing_ok=True)

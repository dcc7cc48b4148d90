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
    """A part that does nothing.

    Args:
        config: the model's configuration.
        settings: the part's own.

    Attributes:
        name: the part's.
        flat: the fields of an earlier version's configurations that are the part's.
        was: its name in an earlier version.
        kind: `expert_kind` of the experts that it makes; None where it makes none.
        layer_class: goes before `ExpandedFFN` in the class of the expanded layers.
        model_class: goes before the model's class.
        not_beside: why the part cannot stand beside others, by their names, beside `exclusive` experts or in a type of
            model (`dmoe`).
        not_told: why languages cannot be told.
        not_served: why servers cannot run the model; `{server}` stands for the server's name.
        not_batched: why continuous batching cannot run it.
        splits: the experts that tensor parallelism splits; None where every rank keeps the layers whole.
        judges: whether it judges what nobody tells.
        shares_expert_0: whether all tokens take expert 0, beside the routed experts.
        beside_mixtures: whether its experts can stand beside a mixture of the backbone's own.
        is_saved: whether a model that was loaded has it, and is saved with it.
    """

    name: ClassVar[str]
    flat: ClassVar[tuple[str, ...]] = ()
    was: ClassVar[str | None] = None
    kind: ClassVar[str | None] = None
    layer_class: ClassVar[type | None] = None
    model_class: ClassVar[type | None] = None
    not_beside: ClassVar[dict[str, str]] = {}
    not_told: ClassVar[str | None] = None
    not_served: ClassVar[str | None] = None
    not_batched: ClassVar[str | None] = None
    splits: ClassVar[str | None] = "*"
    judges: ClassVar[bool] = False
    shares_expert_0: ClassVar[bool] = False
    beside_mixtures: ClassVar[bool] = False
    is_saved: ClassVar[bool] = True

    def __init__(self, config: Any, settings: Any) -> None:
        self.config, self.settings = config, settings

    @classmethod
    def read(cls, fields: dict[str, Any], config: Any) -> Any:
        """The settings in the flat fields of an earlier version's configuration, or that its other fields imply; None
        where it does not use the part."""
        return next((fields[name] for name in cls.flat if fields.get(name) not in (None, False)), None)

    @classmethod
    def flat_value(cls, settings: Any, name: str) -> Any:
        """The value of a flat field by these settings, which are None where the model does not use the part."""
        return settings

    @classmethod
    def prepare(cls, made: type) -> None:
        """Changes a new class of configurations, that of one type of backbone."""

    @property
    def stays_home(self) -> str | None:
        """What is said once where text that nobody tells or judges is the base's; None where it is the newest
        expansion's."""
        return None

    def check(self) -> None:
        """Refuses settings that contradict the configuration.

        Raises:
            ValueError: they do.
        """

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


def calls(hooks: Any, method: Any) -> bool:
    """Whether a partial of the method is among a module's hooks."""
    return any(getattr(hook, "func", None) == method for hook in hooks.values())


def read_parts(parts: dict[str, Any], settings: dict[str, Any] | None, fields: dict[str, Any], config: Any) -> dict:
    """A configuration's parts: those that it names, and those of flat fields, which are taken out of `fields`.

    Raises:
        ValueError: this code does not have a part, no part makes such experts, or a flat field contradicts a part.
    """
    if not isinstance(settings, dict | None):
        raise ValueError(f"parts is {settings!r}: must be an object with the settings of each part by its name.")
    now = {part.was: name for name, part in parts.items()}
    found = {now.get(name, name): own for name, own in (settings or {}).items() if own is not None and own is not False}
    kind, kinds = fields.get("expert_kind"), [part.kind for part in parts.values() if part.kind]
    if missing := [str(name) for name in found if name not in parts]:
        raise ValueError(
            f"parts: {', '.join(missing)}: this code does not have it: load the checkpoint by an Auto class with "
            "trust_remote_code=True, or by a version of hf-moe-expand that does."
        )
    if kind not in (None, "ffn", *kinds):
        raise ValueError(f"expert_kind is {kind!r}; known: ffn, {', '.join(kinds)}.")
    for name, part in parts.items():
        if name not in found and (own := part.read(fields, config)) is not None:
            found[name] = own
        elif name in found:
            says = {"expert_kind": part.kind} if part.kind else {}
            says |= {flat: part.flat_value(found[name], flat) for flat in part.flat}
            for flat, value in says.items():
                if fields.get(flat) not in (None, False, value):
                    raise ValueError(f"{flat} is {fields[flat]!r}, but parts.{name} says {value!r}: give one of them.")
    for name in ("expert_kind", *(name for part in parts.values() for name in part.flat)):
        fields.pop(name, None)
    return {name: found[name] for name in parts if name in found}


def parts_text(names: Sequence[str]) -> str:
    """The text of `parts.py` in a checkpoint with these parts."""
    lines = [f"from .part_{name} import Part as {name}" for name in sorted(names)]
    listed = ", ".join(f'"{name}": {name}' for name in names)
    return "\n".join([_HEAD, *lines, *([""] if lines else []), f"PARTS: dict = {{{listed}}}", ""])


def keep_own_code(folder: Any, auto_map: dict[str, str], names: Sequence[str]) -> None:
    """Leaves in a saved checkpoint the code of its own parts alone."""
    (Path(folder) / "parts.py").write_text(parts_text(names), encoding="utf-8")
    files = (place.rpartition("--")[2].partition(".")[0] for place in auto_map.values())  # without a repository's name
    begins = {Path(folder) / f"{file}.py" for file in files}
    read: Any = [[begin, *get_relative_import_files(begin)] for begin in begins if begin.is_file()]
    needed = {Path(file).name for files in read for file in files}
    for file in Path(__file__).parent.glob("[!_]*.py"):  # no checkpoint has an `__init__.py`, but a user's folder may
        if file.name not in needed:
            (Path(folder) / file.name).unlink(missing_ok=True)

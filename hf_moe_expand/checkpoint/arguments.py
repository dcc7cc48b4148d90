"""The types of the verbs' parameters: what is given on the command line, the help, and what the verb gets. A file that
cannot be written and a name that is no checkpoint are refused here, before any work."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any

from ..core.errors import InputError, library_errors_at
from ..core.verbs import Kind


def text_sources(arguments: Sequence[str], look: bool = False) -> dict[str, Any]:
    """The texts of `LANGUAGE=FILE` arguments, by language.

    Args:
        look: refuse files that are not there now, before any work.
    """
    from ..core.languages import check_named_once
    from ..data.sources import LanguageText

    sources: dict[str, LanguageText] = {}
    for argument in arguments:
        source = LanguageText.parse(argument)
        if source.language in sources:
            raise InputError(f"Language {source.language!r} is given twice; put its files into one folder.")
        sources[source.language] = source
        if look:
            source.files()
    check_named_once(list(sources))
    return sources


def check_file(path: Path, overwrite: bool) -> None:
    """Refuses a file that exists (without `overwrite`), is a folder or cannot be written, before the work of hours that
    it is for."""
    with library_errors_at(f"{path}: cannot be written there", OSError):
        if path.is_dir():
            raise InputError(f"{path}: is a folder; give the name of a file in it.")
        if path.exists() and not overwrite:
            raise InputError(f"{path}: exists already; choose another file or pass --overwrite.")
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        with TemporaryFile(dir=folder):
            pass


def codes(argument: str) -> list[str]:
    return [code.strip() for code in argument.split(",") if code.strip()]


def checkpoint(name: str, values: Mapping[str, Any]) -> str:
    """The name, which is that of a checkpoint's folder or a hub id."""
    from .source import local_checkpoint

    local_checkpoint(name, values.get("revision"))
    return name


def expanded(name: str, values: Mapping[str, Any]) -> str:
    """The name, which is not that of a dense checkpoint on this machine."""
    from .source import check_expanded

    check_expanded(name, values.get("revision"))
    return name


def each(names: Sequence[str], _: Mapping[str, Any] = {}) -> list[str]:
    """The names, all of them of checkpoints."""
    return [checkpoint(name, {}) for name in names]


def _writable(path: Path, values: Mapping[str, Any]) -> Path:
    check_file(path, values["overwrite"])
    return path


def _plan(path: Path, _: Mapping[str, Any]) -> Any:
    from ..planning.plan import Plan

    return Plan.load(path)


MODEL = "Folder or hub id of a checkpoint."
_TEXTS = "LANGUAGE=FILE; repeat for each language."

Model = Annotated[str, Kind(MODEL, checkpoint)]
Expanded = Annotated[str, Kind(MODEL, expanded)]
Models = Annotated[
    list[str], Kind("Folders or hub ids; the others are compared with the first.", each, metavar="MODELS...")
]
NewFolder = Annotated[Path, Kind("Folder to write.")]
NewFile = Annotated[Path, Kind("File to write.", _writable, is_file=True)]
PlanFile = Annotated[Any, Kind("plan.json of `plan`.", _plan, Path)]
Texts = Annotated[dict[str, Any], Kind(_TEXTS, lambda given, _: text_sources(given, look=True), list[str])]
Places = Annotated[dict[str, Any], Kind(_TEXTS, lambda given, _: text_sources(given), list[str])]  # not looked for
Codes = Annotated[Sequence[str], Kind("Codes of languages, e.g. el,hu,tr.", lambda given, _: codes(given), str)]
OldCodes = Annotated[Sequence[str], Kind("Codes of the old languages, e.g. en,es,zh.", lambda g, _: codes(g), str)]
NewCodes = Annotated[Sequence[str], Kind("Codes of the new languages, e.g. el,hu,tr.", lambda g, _: codes(g), str)]

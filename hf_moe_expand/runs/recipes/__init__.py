"""Recipes of published settings, one YAML file each, whose first line is `# METHOD: description`, and how a recipe
inherits. The files in `methods` are for recipes to inherit."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from os.path import isdir, isfile
from pathlib import Path
from typing import Any

from ...core.errors import InputError, errors_at
from ...core.jsonfile import read_text
from ...core.recipe_paths import filled_in
from ...core.yamlfile import parse_mapping

INHERITS = "inherits"


@dataclass(frozen=True)
class PackagedRecipe:
    """A recipe that comes with the package: the name of its file without `.yaml`, method and description from its first
    line, and the base's hub id."""

    name: str
    method: str
    base: str
    about: str


def packaged_files(folder: str = ".") -> dict[str, Path]:
    """The recipes' files by name, in alphabetical order; in the folder `methods`, files that recipes inherit."""
    found = (Path(__file__).parent / folder).glob("*.yaml")
    return {path.stem: path for path in sorted(found, key=lambda path: path.stem)}


def packaged_recipes() -> list[PackagedRecipe]:
    """The packaged recipes, for `recipes ls`."""
    recipes = []
    for name, path in packaged_files().items():
        method, _, about = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ").partition(": ")
        recipes.append(PackagedRecipe(name, method, WholeRecipe.load(path).mapping["base"], about))
    return recipes


def find_recipe(name: str, folder: Path = Path()) -> Path:
    """The file of that name in a folder, or else of the package."""
    files = packaged_files() | packaged_files("methods")
    if isfile(folder / name):  # which takes names that no file system does
        return folder / name
    if name in files:
        return files[name]
    if isdir(folder / name):
        raise InputError(f"{name}: is a folder; name a recipe's file in it.")
    raise InputError(f"{name}: no such file, and no packaged recipe of that name (`hf-moe-expand recipes ls`).")


def _never(key: str) -> bool:
    """Null is a value of no key."""
    return False


@dataclass(frozen=True)
class WholeRecipe:
    """A recipe with all that it inherits."""

    text: str  # of its own file
    files: list[Path]  # its own file, then those that it inherits from
    mapping: dict[str, Any]  # the values of all of them; a null for a key that no parent has stays

    @classmethod
    def load(cls, path: str | Path, keeps_null: Callable[[str], bool] = _never) -> "WholeRecipe":
        """Reads a recipe's file, and the files that it inherits from."""
        return cls.of_text(read_text(path), path, keeps_null)

    @classmethod
    def of_text(cls, text: str, path: str | Path, keeps_null: Callable[[str], bool] = _never) -> "WholeRecipe":
        """As `load`, from the text of the file `path`.

        Args:
            keeps_null: whether null is a value of a key; any other key is taken out by it.

        Raises:
            InputError: a file is missing, is no YAML mapping, or inherits from itself.
        """
        line = list(_line(text, path))
        whole: dict[str, Any] = {}
        for _, mapping in reversed(line):
            whole = _merged(mapping, whole, keeps_null)
        return cls(text, [file for file, _ in line], whole)

    @property
    def where(self) -> str:
        """Its files, for messages."""
        file, *parents = map(str, self.files)
        return f"{file} ({INHERITS} {', '.join(parents)})" if parents else file


def _line(text: str, path: str | Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A recipe and those that it inherits from, in turn: file and values."""
    file, seen = Path(path), {}
    while True:
        mapping = parse_mapping(text, file)
        parent = mapping.pop(INHERITS, None)
        yield file, mapping
        if parent is None:
            return
        seen[file.resolve()] = file
        with errors_at(f"{file}: {INHERITS}"):
            if not isinstance(parent, str) or not parent.strip():
                raise InputError(f"expected the path or the name of one recipe, found {parent!r}.")
            file = find_recipe(filled_in(parent), file.parent)
            if file.resolve() in seen:
                circle = " -> ".join(map(str, [*seen.values(), file]))
                raise InputError(f"a recipe inherits from itself ({circle}): take `{INHERITS}` out of one of them.")
        text = read_text(file)


def _merged(child: dict, parent: dict, keeps_null: Callable[[str], bool] = _never) -> dict:
    """The values of two mappings: mappings merge key by key, other values of the child replace the parent's, and a null
    takes a key out."""
    whole = dict(parent)
    for key, value in child.items():
        if isinstance(value, dict) and isinstance(parent.get(key), dict):
            whole[key] = _merged(value, parent[key])
        elif value is None and key in parent and not keeps_null(key):
            del whole[key]
        else:
            whole[key] = value
    return whole

"""Recipes of published settings, one YAML file each; its first line is `# METHOD: description`."""

import difflib
from dataclasses import dataclass
from pathlib import Path

from ..errors import InputError
from ..schema import unknown_key
from ..yamlfile import read_yaml

# The keys of a recipe before and after those of its stages, so that an unknown key is refused before torch is imported.
_FIRST = ("new", "analysis", "deviation", "plan", "expand")
_LAST = (
    "base", "output", "old", "test", "anchors", "revision", "seed", "expansions", "join", "self_written", "evaluation",
)  # fmt: skip


@dataclass(frozen=True)
class PackagedRecipe:
    """A recipe that comes with the package.

    Attributes:
        name: name of its file, without `.yaml`.
        method, about: method and description, from its first line.
        base: hub id of the base model.
    """

    name: str
    method: str
    base: str
    about: str


def packaged_files() -> dict[str, Path]:
    """The recipes' files by name, in alphabetical order."""
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("*.yaml"), key=lambda path: path.stem)}


def packaged_recipes() -> list[PackagedRecipe]:
    """The packaged recipes, for `recipes ls`."""
    recipes = []
    for name, path in packaged_files().items():
        method, _, about = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ").partition(": ")
        recipes.append(PackagedRecipe(name, method, read_yaml(path)["base"], about))
    return recipes


def readable_recipe(name: str) -> Path:
    """The file of a recipe, after the checks that need no torch, which takes seconds to import.

    Raises:
        InputError: `name` is no recipe, or the file is not YAML or has an unknown key.
    """
    file = find_recipe(name)
    mapping = read_yaml(file)
    known = recipe_keys()
    for key in mapping:
        if key not in known:
            raise InputError(f"{file}: {unknown_key(str(key), known)}")
    return file


def recipe_keys() -> list[str]:
    """The keys of a recipe, in order."""
    from ..stages import RECIPE_STAGES

    return [*_FIRST, *RECIPE_STAGES, *_LAST]


def find_recipe(name: str) -> Path:
    """The file of a recipe: a file of that name, or else a packaged recipe.

    Raises:
        InputError: `name` is neither; the message suggests the nearest packaged recipe.
    """
    files = packaged_files()
    if Path(name).is_file():
        return Path(name)
    if name in files:
        return files[name]
    near = difflib.get_close_matches(name.removesuffix(".yaml"), files, n=1, cutoff=0.5)
    hint = f"did you mean `{near[0]}`?" if near else "`hf-moe-expand recipes ls` shows them."
    raise InputError(f"{name}: no such file, and no packaged recipe of that name; {hint}")

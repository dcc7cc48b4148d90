"""Recipes of published settings, one YAML file each; its first line is `# METHOD: description`."""

import difflib
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import InputError
from ...core.yamlfile import read_yaml


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


def find_recipe(name: str) -> Path:
    """The file of that name, or else of a packaged recipe; an InputError suggests the nearest one."""
    files = packaged_files()
    if Path(name).is_file():
        return Path(name)
    if name in files:
        return files[name]
    near = difflib.get_close_matches(name.removesuffix(".yaml"), files, n=1, cutoff=0.5)
    hint = f"did you mean `{near[0]}`?" if near else "`hf-moe-expand recipes ls` shows them."
    raise InputError(f"{name}: no such file, and no packaged recipe of that name; {hint}")

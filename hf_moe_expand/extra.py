"""Imports of the packages of the extra `eval`, which only translation and evaluation need."""

from importlib import import_module
from types import ModuleType

from .errors import InputError


def import_extra(name: str) -> ModuleType:
    """Imports a module of a package that the extra `eval` installs.

    Raises:
        InputError: the package is not installed.
    """
    package = name.partition(".")[0]
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise InputError(f"{package} is not installed: pip install 'hf-moe-expand[eval]'.") from None

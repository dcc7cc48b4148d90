"""Imports of packages that an extra installs: `eval`, for translation and evaluation, and `gguf`."""

from importlib import import_module
from types import ModuleType

from .errors import InputError


def import_extra(name: str, extra: str = "eval") -> ModuleType:
    """Imports a module of a package that an extra installs; an InputError says how to install it."""
    package = name.partition(".")[0]
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise InputError(f"{package} is not installed: pip install 'hf-moe-expand[{extra}]'.") from None

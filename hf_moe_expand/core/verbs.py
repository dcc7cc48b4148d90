"""What the verbs of the command line say of their parameters. `cli/signature.py` makes their options from it."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NewType

from .errors import InputError

Verb = Callable[..., None]
# A parameter of this type gets the names of the options that the command line has.
Given = NewType("Given", frozenset[str])


@dataclass(frozen=True)
class Kind:
    """What a type says of its parameters.

    Attributes:
        help: where the docstring has none.
        read: makes the parameter's value of what the command line gives, and of all of its values by name.
        given: the type on the command line, where it is another.
        metavar: the argument's name in the help.
        is_file: whether it is a file to write, which `--overwrite` lets replace another.
    """

    help: str = ""
    read: Callable[[Any, Mapping[str, Any]], Any] | None = None
    given: Any = None
    metavar: str | None = None
    is_file: bool = False


@dataclass(frozen=True)
class Keys:
    """Of a settings class: keys without an option, and defaults in place of the class's own."""

    without: Collection[str] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Group:
    """A group of verbs, and its help: by name the function, its parameters that are no options, other types of
    parameters, and keywords for typer."""

    about: str
    verbs: dict[str, tuple[Verb, Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]] = field(default_factory=dict)

    def add(
        self, verb: Verb, name: str, fixed: Mapping[str, Any] = {}, types: Mapping[str, Any] = {}, **keywords: Any
    ) -> None:
        self.verbs[name] = (verb, fixed, types, keywords)

    def verb(self, name: str) -> Callable[[Verb], Verb]:
        """Adds the function below it."""

        def decorate(function: Verb) -> Verb:
            self.add(function, name)
            return function

        return decorate


def flag(name: str) -> str:
    return f"--{name.strip('_').replace('_', '-')}"


def without_effect(given: Given, beside: str, *taken: str) -> None:
    """Refuses options of the command line that have no effect beside the option `beside`: others than those `taken`."""
    if idle := sorted(given - {*taken}):
        raise InputError(f"{flag(idle[0])} has no effect beside {beside}: leave it out.")


def belongs(given: Given, to: str, *names: str) -> None:
    """Refuses options of the command line whose owner, the option `to`, it does not have."""
    if to not in given and (idle := [name for name in names if name in given]):
        raise InputError(f"{flag(idle[0])} belongs to {flag(to)}, which is not given.")

"""Fills the templates in `pages/`."""

from collections.abc import Callable, Mapping
from typing import Any

import jinja2


def render(template: str, facts: Mapping[str, Any], filters: Mapping[str, Callable[..., Any]] | None = None) -> str:
    """A template's text with these facts, which are escaped in HTML; a fact that is missing is an error."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__, "pages"), undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, autoescape=jinja2.select_autoescape(),
    )  # fmt: skip
    environment.filters |= filters or {}
    return environment.get_template(template).render(facts)

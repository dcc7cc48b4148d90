"""Merges YAML mappings, the nearest first: their values, and one text for them that keeps the files' comments."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ruamel.yaml.nodes import CollectionNode, MappingNode, Node, ScalarNode

from .errors import InputError
from .yamlfile import compose, parse_yaml, to_yaml

_WIDTH = 120
_COMMENT = re.compile(r"[\s,]*(#.*)?$")


def never(key: str) -> bool:
    """Null is a value of no key."""
    return False


def merged(child: dict, parent: dict, keeps_null: Callable[[str], bool] = never, start: str | None = None) -> dict:
    """The values of two mappings: mappings merge key by key, other values of the child replace the parent's, and a null
    takes a key out.

    A new key comes after the key that it follows in the child, or at the end.

    Args:
        keeps_null: whether null is a value of a key.
        start: the child's key that stands for the parent's beginning: keys that follow it come first.
    """
    order = list(parent)
    place = len(order)
    for key in child:
        if key in parent:
            place = order.index(key) + 1
        elif key == start:
            place = 0
        else:
            order.insert(place, key)
            place += 1
    whole: dict[Any, Any] = {}
    for key in order:
        value: Any = child.get(key, parent.get(key))
        if isinstance(value, dict) and isinstance(parent.get(key), dict):
            whole[key] = merged(child.get(key, {}), parent[key])
        elif value is not None or key not in child or key not in parent or keeps_null(key):
            whole[key] = value
    return whole


@dataclass
class _Entry:
    """A key of a mapping in a file.

    Attributes:
        above: the lines of comments above it.
        lines: the key and its value as written.
        code, beside: the key and its value in one line, and the comment there; of a block, that in the key's line.
        head, inner: the key's line and the keys of a mapping.
    """

    above: list[str]
    lines: list[str]
    code: str
    head: str
    beside: str
    inner: "dict[str, _Entry] | None"


def merged_text(whole: dict, texts: Sequence[str], left_out: str) -> str:
    """A text for the merged value of YAML texts, the nearest first, in which each key stands as the nearest text writes
    it. Without comments of its own there, a key has the comments above it that another text has. Where anchors and the
    like are in the way, the text has no comments.

    Args:
        left_out: a key that is not in the text; its comments stand at the beginning.
    """
    text, plain = _commented(whole, texts, left_out), to_yaml(whole)
    try:
        return text if to_yaml(parse_yaml(text, "")) == plain else plain
    except InputError:
        return plain


def _commented(whole: dict, texts: Sequence[str], left_out: str) -> str:
    trees = [_entries(cast(CollectionNode, compose(text)), text.split("\n"), text, 0) for text in texts]
    head, *_ = [_take_head(tree, left_out) for tree in trees]  # the others' speak of the others
    return "\n".join([*([head, ""] if head else []), *_lines(whole, trees), ""])


def _take_head(tree: "dict[str, _Entry]", left_out: str) -> str:
    """The comments at a file's beginning, which its first key then lacks: those before a blank line, or before the key
    that is left out."""
    first = next(iter(tree.values()), None)
    if first is None:
        return ""
    end = max((i for i, line in enumerate(first.above, 1) if not line), default=0)
    end = len(first.above) if tree.get(left_out) is first else end
    head, first.above = first.above[:end], first.above[end:]
    return "\n".join(head).strip("\n")


def _entries(node: CollectionNode, lines: list[str], text: str, done: int) -> dict[str, _Entry]:
    """The keys of a mapping of a text.

    Args:
        done: the first line that belongs to no key yet.
    """
    entries = {}
    for key, value in node.value:
        if not isinstance(key, ScalarNode):
            continue
        first, column = _position(text, key.start_mark.index)
        end = len(text[: _end(value)].rstrip())  # the mark of a block of text is behind its last line
        last, width = _position(text, end)
        code = re.sub(r"\s*\n\s*", " ", text[key.start_mark.index : end])
        beside = _beside(lines[last][width:])
        raw = [code + (f"  {beside}" if beside else "")]
        head, inner = f"{text[key.start_mark.index : key.end_mark.index]}:", None
        if not node.flow_style and last > first:
            raw = [line[column:] for line in lines[first : last + 1]]
        if isinstance(value, MappingNode):
            inner = _entries(value, lines, text, first + 1)
            if not value.flow_style:
                beside = _beside(lines[first][column + len(head) :])
        above = [line.strip() for line in lines[done:first]]
        above = [line for line in above if not line or line.startswith("#")]
        entries[key.value] = _Entry(above, raw, code, head, beside, inner)
        done = max(done, last + 1)
    return entries


def _position(text: str, index: int) -> tuple[int, int]:
    """Line and column of a place in a text."""
    return text.count("\n", 0, index), index - text.rfind("\n", 0, index) - 1


def _beside(rest: str) -> str:
    """The comment in the rest of a line, if nothing else is in it."""
    found = _COMMENT.match(rest)
    return (found[1] or "") if found else ""


def _end(node: Node) -> int:
    """The end of a value: that of its last part, since a block's mark is behind the comments that follow it."""
    if isinstance(node, CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return node.end_mark.index


def _lines(whole: dict, trees: Sequence[dict[str, _Entry]]) -> Iterator[str]:
    """The lines of a merged mapping, comments beside keys aligned."""
    run: list[tuple[str, str]] = []
    for key, value in whole.items():
        found = [tree[key] for tree in trees if key in tree]
        if not found:
            yield from to_yaml({key: value}).splitlines()
            continue
        entry = found[0]
        above = next((one.above for one in found if any(one.above)), [])
        inner = [one.inner for one in found if one.inner is not None]
        merges = isinstance(value, dict) and value and len(inner) > 1
        alone = len(entry.lines) == 1 and not merges
        if above or not alone:
            yield from _aligned(run)
            run = []
        yield from above
        if alone:
            run.append((entry.code, entry.beside))
        elif merges:
            beside = next((one.beside for one in found if one.inner is not None and one.beside), "")
            yield from _aligned([(entry.head, beside)])
            yield from (f"  {line}" if line else "" for line in _lines(value, inner))
        else:
            yield from entry.lines
    yield from _aligned(run)


def _aligned(run: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Lines of code with the comments beside them in one column."""
    width = max((len(code) for code, beside in run if beside), default=0)
    for code, beside in run:
        line = f"{code.ljust(width)}  {beside}"
        yield (line if len(line) <= _WIDTH else f"{code}  {beside}") if beside else code

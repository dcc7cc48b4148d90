"""Imports at the top of a module go one way, from later rooms to earlier ones, and make no cycle."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "hf_moe_expand"
BESIDE = ("model_cards", "modeling", "trainers")  # packages of the package, at the top of the repository
# From the leaves to the command line. Each line may import the lines above it; `` is the package itself.
ROOMS = (
    ("core", "model_cards", "modeling"),
    ("", "planning"),
    ("data", "trainers"),
    ("checkpoint",),
    ("inference",),
    ("evaluation",),
    ("analysis", "baselines"),
    ("stages",),
    ("runs",),
    ("report",),
    ("demo", "hub"),
    ("cli",),
    ("__main__",),
)


def modules() -> dict[str, tuple[Path, bool]]:
    """Dotted name inside the package, `` for the package itself, to the file and whether it is an `__init__`."""
    found = {}
    rooms = [(path, PACKAGE.parent) for room in BESIDE for path in (PACKAGE.parent / room).rglob("*.py")]
    for path, top in [(path, PACKAGE) for path in PACKAGE.rglob("*.py")] + rooms:
        parts = path.relative_to(top).with_suffix("").parts
        whole = parts[-1] == "__init__"
        found[".".join(parts[:-1] if whole else parts)] = (path, whole)
    return found


def statements(body: list[ast.AST]) -> Iterator[ast.AST]:
    """All that runs, inside functions too: not what is there for type checkers alone."""
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            yield from statements(list(node.orelse))
        else:
            yield node
            yield from statements(list(ast.iter_child_nodes(node)))


def imported(name: str, known: dict[str, tuple[Path, bool]]) -> set[str]:
    """Modules of the package that a module imports, inside its functions too."""
    path, whole = known[name]
    here = name.split(".") if name else []
    package = here if whole else here[:-1]
    found = set()
    for node in statements(list(ast.parse(path.read_text("utf-8")).body)):
        if isinstance(node, ast.Import):
            assert not any(alias.name.split(".")[0] == "hf_moe_expand" for alias in node.names), path
        if not isinstance(node, ast.ImportFrom):
            continue
        if not node.level:
            assert (node.module or "").split(".")[0] != "hf_moe_expand", f"{path}: imports are relative"
            continue
        above = package[: len(package) - node.level + 1]
        source = ".".join([*above, *([node.module] if node.module else [])])
        for alias in node.names:
            inner = f"{source}.{alias.name}".strip(".")
            found.add(inner if inner in known else source)
    return found - {name}


def test_imports_go_from_later_rooms_to_earlier_ones():
    known = modules()
    place = {room: number for number, line in enumerate(ROOMS) for room in line}
    assert {name.split(".")[0] for name in known} == set(place)
    backwards = []
    for name in known:
        room = name.split(".")[0]
        for other in imported(name, known):
            there = other.split(".")[0]
            if there != room and place[there] >= place[room]:
                backwards.append(f"{name} imports {other}")
    assert backwards == []


def test_modules_import_in_no_circle_and_what_loads_configurations_registers():
    known = modules()
    list(TopologicalSorter({name: imported(name, known) for name in known}).static_order())  # raises CycleError
    loads = {name for name, (path, _) in known.items() if "AutoConfig.from_pretrained" in path.read_text("utf-8")}
    assert loads == {"checkpoint.source", "hub.published"}
    assert all("modeling" in imported(name, known) for name in loads)

"""The documentation and the list of files agree with the repository; imports go one way."""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

from conftest import invoke

from hf_moe_expand.planning.methods import METHODS
from hf_moe_expand.runs.recipe import Recipe
from hf_moe_expand.runs.settings_page import _fields, settings_page
from hf_moe_expand.stages import all_stages, recipe_stages

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
GUIDES = [README, *sorted(DOCS.glob("*.md"))]
TOPS = ("modeling", "model_cards", "examples", "benchmarks", "docs", "tests")


def test_the_file_tree_is_the_repository():
    """Every line names a file or folder where it lies; every room of the package has its line."""
    (tree,) = re.findall(r"```\n(modeling/.*?)```", (DOCS / "extending.md").read_text("utf-8"), re.DOTALL)
    named, path = set(), []
    for line in tree.splitlines():
        indent, name, about = re.fullmatch(r"( *)([\w.]+/?)(?: +(.+))?", line).groups()
        path = [*path[: len(indent) // 2], name.rstrip("/")]
        place = ROOT.joinpath(*path)
        assert place.is_dir() if name.endswith("/") else place.is_file(), line
        assert (about and "  " not in about) or name == "hf_moe_expand/", line
        named.add("/".join(path))
    tops = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    rooms = {path.parent for top in ("hf_moe_expand", "trainers") for path in (ROOT / top).rglob("*.py")}
    wanted = {str(room.relative_to(ROOT)) for room in rooms} | {top for top in TOPS if top in tops}
    assert wanted <= named


def assert_leads_somewhere(file: Path, target: str) -> None:
    name, _, anchor = target.partition("#")
    there = file if not name else file.parent / name
    assert there.exists(), f"{file.name}: {target}"
    headings = re.findall(r"^#+ (.*)$", there.read_text("utf-8"), re.MULTILINE) if anchor else []
    anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    assert not anchor or anchor in anchors, f"{file.name}: {target}"


def test_links_lead_somewhere():
    for guide in (*GUIDES, ROOT / "CHANGELOG.md"):
        for target in re.findall(r"\]\(([^)]+)\)", guide.read_text("utf-8")):
            if not target.startswith("http"):
                assert_leads_somewhere(guide, target)


def test_pages_that_code_and_settings_name_exist():
    rooms = ("hf_moe_expand", "modeling", "trainers", "model_cards", "benchmarks", "examples", "tests")
    kinds = {".py", ".yaml", ".md", ".ipynb"}
    files = [file for room in rooms for file in (ROOT / room).rglob("*") if file.suffix in kinds]
    for file in (*files, ROOT / "Makefile", ROOT / "pyproject.toml"):
        for page in re.findall(r"\bdocs/\w+\.md(?:#[\w-]+)?", file.read_text("utf-8")):
            assert_leads_somewhere(ROOT / file.name, page)


def raised_messages() -> set[str]:
    """Every message that the package raises, with … for what is filled in."""

    def text(node: ast.AST) -> str:
        if isinstance(node, ast.BinOp):
            return text(node.left) + text(node.right)
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts)

    files = [file for room in ("hf_moe_expand", "modeling", "trainers") for file in (ROOT / room).rglob("*.py")]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text("utf-8")))]
    calls = [node.exc for node in nodes if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
    named = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    calls += [call for call in named if call.func.id == "InputError"]  # which a caller raises
    libraries = {f"{text(call.args[0])}: …." for call in named if call.func.id == "library_errors_at"}
    return {text(call.args[0]) for call in calls if call.args} | libraries


def test_the_troubleshooting_guide_quotes_what_the_code_says():
    quoted = set(re.findall(r"^### `(.*)`$", (DOCS / "troubleshooting.md").read_text("utf-8"), re.MULTILINE))
    assert quoted
    assert quoted <= raised_messages()


def test_the_page_of_settings_is_what_the_declarations_say():
    """`hf-moe-expand recipes settings --out docs/settings.md` prints it anew, every key with its description."""
    page, sections = settings_page(), {}
    assert (DOCS / "settings.md").read_text("utf-8") == page == invoke("recipes", "settings")
    for part in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        title = part.partition("\n")[0].replace("`", "")
        sections[title] = dict(re.findall(r"^- `(\w+)`(?: \(.*?\))?: (.+)$", part, re.MULTILINE))
        for first, names in re.findall(r"^- as in `(\w+)`: (.*)$", part, re.MULTILINE):
            sections[title] |= {name: sections[first][name] for name in re.findall(r"`(\w+)`", names)}
        assert all(sections[title].values()), title
    stages = {key: set(_fields(stage.settings)) for key, stage in all_stages().items()}
    assert list(stages) == ["post_pretrain", "group", "joint", "graft", "gates", "review", "average", "adapt", "dense"]
    wanted = {key if key in recipe_stages() else f"A file of train {key}": stages[key] for key in stages}
    wanted["plan"] = {key for method in METHODS.values() for key in method.all_keys()}
    wanted["masking"] = {"expert_output", "final_output", "conditional_routing", "gating_dropout", "lora_dropout"}
    assert {title: set(sections[title]) for title in wanted} == wanted
    for name, field in Recipe.model_fields.items():
        assert name in sections or name in sections["A recipe"], name
        assert field.description, name


def test_every_file_of_the_package_is_in_the_wheel():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    beside = project["package-dir"]
    assert set(beside.values()) == {"modeling", "trainers", "model_cards"}

    def folder_of(package):
        top = next((top for top in beside if f"{package}.".startswith(f"{top}.")), "")
        return ROOT / (beside.get(top, "") + package.removeprefix(top)).replace(".", "/")

    shipped = {file for package in project["packages"] for file in folder_of(package).glob("*.py")}
    for package, patterns in project["package-data"].items():
        shipped |= {file for pattern in patterns for file in folder_of(package).glob(pattern)}
    folders = [ROOT / "hf_moe_expand", *(ROOT / folder for folder in beside.values())]
    files = {file for folder in folders for file in folder.rglob("*") if "__pycache__" not in file.parts}
    assert {file for file in files if file.is_file()} == shipped


def equations_of_the_papers() -> dict[str, str]:
    """The index: what stands behind each equation."""
    text = (DOCS / "papers.md").read_text("utf-8").partition("## Where each equation lives\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^- \*\*(.+?)\*\*: (.+)$", re.sub(r"\n  +", " ", text), re.MULTILINE))


def test_the_paper_index_leads_to_code():
    found = []
    for line in equations_of_the_papers().values():
        assert "`" in line, line
        folder = ROOT  # a file without its folder lies in that of the file before it
        for file, names in re.findall(r"`([\w/]+\.py)`:((?: `[\w.]+`,?)+)", line):
            places = [ROOT / file, ROOT / "hf_moe_expand" / file, folder / file]
            place = next((place for place in places if place.is_file()), None)
            assert place is not None, f"{line}: {file}"
            folder, text = place.parent, place.read_text("utf-8")
            for name in re.findall(r"`(?:\w+\.)?(\w+)`", names):
                assert re.search(rf"^ *(?:def|class) {name}\b", text, re.MULTILINE), f"{file}: {name}"
                found.append(name)
    assert found


# The numbered equations of each paper; Elbayad et al. print no 6.
LAST = {"MoE-LPR": 11, "LayerMoE": 16, "DMoE": 4, "Elbayad et al.": 9, "DeltaMoE": 9}
EQUATIONS = {paper: {*range(1, last + 1)} - ({6} if "Elbayad" in paper else set()) for paper, last in LAST.items()}


def test_the_paper_index_has_every_equation():
    found = {paper: set() for paper in EQUATIONS}
    for named in equations_of_the_papers():
        for paper, numbers in re.findall(rf"({'|'.join(EQUATIONS)}) ((?:\d+(?:–\d+)?(?:, )?)+)", named):
            for first, last in re.findall(r"(\d+)(?:–(\d+))?", numbers):
                found[paper] |= {*range(int(first), int(last or first) + 1)}
    assert found == EQUATIONS


def test_the_documentation_stays_short():
    pages = sorted(DOCS.glob("*.md"))
    assert len(pages) <= 18, [page.name for page in pages]
    words = {page.name: len(page.read_text("utf-8").split()) for page in pages}
    assert sum(words.values()) <= 30_000, words
    assert len((DOCS / "speed.md").read_text("utf-8").splitlines()) <= 80


PACKAGE = ROOT / "hf_moe_expand"
BESIDE = ("model_cards", "modeling", "trainers")  # packages of the package, at the top of the repository
# From the leaves to the command line. Each line may import the lines above it; `` is the package itself.
ROOMS = (
    ("core", "model_cards", "modeling"), ("", "planning"), ("data", "trainers"), ("checkpoint",), ("inference",),
    ("evaluation",), ("analysis", "baselines"), ("stages",), ("runs",), ("report",), ("demo", "hub"), ("cli",),
    ("__main__",),
)  # fmt: skip


@cache
def modules() -> dict[str, Path]:
    """Each file of the package by its dotted name inside it, `` for the package itself."""
    files = [(path, PACKAGE) for path in PACKAGE.rglob("*.py")]
    files += [(path, ROOT) for room in BESIDE for path in (ROOT / room).rglob("*.py")]
    names = [".".join(path.relative_to(top).with_suffix("").parts) for path, top in files]
    return {name.removesuffix("__init__").rstrip("."): path for name, (path, _) in zip(names, files, strict=True)}


def statements(body: list[ast.AST]) -> Iterator[ast.AST]:
    """All that runs, inside functions too: not what is there for type checkers alone."""
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            yield from statements(list(node.orelse))
        else:
            yield node
            yield from statements(list(ast.iter_child_nodes(node)))


@cache
def imported(name: str) -> set[str]:
    """Modules of the package that a module imports, inside its functions too."""
    path, found = modules()[name], set()
    whole = f"{PACKAGE.name}.{name}".rstrip(".")
    for node in statements(list(ast.parse(path.read_text("utf-8")).body)):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        names = [alias.name for alias in node.names]
        if isinstance(node, ast.Import) or not node.level:
            outside = names if isinstance(node, ast.Import) else [node.module]
            assert not any(one.split(".")[0] == PACKAGE.name for one in outside), f"{path}: imports are relative"
            continue
        here = whole if path.stem == "__init__" else whole.rpartition(".")[0]
        source = resolve_name("." * node.level + (node.module or ""), here).removeprefix(PACKAGE.name).lstrip(".")
        inner = {one: f"{source}.{one}".strip(".") for one in names}
        found |= {inner[one] if inner[one] in modules() else source for one in names}
    return found - {name}


def test_imports_go_from_later_rooms_to_earlier_ones():
    place = {room: number for number, line in enumerate(ROOMS) for room in line}
    room = lambda name: name.split(".")[0]  # noqa: E731
    assert {*map(room, modules())} == {*place}
    pairs = [(name, other) for name in modules() for other in imported(name) if room(name) != room(other)]
    assert [pair for pair in pairs if place[room(pair[1])] >= place[room(pair[0])]] == []


def test_modules_import_in_no_circle_and_what_loads_configurations_registers():
    list(TopologicalSorter({name: imported(name) for name in modules()}).static_order())  # raises CycleError
    loads = {name for name, path in modules().items() if "AutoConfig.from_pretrained" in path.read_text("utf-8")}
    assert loads == {"checkpoint.source", "hub.published"}
    assert all("modeling" in imported(name) for name in loads)

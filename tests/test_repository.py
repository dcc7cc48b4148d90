"""What the documentation says of the code, and the package's list of files, are what is there."""

import ast
import re
import tomllib
import typing
from dataclasses import MISSING, fields, is_dataclass
from inspect import Parameter
from pathlib import Path

from hf_moe_expand import settings
from hf_moe_expand.planning.methods import DEFAULT_METHOD, METHODS
from hf_moe_expand.recipe import Recipe

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
GUIDES = [README, *sorted(DOCS.glob("*.md"))]


def test_the_readmes_file_tree_is_the_repository():
    (tree,) = re.findall(r"```\n(modeling/.*?)```", README.read_text("utf-8"), re.DOTALL)
    named = set(re.findall(r"\w+\.py", tree))
    shipped = {file.name for room in ("hf_moe_expand", "modeling", "trainers") for file in (ROOT / room).rglob("*.py")}
    others = {file.name for room in ("benchmarks", "tests") for file in (ROOT / room).glob("*.py")}
    assert shipped - {"__init__.py"} <= named <= shipped | others


def test_links_lead_somewhere():
    for guide in GUIDES:
        for target in re.findall(r"\]\(([^)]+)\)", guide.read_text("utf-8")):
            if target.startswith("http"):
                continue
            file, _, anchor = target.partition("#")
            there = guide if not file else guide.parent / file
            assert there.exists(), f"{guide.name}: {target}"
            headings = re.findall(r"^#+ (.*)$", there.read_text("utf-8"), re.MULTILINE) if anchor else []
            anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert not anchor or anchor in anchors, f"{guide.name}: {target}"


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
    return {text(call.args[0]) for call in calls if call.args}


def test_the_troubleshooting_guide_quotes_what_the_code_says():
    quoted = re.findall(r"^### `(.*)`$", (DOCS / "troubleshooting.md").read_text("utf-8"), re.MULTILINE)
    assert 12 <= len(quoted) <= 24
    assert len(re.findall(r"^### ", (DOCS / "troubleshooting.md").read_text("utf-8"), re.MULTILINE)) == len(quoted)
    assert set(quoted) <= raised_messages()


def documented_settings() -> dict[str, dict[str, str]]:
    """Of each heading of settings.md, or `key of ...` of a table: key to default."""
    found, section = {}, ""
    for line in (DOCS / "settings.md").read_text("utf-8").splitlines():
        if named := re.match(r"#+ (?:A )?`?(\w+)`?", line) or re.match(r"\| key of `([\w ]+)`", line):
            section = named.group(1)
        elif row := re.match(r"\| `(\w+)` \|(.*?)\| .+ \|$", line):
            found.setdefault(section, {})[row.group(1)] = row.group(2).strip()
    return found


def test_every_setting_is_documented_with_its_default():
    sections = documented_settings()
    stages = {"analysis", "deviation", "expand", "post_pretrain", "review", "group", "normal", "graft"}
    classes = {name: typing.get_type_hints(Recipe)[name] for name in stages | {"evaluation"}}
    classes = {name: (typing.get_args(hint) or [hint])[0] for name, hint in classes.items()}
    classes |= {
        "recipe": Recipe, "masking": settings.MaskingSettings, "validation": settings.ValidationSettings,
        "train adapt": settings.AdaptSettings, "train dense": settings.DenseSettings, "lora": settings.LoraSettings,
    }  # fmt: skip
    keys = {name: key.default for method in METHODS.values() for name, key in method.keys.items()}
    shown = {Parameter.empty: "must be given", None: "–"}
    wanted = {name: shown[default] if default in shown else str(default) for name, default in keys.items()}
    assert sections.pop("plan") == {"method": DEFAULT_METHOD, **wanted}
    assert set(sections) == set(classes)
    for name, cls in classes.items():
        wanted = {}
        for field in fields(cls):
            value = field.default if field.default is not MISSING else None
            if field.default_factory is not MISSING:
                value = field.default_factory()
            shown = "must be given" if field.default is MISSING is field.default_factory else "–"
            shown = shown if value is None else "" if is_dataclass(value) else str(value)
            wanted[field.name] = {"True": "true", "False": "false"}.get(shown, shown)
        if cls is Recipe:
            wanted = {key: value for key, value in wanted.items() if key not in stages | {"plan"}}
        assert sections[name] == wanted, name


def test_every_file_of_the_package_is_in_the_wheel():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    rooms = {package: ROOT / package.replace(".", "/") for package in project["packages"]}
    rooms |= {package: ROOT / folder for package, folder in project["package-dir"].items()}
    shipped = {file for folder in rooms.values() for file in folder.glob("*.py")}
    for package, patterns in project["package-data"].items():
        shipped |= {file for pattern in patterns for file in rooms[package].glob(pattern)}
    there = {
        file
        for room in ("hf_moe_expand", "modeling", "trainers", "model_cards")
        for file in (ROOT / room).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert there == shipped

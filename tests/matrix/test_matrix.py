"""Every form x every operation: a cell runs, or raises its one sentence. There is no skip."""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
from conftest import IN_MEMORY
from datasets import disable_progress_bars

from hf_moe_expand.core.errors import InputError
from matrix import surgery  # noqa: F401  # the other half of the columns
from matrix.alone import Alone
from matrix.forms import Form, all_forms, name_of, refused, refusing
from matrix.operations import OPERATIONS
from matrix.together import refusals, table
from matrix.two_ranks import Ranks

FORMS = {name_of(parts): parts for parts in all_forms()}
MADE = "made"  # the one cell of a form that is refused
CELLS = [
    pytest.param(name, operation, id=f"{name}:{operation}")
    for name, parts in FORMS.items()
    for operation in ([MADE] if refused(parts) else OPERATIONS)
]


@pytest.fixture(scope="session")
def forms():
    """`forms("lora+gated")`: a form, made where the first of its cells runs."""
    disable_progress_bars()
    made = {}

    def get(name):
        if name not in made:
            for before in made.values():
                shutil.rmtree(before.root)
            made.clear()
            made[name] = Form(FORMS[name], root, helpers)
        return made[name]

    with TemporaryDirectory(dir=IN_MEMORY) as folder:
        root, helpers = Path(folder, "forms"), SimpleNamespace(ranks=Ranks(), alone=Alone(Path(folder, "home")))
        root.mkdir()
        yield get
        for helper in vars(helpers).values():
            helper.stop()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("name", "operation"), CELLS)
def test_cell(name, operation, forms, record_property, monkeypatch):
    monkeypatch.setenv("CI", "true")  # TRL sends no telemetry
    form = forms(name)
    sentences = refused(form.parts, None if operation == MADE else operation)
    run = (lambda one: one.folder) if operation == MADE else OPERATIONS[operation]
    if not sentences:
        run(form)
    else:
        with pytest.raises((InputError, ValueError)) as raised:
            run(form)
        assert any(said in str(raised.value) for said in sentences), raised.value
    record_property("cell", "refused" if sentences else "ran")


def test_every_refusal_has_a_cell():
    cells = [(FORMS[cell.values[0]], cell.values[1]) for cell in CELLS]
    seen = {pair for parts, name in cells for pair in refusing(parts, None if name == MADE else name)}
    assert [pair for pair in refusals() if pair not in seen] == []


def test_the_page_says_what_is_refused():
    assert f"\n{table()}\n" in (Path(__file__).parents[2] / "docs" / "choose.md").read_text("utf-8")

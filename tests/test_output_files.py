"""Files that commands write are looked at before the work, not after it."""

import os

import pytest
from conftest import write_texts

from hf_moe_expand.cli.common import check_file
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.data.sources import LanguageText


def test_a_file_that_can_be_written_passes_and_leaves_no_trace(tmp_path):
    check_file(tmp_path / "new" / "folder" / "out.json", overwrite=False)
    assert not list(tmp_path.iterdir())
    (tmp_path / "there.json").write_text("{}")
    check_file(tmp_path / "there.json", overwrite=True)
    assert (tmp_path / "there.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("there.json", "exists already; choose another file or pass --overwrite"),
        ("folder", "is a folder; give the name of a file in it"),
        ("there.json/out.json", "cannot be written there"),
        ("n" * 300, "cannot be written there"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_in_one_sentence(tmp_path, name, message):
    (tmp_path / "there.json").write_text("{}")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match=message):
        check_file(tmp_path / name, overwrite=False)


def test_text_of_the_same_relative_path_is_another_text(tmp_path, monkeypatch):
    for project, text in (("one", "first"), ("two", "other")):
        (tmp_path / project).mkdir()
        write_texts(tmp_path / project / "el.jsonl", [text])
    times = (tmp_path / "one" / "el.jsonl").stat()
    os.utime(tmp_path / "two" / "el.jsonl", ns=(times.st_atime_ns, times.st_mtime_ns))
    for project, text in (("one", "first"), ("two", "other")):
        monkeypatch.chdir(tmp_path / project)
        assert LanguageText("el", "el.jsonl").load()["text"] == [text]

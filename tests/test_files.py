"""Files of text: kinds, compression, encodings, folders, and what is left out of them."""

import bz2
import gzip
import json
import lzma
import os
import sys
import zipfile

import pyarrow
import pytest
from conftest import refused, write_texts
from pyarrow import parquet

from hf_moe_expand import cli
from hf_moe_expand.core.saying import say_once
from hf_moe_expand.data.files import count_lines, format_of, read_rows, text_files
from hf_moe_expand.data.sources import LanguageText

TEXTS = ["ένα", "δύο", "τρία"]
BODY = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in TEXTS).encode()


def zipped(path, **members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


COMPRESSIONS = {
    ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress,
    ".zst": lambda content: pyarrow.Codec("zstd").compress(content, asbytes=True),
}  # fmt: skip


def load(path, language="el"):
    return LanguageText(language, str(path)).load()["text"][:]


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_compressed_files_are_read_in_all_their_parts(tmp_path, suffix):
    compress = COMPRESSIONS[suffix]
    file = tmp_path / f"a.jsonl{suffix}"
    file.write_bytes(compress(BODY[:9]) + compress(BODY[9:]))
    assert load(file) == TEXTS
    plain = tmp_path / f"a.TXT{suffix.upper()}"
    plain.write_bytes(compress("ένα\n\nδύο\n".encode()))
    assert load(plain) == ["ένα", "δύο"]
    assert count_lines(plain) == 3
    assert load(tmp_path) == ["ένα", "δύο", *TEXTS]
    whole = compress(BODY * 99)
    for damaged in (whole[: len(whole) // 2], BODY):  # torn, and of another kind
        file.write_bytes(damaged)
        refused(load, file, says=rf"a\.jsonl\{suffix}: cannot be read")


def test_an_archive_of_one_file_is_read_and_one_of_several_refused(tmp_path):
    zipped(tmp_path / "one.jsonl.zip", **{"el.jsonl": BODY})
    assert load(tmp_path / "one.jsonl.zip") == TEXTS
    zipped(tmp_path / "two.jsonl.zip", **{"a.jsonl": BODY, "b.jsonl": BODY})
    refused(load, tmp_path / "two.jsonl.zip", says=r"two\.jsonl\.zip: .*holds 2 files")
    (tmp_path / "wrong.txt.zip").write_bytes(b"no archive")
    refused(load, tmp_path / "wrong.txt.zip", says=r"wrong\.txt\.zip: cannot be read")
    content = bytearray((tmp_path / "one.jsonl.zip").read_bytes())
    content[content.index(b"PK\x01\x02") + 10] = 99  # the method's number
    (tmp_path / "odd.jsonl.zip").write_bytes(content)
    refused(load, tmp_path / "odd.jsonl.zip", says=r"odd\.jsonl\.zip: cannot be read: .*compression method")


def test_a_kind_is_told_by_the_name():
    kinds = {"a.jsonl": ".jsonl", "A.JSONL": ".jsonl", "a.txt.zst": ".txt", "a.parquet": ".parquet"}
    assert {name: format_of(name) for name in kinds} == kinds
    assert not any(map(format_of, ("a.parquet.gz", "a.json", "a.gz", "jsonl", "a.jsonl.gz.bak")))


def test_every_file_of_a_folder_is_read_or_said(tmp_path, capsys):
    for name in ("a.jsonl", "in/b.jsonl", "readme.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(BODY)
    about = ["README.txt", "LICENSE.txt", "LICENCE-MIT.txt", "in/copying.TXT", "NOTICE.txt", "sha256sums.txt"]
    for name in (*about, "notes.md", "b.parquet.gz", ".hidden.txt", "in/news.txt"):
        (tmp_path / name).write_text("some words")
    (tmp_path / "void.jsonl").touch()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x.txt").write_text("never read")
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    (tmp_path / "linked").symlink_to(tmp_path / "in")
    (tmp_path / "later.jsonl").symlink_to(tmp_path / "a.jsonl")
    files, left_out = text_files(str(tmp_path))
    assert [os.path.relpath(file, tmp_path) for file in files] == [
        "a.jsonl", "in/b.jsonl", "in/news.txt", "readme.jsonl",
    ]  # fmt: skip
    assert {reason: sorted(names) for reason, names in left_out.items()} == {
        "about the data, by its name": sorted(about), "of another kind": ["b.parquet.gz", "notes.md"],
        "hidden": [".git/", ".hidden.txt"], "empty": ["void.jsonl"], "a link to a folder": ["linked/"],
        "no file, or a link to none": ["gone.jsonl"], "another name of a file that is read": ["later.jsonl"],
    }  # fmt: skip
    assert load(tmp_path) == [*TEXTS, *TEXTS, "some words", *TEXTS]
    said = capsys.readouterr().err
    for names in left_out.values():
        assert all(name in said for name in names)
    assert load(tmp_path / "*.jsonl") == [*TEXTS, *TEXTS]
    assert f"{tmp_path / 'void.jsonl'} (empty)" in capsys.readouterr().err
    for name in ("gone.jsonl", "later.jsonl", "linked", "void.jsonl"):
        (tmp_path / name).unlink()
    assert load(f"file://{tmp_path}") == [*TEXTS, *TEXTS, "some words", *TEXTS]
    assert "README.txt, " in capsys.readouterr().err


def test_a_folder_of_readmes_alone_holds_no_text(tmp_path):
    (tmp_path / "README.txt").write_text("This data is free.")
    refused(load, tmp_path, says=r"holds no text; .*README\.txt \(about the data, by its name\)")
    assert load(tmp_path / "README.txt") == ["This data is free."]  # asked for by its name


@pytest.mark.parametrize(("kind", "suffix"), [(".jsonl", ""), (".txt", ".gz")])
def test_bytes_that_are_no_utf8_are_told_by_their_line(tmp_path, kind, suffix):
    line = b'{"text": "caf\xe9"}\n' if kind == ".jsonl" else b"caf\xe9\n"
    good = BODY if kind == ".jsonl" else "ένα\n\nδύο\n".encode()
    content = good * 20 + line + good * 5000
    (tmp_path / f"a{kind}{suffix}").write_bytes(gzip.compress(content) if suffix else content)
    refused(load, tmp_path / f"a{kind}{suffix}", says=rf"a{kind}{suffix}:61: not UTF-8 text: .*byte 0xe9 in position")


@pytest.mark.parametrize("kind", [".jsonl", ".txt"])
def test_byte_order_marks_stand_before_any_line(tmp_path, kind):
    mark = b"\xef\xbb\xbf"
    part = BODY if kind == ".jsonl" else "\r\n".join([*TEXTS, ""]).encode()  # of Windows
    (tmp_path / f"a{kind}").write_bytes(mark + mark + part + mark + part + mark)
    assert load(tmp_path / f"a{kind}") == TEXTS * 2


def test_parquet_holds_strings_in_several_ways(tmp_path):
    columns = [pyarrow.array(TEXTS, kind()) for kind in (pyarrow.string, pyarrow.large_string, pyarrow.string_view)]
    tags = pyarrow.array(["el", "en", "ell"]).dictionary_encode()
    for number, column in enumerate([*columns, *(column.dictionary_encode() for column in columns[:2])]):
        parquet.write_table(pyarrow.table({"text": column, "language": tags}), tmp_path / f"{number}.parquet")
        assert load(tmp_path / f"{number}.parquet") == ["ένα", "τρία"]


ROWS = [{"text": None}, {"text": "ένα"}, {"text": " \n"}, {"text": ""}, {"text": "one", "language": "en"}]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "hub"])
def test_the_same_rows_are_kept_of_every_kind_and_the_others_counted(tmp_path, kind, capsys):
    rows = [{"text": None, "language": None, **row} for row in ROWS]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    file = tmp_path / f"train.{kind}"
    if kind == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    elif kind == "hub":  # the library takes a folder for a hub id
        file = f"hub:{tmp_path}"
        (tmp_path / "train.jsonl").write_bytes(lines)
    else:
        file.write_bytes(gzip.compress(lines) if kind.endswith("gz") else lines)
    for _ in range(2):  # the second time from the cache, as in another process
        say_once.cache_clear()
        assert load(file) == ["ένα"]
        expected = "language 'el': 1 document kept, 4 rows left out: 3 without text, 1 tagged 'en'"
        assert expected in capsys.readouterr().err


def test_text_and_translations_in_one_file_are_both_read(tmp_path):
    pytest.importorskip("language_data", reason="the extra `eval` is not installed")
    rows = [{"text": "ένα", "translation": None}, {"text": None, "translation": {"en": "two", "el": "δύο"}}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert load(tmp_path / "a.jsonl") == load(tmp_path / "a.parquet")
    assert load(tmp_path / "a.jsonl") == ["ένα", "English: two → Greek: δύο", "Greek: δύο → English: two"]
    columns = pyarrow.array(["one"], pyarrow.large_string()), pyarrow.array(["ένα"], pyarrow.string_view())
    rows = pyarrow.StructArray.from_arrays(columns, names=["en", "el"])
    parquet.write_table(pyarrow.table({"translation": rows}), tmp_path / "a.parquet")
    assert load(tmp_path / "a.parquet") == ["English: one → Greek: ένα", "Greek: ένα → English: one"]


@pytest.mark.parametrize("as_pairs", [False, True])
def test_a_row_whose_text_is_none_is_refused_whatever_stands_beside_it(tmp_path, as_pairs):
    rows = [
        {"text": None, "translation": ["ένα"]}, {"text": None, "translation": {"el": 5}},
        {"text": None, "translation": 5},
        {"text": 5, "translation": {"el": "ένα", "en": "one"}}, {"text": ["ένα"]}, {"translation": {"el": ["ένα"]}},
        {"text": "ένα", "translation": {"el": "\ud800", "en": "one"}}, {"translation": {"el": "ένα", "\ud800": "one"}},
    ]  # fmt: skip
    for number, row in enumerate(rows):
        file = tmp_path / f"{number}.jsonl"
        file.write_text(json.dumps(row) + "\n")
        says = rf"{number}\.jsonl:1: (has no string under `text`, nor|not Unicode)"
        refused(LanguageText("el", str(file)).load, as_pairs, says=says)


def test_parquet_with_two_columns_of_one_name_is_refused(tmp_path):
    for name, *names in (("text", "text", "text"), ("language", "text", "language", "language")):
        table = pyarrow.Table.from_arrays([pyarrow.array(["el"])] * len(names), names=names)
        parquet.write_table(table, tmp_path / "a.parquet")
        refused(load, tmp_path / "a.parquet", says=f"two columns are named `{name}`")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_names_that_are_not_unicode_are_refused_or_counted(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.jsonl").write_bytes(BODY)
    odd = tmp_path / "\udcff.jsonl"
    odd.write_bytes(BODY)
    assert load(tmp_path) == TEXTS
    assert "not Unicode" in LanguageText("el", str(tmp_path)).files_left_out()
    refused(load, odd, says="not Unicode")
    monkeypatch.setattr(sys, "argv", ["hf-moe-expand", "inspect", str(odd)])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert "not Unicode; rename" in capsys.readouterr().err


def test_text_of_the_same_relative_path_is_another_text(tmp_path, monkeypatch):
    for project, text in (("one", "first"), ("two", "other")):
        (tmp_path / project).mkdir()
        write_texts(tmp_path / project / "el.jsonl", [text])
    times = (tmp_path / "one" / "el.jsonl").stat()
    os.utime(tmp_path / "two" / "el.jsonl", ns=(times.st_atime_ns, times.st_mtime_ns))
    for project, text in (("one", "first"), ("two", "other")):
        monkeypatch.chdir(tmp_path / project)
        assert load("el.jsonl") == [text]


def test_the_share_that_is_read_of_a_file_grows_to_the_whole(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(BODY * 9999)
    shares = [row.read for row in read_rows(tmp_path / "a.jsonl")]
    assert shares == sorted(shares)
    assert shares[0] < 0.1
    assert shares[-1] == 1.0

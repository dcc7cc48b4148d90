"""YAML files: numbers as in YAML 1.2, and one sentence with the line for whatever is wrong."""

import pytest
import yaml

from hf_moe_expand.core.errors import InputError
from hf_moe_expand.core.yamlfile import read_yaml, to_yaml


def read(tmp_path, text, encoding="utf-8"):
    (tmp_path / "a.yaml").write_bytes(text.encode(encoding))
    return read_yaml(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4), ("3E-4", 3e-4), ("-1e3", -1000.0), ("1.", 1.0), (".5", 0.5), ("1.5e-3", 1.5e-3), ("+2", 2),
        ("5e5", 5e5), ("010", 10), ("0o10", 8), ("0x1F", 31), ("-0", 0), ("100_000", 100_000), (".inf", float("inf")),
        ("1:30", "1:30"), ("2026-01-31", "2026-01-31"), ("2026-13-45", "2026-13-45"), ("1.2.3", "1.2.3"), ("1e", "1e"),
        ("'3e-4'", "3e-4"), ("true", True), ("off", "off"), ("~", None), ("", None), ("[1, 3e-4]", [1, 3e-4]),
        ("{x: 3e-4}", {"x": 3e-4}), ("1-2", "1-2"), ("e5", "e5"),
    ],
)  # fmt: skip
def test_values(tmp_path, text, value):
    found = read(tmp_path, f"a: {text}\n")["a"]
    assert found == value
    assert type(found) is type(value)


def test_what_is_written_reads_back_as_it_was(tmp_path):
    value = {"b": "3e-4", "a": [3e-4, 1e-5, 10, None, True, {"x": "no: x"}], "é": "010", "text": "a\nb", "none": {}}
    assert read(tmp_path, to_yaml(value)) == value
    assert list(read(tmp_path, to_yaml(value))) == list(value)
    assert yaml.safe_load(to_yaml({"rate": 5e-5, "scale": -1e20})) == {"rate": 5e-5, "scale": -1e20}  # YAML 1.1


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_windows_files_are_read(tmp_path, encoding):
    assert read(tmp_path, "a: 1\r\nb: |\r\n  x\r\n  y\r\n", encoding) == {"a": 1, "b": "x\ny\n"}


def test_mappings_may_be_merged_and_used_twice(tmp_path):
    found = read(tmp_path, "one: &a {x: 1, y: 2}\ntwo: &b {<<: *a, y: 3}\nthree: {<<: *b, z: 4}\nfour: *a\n")
    assert found["three"] == {"x": 1, "y": 3, "z": 4}
    assert found["four"] == {"x": 1, "y": 2}


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", 'line 3: found duplicate key "a"'),
        ("x:\n  a: {b: 1, b: 2}\n", 'line 2: found duplicate key "b"'),
        (BOMB, "aliases that stand for over 1,000,000 values"),
        ("b: 1\na: &a [*a]\n", "an alias inside the value that it names"),
        ("x: 1\na: " + "[" * 5000, "recursion depth exceeded"),
        ("a:\n" + "".join(" " * n + f"b{n}:\n" for n in range(1, 3000)), "recursion depth exceeded"),
        ("x: 1\na: " + "9" * 5000 + "\n", "5000 digits"),
        ("a: 0x" + "f" * 5000 + "\n", "an integer of more than 100 digits"),
        ("a: !!int x\n", "invalid literal for int"),
        ("a: !!float x\n", "could not convert string to float"),
        ("a: !!python/object/apply:os.system [ls]\n", "line 1: could not determine a constructor"),
        ("x: 1\na: [1, 2\n", "line 3: "),
        ("x: 1\na: b: c\n", "line 2: mapping values are not allowed"),
        ("a: 1\n---\nb: 2\n", "line 2: "),
        ("a: *b\n", "line 1: found undefined alias"),
        ("x: 1\na: \x07\n", "line 2: .*#x0007"),
        ('a: "\\ud800"\n', "surrogates not allowed"),
        ("\tx: 1\n", "line 1: found character"),
        ("", "found nothing"),
        ("- a\n", "found list"),
    ],
    ids=lambda text: text[:24],
)
def test_what_is_wrong_is_one_sentence(tmp_path, text, message):
    with pytest.raises(InputError, match=rf"^{tmp_path}/a\.yaml: .*{message}") as error:
        read(tmp_path, text)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400

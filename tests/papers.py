"""The table of values in papers.yaml, and the texts of the papers, which lie outside the repository."""

import re
from collections.abc import Iterator
from math import isclose
from pathlib import Path
from typing import Any

from conftest import DATA

from hf_moe_expand.core.yamlfile import read_yaml

TEXTS = DATA.parent / "papers"
FILES = {
    "LayerMoE": "000_*.txt", "MoE-LPR": "001_*.txt", "Elbayad et al.": "002_*.txt", "DMoE": "003_*.txt",
    "DeltaMoE": "004_*.txt", "METHODS": "METHODS.md",
}  # fmt: skip
HEADING = re.compile(r"^(?:#+ |\d(?:\.\d)? [A-Z]|Appendix [A-Z] |[A-H](?:\.\d)? [A-Z])")
NUMBER = re.compile(r"(\d[\d,]*(?:\.\d+)?)(?:e(-?\d+)|\^\{(-?\d+)\}|( billion|[kKM]\b|B\b))?")
UNITS = {" billion": 1e9, "B": 1e9, "M": 1e6, "k": 1e3, "K": 1e3}
WORDS = {"one": 1, "two": 2, "three": 3, "four": 4, "ten": 10}


def facts() -> Iterator[tuple[str, str, str, str, Any]]:
    """Paper, section, recipes or row of the page, key, value."""
    for paper, sections in read_yaml(Path(__file__).with_name("papers.yaml")).items():
        for section, of in sections.items():
            for words, values in of.items():
                yield from ((paper, section, words, key, value) for key, value in values.items())


def section_text(paper: str, section: str) -> str:
    """From the heading to the next one."""
    (file,) = TEXTS.glob(FILES[paper])
    lines = file.read_text("utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if re.match(rf"(?:#+ )?{re.escape(section)}(?:\W|$)", line))
    end = next((i for i in range(start + 1, len(lines)) if HEADING.match(lines[i])), len(lines))
    return "\n".join(lines[start + 1 : end])


def has(text: str, value: Any) -> bool:
    """Whether a text has a number, or all words of a text."""
    if isinstance(value, str):
        return all(re.search(rf"(?<![a-z]){re.escape(word)}(?![a-z])", text, re.IGNORECASE) for word in value.split())
    numbers = [WORDS[word] for word in re.findall(r"[a-z]+", text.lower()) if word in WORDS]
    for digits, exponent, power, unit in NUMBER.findall(text):
        number = float(digits.replace(",", ""))
        number = number ** float(power) if power else number * 10 ** float(exponent or 0)
        numbers.append(number * UNITS.get(unit, 1))
    return any(isclose(number, value, rel_tol=1e-6) for number in numbers)

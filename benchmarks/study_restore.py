"""Takes up a study from its published JSON, on another machine: finished rows are not made again."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from study_changes import DOMAINS
from study_settings import row_digest

from hf_moe_expand.errors import InputError
from hf_moe_expand.jsonfile import read_json, write_json

# Machines differ in the last digits of a score; another training of the small base differs in the second.
SAME = 1e-3


def restore(studies: Sequence[Any], published: Path, write: Callable[[Any], None] = print) -> None:
    """Writes the results and sweeps of a `report --json` into the study's folder, after scoring the base here.

    Rows of other settings are left out, and named. What the folder has already stays.

    Args:
        studies: the study at each of its lengths.

    Raises:
        InputError: the file is no report, or its base has other scores than the one here.
    """
    report = read_json(published, "a report of the study")
    lengths = report.get("lengths", {"None": report})
    if not all(isinstance(one, Mapping) and "rows" in one for one in lengths.values()):
        raise InputError(f"{published}: is no JSON of `study.py report`: it has no `rows`.")
    _check_base(studies[0].result("base", 0), lengths, published)
    for study in studies:
        rows = lengths.get(str(study.tokens), {"rows": {}})["rows"]
        for name, row in rows.items():
            if not study.settings["rows"].get(name):
                continue  # the base, or a row that these settings lack
            digest, seeds = row_digest(study.settings, name), row["seeds"]
            if any(one.get("settings") != digest for one in seeds):
                write(f"{name}, {study.tokens} tokens: was made with other settings; left out")
                continue
            files = {study.result_file(name, one.get("seed", place)): one for place, one in enumerate(seeds)}
            contents = {file: {**one, "path": str(study.out / "restored")} for file, one in files.items()}
            if row["sweep"].get("settings") == digest:
                contents[study.sweep_file(name)] = row["sweep"]
            for file, content in contents.items():
                if not file.exists():
                    write_json(file, content)
            write(f"{name}, {study.tokens} tokens: {len(seeds)} seeds")


def _check_base(here: Mapping[str, Any], lengths: Mapping[str, Any], published: Path) -> None:
    theirs = next((one["rows"]["base"]["seeds"][0] for one in lengths.values() if "base" in one["rows"]), None)
    if theirs is None:
        raise InputError(f"{published}: has no row `base`, by which its base is compared with this one.")
    for domain in DOMAINS:
        for code, score in theirs["scores"][domain].items():
            ours = here["scores"][domain].get(code)
            if ours is None or abs(ours / score - 1) > SAME:
                raise InputError(
                    f"{published}: its base has {score:.4f} bits per byte of {domain} in {code}, but this one has "
                    f"{'none' if ours is None else f'{ours:.4f}'}: rows of different bases are not mixed. A base that "
                    "was trained on another kind of machine is another base."
                )

"""Takes up a study from its published JSON, on another machine: finished rows are not made again."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from study_changes import DOMAINS
from study_settings import row_digest

from hf_moe_expand.core.errors import InputError
from hf_moe_expand.core.jsonfile import read_json, write_json

# Machines differ in the last digits of a score; another training of the small base differs by one or two percent.
SAME, RETRAINED = 1e-3, 2e-2


def restore(
    studies: Sequence[Any], published: Path, retrained: bool = False, write: Callable[[Any], None] = print
) -> None:
    """Writes the results and sweeps of a `report --json` into the study's folder, after scoring the base here.

    Rows of other settings are left out, and named. What the folder has already stays.

    Args:
        studies: the study at each of its lengths.
        retrained: the base here may be another training of the published one; each restored row then keeps its own
            base's scores, against which its changes are.

    Raises:
        InputError: the file is no report, or its base has other scores than the one here.
    """
    report = read_json(published, "a report of the study")
    lengths = report.get("lengths", {"None": report})
    if not all(isinstance(one, Mapping) and "rows" in one for one in lengths.values()):
        raise InputError(f"{published}: is no JSON of `study.py report`: it has no `rows`.")
    bases = [
        seed.get("scores", {}) for one in lengths.values() for seed in one["rows"].get("base", {}).get("seeds", [])
    ]
    theirs = next((scores for scores in bases if all(scores.get(domain) for domain in DOMAINS)), None)
    if theirs is None:
        raise InputError(f"{published}: has no scores of a row `base`, by which its base is compared with this one.")
    same = _is_same_base(studies[0].result("base", 0)["scores"], theirs, published, retrained)
    own_base = {} if same else {"base": {"scores": theirs}}
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
            added = {"path": str(study.out / "restored")}
            contents = {file: {**own_base, **one, **added} for file, one in files.items()}
            if row["sweep"].get("settings") == digest:
                contents[study.sweep_file(name)] = row["sweep"]
            for file, content in contents.items():
                if not file.exists():
                    write_json(file, content)
            write(f"{name}, {study.tokens} tokens: {len(seeds)} seeds")


def _is_same_base(here: Mapping[str, Any], theirs: Mapping[str, Any], published: Path, retrained: bool) -> bool:
    """Whether the base of a report is the one here; refuses another model and, unless `retrained`, another training."""
    pairs = [(domain, code, score) for domain in DOMAINS for code, score in theirs[domain].items()]
    differences = {(domain, code): abs(here[domain].get(code, 0) / score - 1) for domain, code, score in pairs}
    (domain, code), most = max(differences.items(), key=lambda entry: entry[1])
    if most <= (RETRAINED if retrained else SAME):
        return most <= SAME
    ours, told = here[domain].get(code), ""
    if most <= RETRAINED:
        told = "; --retrained takes rows of another training of the base, each with its own base's scores"
    raise InputError(
        f"{published}: its base has {theirs[domain][code]:.4f} bits per byte of {domain} in {code}, but this one has "
        f"{'none' if ours is None else f'{ours:.4f}'}: rows of different bases are not mixed{told}."
    )

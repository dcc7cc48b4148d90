"""Chooses the published files of a checkpoint folder, refuses foreign code in them, and checks that they load in a
fresh process without this package."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from .. import modeling
from ..checkpoint.compare import BASE_CHECK
from ..checkpoint.reader import CheckpointReader
from ..checkpoint.source import CODE, TOKENIZER_FILES, lies_inside, load_expanded_config, run_of
from ..core.errors import InputError
from ..core.jsonfile import read_json
from ..core.progress import Bar
from ..core.recipe_paths import RECIPE, SETTINGS
from ..modeling import MODEL_CLASSES
from ..modeling.part import parts_text
from ..modeling.part_expansion_only import RECORD

CARD = "README.md"
EVALUATION = "evaluation.json"
PROVENANCE = (RECIPE, SETTINGS, "plan.json", "analysis.json")

_PROGRAM = """
import sys
sys.modules["hf_moe_expand"] = None  # importing it fails, as if it were not installed
import torch
from pathlib import Path
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer
folder = sys.argv[1]
try:
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    auto_class = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    if (Path(folder) / "tokenizer_config.json").is_file():
        AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model, info = auto_class.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            raise ValueError(kind.replace("_", " ") + ": " + ", ".join(map(str, sorted(info[kind])[:5])))
    with torch.no_grad():
        token = torch.zeros(1, 1, dtype=torch.long)
        logits = model(token, **({"decoder_input_ids": token} if config.is_encoder_decoder else {})).logits
    if not logits.isfinite().all():
        raise ValueError("its logits are not finite")
except Exception as error:
    print(f"{type(error).__name__}: {error}")
    sys.exit(1)
"""
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|_KEY", re.IGNORECASE)


def published_files(folder: Path, include: Sequence[str] = (), say: Callable[[str], None] = print) -> dict[str, Path]:
    """Maps names in the repository to local files: weights, configuration, code, tokenizer, the records of the run that
    the folder lies in, and what to `include`. Says which other files of the folder stay here."""
    names = [file.name for file in CheckpointReader(folder).files]
    patterns = ("config.json", "*.py", *TOKENIZER_FILES, "*.safetensors.index.json", RECORD, CARD, EVALUATION)
    for pattern in (*patterns, *PROVENANCE):
        names += [str(file.relative_to(folder)) for file in folder.glob(pattern)]
    files = {Path(name).as_posix(): folder / name for name in [*names, *include]}
    for name, file in files.items():
        inside = not Path(name).is_absolute() and ".." not in Path(name).parts and lies_inside(folder, file)
        if not (inside and file.is_file()):
            raise InputError(f"{folder}: {name} is no file in the folder, or a link that leads out of it.")
    if left := {file.name for file in folder.iterdir()} - {Path(name).parts[0] for name in files} - {BASE_CHECK}:
        say(f"not published: {', '.join(sorted(left))}")
    # The nearest folder comes last: in a run with several expansions, each has its own plan.
    near = [folder.resolve().parent, run_of(folder)]
    made_by = {name: there / name for there in near[::-1] for name in PROVENANCE if there and (there / name).is_file()}
    return dict(sorted({**(made_by if near[1] else {}), **files}.items()))


def check_loads_alone(folder: Path) -> None:
    """Loads the checkpoint with transformers alone, offline, and runs one token through it. Runs only this package's
    code, and without access tokens."""
    check_code(folder)
    with tempfile.TemporaryDirectory() as empty:
        environment = {name: value for name, value in os.environ.items() if not _SECRET.search(name)}
        environment |= {
            "HF_HUB_OFFLINE": "1",
            "HF_MODULES_CACHE": empty,  # reads the code from the folder, not from a cache of an earlier version
            "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
            "HF_TOKEN_PATH": str(Path(empty) / "token"),  # this file does not exist
        }
        command = [sys.executable, "-c", _PROGRAM, str(folder.resolve())]
        with Bar(desc="load in a fresh process", bar_format="{desc}: {elapsed}", leave=False):
            done = subprocess.run(
                command, env=environment, cwd=empty, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                check=False,
            )  # fmt: skip
    if done.returncode:
        lines = (done.stdout.strip() or done.stderr.strip() or f"exit code {done.returncode}").splitlines()
        reason = lines[0] if done.stdout.strip() else lines[-1]
        raise InputError(
            f"{folder}: does not load in a fresh process with transformers alone, so it is not published: {reason}"
        )


def check_code(folder: Path) -> None:
    """Checks that a checkpoint folder holds and names only this package's code, byte for byte."""
    again = "Load it with `load_for_inference`, and save it again."
    own, parts = Path(modeling.__file__).parent, [*load_expanded_config(folder).parts]
    for file in sorted(folder.rglob("*.py")):
        name = str(file.relative_to(folder))
        if name not in CODE:
            raise InputError(f"{folder}: {name} is not code of this package, so it is not run; move it away.")
        text = (own / name).read_text("utf-8") if name != "parts.py" else parts_text(parts)
        if file.read_text("utf-8") != text:
            raise InputError(f"{folder}: {name} differs from this package's, so it is not run. {again}")
    for file in sorted(folder.glob("*.json")):
        if b'"auto_map"' not in file.read_bytes():
            continue
        named = read_json(file, "a JSON file").get("auto_map")
        ours = [model_class._auto_map for _, model_class, _ in MODEL_CLASSES.values()]
        known = isinstance(named, dict) and any(named.items() <= auto_map.items() for auto_map in ours)
        if not (file.name == "config.json" and known):
            raise InputError(f"{folder}: {file.name} names code that is not this package's (auto_map). {again}")

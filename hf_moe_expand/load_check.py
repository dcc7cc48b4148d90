"""Checks, in a fresh process, that a checkpoint loads without this package, before it is published."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from . import modeling
from .checkpoint.source import CODE
from .errors import InputError
from .jsonfile import read_json
from .modeling import MODEL_CLASSES

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


def check_loads_alone(folder: Path) -> None:
    """Loads the checkpoint with transformers alone, offline, and runs one token through it. Runs only this package's
    code, and without access tokens.

    Raises:
        InputError: see `check_code`; or the checkpoint does not load (the message gives the reason).
    """
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
        done = subprocess.run(
            command, env=environment, cwd=empty, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    if done.returncode:
        lines = (done.stdout.strip() or done.stderr.strip() or f"exit code {done.returncode}").splitlines()
        reason = lines[0] if done.stdout.strip() else lines[-1]
        raise InputError(
            f"{folder}: does not load in a fresh process with transformers alone, so it is not published: {reason}"
        )


def check_code(folder: Path) -> None:
    """Checks that a checkpoint folder holds and names only this package's code, byte for byte.

    Raises:
        InputError: a file differs; the message names it, and says how to rewrite the checkpoint.
    """
    again = (
        "Write it again with this package's code: python -c \"from hf_moe_expand.models import load_for_inference; "
        f"load_for_inference('{folder}')[0].save_pretrained('{folder}')\"."
    )
    own = Path(modeling.__file__).parent
    for file in sorted(folder.rglob("*.py")):
        name = str(file.relative_to(folder))
        if name not in CODE:
            raise InputError(f"{folder}: {name} is not code of this package, so it is not run; move it away.")
        if file.read_bytes() != (own / name).read_bytes():
            raise InputError(f"{folder}: {name} differs from this package's, so it is not run. {again}")
    for file in sorted(folder.glob("*.json")):
        if b'"auto_map"' not in file.read_bytes():
            continue
        named = read_json(file, "a JSON file").get("auto_map")
        ours = [model_class._auto_map for _, model_class, _ in MODEL_CLASSES.values()]
        if not (file.name == "config.json" and isinstance(named, dict) and any(_within(named, map_) for map_ in ours)):
            raise InputError(f"{folder}: {file.name} names code that is not this package's (auto_map). {again}")


def _within(named: dict, ours: dict) -> bool:
    return all(ours.get(name) == place for name, place in named.items())

"""Does a checkpoint load where this package is not installed? Tried in a fresh process before it is published."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from .errors import InputError

_PROGRAM = """
import sys
sys.modules["hf_moe_expand"] = None  # importing it fails, as where it is not installed
import torch
from pathlib import Path
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
folder = sys.argv[1]
try:
    AutoConfig.from_pretrained(folder, trust_remote_code=True)
    if (Path(folder) / "tokenizer_config.json").is_file():
        AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model, info = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            raise ValueError(kind.replace("_", " ") + ": " + ", ".join(map(str, sorted(info[kind])[:5])))
    with torch.no_grad():
        logits = model(torch.zeros(1, 1, dtype=torch.long)).logits
    if not logits.isfinite().all():
        raise ValueError("its logits are not finite")
except Exception as error:
    print(f"{type(error).__name__}: {error}")
    sys.exit(1)
"""


def check_loads_alone(folder: Path) -> None:
    """Loads the checkpoint with transformers alone, offline, and runs one token through it.

    Raises:
        InputError: it does not load, with the reason.
    """
    with tempfile.TemporaryDirectory() as empty:
        # Its code is read from the folder, not from a cache of an earlier version.
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": empty}
        command = [sys.executable, "-c", _PROGRAM, str(folder.resolve())]
        done = subprocess.run(command, env=environment, cwd=empty, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stdout.strip() or done.stderr.strip() or f"exit code {done.returncode}").splitlines()
        reason = said[0] if done.stdout.strip() else said[-1]
        raise InputError(
            f"{folder}: does not load in a fresh process with transformers alone, so it is not published: {reason}"
        )

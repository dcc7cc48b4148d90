"""Makes virtual environments for the tools that the benchmarks compare with."""

import json
import subprocess
import sys
from pathlib import Path

import torch

_DONE = ".installed"


class UnavailableError(Exception):
    """A tool that cannot be installed. The message is the reason."""


def environment(folder: Path, *packages: str) -> Path:
    """The Python of an environment with the packages and this environment's version of torch; made once.

    Packages come from the index that the user's pip is set up for. Nothing is installed where torch would bring CUDA
    libraries, several gigabytes that a measurement on a CPU does not use.

    Raises:
        UnavailableError: pip does not find the packages or a common version of what they need, or torch would bring
            CUDA libraries.
    """
    python = folder.absolute() / "bin" / "python"
    if (folder / _DONE).exists():
        return python
    # Not the local version, such as 2.13.0+cpu, which no public index has.
    wanted = [*packages, f"torch=={torch.__version__.partition('+')[0]}"]
    _run(sys.executable, "-m", "venv", "--clear", str(folder))
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    cuda = [name for name in planned(_run(*pip, "--dry-run", "--report=-", *wanted)) if name.startswith("nvidia-")]
    if cuda:
        raise UnavailableError(f"pip would install {len(cuda)} CUDA packages, such as {cuda[0]}")
    _run(*pip, *wanted)
    (folder / _DONE).touch()
    return python


def planned(report: str) -> list[str]:
    """Names of the packages that pip would install, from its report."""
    return sorted(entry["metadata"]["name"] for entry in json.loads(report)["install"])


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        why = next((line for line in said if line.startswith("ERROR: ")), said[-1] if said else "no reason given")
        raise UnavailableError(why.removeprefix("ERROR: "))
    return done.stdout

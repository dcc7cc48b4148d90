"""What text costs before and during a training: streamed beside packed first.

    python benchmarks/data.py TOKENIZER TEXT.jsonl --tokens 5e6 50e6 --workers 0 2

TEXT.jsonl's documents are repeated, with a number and in another order of their lines, up to the tokens, in Parquet
shards. A row is one way in a process of its own: seconds to the first batch, tokens a second of one processor
(packed: of the packing; streamed: of the loader, with nothing else to do), the share of its time that a trainer waits
which takes `--pace` tokens a second, the memory above that of the imports (all processes, without what they share), and
bytes of disk a token. The last lines forecast `--forecast` tokens by the rates of the largest text. Linux only.
"""

import contextlib
import json
import math
import sys
import time
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from timing import in_own_process, parser, report
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from hf_moe_expand.data.packing import pack_texts
from hf_moe_expand.data.sources import LanguageText
from hf_moe_expand.data.stream import TextStream, as_they_are
from hf_moe_expand.stages.streaming import PREFETCHED
from hf_moe_expand.trainers import LanguageMix

ROWS, BLOCK, SHARDS, ACCUMULATION = 8, 1024, 8, 1
HEAD = ["tokens", "way", "seconds to step 1", "tokens a CPU second", "waits", "memory MB", "bytes of disk a token"]


def write_text(folder: Path, source: Path, tokens: float, tokenizer: Any) -> None:
    """Shards of about so many tokens."""
    texts = [json.loads(line)["text"] for line in source.read_text("utf-8").splitlines()]
    each = sum(map(len, tokenizer(texts[:200]).input_ids)) / len(texts[:200])
    count = int(tokens / each)
    for shard in range(SHARDS):
        rows = []
        for number in range(shard, count, SHARDS):
            lines = texts[number % len(texts)].split("\n")
            turn = number // len(texts) % len(lines)
            rows.append(f"{number}\n" + "\n".join(lines[turn:] + lines[:turn]))
        pq.write_table(pa.table({"text": rows}), folder / f"{shard}.parquet", row_group_size=1000)


def memory() -> int:
    """Bytes of this process and its children that they do not share."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    found = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found += process.memory_full_info().uss
    return found


def processor_seconds() -> float:
    """Of this process and its children."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(process.cpu_times().user + process.cpu_times().system for process in processes)


def packed(folder: Path, tokenizer: Any, options: Any) -> tuple[float, ...]:
    """Seconds to the first batch, tokens a second, bytes of memory and bytes of disk a token."""
    with TemporaryDirectory(dir=folder.parent) as cache:
        datasets.config.HF_DATASETS_CACHE = Path(cache)
        before, started, processor = memory(), time.perf_counter(), processor_seconds()
        with contextlib.redirect_stdout(sys.stderr):
            found = pack_texts({"el": LanguageText("el", str(folder)).load()}, tokenizer, BLOCK, options.seed)
            dict(found.dataset[0])
        seconds, tokens = time.perf_counter() - started, sum(found.tokens.values())
        disk = sum(file.stat().st_size for file in Path(cache).rglob("*") if file.is_file())
        processor = processor_seconds() - processor
    return seconds, tokens / processor, float("nan"), memory() - before, disk / tokens


def streamed(folder: Path, tokenizer: Any, options: Any, workers: int, tokens: float) -> tuple[float, ...]:
    """As `packed`; `waits` is the share of a trainer's time that it waits for batches."""
    before, started = memory(), time.perf_counter()
    stream = TextStream({"el": LanguageText("el", str(folder))}, tokenizer, BLOCK, options.seed)
    stream.begin(LanguageMix([1]), ROWS, ACCUMULATION, workers=workers)
    context = "fork" if workers else None  # as a training on Linux, not as `in_own_process`
    loader = DataLoader(
        stream, batch_size=None, num_workers=workers, multiprocessing_context=context, collate_fn=as_they_are,
        prefetch_factor=PREFETCHED if workers else None,
    )  # fmt: skip
    of_batch, most, batches = ROWS * BLOCK, 0, stream.received(loader)
    next(batches)
    first = time.perf_counter() - started
    count = max(int(min(tokens, options.most) / of_batch / 2), 20)
    processor = processor_seconds()
    for number, _ in enumerate(islice(batches, count)):
        if number % 50 == 0:
            most = max(most, memory() - before)
    speed = count * of_batch / (processor_seconds() - processor)
    waited, step = 0.0, of_batch / options.pace
    began = time.perf_counter()
    for _ in range(count):
        asked = time.perf_counter()
        next(batches)
        waited += time.perf_counter() - asked
        time.sleep(max(step - (time.perf_counter() - asked), 0))
    return first, speed, waited / (time.perf_counter() - began), max(most, memory() - before), 0.0


def main() -> None:
    options = parser(__doc__, 1, on_device=False)
    options.add_argument("tokenizer", help="folder or hub id")
    options.add_argument("text", type=Path, help="a .jsonl file")
    options.add_argument("--tokens", type=float, nargs="+", default=[5e6, 50e6], help="(%(default)s)")
    options.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2], help="of a stream (%(default)s)")
    options.add_argument("--pace", type=float, default=300_000, help="tokens a second of the trainer (%(default)s)")
    options.add_argument("--most", type=float, default=20e6, help="tokens to take of a stream (%(default)s)")
    options.add_argument("--forecast", type=float, default=24e9, help="tokens (%(default)s)")
    options = options.parse_args()
    torch.set_num_threads(1)
    tokenizer, rows, last = AutoTokenizer.from_pretrained(options.tokenizer), [], {}
    for tokens in options.tokens:
        with TemporaryDirectory() as place:
            folder = Path(place) / "text"
            folder.mkdir()
            write_text(folder, options.text, tokens, tokenizer)
            ways = {"packed first": in_own_process(packed, folder, tokenizer, options)}
            for workers in options.workers:
                ways[f"streamed, {workers} workers"] = in_own_process(
                    streamed, folder, tokenizer, options, workers, tokens
                )
        for way, (first, speed, waits, used, disk) in ways.items():
            waiting = "" if math.isnan(waits) else f"{waits:.1%}"
            rows.append([
                f"{tokens:,.0f}", way, f"{first:.1f}", f"{speed:,.0f}", waiting, f"{used / 1e6:,.0f}", f"{disk:.1f}",
            ])  # fmt: skip
        last = ways
    report("text", HEAD, rows, options)
    print(f"\n{options.forecast:,.0f} tokens on two cores:")
    for way, (first, speed, _, _, disk) in last.items():
        hours = options.forecast / speed / 2 / 3600
        begins = f"begins after {first:.0f} s" if way.startswith("streamed") else f"begins after {hours:,.1f} hours"
        print(f"{way}: {begins}, {options.forecast * disk / 1e9:,.0f} GB of disk, at least {hours:,.1f} hours in all")


if __name__ == "__main__":
    main()

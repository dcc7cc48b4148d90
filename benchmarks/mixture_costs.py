"""What a mixture of 30 B parameters, 3 B of them active, costs to expand with added experts, and its forecast.

    python benchmarks/mixture_costs.py --layers 48 --scratch /tmp --out mixture_costs.md

The base has the configuration of Qwen3-30B-A3B and the layout of its checkpoint, a tensor for each expert's matrix in
shards of about 4 GB, of which `--layers` are made as sparse files: all zeros, which take no room on the disk. The
expansion is written in full: 1.3 GB a layer. Peak memory is resident memory above that of the parent process, which has
only imported the modules. Linux only.
"""

import json
import struct
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from timing import in_own_process, parser, report, reset_peak, resident_bytes
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.core_model_loading import revert_weight_conversion

from hf_moe_expand import Plan, expand_checkpoint
from hf_moe_expand.checkpoint.stored import network_of
from hf_moe_expand.forecast import size_of
from hf_moe_expand.inspection import inspect_plan

SHARD = 4_000_000_000


def configuration(layers: int) -> Qwen3MoeConfig:
    """That of Qwen3-30B-A3B, with some of its 48 layers."""
    return Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
        norm_topk_prob=True, max_position_embeddings=40960, tie_word_embeddings=False, dtype="bfloat16",
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip


def write_base(folder: Path, layers: int) -> None:
    """A checkpoint of zeros in sparse shards."""
    config = configuration(layers)
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tensors = revert_weight_conversion(model, model.state_dict())
    shards: list[dict[str, Any]] = [{}]
    for name, tensor in tensors.items():
        if sum(one.nbytes for one in shards[-1].values()) + tensor.nbytes > SHARD:
            shards.append({})
        shards[-1][name] = tensor
    where = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        where |= dict.fromkeys(shard, file)
        _write_sparse(folder / file, shard)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")


def _write_sparse(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    header, end = {}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    written = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(written)) + written)
        file.truncate(8 + len(written) + end)


def measured(base: Path, out: Path, plan: Plan, width: int) -> tuple[float, int]:
    """Seconds, and peak bytes; run it in a process of its own."""
    imports = resident_bytes()
    reset_peak()
    start = perf_counter()
    expand_checkpoint(base, out, plan, expert_kind="added", expert_width=width)
    return perf_counter() - start, resident_bytes(peak=True) - imports


def main(arguments: list[str] | None = None) -> None:
    options_parser = parser(__doc__, repeats=1, on_device=False)
    options_parser.add_argument("--layers", type=int, default=48, help="layers of the base (%(default)s)")
    options_parser.add_argument("--width", type=int, default=512, help="width of the added experts (%(default)s)")
    options_parser.add_argument("--scratch", type=Path, help="folder for the checkpoints")
    options = options_parser.parse_args(arguments)
    plan = Plan("moe-lpr", [2] * options.layers, old=["en"], new=["el"])
    with TemporaryDirectory(dir=options.scratch, prefix="mixture_costs-") as name:
        base, out = Path(name) / "base", Path(name) / "out"
        write_base(base, options.layers)
        seconds, peak = in_own_process(measured, base, out, plan, options.width)
        sizes = [sum(file.stat().st_size for file in folder.glob("*.safetensors")) for folder in (base, out)]
        print("\n".join(inspect_plan(base, plan, expert_kind="added", expert_width=options.width)))
    said = [str(options.layers), *(f"{size / 1e9:,.2f}" for size in sizes), f"{seconds:,.0f}", f"{peak / 2**20:,.0f}"]
    titles = ["layers", "base, GB", "expanded, GB", "seconds", "peak MiB"]
    parameters = size_of(network_of(configuration(options.layers)))
    report(f"A mixture of {parameters:,} parameters, added experts of width {options.width}", titles, [said], options)


if __name__ == "__main__":
    main()

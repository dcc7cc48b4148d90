"""Expansion: a dense checkpoint's FFNs become experts; streamed, one tensor in memory."""

import copy
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, dot_natural_key, rename_source_key
from transformers.dynamic_module_utils import custom_object_save

from .. import __version__
from ..errors import InputError
from ..modeling import LayerMoEConfig, LayerMoEForCausalLM, decoder_ffns
from ..modeling.expanded_ffn import init_router
from ..planning.plan import Plan
from .reader import CheckpointReader, TensorInfo
from .source import COMPANIONS, load_base_config, resolve_checkpoint
from .writer import DEFAULT_SHARD_SIZE, OutputTensor, check_output, new_folder, tensor_bytes, write_weights

EXPERT_INITS = ("copy", "random")
_TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


@dataclass(frozen=True)
class ExpansionReport:
    """What `expand_checkpoint` did: parameters before and after, and tensors that the backbone does not know."""

    out: Path
    base_parameters: int
    parameters: int
    left_out: list[str]


def expand_checkpoint(
    base: str | os.PathLike,
    out: str | os.PathLike,
    plan: Plan,
    *,
    expert_init: str = "copy",
    seed: int = 0,
    revision: str | None = None,
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
) -> ExpansionReport:
    """Writes the expanded checkpoint of a dense one.

    Args:
        base: folder or hub id of the dense checkpoint (safetensors).
        out: folder to write; appears whole or not at all.
        plan: experts and classifiers of each layer.
        expert_init: `copy` makes every new expert a copy of the original FFN, so that the expanded model computes what
            the dense one did; `random` draws their weights as the backbone's own initialisation does
            (MoE-LPR's ablation "w/o EC").
        seed: of the routers and of random experts.
        revision: of a hub id.
        max_shard_size: largest weight file.
        overwrite: replace `out` if it exists.

    Raises:
        InputError: the base cannot be expanded, the plan is for another model, or `out` cannot be written.
    """
    if expert_init not in EXPERT_INITS:
        raise InputError(f"expert_init is {expert_init!r}; known: {', '.join(EXPERT_INITS)}.")
    folder = resolve_checkpoint(base, revision)
    check_output(out, overwrite, folder)
    dense_config = load_base_config(folder)
    if len(plan.experts_per_layer) != dense_config.num_hidden_layers:
        raise InputError(
            f"The plan is for {len(plan.experts_per_layer)} layers, but {base} has {dense_config.num_hidden_layers}."
        )
    reader = CheckpointReader(folder)
    config = LayerMoEConfig.from_dense(
        dense_config,
        num_experts_per_layer=plan.experts_per_layer,
        classifier_layers=plan.classifier_layers,
        router_top_k=plan.top_k,
    )
    tensors, left_out = _outputs(reader, dense_config, config, expert_init, seed)
    base_parameters = sum(info.numel for info in reader.tensors.values())
    parameters = sum(tensor_numel(tensor.shape) for tensor in tensors)
    config.expansions = [_provenance(plan, base, revision, folder, expert_init, seed, base_parameters, parameters)]
    config.architectures = [LayerMoEForCausalLM.__name__]
    config.auto_map = dict(LayerMoEForCausalLM._auto_map)
    with new_folder(out, overwrite, needed_bytes=sum(tensor.nbytes for tensor in tensors)) as partial:
        config.save_pretrained(partial)
        custom_object_save(LayerMoEForCausalLM, partial)
        copy_companions(folder, partial)
        with tqdm(total=len(tensors), desc="expand", unit="tensor") as bar:
            write_weights(partial, [_counted(tensor, bar) for tensor in tensors], max_shard_size)
    return ExpansionReport(Path(out), base_parameters, parameters, left_out)


def tensor_numel(shape: Iterable[int]) -> int:
    """Elements of a tensor of this shape."""
    return int(torch.Size(shape).numel())


def copy_companions(source: Path, target: Path) -> None:
    """Tokenizer, generation config and chat template travel along."""
    for pattern in COMPANIONS:
        for file in source.glob(pattern):
            destination = target / file.relative_to(source)
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, destination)


def _counted(tensor: OutputTensor, bar: Any) -> OutputTensor:
    def data() -> Iterable[bytes]:
        yield from tensor.data()
        bar.update()

    return OutputTensor(tensor.name, tensor.dtype, tensor.shape, data)


def _outputs(
    reader: CheckpointReader, dense_config: PreTrainedConfig, config: Any, expert_init: str, seed: int
) -> tuple[list[OutputTensor], list[str]]:
    """Every tensor of the expanded checkpoint, as a function of the dense one's."""
    with torch.device("meta"):
        dense = AutoModelForCausalLM.from_config(copy.deepcopy(dense_config))
        expanded = LayerMoEForCausalLM(copy.deepcopy(config))
    ffns = decoder_ffns(dense)
    home: dict[str, tuple[int, str]] = {}  # expanded name -> (layer, name in the dense FFN)
    for layer, ffn in expanded.expanded_ffns().items():
        prefix = ffns[layer][0]
        for name in ffn.state_dict():
            home[f"{prefix}.{name}"] = (layer, name)
    names = _stored_names(reader, dense)
    shapes = dense.state_dict()
    tied = set(getattr(dense, "all_tied_weights_keys", None) or ())
    outputs, used, missing = [], set(), []

    def find(name: str) -> TensorInfo | None:
        stored = names.get(name)
        if stored is None:
            if name not in tied:
                missing.append(name)
            return None
        used.add(stored)
        info = reader.tensors[stored]
        if info.shape != tuple(shapes[name].shape):
            raise InputError(
                f"{reader.folder}: tensor {stored!r} has shape {list(info.shape)}, but the configuration asks for "
                f"{list(shapes[name].shape)}."
            )
        return info

    def copied(name: str, source: str, info: TensorInfo) -> OutputTensor:
        return OutputTensor(name, info.dtype, info.shape, lambda: reader.chunks(names[source]))

    for name, parameter in expanded.state_dict().items():
        if name not in home:
            info = find(name)
            if info is not None:
                outputs.append(copied(name, name, info))
            continue
        layer, inner = home[name]
        prefix = ffns[layer][0]
        if inner.startswith("experts."):
            _, expert, rest = inner.split(".", 2)
            source = f"{prefix}.{rest}"
            info = find(source)
            if info is None:
                continue
            if expert_init == "copy" or expert == "0":
                outputs.append(copied(name, source, info))
            else:
                outputs.append(
                    _random_expert_tensor(name, info, dense, ffns[layer][1], rest, (seed, layer, int(expert)))
                )
        else:
            dtype = _ffn_dtype(reader, names, prefix, ffns[layer][1])
            outputs.append(_routing_tensor(name, dtype, tuple(parameter.shape), inner, (seed, layer)))
    if missing:
        raise InputError(
            f"{reader.folder}: tensors are missing from the checkpoint: {', '.join(sorted(set(missing))[:5])}."
        )
    outputs.sort(key=lambda output: dot_natural_key(output.name))  # the library's order, hence its shards
    return outputs, sorted(set(reader.tensors) - used)


def _stored_names(reader: CheckpointReader, dense: Any) -> dict[str, str]:
    """Model key to the checkpoint's key: the library's own renaming, as when it loads (GPT-NeoX's `embed_out`, BLOOM's
    keys without `transformer.`)."""
    renamings = [rule for rule in get_model_conversion_mapping(dense) if isinstance(rule, WeightRenaming)]
    known = dense.state_dict()
    return {rename_source_key(name, renamings, [], dense.base_model_prefix, known)[0]: name for name in reader.tensors}


def _ffn_dtype(reader: CheckpointReader, names: dict[str, str], prefix: str, ffn: nn.Module) -> str:
    first = next(name for name, _ in ffn.named_parameters())
    dtype = reader.tensors[names[f"{prefix}.{first}"]].dtype
    if dtype not in _TORCH_DTYPES:
        raise InputError(f"{reader.folder}: the FFN weights are stored as {dtype}; expand the unquantised checkpoint.")
    return dtype


def _place_seed(*numbers: int) -> int:
    """A seed for one tensor's place: what a router gets depends neither on the others nor on their order."""
    value = 0
    for number in numbers:
        value = (value * 1_000_003 + number + 1) % ((1 << 61) - 1)
    return value


def _routing_tensor(name: str, dtype: str, shape: tuple[int, ...], inner: str, place: tuple[int, ...]) -> OutputTensor:
    def data() -> Iterable[bytes]:
        weight = torch.zeros(shape)
        if inner == "router.weight":
            init_router(weight, torch.Generator().manual_seed(_place_seed(*place)))
        yield tensor_bytes(weight.to(_TORCH_DTYPES[dtype]))

    return OutputTensor(name, dtype, shape, data)


def _random_expert_tensor(
    name: str, info: TensorInfo, dense: Any, ffn: nn.Module, rest: str, place: tuple[int, ...]
) -> OutputTensor:
    module_name, _, parameter_name = rest.rpartition(".")
    template = ffn.get_submodule(module_name)

    def data() -> Iterable[bytes]:
        module = copy.deepcopy(template).to_empty(device="cpu")
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(_place_seed(*place, *module_name.encode()))
            dense._init_weights(module)
        yield tensor_bytes(module.get_parameter(parameter_name).detach().to(_TORCH_DTYPES[info.dtype]))

    return OutputTensor(name, info.dtype, info.shape, data)


def _provenance(
    plan: Plan,
    base: str | os.PathLike,
    revision: str | None,
    folder: Path,
    expert_init: str,
    seed: int,
    base_parameters: int,
    parameters: int,
) -> dict[str, Any]:
    local = Path(base).is_dir()
    return {
        "method": plan.method,
        "base_model": Path(base).resolve().name if local else str(base),  # no path of this machine
        # The hub's cache names a snapshot's folder by its commit.
        "base_revision": revision if local else folder.name,
        "old_languages": plan.old,
        "new_languages": plan.new,
        "experts_per_layer": plan.experts_per_layer,
        "classifier_layers": plan.classifier_layers,
        "expert_init": expert_init,
        "seed": seed,
        "base_parameters": base_parameters,
        "parameters": parameters,
        "versions": {
            "hf_moe_expand": __version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        },
        "stages": [],
    }

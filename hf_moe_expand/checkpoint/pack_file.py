"""The file in which a joined model keeps a pack as it was: its configuration, routers and classifiers."""

import json
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open

from ..errors import InputError
from ..jsonfile import parse_json
from ..modeling import LayerMoEConfig, model_class
from .reader import TORCH_DTYPES, is_finite
from .source import load_expanded_config

PACK_FILE = "pack_{}.safetensors"
ROUTING = ("router.weight", "classifier.weight", "classifier.bias")
# float16's largest number. Scores that large make a softmax meaningless; no training comes near it.
_LARGEST = 65504.0


@dataclass(frozen=True)
class KeptPack:
    """The content of the file; see `packs.Pack`."""

    name: str
    config: Any
    text: str
    scale: float
    routing: dict[tuple[int, str], torch.Tensor]


def read_pack_file(file: Path) -> KeptPack:
    """Reads a pack's file.

    Raises:
        InputError: it is missing or broken, holds no LayerMoE configuration, or values that no training makes.
    """
    if not file.is_file():
        raise InputError(f"{file}: is missing; it holds the pack's routers, without which no pack can be taken out.")
    try:
        with safe_open(file, "pt") as opened:
            facts = json.loads(opened.metadata()["pack"])
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 not a mapping
        name, text, scale = str(facts["name"]), str(facts["config"]), float(facts["scale"])
        routing = {(int(key.split(".", 1)[0]), key.split(".", 1)[1]): tensor for key, tensor in tensors.items()}
        if not 0 < scale < float("inf"):
            raise ValueError(f"the factor of its router is {scale}, not a positive number")
        if not isinstance(parse_json(text), dict):
            raise ValueError("its configuration is not an object")
        check_pack_name(name)
    except Exception as error:  # a broken file raises many types
        raise InputError(f"{file}: cannot be read ({error}).") from None
    for key, tensor in tensors.items():
        check_rows(file, key, tensor)
    with TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(text, "utf-8")
        try:
            config: Any = load_expanded_config(Path(scratch))
        except InputError as error:
            raise InputError(str(error).replace(scratch, str(file))) from None
    if not isinstance(config, LayerMoEConfig):
        raise InputError(f"{file}: holds no LayerMoE configuration.")
    return KeptPack(name, config, own_text(text, config), scale, routing)


def check_rows(where: Path, name: str, rows: torch.Tensor) -> None:
    """Checks the rows of a router, classifier or gate that is to be joined.

    Raises:
        InputError: they are of another type than a floating-point one, or hold values that no training makes.
    """
    if rows.dtype not in TORCH_DTYPES.values():
        raise InputError(f"{where}: tensor {name!r} is of type {rows.dtype}; a router is of a floating-point type.")
    if rows.numel() and not is_finite(rows):
        raise InputError(f"{where}: tensor {name!r} holds NaN or infinite values; the checkpoint is damaged.")
    if rows.numel() and (largest := float(rows.abs().max())) > _LARGEST:
        raise InputError(
            f"{where}: tensor {name!r} holds {largest:.3g}, beyond {_LARGEST:,.0f}, with which no router can choose; "
            "the checkpoint is damaged."
        )


def check_pack_name(name: str) -> None:
    """Checks a pack's name.

    Raises:
        InputError: it is empty, too long, or holds line ends or other characters that are not printed.
    """
    if not name.strip() or len(name) > 200 or not name.isprintable():
        raise InputError(f"{name[:60]!r} is no name of a pack: it must be of 1 to 200 printable characters.")


def own_text(text: str, config: Any) -> str:
    """A pack's config.json as a whole checkpoint of this package has it: with no reference to a base elsewhere, and to
    no other code than this package's. Where it is so already, the text stays byte for byte."""
    fields = parse_json(text)
    own = {name: value for name, value in fields.items() if name not in ("expansion_base", "custom_pipelines")}
    if "auto_map" in own:
        own["auto_map"] = model_class(config).auto_map(config)
    return text if own == fields else json.dumps(own, indent=2, sort_keys=True) + "\n"

"""Writes a fitted language gate into a model, in place of its classifiers or gate."""

import copy
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..core.errors import InputError, named_as
from ..core.jsonfile import read_json
from ..core.scratch import link, scratch_folder, sibling
from ..modeling import ExpandedConfig, LayerMoEConfig
from ..modeling.language_gate import GateRule
from ..modeling.parts import PARTS
from .facts import set_part
from .reader import TORCH_DTYPES
from .records import History, StageRecord
from .source import OLD_GATES, load_expanded_config, resolve_checkpoint
from .stored import GATE_ROWS, Place, gate_home
from .table import Copy, Given, opened, rewrite
from .writer import DEFAULT_SHARD_SIZE

# Why a model takes no gate.
REFUSED = {
    ("dmoe", "gated"): PARTS["gate"].not_beside["dmoe"],
    ("encoder-decoder", "gated"): PARTS["encoder_decoder"].not_beside["gate"],
}


@dataclass(frozen=True)
class Gate:
    """A language gate: its layer, languages and numbers, and its rows, in the order of `rule.languages`."""

    rule: GateRule
    weight_Rh: torch.Tensor
    bias_R: torch.Tensor

    @property
    def rows(self) -> dict[tuple[int, str], torch.Tensor]:
        """Its tensors, by layer and inner name."""
        weight, bias = ((self.rule.layer, inner) for inner in GATE_ROWS)
        return {weight: self.weight_Rh, bias: self.bias_R}

    def set_in(self, config: Any) -> None:
        config.classifier_layers = []
        set_part(config, "gate", asdict(self.rule))


@contextmanager
def gated(model: str | os.PathLike, out: str | os.PathLike) -> Iterator[Path]:
    """The folder of a checkpoint that takes a gate. One with gates of an earlier version, which nothing else reads, is
    shown without them, in a folder beside `out`."""
    folder = resolve_checkpoint(model)
    fields = read_json(folder / "config.json", "a configuration")
    if any(fields.get(name) is not None for name in OLD_GATES):
        place = sibling(Path(out), "gated")
        with named_as(place, folder), scratch_folder(place, True) as scratch:
            shutil.copytree(folder, scratch, copy_function=link, dirs_exist_ok=True)
            (scratch / "config.json").unlink()
            left = {name: value for name, value in fields.items() if name not in OLD_GATES}
            (scratch / "config.json").write_text(json.dumps({**left, "classifier_layers": []}), encoding="utf-8")
            check_takes_gate(scratch)
            yield scratch
    else:
        check_takes_gate(folder)
        yield folder


def check_takes_gate(model: str | os.PathLike | PreTrainedModel) -> Any:
    """The configuration of a checkpoint, or of a loaded model, that takes a gate; refuses others."""
    if isinstance(model, PreTrainedModel):
        config, name = model.config, f"model, a {type(model).__name__}"
    else:
        config, name = load_expanded_config(resolve_checkpoint(model, weights=False)), str(model)
    if not isinstance(config, ExpandedConfig):
        raise InputError(f"{name}: is not expanded: expand it first, or fit its gate with fit_base_gate.")
    if not isinstance(config, LayerMoEConfig):
        raise InputError(f"{name}: {REFUSED['dmoe', 'gated']}.")
    if config.is_encoder_decoder:
        raise InputError(f"{name}: {REFUSED['encoder-decoder', 'gated']} (docs/backbones.md).")
    return config


def write_gate(
    model: str | os.PathLike | PreTrainedModel,
    out: str | os.PathLike | None,
    gate: Gate,
    record: StageRecord,
    *,
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
) -> Any:
    """An expanded model with this gate, and the step's `record` in its history: a checkpoint's folder, which is
    written, or a loaded model."""
    (stored,) = opened([model], out, overwrite)
    config: Any = copy.deepcopy(stored.config)
    gate.set_in(config)
    fields = {"classifier_layers": config.classifier_layers, "language_gate": config.language_gate}
    history = History.of(config).with_last(**fields).with_stage(record)
    home = gate_home(stored.network, gate.rule.layer)
    # In the type of its layer.
    like = next(key for key in stored.tensors if key.startswith(f"{home}.") and stored[key].dtype in TORCH_DTYPES)
    dtype = TORCH_DTYPES[stored[like].dtype]

    def rule(place: Place) -> Copy | Given:
        rows = gate.rows.get((place.layer, place.inner))
        return Copy(place.key) if rows is None else Given(rows.to(dtype))

    return rewrite(
        [stored], config, rule, out, record=history, title="gates", max_shard_size=max_shard_size, overwrite=overwrite
    )

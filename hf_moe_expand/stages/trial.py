"""What the steps of a recipe know while they are tried, on checkpoints without their tensors."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.reader import CheckpointReader, headers_alone
from ..checkpoint.source import resolve_checkpoint
from ..checkpoint.stored import network_of
from ..checkpoint.table import New, rewrite
from ..checkpoint.writer import DTYPE_NAMES
from ..inference.models import load_tokenizer


@dataclass
class Trial:
    """A recipe that is tried.

    Attributes:
        base, revision: folder or hub id of the dense base.
        config: its configuration; None if it is not on this machine.
        offline: download nothing; skip checks that need an absent file, with a line that says so.
        here: refuse what this machine cannot do; else another one may be the one that trains.
        beside: by a step's name, the most bytes of the files beside its output that it removes at its end.
    """

    base: str
    revision: str | None
    config: Any
    offline: bool
    here: bool = True
    beside: dict[str, int] = field(default_factory=dict)

    @cached_property
    def tokenizer(self) -> Any:
        """The base's tokenizer; None where nothing may be downloaded."""
        return None if self.offline else load_tokenizer(resolve_checkpoint(self.base, self.revision), self.base)


def write_base(config: Any, out: Path) -> None:
    """Writes the headers of a dense checkpoint of which the configuration alone is on this machine."""
    new = New(torch.Tensor, DTYPE_NAMES.get(config.dtype, DTYPE_NAMES[torch.float32]))
    tied = network_of(config).all_tied_weights_keys or {}
    with headers_alone():
        rewrite([], config, lambda place: None if place.key in tied else new, out)


def weight_bytes(folder: Path) -> int:
    """Bytes of a checkpoint's tensors."""
    return sum(tensor.nbytes for tensor in CheckpointReader(folder).tensors.values())

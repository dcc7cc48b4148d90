"""LLaMA-Pro: inserts copied blocks, which at first leave the output unchanged, into a dense model; streamed."""

import copy
import os
from collections.abc import Sequence
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from ..checkpoint.promises import tiny_twin
from ..checkpoint.records import StageRecord
from ..checkpoint.source import load_base_config
from ..checkpoint.stored import Place, StoredModel, layer_list
from ..checkpoint.table import Copy, Mix, opened, rewrite
from ..checkpoint.writer import DEFAULT_SHARD_SIZE
from ..core.errors import InputError

# The modules whose outputs a block adds to the residual stream.
_OUTPUTS = ("self_attn.o_proj", "mlp.down_proj")
# Configuration fields with one entry for each layer.
_PER_LAYER = ("layer_types", "no_rope_layers")


def expand_depth(
    base: str | os.PathLike,
    out: str | os.PathLike,
    blocks: int,
    *,
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
) -> list[int]:
    """Inserts copied blocks whose output projections are zero, so that the model's output does not change.

    The layers are divided into `blocks` runs, whose lengths differ by at most one layer; each run is followed by a copy
    of its last layer. The result is an ordinary dense checkpoint; the field `new_layers` of its configuration lists the
    new layers, which are returned.
    """
    (dense,) = opened([base], out, overwrite, load_base_config)
    folder = dense.folder
    if dense.config.is_encoder_decoder:
        raise InputError(f"{folder}: is an encoder-decoder; blocks are inserted into decoders alone.")
    config, old = dense.config, dense.config.num_hidden_layers
    if getattr(config, "new_layers", None):
        raise InputError(f"{folder}: has inserted blocks already; give the dense model from which it was made.")
    if not 1 <= blocks <= old:
        raise InputError(f"{folder}: {blocks} blocks were asked for; with {old} layers 1 to {old} can be inserted.")
    if not _is_silent(config):
        raise InputError(
            f"{folder}: an inserted block of architecture {config.model_type!r} would change the output, as a tiny "
            f"twin of the model shows: its blocks add more than {' and '.join(_OUTPUTS)}. Use another architecture."
        )
    return _insert(dense, out, blocks, max_shard_size=max_shard_size, overwrite=overwrite)


def _insert(dense: StoredModel, out: str | os.PathLike, blocks: int, **written: Any) -> list[int]:
    """Writes the deeper model; returns the new layers' numbers."""
    config, layers = copy.deepcopy(dense.config), layer_list(dense.network)
    old = config.num_hidden_layers
    after = {(number + 1) * old // blocks - 1 for number in range(blocks)}
    # Of each layer of the deeper model: the old layer that it comes from, and whether it is an inserted copy.
    sources = [(layer, copied) for layer in range(old) for copied in (False, True) if layer in after or not copied]
    config.num_hidden_layers = len(sources)
    for name in _PER_LAYER:
        values: Sequence[Any] | None = getattr(config, name, None)
        if values is not None:
            setattr(config, name, [values[source] for source, _ in sources])
    config.new_layers = [layer for layer, (_, copied) in enumerate(sources) if copied]

    def rule(place: Place) -> Copy | Mix:
        if not place.key.startswith(f"{layers}."):
            return Copy(place.key)
        layer, inner = place.key.removeprefix(f"{layers}.").split(".", 1)
        source, copied = sources[int(layer)]
        of = Copy(f"{layers}.{source}.{inner}")
        return Mix([of], torch.zeros_like) if copied and inner.startswith(_OUTPUTS) else of

    record = StageRecord(stage="expand-depth", settings={"base": dense.name, "blocks": blocks})
    rewrite([dense], config, rule, out, record=record, title="expand-depth", **written)
    return config.new_layers


@torch.no_grad()
def _is_silent(config: PreTrainedConfig) -> bool:
    """Whether inserted blocks leave the output of a tiny twin of the model unchanged."""
    ids = torch.arange(3, 15)[None]
    try:
        twin = tiny_twin(config)
        with TemporaryDirectory() as folder:
            twin.save_pretrained(f"{folder}/twin")
            _insert(StoredModel(f"{folder}/twin"), f"{folder}/deeper", 2)
            deeper: Any = AutoModelForCausalLM.from_pretrained(f"{folder}/deeper", trust_remote_code=False)
            return torch.allclose(deeper.eval()(ids).logits, twin(ids).logits, rtol=1e-4, atol=1e-5)
    except Exception:  # models raise many types
        return False

"""The two sides of an encoder-decoder in a batch: the source's tokens in its encoder, the target's in its decoder.

Shape suffixes: B pairs of a batch, S tokens of a source, T tokens of a target, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from ..modeling import LayerRouting, stack_sizes

# The columns with the tokens of the source (or of a decoder's text) and of the target, and with their languages.
TOKEN_COLUMNS = ("input_ids", "decoder_input_ids")
LANGUAGE_COLUMNS = ("language_ids", "decoder_language_ids")
_IGNORED = -100


def target_loss(
    outputs: Any, labels_BT: torch.Tensor, num_items_in_batch: Any = None, label_smoothing: float = 0.0
) -> torch.Tensor:
    """The mean negative log-likelihood of the target's tokens, in nats: over the whole optimizer step (by default over
    the batch), not the mean of its micro-batches' means, which the library's translation models give.
    `label_smoothing` is the share of the probability that is spread over the vocabulary."""
    logits_NV = outputs["logits"].flatten(0, 1).float()
    nats = F.cross_entropy(
        logits_NV, labels_BT.flatten(), ignore_index=_IGNORED, reduction="sum", label_smoothing=label_smoothing
    )
    return nats / (labels_BT.ne(_IGNORED).sum() if num_items_in_batch is None else num_items_in_batch)


def with_decoder_inputs(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs with `decoder_input_ids` `[B, T]`: the labels, shifted to the right as the model itself does it."""
    labels_BT = inputs.get("labels")
    if labels_BT is None or inputs.get("decoder_input_ids") is not None:
        return dict(inputs)
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if shift is not None:
        return {**inputs, "decoder_input_ids": shift(labels=labels_BT)}
    shifted_BT = labels_BT.roll(1, dims=-1)
    shifted_BT[:, 0] = model.config.decoder_start_token_id
    return {**inputs, "decoder_input_ids": shifted_BT.masked_fill(shifted_BT == _IGNORED, model.config.pad_token_id)}


def sides(inputs: Mapping[str, Any], both: bool) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """The source's tokens that are no padding, `[B, S]` bool, and their language ids; with `both`, then the target's,
    `[B, T]`: the tokens with a label."""
    source_BS, mask_BS = inputs["input_ids"], inputs.get("attention_mask")
    found = [((torch.ones_like(source_BS) if mask_BS is None else mask_BS).bool(), inputs.get("language_ids"))]
    if both:
        labels_BT, mask_BT = inputs.get("labels"), inputs.get("decoder_attention_mask")
        if labels_BT is not None:
            mask_BT = labels_BT.ne(_IGNORED)
        elif mask_BT is None:
            mask_BT = torch.ones_like(inputs["decoder_input_ids"])
        found.append((mask_BT.bool(), inputs.get("decoder_language_ids")))
    return found


def without_rows(inputs: Mapping[str, Any], kept: int) -> dict[str, Any]:
    """The inputs in which the tokens of all rows but the first `kept` are padding."""
    mask_BS = torch.ones_like(inputs["input_ids"]) if inputs.get("attention_mask") is None else inputs["attention_mask"]
    padding = {"attention_mask": 0, "decoder_attention_mask": 0, "labels": _IGNORED}
    found = {**inputs, "attention_mask": mask_BS}
    for name, value in padding.items():
        if found.get(name) is not None:
            found[name] = found[name].clone()
            found[name][kept:] = value
    return found


def by_stack(config: Any, layers: Mapping[int, LayerRouting]) -> list[list[LayerRouting]]:
    """The routing of the expanded layers, in order: of an encoder-decoder, the encoder's and the decoder's."""
    stacks, first = [], 0
    for size in stack_sizes(config).values():
        stacks.append([layers[layer] for layer in sorted(layers) if first <= layer < first + size])
        first += size
    return stacks

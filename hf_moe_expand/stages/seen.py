"""Counts the text that a training has seen, over all ranks and attempts."""

from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from ..trainers.encoder_decoder import counted_tokens


class SeenText(TrainerCallback, ExportableState):
    """The blocks and tokens that passed through training so far; kept in the Trainer's state, so that a resumed
    training counts on.

    Attributes:
        blocks: blocks seen, over all ranks.
        tokens: tokens seen, padding excluded: first those of no known language, then those of each language id. None if
            the training was resumed from a checkpoint that did not count.
    """

    def __init__(self) -> None:
        self.blocks = 0
        self.tokens: list[int] | None = [0]
        self._here: torch.Tensor | None = None  # of this rank since the last gathering: blocks, then `tokens`

    def state(self) -> dict[str, Any]:
        """What the Trainer's state keeps; call `gather` before."""
        return {"args": {}, "attributes": {"blocks": self.blocks, "tokens": self.tokens}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        saved = (state.stateful_callbacks or {}).get(type(self).__name__) if state.global_step else None
        self.blocks, self.tokens, self._here = 0, None if state.global_step else [0], None
        if saved:
            self.blocks, self.tokens = saved["attributes"]["blocks"], saved["attributes"]["tokens"]

    def add(self, inputs: Any, languages: int) -> None:
        """Counts a batch of this rank, without waiting for the device.

        Args:
            inputs: `input_ids`, and perhaps `attention_mask` and `language_ids`, all `[batch, sequence]`; an
                encoder-decoder's `labels` and `decoder_language_ids`, both `[batch, target]`.
            languages: number of language ids.
        """
        input_ids = inputs.get("input_ids")
        if input_ids is None or self.tokens is None:
            return
        mask, ids = inputs.get("attention_mask"), inputs.get("language_ids")
        counted = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()
        ids = torch.full_like(input_ids, -1) if ids is None else ids.long()
        ids = ids.where((ids >= 0) & (ids < languages), -1)
        per_language = [(counted & (ids == language)).sum() for language in range(-1, languages)]
        counts = torch.stack([torch.full_like(per_language[0], len(input_ids)), *per_language])
        if inputs.get("decoder_language_ids") is not None:  # an encoder-decoder's targets
            ids = inputs["decoder_language_ids"].long()
            counted = counted_tokens(inputs)
            targets = [(counted & (ids == language)).sum() for language in range(-1, languages)]
            counts = counts + torch.stack([torch.zeros_like(targets[0]), *targets])
        self._here = counts if self._here is None else self._here + counts

    def gather(self, trainer: Any, languages: int) -> None:
        """Adds what all ranks have counted since the last call. Every rank must call this."""
        if self.tokens is None:
            return
        here = self._here
        if here is None:
            here = torch.zeros(2 + languages, dtype=torch.long, device=trainer.args.device)
        # Ranks that share the parts of one batch all count it.
        blocks, *tokens = (trainer.accelerator.reduce(here, "sum") // trainer.get_tp_size()).tolist()
        before = self.tokens + [0] * (len(tokens) - len(self.tokens))
        self.blocks, self.tokens = self.blocks + blocks, [a + b for a, b in zip(before, tokens, strict=True)]
        self._here = None

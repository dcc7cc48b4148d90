"""The next-token loss in pieces of the sequence, so that the logits of a whole batch are never in memory at once.

At 8 x 1,024 tokens and a vocabulary of 49,152 the logits take 1.6 GB in float32, and the loss keeps three times that.
Here the head runs on some tokens at a time, and again in the backward pass (activation checkpointing). Liger's fused
kernel is for model types that it knows by name, which expanded models are not; TRL's fused head keeps tiles of 4,096
tokens, which saves nothing at a CPU's sizes; torch's `linear_cross_entropy` came with 2.13.

Shape suffixes: B sequences, S tokens of a sequence, T tokens, H hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.loss.loss_utils import ForCausalLMLoss

from .freezing import evaluating

_IGNORED = -100
# A training that would compute more logits at once than the first, 256 MB in float32, computes as many at a time as the
# second says.
LARGE, PIECE = 1 << 26, 1 << 24
_PROBED = 8  # tokens


def is_large(tokens: int, vocabulary: int) -> bool:
    """Whether the logits of so many tokens are computed in pieces."""
    return tokens * vocabulary > LARGE


class LogitsInPieces:
    """The head of a decoder, run on some of the tokens at a time.

    Attributes:
        vocabulary: number of logits of a token.
    """

    def __init__(self, model: Any, autocast: Callable[[], AbstractContextManager] = nullcontext) -> None:
        self.head: nn.Linear = model.get_output_embeddings()
        self.vocabulary = self.head.weight.shape[0]
        self._softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
        self._scale = 1.0  # Cohere and Granite scale their logits
        self._autocast = autocast

    @classmethod
    def of(cls, model: Any, autocast: Callable[[], AbstractContextManager] = nullcontext) -> "LogitsInPieces | None":
        """The head of `model`; None for a model whose loss is not the library's, or whose logits are not those of a
        linear head, scaled or capped: it is run on a few tokens to find out; or whose languages have heads of their
        own."""
        if vars(model).get("language_places"):
            return None
        head = getattr(model, "get_output_embeddings", lambda: None)()
        if type(head) is not nn.Linear or getattr(model, "loss_function", None) is not ForCausalLMLoss:
            return None
        pieces = cls(model, autocast)
        ids = torch.arange(_PROBED, device=head.weight.device).unsqueeze(0) % pieces.vocabulary
        with torch.no_grad(), evaluating(model), pieces.head_inputs(whole=True) as hidden_states:
            logits = model(input_ids=ids, use_cache=False).logits
            again = pieces.logits(hidden_states[0]) if len(hidden_states) == 1 else torch.empty(0)
        if again.shape != logits.shape:
            return None
        one, other = again.double(), logits.double()
        scale = float((one * other).sum() / (one * one).sum().clamp(min=1e-30))
        pieces._scale = 1.0 if torch.allclose(one, other, rtol=1e-5, atol=1e-6) else scale
        return pieces if torch.allclose(pieces._scale * one, other, rtol=1e-4, atol=1e-4) else None

    def size(self) -> int:
        """The most tokens of a piece."""
        return max(PIECE // self.vocabulary, 1)

    @contextmanager
    def head_inputs(self, whole: bool = False) -> Iterator[list[torch.Tensor]]:
        """Inside, forward passes leave the head's inputs `[B, S, H]` in a list and, unless `whole`, compute the logits
        of each sequence's last token alone."""
        inputs: list[torch.Tensor] = []

        def keep(head: nn.Module, args: tuple) -> tuple:
            inputs.append(args[0])
            return args if whole else (args[0][:, -1:],)

        with self.head.register_forward_pre_hook(keep):
            yield inputs

    def logits(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        """`[T, V]`, as the model itself computes them."""
        with self._autocast():
            logits_TV = F.linear(hidden_TH, self.head.weight, self.head.bias)
            logits_TV = logits_TV if self._scale == 1.0 else logits_TV * self._scale
            return logits_TV if self._softcap is None else torch.tanh(logits_TV / self._softcap) * self._softcap

    def sum(self, of_logits: Callable[..., torch.Tensor], hidden_TH: torch.Tensor, *others_T: torch.Tensor) -> Any:
        """The sum over the pieces of `of_logits(logits, *others)`, a sum over the tokens of a piece."""

        def of_piece(hidden_TH: torch.Tensor, *others_T: torch.Tensor) -> torch.Tensor:
            return of_logits(self.logits(hidden_TH), *others_T)

        total: Any = 0.0
        for piece in zip(*(tensor.split(self.size()) for tensor in (hidden_TH, *others_T)), strict=True):
            total = total + checkpoint(of_piece, *piece, use_reentrant=False)
        return total

    def next_token_loss(self, hidden_BSH: torch.Tensor, labels_BS: torch.Tensor, num_items: Any = None) -> torch.Tensor:
        """The loss that the model itself computes with its labels: the mean negative log-likelihood of each sequence's
        next tokens in nats, or their sum divided by `num_items`."""
        targets_BS = labels_BS[:, 1:]
        counted_BS = targets_BS != _IGNORED
        nats = self.sum(_nats, hidden_BSH[:, :-1][counted_BS], targets_BS[counted_BS])
        return nats / (counted_BS.sum() if num_items is None else num_items)


def _nats(logits_TV: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits_TV.float(), targets_T, reduction="sum")

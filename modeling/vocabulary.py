"""Tokens that new languages have beside the base's: further rows of the embedding and of the head.

The base's matrices and `vocab_size` stay. A token's id is `vocab_size` plus the number of its row. Which text has such
ids is its tokenizer's affair: the base's has none, and each language has its own, under `vocabulary/` of a checkpoint.

The head gives them minus infinity, but after a token of a new language: one whose language the user tells or, in a
Trainer, the row names, or that the gate recognises in a text with such tokens. Text in the base's tokens is scored by
these alone.

Shape suffixes: B sequences, S tokens whose logits are computed, V rows of the base, R further ones; h hidden size.
"""

import copy
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoTokenizer

from .routing_control import RoutingControl, classes_of

FOLDER = "vocabulary"  # in a checkpoint: a language's tokenizer is in `vocabulary/el`


class Rows(nn.Module):
    """A matrix `[R, h]`: embeds ids, or gives the logits of hidden states. Called, as what splits or moves a model's
    weights sees to the calls of its modules."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight) if x.is_floating_point() else F.embedding(x, self.weight)


class Vocabulary(nn.Module):
    """The rows of all languages' tokens, and the hooks on a model's embedding and head that take them.

    Args:
        model: the model, on whose head there are rows of its own if it is not tied to the embedding.
    """

    def __init__(self, model: Any, control: RoutingControl) -> None:
        super().__init__()
        config, rows = model.config, sum(model.config.vocabularies.values())
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear | None):
            raise ValueError(
                f"vocabularies: the embedding of a {config.backbone_model_type} model is a {type(embedding).__name__} "
                f"and its head a {type(head).__name__}: tokens are added to an Embedding and a Linear alone."
            )
        self.first = config.vocab_size
        self.embedding = Rows(rows, embedding.embedding_dim)
        is_tied = head is None or config.tie_word_embeddings
        self.head = None if is_tied else Rows(rows, head.in_features)  # type: ignore[union-attr]
        # Partial, not bound or closed over: a copy of the model has a copy of this module.
        embedding.register_forward_pre_hook(partial(_with_base_ids, self, control))
        embedding.register_forward_hook(partial(_with_rows, self, control))
        if head is not None:
            head.register_forward_hook(partial(_with_columns, self, control))

    def columns(self, hidden_BSh: torch.Tensor, is_new_BS: torch.Tensor) -> torch.Tensor:
        """`[..., S, R]`: the logits of the rows, where a token of a new language comes before; else minus infinity."""
        logits_BSR = (self.embedding if self.head is None else self.head)(hidden_BSh)
        return logits_BSR.masked_fill(~is_new_BS.to(logits_BSR.device).unsqueeze(-1), -torch.inf)


def _with_base_ids(own: Vocabulary, control: RoutingControl, embedding: nn.Module, args: tuple) -> tuple:
    control.token_ids = args[0]
    return args[0].masked_fill(args[0] >= own.first, 0), *args[1:]


def _with_rows(own: Vocabulary, control: RoutingControl, embedding: Any, args: tuple, output: Any) -> torch.Tensor:
    ids, control.token_ids = control.token_ids, None
    rows = own.embedding((ids - own.first).clamp(min=0)).to(output)
    scale = getattr(embedding, "embed_scale", 1.0)  # of Gemma 3 and BART's kin, whose modules scale what they embed
    rows = rows * (scale.to(rows) if isinstance(scale, torch.Tensor) else scale)
    return torch.where((ids >= own.first).unsqueeze(-1), rows, output)


def _with_columns(own: Vocabulary, control: RoutingControl, head: Any, args: tuple, output: Any) -> torch.Tensor:
    is_new_BS = new_tokens(control, args[0].shape[:-1], args[0].device)
    return torch.cat([output, own.columns(args[0], is_new_BS).to(output)], -1)


def new_tokens(control: RoutingControl, shape: Any, device: Any) -> torch.Tensor:
    """`[B, S]` bool: the last S tokens of each sequence after which a new language's own token may come."""
    request, (B, S) = control.request, shape
    new_BS = torch.zeros(B, S, dtype=torch.bool, device=device)
    if request.expert == 0 or request.expansion == 0:
        return new_BS
    of_rows, may_BS = request.token_classes, control.may_write
    if of_rows is not None:  # a block has several texts: the language is that of the token to come
        class_BS = of_rows.class_T.view(B, -1)
        new_BS = _last(torch.cat([class_BS[:, 1:], class_BS[:, -1:]], 1) > 0, S)
    elif may_BS is not None:
        new_BS = _last(may_BS, S)
    if request.classes is not None:
        given_B = torch.tensor([-1 if number is None else number for number in request.classes], device=device)
        given_B1 = given_B.repeat_interleave(B // len(given_B)).unsqueeze(-1)  # beams follow one another
        new_BS = torch.where(given_B1 < 0, new_BS.to(device), given_B1 > 0)
    if request.may_write is not None:
        may_B = torch.tensor(request.may_write, device=device)
        new_BS = new_BS & may_B.repeat_interleave(B // len(may_B)).unsqueeze(-1)
    return new_BS


def _last(of_BS: torch.Tensor, S: int) -> torch.Tensor:
    """The last S columns; virtual tokens in front have none."""
    return F.pad(of_BS, (max(S - of_BS.shape[1], 0), 0))[:, -S:]


def loss_of_all(loss: Any, *args: Any, logits: torch.Tensor, vocab_size: int, **kwargs: Any) -> Any:
    """A loss of the library, which would take `vocab_size` for the number of logits."""
    return loss(*args, logits=logits, vocab_size=logits.shape[-1], **kwargs)


class VocabularyMixin:
    """What an expanded model with languages' own tokens does otherwise than its backbone."""

    config: Any
    vocabulary: Vocabulary | None
    hub_options: ClassVar[dict[str, Any]]

    @property
    def loss_function(self) -> Any:
        loss = super().loss_function  # type: ignore[misc]
        return loss if getattr(self, "vocabulary", None) is None else partial(loss_of_all, loss)

    @loss_function.setter
    def loss_function(self, value: Any) -> None:
        self._loss_function = value

    def _with_all_tokens(self) -> Any:
        """This model, whose `vocab_size` is the number of its logits, for what of the library takes it for that."""
        model = copy.copy(self)
        model.config = copy.copy(self.config)
        model.config.vocab_size = self.config.num_tokens
        return model

    def compute_transition_scores(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the backbone's."""
        model = self._with_all_tokens() if self.config.vocabularies else self
        return super(VocabularyMixin, model).compute_transition_scores(*args, **kwargs)  # type: ignore[misc]

    def _get_candidate_generator(self, *args: Any, **kwargs: Any) -> Any:
        assistant = kwargs.get("assistant_model")
        tokens = None if assistant is None else getattr(assistant.config, "num_tokens", None)
        if self.config.vocabularies and assistant is not None and tokens != self.config.num_tokens:
            raise ValueError(
                "assistant_model: it lacks the languages' own tokens: take this model itself, or "
                "prompt_lookup_num_tokens."
            )
        model = self._with_all_tokens() if self.config.vocabularies else self
        return super(VocabularyMixin, model)._get_candidate_generator(*args, **kwargs)  # type: ignore[misc]

    def _get_logits_processor(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_logits_processor(*args, **kwargs)  # type: ignore[misc]
        for place, one in enumerate(found if self.config.vocabularies else ()):
            if hasattr(one, "guidance_scale"):  # it takes the difference of two logits, also of minus infinity's
                found.insert(place + 1, _never_nan)
                break
        return found

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """As the backbone's.

        Raises:
            ValueError: languages have tokens of their own, whose ids begin where the base's rows end.
        """
        if self.config.vocabularies and (args or kwargs):
            raise ValueError(
                "resize_token_embeddings: the ids of the languages' own tokens begin where the embedding's rows end: "
                "resize the base before it is expanded."
            )
        return super().resize_token_embeddings(*args, **kwargs)  # type: ignore[misc]

    def tokenizer_of(self, language: str) -> Any:
        """The tokenizer that reads text in a language, and writes any language's: its own, or else the base's.

        Raises:
            ValueError: the checkpoint does not know the language.
        """
        classes_of(self.config, language)
        loaded = self.__dict__.setdefault("language_tokenizers", {})
        if language not in loaded:
            own = [FOLDER, language] if language in (self.config.vocabularies or {}) else []
            folder = "/".join(filter(None, [self.hub_options.get("subfolder"), *own]))
            options = {**self.hub_options, "subfolder": folder, "trust_remote_code": False}
            loaded[language] = AutoTokenizer.from_pretrained(self.config.name_or_path, **options)
        return loaded[language]

    def save_tokenizers(self, folder: Any) -> None:
        """Writes the languages' own tokenizers into a checkpoint's folder."""
        for code in self.config.vocabularies or ():
            save_tokenizer(self.tokenizer_of(code), Path(folder) / FOLDER / code)


def _never_nan(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(scores.isnan(), -torch.inf)


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Writes a language's tokenizer into its folder, with an empty configuration: without one AutoTokenizer asks the
    hub for it, and fails offline."""
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text("{}\n")

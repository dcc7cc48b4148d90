"""A loaded model that writes: it goes on from a prompt, or replies in its chat template."""

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..checkpoint.facts import Facts
from ..checkpoint.source import load_config, name_in_results, resolve_checkpoint
from ..core.errors import InputError, library_errors_at
from ..data.tokens import prompt_tokens
from ..modeling import ExpandedConfig
from ..modeling.routing_control import classes_of
from .models import check_decoder, generated, load_for_inference, longest_block
from .writing import Answering

Message = Mapping[str, str]


class ChatModel:
    """A loaded decoder that answers, by its name in results; or the base `inside` it, which is expert 0 alone. An
    InputError says that there is none."""

    def __init__(self, model: Any, tokenizer: Any, name: str, inside: bool = False) -> None:
        check_decoder(model.config, name, "prompts")
        self.model, self.tokenizer, self.name, self.inside = model.eval(), tokenizer, name, inside
        if inside and (why := why_no_base_inside(model.config)):
            raise InputError(f"{name}: {why}.")

    @classmethod
    def load(cls, name: str | os.PathLike, revision: str | None = None) -> "ChatModel":
        """Loads a folder or hub id; see `load_for_inference`."""
        return cls(*load_for_inference(name, revision), name_in_results(name))

    def base_inside(self) -> "ChatModel":
        """The base inside this expanded model, which shares its memory."""
        return ChatModel(self.model, self.tokenizer, f"{self.name}: base inside", inside=True)

    @property
    def has_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    def check_template(self) -> None:
        """Refuses a tokenizer without a chat template."""
        if not self.has_template:
            raise InputError(f"{self.name}: its tokenizer has no chat template, so it cannot chat: give `--prompt`.")

    def answer(self, prompt: str, how: Answering, language: str | None = None, streamer: Any = None) -> str:
        """What it writes after a prompt, without a template; see `reply`."""
        if how.system is not None:
            raise InputError("A system message belongs to a chat: ask in the chat template, or leave it out.")
        return self._write(prompt_tokens(prompt, self.tokenizer), how, language, streamer=streamer)

    def reply(
        self, messages: Sequence[Message], how: Answering, language: str | None = None, streamer: Any = None
    ) -> str:
        """The next message of a conversation.

        Args:
            messages: the conversation so far, each with `role` and `content`; the last one is the user's.
            language: code of the conversation's language, where the user names it; a dense model pays it no heed.
            streamer: gets the tokens as they come (`transformers.TextStreamer`).
        """
        self.check_template()
        system = [{"role": "system", "content": how.system}] if how.system is not None else []
        options = {"add_generation_prompt": True, "return_dict": False, **self._template(language)}
        with library_errors_at(f"{self.name}: its chat template refuses the messages"):
            talks = [*system, *messages], messages[-1:]
            ids, newest = (self.tokenizer.apply_chat_template(talk, **options) for talk in talks)
        # The gate judges the newest message alone, in the template: bare, a short one says too little.
        judge = {"judge": torch.tensor([newest])} if hasattr(self.model, "judge") else {}
        return self._write(ids, how, language, streamer=streamer, **judge)

    def _template(self, language: str | None) -> dict[str, Any]:
        """The chat template of the fine-tune that a language came from, where it has its own."""
        known = self.tokenizer.chat_template
        return {"chat_template": known[language]} if isinstance(known, dict) and language in known else {}

    def _write(self, ids: list[int], how: Answering, language: str | None, **given: Any) -> str:
        """What it writes after these tokens, with further arguments of `generate`."""
        if not ids:
            raise InputError("The prompt is empty: give some words.")
        most = longest_block(self.model.config)
        if most is not None and len(ids) >= most:
            raise InputError(
                f"{self.name}: the prompt has {len(ids):,} tokens, but the model takes {most:,} positions."
            )
        drawn: dict[str, Any] = {"do_sample": True, "temperature": how.temperature, "top_p": how.top_p, "top_k": 0}
        options = {
            "max_new_tokens": how.max_new_tokens if most is None else min(how.max_new_tokens, most - len(ids)),
            **(drawn if how.temperature else {}),
        }
        torch.manual_seed(how.seed)
        with self._as_asked(language):
            (written,) = generated(self.model, self.tokenizer, [ids], given, **options)
        return self.tokenizer.decode(written, skip_special_tokens=True)

    def _as_asked(self, language: str | None) -> AbstractContextManager:
        if self.inside:
            return self.model.use_expert(0)
        if language is None or not isinstance(self.model.config, ExpandedConfig):
            return nullcontext()
        if (why := self.not_told(language)) is not None:
            raise InputError(f"{self.name}: {why}")
        return self.model.use_languages(language)

    def not_told(self, language: str) -> str | None:
        """Why it cannot be told this language; None if it can."""
        return _not_told(self.model.config, language)


def _not_told(config: Any, language: str) -> str | None:
    if not isinstance(config, ExpandedConfig):
        return "is a dense model, which knows no languages"
    try:
        classes_of(config, language)
    except ValueError as error:
        return str(error)
    return None


def check_told(name: str, revision: str | None, language: str, beside: bool = False) -> None:
    """Refuses a language that a model does not know, unless it is a dense one `beside` another; reads its config.json
    alone."""
    config = load_config(resolve_checkpoint(name, revision, weights=False))
    is_expanded = isinstance(config, ExpandedConfig)
    if (is_expanded or not beside) and (why := _not_told(config, language)) is not None:
        raise InputError(f"{name_in_results(name)}: {why}")


def why_no_base_inside(config: Any) -> str | None:
    """Why there is no base inside a model to ask; None if there is one."""
    if not isinstance(config, ExpandedConfig):
        return "is a dense model, which has no base inside: give an expanded one"
    if config.model_type == "dmoe":
        return "all experts of a DMoE train, so its base is not inside: give the base's folder"
    stage = next((s.stage for s in Facts(config).history.stages if s.changes_everything), None)
    return stage and f"`{stage}` changed the base inside: give the base's own folder or hub id"

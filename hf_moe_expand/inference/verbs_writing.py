"""The verbs that let a model write: `chat`, in which it talks or answers once, and `sample`."""

import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from ..checkpoint.arguments import Model, NewFile, checkpoint
from ..core.errors import InputError, library_errors_at
from ..core.verbs import Given, Keys, belongs
from .writing import Answering, SampleSettings

if TYPE_CHECKING:
    from .asking import ChatModel


def chat(
    model: Model,
    *,
    settings: Annotated[Answering, Keys(defaults={"max_new_tokens": 512})],
    prompt: str | None = None,
    plain: bool = False,
    languages: str | None = None,
    base: str | None = None,
    revision: str | None = None,
    given: Given,
) -> None:
    """Talk with a model in its chat template, line by line, or once (--prompt); with --base, with another beside it.

    /new begins a new conversation, /languages el names its language, /exit or the end of the input ends it. Another
    word after a slash is refused, and not sent. An old language gets the base's own output, a new one all experts of
    its expansion.

    Example: hf-moe-expand chat qwen-el-chat --languages el --base inside

    Example: hf-moe-expand chat qwen-el-2 --prompt "Η Ελλάδα είναι" --base inside

    Args:
        prompt: answer this and end; without a chat template, go on from it.
        plain: go on from the prompt in spite of a chat template.
        languages: language of the conversation, where you know it, e.g. el.
        base: model to ask beside: a folder, a hub id, or `inside`, the base inside the model (expert 0).
    """
    belongs(given, "prompt", "plain")
    if base not in (None, "inside"):
        checkpoint(str(base), {})
    from .asking import ChatModel, check_told

    if languages is not None:
        for name, at in ((model, revision), (base, None)):
            if name not in (None, "inside"):
                check_told(str(name), at, languages, beside=base not in (None, "inside"))
    models = [ChatModel.load(model, revision)]
    if base == "inside":
        _warn_of_moved(model, revision)
    if base is not None:
        models.append(models[0].base_inside() if base == "inside" else ChatModel.load(base))
    if prompt is None:
        for one in models:
            one.check_template()
        _talk(models, settings, languages)
        return
    for one in models:
        shown = settings, languages, _streamer(one, len(models) > 1)
        if one.has_template and not plain:
            one.reply([{"role": "user", "content": prompt}], *shown)
        else:
            one.answer(prompt, *shown)


def _warn_of_moved(model: str, revision: str | None) -> None:
    """Says where the recorded verdict is that the base inside is not the base."""
    from ..checkpoint.compare import recorded_verdict
    from ..checkpoint.source import resolve_checkpoint

    if (verdict := recorded_verdict(resolve_checkpoint(model, revision))).moved:
        print(f"warning: expert 0 is not the base that was expanded: {verdict.names} moved since", file=sys.stderr)


def _talk(models: "list[ChatModel]", how: Answering, language: str | None) -> None:
    """Reads lines and lets each model reply, in a conversation of its own."""
    talks: list[list[dict[str, str]]] = [[] for _ in models]
    while (line := _read()) is not None:
        command, _, rest = line.partition(" ")
        if command == "/exit":
            return
        if command == "/new":
            talks = [[] for _ in models]
        elif command == "/languages":
            language = rest.strip() or None
        elif re.fullmatch(r"/\w*", command):  # a path has a second slash
            print(f"error: {command}: unknown command; known: /new, /languages el, /exit.", file=sys.stderr)
        elif line:
            for one, talk in zip(models, talks, strict=True):
                talk.append({"role": "user", "content": line})
                try:
                    said = one.reply(talk, how, language, _streamer(one, len(models) > 1))
                except InputError as error:  # a language that it does not know, or a conversation that is too long
                    talk.pop()
                    if not sys.stdin.isatty():
                        raise
                    print(f"error: {error}", file=sys.stderr)
                    continue
                talk.append({"role": "assistant", "content": said})


def _streamer(one: "ChatModel", is_named: bool) -> Any:
    """Shows the tokens of a model's answer as they come, below its name if there is another model."""
    from transformers import TextStreamer

    if is_named:
        print(f"{one.name}:")
    return TextStreamer(one.tokenizer, skip_prompt=True, skip_special_tokens=True)


def _read() -> str | None:
    """The next line of the input; None at its end."""
    with library_errors_at("The input", UnicodeError):
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return None
        line.encode()
    if not sys.stdin.isatty():
        print(line)
    return line


def sample(
    model: Model,
    *,
    out: NewFile,
    settings: Annotated[SampleSettings, Keys(without=("prompts",))],
    language: str = "und",
    prompt: Sequence[str] = (),
    revision: str | None = None,
) -> None:
    """Let a base model write text, for a gate or a review without any text that the base was trained on.

    Of an expanded model, the base inside writes (expert 0). Each row of the file names the model, the prompt and the
    settings that it came from.

    Example: hf-moe-expand sample Qwen/Qwen2.5-0.5B --language en --prompt "The city" --prompt "In 1990" --out en.jsonl

    Args:
        language: code of the old language for which the text stands, e.g. en; und: undetermined.
        prompt: beginning of a document, a few words in the language; repeat, for turns.
    """
    from ..core.languages import check_language_code
    from ..core.schema import changed
    from .sampling import write_sample

    check_language_code(language)
    settings = changed(settings, prompts=prompt)
    print(f"wrote {out}: {write_sample(model, revision, language, settings, out)}")

"""Verbs that let a model write: `generate` and `chat`."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.errors import InputError, is_unicode
from ..inference.writing import Answering
from .common import check_checkpoints, check_file, codes
from .options import Model, Overwrite, Revision, app, with_settings

if TYPE_CHECKING:
    from ..inference.asking import ChatModel

Beside = Annotated[
    str | None,
    typer.Option(
        "--base", help="Model to ask beside: a folder, a hub id, or `inside`, the base inside the model (expert 0)."
    ),
]


@app.command()
@with_settings()
def generate(
    model: Model,
    settings: Answering,
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="[PROMPT...]", help="Prompts; by default the lines of the input.")
    ] = None,
    languages: Annotated[
        str, typer.Option(help="Language of each prompt, e.g. el,en, or one for all, where you know it.")
    ] = "",
    base: Beside = None,
    revision: Revision = None,
    out: Annotated[Path | None, typer.Option(help="JSON file for the answers as well.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Let a model continue prompts, or answer them; with --base, another model beside it.

    With --languages, an old language gets the base's own output, a new one all experts of its expansion.

    Example: hf-moe-expand generate qwen-el-2 "Η Ελλάδα είναι" "Greece is" --languages el,en --base Qwen/Qwen2.5-0.5B
    """
    check_file(out, overwrite)
    check_checkpoints(model, revision=revision)
    if base not in (None, "inside"):
        check_checkpoints(str(base))
    texts = list(prompts or [])
    if not texts:
        if sys.stdin.isatty():
            raise InputError("There is no prompt: give one as an argument, or lines on the input.")
        texts = [line.rstrip("\n") for line in _lines() if line.strip()]
    named = codes(languages)
    from ..inference.asking import ChatModel, ask

    spoken: Any = named[0] if len(named) == 1 else named or None
    loaded = ChatModel.load(model, revision)
    by_model = ask([loaded, *([base] if base else [])], texts, settings, spoken)
    for number, prompt in enumerate(texts):
        print(f"{prompt}")
        width = max(map(len, by_model))
        for name, answers in by_model.items():
            cut = "" if answers[number].ended else " ..."
            reply = answers[number].text.strip().replace("\n", "\n    ") + cut
            print(f"  {name + ':':<{width + 1}} {reply}" if len(by_model) > 1 else f"  {reply}")
    if out is not None:
        from ..core.jsonfile import write_json

        write_json(out, {
            "prompts": texts, "languages": spoken, "how": settings.model_dump(),
            "answers": {name: [vars(answer) for answer in answers] for name, answers in by_model.items()},
        })  # fmt: skip
        print(f"wrote {out}")


@app.command()
@with_settings("chat", chat=True, max_new_tokens=512)
def chat(
    model: Model,
    settings: Answering,
    language: Annotated[
        str | None, typer.Option("--languages", help="Language of the conversation, where you know it, e.g. el.")
    ] = None,
    base: Beside = None,
    revision: Revision = None,
) -> None:
    """Talk with a model in its chat template, line by line; with --base, with another model beside it.

    /new begins a new conversation, /languages el names its language, /exit or the end of the input ends it. Another
    word after a slash is refused, and not sent.

    Example: hf-moe-expand chat qwen-el-chat --languages el --base inside
    """
    check_checkpoints(model, revision=revision)
    if base not in (None, "inside"):
        check_checkpoints(str(base))
    from ..inference.asking import ChatModel

    first = ChatModel.load(model, revision)
    models = [first]
    if base is not None:
        models.append(first.base_inside() if base == "inside" else ChatModel.load(base))
    for one in models:
        one.check_template()
    _talk(models, settings, language)


def _talk(models: "list[ChatModel]", how: Answering, language: str | None) -> None:
    """Reads lines and lets each model reply, in a conversation of its own."""
    from transformers import TextStreamer

    talks: list[list[dict[str, str]]] = [[] for _ in models]
    while (line := _read()) is not None:
        command, _, rest = line.partition(" ")
        if command in ("/exit", "/quit"):
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
                if len(models) > 1:
                    print(f"{one.name}:")
                streamer = TextStreamer(one.tokenizer, skip_prompt=True, skip_special_tokens=True)
                try:
                    answer = one.reply(talk, how, language, streamer)
                except InputError as error:  # a language that it does not know, or a conversation that is too long
                    talk.pop()
                    if not sys.stdin.isatty():
                        raise
                    print(f"error: {error}", file=sys.stderr)
                    continue
                talk.append({"role": "assistant", "content": answer.text})


def _read() -> str | None:
    """The next line of the input; None at its end."""
    if sys.stdin.isatty():
        try:
            return input("> ").strip()
        except EOFError:
            print()
            return None
    line = next(_lines(), None)
    if line is not None:
        print(f"> {line.strip()}")
    return None if line is None else line.strip()


def _lines() -> Iterator[str]:
    """The next lines of the input."""
    try:
        for line in sys.stdin:
            if not is_unicode(line):
                raise InputError(f"{line.strip()!r}: the input is not UTF-8.")
            yield line
    except UnicodeDecodeError as error:
        raise InputError(f"The input is not {error.encoding.upper()} (byte {error.object[error.start]:#x}).") from None

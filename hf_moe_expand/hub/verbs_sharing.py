"""The verbs that show a checkpoint to others: its card and its repository."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ..checkpoint.arguments import MODEL, Expanded, NewFile, expanded
from ..core.printing import print_or_write
from ..core.schema import Schema
from ..core.verbs import Kind


class CardSettings(Schema):
    """What a card says beside the checkpoint's own facts."""

    evaluation: Path | None = Field(None, description="evaluation.json, for the card's results")
    evaluated_as: str | None = Field(None, description="name of this model in the evaluation")
    license: str | None = Field(None, description="license for the card; by default that of the base model's card")
    base: str | None = Field(
        None, description="hub id of the base, if it was a local folder: card and config.json name it"
    )
    expansion_only: bool = Field(False, description="only the added tensors are published; loading fetches the base")


def card(model: Expanded, *, settings: CardSettings, repo_id: str | None = None, out: NewFile | None = None) -> None:
    """Print the model card that `push` writes with the same options; its notes go to the error stream.

    Example: hf-moe-expand card qwen-el-2 --repo-id me/qwen-el

    Args:
        repo_id: repository of the published checkpoint: namespace/name.
        out: file to write, such as README.md in the checkpoint.
    """
    from ..core.saying import say_once
    from .publish import card_to_push

    print_or_write(card_to_push(model, repo_id, **dict(settings), say=say_once)[0], out)


def push(
    model: Annotated[str, Kind(MODEL, lambda name, _: expanded(name, {}))],  # whatever the branch to push to
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    settings: CardSettings,
    include: Sequence[str] = (),
    dry_run: bool = False,
) -> None:
    """Publish a checkpoint on the hub. A second run continues a broken upload, and sends only files that changed.

    Example: hf-moe-expand push qwen-el-2 me/qwen-el --evaluation evaluation.json

    Args:
        repo_id: repository: namespace/name.
        private: make a new repository private.
        revision: branch to push to; main by default.
        include: further file of the folder to publish; repeat.
        dry_run: print files and card without uploading.
    """
    from .publish import push_to_hub

    options: dict[str, Any] = {"private": private, "revision": revision, "include": include, "dry_run": dry_run}
    push_to_hub(model, repo_id, **options, **dict(settings))

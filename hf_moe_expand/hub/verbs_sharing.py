"""The verbs that show a checkpoint to others: its card and its repository."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from ..checkpoint.arguments import MODEL, Expanded, NewFile, expanded
from ..core.printing import print_or_write
from ..core.verbs import Kind

Evaluated = Annotated[Path, Kind("evaluation.json, for the card's results.")]
EvaluatedAs = Annotated[str, Kind("Name of this model in the evaluation.")]
License = Annotated[str, Kind("License for the card; by default that of the base model's card.")]
BaseId = Annotated[str, Kind("Hub id of the base, if it was a local folder: card and config.json name it.")]


def card(
    model: Expanded,
    *,
    evaluation: Evaluated | None = None,
    evaluated_as: EvaluatedAs | None = None,
    repo_id: str | None = None,
    license: License | None = None,
    base: BaseId | None = None,
    expansion_only: bool = False,
    out: NewFile | None = None,
) -> None:
    """Print the model card that `push` writes with the same options; its notes go to the error stream.

    Example: hf-moe-expand card qwen-el-2 --repo-id me/qwen-el

    Args:
        repo_id: repository of the published checkpoint: namespace/name.
        expansion_only: the card of a repository that holds only the added tensors.
        out: file to write, such as README.md in the checkpoint.
    """
    from ..core.saying import say_once
    from .publish import card_to_push

    text, *_ = card_to_push(
        model, repo_id, evaluation=evaluation, evaluated_as=evaluated_as, license=license, base=base,
        expansion_only=expansion_only, say=say_once,
    )  # fmt: skip
    print_or_write(text, out)


def push(
    model: Annotated[str, Kind(MODEL, lambda name, _: expanded(name, {}))],  # whatever the branch to push to
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    evaluation: Evaluated | None = None,
    evaluated_as: EvaluatedAs | None = None,
    include: Sequence[str] = (),
    license: License | None = None,
    base: BaseId | None = None,
    expansion_only: bool = False,
    dry_run: bool = False,
) -> None:
    """Publish a checkpoint on the hub. A second run continues a broken upload, and sends only files that changed.

    Example: hf-moe-expand push qwen-el-2 me/qwen-el --evaluation evaluation.json

    Args:
        repo_id: repository: namespace/name.
        private: make a new repository private.
        revision: branch to push to; main by default.
        include: further file of the folder to publish; repeat.
        expansion_only: publish only the added tensors; loading fetches the base model.
        dry_run: print files and card without uploading.
    """
    from .publish import push_to_hub

    push_to_hub(
        model, repo_id, private=private, revision=revision, evaluation=evaluation, evaluated_as=evaluated_as,
        include=include, license=license, base=base, expansion_only=expansion_only, dry_run=dry_run,
    )  # fmt: skip

"""Publishes an expanded checkpoint, its card and the files of its run as a model repository of the hub."""

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard
from huggingface_hub.utils import validate_repo_id

from .. import __version__
from ..checkpoint.expansion_only import save_expansion
from ..checkpoint.reader import CheckpointReader
from ..checkpoint.source import load_expanded_config, name_in_results, own_name, resolve_checkpoint, run_of
from ..core.disk import readable_size
from ..core.errors import InputError, goes_on, library_errors_at, named_as
from ..core.private import refuse_private
from ..core.recipe_paths import RECIPE, SETTINGS, without_paths
from ..core.schema import checked
from ..evaluation.report import Evaluation
from ..modeling.part_expansion_only import RECORD
from ..stages import recipe_stages
from .card import BaseModel, base_on_hub, config_with_base, make_card, named_base
from .published import CARD, EVALUATION, check_code, check_loads_alone, published_files

_WEIGHTS = (".safetensors", ".safetensors.index.json")


@dataclass(frozen=True)
class Push:
    """Repository, branch, and the branch's commit now (None after a dry run); whether some file changed, so that a
    commit was made; the bytes of every file; and the text of README.md."""

    repo_id: str
    revision: str
    commit: str | None
    changed: bool
    files: dict[str, int]
    card: str


@checked
def push_to_hub(
    model: str | os.PathLike,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    evaluation: str | os.PathLike | None = None,
    evaluated_as: str | None = None,
    include: Sequence[str] = (),
    license: str | None = None,
    base: str | None = None,
    expansion_only: bool = False,
    dry_run: bool = False,
    commit_message: str | None = None,
    token: str | None = None,
    say: Callable[[str], None] = print,
) -> Push:
    """Publishes a checkpoint: weights, code, tokenizer, card, and the run's recipe, plan, analysis and evaluation.

    Where the folder has no card but a trainer's, one is written. The checkpoint is first loaded in a fresh process
    without this package. After a broken upload, the same call resumes. Unchanged files make no commit.

    Args:
        model: folder of an expanded checkpoint (or a hub id, to publish it under another name).
        repo_id: `namespace/name`, or a name in the token's namespace; a new one is `private` or not.
        revision: branch to push to, created if it does not exist; `main` by default.
        evaluation, evaluated_as, license, base: see `make_card`; the folder's or its run's evaluation by default.
        include: further files of the folder to publish.
        expansion_only: publish only the added tensors, with a reference to the base (see `save_expansion`).
        dry_run: print what would be published, without an upload; needs no token.
        token: access token; by default that of `hf auth login` or HF_TOKEN.

    Raises:
        InputError: the folder or the card is wrong, or the hub refuses.
    """
    folder, api = resolve_checkpoint(model), HfApi(token=token)
    CheckpointReader(folder).check_finite()
    repo_id = _full_name(api, repo_id, dry_run)
    card, chosen, origin = card_to_push(
        folder, repo_id, evaluation=evaluation, evaluated_as=evaluated_as, license=license, base=base,
        expansion_only=expansion_only, keep=True, token=token, say=say,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        files: dict[str, Any] = dict(published_files(folder, include, say))
        files = _without_base(files, folder, Path(scratch), base, say) if expansion_only else files
        config = files["config.json"] if base is None else config_with_base(files["config.json"], origin)
        files |= {CARD: card.encode(), EVALUATION: chosen, "config.json": config}
        files = {name: content for name, content in files.items() if content is not None}
        upload = _laid_out(files, Path(scratch) / "upload", folder)
        sizes = {name: (upload / name).stat().st_size for name in sorted(files)}
        if dry_run:
            say("\n".join([*(f"{readable_size(size):>10}  {name}" for name, size in sizes.items()), "", card]))
            return Push(repo_id, revision or "main", None, False, sizes, card)
        say("loading it in a fresh process, without this package ...")
        with named_as(upload, folder):
            check_loads_alone(upload)
        before, commit = _upload(api, upload, repo_id, private, revision, commit_message)
    say(f"{repo_id}: {'unchanged' if commit == before else f'pushed {len(files)} files'}, commit {commit}")
    return Push(repo_id, revision or "main", commit, commit != before, sizes, card)


def _secrets(api: HfApi) -> list[str]:
    return [api.token] if isinstance(api.token, str) else []


def _full_name(api: HfApi, repo_id: str, dry_run: bool) -> str:
    """The repository's name with its namespace; refused before all work where the name or the token is wrong."""
    with library_errors_at(repo_id, secrets=_secrets(api)):
        validate_repo_id(repo_id)
        if dry_run:
            return repo_id
        user = api.whoami()["name"]
        return repo_id if "/" in repo_id else f"{user}/{repo_id}"


def _without_base(
    files: dict[str, Any], folder: Path, scratch: Path, base: str | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """The files with the added tensors alone."""
    saved = save_expansion(folder, scratch / folder.resolve().name, base)
    if saved.changed:
        say(f"training changed {len(saved.changed)} tensors of the base model, which are published too")
    kept = {name: file for name, file in files.items() if not name.endswith(_WEIGHTS)}
    return {**kept, **published_files(saved.out)}


def _laid_out(files: dict[str, Any], upload: Path, folder: Path) -> Path:
    """The folder `upload` with the contents, and links to the files of `folder`; of a recipe's paths, the last part
    stays. Refuses what nobody should run or read."""
    for name in {RECIPE, SETTINGS} & files.keys():
        files[name] = without_paths(files[name].read_text(encoding="utf-8-sig")).encode()
    for name, content in files.items():
        (upload / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            (upload / name).write_bytes(content)
        else:
            (upload / name).symlink_to(content.resolve())
    with named_as(upload, folder):
        check_code(upload)
    refuse_private(files)
    return upload


def _upload(
    api: HfApi, upload: Path, repo_id: str, private: bool, revision: str | None, message: str | None
) -> tuple[str | None, str]:
    """Uploads the folder; the branch's commit before and after."""
    # Weights of an earlier push under other names would be loaded instead of these.
    stale = [RECORD, *(f"*{end}" for end in (*_WEIGHTS, ".bin", ".bin.index.json"))]
    message = message or f"Push with hf-moe-expand {__version__}"
    with library_errors_at(repo_id, secrets=_secrets(api)), goes_on(lambda: "with the files that have not arrived"):
        api.create_repo(repo_id, private=private or None, exist_ok=True)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        before = api.model_info(repo_id, revision=revision)
        if private and not before.private:
            raise InputError(f"{repo_id}: exists already and is public; make it private in its settings.")
        done = api.upload_folder(
            repo_id=repo_id, folder_path=upload, revision=revision, commit_message=message, delete_patterns=stale
        )
    return before.sha, done.oid


def card_to_push(
    model: str | os.PathLike, repo_id: str | None = None, *, evaluation: str | os.PathLike | None = None,
    evaluated_as: str | None = None, license: str | None = None, base: str | None = None, expansion_only: bool = False,
    keep: bool = False, token: str | None = None, say: Callable[[str], None] = print,
) -> tuple[str, Path | None, BaseModel]:  # fmt: skip
    """The card that `push_to_hub` writes with the same arguments (with `keep`, the folder's own takes its place), the
    evaluation behind it, and the base that it names."""
    folder, name = resolve_checkpoint(model, weights=False), repo_id or own_name(model)
    config = load_expanded_config(folder)
    origin = named_base(config) if base is None else base_on_hub(config, base, token)
    if base is not None and origin.revision is None:
        say(f"base: {base} was not compared with the checkpoint: the hub is out of reach, or gives no access to it")
    if origin.hub_id is None:
        say(f"base: {origin.name}, a local folder; if it is published too, name it with --base HUB_ID")
    chosen, called = _evaluation(folder, evaluation, evaluated_as, name, say)
    if own := _has_own_card(folder):
        say(f"card: {folder} has a {CARD} already, which `push` publishes as it stands: move it away for a new one")
    if own and keep:
        if license is not None:
            raise InputError(f"license: {CARD} of {folder} is the card, as it stands: name the licence there.")
        text = (folder / CARD).read_text(encoding="utf-8")
    else:
        text = str(make_card(folder, name, chosen, called, license, origin, expansion_only))
    if not ModelCard(text, ignore_metadata_errors=True).data.get("license"):
        say(f"warning: the card names no license: give one with --license, such as apache-2.0, or in your own {CARD}")
    return text, chosen, origin


def _has_own_card(folder: Path) -> bool:
    """Whether the folder has a card that no trainer of transformers or TRL wrote: theirs have a tag of their own."""
    if not (folder / CARD).is_file():
        return False
    with library_errors_at(f"{folder / CARD}: its metadata cannot be read"):
        tags = ModelCard.load(folder / CARD, ignore_metadata_errors=True).data.get("tags")
    return "generated_from_trainer" not in (tags or [])


def _evaluation(
    folder: Path, evaluation: str | os.PathLike | None, called: str | None, repo_id: str, say: Callable[[str], None]
) -> tuple[Path | None, str | None]:
    """The evaluation to publish, and this model's name in it; one that was found must have scores of this model."""
    run = run_of(folder)
    names = [repo_id, folder.resolve().name, name_in_results(folder), own_name(folder)]
    names += [] if run is None else [_name_in_run(folder.resolve(), run)]
    found = [place / EVALUATION for place in (folder, run) if place and (place / EVALUATION).is_file()]
    for file in found if evaluation is None else [Path(evaluation)]:
        scored = Evaluation.from_json(file).models
        name = called or next((name for name in names if name in scored), None)
        if name is not None or evaluation is not None:
            return file, name
    say("no evaluation: the card will show no results (make one with `hf-moe-expand evaluate`)")
    return None, None


def _name_in_run(folder: Path, run: Path) -> str:
    """The name of a run's checkpoint in the run's evaluation: of its stage, or of the expansion that it ends."""
    result_names = {key: stage.result_name for key, stage in recipe_stages().items()}
    if folder.parent == run:
        return result_names.get(folder.name, folder.name)
    last = [stage for stage in result_names if (folder.parent / stage).is_dir()][-1:]
    return f"after expansion {folder.parent.name}" if [folder.name] == last else ""

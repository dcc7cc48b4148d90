"""Publishes an expanded checkpoint, its card and the files of its run as a model repository of the hub."""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelCard,
    get_token,
    hf_hub_download,
    metadata_load,
)
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id

from .. import __version__
from ..checkpoint.expansion_only import BaseModel, base_of, save_expansion
from ..checkpoint.local import name_in_results, own_name, run_of
from ..checkpoint.reader import CheckpointReader
from ..checkpoint.source import load_expanded_config, resolve_checkpoint
from ..core.disk import readable_size
from ..core.errors import InputError, first_line, goes_on
from ..core.hub_access import patiently
from ..core.hub_answers import is_quota, refusal, status_of, without_secrets
from ..core.jsonfile import read_json
from ..core.private import refuse_private
from ..core.recipe_paths import RECIPE, SETTINGS, without_paths
from ..core.schema import checked
from ..evaluation.report import Evaluation
from ..modeling import MODEL_CLASSES
from ..stages import recipe_stages
from .card import make_card, scores_of_this
from .files import (
    CARD,
    EVALUATION,
    base_on_hub,
    check_code,
    check_loads_alone,
    config_with_base,
    is_weights,
    published_files,
)

# Answers to an upload that the same one would get again.
_FOR_GOOD = (401, 402, 403, 404, 407, 410, 413, 415, 422, 451, 507)


@dataclass(frozen=True)
class Push:
    """Result of `push_to_hub`.

    Attributes:
        repo_id, revision: repository and branch.
        commit: the branch's commit now; None after a dry run.
        changed: False if the repository had all files already, so that no commit was made.
        files: size in bytes of every file.
        card: the text of README.md.
    """

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
    leave_others: bool = False,
    commit_message: str | None = None,
    token: str | None = None,
    say: Callable[[str], None] = print,
) -> Push:
    """Publishes a checkpoint: weights, code, tokenizer, card, and the run's recipe, plan, analysis and evaluation. Of
    local paths in the recipe, the last part is published.

    After training with any trainer:

        trainer.save_model("qwen-el")
        tokenizer.save_pretrained("qwen-el")
        push_to_hub("qwen-el", "me/qwen-el")

    The package's own Trainers do so with `trainer.push_to_hub()`.

    The folder's README.md is the card; if it is missing or a trainer wrote it, a card is written from config.json and
    the evaluation. Before the upload the checkpoint is loaded in a fresh process without this package. After a broken
    upload, the same call resumes: files that arrived are not sent again. Unchanged files make no commit.

    Args:
        model: folder of an expanded checkpoint (or a hub id, to publish it under another name).
        repo_id: `namespace/name`, or a name in the token's namespace.
        private: make a new repository private.
        revision: branch to push to, created if it does not exist; `main` by default.
        evaluation: evaluation.json; by default the folder's or its run's.
        evaluated_as: the name of this model in `evaluation`; the folder's name by default.
        include: further files of the folder to publish.
        license: license of the card; by default the base model's license, if its card names one.
        base: hub id of the base model, if config.json knows it only as a local folder; the published config.json and
            card name it, with its commit.
        expansion_only: publish only the added tensors, with a reference to the base (see `save_expansion`).
        leave_others: leave other files of the folder here, where by default they are refused; a line names them.
        commit_message: message of the commit.
        dry_run: print what would be published, without an upload; needs no token.
        token: access token; by default that of `hf auth login` or HF_TOKEN.

    Raises:
        InputError: the token, the repository, the folder or the card is wrong; the message says which and why.
    """
    folder = resolve_checkpoint(model)
    config = load_expanded_config(folder)
    check_code(folder)
    CheckpointReader(folder).check_finite()
    api = HfApi(token=token)
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise InputError(f"{repo_id}: not the id of a repository (namespace/name): {error}") from None
    with tempfile.TemporaryDirectory() as scratch:
        if not dry_run:
            with _hub_errors(repo_id):
                repo_id = patiently(_check_repository, api, repo_id, private)
        origin = _origin(config, base, token, say)
        if origin.hub_id is None and expansion_only:
            raise InputError(
                f"{folder}: was expanded from {origin.name}, a local folder, but loading the added tensors alone "
                "fetches the base from the hub: name its published copy with --base HUB_ID, or leave out "
                "--expansion-only."
            )
        files: dict[str, Path | bytes] = {**published_files(folder, include, say if leave_others else None)}
        files.pop(EVALUATION, None)
        chosen, called = _evaluation(folder, evaluation, evaluated_as, repo_id, say)
        if chosen is not None:
            files[EVALUATION] = chosen
        source = folder
        if expansion_only:
            saved = save_expansion(folder, Path(scratch) / folder.resolve().name, base)
            if saved.changed:
                say(f"training changed {len(saved.changed)} tensors of the base model, which are published too")
            source = saved.out
            files = {name: content for name, content in files.items() if not is_weights(name)}
            files |= published_files(source)
        if _own_card(folder):
            if license is not None:
                raise InputError(f"license: {CARD} of {folder} is the card, as it stands: name the licence there.")
            say(f"card: {CARD} of {folder}, as it stands")
            card = (folder / CARD).read_text(encoding="utf-8")
        else:
            card = str(make_card(folder, repo_id, chosen, called, license, origin, expansion_only))
            files[CARD] = card.encode()
        _warn_of_no_license(card, say)
        if base is not None:
            files["config.json"] = config_with_base(source / "config.json", origin)
        for name in (RECIPE, SETTINGS):
            if isinstance(written := files.get(name), Path):
                files[name] = without_paths(written.read_text(encoding="utf-8-sig")).encode()
        refuse_private(files)
        sizes = {name: len(c) if isinstance(c, bytes) else c.stat().st_size for name, c in sorted(files.items())}
        branch = revision or "main"
        if dry_run:
            for name, size in sizes.items():
                say(f"{readable_size(size):>10}  {name}")
            say(f"\n{card}")
            return Push(repo_id, branch, None, False, sizes, card)
        say("loading it in a fresh process, without this package ...")
        check_loads_alone(source)
        with _hub_errors(repo_id, uploads=True), goes_on(lambda: "with the files that have not arrived"):
            commit, changed = patiently(_upload, api, repo_id, branch, private, files, commit_message)
        say(f"{repo_id}: {f'pushed {len(files)} files' if changed else 'unchanged'}, commit {commit}")
    return Push(repo_id, branch, commit, changed, sizes, card)


def card_to_push(
    model: str | os.PathLike,
    repo_id: str | None = None,
    *,
    evaluation: str | os.PathLike | None = None,
    evaluated_as: str | None = None,
    license: str | None = None,
    base: str | None = None,
    expansion_only: bool = False,
    say: Callable[[str], None] = print,
) -> str:
    """The card that `push_to_hub` writes with the same arguments.

    Args:
        repo_id: repository of the published model; by default the card names the checkpoint's own folder.

    Raises:
        InputError: as `push_to_hub`.
    """
    folder = resolve_checkpoint(model, weights=False)
    origin = _origin(load_expanded_config(folder), base, None, say)
    location = repo_id or own_name(model)
    chosen, called = _evaluation(folder, evaluation, evaluated_as, location, say)
    card = str(make_card(folder, location, chosen, called, license, origin, expansion_only))
    if _own_card(folder):
        say(f"card: {folder} has a {CARD} already, which `push` publishes as it stands: move it away for this one")
    _warn_of_no_license(card, say)
    return card


def _origin(config: Any, base: str | None, token: str | None, say: Callable[[str], None]) -> BaseModel:
    """The base to name, which may be known as a local folder alone; says what is not known of it."""
    origin = base_of(config) if base is None else base_on_hub(config, base, token)
    if base is not None and origin.revision is None:
        say(f"base: {base} was not compared with the checkpoint: the hub is out of reach, or gives no access to it")
    if origin.hub_id is None:
        say(f"base: {origin.name}, a local folder; if it is published too, name it with --base HUB_ID")
    return origin


def _warn_of_no_license(card: str, say: Callable[[str], None]) -> None:
    data: Any = ModelCard(card, ignore_metadata_errors=True).data
    if not data.license:
        say(
            f"warning: the card names no license, nor does the base's card, or it could not be read: give one with "
            f"--license, such as apache-2.0, or in the metadata of your own {CARD}"
        )


def _own_card(folder: Path) -> bool:
    """Whether the folder has a card that no trainer of transformers or TRL wrote: theirs have a tag of their own."""
    card = folder / CARD
    if not card.is_file():
        return False
    try:
        data: Any = metadata_load(card) or {}
    except Exception as error:  # broken metadata raises many types
        raise InputError(f"{card}: its metadata cannot be read ({first_line(error)}).") from error
    return not isinstance(data, dict) or "generated_from_trainer" not in (data.get("tags") or [])


def _evaluation(
    folder: Path,
    evaluation: str | os.PathLike | None,
    called: str | None,
    repo_id: str,
    say: Callable[[str], None],
) -> tuple[Path | None, str | None]:
    """The evaluation to publish, and this model's name in it. An evaluation that was not given but found is used only
    if it has scores of this model; a run's evaluation has none of the run's first checkpoint. Says where there is
    none."""
    run = run_of(folder)
    ours = [folder.resolve().name, name_in_results(folder), own_name(folder)]
    candidates = [(folder / EVALUATION, [*ours, repo_id])]
    if run is not None:
        candidates.append((run / EVALUATION, [_name_in_run(folder.resolve(), run)]))
    if evaluation is not None:
        own = [name for file, (name, *_) in candidates[1:] if file.resolve() == Path(evaluation).resolve()]
        candidates = [(Path(evaluation), [repo_id, *ours, *own])]
    for file, names in candidates:
        if not file.is_file() and evaluation is None:
            continue
        scores = Evaluation.from_json(file)
        names = [called] if called is not None else names
        if evaluation is not None or called is not None:
            scores_of_this(scores, names, file)
        if name := next((name for name in names if name in scores.models), None):
            return file, name
    say("no evaluation: the card will show no results (make one with `hf-moe-expand evaluate`)")
    return None, None


def _name_in_run(folder: Path, run: Path) -> str:
    """The name of a run's checkpoint in the run's evaluation: that of its stage or, in a run with several expansions,
    of the expansion whose last checkpoint it is."""
    result_names = {key: stage.result_name for key, stage in recipe_stages().items()}
    if folder.parent == run:
        return result_names.get(folder.name, folder.name)
    last = [stage for stage in result_names if (folder.parent / stage).is_dir()][-1:]
    return f"after expansion {folder.parent.name}" if [folder.name] == last else ""


def _check_repository(api: HfApi, repo_id: str, private: bool) -> str:
    """The full id of the repository, after checking as far as possible that the token may write to it."""
    if (api.token or get_token()) is None:
        raise InputError(
            "The hub needs an access token with write permission: log in with `hf auth login`, or set HF_TOKEN "
            "(https://huggingface.co/settings/tokens)."
        )
    user = api.whoami()["name"]
    repo_id = repo_id if "/" in repo_id else f"{user}/{repo_id}"
    try:
        info = api.model_info(repo_id)
    except RepositoryNotFoundError:
        for kind in ("dataset", "space"):
            if api.repo_exists(repo_id, repo_type=kind):
                raise InputError(f"{repo_id}: is already a {kind} on the hub; give the model another name.") from None
        return repo_id
    if private and not info.private:
        raise InputError(
            f"{repo_id}: exists already and is public; make it private in its settings, or choose another name."
        )
    names = [sibling.rfilename for sibling in info.siblings or []]
    content = "weights without config.json" if any(map(is_weights, names)) else None
    if "config.json" in names:
        config = read_json(hf_hub_download(repo_id, "config.json", revision=info.sha, token=api.token), "config.json")
        model_type = config.get("model_type")
        ours = [config_class.model_type for config_class in MODEL_CLASSES]  # type: ignore[attr-defined]
        content = None if model_type in ours else f"a model of type {model_type}"
    if content is not None:
        raise InputError(f"{repo_id}: holds {content}, which this push would overwrite; choose another name.")
    return repo_id


def _upload(
    api: HfApi, repo_id: str, branch: str, private: bool, files: dict[str, Path | bytes], message: str | None
) -> tuple[str, bool]:
    """Uploads the files; returns the branch's commit afterwards, and whether it is new."""
    api.create_repo(repo_id, private=private or None, exist_ok=True)
    if branch != "main":
        api.create_branch(repo_id, branch=branch, exist_ok=True)
    info = api.model_info(repo_id, revision=branch)
    # Weights of an earlier push under other names would be loaded instead of these.
    stale = [s.rfilename for s in info.siblings or [] if is_weights(s.rfilename) and s.rfilename not in files]
    additions = [CommitOperationAdd(name, c if isinstance(c, bytes) else str(c)) for name, c in files.items()]
    deletions = [CommitOperationDelete(name) for name in stale]
    message = message or f"Push with hf-moe-expand {__version__}"
    done = api.create_commit(repo_id, [*additions, *deletions], commit_message=message, revision=branch)
    return done.oid, done.oid != info.sha


@contextmanager
def _hub_errors(repo_id: str, uploads: bool = False) -> Iterator[None]:
    """Inside, the hub is asked: what is raised comes from it, from what stands before it, or from the network."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # an answer that is none of the hub's raises many types
        said, status = refusal(error), status_of(error)
        if "metadata in README.md" in str(error):
            said = f"the hub refuses the card: {without_secrets(' '.join(str(error).split()))}"
        elif status == HTTPStatus.UNAUTHORIZED:
            raise InputError(f"The hub refuses the access token: {said}.") from None
        elif status == HTTPStatus.FORBIDDEN and not is_quota(error):
            said = f"the access token may not write to it: {said}, or push to a namespace of your own"
        elif uploads and status not in _FOR_GOOD:
            said = f"the upload broke off ({said}). Run the same command again: it sends only missing files"
        raise InputError(f"{repo_id}: {said}.") from None

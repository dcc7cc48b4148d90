"""Finds a checkpoint on this machine and refuses what is none, before anything is loaded."""

import os
from pathlib import Path

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from ..core.errors import InputError, first_line
from ..core.jsonfile import read_json
from ..core.saying import say_once
from ..core.scratch import leftovers, restore

MOST_LAYERS = 4096  # no model comes near it; building a longer list of modules would take for ever
# Ends of the names of files that are read from a checkpoint.
_READ = (".json", ".safetensors", ".jinja", ".model", ".txt", ".tiktoken", ".spm", ".bpe", ".py")
ADAPTER = "adapter_config.json"  # of PEFT
# The model types of expanded checkpoints.
EXPANDED = ("layer_moe", "dmoe")


def local_checkpoint(name: str | os.PathLike, revision: str | None = None) -> Path | None:
    """The folder of a checkpoint on this machine; None for a hub id."""
    if not str(name):
        raise InputError("The name of a model is empty: give a folder or hub id.")
    folder = Path(name)
    try:
        restore(folder)
        there = folder.exists()
    except (OSError, ValueError) as error:
        raise InputError(f"{name}: not a valid name of a folder or hub id ({first_line(error)}).") from None
    if folder.is_dir():
        folder = last_checkpoint(folder)
        if revision is not None:
            raise InputError(f"{folder}: is a local folder, which has no revision {revision!r}; give a hub id.")
        refuse_adapter(folder, folder)
        if not (folder / "config.json").is_file():
            raise InputError(f"{folder}: not a checkpoint: it has no config.json. Give a model's folder or hub id.")
        _check_files(folder)
        return folder
    if there:
        raise InputError(f"{folder}: is a file; give the checkpoint's folder.")
    try:
        validate_repo_id(str(name))
    except HFValidationError:
        raise InputError(f"{name}: no such folder, and not a hub id (namespace/name).") from None
    return None


def refuse_adapter(folder: Path, name: str | os.PathLike) -> None:
    """Refuses an adapter of PEFT in the place of a model, or beside a model's weights: transformers would load it too,
    and nothing says whether the weights have it already. Messages call the checkpoint `name`."""
    file = folder / ADAPTER
    if file.is_file():
        base = read_json(file, "an adapter's configuration").get("base_model_name_or_path")
    elif any(folder.glob("adapter_model.*")) and not (folder / "config.json").is_file():
        base = None
    else:
        return
    of = f" of {base}" if isinstance(base, str) else ""
    beside = any(weights.name.startswith("model") for weights in folder.glob("*.safetensors"))
    kind = f"has an adapter{of} beside a model's weights" if beside else f"is an adapter{of}, not a model"
    there = " If the weights have it already, move adapter_config.json away." if beside else ""
    raise InputError(
        f"{name}: {kind}: merge it into its base, and give the merged model: with PEFT, "
        "PeftModel.from_pretrained(BASE_MODEL, ADAPTER).merge_and_unload().save_pretrained(FOLDER). Or make an "
        f"expansion of it: hf-moe-expand from-peft ADAPTER OUT --base BASE_MODEL --language CODE.{there}"
    )


def last_checkpoint(folder: Path) -> Path:
    """For the folder of a run, the checkpoint of its last finished step, which is said; any other folder as it is."""
    file = folder / "steps.json"
    if (folder / "config.json").is_file() or not file.is_file():
        return folder
    outputs = [step.get("output") for step in read_json(file, "the record of a run").values() if isinstance(step, dict)]
    made = [folder / output for output in outputs if isinstance(output, str)]
    for checkpoint in reversed(made):
        if (checkpoint / "config.json").is_file():
            say_once(
                f"{folder} is the folder of a run: the checkpoint of its last finished step is taken, {checkpoint}"
            )
            return checkpoint
    raise InputError(
        f"{folder}: the folder of a run that has no finished checkpoint: run its recipe again, or give a checkpoint's "
        "folder."
    )


def run_of(folder: Path) -> Path | None:
    """The folder of the run that made this checkpoint; None for a checkpoint outside of it."""
    return next((parent for parent in folder.resolve().parents[:2] if (parent / "steps.json").is_file()), None)


def own_name(name: str | os.PathLike) -> str:
    """The name of a model for cards and packs, without this machine's folders: that of its run's folder, since a run
    names its checkpoints by their stages; else that of its own folder; or its hub id."""
    folder = Path(name)
    return (run_of(folder) or folder.resolve()).name if folder.is_dir() else str(name)


def name_in_results(name: str | os.PathLike) -> str:
    """The name of a model in tables of results: in a run `RUN/STAGE`, else that of its folder; or its hub id."""
    folder = Path(name)
    if not folder.is_dir():
        return str(name)
    folder = last_checkpoint(folder)
    run = run_of(folder)
    return folder.resolve().relative_to(run.parent).as_posix() if run else folder.resolve().name


def name_and_commit(name: str | os.PathLike, folder: Path) -> tuple[str, str | None]:
    """The name of a model for histories, and its commit: of a folder, its last part and None; of a hub id, the id and
    the name of its `folder` in the hub's cache."""
    return (folder.resolve().name, None) if Path(name).is_dir() else (str(name), folder.name)


def pack_and_name(pack: str | os.PathLike) -> tuple[str, str]:
    """A pack's folder or hub id, and its name: in `NAME=PACK` the one that stands there, else `own_name`."""
    text = str(pack)
    name, equals, place = text.partition("=")
    if equals and name and place and not Path(text).is_dir():
        return place, name
    return text, own_name(text)


def _check_files(folder: Path) -> None:
    """Refuses a folder in which something else stands where a file is read: reading a pipe would never end."""
    for entry in folder.iterdir():
        if entry.name.endswith(_READ) and not entry.is_file():
            kind = "a folder" if entry.is_dir() else "a broken link" if entry.is_symlink() else "no file"
            raise InputError(f"{folder}: {entry.name} is {kind}, but a file is read there; remove it.")


def check_expanded(name: str | os.PathLike, revision: str | None = None) -> None:
    """Refuses what is no checkpoint, and a dense checkpoint on this machine; names what interrupted commands left where
    it would be."""
    left = leftovers(Path(name)) if str(name) else []
    if left and not Path(name).exists():
        raise InputError(f"{name}: no such folder. {' '.join(left)}")
    folder = local_checkpoint(name, revision)
    if folder is None:
        return
    model_type = read_json(folder / "config.json", "a configuration").get("model_type")
    if isinstance(model_type, str) and model_type not in EXPANDED:
        raise not_expanded(folder, model_type)


def not_expanded(folder: Path, model_type: str) -> InputError:
    """The refusal of a dense checkpoint where an expanded one is needed."""
    return InputError(f"{folder}: a {model_type} checkpoint, not an expanded one; run `hf-moe-expand expand` first.")

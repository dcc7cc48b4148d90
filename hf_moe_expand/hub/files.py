"""Chooses the published files of a checkpoint folder, refuses foreign code in them, and checks
that they load in a fresh process; finds the base model on the hub, which may be named after training."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from transformers.dynamic_module_utils import get_relative_import_files

from .. import modeling
from ..checkpoint.base_tensors import BASE_CHECK
from ..checkpoint.expansion_only import BaseModel
from ..checkpoint.graft import COMPUTATION
from ..checkpoint.local import run_of
from ..checkpoint.reader import CheckpointReader
from ..checkpoint.records import History
from ..checkpoint.source import CODE, TOKENIZER_FILES, lies_inside, load_config, text_config
from ..core.errors import InputError
from ..core.hub_access import hub_problem, patiently
from ..core.jsonfile import read_json
from ..core.recipe_paths import RECIPE, SETTINGS
from ..modeling import MODEL_CLASSES
from ..modeling.expansion_only import RECORD

CARD = "README.md"
EVALUATION = "evaluation.json"
PROVENANCE = (RECIPE, SETTINGS, "plan.json", "analysis.json")
# Files that training leaves in a folder; they are skipped without a message.
_STAYS_HOME = (
    "training_args.bin", "trainer_state.json", "validation.json", "steps.json", "optimizer.*", "scheduler.pt",
    "scaler.pt", "rng_state*.pth", BASE_CHECK, "checkpoint-*", "_push-*", "runs", "__pycache__", ".*",
)  # fmt: skip

_PROGRAM = """
import sys
sys.modules["hf_moe_expand"] = None  # importing it fails, as if it were not installed
import torch
from pathlib import Path
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer
folder = sys.argv[1]
try:
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    auto_class = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    if (Path(folder) / "tokenizer_config.json").is_file():
        AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model, info = auto_class.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            raise ValueError(kind.replace("_", " ") + ": " + ", ".join(map(str, sorted(info[kind])[:5])))
    with torch.no_grad():
        token = torch.zeros(1, 1, dtype=torch.long)
        logits = model(token, **({"decoder_input_ids": token} if config.is_encoder_decoder else {})).logits
    if not logits.isfinite().all():
        raise ValueError("its logits are not finite")
except Exception as error:
    print(f"{type(error).__name__}: {error}")
    sys.exit(1)
"""
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|_KEY", re.IGNORECASE)


def published_files(
    folder: Path, include: Sequence[str] = (), leave_others: Callable[[str], None] | None = None
) -> dict[str, Path]:
    """Maps names in the repository to local files: weights, configuration, code, tokenizer and the run's records.

    For a checkpoint inside a run folder, these include the run's recipe, plan and analyses.

    Args:
        include: further files of the folder to publish, relative to it.
        leave_others: says which other files stay here; by default they are refused.
    """
    reader = CheckpointReader(folder)
    names = [file.name for file in reader.files] + ["config.json", *_code(folder)]
    for pattern in (*TOKENIZER_FILES, "*.safetensors.index.json", RECORD, CARD, EVALUATION, *PROVENANCE):
        names += [str(file.relative_to(folder)) for file in folder.glob(pattern)]
    for name in include:
        inside = not Path(name).is_absolute() and ".." not in Path(name).parts
        if not inside or not (folder / name).is_file():
            raise InputError(f"{folder}: --include names {name}, but the folder has no such file.")
    files = {Path(name).as_posix(): folder / name for name in [*names, *include]}
    if away := [name for name, file in files.items() if not lies_inside(folder, file)]:
        raise InputError(f"{folder}: {away[0]} is a link that leads out of the folder; put the file itself there.")
    left = {file.name for file in folder.iterdir()} - {Path(name).parts[0] for name in files}
    if foreign := sorted(name for name in left if not _stays_home(name)):
        named = f"files that are not part of the checkpoint: {', '.join(foreign)}"
        if leave_others is None:
            raise InputError(f"{folder}: holds {named}. Move them away, or publish them too with --include FILE.")
        leave_others(f"not published: {named}")
    # The nearest folder comes last: in a run with several expansions, each has its own plan.
    near = [folder.resolve().parent, run_of(folder)]
    made_by = {name: there / name for there in near[::-1] for name in PROVENANCE if there and (there / name).is_file()}
    return dict(sorted({**(made_by if near[1] else {}), **files}.items()))


def _stays_home(name: str) -> bool:
    """Whether training leaves files of this name."""
    return any(Path(name).match(pattern) for pattern in _STAYS_HOME)


def is_weights(name: str) -> bool:
    """Whether a file of a repository holds weights, or is their index."""
    return name == RECORD or name.endswith((".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json"))


def _code(folder: Path) -> list[str]:
    """The `.py` files that config.json names, and the files that they import."""
    entries = read_json(folder / "config.json", "a configuration").get("auto_map") or {}
    names: set[str] = set()
    for entry in entries.values() if isinstance(entries, dict) else ():
        file = folder / f"{str(entry).rpartition('--')[2].partition('.')[0]}.py"
        if not file.is_file():
            raise InputError(
                f"{folder}: config.json names {file.name}, which is missing: write the checkpoint with save_pretrained."
            )
        names |= {file.name, *(Path(other).name for other in get_relative_import_files(file))}
    if not names:
        raise InputError(
            f"{folder}: config.json names no code (auto_map), so the model could not be loaded: write it with "
            "save_pretrained."
        )
    return sorted(names)


def check_loads_alone(folder: Path) -> None:
    """Loads the checkpoint with transformers alone, offline, and runs one token through it. Runs only this package's
    code, and without access tokens."""
    check_code(folder)
    with tempfile.TemporaryDirectory() as empty:
        environment = {name: value for name, value in os.environ.items() if not _SECRET.search(name)}
        environment |= {
            "HF_HUB_OFFLINE": "1",
            "HF_MODULES_CACHE": empty,  # reads the code from the folder, not from a cache of an earlier version
            "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
            "HF_TOKEN_PATH": str(Path(empty) / "token"),  # this file does not exist
        }
        command = [sys.executable, "-c", _PROGRAM, str(folder.resolve())]
        done = subprocess.run(
            command, env=environment, cwd=empty, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    if done.returncode:
        lines = (done.stdout.strip() or done.stderr.strip() or f"exit code {done.returncode}").splitlines()
        reason = lines[0] if done.stdout.strip() else lines[-1]
        raise InputError(
            f"{folder}: does not load in a fresh process with transformers alone, so it is not published: {reason}"
        )


def check_code(folder: Path) -> None:
    """Checks that a checkpoint folder holds and names only this package's code, byte for byte."""
    again = (
        "Write it again with this package's code: python -c \"from hf_moe_expand import load_for_inference; "
        f"load_for_inference('{folder}')[0].save_pretrained('{folder}')\"."
    )
    own = Path(modeling.__file__).parent
    for file in sorted(folder.rglob("*.py")):
        name, (first, *_) = str(file.relative_to(folder)), file.relative_to(folder).parts
        if _stays_home(first):  # a training checkpoint's, which nothing here loads
            continue
        if name not in CODE:
            raise InputError(f"{folder}: {name} is not code of this package, so it is not run; move it away.")
        if file.read_bytes() != (own / name).read_bytes():
            raise InputError(f"{folder}: {name} differs from this package's, so it is not run. {again}")
    for file in sorted(folder.glob("*.json")):
        if b'"auto_map"' not in file.read_bytes():
            continue
        named = read_json(file, "a JSON file").get("auto_map")
        ours = [model_class._auto_map for _, model_class, _ in MODEL_CLASSES.values()]
        known = isinstance(named, dict) and any(named.items() <= auto_map.items() for auto_map in ours)
        if not (file.name == "config.json" and known):
            raise InputError(f"{folder}: {file.name} names code that is not this package's (auto_map). {again}")


def base_on_hub(config: Any, hub_id: str, token: str | None = None) -> BaseModel:
    """The base that the hub has under `hub_id`, with its present commit, after comparing its configuration with that of
    the expanded model. Without a connection, or without access to a gated model, nothing is compared and the commit
    stays unknown."""
    where = f"--base {hub_id}"
    if Path(hub_id).is_dir():
        raise InputError(f"{where}: is a local folder; give the base model's hub id, which others need.")
    try:
        unreachable = bool(hub_problem())  # the library would try for a minute
        file = Path(patiently(hf_hub_download, hub_id, "config.json", token=token, local_files_only=unreachable))
    except HFValidationError:
        raise InputError(f"{where}: not a hub id (namespace/name).") from None
    except (GatedRepoError, LocalEntryNotFoundError):
        return BaseModel(hub_id, hub_id, None)
    except RepositoryNotFoundError:
        raise InputError(
            f"{where}: the hub shows no model of that name: publish the base model first, or, if it is private, log in "
            "with `hf auth login`."
        ) from None
    except EntryNotFoundError:
        raise InputError(f"{where}: is not a model: it has no config.json.") from None
    except Exception:  # an answer that is none of the hub's raises many types
        return BaseModel(hub_id, hub_id, None)
    _compare(config, text_config(load_config(file.parent)), where)
    return BaseModel(hub_id, hub_id, file.parent.name)  # the hub's cache names a snapshot's folder by its commit


def _compare(config: Any, base: Any, where: str) -> None:
    ours: dict[str, Any] = {name: getattr(config, name, None) for name in (*_SIZES, *COMPUTATION)}
    ours = {"model_type": config.backbone_model_type, **ours}
    if ours["num_hidden_layers"] is not None:
        ours["num_hidden_layers"] -= len(getattr(config, "new_layers", None) or ())
    if any(stage.changes_everything for stage in History.of(config).stages):
        del ours["vocab_size"]  # a graft may have added tokens
    for name, value in ours.items():
        if (theirs := getattr(base, name, None)) != value:
            raise InputError(
                f"{where}: is not the model that was expanded: its {name} is {theirs!r}, not {value!r}. Give the "
                "base's hub id."
            )


def config_with_base(file: Path, base: BaseModel) -> bytes:
    """A checkpoint's config.json in which every expansion of the first one's base names `base`."""
    fields = read_json(file, "a configuration")
    before = fields["expansions"][0].get("base_model")
    for record in fields["expansions"]:
        if record.get("base_model") == before:
            record |= {"base_model": base.name, "base_revision": base.revision}
    return (json.dumps(fields, indent=2, ensure_ascii=False) + "\n").encode()

"""The base model of an expanded checkpoint on the hub, which may be named after training."""

import json
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from .checkpoint.expansion_only import BaseModel
from .checkpoint.graft import COMPUTATION
from .checkpoint.source import load_config, text_config
from .errors import InputError
from .hub_access import hub_problem
from .jsonfile import read_json
from .records import History

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")


def base_on_hub(config: Any, hub_id: str, token: str | None = None) -> BaseModel:
    """The base that the hub has under `hub_id`, with its present commit, after comparing its configuration with that of
    the expanded model. Without a connection, or without access to a gated model, nothing is compared and the commit
    stays unknown.

    Raises:
        InputError: `hub_id` is a local folder or no model of the hub, or a model from which this one cannot have been
            expanded; the message names the first field that differs.
    """
    where = f"--base {hub_id}"
    if Path(hub_id).is_dir():
        raise InputError(f"{where}: is a local folder; give the base model's hub id, which others need.")
    try:
        unreachable = bool(hub_problem())  # the library would try for a minute
        file = Path(hf_hub_download(hub_id, "config.json", token=token, local_files_only=unreachable))
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
    except (HfHubHTTPError, OSError):
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

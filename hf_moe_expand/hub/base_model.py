"""The dense model inside an expanded one, as the hub has it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError

from ..checkpoint.facts import Facts
from ..checkpoint.source import load_config, text_config
from ..checkpoint.stored import BASE_FIELDS, field_of
from ..core.errors import InputError, errors_at, library_errors_at
from ..core.jsonfile import read_json


@dataclass(frozen=True)
class BaseModel:
    """The dense model inside an expanded one; `hub_id` is None for a model known only as a local folder."""

    name: str
    hub_id: str | None
    revision: str | None


def named_base(config: Any) -> BaseModel:
    """The base that config.json records."""
    first = Facts(config).history.first
    name, revision = first.base_model, first.base_revision  # of a model of the hub only
    if name is None:
        raise InputError(
            "config.json does not say which base model was expanded: give its hub id (`push --base HUB_ID`)."
        )
    return BaseModel(name, name if revision else None, revision)


def base_on_hub(config: Any, hub_id: str, token: str | None = None) -> BaseModel:
    """The base that the hub has under `hub_id`, with its present commit; its configuration must be that of the model
    that was expanded. Where the hub is out of reach, or a model gated, nothing is compared and the commit is None."""
    where = f"--base {hub_id}"
    with library_errors_at(where, secrets=[token]):
        try:
            folder = Path(snapshot_download(hub_id, allow_patterns="config.json", token=token))
        except (GatedRepoError, LocalEntryNotFoundError):
            return BaseModel(hub_id, hub_id, None)
    with errors_at(where):
        _compare_configs(config, text_config(load_config(folder)))
    return BaseModel(hub_id, hub_id, folder.name)  # the hub's cache names a snapshot's folder by its commit


def _compare_configs(config: Any, base: Any) -> None:
    grafted = any(stage.changes_everything for stage in Facts(config).history.stages)  # perhaps with further tokens
    for name in ("hidden_size", "intermediate_size", *([] if grafted else ["vocab_size"]), *BASE_FIELDS):
        if (ours := field_of(config, name, base)) != (theirs := field_of(base, name, base)):
            raise InputError(f"is not the model that was expanded: its {name} is {theirs!r}, not {ours!r}.")


def config_with_base(file: Path, base: BaseModel) -> bytes:
    """A checkpoint's config.json in which every expansion of the first one's base names `base`."""
    fields = read_json(file, "a configuration")
    before = fields["expansions"][0].get("base_model")
    for record in fields["expansions"]:
        if record.get("base_model") == before:
            record |= {"base_model": base.name, "base_revision": base.revision}
    return (json.dumps(fields, indent=2, ensure_ascii=False) + "\n").encode()

"""From what a user names (a folder or a hub id) to a local checkpoint folder and its configuration."""

import os
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..errors import InputError
from ..modeling import SUPPORTED_BACKBONES, ExpandedConfig

# What turns text into tokens and back, and says how to generate.
TOKENIZER_FILES = (
    "tokenizer*", "*.model", "*.tiktoken", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "additional_chat_templates/*", "generation_config.json",
)  # fmt: skip
# Everything that travels with a model besides its weights and configuration.
COMPANIONS = (*TOKENIZER_FILES, "routers_after_expansion_*.safetensors")

_COUNTS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_FFN_NOT_A_MODULE = ("biogpt", "opt", "xglm")


def resolve_checkpoint(name: str | os.PathLike, revision: str | None = None, weights: bool = True) -> Path:
    """The local folder of a checkpoint; a hub id is downloaded (safetensors and JSON, no pickles).

    Args:
        weights: False leaves the weights on the hub.

    Raises:
        InputError: it is neither a checkpoint folder nor a model that the hub gives us.
    """
    folder = Path(name)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise InputError(f"{folder}: not a checkpoint: it has no config.json.")
        return folder
    if folder.exists():
        raise InputError(f"{folder}: is a file; give the checkpoint's folder.")
    try:
        patterns = ["*.json", "*.py", *COMPANIONS] + (["*.safetensors"] if weights else [])
        return Path(snapshot_download(str(name), revision=revision, allow_patterns=patterns))
    except HFValidationError:
        raise InputError(f"{name}: no such folder, and not a hub id (namespace/name).") from None
    except (RepositoryNotFoundError, GatedRepoError):
        raise InputError(
            f"{name}: no such folder, and the hub shows no model of that name: check the name, or, if it is private or "
            "gated, log in with `hf auth login` or set HF_TOKEN."
        ) from None
    except RevisionNotFoundError:
        raise InputError(f"{name}: has no revision {revision!r} on the hub.") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"{name}: no such folder, and the hub does not give a model of that name ({reason})."
        ) from None


def base_config_at_hand(name: str, revision: str | None = None) -> PreTrainedConfig | None:
    """The configuration of a dense checkpoint from its folder or the hub's cache, without the network; None if it is
    not there.

    Raises:
        InputError: as `load_base_config`; or it is neither a folder nor a hub id.
    """
    if Path(name).exists():
        return load_base_config(resolve_checkpoint(name))
    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:
        raise InputError(f"{name}: no such folder, and not a hub id (namespace/name).") from None
    return load_base_config(Path(found).parent) if isinstance(found, str) else None


def load_config(folder: Path) -> PreTrainedConfig:
    """The configuration of a checkpoint folder; runs none of its code.

    Raises:
        InputError: config.json is broken or of a model type that the installed transformers does not know.
    """
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"{folder}: its configuration cannot be read ({reason}).") from None


def load_expanded_config(folder: Path) -> Any:
    """The configuration of an expanded checkpoint.

    Raises:
        InputError: the checkpoint is not expanded.
    """
    config = load_config(folder)
    if not isinstance(config, ExpandedConfig):
        raise InputError(
            f"{folder}: a {config.model_type} checkpoint, not an expanded one; run `hf-moe-expand expand` first."
        )
    return config


def languages_by_expansion(folder: Path) -> list[list[str]]:
    """The languages of an expanded checkpoint's base, then those that each expansion brought; empty for any other
    checkpoint."""
    expansions = getattr(load_config(folder), "expansions", None)
    if not expansions:
        return []
    return [expansions[0]["old_languages"], *(entry["new_languages"] for entry in expansions)]


def load_base_config(folder: Path) -> PreTrainedConfig:
    """The configuration of a dense checkpoint that can be expanded.

    Raises:
        InputError: the architecture is not supported or computes its FFN in slices, the checkpoint is expanded already,
            or it is quantised.
    """
    config = load_config(folder)
    check_base_config(config, folder)
    return config


def check_base_config(config: PreTrainedConfig, name: str | os.PathLike) -> None:
    """Refuses the configuration of a model that cannot be expanded; messages call the model `name`.

    Raises:
        InputError: see `load_base_config`.
    """
    if isinstance(config, ExpandedConfig):
        raise InputError(f"{name}: is an expanded checkpoint already; give the dense model that it came from.")
    if config.model_type not in SUPPORTED_BACKBONES:
        raise InputError(
            f"{name}: architecture {config.model_type!r} is not supported{_reason(config)}. "
            f"Supported: {', '.join(SUPPORTED_BACKBONES)}."
        )
    if getattr(config, "quantization_config", None) is not None:
        raise InputError(f"{name}: the weights are quantised; expand the unquantised checkpoint.")
    if getattr(config, "slow_but_exact", False) and config.pretraining_tp > 1:  # its FFN then slices whole sequences
        raise InputError(
            f"{name}: slow_but_exact with pretraining_tp {config.pretraining_tp} computes the FFN in slices, which "
            "experts cannot. Set slow_but_exact to false in config.json."
        )


def _reason(config: PreTrainedConfig) -> str:
    if any(getattr(config, name, None) for name in _COUNTS_OF_EXPERTS):
        return ": it is a mixture of experts already"
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or config.is_encoder_decoder:
        return ": it is not a decoder language model"
    if config.model_type in _FFN_NOT_A_MODULE:
        return ": its layers hold the FFN's linear layers one by one, not in a module that could become an expert"
    return ""


def grown_from(name: str) -> tuple[list[int], list[str]]:
    """Experts of each layer of an expanded checkpoint, and every language that it knows.

    Raises:
        InputError: the checkpoint is not expanded.
    """
    config = load_expanded_config(resolve_checkpoint(name, weights=False))
    return config.num_experts_per_layer, known_languages(config)


def known_languages(config: Any) -> list[str]:
    """The base model's languages and those of every expansion, in order."""
    known = list(config.expansions[0]["old_languages"])
    return known + [code for entry in config.expansions for code in entry["new_languages"]]

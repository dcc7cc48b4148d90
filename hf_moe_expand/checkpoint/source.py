"""Finds the folder of a checkpoint, for a folder or hub id, and reads its configuration, checked."""

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download, try_to_load_from_cache
from huggingface_hub.utils import validate_repo_id
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .. import modeling
from ..core.errors import InputError, errors_at, library_errors_at
from ..core.jsonfile import read_json
from ..core.saying import say_once
from ..core.schema import shown_value
from ..core.scratch import restore
from ..modeling import ExpandedConfig, language_models
from ..planning.plan import MOST_EXPERTS
from .proven import LEFT_OUT, is_proven
from .records import History

# Files of the tokenizer and the generation config.
TOKENIZER_FILES: tuple[str, ...] = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tokenizer.model.v[0-9]*", "tokenizer.tiktoken",
    "qwen.tiktoken", "tekken.json", "spiece.model", "sentencepiece.bpe.model", "sentencepiece.model", "vocab.json",
    "vocab.txt", "vocab.bpe", "merges.txt", "source.spm", "target.spm", "target_vocab.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja",
    "generation_config.json",
)  # fmt: skip
GENERATION, TEMPLATE = "generation_config.json", "chat_template.jinja"
# The fields of gates that an earlier version fitted in all layers.
OLD_GATES = ("prefix_gate", "gate_languages")
# The code that travels inside an expanded checkpoint, by file name.
CODE: tuple[str, ...] = tuple(sorted(file.name for file in Path(modeling.__file__).parent.glob("[!_]*.py")))
MOST_LAYERS = 4096  # no model comes near it; building a longer list of modules would take for ever
# Ends of the names of files that are read from a checkpoint.
_READ = (".json", ".safetensors", ".jinja", ".model", ".txt", ".tiktoken", ".spm", ".bpe", ".py")
ADAPTER = "adapter_config.json"  # of PEFT
# The model types of expanded checkpoints.
EXPANDED = ("layer_moe", "dmoe")
_LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers",
)  # fmt: skip


def local_checkpoint(name: str | os.PathLike, revision: str | None = None) -> Path | None:
    """The folder of a checkpoint on this machine; None for a hub id."""
    folder = Path(name)
    with library_errors_at(f"{name}: not a name of a folder or hub id", OSError, ValueError):
        restore(folder)
        there = folder.exists() and str(name) != ""
    if not there:
        _check_id(name)
        return None
    folder = last_checkpoint(folder)
    if revision is not None:
        raise InputError(f"{folder}: is a local folder, which has no revision {revision!r}; give a hub id.")
    _refuse_adapter(folder, folder)
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder}: not a checkpoint: it has no config.json. Give a model's folder or hub id.")
    for entry in folder.iterdir():  # reading a pipe or a device would never end
        if entry.name.endswith(_READ) and not entry.is_file():
            raise InputError(f"{folder}: {entry.name} is no file, but a file is read there; remove it.")
    return folder


def _check_id(name: str | os.PathLike) -> None:
    with library_errors_at(f"{name}: no such folder, and not a hub id (namespace/name)"):
        validate_repo_id(str(name))


def _refuse_adapter(folder: Path, name: str | os.PathLike) -> None:
    """Beside weights transformers would load it too, and nothing says whether the weights have it already."""
    if (folder / ADAPTER).is_file():
        raise InputError(
            f"{name}: has an adapter of PEFT ({ADAPTER}), which is not read with a model: merge it into its base, or "
            "make an expansion of it: hf-moe-expand expand BASE_MODEL OUT --tuned CODE=ADAPTER."
        )


def last_checkpoint(folder: Path) -> Path:
    """For the folder of a run, the checkpoint of its last finished step, which is said; any other folder as it is."""
    file = folder / "steps.json"
    if (folder / "config.json").is_file() or not file.is_file():
        return folder
    steps = [step for step in read_json(file, "the record of a run").values() if isinstance(step, dict)]
    for step in reversed(steps):
        checkpoint = folder / str(step.get("output"))
        if (checkpoint / "config.json").is_file():
            say_once(f"{folder} is the folder of a run: its last finished checkpoint is taken, {checkpoint}")
            return checkpoint
    raise InputError(f"{folder}: the folder of a run that has no finished checkpoint: run its recipe again.")


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


def check_expanded(name: str | os.PathLike, revision: str | None = None) -> None:
    """Refuses what is no checkpoint, and a dense checkpoint on this machine."""
    if (folder := local_checkpoint(name, revision)) is not None:
        _check_type(folder, read_json(folder / "config.json", "a configuration").get("model_type"))


def _check_type(folder: Path, model_type: Any) -> None:
    if isinstance(model_type, str) and model_type not in EXPANDED:
        raise InputError(f"{folder}: a {model_type} checkpoint, not an expanded one; run `hf-moe-expand expand` first.")


def resolve_checkpoint(name: str | os.PathLike, revision: str | None = None, weights: bool = True) -> Path:
    """The local folder of a checkpoint; a hub id is downloaded (safetensors and JSON, no pickles), without the weights
    on demand."""
    folder = local_checkpoint(name, revision)
    if folder is not None:
        return folder
    patterns = ["*.json", "*.py", *TOKENIZER_FILES, *(["*.safetensors"] if weights else [])]
    snapshot = _downloaded(name, revision, patterns)
    _refuse_adapter(snapshot, name)
    return snapshot


def holds_adapter(name: str | os.PathLike) -> bool:
    """Whether a folder, or a repository of the hub, holds an adapter of PEFT and no model."""
    folder = Path(name) if Path(name).exists() else _downloaded(name, None, [ADAPTER])
    return (folder / ADAPTER).is_file() and not (folder / "config.json").is_file()


def resolve_adapter(name: str | os.PathLike) -> Path:
    """The local folder of an adapter of PEFT, from a folder or a hub id."""
    folder = Path(name)
    return folder if folder.is_dir() else _downloaded(name, None, [ADAPTER, "adapter_model.safetensors"])


def _downloaded(name: str | os.PathLike, revision: str | None, patterns: list[str]) -> Path:
    """The snapshot of a repository on the hub, of which some files are fetched."""
    _check_id(name)
    with library_errors_at(f"{name}: no such folder, and the hub does not give it", secrets=()):
        return Path(snapshot_download(str(name), revision=revision, allow_patterns=patterns))


def lies_inside(folder: Path, file: Path) -> bool:
    """Whether a file of a checkpoint folder, links followed, lies inside the folder."""
    home = folder.resolve()
    # The hub's cache keeps a snapshot's files as links to its `blobs`.
    home = home.parents[1] if home.parent.name == "snapshots" else home
    return home in file.resolve().parents


def check_inside(folder: Path, file: Path) -> None:
    """Refuses what is no file of a checkpoint folder: reading a pipe would never end, and a link could lead a file of
    the user's into what is published."""
    if not lies_inside(folder, file) or not file.is_file():
        raise InputError(f"{file}: is no file in the folder, or a link that leads out of it.")


def base_config_at_hand(name: str, revision: str | None = None) -> PreTrainedConfig | None:
    """A dense checkpoint's configuration from its folder or the hub's cache, without the network; None without one."""
    folder = local_checkpoint(name)
    if folder is not None:
        return load_base_config(folder)
    cached = try_to_load_from_cache(name, "config.json", revision=revision)
    return load_base_config(Path(cached).parent) if isinstance(cached, str) else None


def load_config(folder: Path) -> PreTrainedConfig:
    """The configuration of a checkpoint folder; runs none of its code."""
    fields = read_json(folder / "config.json", "a configuration")
    with errors_at(str(folder)), library_errors_at("its configuration cannot be read"):
        _check_fields(fields)
        config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if hasattr(config, "validate"):
            config.validate()  # as `save_pretrained` does, before the work that is then saved
        _check_values(config, History.of(config))
        return config


def differences(
    one: PreTrainedConfig, other: PreTrainedConfig, ignored: Collection[str]
) -> Iterator[tuple[str, Any, Any]]:
    """Each field that differs between two configurations, in order, with its two values; those `ignored` left out."""
    ours, theirs = one.to_dict(), other.to_dict()
    for name in sorted({*ours, *theirs}.difference(ignored)):
        if ours.get(name) != theirs.get(name):
            yield name, ours.get(name), theirs.get(name)


def load_expanded_config(folder: Path) -> Any:
    """The configuration of an expanded checkpoint."""
    config = load_config(folder)
    _check_type(folder, config.model_type)
    return config


def load_base_config(folder: Path) -> PreTrainedConfig:
    """The configuration of a dense checkpoint that can be expanded."""
    config = text_config(load_config(folder))
    check_base_config(config, folder)
    return config


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the text decoder inside a model of several kinds of input, or the configuration itself."""
    if config.is_encoder_decoder:
        return config
    inner = config.get_text_config(decoder=True)
    if inner is config or type(inner) not in language_models(inner):
        return config
    for name in ("dtype", "tie_word_embeddings"):
        setattr(inner, name, getattr(inner, name) or getattr(config, name))
    inner.name_or_path = config.name_or_path
    return inner


def check_base_config(config: PreTrainedConfig, name: str | os.PathLike) -> None:
    """Refuses the configuration of a model that cannot be expanded; messages use `name` for the model."""
    if isinstance(config, ExpandedConfig):
        raise InputError(f"{name}: is an expanded checkpoint already; give the dense model that it came from.")
    reason = None if is_proven(config) else LEFT_OUT.get(config.model_type)
    if not reason and type(config) not in language_models(config):
        reason = "not a language model that transformers knows"
    if reason:
        what = f"a {config.model_type} checkpoint cannot be expanded"
        raise InputError(f"{name}: {what}: it is {reason} (docs/backbones.md).")
    wrong: dict[str, Any] = {
        "has fields of expanded models": [one for one in ExpandedConfig.__annotations__ if hasattr(config, one)],
        "is quantised; expand the unquantised checkpoint": getattr(config, "quantization_config", None) is not None,
        "computes the FFN in slices, which experts cannot (slow_but_exact with pretraining_tp above 1)": (
            getattr(config, "slow_but_exact", False) and config.pretraining_tp > 1
        ),
    }
    if said := next((what for what, is_so in wrong.items() if is_so), None):
        raise InputError(f"{name}: its configuration says that it {said}.")


def _check_fields(fields: Mapping[str, Any]) -> None:
    """Checks what transformers would not refuse in config.json."""
    for mapping in [fields, *(value for value in fields.values() if isinstance(value, Mapping))]:
        for name in _LAYERS:
            value = mapping.get(name)
            if value is not None and not (type(value) is int and 1 <= value <= MOST_LAYERS):
                raise InputError(f"{name} is {shown_value(value)}, not a whole number from 1 to {MOST_LAYERS:,}.")
    experts, kind = fields.get("num_experts_per_layer"), fields.get("model_type")
    if isinstance(experts, list) and all(type(count) is int for count in experts) and sum(experts) > MOST_EXPERTS:
        raise InputError(f"num_experts_per_layer has {sum(experts)} experts, not at most {MOST_EXPERTS:,}.")
    if fields.get("auto_map") and isinstance(kind, str) and kind not in (*CONFIG_MAPPING, *EXPANDED):
        raise InputError(f"its architecture {kind!r} is code inside the checkpoint (auto_map), which no command runs.")
    if "transformers_weights" in fields:
        raise InputError("names a file of weights (transformers_weights): name it model.safetensors.")


def _check_values(config: Any, history: History) -> None:
    """Checks what transformers does not notice."""
    if not config.is_encoder_decoder and not isinstance(config.get_text_config(decoder=True), PreTrainedConfig):
        raise InputError(f"config.json describes a text decoder inside, but a {config.model_type} model has none.")
    if isinstance(config, ExpandedConfig):
        earlier, packs = getattr(config, "earlier_experts_per_layer", None) or [], getattr(config, "packs", None) or []
        if config.backbone_model_type is None:
            raise InputError("config.json does not say which backbone was expanded (backbone_model_type).")
        if (earlier and len(history) not in (0, len(earlier) + 1)) or (packs and not len(history)):
            raise InputError("earlier_experts_per_layer or packs are of another number of expansions than recorded.")

"""The types of the verbs' parameters, and the settings of what changes checkpoints without training. A file that cannot
be written and a name that is no checkpoint are refused here, before any work."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any, Literal

from pydantic import AllowInfNan, Field

from ..core.disk import DEFAULT_SHARD_SIZE
from ..core.errors import InputError, library_errors_at
from ..core.recipe_paths import Located
from ..core.schema import Count, Flag, Number, Positive, Schema, Text, Whole
from ..core.verbs import Kind


def text_sources(arguments: Sequence[str], look: bool = False) -> dict[str, Any]:
    """The texts of `LANGUAGE=FILE` arguments, by language; `look`: refuse files that are not there now."""
    from ..core.languages import check_named_once
    from ..data.sources import LanguageText

    sources: dict[str, LanguageText] = {}
    for source in map(LanguageText.parse, arguments):
        if source.language in sources:
            raise InputError(f"Language {source.language!r} is given twice; put its files into one folder.")
        sources[source.language] = source
        if look:
            source.files()
    check_named_once(list(sources))
    return sources


def check_file(path: Path, overwrite: bool) -> None:
    """Refuses a file that exists (without `overwrite`), is a folder or cannot be written, before the work of hours that
    it is for."""
    with library_errors_at(f"{path}: cannot be written there", OSError):
        if path.is_dir():
            raise InputError(f"{path}: is a folder; give the name of a file in it.")
        if path.exists() and not overwrite:
            raise InputError(f"{path}: exists already; choose another file or pass --overwrite.")
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        with TemporaryFile(dir=folder):
            pass


def codes(argument: str) -> list[str]:
    return [code.strip() for code in argument.split(",") if code.strip()]


def checkpoint(name: str, values: Mapping[str, Any]) -> str:
    """The name, which is that of a checkpoint's folder or a hub id."""
    from .source import local_checkpoint

    local_checkpoint(name, values.get("revision"))
    return name


def expanded(name: str, values: Mapping[str, Any]) -> str:
    """The name, which is not that of a dense checkpoint on this machine."""
    from .source import check_expanded

    check_expanded(name, values.get("revision"))
    return name


def each(names: Sequence[str], _: Mapping[str, Any] = {}) -> list[str]:
    """The names, all of them of checkpoints."""
    return [checkpoint(name, {}) for name in names]


def _writable(path: Path, values: Mapping[str, Any]) -> Path:
    check_file(path, values["overwrite"])
    return path


def _plan(path: Path, _: Mapping[str, Any]) -> Any:
    from ..planning.plan import Plan

    return Plan.load(path)


MODEL = "Folder or hub id of a checkpoint."
_TEXTS = "LANGUAGE=FILE; repeat for each language."

Model = Annotated[str, Kind(MODEL, checkpoint)]
Expanded = Annotated[str, Kind(MODEL, expanded)]
Models = Annotated[
    list[str], Kind("Folders or hub ids; the others are compared with the first.", each, metavar="MODELS...")
]
NewFolder = Annotated[Path, Kind("Folder to write.")]
NewFile = Annotated[Path, Kind("File to write.", _writable, is_file=True)]
PlanFile = Annotated[Any, Kind("plan.json of `plan`.", _plan, Path)]
Texts = Annotated[dict[str, Any], Kind(_TEXTS, lambda given, _: text_sources(given, look=True), list[str])]
Places = Annotated[dict[str, Any], Kind(_TEXTS, lambda given, _: text_sources(given), list[str])]  # not looked for
Codes = Annotated[Sequence[str], Kind("Codes of languages, e.g. el,hu,tr.", lambda given, _: codes(given), str)]
OldCodes = Annotated[Sequence[str], Kind("Codes of the old languages, e.g. en,es,zh.", lambda g, _: codes(g), str)]
NewCodes = Annotated[Sequence[str], Kind("Codes of the new languages, e.g. el,hu,tr.", lambda g, _: codes(g), str)]


ShardSize = Annotated[Text, Field(description="size of the largest weight file")]


class NewExperts(Schema):
    """Kind and initial weights of the new experts."""

    expert_init: Literal["copy", "random"] = Field(
        "copy", description="`copy` of the original FFN, or `random` weights (an ablation)"
    )
    conditional_routing: Flag = Field(
        False, description="share the original FFN among all tokens; its share of a token's output is learned (CMR)"
    )
    expert_kind: Literal["ffn", "lora", "added", "adapter"] = Field(
        "ffn",
        description="`ffn`; `lora`: low-rank updates of the original FFN (MoLA, LoRAMoE); `added`: small FFNs beside "
        "the original block, which may be a mixture of experts; or `adapter`: low-rank updates of all linear layers, "
        "in attention too",
    )
    target_modules: Text | None = Field(
        None, description="the linear layers that adapters update, as PEFT names them: `q_proj,v_proj`; all by default"
    )
    lora_rank: Count = Field(8, description="rank of the updates")
    lora_alpha: Positive = Field(16.0, description="the updates are scaled by lora_alpha / lora_rank")
    expert_width: Count | None = Field(None, description="width of the added FFNs")


class ExpandSettings(NewExperts):
    """Kind and initial weights of the new experts."""

    copy_from: Annotated[Whole, Field(ge=0)] | Literal["nearest"] = Field(
        0,
        description="in a further expansion, the expert that new ones copy: its number, or `nearest`, the one to "
        "which each layer routes the new languages' text most",
    )
    max_shard_size: ShardSize = DEFAULT_SHARD_SIZE

    @property
    def experts(self) -> NewExperts:
        """The settings of the new experts alone."""
        return NewExperts(**self.model_dump(include=set(NewExperts.model_fields)))


class WriteSettings(Schema):
    """How a checkpoint is written."""

    max_shard_size: ShardSize = DEFAULT_SHARD_SIZE
    overwrite: Flag = Field(False, description="replace the output if it exists")


class JoinSettings(Schema):
    """Language packs, which are joined without training."""

    packs: list[Located] = Field(
        min_length=2, description="folders or hub ids of expansions of `base`, made apart; `NAME=FOLDER` names a pack"
    )
    max_shard_size: ShardSize = DEFAULT_SHARD_SIZE


class GraftSettings(Schema):
    """`model + scale * (instruct - base)` (DeltaMoE Eq. 8, 9)."""

    instruct: Located = Field(description="folder or hub id of the fine-tune")
    scale: Annotated[Number, AllowInfNan(False)] = Field(1.0, description="factor of the change")
    keep_tokenizer: Flag = Field(
        False, description="keep the model's tokenizer, chat template and generation config, not the fine-tune's"
    )


class TunedSettings(Schema):
    """How fine-tunes of the base become languages."""

    rank: Count | None = Field(
        None, description="with --tuned: keep the best low-rank update of each map's difference; by default all is kept"
    )
    weight: Number = Field(
        1.0, gt=0, le=2, description="with --tuned: times the difference; 0.5 is the mean with the base"
    )


class AverageSettings(Schema):
    """`weight * expert + (1 - weight) * FFN`, of each new expert and the FFN from which it was copied."""

    weight: float = Field(0.8, ge=0, le=1, description="the new expert's weight in the mean")

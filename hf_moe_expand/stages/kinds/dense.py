"""Train a dense model further, as a baseline: all parameters, LoRA, some columns, or only inserted blocks.

Example: hf-moe-expand train dense Qwen/Qwen2.5-0.5B qwen-ft --data el=el.jsonl --config dense.yaml
"""

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from pydantic import Field
from transformers import AutoModelForCausalLM, set_seed

from ...checkpoint.compare import compare_checkpoints
from ...checkpoint.source import TOKENIZER_FILES, load_base_config, resolve_checkpoint
from ...checkpoint.stored import layer_list, network_of
from ...data.packing import PackedText, collate_without_languages, pack_texts
from ...errors import InputError
from ...models import longest_block
from ...schema import Count, Declared, Number, Text
from ...trainers.freezing import EVERYTHING
from ...trainers.shielding import column_importance, important_columns, shielded, shielded_layers, shielded_parameters
from ..base import TrainingStage
from ..checks import StageFacts
from ..config import setting
from ..recording import RecordingTrainer


class LoraSettings(Declared):
    """Low-rank adapters of `train dense`, merged into the weights at the end."""

    r: Count = Field(16, description="rank")
    alpha: Number = Field(32, description="the update is scaled by alpha / r")
    target_modules: Text | list[Text] = Field(
        "all-linear", description="modules with an adapter: `all-linear`, or names"
    )


class ShieldSettings(Declared):
    """Columns of weights that `train dense` leaves frozen (source-shielded updates, arXiv 2512.04844)."""

    languages: list[Text] = Field(
        default_factory=list,
        description="languages of the data whose text says which columns matter; it is not trained on",
    )
    share: float = Field(0.5, gt=0, lt=1, description="share of each linear layer's columns to freeze")
    tokens: Count = Field(20_000, description="most tokens of that text to read, of all languages together")


@dataclass
class DenseConfig(TrainingStage):
    """Continued pre-training of a dense model: `L = L_NTP`."""

    key = "dense"
    name = "dense"
    title = "Dense training"
    participle = "trained"
    families = ()
    trains = EVERYTHING
    companions = TOKENIZER_FILES

    tokens_per_language: Count | None = setting(None, "tokens of each language to train on; all of its text by default")
    method: Literal["full", "lora", "shielded", "new-blocks"] = setting(
        "full",
        "parameters that train: `full`, all; `lora`, adapters; `shielded`, all but the columns that matter most to old "
        "languages; `new-blocks`, the blocks of `expand-depth`",
    )
    lora: LoraSettings | str | None = setting(LoraSettings, "the adapters of `method: lora`")
    shield: ShieldSettings | str | None = setting(ShieldSettings, "the frozen columns of `method: shielded`")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lora is None:
            self.lora = LoraSettings()
        if self.shield is None:
            self.shield = ShieldSettings()

    @classmethod
    def load_config(cls, folder: Path) -> Any:
        config = load_base_config(folder)
        if config.is_encoder_decoder:
            raise InputError(
                f"{folder}: is an encoder-decoder, which the dense baselines do not train: use Seq2SeqTrainer of "
                "transformers."
            )
        return config

    @classmethod
    def facts(cls, model_config: Any, texts: Iterable[str]) -> StageFacts:
        languages = list(texts)
        return StageFacts(
            [], languages, languages, longest=longest_block(model_config), is_encoder_decoder=False, model=model_config
        )

    def check_text(self, facts: StageFacts) -> None:
        if self.method != "lora" and self.lora != LoraSettings():
            raise InputError(f"lora: the method is {self.method}, but lora has settings; set `method: lora`.")
        if self.method == "new-blocks" and not getattr(facts.model, "new_layers", None):
            raise InputError("The checkpoint has no new blocks: insert some with `expand-depth` first.")
        _check_shield(self, facts.texts)
        super().check_text(facts)

    def pack(self, texts: Mapping[str, Dataset], tokenizer: Any, model_config: Any) -> PackedText:
        groups = None
        shield: Any = self.shield
        if self.method == "shielded":  # its blocks have trained or shielded languages
            groups = [[code for code in texts if code not in shield.languages], shield.languages]
        return pack_texts(
            texts, tokenizer, self.block_size, self.seed, tokens_per_language=self.tokens_per_language,
            groups=groups,
        )  # fmt: skip

    def saved_parameters(self, network: Any) -> tuple[int, int]:
        if self.method == "lora":  # the adapters alone, which are small
            return 0, 0
        if self.method == "new-blocks":
            _freeze_all_but(network, network.config.new_layers)
        parameters = list(network.parameters())
        return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)

    def make_trainer(self, network: Any, packed: PackedText, callbacks: list[Any]) -> Any:
        if self.method == "lora":
            set_seed(self.seed)  # adapters start with random weights
            network = _with_adapters(network, self.lora)
        elif self.method == "new-blocks":
            _freeze_all_but(network, network.config.new_layers)
        trainer: RecordingTrainer
        if self.method == "shielded":
            packed, trainer = _shielding(network, self, packed, callbacks)
        else:
            trainer = RecordingTrainer(network, self, collate_without_languages, packed.dataset, callbacks=callbacks)
        trainer.packed, trainer.trained_as = packed, f"dense {self.method}"
        return trainer

    def to_write(self, folder: Path, weights: Mapping[str, Any]) -> Mapping[str, Any]:
        return _merged(folder, self.lora, weights) if self.method == "lora" else weights


class ShieldedTrainer(RecordingTrainer):
    """Leaves the columns frozen that matter most to the text of `shown` (`[blocks, block_size]`)."""

    shown: torch.Tensor

    def train(self, *args: Any, **kwargs: Any) -> Any:
        config: Any = self.args
        model = self.accelerator.unwrap_model(self.model)
        importance = column_importance(model, self.shown.split(config.per_device_train_batch_size))
        columns = important_columns(importance, config.shield.share)
        frozen = shielded_parameters(model, config.shield.share)
        if self.is_world_process_zero():
            print(
                f"shielded: {frozen:,} weights in {len(columns)} layers stay frozen, by {self.shown.numel():,} tokens"
            )
        with shielded(model, columns):
            return super().train(*args, **kwargs)

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        not_decayed = {f"{name}.weight" for name in shielded_layers(self.accelerator.unwrap_model(model))}
        return [
            name for name in super().get_decay_parameter_names(model) if name.removeprefix("module.") not in not_decayed
        ]


def _shielding(
    network: Any, config: DenseConfig, packed: PackedText, callbacks: list[Any]
) -> tuple[PackedText, ShieldedTrainer]:
    """The text to train on without the shielded languages', and the trainer."""
    shield: Any = config.shield
    if not shielded_layers(network):
        raise InputError("method: shielded freezes columns of torch.nn.Linear, of which this model has none.")
    trained, read = packed.blocks
    read = min(read, max(1, shield.tokens // config.block_size))
    shown = packed.dataset.select(range(trained, trained + read))
    own = replace(
        packed, dataset=packed.dataset.select(range(trained)), blocks=(trained,),
        tokens={code: count for code, count in packed.tokens.items() if code not in shield.languages},
        documents={code: count for code, count in packed.documents.items() if code not in shield.languages},
    )  # fmt: skip
    trainer = ShieldedTrainer(network, config, collate_without_languages, own.dataset, callbacks=callbacks)
    trainer.shown = torch.tensor([list(ids) for ids in shown["input_ids"]])
    return own, trainer


def _check_shield(config: DenseConfig, data: Collection[str]) -> None:
    """Raises InputError if the settings of `shield` do not fit the method, the data or the launch."""
    shield: Any = config.shield
    if config.method != "shielded":
        if shield != ShieldSettings():
            raise InputError(f"shield: the method is {config.method}, but shield has settings; set `method: shielded`.")
        return
    if not shield.languages or (missing := [code for code in shield.languages if code not in data]):
        named = f"has no text in {', '.join(missing)}" if shield.languages else "names none"
        raise InputError(
            f"shield.languages {named}: name languages that the base knows, and give some text of each with --data; "
            "it says which columns matter, and is not trained on."
        )
    if not set(data) - set(shield.languages):
        raise InputError("shield.languages names every language of the data: give text to train on, too.")
    if config.distributed_config or config.deepspeed or config.fsdp:
        raise InputError("method: shielded trains data-parallel only: columns need whole weights on each device.")


def check_old_blocks(before: str | os.PathLike, after: str | os.PathLike) -> int:
    """Checks that the tensors outside the new blocks are byte-identical; returns their number."""
    folder = resolve_checkpoint(before)
    config: Any = load_base_config(folder)
    layers = layer_list(network_of(config))
    new = tuple(f"{layers}.{layer}." for layer in config.new_layers)
    comparison = compare_checkpoints(folder, after)
    wrong = [name for name in comparison.changed if not name.startswith(new)] + comparison.added + comparison.removed
    if wrong:
        raise RuntimeError(f"{after}: training new blocks changed other tensors: {', '.join(wrong[:5])}.")
    return sum(not name.startswith(new) for name in comparison.identical)


def _with_adapters(network: Any, lora: Any) -> Any:
    try:
        return get_peft_model(
            network,
            LoraConfig(r=lora.r, lora_alpha=lora.alpha, target_modules=lora.target_modules, task_type="CAUSAL_LM"),
        )
    except ValueError as error:
        raise InputError(f"lora: {error}") from None


def _merged(folder: Path, lora: Any, trained: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The checkpoint's weights with the trained adapters added; only the adapters come from the launch's model."""
    network = _with_adapters(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False), lora
    )
    network.load_state_dict({name: value.cpu() for name, value in trained.items() if "lora_" in name}, strict=False)
    return network.merge_and_unload().state_dict()


def _freeze_all_but(network: Any, layers: list[int]) -> None:
    network.requires_grad_(False)
    blocks = network.get_submodule(layer_list(network))
    for layer in layers:
        blocks[layer].requires_grad_(True)

"""Train a dense model further, as a baseline: all parameters, LoRA, or only inserted blocks.

Example: hf-moe-expand train dense Qwen/Qwen2.5-0.5B qwen-ft --data el=el.jsonl --config dense.yaml
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from pydantic import Field
from transformers import AutoModelForCausalLM, set_seed

from ...checkpoint.source import load_base_config
from ...checkpoint.stored import layer_list
from ...core.errors import InputError, library_errors_at
from ...core.languages import LanguageCode
from ...core.schema import Count, Number, Schema, Text
from ...data.packing import PackedText, collate_without_languages, pack_texts
from ...trainers.freezing import EVERYTHING, Trained
from ..config import REPLAY_SHARE, ReplayShare, StageConfig
from ..keywords import mapping, setting
from ..trainer import StageTrainer


class LoraSettings(Schema):
    """Low-rank adapters of `train dense`, merged into the weights at the end."""

    r: Count = Field(16, description="rank")
    alpha: Number = Field(32, description="the update is scaled by alpha / r")
    target_modules: Text | list[Text] = Field(
        "all-linear", description="modules with an adapter: `all-linear`, or names"
    )


@dataclass
class DenseConfig(StageConfig):
    """Continued pre-training of a dense model: `L = L_NTP`."""

    key = "dense"
    name = "dense"
    title = "Dense training"
    result_name = "trained"
    families = ()
    trains = EVERYTHING

    tokens_per_language: Count | None = setting(None, "tokens of each language to train on; all of its text by default")
    replay: list[LanguageCode] = setting(list, "the old languages of the text, for `replay_share`")
    replay_share: ReplayShare = setting(None, REPLAY_SHARE)
    method: Literal["full", "lora", "new-blocks"] = setting(
        "full", "parameters that train: `full`, all; `lora`, adapters; `new-blocks`, the blocks of `expand --blocks`"
    )
    lora: Annotated[LoraSettings | str | None, mapping(LoraSettings)] = setting(
        LoraSettings, "the adapters of `method: lora`"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lora is None:
            self.lora = LoraSettings()
        if self.method != "lora" and self.lora != LoraSettings():
            raise InputError(f"lora: the method is {self.method}, but lora has settings; set `method: lora`.")
        if bool(self.replay) != (self.replay_share is not None):
            raise InputError("replay names the old languages, and replay_share says how much of them: give both.")

    @classmethod
    def load_config(cls, folder: Path) -> Any:
        config = load_base_config(folder)
        if config.is_encoder_decoder:
            raise InputError(f"{folder}: is an encoder-decoder: use Seq2SeqTrainer of transformers.")
        return config

    def trained(self) -> tuple[str, Trained]:
        return f"dense {self.method}", self.trains

    @classmethod
    def language_classes(cls, model_config: Any, languages: Any) -> None:
        """There is no router whose loss would need them."""

    @classmethod
    def known_languages(cls, model: Any, texts: Iterable[str]) -> tuple[list[str], list[str]]:
        return [], list(texts)

    @classmethod
    def check_model(cls, model_config: Any) -> None:
        """Accepts any model."""

    def check_settings(self, model: Any) -> None:
        if self.method == "new-blocks" and not getattr(model, "new_layers", None):
            raise InputError("The checkpoint has no new blocks: insert some with `expand --blocks` first.")

    def check_texts(self, model: Any, texts: Mapping[str, Any]) -> list[str]:
        if missing := [code for code in self.replay if code not in texts]:
            raise InputError(f"replay: {', '.join(missing)} has no text; give some with --data, or leave it out.")
        if texts and not set(texts) - set(self.replay):
            raise InputError("replay: names every language, so that none is new: leave the new ones out.")
        return super().check_texts(model, texts)

    def pack(self, texts: Mapping[str, Dataset], tokenizer: Any, model_config: Any, whole: bool = False) -> PackedText:
        amounts = {} if whole else self.amounts(texts, model_config)
        return pack_texts(texts, tokenizer, self.block_size, self.seed, num_proc=self.dataset_num_proc, **amounts)

    def amounts(self, texts: Mapping[str, Any], model_config: Any) -> dict[str, Any]:
        replay = {} if self.replay_share is None else {"replay": (self.replay, self.replay_share)}
        return {**super().amounts(texts, model_config), **replay}

    def saved_parameters(self, network: Any) -> tuple[int, int]:
        return (0, 0) if self.method == "lora" else super().saved_parameters(network)  # adapters, which are small

    def freeze(self, network: Any) -> None:
        if self.method == "new-blocks":
            self.check_settings(network.config)
            network.requires_grad_(False)
            blocks = network.get_submodule(layer_list(network))
            for layer in network.config.new_layers:
                blocks[layer].requires_grad_(True)

    def make_trainer(self, network: Any, packed: PackedText, callbacks: list[Any]) -> Any:
        if self.method == "lora":
            set_seed(self.seed)  # adapters start with random weights
            network = _with_adapters(network, self.lora)
        return self.trainer_class(network, self, collate_without_languages, packed, callbacks=callbacks)

    def to_write(self, folder: Path, weights: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.method != "lora":
            return weights
        network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
        network = _with_adapters(network, self.lora)  # only the adapters come from the launch's model
        network.load_state_dict({name: value.cpu() for name, value in weights.items() if "lora_" in name}, strict=False)
        return network.merge_and_unload().state_dict()


class DenseTrainer(StageTrainer):
    """Trains a dense model."""

    stage = DenseConfig


def _with_adapters(network: Any, lora: Any) -> Any:
    settings = LoraConfig(r=lora.r, lora_alpha=lora.alpha, target_modules=lora.target_modules, task_type="CAUSAL_LM")
    with library_errors_at("lora", ValueError):
        return get_peft_model(network, settings)

"""MoESFTTrainer: TRL's supervised fine-tuning with the routers' losses."""

import copy
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset
from torch import nn
from transformers import (
    PreTrainedConfig,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer, pack_dataset
from trl.data_utils import get_dataset_column_names
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from ..core.errors import InputError, library_errors_at
from ..core.schema import checked, shown_value
from ..modeling.routing_control import recorded_classes  # and registers the model with the Auto classes
from .bfloat16 import NO_BFLOAT16, has_bfloat16
from .encoder_decoder import target_loss
from .losses import LayerLoss
from .router_losses import RouterLossMixin, classes_matter
from .watching import check_columns, without_compiler

_COLUMNS = ("input_ids", "messages", "prompt", "completion", "conversations", "chosen", "text")
_READ_BESIDE = (
    "labels", "language_ids", "language", "completion_mask", "assistant_masks", "attention_mask", "position_ids",
    "seq_lengths", "image", "images", "tools", "chat_template_kwargs", "rejected", "token_type_ids",
)  # fmt: skip
_RECORDED = ("learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps", "max_length")
REFUSED = {
    ("encoder-decoder", "sft-on-top"): "TRL trains decoders: take RouterLossMixin with Seq2SeqTrainer of transformers",
}
UNKNOWN = -1  # language id of padding and of text in an unknown language


@dataclass
class CollatorWithLanguages(DataCollatorForLanguageModeling):
    """TRL's collator, which also pads (with -1) or joins the rows' `language_ids`, if they have them."""

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super().torch_call(examples)
        if "language_ids" in examples[0]:
            rows = [torch.tensor(example["language_ids"]) for example in examples]
            if self.padding_free:
                rows = [torch.cat(rows)]
            length = batch["input_ids"].shape[1]
            batch["language_ids"] = torch.stack([F.pad(row, (0, length - len(row)), value=UNKNOWN) for row in rows])
        return batch


class MoESFTTrainer(RouterLossMixin, SFTTrainer):  # type: ignore[misc]
    """`trl.SFTTrainer` with router losses: it takes the same data sets, the same `SFTConfig` and LoRA by `peft_config`.

    The balance loss needs no further data. Losses with `needs_languages`, such as the language-prior and the classifier
    loss, need each token's language, from one of two columns of the data set:

    - `language`: a code such as "el" for each row, None where unknown. The class of each code is in the model's
      config.json, which records its expansions, or in `language_classes={"en": 0, "el": 1}`.
    - `language_ids`, beside `input_ids` (tokenised text): an id for each token, negative where unknown. Then
      `language_classes=[0, 1]` gives the class of each id.

    Truncation and packing keep the ids beside their tokens. Router losses count every token but padding, including a
    prompt's: `completion_only_loss` and masked labels affect only the next-token loss.

    Args:
        model: as in `SFTTrainer`: a model, a folder or a hub id.
        router_losses: as in `RouterLossMixin`.
        language_classes: the class of each code or id: 0 for a language of the base model, g for a language of
            expansion g; with the group loss, its language group.

    Raises:
        InputError: a loss needs languages, but a data set lacks their column or holds wrong values in it.
    """

    @checked
    def __init__(
        self, model: str | nn.Module, args: TrainingArguments | None = None, *more: Any, router_losses: Any = None,
        language_classes: Mapping[str, int] | Sequence[int] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        # TRL makes an SFTConfig of plain arguments; those of a stage are another trainer's.
        if not isinstance(args, SFTConfig | None) and type(args) is not TrainingArguments:
            raise InputError(f"args is {shown_value(args)}: must be SFTConfig or None.")
        model = without_compiler(model)
        config = _config_of(model, args)
        if getattr(config, "is_encoder_decoder", False):
            raise InputError(f"model: {REFUSED['encoder-decoder', 'sft-on-top']}.")
        # TRL loads a name's weights in float32, in which small steps do not round away.
        self._stored_dtype = _stored_dtype(config, args) if isinstance(model, str) else None
        self._codes_given = isinstance(language_classes, Mapping)
        self._ids_given = language_classes is not None and not self._codes_given
        recorded = recorded_classes(getattr(config, "expansions", None) or [])
        class_of_code: Any = language_classes if self._codes_given else recorded
        class_of_id: Any = language_classes if self._ids_given else None
        self._class_of_code = {**class_of_code, None: UNKNOWN}
        self._classes_matter = classes_matter(config)
        super().__init__(model, args, *more, router_losses=router_losses, language_classes=class_of_id, **options)
        if self.args.bf16 and not has_bfloat16():
            warnings.warn(f"{NO_BFLOAT16}give SFTConfig bf16=False, since TRL's default is True.", stacklevel=2)
        self._check_classes(language_classes.values() if isinstance(language_classes, Mapping) else [])
        of_layers = [loss.name for loss in self._active_losses() if isinstance(loss, LayerLoss)]
        if of_layers and not any(ffn.router or ffn.classifier for ffn in self._expanded.expanded_ffns().values()):
            raise InputError(f"The {of_layers[0]} loss is of routers or classifiers, and the model has none.")
        kind = getattr(self.args, "loss_type", "nll")
        if self._reads_logits and kind != "nll":
            raise InputError(f"loss_type is {kind!r}: a loss that reads logits goes with 'nll' alone.")
        if type(self.data_collator) is DataCollatorForLanguageModeling:
            self.data_collator = CollatorWithLanguages(**vars(self.data_collator))

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains, and adds the training to the history in the model's configuration. Weights that were loaded by name
        then have their stored type again."""
        result = super().train(*args, **kwargs)
        model = self._expanded
        split = self.is_fsdp_enabled or self.is_deepspeed_enabled
        if self._stored_dtype is not None and not split and not getattr(model, "peft_config", None):
            model.to(self._stored_dtype)
        self._record(model, result.global_step)
        return result

    def _record(self, model: Any, steps: int) -> None:
        """Adds the training to the history, with the parts of the model that trained."""
        if not (history := getattr(model.config, "expansions", None)):
            return
        trained = sorted({_part(name) for name, parameter in model.named_parameters() if parameter.requires_grad})
        settings = {name: getattr(self.args, name) for name in _RECORDED}
        stage = {"stage": "sft", "steps": steps, "seed": self.args.seed, "trained": trained, "settings": settings}
        model.config.expansions = [*history[:-1], {**history[-1], "stages": [*history[-1].get("stages", []), stage]}]

    @property
    def _reads_logits(self) -> bool:
        return any(loss.needs_outputs for loss in self._active_losses())

    def next_token_loss(self, model: Any, inputs: dict, return_outputs: bool, num_items_in_batch: Any) -> Any:
        if not (model.training and self._reads_logits):
            return super().next_token_loss(model, inputs, return_outputs, num_items_in_batch)
        # TRL computes the loss without the logits, and returns some without gradient.
        labels = inputs["labels"]
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"}, use_cache=False)
        if self.compute_loss_func is not None:
            loss = self.compute_loss_func(outputs, labels, num_items_in_batch=num_items_in_batch)
        else:
            logits = outputs.logits[:, -labels.shape[1] :][:, :-1]  # without virtual tokens
            count = labels[:, 1:].ne(-100).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
            loss = target_loss({"logits": logits}, labels[:, 1:], count)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * (self.accelerator.num_processes // self.get_tp_size())
        return (loss, outputs) if return_outputs else loss

    def _prepare_dataset(
        self, dataset: Any, processing_class: Any, args: Any, packing: bool, formatting_func: Any, dataset_name: str
    ) -> Any:
        columns = get_dataset_column_names(dataset)
        if formatting_func is None:
            check_columns(columns, (*_COLUMNS, *_READ_BESIDE, args.dataset_text_field), f"The {dataset_name} data set")
        given = self._codes_given or self._ids_given
        step: Callable[..., dict]
        options: dict[str, Any]
        if "language_ids" in columns:
            if self._codes_given or (self._language_classes is None and self._classes_matter):
                raise InputError(
                    f"The {dataset_name} data set has a column `language_ids`: pass the class of each id, such as "
                    "language_classes=[0, 1]."
                )
            classes = None if self._language_classes is None else len(self._language_classes)
            dataset = _map(dataset, args, _check_ids, classes=classes, name=dataset_name)
            step, options = _cut_ids, {"keep_end": args.truncation_mode == "keep_end"}
        elif "language" in columns and (self._needs_languages or given or self._classes_matter):
            self._use_codes(dataset_name)
            step, options = _ids_of_code, {"class_of": self._class_of_code, "name": dataset_name}
        elif self._needs_languages or (given and self._classes_matter):
            raise InputError(
                f"The {dataset_name} data set has no column `language` (a code for each row), nor `language_ids` (an "
                f"id for each token of tokenised text). {self._who_needs_languages()}"
            )
        else:
            return super()._prepare_dataset(dataset, processing_class, args, packing, formatting_func, dataset_name)
        whole = args
        if packing and args.max_length is None:
            raise InputError("packing=True needs max_length, the length of a packed row.")
        if packing:  # TRL's packing would drop language ids: it prepares whole rows, which are packed here
            whole = copy.copy(args)
            whole.max_length = None
        dataset = super()._prepare_dataset(dataset, processing_class, whole, False, formatting_func, dataset_name)
        dataset = _map(dataset, args, step, **options)
        if packing:
            dataset = dataset.select_columns(["input_ids", "labels", "language_ids"])
            dataset = pack_dataset(dataset, args.max_length, args.packing_strategy)
            dataset = dataset.shuffle(seed=args.seed) if args.shuffle_dataset else dataset
        return dataset

    def _use_codes(self, name: str) -> None:
        example = 'language_classes={"en": 0, "el": 1}'
        if self._ids_given:
            raise InputError(f"{name}: a list of language_classes is for a column `language_ids`: pass {example}.")
        if not self._codes_given and (needs := [loss.name for loss in self._active_losses() if loss.needs_groups]):
            raise InputError(f"The {needs[0]} loss needs the group of each code of `language`: pass {example}.")
        if len(self._class_of_code) == 1:
            raise InputError(f"The model's config.json records no languages: pass {example}.")
        self._language_classes = torch.arange(max(self._class_of_code.values()) + 1)  # a code's id is its class


def _part(name: str) -> str:
    """The part of an expanded model in which a parameter stands, by its name."""
    if (expert := re.search(r"\.experts\.(\d+)\.", name)) and expert[1] != "0":
        return "experts"
    return next((part for part in ("router", "classifier", "conditional_gate") if f".{part}." in name), "base")


def _stored_dtype(config: Any, args: Any) -> torch.dtype | None:
    """The type of a named checkpoint's weights, if the arguments name none."""
    if "dtype" in (getattr(args, "model_init_kwargs", None) or {}):
        return None
    dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    return getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype


def _config_of(model: Any, args: Any) -> Any:
    """The configuration of a model, or the entries of the one that is named."""
    if not isinstance(model, str):
        return model.config
    options = getattr(args, "model_init_kwargs", None) or {}
    with library_errors_at(f"model is {model!r}", OSError):
        return SimpleNamespace(**PreTrainedConfig.get_config_dict(model, **options)[0])


def _map(dataset: Any, args: Any, step: Callable[..., dict], **options: Any) -> Any:
    several = {"num_proc": args.dataset_num_proc, "desc": "languages"} if isinstance(dataset, Dataset) else {}
    with args.main_process_first(desc="languages"):
        return dataset.map(step, fn_kwargs=options, **several)


def _check_ids(row: dict, classes: int | None, name: str) -> dict:
    ids, tokens = row["language_ids"], row.get("input_ids")
    if tokens is None or len(ids) != len(tokens):
        raise InputError(
            f"The {name} data set has a row of {len(tokens or [])} input_ids with {len(ids)} language_ids: each token "
            "needs one (-1 where its language is not known)."
        )
    if classes is not None and max(ids, default=0) >= classes:
        raise InputError(
            f"The {name} data set has the language id {max(ids)}, but language_classes holds {classes} classes, of the "
            f"ids 0..{classes - 1}."
        )
    return {}


def _cut_ids(row: dict, keep_end: bool) -> dict:
    """Cuts the language ids of a row that TRL cut to max_length."""
    length, ids = len(row["input_ids"]), row["language_ids"]
    return {"language_ids": ids[len(ids) - length :] if keep_end else ids[:length]}


def _ids_of_code(row: dict, class_of: dict, name: str) -> dict:
    if row["language"] not in class_of:
        known = ", ".join(code for code in class_of if code)
        raise InputError(
            f"The {name} data set has the unknown language {row['language']!r}; known: {known}. Pass language_classes "
            "with every code of the column `language`."
        )
    return {"language_ids": [class_of[row["language"]]] * len(row["input_ids"])}

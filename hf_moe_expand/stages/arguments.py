"""Checks `TrainingArguments` in a recipe: unknown arguments, those that we set, and those that the library refuses."""

import copy
import re
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from math import inf
from typing import Annotated, Any

import pydantic
import torch
from pydantic import AllowInfNan
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.integrations import get_reporting_integration_callbacks

from ..distributed import SHARDING, check_sharding
from ..errors import InputError
from ..schema import MOST, Flag, Number, Whole, read, unknown_key
from ..trainers.router_losses import CHECKPOINTING, CHECKPOINTING_NAMES, NOT_REENTRANT

_CHECKPOINTING = re.compile(f"^({'|'.join(CHECKPOINTING_NAMES)})(?=$|_kwargs$)")
# Set by this package: paths, seeds and arguments on which the losses rely.
_RESERVED = ("output_dir", "seed", "data_seed", "remove_unused_columns", "label_names")
_SCORED = ("eval_strategy", "do_eval", "eval_on_start", "load_best_model_at_end")
PUBLISHED = ("push_to_hub", "hub_token", "hub_model_id", "hub_strategy", "hub_private_repo")
_FILES = ("deepspeed", "accelerator_config", "fsdp_config")
# Optimizers that choose among the modules of the model, which is not there yet.
_CHOOSE_MODULES = ("galore", "apollo", "lomo", "adalomo")
# Smallest values that the library's training loop takes.
_AT_LEAST = {
    "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "dataloader_num_workers": 0, "max_grad_norm": 0,
    "weight_decay": 0,
}  # fmt: skip
_STRICT = {int: Whole, float: Annotated[Number, AllowInfNan(False)], bool: Flag, type(None): type(None)}


def check_training_arguments(training: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Refuses keys that `TrainingArguments` does not have or that this package sets, and numbers of another type.

    Returns:
        The arguments under their names in the installed transformers.
    """
    known = {f.name: f.default for f in fields(TrainingArguments) if f.init}
    arguments = {_CHECKPOINTING.sub(CHECKPOINTING, name): value for name, value in training.items()}
    for key, value in arguments.items():
        if key in _RESERVED:
            raise InputError(f"{where}: `{key}` is set by hf-moe-expand; leave it out.")
        if key in _SCORED and value not in (known[key], False):
            raise InputError(f"{where}: leave `{key}` out; held-out text is scored by `validation`, beside `training`.")
        if key in PUBLISHED and value != known[key]:
            raise InputError(f"{where}: leave `{key}` out; `hf-moe-expand push` publishes the finished checkpoint.")
        if key == "save_only_model" and value:
            raise InputError(f"{where}: leave `{key}` out; an interrupted run could not resume exactly.")
        if key in _FILES and not isinstance(value, str | Mapping | None):
            raise InputError(f"{where}.{key}: {value!r} is neither a file nor a mapping; give one of these.")
        if key not in [*known, SHARDING]:
            raise InputError(f"{where}: {unknown_key(key, known)}")
    check_sharding(training, where)
    for name in (f"{name}_kwargs" for name in CHECKPOINTING_NAMES):
        options = training.get(name)
        if isinstance(options, Mapping) and options.get("use_reentrant"):
            raise InputError(f"{where}.{name}: {NOT_REENTRANT}")
    numbers = {name: value for name, value in arguments.items() if name in _numbers().model_fields}
    checked = read(_numbers(), numbers, where).model_dump(exclude_unset=True)
    # Copies, since the library adds keys to mappings. The keys of scoring can only turn it off, and are dropped.
    rest = {name: copy.deepcopy(value) for name, value in arguments.items() if name not in _SCORED}
    return {**rest, **checked}


@cache
def _numbers() -> type[pydantic.BaseModel]:
    """The arguments that are numbers or booleans, with their types."""
    hints = typing.get_type_hints(TrainingArguments)
    types: dict[str, Any] = {}
    for f in fields(TrainingArguments):
        options = typing.get_args(hints[f.name]) or (hints[f.name],)
        if f.init and all(option in _STRICT for option in options):
            types[f.name] = (typing.Union[tuple(_STRICT[option] for option in options)], None)  # noqa: UP007
    return pydantic.create_model("TrainingNumbers", **types)


@contextmanager
def refused_by_the_library(where: str) -> Iterator[None]:
    """Turns the errors of `TrainingArguments` into an InputError."""
    try:
        yield
    except InputError:
        raise
    except (ValueError, TypeError, OSError, ImportError, RuntimeError, AttributeError) as error:
        raise InputError(f"{where}: {error}") from None
    except KeyError as error:
        raise InputError(f"{where}: {error} is not a known value of its key.") from None


def accepted_arguments(arguments: TrainingArguments) -> None:
    """Refuses arguments that the library would refuse or misread only later, while it trains."""
    with refused_by_the_library("training"):
        for integration in get_reporting_integration_callbacks(arguments.report_to):
            integration()  # raises if its library is not installed
    for name, least in _AT_LEAST.items():
        if not getattr(arguments, name) >= least:
            raise InputError(f"training.{name} is {getattr(arguments, name):g}: must be at least {least}.")
    for name in ("learning_rate", "save_steps", "logging_steps"):
        if not 0 < getattr(arguments, name) < inf:
            raise InputError(f"training.{name} is {getattr(arguments, name):g}: must be above 0, and finite.")
    if arguments.num_train_epochs > MOST:
        raise InputError(f"training.num_train_epochs is {arguments.num_train_epochs:g}: must be at most {MOST:,}.")
    if arguments.max_steps < -1:
        raise InputError(f"training.max_steps is {arguments.max_steps}: must be above 0; leave it out to train epochs.")
    if arguments.max_steps == 0 or (arguments.max_steps < 0 and arguments.num_train_epochs <= 0):
        raise InputError("training: max_steps and num_train_epochs give no step: set one of them above 0.")
    _check_optimizer(arguments)


def _check_optimizer(arguments: Any) -> None:
    """Makes the optimizer and the schedule of the learning rate of a single weight, as the Trainer will."""
    if arguments.optim.value.startswith(_CHOOSE_MODULES):
        return
    weight = torch.nn.Parameter(torch.zeros(1))
    with refused_by_the_library("training.optim"):
        kind, options = Trainer.get_optimizer_cls_and_kwargs(arguments)
        optimizer = kind([{"params": [weight], "weight_decay": arguments.weight_decay}], **options)
    with refused_by_the_library("training.lr_scheduler_type"):
        kind, warmup = arguments.lr_scheduler_type, arguments.get_warmup_steps(1000)
        get_scheduler(kind, optimizer, warmup, 1000, arguments.lr_scheduler_kwargs)

"""Whether the libraries that a stage's arguments name are installed, and take the arguments."""

from typing import Any

import torch
from transformers import Trainer, get_scheduler
from transformers.integrations import get_reporting_integration_callbacks
from transformers.utils import is_liger_kernel_available

from ..core.errors import InputError, in_one_line
from .keywords import refused_by_the_library

# Optimizers that choose among the modules of the model, which is not there yet.
_CHOOSE_MODULES = ("galore", "apollo", "lomo", "adalomo")


def check_libraries(config: Any) -> None:
    """Refuses reporters, optimizers, schedules and kernels that are not installed, or do not take their arguments."""
    with refused_by_the_library("report_to: "):
        for integration in get_reporting_integration_callbacks(config.report_to):
            integration()  # raises if its library is not installed
    if config.use_liger_kernel and not is_liger_kernel_available():
        raise InputError("use_liger_kernel: the package liger-kernel is not installed (pip install liger-kernel).")
    _check_optimizer(config)


def _check_optimizer(config: Any) -> None:
    """Makes the optimizer and the schedule of the learning rate of a single weight, as the Trainer will."""
    if config.optim.value.startswith(_CHOOSE_MODULES):
        try:
            Trainer.get_optimizer_cls_and_kwargs(config)
        except ImportError as error:
            raise InputError(f"optim: {in_one_line(error)}") from None
        except Exception:  # it asks for the model
            pass
        return
    weight = torch.nn.Parameter(torch.zeros(1))
    with refused_by_the_library("optim: "):
        kind, options = Trainer.get_optimizer_cls_and_kwargs(config)
        optimizer = kind([{"params": [weight], "weight_decay": config.weight_decay}], **options)
    with refused_by_the_library("lr_scheduler_type: "):
        warmup = config.get_warmup_steps(1000)
        get_scheduler(config.lr_scheduler_type, optimizer, warmup, 1000, config.lr_scheduler_kwargs)

"""Whether the libraries that a stage's arguments name are installed, and take the arguments."""

from typing import Any

import torch
from transformers import Trainer, get_scheduler
from transformers.integrations import get_reporting_integration_callbacks
from transformers.utils import is_liger_kernel_available

from ..core.errors import InputError, library_errors_at

_CHOOSE_MODULES = ("galore", "apollo", "lomo", "adalomo")  # of the model, which is not there yet


def check_libraries(config: Any) -> None:
    """Refuses reporters, kernels, an optimizer and a schedule that are not installed, or do not take their arguments:
    makes those of a single weight, as the Trainer will."""
    with library_errors_at("report_to"):
        for integration in get_reporting_integration_callbacks(config.report_to):
            integration()  # raises if its library is not installed
    if config.use_liger_kernel and not is_liger_kernel_available():
        raise InputError("use_liger_kernel: the package liger-kernel is not installed (pip install liger-kernel).")
    if config.optim.value.startswith(_CHOOSE_MODULES):
        try:
            with library_errors_at("optim", ImportError):
                Trainer.get_optimizer_cls_and_kwargs(config)
        except InputError:
            raise
        except Exception:  # it asks for the model
            pass
        return
    weight = torch.nn.Parameter(torch.zeros(1))
    with library_errors_at("optim"):
        kind, options = Trainer.get_optimizer_cls_and_kwargs(config)
        optimizer = kind([{"params": [weight], "weight_decay": config.weight_decay}], **options)
    with library_errors_at("lr_scheduler_type"):
        get_scheduler(
            config.lr_scheduler_type, optimizer, config.get_warmup_steps(1000), 1000, config.lr_scheduler_kwargs
        )

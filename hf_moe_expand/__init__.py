"""hf-moe-expand: teach a dense language model new languages by growing its FFNs into mixtures of experts.

`__init__.pyi` lists the public names. They are imported on first use, so that `hf-moe-expand --help` does not wait for
torch. The Auto classes of transformers know this package's checkpoints as soon as both packages are imported.
"""

import logging

import lazy_loader

from ._auto_classes import register_when_loaded

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

register_when_loaded()

# Where DeepSpeed is installed, it greets with these lines, also those who do not use it.
logging.getLogger("DeepSpeed").addFilter(
    lambda record: not record.getMessage().startswith(("Setting accelerator to", "Setting ds_accelerator to"))
)

"""hf-moe-expand: teach a dense language model new languages by growing its FFNs into mixtures of experts.

`__init__.pyi` lists the public names, which are imported on first use: the Trainers take seconds. Importing this
package registers its checkpoints with the Auto classes of transformers.
"""

import logging

import lazy_loader

# Where DeepSpeed is installed, it greets with these lines, also those who do not use it.
logging.getLogger("DeepSpeed").addFilter(
    lambda record: not record.getMessage().startswith(("Setting accelerator to", "Setting ds_accelerator to"))
)

from . import modeling  # noqa: E402, F401  # registers

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

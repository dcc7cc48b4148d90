"""hf-moe-expand: teach a dense language model new languages by growing its FFNs into mixtures of experts.

`__init__.pyi` lists the public names, which are imported on first use: the Trainers take seconds. Importing this
package registers its checkpoints with the Auto classes of transformers; on the command line, `modeling` does so when
a verb imports it, so that `--help` does not wait for torch.
"""

import logging
import sys
from pathlib import Path

import lazy_loader

# Where DeepSpeed is installed, it greets with these lines, also those who do not use it.
logging.getLogger("DeepSpeed").addFilter(
    lambda record: not record.getMessage().startswith(("Setting accelerator to", "Setting ds_accelerator to"))
)

# The first argument is the console script, or `-m` while Python looks for the module of `python -m hf_moe_expand`.
if Path("".join(sys.argv[:1])).name.removesuffix(".exe") not in ("hf-moe-expand", "-m"):
    from . import modeling  # noqa: F401  # registers

__version__ = "0.2.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

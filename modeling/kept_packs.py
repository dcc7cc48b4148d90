"""The files in which a joined model keeps its language packs as they were, beside its weights."""

import os
import shutil
from typing import Any

from transformers.utils import cached_file, logging

PACK_FILE = "pack_{}.safetensors"
_LOG = logging.get_logger(__name__)


def carry_packs(config: Any, folder: Any) -> None:
    """Copies the packs' files from where a joined model was loaded to where it is saved. Warns where they are not to be
    had: the saved model works, but no pack can be taken out of it."""
    for number in range(1, 1 + len(getattr(config, "packs", None) or ())):
        name = PACK_FILE.format(number)
        target = os.path.join(folder, name)
        if os.path.isfile(target):
            continue
        try:
            source = cached_file(config.name_or_path, name) if config.name_or_path else None
        except (OSError, ValueError):
            source = None
        if source is None:
            _LOG.warning(
                f"{name} is not saved, as it is not where the model was loaded: packs cannot be taken out of the saved "
                "model. Copy the file from the joined checkpoint."
            )
            return
        shutil.copyfile(source, target)

"""The memory of the device that trains."""

import os

import torch


def device_memory() -> int | None:
    """Bytes of memory of the device that trains here: the GPU's, else the machine's; None where it is not known."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[1]
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def gigabytes(size: float) -> str:
    """A number of bytes in GB."""
    return f"{size / 1e9:,.1f} GB"

"""The device that trains: its memory, and whether it computes in bfloat16."""

import psutil
import torch


def device_memory() -> int:
    """Bytes of memory of the device that trains here: the GPU's, else the machine's."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[1]
    return psutil.virtual_memory().total


def memory_of_all() -> int | None:
    """Bytes of memory of all devices here over which a launch may split a model; None where it is not known."""
    if torch.accelerator.is_available() and not torch.cuda.is_available():
        return None
    memory = device_memory()
    return memory and memory * max(torch.cuda.device_count(), 1)


def has_bfloat16() -> bool:
    """Whether the device that trains here has instructions for bfloat16. Others (a CPU with AVX2 alone, GPUs before
    NVIDIA's Ampere) emulate it; a CPU then takes up to thirty times as long as in float32."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if torch.accelerator.is_available():
        return True
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()

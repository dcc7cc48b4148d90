"""Whether the device that trains computes in bfloat16."""

import torch

NO_BFLOAT16 = (
    "bf16: this machine has no instructions for bfloat16 and emulates it, up to thirty times slower than float32: "
)


def has_bfloat16() -> bool:
    """Whether the device that trains here has instructions for bfloat16. Others (a CPU with AVX2 alone, GPUs before
    NVIDIA's Ampere) emulate it; a CPU then takes up to thirty times as long as in float32."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if torch.accelerator.is_available():
        return True
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()

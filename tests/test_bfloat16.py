"""bfloat16 where the device computes in it: the demo takes it there alone, a stage that asks for it elsewhere warns."""

import warnings
from unittest.mock import Mock

import pytest
import torch

from hf_moe_expand import PostPretrainConfig
from hf_moe_expand.stages import config
from hf_moe_expand.trainers.bfloat16 import has_bfloat16


def test_a_cpu_has_it_by_its_instructions(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    if torch.backends.mkldnn.is_available():
        assert has_bfloat16() == torch.ops.mkldnn._is_mkldnn_bf16_supported()
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not has_bfloat16()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert has_bfloat16()


def test_a_gpu_has_it_where_it_does_not_emulate_it(monkeypatch):
    for major, has in ((7, False), (8, True)):
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "_check_bf16_tensor_supported", lambda device: True)  # by emulation
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, major=major: Mock(major=major))
        assert has_bfloat16() == has
        monkeypatch.undo()


def test_a_stage_on_a_machine_without_it_warns(monkeypatch, tmp_path):
    monkeypatch.setattr(config, "has_bfloat16", lambda: False)
    with pytest.warns(UserWarning, match="no instructions for bfloat16.*leave `bf16: true` out"):
        PostPretrainConfig(str(tmp_path), bf16=True, use_cpu=True).begun()
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)  # by emulation
    with pytest.warns(UserWarning, match="or give `fp16: true` on a GPU"):
        PostPretrainConfig(str(tmp_path), bf16=True, use_cpu=False).begun()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PostPretrainConfig(str(tmp_path), use_cpu=True).begun()
        monkeypatch.setattr(config, "has_bfloat16", lambda: True)
        PostPretrainConfig(str(tmp_path), bf16=True, use_cpu=True).begun()

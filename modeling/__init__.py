"""The code inside every checkpoint, except this file, which registers the installed package with the Auto classes."""

from typing import Any

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .backbone import DecoderFFN, decoder_ffns
from .configuration_dmoe import DMoEConfig
from .configuration_layer_moe import LayerMoEConfig
from .expanded_config import ExpandedConfig, on_new_config_class, static_class
from .expanded_ffn import ExpandedFFN
from .modeling_dmoe import DMoEForCausalLM, DMoEModel
from .modeling_layer_moe import LayerMoEForCausalLM, LayerMoEModel
from .routing import LayerRouting
from .routing_control import Routing

__all__ = [
    "MODEL_CLASSES",
    "DMoEConfig",
    "DMoEForCausalLM",
    "DMoEModel",
    "DecoderFFN",
    "ExpandedConfig",
    "ExpandedFFN",
    "LayerMoEConfig",
    "LayerMoEForCausalLM",
    "LayerMoEModel",
    "LayerRouting",
    "Routing",
    "decoder_ffns",
]

# Each configuration class with its model classes, without and with a language-model head.
MODEL_CLASSES: dict[Any, tuple[Any, Any]] = {
    LayerMoEConfig: (LayerMoEModel, LayerMoEForCausalLM),
    DMoEConfig: (DMoEModel, DMoEForCausalLM),
}


def _register(config_class: type) -> None:
    # The Auto classes look models up by the exact configuration class, so each backbone's is registered.
    base, causal = MODEL_CLASSES[static_class(config_class)]
    AutoModel.register(config_class, base)
    AutoModelForCausalLM.register(config_class, causal)


for _config_class in MODEL_CLASSES:
    AutoConfig.register(_config_class.model_type, _config_class)
on_new_config_class(_register)

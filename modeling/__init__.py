"""What travels inside every checkpoint. This file does not: it tells the Auto classes of the installed package."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .configuration_layer_moe import LayerMoEConfig
from .expanded_config import SUPPORTED_BACKBONES, on_new_config_class
from .expanded_ffn import ExpandedFFN, LayerRouting, Routing
from .expanded_model import decoder_ffns
from .modeling_layer_moe import LayerMoEForCausalLM, LayerMoEModel

__all__ = [
    "SUPPORTED_BACKBONES",
    "ExpandedFFN",
    "LayerMoEConfig",
    "LayerMoEForCausalLM",
    "LayerMoEModel",
    "LayerRouting",
    "Routing",
    "decoder_ffns",
]


def _register(config_class: type) -> None:
    # The Auto classes look models up by the exact configuration class, so each backbone's is registered.
    AutoModel.register(config_class, LayerMoEModel)
    AutoModelForCausalLM.register(config_class, LayerMoEForCausalLM)


AutoConfig.register(LayerMoEConfig.model_type, LayerMoEConfig)
on_new_config_class(_register)

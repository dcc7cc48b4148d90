"""LayerMoEModel, LayerMoEForCausalLM, LayerMoEForSeq2SeqLM: the classes that LayerMoE and MoE-LPR checkpoints name."""

from transformers import GenerationMixin, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
)

from .configuration_layer_moe import LayerMoEConfig
from .expanded_model import ExpandedModelMixin

_AUTO_MAP = {
    "AutoConfig": "configuration_layer_moe.LayerMoEConfig",
    "AutoModel": "modeling_layer_moe.LayerMoEModel",
    "AutoModelForCausalLM": "modeling_layer_moe.LayerMoEForCausalLM",
    "AutoModelForSeq2SeqLM": "modeling_layer_moe.LayerMoEForSeq2SeqLM",
}


class LayerMoEModel(ExpandedModelMixin, PreTrainedModel):
    """The decoder, or encoder and decoder, without a language-model head. Build it with a `LayerMoEConfig` or
    `from_pretrained`."""

    config_class = LayerMoEConfig
    _dense_mapping = MODEL_MAPPING
    _auto_map = _AUTO_MAP
    _supports_attention_backend = True  # read on the static class by serving back ends


class LayerMoEForCausalLM(ExpandedModelMixin, PreTrainedModel, GenerationMixin):
    """A language model expanded by MoE-LPR or LayerMoE. It has the methods of the backbone's own `...ForCausalLM`, and
    `capture_routing()`, `use_expert()`, `use_languages()` and `expanded_ffns()`; `forward` and `generate` take
    `languages`."""

    config_class = LayerMoEConfig
    _dense_mapping = MODEL_FOR_CAUSAL_LM_MAPPING
    _auto_map = _AUTO_MAP
    _of_encoder_decoders = False
    _supports_attention_backend = True


class LayerMoEForSeq2SeqLM(ExpandedModelMixin, PreTrainedModel, GenerationMixin):
    """An encoder-decoder, such as a translation model, expanded by MoE-LPR or LayerMoE. It has the methods of the
    backbone's own `...ForConditionalGeneration`, and `capture_routing()`, `use_expert()` and `expanded_ffns()`, whose
    layers are the encoder's, then the decoder's."""

    config_class = LayerMoEConfig
    _dense_mapping = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    _auto_map = _AUTO_MAP
    _of_encoder_decoders = True
    _supports_attention_backend = True


LayerMoEModel.register_for_auto_class("AutoModel")
LayerMoEForCausalLM.register_for_auto_class("AutoModelForCausalLM")
LayerMoEForSeq2SeqLM.register_for_auto_class("AutoModelForSeq2SeqLM")

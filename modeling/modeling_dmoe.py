"""DMoEModel and DMoEForCausalLM: the classes that DMoE checkpoints name."""

from transformers import GenerationMixin, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

from .configuration_dmoe import DMoEConfig
from .expanded_model import ExpandedModelMixin

_AUTO_MAP = {
    "AutoConfig": "configuration_dmoe.DMoEConfig",
    "AutoModel": "modeling_dmoe.DMoEModel",
    "AutoModelForCausalLM": "modeling_dmoe.DMoEForCausalLM",
}


class DMoEModel(ExpandedModelMixin, PreTrainedModel):
    """The decoder without a language-model head."""

    config_class = DMoEConfig
    _dense_mapping = MODEL_MAPPING
    _auto_map = _AUTO_MAP


class DMoEForCausalLM(ExpandedModelMixin, PreTrainedModel, GenerationMixin):
    """A language model expanded by DMoE: the backbone's own `...ForCausalLM`, with the methods of
    `ExpandedModelMixin`; `use_expert()` gives a language group's expert."""

    config_class = DMoEConfig
    _dense_mapping = MODEL_FOR_CAUSAL_LM_MAPPING
    _auto_map = _AUTO_MAP


DMoEModel.register_for_auto_class("AutoModel")
DMoEForCausalLM.register_for_auto_class("AutoModelForCausalLM")

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
    """The decoder without a language-model head. Build it with a `DMoEConfig` or `from_pretrained`."""

    config_class = DMoEConfig
    _dense_mapping = MODEL_MAPPING
    _auto_map = _AUTO_MAP


class DMoEForCausalLM(ExpandedModelMixin, PreTrainedModel, GenerationMixin):
    """A language model expanded by DMoE. It has the methods of the backbone's own `...ForCausalLM`, and
    `capture_routing()`, `use_expert()` (only a language group's expert) and `expanded_ffns()`."""

    config_class = DMoEConfig
    _dense_mapping = MODEL_FOR_CAUSAL_LM_MAPPING
    _auto_map = _AUTO_MAP


DMoEModel.register_for_auto_class("AutoModel")
DMoEForCausalLM.register_for_auto_class("AutoModelForCausalLM")

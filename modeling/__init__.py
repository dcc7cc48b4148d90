"""The code inside every checkpoint, except this file, which registers the installed package with the Auto classes, and
chooses among them."""

import sys
from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING

from .backbone import DecoderFFN as DecoderFFN
from .backbone import count_layers as count_layers
from .backbone import decoder_ffns as decoder_ffns
from .backbone import layer_names as layer_names
from .backbone import stack_sizes as stack_sizes
from .configuration_dmoe import DMoEConfig as DMoEConfig
from .configuration_layer_moe import LayerMoEConfig as LayerMoEConfig
from .expanded_config import LISTENERS, static_class
from .expanded_config import ExpandedConfig as ExpandedConfig
from .expanded_ffn import ExpandedFFN as ExpandedFFN
from .expanded_model import ExpandedModelMixin
from .modeling_dmoe import DMoEForCausalLM as DMoEForCausalLM
from .modeling_dmoe import DMoEModel as DMoEModel
from .modeling_layer_moe import LayerMoEForCausalLM as LayerMoEForCausalLM
from .modeling_layer_moe import LayerMoEForSeq2SeqLM as LayerMoEForSeq2SeqLM
from .modeling_layer_moe import LayerMoEModel as LayerMoEModel
from .routing import LayerRouting as LayerRouting
from .routing_control import Routing as Routing

# Each configuration class with its model classes: without a language-model head, with one on a decoder, and with one on
# an encoder-decoder. DMoE, whose groups train every expert on one language, is for decoders.
MODEL_CLASSES: dict[Any, tuple[Any, Any, Any]] = {
    LayerMoEConfig: (LayerMoEModel, LayerMoEForCausalLM, LayerMoEForSeq2SeqLM),
    DMoEConfig: (DMoEModel, DMoEForCausalLM, None),
}


def auto_class(config: Any) -> Any:
    """`AutoModelForSeq2SeqLM` for an encoder-decoder, else `AutoModelForCausalLM`."""
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def language_models(config: Any) -> Any:
    """transformers' mapping from configuration classes to the classes of such language models."""
    return MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING if config.is_encoder_decoder else MODEL_FOR_CAUSAL_LM_MAPPING


def model_class(config: Any) -> Any:
    """The static class, with a language-model head, of the model that an expanded configuration describes."""
    _, causal, encoder_decoder = MODEL_CLASSES[static_class(type(config))]
    return encoder_decoder if config.is_encoder_decoder else causal


def _register(config_class: Any) -> None:
    # The Auto classes look models up by the exact configuration class, so each backbone's is registered.
    base, causal, encoder_decoder = MODEL_CLASSES[static_class(config_class)]
    AutoModel.register(config_class, base)
    if encoder_decoder is None or config_class.backbone_config_class not in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
        AutoModelForCausalLM.register(config_class, causal)
    else:
        AutoModelForSeq2SeqLM.register(config_class, encoder_decoder)


for _config_class in MODEL_CLASSES:
    AutoConfig.register(_config_class.model_type, _config_class)
LISTENERS.append(_register)

_upload = ExpandedModelMixin._upload_modified_files


def _upload_with_card(self: Any, working_dir: Any, repo_id: str, *args: Any, **kwargs: Any) -> Any:
    """What `push_to_hub` uploads, with a card of this package."""
    make_card = getattr(sys.modules.get("hf_moe_expand"), "make_card", None)
    if make_card is not None and getattr(self.config, "expansions", None):
        file = Path(working_dir) / "README.md"
        card = make_card(working_dir, repo_id)
        tags = type(card).load(file).data.tags if file.is_file() else None
        card.data.tags = list(dict.fromkeys([*card.data.tags, *(tags or ())]))  # with those that a push names
        card.save(file)
    return _upload(self, working_dir, repo_id, *args, **kwargs)


ExpandedModelMixin._upload_modified_files = _upload_with_card  # type: ignore[method-assign]

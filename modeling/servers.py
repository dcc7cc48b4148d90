"""Refuses what a server would compute wrongly or not at all: vLLM, SGLang, and the library's continuous batching."""

from typing import Any

from .routing_control import RoutingRequest

# Servers that run a model's code in place of transformers' generate, by the name of their attention.
_SERVERS = {"vllm": "vLLM", "sglang": "SGLang"}
_NOT_JUDGED = (
    "language_gate: the gate judges whole texts, and {} reads parts of several in one pass. Write a dense model of "
    "one language (`hf-moe-expand export --language`), or serve the model with transformers' generate."
)


def check_model(config: Any, has_mixtures: bool) -> None:
    """Refuses, before a server loads weights, what it would compute wrongly or not at all."""
    server = _SERVERS.get(str(getattr(config, "_attn_implementation", None)))
    if server is None:
        return
    if config.is_encoder_decoder:
        raise ValueError(f"{server} serves decoders alone by transformers' code, and this model is an encoder-decoder.")
    if config.has_kind("lora"):
        raise ValueError(
            f"{server} merges the linear layers of expert 0, which LoRA experts update: serve this model with "
            "transformers, or a dense model of one expert (`hf-moe-expand export --expert`)."
        )
    if config.has_kind("adapter"):
        raise ValueError(
            f"{server} merges the linear layers that adapters update: serve the base with its adapters (`hf-moe-expand "
            "export --peft`), or the dense model of one language (`hf-moe-expand export --language`)."
        )
    if has_mixtures:
        raise ValueError(
            f"{server} runs a mixture of experts by code of its own, which knows nothing of the experts beside it: "
            "serve this model with transformers."
        )
    if getattr(config, "expansion_base", None):
        raise ValueError(
            f"{server} reads weight files itself, and this checkpoint holds only the tensors that an expansion added: "
            "load it with from_pretrained, save the whole model with save_pretrained, and serve that."
        )


def check_gate(config: Any) -> None:
    """Refuses a server that reads parts of texts: vLLM, SGLang.

    Raises:
        ValueError: the attention is such a server's.
    """
    server = _SERVERS.get(str(getattr(config, "_attn_implementation", None)))
    if server is not None:
        raise ValueError(_NOT_JUDGED.format(server))


def check_batching(config: Any, request: RoutingRequest) -> None:
    """Refuses the library's continuous batching for a model with a gate, and for a caller that asks something of the
    routing.

    Raises:
        ValueError: such a model; or inside of `use_languages` and its like, which do not reach the thread that
            generates.
    """
    if config.language_gate is not None:
        raise ValueError(_NOT_JUDGED.format("continuous batching"))
    if any(value is not None for value in (request.capture, request.expert, request.expansion, request.classes)):
        raise ValueError(
            "Continuous batching generates in a thread of its own, which use_languages, use_expert, use_expansion "
            "and capture_routing around it do not reach: use generate."
        )

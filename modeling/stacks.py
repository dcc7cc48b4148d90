"""The layers of a model as one list: a decoder's; of an encoder-decoder, the encoder's first, then the decoder's."""

from typing import Any

# The names that configurations have for the decoder's layers; the encoder's are `num_hidden_layers` under any name.
DECODER_LAYERS = ("decoder_layers", "num_decoder_layers")


def stack_sizes(config: Any) -> dict[str, int]:
    """The number of layers of each stack: `{"": n}` for a decoder, `{"encoder": n, "decoder": m}` for an
    encoder-decoder.

    Raises:
        ValueError: an encoder-decoder's configuration does not say how many layers its decoder has.
    """
    if not getattr(config, "is_encoder_decoder", False):
        return {"": config.get_text_config(decoder=True).num_hidden_layers}  # of a model of several kinds of input
    decoder = next((layers for name in DECODER_LAYERS if (layers := getattr(config, name, None)) is not None), None)
    if decoder is None or not isinstance(config.num_hidden_layers, int):
        raise ValueError(
            f"a {config.model_type} configuration has none of {', '.join(DECODER_LAYERS)}, the decoder's layers."
        )
    return {"encoder": config.num_hidden_layers, "decoder": decoder}


def count_layers(config: Any) -> int:
    """The number of all layers."""
    return sum(stack_sizes(config).values())


def layer_names(config: Any) -> list[str]:
    """The name of each layer: its number in a decoder; `encoder.0`, `decoder.0` and so on in an encoder-decoder."""
    sizes = stack_sizes(config)
    return [f"{stack}.{layer}" if stack else str(layer) for stack, size in sizes.items() for layer in range(size)]

"""The names of layers in output and in what users give: numbers in a decoder; `encoder.0`, `decoder.3` and so on in an
encoder-decoder, whose layers are one list, the encoder's first."""

from collections.abc import Iterable


def layer_name(layer: int, encoder_layers: int) -> str:
    """The name of the layer with this number in the list of all; a decoder has 0 `encoder_layers`."""
    if not encoder_layers:
        return str(layer)
    return f"encoder.{layer}" if layer < encoder_layers else f"decoder.{layer - encoder_layers}"


def layers_in_words(layers: Iterable[int], encoder_layers: int) -> str:
    """The names of layers, with commas between."""
    return ", ".join(layer_name(layer, encoder_layers) for layer in layers)


def counts_in_words(counts: Iterable[int], encoder_layers: int) -> str:
    """A number for each layer; those of the encoder and of the decoder are set apart."""
    words = [str(count) for count in counts]
    if not encoder_layers:
        return " ".join(words)
    return f"encoder {' '.join(words[:encoder_layers])}, decoder {' '.join(words[encoder_layers:])}"

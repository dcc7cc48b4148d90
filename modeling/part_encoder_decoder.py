"""Encoder-decoders, whose pairs of sentences have a language each. `config.parts["encoder_decoder"]` is empty."""

from typing import Any, ClassVar

from .part import BasePart

_PAIR = "a sentence of an encoder-decoder and its translation have a language each"


class EncoderDecoderModel:
    """An encoder-decoder whose layers all run."""

    def post_init(self) -> None:
        # A layer that training leaves out at random (M2M100) would leave its routers without a gradient.
        for module in self.modules():  # type: ignore[attr-defined]
            if hasattr(module, "layerdrop"):
                module.layerdrop = 0.0
        super().post_init()  # type: ignore[misc]


class Part(BasePart):
    name = "encoder_decoder"
    model_class = EncoderDecoderModel
    not_beside: ClassVar = {
        "exclusive": f"a token of a new language takes its expert alone, but {_PAIR}",
        "gate": f"the gate judges one text, but {_PAIR}",
        "dmoe": "each expert of a DMoE learns the text of one language group, but a pair of sentences has two "
        "languages, and so may have two groups",
    }
    not_told = f"{_PAIR}, and its routers and classifiers judge the tokens of both"
    not_served = "{server} serves decoders alone by transformers' code, and this model is an encoder-decoder."

    @classmethod
    def read(cls, fields: dict[str, Any], config: Any) -> Any:
        return {} if config.is_encoder_decoder else None

"""The optional parts that this code has, in the order in which they are asked."""

from .part_added import Part as added
from .part_cmr import Part as cmr
from .part_encoder_decoder import Part as encoder_decoder
from .part_expansion_only import Part as expansion_only
from .part_gate import Part as gate
from .part_joined import Part as joined
from .part_languages import Part as languages
from .part_lora import Part as lora
from .part_mixture import Part as mixture

PARTS: dict = {
    "encoder_decoder": encoder_decoder,
    "mixture": mixture,
    "gate": gate,
    "cmr": cmr,
    "lora": lora,
    "added": added,
    "languages": languages,
    "joined": joined,
    "expansion_only": expansion_only,
}

"""Lets the tokenizer of an expanded checkpoint load as that of its base does."""

from pathlib import Path

from transformers import AutoTokenizer
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from ..jsonfile import read_json, write_json
from .local import EXPANDED

_FILE = "tokenizer_config.json"


def keep_tokenizer_class(source: Path, target: Path) -> None:
    """Writes the class of a dense checkpoint's tokenizer into the copied `tokenizer_config.json` if it says another.

    For some model types the library overrules the class in this file (it loads every tokenizer of a Qwen2 model as
    `Qwen2Tokenizer`, which cuts words in its own way). It does not know the model types of expanded models, so that
    their text would be cut in another way than the base's.
    """
    if not (target / _FILE).is_file():
        return
    model_type = read_json(source / "config.json", "a configuration").get("model_type")
    fields = read_json(target / _FILE, "a JSON file")
    told = str(fields.get("tokenizer_class"))
    registered = TOKENIZER_MAPPING_NAMES.get(str(model_type))
    if model_type in EXPANDED or registered is None or _plain(registered) == _plain(told):
        return
    try:
        actual = type(AutoTokenizer.from_pretrained(source, trust_remote_code=False)).__name__
    except Exception:  # the library raises many types; who loads the tokenizer will see which
        return
    if _plain(actual) != _plain(told):
        write_json(target / _FILE, {**fields, "tokenizer_class": actual})


def _plain(name: str) -> str:
    return name.removesuffix("Fast")

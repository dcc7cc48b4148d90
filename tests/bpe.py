"""A small byte-level BPE tokenizer, which merges."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def bpe_tokenizer() -> PreTrainedTokenizerFast:
    """All bytes but one, which no text here has, one merge, and an end-of-text token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet[:-1])} | {"al": 255}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "l")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>", clean_up_tokenization_spaces=False
    )

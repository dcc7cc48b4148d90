"""Small byte-level BPE tokenizers, which cut text into words by rules that llama.cpp has too."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEXT = "Alma, don't DON'T 12345 x1y2\n\n  z\t\tΗ Ελλάδα είναι  ώραία!!! ½ ٣٤ 漢字かな émigré — «Szia»\r\n   \n end "
CUTS = {
    "gpt-2": ([], True, False),
    "smollm": ([pre_tokenizers.Digits(individual_digits=True)], True, False),
    "llama-bpe": ([pre_tokenizers.Split(Regex(LLAMA3), "isolated")], False, True),
    "smaug-bpe": ([pre_tokenizers.Split(Regex(LLAMA3), "isolated")], False, False),
    "qwen2": ([pre_tokenizers.Split(Regex(QWEN2), "isolated")], False, False),
}


def bpe_tokenizer(rule="gpt-2", size=257, **changes) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with `size` tokens."""
    steps, regex, ignore_merges = CUTS[rule]
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, whole]) if steps else whole
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if size == 257:  # all bytes but one, which no text here has, and one merge
        vocabulary = {character: number for number, character in enumerate(alphabet[:-1])} | {"al": 255}
        tokenizer.model = models.BPE(vocab=vocabulary, merges=[("a", "l")], ignore_merges=ignore_merges)
        tokenizer.add_special_tokens(["<end>"])
    else:
        trainer = trainers.BpeTrainer(
            vocab_size=size, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False
        )
        tokenizer.train_from_iterator([TEXT] * 20, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>", clean_up_tokenization_spaces=False, **changes
    )

"""Tiny encoder-decoders with random weights, and small tokenizers of the kinds that they have."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from conftest import shaken
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    ByT5Tokenizer,
    GenerationConfig,
    MBart50Tokenizer,
    MBartTokenizer,
    NllbTokenizer,
    PreTrainedTokenizerFast,
    T5Tokenizer,
)

from hf_moe_expand import Plan

BART_SIZES = {
    "d_model": 32, "encoder_layers": 3, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64, "dropout": 0.0,
    "attention_dropout": 0.0, "activation_dropout": 0.0, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
    "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
T5_SIZES = {
    "d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
    "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0,
}  # fmt: skip
# Each shape that is asked for, with the configuration's own switches: plain and gated FFNs, tied heads and free ones.
SHAPES: dict[str, dict] = {
    "bart": BART_SIZES,
    "m2m_100": {**BART_SIZES, "encoder_layerdrop": 0.05, "decoder_layerdrop": 0.05, "activation_function": "relu"},
    "marian": {**BART_SIZES, "decoder_vocab_size": 300},
    "mbart": BART_SIZES,
    "pegasus": BART_SIZES,
    "t5": T5_SIZES,
    "mt5": {**T5_SIZES, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "umt5": {**T5_SIZES, "feed_forward_proj": "gated-gelu"},
}  # fmt: skip
# ByT5 is mT5's architecture with T5's name.
SHAPES["byt5"] = SHAPES["mt5"]
# A dense layer and a classifier in each stack. (For T5 the library sizes its cache by the encoder's layers.)
PLAN = Plan("layer-moe", [3, 1, 2, 1, 4], [0, 4], old=["en", "es"], new=["el"], encoder_layers=3)
SENTENCES = {
    "en": ["the white house", "the sea is blue", "a black dog runs", "i read the book", "good night"],
    "es": ["la casa blanca", "el mar es azul", "un perro negro corre", "leo el libro", "buenas noches"],
    "el": ["το λευκό σπίτι", "η θάλασσα είναι μπλε", "ένας μαύρος σκύλος τρέχει", "διαβάζω το βιβλίο", "καληνύχτα"],
}


def tiny(shape: str, seed: int = 0, vocabulary: int = 300, **changes):
    """A dense model: three encoder layers, two decoder layers; biases and norms are random too."""
    torch.manual_seed(seed)
    sizes = {**SHAPES[shape], "vocab_size": vocabulary, **changes}
    config = AutoConfig.for_model("t5" if shape == "byt5" else shape, **sizes)
    return shaken(AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32).eval())


def pieces(special: list[str]) -> Tokenizer:
    """A byte-pair tokenizer of the sentences, whose first tokens are `special`."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=240, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator((text for texts in SENTENCES.values() for text in texts), trainer)
    return tokenizer


def nllb_tokenizer(more: Sequence[str] = ()) -> NllbTokenizer:
    """`<language> tokens </s>` on both sides, as NLLB and M2M100 have it."""
    model = pieces(["<s>", "<pad>", "</s>", "<unk>"])
    fields = json.loads(model.to_str())["model"]
    merges = [tuple(pair) for pair in fields["merges"]]
    codes = ["eng_Latn", "spa_Latn", "ell_Grek", "zho_Hans", "zho_Hant", *more]
    return NllbTokenizer(vocab=fields["vocab"], merges=merges, extra_special_tokens=codes)


def scored(special: list[str]) -> list[tuple[str, float]]:
    words = sorted(pieces(special).get_vocab().items(), key=lambda item: item[1])
    return [(word, 0.0 if word in special else -float(number)) for number, (word, _) in enumerate(words)]


def mbart_tokenizer() -> MBartTokenizer:
    """`tokens </s> <language>` on both sides, as the first mBART has it."""
    return MBartTokenizer(vocab=scored(["<s>", "<pad>", "</s>", "<unk>"]))


def mbart50_tokenizer() -> MBart50Tokenizer:
    return MBart50Tokenizer(vocab=scored(["<unk>", "<s>", "</s>"]))


def t5_tokenizer() -> T5Tokenizer:
    """No language codes: the language stands in the text."""
    return T5Tokenizer(vocab=scored(["<pad>", "</s>", "<unk>"]), extra_ids=0)


def byt5_tokenizer() -> ByT5Tokenizer:
    return ByT5Tokenizer(extra_ids=0)


def plain_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer without language codes whose vocabulary is the pieces alone, as a single pair's model has it."""
    model, special = pieces(["<s>", "<pad>", "</s>", "<unk>"]), {"pad_token": "<pad>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>", **special)


TOKENIZERS = {"m2m_100": nllb_tokenizer, "mbart": mbart50_tokenizer, "t5": t5_tokenizer, "byt5": byt5_tokenizer}


def save_tiny(folder: Path, shape: str = "m2m_100", tokenizer=None, **changes) -> Path:
    """A dense checkpoint with this tokenizer, or that of its kind, as a user would bring it."""
    tokenizer = tokenizer or TOKENIZERS[shape]()
    model = tiny(shape, vocabulary=len(tokenizer) + 3, **changes)
    model.generation_config = GenerationConfig.from_model_config(model.config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def batch(rows: int = 3, source: int = 9, target: int = 6) -> dict[str, torch.Tensor]:
    """Sources of different lengths, and the targets' first tokens."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(5, 200, (rows, source), generator=generator)
    mask = (torch.arange(source) < torch.arange(source, source - rows, -1)[:, None]).long()
    decoder = torch.randint(5, 200, (rows, target), generator=generator)
    return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": decoder}

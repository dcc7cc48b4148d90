"""Makes a small dense base model from scratch, for the demo and for experiments on machines without a hub."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset, interleave_datasets
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2Tokenizer,
    Trainer,
    TrainingArguments,
    set_seed,
)

from ..checkpoint.writer import new_folder
from ..data.packing import collate_without_languages, pack_texts
from ..trainers.bfloat16 import has_bfloat16
from ..trainers.log_lines import LogLines, took_away_usual


@dataclass(frozen=True)
class BaseSettings:
    """Sizes of the model and of its pre-training.

    Attributes:
        architecture: the class of its configuration.
        fields: further fields of the configuration, by name.
    """

    vocab_size: int = 8192
    hidden_size: int = 256
    intermediate_size: int = 704
    num_layers: int = 6
    num_heads: int = 4
    architecture: Callable[..., PreTrainedConfig] = Qwen2Config
    fields: Mapping[str, Any] = field(default_factory=dict)
    block_size: int = 256
    blocks_per_step: int = 16
    steps: int = 1000
    learning_rate: float = 2e-3
    logging_steps: int = 100


def make_base(
    out: str | Path, texts: Mapping[str, Dataset], shares: Mapping[str, float], settings: BaseSettings, seed: int = 0
) -> None:
    """Trains a tokenizer and a model on texts (column `text`) whose blocks are drawn by `shares`, and saves both.

    Like real bases', the tokenizer has whole words of the languages with large shares, and spells out the others'.
    """
    set_seed(seed)
    largest = max(shares.values())
    counts = {code: max(1, round(len(texts[code]) * share / largest)) for code, share in shares.items()}
    lines = (text for code, n in counts.items() for text in texts[code].select(range(n))["text"])
    tokenizer = Qwen2Tokenizer().train_new_from_iterator(lines, settings.vocab_size, show_progress=False)
    packed = [pack_texts({code: texts[code]}, tokenizer, settings.block_size, seed).dataset for code in shares]
    blocks = [Dataset.from_dict({"input_ids": rows["input_ids"]}) for rows in packed]
    total = sum(shares.values())
    dataset = interleave_datasets(
        blocks, [share / total for share in shares.values()], seed, stopping_strategy="all_exhausted"
    )
    config = _config(settings, tokenizer)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with new_folder(out) as partial, TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            output_dir=scratch, seed=seed, max_steps=settings.steps, learning_rate=settings.learning_rate,
            per_device_train_batch_size=settings.blocks_per_step, logging_steps=settings.logging_steps,
            lr_scheduler_type="cosine", warmup_steps=20, weight_decay=0.01, bf16=has_bfloat16(),
            use_cpu=not torch.accelerator.is_available(), save_strategy="no", report_to="none",
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=dataset, data_collator=collate_without_languages)
        trainer.add_callback(LogLines(took_away_usual(trainer)))
        trainer.train()
        if "output_router_logits" in settings.fields:
            model.config.output_router_logits = False  # with them comes the loss that balances the experts
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)


def _config(settings: BaseSettings, tokenizer: Any) -> PreTrainedConfig:
    return settings.architecture(
        vocab_size=len(tokenizer), hidden_size=settings.hidden_size, intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_layers, num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_heads, max_position_embeddings=2 * settings.block_size,
        # With the usual 0.02 the rows of rare tokens stay nearly equal, and a frozen head could not distinguish them.
        initializer_range=settings.hidden_size**-0.5,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, **settings.fields,
    )  # fmt: skip

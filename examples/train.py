"""The review stage with a plain `Trainer`: routers and classifiers learn to separate old and new languages.

    python examples/train.py qwen-el-1 qwen-el-2 --old en=en.jsonl --new el=el.jsonl --steps 500

`RouterLossMixin` goes in front of any trainer. `hf-moe-expand push qwen-el-2 me/qwen-el` publishes the result.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from hf_moe_expand import ClassifierLoss, LanguagePriorLoss, LanguageText, RouterLossMixin, freeze
from hf_moe_expand.data.packing import collate_blocks, pack_texts


# Any Trainer of transformers, with the router losses in front.
class MyTrainer(RouterLossMixin, Trainer):
    """Trainer, with the router losses."""


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", help="expanded checkpoint")
parser.add_argument("out", help="folder to write")
parser.add_argument("--old", action="append", default=[], help="LANGUAGE=FILE")
parser.add_argument("--new", action="append", default=[], help="LANGUAGE=FILE")
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--block-size", type=int, default=512)
asked = parser.parse_args()

# float32, whatever type the checkpoint stores: in bfloat16 a step of 5e-5 would round away.
model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.float32, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(asked.model, trust_remote_code=True)
# Routers and classifiers train, nothing else.
print(freeze(model, "review"))

# The text of each language, in blocks that carry its id.
sources = [LanguageText.parse(argument) for argument in asked.old + asked.new]
packed = pack_texts({s.language: s.load() for s in sources}, tokenizer, asked.block_size, seed=0)
# The losses that send old languages to expert 0, each with its weight.
trainer = MyTrainer(
    model,
    TrainingArguments(asked.out, max_steps=asked.steps, learning_rate=5e-5, logging_steps=1, report_to="none"),
    train_dataset=packed.dataset,  # columns input_ids and language_ids
    data_collator=collate_blocks,
    router_losses=[LanguagePriorLoss(0.1), ClassifierLoss(0.1)],
    language_classes=[0] * len(asked.old) + [1] * len(asked.new),  # class of each language id: 0 is old
)
# The checkpoint, with its code, and the tokenizer beside it.
trainer.train()
trainer.save_model()
tokenizer.save_pretrained(asked.out)

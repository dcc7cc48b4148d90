"""Loads an expanded checkpoint and generates text. Needs only transformers: the checkpoint contains the model's code.

python examples/generate.py me/qwen-el "Η Ελλάδα είναι"
"""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", help="folder or hub id of an expanded checkpoint")
parser.add_argument("prompts", nargs="+")
parser.add_argument("--tokens", type=int, default=50)
asked = parser.parse_args()

# The model, with the code inside the checkpoint, and its tokenizer.
model = AutoModelForCausalLM.from_pretrained(asked.model, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(asked.model, trust_remote_code=True, padding_side="left")
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
# The prompts as one batch, padded on the left.
batch = tokenizer(asked.prompts, return_tensors="pt", padding=True).to(model.device)
# The prompts and what follows them.
for line in tokenizer.batch_decode(model.generate(**batch, max_new_tokens=asked.tokens), skip_special_tokens=True):
    print(line)

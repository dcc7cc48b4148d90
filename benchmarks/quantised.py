"""Size and loss of an expanded model whose weights torchao quantises when it loads, on a CPU.

python benchmarks/quantised.py MODEL --data en=help/en.test.jsonl

Needs torchao (`pip install torchao`). Prints, for bfloat16 and for each kind of quantisation, the megabytes of the
weights, the bits per byte of the text, and whether the saved model computes the same.
"""

import argparse
import math
import tempfile
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TorchAoConfig

from hf_moe_expand.data.sources import LanguageText


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor, or of the tensors that a quantised one is made of."""
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(nbytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return tensor.nbytes


@torch.no_grad()
def bits_per_byte(model: Any, tokenizer: Any, texts: list[str], length: int) -> float:
    nats = size = 0.0
    for text in texts:
        ids = tokenizer(text, return_tensors="pt").input_ids[:, :length]
        nats += model(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        size += len(tokenizer.decode(ids[0]).encode())
    return nats / size / math.log(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of an expanded checkpoint")
    parser.add_argument("--data", required=True, help="LANGUAGE=FILE of text")
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--length", type=int, default=256, help="tokens of each document")
    options = parser.parse_args()
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=False)
    texts = LanguageText.parse(options.data).load()["text"][: options.documents]
    kinds = {
        "bfloat16": None,
        "int8 weights": Int8WeightOnlyConfig(),
        "int8 weights, int8 activations": Int8DynamicActivationInt8WeightConfig(),
    }
    for name, kind in kinds.items():
        chosen = {} if kind is None else {"quantization_config": TorchAoConfig(kind)}
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16, **chosen).eval()
        size, bits = sum(map(nbytes, model.parameters())) / 1e6, bits_per_byte(model, tokenizer, texts, options.length)
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            model.save_pretrained(folder)
            ids = tokenizer(texts[0], return_tensors="pt").input_ids[:, :32]
            same = torch.equal(AutoModelForCausalLM.from_pretrained(folder).eval()(ids).logits, model(ids).logits)
        print(f"{name}: {size:.0f} MB, {bits:.4f} bits per byte, saved and loaded the same: {same}")


if __name__ == "__main__":
    main()

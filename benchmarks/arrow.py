"""Adapters behind one gate beside PEFT's Arrow, which routes each token of each layer between the same adapters.

    python benchmarks/arrow.py BASE MODEL --adapter hu=FOLDER --adapter tr=FOLDER --data en=en.jsonl --data hu=hu.jsonl

MODEL is what `from-peft` made of BASE and the same adapters, with a gate. The table has bits per byte of each language,
and seconds of each row (docs/adapters.md).
"""

import argparse
import time
from contextlib import nullcontext

from peft import ArrowConfig, create_arrow_model
from tables import markdown_table

from hf_moe_expand import evaluate_model, load_for_inference
from hf_moe_expand.checkpoint.records import History
from hf_moe_expand.data.sources import LanguageText


def pairs(arguments):
    return dict(argument.split("=", 1) for argument in arguments)


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base")
    parser.add_argument("model")
    parser.add_argument("--adapter", action="append", required=True, metavar="LANGUAGE=FOLDER")
    parser.add_argument("--data", action="append", required=True, metavar="LANGUAGE=FILE")
    parser.add_argument("--max-tokens", type=int, default=2000)
    parser.add_argument("--block-size", type=int, default=256)
    asked = parser.parse_args(words)
    adapters = pairs(asked.adapter)
    texts = {code: LanguageText(code, file).load()["text"] for code, file in pairs(asked.data).items()}
    options = {"block_size": asked.block_size, "batch_size": 2, "max_tokens": asked.max_tokens}
    rows = []

    def score(name, model, tokenizer, told=None):
        """A row; `told` is the context in which the text of a language is scored."""
        start, bits = time.perf_counter(), {}
        for code, text in texts.items():
            with told(code) if told else nullcontext():
                bits |= evaluate_model(model, tokenizer, {code: text}, **options)
        seconds = time.perf_counter() - start
        rows.append([name, *(f"{bits[code].bits_per_byte:.3f}" for code in texts), f"{seconds:.0f}"])
        print(rows[-1], flush=True)

    base, tokenizer = load_for_inference(asked.base)
    score("the base", base, tokenizer)
    for top_k in range(1, len(adapters) + 1):
        base, _ = load_for_inference(asked.base)  # Arrow puts its adapters into the model
        arrow = create_arrow_model(base, list(adapters.values()), ArrowConfig(top_k=top_k))
        score(f"Arrow, top {top_k}", arrow.eval(), tokenizer)
    model, _ = load_for_inference(asked.model)
    classes = History.of(model.config).classes
    score("behind the gate", model, tokenizer)
    score("told", model, tokenizer, lambda code: model.use_languages(code if code in classes else next(iter(classes))))
    print(markdown_table(["", *texts, "seconds"], rows))


if __name__ == "__main__":
    main()

"""Serves a model with vLLM in a process of its own: `engine.py MODEL`, with prompts and options as JSON on stdin.

Prints the tokens of each prompt as JSON in the last line.
"""

import json
import os
import sys

# One process, whose threads are not bound to cores.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def serve(
    model: str, rounds: list[list[list[int]]], count: int, options: dict, adapters: list[str | None] | None
) -> list[list[list[int]]]:
    """The greedy tokens of each prompt of each round; the rounds follow one another in one engine. `adapters` has the
    folder of each prompt's LoRA, or None."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    engine = LLM(model, **{"dtype": "float32", "max_model_len": 64, "enforce_eager": True, **options})
    greedy = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    loras = adapters and [place and LoRARequest(place, adapters.index(place) + 1, place) for place in adapters]
    found = []
    for prompts in rounds:
        answers = engine.generate([{"prompt_token_ids": ids} for ids in prompts], greedy, lora_request=loras)
        found.append([list(answer.outputs[0].token_ids) for answer in answers])
    return found


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    result = serve(sys.argv[1], asked["rounds"], asked["count"], asked["options"], asked["adapters"])
    print("\n" + json.dumps(result), flush=True)

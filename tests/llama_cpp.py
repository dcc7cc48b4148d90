"""llama.cpp in this process: the logits and the tokens of a GGUF file."""

import ctypes
import json
import urllib.request
from pathlib import Path

import pytest
import torch

xllamacpp = pytest.importorskip("xllamacpp", reason="xllamacpp is not installed (the extra `dev`): nothing runs GGUF")


class LlamaCpp:
    """A GGUF file in llama.cpp, perhaps with an adapter, with a cache in float32; one thread."""

    def __init__(self, file: Path, context: int = 64, adapter: Path | None = None) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(file)
        if adapter is not None:
            lora = xllamacpp.CommonAdapterLoraInfo()
            lora.path, lora.scale = str(adapter), 1.0
            params.lora_adapters = [lora]
        params.n_ctx = params.n_batch = context
        params.n_parallel = params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.warmup = params.fit_params = False
        params.verbosity = -1
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.server = xllamacpp.Server(params)
        # Its destructor waits for a thread, at times for ever: the server stays until the process ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.server))

    def logprobs(self, ids: list[int], vocabulary: int) -> torch.Tensor:
        """`[V]`: the logarithms of the next token's probabilities after a text.

        The token that is then drawn is A: of a byte that is no letter by itself the server would return nothing.
        """
        (letter,) = self.tokenize("A")
        asked = {"prompt": ids, "n_predict": 1, "n_probs": vocabulary, "logit_bias": [[letter, 1000]]}
        answer = self.server.handle_completions({**asked, "temperature": 0, "cache_prompt": False})
        found = torch.full((vocabulary,), float("-inf"))
        for entry in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
            found[entry["id"]] = entry["logprob"]
        return found

    def greedy(self, ids: list[int], count: int, vocabulary: int) -> list[int]:
        """The tokens that follow a text, each the most probable one."""
        found = list(ids)
        for _ in range(count):
            found.append(int(self.logprobs(found, vocabulary).argmax()))
        return found[len(ids) :]

    def tokenize(self, text: str, special: bool = False) -> list[int]:
        return self._post("tokenize", {"content": text, "add_special": special, "parse_special": True})["tokens"]

    def chat(self, messages: list[dict]) -> str:
        """The text of a conversation, by the file's chat template."""
        return self._post("apply-template", {"messages": messages})["prompt"]

    def _post(self, path: str, asked: dict) -> dict:
        request = urllib.request.Request(
            f"{self.server.listening_address}/{path}", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

"""Slow definitions that the operations are held against: one text, one token, one expert at a time, without a cache."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F


@torch.no_grad()
def next_logits(model: Any, prompt: Sequence[int], answer: Sequence[int], told: str | None = None) -> torch.Tensor:
    """The logits of the token after an answer's beginning, `[V]`: one row, no padding, no cache."""
    more = {} if told is None else {"languages": told}
    if model.config.is_encoder_decoder:
        begin = [model.config.decoder_start_token_id, *answer]
        more["decoder_input_ids"] = torch.tensor([begin])
    else:
        prompt = [*prompt, *answer]
    return model(input_ids=torch.tensor([list(prompt)]), use_cache=False, **more).logits[0, -1]


def greedy(model: Any, prompt: Sequence[int], count: int, told: str | None = None) -> list[int]:
    """The answer of `count` tokens, each of which is the likeliest."""
    answer: list[int] = []
    for _ in range(count):
        answer.append(int(next_logits(model, prompt, answer, told).argmax()))
    return answer


def beam_search(model: Any, prompt: Sequence[int], count: int, beams: int, told: str | None = None) -> list[int]:
    """The likeliest answer that a search with so many beams finds."""
    kept: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(count):
        longer = []
        for score, answer in kept:
            scores = next_logits(model, prompt, answer, told).log_softmax(-1)
            best = scores.topk(beams)
            longer += [
                (score + s, [*answer, t]) for s, t in zip(best.values.tolist(), best.indices.tolist(), strict=True)
            ]
        kept = sorted(longer, key=lambda pair: -pair[0])[:beams]
    return kept[0][1]


def sampled(
    model: Any, prompts: Sequence[Sequence[int]], each: int, count: int, told: Sequence[str | None], seed: int
) -> list[list[int]]:
    """`each` answers to each prompt, drawn together, a token of all of them at a time."""
    torch.manual_seed(seed)
    rows = [(prompt, code) for prompt, code in zip(prompts, told, strict=True) for _ in range(each)]
    answers: list[list[int]] = [[] for _ in rows]
    for _ in range(count):
        logits = [next_logits(model, prompt, answers[n], code) for n, (prompt, code) in enumerate(rows)]
        drawn = torch.multinomial(torch.stack(logits).softmax(-1), 1)
        for answer, token in zip(answers, drawn[:, 0].tolist(), strict=True):
            answer.append(token)
    return answers


def bits_per_byte(model: Any, tokenizer: Any, texts: Sequence[str], block: int, told: str | None) -> float:
    """Of documents in one stream, each after an end-of-text token, in windows of `block` tokens."""
    ids, scored = [], []
    for text in texts:
        own = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += [tokenizer.eos_token_id, *own]
        scored += [False, *[True] * len(own)]
    nats = 0.0
    for start in range(0, len(ids) - 1, block):
        window = ids[start : start + block + 1]
        for end in range(1, len(window)):
            if scored[start + end]:
                scores = next_logits(model, window[:end], [], told).log_softmax(-1)
                nats -= scores[window[end]].item()
    return nats / math.log(2) / sum(len(text.encode()) for text in texts)


def bits_per_byte_of_pairs(model: Any, pairs: Sequence[tuple[list[int], list[int], int]], size: int) -> float:
    """Of translations: the tokens of each sentence, of its translation, and the place of the token that names the
    target's language, which is given; `size` bytes."""
    nats = 0.0
    for source, target, code in pairs:
        for place, token in enumerate(target):
            if place != code % len(target):
                nats -= next_logits(model, source, target[:place]).log_softmax(-1)[token].item()
    return nats / math.log(2) / size


def sft_step(model: Any, rows: Sequence[Sequence[int]], codes: Sequence[str] | None) -> dict[str, torch.Tensor]:
    """The gradient of the next-token loss of some rows, one row at a time: the mean over all tokens."""
    from hf_moe_expand.modeling.routing import TokenClasses

    model.train()
    count, total = sum(len(row) - 1 for row in rows), 0.0
    for number, row in enumerate(rows):
        ids, asked = torch.tensor([list(row)]), {}
        if codes is not None:
            number = codes[number]
            asked = {"token_classes": TokenClasses(torch.full((len(row),), number), [number])}
        with model.routing_control.asking(**asked):
            logits = model(ids, use_cache=False).logits[0, :-1]
        total = total + F.cross_entropy(logits, ids[0, 1:], reduction="sum")
    (total / count).backward()
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}

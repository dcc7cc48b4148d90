"""Slow definitions that the operations are held against: one text, one token, one expert at a time, without a cache."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from hf_moe_expand.modeling.routing import TokenClasses


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


def stage_step(
    model: Any, rows: Sequence[dict[str, list[int]]], exclusive: bool, prior: float
) -> dict[str, torch.Tensor]:
    """The gradient of a stage's loss: the mean of the next-token loss over all tokens, and `prior` times the mean over
    layers of the language-prior loss, which is the mean over all tokens of class 0. One row at a time."""
    model.train()
    nats, targets = [], 0
    scores: dict[int, list[torch.Tensor]] = {layer: [] for layer in model.expanded_ffns()}
    for row in rows:
        classes, ids = row["language_ids"], torch.tensor([row["input_ids"]])
        asked = {"token_classes": TokenClasses(torch.tensor(classes), sorted({*classes}))} if exclusive else {}
        with model.routing_control.asking(**asked), model.capture_routing() as routing:
            if "labels" in row:
                labels = torch.tensor(row["labels"])
                begin = torch.tensor([[model.config.decoder_start_token_id, *row["labels"][:-1]]])
                logits = model(input_ids=ids, decoder_input_ids=begin, use_cache=False).logits[0]
            else:
                labels, logits = ids[0, 1:], model(ids, use_cache=False).logits[0, :-1]
        nats.append(F.cross_entropy(logits, labels, reduction="sum"))
        targets += len(labels)
        for layer, one in routing.layers.items() if prior else ():
            in_decoder = model.config.is_encoder_decoder and layer >= model.config.num_hidden_layers
            of = [classes[int(in_decoder)]] * len(one.router_logits) if "labels" in row else classes
            scores[layer] += [s for s, number in zip(one.router_logits, of, strict=True) if number == 0]
    loss = torch.stack(nats).sum() / targets
    for found in scores.values() if prior else ():
        loss = loss - prior * torch.stack(found).log_softmax(-1)[:, 0].mean() / len(scores)
    loss.backward()
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


def sft_step(model: Any, rows: Sequence[Sequence[int]], codes: Sequence[str] | None) -> dict[str, torch.Tensor]:
    """The gradient of the next-token loss of some rows, one row at a time: the mean over all tokens."""
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

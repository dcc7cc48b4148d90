"""What benchmarks/study.py scores: bits per byte, the gate, and the answers of a chat."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hf_moe_expand.evaluation.perplexity import batch_nats

LONGEST = 512  # tokens of a text that is scored
AT_ONCE = {"cuda": 8192, "cpu": 1024}  # tokens of a scored batch, padding counted


def lines_of(file: Path) -> list[str]:
    return [json.loads(line)["text"] for line in file.read_text("utf-8").splitlines()] if file.is_file() else []


def texts_of(data: Path, code: str, count: int, begin: int = 0) -> dict[str, list[str]]:
    """A language's test text by kind, `count` sentences from `begin` on; documents are six sentences each."""
    sentences = lines_of(data / "flores" / f"{code}.dev.jsonl")[begin : begin + count]
    pages = [text[:2000] for text in lines_of(data / "help" / f"{code}.test.jsonl")[: count // 6]]
    documents = [" ".join(sentences[i : i + 6]) for i in range(0, len(sentences), 6)]
    kinds = {"pages": pages, "documents": documents, "sentences": sentences}
    return {kind: texts for kind, texts in kinds.items() if texts}


def batches(texts: Sequence[str], tokenizer: Any, device: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """Left-padded tokens and masks, and the bytes of the scored text; texts of like lengths together."""
    begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    rows = [[begin, *tokenizer(text, add_special_tokens=False).input_ids[: LONGEST - 1]] for text in texts]
    rows.sort(key=len)
    while rows:
        longest = len(rows[-1])
        count = max(1, AT_ONCE[device.type] // longest)
        rows, part = rows[:-count], rows[-count:]
        ids = torch.tensor([[begin] * (longest - len(row)) + row for row in part])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in part])
        yield ids.to(device), mask.to(device), sum(len(tokenizer.decode(row[1:]).encode()) for row in part)


def nats_of(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> float:
    """Nats of left-padded texts, without those of their first tokens."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    wanted = (mask[:, 1:] > 0) & (positions[:, 1:] > 0)
    targets = torch.where(wanted, ids[:, 1:], -100)
    return batch_nats(model, targets, input_ids=ids, attention_mask=mask, position_ids=positions).sum().item()


@torch.no_grad()
def scores(
    model: Any, tokenizer: Any, texts: Mapping[str, Any], new: Sequence[str],
    homes: dict[tuple[str, str, int], float] | None = None,
) -> dict[str, float]:  # fmt: skip
    """Bits per byte by way, kind of text and language, and the share of texts that go to new languages.

    A batch that is judged as its own new language has the nats of the told one.

    Args:
        homes: nats of batches of which all texts went home, by language, kind and number: read, or written where
            missing. All models with this base and gate have the same.
    """
    rule, homes = getattr(model.config, "language_gate", None), {} if homes is None else homes
    classes = {code: number for number, codes in enumerate(rule["languages"]) for code in codes} if rule else {}
    found: dict[str, float] = {}
    for code, kinds in texts.items():
        can_tell = code in new and hasattr(model, "routing_control")
        for kind, some in kinds.items():
            sums, size, taken = {"read": 0.0, "told": 0.0}, 0, 0
            for number, (ids, mask, width) in enumerate(batches(some, tokenizer, model.device)):
                size += width
                if can_tell:
                    with model.use_languages(code):
                        told = nats_of(model, ids, mask)
                    sums["told"] += told
                judged = model.judge(ids, mask) if rule else torch.ones(1)
                taken += int((judged > 0).sum())
                key = code, kind, number
                if can_tell and rule and (judged == classes[code]).all():
                    sums["read"] += told
                elif judged.any():
                    sums["read"] += nats_of(model, ids, mask)
                else:
                    homes[key] = homes[key] if key in homes else nats_of(model, ids, mask)
                    sums["read"] += homes[key]
            for way in ("read", "told") if can_tell else ("read",):
                found[f"{way}.{kind}.{code}"] = round(sums[way] / math.log(2) / size, 5)
            if rule:  # a text is judged by its end before it is read
                found[f"end.{kind}.{code}"] = found[f"read.{kind}.{code}"]
                found[f"new.{kind}.{code}"] = round(taken / len(some), 5)
    return found


def in_template(tokenizer: Any, asked: Sequence[str]) -> list[str]:
    """Questions as prompts of the chat template, where there is one."""
    if not tokenizer.chat_template:
        return list(asked)
    messages = [[{"role": "user", "content": question}] for question in asked]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


@torch.no_grad()
def chat(model: Any, tokenizer: Any, asked: Sequence[str], tokens: int = 24) -> list[str]:
    """Greedy answers to questions; without a chat template, how the model goes on."""
    asked = in_template(tokenizer, asked)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    batch = tokenizer(asked, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    ids = model.generate(**inputs, max_new_tokens=tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    return tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

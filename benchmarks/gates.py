"""Prints where a language gate sends text, and what it costs in gain: the tables of docs/gates.md.

    python benchmarks/gates.py MODEL --base BASE --data DIR --old en --new hu,tr --unnamed es,fr,de,pt,id,sw

DIR has `flores/` and `help/` (a JSON object with `text` on each line). The first table has the share of tokens that new
experts take: documents of six sentences, single sentences, pages, the first 8 and 32 tokens of documents; and the share
of single sentences that go to new experts as a whole, judged by their end. The second has the change of bits per byte
against the base: judged token by token, judged by the text's end, and told the language; further models (`--also
NAME=FOLDER`), without a gate, are told alone. Code, mathematics and chat messages stand in the script.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timing import parser, report

from hf_moe_expand.inference.models import load_for_inference

QUESTIONS = {
    "en": ["What is the capital of France?", "Name three fruits.", "Why do we sleep?", "What do bees make?"],
    "hu": ["Mi Franciaország fővárosa?", "Sorolj fel három gyümölcsöt.", "Miért alszunk?", "Mit készítenek a méhek?"],
    "tr": ["Fransa'nın başkenti neresidir?", "Üç meyve say.", "Neden uyuruz?", "Arılar ne yapar?"],
    "es": ["¿Cuál es la capital de Francia?", "Nombra tres frutas.", "¿Por qué dormimos?", "¿Qué hacen las abejas?"],
}
OTHER = {
    "code": [
        "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n    return total / 2\n",
        "for (int i = 0; i < n; i++) {\n    if (a[i] > best) { best = a[i]; where = i; }\n}\nreturn where;\n",
        "SELECT name, COUNT(*) FROM orders WHERE year = 2020 GROUP BY name ORDER BY COUNT(*) DESC LIMIT 10;\n",
    ],
    "mathematics": [
        "Let $f(x) = x^2 - 2x + 1$. Then $f'(x) = 2x - 2$, so that $f'(x) = 0$ at $x = 1$, where $f(1) = 0$.",
        "\\int_0^1 x^n dx = \\frac{1}{n+1}, \\quad \\sum_{k=1}^n k = \\frac{n(n+1)}{2}, \\quad e^{i\\pi} + 1 = 0",
    ],
}  # fmt: skip
LONGEST = 512


def lines(path: Path) -> list[str]:
    """The texts of a file."""
    return [json.loads(line)["text"] for line in path.read_text("utf-8").splitlines()] if path.is_file() else []


def texts_of(data: Path, code: str, most: int) -> dict[str, list[str]]:
    """A language's test text by kind, up to `most` texts of each."""
    sentences = lines(data / "flores" / f"{code}.dev.jsonl")
    documents = [" ".join(sentences[i : i + 6]) for i in range(0, len(sentences), 6)]
    return {
        "documents": documents[: most // 6], "sentences": sentences[:most],
        "pages": [text[:2000] for text in lines(data / "help" / f"{code}.test.jsonl")[: most // 6]],
    }  # fmt: skip


def batches(texts: Sequence[str], tokenizer: Any, size: int = 8) -> Any:
    """Left-padded batches: tokens, mask and positions; texts of like lengths together."""
    begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    rows = sorted(([begin, *tokenizer(t, add_special_tokens=False).input_ids[: LONGEST - 1]] for t in texts), key=len)
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        longest = max(map(len, part))
        ids = torch.tensor([[begin] * (longest - len(row)) + row for row in part])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in part])
        yield ids, mask, (mask.cumsum(1) - 1).clamp(min=0)


@torch.no_grad()
def shares(model: Any, texts: Sequence[str], tokenizer: Any) -> dict[str, float]:
    """The share of tokens that new experts take: of all, of each text's first ones; and of texts, by their end."""
    counts = {name: [0, 0] for name in ("all", "8", "32", "end")}
    control, found = model.routing_control, []
    gate = model.expanded_ffns()[model.config.language_gate["layer"]]
    hook = gate.register_forward_hook(lambda *_: found.append(control.gate_pass.classes.class_T))
    for ids, mask, positions in batches(texts, tokenizer):
        model(ids, attention_mask=mask, position_ids=positions, use_cache=False, logits_to_keep=1)
        is_new = (found.pop().view(ids.shape) > 0) & (mask > 0)
        place = (mask.cumsum(1) - 1) * mask  # 0 for padding and for the token that begins a text, which has no language
        for name, most in (("all", LONGEST), ("8", 8), ("32", 32)):
            chosen = (place > 0) & (place <= most)
            counts[name][0] += int((is_new & chosen).sum())
            counts[name][1] += int(chosen.sum())
        counts["end"][0] += int(is_new[:, -1].sum())
        counts["end"][1] += len(ids)
    hook.remove()
    return {name: part / max(whole, 1) for name, (part, whole) in counts.items()}


@torch.no_grad()
def bits(model: Any, texts: Sequence[str], tokenizer: Any, way: str = "", code: str = "") -> float:
    """Bits per byte, token by token, judged by the text's end (`end`) or told the language (`told`)."""
    nats = size = 0.0
    for ids, mask, positions in batches(texts, tokenizer):
        ends = [ids.shape[1]] if way == "end" else None
        said = {"languages": code} if way == "told" else {}
        with model.routing_control.asking(message_ends=ends) if way == "end" else nullcontext():
            logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False, **said).logits
        wanted = (mask[:, 1:] > 0) & (positions[:, 1:] > 0)
        labels = torch.where(wanted, ids[:, 1:], -100)
        nats += F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels.flatten(), reduction="sum").item()
        size += sum(len(tokenizer.decode(row[keep]).encode()) for row, keep in zip(ids[:, 1:], wanted, strict=True))
    return nats / math.log(2) / size


def share_rows(model: Any, tokenizer: Any, texts: Mapping[str, Mapping[str, Sequence[str]]]) -> list[list[str]]:
    """The first table."""
    rows = []
    for code, kinds in texts.items():
        found = {kind: shares(model, some, tokenizer) for kind, some in kinds.items() if some}
        cells = [found["documents"][name] for name in ("all", "8", "32")]
        cells += [
            found["sentences"]["all"],
            found["sentences"]["end"],
            *(found[kind]["all"] for kind in found if kind == "pages"),
        ]
        rows.append([code, *map(_per_cent, cells), *[""] * (6 - len(cells))])
    chats = {f"chat questions, {code}": [_chat(q, tokenizer) for q in some] for code, some in QUESTIONS.items()}
    for name, some in (OTHER | chats).items():
        of = shares(model, some, tokenizer)
        rows.append([name, *(_per_cent(of[part]) for part in ("all", "8", "32")), "", _per_cent(of["end"]), ""])
    return rows


def _chat(question: str, tokenizer: Any) -> str:
    if not getattr(tokenizer, "chat_template", None):
        return question
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def _per_cent(share: float) -> str:
    return f"{100 * share:.1f} %"


def gain_rows(models: Mapping[str, Any], base: Any, tokenizer: Any, texts: Any, new: Sequence[str]) -> list[list[str]]:
    """The second table."""
    rows = []
    for code, kinds in texts.items():
        for kind, some in kinds.items():
            if not some:
                continue
            before = bits(base, some, tokenizer)
            after = [bits(models["told"], some, tokenizer, way) for way in ("", "end")]
            after += [bits(model, some, tokenizer, "told", code) for model in models.values() if code in new]
            cells = [f"{100 * (one / before - 1):+.1f} %" for one in after]
            rows.append([code, kind, f"{before:.3f}", *cells, *[""] * (2 + len(models) - len(cells))])
    return rows


def main(arguments: list[str] | None = None) -> None:
    found = parser(__doc__, repeats=1)
    found.add_argument("model", help="checkpoint with a gate")
    for name, default in (("--base", None), ("--data", None), ("--old", "en"), ("--new", None), ("--unnamed", "")):
        found.add_argument(name, default=default, required=default is None)
    found.add_argument("--also", action="append", default=[], help="NAME=FOLDER, told the language too; repeat")
    found.add_argument("--texts", type=int, default=48, help="sentences of a language (%(default)s)")
    options: argparse.Namespace = found.parse_args(arguments)
    new = options.new.split(",")
    codes = [code for part in (options.old, options.unnamed, options.new) for code in part.split(",") if code]
    texts = {code: texts_of(Path(options.data), code, options.texts) for code in codes}
    model, tokenizer = load_for_inference(options.model)
    head = ["text", "documents", "first 8", "first 32", "sentences", "judged by their end", "pages"]
    report("To new experts", head, share_rows(model, tokenizer, texts), options)
    base, _ = load_for_inference(options.base)
    models = {"told": model}
    for named in options.also:
        name, _, folder = named.partition("=")
        models[f"{name}, told"] = load_for_inference(folder)[0]
    head = ["language", "text", "base", "token by token", "judged by the end", *models]
    options.out = None
    report("Change of bits per byte", head, gain_rows(models, base, tokenizer, texts, new), options)


if __name__ == "__main__":
    main()

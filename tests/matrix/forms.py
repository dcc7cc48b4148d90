"""The rows of the matrix: forms of model, each made of parts by the public functions.

A form joins by one line in `PARTS`. Two parts that one model may have together make a form of their own; those that the
code refuses stand in its tables (`together.py`).
"""

import copy
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from added import EXPERTS
from conftest import byte_tokenizer, moved, save_dense, write_texts
from encoder_decoders import SENTENCES, nllb_tokenizer, save_tiny
from transformers import AutoConfig

import hf_moe_expand as moe
from hf_moe_expand.analysis.settings import GateSettings
from hf_moe_expand.modeling import auto_class
from matrix.together import refusals

LAYERS = 2
SIZES = {"num_hidden_layers": LAYERS, "max_position_embeddings": 256}
BASES: dict[str, Callable[[Path], Any]] = {
    "llama": lambda folder: save_dense(folder, "llama", **SIZES),
    "gpt2": lambda folder: save_dense(
        folder, "gpt2", n_layer=LAYERS, n_positions=256, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0
    ),
    "olmoe": lambda folder: save_dense(folder, "olmoe", **SIZES, **EXPERTS),
    "m2m_100": lambda folder: save_tiny(
        folder, tokenizer=nllb_tokenizer(CODES), encoder_layers=LAYERS, decoder_layers=LAYERS, decoder_ffn_dim=48
    ),
}
CODES = ["rus_Cyrl", "heb_Hebr"]  # more of the translator's
NEW = ("el", "ru", "he", "ka")  # the language of each expansion, in order
# Each language has bytes of its own; anchors are other ASCII letters than English has here.
ALPHABETS = {"en": "aeiou nt", "el": "αβγδεζη", "ru": "бгджзлф", "he": "אבגדהוז", "ka": "აბგდევზ"}
ANCHORS = ("bcdfgh", "jklmpq", "rsvwxyz", "ABCDEFG", "HIJKLMN", "OPQRSTU", "VWXYZ", "0123456789")
GATE = GateSettings(tokens=400, anchor_tokens=150, unseen_share=0.02)


def lines(letters: str, count: int, seed: int = 0) -> list[str]:
    """Lines of 30 characters: words of these letters."""
    picked = torch.randint(len(letters) + 1, (count, 30), generator=torch.Generator().manual_seed(seed)).tolist()
    return ["".join((letters + " ")[number] for number in row) for row in picked]


@dataclass(frozen=True)
class Part:
    """One feature of a model.

    Attributes:
        base: the dense model.
        plan, make: what `Plan` and `expand_checkpoint` are told.
        then: what is done to the expanded checkpoint: of the form, from a folder into another one.
    """

    base: str | None = None
    plan: Mapping[str, Any] = field(default_factory=dict)
    make: Mapping[str, Any] = field(default_factory=dict)
    then: Callable[["Form", Path, Path], Any] | None = None


PARTS: dict[str, Part] = {
    "gpt2": Part(base="gpt2"),
    "mixture": Part(base="olmoe", make={"expert_kind": "added", "expert_width": 16}),
    "encoder-decoder": Part(base="m2m_100", plan={"encoder_layers": LAYERS}),
    "exclusive": Part(plan={"exclusive": True}),
    "uneven": Part(),
    "classifiers": Part(plan={"classifier_layers": [1]}),
    "conditional": Part(make={"conditional_routing": True}),
    "random": Part(make={"expert_init": "random"}),
    "copies": Part(make={"expert_kind": "ffn"}),  # which experts are by default
    "lora": Part(make={"expert_kind": "lora", "lora_rank": 4, "lora_alpha": 6.0}),
    "added": Part(make={"expert_kind": "added", "expert_width": 16}),
    "adapters": Part(plan={"exclusive": True}, make={"expert_kind": "adapter", "lora_rank": 4, "lora_alpha": 6.0}),
    "tuned": Part(plan={"exclusive": True}),
    "dmoe": Part(plan={"groups": True}),
    "joined": Part(plan={"exclusive": True}, then=lambda form, before, out: form.join(before, out)),
    "grown": Part(then=lambda form, before, out: form.grow(before, out)),
    "gated": Part(then=lambda form, before, out: form.gate(before, out)),
    "expansion-only": Part(),
}
_KINDS = ("copies", "lora", "added", "adapters", "tuned")
_PLANNED = {"encoder-decoder", "uneven", "classifiers", "conditional", "random", "dmoe"}  # a fine-tune has no plan
_MAKES = {"grow": "grown", "join": "joined"}  # operations, and the feature of what they make
# The recommended model, and what else it may be.
RECOMMENDED = ("exclusive", "gated")


def all_forms() -> list[tuple[str, ...]]:
    """The parts of every form: none, each alone, each two of them, and each beside the recommended ones."""
    found = [(), *combinations(PARTS, 1), *combinations(PARTS, 2)]
    found += [tuple(name for name in PARTS if name in (*RECOMMENDED, more)) for more in PARTS]
    apart = [("gpt2", "mixture", "encoder-decoder"), _KINDS]  # a model has one base, and experts of one kind
    return [
        parts
        for parts in dict.fromkeys(found)
        if not any(len({*parts} & {*several}) > 1 for several in apart)
        and ("copies" not in parts or parts == ("mixture", "copies"))
        and not ("tuned" in parts and _PLANNED & {*parts})
    ]


def name_of(parts: tuple[str, ...]) -> str:
    return "+".join(parts) or "plain"


def facts_of(parts: tuple[str, ...]) -> set[str]:
    """The features by which the tables of refusals know a form."""
    facts = {"expanded", *parts}
    facts |= {"exclusive"} if facts & {"adapters", "joined", "tuned"} else set()
    facts |= {"added"} if "mixture" in facts and not facts & {*_KINDS} else set()
    if not facts & {"exclusive", "dmoe"}:
        facts.add("routed")
    if "routed" in facts or ("uneven" in facts and "adapters" not in facts):
        facts.add("several")  # experts of one language, among which a router chooses
    if not facts & {"lora", "added", "adapters", "tuned"}:
        facts.add("copies")
    return facts


def refused(parts: tuple[str, ...], operation: str | None = None) -> list[str]:
    """The sentences of which one refuses an operation on a form, or the form itself; none if nothing does."""
    return [refusals()[pair] for pair in refusing(parts, operation)]


def refusing(parts: tuple[str, ...], operation: str | None = None) -> list[tuple[str, str]]:
    """The entries of the tables that refuse it."""
    facts = facts_of(parts)
    wanted = facts if operation is None else {_MAKES.get(operation, operation)}
    if operation is not None and "grown" in facts:
        facts.discard("random")  # the newest experts are copies
    return [(one, other) for one, other in refusals() if one in facts and other in wanted]


class Form:
    """A form of model, made where it is first asked for.

    Attributes:
        base: the dense checkpoint.
        root: the form's own folder.
        helpers: the processes beside the tests: two `ranks`, and one that loads `alone`.
        kept: what several operations compare with, by its name.
    """

    def __init__(self, parts: tuple[str, ...], root: Path, helpers: Any = None) -> None:
        self.parts, self.facts, self.helpers = parts, facts_of(parts), helpers
        self.root = root / name_of(parts)
        self.root.mkdir(exist_ok=True)
        self.kept: dict[Any, Any] = {}
        backbone = next((PARTS[name].base for name in parts if PARTS[name].base), "llama")
        self.base = root / "bases" / backbone
        if not self.base.exists():
            BASES[backbone](self.base)

    def __contains__(self, fact: str) -> bool:
        return fact in self.facts

    def place(self, name: str) -> Path:
        """A folder that is not there."""
        shutil.rmtree(self.root / name, ignore_errors=True)
        return self.root / name

    # --- making -------------------------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """The experts of an expanded layer."""
        if "dmoe" in self:
            return 2
        count = 2 if "exclusive" in self else 3
        return count + 1 if "uneven" in self and "adapters" not in self else count

    def plan(self, new: str = NEW[0]) -> moe.Plan:
        """The plan of its first expansion."""
        layers = 2 * LAYERS if "encoder-decoder" in self else LAYERS
        counts = [1 if "uneven" in self and layer % 2 == 0 else self.count for layer in range(layers)]
        fields: dict[str, Any] = {"old": ["en"], "new": [new]}
        for name in self.parts:
            fields |= PARTS[name].plan
        if "groups" in fields:
            fields["groups"] = [["en"], [new]]
        return moe.Plan("dmoe" if "groups" in fields else "moe-lpr", counts, **fields)

    @property
    def made(self) -> dict[str, Any]:
        """What `expand_checkpoint` is told."""
        made = {name: value for part in self.parts for name, value in PARTS[part].make.items()}
        return made if made.get("expert_kind") == "added" else {n: v for n, v in made.items() if n != "expert_width"}

    def expand(self, out: Path, new: str = NEW[0], seed: int = 3) -> Path:
        """Its first expansion, or a pack beside it."""
        if "tuned" in self:
            moe.expand_tuned(self.base, {new: self.fine_tune(new, seed)}, out, ["en"])
            return out
        moe.expand_checkpoint(self.base, out, self.plan(new), seed=seed, **self.made)
        return out

    def in_memory(self) -> Any:
        """Its first expansion of the loaded base."""
        if "tuned" in self:
            return moe.expand_tuned(self.copy_of_base(), {NEW[0]: load(self.fine_tune(NEW[0]))}, None, ["en"])
        return moe.expand_model(self.copy_of_base(), self.plan(), seed=3, **self.made)

    def fine_tune(self, new: str, seed: int = 3) -> Path:
        """A fine-tune of its base."""
        out = self.root / f"fine-tune-{new}"
        if not out.exists():
            model, generator = self.copy_of_base(), torch.Generator().manual_seed(seed)
            for weight in model.parameters():
                weight.data += 0.1 * weight.std().clamp(min=0.02) * torch.randn(weight.shape, generator=generator)
            model.save_pretrained(out)
        return out

    def pack(self, new: str, seed: int = 5) -> Path:
        """Another pack of its base, whose experts are no copies."""
        out = self.root / f"pack-{new}"
        if not out.exists():
            self.expand(out, new, seed)
        return out

    def join(self, before: Path, out: Path) -> None:
        """The model with a second pack."""
        moe.join_expansions([f"first={before}", f"second={self.pack(NEW[1])}"], out)

    def growth(self, before: Path, new: str) -> moe.Plan:
        """The plan of a further expansion by one expert in each expanded layer."""
        config = AutoConfig.from_pretrained(before)
        counts = config.num_experts_per_layer
        known = [code for code in NEW if NEW.index(code) < NEW.index(new)]
        return moe.Plan(
            "moe-lpr", [count + (count > 1) for count in counts], old=["en", *known], new=[new], grows_from=counts,
            exclusive=config.exclusive_experts, classifier_layers=config.classifier_layers,
            encoder_layers=LAYERS if "encoder-decoder" in self else 0,
        )  # fmt: skip

    def grow(self, before: Path, out: Path) -> None:
        if "tuned" in self:
            new = NEW[self.expansions - 1]
            moe.expand_tuned(before, {new: self.fine_tune(new)}, out)
            return
        moe.grow_checkpoint(before, out, self.growth(before, NEW[self.expansions - 1]))

    def gate(self, before: Path, out: Path) -> None:
        texts = {code: lines(ALPHABETS[code], 30) for code in self.languages}
        anchors = {f"q{chr(97 + n)}a": lines(letters, 15, n) for n, letters in enumerate(ANCHORS)}
        with patch("hf_moe_expand.analysis.gating.shipped_anchors", lambda leave_out: {}):
            moe.fit_gates(before, out, texts, anchors, GATE)

    @cached_property
    def fresh(self) -> Path:
        """The checkpoint right after it was made."""
        before = self.expand(self.root / "expanded")
        steps = [name for name in ("joined", "grown", "gated") if name in self.parts]
        for number, name in enumerate(steps):
            out = self.root / f"fresh-{number}"
            PARTS[name].then(self, before, out)  # type: ignore[misc]
            before = out
        return before

    @cached_property
    def whole(self) -> Path:
        """The checkpoint after something like training: experts differ, routers decide."""
        out = self.root / "whole"
        moved(load(self.fresh)).save_pretrained(out)
        self.tokenizer.save_pretrained(out)
        return out

    @cached_property
    def folder(self) -> Path:
        """The checkpoint: the same, or what its expansion added."""
        if "expansion-only" not in self.parts:
            return self.whole
        out = self.root / "added"
        moe.save_expansion(self.whole, out, self.base)
        # A folder where a hub's name would stand.
        fields = json.loads((out / "config.json").read_text())
        fields["parts"]["expansion_only"]["base_model"] = str(self.base)
        (out / "config.json").write_text(json.dumps(fields))
        return out

    # --- what it is ---------------------------------------------------------------------------------------------------

    @property
    def joins(self) -> bool:
        """Whether all its expansions are packs, none newer than another: fine-tunes are."""
        return {"tuned", "grown"} <= self.facts or ("joined" in self and "grown" not in self)

    @property
    def expansions(self) -> int:
        return 1 + ("joined" in self) + ("grown" in self)

    @property
    def languages(self) -> list[str]:
        """The base's, and that of each expansion."""
        return ["en", *NEW[: self.expansions]]

    @property
    def is_told(self) -> bool:
        """Whether it can be told a language."""
        return not refused(self.parts, "told")

    @cached_property
    def tokenizer(self) -> Any:
        return nllb_tokenizer(CODES) if "encoder-decoder" in self else byte_tokenizer()

    @cached_property
    def model(self) -> Any:
        """The loaded model, which all operations share: one that changes it takes a copy."""
        return load(self.folder)

    @cached_property
    def dense(self) -> Any:
        """The loaded base."""
        return load(self.base)

    def copy(self) -> Any:
        return copy.deepcopy(self.model)

    def copy_of_base(self) -> Any:
        return copy.deepcopy(self.dense)

    def once(self, name: Any, make: Callable[[], Any]) -> Any:
        """What `make` makes, the first time that it is asked for."""
        if name not in self.kept:
            self.kept[name] = make()
        return self.kept[name]

    def text(self, language: str) -> moe.LanguageText:
        """Text to train on: documents, or sentence pairs with English."""
        file = self.root / f"{language}.jsonl"
        if not file.exists() and "encoder-decoder" in self:
            write_pairs(file, language if language != "en" else "es")
        elif not file.exists():
            write_texts(file, lines(ALPHABETS[language], 12, seed=7))
        return moe.LanguageText(language, str(file))


def load(folder: Path) -> Any:
    """A model in aligned memory: matrix products round otherwise where weights lie unaligned in a mapped file."""
    model = auto_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder, dtype=torch.float32).eval()
    for value in (*model.parameters(), *model.buffers()):
        value.data = value.data.clone()
    return model


def pairs(language: str) -> list[dict[str, str]]:
    """Sentences of English words with those of a language."""
    words = [text.split() for text in SENTENCES["en"]], [text.split() for text in SENTENCES["el"]]
    draw = torch.Generator().manual_seed(len(language))
    found = []
    for number in torch.randint(len(words[0]), (10,), generator=draw).tolist():
        found.append({"en": " ".join(words[0][number]), language: " ".join(words[1][number])})
    return found


def write_pairs(file: Path, language: str) -> None:
    rows = [json.dumps({"translation": row}, ensure_ascii=False) + "\n" for row in pairs(language)]
    file.write_text("".join(rows), "utf-8")

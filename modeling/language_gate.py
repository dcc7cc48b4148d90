"""The language gate: in one layer, once in a pass, it decides which expansion each token's language belongs to.

With the FFN's input x, a row w_c and a bias b_c for each language c, token t is evidence for each later class g, the
languages of expansion g, against class 0, the languages that stay home, in whole 1/1024 nats:

    l_t[g] = logsumexp over c in g (w_c x_t + b_c) - logsumexp over c in 0 (w_c x_t + b_c)
    e_t[g] = round(1024 * (1 - z_t) * bound * tanh(l_t[g] / bound))

with z_t the share of the softmax over all rows that the row of a chat template's own words has (`zxx`, no language; 0
where there is none): they are evidence for no class.

    s_t[g] = sum of e over the last `window` tokens of the text up to t

The token's class is the g with the largest s_t[g], if that is above 0; else 0, home. Whole numbers add up to the same
bits in any order: in one pass, token by token, in chunks, after a crop, in a graph. Padding is no evidence, and a text
begins where position_ids begin anew.

The decision holds for the gate's layer and all later ones. Layers below it run expert 0, but where the user tells the
language. All tokens' evidence lies in one tensor beside a cache's keys and values, as its last layer.

Shape suffixes: B sequences, S tokens of this pass, P tokens of the cache (or for which a static one has room), C
classes, E = C - 1; others as in `routing.py`.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Cache, StaticCache
from transformers.cache_utils import CacheLayerMixin, StaticLayer

from .dispatch import is_traced
from .routing import Scores, TokenClasses

UNIT = 1024  # of evidence in a nat
TEMPLATE = "zxx"  # of no language: the first row, where a chat template's own words have one
_FIELDS = ("layer", "languages", "bound", "window")


@dataclass(frozen=True)
class GateRule:
    """The field `language_gate` of a configuration.

    Args:
        layer: the layer that has the gate.
        languages: the languages that the gate tells apart, by class; class 0 stays home.
        bound: most evidence of one token, in nats.
        window: tokens whose evidence counts.

    Raises:
        ValueError: a value has another type or is out of range, or a language stands twice.
    """

    layer: int
    languages: list[list[str]]
    bound: float = 4.0
    window: int = 64

    def __post_init__(self) -> None:
        numbers = (("layer", self.layer, int), ("window", self.window, int), ("bound", self.bound, int | float))
        for name, value, kind in numbers:
            if isinstance(value, bool) or not isinstance(value, kind):
                raise ValueError(f"language_gate: {name} is {value!r}: must be a number.")
        if self.layer < 0 or self.window < 1 or not 0 < self.bound <= UNIT:
            raise ValueError(
                f"language_gate: layer is {self.layer}, window {self.window} and bound {self.bound:g}: layer must be "
                f"at least 0, window at least 1, and bound above 0 and at most {UNIT} nats."
            )
        codes = [code for of_class in self.languages for code in of_class]
        if len(self.languages) < 2 or not all(self.languages) or len(set(codes)) < len(codes) or not all(codes):
            raise ValueError(
                f"language_gate: languages is {self.languages}: must name the languages of class 0 and of each "
                "expansion, each language once."
            )

    @classmethod
    def of(cls, config: Any) -> "GateRule | None":
        """The rule in a model's configuration; None if it has no gate.

        Raises:
            ValueError: the field has other keys, or a value is wrong.
        """
        settings = getattr(config, "language_gate", None)
        if settings is None:
            return None
        if not isinstance(settings, dict) or set(settings) - set(_FIELDS) or not {"layer", "languages"} <= {*settings}:
            raise ValueError(f"language_gate is {settings!r}: must be an object with {', '.join(_FIELDS)}.")
        return cls(**settings)


class LanguageGate(Scores):
    """Each token's evidence for the later classes, `[T, h] -> [T, E]` whole numbers of 1/1024 nat."""

    def __init__(self, hidden_size: int, rule: GateRule) -> None:
        self.sizes, self.bound = [len(codes) for codes in rule.languages], rule.bound
        self.has_template = rule.languages[0][0] == TEMPLATE
        super().__init__(hidden_size, sum(self.sizes))
        self.bias = nn.Parameter(torch.empty(sum(self.sizes)))

    def forward(self, x_Th: torch.Tensor) -> torch.Tensor:
        return token_evidence(super().forward(x_Th) + self.bias.float(), self.sizes, self.bound, self.has_template)


def token_evidence(logits_TR: torch.Tensor, sizes: Sequence[int], bound: float, has_template: bool) -> torch.Tensor:
    """`e`, `[..., R] -> [..., E]` int32.

    Args:
        sizes: the number of languages of each class, in the order of the rows.
        has_template: whether the first row is that of a chat template's own words.
    """
    home, *classes = (logits.logsumexp(-1) for logits in logits_TR.split(list(sizes), -1))
    evidence_TE = bound * ((torch.stack(classes, -1) - home.unsqueeze(-1)) / bound).tanh()
    if has_template:
        evidence_TE = evidence_TE * (1 - logits_TR.softmax(-1)[..., :1])
    return (UNIT * evidence_TE).round().int()


def window_sums(evidence_BPE: torch.Tensor, counted_BP: torch.Tensor, starts_BP: torch.Tensor, window: int) -> Any:
    """`s`, `[B, P, E]` int64: the sums over the last `window` counted tokens of each token's text.

    Args:
        counted_BP: bool, all tokens but padding, whose evidence is 0.
        starts_BP: bool, the first token of each text.
    """
    number_BP = counted_BP.long().cumsum(1)  # of counted tokens up to each column
    before_BP = torch.where(starts_BP, number_BP - counted_BP.long(), 0).cummax(1).values  # those of earlier texts
    outside_BP = torch.maximum(number_BP - window, before_BP)
    column_BP = torch.searchsorted(number_BP, outside_BP, right=True)  # the columns that hold those
    totals_BPE = F.pad(evidence_BPE.long().cumsum(1), (0, 0, 1, 0))
    return totals_BPE[:, 1:] - totals_BPE.gather(1, column_BP.unsqueeze(-1).expand_as(evidence_BPE))


def classes_of_sums(sums_BSE: torch.Tensor) -> torch.Tensor:
    """`[B, S]`, the class with the largest sum if it is above 0 (of equals the first), else 0."""
    E = sums_BSE.shape[-1]
    best_BS = (sums_BSE * E - torch.arange(E, device=sums_BSE.device)).argmax(-1)
    return torch.where(sums_BSE.amax(-1) > 0, best_BS + 1, 0)


class GateMemory(CacheLayerMixin):
    """The evidence of the tokens in a cache: its last layer, which holds no keys and values.

    A cache passes on to its layers what changes its sequences or tokens, to this one after all others.

    Attributes:
        kept: `[B, P, 2 + E]` int32: whether a token counts, whether it begins a text, and its evidence; None before the
            first pass.
        others: tokens in the cache that the gate has not judged (virtual tokens of prefix tuning), in front of the P.
        rule: the values of the `GateRule` by which they were judged.
        beside: a layer with keys and values, which knows how many tokens the cache holds.
    """

    is_compileable = is_croppable = True
    supports_early_init = False
    kept: torch.Tensor | None = None
    rule: tuple | None = None

    def __init__(self, beside: Any = None) -> None:
        super().__init__()
        self.beside, self.others = beside, 0

    def __len__(self) -> int:
        return 0 if self.kept is None else self.kept.shape[1]

    def _change(self, change: Any) -> None:
        if self.kept is not None:
            self.kept = change(self.kept)

    def reset(self) -> None:
        self.kept, self.others = None, 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._change(lambda kept: kept.index_select(0, beam_idx.to(kept.device)))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._change(lambda kept: kept[indices.to(kept.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change(lambda kept: kept.repeat_interleave(repeats, 0))

    def crop(self, _: int) -> None:  # releases differ in what they are told: tokens to keep, or to remove
        left = max(int(self.get_seq_length()) - self.others, 0)
        self._change(lambda kept: kept[:, :left])

    def with_pass(self, new_BSF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What is kept with a pass's tokens, `[B, P, 2 + E]`, and the columns `[S]` of these; None if they are last."""
        return new_BSF if self.kept is None else torch.cat([self.kept.to(new_BSF.device), new_BSF], 1), None

    # What a cache may ask of any layer: the answers of the layer beside.

    def lazy_initialization(self, *_: Any) -> None: ...

    def prefetch(self) -> None:  # asked by the last layer with keys, it fetches the first one for the next pass
        self.beside.prefetch()

    def update(self, *_: Any, **others: Any) -> Any:
        raise NotImplementedError("This layer of the cache keeps no keys and values.")

    def get_seq_length(self) -> int:
        return self.beside.get_seq_length()

    def get_mask_sizes(self, *queries: Any) -> tuple[int, int]:
        return self.beside.get_mask_sizes(*queries)

    def get_max_length(self) -> int:
        return self.beside.get_max_length()


class StaticGateMemory(GateMemory):
    """`GateMemory` of a static cache: a tensor with all its columns, to which a pass writes, so that a compiled pass
    need not know how many are in use; `beside` is a static layer that keeps all tokens."""

    is_croppable = False  # as the static layers beside it

    def __len__(self) -> int:
        return 0 if self.kept is None else int(self.judged)

    def with_pass(self, new_BSF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        B, S, features = new_BSF.shape
        if self.kept is None:
            self.kept = _in_place(new_BSF.new_zeros(B, self.beside.max_cache_len, features))
            self.judged = _in_place(torch.zeros((), dtype=torch.long, device=new_BSF.device))  # tokens
        columns_S = torch.arange(S, device=new_BSF.device) + self.judged.to(new_BSF.device)
        self.kept.index_copy_(1, columns_S.to(self.kept.device), new_BSF.to(self.kept.device))
        self.judged.add_(S)
        return self.kept.to(new_BSF.device), columns_S


def _in_place(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, which compiled passes will change where it lies, as they do a static cache's keys and values."""
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(tensor)
    return tensor


class GatePass:
    """The texts of one forward pass, and what the gate decides of them.

    Args:
        counted, starts: `[B, S]` bool, all tokens but padding, and the first token of each text.
        memory: the tokens before them, of which this pass changes nothing but in a static cache.
        held: tokens in the cache before this pass; 0 without one.
        message_ends: columns at which the messages of a prompt end, which are judged whole; none by default.
        must_begin: whether the pass must begin its texts, since nothing is known of tokens before.

    Attributes:
        classes: the classes of the pass's tokens, from the gate's layer on; None before it.
    """

    def __init__(
        self, rule: GateRule, counted: torch.Tensor, starts: torch.Tensor, memory: GateMemory | None = None,
        held: int = 0, message_ends: Sequence[int] = (), must_begin: bool = False,
    ) -> None:  # fmt: skip
        self.rule, self.counted, self.starts = rule, counted, starts
        self.memory = GateMemory() if memory is None else memory
        self.held, self.message_ends, self.must_begin = held, message_ends, must_begin
        self.classes: TokenClasses | None = None
        self.kept: torch.Tensor | None = None

    @classmethod
    def of_inputs(cls, rule: GateRule, shape: Sequence[int], device: Any, **others: Any) -> "GatePass":
        """The pass of a model's inputs, of shape `[B, S]`.

        Raises:
            ValueError: the attention mask is not `[B, S]`, and there are no position_ids.
        """
        mask, positions = others.pop("attention_mask", None), others.pop("position_ids", None)
        B, S = shape
        starts = torch.zeros(B, S, dtype=torch.bool, device=device)
        counted = ~starts
        if positions is not None:
            positions = positions[0] if positions.dim() == 3 else positions
            starts = (positions[:, -S:] == 0).expand(B, S).to(device)
        if isinstance(mask, torch.Tensor) and mask.dim() == 2:
            counted = mask[:, -S:].to(device, torch.bool)
        elif mask is not None and positions is None:
            raise ValueError(
                "The language gate does not find padding and the beginnings of texts in this attention_mask: give one "
                "of [batch, sequence], or position_ids."
            )
        return cls(rule, counted, starts, **others)

    def judge(self, evidence_TE: torch.Tensor) -> torch.Tensor:
        """`[B, S]`, the class of each token, from the evidence of the pass's tokens."""
        (B, S), device = self.counted.shape, evidence_TE.device
        marks_BS2 = torch.stack([self.counted, self.starts], -1).to(device)
        evidence_BSE = evidence_TE.view(B, S, -1).masked_fill(~marks_BS2[..., :1], 0)
        self.kept, columns_S = self.memory.with_pass(torch.cat([marks_BS2.int(), evidence_BSE], -1))
        counted_BP, starts_BP = self.kept[..., 0].bool(), self.kept[..., 1].bool()
        sums_BPE = window_sums(self.kept[..., 2:], counted_BP, starts_BP, self.rule.window)
        sums_BSE = sums_BPE[:, -S:] if columns_S is None else sums_BPE.index_select(1, columns_S)
        class_BS = classes_of_sums(sums_BSE)
        if not self.message_ends or self.held >= self.message_ends[-1]:
            return class_BS
        # A message's tokens take the class after its last one, as far as this pass reads it.
        column_S = torch.arange(S, device=device) + self.held
        ends_M = torch.tensor(list(self.message_ends), device=device)
        end_S = ends_M[torch.searchsorted(ends_M, column_S, right=True).clamp(max=len(ends_M) - 1)]
        last_S = torch.where(column_S < ends_M[-1], (end_S - 1 - self.held).clamp(max=S - 1), column_S - self.held)
        return class_BS.index_select(1, last_S)

    def decide(self, class_BS: torch.Tensor) -> TokenClasses:
        """The classes of the pass's tokens, for later layers too. The host reads once which occur, but in a graph.

        Raises:
            ValueError: the pass goes on with a text whose evidence is not at hand.
        """
        present = None
        if not is_traced(class_BS) and not (class_BS.is_cuda and torch.cuda.is_current_stream_capturing()):
            number_C = torch.arange(len(self.rule.languages), device=class_BS.device)
            occurs_BSC = (class_BS.unsqueeze(-1) == number_C) & self.counted.to(class_BS.device).unsqueeze(-1)
            read = [occurs_BSC.flatten(0, -2).any(0), self._begins().to(class_BS.device)]
            *occurs_C, begins = torch.cat(read).tolist()
            if self.must_begin and not begins:
                raise ValueError(
                    "language_gate: the pass goes on with a text (its position_ids do not begin at 0), but the gate "
                    "knows nothing of the tokens before: pass the cache that holds them, or the whole text."
                )
            present = [number for number, occurs in enumerate(occurs_C) if occurs] or [0]
        self.classes = TokenClasses(class_BS.flatten(), present)
        return self.classes

    def _begins(self) -> torch.Tensor:
        """`[1]` bool, whether the first counted token of each sequence begins a text."""
        first_B1 = self.counted.long().argmax(-1, keepdim=True)
        return (self.starts.gather(1, first_B1) | ~self.counted.gather(1, first_B1)).all().unsqueeze(0)

    def remember(self, cache: Cache) -> None:
        """Puts the evidence of this pass, and all before it, beside a cache's keys and values."""
        memory = self.memory
        if _memory(cache) is None:
            own = (layer for layer in cache.layers if hasattr(layer, "get_seq_length"))
            memory.beside = memory.beside or next(own)
            cache.layers.append(memory)
        if self.kept is not None and not isinstance(memory, StaticGateMemory):
            memory.kept = self.kept


def _memory(cache: Any) -> GateMemory | None:
    return next((layer for layer in getattr(cache, "layers", ()) if isinstance(layer, GateMemory)), None)


def _static_layer(cache: Any) -> StaticLayer | None:
    """A layer of a static cache that keeps all tokens, not those of a window alone."""
    static = (layer for layer in getattr(cache, "layers", ()) if isinstance(layer, StaticLayer))
    return next((layer for layer in static if not layer.is_sliding), None)


def can_compile(config: Any) -> bool:
    """Whether a compiled pass with a static cache keeps what a model's gate needs: in a cache that keeps windows alone,
    the evidence grows with every token."""
    try:
        return _static_layer(StaticCache(config=config, max_cache_len=2)) is not None
    except Exception:  # the library makes no static cache for this backbone
        return False


def memory_of(rule: GateRule, cache: Any, virtual: int | None = None) -> tuple[GateMemory, int]:
    """What the gate has kept of a cache's tokens, and how many it holds; 0 in a graph, which cannot read the number of
    a static cache.

    Args:
        virtual: tokens at the beginning of a new cache that are no text.

    Raises:
        ValueError: tokens came into the cache, or left it, without the gate, or another model's gate judged them.
    """
    if isinstance(cache, tuple | list):
        raise ValueError(
            f"language_gate: past_key_values is a {type(cache).__name__}: pass a Cache that a model filled."
        )
    memory = _memory(cache)
    if isinstance(memory, StaticGateMemory) and torch.compiler.is_compiling():
        return memory, 0
    held = 0 if cache is None else int(cache.get_seq_length())
    judged, judge = 0 if memory is None else len(memory), (rule.layer, rule.languages, rule.bound, rule.window)
    if memory is not None and judged:
        if held != judged + memory.others:
            raise ValueError(
                f"The cache holds {held} tokens, but the model's language gate knows {judged + memory.others}: change "
                "a cache by its own methods (crop, reorder_cache, reset), or start with a new one."
            )
        if memory.rule not in (None, judge):
            raise ValueError("Another model's language gate judged the cache's tokens: start with a new cache.")
        return memory, held
    if held not in (0, virtual, 0 if memory is None else memory.others):
        raise ValueError(
            f"The cache holds {held} tokens that the model's language gate has not judged, as one does that was made "
            "of keys and values or filled by another model: keep the cache itself (copy.deepcopy, pickle), or read the "
            "text again. If they are prefix tuning's, call the model in `with model.use_virtual_tokens("
            f"{held}):`."
        )
    if memory is None:
        beside = _static_layer(cache)
        memory = GateMemory() if beside is None else StaticGateMemory(beside)
    memory.others, memory.rule = held, judge
    return memory, held


def pass_of_call(
    rule: GateRule, decoder: Any, args: tuple, kwargs: dict[str, Any], ends: Sequence[int], virtual: int | None = None
) -> GatePass:
    """The pass of a decoder's forward, from its arguments.

    Args:
        ends: see `GatePass`; they count from after virtual tokens.
        virtual: see `memory_of`.

    Raises:
        ValueError: see `GatePass.of_inputs` and `memory_of`; or the pass goes on with a text whose evidence is lost.
    """
    arguments = inspect.signature(decoder.forward).bind_partial(*args).arguments | kwargs if args else kwargs
    inputs = arguments.get("input_ids")
    inputs = arguments["inputs_embeds"] if inputs is None else inputs
    cache, positions = arguments.get("past_key_values"), arguments.get("position_ids")
    memory, held = memory_of(rule, cache, virtual)
    if memory.kept is not None and len(memory.kept) != len(inputs):
        raise ValueError(
            f"The language gate knows {len(memory.kept)} sequences of the cache, but the pass has {len(inputs)}: "
            "change a cache by its own methods (batch_select_indices, reorder_cache), or start with a new one."
        )
    compiling = torch.compiler.is_compiling()  # a compiled pass reads no number of tokens
    if compiling and (memory.kept is not None or inputs.shape[1] == 1):  # and a prompt at a text's beginning alone
        ends = ()
    return GatePass.of_inputs(
        rule, inputs.shape[:2], inputs.device, attention_mask=arguments.get("attention_mask"), position_ids=positions,
        memory=memory, held=0 if compiling else held - memory.others, message_ends=ends,
        must_begin=positions is not None and not compiling and not held,
    )  # fmt: skip


def cache_of_call(args: tuple, kwargs: dict[str, Any], output: Any) -> Cache | None:
    """The cache that a decoder's forward pass has filled; None without one."""
    outputs = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else ()
    caches = (value for value in (*kwargs.values(), *args, *outputs) if isinstance(value, Cache))
    return next(caches, None)

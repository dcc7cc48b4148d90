"""Prefix gates: routing classifiers that judge the text so far instead of one token.

With the classifier's logits c, token t is evidence for each later class g against class 0,

    e_t[g] = bound * tanh((c_t[g] - c_t[0]) / bound),

and the gate's log-odds add it up along the text:

    s_t[g] = decay * s_{t-1}[g] + e_t[g],    s = 0 before a text.

The token's class is the largest of `[0, s_t[1], ..., s_t[C-1]]`, and decides as a classifier's does (LayerMoE Eq. 13).
Padding is no evidence, and a text begins where position_ids begin anew.

The evidence of all tokens stays in a layer of the cache, beside those with keys and values. Each forward pass sums it
up anew, in an order that depends on a token's column alone: so a token's log-odds are the same bits in one pass and
token by token.

Shape suffixes: B sequences, S tokens of this pass, P tokens of the cache (or for which a static one has room), C
classes, E = C - 1; others as in `routing.py`.
"""

import inspect
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from transformers import Cache, StaticCache
from transformers.cache_utils import CacheLayerMixin, StaticLayer

REACHES = ("layer", "later")
# Servers that run a model's code in place of transformers' generate, by the name of their attention.
SERVERS = {"vllm": "vLLM", "sglang": "SGLang"}
_FIELDS = ("decay", "bound", "reach")


@dataclass(frozen=True)
class PrefixRule:
    """How prefix gates judge.

    Args:
        decay: factor of the log-odds from token to token, above 0 and at most 1.
        bound: most evidence of one token, in nats.
        reach: `"layer"`, a gate decides for its own layer; `"later"`, also for the later layers without one.

    Raises:
        ValueError: a value is out of range.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}  # where a plan holds it

    decay: float
    bound: float
    reach: str = "layer"

    def __post_init__(self) -> None:
        numbers = [self.decay, self.bound]
        if any(isinstance(number, bool) or not isinstance(number, int | float) for number in numbers):
            raise ValueError(f"decay is {self.decay!r} and bound {self.bound!r}: must be numbers.")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay is {self.decay:g}: must be above 0 and at most 1.")
        if not 0 < self.bound < float("inf"):
            raise ValueError(f"bound is {self.bound:g}: must be above 0, in nats.")
        if self.reach not in REACHES:
            raise ValueError(f"reach is {self.reach!r}; known: {', '.join(REACHES)}.")

    @classmethod
    def of(cls, config: Any) -> "PrefixRule | None":
        """The rule in a model's configuration; None if its classifiers judge single tokens.

        Raises:
            ValueError: the field `prefix_gate` has other keys, or a value is out of range.
        """
        settings = getattr(config, "prefix_gate", None)
        if settings is None:
            return None
        if not isinstance(settings, dict) or set(settings) - set(_FIELDS):
            raise ValueError(f"prefix_gate is {settings!r}: must be an object with {', '.join(_FIELDS)}.")
        if "decay" not in settings or "bound" not in settings:
            raise ValueError(f"prefix_gate is {settings!r}: decay and bound are missing.")
        try:
            return cls(**settings)
        except ValueError as error:
            raise ValueError(f"prefix_gate: {error}") from None


@dataclass(frozen=True)
class TextMarks:
    """Where the texts of a batch begin, and which of its tokens are text.

    Attributes:
        starts: `[B, S]` bool, the first token of each text.
        counted: `[B, S]` bool, all tokens but padding.
    """

    starts: torch.Tensor
    counted: torch.Tensor

    @classmethod
    def of(
        cls, shape: tuple[int, int], device: Any, attention_mask: Any = None, position_ids: Any = None
    ) -> "TextMarks":
        """The marks of a model's inputs.

        Raises:
            ValueError: the attention mask is not `[B, S]`, and there are no position_ids.
        """
        B, S = shape
        starts = torch.zeros(shape, dtype=torch.bool, device=device)
        counted = ~starts
        if position_ids is not None:
            position_ids = position_ids[0] if position_ids.dim() == 3 else position_ids
            starts = (position_ids[:, -S:] == 0).expand(B, S).to(device)
        if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2:
            counted = attention_mask[:, -S:].to(device, torch.bool)
        elif attention_mask is not None and position_ids is None:
            raise ValueError(
                "Prefix gates do not find padding and the beginnings of texts in this attention_mask: give one of "
                "[batch, sequence], or position_ids."
            )
        return cls(starts, counted)


def bounded_log_odds(logits: torch.Tensor, bound: float) -> torch.Tensor:
    """`bound * tanh((c[g] - c[0]) / bound)`, `[..., C] -> [..., E]`: a token's evidence for each later class."""
    return bound * ((logits[..., 1:] - logits[..., :1]) / bound).tanh()


def running_sums(evidence_BSE: torch.Tensor, keep_BS: torch.Tensor) -> torch.Tensor:
    """`s_t = keep_t * s_{t-1} + e_t`, `[B, S, E]`, in log2(S) passes over the sequence.

    The order of the sums depends on a token's column alone: what follows a token changes no bit of its sum.
    """
    return _sums(evidence_BSE, _products(keep_BS))


def _products(keep_BS: torch.Tensor) -> list[torch.Tensor]:
    """For n = 1, 2, 4... below S, the product of the n factors up to each token from column n on, `[B, S - n, 1]`."""
    found, n, product_BS1 = [], 1, keep_BS[:, 1:].unsqueeze(-1)
    while n < keep_BS.shape[1]:
        found.append(product_BS1)
        product_BS1 = product_BS1[:, n:] * product_BS1[:, :-n]
        n *= 2
    return found


def _sums(s_BSE: torch.Tensor, products: list[torch.Tensor]) -> torch.Tensor:
    """`running_sums` with the `_products` of its factors. After each pass a token has the sum of twice as many."""
    n = 1
    for product_BS1 in products:
        s_BSE = torch.cat([s_BSE[:, :n], s_BSE[:, n:] + product_BS1 * s_BSE[:, :-n]], 1)
        n *= 2
    return s_BSE


def _products_of_last(keep_BS: torch.Tensor) -> list[torch.Tensor]:
    """Those of `_products` that the sum after the last token needs, the last token first: `[B, P / 2, 1]`,
    `[B, P / 4, 1]`... with P the next power of two."""
    found, product_BP1 = [], _from_last(keep_BS.unsqueeze(-1))
    while product_BP1.shape[1] > 1:
        found.append(product_BP1[:, ::2])
        product_BP1 = product_BP1[:, ::2] * product_BP1[:, 1::2]
    return found


def _last_sum(evidence_BSE: torch.Tensor, products: list[torch.Tensor]) -> torch.Tensor:
    """The last of `running_sums`, `[B, 1, E]`: the same sums of the same terms, without those of other tokens."""
    s_BPE = _from_last(evidence_BSE)
    for product_BP1 in products:
        s_BPE = s_BPE[:, ::2] + product_BP1 * s_BPE[:, 1::2]
    return s_BPE


def _from_last(of_tokens_BS: torch.Tensor) -> torch.Tensor:
    """In reverse order, with zeros up to the next power of two."""
    size = 1
    while size < of_tokens_BS.shape[1]:
        size *= 2
    return F.pad(of_tokens_BS.flip(1), (0, 0, 0, size - of_tokens_BS.shape[1]))


class SeenText(CacheLayerMixin):
    """What the prefix gates keep of the tokens in a cache: its last layer, which holds no keys and values.

    A cache passes on to its layers what changes its sequences or tokens, to this one after all others.

    Attributes:
        keep: `[B, P]`; None before the first pass.
        evidence: `[B, P, E]` for each layer with a gate.
        others: tokens in the cache that no gate has judged (virtual tokens of prefix tuning), in front of the P.
        beside: a layer with keys and values, which knows how many tokens the cache holds.
    """

    is_compileable = is_croppable = True
    supports_early_init = False
    keep: torch.Tensor | None
    evidence: dict[int, torch.Tensor]

    def __init__(self, beside: Any = None) -> None:
        super().__init__()
        self.beside, self.others = beside, 0
        self.reset()

    def __len__(self) -> int:
        return 0 if self.keep is None else self.keep.shape[1]

    def _each(self, change: Any) -> None:
        """Applies a function to every tensor; each has one row for each sequence, and one column for each token."""
        if self.keep is not None:
            self.keep = change(self.keep)
            self.evidence = {layer: change(kept_BPE) for layer, kept_BPE in self.evidence.items()}

    def reset(self) -> None:
        self.keep, self.evidence = None, {}

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._each(lambda kept_B: kept_B.index_select(0, beam_idx.to(kept_B.device)))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._each(lambda kept_B: kept_B[indices.to(kept_B.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._each(lambda kept_B: kept_B.repeat_interleave(repeats, 0))

    def crop(self, _: int) -> None:  # releases differ in what they are told: tokens to keep, or to remove
        left = max(int(self.get_seq_length()) - self.others, 0)
        self._each(lambda kept_B: kept_B[:, :left])

    def columns(self, tokens_S: torch.Tensor) -> torch.Tensor | None:
        """The columns `[S]` of a pass's tokens, such as these; None if they follow those that are kept."""
        return None

    def extended(self, kept: torch.Tensor | None, new: torch.Tensor, columns_S: torch.Tensor | None) -> torch.Tensor:
        """What is kept, `[B, P, ...]`, with what is new, `[B, S, ...]`, in its columns."""
        return new if kept is None else torch.cat([kept.to(new.device), new], 1)

    def add(self, tokens: int) -> None:
        """Counts the tokens of a pass."""

    # What a cache may ask of any layer: the answers of the layer beside.

    def lazy_initialization(self, *_: Any) -> None: ...

    def update(self, *_: Any, **others: Any) -> Any:
        raise NotImplementedError("This layer of the cache keeps no keys and values.")

    def get_seq_length(self) -> int:
        return self.beside.get_seq_length()

    def get_mask_sizes(self, *queries: Any) -> tuple[int, int]:
        return self.beside.get_mask_sizes(*queries)

    def get_max_length(self) -> int:
        return self.beside.get_max_length()


class StaticText(SeenText):
    """`SeenText` of a static cache: tensors with all its columns, to which a pass writes, so that a compiled pass need
    not know how many are in use.

    Args:
        beside: a static layer that keeps all tokens.
    """

    is_croppable = False  # as the static layers beside it

    def __init__(self, beside: StaticLayer) -> None:
        super().__init__(beside)
        self.others = int(beside.get_seq_length())

    def __len__(self) -> int:
        return 0 if self.keep is None else int(self.judged)

    def columns(self, tokens_S: torch.Tensor) -> torch.Tensor:
        if self.keep is None:
            self.judged = _in_place(torch.zeros((), dtype=torch.long, device=tokens_S.device))  # tokens
        held = self.beside.get_seq_length()
        held = held.to(tokens_S.device) if isinstance(held, torch.Tensor) else held
        return torch.arange(len(tokens_S), device=tokens_S.device) + (held - self.others)

    def extended(self, kept: torch.Tensor | None, new: torch.Tensor, columns_S: torch.Tensor | None) -> torch.Tensor:
        if kept is None:
            kept = _in_place(new.new_zeros(new.shape[0], self.beside.max_cache_len, *new.shape[2:]))
        kept.index_copy_(1, columns_S.to(kept.device), new.to(kept.device))  # type: ignore[union-attr]
        return kept

    def add(self, tokens: int) -> None:
        self.judged.add_(tokens)


def _in_place(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, which compiled passes will change where it lies, as they do a static cache's keys and values."""
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(tensor)
    return tensor


class RunningText:
    """The texts of one forward pass, for all its prefix gates.

    Args:
        marks: the texts of this pass's tokens.
        seen: the tokens before them, of which this pass changes nothing; none by default. In a static cache it writes
            its own columns at once.
    """

    def __init__(self, rule: PrefixRule, marks: TextMarks, seen: SeenText | None = None) -> None:
        self.rule, self.marks, self.seen = rule, marks, SeenText() if seen is None else seen
        # The factor of the log-odds before each token: 0 where a text begins, 1 at padding.
        new_BS = torch.where(marks.counted, rule.decay, 1.0).masked_fill(marks.starts, 0)
        self.padding_BS1 = ~marks.counted.unsqueeze(-1)
        self.columns_S = self.seen.columns(new_BS[0])
        self.keep = self.seen.extended(self.seen.keep, new_BS, self.columns_S)
        self.evidence: dict[int, torch.Tensor] = {}
        self.products: list[torch.Tensor] | None = None  # all gates' alike
        self.log_odds_TC: torch.Tensor | None = None  # of the last gate, where it decides for later layers too

    def note(self, layer: int, logits_TC: torch.Tensor) -> torch.Tensor:
        """Keeps the evidence of a layer's gate, from the tokens' own logits; returns all of the text's, `[B, P, E]`."""
        B, S = self.marks.counted.shape
        own_BSE = bounded_log_odds(logits_TC.view(B, S, -1), self.rule.bound)
        own_BSE = own_BSE.masked_fill(self.padding_BS1.to(own_BSE.device), 0)
        self.evidence[layer] = self.seen.extended(self.seen.evidence.get(layer), own_BSE, self.columns_S)
        return self.evidence[layer]

    def judge(self, layer: int, logits_TC: torch.Tensor) -> torch.Tensor:
        """`[T, C]`, the log-odds of a layer's gate after each token of this pass, from the tokens' own logits."""
        S, all_BPE = self.marks.counted.shape[1], self.note(layer, logits_TC)
        is_last = S == 1 and self.columns_S is None
        if self.products is None:
            self.products = _products_of_last(self.keep) if is_last else _products(self.keep)
        products = [product.to(all_BPE.device) for product in self.products]
        if is_last:
            sums_BSE = _last_sum(all_BPE, products)
        elif self.columns_S is None:
            sums_BSE = _sums(all_BPE, products)[:, -S:]
        else:
            sums_BSE = _sums(all_BPE, products).index_select(1, self.columns_S.to(all_BPE.device))
        found_TC = F.pad(sums_BSE, (1, 0)).flatten(0, 1)
        self.log_odds_TC = found_TC if self.rule.reach == "later" else None
        return found_TC

    def remember(self, cache: Cache) -> None:
        """Puts the evidence of this pass, and all before it, beside a cache's keys and values."""
        kept, is_static = _kept(cache), isinstance(self.seen, StaticText)
        if kept is None:
            beside = next(layer for layer in cache.layers if hasattr(layer, "get_seq_length"))
            kept = self.seen if is_static else SeenText(beside)
            cache.layers.append(kept)
        if not is_static and not len(self.seen):
            kept.others = int(cache.get_seq_length()) - self.keep.shape[1]
        kept.keep, kept.evidence = self.keep, self.evidence
        kept.add(self.marks.counted.shape[1])


def _kept(cache: Any) -> SeenText | None:
    return next((layer for layer in getattr(cache, "layers", ()) if isinstance(layer, SeenText)), None)


def _static_layer(cache: Any) -> StaticLayer | None:
    """A layer of a static cache that keeps all tokens, not those of a window alone."""
    static = (layer for layer in getattr(cache, "layers", ()) if isinstance(layer, StaticLayer))
    return next((layer for layer in static if not layer.is_sliding), None)


def can_compile(config: Any) -> bool:
    """Whether a compiled pass with a static cache keeps what a model's prefix gates need: in a cache that keeps windows
    alone, the evidence grows with every token."""
    try:
        return _static_layer(StaticCache(config=config, max_cache_len=2)) is not None
    except Exception:  # the library makes no static cache for this backbone
        return False


def text_seen(cache: Any) -> SeenText:
    """What the gates have kept of a cache's tokens.

    Raises:
        ValueError: tokens came into the cache, or left it, without the gates.
    """
    seen = _kept(cache)
    if isinstance(seen, StaticText) and (torch.compiler.is_compiling() or not len(seen)):
        return seen  # no graph can read how many tokens there are
    if seen is None or not len(seen):
        beside = _static_layer(cache)
        return SeenText() if beside is None else StaticText(beside)
    held = int(cache.get_seq_length())
    if held != len(seen) + seen.others:
        raise ValueError(
            f"The cache holds {held} tokens, but the model's prefix gates know {len(seen) + seen.others}: change a "
            "cache by its own methods (crop, reorder_cache, reset), or start with a new one."
        )
    return seen


def check_runner(config: Any) -> None:
    """Refuses a server whose own cache keeps no evidence: vLLM, SGLang, and the library's continuous batching.

    Raises:
        ValueError: the attention is such a server's.
    """
    name = str(getattr(config, "_attn_implementation", None) or "")
    if name in SERVERS or name.startswith("paged"):
        raise ValueError(
            f"prefix_gate: these gates add up evidence along a text, which {name} attention does not keep beside its "
            "cache, so that tokens would go astray. Fit gates that judge each token by itself (`hf-moe-expand gates "
            "--state-free`), or serve the model with transformers' generate."
        )


def _check_start(marks: TextMarks, position_ids: Any, cache: Any) -> None:
    """Refuses a pass that goes on with a text whose evidence is not at hand."""
    if position_ids is None or torch.compiler.is_compiling() or (cache is not None and int(cache.get_seq_length())):
        return
    if marks.counted.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    first_B1 = marks.counted.long().argmax(-1, keepdim=True)
    begins_B1 = marks.starts.gather(1, first_B1) | ~marks.counted.gather(1, first_B1)
    if not bool(begins_B1.all()):
        raise ValueError(
            "prefix_gate: the pass goes on with a text (its position_ids do not begin at 0), but its gates know "
            "nothing of the tokens before: pass the cache that holds them, or the whole text."
        )


def texts_of_call(rule: PrefixRule, decoder: Any, args: tuple, kwargs: dict[str, Any]) -> RunningText:
    """The texts of a decoder's forward pass, from its arguments.

    Raises:
        ValueError: see `TextMarks.of` and `text_seen`.
    """
    arguments = inspect.signature(decoder.forward).bind_partial(*args).arguments | kwargs if args else kwargs
    inputs = arguments.get("input_ids")
    inputs = arguments["inputs_embeds"] if inputs is None else inputs
    marks = TextMarks.of(
        tuple(inputs.shape[:2]), inputs.device, arguments.get("attention_mask"), arguments.get("position_ids")
    )
    cache = arguments.get("past_key_values")
    _check_start(marks, arguments.get("position_ids"), cache)
    return RunningText(rule, marks, text_seen(cache))


def cache_of_call(args: tuple, kwargs: dict[str, Any], output: Any) -> Cache | None:
    """The cache that a decoder's forward pass has filled; None without one."""
    outputs = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else ()
    caches = (value for value in (*kwargs.values(), *args, *outputs) if isinstance(value, Cache))
    return next(caches, None)

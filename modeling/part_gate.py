"""A model with a language gate: it judges texts before it reads them, and the answers that it writes.

Shape suffixes as in `language_gate.py`.
"""

import inspect
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from transformers.core_model_loading import WeightRenaming
from transformers.integrations import is_fsdp_managed_module

from .backbone import decoder_ffns
from .dispatch import is_traced
from .language_gate import GateRule, LanguageGate, classes_of_sums, counted_tokens, last_sums, text_ends, text_numbers
from .part import BasePart
from .routing import TokenClasses
from .routing_control import RoutingControl, RoutingRequest, RowClasses, check_count, inputs_of

_ONE_BY_ONE = threading.Lock()  # the compiler's stance is that of all threads


class _ReadError(Exception):
    """Ends a pass at the gate."""


def catch(control: RoutingControl, gate: LanguageGate, ffn: Any, args: tuple) -> None:
    """Before the FFN of the gate's layer: in a pass that judges, the evidence `[T, E]` of its tokens."""
    reading = control.request.reading
    if reading is not None:
        reading.evidence = gate(args[0].reshape(-1, args[0].shape[-1]))
        if reading.ends:
            raise _ReadError


def is_shared(decoder: Any) -> bool:
    """Whether processes share a model's weights and gather them in hooks, which then must all run."""
    of_several = (hasattr(weight, "ds_id") or hasattr(weight, "placements") for weight in decoder.parameters())
    return is_fsdp_managed_module(decoder) or any(of_several)


@torch.no_grad()
def sums_of(
    control: RoutingControl, rule: GateRule, model: Any, inputs: torch.Tensor, texts_BS: torch.Tensor
) -> torch.Tensor:
    """`s` of each text, `[M, E]`, by one pass up to the gate's layer of the decoder, or of the whole model where
    processes share its weights and no pass of it goes on; see `text_numbers` and `text_ends`."""
    begin = None if rule.begin is None else torch.tensor(rule.begin, device=inputs.device)
    if begin is not None and inputs.ndim == 3:
        begin = model.get_input_embeddings()(begin)
    rows, lengths_M = text_ends(inputs, texts_BS, begin)
    first, column_L = int(begin is not None), torch.arange(rows.shape[1], device=rows.device)
    mask_ML = (column_L < lengths_M.unsqueeze(-1) + first) | (column_L == 0)
    given: dict[str, Any] = {"inputs_embeds" if rows.ndim == 3 else "input_ids": rows, "attention_mask": mask_ML.long()}
    reading = SimpleNamespace(ends=not is_shared(model), evidence=None)
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        given["logits_to_keep"] = 1
    alone = control.asking(**vars(RoutingRequest(expert=0, reading=reading)))
    with _ONE_BY_ONE, alone, torch.compiler.set_stance("force_eager"), suppress(_ReadError):
        model(**given, use_cache=False)
    evidence_MLE = reading.evidence.view(*rows.shape[:2], -1)[:, first:]
    return last_sums(evidence_MLE, lengths_M.to(evidence_MLE.device), rule.window).to(inputs.device)


@torch.no_grad()
def inside(control: RoutingControl, model: Any, decoder: Any, device: Any, work: Callable[[], torch.Tensor]) -> Any:
    """What `work` makes in a pass of the whole model: where processes share its weights, there alone each of them has
    the embeddings'."""
    found: list[torch.Tensor] = []

    def run(*_: Any) -> None:
        handle.remove()  # `work` runs the decoder too
        found.append(work())

    with decoder.register_forward_pre_hook(run) as handle, control.asking(**vars(RoutingRequest(expert=0))):
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device), use_cache=False)
    return found[0]


def begin_pass(control: RoutingControl, rule: GateRule, decoder: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """Before a decoder runs: judges the texts whose language nobody tells, but in training."""
    asked, control.own.judged = control.request, None
    is_told = asked.classes is not None and asked.classes.complete
    if is_told or decoder.training or asked.as_in_training or asked.expert is not None or asked.expansion == 0:
        return
    control.own.judged = _judge_call(control, rule, decoder, args, kwargs)


def end_pass(control: RoutingControl, *_: Any) -> None:
    if not getattr(control.own, "passes", 0):  # else it is of a larger pass
        control.own.judged = None


def is_filled(cache: Any) -> bool:
    """Whether a cache, or a tuple of keys and values in place of one, holds tokens."""
    return cache is not None and (len(cache) if isinstance(cache, tuple | list) else int(cache.get_seq_length())) > 0


@torch.compiler.disable
def _judge_call(control: RoutingControl, rule: GateRule, decoder: Any, args: tuple, kwargs: Any) -> TokenClasses:
    """The classes of a call's tokens; raises ValueError where it cannot be judged."""
    arguments = inspect.signature(decoder.forward).bind_partial(*args).arguments | kwargs if args else kwargs
    inputs = arguments.get("input_ids")
    inputs = (arguments["inputs_embeds"] if inputs is None else inputs).detach()
    if is_filled(arguments.get("past_key_values")) or is_traced(inputs):
        what = "a graph" if is_traced(inputs) else "a pass on a filled cache"
        raise ValueError(f"language_gate: {what} judges no text: give languages=, or `with model.judged(input_ids):`.")
    positions, mask = arguments.get("position_ids"), arguments.get("attention_mask")
    if positions is not None:
        positions = (positions[0] if positions.ndim == 3 else positions)[:, -inputs.shape[1] :]
        positions = positions.expand(inputs.shape[:2]).to(inputs.device)
    is_plain = isinstance(mask, torch.Tensor) and mask.ndim == 2
    if mask is not None and not is_plain and positions is None:
        raise ValueError("language_gate: attention_mask must be [batch, sequence], or stand beside position_ids.")
    counted_BS = counted_in(decoder, inputs, mask if is_plain else None, getattr(decoder.config, "pad_token_id", None))
    texts_BS = text_numbers(counted_BS, positions)
    class_M = classes_of_sums(sums_of(control, rule, decoder, inputs, texts_BS))
    present = sorted(set(class_M.tolist()))
    # Virtual tokens, and padding, have the class of the text that follows in their row, or of its last one.
    following_BS = texts_BS.masked_fill(texts_BS < 0, len(class_M)).flip(1).cummin(1).values.flip(1)
    texts_BS = torch.minimum(following_BS, texts_BS.amax(1, keepdim=True))
    class_BS = torch.where(texts_BS < 0, present[0], class_M[texts_BS.clamp(min=0)])
    return TokenClasses(class_BS.flatten(), present)


def counted_in(decoder: Any, inputs: torch.Tensor, mask: torch.Tensor | None, pad: int | None) -> torch.Tensor:
    """`counted_tokens`, less embeddings that are no token's, as PEFT's virtual ones are, beside some that are."""
    counted_BS = counted_tokens(inputs, mask, pad)
    if inputs.ndim == 2:
        return counted_BS
    embeddings, n = decoder.get_input_embeddings(), 8 // inputs.element_size()

    def keys(rows: torch.Tensor) -> torch.Tensor:
        return rows.detach()[..., :n].contiguous().view(torch.int64).flatten()

    ids_V = torch.arange(decoder.config.vocab_size, device=inputs.device)
    with torch.no_grad():
        known_V = torch.cat([keys(embeddings(part).to(inputs.dtype)) for part in ids_V.split(8192)])
    is_token_BS = torch.isin(keys(inputs), known_V.to(inputs.device)).view(inputs.shape[:2])
    return counted_BS & is_token_BS if (counted_BS & is_token_BS).any() else counted_BS


@dataclass
class Answers:
    """The classes of the rows of one call of `generate`: the prompts' until the answers' own tokens say otherwise."""

    rule: GateRule
    judge: Callable[[torch.Tensor], torch.Tensor]  # the sums [R, E] of answers [R, S]
    prompts: RowClasses  # the class of each prompt
    told: list[bool]  # whether each one's language is told, and holds
    start: int  # tokens of a row before its answer
    moves: bool  # whether a row may go on with another one's answer, as beams do
    classes: dict[tuple, int] = field(default_factory=dict)  # by the prompt's number, and the answer up to a mark

    def rows(self, ids_RS: torch.Tensor) -> RowClasses | None:
        """The classes of the rows before the model reads the last token of these; None where they stay."""
        count = max(0, ids_RS.shape[1] - self.start)
        mark = count // 64 * 64 or count // 32 * 32 or count // 16 * 16  # 16, 32, 64, and every 64 more
        if not mark or (count > mark and not self.moves):
            return None
        before = mark - 64 if mark > 64 else mark // 2
        beams, answers_RS = len(ids_RS) // len(self.told), ids_RS[:, self.start : self.start + mark]
        keys = [(row // beams, *answer) for row, answer in enumerate(answers_RS.tolist())]
        unknown = {key: row for row, key in enumerate(keys) if key not in self.classes and not self.told[key[0]]}
        if unknown:
            had = [self._class(key[: before + 1]) for key in unknown]
            sums_RE = self.judge(answers_RS[list(unknown.values())])
            had_R = torch.tensor(had, device=sums_RE.device)
            now_R = classes_of_sums(sums_RE, had_R, self.rule.home, self.rule.leave)
            self.classes |= zip(unknown, now_R.tolist(), strict=True)
        return RowClasses.of([self._class(key) for key in keys], ids_RS.device)

    def _class(self, key: tuple) -> int:
        return self.classes.get(key, self.prompts.numbers[key[0]])  # type: ignore[return-value, arg-type]


def _with_answers(prepare: Callable) -> Callable:
    """A backbone's `prepare_inputs_for_generation`, before which the answers so far are judged."""

    @wraps(prepare)
    def prepare_with_answers(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        answers = self.routing_control.request.answers
        if answers is not None and (rows := answers.rows(input_ids)) is not None:
            self.routing_control.change(classes=rows)
        return prepare(self, input_ids, *args, **kwargs)

    return prepare_with_answers


class GatedModel:
    """A model with a gate."""

    config: Any
    device: Any
    training: bool
    routing_control: RoutingControl
    _gate_places: tuple[str, str, str]  # the decoder's name, the layer's and its FFN's

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        dense: Any = getattr(cls, "_dense_class", None)
        if hasattr(dense, "prepare_inputs_for_generation"):  # a model without a head generates nothing
            cls.prepare_inputs_for_generation = _with_answers(dense.prepare_inputs_for_generation)  # type: ignore[attr-defined]

    def post_init(self) -> None:
        rule, ffns = self._rule, decoder_ffns(self)  # type: ignore[arg-type]
        place = ffns[rule.layer].place
        self._gate_places = ffns[0].place.partition(".0.")[0].rpartition(".")[0], place.rpartition(".")[0], place
        super().post_init()  # type: ignore[misc]
        # On the module that owns the layers: it always runs, also for heads of other libraries.
        decoder = self._gate_module(0)
        decoder.register_forward_pre_hook(partial(begin_pass, self.routing_control, rule), with_kwargs=True)
        decoder.register_forward_hook(partial(end_pass, self.routing_control), with_kwargs=True, always_call=True)

    def _attach_parts(self) -> None:
        super()._attach_parts()  # type: ignore[misc]
        layer, ffn = self._gate_module(1), self._gate_module(2)
        if not hasattr(layer, "language_gate"):  # the last of the layer's modules, whose order optimizers have saved
            layer.language_gate = LanguageGate(self.config.hidden_size, self._rule)
        if not hasattr(ffn, "shows_evidence"):
            ffn.shows_evidence = True
            ffn.register_forward_pre_hook(partial(catch, self.routing_control, self.language_gate))
        used = getattr(self, "_weight_conversions", None) or []
        if any("language_gate" in source for rule in used for source in rule.source_patterns):  # saved by today's names
            self._weight_conversions = [rule for rule in used if "language_gate" not in rule.source_patterns[0]]

    def _rules(self) -> list:
        _, before, place = self._gate_places  # earlier versions kept it inside a layer's block
        old = (re.escape(f"{block}.language_gate") for block in (place, f"{before}.adapters"))
        return [*(WeightRenaming(name, f"{before}.language_gate") for name in old), *super()._rules()]  # type: ignore[misc]

    @property
    def _rule(self) -> Any:
        return GateRule.of(self.config)

    def _gate_module(self, place: int) -> Any:
        return self.get_submodule(self._gate_places[place])  # type: ignore[attr-defined]

    @property
    def language_gate(self) -> LanguageGate:
        """The gate."""
        return self._gate_module(1).language_gate

    @contextmanager
    def judged(self, input_ids: Any = None, attention_mask: Any = None, inputs_embeds: Any = None) -> Iterator[None]:
        """Inside, the language of each sequence is known, as with `use_languages`: the one that `judge` finds in these
        texts. For a loop of one's own over a cache, and for caches that others fill (PEFT's prefix tuning)."""
        rows = self.judge(input_ids, attention_mask, inputs_embeds).tolist()
        with self.routing_control.asking(classes=RowClasses.of(rows, self.device), sequences=len(rows), answers=None):
            yield

    def judge(self, input_ids: Any = None, attention_mask: Any = None, inputs_embeds: Any = None) -> torch.Tensor:
        """The class of each row's text, `[B]`: 0 stays home, g takes expansion g's experts. Rows are ids `[B, S]` or
        embeddings `[B, S, h]`. Without a mask `pad` at either end, and a run of one token at the end, are padding.

        Raises:
            ValueError: the model is in training mode.
        """
        return classes_of_sums(self._sums(input_ids, attention_mask, inputs_embeds))

    def _sums(self, input_ids: Any, attention_mask: Any = None, inputs_embeds: Any = None, pad: Any = None) -> Any:
        """The evidence of each row, `[B, E]`; see `judge`."""
        if self.training:
            raise ValueError("judge: call model.eval() first.")
        decoder, inputs = self._gate_module(0), input_ids if inputs_embeds is None else inputs_embeds
        pad = getattr(decoder.config, "pad_token_id", None) if pad is None else pad

        def work(model: Any = decoder) -> torch.Tensor:
            counted_BS = counted_in(decoder, inputs, attention_mask, pad)
            # A row with padding alone is an empty text of its own.
            texts_BS = torch.arange(len(inputs), device=counted_BS.device).unsqueeze(-1).masked_fill(~counted_BS, -1)
            return sums_of(self.routing_control, self._rule, model, inputs, texts_BS)

        if not is_shared(self):
            sums_ME = work()
        elif inputs.ndim == 2:
            sums_ME = work(self)
        else:
            sums_ME = inside(self.routing_control, self, decoder, inputs.device, work)
        return torch.nn.functional.pad(sums_ME, (0, 0, 0, len(inputs) - len(sums_ME)))

    def generate(
        self, inputs: Any = None, generation_config: Any = None, *args: Any, languages: Any = None,
        judge: bool | torch.Tensor = True, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """As the backbone's `generate`. Each prompt is judged unless its language is told (see `use_languages`), and so
        are the answer's own tokens when there are 16, 32, 64 and every 64 more of them. With drafts (an assistant,
        prompt lookup), and where processes generate in step (`synced_gpus`), the prompt's class holds to the end.

        Args:
            judge: False leaves sequences home whose language is not told. A tensor `[B, S]` of ids is judged in place
                of the prompts (a chat's newest message alone).

        Raises:
            ValueError: nobody tells the language of texts of which a cache holds a part.
        """
        if languages is not None:
            with self.use_languages(languages):  # type: ignore[attr-defined]
                return self.generate(inputs, generation_config, *args, judge=judge, **kwargs)
        control = self.routing_control
        check_count(control, inputs, kwargs)
        changes: dict[str, Any] = {"sequences": None}  # each sequence has beams
        if control.request.expert is None:
            changes |= self._told(inputs, {"generation_config": generation_config, **kwargs}, judge)
        with control.asking(**changes):
            made = super().generate(inputs, generation_config, *args, **kwargs)  # type: ignore[misc]
        if getattr(generation_config, "is_assistant", False) and changes.get("classes") is not None:
            control.notes[made.past_key_values] = changes["classes"]
        return made

    def _told(self, inputs: Any, given: dict[str, Any], judge: Any) -> dict[str, Any]:
        """Changes of the request for a call of `generate`: the class of each sequence, told or judged, and what judges
        its answer."""
        control, cache = self.routing_control, given.get("past_key_values")
        rows, prompts = control.request.classes, inputs_of(inputs, given)
        if rows is not None and rows.complete:
            return {}
        if self.training:
            warnings.warn("generate: in training mode nothing is judged: call model.eval() first.", stacklevel=3)
            return {}
        is_assistant = getattr(given["generation_config"], "is_assistant", False)
        if is_filled(cache) and judge is not False:
            rows = control.notes.get(cache) if is_assistant else None
            if rows is None:
                raise ValueError(
                    "generate: nobody tells the language of the texts in past_key_values: give languages=, or call it "
                    "in `with model.judged(input_ids):`."
                )
            return {"classes": rows}
        count = 1 if prompts is None else len(prompts)
        told = list(rows.numbers) if rows is not None else [None] * count
        told = told * (count // len(told))  # one code may speak of all
        judged = self._judged(prompts, given, judge, count)
        numbers = [mine if said is None else said for said, mine in zip(told, judged, strict=True)]
        changes: dict[str, Any] = {"classes": RowClasses.of(numbers, self.device)}
        settings = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")
        drafts = given.get("assistant_model") is not None or any(self._setting_of(name, given) for name in settings)
        in_step = given.get("synced_gpus")  # then no process may run a pass alone
        if judge is False or is_assistant or drafts or (is_shared(self) if in_step is None else in_step):
            return changes
        ids = given.get("input_ids", inputs)
        # Without a prompt, the id that begins a text.
        start = ids.shape[1] if ids is not None else int(given.get("inputs_embeds") is None)
        moves = (self._setting_of("num_beams", given) or 1) > 1
        is_told = [said is not None for said in told]
        return changes | {"answers": Answers(self._rule, self._sums, changes["classes"], is_told, start, moves)}

    def _judged(self, prompts: Any, given: dict[str, Any], judge: Any, count: int) -> list[int]:
        """The judged class of each prompt of a call of `generate`."""
        if isinstance(judge, torch.Tensor):
            judged = self.judge(judge if prompts is None else judge.to(prompts.device)).tolist()
            if len(judged) != count:
                raise ValueError(f"judge has {len(judged)} texts, but there are {count} prompts: give one for each.")
            return judged
        if judge is False or prompts is None or not prompts.shape[1]:
            return [0] * count
        mask = given.get("attention_mask")
        mask = mask if isinstance(mask, torch.Tensor) and mask.ndim == 2 else None
        return classes_of_sums(self._sums(prompts, mask, pad=self._setting_of("pad_token_id", given))).tolist()

    def _setting_of(self, name: str, arguments: dict[str, Any]) -> Any:
        """A setting of a call of `generate`, read as the library does: the argument, or else the given configuration's,
        or else the model's own."""
        if name in arguments:
            return arguments[name]
        of_call = getattr(arguments.get("generation_config"), name, None)
        return getattr(self.generation_config, name, None) if of_call is None else of_call  # type: ignore[attr-defined]


class Part(BasePart):
    """`config.parts["gate"]` has the fields of a `GateRule`."""

    name = "gate"
    flat: ClassVar = {"language_gate": None}
    model_class = GatedModel
    judges = True
    not_beside: ClassVar = {"dmoe": "a DMoE keeps no language of its base, so that a gate has nothing to send home"}
    not_served = (
        "language_gate: the gate judges whole texts, and {server} reads parts of several in one pass. Write a dense "
        "model of one language (`hf-moe-expand export --language`), or serve the model with transformers' generate."
    )
    not_batched = not_served.format(server="continuous batching")

    @classmethod
    def read(cls, fields: dict[str, Any], config: Any) -> Any:
        if fields.get("prefix_gate") is not None or fields.get("gate_languages") is not None:
            raise ValueError(
                "prefix_gate: the checkpoint has gates in all layers, of an earlier version: fit the one that takes "
                "their place (`hf-moe-expand gates MODEL OUT --data LANGUAGE=FILE`)."
            )
        if fields.get("vocabularies") is not None:
            raise ValueError("vocabularies: languages have tokens of their own, of an earlier version: expand again.")
        return super().read(fields, config)

    def check(self) -> None:
        rule: Any = GateRule.of(self.config)
        layers, classes = len(self.config.num_experts_per_layer), len(self.config.counts_of_expansions) + 1
        if self.config.classifier_layers:
            raise ValueError("language_gate decides for all layers: leave classifier_layers out.")
        if rule.layer >= layers:
            raise ValueError(f"language_gate: layer is {rule.layer}, but the layers are 0 to {layers - 1}.")
        if len(rule.languages) != classes:  # the base's, and each expansion's
            raise ValueError(
                f"language_gate: languages has {len(rule.languages)} classes, but the model has {classes}."
            )

    def classes(self) -> dict[str, int]:
        return {code: number for number, codes in enumerate(self.settings["languages"]) for code in codes}

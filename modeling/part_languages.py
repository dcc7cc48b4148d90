"""Languages as modules of their own: for the texts of a class, modules of the base have others in their place, whole
copies or low-rank updates, in the layers (any map, FFN, norm, block) and outside them (embeddings, last norm, head).
"""

import copy
import re
from functools import partial
from itertools import pairwise
from math import isfinite
from typing import Any, ClassVar

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from .backbone import decoder_ffns
from .language_modules import Choosing, LayerModules, OuterModules, own_name
from .part import BasePart
from .routing_control import RoutingControl
from .updates import LoraUpdate


class ModelOfLanguages:
    """A model whose languages have modules of their own."""

    config: Any
    routing_control: RoutingControl

    @property
    def _entries(self) -> list[dict]:
        return self.config.parts["languages"]

    def _holders(self) -> dict[str, Choosing]:
        """What chooses among the modules, by name, and the name of the module beside which it stands."""
        return {name: module for name, module in self.named_modules() if isinstance(module, Choosing)}  # type: ignore[attr-defined]

    def generate(
        self, inputs: Any = None, generation_config: Any = None, *args: Any, languages: Any = None, **kwargs: Any
    ) -> Any:
        """As the backbone's `generate`. An answer ends at its language's own end token, where the fine-tune that the
        language came from has another one, and nothing else is given."""
        if languages is not None:
            with self.use_languages(languages):  # type: ignore[attr-defined]
                return self.generate(inputs, generation_config, *args, **kwargs)
        rows, config = self.routing_control.request.classes, copy.deepcopy(self.generation_config)  # type: ignore[attr-defined]
        own = [entry.get("generation", {}).get("eos_token_id") for entry in self._entries]
        if rows is not None and any(own) and generation_config is None and "eos_token_id" not in kwargs:
            ends = [_listed(config.eos_token_id), *(_listed(one or config.eos_token_id) for one in own)]
            here = [{*ends[number or 0]} for number in {*rows.numbers}]
            config.pad_token_id = config.pad_token_id if config.pad_token_id is not None else next(iter(ends[0]), None)
            config.eos_token_id = sorted(set.intersection(*here)) or None
            if len(here) > 1:
                stops = [*(kwargs.pop("stopping_criteria", None) or []), _Ends(self.routing_control, ends)]
                kwargs["stopping_criteria"] = StoppingCriteriaList(stops)
            generation_config = config
        return super().generate(inputs, generation_config, *args, **kwargs)  # type: ignore[misc]

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """As the backbone's; refused where languages have embeddings or heads of their own, which keep their size."""
        of_all = any(entry.get("outside") or entry.get("head") for entry in self._entries)
        if of_all and new_num_tokens not in (None, self.get_input_embeddings().weight.shape[0]):  # type: ignore[attr-defined]
            raise ValueError(
                "resize_token_embeddings: languages have embeddings or heads of their own: resize the base."
            )
        return super().resize_token_embeddings(new_num_tokens, *args, **kwargs)  # type: ignore[misc]

    def initialize_weights(self) -> None:
        super().initialize_weights()  # type: ignore[misc]
        self.share_buffers()

    def share_buffers(self) -> None:
        """Gives whole copies the buffers that no checkpoint holds: some backbones compute those of their own modules
        alone."""
        for name, holder in self._holders().items():
            holder.share_buffers(self.get_submodule(name.rpartition(".")[0]))  # type: ignore[attr-defined]

    def _attach_parts(self) -> None:
        super()._attach_parts()  # type: ignore[misc]
        model: Any = self
        if "_is_attached" in vars(model):
            return
        model._is_attached = True
        place, control = decoder_of(model), self.routing_control
        for owner, field in ((model.get_submodule(place), "outside"), (model, "head")):
            owner.register_forward_pre_hook(partial(_begin, control))
            owner.register_forward_hook(partial(_end, control), always_call=True)
            maps = [entry.get(field) or {} for entry in self._entries]
            if any(maps) and (field == "outside" or model.get_output_embeddings() is not None):
                owner.adapters = OuterModules(owner, maps, control, field == "head")
                if field == "head":
                    self._tie(owner.adapters, place)
        for name, holder in self._holders().items():
            holder.attach(model.get_submodule(name.rpartition(".")[0]))

    def _tie(self, owner: OuterModules, decoder: str) -> None:
        """Ties the classes' own heads to their own embeddings, as the base's are tied."""
        ties: dict[str, str] = dict(getattr(self, "_tied_weights_keys", None) or {})
        for target, source in [*ties.items()]:
            head, _, kind = target.rpartition(".")
            embedding = source.rpartition(".")[0].removeprefix(f"{decoder}.")
            for number, own in enumerate(owner.own):
                if (inner := own.get(head)) is not None:
                    place = f"experts.{number}.{own_name(embedding, inner.endswith('_update'))}"
                    for name, _ in owner.experts[number].get_submodule(inner).named_parameters():
                        if name.endswith(kind):
                            ties[f"adapters.experts.{number}.{inner}.{name}"] = f"{decoder}.adapters.{place}.{name}"
        self._tied_weights_keys = ties

    def init_parallel_plans(self) -> None:
        super().init_parallel_plans()  # type: ignore[misc]
        rules: dict = dict(self._tp_plan)  # type: ignore[has-type]
        for holder, module in self._holders().items():
            if any(isinstance(inner, LoraUpdate) for inner in module.experts.modules()):
                self._tp_plan: dict = {}  # an update is added to a map's whole output: every rank keeps the model whole
                return
            # A whole copy is split as what it stands for.
            owner = re.sub(r"\.\d+(?=\.|$)", ".*", holder).rpartition("adapters")[0]
            for name, inner in (item for own in module.own for item in own.items()):
                for rule, style in self._tp_plan.items():
                    if rule == f"{owner}{name}" or rule.startswith(f"{owner}{name}."):
                        rules[f"{owner}adapters.experts.*.{inner}{rule.removeprefix(owner + name)}"] = style
        self._tp_plan = rules


class _Ends(StoppingCriteria):
    """Ends each row at an end token of its class."""

    def __init__(self, control: RoutingControl, ends: list[list[int]]) -> None:
        self.control, self.ends, self.eos_token_id = control, ends, None  # the field by which rows are known to end

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        numbers = self.control.request.classes.numbers  # type: ignore[union-attr]
        each = len(input_ids) // len(numbers)  # beams, and several answers
        last = input_ids[:, -1].tolist()
        done = [token in self.ends[numbers[row // each] or 0] for row, token in enumerate(last)]
        return torch.tensor(done, device=input_ids.device)


def _listed(value: Any) -> list[int]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _begin(control: RoutingControl, *_: Any) -> None:
    control.own.passes = getattr(control.own, "passes", 0) + 1


def _end(control: RoutingControl, *_: Any) -> None:
    control.own.passes -= 1
    if not control.own.passes:
        control.own.judged = None


def decoder_of(model: Any) -> str:
    """The name of the module that owns the layers."""
    return decoder_ffns(model)[0].place.partition(".0.")[0].rpartition(".")[0]


def _is_update(value: Any) -> bool:
    if value is None:
        return True
    rank, scaling, *bias = value
    return type(rank) is int and rank >= 1 and isfinite(scaling) and bias in ([], [True])


class Part(BasePart):
    """`config.parts["languages"]` has for each expansion the modules that its languages have of their own:

        {"maps": {NAME: [rank, scaling] | None}, "layers": {LAYER: {...}}, "outside": {...}, "head": {...}}

    `maps` by their names in each layer, and `layers` those of layers that differ; `outside` by their names in the
    decoder, and `head` in the model. None is a whole copy; a third value, true, gives an update a bias."""

    name, kind, was = "languages", "adapter", "adapters"
    flat: ClassVar = {"adapters": None}
    model_class = ModelOfLanguages
    beside_mixtures = True
    not_beside: ClassVar = {
        "lora": "a language's modules stand in the FFN too",
        "added": "a language's modules stand in the FFN too",
    }
    not_served = (
        "{server} merges the linear layers that languages have of their own: serve the base with its adapters "
        "(`hf-moe-expand export --peft`), or the dense model of one language (`hf-moe-expand export --language`)."
    )

    def check(self) -> None:
        if not isinstance(self.settings, list) or not self.settings:
            raise ValueError("adapters is empty: a language needs the modules that it has of its own.")
        for entry in self.settings:
            outer = [entry.get(field, {}) for field in ("outside", "head")]
            for maps in (entry.get("maps"), *entry.get("layers", {}).values(), *outer):
                if not isinstance(maps, dict) or not all(map(_is_update, maps.values())):
                    raise ValueError(
                        f"adapters has {str(entry)[:80]}: must have `maps`, and may have `layers`, `outside` and "
                        "`head`, with a rank of at least 1 and a finite scaling for each module's name, or null."
                    )
        history = self.config.counts_of_expansions
        steps = pairwise([[1] * len(history[0]), *history])
        one_each = all(after - before in (0, 1) for old, new in steps for before, after in zip(old, new, strict=False))
        if not self.config.exclusive_experts or not one_each or len(self.settings) != len(history):
            raise ValueError(
                "expert_kind is 'adapter': a class has one expert in a layer and no router: set exclusive_experts, add "
                "at most one expert to a layer in each expansion, and give one entry of adapters for each expansion."
            )

    def expand(self, model: Any, place: str, layer: int) -> bool:
        module = model.get_submodule(place.rpartition(".")[0])
        module.adapters = LayerModules(module, self.config, layer, model.routing_control)
        return True

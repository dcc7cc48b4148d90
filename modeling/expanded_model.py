"""Grows a backbone's own model classes into expanded ones.

`LayerMoEForCausalLM` and its siblings are static classes that hub checkpoints name. Their constructor makes an instance
of a subclass of both the static class and the backbone's class, and then replaces its FFNs. All other modules are the
backbone's own.
"""

import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init

from .adapters import AdaptedLayer, calls
from .backbone import SeparateFFN, decoder_ffns, mixture_rules, put_in_place, use_rules
from .dispatch import ExpertsImplementationMixin
from .expanded_config import layer_names, static_class
from .expanded_ffn import ExpandedFFN
from .expanded_layer import ExpandedLayer
from .expansion_only import HUB_OPTIONS, load_assembled
from .experts import AddedExpert, LoraUpdate
from .judging import Answers, begin_pass, catch, counted_in, end_pass, inside, is_shared, sums_of
from .language_gate import GateRule, LanguageGate, classes_of_sums
from .routing import Classifier, ConditionalGate, Router, init_router
from .routing_control import (
    Routing,
    RoutingControl,
    RowClasses,
    check_count,
    classes_of,
    inputs_of,
    is_filled,
    with_answers,
    with_languages,
)
from .servers import check_batching, check_gate, check_model

_CLASSES: dict[tuple[type, str], type] = {}


class ExpandedModelMixin(ExpertsImplementationMixin):
    """The methods that every expanded model adds to its backbone. Static classes set `_dense_mapping` (a transformers
    mapping from configuration class to model class), `_auto_map` (config.json's entry for the Auto classes) and
    `_of_encoder_decoders` (whether the class is for encoder-decoders; None if it is for all backbones)."""

    _dense_class: type | None = None
    _dense_mapping: Any = None
    _auto_map: ClassVar[dict[str, str]] = {}
    _of_encoder_decoders: ClassVar[bool | None] = None
    _gate_places: tuple[str, str, str] | None = None  # the decoder's name, the layer's and its FFN's
    hub_options: ClassVar[dict[str, Any]] = {}  # of a loaded model: those by which its other files are found, too
    _supports_attention_backend = True  # read on the static class by serving back ends
    _tp_plan: Any

    def __new__(cls, config: Any = None, *args: Any, **kwargs: Any) -> Any:
        return object.__new__(cls if config is None else _expanded_class(cls, config))

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        """Loads an expanded checkpoint; see `PreTrainedModel.from_pretrained`.

        A checkpoint with only the tensors added by an expansion fetches its base model; `base_model` (a folder or hub
        id) names the base model if config.json does not.

        Raises:
            ValueError: the checkpoint is a dense model's, or the base model is not the one that was expanded.
        """
        passed = {name: kwargs[name] for name in HUB_OPTIONS if name in kwargs}
        if config is None:
            config = cls.config_class.from_pretrained(pretrained_model_name_or_path, **passed)  # type: ignore[attr-defined]
        cls = _expanded_class(cls, config)
        if pretrained_model_name_or_path is not None and kwargs.get("state_dict") is None:
            _refuse_dense(cls.__name__, pretrained_model_name_or_path, config, passed)
        load = super().from_pretrained  # type: ignore[misc]
        if getattr(config, "expansion_base", None) and kwargs.get("state_dict") is None:
            loaded = load_assembled(load, pretrained_model_name_or_path, config, kwargs)
        else:
            loaded = load(pretrained_model_name_or_path, *args, config=config, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.hub_options = {name: value for name, value in passed.items() if value is not None}
        model._attach_parts()
        # A gate that an earlier version stored inside a layer's block is saved beside it.
        used = getattr(model, "_weight_conversions", None) or []
        if any("language_gate" in source for rule in used for source in rule.source_patterns):
            kept = [rule for rule in used if "language_gate" not in rule.source_patterns[0]]
            model._weight_conversions = kept
        return loaded

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> Any:
        return super(ExpandedModelMixin, _expanded_class(cls, config))._from_config(config, **kwargs)  # type: ignore[misc]

    def __reduce__(self) -> tuple:
        options = {name: value for name, value in self.hub_options.items() if name != "token"}  # a secret
        state = {**self.__dict__, "hub_options": options}
        return _blank_model, (static_class(type(self)), self.config), state  # type: ignore[attr-defined]

    def post_init(self) -> None:
        # Precedes the library's own post_init, so that initialisation, tied keys and sharding plans use the final tree.
        config = self.config  # type: ignore[attr-defined]
        control = RoutingControl()
        rule = GateRule.of(config)
        ffns = decoder_ffns(self)  # type: ignore[arg-type]
        mixtures = [index for index, ffn in enumerate(ffns) if ffn.is_mixture]
        check_model(config, bool(mixtures))
        grown = [index for index in mixtures if config.num_experts_per_layer[index] > 1]
        if grown and not (config.has_kind("added") or config.has_kind("adapter")):
            names = layer_names(config)
            raise ValueError(
                f"Layers {', '.join(names[index] for index in grown)} are mixtures of experts of the backbone's own, "
                "beside which only added experts and adapters can stand: set expert_kind to 'added' or 'adapter', or "
                "num_experts_per_layer to 1 there."
            )
        if config.is_encoder_decoder:
            # A layer that training leaves out at random (M2M100) would leave its routers without a gradient.
            for module in self.modules():  # type: ignore[attr-defined]
                if hasattr(module, "layerdrop"):
                    module.layerdrop = 0.0
        for index, ffn in enumerate(ffns):
            if config.num_experts_per_layer[index] > 1:
                if config.has_kind("adapter"):
                    layer = self.get_submodule(ffn.place.rpartition(".")[0])  # type: ignore[attr-defined]
                    layer.adapters = AdaptedLayer(layer, config, index, control)
                    continue
                expanded = ExpandedFFN(ffn.module, config, index, control, is_mixture=ffn.is_mixture)
                parent, attribute = ffn.place.rsplit(".", 1)
                layer = self.get_submodule(parent)  # type: ignore[attr-defined]
                if isinstance(ffn.module, SeparateFFN):
                    put_in_place(layer, expanded)
                else:
                    setattr(layer, attribute, expanded)
        self.routing_control = control
        # Noted now: quantised weights no longer have the shapes by which an FFN is known.
        adapted = [ffn.place for ffn, count in zip(ffns, config.num_experts_per_layer, strict=True) if count > 1]
        self._adapted_ffns = adapted if config.has_kind("adapter") else []
        old_names = {}
        if rule is not None:
            check_gate(config)
            place = decoder_ffns(self)[rule.layer].place  # type: ignore[arg-type]
            before = place.rpartition(".")[0]
            self.get_submodule(before).language_gate = LanguageGate(config.hidden_size, rule)  # type: ignore[attr-defined]
            blocks = (place, f"{before}.adapters")
            old_names = {f"{block}.language_gate": f"{before}.language_gate" for block in blocks}
            # On the module that owns the layers: it always runs, also for heads of other libraries.
            self._gate_places = ffns[0].place.partition(".0.")[0].rpartition(".")[0], before, place
            decoder = self._decoder()
            decoder.register_forward_pre_hook(partial(begin_pass, control, rule), with_kwargs=True)
            decoder.register_forward_hook(partial(end_pass, control), with_kwargs=True, always_call=True)
        self._attach_parts()
        self._use_requested_experts(bool(mixtures))
        use_rules(self, mixture_rules(self, decoder_ffns(self)) if mixtures else [], old_names)  # type: ignore[arg-type]
        super().post_init()  # type: ignore[misc]

    def _attach_parts(self) -> None:
        """Lets the maps that adapters update call them, and the FFN of the gate's layer the gate; again after loading,
        which replaces the maps of a quantised model."""
        for place in self._adapted_ffns:
            layer: Any = self.get_submodule(place.rpartition(".")[0])  # type: ignore[attr-defined]
            layer.adapters.attach(layer)
        if self._gate_places is not None:
            ffn, gate = self.get_submodule(self._gate_places[2]), self.language_gate  # type: ignore[attr-defined]
            if not calls(ffn._forward_pre_hooks, catch):
                ffn.register_forward_pre_hook(partial(catch, self.routing_control, gate))  # type: ignore[arg-type]

    def _decoder(self) -> Any:
        """The module that owns the layers, of a model with a gate."""
        return self.get_submodule(self._gate_places[0])  # type: ignore[attr-defined, index]

    @property
    def language_gate(self) -> LanguageGate | None:
        """The model's language gate; None without one."""
        return self._gate_places and self.get_submodule(self._gate_places[1]).language_gate  # type: ignore[attr-defined]

    def init_parallel_plans(self) -> None:
        # The backbone's tensor-parallel rules for its FFN apply to every expert. Routers and classifiers have no rule:
        # every rank keeps them whole. The library would warn of a rule that applies to no layer.
        super().init_parallel_plans()  # type: ignore[misc]
        if self.config.has_kind("adapter"):  # type: ignore[attr-defined]
            self._tp_plan = {}  # an update is added to a map's whole output: every rank keeps the model whole
            return
        places: dict[str, list[bool]] = {}  # the FFNs under each pattern of names, and whether they are expanded
        for ffn in decoder_ffns(self):  # type: ignore[arg-type]
            pattern = re.sub(r"\.\d+\.", ".*.", ffn.place) + "."
            places.setdefault(pattern, []).append(isinstance(ffn.module, ExpandedFFN))
        plan: Any = {}
        for rule, style in self._tp_plan.items():
            prefix = next((prefix for prefix in places if rule.startswith(prefix)), None)
            if prefix is None or not all(places[prefix]):
                plan[rule] = style
            # A LoRA expert's update has no rule: every rank keeps its layers whole, including expert 0. Added experts
            # are small, and every rank keeps them whole.
            if prefix is not None and any(places[prefix]) and not self.config.has_kind("lora"):  # type: ignore[attr-defined]
                split = "0" if self.config.has_kind("added") else "*"  # type: ignore[attr-defined]
                plan[f"{prefix}experts.{split}.{rule.removeprefix(prefix)}"] = style
        self._tp_plan = plan

    @classmethod
    def auto_map(cls, config: Any) -> dict[str, str]:
        """config.json's entry for the Auto classes: the class with a language-model head depends on the backbone."""
        other = "AutoModelForCausalLM" if config.is_encoder_decoder else "AutoModelForSeq2SeqLM"
        return {name: place for name, place in cls._auto_map.items() if name != other}

    @classmethod
    def is_custom_code(cls) -> bool:
        # For custom code the library skips modules without weights of their own, although some of them (Falcon-H1's
        # model) initialise buffers of others. Ours initialises as the library's own code does.
        return False

    def initialize_weights(self) -> None:
        # Our modules first: the library passes all modules of the inner base model to that model's class, which cannot
        # initialise them.
        if self.language_gate is not None:
            self._initialize_weights(self.language_gate)  # type: ignore[attr-defined]
        for ffn in self.expanded_ffns().values():
            new = (module for module in ffn.experts.modules() if isinstance(module, LoraUpdate | AddedExpert))
            for module in (ffn.router, ffn.classifier, ffn.conditional_gate, *new):
                if module is not None:
                    self._initialize_weights(module)  # type: ignore[attr-defined]
            for number, expert in enumerate(ffn.experts):
                if not self.config.kind_of(ffn.layer_index, number).has_ffn:  # type: ignore[attr-defined]
                    # GPT-2 initialises a layer of its FFN by name; in LoRA experts an update stands there.
                    for part in expert.modules():
                        part._is_hf_initialized = True  # type: ignore[assignment]
        super().initialize_weights()  # type: ignore[misc]

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Router):
            init_router(module.weight)
        elif isinstance(module, Classifier | ConditionalGate | LanguageGate):
            for parameter in module.parameters():
                init.zeros_(parameter)
        elif isinstance(module, LoraUpdate | AddedExpert):
            module.init_weights()
        else:
            super()._init_weights(module)  # type: ignore[misc]

    def expanded_ffns(self) -> dict[int, ExpandedLayer]:
        """The `ExpandedFFN`, or the `AdaptedLayer`, of each expanded layer, by layer index."""
        return {module.layer_index: module for module in self.modules() if isinstance(module, ExpandedLayer)}  # type: ignore[attr-defined]

    @contextmanager
    def capture_routing(self) -> Iterator[Routing]:
        """Records the routing of a forward pass that runs inside, whoever calls it (a Trainer, a fused head).

        Logits and weights keep their graph. Of several passes, the last one's routing is kept.
        """
        with self.routing_control.asking(capture=(routing := Routing())):
            yield routing

    def use_expert(self, expert: int) -> AbstractContextManager[None]:
        """Inside, every token goes only to this expert in every expanded layer; expert 0 gives the base model's
        output.

        Raises:
            ValueError: the number is below 0; in a pass, that a layer has no such expert.
        """
        if not isinstance(expert, Integral) or expert < 0:
            raise ValueError(f"Expert {expert!r} was asked for: give a number from 0, the base's.")
        return self.routing_control.asking(expert=expert)

    def use_expansion(self, expansion: int) -> AbstractContextManager[None]:
        """Inside, the model routes as after an earlier expansion (0: the base model), without later experts.

        Raises:
            ValueError: the model has no such expansion.
        """
        last = 1 + len(getattr(self.config, "earlier_experts_per_layer", None) or ())  # type: ignore[attr-defined]
        if expansion not in range(last + 1):
            raise ValueError(f"Expansion {expansion!r} was asked for, but the model has 0 (the base) to {last}.")
        return self.routing_control.asking(expansion=expansion)

    @contextmanager
    def use_languages(self, languages: str | Sequence[str | None]) -> Iterator[None]:
        """Inside, the model knows the language of each sequence, as with `languages` of `forward` and `generate`.

        Args:
            languages: a code for each sequence of the batches, None where it is not known; or one code for all. A
                sequence in a language of the base model gets the base model's output bit for bit, which is expert 0's
                in every layer. One in a language of expansion g may use the experts up to expansion g, whatever
                classifiers and the language gate say.

        Raises:
            ValueError: the checkpoint does not know a code, or it is a DMoE's. A forward pass inside raises it too if
                it has another number of sequences than there are codes.
        """
        rows = RowClasses.of(classes_of(self.config, languages), self.device)  # type: ignore[attr-defined]
        sequences = None if isinstance(languages, str) else len(rows.numbers)
        with self.routing_control.asking(classes=rows, sequences=sequences, answers=None):
            yield

    @contextmanager
    def judged(self, input_ids: Any = None, attention_mask: Any = None, inputs_embeds: Any = None) -> Iterator[None]:
        """Inside, the language of each sequence is known, as with `use_languages`: the one that `judge` finds in these
        texts. For a loop of one's own over a cache, and for caches that others fill (PEFT's prefix tuning).

        Raises:
            ValueError: see `judge`.
        """
        rows = self.judge(input_ids, attention_mask, inputs_embeds).tolist()
        with self.routing_control.asking(classes=RowClasses.of(rows, self.device), sequences=len(rows), answers=None):  # type: ignore[attr-defined]
            yield

    def judge(self, input_ids: Any = None, attention_mask: Any = None, inputs_embeds: Any = None) -> torch.Tensor:
        """The class of each text, `[B]`, one a row, by the language gate: 0 stays home, g takes expansion g's experts.
        A text is judged by its last 128 tokens alone.

        Args:
            input_ids: `[B, S]`.
            attention_mask: `[B, S]`, 0 where a token is padding. Without it the padding token at either end, and a run
                of one token at a row's end, are padding.
            inputs_embeds: `[B, S, h]`, in place of ids.

        Raises:
            ValueError: the model has no language gate, or is in training mode.
        """
        return classes_of_sums(self._sums(input_ids, attention_mask, inputs_embeds))

    def _sums(self, input_ids: Any, attention_mask: Any = None, inputs_embeds: Any = None, pad: Any = None) -> Any:
        """The evidence of each row, `[B, E]`; see `judge`."""
        rule = GateRule.of(self.config)  # type: ignore[attr-defined]
        if rule is None or self.training:  # type: ignore[attr-defined]
            raise ValueError(
                "judge: " + ("the model has no language gate." if rule is None else "call model.eval() first.")
            )
        decoder, inputs = self._decoder(), input_ids if inputs_embeds is None else inputs_embeds
        pad = getattr(decoder.config, "pad_token_id", None) if pad is None else pad

        def work(model: Any = decoder) -> torch.Tensor:
            counted_BS = counted_in(decoder, inputs, attention_mask, pad)
            # A row with padding alone is an empty text of its own.
            texts_BS = torch.arange(len(inputs), device=counted_BS.device).unsqueeze(-1).masked_fill(~counted_BS, -1)
            return sums_of(self.routing_control, rule, model, inputs, texts_BS)

        if not is_shared(self):
            sums_ME = work()
        elif inputs.ndim == 2:
            sums_ME = work(self)
        else:
            sums_ME = inside(self.routing_control, self, decoder, inputs.device, work)
        return torch.nn.functional.pad(sums_ME, (0, 0, 0, len(inputs) - len(sums_ME)))

    def generate(
        self,
        inputs: Any = None,
        generation_config: Any = None,
        *args: Any,
        languages: Any = None,
        judge: bool | torch.Tensor = True,
        **kwargs: Any,
    ) -> Any:
        """As the backbone's `generate`. With a language gate each prompt is judged and then told, and the answer's own
        tokens are judged when there are 16, 32, 64 and every 64 more of them.

        With drafts (an assistant, prompt lookup), and where processes generate in step (`synced_gpus`), the prompt's
        class holds to the end.

        Args:
            languages: the language of each sequence, which holds to the end; see `use_languages`.
            judge: False leaves sequences home whose language is not told. A tensor `[B, S]` of ids is judged in place
                of the prompts (a chat's newest message without its template).

        Raises:
            ValueError: see `use_languages`; or the number of codes, or of texts to judge, is not that of the sequences;
                or nobody tells the language of texts of which a cache holds a part.
        """
        if "judge_prompt" in kwargs:
            warnings.warn("generate: judge_prompt is called judge now.", FutureWarning, stacklevel=2)
            judge = kwargs.pop("judge_prompt") is not False
        if languages is not None:
            with self.use_languages(languages):
                return self.generate(inputs, generation_config, *args, judge=judge, **kwargs)
        control, given = self.routing_control, {"generation_config": generation_config, **kwargs}
        if (sequences := control.request.sequences) is not None:
            check_count(sequences, inputs, kwargs)
        changes: dict[str, Any] = {"sequences": None}  # each sequence has beams
        if self._gate_places is not None and control.request.expert is None:
            changes |= self._told(inputs, given, judge)
        with control.asking(**changes):
            made = super().generate(inputs, generation_config, *args, **kwargs)  # type: ignore[misc]
        if self._gate_places is not None and getattr(generation_config, "is_assistant", False):
            control.remember(made.past_key_values, changes.get("classes"))
        return made

    def _told(self, inputs: Any, given: dict[str, Any], judge: Any) -> dict[str, Any]:
        """What a call of `generate` knows of its sequences' languages, as changes of the request: what the caller
        tells, or else the judged class of each prompt, and how its answer is judged."""
        control, cache = self.routing_control, given.get("past_key_values")
        rows, prompts, embeds = control.request.classes, inputs_of(inputs, given), given.get("inputs_embeds")
        if rows is not None and rows.complete:
            return {}
        if self.training:  # type: ignore[attr-defined]
            warnings.warn(
                "generate in training mode: the language gate judges nothing, and text of any language takes the new "
                "experts: call model.eval() first.",
                stacklevel=3,
            )
            return {}
        is_assistant = getattr(given["generation_config"], "is_assistant", False)
        if is_filled(cache) and judge is not False:
            rows = control.remembered(cache) if is_assistant else None
            if rows is None:
                raise ValueError(
                    "generate: nobody tells the language of the texts in past_key_values: give languages=, or call it "
                    "in `with model.judged(input_ids):`."
                )
            return {"classes": rows}
        count = 1 if prompts is None else len(prompts)
        told = list(rows.numbers) if rows is not None else [None] * count
        told = told * (count // len(told))  # one code may speak of all
        judged = [0] * count
        if isinstance(judge, torch.Tensor):
            judged = self.judge(judge if prompts is None else judge.to(prompts.device)).tolist()
            if len(judged) != count:
                raise ValueError(f"judge has {len(judged)} texts, but there are {count} prompts: give one for each.")
        elif judge is not False and prompts is not None and prompts.shape[1]:
            mask, pad = given.get("attention_mask"), self._setting_of("pad_token_id", given)
            mask = mask if isinstance(mask, torch.Tensor) and mask.ndim == 2 else None
            is_text = prompts.ndim == 2
            sums_BE = self._sums(prompts if is_text else None, mask, None if is_text else prompts, pad)
            judged = classes_of_sums(sums_BE).tolist()
        numbers = [mine if said is None else said for said, mine in zip(told, judged, strict=True)]
        changes: dict[str, Any] = {"classes": RowClasses.of(numbers, self.device)}  # type: ignore[attr-defined]
        settings = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")
        drafts = given.get("assistant_model") is not None or any(self._setting_of(name, given) for name in settings)
        if judge is False or is_assistant or drafts or self._in_step(given):
            return changes
        ids = given.get("input_ids", inputs)
        start = ids.shape[1] if ids is not None else int(embeds is None)  # without a prompt, the id that begins a text
        moves = (self._setting_of("num_beams", given) or 1) > 1
        is_told = [said is not None for said in told]
        rule: Any = GateRule.of(self.config)  # type: ignore[attr-defined]
        return changes | {"answers": Answers(rule, self._sums, changes["classes"], is_told, start, moves)}

    def _in_step(self, given: dict[str, Any]) -> bool:
        """Whether processes generate in step, so that none may run a pass alone."""
        asked = given.get("synced_gpus")
        return is_shared(self) if asked is None else bool(asked)

    def _setting_of(self, name: str, arguments: dict[str, Any]) -> Any:
        """A setting of a call of `generate`, read as the library does: the argument, or else the given configuration's,
        or else the model's own."""
        if name in arguments:
            return arguments[name]
        of_call = getattr(arguments.get("generation_config"), name, None)
        return getattr(self.generation_config, name, None) if of_call is None else of_call  # type: ignore[attr-defined]

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """As the backbone's, which `generate_batch` calls.

        Raises:
            ValueError: see `check_batching`.
        """
        check_batching(self.config, self.routing_control.request)  # type: ignore[attr-defined]
        return super().init_continuous_batching(*args, **kwargs)  # type: ignore[misc]

    def generate_batch(self, *args: Any, languages: Any = None, judge: Any = True, **kwargs: Any) -> Any:
        """As the backbone's, which knows no `languages` and `judge`.

        Raises:
            ValueError: one of them is given; see `check_batching`.
        """
        judge = kwargs.pop("judge_prompt", judge)
        if languages is not None or judge is not True:
            name = "judge" if languages is None else "languages"
            raise ValueError(f"{name}: continuous batching does not know it: use generate.")
        return super().generate_batch(*args, **kwargs)  # type: ignore[misc]

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = checkpoint, *args: Any, **kwargs: Any
    ) -> None:
        function = partial(self.routing_control.checkpointed, gradient_checkpointing_func)
        super()._set_gradient_checkpointing(enable, function, *args, **kwargs)  # type: ignore[misc]

    def _upload_modified_files(self, working_dir: Any, repo_id: str, *args: Any, **kwargs: Any) -> Any:
        # Where hf_moe_expand is imported, it makes the card; elsewhere the card is the library's.
        make_card = getattr(sys.modules.get("hf_moe_expand"), "make_card", None)
        if make_card is not None and getattr(self.config, "expansions", None):  # type: ignore[attr-defined]
            file = Path(working_dir) / "README.md"
            card = make_card(working_dir, repo_id)
            tags = type(card).load(file).data.tags if file.is_file() else None
            card.data.tags = list(dict.fromkeys([*card.data.tags, *(tags or ())]))  # with those that a push names
            card.save(file)
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)  # type: ignore[misc]

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        # FSDP2 replaces the model's class by its own, from torch's files, but the class and files to save are ours.
        made = type(self)
        ours = next(cls for cls in made.__mro__ if "_static" in vars(cls))
        made.__name__, made.__module__ = ours.__name__, ours.__module__
        self.config.auto_map = self.auto_map(self.config)  # type: ignore[attr-defined]
        vars(self.config).pop("expansion_base", None)  # type: ignore[attr-defined]  # the whole model is saved
        return super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]


def _expanded_class(cls: Any, config: Any) -> type:
    """The subclass of the static class `cls` for the backbone that `config` names, created once in a process."""
    if cls._dense_class is not None:
        return cls
    backbone = getattr(config, "backbone_model_type", None)
    if backbone is None:
        raise ValueError(
            f"{cls.__name__} needs the configuration of an expanded model, not a {type(config).__name__}: expand the "
            "dense model (`hf_moe_expand.expand_model`) or its checkpoint (`hf_moe_expand.expand_checkpoint`, "
            "`hf-moe-expand expand`), or build a model with random weights from `LayerMoEConfig.from_dense`."
        )
    _check_kind(cls, config)
    if (cls, backbone) not in _CLASSES:
        dense = cls._dense_mapping[type(config).backbone_config_class]
        namespace = {
            "__module__": cls.__module__,
            # The library's registries use the qualified name as a key: it must differ between backbones.
            "__qualname__": f"{cls.__name__}_{backbone}",
            "config_class": type(config),
            "_dense_class": dense,
            "_static": cls,
            "_supports_attention_backend": dense._supports_attention_backend,
            "forward": with_languages(dense.forward),
        }
        if hasattr(dense, "prepare_inputs_for_generation"):  # a model without a head generates nothing
            namespace["prepare_inputs_for_generation"] = with_answers(dense.prepare_inputs_for_generation)
        _CLASSES[cls, backbone] = type(cls.__name__, (cls, dense), namespace)
    return _CLASSES[cls, backbone]


def _check_kind(cls: Any, config: Any) -> None:
    """Refuses the class of a decoder for an encoder-decoder, and the reverse."""
    if cls._of_encoder_decoders is None or cls._of_encoder_decoders == bool(config.is_encoder_decoder):
        return
    actual, wanted = ("an encoder-decoder", "Seq2SeqLM") if config.is_encoder_decoder else ("a decoder", "CausalLM")
    raise ValueError(
        f"{cls.__name__} is not for this model: its backbone, {config.backbone_model_type}, is {actual}: load it with "
        f"AutoModelFor{wanted}."
    )


def _refuse_dense(class_name: str, path: Any, config: Any, hub_options: dict[str, Any]) -> None:
    """Refuses a dense checkpoint, for which the library would initialise experts and routers at random."""
    if not os.path.isdir(path) and str(path) == config.name_or_path:
        return  # the configuration belongs to this hub repository
    try:
        stored, _ = PreTrainedConfig.get_config_dict(path, **hub_options)
    except OSError:  # the folder holds only weights
        return
    if stored.get("model_type", config.model_type) != config.model_type:
        raise ValueError(
            f"{path} holds a {stored['model_type']} model, which lacks the experts and routers of {class_name}. "
            "Expand the loaded model with hf_moe_expand.expand_model(model, plan), or its files with "
            "hf_moe_expand.expand_checkpoint(folder, out, plan)."
        )


def _blank_model(static: type, config: Any) -> PreTrainedModel:
    return object.__new__(_expanded_class(static, config))

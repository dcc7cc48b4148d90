"""Grows a backbone's own model classes into expanded ones.

`LayerMoEForCausalLM` and its siblings are static classes that hub checkpoints name. Their constructor makes an instance
of a subclass of both the static class and the backbone's class, and then replaces its FFNs. All other modules are the
backbone's own.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, ClassVar

from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter

from .backbone import SeparateFFN, decoder_ffns
from .expanded_config import static_class
from .expanded_ffn import ExpandedFFN, ExpandedLayer
from .part import HUB_OPTIONS, SERVERS, keep_own_code
from .parts import PARTS
from .routing_control import Routing, RoutingControl, RowClasses, check_count, classes_of, with_languages

_CLASSES: dict[tuple, type] = {}


class ExpandedModelMixin:
    """The methods that every expanded model adds to its backbone. Static classes set `_dense_mapping` (a transformers
    mapping from configuration class to model class), `_auto_map` (config.json's entry for the Auto classes) and
    `_reads_pairs` (whether the class is for encoder-decoders; None if it is for all backbones)."""

    _dense_class: type | None = None
    _dense_mapping: Any = None
    _auto_map: ClassVar[dict[str, str]] = {}
    _reads_pairs: ClassVar[bool | None] = None
    _supports_attention_backend = True  # read on the static class by serving back ends
    _tp_plan: Any

    def __new__(cls, config: Any = None, *args: Any, **kwargs: Any) -> Any:
        return object.__new__(cls if config is None else _expanded_class(cls, config))

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        """Loads an expanded checkpoint; see `PreTrainedModel.from_pretrained`.

        Raises:
            ValueError: the checkpoint is a dense model's.
        """
        if config is None:
            passed = {name: kwargs[name] for name in HUB_OPTIONS if name in kwargs}
            config = cls.config_class.from_pretrained(pretrained_model_name_or_path, **passed)  # type: ignore[attr-defined]
        cls = _expanded_class(cls, config)
        load = super().from_pretrained  # type: ignore[misc]
        for part in config.used_parts if kwargs.get("state_dict") is None else ():
            load = part.load(load, pretrained_model_name_or_path, config)
        loaded = load(pretrained_model_name_or_path, *args, config=config, **kwargs)
        (loaded[0] if isinstance(loaded, tuple) else loaded)._attach_parts()
        return loaded

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> Any:
        return super(ExpandedModelMixin, _expanded_class(cls, config))._from_config(config, **kwargs)  # type: ignore[misc]

    def __reduce__(self) -> tuple:
        return _blank_model, (static_class(type(self)), self.config), self.__dict__  # type: ignore[attr-defined]

    def post_init(self) -> None:
        # Precedes the library's own post_init, so that initialisation, tied keys and sharding plans use the final tree.
        config: Any = self.config  # type: ignore[attr-defined]
        server = SERVERS.get(str(config._attn_implementation))
        for part in config.used_parts if server is not None else ():
            if part.not_served is not None:  # before a server loads weights
                raise ValueError(part.not_served.format(server=server))
        self.routing_control = RoutingControl(next(filter(None, (part.stays_home for part in config.used_parts)), None))
        for index, ffn in enumerate(decoder_ffns(self)):  # type: ignore[arg-type]
            if config.num_experts_per_layer[index] == 1 or any(
                part.expand(self, ffn.place, index) for part in config.used_parts
            ):
                continue
            made = _layer_class(config)(ffn.module, config, index, self.routing_control, is_mixture=ffn.is_mixture)
            parent, attribute = ffn.place.rsplit(".", 1)
            layer = self.get_submodule(parent)  # type: ignore[attr-defined]
            if isinstance(ffn.module, SeparateFFN):
                ffn.module.replace_in(layer, made)
            else:
                setattr(layer, attribute, made)
        self._attach_parts()
        # The library looks rules up by the name of the model's class, right after it is built, and keeps them in it.
        rules, name = self._rules(), type(self).__name__
        if rules or get_checkpoint_conversion_mapping(name) is not None:
            register_checkpoint_conversion_mapping(name, rules, overwrite=True)
        if rules:
            self._weight_conversions = [rule for rule in rules if isinstance(rule, WeightConverter)]
        super().post_init()  # type: ignore[misc]

    def _attach_parts(self) -> None:
        """Adds what parts hang on modules; again after loading, which replaces the maps of a quantised model."""

    def _rules(self) -> list:
        """The library's rules by which tensors are loaded under other names, or together."""
        return []

    def init_parallel_plans(self) -> None:
        # The backbone's tensor-parallel rules for its FFN apply to every expert. Routers and classifiers have no rule:
        # every rank keeps them whole. The library would warn of a rule that applies to no layer.
        super().init_parallel_plans()  # type: ignore[misc]
        places: dict[str, list[bool]] = {}  # the FFNs under each pattern of names, and whether they are expanded
        for ffn in decoder_ffns(self):  # type: ignore[arg-type]
            pattern = re.sub(r"\.\d+\.", ".*.", ffn.place) + "."
            places.setdefault(pattern, []).append(isinstance(ffn.module, ExpandedFFN))
        plan: Any = {}
        splits = next((part.splits for part in self.config.used_parts if part.splits != "*"), "*")  # type: ignore[attr-defined]
        for rule, style in self._tp_plan.items():
            prefix = next((prefix for prefix in places if rule.startswith(prefix)), None)
            if prefix is None or not all(places[prefix]):
                plan[rule] = style
            if prefix is not None and any(places[prefix]) and splits is not None:
                plan[f"{prefix}experts.{splits}.{rule.removeprefix(prefix)}"] = style
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
        for module in self.modules():  # type: ignore[attr-defined]
            if hasattr(module, "init_part"):
                self._initialize_weights(module)  # type: ignore[attr-defined]
        for expert in (expert for ffn in self.expanded_ffns().values() for expert in ffn.experts):
            if any(hasattr(module, "init_part") for module in expert.modules()):
                # GPT-2 initialises a layer of its FFN by name, where something else may stand.
                for module in expert.modules():
                    module._is_hf_initialized = True  # type: ignore[assignment]
        super().initialize_weights()  # type: ignore[misc]

    def _init_weights(self, module: Any) -> None:
        if hasattr(module, "init_part"):
            module.init_part()
        else:
            super()._init_weights(module)  # type: ignore[misc]

    def expanded_ffns(self) -> dict[int, ExpandedLayer]:
        """The `ExpandedLayer` of each expanded layer, by layer index."""
        return {module.layer_index: module for module in self.modules() if isinstance(module, ExpandedLayer)}  # type: ignore[attr-defined]

    @contextmanager
    def capture_routing(self) -> Iterator[Routing]:
        """Records the routing of the last forward pass that runs inside, whoever calls it (a Trainer, a fused head).
        Logits and weights keep their graph."""
        with self.routing_control.asking(capture=(routing := Routing())):
            yield routing

    def use_expert(self, expert: int) -> AbstractContextManager[None]:
        """Inside, every token goes only to this expert in every expanded layer; expert 0 gives the base model's output.

        Raises:
            ValueError: the number is below 0; in a pass, that a layer has no such expert.
        """
        if expert < 0:  # else Python counts it from the end
            raise ValueError(f"Expert {expert} was asked for: give a number from 0, the base's.")
        return self.routing_control.asking(expert=expert)

    def use_expansion(self, expansion: int) -> AbstractContextManager[None]:
        """Inside, the model routes as after an earlier expansion (0: the base model), without later experts.

        Raises:
            ValueError: the model has no such expansion.
        """
        last = len(self.config.counts_of_expansions)  # type: ignore[attr-defined]
        if expansion not in range(last + 1):
            raise ValueError(f"Expansion {expansion!r} was asked for, but the model has 0 (the base) to {last}.")
        return self.routing_control.asking(expansion=expansion)

    @contextmanager
    def use_languages(self, languages: str | Sequence[str | None]) -> Iterator[None]:
        """Inside, the model knows the language of each sequence, as with `languages` of `forward` and `generate`: by a
        code for each, None where it is not known; or by one code for all. A sequence in a language of the base model
        gets the base model's output bit for bit, which is expert 0's in every layer. One in a language of expansion g
        may use the experts up to expansion g, whatever classifiers say.

        Raises:
            ValueError: the checkpoint does not know a code, or it is a DMoE's; in a pass, that it has another number of
                sequences than there are codes.
        """
        rows = RowClasses.of(classes_of(self.config, languages), self.device)  # type: ignore[attr-defined]
        sequences = None if isinstance(languages, str) else len(rows.numbers)
        with self.routing_control.asking(classes=rows, sequences=sequences, answers=None):
            yield

    def generate(
        self, inputs: Any = None, generation_config: Any = None, *args: Any, languages: Any = None, **kwargs: Any
    ) -> Any:
        """As the backbone's `generate`. `languages` are those of the sequences, to the end; see `use_languages`."""
        if languages is not None:
            with self.use_languages(languages):
                return self.generate(inputs, generation_config, *args, **kwargs)
        check_count(self.routing_control, inputs, kwargs)
        with self.routing_control.asking(sequences=None):  # each sequence has beams
            return super().generate(inputs, generation_config, *args, **kwargs)  # type: ignore[misc]

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """As the backbone's; raises ValueError where its thread does not know a part, or what is asked."""
        for part in self.config.used_parts:  # type: ignore[attr-defined]
            if part.not_batched:
                raise ValueError(part.not_batched)
        asked = self.routing_control.request
        if any(value is not None for value in (asked.capture, asked.expert, asked.expansion, asked.classes)):
            raise ValueError(
                "Continuous batching has a thread of its own, which no `use_…` around it reaches: generate."
            )
        return super().init_continuous_batching(*args, **kwargs)  # type: ignore[misc]

    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        """As the backbone's; raises ValueError for our own arguments, which it does not know."""
        if own := sorted({"languages", "judge"} & {*kwargs}):
            raise ValueError(f"{own[-1]}: continuous batching does not know it: use generate.")
        return super().generate_batch(*args, **kwargs)  # type: ignore[misc]

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = checkpoint, *args: Any, **kwargs: Any
    ) -> None:
        function = partial(self.routing_control.checkpointed, gradient_checkpointing_func)
        super()._set_gradient_checkpointing(enable, function, *args, **kwargs)  # type: ignore[misc]

    def _upload_modified_files(self, working_dir: Any, repo_id: str, *args: Any, **kwargs: Any) -> Any:
        keep_own_code(working_dir, self.config)  # type: ignore[attr-defined]
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)  # type: ignore[misc]

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        # FSDP2 replaces the model's class by its own, from torch's files, but the class and files to save are ours.
        made, config = type(self), self.config  # type: ignore[attr-defined]
        ours = next(cls for cls in made.__mro__ if "_static" in vars(cls))
        made.__name__, made.__module__ = ours.__name__, ours.__module__
        config.auto_map = self.auto_map(config)
        config.parts = {name: config.parts[name] for name in PARTS if name in config.parts and PARTS[name].is_saved}
        super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        if kwargs.get("is_main_process", args[0] if args else True):
            keep_own_code(save_directory, config)


def _expanded_class(cls: Any, config: Any) -> type:
    """The subclass of the static class `cls` for the backbone that `config` names, created once in a process."""
    if cls._dense_class is not None and "_static" not in vars(cls):  # of FSDP2's own
        return cls
    cls, backbone = static_class(cls), getattr(config, "backbone_model_type", None)
    if backbone is None:
        raise ValueError(
            f"{cls.__name__} needs the configuration of an expanded model, not a {type(config).__name__}: expand the "
            "dense model with `hf_moe_expand.expand_model`, or its checkpoint with `expand_checkpoint`."
        )
    if cls._reads_pairs not in (None, config.is_encoder_decoder):
        kind = "Seq2SeqLM" if config.is_encoder_decoder else "CausalLM"
        raise ValueError(f"{cls.__name__} is not for a {backbone} backbone: load it with AutoModelFor{kind}.")
    own = tuple(part.model_class for part in config.used_parts if part.model_class)
    key = (cls, backbone, own)
    if key not in _CLASSES:
        dense = cls._dense_mapping[type(config).backbone_config_class]
        namespace = {
            "__module__": cls.__module__,
            # The library's registries use the qualified name as a key: it must differ between classes.
            "__qualname__": "_".join([cls.__name__, backbone, *(one.__name__ for one in own)]),
            "config_class": type(config),
            "_dense_class": dense,
            "_static": cls,
            "_supports_attention_backend": dense._supports_attention_backend,
            "forward": with_languages(dense.forward),
        }
        _CLASSES[key] = type(cls.__name__, (*own, cls, dense), namespace)
    return _CLASSES[key]


def _blank_model(static: type, config: Any) -> PreTrainedModel:
    return object.__new__(_expanded_class(static, config))


def _layer_class(config: Any) -> Any:
    """`ExpandedFFN`, or the classes that parts put before it, joined."""
    return _joined(*(part.layer_class for part in config.used_parts if part.layer_class))


def _joined(*own: type) -> type:
    if len(own) < 2:
        return [*own, ExpandedFFN][0]
    pickled = {"__reduce__": lambda layer: (_blank_layer, own, vars(layer))}
    return _CLASSES.setdefault(own, type("ExpandedFFN", own, pickled))


def _blank_layer(*own: type) -> Any:
    return object.__new__(_joined(*own))

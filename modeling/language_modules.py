"""The modules that languages have of their own, and how the base's modules look them up.

In place of `module(x)` a text of the class gets `own(x)`, or `module(x) + scaling * B A x` of an update, and all other
texts get the base's own bits. The base's modules stay in their places. The modules that own them are of classes that
look such a child up by the class of the pass's texts: what PEFT wraps around a map is the base's alone, and what a
quantiser puts in its place is found.

Shape suffixes as in `routing.py`.
"""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.conv import _ConvNd
from transformers import initialization as init

from .backbone import takes_hidden_states_alone
from .expanded_ffn import ExpandedLayer, copy_ffn
from .routing import TokenClasses
from .routing_control import RoutingControl, RoutingRequest
from .updates import LoraFactor, LoraUpdate, init_kaiming

Maps = dict[str, list | None]  # by a module's name: rank, scaling and whether B has a bias; None for a whole copy


class OwnHead(LoraFactor):
    """A whole head of a language's own, which quantisers and "all linear layers" leave alone as they do the base's."""

    def init_part(self) -> None:
        """First weights, as those of `nn.Linear`."""
        init_kaiming(self.weight)
        if self.bias is not None:
            init.zeros_(self.bias)


class EmbeddingUpdate(LoraUpdate):
    """The update of an embedding `[V, h]`: `scaling * B A`, A `[r, h]`, B `[V, r]`."""

    def __init__(self, layer: Any, name: str, rank: int, scaling: float) -> None:
        super().__init__(layer, name, rank, scaling)
        # Gemma's and BART's kin scale their embeddings.
        self.factor = float(getattr(layer, "scalar_embed_scale", getattr(layer, "embed_scale", 1.0)))

    def forward(self, x: torch.Tensor, only_T: torch.Tensor | None = None) -> torch.Tensor:
        """`[...] -> [..., h]`, of tokens."""
        rows = F.embedding(x, self.lora_B.weight)
        rows = rows if only_T is None else rows.where(only_T.view(*rows.shape[:-1], 1), 0)
        return self.scaling * self.factor * F.linear(rows, self.lora_A.weight.T)


def own_name(name: str, is_update: bool) -> str:
    """The name of a language's module: that of `self_attn.q_proj` is `self_attn_q_proj_update`, or
    `self_attn_q_proj_own` if it is whole: names that PEFT does not take for the map's."""
    return f"{name.replace('.', '_')}_{'update' if is_update else 'own'}"


class Choosing:
    """Chooses among the base's modules and those of the classes: a layer's, or those outside the layers."""

    control: RoutingControl
    experts: nn.ModuleList  # expert 0 has no weights: it is the base. Expert e has the modules of a class.
    training: bool
    classes: int  # their number, the base's counted
    own: list[dict[str, str]]  # for each expert the name in it of what stands for a module, by the module's name
    tokenwise: set[str]  # the modules that map each token alone

    def _make(self, owner: nn.Module, maps: list[Maps], heads: bool = False) -> None:
        self.experts, self.own = nn.ModuleList([nn.Identity()]), [{}]
        for of_expert in maps:
            expert = nn.Module()
            for name, update in sorted(of_expert.items()):  # the order in a saved configuration
                module: Any = owner.get_submodule(name)
                if update is not None:
                    kind = EmbeddingUpdate if isinstance(module, nn.Embedding) else LoraUpdate
                    own: nn.Module = kind(module, name, *update)
                elif heads and isinstance(module, nn.Linear):
                    own = OwnHead(module.in_features, module.out_features, module.bias is not None)
                else:
                    own = copy_ffn(module)
                expert.add_module(own_name(name, update is not None), own)
            self.experts.append(expert)
            self.own.append({name: own_name(name, update is not None) for name, update in of_expert.items()})
        self.names = list(dict.fromkeys(name for of_expert in maps for name in of_expert))
        self.tokenwise = {name for name in self.names if is_tokenwise(owner, name)}

    def expert_of(self, number: int) -> int | None:
        """The expert of a class."""
        return number

    def attach(self, owner: nn.Module) -> None:
        """Lets the modules of `owner` look their children up here."""
        for name in self.names:
            place, _, child = name.rpartition(".")
            parent: Any = owner.get_submodule(place)
            parent.language_places = {**parent.__dict__.get("language_places", {}), child: (self, name)}
            made = type(parent)
            if isinstance(getattr(made, child, None), property):
                continue
            if "_static" in vars(made):  # the model's own
                setattr(made, child, _property(child))
            else:
                parent.__class__ = _looking(*getattr(made, "_looks", (made,)), child)

    def share_buffers(self, owner: nn.Module) -> None:
        """Gives whole copies the buffers that the base's modules compute, and no checkpoint holds."""
        for expert, names in enumerate(self.own):
            for name in names:
                base, own = owner.get_submodule(name), self.get(expert, name)
                for buffer, value in [] if isinstance(own, LoraUpdate) else [*base.named_buffers()]:
                    if buffer not in base.state_dict():
                        place, _, inner = buffer.rpartition(".")
                        own.get_submodule(place).register_buffer(inner, value, persistent=False)  # type: ignore[union-attr]

    def get(self, expert: int, name: str) -> nn.Module | None:
        """What an expert has in a module's place; None for the base's own."""
        own = self.own[expert].get(name)
        if own is None:
            return None
        of_expert: Any = self.experts._modules[str(expert)]  # a list's own look-up takes longer than a small map
        return of_expert._modules[own]

    def alone(self, expert: int, name: str, module: nn.Module) -> Any:
        """What stands in a module's place where all tokens take one expert."""
        own = self.get(expert, name)
        return module if own is None else _Sum(module, own) if isinstance(own, LoraUpdate) else own

    def chosen(self, name: str, module: nn.Module) -> Any:
        """What stands in the place of a module in this pass; the module, if none runs and nothing is told."""
        request = self.control.request
        if request.classes is None and request.token_classes is None and not self.control.is_running:
            return module
        numbers = None if request.expert is not None else self._numbers(request)
        experts = None if numbers is None else sorted({self.expert_of(number) or 0 for number in numbers})
        if request.expert is not None:
            experts = [request.expert]
            if request.expert >= len(self.experts):
                raise ValueError(f"There is no expert {request.expert}.")
        if experts is not None and not self.training:
            if not any(name in self.own[expert] for expert in experts):
                return module
            if len(experts) == 1:
                return self.alone(experts[0], name, module)
        return _Chosen(self, name, module, experts, numbers)

    def _given(self, request: RoutingRequest) -> TokenClasses | None:
        """The classes of the pass's tokens, where a part judged them or a batch says them, and not all are told."""
        if request.classes is not None and request.classes.complete:
            return None
        return self.control.judged or request.token_classes

    def _numbers(self, request: RoutingRequest) -> list[int] | None:
        """The classes of the pass's texts, as far as the host knows them."""
        rows, given, most = request.classes, self._given(request), request.expansion
        if most == 0 and not self.training:
            return [0]
        if rows is not None and rows.only is not None:
            found = [rows.only]
        elif torch.compiler.is_compiling() and (rows is not None or (given is not None and given.only is None)):
            return None
        else:
            found = [] if rows is None else [*rows.present]
            if given is None and (rows is None or not rows.complete):
                found.append(self.control.untold(self.classes - 1, self.training))
            elif given is not None:
                if given.present is None:
                    return None
                found += given.present
        return sorted({number if most is None else min(number, most) for number in found})

    def classes_at(self, y: torch.Tensor, of_ids: bool = False) -> torch.Tensor:
        """The class of each token of an output `[B, S, ..., h]`, of a shape that broadcasts to it.

        Args:
            of_ids: whether it is an embedding, perhaps of positions that all rows share, `[1, S, h]`.

        Raises:
            ValueError: it has other tokens than the pass, so that nobody knows.
        """
        request, shape, tokens = self.control.request, y.shape[:-1], y.shape[:-1].numel()
        rows, given = request.classes, self._given(request)
        if given is None:
            assert rows is not None
            class_T = rows.class_B.masked_fill(rows.class_B < 0, self.control.untold(self.classes - 1, self.training))
        else:
            class_T = (given if rows is None else rows.over(given)).class_T
        class_T = class_T.to(y.device)
        if request.expansion is not None:
            class_T = class_T.clamp(max=request.expansion)
        count = len(class_T)
        shares = of_ids and shape[0] == 1 and len(shape) > 1 and count > 1
        if given is not None and count != tokens and len(shape) > 1 and count % shape[0] == 0 and not shares:
            class_BS = class_T.view(shape[0], -1)
            S, there = class_BS.shape[1], shape[1]
            if len(shape) > 2 and shape[-1] == S != there:  # [B, heads, S, h]
                return class_BS.view(-1, 1, S, 1)
            if there > S:  # virtual tokens before a row, or what a cache holds
                more_BV = (class_BS[:, :1] if self.training else class_BS[:, -1:]).expand(-1, there - S)
                class_BS = torch.cat([more_BV, class_BS] if self.training else [class_BS, more_BV], 1)
            return class_BS[:, -there:].view(-1, there, *[1] * (len(shape) - 1))
        if shares and count != tokens:
            return class_T.view(*((-1, shape[1]) if count % shape[1] == 0 and given is not None else (-1, 1)), 1)
        if tokens % count:
            raise ValueError(
                f"languages: an output of {list(y.shape)} has other tokens than the {count} whose language is known: "
                "run texts of one language at a time."
            )
        return class_T.repeat_interleave(tokens // count).view(*shape, 1)


class _Sum:
    """A module of the base, and one update for all tokens."""

    def __init__(self, module: Any, update: LoraUpdate) -> None:
        self.module, self.update = module, update

    @property
    def weight(self) -> torch.Tensor:
        """The sum's, for what reads weights itself."""
        change = self.update.scaling * self.update.lora_B.weight @ self.update.lora_A.weight
        weight = self.module.weight
        return weight + (change if change.shape == weight.shape else change.T)

    @property
    def bias(self) -> Any:
        """The sum's."""
        own, bias = self.update.lora_B.bias, self.module.bias
        return bias if own is None else bias + self.update.scaling * own

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x) + self.update(x)


class _Chosen:
    """What stands in a module's place for texts of several classes, or in training; `experts` run, of the classes
    `numbers` that occur, None where the host does not know."""

    def __init__(self, at: Choosing, name: str, module: Any, experts: Any, numbers: Any) -> None:
        self.at, self.name, self.module, self.experts, self.numbers = at, name, module, experts, numbers

    @property
    def only(self) -> Any:
        """The module of all tokens; None where their classes have several, each of which maps single tokens."""
        if self.experts is not None and len(self.experts) == 1:
            return self.at.alone(self.experts[0], self.name, self.module)
        if self.name not in self.at.tokenwise:
            raise ValueError(
                f"languages: {self.name} is no map of single tokens, and a language has its own: run the texts of each "
                "language in a batch of their own."
            )
        return None

    def __getattr__(self, name: str) -> Any:
        only = self.only
        if only is None and name in ("weight", "bias"):
            raise ValueError(
                f"languages: what reads {self.name}.{name} itself takes one for all, and a language has its own: give "
                "it the texts of one language at a time (TRL's SFT: per_device_train_batch_size=1)."
            )
        return getattr(self.module if only is None else only, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        at = self.at
        if (only := self.only) is not None:
            y, ran = only(*args, **kwargs), {*self.experts}
        else:
            y = self._several(args, kwargs)
            ran = set(range(1, at.classes)) if self.numbers is None else {*self.experts}
        if at.training and self.name in at.tokenwise:  # all are in the graph, so that all ranks have the same graph
            idle = (at.get(expert, self.name) for expert in range(1, len(at.experts)) if expert not in ran)
            y = y + sum(_nothing(own, args) for own in idle if own is not None)
        return y

    def _several(self, args: tuple, kwargs: Any) -> torch.Tensor:
        at, base = self.at, self.module(*args, **kwargs)
        y, class_T1 = base, at.classes_at(base, isinstance(self.module, nn.Embedding))
        for number in range(at.classes) if self.numbers is None else self.numbers:
            if (own := at.get(at.expert_of(number) or 0, self.name)) is None:
                continue
            is_own = class_T1 == number
            if not isinstance(own, LoraUpdate):
                y = torch.where(is_own, own(*args, **kwargs), y)
            elif at.training and is_own.numel() == base.shape[:-1].numel():
                # Where gradients flow, passes over whole outputs cost more than the update.
                y = y + own(*args, is_own)
            else:
                y = torch.where(is_own, base + own(*args), y)
        return y


def _nothing(own: Any, args: tuple) -> Any:
    """Zero, of a module that runs on no tokens."""
    kind: Any = type(own)
    if not takes_hidden_states_alone(kind) and not isinstance(own, LoraUpdate):  # positions
        return sum(parameter.flatten()[:0].sum() for parameter in own.parameters())
    return own(args[0][:0]).sum()


def is_tokenwise(owner: nn.Module, name: str) -> bool:
    """Whether a module maps each token alone, called as a whole, whatever kernels its block has."""
    module: Any = owner.get_submodule(name)
    parent = owner.get_submodule(name.rpartition(".")[0])
    if isinstance(module, nn.Embedding):
        return True
    has_state = hasattr(parent, "A_log") or any(isinstance(inner, _ConvNd) for inner in module.modules())
    has_parts = bool(module._parameters) and bool(module._modules)  # which its own methods may read
    return not has_state and not has_parts and takes_hidden_states_alone(type(module))  # type: ignore[arg-type]


def maps_of(entry: dict, layer: int) -> Maps:
    """What a language has in a layer, by its entry: rank and scaling by the names of modules in the layer, or None."""
    return entry.get("layers", {}).get(str(layer), entry["maps"])


class LayerModules(Choosing, ExpandedLayer):
    """The classes' own modules of a layer: a module beside the layer's own."""

    def __init__(self, layer: nn.Module, config: Any, layer_index: int, control: RoutingControl) -> None:
        super().__init__(config, layer_index, control)
        self.classes = len(self.experts_after_expansion)
        steps = enumerate(pairwise(self.experts_after_expansion))  # an expansion adds one expert to the layer, or none
        entries = [config.parts["languages"][number] for number, (before, after) in steps if after > before]
        self._make(layer, [maps_of(entry, layer_index) for entry in entries])

    expert_of = ExpandedLayer.expert_of


class OuterModules(Choosing, nn.Module):
    """The classes' own modules outside the layers: those of the decoder, or of the whole model, its heads."""

    def __init__(self, owner: nn.Module, maps: list[Maps], control: RoutingControl, heads: bool) -> None:
        super().__init__()
        self.control, self.classes = control, len(maps) + 1
        self._make(owner, maps, heads)


_CLASSES: dict[tuple, type] = {}


def _looking(base: type, *children: str) -> type:
    """A class of modules that look up these children by the class of a pass's texts."""
    if (base, *children) not in _CLASSES:
        own: dict[str, Any] = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
        own |= {child: _property(child) for child in children}
        own |= {"_looks": (base, *children), "__reduce__": lambda module: (_blank, module._looks, vars(module))}
        if issubclass(base, nn.Sequential | nn.ModuleList):  # whose children are looked up by number
            own["__iter__"] = lambda parts: iter([getattr(parts, name) for name in parts._modules])
            own["__getitem__"] = lambda parts, number: [*parts][number]
        _CLASSES[base, *children] = type(base.__name__, (base,), own)
    return _CLASSES[base, *children]


def _blank(base: type, *children: str) -> Any:
    return object.__new__(_looking(base, *children))


def _property(child: str) -> property:
    def chosen(parent: Any) -> Any:
        module = parent._modules[child]
        at = parent.__dict__.get("language_places", {}).get(child)
        return module if at is None or module is None else at[0].chosen(at[1], module)

    return property(chosen)

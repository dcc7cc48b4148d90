"""The promises of an expanded architecture, each with its check on a tiny twin of the model."""

import copy
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import torch

from hf_moe_expand import freeze
from hf_moe_expand.checkpoint.promises import expanded_twin, logits, starts_as_the_base, tiny_twin
from hf_moe_expand.modeling import auto_class, decoder_ffns


@dataclass(frozen=True)
class Twin:
    """A tiny dense model, the model right after its expansion, and one whose experts and routers have changed since."""

    dense: Any
    expanded: Any
    trained: Any

    @classmethod
    def of(cls, config) -> "list[Twin]":
        """With FFNs as experts, unless all layers are mixtures; with added experts if some are."""
        dense = tiny_twin(config)
        mixtures, kinds = [ffn.is_mixture for ffn in decoder_ffns(dense)], []
        if not all(mixtures):
            kinds.append({"num_experts_per_layer": [1 if mixture else 3 for mixture in mixtures]})
        if any(mixtures):
            kinds.append({"num_experts_per_layer": [3] * len(mixtures), "expert_kind": "added", "expert_width": 16})
        pairs = [(expanded_twin(dense, **fields), expanded_twin(dense, **fields)) for fields in kinds]
        return [cls(dense, expanded, _moved(other)) for expanded, other in pairs]


@torch.no_grad()
def _moved(model):
    """The model, after its new experts and routers have changed."""
    generator = torch.Generator().manual_seed(3)
    for parameter in _new(model):
        parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def _new(model):
    return [p for f in model.expanded_ffns().values() for m in (*f.experts[1:], f.router) for p in m.parameters()]


def _ids(rows, length):
    return torch.randint(3, 256, (rows, length), generator=torch.Generator().manual_seed(2))


def _keeps_the_base(twin):
    with twin.trained.use_expert(0):
        return torch.equal(logits(twin.trained), logits(twin.dense))


def _learns(twin):
    model, ids = copy.deepcopy(twin.trained).train(), _ids(4, 16)
    model(ids, labels=ids, use_cache=False).loss.backward()
    return all(parameter.grad is not None and bool(parameter.grad.any()) for parameter in _new(model))


def _stays_frozen(twin):
    model, ids = copy.deepcopy(twin.trained).train(), _ids(4, 16)
    freeze(model, "post-pretrain")
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model(ids, labels=ids, use_cache=False).loss.backward()
    torch.optim.SGD([p for p in model.parameters() if p.grad is not None], lr=1.0).step()
    new = {id(parameter) for parameter in _new(model)}
    return all(id(p) in new or torch.equal(p, before[name]) for name, p in model.named_parameters())


def _is_saved_whole(twin):
    with TemporaryDirectory() as folder:
        twin.trained.save_pretrained(folder)
        again, info = auto_class(twin.trained.config).from_pretrained(folder, output_loading_info=True)
        expected, state = twin.trained.state_dict(), again.state_dict()
        same = list(state) == list(expected) and all(torch.equal(state[name], expected[name]) for name in expected)
    return same and not any(info.values())


def _generates_with_a_cache(twin):
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    if twin.trained.config.is_encoder_decoder:
        options |= {"decoder_start_token_id": 2, "num_beams": 2, "forced_eos_token_id": None}
    return torch.equal(*(twin.trained.generate(_ids(2, 12), **options, use_cache=cached) for cached in (True, False)))


PROMISES = {
    "the expanded model computes what the base does": lambda twin: starts_as_the_base(twin.dense, twin.expanded),
    "expert 0 alone is the base, bit for bit": _keeps_the_base,
    "every new expert and router learns": _learns,
    "a step of stage 1 moves new experts and routers alone": _stays_frozen,
    "the model is the same after saving and loading": _is_saved_whole,
    "generation with a cache equals the full forward pass": _generates_with_a_cache,
}


def broken_promises(config) -> list[str]:
    """The promises that the architecture of a dense configuration does not keep."""
    return [words for twin in Twin.of(config) for words, holds in PROMISES.items() if not holds(twin)]

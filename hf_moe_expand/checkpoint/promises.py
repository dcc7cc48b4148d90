"""What an architecture must keep to be expanded, checked on a tiny twin of the model.

Architectures in `PROVEN` have passed the same checks in the tests; any other passes them when `expand` meets it.
"""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig

from ..auto_class import auto_class
from ..errors import InputError, first_line
from ..modeling import LayerMoEConfig, decoder_ffns
from .proven import is_proven, reason_left_out
from .stored import places
from .twin import VOCABULARY, tiny_twin

_EXPERTS = 3
_WIDTH = 16
_NEW_TOKENS = 4


@dataclass(frozen=True)
class Twin:
    """A tiny dense model, the model right after its expansion, and one whose experts and routers have changed since."""

    dense: Any
    expanded: Any
    trained: Any

    @classmethod
    def of(cls, config: PreTrainedConfig) -> list["Twin"]:
        """The twins of a dense model's configuration: one with experts that are FFNs, unless all layers are mixtures of
        experts of the backbone's own, and one with added experts if some are.

        Raises:
            ValueError: no twin can be built; the message has the reason.
        """
        dense = tiny_twin(config)
        mixtures = [ffn.is_mixture for ffn in decoder_ffns(dense)]
        kinds: list[dict[str, Any]] = []
        if not all(mixtures):
            kinds.append({"num_experts_per_layer": [1 if mixture else _EXPERTS for mixture in mixtures]})
        if any(mixtures):
            added = {"expert_kind": "added", "expert_width": _WIDTH}
            kinds.append({"num_experts_per_layer": [_EXPERTS] * len(mixtures), **added})
        return [cls._expanded(dense, fields) for fields in kinds]

    @classmethod
    def _expanded(cls, dense: Any, fields: dict[str, Any]) -> "Twin":
        own: Any = LayerMoEConfig.from_dense(dense.config, **fields)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            expanded = auto_class(own).from_config(own, dtype=torch.float32).eval()
        weights = dense.state_dict()
        with torch.no_grad():
            for key, place in places(expanded).items():
                if place.dense is not None:
                    expanded.state_dict()[key].copy_(weights[place.dense])
        return cls(dense, expanded, _moved(expanded))


class Promise(NamedTuple):
    """A promise, in the words of a refusal, and the check that it holds for a twin."""

    name: str
    words: str
    holds: Callable[[Twin], bool]


def _tokens(rows: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(3, VOCABULARY - 1, (rows, length), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def _logits(model: Any) -> torch.Tensor:
    return model(_tokens(), **_of_decoder(model)).logits


def _of_decoder(model: Any) -> dict[str, torch.Tensor]:
    """The decoder's own tokens, where it has some besides the encoder's."""
    return {"decoder_input_ids": _tokens(length=9)} if model.config.is_encoder_decoder else {}


@torch.no_grad()
def _moved(model: Any) -> Any:
    """A copy whose new experts and routers have changed."""
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(3)
    for ffn in model.expanded_ffns().values():
        for module in (*ffn.experts[1:], ffn.router):
            for parameter in module.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def _starts_as_the_base(twin: Twin) -> bool:
    expected, actual = _logits(twin.dense), _logits(twin.expanded)
    return torch.allclose(actual, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def _keeps_the_base(twin: Twin) -> bool:
    expected = _logits(twin.dense)
    with twin.trained.use_expert(0):
        return torch.equal(_logits(twin.trained), expected)


def _learns(twin: Twin) -> bool:
    model, ids = copy.deepcopy(twin.trained).train(), _tokens(rows=4, length=16)
    model(ids, labels=ids, use_cache=False).loss.backward()
    new = [p for f in model.expanded_ffns().values() for m in (*f.experts[1:], f.router) for p in m.parameters()]
    return all(parameter.grad is not None and bool(parameter.grad.any()) for parameter in new)


def _is_saved_whole(twin: Twin) -> bool:
    with TemporaryDirectory() as folder:
        twin.trained.save_pretrained(folder)
        loaded: Any = auto_class(twin.trained.config).from_pretrained(
            folder, trust_remote_code=False, output_loading_info=True
        )
        again, info = loaded
        expected = twin.trained.state_dict()
        state = again.state_dict()
        same = list(state) == list(expected) and all(torch.equal(state[name], expected[name]) for name in expected)
    return same and not any(info.values())


def _generates_with_a_cache(twin: Twin) -> bool:
    ids = _tokens()
    options: dict[str, Any] = {
        "max_new_tokens": _NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0
    }  # fmt: skip
    if twin.trained.config.is_encoder_decoder:
        options |= {"decoder_start_token_id": 2, "num_beams": 2, "forced_eos_token_id": None}
    with_cache, without = (twin.trained.generate(ids, **options, use_cache=cached) for cached in (True, False))
    return torch.equal(with_cache, without)


PROMISES = (
    Promise("start", "the expanded model computes what the base does", _starts_as_the_base),
    Promise("expert 0", "expert 0 alone is the base, bit for bit", _keeps_the_base),
    Promise("gradients", "every new expert and router learns", _learns),
    Promise("files", "the model is the same after saving and loading", _is_saved_whole),
    Promise("cache", "generation with a cache equals the full forward pass", _generates_with_a_cache),
)


def broken_promise(config: PreTrainedConfig) -> str | None:
    """What the architecture of a dense configuration does not keep; None if it keeps every promise."""
    try:
        twins = Twin.of(config)
    except Exception as error:  # models raise many types
        return first_line(error)
    for twin, promise in product(twins, PROMISES):
        try:
            if not promise.holds(twin):
                return f"it does not hold that {promise.words}"
        except Exception as error:
            return f"it cannot be shown that {promise.words} ({first_line(error)})"
    return None


def check_architecture(config: PreTrainedConfig, name: Any) -> None:
    """Refuses an architecture that does not keep the promises; messages call the model `name`. A proven one passes at
    once, any other is tried on a tiny twin.

    Raises:
        InputError: a promise does not hold; the message names it.
    """
    if is_proven(config):
        return
    values = config.to_dict()
    if reason := _broken(type(config), json.dumps(values, sort_keys=True, default=str)):  # type: ignore[arg-type]
        known = reason_left_out(config)
        reason = f"it is {known}" if known else f"on a tiny twin of the model, {reason}"
        raise InputError(f"{name}: a {config.model_type} checkpoint cannot be expanded: {reason} (docs/backbones.md).")


@lru_cache(maxsize=8)
def _broken(kind: Any, values: str) -> str | None:
    return broken_promise(kind(**json.loads(values)))

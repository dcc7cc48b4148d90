"""Models with a language gate, what the gate decides in them, and the same by a slow loop; for several test files."""

from collections.abc import Sequence

import torch
from conftest import tiny_config, tiny_dense

from hf_moe_expand import LayerMoEConfig, LayerMoEForCausalLM

LANGUAGES = [["en", "de"], ["el"], ["hu", "tr"]]
GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 256}
# The experts of each layer after each expansion: one class that is new, and two of which each has one expert.
ONE, TWO = [(1, 2, 2)], [(1, 2, 2), (1, 3, 3)]


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 250, shape, generator=torch.Generator().manual_seed(seed))


def gated_model(
    backbone: str = "qwen2", expansions: Sequence[Sequence[int]] = ONE, exclusive: bool = False, layer: int = 1,
    window: int = 5, top_k: int = 2, fields: dict | None = None, **changes,
) -> LayerMoEForCausalLM:  # fmt: skip
    """A model with random weights whose gate decides now one way, now the other. A layer below the gate may have
    experts."""
    *earlier, counts = map(list, expansions)
    languages = LANGUAGES[: len(expansions) + 1]
    history = [
        {
            "method": "x",
            "old_languages": [code for of_class in languages[:number] for code in of_class],
            "new_languages": languages[number],
        }
        for number in range(1, len(languages))
    ]
    config = LayerMoEConfig.from_dense(
        tiny_config(backbone, **changes), num_experts_per_layer=counts, earlier_experts_per_layer=earlier or None,
        exclusive_experts=exclusive, router_top_k=top_k, expansions=history,
        language_gate={"layer": layer, "languages": languages, "window": window, "bound": 2.0}, **fields or {},
    )  # fmt: skip
    torch.manual_seed(1)
    model = LayerMoEForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        ffn = model.get_submodule(model._gate_places[2])
        # Orthogonal to the mean of the layer's inputs, so that the tokens are evidence for all sides.
        found: list[torch.Tensor] = []
        handle = ffn.register_forward_pre_hook(lambda _, args: found.append(args[0]))
        model(tokens(8, 16, seed=2), languages="en")
        handle.remove()
        mean = torch.nn.functional.normalize(found[0].flatten(0, -2).mean(0), dim=0)
        weight = torch.randn_like(model.language_gate.weight)
        model.language_gate.weight.copy_(weight - (weight @ mean).unsqueeze(-1) * mean)
        model.language_gate.bias.zero_()
    return model


def dense_of(model, expert: Sequence[int] = ()) -> torch.nn.Module:
    """The dense model of expert 0, or of other experts of each layer."""
    dense = tiny_dense(model.config.backbone_model_type)
    state = {}
    for name, value in model.state_dict().items():
        before, found, after = name.partition(".experts.")
        if not found and not any(part in name for part in (".router.", ".language_gate.")):
            state[name] = value
        elif found:
            layer = next(number for number, ffn in model.expanded_ffns().items() if ffn is model.get_submodule(before))
            number, _, inner = after.partition(".")
            if int(number) == (expert[layer] if expert else 0):
                state[f"{before}.{inner}"] = value
    dense.load_state_dict(state)
    return dense


def all_go_to(model, number: int) -> None:
    """Every token is strong evidence for this class."""
    sizes = [len(codes) for codes in model.config.language_gate["languages"]]
    with torch.no_grad():
        model.language_gate.weight.zero_()
        model.language_gate.bias.fill_(0)
        model.language_gate.bias[sum(sizes[:number])] = 20.0

"""Models with a language gate, what the gate decides in them, and the same by a slow loop; for several test files."""

from collections.abc import Sequence

import torch
from conftest import shaken, tiny_config, tiny_dense

from hf_moe_expand import LayerMoEConfig, LayerMoEForCausalLM
from hf_moe_expand.modeling.language_gate import GateRule

LANGUAGES = [["en", "de"], ["el"], ["hu", "tr"]]
CODES = ["en", "el", "hu"]  # one of each class
GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 256}
# The experts of each layer after each expansion: one class that is new, and two of which each has one expert.
ONE, TWO = [(1, 2, 2)], [(1, 2, 2), (1, 3, 3)]
THREE = [(1, 4, 3), (1, 5, 5)]  # more experts than the two that a token takes
MAPS = {name: [4, 1.0] for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj")}
# Experts below the gate's layer; a gate in a layer without experts; several experts of a class; adapters.
KINDS = {
    "copies": {"expansions": [(2, 2, 2), (3, 3, 3)]},
    "top-k": {"expansions": [(2, 1, 3), (4, 1, 5)]},
    "exclusive": {"expansions": [(2, 2, 2), (3, 3, 3)], "exclusive": True},
    "exclusive of several": {"expansions": THREE, "exclusive": True},
    "adapters": {
        "expansions": [(2, 2, 2), (3, 3, 3)], "exclusive": True,
        "fields": {"expert_kind": "adapter", "adapters": [{"maps": MAPS}] * 2},
    },
}  # fmt: skip


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 250, shape, generator=torch.Generator().manual_seed(seed))


def gated_model(
    backbone: str = "qwen2", expansions: Sequence[Sequence[int]] = ONE, exclusive: bool = False, layer: int = 1,
    window: int = 5, top_k: int = 2, fields: dict | None = None, rule: dict | None = None, **changes,
) -> LayerMoEForCausalLM:  # fmt: skip
    """A model with random weights whose gate decides now one way, now the other. `rule` has more of the gate's."""
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
        language_gate={"layer": layer, "languages": languages, "window": window, "bound": 2.0, **(rule or {})},
        **(fields or {}),
    )  # fmt: skip
    torch.manual_seed(1)
    model = shaken(LayerMoEForCausalLM(config).eval())
    with torch.no_grad():
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


@torch.no_grad()
def slow_sums(model, text: Sequence[int]) -> list[float]:
    """The evidence of one text for each later class, in nats: the base reads its end, each token written out."""
    rule, text = GateRule.of(model.config), list(text)
    begin = [] if rule.begin is None else [rule.begin]
    own = text[len(begin) :] if begin and text[:1] == begin else text
    sums = [0.0] * (len(rule.languages) - 1)
    if not own:
        return sums
    seen: list[torch.Tensor] = []
    handle = model.get_submodule(model._gate_places[2]).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with model.use_expert(0):
        model(torch.tensor([begin + own[-128:]]))
    handle.remove()
    weight, bias = model.language_gate.weight.double(), model.language_gate.bias.double()
    for x in seen[0].flatten(0, -2)[len(begin) :][-rule.window :].double():
        odds = [own.logsumexp(0) for own in (weight @ x + bias).split([len(codes) for codes in rule.languages])]
        for number, one in enumerate(odds[1:]):
            sums[number] += round(1024 * rule.bound * torch.tanh((one - odds[0]) / rule.bound).item()) / 1024
    return sums


def slow_class(sums: Sequence[float]) -> int:
    return 1 + sums.index(max(sums)) if max(sums) > 0 else 0


def clear_texts(model, count: int, *lengths: int, seed: int = 0) -> list[list[int]]:
    """Texts whose class no rounding can change, `count` of each class."""
    left = dict.fromkeys(range(len(model.config.language_gate["languages"])), count)
    found: list[list[int]] = []
    while any(left.values()):
        seed += 1
        (text,) = tokens(1, lengths[seed % len(lengths)], seed=seed).tolist()
        sums = slow_sums(model, text)
        number, (*_, second, first) = slow_class(sums), sorted([0.0, *sums])
        if left[number] and first - second > 0.01:
            left[number] -= 1
            found.append(text)
    return found


def padded(texts: Sequence[Sequence[int]], side: str = "left", pad: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask."""
    longest = max(map(len, texts))
    rows, order = [], 1 if side == "left" else -1
    for text in texts:
        parts = [[(pad, 0)] * (longest - len(text)), [(token, 1) for token in text]][::order]
        rows.append([*parts[0], *parts[1]])
    ids, mask = torch.tensor(rows).unbind(-1)
    return ids, mask

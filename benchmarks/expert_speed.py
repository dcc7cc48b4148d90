"""Speed of one expanded FFN, as a multiple of a dense FFN's time.

    python benchmarks/expert_speed.py --hidden 512 --experts 4 --tokens 1 4096 --out expert_speed.md

A gated FFN of `2.75 h` (rounded to 64) is expanded; 2 experts a token, evenly drawn. Each row is one pass:

- `forward`: evaluation, no gradients;
- `forward+backward`: all experts train;
- `expert 0 frozen`: the same with a frozen expert 0, as in stage 1, against a dense FFN whose weights all train;
- `old tokens`: `forward` behind a classifier that classifies every token as old.

`dense ms` is one dense FFN of the width of 2 experts, hence of equal active FLOPs; in `old tokens`, of one. The other
columns are multiples of it: ours, as it chooses by default and with `in_turn` (one expert after
the other); Mixtral's block of transformers with its `eager`, `grouped_mm` and `batched_mm` experts (the last while it
copies no more weights than there are experts); a plain loop (masks, `torch.where`, `index_add_`), as in research code.
They share routing and equal weights, and the run stops if their outputs or gradients disagree. `autocast` is bfloat16
autocast over float32 weights, which transformers' grouped_mm ignores: it computes in float32.

Set MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_THRESHOLD_ to 100000000000 on a CPU, or allocation dominates the times.
"""

import argparse
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain, product
from typing import Any

import torch
import torch.nn.functional as F
from models import ffn_size
from timing import parser, ratio, report, time_in_turn
from torch import nn
from tqdm.auto import tqdm
from transformers import MixtralConfig, Qwen2Config
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

from hf_moe_expand import LayerMoEConfig
from hf_moe_expand.modeling.expanded_ffn import ExpandedFFN
from hf_moe_expand.modeling.routing import Classifier
from hf_moe_expand.modeling.routing_control import RoutingControl

TOP_K = 2
# Columns, and whether our experts run in turn in the first two.
WAYS = {"default": False, "eager": True}
OURS, LOOP = "default", "loop"
BATCHED = "Mixtral batched_mm"
MIXTRAL = {"Mixtral eager": "eager", "Mixtral grouped_mm": "grouped_mm", BATCHED: "batched_mm"}
COLUMNS = (*WAYS, *MIXTRAL, LOOP)
HEAD = ["hidden", "experts", "tokens", "dtype", "pass", "dense ms", *COLUMNS]
PASSES = ("forward", "forward+backward", "expert 0 frozen", "old tokens")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "autocast": torch.float32}
# Largest difference, as a share of the largest value.
TOLERANCE = {"fp32": 3e-5, "bf16": 3e-2, "autocast": 3e-2}


class LoopFFN(nn.Module):
    """Runs one expert after the other on the tokens that a mask selects, and adds results in the model's dtype."""

    def __init__(self, router_weight: nn.Parameter, experts: nn.ModuleList) -> None:
        super().__init__()
        self.router_weight, self.experts = router_weight, experts

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x_Th = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores_TN = F.linear(x_Th, self.router_weight).float().softmax(-1)
        weights_TK, index_TK = scores_TN.topk(TOP_K)
        weights_TK = (weights_TK / weights_TK.sum(-1, keepdim=True)).to(x_Th.dtype)
        mask_NKT = F.one_hot(index_TK, len(self.experts)).permute(2, 1, 0)
        y_Th = torch.zeros_like(x_Th)
        for expert, mask_KT in zip(self.experts, mask_NKT, strict=True):
            place, token = torch.where(mask_KT)
            y = expert(x_Th[token]) * weights_TK[token, place, None]
            y_Th.index_add_(0, token, y.to(y_Th.dtype))
        return y_Th.view(hidden_states.shape)


def gated_ffn(hidden: int, intermediate: int) -> Qwen2MLP:
    ffn = Qwen2MLP(Qwen2Config(hidden_size=hidden, intermediate_size=intermediate))
    for parameter in ffn.parameters():
        nn.init.normal_(parameter, std=0.02)
    return ffn


def build(hidden: int, experts: int, mode: str, device: str, seed: int) -> tuple[nn.Module, dict[str, nn.Module]]:
    """The dense FFN with equal active FLOPs, and all implementations of the same expanded FFN."""
    torch.manual_seed(seed)
    size, dtype = ffn_size(hidden), DTYPES[mode]
    with torch.device(device):
        ours = ExpandedFFN(gated_ffn(hidden, size), _config(hidden, experts), 0, RoutingControl()).to(dtype)
        dense = gated_ffn(hidden, TOP_K * size).to(dtype)
        with torch.no_grad():
            for parameter in ours.experts.parameters():
                nn.init.normal_(parameter, std=0.02)
            ours.router.weight.copy_(torch.eye(experts, hidden))
    found: dict[str, nn.Module] = {}
    for name, in_turn in WAYS.items():
        found[name] = copy.copy(ours)  # the same experts and router
        found[name].in_turn = in_turn  # type: ignore[assignment]
    shared = _stacked(ours)
    for name, implementation in MIXTRAL.items():
        config = MixtralConfig(
            hidden_size=hidden,
            intermediate_size=size,
            num_local_experts=experts,
            num_experts_per_tok=TOP_K,
            experts_implementation=implementation,
        )
        with torch.device("meta"):
            block = MixtralSparseMoeBlock(config)
        block.gate.weight = ours.router.weight
        block.experts.gate_up_proj, block.experts.down_proj = shared
        found[name] = block
    found[LOOP] = LoopFFN(ours.router.weight, ours.experts)
    return dense, found


def _config(hidden: int, experts: int) -> LayerMoEConfig:
    return LayerMoEConfig(
        backbone_model_type="qwen2", hidden_size=hidden, num_hidden_layers=1, num_experts_per_layer=[experts],
        router_top_k=TOP_K,
    )  # fmt: skip


def _stacked(ours: ExpandedFFN) -> tuple[nn.Parameter, nn.Parameter]:
    gate_up = torch.stack([torch.cat([e.gate_proj.weight, e.up_proj.weight]) for e in ours.experts])
    down = torch.stack([e.down_proj.weight for e in ours.experts])
    return nn.Parameter(gate_up.detach()), nn.Parameter(down.detach())


def draw_tokens(tokens: int, hidden: int, experts: int, mode: str, device: str, seed: int) -> torch.Tensor:
    """`[1, T, h]`. The first N features are the router logits (its weights are an identity): distinct multiples of 1/2,
    which are exact in every implementation's dtype. The next feature is 1."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, tokens, hidden, generator=generator)
    x[..., :experts] = torch.rand(1, tokens, experts, generator=generator).argsort(-1) / 2
    x[..., experts] = 1
    return x.to(device, DTYPES[mode])


def forward_pass(module: nn.Module, x: torch.Tensor, mode: str) -> Callable[[], torch.Tensor]:
    module.eval()

    def call() -> torch.Tensor:
        with torch.no_grad(), _precision(mode, x):
            return module(x)

    return call


def training_pass(module: nn.Module, x: torch.Tensor, mode: str, seed: int) -> Callable[[], list[torch.Tensor]]:
    """Output, then the gradients of the input and of all trained parameters."""
    module.train()
    x = x.detach().requires_grad_()
    gradient = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(x)
    wanted = [x, *(parameter for parameter in module.parameters() if parameter.requires_grad)]

    def call() -> list[torch.Tensor]:
        with _precision(mode, x):
            y = module(x)
        return [y, *torch.autograd.grad(y, wanted, gradient.to(y.dtype), allow_unused=True)]

    return call


def _precision(mode: str, x: torch.Tensor) -> Any:
    return torch.autocast(x.device.type, torch.bfloat16) if mode == "autocast" else nullcontext()


def check_agreement(found: dict[str, torch.Tensor], what: str, tolerance: float) -> None:
    """Raises RuntimeError if an implementation's result differs from ours."""
    ours = found[OURS].float()
    for name, other in found.items():
        error = ((other.float() - ours).abs().max() / ours.abs().max()).item()
        if not error <= tolerance:
            raise RuntimeError(f"{name}: {what} differs from {OURS}'s by {error:.1e} of its largest value.")


def measure(
    options: argparse.Namespace, hidden: int, experts: int, all_tokens: Sequence[int], mode: str
) -> Iterator[list[str]]:
    """Yields one row for each number of tokens and pass."""
    dense, found = build(hidden, experts, mode, options.device, options.seed)
    for tokens in all_tokens:
        yield from _measure(options, dense, found, (hidden, experts, tokens, mode))


def _measure(
    options: argparse.Namespace, dense: nn.Module, found: dict[str, nn.Module], case: tuple[int, int, int, str]
) -> Iterator[list[str]]:
    hidden, experts, tokens, mode = case
    x = draw_tokens(tokens, hidden, experts, mode, options.device, options.seed)
    ours: Any = found[OURS]  # whose experts all of WAYS have
    _set_classifier(found, None)
    ours.experts.requires_grad_(True)
    columns = [name for name in found if name != BATCHED or tokens * TOP_K <= experts]

    def row(kind: str, reference: nn.Module, names: list[str], passing: Callable[..., Any], *extra: Any) -> list[str]:
        cases = {"dense": passing(reference, x, mode, *extra)}
        cases |= {name: passing(found[name], x, mode, *extra) for name in names}
        times = time_in_turn(cases, options.repeats, options.device, options.clock)
        figures = [f"{ratio(times, name, 'dense'):.2f}" if name in names else "–" for name in COLUMNS]
        return [str(hidden), str(experts), str(tokens), mode, kind, f"{1000 * min(times['dense']):.3f}", *figures]

    outputs = {name: forward_pass(found[name], x, mode)() for name in columns}
    check_agreement(outputs, "the output", TOLERANCE[mode])
    yield row("forward", dense, columns, forward_pass)
    gradients = {name: training_pass(found[name], x, mode, options.seed)()[1] for name in columns}
    check_agreement(gradients, "the input's gradient", TOLERANCE[mode])
    del outputs, gradients
    yield row("forward+backward", dense, columns, training_pass, options.seed)
    ours.experts[0].requires_grad_(False)
    ways = [name for name in WAYS if name in columns]
    # Mixtral's experts are one parameter, of which no part can be frozen.
    yield row("expert 0 frozen", dense, [*ways, LOOP], training_pass, options.seed)
    classifier = Classifier(hidden, 2).to(x)
    with torch.no_grad():
        classifier.weight.zero_()[0, experts] = 1
    _set_classifier(found, classifier)
    alone, home = forward_pass(ours.experts[0], x, mode)(), forward_pass(ours, x, mode)()
    check_agreement({OURS: home, "expert 0": alone}, "an old token's output", TOLERANCE[mode])
    if (experts <= TOP_K or options.device == "cpu") and not torch.equal(home, alone):
        raise RuntimeError(f"{OURS}: an old token's output is not that of expert 0 bit for bit.")
    yield row("old tokens", ours.experts[0], ways, forward_pass)


def _set_classifier(found: Mapping[str, Any], classifier: nn.Module | None) -> None:
    for name in WAYS:  # copies, which share one dictionary of modules
        vars(found[name]).pop("classifier", None)
        found[name].classifier = classifier


def rows(options: argparse.Namespace) -> Iterator[list[list[str]]]:
    """Yields each row once it is measured."""
    tokens = options.tokens or [1, 16, 64, 4096] + [32768] * (options.device == "cuda")
    for hidden, experts, mode in tqdm(list(product(options.hidden, options.experts, options.dtypes)), unit="case"):
        for row in measure(options, hidden, experts, tokens, mode):
            yield [row]


def options_parser() -> argparse.ArgumentParser:
    """The script's options."""
    found = parser(__doc__, repeats=7)
    found.add_argument("--hidden", type=int, nargs="+", default=[512, 1024, 2048])
    found.add_argument("--experts", type=int, nargs="+", default=[2, 4, 8])
    found.add_argument("--tokens", type=int, nargs="+", help="(1 16 64 4096, with cuda also 32768)")
    found.add_argument("--dtypes", choices=list(DTYPES), nargs="+", default=list(DTYPES))
    return found


def main(arguments: list[str] | None = None) -> None:
    options = options_parser().parse_args(arguments)
    report("Expanded FFN", HEAD, list(chain.from_iterable(rows(options))), options)


if __name__ == "__main__":
    main()

"""Compares greedy generation with the cache on, in tokens a second, with the dense base.

    python benchmarks/generate.py --out generate.md

A Qwen2 shape (30 M parameters by default) and its expansion, 2 experts a token; the run stops if their logits differ.
The second row is a dense model with as many active FLOPs: `of limit` is the share of its speed that a row reaches.
"eager" is the expansion whose experts run in turn. "classifiers" are in the last third of the layers (or in
`--classifiers` layers); the row names the class that they give every token; "told" rows are told the language
(`languages=`). "gate" rows have one gate in the first third and exclusive experts from its layer on; the row names
where it sends every token. "whole" and "rank 16" rows have two languages from `expand --tuned`, of whose fine-tunes
every tensor differs from the base's: embedding, head and all modules of the layers are theirs, whole or as updates.
`--cache static` generates with a static cache, on a GPU compiled.
"""

import argparse
import copy
from collections.abc import Callable, Iterator
from itertools import chain, product
from typing import Any

import torch
from models import add_model_options, dense_config, dense_model, uniform_plan
from timing import parser, ratio, report, time_in_turn
from torch import nn

from hf_moe_expand import Plan, expand_model, expand_tuned
from hf_moe_expand.checkpoint.gate import Gate
from hf_moe_expand.modeling.language_gate import GateRule

BASE, WIDE, EXPANDED = "dense base", "dense, FFN 2 x as wide", "expanded"
EAGER = "expanded, eager"
OLD, NEW = "classifiers: old language", "classifiers: new language"
WORD = "expanded, told an old language"
HOME, GATED = "gate: home", "gate: new language"
ONE, BOTH = "told one language", "told two in turn"
TUNED = {f"{size}, {told}": rank for size, rank in (("whole", None), ("rank 16", 16)) for told in (ONE, BOTH)}
ROWS = (BASE, WIDE, EXPANDED, EAGER, NEW, OLD, WORD, HOME, GATED, *TUNED)
HEAD = ["cache", "batch", "model", "tokens/s", "speed", "of limit"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2}


def make_models(options: argparse.Namespace) -> dict[str, Any]:
    """The models of the rows; all but the wide one, untold, give the same outputs."""
    config, dtype = dense_config(options, options.layers), DTYPES[options.dtype]
    found = {BASE: dense_model(config, options.seed, dtype, options.device)}
    found[WIDE] = dense_model(dense_config(options, options.layers, ffn_widths=2), options.seed, dtype, options.device)
    classifiers = options.layers // 3 if options.classifiers is None else options.classifiers
    for name in options.rows:
        if name in found:
            continue
        if name in (HOME, GATED):
            found[name] = _gated(found[BASE], options.layers // 3, to_new=name == GATED)
            continue
        if name in TUNED:
            same = next((found[other] for other in found if TUNED.get(other, 0) == TUNED[name]), None)
            found[name] = same or _tuned(found[BASE], TUNED[name], options.seed)
            continue
        plan = uniform_plan(options.layers, options.experts, classifiers if name in (NEW, OLD) else 0)
        # A copy, since an expansion in memory shares the base's weights.
        found[name] = copy.deepcopy(expand_model(found[BASE], plan, seed=options.seed))
        for ffn in found[name].expanded_ffns().values():
            ffn.in_turn = name == EAGER
            if ffn.classifier is not None:
                ffn.classifier.register_forward_hook(_decide_old if name == OLD else _decide_new)
    return {name: model.to(options.device).eval() for name, model in found.items()}


def _gated(base: Any, layer: int, to_new: bool) -> Any:
    """The base with a gate that sends every token home or to the new experts, which are exclusive copies."""
    counts = [1] * layer + [2] * (base.config.num_hidden_layers - layer)
    plan = Plan("exclusive", counts, old=["en"], new=["el"], exclusive=True)
    gate = Gate(GateRule(layer, [["en"], ["el"]]), torch.zeros(2, base.config.hidden_size), torch.zeros(2))
    model = copy.deepcopy(expand_model(base, plan, gate=gate))
    with torch.no_grad():
        model.language_gate.bias.copy_(torch.tensor([float(not to_new), float(to_new)]))
    return model


def _tuned(base: Any, rank: int | None, seed: int) -> Any:
    """The base with two fine-tunes as languages, which differ from it in every tensor."""
    torch.manual_seed(seed)
    tuned = {code: copy.deepcopy(base) for code in ("el", "hu")}
    with torch.no_grad():
        for weight in (weight for model in tuned.values() for weight in model.parameters()):
            weight += 0.1 * (weight.std() if weight.dim() > 1 else 1) * torch.randn_like(weight)
    return expand_tuned(base, tuned, None, ["en"], rank=rank)


# A classifier without a bias cannot give all inputs one class by its weights alone.
def _decide_old(module: nn.Module, inputs: Any, logits_TC: torch.Tensor) -> torch.Tensor:
    return logits_TC * 0 + torch.tensor([1.0, 0.0], device=logits_TC.device)


def _decide_new(module: nn.Module, inputs: Any, logits_TC: torch.Tensor) -> torch.Tensor:
    return logits_TC * 0 + torch.tensor([0.0, 1.0], device=logits_TC.device)


def make_prompts(options: argparse.Namespace, batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(options.seed)
    return torch.randint(1, options.vocabulary, (batch, options.prompt), generator=generator).to(options.device)


def generation(
    name: str, model: Any, prompts: torch.Tensor, tokens: int, cache: str = "dynamic"
) -> Callable[[], torch.Tensor]:
    """A call that returns the prompts, each continued by `tokens` tokens."""
    options: dict[str, Any] = {"attention_mask": torch.ones_like(prompts), "do_sample": False, "use_cache": True}
    if cache == "static":
        options["cache_implementation"] = "static"
    turns = [("el", "hu")[row % 2] for row in range(len(prompts))]
    told: dict[str, Any] = {"languages": "en"} if name == WORD else {}
    if name in TUNED:
        told = {"languages": "el" if name.endswith(ONE) else turns}

    def call() -> torch.Tensor:
        return model.generate(prompts, max_new_tokens=tokens, min_new_tokens=tokens, **options, **told)

    return call


def check_agreement(models: dict[str, Any], prompts: torch.Tensor, tolerance: float) -> None:
    """Raises RuntimeError if an expanded model's logits differ from the base's."""
    with torch.no_grad():
        logits = {name: model(prompts).logits.float() for name, model in models.items() if name != WIDE}
    for name, other in logits.items():
        error = ((other - logits[BASE]).abs().max() / logits[BASE].abs().max()).item()
        if not error <= tolerance:
            raise RuntimeError(f"{name}: logits differ from the base's by {error:.1e} of their largest value.")


def rows(options: argparse.Namespace) -> Iterator[list[list[str]]]:
    """Yields the rows, those of a cache and a batch size together."""
    models = make_models(options)
    torch.compiler.reset()  # a static cache is compiled on a GPU, and there is a limit of compilations
    for cache, batch in product(options.cache, options.batch):
        prompts = make_prompts(options, batch)
        check_agreement(models, prompts, TOLERANCE[options.dtype])
        calls = {name: generation(name, model, prompts, options.tokens, cache) for name, model in models.items()}
        times = time_in_turn(calls, options.repeats, options.device, options.clock)
        found = []
        for name in models:
            speed = batch * options.tokens / min(times[name])
            shares = [f"{ratio(times, limit, name):.2f}" for limit in (BASE, WIDE)]
            found.append([cache, str(batch), name, f"{speed:,.0f}", *shares])
        yield found


def title(options: argparse.Namespace) -> str:
    """What the table shows."""
    found = f"Generation, {options.layers} layers of {options.hidden}, {options.experts} experts, {options.dtype}"
    return f"{found}, prompt {options.prompt}, {options.tokens} new"


def options_parser() -> argparse.ArgumentParser:
    """The script's options."""
    found = parser(__doc__, repeats=7)
    add_model_options(found, hidden=512, vocabulary=8192)
    found.add_argument("--layers", type=int, default=8, help="decoder layers (%(default)s)")
    found.add_argument("--classifiers", type=int, help="layers with a classifier (a third)")
    found.add_argument("--batch", type=int, nargs="+", default=[1, 16], help="batch sizes (%(default)s)")
    found.add_argument("--prompt", type=int, default=32, help="tokens of a prompt (%(default)s)")
    found.add_argument("--tokens", type=int, default=64, help="generated tokens (%(default)s)")
    found.add_argument("--dtype", choices=list(DTYPES), default="bf16", help="(%(default)s)")
    found.add_argument("--cache", choices=["dynamic", "static"], nargs="+", default=["dynamic"], help="(dynamic)")
    found.add_argument("--rows", choices=ROWS, nargs="+", default=list(ROWS), help="besides the dense models (all)")
    return found


def main(arguments: list[str] | None = None) -> None:
    options = options_parser().parse_args(arguments)
    report(title(options), HEAD, list(chain.from_iterable(rows(options))), options)


if __name__ == "__main__":
    main()

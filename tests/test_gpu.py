"""The promises of the expanded layers on a GPU (`make gpu`); each runs on the CPU too, so that its code works."""

import copy
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from conftest import moved, tiny_dense
from layers import assert_is_the_definition, build, drawn
from test_adapters import KIND, PLAN, merged
from test_dispatch import WAYS

from hf_moe_expand import LayerMoEForCausalLM, Plan, expand_model
from hf_moe_expand.checkpoint.gate import Gate
from hf_moe_expand.modeling.dispatch import FEW_ROWS
from hf_moe_expand.modeling.language_gate import GateRule

CLOSE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # of the largest value
# No mask, so that transformers' own code, which reads values of one on the host, does not run.
UNMASKED = {"attention_mask": {"full_attention": None}, "use_cache": False}

CUDA = [pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in CLOSE]
pytestmark = pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float32), *CUDA])


def models(device, dtype, experts, judge=None, differ=True, exclusive=False, **changes):
    """A dense model and its expansion, with classifiers or a gate; `differ`: its experts are no copies."""
    dense = tiny_dense("qwen2", dtype=dtype, **changes)
    layers = dense.config.num_hidden_layers
    classifiers = list(range(layers)) if judge == "classifier" else []
    plan = Plan("own", [experts] * layers, classifiers, old=["en"], new=["el"], exclusive=exclusive)
    weight, bias = torch.zeros(2, dense.config.hidden_size), torch.zeros(2)
    gate = Gate(GateRule(0, [["en"], ["el"]]), weight, bias) if judge == "gate" else None
    model = expand_model(tiny_dense("qwen2", dtype=dtype, **changes), plan, gate=gate).eval()
    if differ:
        draw = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for ffn in model.expanded_ffns().values():
                for parameter in ffn.experts[1:].parameters():
                    parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.4)
    return dense.to(device), model.to(device)


def adapted(device, dtype, judge=None):
    """A dense model, and the same with an adapter of Greek, whose updates are far from nothing."""
    dense = tiny_dense("qwen2", dtype=dtype, num_hidden_layers=3)
    model = expand_model(tiny_dense("qwen2", dtype=dtype, num_hidden_layers=3), PLAN, **KIND)
    if judge == "gate":
        config = copy.deepcopy(model.config)
        config.parts["gate"] = {"layer": 0, "languages": [["en"], ["el"]]}
        judged = LayerMoEForCausalLM._from_config(config, dtype=dtype)
        judged.load_state_dict(model.state_dict(), strict=False)
        model = judged
    return dense.to(device), moved(model, scale=0.2).to(device).eval()


def text(device, rows, length, seed=0):
    return torch.randint(0, 250, (rows, length), generator=torch.Generator().manual_seed(seed)).to(device)


def send_home(model, is_home_T):
    """Lets every classifier, or the gate, send these tokens, or rows, home and no others."""
    logits_TC = torch.stack([is_home_T, ~is_home_T], -1).float() * 9
    for ffn in model.expanded_ffns().values():
        if ffn.classifier is not None:
            ffn.classifier.register_forward_hook(lambda *_: logits_TC)
    if hasattr(model, "language_gate"):
        model.language_gate.register_forward_hook(lambda *_: (logits_TC[:, 1:] - logits_TC[:, :1]).int())


def assert_close(found, expected, dtype):
    torch.testing.assert_close(found, expected, rtol=0, atol=CLOSE[dtype] * expected.abs().max().item())


@contextmanager
def no_value_read(device):
    """Lets CUDA raise an error where the host waits for a value."""
    if device == "cpu":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def as_graph(function, example):
    """The function itself, on a GPU as a CUDA graph that was captured with the example."""
    if example.device.type == "cpu":
        return function
    given = example.clone()
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            function(given)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = function(given)

    def replay(other):
        given.copy_(other)
        graph.replay()
        return output.clone()

    return replay


def tokens_without_a_read(device, experts):
    """How many tokens a layer takes without reading a value on the host, unless each token takes all experts."""
    return 1000 if experts <= 2 or device == "cpu" else FEW_ROWS // experts


@torch.no_grad()
@pytest.mark.parametrize("experts", [2, 4])
def test_right_after_expansion_it_computes_what_the_base_does(device, dtype, experts):
    dense, model = models(device, dtype, experts, differ=False)
    for ids in (text(device, 1, 5), text(device, 3, 40)):
        assert_close(model(ids).logits, dense(ids).logits, dtype)


def asked_of_two(model, judge, length):
    """Sends the second of three rows to new experts: what its pass is told."""
    if judge == "languages":
        return {"languages": ["en", "el", "en"]}
    device = next(model.parameters()).device
    send_home(model, torch.tensor([True, False, True], device=device).repeat_interleave(length))
    return {}


@torch.no_grad()
@pytest.mark.parametrize(
    ("judge", "experts", "exclusive"),
    [(judge, experts, False) for judge in ("classifier", "gate", "languages") for experts in (2, 4)]
    + [("gate", 2, True)],
)
def test_a_token_sent_home_gets_the_bases_bits(device, dtype, judge, experts, exclusive):
    """By classifiers where a token takes all experts, and else to rounding; by a gate or the user always."""
    dense, model = models(device, dtype, experts, judge, exclusive=exclusive)
    is_told = judge != "classifier"

    def check(found, base, exact):
        assert torch.equal(found, base) if exact else assert_close(found, base, dtype) is None

    for length in (1, 40):
        ids = text(device, 3, length)
        base, found = dense(ids).logits, model(ids, **asked_of_two(model, judge, length)).logits
        check(found[[0, 2]], base[[0, 2]], exact=is_told or experts == 2)
        assert not torch.allclose(found[1], base[1], rtol=0.1)
        if judge != "languages":
            send_home(model, torch.ones(3 * length, dtype=torch.bool, device=device))
        found = model(ids, **({"languages": "en"} if judge == "languages" else {})).logits
        check(found, base, exact=is_told or device == "cpu")


@torch.no_grad()
@pytest.mark.parametrize("judge", ["gate", "languages"])
def test_an_adapter_is_in_the_weights_of_its_tokens_alone(device, dtype, judge):
    dense, model = adapted(device, dtype, judge)
    greek = merged(model, dense, 1)
    for length in (1, 40):
        ids = text(device, 3, length)
        found, base = model(ids, **asked_of_two(model, judge, length)).logits, dense(ids).logits
        assert torch.equal(found[[0, 2]], base[[0, 2]])
        assert_close(found[1], greek(ids).logits[1], dtype)
        assert not torch.allclose(found[1], base[1], rtol=0.1)


@torch.no_grad()
def test_a_pass_that_is_judged_reads_two_values_on_the_host_and_a_told_one_none(device, dtype):
    _, model = models(device, dtype, 2, "gate", exclusive=True)
    ids = text(device, 2, 40)
    model(ids, use_cache=False)
    reads, read = [], torch.Tensor.tolist
    with patch.object(torch.Tensor, "tolist", lambda tensor: reads.append(tensor.shape) or read(tensor)):
        model(ids, use_cache=False)
    assert len(reads) == 2  # the texts' lengths, and their classes
    if device != "cpu":
        ffn = model.expanded_ffns()[1]
        x = torch.randn(1, 80, model.config.hidden_size, device=device, dtype=dtype)
        with model.use_languages("el"), no_value_read(device):
            ffn(x)


@pytest.mark.parametrize("form", ["gated", "conv1d"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_is_the_definition_with_every_gradient(device, dtype, way, form):
    for N, T in ((2, 3), (4, 1), (9, 70)):
        experts = build(form, N, dtype=dtype).experts.to(device)
        experts[0].requires_grad_(False)
        given = [one.to(device) for one in drawn(T, 2, N, dtype)]
        assert_is_the_definition(WAYS[way], experts, *given)
    assert_is_the_definition(WAYS[way], experts, *(one.to(device) for one in drawn(70, 2, 9)), autocast=True)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("experts", [2, 4])
def test_the_layer_reads_no_value_on_the_host(device, dtype, experts, mode):
    layer = getattr(build("gated", experts, dtype=dtype, has_classifier=True).to(device), mode)()
    layer.experts[0].requires_grad_(False)
    for tokens in (1, tokens_without_a_read(device, experts)):
        x = torch.randn(1, tokens, 16).to(device, dtype).requires_grad_()
        layer(x).sum().backward()  # libraries may set themselves up the first time
        with no_value_read(device):
            y = layer(x)
            y.sum().backward()
        assert y.isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("experts", [2, 4])
def test_a_captured_graph_of_a_forward_pass_replays_exactly(device, dtype, experts):
    _, model = models(device, dtype, experts, "classifier")
    length = tokens_without_a_read(device, experts) // 2
    first, second = (text(device, 2, length, seed) for seed in (0, 1))
    replay = as_graph(lambda ids: model(ids, **UNMASKED).logits, first)
    for ids in (first, second):
        assert torch.equal(replay(ids), model(ids, **UNMASKED).logits)
    torch.testing.assert_close(model(first, **UNMASKED).logits, model(first).logits)


@torch.no_grad()
@pytest.mark.parametrize(("judge", "experts"), [("classifier", 4), ("gate", 4), ("exclusive", 2), ("adapter", 2)])
def test_it_generates_with_a_static_cache(device, dtype, judge, experts):
    """On a GPU transformers compiles it. Each token is the best by a pass without a cache, to rounding."""
    prompts, said = text(device, 2, 7), {}
    options = {"attention_mask": torch.ones_like(prompts), "do_sample": False, "eos_token_id": None}
    if judge == "adapter":
        _, model = adapted(device, dtype)
        said["languages"] = ["en", "el"]
    else:
        exclusive, judge = judge == "exclusive", "classifier" if judge == "classifier" else "gate"
        _, model = models(device, dtype, experts, judge, exclusive=exclusive, num_hidden_layers=1)
        said = {"languages": ["en", "el"]} if judge == "gate" else {}
    torch.compiler.reset()
    found = model.generate(prompts, max_new_tokens=8, cache_implementation="static", **options, **said)
    assert found.shape == (2, 15)
    logits = model(found[:, :-1], **said).logits[:, 6:].float()
    least = logits.amax(-1) - CLOSE[dtype] * logits.abs().max()
    assert (logits.gather(-1, found[:, 7:, None]).squeeze(-1) >= least).all()
    assert (logits >= least.unsqueeze(-1)).sum(-1).float().mean() < 5  # else many tokens would do

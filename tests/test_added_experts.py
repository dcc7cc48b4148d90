"""Added experts and LoRA experts: beside expert 0, on dense bases and on bases that are mixtures; packs; refusals."""

import pytest
import torch
import torch.nn.functional as F
from added import EXPERTS, IDS, MIXTURES, PLAN, WIDTH, build, saved_in
from conftest import ADDED, BACKBONE_NAMES, invoke, load, move, refused, shaken, tensors, tiny_config, write_texts
from layers import ask
from safetensors.torch import load_file, save_file

from hf_moe_expand import (
    DenseConfig,
    LanguageText,
    LayerMoEConfig,
    LayerMoEForCausalLM,
    Plan,
    expand_checkpoint,
    join_expansions,
    train_stage,
)
from hf_moe_expand.checkpoint.average import average_checkpoints
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.modeling.part_lora import LoraLinear
from hf_moe_expand.modeling.updates import LoraFactor
from hf_moe_expand.report.inspection import inspect_checkpoint
from hf_moe_expand.stages.kinds.dense import LoraSettings
from hf_moe_expand.trainers import Masking, mask_routing

BASES = ("qwen2", "bloom", *MIXTURES)
# Tensor names of a mixture of which each expert is stored by itself.
ONE_BY_ONE = "model.layers.0.mlp.experts.0.experts.3.gate_proj.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return saved_in(tmp_path_factory.mktemp("added"))


def of_definition(ffn, x_Th, residual):
    """`E_0(x) + sum_e w_e D_e(x)`, one token and expert after the other, in float64."""
    routing = ffn.route(ffn.control.request, x_Th, None, None, None)
    y = ffn.experts[0](x_Th[None], *(() if residual is None else (residual[None],)))
    y = (y[0] if isinstance(y, tuple) else y)[0].double()
    for token, (weights, experts) in enumerate(zip(routing.weights, routing.experts, strict=True)):
        for weight, expert in zip(weights.double(), experts, strict=True):
            if 0 < expert < len(ffn.experts):
                gate, up, down = (p.double() for p in ffn.experts[expert].parameters())
                x = x_Th[token].double()
                y[token] += weight * (down @ (F.silu(gate @ x) * (up @ x)))
    return y


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("top_k", [1, 4])
def test_it_is_its_definition(base, top_k):
    model = build(base, top_k)
    x_BSh = torch.randn(2, 7, 32)
    residual = torch.randn(2, 7, 32) if base == "bloom" else None
    flat = None if residual is None else residual.view(-1, 32)
    for ffn in model.expanded_ffns().values():
        inputs = (x_BSh,) if residual is None else (x_BSh, residual)
        with torch.no_grad():
            found = ffn(*inputs)
            expected = of_definition(ffn, x_BSh.view(-1, 32), flat)
            if base == "gpt_oss":
                found, scores = found
                assert torch.equal(scores, ffn.experts[0](x_BSh)[1])
            torch.testing.assert_close(found.view(-1, 32).double(), expected, rtol=1e-4, atol=1e-5)
            with_one = ffn.experts[1](x_BSh)
            alone = ffn.experts[0](*inputs)
            alone = alone[0] if isinstance(alone, tuple) else alone
            ask(ffn, expert=1)
            found = ffn(*inputs)
            ask(ffn, expert=None)
            assert torch.equal(found[0] if isinstance(found, tuple) else found, alone + with_one)


def test_a_mixture_runs_in_training_as_in_inference():
    """Mixtral's router draws noise in training."""
    model = build("mixtral", router_jitter_noise=0.5, num_experts_per_layer=[2, 2, 2])
    with torch.no_grad(), model.use_expert(0):
        expected = model(IDS).logits
        assert torch.equal(model.train()(IDS).logits, expected)
        for ffn in model.expanded_ffns().values():
            ffn.is_mixture = False
        assert not torch.equal(model.train()(IDS).logits, expected)


@pytest.mark.parametrize("name", ["eager", "grouped_mm", "batched_mm"])
def test_the_bases_mixtures_run_as_the_switch_says(name, saved):
    folder = saved("olmoe")
    expected, model = load(folder / "moved"), load(folder / "moved", experts_implementation=name)
    dense = load(folder / "base", experts_implementation=name)
    assert model.get_experts_implementation() == {"": name} == dense.get_experts_implementation()
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, expected(IDS).logits, rtol=1e-4, atol=1e-5)
        with model.use_expert(0):
            assert torch.equal(model(IDS).logits, dense(IDS).logits)
        expected.set_experts_implementation(name)
        assert torch.equal(model(IDS).logits, expected(IDS).logits)


def test_experts_stay_one_by_one_or_fused_as_the_base_has_them(saved, tmp_path):
    folder = saved("olmoe")
    base = load_file(folder / "base" / "model.safetensors")
    fused = {name: value for name, value in base.items() if ".mlp.experts." not in name}
    for layer in range(3):
        parts = {part: [base[f"model.layers.{layer}.mlp.experts.{e}.{part}_proj.weight"] for e in range(4)]
                 for part in ("gate", "up", "down")}  # fmt: skip
        gate_up = torch.stack([torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)])
        fused[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = gate_up
        fused[f"model.layers.{layer}.mlp.experts.down_proj"] = torch.stack(parts["down"])
    (tmp_path / "base").mkdir()
    save_file(fused, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "base" / "config.json").write_bytes((folder / "base" / "config.json").read_bytes())
    expand_checkpoint(tmp_path / "base", tmp_path / "new", PLAN, **ADDED)
    names = set(load_file(tmp_path / "new" / "model.safetensors"))
    assert "model.layers.0.mlp.experts.0.experts.gate_up_proj" in names
    assert ONE_BY_ONE not in names
    one_by_one = load_file(folder / "new" / "model.safetensors")
    assert ONE_BY_ONE in one_by_one
    # A layer that is not expanded keeps its names.
    assert torch.equal(one_by_one[(name := "model.layers.1.mlp.experts.2.up_proj.weight")], base[name])
    new = {name for name in names if name.replace(".mlp.experts.0.", ".mlp.", 1) not in fused}
    assert {name.split(".", 4)[-1] for name in new} == {
        "router.weight", "classifier.weight",
        *(f"experts.{e}.{part}_proj.weight" for e in (1, 2, 3) for part in ("gate", "up", "down")),
    }  # fmt: skip
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "new")(IDS).logits, load(folder / "new")(IDS).logits)
    for where in (tmp_path, folder):
        load(where / "new").save_pretrained(tmp_path / "again")
        again, new = (path / "model.safetensors" for path in (tmp_path / "again", where / "new"))
        assert again.read_bytes() == new.read_bytes()


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_mixture_trains_densely_too(method, saved, tmp_path):
    write_texts(tmp_path / "el.jsonl", [f"η γάτα {number} κάθεται στο χαλί " * 6 for number in range(40)])
    data = {"el": LanguageText("el", str(tmp_path / "el.jsonl"))}
    lora = {"lora": LoraSettings(r=2, alpha=4, target_modules=["q_proj", "v_proj"])} if method == "lora" else {}
    training = {"per_device_train_batch_size": 2, "max_steps": 2, "learning_rate": 0.01, "disable_tqdm": True}
    train_stage(
        saved("olmoe") / "base", tmp_path / "out", data, DenseConfig(block_size=32, method=method, **lora, **training)
    )
    before, after = tensors(saved("olmoe") / "base"), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    changed = {name.split(".")[-2] for name in before if not torch.equal(before[name], after[name])}
    assert changed == ({"q_proj", "v_proj"} if method == "lora" else {name.split(".")[-2] for name in before})
    assert torch.isfinite(load(tmp_path / "out")(IDS).logits).all()


@pytest.mark.parametrize("base", ["olmoe", "qwen2"])
def test_packs_of_any_width_are_joined(base, saved, tmp_path):
    dense, packs = saved(base) / "base", []
    plans = [
        Plan("moe-lpr", counts, old=["en"], new=[code], exclusive=True)
        for code, counts in (("el", [2, 1, 3]), ("hu", [2, 2, 2]), ("tr", [3, 1, 1]))
    ]
    for seed, (plan, width) in enumerate(zip(plans, (WIDTH, 24, WIDTH), strict=True)):
        folder = tmp_path / plan.new[0]
        made = expand_checkpoint(dense, folder, plan, seed=seed, expert_kind="added", expert_width=width)
        assert made.left_out == []
        packs.append(move(folder, seed=seed))
    join_expansions(packs, tmp_path / "joined")
    joined = load(tmp_path / "joined")
    assert joined.config.parts["added"] == {"each": [{"width": width} for width in (16, 24, 16)]}
    found, alone = iter(joined.expanded_ffns()[0].experts[1:]), map(load, packs)
    for number, (pack, plan) in enumerate(zip(alone, plans, strict=True), start=1):
        for theirs in pack.expanded_ffns()[0].experts[1:]:
            assert torch.equal(next(found).down_proj.weight, theirs.down_proj.weight)
        assert f"pack {number}              {plan.new[0]}" in invoke("inspect", tmp_path / "joined")
    with torch.no_grad(), joined.use_expert(0):
        assert torch.equal(joined(IDS).logits, load(dense)(IDS).logits)
    join_expansions([packs[0], packs[2]], tmp_path / "two")
    assert load(tmp_path / "two").config.parts["added"] == {"width": WIDTH}
    if base == "qwen2":
        copies = Plan("u", [2, 2, 2], old=["en"], new=["de"], exclusive=True)
        expand_checkpoint(dense, tmp_path / "copies", copies)
        refused(join_expansions, [packs[0], tmp_path / "copies"], tmp_path / "out", says="added experts are joined")


def test_refusals(saved, tmp_path):
    mixture, dense, out = saved("olmoe") / "base", saved("qwen2") / "base", tmp_path / "out"
    for said, base, plan, options in (
        ("there is no expert_width: give the width", dense, PLAN, {"expert_kind": "added"}),
        ("expert_width: Input should be greater", dense, PLAN, {"expert_kind": "added", "expert_width": 0}),
        ("more than the disk has free", mixture, PLAN, {"expert_kind": "added", "expert_width": 1 << 40}),
        ("expert_width is 16, but expert_kind is 'ffn'", dense, PLAN, {"expert_width": 16}),
        ("expert_kind: Input should be 'ffn', 'lora'", dense, MOLA, LORA | {"expert_kind": "qlora"}),
        ("lora_rank: Input should be greater than or equal to 1", dense, MOLA, LORA | {"lora_rank": 0}),
        ("lora_rank is 32: must be below 32, the narrowest side", dense, MOLA, LORA | {"lora_rank": 32}),
        ("lora_alpha: Input should be greater than 0", dense, MOLA, LORA | {"lora_alpha": 0}),
    ):
        refused(expand_checkpoint, base, out, plan, says=said, **options)
    refused(average_checkpoints, [saved("qwen2") / "moved", dense], out, says="has added experts, which the dense")
    assert not out.exists()
    for said, fields in (
        ("expert_width is None: added experts need a width of at least 1", {"expert_kind": "added"}),
        ("lora_rank is None and lora_alpha 1: LoRA experts need", {"expert_kind": "lora", "lora_alpha": 1}),
        ("expert_kind is 'ia3'; known: ffn, lora", {"expert_kind": "ia3"}),
    ):
        refused(LayerMoEConfig.from_dense, tiny_config("qwen2"), says=said, raises=ValueError, **fields)
    config = LayerMoEConfig.from_dense(tiny_config("olmoe", **EXPERTS), num_experts_per_layer=[2, 1, 1])
    with pytest.raises(ValueError, match="of which no ffn experts are made"):
        LayerMoEForCausalLM(config)


LORA_COUNTS, RANK, ALPHA = [3, 1, 4], 4, 6.0
MOLA = Plan("mola", LORA_COUNTS, [2], top_k=2, old=["en"], new=["el"])
LORA = {"expert_kind": "lora", "lora_rank": RANK, "lora_alpha": ALPHA}


def lora_model(backbone="qwen2", top_k=2, **fields):
    """A model whose updates are far from nothing."""
    torch.manual_seed(0)
    fields = {"num_experts_per_layer": LORA_COUNTS, "classifier_layers": [2], "router_top_k": top_k, **LORA, **fields}
    config = LayerMoEConfig.from_dense(tiny_config(backbone), **fields)
    return shaken(LayerMoEForCausalLM(config).eval())


@pytest.mark.parametrize("backbone", BACKBONE_NAMES)
def test_every_backbones_ffn_has_its_weights_in_linear_layers_alone(backbone):
    with torch.device("meta"):
        model = LayerMoEForCausalLM(lora_model(backbone).config)
    for ffn in model.expanded_ffns().values():
        for expert in ffn.experts[1:]:
            assert type(expert) is type(ffn.experts[0])
            assert {type(m) for m in expert.modules() if any(True for _ in m.parameters(recurse=False))} == {
                *(type(m) for m in expert.modules() if isinstance(m, LoraFactor))
            }
            assert all(parameter.device.type == "meta" for parameter in expert.parameters())


def test_the_seed_decides_and_updates_differ(base, tmp_path):
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        expand_checkpoint(base, tmp_path / name, MOLA, **LORA, seed=seed)
    assert (tmp_path / "same/model.safetensors").read_bytes() == (tmp_path / "one/model.safetensors").read_bytes()
    first, other = tensors(tmp_path / "one"), tensors(tmp_path / "other")
    drawn = {name for name in first if not torch.equal(first[name], other[name])}
    assert drawn == {name for name in first if "router" in name or "lora_A" in name}
    place = "model.layers.{}.mlp.experts.{}.{}_proj.lora_A.weight"
    same_shape = [first[place.format(*at)] for at in ((0, 1, "gate"), (0, 1, "up"), (0, 2, "gate"), (2, 1, "gate"))]
    assert len({tuple(value.flatten().tolist()) for value in same_shape}) == 4


@pytest.mark.parametrize(("top_k", "active"), [(1, 1), (2, 2), (4, 3)])
def test_inspect_counts_updates(base, tmp_path, top_k, active):
    plan = Plan("moe-lpr", [4, 4, 4], top_k=top_k, old=["en"], new=["el"])
    report = expand_checkpoint(base, tmp_path / "out", plan, **LORA)
    found = inspect_checkpoint(tmp_path / "out")
    update, router = RANK * 3 * (32 + 48), 4 * 32
    assert found.base == report.base_parameters
    assert found.total == report.parameters == found.base + 3 * (3 * update + router)
    assert found.active == found.base + 3 * (active * update + router)  # expert 0's weights are always needed
    assert found.trainable["post-pretrain"] == 3 * (3 * update + router)


def test_dropout_of_the_updates_inputs():
    """As PEFT's, before A: in training alone, and inside the context alone."""
    model = lora_model()
    update = next(module for module in model.modules() if isinstance(module, LoraLinear)).train()
    x = torch.randn(5, update.lora_A.weight.shape[1], generator=torch.Generator().manual_seed(1))
    plain = update(x)
    with mask_routing(model, Masking(lora_dropout=0.5)):
        torch.manual_seed(3)
        masked = update(x)
        torch.manual_seed(3)
        low = update.lora_A(torch.dropout(x, 0.5, True))
        own = update.owner[0].get_submodule(update.name)(x)
        torch.testing.assert_close(masked, own + update.scaling * update.lora_B(low))
        assert not torch.allclose(masked, plain)
        assert torch.equal(update.eval()(x), plain)
    assert torch.equal(update.train()(x), plain)
    copies = LayerMoEForCausalLM(LayerMoEConfig.from_dense(tiny_config("qwen2"), num_experts_per_layer=LORA_COUNTS))
    with pytest.raises(InputError, match=r"masking\.lora_dropout is for LoRA experts, but the checkpoint has none"):
        mask_routing(copies, Masking(lora_dropout=0.5))


def test_every_added_expert_is_drawn_by_itself(saved):
    drawn = [
        layer.weight
        for ffn in load(saved("olmoe") / "new").expanded_ffns().values()
        for added in list(ffn.experts)[1:]
        for layer in (added.gate_proj, added.up_proj)
    ]
    assert not any(torch.equal(a, b) for number, a in enumerate(drawn) for b in drawn[:number])

"""Added experts and LoRA experts: beside expert 0, on dense bases and on bases that are mixtures; packs; refusals."""

import re

import pytest
import torch
import torch.nn.functional as F
from added import EXPERTS, IDS, PLAN, WIDTH, build, saved_in
from conftest import ADDED, BACKBONE_NAMES, invoke, load, move, refused, shaken, tensors, tiny_config, write_texts
from layers import ask
from safetensors.torch import load_file

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
from hf_moe_expand.checkpoint.merge import average_checkpoints
from hf_moe_expand.modeling.part_lora import LoraLinear
from hf_moe_expand.modeling.updates import LoraFactor
from hf_moe_expand.report.inspection import inspect_checkpoint
from hf_moe_expand.stages.kinds.dense import LoraSettings
from hf_moe_expand.trainers import Masking, mask_routing

ONE_BY_ONE = "model.layers.0.mlp.experts.0.experts.3.gate_proj.weight"  # of a mixture that stores each expert by itself


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return saved_in(tmp_path_factory.mktemp("added"))


def hidden(output):
    """What a layer computes; some return their router's scores beside it."""
    return output[0] if isinstance(output, tuple) else output


def of_definition(ffn, x_Th, residual):
    """`E_0(x) + sum_e w_e D_e(x)` in float64."""
    routing = ffn.route(ffn.control.request, x_Th, None, None, None)
    y_Th, x_Th = hidden(ffn.experts[0](x_Th[None], *(one[None] for one in residual)))[0].double(), x_Th.double()
    for number, expert in enumerate(ffn.experts[1:], start=1):
        gate, up, down = (parameter.double() for parameter in expert.parameters())
        weight_T1 = (routing.weights * (routing.experts == number)).sum(-1, keepdim=True)
        y_Th += weight_T1 * ((F.silu(x_Th @ gate.T) * (x_Th @ up.T)) @ down.T)
    return y_Th


@torch.no_grad()
@pytest.mark.parametrize("base", ["bloom", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("top_k", [1, 4])
def test_it_is_its_definition(base, top_k):
    x_BSh = torch.randn(2, 7, 32)
    residual = [torch.randn(2, 7, 32)] if base == "bloom" else []
    for ffn in build(base, top_k).expanded_ffns().values():
        found, alone = ffn(x_BSh, *residual), ffn.experts[0](x_BSh, *residual)
        expected = of_definition(ffn, x_BSh.view(-1, 32), [one.view(-1, 32) for one in residual])
        torch.testing.assert_close(hidden(found).view(-1, 32).double(), expected, rtol=1e-4, atol=1e-5)
        assert base != "gpt_oss" or torch.equal(found[1], alone[1])
        ask(ffn, expert=1)
        assert torch.equal(hidden(ffn(x_BSh, *residual)), hidden(alone) + ffn.experts[1](x_BSh))
        ask(ffn, expert=None)


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
    load(folder / "base").save_pretrained(tmp_path / "base", save_original_format=False)
    fused = load_file(tmp_path / "base" / "model.safetensors")
    assert "model.layers.0.mlp.experts.gate_up_proj" in fused
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
    config = DenseConfig(block_size=32, method=method, **lora, **training)
    train_stage(saved("olmoe") / "base", tmp_path / "out", data, config)
    before, after = tensors(saved("olmoe") / "base"), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    changed = {name.split(".")[-2] for name in before if not torch.equal(before[name], after[name])}
    assert changed == ({"q_proj", "v_proj"} if method == "lora" else {name.split(".")[-2] for name in before})


def test_packs_of_any_width_are_joined(saved, tmp_path):
    dense, packs = saved("qwen2") / "base", []
    for seed, (code, counts, width) in enumerate((("el", [2, 1, 3], 16), ("hu", [2, 2, 2], 24), ("tr", [3, 1, 1], 16))):
        plan = Plan("moe-lpr", counts, old=["en"], new=[code], exclusive=True)
        expand_checkpoint(dense, tmp_path / code, plan, seed=seed, expert_kind="added", expert_width=width)
        packs.append(move(tmp_path / code, seed=seed))
    join_expansions(packs, tmp_path / "joined")
    joined, shown = load(tmp_path / "joined"), invoke("inspect", tmp_path / "joined")
    assert joined.config.parts["added"] == {"each": [{"width": width} for width in (16, 24, 16)]}
    assert all(f"pack {number}              {code}" in shown for number, code in enumerate(("el", "hu", "tr"), 1))
    own = [expert for pack in packs for expert in load(pack).expanded_ffns()[0].experts[1:]]
    for found, expected in zip(joined.expanded_ffns()[0].experts[1:], own, strict=True):
        assert torch.equal(found.down_proj.weight, expected.down_proj.weight)
    join_expansions([packs[0], packs[2]], tmp_path / "two")
    assert load(tmp_path / "two").config.parts["added"] == {"width": WIDTH}
    expand_checkpoint(dense, tmp_path / "copies", Plan("u", [2, 2, 2], old=["en"], new=["de"], exclusive=True))
    refused(join_expansions, [packs[0], tmp_path / "copies"], tmp_path / "out", says="joined with their own kind")


def test_refusals(saved, tmp_path):
    mixture, dense, out = saved("olmoe") / "base", saved("qwen2") / "base", tmp_path / "out"
    for said, base, plan, options in (
        ("expert_width is None: added experts need a width", dense, PLAN, {"expert_kind": "added"}),
        ("more than the disk has free", mixture, PLAN, {"expert_kind": "added", "expert_width": 1 << 40}),
        ("expert_width is 16, but expert_kind is 'ffn'", dense, PLAN, {"expert_width": 16}),
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
    refused(LayerMoEForCausalLM, config, says="of which no ffn experts are made", raises=ValueError)


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
        model = lora_model(backbone)
    for ffn in model.expanded_ffns().values():
        for expert in ffn.experts[1:]:
            assert type(expert) is type(ffn.experts[0])
            assert all(isinstance(one, LoraFactor) for one in expert.modules() if [*one.parameters(recurse=False)])


def test_the_seed_decides_and_every_expert_is_drawn_by_itself(base, saved, tmp_path):
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        expand_checkpoint(base, tmp_path / name, MOLA, **LORA, seed=seed)
    assert (tmp_path / "same/model.safetensors").read_bytes() == (tmp_path / "one/model.safetensors").read_bytes()
    first, other = tensors(tmp_path / "one"), tensors(tmp_path / "other")
    drawn = {name for name in first if not torch.equal(first[name], other[name])}
    assert drawn == {name for name in first if "router" in name or "lora_A" in name}
    added = tensors(saved("qwen2") / "new")
    for made, part in ((first, "lora_A"), (added, "gate_proj"), (added, "up_proj")):
        values = [value for name, value in made.items() if re.search(rf"experts\.[1-9]\..*{part}", name)]
        assert len(values) > 4
        assert not any(torch.equal(a, b) for number, a in enumerate(values) for b in values[:number])


@pytest.mark.parametrize(("top_k", "active"), [(1, 1), (4, 3)])
def test_inspect_counts_updates(base, tmp_path, top_k, active):
    plan = Plan("moe-lpr", [4, 4, 4], top_k=top_k, old=["en"], new=["el"])
    expand_checkpoint(base, tmp_path / "out", plan, **LORA)
    found = inspect_checkpoint(tmp_path / "out")
    update, router = RANK * 3 * (32 + 48), 4 * 32
    assert found.total == found.base + 3 * (3 * update + router)
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
    refused(mask_routing, copies, Masking(lora_dropout=0.5), says=r"lora_dropout is for LoRA experts, but")

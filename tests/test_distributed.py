"""Two ranks (gloo, CPU) against one process: data-parallel, FSDP2, tensor-parallel."""

import pytest
import torch
from conftest import HERE, run_ranks
from one_step import train
from ranks import STEPS, model_of

from hf_moe_expand import LayerMoEForCausalLM
from hf_moe_expand.checkpoint.compare import compare_checkpoints

CHECKS = ("ddp", "fsdp_by_hand", "fsdp_native", "tensor_parallel")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def found(root):
    """What each check gave, all of them run in one launch."""
    run_ranks(str(HERE / "ranks.py"), str(root), *CHECKS)
    return {check: torch.load(root / f"{check}.pt", weights_only=False) for check in CHECKS}


@pytest.fixture(scope="module")
def alone(root):
    """`alone("review")`: the parameters after the same step in this process."""
    made = {}

    def step(name, backbone="qwen2"):
        if (name, backbone) not in made:
            made[name, backbone] = train(str(root / "alone"), model=model_of(name, backbone), **STEPS[name])
        return made[name, backbone]

    return step


def same(parameters, expected):
    assert parameters.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(parameters[name], value, rtol=1e-4, atol=2e-5, msg=name)


@pytest.mark.parametrize("step", ["idle", "idle, checkpointing"])
def test_data_parallel_with_experts_that_get_no_token(found, alone, step):
    same(found["ddp"][step][0], alone(step))


@pytest.mark.parametrize("backbone", ["qwen2", "bloom", "gemma3_text"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_fully_shard_by_hand(found, backbone, checkpointing):
    result = found["fsdp_by_hand"][backbone, checkpointing]
    assert result["loss"][0] == pytest.approx(result["loss"][1], rel=1e-5)
    assert result["gradients"]
    for name, (sharded, whole) in result["gradients"].items():
        whole = torch.zeros_like(sharded) if whole is None else whole
        torch.testing.assert_close(sharded, whole, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("step", ["review", "checkpointing", "post", "idle, checkpointing", "everything"])
def test_transformers_own_fsdp(found, alone, step):
    same(found["fsdp_native"][step][0], alone(step))


@pytest.mark.parametrize("step", ["review", "post", "everything"])
def test_tensor_parallel_through_the_trainers(found, alone, step):
    same(found["tensor_parallel"][step][0], alone(step))


@pytest.mark.parametrize("backbone", ["qwen2", "llama", "gemma3_text", "gpt_neox"])
def test_tensor_parallel_experts_are_split_and_compute_the_same(found, root, backbone):
    result = found["tensor_parallel"][backbone]
    assert result["loss"][0] == pytest.approx(result["loss"][1], rel=1e-5)
    assert any(".experts.1." in name for name in result["split"])
    assert not any("router" in name or "classifier" in name for name in result["split"])
    for name, (parallel, whole) in result["gradients"].items():
        torch.testing.assert_close(parallel, whole, rtol=1e-4, atol=1e-5, msg=name)
    kept = compare_checkpoints(root / f"tp {backbone}.base", root / f"tp {backbone}")
    assert not kept.changed + kept.removed
    assert set(kept.added) <= {"lm_head.weight"}  # transformers writes a tied head of a split model out as well


@pytest.mark.parametrize("step", ["review", "post"])
def test_checkpoints_saved_by_several_ranks_load_here(found, root, alone, step):
    model = LayerMoEForCausalLM.from_pretrained(root / f"fsdp {step}")
    same({name: parameter.detach() for name, parameter in model.named_parameters()}, alone(step))
    frozen = compare_checkpoints(root / f"fsdp {step}.base", root / f"fsdp {step}")
    moved = {name.rsplit(".", 2)[1] if "experts" not in name else "experts" for name in frozen.changed}
    assert moved <= ({"router", "classifier"} if step == "review" else {"router", "experts"})
    assert frozen.identical

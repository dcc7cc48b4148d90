"""Two ranks (gloo, CPU) against one process: data-parallel, FSDP2, tensor-parallel, DeepSpeed."""

import json
import logging
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from unittest.mock import Mock

import pytest
import torch
from conftest import accelerates_environment, byte_tokenizer, fork_ranks, refused, save_dense, write_texts
from gated_models import GREEDY, MAPS, gated_model, tokens
from one_step import train
from ranks import STEPS, adapt, dense, model_of, options, post_pretraining, stage
from safetensors.torch import load_file
from uneven_rows import KINDS, SETTINGS, scores, slow_loss, uneven_rows
from uneven_rows import model_of as uneven_model

from hf_moe_expand import LayerMoEForCausalLM, Plan, ReviewConfig, expand_checkpoint
from hf_moe_expand.checkpoint.compare import compare_checkpoints

CHECKS = (
    "ddp_in_pieces", "evaluation", "fsdp_native", "tensor_parallel", "stage_native", "adaptation", "streamed",
    "judging",
)  # fmt: skip


def prepared(folder):
    """What `stage` starts from: text, an expanded model, and one with all that is uncommon in it."""
    base = save_dense(folder / "base", vocab_size=258)  # which two ranks share alike
    write_texts(folder / "en.jsonl", [f"one word, {number} words, and a line of them." for number in range(60)])
    write_texts(folder / "el.jsonl", [f"μία λέξη, {number} λέξεις και μία γραμμή." for number in range(60)])
    plan = Plan("moe-lpr", [2, 3, 2], [1], old=["en"], new=["el"])
    expand_checkpoint(base, folder / "ffn", plan)
    expand_checkpoint(base, folder / "lora", plan, expert_kind="lora", conditional_routing=True)
    adapters = {"expert_kind": "adapter", "adapters": [{"maps": MAPS}]}
    for name, counts, fields in (("gate", (1, 2, 2), {}), ("adapters", (2, 2, 2), adapters)):
        gated_model(expansions=[counts], exclusive=True, vocab_size=258, fields=fields).save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    expand_checkpoint(base, folder / "dmoe", Plan("dmoe", [2, 1, 2], new=["en", "tr"], groups=[["en"], ["tr"]]))
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def found(root):
    """What each check gave, all of them run in one launch."""
    fork_ranks("ranks.py", str(root), *CHECKS)
    return {check: torch.load(root / f"{check}.pt", weights_only=False) for check in CHECKS}


@pytest.fixture(scope="module")
def alone(root):
    """`alone("review")`: the parameters after the same step in this process."""
    folder = str(root / "alone")
    return cache(lambda step, backbone="qwen2": train(folder, model=model_of(step, backbone), **STEPS[step]))


def same(parameters, expected):
    assert parameters.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(parameters[name], value, rtol=1e-4, atol=2e-5, msg=name)


@pytest.fixture(scope="module")
def scored_alone(tmp_path_factory):
    return scores(tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_counts_each_row_and_target_once(found, scored_alone, kind):
    for batch, count in SETTINGS:
        expected = slow_loss(uneven_model(kind), kind, uneven_rows(count))
        for loss, of_text in (found["evaluation"][kind, batch, count], scored_alone[kind, batch, count]):
            assert loss == pytest.approx(expected, abs=2e-5), (batch, count)
            assert kind == "review" or of_text == pytest.approx(expected, abs=2e-5)


def test_data_parallel_with_the_loss_in_pieces_and_fsdp_of_tied_embeddings(found, alone):
    same(found["ddp_in_pieces"], alone("idle"))  # experts that get no token
    same(found["fsdp_native"]["tied"], alone("post", "gemma3_text"))
    assert "The embeddings train and are tied to the head" in found["fsdp_native"]["refused"]


@pytest.mark.parametrize("step", ["review", "post", "idle, checkpointing", "everything"])
def test_transformers_own_fsdp(found, root, alone, step):
    same(found["fsdp_native"][step], alone(step))
    model = LayerMoEForCausalLM.from_pretrained(root / f"fsdp {step}")  # which two ranks saved
    same({name: parameter.detach() for name, parameter in model.named_parameters()}, alone(step))
    frozen = compare_checkpoints(root / f"fsdp {step}.base", root / f"fsdp {step}")
    moved = {name.rsplit(".", 2)[1] if "experts" not in name else "experts" for name in frozen.changed}
    assert step == "everything" or moved <= {"router", "classifier" if step == "review" else "experts"}


@pytest.mark.parametrize("step", ["review", "post", "everything"])
def test_tensor_parallel_through_the_trainers(found, alone, step):
    same(found["tensor_parallel"][step], alone(step))


@pytest.mark.parametrize("backbone", ["qwen2", "gemma3_text", "gpt_neox"])
def test_tensor_parallel_experts_are_split_and_compute_the_same(found, root, backbone):
    result = found["tensor_parallel"][backbone]
    torch.testing.assert_close(*result["logits"], rtol=1e-4, atol=1e-5)
    assert any(".experts.1." in name for name in result["split"])
    assert not any("router" in name or "classifier" in name for name in result["split"])
    kept = compare_checkpoints(root / f"tp {backbone}.base", root / f"tp {backbone}")
    assert not kept.changed + kept.removed
    assert set(kept.added) <= {"lm_head.weight"}  # transformers writes a tied head of a split model out as well


@pytest.mark.parametrize("way", ["ddp", "by hand", "fsdp", "tp"])
def test_texts_are_judged_as_in_one_process(found, way):
    for ours, whole in found["judging"][way].values():
        torch.testing.assert_close(ours, whole, rtol=1e-4, atol=1e-5)
    assert len(whole.unique()) > 1


@pytest.fixture(scope="module")
def one_process(root):
    """`one_process("ffn")`: the checkpoint that stage 1 leaves in one process."""

    @cache
    def made(start):
        config = post_pretraining(2, gradient_accumulation_steps=2, use_cpu=True)
        stage(root, f"one process {start}", config, start=start)
        return root / f"one process {start}"

    return made


def same_checkpoint(folder, expected):
    """As `same`, of two folders; the stored types, too."""
    weights, others = (load_file(path / "model.safetensors") for path in (folder, expected))
    assert {name: tensor.dtype for name, tensor in weights.items()} == {n: t.dtype for n, t in others.items()}
    same(weights, others)


@pytest.fixture(scope="module", params=["fsdp2", "deepspeed_zero3"])
def under_accelerate(request, root, tmp_path_factory):
    """Two ranks under a packaged configuration: the folder, and what they found."""
    if request.param == "deepspeed_zero3" and find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    folder = prepared(tmp_path_factory.mktemp(request.param))
    configuration = files("hf_moe_expand") / "accelerate_configs" / f"{request.param}.yaml"
    fork_ranks("ranks.py", str(folder), "stage_accelerate", environment=accelerates_environment(configuration))
    return folder, torch.load(folder / "stage_accelerate.pt", weights_only=False)


@pytest.mark.parametrize("start", ["ffn", "lora", "gate", "adapters"])
def test_a_stage_under_the_packaged_configurations(under_accelerate, one_process, start):
    folder, found = under_accelerate
    out = folder / f"trained {start}"
    # Interrupted ones went on from there; all end as one process does.
    assert ("checkpoint-2" in found[start]["left"]) == (start in ("ffn", "adapters"))
    same_checkpoint(out, one_process(start))
    assert not any(
        "self_attn.q_proj" in name or "experts.0" in name for name in compare_checkpoints(folder / start, out).changed
    )
    model = LayerMoEForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        logits = torch.cat([model(torch.tensor([[token]])).logits for token in range(0, 60, 2)])
    torch.testing.assert_close(found[start]["logits"], logits, rtol=1e-4, atol=1e-4)
    own = tokens(8, 12, seed=3)[:4]
    assert torch.equal(found[start]["answers"], model.generate(own, **GREEDY))
    if found[start]["classes"] is not None:
        assert found[start]["classes"].tolist() == model.judge(own).tolist()
        assert len(model.judge(tokens(8, 12, seed=3)).unique()) > 1


@pytest.mark.parametrize("method", ["full", "lora"])
def test_dense_training_under_the_packaged_configurations(under_accelerate, root, method):
    alone = root / f"dense {method}"
    if not alone.exists():
        dense(root, alone.name, method, 2, gradient_accumulation_steps=2, use_cpu=True)
    same_checkpoint(under_accelerate[0] / alone.name, alone)
    assert compare_checkpoints(root / "base", alone).changed


def test_an_interruption_of_a_stream_on_two_ranks_changes_nothing(found, root):
    def record(name):
        return json.loads((root / name / "config.json").read_text())["expansions"][-1]["stages"][-1]

    assert compare_checkpoints(root / "streamed", root / "streamed again").changed == []
    assert record("streamed") == record("streamed again")
    assert record("streamed")["tokens"] == {"el": 4 * 2 * 2 * 16}
    # It does not go on with fewer ranks.
    said = r"(was read by 2 ranks with 2 workers each .* by 1 with 2 now|its steps are of 4 blocks, not of 2)"
    refused(stage, root, "streamed left", post_pretraining(2, stream=True, save_steps=2), says=said)


def test_two_ranks_adapt_a_model_to_a_language(found, root):
    alone = adapt(root, "adapted alone", 4, use_cpu=True)
    assert found["adaptation"] == pytest.approx(alone.perplexity)
    same_checkpoint(root / "adapted", root / "adapted alone")
    assert not [path.name for path in root.iterdir() if "grown" in path.name]


def test_a_stage_on_a_model_that_transformers_splits(found, root):
    stage(root, "native alone", post_pretraining(4, use_cpu=True))
    same_checkpoint(root / "native", root / "native alone")
    stage(root, "native tp alone", ReviewConfig(block_size=16, **options(4, max_steps=2, use_cpu=True)))
    same_checkpoint(root / "native tp", root / "native tp alone")
    for weights, stored in found["stage_native"]:
        assert weights == stored > 0  # none of them was gathered into memory
    assert not (root / "native.training").exists()


def test_deepspeeds_greeting_stays_out_of_the_output():
    """Where it is installed, it greets on the standard output of every training, also of those without it."""
    logger, ear = logging.getLogger("DeepSpeed"), Mock(level=0)
    logger.addHandler(ear)
    try:
        logger.warning("Setting accelerator to CPU. If you have GPU or other accelerator, we were unable to detect it.")
        logger.warning("something is wrong")
    finally:
        logger.removeHandler(ear)
    assert [call.args[0].getMessage() for call in ear.handle.call_args_list] == ["something is wrong"]

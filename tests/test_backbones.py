"""The promises P1, P2, P4 and P5 on every backbone, on checkpoints that `expand` wrote."""

import copy
import json
import pickle

import pytest
import torch
from conftest import COMMON_BACKBONES, WIDE_BACKBONES, byte_tokenizer, run_fresh, save_dense, tiny_config, tiny_dense
from transformers import AutoModel, AutoModelForCausalLM

from hf_moe_expand import LayerMoEConfig, LayerMoEForCausalLM, LayerMoEModel, Plan, expand_checkpoint

# A layer with three experts, one that stays dense, one with two and a classifier.
PLAN = Plan("layer-moe", [3, 1, 2], [2], old=["en"], new=["el"])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """`checkpoint("qwen2")`: a folder with a dense checkpoint and its expansion, made once."""
    root = tmp_path_factory.mktemp("checkpoints")

    def made(name):
        if not (root / name).exists():
            save_dense(root / name / "dense", name)
            expand_checkpoint(root / name / "dense", root / name / "expanded", PLAN)
        return root / name

    return made


@pytest.fixture
def dense(checkpoint, backbone):
    return AutoModelForCausalLM.from_pretrained(checkpoint(backbone) / "dense").eval()


@pytest.fixture
def expanded(checkpoint, backbone):
    return LayerMoEForCausalLM.from_pretrained(checkpoint(backbone) / "expanded").eval()


def padded_batch():
    """Left-padded prompts of 3, 7 and 12 tokens."""
    torch.manual_seed(5)
    ids, mask = torch.full((3, 12), 256), torch.zeros(3, 12, dtype=torch.long)
    for row, length in enumerate((3, 7, 12)):
        ids[row, 12 - length :] = torch.randint(0, 256, (length,))
        mask[row, 12 - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def test_p1_the_expanded_model_is_the_dense_model_whatever_the_router_says(dense, expanded):
    batch = padded_batch()
    expected = dense(**batch).logits
    for scale in (1.0, 50.0, -3.0):
        for ffn in expanded.expanded_ffns().values():
            ffn.router.weight.data.mul_(scale)
            if ffn.classifier is not None:
                ffn.classifier.weight.data.normal_()
        found = expanded(**batch).logits
        rows = batch["attention_mask"].bool()
        torch.testing.assert_close(found[rows], expected[rows], rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def test_p2_with_every_token_at_expert_0_logits_and_generation_are_the_dense_models(dense, expanded):
    for ffn in expanded.expanded_ffns().values():
        for expert in ffn.experts[1:]:
            for parameter in expert.parameters():
                parameter.data.normal_()
    batch = padded_batch()
    assert not torch.allclose(expanded(**batch).logits, dense(**batch).logits, atol=1e-2)
    with expanded.use_expert(0):
        assert torch.equal(expanded(**batch).logits, dense(**batch).logits)
        options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 256, "eos_token_id": None}
        assert torch.equal(expanded.generate(**batch, **options), dense.generate(**batch, **options))


def test_p2_with_every_token_classed_old_too(dense):
    # Router replaced by classifiers that say "old" to everything, in every layer.
    base = dense
    config = LayerMoEConfig.from_dense(base.config, num_experts_per_layer=[3, 2, 2], classifier_layers=[0, 1, 2])
    torch.manual_seed(1)
    model = LayerMoEForCausalLM(config).eval()
    weights = base.state_dict()
    sources = {name: name.replace(".experts.0.", ".") for name in model.state_dict()}
    model.load_state_dict({name: weights[old] for name, old in sources.items() if old in weights}, strict=False)
    for ffn in model.expanded_ffns().values():
        ffn.classifier = _SaysOld()
    batch = padded_batch()
    assert torch.equal(model(**batch).logits, base(**batch).logits)


class _SaysOld(torch.nn.Module):
    def forward(self, x):
        return torch.tensor([1.0, 0.0]).expand(len(x), 2)


@pytest.mark.parametrize("names", [COMMON_BACKBONES, pytest.param(WIDE_BACKBONES, marks=pytest.mark.wide)])
def test_p4_checkpoints_load_in_a_fresh_process_and_save_the_same_bytes(checkpoint, names, tmp_path):
    program = """
import json, sys, torch
from pathlib import Path
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
out = Path(sys.argv[1])
found = {}
for folder in map(Path, sys.argv[2:]):
    path = folder / "expanded"
    config = AutoConfig.from_pretrained(path, trust_remote_code=True)
    base = AutoModel.from_pretrained(path, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer("Ένα, két, three", return_tensors="pt").input_ids
    found[folder.name] = {
        "classes": [type(x).__name__ for x in (config, base, model)],
        "module": type(model).__module__.split(".")[0],
        "last": model(ids).logits[0, -1].tolist(),
        "hidden": torch.equal(base(ids)[0], model(ids, output_hidden_states=True).hidden_states[-1]),
        "generated": model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=256).tolist(),
    }
    model.save_pretrained(out / folder.name)
assert sys.modules["hf_moe_expand"] is None
(out / 'found.json').write_text(json.dumps(found))
"""
    run_fresh(program, str(tmp_path), *(str(checkpoint(name)) for name in names))
    found = json.loads((tmp_path / "found.json").read_text())
    assert sorted(found) == sorted(names)
    ids = byte_tokenizer()("Ένα, két, three", return_tensors="pt").input_ids
    for name, result in found.items():
        assert result["classes"] == ["LayerMoEConfig", "LayerMoEModel", "LayerMoEForCausalLM"]
        assert result["module"] == "transformers_modules"
        assert result["hidden"]
        here = LayerMoEForCausalLM.from_pretrained(checkpoint(name) / "expanded").eval()
        assert result["last"] == here(ids).logits[0, -1].tolist()
        assert result["generated"] == here.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=256).tolist()
        saved = {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for file, content in saved.items():
            assert content == (checkpoint(name) / "expanded" / file).read_bytes(), f"{name}: {file}"
        assert {"config.json", "model.safetensors", "modeling_layer_moe.py", "routing.py"} <= set(saved)


def test_p5_cached_batched_left_padded_generation_is_the_uncached_forward(expanded):
    torch.manual_seed(2)
    for ffn in expanded.expanded_ffns().values():  # make experts, router and classifier matter
        for expert in ffn.experts[1:]:
            for parameter in expert.parameters():
                parameter.data.add_(torch.randn_like(parameter) * 0.3)
        if ffn.classifier is not None:
            ffn.classifier.weight.data.normal_()
    batch = padded_batch()
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 256, "eos_token_id": None}
    cached = expanded.generate(**batch, **options)
    for row in range(3):
        ids = batch["input_ids"][row][batch["attention_mask"][row].bool()].unsqueeze(0)
        for _ in range(8):
            ids = torch.cat([ids, expanded(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
        assert ids[0, -8:].tolist() == cached[row, -8:].tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_checkpoints_stay_exact(backbone, dtype, tmp_path):
    tiny_dense(backbone, dtype=dtype).save_pretrained(tmp_path / "dense")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype="auto").eval()
    expand_checkpoint(tmp_path / "dense", tmp_path / "out", PLAN)
    expanded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").eval()
    assert {parameter.dtype for parameter in expanded.parameters()} == {dtype}
    ids = torch.randint(0, 256, (2, 9))
    with expanded.use_expert(0):
        assert torch.equal(expanded(ids).logits, model(ids).logits)
    difference = (expanded(ids).logits - model(ids).logits).abs().max() / model(ids).logits.abs().max()
    assert difference < (1e-2 if dtype is torch.bfloat16 else 1e-3)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_heads_stay_tied(backbone, tied, tmp_path):
    tiny_dense(backbone, tie_word_embeddings=tied).save_pretrained(tmp_path / "dense")
    expand_checkpoint(tmp_path / "dense", tmp_path / "out", PLAN)
    model = LayerMoEForCausalLM.from_pretrained(tmp_path / "out")
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied


def test_copies_pickle_and_keep_their_own_routing(expanded):
    ids = torch.randint(0, 256, (1, 6))
    expected = expanded(ids).logits
    for twin in (copy.deepcopy(expanded), pickle.loads(pickle.dumps(expanded))):
        assert type(twin) is type(expanded)
        assert torch.equal(twin(ids).logits, expected)
        with twin.capture_routing() as routing:
            expanded(ids)
            assert len(routing) == 0
            twin(ids)
            assert sorted(routing.layers) == [0, 2]


def test_auto_classes_know_the_package_models(backbone):
    config = LayerMoEConfig.from_dense(tiny_config(backbone), num_experts_per_layer=[2, 1, 3])
    model = AutoModelForCausalLM.from_config(config)
    assert isinstance(model, LayerMoEForCausalLM)
    assert isinstance(AutoModel.from_config(config), LayerMoEModel)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert all(ffn.router.weight.std() > 0.05 for ffn in model.expanded_ffns().values())


def test_configurations_that_contradict_themselves_are_refused():
    dense = tiny_config("qwen2")
    with pytest.raises(ValueError, match="has 2 entries, but the qwen2 backbone has 3 layers"):
        LayerMoEConfig.from_dense(dense, num_experts_per_layer=[2, 2])
    with pytest.raises(ValueError, match=r"num_experts_per_layer\[1\] is 0"):
        LayerMoEConfig.from_dense(dense, num_experts_per_layer=[2, 0, 2])
    with pytest.raises(ValueError, match=r"layer 1, which is dense"):
        LayerMoEConfig.from_dense(dense, num_experts_per_layer=[2, 1, 2], classifier_layers=[1])
    with pytest.raises(ValueError, match=r"'t5' is not supported. Supported: bloom, cohere"):
        LayerMoEConfig(backbone_model_type="t5")
    with pytest.raises(ValueError, match="not a Qwen2Config"):
        LayerMoEForCausalLM(dense)

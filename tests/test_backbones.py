"""Every backbone's expanded checkpoint in a fresh process; tied heads; configurations that are refused."""

import json

import pytest
from conftest import COMMON_BACKBONES, WIDE_BACKBONES, byte_tokenizer, run_fresh, save_dense, tiny_config, tiny_dense

from hf_moe_expand import LayerMoEConfig, LayerMoEForCausalLM, Plan, expand_checkpoint

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
        "hidden": torch.equal(base(ids)[0], model.base_model(ids)[0]),
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


@pytest.mark.parametrize("tied", [True, False])
def test_tied_heads_stay_tied(backbone, tied, tmp_path):
    tiny_dense(backbone, tie_word_embeddings=tied).save_pretrained(tmp_path / "dense")
    expand_checkpoint(tmp_path / "dense", tmp_path / "out", PLAN)
    model = LayerMoEForCausalLM.from_pretrained(tmp_path / "out")
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied


def test_configurations_that_contradict_themselves_are_refused():
    dense = tiny_config("qwen2")
    with pytest.raises(ValueError, match="has 2 entries, but the qwen2 backbone has 3 layers"):
        LayerMoEConfig.from_dense(dense, num_experts_per_layer=[2, 2])
    with pytest.raises(ValueError, match=r"num_experts_per_layer\[1\] is 0"):
        LayerMoEConfig.from_dense(dense, num_experts_per_layer=[2, 0, 2])
    with pytest.raises(ValueError, match=r"layer 1, which is dense"):
        LayerMoEConfig.from_dense(dense, num_experts_per_layer=[2, 1, 2], classifier_layers=[1])
    with pytest.raises(ValueError, match=r"does not know the backbone architecture 'no-such'"):
        LayerMoEConfig(backbone_model_type="no-such")
    with pytest.raises(ValueError, match="not a Qwen2Config"):
        LayerMoEForCausalLM(dense)

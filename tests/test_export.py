"""Export of one expert as a dense model, byte for byte."""

import json

import pytest
import torch
from conftest import COMMON_BACKBONES, load, move, refused, run_fresh, save_dense
from transformers import GenerationConfig

from hf_moe_expand import Plan, expand_checkpoint
from hf_moe_expand.checkpoint.export import export_dense
from hf_moe_expand.core.errors import InputError

IDS = torch.randint(0, 256, (2, 20), generator=torch.Generator().manual_seed(0))
PLAN = Plan("moe-lpr", [3, 1, 3], old=["en"], new=["el"])


def trained(root, backbone, **changes):
    """An expanded checkpoint whose experts differ."""
    save_dense(root / "base", backbone, **changes)
    expand_checkpoint(root / "base", root / "expanded", PLAN)
    return move(root / "expanded", root / "trained")


def test_the_export_needs_nothing_of_ours(tmp_path):
    model = trained(tmp_path, "qwen3")
    GenerationConfig(temperature=0.7, do_sample=True, eos_token_id=256).save_pretrained(model)
    export_dense(model, tmp_path / "out", expert=2)
    assert not list((tmp_path / "out").glob("*.py"))
    text = (tmp_path / "out" / "config.json").read_text()
    assert str(tmp_path) not in text
    (entry,) = json.loads(text)["history"]
    assert entry["settings"]["expansions"][0]["new_languages"] == ["el"]
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert GenerationConfig.from_pretrained(tmp_path / "out").temperature == 0.7
    code = "from transformers import AutoModelForCausalLM as A\nprint(type(A.from_pretrained(sys.argv[1])).__name__)"
    assert run_fresh(code, str(tmp_path / "out")).strip() == "Qwen3ForCausalLM"


@pytest.mark.parametrize("backbone", [*COMMON_BACKBONES, "qwen3"])
def test_expert_0_is_the_base_byte_for_byte_and_others_are_what_they_compute(tmp_path, backbone):
    model = trained(tmp_path, backbone, **({"tie_word_embeddings": True} if backbone == "qwen3" else {}))
    for expert in (0, 2):
        name = export_dense(model, tmp_path / f"expert{expert}", expert=expert)
        assert name == type(load(tmp_path / "base")).__name__
    for file in ("model.safetensors", "generation_config.json"):
        assert (tmp_path / "expert0" / file).read_bytes() == (tmp_path / "base" / file).read_bytes()
    configs = [json.loads((tmp_path / which / "config.json").read_text()) for which in ("expert0", "base")]
    assert configs[0].pop("history")[0]["settings"]["expert"] == 0
    assert configs[0] == configs[1]
    ours, dense = load(model), load(tmp_path / "expert2")
    with ours.use_expert(2), torch.no_grad():
        assert torch.equal(ours(IDS).logits, dense(IDS).logits)
    with torch.no_grad():
        assert not torch.equal(dense(IDS).logits, load(tmp_path / "base")(IDS).logits)


def test_an_expert_that_not_every_layer_has(tmp_path):
    save_dense(tmp_path / "base")
    expand_checkpoint(tmp_path / "base", tmp_path / "out", Plan("moe-lpr", [3, 1, 2]))
    with pytest.raises(InputError, match=r"layer 2 has no expert 2; give one of 0\.\.1"):
        export_dense(tmp_path / "out", tmp_path / "no", expert=2)
    export_dense(tmp_path / "out", tmp_path / "one", expert=1)
    refused(export_dense, tmp_path / "base", tmp_path / "no", says="not an expanded one", expert=0)
    refused(export_dense, tmp_path / "out", tmp_path / "no", says="has no expert -1", expert=-1)
    for both in ({}, {"expert": 1, "language": "el"}):
        with pytest.raises(InputError, match=r"Give one of --language CODE and --expert NUMBER, .* or --peft"):
            export_dense(tmp_path / "out", tmp_path / "no", **both)
    assert not (tmp_path / "no").exists()

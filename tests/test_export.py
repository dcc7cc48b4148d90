"""Export of one expert as a dense model, byte for byte."""

import json

import pytest
from conftest import move, refused, run_fresh, save_dense
from transformers import GenerationConfig

from hf_moe_expand import Plan, expand_checkpoint
from hf_moe_expand.checkpoint.export import export_dense
from hf_moe_expand.core.errors import InputError

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

"""Tied heads, and configurations that are refused."""

import pytest
from conftest import tiny_config, tiny_dense

from hf_moe_expand import LayerMoEConfig, LayerMoEForCausalLM, Plan, expand_checkpoint

# A layer with three experts, one that stays dense, one with two and a classifier.
PLAN = Plan("layer-moe", [3, 1, 2], [2], old=["en"], new=["el"])


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

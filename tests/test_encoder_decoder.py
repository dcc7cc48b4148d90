"""Encoder-decoders: the promises on each shape, from folder to folder and in memory, and every surgery."""

import copy
import json

import pytest
import torch
from conftest import invoke, move, refused, save_dense
from encoder_decoders import PLAN, batch, save_tiny, tiny
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from hf_moe_expand import (
    DMoEConfig,
    LayerMoEConfig,
    LayerMoEForCausalLM,
    LayerMoEForSeq2SeqLM,
    Plan,
    expand_checkpoint,
    expand_model,
)
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.modeling import decoder_ffns, layer_names
from hf_moe_expand.planning.layers import layers_in

CONFIGURATIONS = {
    "layer-moe": (PLAN, {}),
    "conditional": (Plan("moe-lpr", [3] * 5, new=["el"], encoder_layers=3), {"conditional_routing": True}),
    "lora": (PLAN, {"expert_kind": "lora", "lora_rank": 4, "lora_alpha": 6.0}),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """`made(shape, configuration)`: folders of the dense checkpoint and of its expansion, and their models."""
    root, found = tmp_path_factory.mktemp("models"), {}

    def make(shape, configuration="layer-moe"):
        dense = root / shape / "dense"
        if not dense.exists():
            tiny(shape).save_pretrained(dense)
        if (shape, configuration) not in found:
            out = root / shape / configuration
            plan, options = CONFIGURATIONS[configuration]
            expand_checkpoint(dense, out, plan, **options)
            models = [copy.deepcopy(AutoModelForSeq2SeqLM.from_pretrained(path).eval()) for path in (dense, out)]
            found[shape, configuration] = (dense, out, *models)
        return found[shape, configuration]

    return make


@torch.no_grad()
def logits(model, **changes):
    return model(**{**batch(), **changes}).logits


def test_layers_are_one_list_the_encoders_first(made):
    for shape, places in {
        "m2m_100": ["model.encoder.layers.0.fc1", "model.decoder.layers.1.fc1"],
        "t5": ["encoder.block.0.layer.1.DenseReluDense", "decoder.block.1.layer.2.DenseReluDense"],
    }.items():
        model = made(shape)[3]
        found = decoder_ffns(model)
        assert [found[0].place, found[4].place] == places
        assert layer_names(model.config) == ["encoder.0", "encoder.1", "encoder.2", "decoder.0", "decoder.1"]
        assert {layer: len(ffn.experts) for layer, ffn in model.expanded_ffns().items()} == {0: 3, 2: 2, 4: 4}
        assert [layer for layer, ffn in model.expanded_ffns().items() if ffn.classifier is not None] == [0, 4]
        with torch.no_grad(), model.capture_routing() as routing:
            model(**batch())
        assert [routing.layers[layer].router_logits.shape[0] for layer in (0, 2, 4)] == [27, 27, 18]


def test_training_draws_the_dropout_inside_the_ffn_as_the_base_does():
    dense = tiny("bart", activation_dropout=0.3).train()
    model = expand_model(copy.deepcopy(dense), Plan("own", [2] * 5, old=["en"], new=["el"], encoder_layers=3)).train()
    drawn = []
    for network, seed in ((dense, 0), (model, 0), (model, 1)):
        torch.manual_seed(seed)
        with model.use_expert(0):
            drawn.append(logits(network))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.allclose(drawn[1], drawn[2])


def test_a_layer_is_never_left_out_at_random(made):
    model = made("m2m_100")[3].train()
    assert model.config.encoder_layerdrop == 0.05
    assert {module.layerdrop for module in model.modules() if hasattr(module, "layerdrop")} == {0.0}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def el(base):
    expand_checkpoint(base, base.with_name("el"), PLAN, seed=1)
    return move(base.with_name("el"))


def test_plans_name_layers_by_their_stack(base, tmp_path):
    out = tmp_path / "plan.json"
    said = invoke(
        "plan", "moe-lpr", "--layers", base, "--experts", 3, "--only-layers", "encoder.0-2/2,decoder.1", "--new", "el",
        "--classifiers-in", "decoder.1", "--out", out,
    )  # fmt: skip
    assert "experts per layer  encoder 3 1 3, decoder 1 3 (total 11)" in said
    assert "classifier layers  decoder.1" in said
    plan = Plan.load(out)
    assert (plan.encoder_layers, plan.experts_per_layer, plan.classifier_layers) == (3, [3, 1, 3, 1, 3], [4])
    invoke("plan", "random", "--layers", "3+2", "--total-experts", 12, "--new", "el", "--out", tmp_path / "random.json")
    assert Plan.load(tmp_path / "random.json").encoder_layers == 3
    with pytest.raises(InputError, match=r"--layers is 3\+0: must be at least 1, or a checkpoint"):
        invoke("plan", "random", "--layers", "3+0", "--total-experts", 12, "--out", tmp_path / "none.json")
    Plan("own", [2, 2]).save(tmp_path / "decoder.json")
    assert "encoder_layers" not in json.loads((tmp_path / "decoder.json").read_text())


@pytest.mark.parametrize("encoder_layers", [-1, 5, 6])
def test_a_plan_s_decoder_begins_within_the_list(encoder_layers):
    with pytest.raises(InputError, match=rf"encoder_layers is {encoder_layers}: must be at least 0 and below 5"):
        Plan("own", [2] * 5, encoder_layers=encoder_layers)


@pytest.mark.parametrize(
    ("text", "encoder", "message"),
    [
        ("1-3", 2, r"1-3: the model is an encoder-decoder; name its layers by encoder\.0 or decoder\.0"),
        ("encoder.1", 0, r"encoder\.1: the model is a decoder; name its layers by their numbers alone"),
        ("decoder.3", 2, r"the model has no layer decoder\.3; its layers are decoder\.0-2"),
        ("encoder.2", 2, r"the model has no layer encoder\.2; its layers are encoder\.0-1"),
        ("decoder.2-1", 2, r"decoder\.2-1 runs backwards"),
        ("middle.1", 2, "give layers and ranges of layers from 0"),
        ("0-4/0", 0, "has a step of 0"),
    ],
)
def test_layers_that_the_model_has_not_are_refused(text, encoder, message):
    refused(layers_in, text, 5, says=message, encoder_layers=encoder)


def test_the_wrong_auto_class_is_named(el, tmp_path):
    save_dense(tmp_path / "decoder")
    expand_checkpoint(tmp_path / "decoder", tmp_path / "qwen", Plan("own", [2, 1, 2], new=["el"]))
    with pytest.raises(ValueError, match=r"m2m_100, is an encoder-decoder: load it with AutoModelForSeq2SeqLM"):
        LayerMoEForCausalLM.from_pretrained(el)
    with pytest.raises(ValueError, match=r"qwen2, is a decoder: load it with AutoModelForCausalLM"):
        LayerMoEForSeq2SeqLM.from_pretrained(tmp_path / "qwen")
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        AutoModelForCausalLM.from_pretrained(el)
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "qwen")


def test_bases_and_plans_that_do_not_fit_are_refused(base, tmp_path):
    decoder = {"is_encoder_decoder": False, "is_decoder": True}
    for name, fields in (("bert", {}), ("bart", decoder)):
        AutoConfig.for_model(name, **fields).save_pretrained(tmp_path / name)
    for folder, plan, said in (
        (base, Plan("own", [2] * 5), r"The plan is for 5 layers, but .* has 5 layers, 3 of them an encoder's"),
        (base, Plan("own", [2] * 5, encoder_layers=2), "The plan is for 5 layers, 2 of them an encoder's"),
        (base, Plan("own", [2] * 6, encoder_layers=3), "The plan is for 6 layers, .*, but .* has 5"),
        (base, Plan("dmoe", [2] * 5, groups=[["en"], ["el"]]), "The plan is for 5 layers, but"),
        (base, Plan("own", [2] * 5, [0], new=["el"], exclusive=True), "The plan is for 5 layers, but"),
        (tmp_path / "bert", PLAN, "a bert checkpoint cannot be expanded: it is an encoder, or"),
        (tmp_path / "bart", PLAN, "it is the decoder of an encoder-decoder"),
    ):
        refused(expand_checkpoint, folder, tmp_path / "out", plan, says=said)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("counts", "fields", "said"),
    [
        ([2] * 5, {"language_gate": {"layer": 0, "languages": [["en"], ["el"]]}}, "its translation have a language"),
        ([2] * 5, {"exclusive_experts": True}, r"encoder_decoder beside exclusive: .*an encoder-decoder"),
        ([2, 2], {}, r"2 entries, but the m2m_100 backbone has 5 layers \(encoder 3, decoder 2"),
        ([2, 1, 2, 2, 2], {"classifier_layers": [1]}, r"classifier_layers names layer encoder\.1, which is dense"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(base, counts, fields, said):
    config = AutoConfig.from_pretrained(base)
    refused(LayerMoEConfig.from_dense, config, says=said, raises=ValueError, num_experts_per_layer=counts, **fields)
    with pytest.raises(ValueError, match="encoder_decoder beside dmoe"):
        DMoEConfig.from_dense(config, num_experts_per_layer=[2] * 5)

"""Every dense decoder that transformers has: the promises, on a tiny twin; and its checkpoint from folder to folder."""

import re
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from conftest import SIZES, TABLES, VOCABULARY, byte_tokenizer, invoke, load, moved, refused
from promises import PROMISES, Twin
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, Qwen2Config, Qwen2ForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from hf_moe_expand import LayerMoEConfig, LayerMoEForCausalLM, Plan, expand_checkpoint, graft_delta, grow_checkpoint
from hf_moe_expand.analysis.similarity import measure_similarity
from hf_moe_expand.baselines.branches import expand_branches
from hf_moe_expand.checkpoint.compare import compare_checkpoints
from hf_moe_expand.checkpoint.expansion_only import save_expansion
from hf_moe_expand.checkpoint.export import export_dense
from hf_moe_expand.checkpoint.merge import average_checkpoints
from hf_moe_expand.checkpoint.promises import check_architecture, tiny_twin
from hf_moe_expand.checkpoint.proven import LEFT_OUT, PROVEN, PROVEN_ENCODER_DECODERS, PROVEN_MIXTURES
from hf_moe_expand.evaluation.perplexity import evaluate_model
from hf_moe_expand.inference.models import load_for_inference
from hf_moe_expand.modeling import decoder_ffns

INSTALLED = [name for name in PROVEN if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
# Refused on a tiny twin: without an FFN in each layer, or with a configuration of which no small model can be built.
REFUSED = (
    "bamba", "cohere_compass_text", "dbrx", "deepseek_v4", "dots3_note_text", "falcon_mamba", "granitemoehybrid",
    "hrm_text", "jamba", "longcat_flash", "mamba", "mamba2", "nemotron_h", "qwen4_exp_text", "rwkv", "xlstm", "zamba",
    "zamba2", "zaya",
)  # fmt: skip
IDS = torch.arange(3, 15)[None]


def saved_twin(name, folder):
    twin = tiny_twin(CONFIG_MAPPING[name]())
    twin.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return twin


def test_every_architecture_of_the_library_is_proven_or_refused():
    """A new release of transformers shows its architectures here: each belongs in one of the tables."""
    tables = (*PROVEN, *PROVEN_MIXTURES, *LEFT_OUT, *REFUSED)
    assert sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(tables)) == []
    assert len(tables) == len(set(tables))
    tables = (*PROVEN_ENCODER_DECODERS, *LEFT_OUT)
    assert sorted(set(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES) - set(tables)) == []
    assert len(INSTALLED) >= 70


@pytest.mark.wide
@pytest.mark.parametrize("name", REFUSED)
def test_an_architecture_that_breaks_the_first_promise_is_refused(name):
    said = f"base: a {name} checkpoint cannot be expanded: on a tiny twin of the model"
    refused(check_architecture, CONFIG_MAPPING[name](), "base", says=said)


class FourthConfig(Qwen2Config):
    model_type = "fourth"
    mixes_tokens = False  # then it has no FFN: each output depends on the token before it


class PlainFeedForward(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.into, self.out = nn.Linear(config.hidden_size, 40), nn.Linear(40, config.hidden_size)
        self.mixes_tokens = config.mixes_tokens

    def forward(self, states):
        states = states + states.roll(1, dims=-2) if self.mixes_tokens else states
        return self.out(torch.relu(self.into(states)))


class FourthForCausalLM(Qwen2ForCausalLM):
    """A class that the project has never seen: the FFN is another one, under another name."""

    config_class = FourthConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = PlainFeedForward(config)
        self.post_init()


@pytest.fixture
def fourth():
    AutoConfig.register("fourth", FourthConfig, exist_ok=True)
    AutoModelForCausalLM.register(FourthConfig, FourthForCausalLM, exist_ok=True)
    return FourthConfig(**VOCABULARY, **SIZES)


def test_a_class_never_seen_is_taken_by_the_rule(fourth, tmp_path):
    model = FourthForCausalLM(fourth).eval()
    model.save_pretrained(tmp_path / "dense")
    expand_checkpoint(tmp_path / "dense", tmp_path / "out", Plan("own", [3, 1, 2], new=["el"]))
    loaded = LayerMoEForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad(), loaded.use_expert(0):
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    assert {type(expert) for ffn in loaded.expanded_ffns().values() for expert in ffn.experts} == {PlainFeedForward}


def test_a_class_that_breaks_a_promise_is_refused_by_its_name(fourth, tmp_path):
    fourth.mixes_tokens = True
    FourthForCausalLM(fourth).save_pretrained(tmp_path / "dense")
    wanted = "on a tiny twin of the model, it does not hold that the expanded model computes what the base does"
    refused(expand_checkpoint, tmp_path / "dense", tmp_path / "out", Plan("own", [3, 1, 2], new=["el"]), says=wanted)
    assert not (tmp_path / "out").exists()


# Each promise, and what damages a twin in the way that it speaks of.
DAMAGE = dict(zip(PROMISES, [
    lambda twin: twin.expanded.expanded_ffns()[0].experts[1].down_proj.weight.add_(1.0),
    lambda twin: twin.trained.model.embed_tokens.weight.add_(1e-6),
    lambda twin: [ffn.router.weight.requires_grad_(False) for ffn in twin.trained.expanded_ffns().values()],
    lambda twin: twin.trained.model.norm.register_forward_hook(lambda norm, *_: norm.weight.data.add_(1.0)),
    lambda twin: twin.trained.register_parameter("extra", nn.Parameter(torch.ones(1))),
    lambda twin: [setattr(layer.self_attn, "layer_idx", 0) for layer in twin.trained.model.layers],
], strict=True))  # fmt: skip


@pytest.mark.parametrize("promise", PROMISES)
def test_each_promise_can_fail(promise):
    (twin,) = Twin.of(CONFIG_MAPPING["qwen2"]())
    assert PROMISES[promise](twin)
    with torch.no_grad():
        DAMAGE[promise](twin)
    with suppress(RuntimeError, ValueError, IndexError):  # or it breaks
        assert not PROMISES[promise](twin)


def test_layers_that_are_mixtures_stay_as_they_are(tmp_path):
    twin = saved_twin("glm4_moe", tmp_path / "dense")
    assert [ffn.is_mixture for ffn in decoder_ffns(twin)] == [False, True, True, True]
    plan, said = Plan("own", [2, 2, 1, 1], new=["el"]), "Layers 1: of a base's own mixture of experts no copies"
    refused(expand_checkpoint, tmp_path / "dense", tmp_path / "out", plan, says=said)
    Plan("own", [2, 1, 1, 1], new=["el"]).save(tmp_path / "plan.json")
    said = invoke("inspect", tmp_path / "dense", "--plan", tmp_path / "plan.json")
    assert "mixtures before     layers 1, 2, 3, not expanded" in said
    assert all(ffn.is_mixture for ffn in decoder_ffns(tiny_twin(CONFIG_MAPPING["mixtral"]())))


# FFNs of separate layers, parts that the library puts together when it loads, layers that are mixtures already, FFNs of
# different widths beside other paths.
@pytest.mark.wide
@pytest.mark.parametrize("name", ["gemma3n_text", "glm4_moe", "olmo_hybrid", "opt"])
def test_surgery_on_unusual_backbones(name, tmp_path):
    base, made, out = (tmp_path / name for name in ("base", "made", "out"))
    dense = [not ffn.is_mixture for ffn in decoder_ffns(saved_twin(name, base))]
    counts, more = ([1 + times * own for own in dense] for times in (1, 2))
    expand_checkpoint(base, tmp_path / "fresh", Plan("own", counts, [0], old=["en"], new=["el"]))
    moved(load(tmp_path / "fresh")).save_pretrained(made)
    byte_tokenizer().save_pretrained(made)
    export_dense(made, out, expert=0)
    assert compare_checkpoints(base, out).same
    graft_delta(made, out, base, base, overwrite=True)
    assert compare_checkpoints(made, out).same
    average_checkpoints([made, made], out, overwrite=True)
    assert compare_checkpoints(made, out).same
    plan = Plan("own", more, [0], old=["en", "el"], new=["hu"], grows_from=counts)
    grow_checkpoint(made, out, plan, overwrite=True)
    grown = compare_checkpoints(made, out)
    assert not any(".experts." in name for name in (*grown.changed, *grown.removed))
    save_expansion(made, out, base=str(base), overwrite=True)
    with torch.no_grad():
        alone = LayerMoEForCausalLM.from_pretrained(out, base_model=str(base)).eval()
        assert torch.equal(alone(IDS).logits, load(made)(IDS).logits)
        expand_branches([base] * 2, out, Plan("dmoe", counts, groups=[["en"], ["el"]]), overwrite=True)
        torch.testing.assert_close(load(out)(IDS).logits, load(base)(IDS).logits, rtol=1e-4, atol=1e-5)


TEXT = {**VOCABULARY, **SIZES, "bos_token_id": 1}
WRAPPERS = TABLES["models of images"]


@pytest.mark.wide
@pytest.mark.parametrize("name", WRAPPERS)
def test_the_text_decoder_inside_a_model_of_images_is_taken(name, tmp_path, capsys):
    options = dict(WRAPPERS[name])
    config = CONFIG_MAPPING[name](text_config={**TEXT, **options.pop("text", {})}, **options)
    whole = AutoModelForImageTextToText.from_config(config).eval()
    whole.save_pretrained(tmp_path / "whole")
    byte_tokenizer().save_pretrained(tmp_path / "whole")
    Plan("own", [2, 1, 2], old=["en"], new=["el"]).save(tmp_path / "plan.json")
    said = invoke("expand", tmp_path / "whole", tmp_path / "out", "--plan", tmp_path / "plan.json")
    assert re.search(r"left out, since the backbone does not use them: \d+ tensors, such as \S+", said)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert model.config.backbone_model_type == config.get_text_config().model_type
    with torch.no_grad(), model.eval().use_expert(0):
        assert torch.equal(model(IDS).logits, whole(IDS).logits)
    text = {"en": ["One line of text."] * 20, "el": ["Μία γραμμή κειμένου."] * 20}
    base, tokenizer = load_for_inference(tmp_path / "whole")  # for analyses, and as the base of scores
    found, expected = (evaluate_model(one, tokenizer, text, block_size=16) for one in (base, model))
    assert found["en"].perplexity == pytest.approx(expected["en"].perplexity, rel=1e-4)
    assert len(measure_similarity(base, tokenizer, text, ["en"], ["el"], tokens=64, block_size=16).similarity) == 3


def test_what_is_no_text_decoder_of_the_library_is_refused(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    given = (expand_checkpoint, base, tmp_path / "out", Plan("own", [2], new=["el"]))
    CONFIG_MAPPING["mllama"]().to_json_file(base / "config.json")
    refused(*given, says="a mllama checkpoint cannot be expanded: it is")
    (base / "config.json").write_text('{"model_type": "mine", "auto_map": {"AutoConfig": "a.B"}}')
    refused(*given, says=r"'mine' is code inside the checkpoint \(auto_map\), which no command runs")


def test_the_page_lists_the_proven_architectures():
    page = (Path(__file__).parents[1] / "docs" / "backbones.md").read_text("utf-8")
    for kind, names in (("Architectures", PROVEN), ("Mixtures of experts", PROVEN_MIXTURES),
                        ("Encoder-decoders", PROVEN_ENCODER_DECODERS)):  # fmt: skip
        assert f"### {kind} that keep every promise ({len(names)})\n" in page
        assert f"\n{', '.join(names)}\n" in page
    assert ";\n".join(f"- {words}" for words in PROMISES) in page


def test_dropout_inside_an_ffn_of_separate_layers_is_drawn_for_each_expert():
    config = LayerMoEConfig.from_dense(
        AutoConfig.for_model(
            "xglm", vocab_size=257, d_model=32, ffn_dim=48, num_layers=2, attention_heads=4, activation_dropout=1.0,
            dropout=0.0, attention_dropout=0.0,
        ),
        num_experts_per_layer=[2, 1],
    )  # fmt: skip
    model = LayerMoEForCausalLM(config)
    ffn = model.expanded_ffns()[0]
    x = torch.randn(5, 32)
    torch.testing.assert_close(ffn.train()(x), ffn.experts[0].fc2.bias.expand(5, 32))
    assert not torch.allclose(ffn.eval()(x), ffn.experts[0].fc2.bias.expand(5, 32))


def test_two_modules_that_map_the_hidden_states_the_larger_is_the_ffn():
    twin = tiny_twin(CONFIG_MAPPING["gemma3n_text"]())
    assert {ffn.place.rsplit(".", 1)[1] for ffn in decoder_ffns(twin)} == {"mlp"}

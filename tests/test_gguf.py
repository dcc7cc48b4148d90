"""GGUF files become checkpoints: the same function, ready to expand; and what commands say of such a file."""

import sys

import pytest
import torch
from conftest import byte_tokenizer, invoke, tiny_dense
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_moe_expand import Plan, expand_checkpoint
from hf_moe_expand.checkpoint import source
from hf_moe_expand.checkpoint.source import resolve_checkpoint
from hf_moe_expand.core.errors import InputError

LAYER = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def rows_of_llama_cpp(weight, heads):
    """llama.cpp rotates neighbouring rows of a head, transformers its two halves."""
    return weight.view(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture
def quantised(tmp_path):
    """A tiny Llama as a GGUF file whose up projections are in 8 bits; and the dense model with those weights."""
    gguf = pytest.importorskip("gguf", reason="the extra `gguf` is not installed")
    model = tiny_dense("llama", tie_word_embeddings=False)
    config, weights = model.config, model.state_dict()
    names = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in WHOLE.items()}
    for number in range(config.num_hidden_layers):
        names |= {f"blk.{number}.{a}.weight": f"model.layers.{number}.{b}.weight" for a, b in LAYER.items()}
    assert sorted(names.values()) == sorted(weights)
    (tmp_path / "models").mkdir()
    file = tmp_path / "models" / "tiny.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    vocabulary = byte_tokenizer().get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.get)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*tokens[:255], "al", tokens[256]])  # one merge, in the place of a byte
    writer.add_token_types([1] * 256 + [3])
    writer.add_token_merges(["a l"])
    writer.add_eos_token_id(256)
    writer.add_bos_token_id(256)
    for ours, theirs in names.items():
        weight = weights[theirs]
        if "attn_q" in ours or "attn_k" in ours:
            heads = config.num_attention_heads if "attn_q" in ours else config.num_key_value_heads
            weight = rows_of_llama_cpp(weight, heads)
        if "ffn_up" in ours:
            small = gguf.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q8_0)
            weights[theirs].copy_(torch.from_numpy(gguf.dequantize(small, gguf.GGMLQuantizationType.Q8_0)))
            writer.add_tensor(ours, small, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(ours, weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file, model


def test_the_checkpoint_computes_the_same_and_can_be_expanded(quantised, tmp_path):
    file, dense = quantised
    assert f"wrote {tmp_path / 'dense'}: {dense.num_parameters():,} parameters" in invoke(
        "from-gguf", file, tmp_path / "dense"
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    assert model.dtype == torch.float32
    assert not hasattr(model.config, "quantization_config")
    ids = torch.arange(40)[None]
    torch.testing.assert_close(model(ids).logits, dense(ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "dense")
    beginning, end = (byte_tokenizer()(text).input_ids for text in ("Egy ", "mafa."))
    assert tokenizer("Egy almafa.", add_special_tokens=False).input_ids == [*beginning, 255, *end]
    assert tokenizer.eos_token_id == 256
    report = expand_checkpoint(
        tmp_path / "dense", tmp_path / "expanded", Plan("moe-lpr", [2, 2, 2], old=["en"], new=["hu"])
    )
    assert report.base_parameters == dense.num_parameters()
    assert model.config.unpacked_from_gguf == ["Q8_0"]
    assert "base's weights      unpacked from GGUF: Q8_0" in invoke("inspect", tmp_path / "expanded")
    card = invoke("card", tmp_path / "expanded")
    assert "| weights of the base | quantised (GGUF: Q8\\_0), unpacked" in card or "GGUF: Q8_0), unpacked" in card
    with pytest.raises(InputError, match="exists already"):
        invoke("from-gguf", file, tmp_path / "dense")


def test_other_files_are_refused(quantised, tmp_path):
    file, _ = quantised
    for broken, message in (
        (tmp_path / "none.gguf", "no such file; give a .gguf file"),
        (tmp_path / "text.gguf", "is not a GGUF file"),
        (tmp_path / "half.gguf", "transformers cannot read it"),
    ):
        if broken.stem == "text":
            broken.write_text("words")
        if broken.stem == "half":
            broken.write_bytes(file.read_bytes()[:2000])
        with pytest.raises(InputError, match=f"{broken.name}: {message}"):
            invoke("from-gguf", broken, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_without_its_package_a_command_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr("hf_moe_expand.core.extra.import_module", missing)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(InputError, match=r"gguf is not installed: pip install 'hf-moe-expand\[gguf\]'"):
        invoke("from-gguf", tmp_path / "a.gguf", tmp_path / "out")


def missing(name):
    raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_every_command_says_how_to_make_a_checkpoint_of_it(tmp_path, monkeypatch):
    file = tmp_path / "only" / "tiny.Q4.gguf"
    file.parent.mkdir()
    file.write_bytes(b"GGUF")
    said = f"{file}: is a GGUF file, not a checkpoint; make one of it with `hf-moe-expand from-gguf {file} OUT`."
    for name in (file, file.parent):
        with pytest.raises(InputError) as caught:
            resolve_checkpoint(name)
        assert str(caught.value) == said
    monkeypatch.setattr(source, "hub_problem", lambda: "")
    monkeypatch.setattr(source, "snapshot_download", lambda *_, **__: tmp_path)
    for files, refused in (["tiny.Q4.gguf"], True), (["README.md"], False):
        monkeypatch.setattr(source.HfApi, "list_repo_files", lambda *_, files=files, **__: files)
        if refused:
            with pytest.raises(InputError, match=r"me/tiny: the hub has this model as GGUF files alone: .* from-gguf"):
                resolve_checkpoint("me/tiny")
        else:
            assert resolve_checkpoint("me/tiny") == tmp_path

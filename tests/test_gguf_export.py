"""Export to GGUF: llama.cpp computes what transformers does, and cuts text as the tokenizer does."""

import json
import os
from pathlib import Path

import pytest
import torch
from bpe import CUTS, TEXT, bpe_tokenizer
from conftest import invoke, save_dense
from test_export import IDS, load, trained
from tokenizers import models, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_moe_expand import Plan, expand_checkpoint
from hf_moe_expand.checkpoint import gguf_export as module
from hf_moe_expand.checkpoint.gguf import KEPT
from hf_moe_expand.checkpoint.gguf_export import export_gguf
from hf_moe_expand.checkpoint.source import resolve_checkpoint
from hf_moe_expand.core.errors import InputError

gguf = pytest.importorskip("gguf", reason="the extra `gguf` is not installed")
# A folder with bases that benchmarks/study_bases.py made.
BASES = Path(os.environ.get("HF_MOE_EXPAND_BASES", "runs/bases"))


def grown(root, backbone, counts, top_k=2, **changes):
    """An expanded checkpoint whose experts differ, with a tokenizer that GGUF can hold."""
    model = trained(root, backbone, Plan("moe-lpr", counts, top_k=top_k), **changes)
    bpe_tokenizer().save_pretrained(model)
    return model


def llama_cpp(file, **options):
    from llama_cpp import LlamaCpp

    return LlamaCpp(file, **options)


def assert_same(file, model, tolerance=1e-4):
    served, ids, vocabulary = llama_cpp(file), IDS[0].tolist(), model.config.vocab_size
    with torch.no_grad():
        for length in (1, 7, 20):
            expected = model(IDS[:1, :length]).logits[0, -1].float().log_softmax(-1)
            torch.testing.assert_close(served.logprobs(ids[:length], vocabulary), expected, rtol=0, atol=tolerance)
    generated = model.generate(IDS[:1], max_new_tokens=6, do_sample=False, eos_token_id=None)[0, 20:].tolist()
    assert served.greedy(ids, 6, vocabulary) == generated


LLAMA31 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
GRANITE = {
    "embedding_multiplier": 3.0, "attention_multiplier": 0.4, "residual_multiplier": 0.7, "logits_scaling": 2.5,
}  # fmt: skip
MODELS = {
    "llama": ("llama", [3, 3, 3], {}),
    "llama-tied": ("llama", [3, 3, 3], {"tie_word_embeddings": True, "head_dim": 12}),
    "llama-biases": ("llama", [3, 3, 3], {"attention_bias": True}),
    "llama-3.1": ("llama", [3, 3, 3], {"rope_parameters": LLAMA31}),
    "llama-linear": ("llama", [3, 3, 3], {"rope_parameters": {**YARN, "rope_type": "linear"}}),
    "llama-yarn": ("llama", [3, 3, 3], {"rope_parameters": YARN}),
    "llama-one-active": ("llama", [2, 4, 3], {"top_k": 1}),
    "llama-with-dense": ("llama", [3, 1, 3], {}),
    "llama-uneven": ("llama", [2, 1, 4], {}),
    "llama-leading-dense": ("llama", [1, 2, 4], {}),
    "mistral": ("mistral", [3, 3, 3], {"sliding_window": None}),
    "mistral-uneven": ("mistral", [2, 3, 2], {"sliding_window": None}),
    "qwen2": ("qwen2", [3, 3, 3], {}),
    "qwen2-uneven": ("qwen2", [2, 1, 4], {}),
    "qwen3": ("qwen3", [3, 3, 3], {"head_dim": 12}),
    "qwen3-uneven": ("qwen3", [1, 2, 4], {}),
    "granite": ("granite", [3, 3, 3], GRANITE),
    "granite-with-dense": ("granite", [3, 1, 3], GRANITE),
}
ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "qwen2": "llama", "qwen3": "qwen3moe", "granite": "granitemoe",
    "llama-uneven": "ernie4_5-moe", "llama-leading-dense": "ernie4_5-moe", "mistral-uneven": "ernie4_5-moe",
    "qwen2-uneven": "ernie4_5-moe", "qwen3-uneven": "glm4moe",
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_computes_the_same(tmp_path, name):
    backbone, counts, changes = MODELS[name]
    model = grown(tmp_path, backbone, counts, **changes)
    assert export_gguf(model, tmp_path / "out.gguf") == ARCHITECTURES.get(name, ARCHITECTURES[backbone])
    ours, dense = load(model), load(tmp_path / "base")
    with torch.no_grad():
        assert (ours(IDS).logits - dense(IDS).logits).abs().max() > 0.01  # the experts do matter
    assert_same(tmp_path / "out.gguf", ours)


@pytest.mark.parametrize("backbone", ["llama", "mistral", "qwen2", "qwen3", "granite"])
def test_one_expert_as_a_dense_model(tmp_path, backbone):
    changes = {"sliding_window": None} if backbone == "mistral" else {}
    model = grown(tmp_path, backbone, [3, 1, 3], **changes)
    said = invoke("export", model, tmp_path / "out.gguf", "--gguf", "--expert", 2)
    assert said.strip().endswith(f"out.gguf: {'llama' if backbone == 'mistral' else backbone}")
    ours = load(model)
    served, ids = llama_cpp(tmp_path / "out.gguf"), IDS[0].tolist()
    with ours.use_expert(2), torch.no_grad():
        expected = ours(IDS[:1]).logits[0, -1].log_softmax(-1)
    torch.testing.assert_close(served.logprobs(ids, 257), expected, rtol=0, atol=1e-4)


def test_merged_lora_experts(tmp_path):
    save_dense(tmp_path / "base", "llama")
    expand_checkpoint(tmp_path / "base", tmp_path / "lora", Plan("mola", [3, 2, 3]), expert_kind="lora", lora_rank=4)
    model = load(tmp_path / "lora")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    model.save_pretrained(tmp_path / "trained")
    bpe_tokenizer().save_pretrained(tmp_path / "trained")
    with pytest.raises(InputError, match=r"no architecture of llama\.cpp has such experts"):
        export_gguf(tmp_path / "trained", tmp_path / "out.gguf")
    invoke("export", tmp_path / "trained", tmp_path / "out.gguf", "--gguf", "--merge-lora")
    assert_same(tmp_path / "out.gguf", model)


@pytest.mark.parametrize(("kind", "tolerance"), [("f32", 0.0), ("f16", 2e-3), ("bf16", 2e-2), ("q8_0", 2e-2)])
def test_each_type_holds_the_weights(tmp_path, kind, tolerance):
    model = grown(tmp_path, "llama", [2, 2, 2], hidden_size=64, intermediate_size=96)
    invoke("export", model, tmp_path / "out.gguf", "--gguf", "--type", kind)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    weights = load(model).state_dict()
    assert stored["blk.1.ffn_gate_inp.weight"].tensor_type == gguf.GGMLQuantizationType.F32
    assert stored["blk.1.ffn_norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32
    down = stored["blk.1.ffn_down_exps.weight"]
    assert down.tensor_type.name == kind.upper()
    values = torch.tensor(gguf.dequantize(down.data, down.tensor_type)).view(2, 64, 96)
    for expert in range(2):
        expected = weights[f"model.layers.1.mlp.experts.{expert}.down_proj.weight"]
        torch.testing.assert_close(
            values[expert], expected, rtol=tolerance, atol=tolerance * expected.abs().max().item()
        )
    assert stored["blk.0.attn_q.weight"].tensor_type.name == kind.upper()


def test_rows_that_q8_0_cannot_take_become_f16(tmp_path):
    model = grown(tmp_path, "llama", [2, 2, 2], intermediate_size=48)
    export_gguf(model, tmp_path / "out.gguf", kind="q8_0")
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    assert types["blk.0.ffn_down_exps.weight"] == "F16"
    assert types["blk.0.ffn_up_exps.weight"] == "Q8_0"


@pytest.mark.parametrize("rule", CUTS)
def test_llama_cpp_cuts_text_as_the_tokenizer_does(tmp_path, rule):
    model = grown(tmp_path, "llama", [2, 2, 2], vocab_size=512)
    tokenizer = bpe_tokenizer(rule, 400)
    tokenizer.add_tokens(["gőz", "<|x|>"])
    tokenizer.save_pretrained(model)
    export_gguf(model, tmp_path / "out.gguf")
    served = llama_cpp(tmp_path / "out.gguf")
    for text in (TEXT, "alma", " 12 345", "gőzgép<|x|><end> x", "\n\n", "δοκιμή 99"):
        assert served.tokenize(text) == tokenizer(text).input_ids
        assert served.tokenize(text, special=True) == tokenizer(text).input_ids


def test_special_tokens_and_chat_template_travel(tmp_path):
    model = grown(tmp_path, "llama", [2, 2, 2])
    tokenizer = bpe_tokenizer(bos_token="!")
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="! $A", special_tokens=[("!", 0)])
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    tokenizer.save_pretrained(model)
    (model / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.6}))
    said = invoke("export", model, tmp_path / "out.gguf", "--gguf", "--modelfile")
    assert "out.gguf: llama" in said
    assert (tmp_path / "Modelfile").read_text().splitlines() == [
        "FROM ./out.gguf", "PARAMETER num_ctx 64", "PARAMETER temperature 0.6", "PARAMETER top_k 50",
        "PARAMETER top_p 1.0", 'PARAMETER stop "<end>"',
    ]  # fmt: skip
    fields = {name: field.contents() for name, field in gguf.GGUFReader(tmp_path / "out.gguf").fields.items()}
    assert (fields["tokenizer.ggml.bos_token_id"], fields["tokenizer.ggml.eos_token_id"]) == (0, 256)
    assert fields["tokenizer.ggml.add_bos_token"]
    assert fields["general.name"] == "trained"
    served = llama_cpp(tmp_path / "out.gguf")
    assert served.tokenize("alma", special=True) == tokenizer("alma").input_ids
    messages = [{"role": "user", "content": "Szia"}]
    assert served.chat(messages).strip() == tokenizer.apply_chat_template(messages, tokenize=False).strip()


def test_a_base_from_gguf_keeps_its_tokenizers_fields(tmp_path):
    model = grown(tmp_path, "llama", [2, 2, 2])
    export_gguf(model, tmp_path / "base.gguf", expert=0)
    invoke("from-gguf", tmp_path / "base.gguf", tmp_path / "base-again")
    kept = tmp_path / "base-again" / KEPT
    content = json.loads(kept.read_text())
    assert content["tokenizer.ggml.pre"]["value"] == "gpt-2"
    content["tokenizer.ggml.pre"]["value"] = "smollm"  # not the name that the tokenizer itself would get
    kept.write_text(json.dumps(content))
    expand_checkpoint(tmp_path / "base-again", tmp_path / "grown", Plan("moe-lpr", [2, 2, 2]))
    export_gguf(tmp_path / "grown", tmp_path / "out.gguf")
    written = {name: field.contents() for name, field in gguf.GGUFReader(tmp_path / "out.gguf").fields.items()}
    before = {name: field.contents() for name, field in gguf.GGUFReader(tmp_path / "base.gguf").fields.items()}
    names = {name for name in before if name.startswith("tokenizer.")}
    assert {name for name in written if name.startswith("tokenizer.")} == names
    assert {name for name in names if written[name] != before[name]} == {"tokenizer.ggml.pre"}
    assert written["tokenizer.ggml.pre"] == "smollm"


def test_what_a_gguf_file_cannot_hold_is_refused(tmp_path):
    out = tmp_path / "out.gguf"

    def refused(message, model, **options):
        with pytest.raises(InputError, match=message):
            export_gguf(model, out, **options)
        assert not list(tmp_path.glob("*.gguf")) + list(tmp_path.glob(".*partial*"))

    def expanded(name, backbone, plan, **changes):
        save_dense(tmp_path / f"{name}-base", backbone, **changes)
        expand_checkpoint(tmp_path / f"{name}-base", tmp_path / name, plan)
        bpe_tokenizer().save_pretrained(tmp_path / name)
        return tmp_path / name

    uniform, uneven = Plan("moe-lpr", [2, 2, 2], old=["en"], new=["el"]), Plan("moe-lpr", [2, 3, 2])
    llama = expanded("l", "llama", uniform)
    refused("--type is 'q4_0': give one of f32, f16, bf16, q8_0; llama.cpp's llama-quantize", llama, kind="q4_0")
    refused("layer 0 has no expert 2", llama, expert=2)
    refused("models of bloom are not written as GGUF", expanded("b", "bloom", uniform))
    refused(
        "layers 1 have a classifier; no architecture of llama.cpp",
        expanded("c", "llama", Plan("layer-moe", [2, 2, 2], [1])),
    )
    refused("Granite's multipliers has one", expanded("g", "granite", uneven))
    refused("sliding window of 4 tokens", expanded("m", "mistral", uniform, sliding_window=4))
    refused("activation gelu", expanded("a", "llama", uniform, hidden_act="gelu"))
    refused("has no place for the tensor '.*bias'", expanded("mb", "llama", uniform, mlp_bias=True))
    refused("positions of the type 'llama3'", expanded("r", "llama", uneven, rope_parameters=LLAMA31))
    big = expanded("f", "llama", uniform)
    model = load(big)
    with torch.no_grad():
        model.model.layers[1].mlp.experts[1].up_proj.weight[0, 0] = 1e6
    model.save_pretrained(big)
    refused("ffn_up_exps.weight': a value is not finite in f16; use --type bf16", big, kind="f16")


def test_tokenizers_that_llama_cpp_does_not_have(tmp_path):
    model = grown(tmp_path, "llama", [2, 2, 2])

    def refused(message, **parts):
        tokenizer = bpe_tokenizer()
        for name, part in parts.items():
            setattr(tokenizer.backend_tokenizer, name, part)
        tokenizer.save_pretrained(model)
        with pytest.raises(InputError, match=message):
            export_gguf(model, tmp_path / "out.gguf")

    refused("no rule that cuts words as it does; known: gpt-2, llama-bpe", pre_tokenizer=pre_tokenizers.Whitespace())
    refused("changes text before it cuts it \\(Lowercase\\)", normalizer=normalizers.Lowercase())
    bare = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    refused("it merges nothing", model=models.BPE(vocab=bare, merges=[]))
    refused("it is Unigram, but only byte-level BPE is written", model=models.Unigram([("a", -1.0)], unk_id=0))
    bpe_tokenizer(size=300).save_pretrained(model)
    with pytest.raises(InputError, match=r"has number 257, but the model has 257 tokens \(and 42 more"):
        export_gguf(model, tmp_path / "out.gguf")
    for file in model.glob("token*"):
        file.unlink()
    with pytest.raises(InputError, match="has no tokenizer that loads"):
        export_gguf(model, tmp_path / "out.gguf")


def test_the_file_is_whole_or_not_there(tmp_path, monkeypatch):
    model, out = grown(tmp_path, "llama", [2, 2, 2]), tmp_path / "out.gguf"
    export_gguf(model, out)
    before = out.read_bytes()
    with pytest.raises(InputError, match="exists already; choose another file or pass --overwrite"):
        invoke("export", model, out, "--gguf")
    with pytest.raises(InputError, match="is a folder"):
        invoke("export", model, tmp_path, "--gguf")
    for arguments in (["--type", "f16"], ["--modelfile"]):
        with pytest.raises(InputError, match="belongs to --gguf"):
            invoke("export", model, tmp_path / "native", *arguments)
    with pytest.raises(InputError, match="--max-shard-size: --gguf writes one file"):
        invoke("export", model, tmp_path / "other.gguf", "--gguf", "--max-shard-size", "1MB")

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, "_converted", full)
        with pytest.raises(InputError, match=r"the disk is full; at least [\d.]+ kB are needed"):
            invoke("export", model, tmp_path / "other.gguf", "--gguf", "--modelfile")
        assert not (tmp_path / "Modelfile").exists()
        with pytest.raises(InputError, match=r"the disk is full; at least [\d.]+ kB are needed"):
            export_gguf(model, out, kind="q8_0", overwrite=True)
    with monkeypatch.context() as patch:
        patch.setattr("hf_moe_expand.core.disk.free_bytes", lambda _: 1000)
        with pytest.raises(InputError, match=r"needs [\d.]+ kB, [\d.]+ kB more than the disk has free"):
            export_gguf(model, out, overwrite=True)
    assert out.read_bytes() == before
    assert not list(tmp_path.glob(".*partial*"))
    export_gguf(model, out, kind="f16", overwrite=True)
    assert out.read_bytes() != before
    with pytest.raises(InputError, match="is a GGUF file, not a checkpoint"):
        resolve_checkpoint(out)


def test_smollm2_in_llama_cpp(tmp_path, help_text):
    if not (BASES / "smollm2").is_dir():
        pytest.skip(f"no SmolLM2 in {BASES}: make it with benchmarks/study_bases.py, or set HF_MOE_EXPAND_BASES")
    served_from = resolve_checkpoint(BASES / "smollm2")
    expand_checkpoint(served_from, tmp_path / "expanded", Plan("moe-lpr", [2] * 30, old=["en"], new=["el"]))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "expanded").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts.1." in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    model.save_pretrained(tmp_path / "expanded")
    export_gguf(tmp_path / "expanded", tmp_path / "out.gguf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "expanded", trust_remote_code=False)
    served = llama_cpp(tmp_path / "out.gguf", context=128)
    for text in [*help_text("en", "test", 2), *help_text("el", "test", 2)]:
        ids = tokenizer(text).input_ids[:48]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        found = served.logprobs(ids, len(logits))
        torch.testing.assert_close(found, logits.log_softmax(-1), rtol=0, atol=2e-3)
        assert found.argmax() == logits.argmax()


def test_a_modelfile_of_another_model_is_not_replaced(tmp_path):
    model, out, beside = grown(tmp_path, "llama", [2, 2, 2]), tmp_path / "out.gguf", tmp_path / "Modelfile"
    beside.write_text("FROM ./another.gguf\n")
    with pytest.raises(InputError, match="Modelfile: exists already; choose another file or pass --overwrite"):
        export_gguf(model, out, modelfile=True)
    assert not out.exists()
    export_gguf(model, out, modelfile=True, overwrite=True)
    assert beside.read_text().startswith("FROM ./out.gguf\n")
    out.unlink()  # as after an export that was killed between the two files
    export_gguf(model, out, modelfile=True)

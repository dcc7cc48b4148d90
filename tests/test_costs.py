"""Estimates of a training's costs, against what torch saves for the backward pass and what a tokenizer counts."""

import contextlib
import re

import pytest
import torch
from conftest import byte_tokenizer, write_texts
from transformers import AutoConfig

from hf_moe_expand import LayerMoEConfig, LayerMoEForCausalLM
from hf_moe_expand.costs import LARGE, activation_bytes, tokens_at_hand, training_flops, training_speed
from hf_moe_expand.data.sources import LanguageText
from hf_moe_expand.errors import InputError
from hf_moe_expand.memory import device_memory
from hf_moe_expand.stages import trained_parts
from hf_moe_expand.trainers.freezing import freeze

VOCABULARY = 512


def build(experts=2, top_k=2, fields=None, **sizes):
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4} | sizes
    config = AutoConfig.for_model(
        "llama",
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
        **sizes,
    )
    counts = [experts] * config.num_hidden_layers
    own = {"num_experts_per_layer": counts, "router_top_k": top_k, **(fields or {})}
    model = LayerMoEForCausalLM(LayerMoEConfig.from_dense(config, **own))
    freeze(model, trained_parts("post-pretrain"))
    return model.train()


def saved_bytes(model, rows, half):
    """Bytes of the tensors that torch keeps for the backward pass, the model's own left out."""
    kept = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no other takes its place
        return tensor

    ids = torch.randint(0, VOCABULARY, (rows, 256))
    mixed = torch.autocast("cpu", torch.bfloat16) if half else contextlib.nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), mixed:
        model(input_ids=ids, labels=ids, use_cache=False)
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    "sizes", [{}, {"intermediate_size": 512}, {"hidden_size": 256}, {"experts": 3}, {"experts": 4, "top_k": 1}], ids=str
)
def test_activations_are_those_that_torch_keeps(sizes, half):
    model = build(**sizes)
    # The difference of two batches leaves out what does not depend on their size.
    kept = saved_bytes(model, 8, half) - saved_bytes(model, 4, half)
    logits = 4 * 4 * 256 * VOCABULARY  # of which the forward pass keeps about one part in three
    found = activation_bytes(model, 4 * 256, half) - 2 * logits
    assert 0.7 < found / kept < 1.4


def test_logits_and_checkpointing_have_their_shares():
    model = build()
    assert activation_bytes(model, 200) == 2 * activation_bytes(model, 100)
    assert activation_bytes(model, 100, half=True) < activation_bytes(model, 100)
    less = activation_bytes(model, 100, checkpointing=True)
    logits = 100 * 4 * 3 * VOCABULARY
    assert logits < less < logits + (activation_bytes(model, 100) - logits) / 2
    layers, hidden = model.config.num_hidden_layers, model.config.hidden_size  # all layers are alike
    one = (activation_bytes(model, 100) - logits) / layers
    assert less == pytest.approx(logits + one + 100 * 4 * layers * hidden, abs=1)
    most = LARGE // VOCABULARY  # of more tokens, the loss takes the logits in pieces
    assert activation_bytes(model, most + 1) < activation_bytes(model, most)
    with torch.device("meta"):
        assert activation_bytes(build(), 100) == activation_bytes(model, 100)


def test_arithmetic_counts_k_of_n_experts():
    two, four = build(experts=2), build(experts=4)
    router = 4 * 4 * 2 * 128  # two more rows in each of four layers, met by each token
    frozen = sum(p.numel() for p in two.parameters() if p.requires_grad) > 0
    assert frozen
    ffn = 3 * 128 * 256
    met = sum(p.numel() for p in two.parameters()) - two.get_input_embeddings().weight.numel()
    trained = sum(p.numel() for p in two.parameters() if p.requires_grad)
    assert training_flops(two) == 4 * met + 2 * trained
    # Of four experts two run; three of four train, so one and a half of the two.
    assert training_flops(four) == 4 * (met + router / 4) + 2 * (trained + router / 4 + 4 * (1.5 - 1) * ffn)
    # Where all train, as in the stages `group` and `joint`, embeddings that are looked up take part in no product.
    assert training_flops(two.requires_grad_(True)) == 6 * met


@pytest.mark.parametrize(
    ("fields", "expert", "share"),
    [
        ({"conditional_routing": True}, 3 * 128 * 256, 1 / 3),  # of the routed experts
        ({"expert_kind": "lora", "lora_rank": 4, "lora_alpha": 8}, 3 * 4 * (128 + 256), 1 / 4),
        ({"expert_kind": "added", "expert_width": 8}, 3 * 128 * 8, 1 / 4),
    ],
)
def test_each_token_meets_expert_0_where_it_is_shared_or_changed(fields, expert, share):
    model = build(experts=4, top_k=1, fields=fields)
    total = sum(p.numel() for p in model.parameters())
    idle = (1 - share) * 4 * 3 * expert  # three other experts in each of four layers, all of which train
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    met = total - model.get_input_embeddings().weight.numel() - idle
    assert training_flops(model) == pytest.approx(4 * met + 2 * (trained - idle))


def test_tokens_are_estimated_from_the_beginning_of_each_file(tmp_path):
    texts = [f"number {number} of many texts, {'long ' * (number % 7)}" for number in range(30_000)]
    file = write_texts(tmp_path / "el.jsonl", texts)
    assert file.stat().st_size > 1 << 20
    exact = sum(len(text.encode()) for text in texts)
    found = tokens_at_hand(LanguageText("el", str(file)), byte_tokenizer())
    assert found == pytest.approx(exact, rel=0.02)
    small = write_texts(tmp_path / "hu.jsonl", ["abc", "defg"])
    assert tokens_at_hand(LanguageText("hu", str(small)), byte_tokenizer()) == 7
    wrong = tmp_path / "tr.jsonl"
    wrong.write_text('{"text": "one"}\n{"words": "two"}\n')
    with pytest.raises(InputError, match=f"^{re.escape(str(wrong))}:2: needs an object"):
        tokens_at_hand(LanguageText("tr", str(wrong)), byte_tokenizer())
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    assert tokens_at_hand(LanguageText("hu", str(tmp_path / "x.parquet")), byte_tokenizer()) is None


def test_this_machine_has_memory_and_speed():
    assert device_memory() > 1e8
    assert training_speed() > 1e6

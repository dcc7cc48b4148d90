"""Rows of languages' own tokens in a model: what they embed, where their logits are, and what stays the base's."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_config, tiny_dense
from gated_models import GREEDY, gated_model, tokens

from hf_moe_expand import LayerMoEConfig, LayerMoEForCausalLM, Plan, expand_model
from hf_moe_expand.checkpoint.promises import expanded_twin
from hf_moe_expand.modeling import LayerMoEModel
from hf_moe_expand.modeling.routing import TokenClasses
from hf_moe_expand.modeling.servers import check_model
from hf_moe_expand.trainers.freezing import EVERYTHING, Trained, freeze
from hf_moe_expand.trainers.pieces import LogitsInPieces

V, R = 257, 20
HISTORY = [{"method": "x", "old_languages": ["en"], "new_languages": ["el"]}]
FIELDS = {"vocabularies": {"el": R}, "expansions": HISTORY, "exclusive_experts": True}


def twin(backbone: str, **changes):
    """A dense model and its expansion, whose own tokens' rows are the base's first rows."""
    dense = tiny_dense(backbone, **changes)
    model = expanded_twin(dense, num_experts_per_layer=[2, 2, 2], **FIELDS)
    with torch.no_grad():
        model.vocabulary.embedding.weight.copy_(dense.get_input_embeddings().weight[:R])
        if model.vocabulary.head is not None:
            model.vocabulary.head.weight.copy_(dense.get_output_embeddings().weight[:R])
    return dense, model


@torch.no_grad()
def test_the_base_keeps_its_bits_and_a_row_is_what_the_base_would_make_of_it(backbone):
    if tiny_config(backbone).to_dict().get("final_logit_softcapping") or backbone == "gemma3n_text":
        pytest.skip("refused: see below")
    dense, model = twin(backbone)
    ids = tokens(2, 12)
    untold, told = model(ids).logits, model(ids, languages=["en", "el"]).logits
    expected = dense(ids).logits
    assert untold.shape[-1] == V + R
    assert (untold[..., V:] == -torch.inf).all()
    assert (told[0, :, V:] == -torch.inf).all()
    assert told[1].isfinite().all()
    assert torch.equal(told[0, :, :V], expected[0])
    assert torch.equal(model(ids, languages="en").logits[..., :V], expected)
    # A row that equals one of the base's is embedded as that is, and has its logit, but for a bias of the head.
    first = torch.where(ids < R, ids + V, ids)
    first[:, 0], ids[:, 0] = V + 3, 3
    again, of_base = (model(one, languages="el").logits for one in (first, ids))
    assert torch.allclose(again, of_base, atol=1e-6)
    bias = getattr(dense.get_output_embeddings(), "bias", None)
    of_rows = of_base[..., :R] - (0 if bias is None else bias[:R])
    assert torch.allclose(of_base[..., V:], of_rows, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("backbone", "changes", "said"),
    [("gemma2", {}, "caps the logits"), ("gemma3n_text", {}, "caps the logits|each of its layers"),
     ("t5", {"num_decoder_layers": 3, "d_model": 32}, "encoder-decoder")],
)  # fmt: skip
def test_backbones_that_could_not_keep_the_promise_are_refused(backbone, changes, said):
    with pytest.raises(ValueError, match=said):
        LayerMoEConfig.from_dense(tiny_config(backbone, **changes), **FIELDS | {"exclusive_experts": False})


@pytest.mark.parametrize("wrong", [{}, {"el": -1}, {"el": 1.5}, {"el": True}, ["el"]])
def test_wrong_fields_are_refused(wrong):
    with pytest.raises(ValueError, match="vocabularies is"):
        LayerMoEConfig.from_dense(tiny_config("qwen2"), vocabularies=wrong)


@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_tied_heads_have_one_tensor_and_a_saved_model_the_same(tied, tmp_path):
    _, model = twin("llama", tie_word_embeddings=tied)
    assert (model.vocabulary.head is None) == tied
    model.language_tokenizers = {"el": _NoTokenizer()}
    model.save_pretrained(tmp_path)
    again = LayerMoEForCausalLM.from_pretrained(tmp_path).eval()
    ids = tokens(2, 9) + 12
    assert torch.equal(again(ids, languages="el").logits, model(ids, languages="el").logits)
    without_head = LayerMoEModel.from_pretrained(tmp_path).eval()
    hidden = model.model(ids).last_hidden_state
    assert torch.equal(without_head(ids).last_hidden_state, hidden)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        copied.vocabulary.embedding.weight.mul_(2)  # its own, and its hooks'
        assert not torch.equal(copied.model(ids).last_hidden_state, hidden)
        assert torch.equal(model.model(ids).last_hidden_state, hidden)


class _NoTokenizer:
    def save_pretrained(self, folder):
        Path(folder).mkdir(parents=True)


@torch.no_grad()
def test_the_gate_unmasks_a_new_language_that_has_own_tokens_in_the_text():
    model = gated_model(exclusive=True, fields={"vocabularies": {"el": R}}, window=5)
    gate = model.expanded_ffns()[1].language_gate
    gate.weight.neg_()
    judged, ids = [], tokens(4, 16)
    gate.register_forward_hook(lambda *_: judged.append(_[-1].view(4, 16)))
    logits = model(ids).logits
    assert (judged[0] > 0).any()
    assert (logits[..., V:] == -torch.inf).all()  # text in the base's tokens alone goes on in these
    ids[:, 6] = V + 1
    logits = model(ids).logits
    own_BS = torch.zeros(4, 16, dtype=torch.bool)
    own_BS[:, 6:11] = True  # the window
    evidence_BS = judged[1].masked_fill(ids >= V, 1024 * model.config.language_gate["bound"])
    sums_BS = F.pad(evidence_BS.cumsum(1), (5, 0))
    new_BS = (sums_BS[:, 5:] - sums_BS[:, :-5] > 0) & own_BS
    assert new_BS.any()
    assert not new_BS[own_BS].all()
    assert torch.equal(logits[..., V:].isfinite().all(-1), new_BS)
    told = model(ids, languages=["en", "el", None, None]).logits[..., V:].isfinite().all(-1)
    assert not told[0].any()
    assert told[1].all()
    assert torch.equal(told[2:], new_BS[2:])
    with model.use_expert(0):
        assert (model(ids).logits[..., V:] == -torch.inf).all()
    assert torch.equal(model(ids, logits_to_keep=3).logits, logits[:, -3:])


@torch.no_grad()
def test_own_tokens_are_the_most_evidence_for_their_language():
    model = gated_model(exclusive=True, fields={"vocabularies": {"el": R}}, window=5)
    ids = tokens(2, 16)
    ids[0, 4:] = V + 1
    assert model(ids).logits[0, 6:, V:].isfinite().all()


@torch.no_grad()
def test_embeddings_are_text_in_the_bases_tokens():
    model, ids = gated_model(exclusive=True, fields={"vocabularies": {"el": R}}), tokens(2, 9)
    embedded = model(inputs_embeds=model.get_input_embeddings()(ids[:, :8]), use_cache=True)
    read = model(ids[:, :8], use_cache=True)
    assert torch.equal(embedded.logits, read.logits)
    following = [model(ids[:, 8:], past_key_values=of.past_key_values).logits for of in (embedded, read)]
    assert torch.equal(*following)


@pytest.mark.parametrize("told", ["el", None])
@torch.no_grad()
def test_cached_generation_equals_the_whole_pass(told):
    model = gated_model(exclusive=True, fields={"vocabularies": {"el": R}})
    ids = tokens(2, 7)
    ids[:, 3] = V + 2
    written = model.generate(ids, **GREEDY, **({} if told is None else {"languages": told, "judge_prompt": False}))
    if told is not None:
        logits = model(written[:, :-1], languages=told).logits[:, 6:]
        assert torch.equal(written[:, 7:], logits.argmax(-1))
    assert model.generate(ids, languages="el", num_beams=3, max_new_tokens=4, pad_token_id=256).shape[0] == 2


@torch.no_grad()
def test_told_alone_unmasks_without_a_gate():
    config = LayerMoEConfig.from_dense(
        tiny_config("qwen2"), num_experts_per_layer=[2, 2, 2], **FIELDS | {"exclusive_experts": False}
    )
    model, ids = LayerMoEForCausalLM(config).eval(), tokens(1, 6)
    assert (model(ids).logits[..., V:] == -torch.inf).all()
    assert model(ids, languages="el").logits.isfinite().all()


def test_losses_count_all_columns_and_the_language_of_the_token_to_come():
    _, model = twin("llama", tie_word_embeddings=False)
    ids = tokens(2, 12)
    ids[:, 6:] = torch.where(ids[:, 6:] < R, ids[:, 6:] + V, ids[:, 6:])
    ids[:, 6] = V + 1
    class_T = torch.tensor([0] * 6 + [1] * 6).repeat(2)
    with model.routing_control.asking(token_classes=TokenClasses(class_T, [0, 1])):
        model.train()
        outputs = model(ids, labels=ids)
        assert (outputs.logits[:, :5, V:] == -torch.inf).all()  # the fifth token is followed by an own one
        expected = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        assert outputs.loss.isfinite()
        assert torch.allclose(outputs.loss, expected)
        outputs.loss.backward()
        whole = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        assert whole["vocabulary.embedding.weight"].abs().sum()
        assert whole["vocabulary.head.weight"].abs().sum()
        pieces = LogitsInPieces.of(model)
        pieces.size = lambda: 5
        model.zero_grad()
        with pieces.head_inputs() as hidden:
            model(ids)
        loss = pieces.next_token_loss(hidden[0], ids)
        loss.backward()
    assert torch.allclose(loss, expected)
    for name, parameter in model.named_parameters():
        if name in whole:
            assert torch.allclose(parameter.grad, whole[name], atol=1e-5), name


def test_stage_1_alone_trains_the_rows():
    _, model = twin("llama")
    names = {name for name, _ in model.named_parameters() if name.startswith("vocabulary")}
    for trained, trains in ((Trained(experts="new", vocabulary=True), True), (Trained(), False), (EVERYTHING, True)):
        report = freeze(model, trained)
        assert all(model.get_parameter(name).requires_grad == trains for name in names)
        assert bool(report.parts["own tokens"]) == trains


def test_the_embedding_is_not_resized():
    _, model = twin("llama")
    assert model.resize_token_embeddings() is model.get_input_embeddings()
    with pytest.raises(ValueError, match="resize the base before"):
        model.resize_token_embeddings(V + 8)


@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_servers_with_an_embedding_of_their_own_are_refused(server):
    config = LayerMoEConfig.from_dense(tiny_config("llama"), num_experts_per_layer=[2, 2, 2], **FIELDS)
    config._attn_implementation_internal = server
    with pytest.raises(ValueError, match="export --language"):
        check_model(config, False)


def test_without_own_tokens_nothing_is_hooked():
    model = expand_model(tiny_dense("llama"), Plan("x", [2, 2, 2], old=["en"], new=["el"]))
    assert model.vocabulary is None
    assert not model.get_output_embeddings()._forward_hooks
    assert not any(key.startswith("vocabulary") for key in model.state_dict())

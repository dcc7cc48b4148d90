"""Forward passes with a language gate: texts are judged, and then told, against passes that the user tells."""

from functools import partial

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from conftest import load_offloaded, refused
from gated_models import (
    CODES,
    GREEDY,
    KINDS,
    TWO,
    all_go_to,
    clear_texts,
    dense_of,
    gated_model,
    padded,
    slow_class,
    slow_sums,
    tokens,
)
from peft import PrefixTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface, DynamicCache, StaticCache

from hf_moe_expand import LayerMoEForCausalLM

EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
OLD_NAMES = {"exclusive": "mlp", "adapters": "adapters"}  # of the module that held the gate's tensors


def numbers_of(model, texts):
    return [slow_class(slow_sums(model, text)) for text in texts]


@torch.no_grad()
@EVERY_KIND
def test_a_pass_is_the_one_that_the_user_tells(kind):
    """Of rows that are judged, of some that are told, and of padded ones; what is home has the base's bits."""
    model = gated_model(**KINDS[kind])
    base, texts = dense_of(model), clear_texts(model, 2, 11)
    ids, numbers = torch.tensor(texts), numbers_of(model, texts)
    codes, home = [CODES[number] for number in numbers], torch.tensor(numbers) == 0
    told, plain = model(ids, languages=codes).logits, base(ids).logits
    assert torch.equal(model(ids).logits, told)
    assert torch.equal(told[home], plain[home])
    assert all(not torch.allclose(*pair, atol=0.01) for pair in zip(told[~home], plain[~home], strict=True))
    some = [code if row % 2 else None for row, code in enumerate(codes)]
    assert torch.equal(model(ids, languages=some).logits, told)
    others = [CODES[(number + 1) % 3] if row % 2 else None for row, number in enumerate(numbers)]
    beside = [other or code for other, code in zip(others, codes, strict=True)]
    assert torch.equal(model(ids, languages=others).logits, model(ids, languages=beside).logits)
    for row in range(6):
        assert torch.equal(model(ids[row : row + 1]).logits, model(ids[row : row + 1], languages=codes[row]).logits)
    longer = clear_texts(model, 2, 4, 13, seed=50)
    codes = [CODES[number] for number in numbers_of(model, longer)]
    for side in ("left", "right"):
        ids, mask = padded(longer, side)
        told = model(ids, attention_mask=mask, languages=codes).logits
        assert torch.equal(model(ids, attention_mask=mask).logits, told)
        embedded = model.get_input_embeddings()(ids)
        assert torch.equal(model(inputs_embeds=embedded, attention_mask=mask).logits, told)
        assert torch.equal(model(ids).logits, model(ids, languages=codes).logits)
    with model.use_expert(0):
        assert torch.equal(model(ids).logits, base(ids).logits)
    with model.use_expansion(0):
        assert torch.equal(model(ids).logits, base(ids).logits)
    with model.use_expansion(1):
        assert torch.equal(model(ids).logits, model(ids, languages=codes).logits)


@torch.no_grad()
@EVERY_KIND
def test_each_text_of_a_packed_row_is_judged_by_itself(kind):
    """By positions, also where a mask of four dimensions keeps the texts apart."""
    model = gated_model(**KINDS[kind])
    texts = clear_texts(model, 2, 7)
    ids, codes = torch.tensor(texts).view(2, 21), [CODES[number] for number in numbers_of(model, texts)]
    alone = [model(torch.tensor([text]), languages=code).logits[0] for text, code in zip(texts, codes, strict=True)]
    expected, positions = torch.cat(alone).view(2, 21, -1), torch.arange(7).repeat(3).expand(2, 21)
    mask = torch.block_diag(*[torch.ones(7, 7).tril()] * 3).bool().expand(2, 1, 21, 21)
    torch.testing.assert_close(model(ids, attention_mask=mask, position_ids=positions).logits, expected)
    torch.testing.assert_close(model(ids[:1], position_ids=positions[:1], use_cache=False).logits, expected[:1])
    with pytest.raises(ValueError, match="does not show padding and the beginnings of texts: give one of"):
        model(ids, attention_mask=mask)


@torch.no_grad()
@pytest.mark.parametrize("make", [DynamicCache, partial(StaticCache, max_cache_len=32)])
def test_a_filled_cache_needs_a_told_language_or_a_judged_one(make):
    model = gated_model(**KINDS["exclusive"])
    texts = clear_texts(model, 2, 9)
    ids, cache, numbers = torch.tensor(texts), make(config=model.config), numbers_of(model, texts)
    said = r"a pass on a filled cache judges no text: tell its language \(languages=\), or run it in"
    model(ids, past_key_values=cache)
    for told in ({}, {"languages": ["en", *[None] * 5]}):
        refused(model, ids[:, :1], **told, past_key_values=cache, says=said, raises=ValueError)
    with pytest.raises(ValueError, match=r"nobody tells the language of the texts in past_key_values: give languages="):
        model.generate(torch.cat([ids, ids[:, :2]], 1), past_key_values=cache, **GREEDY)
    expected = model.generate(ids, **GREEDY)
    cache, given, found = make(config=model.config), ids, ids
    with model.judged(ids):
        for _ in range(8):
            given = model(given, past_key_values=cache).logits[:, -1:].argmax(-1)
            found = torch.cat([found, given], 1)
    assert torch.equal(found, expected)
    for ask in (model.judged(ids), model.use_languages([CODES[number] for number in numbers])):
        cache = make(config=model.config)
        model(ids[:, :-1], past_key_values=cache)
        with ask:
            assert torch.equal(model.generate(ids, past_key_values=cache, **GREEDY), expected)


def test_in_training_nothing_is_judged():
    """A model without a told language trains its newest expansion."""
    model, ids, calls = gated_model(expansions=TWO, exclusive=True).train(), tokens(2, 8), []
    model.language_gate.register_forward_hook(lambda *_: calls.append(0))
    all_go_to(model, 0)
    loss = model(ids).logits.square().sum()
    assert torch.equal(loss, model(ids, languages="hu").logits.square().sum())
    loss.backward()
    assert calls == []
    assert model.language_gate.weight.grad is None
    with model.eval().routing_control.asking(as_in_training=True), torch.no_grad():
        model(ids)
    assert calls == []


@torch.no_grad()
def test_a_compiled_pass_is_judged_before():
    """The pass that judges is no part of a graph, whatever part of the model is compiled."""
    for compiles in (lambda model: model, lambda model: model.model.layers[1]):
        model = gated_model(expansions=[(2, 2)], exclusive=True, num_hidden_layers=2)
        ids = torch.tensor(clear_texts(model, 2, 9))
        expected = model(ids, use_cache=False).logits
        torch.compiler.reset()
        compiles(model).compile(backend="eager")
        torch.testing.assert_close(model(ids, use_cache=False).logits, expected)
        torch.testing.assert_close(model(ids, use_cache=False).logits, expected)


@torch.no_grad()
def test_a_graph_judges_no_text():
    with pytest.raises(Exception, match="a graph judges no text: tell its language"):
        torch.export.export(gated_model(), (tokens(2, 8),), strict=False)


@torch.no_grad()
@pytest.mark.parametrize("kind", OLD_NAMES)
def test_a_gate_that_was_stored_inside_a_layers_block_is_saved_beside_it(kind, tmp_path):
    model, ids = gated_model(**KINDS[kind]), tokens(9, 8)
    model.save_pretrained(tmp_path / "new")
    config = (tmp_path / "new" / "config.json").read_text()
    assert '"begin"' not in config  # as of rules of before
    new = load_file(tmp_path / "new" / "model.safetensors")
    gate = {f"model.layers.1.language_gate.{part}" for part in ("weight", "bias")}
    assert {name for name in new if "gate." in name and "proj" not in name} == gate
    old = {name.replace("1.language_gate", f"1.{OLD_NAMES[kind]}.language_gate"): value for name, value in new.items()}
    model.config.save_pretrained(tmp_path / "old")
    save_file(old, tmp_path / "old" / "model.safetensors", {"format": "pt"})
    for folder in ("old", "new"):
        loaded, info = LayerMoEForCausalLM.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert torch.equal(loaded.eval()._sums(ids), model._sums(ids))
        assert torch.equal(loaded(ids).logits, model(ids).logits)
        loaded.save_pretrained(tmp_path / "again")
        assert load_file(tmp_path / "again" / "model.safetensors").keys() == new.keys()


@torch.no_grad()
@pytest.mark.parametrize("kind", ["copies", "exclusive", "adapters"])
def test_an_offloaded_model_judges(kind, tmp_path):
    model = gated_model(**KINDS[kind])
    ids = torch.tensor(clear_texts(model, 2, 9))
    expected, classes, answers = model(ids).logits, model.judge(ids), model.generate(ids, **GREEDY)
    model.save_pretrained(tmp_path)
    on_disk = load_offloaded(tmp_path)
    for other in (on_disk, cpu_offload(model, torch.device("cpu"))):
        assert torch.equal(other.judge(ids), classes)
        assert torch.equal(other(ids).logits, expected)
        assert torch.equal(other.generate(ids, **GREEDY), answers)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["top-k", "exclusive"])
def test_layers_behind_the_gate_may_lie_on_another_device(kind, monkeypatch):
    """As `device_map` spreads them; the meta device stands for a second one."""
    model = gated_model(**KINDS[kind])
    ids = torch.tensor(clear_texts(model, 2, 9))
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device=None: False)  # which meta does not have
    for part in (*model.model.layers[2:], model.model.norm, model.lm_head):
        add_hook_to_module(part.to("meta"), AlignDevicesHook(execution_device="meta"))
    assert model(ids, use_cache=False).logits.shape == (6, 9, 257)


@torch.no_grad()
@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_a_server_that_reads_parts_of_texts_is_refused(server, monkeypatch):
    monkeypatch.setitem(AttentionInterface._global_mapping, server, None)  # as the server registers its own
    config = gated_model().config
    config._attn_implementation_internal = server
    with pytest.raises(ValueError, match=r"(vLLM|SGLang) reads parts of several in one pass.*export --language"):
        LayerMoEForCausalLM(config)


@torch.no_grad()
def test_prefix_tuning_is_told():
    """Its vectors lie in a cache, so that a pass of its own judges nothing; `generate` judges the prompt."""
    model = gated_model(**KINDS["exclusive"])
    texts = clear_texts(model, 2, 9)
    ids, codes = torch.tensor(texts), [CODES[number] for number in numbers_of(model, texts)]
    tuned = get_peft_model(model, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    refused(tuned, ids, says="a pass on a filled cache judges no text", raises=ValueError)
    with tuned.judged(ids):
        found = tuned(ids).logits
    assert torch.equal(found, tuned(ids, languages=codes).logits)
    options = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **GREEDY}
    assert torch.equal(tuned.generate(**options), tuned.generate(languages=codes, **options))


@torch.no_grad()
def test_compiled_rows_of_several_classes_share_a_graph_whichever_they_are():
    model, graphs, counts = gated_model(expansions=TWO, exclusive=True), [], []
    texts = sorted(clear_texts(model, 1, 9), key=lambda text: slow_class(slow_sums(model, text)))
    torch.compiler.reset()
    model.compile(backend=lambda graph, _: graphs.append(graph) or graph.forward)
    for two in ([0, 1], [0, 2], [1, 2]):
        model(torch.tensor([texts[number] for number in two]), use_cache=False)
        counts.append(len(graphs))
    assert counts[0] == counts[2]

"""Passes and `generate` with a language gate, against what the user tells; one model in several threads."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from conftest import enable_checkpointing, load_offloaded, refused, shaken, tiny_config, tiny_dense
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
from transformers import AttentionInterface, CompileConfig, DynamicCache, GenerationConfig, StaticCache

from hf_moe_expand import LayerMoEConfig, LayerMoEForCausalLM

OLD_NAMES = {"exclusive": "mlp", "adapters": "adapters"}  # of the module that held the gate's tensors


def codes_of(model, texts):
    return [CODES[slow_class(slow_sums(model, text))] for text in texts]


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_is_the_one_that_the_user_tells(kind):
    """Of rows that are judged, of some that are told, and of padded ones; what is home has the base's bits."""
    model = gated_model(**KINDS[kind])
    base, texts = dense_of(model), clear_texts(model, 2, 11)
    ids, codes = torch.tensor(texts), codes_of(model, texts)
    home = torch.tensor([code == "en" for code in codes])
    told, plain = model(ids, languages=codes).logits, base(ids).logits
    assert torch.equal(model(ids).logits, told)
    assert torch.equal(told[home], plain[home])
    assert all(not torch.allclose(*pair, atol=0.01) for pair in zip(told[~home], plain[~home], strict=True))
    some = [code if row % 2 else None for row, code in enumerate(codes)]
    assert torch.equal(model(ids, languages=some).logits, told)
    for row in (0, 3):
        assert torch.equal(model(ids[row : row + 1]).logits, model(ids[row : row + 1], languages=codes[row]).logits)
    longer = clear_texts(model, 2, 4, 13, seed=50)
    codes = codes_of(model, longer)
    for side in ("left", "right"):
        ids, mask = padded(longer, side)
        told = model(ids, attention_mask=mask, languages=codes).logits
        assert torch.equal(model(ids, attention_mask=mask).logits, told)
        embedded = model.get_input_embeddings()(ids)
        assert torch.equal(model(inputs_embeds=embedded, attention_mask=mask).logits, told)
        assert torch.equal(model(ids).logits, model(ids, languages=codes).logits)
    for block in (model.use_expert(0), model.use_expansion(0)):
        with block:
            assert torch.equal(model(ids).logits, base(ids).logits)
    with model.use_expansion(1):
        assert torch.equal(model(ids).logits, model(ids, languages=codes).logits)


@torch.no_grad()
def test_each_text_of_a_packed_row_is_judged_by_itself():
    """By positions, also where a mask of four dimensions keeps the texts apart."""
    model = gated_model(**KINDS["exclusive of several"])
    texts = clear_texts(model, 2, 7)
    ids, codes = torch.tensor(texts).view(2, 21), codes_of(model, texts)
    alone = [model(torch.tensor([text]), languages=code).logits[0] for text, code in zip(texts, codes, strict=True)]
    expected, positions = torch.cat(alone).view(2, 21, -1), torch.arange(7).repeat(3).expand(2, 21)
    mask = torch.block_diag(*[torch.ones(7, 7).tril()] * 3).bool().expand(2, 1, 21, 21)
    torch.testing.assert_close(model(ids, attention_mask=mask, position_ids=positions).logits, expected)
    torch.testing.assert_close(model(ids[:1], position_ids=positions[:1], use_cache=False).logits, expected[:1])
    refused(model, ids, attention_mask=mask, says="attention_mask must be .batch, sequence.", raises=ValueError)


@torch.no_grad()
@pytest.mark.parametrize("make", [DynamicCache, partial(StaticCache, max_cache_len=32)])
def test_a_filled_cache_needs_a_told_language_or_a_judged_one(make):
    model = gated_model(**KINDS["exclusive"])
    texts = clear_texts(model, 2, 9)
    ids, cache = torch.tensor(texts), make(config=model.config)
    said = "a pass on a filled cache judges no text: give languages=, or"
    model(ids, past_key_values=cache)
    for told in ({}, {"languages": ["en", *[None] * 5]}):
        refused(model, ids[:, :1], **told, past_key_values=cache, says=said, raises=ValueError)
    said = r"nobody tells the language of the texts in past_key_values: give languages="
    given = {"past_key_values": cache, **GREEDY}
    refused(model.generate, torch.cat([ids, ids[:, :2]], 1), **given, says=said, raises=ValueError)
    expected = model.generate(ids, **GREEDY)
    for ask in (model.judged(ids), model.use_languages(codes_of(model, texts))):
        cache = make(config=model.config)
        model(ids[:, :-1], past_key_values=cache)
        with ask:
            assert torch.equal(model.generate(ids, past_key_values=cache, **GREEDY), expected)


def test_in_training_nothing_is_judged():
    """A model without a told language trains its newest expansion, and `generate` says so."""
    model, ids, calls = gated_model(expansions=TWO, exclusive=True).train(), tokens(2, 8), []
    model.language_gate.register_forward_hook(lambda *_: calls.append(0))
    all_go_to(model, 0)
    loss = model(ids).logits.square().sum()
    assert torch.equal(loss, model(ids, languages="hu").logits.square().sum())
    loss.backward()
    assert model.language_gate.weight.grad is None
    with pytest.warns(UserWarning, match=r"nothing is judged: call model.eval\(\) first"):
        found = model.generate(ids, **GREEDY)
    assert torch.equal(found, model.generate(ids, languages="hu", **GREEDY))
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
@pytest.mark.parametrize("kind", OLD_NAMES)
def test_a_gate_that_was_stored_inside_a_layers_block_is_saved_beside_it(kind, tmp_path):
    model, ids = gated_model(**KINDS[kind]), tokens(9, 8)
    model.save_pretrained(tmp_path / "new")
    assert '"begin"' not in (tmp_path / "new" / "config.json").read_text()  # as of rules of before
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
def test_an_offloaded_model_judges(tmp_path):
    model = gated_model(**KINDS["adapters"])
    ids = torch.tensor(clear_texts(model, 2, 9))
    expected, classes, answers = model(ids).logits, model.judge(ids), model.generate(ids, **GREEDY)
    model.save_pretrained(tmp_path)
    on_disk = load_offloaded(tmp_path)
    for other in (on_disk, cpu_offload(model, torch.device("cpu"))):
        assert torch.equal(other.judge(ids), classes)
        assert torch.equal(other(ids).logits, expected)
        assert torch.equal(other.generate(ids, **GREEDY), answers)


@torch.no_grad()
def test_layers_behind_the_gate_may_lie_on_another_device(monkeypatch):
    """As `device_map` spreads them; the meta device stands for a second one."""
    model = gated_model(**KINDS["top-k"])
    ids = torch.tensor(clear_texts(model, 2, 9))
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device=None: False)  # which meta does not have
    for part in (*model.model.layers[2:], model.model.norm, model.lm_head):
        add_hook_to_module(part.to("meta"), AlignDevicesHook(execution_device="meta"))
    assert model(ids, use_cache=False).logits.shape == (6, 9, 257)


@torch.no_grad()
def test_prefix_tuning_is_told():
    """Its vectors lie in a cache, so that a pass of its own judges nothing; `generate` judges the prompt."""
    model = gated_model(**KINDS["exclusive"])
    texts = clear_texts(model, 2, 9)
    ids, codes = torch.tensor(texts), codes_of(model, texts)
    tuned = get_peft_model(model, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    refused(tuned, ids, says="a pass on a filled cache judges no text", raises=ValueError)
    with tuned.judged(ids):
        found = tuned(ids).logits
    assert torch.equal(found, tuned(ids, languages=codes).logits)
    options = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **GREEDY}
    assert torch.equal(tuned.generate(**options), tuned.generate(languages=codes, **options))


LONG = {**GREEDY, "max_new_tokens": 80}
# A window of many tokens, and an answer that goes home only if it is clearly not of the new languages.
SWAYING = {"window": 64, "rule": {"home": -6.0, "begin": 251}}


def judgings(model):
    """Inside, how often the gate judges texts."""
    return patch.object(model, "_sums", wraps=model._sums)


WAYS = {
    "without a cache": {"use_cache": False},
    "several beams": {"num_beams": 3, "num_return_sequences": 2},
    "in chunks": {"prefill_chunk_size": 4, "cache_implementation": "static"},
    "as a dictionary": {"return_dict_in_generate": True, "output_logits": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_prompt_is_told_its_class(way):
    """Also padded, and beside prompts that are told."""
    model = gated_model(**KINDS["exclusive"])
    texts = clear_texts(model, 2, 11, 5)
    codes, (ids, mask) = codes_of(model, texts), padded(texts)

    def written(**options):
        made = model.generate(ids, attention_mask=mask, **GREEDY, **WAYS[way], **options)
        return torch.stack(made.logits) if way == "as a dictionary" else made

    told = written(languages=codes)
    with judgings(model) as judged:
        assert torch.equal(written(), told)
    assert judged.call_count == 1
    assert torch.equal(written(languages=[code if row % 2 else None for row, code in enumerate(codes)]), told)
    assert not torch.equal(written(languages="en"), told)
    assert not torch.equal(written(languages="el"), told)
    assert torch.equal(written(judge=False), written(languages="en"))
    assert torch.equal(written(judge=ids.flip(0)), written(languages=codes[::-1]))


def test_prompts_come_in_many_forms():
    """Without a mask, as embeddings, with ids beside them, by other names, and not at all."""
    model = gated_model(**KINDS["adapters"])
    texts = clear_texts(model, 2, 9, 4)
    (ids, mask), codes = padded(texts), codes_of(model, texts)
    told = model.generate(ids, attention_mask=mask, languages=codes, **GREEDY)
    assert torch.equal(model.generate(ids, **GREEDY), told)
    config = GenerationConfig(**GREEDY | {"eos_token_id": 255})
    assert torch.equal(model.generate(ids, config), model.generate(ids, config, attention_mask=mask))
    assert torch.equal(model.generate(input_ids=ids, attention_mask=mask, **GREEDY), told)
    assert torch.equal(model.generate(inputs=ids, attention_mask=mask, input_ids=None, **GREEDY), told)
    embedded = model.get_input_embeddings()(ids)
    for ways in ({}, {"input_ids": ids[:, :0]}, {"input_ids": ids}):
        given = {**ways, "inputs_embeds": embedded, "attention_mask": mask, **GREEDY}
        found = model.generate(**given)
        assert torch.equal(found, model.generate(languages=codes, **given))
        assert torch.equal(found[:, -8:], told[:, -8:])
    nothing = {"bos_token_id": 7, **GREEDY}
    assert torch.equal(model.generate(**nothing), model.generate(languages="en", **nothing))
    said = "judge has 2 texts, but there are 6 prompts: give one for each"
    refused(model.generate, ids, judge=ids[:2], **GREEDY, says=said, raises=ValueError)
    home = model.generate(ids, languages="en", attention_mask=mask, **GREEDY)
    assert torch.equal(model.generate(ids, judge=False, attention_mask=mask, **GREEDY), home)


def test_with_drafts_the_prompts_class_holds():
    """A model that drafts, itself behind a gate or not, judges its prompt once."""
    model, other = gated_model(**KINDS["exclusive"], **SWAYING), gated_model(**KINDS["copies"])
    dense, options = tiny_dense("qwen2", seed=3), {**GREEDY, "max_new_tokens": 20}
    for text in clear_texts(model, 1, 8)[:2]:
        ids, (code,) = torch.tensor([text]), codes_of(model, [text])
        options["attention_mask"] = torch.ones_like(ids)
        told = model.generate(ids, languages=code, **options)
        for way in ({"assistant_model": other}, {"assistant_model": model}, {"assistant_early_exit": 1}):
            with judgings(model) as judged, judgings(other) as drafted:
                assert torch.equal(model.generate(ids, **way, **options), told)
            assert (judged.call_count, drafted.call_count) == (1, way.get("assistant_model") is other)
        with judgings(model) as drafted:
            assert torch.equal(dense.generate(ids, assistant_model=model, **options), dense.generate(ids, **options))
        assert drafted.call_count == 1


def test_what_reads_parts_of_texts_is_refused(monkeypatch):
    """Continuous batching, servers, and a graph of any part."""
    model, said = gated_model(), "and continuous batching reads parts of several.*transformers' generate"
    refused(model.generate_batch, [[1, 2, 3]], says=said, raises=ValueError)
    refused(model.generate, tokens(1, 3), cache_implementation="paged", **GREEDY, says=said, raises=ValueError)
    with pytest.raises(Exception, match="a graph judges no text: give languages="):
        torch.export.export(model, (tokens(2, 8),), strict=False)
    for server in ("vllm", "sglang"):
        monkeypatch.setitem(AttentionInterface._global_mapping, server, None)  # as the server registers its own
        model.config._attn_implementation_internal = server
        said = r"(vLLM|SGLang) reads parts of several in one pass.*export --language"
        refused(LayerMoEForCausalLM, model.config, says=said, raises=ValueError)


def slow_answer_class(model, prompt_class, answer, known):
    """The class of a row from the whole of its answer."""
    home, number = model.config.language_gate["home"], prompt_class
    for mark in (mark for mark in (16, 32, *range(64, 1000, 64)) if mark <= len(answer)):
        judged = list(answer[:mark])
        if judged[-1] == judged[-2] and len({*judged}) > 1:  # a run at the end
            judged = judged[: -next(n for n in range(1, mark) if judged[-1 - n] != judged[-1])]
        if tuple(judged) not in known:
            known[tuple(judged)] = slow_sums(model, judged)
        sums = known[tuple(judged)]
        number = slow_class(sums) if max(sums) > 0 else number if max(sums) >= home else 0
    return number


# Of answers: the kind of model, and what `generate` is told.
ANSWERS = {
    "sampled": ("exclusive", {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 140}),
    "beams": ("copies", {"num_beams": 4, "num_return_sequences": 2}),
    "sampled beams": ("adapters", {"do_sample": True, "num_beams": 2}),
    "static": ("exclusive", {"do_sample": True, "cache_implementation": "static", "prefill_chunk_size": 5}),
    "without a cache": ("exclusive", {"do_sample": True, "use_cache": False, "max_new_tokens": 40}),
    "no prompt": ("exclusive", {"do_sample": True, "bos_token_id": 7, "num_return_sequences": 6}),
    "embeddings": ("exclusive", {"do_sample": True, "embedded": True, "max_new_tokens": 40}),
}


@pytest.mark.parametrize("way", ANSWERS)
def test_each_row_has_the_class_that_its_ids_say(way):
    """Against a loop that judges each row's whole answer again before each token."""
    kind, way = ANSWERS[way]
    model, texts, known, seen = gated_model(**KINDS[kind], **SWAYING), [[]], {}, []
    options = {**LONG, **way}
    if "bos_token_id" not in way:
        texts = clear_texts(model, 2, 9)
        ids = torch.tensor(texts)
        given = {"inputs_embeds": model.get_input_embeddings()(ids)} if options.pop("embedded", 0) else {"inputs": ids}
        options |= given | {"attention_mask": torch.ones_like(ids)}
    start = 1 if "bos_token_id" in way else 0 if "inputs_embeds" in options else 9
    prompts = [slow_class(slow_sums(model, text)) for text in texts]
    prepare = model.prepare_inputs_for_generation

    @wraps(prepare)
    def noting(input_ids, *args, **kwargs):
        made = prepare(input_ids, *args, **kwargs)
        class_B = model.routing_control.request.classes.class_B
        seen.append((input_ids, class_B.repeat_interleave(len(input_ids) // len(class_B)).tolist()))
        return made

    model.prepare_inputs_for_generation = noting
    torch.manual_seed(0)
    model.generate(**options)
    changes, moves, before = 0, 0, None
    for ids, classes in seen:
        of_rows = [number for number in prompts for _ in range(len(ids) // len(prompts))]
        answers = zip(of_rows, ids[:, start:].tolist(), strict=True)
        assert classes == [slow_answer_class(model, number, answer, known) for number, answer in answers], ids.shape
        changes += classes != of_rows
        if ids.shape[1] > start:  # less is a part of a prompt
            moves += before is not None and not torch.equal(ids[:, : before.shape[1]], before)
            before = ids
    assert changes
    assert (moves > 0) == ("num_beams" in way)


def test_an_answer_that_changes_its_class_goes_on_with_its_cache():
    """By a loop of passes that are told."""
    model = gated_model(**KINDS["exclusive"], **SWAYING)
    (text, *_), cache, known = clear_texts(model, 1, 9), DynamicCache(config=model.config), {}
    torch.manual_seed(0)
    options = {"do_sample": True, "return_dict_in_generate": True, "output_logits": True}
    made = model.generate(torch.tensor([text]), **LONG | options)
    found, given, classes, prompt = made.sequences[0].tolist(), text, set(), slow_class(slow_sums(model, text))
    for step, logits in enumerate(made.logits):
        number = slow_answer_class(model, prompt, found[9 : 9 + step], known)
        classes.add(number)
        with torch.no_grad():
            ours = model(torch.tensor([given]), past_key_values=cache, languages=CODES[number]).logits[:, -1]
        torch.testing.assert_close(logits, ours)
        given = [found[9 + step]]
    assert len(classes) > 1


def expanded(**options) -> Any:
    torch.manual_seed(0)
    config = LayerMoEConfig.from_dense(
        tiny_config("qwen2", num_hidden_layers=2), num_experts_per_layer=[3, 2], classifier_layers=[1],
        expansions=[{"method": "layer-moe", "old_languages": ["en"], "new_languages": ["el"]}], **options,
    )  # fmt: skip
    return shaken(LayerMoEForCausalLM(config).eval(), 0.2)


def text(length: int = 9) -> dict[str, torch.Tensor]:
    return {"input_ids": tokens(2, length), "attention_mask": torch.ones(2, length, dtype=torch.long)}


def each_as_alone(model: Any, *calls: Callable[[], Any]) -> list[Any]:
    """What each call gives alone, which is what it gives beside the others. At each layer every thread waits for all
    others: so each reads what it has set after the others have set theirs."""
    alone, barrier = [call() for call in calls], threading.Barrier(len(calls), timeout=60)

    def wait(*_: Any) -> None:
        barrier.wait()

    def several(call: Callable[[], Any]) -> list[Any]:
        with torch.no_grad():
            return [call() for _ in range(3)]

    hooks = [ffn.register_forward_pre_hook(wait) for ffn in model.expanded_ffns().values()]
    with ThreadPoolExecutor(len(calls)) as threads:
        found = [*threads.map(several, calls)]
    for hook in hooks:
        hook.remove()
    for results, wanted in zip(found, alone, strict=True):
        assert all(torch.equal(result, wanted) for result in results)
    return alone


def test_each_threads_languages_expert_expansion_and_capture_are_its_own():
    model, batch = expanded(), text()

    def inside(block: Any) -> torch.Tensor:
        with block:
            return model(**batch).logits

    def captured() -> torch.Tensor:
        with model.capture_routing() as routing:
            model(**batch)
        assert sorted(routing.layers) == [0, 1]
        return torch.cat([layer.router_logits.flatten() for layer in routing])

    told = [lambda code=code: model(**batch, languages=code).logits for code in ("en", None, "el")]
    forced, earlier = lambda: inside(model.use_expert(1)), lambda: inside(model.use_expansion(0))
    home, plain, *_ = each_as_alone(model, *told, forced, earlier, captured)
    assert not torch.equal(home, plain)


def test_each_threads_text_is_its_own():
    """What the gate decides, and at which column each thread's prompt ends."""
    model = gated_model(expansions=TWO, exclusive=True)
    each_as_alone(model, *(lambda n=n: model.generate(**text(n), **GREEDY) for n in (7, 12)))


def test_autograd_in_a_thread_of_its_own_goes_on_with_the_expert_of_the_forward_pass():
    """As on a GPU, where gradient checkpointing repeats the forward pass in such a thread."""

    def gradients(elsewhere: bool) -> dict[str, torch.Tensor]:
        model = expanded().train()
        if elsewhere:
            enable_checkpointing(model)
        with model.use_expert(1), ThreadPoolExecutor(1) as thread:
            loss = model(**text(), labels=text()["input_ids"]).loss
            thread.submit(loss.backward).result() if elsewhere else loss.backward()
        return {name: part.grad for name, part in model.named_parameters() if part.grad is not None}

    wanted, found = gradients(False), gradients(True)
    assert wanted.keys() == found.keys()
    assert any(".experts.1." in name for name in found)
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name])


@torch.no_grad()
def test_a_compiled_model_reads_the_threads_own():
    model, batch = expanded(), text()
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager")

    @torch.no_grad()
    def call() -> torch.Tensor:
        return compiled(**batch).logits

    plain, before = model(**batch).logits, call()
    with model.use_expert(0), ThreadPoolExecutor(1) as thread:
        base, elsewhere, here = model(**batch).logits, thread.submit(call).result(), call()
    for one, other in ((before, plain), (elsewhere, plain), (here, base), (call(), plain)):
        torch.testing.assert_close(one, other)


def test_compiled_there_is_one_graph_for_each_class_and_one_for_several():
    model = gated_model(expansions=[(2, 2), (3, 3)], exclusive=True, num_hidden_layers=2, **SWAYING)
    texts, graphs, counts = clear_texts(model, 2, 9), [], []
    texts.sort(key=lambda text: slow_class(slow_sums(model, text)))
    compiling = CompileConfig(backend=lambda graph, _: graphs.append(graph) or graph.forward, mode=None)
    compiling._compile_all_devices = True
    torch.compiler.reset()
    cache = StaticCache(config=model.config, max_cache_len=40)
    for pair in ([0, 1], [2, 3], [0, 2], [1, 4], [3, 5]):  # of one class, and of two
        ids = torch.tensor([texts[number] for number in pair])
        options = {"attention_mask": torch.ones_like(ids), **GREEDY, "max_new_tokens": 20}
        cache.reset()
        found = model.generate(ids, past_key_values=cache, compile_config=compiling, **options)
        assert torch.equal(found, model.generate(ids, **options))
        counts.append(len(graphs))
    assert 2 <= counts[2] == counts[-1] <= 4

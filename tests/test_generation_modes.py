"""`generate` with a language gate, for a prompt and what it writes; one model in several threads."""

import threading
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial, wraps
from itertools import product
from typing import Any

import pytest
import torch
from conftest import enable_checkpointing, shaken, tiny_config, tiny_dense
from gated_models import (
    CODES,
    GREEDY,
    KINDS,
    MAPS,
    TWO,
    all_go_to,
    clear_texts,
    gated_model,
    padded,
    slow_class,
    slow_sums,
    tokens,
)
from transformers import CompileConfig, DynamicCache, GenerationConfig, StaticCache

from hf_moe_expand import LayerMoEConfig, LayerMoEForCausalLM

LONG = {**GREEDY, "max_new_tokens": 210}
# A window of many tokens, and an answer that goes home only if it is clearly not of the new languages.
SWAYING = {"window": 64, "rule": {"home": -6.0, "begin": 251}}


def codes_of(model, texts):
    return [CODES[slow_class(slow_sums(model, text))] for text in texts]


@contextmanager
def judgings(model):
    """How many texts each call of the gate judges."""
    found, own = [], model._sums

    def counted(*args):
        sums = own(*args)
        found.append(len(sums))
        return sums

    model._sums = counted
    yield found
    del model._sums


WAYS = {
    "greedy": {},
    "without a cache": {"use_cache": False},
    "beams": {"num_beams": 3},
    "beams of one": {"num_beams": 3, "num_return_sequences": 2},
    "sampled": {"do_sample": True, "num_return_sequences": 3},
    "static": {"cache_implementation": "static"},
    "in chunks": {"prefill_chunk_size": 4},
    "in chunks, static": {"prefill_chunk_size": 4, "cache_implementation": "static"},
    "as a dictionary": {"return_dict_in_generate": True, "output_logits": True},
}


@pytest.mark.parametrize(
    ("kind", "way"),
    [pair for pair in product(KINDS, WAYS) if pair[0] == "exclusive" or pair[1] in ("greedy", "beams", "static")],
)
def test_a_prompt_is_told_its_class(kind, way):
    """Also padded, and beside prompts that are told."""
    model = gated_model(**KINDS[kind])
    texts = clear_texts(model, 2, 11, 5)
    codes, (ids, mask) = codes_of(model, texts), padded(texts)

    def written(rows=slice(None), **options):
        torch.manual_seed(0)
        given = {"attention_mask": mask[rows]} | GREEDY | WAYS[way] | options
        made = model.generate(ids[rows], **given)
        return torch.stack(made.logits) if way == "as a dictionary" else made

    told = written(languages=codes)
    with judgings(model) as found:
        assert torch.equal(written(), told)
    assert found == [6]
    assert torch.equal(written(languages=[code if row % 2 else None for row, code in enumerate(codes)]), told)
    assert not torch.equal(written(languages="en"), told)
    assert not torch.equal(written(languages="el"), told)
    assert torch.equal(written(judge=False), written(languages="en"))
    assert torch.equal(written(judge=ids.flip(0)), written(languages=codes[::-1]))
    for row in (0, 3) if way == "greedy" else ():
        alone = written(slice(row, row + 1))
        assert torch.equal(alone, written(slice(row, row + 1), languages=codes[row]))


@pytest.mark.parametrize("kind", ["copies", "exclusive", "adapters"])
def test_prompts_come_in_many_forms(kind):
    """Without a mask, as embeddings, with ids beside them, by other names, and not at all."""
    model = gated_model(**KINDS[kind])
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
    with pytest.raises(ValueError, match="judge has 2 texts, but there are 6 prompts: give one for each"):
        model.generate(ids, judge=ids[:2], **GREEDY)
    home = model.generate(ids, languages="en", attention_mask=mask, **GREEDY)
    for judge_prompt, expected in (([4, 9], told), (False, home)):
        with pytest.warns(FutureWarning, match="judge_prompt is called judge now"):
            found = model.generate(ids, judge_prompt=judge_prompt, attention_mask=mask, **GREEDY)
        assert torch.equal(found, expected)


def test_with_drafts_the_prompts_class_holds():
    """A model that drafts, itself behind a gate or not, judges its prompt once."""
    model, other = gated_model(**KINDS["exclusive"], **SWAYING), gated_model(**KINDS["copies"])
    for text in clear_texts(model, 1, 8):
        ids, (code,) = torch.tensor([text]), codes_of(model, [text])
        options = {"attention_mask": torch.ones_like(ids), **GREEDY, "max_new_tokens": 34}
        told = model.generate(ids, languages=code, **options)
        dense = tiny_dense("qwen2", seed=3)
        drafts = [{"assistant_model": one} for one in (other, dense, model)]
        for way in (*drafts, {"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 1}):
            with judgings(model) as found, judgings(other) as drafted:
                assert torch.equal(model.generate(ids, **way, **options), told)
            assert found == [1]
            assert drafted == [1] * (way.get("assistant_model") is other)
        with judgings(model) as found:
            assert torch.equal(dense.generate(ids, assistant_model=model, **options), dense.generate(ids, **options))
        assert found == [1]


def test_continuous_batching_is_refused():
    model = gated_model()
    with pytest.raises(ValueError, match=r"and continuous batching reads parts of several.*transformers' generate"):
        model.generate_batch([[1, 2, 3]])
    with pytest.raises(ValueError, match="continuous batching reads parts of several"):
        model.generate(tokens(1, 3), cache_implementation="paged", **GREEDY)


def slow_answer_class(model, prompt_class, answer, known):
    """The class of a row from the whole of its answer."""
    home, number = model.config.language_gate["home"], prompt_class
    for mark in (mark for mark in (16, 32, *range(64, 1000, 64)) if mark <= len(answer)):
        judged = list(answer[:mark])
        while len(judged) > 1 and judged[-1] == judged[-2] and len({*judged}) > 1:  # a run at the end
            judged = judged[: -next(n for n in range(1, mark) if judged[-1 - n] != judged[-1])]
            break
        if tuple(judged) not in known:
            known[tuple(judged)] = slow_sums(model, judged)
        sums = known[tuple(judged)]
        number = slow_class(sums) if max(sums) > 0 else number if max(sums) >= home else 0
    return number


ANSWERS = {
    "sampled": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 4, "num_return_sequences": 2, "max_new_tokens": 80},
    "sampled beams": {"do_sample": True, "num_beams": 4, "max_new_tokens": 80},
    "static": {"do_sample": True, "cache_implementation": "static", "prefill_chunk_size": 5, "max_new_tokens": 80},
    "without a cache": {"do_sample": True, "use_cache": False, "max_new_tokens": 40},
    "no prompt": {"do_sample": True, "bos_token_id": 7, "num_return_sequences": 6, "max_new_tokens": 80},
    "embeddings": {"do_sample": True, "embedded": True, "max_new_tokens": 80},
}


@pytest.mark.parametrize(
    ("way", "kind"), [*((way, "exclusive") for way in ANSWERS), ("beams", "copies"), ("sampled", "adapters")]
)
def test_each_row_has_the_class_that_its_ids_say(way, kind):
    """Against a loop that judges each row's whole answer again before each token."""
    model, texts, known, seen = gated_model(**KINDS[kind], **SWAYING), [[]], {}, []
    way = ANSWERS[way]
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
        many = len(ids) // len(prompts)
        answers = ids[:, start:].tolist()
        expected = [slow_answer_class(model, prompts[n // many], answer, known) for n, answer in enumerate(answers)]
        assert classes == expected, len(answers[0])
        changes += classes != [prompts[n // many] for n in range(len(ids))]
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


ROUNDS = 5
OPTIONS = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 256}


def expanded(**options) -> Any:
    torch.manual_seed(0)
    config = LayerMoEConfig.from_dense(
        tiny_config("qwen2"), num_experts_per_layer=[3, 1, 2], classifier_layers=[2],
        expansions=[{"method": "layer-moe", "old_languages": ["en"], "new_languages": ["el"]}], **options,
    )  # fmt: skip
    return shaken(LayerMoEForCausalLM(config).eval(), 0.2)


def text(length: int = 9) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 250, (2, length), generator=torch.Generator().manual_seed(length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def in_step(model: Any, *calls: Callable[[], Any]) -> list[list[Any]]:
    """Runs each call in a thread, `ROUNDS` times. At each layer every thread waits for all others: so each reads what
    it has set after the others have set theirs."""
    barrier = threading.Barrier(len(calls), timeout=60)

    def wait(*_: Any) -> None:
        barrier.wait()

    hooks = [ffn.register_forward_pre_hook(wait) for ffn in model.expanded_ffns().values()]
    found: list[list[Any]] = [[] for _ in calls]

    def work(number: int) -> None:
        try:
            with torch.no_grad():
                found[number] = [calls[number]() for _ in range(ROUNDS)]
        except BaseException:
            barrier.abort()
            raise

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for hook in hooks:
        hook.remove()
    assert [len(results) for results in found] == [ROUNDS] * len(calls)
    return found


def each_as_alone(model: Any, *calls: Callable[[], Any]) -> list[Any]:
    """What each call gives alone, which is what it gives beside the others."""
    alone = [call() for call in calls]
    for results, wanted in zip(in_step(model, *calls), alone, strict=True):
        assert all(torch.equal(result, wanted) for result in results)
    return alone


def test_each_threads_languages_are_its_own():
    model, batch = expanded(), text()
    calls = [lambda code=code: model.generate(**batch, languages=code, **OPTIONS) for code in ("en", None, "el")]
    alone = each_as_alone(model, *calls)
    assert not torch.equal(alone[0], alone[1])
    assert not torch.equal(alone[1], alone[2])


def test_each_threads_expert_expansion_and_capture_are_its_own():
    model, batch = expanded(), text()

    def inside(block: Any) -> torch.Tensor:
        with block:
            return model(**batch).logits

    def captured() -> torch.Tensor:
        with model.capture_routing() as routing:
            model(**batch)
        assert sorted(routing.layers) == [0, 2]
        return torch.cat([layer.router_logits.flatten() for layer in routing])

    forced, earlier = lambda: inside(model.use_expert(1)), lambda: inside(model.use_expansion(0))
    each_as_alone(model, forced, earlier, captured, lambda: model(**batch).logits)


@pytest.mark.parametrize("exclusive", [False, True], ids=["copies", "exclusive"])
def test_each_threads_text_is_its_own(exclusive):
    """What the gate decides, and at which column each thread's prompt ends."""
    model = gated_model(expansions=TWO, exclusive=exclusive)
    batches = [text(length) for length in (7, 12)]
    calls = [lambda batch=batch: model.generate(**batch, **OPTIONS) for batch in batches]
    each_as_alone(model, *calls)


def test_autograd_in_a_thread_of_its_own_goes_on_with_the_expert_of_the_forward_pass():
    """As on a GPU, where gradient checkpointing repeats the forward pass in such a thread."""

    def gradients(checkpointing: bool, elsewhere: bool) -> dict[str, torch.Tensor]:
        model = expanded().train()
        if checkpointing:
            enable_checkpointing(model)
        with model.use_expert(1):
            loss = model(**text(), labels=text()["input_ids"]).loss
            thread = threading.Thread(target=loss.backward)
            if elsewhere:
                thread.start()
                thread.join()
            else:
                loss.backward()
        return {name: part.grad for name, part in model.named_parameters() if part.grad is not None}

    wanted, found = gradients(False, False), gradients(True, True)
    assert wanted.keys() == found.keys()
    assert any(".experts.1." in name for name in found)
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name])


def test_in_training_a_text_is_not_judged_which_is_said():
    model, ids = gated_model(**KINDS["exclusive"]).train(), tokens(2, 8)
    all_go_to(model, 0)
    with pytest.warns(UserWarning, match=r"the language gate judges nothing.*call model.eval\(\) first"):
        found = model.generate(ids, **GREEDY)
    assert torch.equal(found, model.generate(ids, languages="hu", **GREEDY))


def test_a_compiled_model_reads_the_threads_own():
    model, batch = expanded(), text()
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager")

    def call() -> torch.Tensor:
        with torch.no_grad():
            return compiled(**batch).logits

    plain = model(**batch).logits
    before = call()
    found: list[torch.Tensor] = []
    with model.use_expert(0):
        base = model(**batch).logits
        thread = threading.Thread(target=lambda: found.append(call()))
        thread.start()
        thread.join()
        forced = call()
    for one, other in ((before, plain), (found[0], plain), (forced, base), (call(), plain)):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", ["copies", "adapters"])
def test_compiled_there_is_one_graph_for_each_class_and_one_for_several(kind):
    fields = {"expert_kind": "adapter", "adapters": [{"maps": MAPS}]} if kind == "adapters" else {}
    model = gated_model(
        expansions=[(2, 2)], exclusive=kind == "adapters", fields=fields, num_hidden_layers=2, **SWAYING
    )
    texts, graphs = clear_texts(model, 2, 9), []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiling = CompileConfig(backend=backend, mode=None)
    compiling._compile_all_devices = True
    torch.compiler.reset()
    cache, both = StaticCache(config=model.config, max_cache_len=60), sorted(texts, key=partial(slow_sums, model))
    for pair in (both[:2], both[2:], both[1:3], texts[:2]):
        ids = torch.tensor(pair)
        options = {"attention_mask": torch.ones_like(ids), **GREEDY, "max_new_tokens": 40}
        cache.reset()
        found = model.generate(ids, past_key_values=cache, compile_config=compiling, **options)
        assert torch.equal(found, model.generate(ids, **options))
    assert 2 <= len(graphs) <= 3

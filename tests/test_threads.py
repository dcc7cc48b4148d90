"""One model in several threads: what a thread says of its own forward passes holds for these alone."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import enable_checkpointing, tiny_config
from gated_models import TWO, gated_model

from hf_moe_expand import LayerMoEConfig, LayerMoEForCausalLM

ROUNDS = 5
OPTIONS = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 256}


def expanded(**options) -> Any:
    torch.manual_seed(0)
    config = LayerMoEConfig.from_dense(
        tiny_config("qwen2"), num_experts_per_layer=[3, 1, 2], classifier_layers=[2],
        expansions=[{"method": "layer-moe", "old_languages": ["en"], "new_languages": ["el"]}], **options,
    )  # fmt: skip
    model = LayerMoEForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


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

"""Modes of `generate` that meet a language gate and adapters in unusual ways."""

import threading

import pytest
import torch
from conftest import tiny_config
from transformers import CompileConfig, DynamicCache, GenerationConfig

from hf_moe_expand import LayerMoEConfig, LayerMoEForCausalLM

PAD = 256
OPTIONS = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
MAPS = {name: [4, 1.0] for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj")}
IDS = torch.randint(0, 250, (8, 9), generator=torch.Generator().manual_seed(3))


def model(gate=True, **changes):
    """Exclusive experts far from copies, behind a gate that decides now one way, now the other."""
    torch.manual_seed(1)
    rule = {"layer": 1, "languages": [["en"], ["el"]], "window": 5, "bound": 2.0} if gate else None
    config = LayerMoEConfig.from_dense(
        tiny_config("qwen2"), num_experts_per_layer=[2, 2, 2], exclusive_experts=True, language_gate=rule,
        expansions=[{"method": "x", "old_languages": ["en"], "new_languages": ["el"]}], **changes,
    )  # fmt: skip
    made = LayerMoEForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
        if gate:
            own = made.expanded_ffns()[1].language_gate
            own.weight.copy_(torch.randn_like(own.weight) * 3)
            own.bias.zero_()
    return made


def adapters():
    return model(expert_kind="adapter", adapters=[{"maps": MAPS}])


@pytest.fixture(params=[model, adapters], ids=["experts", "adapters"])
def gated(request):
    return request.param()


def test_a_thread_generates_while_another_ones_prompt_is_judged():
    gated, began, go, judging, found = adapters(), threading.Event(), threading.Event(), [], {}
    alone = [gated.generate(IDS[:1], **OPTIONS), gated.generate(IDS[1:2], languages="en", **OPTIONS)]

    def wait(*_):
        if threading.get_ident() in judging and not began.is_set():
            began.set()
            go.wait(60)

    def judge():
        judging.append(threading.get_ident())
        found["judged"] = gated.generate(IDS[:1], **OPTIONS)

    gated.model.layers[0].register_forward_pre_hook(wait)
    thread = threading.Thread(target=judge)
    thread.start()
    began.wait(60)
    try:
        told = gated.generate(IDS[1:2], languages="en", **OPTIONS)
    finally:
        go.set()
        thread.join()
    assert torch.equal(found["judged"], alone[0])
    assert torch.equal(told, alone[1])


def compiled_in_one_chunk(gated):
    config = CompileConfig(backend="eager", mode=None)
    config._compile_all_devices = True
    return {"cache_implementation": "static", "prefill_chunk_size": 20, "compile_config": config}


def compiled_by_its_user(gated):
    gated.compile(backend="eager")
    return {}


@pytest.mark.parametrize("how", [compiled_in_one_chunk, compiled_by_its_user])
def test_compiled_a_prompt_is_judged_as_well(how):
    gated, mask = model(), torch.ones_like(IDS)
    judged = gated.generate(IDS, attention_mask=mask, **OPTIONS)
    assert not torch.equal(judged, gated.generate(IDS, attention_mask=mask, judge_prompt=False, **OPTIONS))
    torch.compiler.reset()
    assert torch.equal(gated.generate(IDS, attention_mask=mask, **OPTIONS, **how(gated)), judged)


def test_messages_are_not_judged_without_a_gate():
    plain = model(gate=False)
    for harmless in (True, False):
        plain.generate(IDS, judge_prompt=harmless, **OPTIONS)
    with pytest.raises(ValueError, match="judge_prompt: the model has no language gate that would judge: leave it out"):
        plain.generate(IDS, judge_prompt=[4, 9], **OPTIONS)


def test_padding_that_the_pad_token_tells_is_no_text(gated):
    ids = torch.randint(0, 250, (32, 9), generator=torch.Generator().manual_seed(7))
    ids[:, :7] = PAD
    masked = gated.generate(ids, attention_mask=(ids != PAD).long(), **OPTIONS)
    classes = [gated.classes_of_prompts(ids, {"attention_mask": mask}) for mask in ((ids != PAD).long(), ids * 0 + 1)]
    assert classes[0] != classes[1]  # as text the pads would count
    assert torch.equal(gated.generate(ids, **OPTIONS), masked)
    config = GenerationConfig(**OPTIONS | {"eos_token_id": 255})  # else the model's own counts, which is the pad token
    masked = gated.generate(ids, config, attention_mask=(ids != PAD).long())
    assert torch.equal(gated.generate(ids, config), masked)
    config.pad_token_id = None  # then it is the model's own
    gated.generation_config.pad_token_id = PAD
    assert torch.equal(gated.generate(ids, generation_config=config), masked)


def test_prompts_that_are_embedded_are_judged_whatever_ids_stand_beside_them(gated):
    embedded = gated.get_input_embeddings()(IDS)
    expected = gated.generate(IDS, **OPTIONS)[:, 9:]
    assert not torch.equal(expected, gated.generate(IDS, judge_prompt=False, **OPTIONS)[:, 9:])
    assert torch.equal(gated.generate(input_ids=IDS[:, :0], inputs_embeds=embedded, **OPTIONS)[:, -6:], expected)


def test_a_model_behind_a_gate_drafts_with_no_part_of_itself(gated):
    before = gated.generate(IDS[:1], **OPTIONS)
    with pytest.raises(ValueError, match="assistant_early_exit: a model of the first layers alone has no language"):
        gated.generate(IDS[:1], assistant_early_exit=1, **OPTIONS)
    with pytest.raises(ValueError, match="assistant_early_exit: a model of the first layers alone has no language"):
        gated.generate(IDS[:1], GenerationConfig(assistant_early_exit=1, **OPTIONS))
    assert torch.equal(gated.generate(IDS[:1], **OPTIONS), before)


def test_an_offloaded_cache_fetches_its_first_layer_again():
    cache = DynamicCache()
    model()(IDS, past_key_values=cache)
    fetched = []
    cache.layers[0].prefetch = lambda: fetched.append(0)
    cache.layers[-1].prefetch()
    assert fetched == [0]

"""The columns of the matrix: what is done with a form, each against a slow definition of `oracles.py` or the base.

An operation joins as one function below `@operation`, here or in `surgery.py`. One that changes a model takes a copy.
"""

import copy
import json
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import quantize_dynamic
from transformers import AutoConfig, AutoModel

from hf_moe_expand import evaluate_model, freeze
from hf_moe_expand.data.pairs import SentencePair
from hf_moe_expand.modeling import auto_class
from hf_moe_expand.modeling.language_modules import OuterModules
from hf_moe_expand.modeling.part_added import AddedFFN
from matrix import oracles
from matrix.forms import ALPHABETS, Form, lines, load, pairs

OPERATIONS: dict[str, Callable[[Form], None]] = {}
COUNT = 6  # tokens of an answer
GREEDY = {"max_new_tokens": COUNT, "do_sample": False}


def operation(function: Callable[[Form], None]) -> Callable[[Form], None]:
    OPERATIONS[function.__name__.replace("_", "-")] = function
    return function


# --- inputs -----------------------------------------------------------------------------------------------------------


def prompts(form: Form) -> list[tuple[list[int], str]]:
    """A text in each language with its code: of different lengths, and long enough for a gate to be sure."""
    found = []
    for number, code in enumerate(form.languages):
        if "encoder-decoder" in form:
            ids = torch.randint(5, 200, (5 + 2 * number,), generator=torch.Generator().manual_seed(number)).tolist()
        else:
            text = " ".join(lines(ALPHABETS[code], 2, seed=11 + number))
            ids = form.tokenizer(text)["input_ids"][: 44 + 3 * number]
        found.append((ids, code))
    return found


def padded(form: Form, rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """Rows padded on the left; on the right for an encoder."""
    pad, longest = form.tokenizer.pad_token_id, max(map(len, rows))
    ids, mask = torch.full((len(rows), longest), pad), torch.zeros(len(rows), longest, dtype=torch.long)
    for number, row in enumerate(rows):
        place = slice(len(row)) if "encoder-decoder" in form else slice(longest - len(row), longest)
        ids[number, place], mask[number, place] = torch.tensor(row), 1
    return {"input_ids": ids, "attention_mask": mask}


def batch(form: Form) -> dict[str, torch.Tensor]:
    """Rows of one length, without padding."""
    ids = torch.randint(5, 200, (3, 12), generator=torch.Generator().manual_seed(5))
    if "encoder-decoder" not in form:
        return {"input_ids": ids}
    return {"input_ids": ids, "decoder_input_ids": ids.flip(1)[:, :7].clone()}


@torch.no_grad()
def logits(model: Any, form: Form, **more: Any) -> torch.Tensor:
    return model(**batch(form), use_cache=False, **more).logits


def naming(form: Form, code: str) -> dict[str, str]:
    """The language as `forward` is told it, if the form can be told."""
    return {"languages": code} if form.is_told else {}


def told_each(form: Form) -> list[dict[str, str]]:
    """Each language, as `forward` is told it; nothing where the form cannot be told."""
    return [{"languages": code} for code in form.languages] if form.is_told else [{}]


def ways(form: Form) -> Iterator[tuple[dict[str, Any], list[str | None]]]:
    """What `generate` is told of the prompts, and what the slow definition is told of each: a gate's class of a text is
    the one that the user would name."""
    codes: list[str | None] = [code for _, code in prompts(form)]
    if form.is_told:
        yield {"languages": codes}, codes
    yield {}, codes if "gated" in form else [None] * len(codes)


def answers(form: Form, model: Any, rows: list[list[int]], **options: Any) -> list[list[int]]:
    """The new tokens of `generate` for a padded batch."""
    inputs = padded(form, rows)
    fixed = {"pad_token_id": form.tokenizer.pad_token_id, "eos_token_id": None, "forced_eos_token_id": None}
    if "encoder-decoder" in form:
        fixed |= {"forced_bos_token_id": None, "min_new_tokens": COUNT}
        del fixed["eos_token_id"]
        model.generation_config.eos_token_id = None
    out = model.generate(**inputs, **fixed, **options)
    return out[:, (1 if "encoder-decoder" in form else inputs["input_ids"].shape[1]) :].tolist()


def close(found: torch.Tensor, expected: torch.Tensor, rtol: float = 1e-4) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol * max(1.0, expected.abs().max().item()))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def weights(model: Any) -> dict[str, torch.Tensor]:
    """The tensors of a model, or of the one in a folder, by their names in it."""
    return dict((load(model) if isinstance(model, Path) else model).state_dict())


def greedy(form: Form, row: list[int], code: str | None) -> list[int]:
    """The slow answer, with which several operations compare."""
    return form.once((*row, code), lambda: oracles.greedy(form.model, row, COUNT, code))


def size_of(model: Any) -> int:
    """Its parameters: tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def changed(before: Any, after: Any) -> set[str]:
    """The tensors that differ, with those that only one model has."""
    a, b = weights(before), weights(after)
    return {name for name in a.keys() | b.keys() if name not in a or name not in b or not torch.equal(a[name], b[name])}


def of_last_expansion(form: Form) -> set[str]:
    """The tensors that stage 1 may move: experts of the last expansion, of all packs of a joined model; routers and
    gates of conditional routing."""
    config, found = form.model.config, set()
    names = {module: name for name, module in form.model.named_modules()}
    for layer, ffn in form.model.expanded_ffns().items():
        before = [1, *(counts[layer] for counts in getattr(config, "earlier_experts_per_layer", None) or [])][-1]
        first = 1 if form.joins else before
        for inner, _ in ffn.named_parameters():
            new = inner.startswith("experts.") and int(inner.split(".")[1]) >= first
            if new or inner.startswith(("router.", "conditional_gate.")):
                found.add(f"{names[ffn]}.{inner}")
    for outer in (module for module in names if isinstance(module, OuterModules)):
        first = 1 if form.joins else len(outer.experts) - 1
        found |= {f"{names[outer]}.{n}" for n, _ in outer.named_parameters() if int(n.split(".")[1]) >= first}
    return found & {name for name, _ in form.model.named_parameters()}  # of tied ones, the embedding's


# --- what it computes -------------------------------------------------------------------------------------------------


@operation
def starts_as_the_base(form: Form) -> None:
    """P1: right after it was made it computes what the base does, whatever routers and classifiers say. Random experts
    and fine-tunes do not, but expert 0 does."""
    model, expected = load(form.fresh), logits(form.dense, form)
    if {"random", "tuned"} & form.facts:
        with model.use_expert(0):
            assert torch.equal(logits(model, form), expected)
        return
    draw = torch.Generator().manual_seed(1)
    for scale in (1.0, 30.0):
        for ffn in model.expanded_ffns().values():
            for module in ffn.scorers:
                for parameter in module.parameters():
                    parameter.data.add_(torch.randn(parameter.shape, generator=draw) * scale)
        close(logits(model, form), expected)
        for code in form.languages if form.is_told else ():
            close(logits(model, form, languages=code), expected)


@operation
def told(form: Form) -> None:
    """P2: told an old language it is the base, bit for bit, and so is its answer; with a gate, untold too. Told another
    one, it is what the expansions up to this one compute."""
    model, expected = form.model, logits(form.dense, form)
    assert torch.equal(logits(model, form, languages="en"), expected)
    rows = [ids for ids, code in prompts(form) if code == "en"]
    home = answers(form, form.dense, rows, **GREEDY)
    assert answers(form, model, rows, languages="en", **GREEDY) == home
    if "gated" in form:
        assert answers(form, model, rows, **GREEDY) == home
    of_code = {code: logits(model, form, languages=code) for code in form.languages}
    for number, code in enumerate(form.languages):
        with model.use_expansion(number):
            close(of_code[code], logits(model, form, languages=code))
        if number:
            assert not torch.allclose(of_code[code], expected, atol=1e-2)
    mixed = logits(model, form, languages=["el", "en", form.languages[-1]])
    for row, code in enumerate(("el", "en", form.languages[-1])):
        close(mixed[row], of_code[code][row])
    with model.use_expansion(1):  # as after it, the languages of later ones have the experts up to it
        earlier = logits(model, form, languages=["el", "en", form.languages[-1]])
    for row, code in enumerate(("el", "en", "el")):
        close(earlier[row], of_code[code][row])


@operation
def expert_0(form: Form) -> None:
    """P2: expert 0 alone is the base, bit for bit, in every form."""
    model, expected = form.copy(), logits(form.dense, form)
    assert not torch.allclose(logits(form.model, form, **naming(form, "el")), expected, atol=1e-2)
    with model.use_expert(0):
        assert torch.equal(logits(model, form), expected)
    with model.use_expansion(0):
        assert torch.equal(logits(model, form), expected)


@operation
def decisions(form: Form) -> None:
    """What each expanded layer computes of a token is what its recorded decision says, one expert after the other."""
    model = form.model
    if "adapters" in form:  # what they compute is PEFT's affair: see `export_to_peft`
        for number, code in enumerate(form.languages):
            with model.use_expert(number):
                assert torch.equal(logits(model, form), logits(model, form, languages=code))
        return
    # By text or token, or home, if nobody tells.
    is_judged = "gated" in form or form.joins or ("exclusive" in form and "classifiers" in form)
    for more in [*([] if is_judged else [{}]), *told_each(form)]:
        with model.capture_routing() as routing, _calls(model) as calls:
            logits(model, form, **more)
        number = form.languages.index(more.get("languages", form.languages[-1]))
        for ffn, inputs, y in calls:
            x_Th = inputs[0].flatten(0, -2)
            decision = routing.layers.get(ffn.layer_index)
            for place, token in enumerate(x_Th):
                if decision is None:  # a class has one expert, and no router chooses
                    chosen = [(1.0, ffn.expert_of(number))]
                else:
                    pair = decision.weights[place].tolist(), decision.experts[place].tolist()
                    chosen = [*zip(*pair, strict=True)]
                with torch.no_grad():
                    parts = [weight * _of_expert(ffn, e, token) for weight, e in chosen if e < len(ffn.experts)]
                close(y.flatten(0, -2)[place], sum(parts))


@contextmanager
def _calls(model: Any) -> Iterator[list[Any]]:
    """Inside, each expanded layer's calls are noted: the layer, its inputs, its output."""
    calls: list[Any] = []
    note = lambda ffn, inputs, output: calls.append((ffn, inputs, output.clone()))  # noqa: E731
    hooks = [ffn.register_forward_hook(note) for ffn in model.expanded_ffns().values()]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _of_expert(ffn: Any, expert: int, token: torch.Tensor) -> torch.Tensor:
    """What an expert makes of a token; an added one stands beside expert 0."""
    own = ffn.experts[expert](token[None, None])[0, 0]
    return ffn.experts[0](token[None, None])[0, 0] + own if expert and isinstance(ffn, AddedFFN) else own


@contextmanager
def unset_memory_is_nan() -> Iterator[None]:
    """Inside, memory that nobody fills is NaN, not what happened to stand there."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@operation
def from_configuration(form: Form) -> None:
    """The configuration alone makes a model with the same tensors, new ones as an expansion begins."""
    config = AutoConfig.from_pretrained(form.folder)
    torch.manual_seed(0)
    with unset_memory_is_nan():
        model = auto_class(config).from_config(config)
    assert type(model) is type(form.model)
    assert {name: value.shape for name, value in model.state_dict().items()} == {
        name: value.shape for name, value in form.model.state_dict().items()
    }
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    for ffn in model.expanded_ffns().values():
        assert ffn.router is None or ffn.router.weight.std() > 0.05
        assert not any(m.weight.any() for m in ffn.scorers if m is not ffn.router)
    assert not any(p.any() for name, p in model.named_parameters() if "lora_B" in name)
    base = AutoModel.from_pretrained(form.folder)
    family = "DMoE" if "dmoe" in form else "LayerMoE"
    head = "ForSeq2SeqLM" if "encoder-decoder" in form else "ForCausalLM"
    names = [type(one).__name__ for one in (config, base, model)]
    assert names == [f"{family}Config", f"{family}Model", f"{family}{head}"]
    assert not {"num_experts", "output_router_logits"} & {*json.loads((form.whole / "config.json").read_text())} - {
        *json.loads((form.base / "config.json").read_text())
    }


@operation
def gradients(form: Form) -> None:
    """They reach all that trains, if zero, and nothing else: ranks wait for one another's."""
    model = form.copy().train()
    freeze(model, "joint" if "dmoe" in form else "post-pretrain")
    ids = batch(form)
    with model.capture_routing() as routing:
        loss = model(**ids, labels=ids.get("decoder_input_ids", ids["input_ids"]), use_cache=False).loss
    (loss + sum(layer.router_logits.logsumexp(-1).mean() for layer in routing)).backward()
    found = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert found == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if "dmoe" not in form:
        assert found <= of_last_expansion(form)
        assert {name for name in of_last_expansion(form) if ".experts." in name} <= found
    assert any(parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)


@operation
def copies(form: Form) -> None:
    """Copies and pickles stand on their own."""
    more = naming(form, "el")
    expected = logits(form.model, form, **more)
    ours = {parameter.data_ptr() for parameter in form.model.parameters()}
    for twin in (form.copy(), pickle.loads(pickle.dumps(form.model))):
        assert torch.equal(logits(twin, form, **more), expected)
        assert not any(parameter.data_ptr() in ours for parameter in twin.parameters())
        with twin.capture_routing() as routing, twin.use_expert(0):
            assert torch.equal(logits(form.model, form, **more), expected)
            assert len(routing) == 0
            assert torch.equal(logits(twin, form), logits(form.dense, form))


@operation
def half(form: Form) -> None:
    """In bfloat16 and float16 expert 0, and a told old language, are the base, bit for bit."""
    for dtype in (torch.bfloat16, torch.float16):
        model, dense = form.copy().to(dtype), form.copy_of_base().to(dtype)
        expected = logits(dense, form)
        with model.use_expert(0):
            assert torch.equal(logits(model, form), expected)
        if form.is_told:
            assert torch.equal(logits(model, form, languages="en"), expected)
        found = logits(model, form, **naming(form, "el")).float()
        assert F.cosine_similarity(found.flatten(), logits(form.model, form, **naming(form, "el")).flatten(), 0) > 0.8


@operation
def offloaded(form: Form) -> None:
    """Two thirds of it on disk, it computes the same."""
    size = sum(file.stat().st_size for file in form.whole.glob("*.safetensors"))
    options = {"max_memory": {"cpu": size // 3}, "offload_folder": form.place("offload")}
    model = auto_class(form.model.config).from_pretrained(form.whole, device_map="auto", **options).eval()
    assert "disk" in model.hf_device_map.values()
    for more in told_each(form):
        close(logits(model, form, **more), logits(form.model, form, **more), rtol=1e-5)


@operation
def in_pieces(form: Form) -> None:
    """A text that is read in pieces, with a cache, gets the logits of one pass."""
    if "encoder-decoder" in form:
        inputs = batch(form)
        ids = inputs.pop("decoder_input_ids")
        name = "decoder_input_ids"
    else:
        inputs, ids, name = {}, batch(form)["input_ids"], "input_ids"
    for code in [*([] if "gated" in form else [None]), *(form.languages if form.is_told else [])]:
        asked = {} if code is None else {"languages": code}
        whole = form.model(**inputs, **{name: ids}, use_cache=False, **asked).logits
        cache, parts = None, []
        for piece in ids.split([3, 1, ids.shape[1] - 4], 1):
            out = form.model(**inputs, **{name: piece}, past_key_values=cache, use_cache=True, **asked)
            cache, parts = out.past_key_values, [*parts, out.logits]
        close(torch.cat(parts, 1), whole)


@operation
def left_padded(form: Form, **options: Any) -> None:
    """P5: cached, batched, padded generation is the uncached one of each row alone."""
    rows = [ids for ids, _ in prompts(form)]
    for asked, codes in ways(form):
        expected = [greedy(form, row, code) for row, code in zip(rows, codes, strict=True)]
        assert answers(form, form.model, rows, **GREEDY, **options, **asked) == expected


@operation
def beams(form: Form) -> None:
    rows = [ids for ids, _ in prompts(form)]
    for asked, codes in ways(form):
        expected = [oracles.beam_search(form.model, row, 4, 3, code) for row, code in zip(rows, codes, strict=True)]
        found = answers(form, form.model, rows, num_beams=3, max_new_tokens=4, do_sample=False, **asked)
        assert [row[:4] for row in found] == expected


@operation
def sampled_sequences(form: Form) -> None:
    rows = [ids for ids, _ in prompts(form)]
    for asked, codes in ways(form):
        expected = oracles.sampled(form.model, rows, 2, 4, codes, seed=3)
        torch.manual_seed(3)
        options = {"do_sample": True, "top_k": 0, "num_return_sequences": 2, "max_new_tokens": 4}
        assert answers(form, form.model, rows, **options, **asked) == expected


@operation
def static_cache(form: Form) -> None:
    left_padded(form, cache_implementation="static", disable_compile=True)


@operation
def prompt_lookup(form: Form) -> None:
    """Drafts of tokens from the prompt, of which the model keeps those that it would write."""
    _drafted(form, prompt_lookup_num_tokens=2)


@operation
def assisted(form: Form) -> None:
    """Drafts of the base, of which the model keeps those that it would write."""
    _drafted(form, assistant_model=form.dense)


def _drafted(form: Form, **options: Any) -> None:
    for ids, code in prompts(form):
        told = [({"languages": code}, code)] if form.is_told else []
        for asked, wanted in [({}, code if "gated" in form else None), *told]:
            assert answers(form, form.model, [ids], **options, **GREEDY, **asked) == [greedy(form, ids, wanted)]


@operation
def evaluate(form: Form) -> None:
    """Bits per byte, of told text too."""
    if "encoder-decoder" in form:
        _evaluate_pairs(form)
        return
    texts = {code: [lines(ALPHABETS[code], 1, seed=21)[0][:12]] for code in form.languages}
    for is_told in [*([] if "gated" in form else [False]), *([True] if form.is_told else [])]:
        found = evaluate_model(form.model, form.tokenizer, texts, 10, 2, told=is_told)
        for code, documents in texts.items():
            slow = oracles.bits_per_byte(form.model, form.tokenizer, documents, 10, code if is_told else None)
            assert abs(found[code].bits_per_byte - slow) < 1e-4 * slow


def _evaluate_pairs(form: Form) -> None:
    names = {"en": "eng_Latn", "el": "ell_Grek", "ru": "rus_Cyrl"}
    for code in form.languages[1:]:
        given = [SentencePair(row["en"], row[code], "en", code) for row in pairs(code)[:3]]
        rows, size = [], 0
        for pair in given:
            form.tokenizer.src_lang, form.tokenizer.tgt_lang = names["en"], names[code]
            encoded = form.tokenizer(pair.source, text_target=pair.target)
            rows.append((encoded["input_ids"], encoded["labels"], 0))
            size += len(pair.target.encode())
        found = evaluate_model(form.model, form.tokenizer, {code: given}, batch_size=2)[code].bits_per_byte
        slow = oracles.bits_per_byte_of_pairs(form.model, rows, size)
        assert abs(found - slow) < 1e-4 * slow


@operation
def int8(form: Form) -> None:
    """Linear layers in eight bits, by torch itself: at home it is the quantised base."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        small, dense = (quantize_dynamic(model, {nn.Linear}) for model in (form.copy(), form.copy_of_base()))
    expected = logits(dense, form)
    with small.use_expert(0):
        assert torch.equal(logits(small, form), expected)
    for code in form.languages if form.is_told else ():
        found, whole = logits(small, form, languages=code), logits(form.model, form, languages=code)
        # A router may choose otherwise.
        assert F.cosine_similarity(found.flatten(), whole.flatten(), 0) > (0.8 if "several" in form else 0.97)


@operation
def in_memory(form: Form) -> None:
    """Expanded in memory it is the model of the checkpoint, and saved it has the same bytes."""
    stored = form.fresh and form.root / "expanded"
    model = form.in_memory()
    expected = load(stored)
    assert type(model) is type(expected)
    assert list(model.state_dict()) == list(expected.state_dict())
    assert all(torch.equal(value, expected.state_dict()[name]) for name, value in model.state_dict().items())
    assert torch.equal(logits(copy.deepcopy(model), form), logits(expected, form))
    out = form.place("from-memory")
    model.save_pretrained(out)
    again, files = contents(out), contents(stored)
    assert {name: files[name] for name in again} == again

"""Further columns of the matrix: what surgery and training make of a form, against the base or a slow definition."""

from contextlib import suppress
from pathlib import Path

import pytest
import torch
from conftest import interrupted
from peft import LoraConfig, PeftModel, get_peft_model

import hf_moe_expand as moe
from hf_moe_expand.checkpoint.export import export_dense
from hf_moe_expand.checkpoint.stored import places
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.report.inspection import inspect_checkpoint
from matrix import oracles
from matrix.forms import NEW, Form, load
from matrix.operations import (
    batch,
    changed,
    close,
    contents,
    logits,
    of_last_expansion,
    operation,
    size_of,
    told_each,
    weights,
)
from matrix.steps import blocks, sft, step, train, trainer_of, whole_step


@operation
def load_alone(form: Form) -> None:
    """P4: a process without the package loads it and computes the same; saved again it has the same bytes."""
    place, asked = form.place("alone"), told_each(form)
    for found, more in zip(form.helpers.alone.load(form, place, batch(form), asked), asked, strict=True):
        close(found, logits(form.model, form, **more), rtol=1e-5)
    again, whole = contents(place / "again"), contents(form.whole)
    assert {name: data for name, data in whole.items() if name in again} == again
    assert {"config.json", "model.safetensors"} <= again.keys()


@operation
def grow(form: Form) -> None:
    """A further expansion leaves every earlier byte, and what the model computes for its languages."""
    new = NEW[form.expansions]
    out = form.place("further")
    moe.grow_checkpoint(form.folder, out, form.growth(form.folder, new))
    model = load(out)
    before, after = weights(form.model), weights(model)
    for name, value in before.items():
        if name.endswith(("router.weight", "classifier.weight")):
            assert torch.equal(after[name][: len(value)], value), name
        elif ".language_gate." not in name:
            assert torch.equal(after[name], value), name
    for code in form.languages if form.is_told else ():
        close(logits(model, form, languages=code), logits(form.model, form, languages=code))
    with model.use_expert(0):
        assert torch.equal(logits(model, form), logits(form.dense, form))
    if "several" not in form and "random" not in form:
        close(logits(model, form, languages=new), logits(form.dense, form))
        layers = range(len(form.model.config.num_experts_per_layer))
        origin = {layer: int(layer in form.model.expanded_ffns()) for layer in layers}
        moe.grow_checkpoint(form.folder, out, form.growth(form.folder, new), copy_from=origin, overwrite=True)
        close(logits(load(out), form, languages=new), logits(form.model, form, languages="el"))


@operation
def join(form: Form) -> None:
    """Joined with another pack, each language gets what its pack alone computes."""
    new = NEW[form.expansions]
    pack, out = form.pack(new), form.place("joined")
    moe.join_expansions([form.folder, f"other={pack}"], out)
    model, other = load(out), load(pack)
    for code in form.languages:
        close(logits(model, form, languages=code), logits(form.model, form, languages=code))
    close(logits(model, form, languages=new), logits(other, form, languages=new))
    assert torch.equal(logits(model, form, languages="en"), logits(form.dense, form))


@operation
def graft(form: Form) -> None:
    """A fine-tune's change on every tensor that the base has, and on each expert."""
    instruct = form.root / "instruct"
    tuned = form.copy_of_base()
    draw = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.02)
    tuned.save_pretrained(instruct)
    form.tokenizer.save_pretrained(instruct)
    out = form.place("grafted")
    moe.graft_delta(form.folder, out, form.base, instruct, scale=0.5)
    half = weights(out)
    moe.graft_delta(form.folder, out, form.base, instruct, overwrite=True)
    model = load(out)
    with model.use_expert(0):
        close(logits(model, form), logits(tuned, form), rtol=1e-5)
    base, after_base, before, after = map(weights, (form.dense, tuned, form.model, model))
    deltas = {name: after_base[name] - base[name] for name in base}
    seen, own_modules = 0, {key: one for key, one in places(form.model).items() if one.number and one.dense}
    for name, value in before.items():
        delta = deltas.get(name)
        if name in own_modules:
            delta = deltas.get(own_modules[name].dense)
        if ".experts.0." in name or ("copies" in form and ".experts." in name):
            head, rest = name.split(".experts.", 1)
            own = f"{head}.{rest.partition('.')[2]}"
            delta = deltas.get(own, deltas.get(own.replace(".fc1.fc", ".fc")))
        if delta is None:
            assert torch.equal(after[name], value), name
        else:
            seen += 1
            torch.testing.assert_close(after[name], value + delta, rtol=0, atol=1e-6, msg=name)
            torch.testing.assert_close(half[name], value + 0.5 * delta, rtol=0, atol=1e-6, msg=name)
    assert seen >= len(base)


@operation
def average(form: Form) -> None:
    """The mean of two checkpoints, tensor by tensor."""
    out = form.place("mean")
    moe.average_checkpoints([form.folder, form.fresh], out, [0.25, 0.75])
    a, b, model = weights(form.model), weights(form.fresh), load(out)
    for name, value in weights(model).items():
        torch.testing.assert_close(value, 0.25 * a[name] + 0.75 * b[name], rtol=0, atol=1e-6, msg=name)
    assert logits(model, form).isfinite().all()


@operation
def average_with_the_base(form: Form) -> None:
    """New experts nearer to the FFNs that they copied: at weight 0 the model is as right after it was made."""
    out = form.place("nearer")
    moe.average_experts(form.folder, out, 0.5)
    half = load(out)
    last = changed(form.model, half)
    assert last
    assert all(".experts." in name or ".adapters." in name for name in last)
    assert not any(".experts.0." in name for name in last)
    model = load(Path(moe.average_experts(form.folder, form.place("nothing"), 0.0)))
    before, middle, start = map(weights, (form.model, half, model))
    for name in last:
        torch.testing.assert_close(middle[name], (before[name] + start[name]) / 2, rtol=0, atol=1e-6, msg=name)
    if form.is_told and "grown" not in form:
        for code in form.languages:
            close(logits(model, form, languages=code), logits(form.dense, form))


@operation
def export_expert(form: Form) -> None:
    """Expert 0 as a dense model is the base, bit for bit; another one, which all layers have, what it computes."""
    out = form.place("dense")
    export_dense(form.folder, out, expert=0)
    assert changed(form.dense, dense := load(out)) == set()
    assert torch.equal(logits(dense, form), logits(form.dense, form))
    if "added" in form:
        with pytest.raises(InputError, match="take expert 0"):
            export_dense(form.folder, form.place("dense-1"), expert=1)
    else:
        export_dense(form.folder, form.place("dense-1"), expert=1)
        with form.model.use_expert(1):
            close(logits(load(form.root / "dense-1"), form), logits(form.model, form))


@operation
def export_language(form: Form) -> None:
    """The dense model of a language is the model that is told it."""
    for code in form.languages:
        out = form.place(f"dense-{code}")
        export_dense(form.folder, out, language=code)
        dense = load(out)
        assert type(dense) is type(form.dense)
        close(logits(dense, form), logits(form.model, form, languages=code))


@operation
def export_to_peft(form: Form) -> None:
    """PEFT computes what the model computes that is told the language."""
    out = form.place("peft")
    found = moe.export_peft(form.folder, out)
    for (name, folder), code in zip(found.folders.items(), form.languages[1:], strict=True):
        assert name == code
        adapted = PeftModel.from_pretrained(form.copy_of_base(), folder).eval()
        close(logits(adapted, form), logits(form.model, form, languages=code))


@operation
def inspect(form: Form) -> None:
    """What `inspect` says, against the tensors in the files."""
    found, own = inspect_checkpoint(form.folder), weights(form.model)
    assert (found.total, found.base) == (size_of(form.model), size_of(form.dense))
    model = form.model
    counts = model.config.num_experts_per_layer
    assert [experts for experts, _, _ in found.layers] == counts
    classifiers = [layer for layer, (_, has_classifier, _) in enumerate(found.layers) if has_classifier]
    assert sum(name.endswith(".classifier.weight") for name in own) == len(classifiers)
    assert found.exclusive == ("exclusive" in form)
    assert (found.gate is not None) == ("gated" in form) == any(".language_gate." in name for name in own)
    assert [record.new_languages for record in found.expansions] == (
        [["el"]] if "dmoe" in form else [[code] for code in form.languages[1:]]
    )
    if "dmoe" not in form:
        sizes = {name: parameter.numel() for name, parameter in form.model.named_parameters()}
        chosen = of_last_expansion(form)
        if "several" not in form:
            chosen = {name for name in chosen if ".router." not in name}
        assert found.trainable["post-pretrain"] == sum(sizes[name] for name in chosen)
    said = "\n".join(found.lines())
    assert f"{found.total:,}" in said
    joins = "joined" in form or {"tuned", "grown"} <= form.facts  # the languages of fine-tunes are packs
    assert len(found.packs) == (form.expansions if joins and "joined" not in form else 2 if joins else 0)


@operation
def card(form: Form) -> None:
    """What the card says, against the tensors in the files."""
    text = str(moe.make_card(form.folder, "me/model"))
    assert "me/model" in text
    assert all(f"{size_of(model):,}" in text for model in (form.model, form.dense)), text
    assert all(code in text for code in form.languages)
    assert str(form.root) not in text
    assert ("mixture-of-experts" in text) == (not {"adapters", "tuned"} & form.facts)


@operation
def cut_steps(form: Form) -> None:
    """P6: a step follows the slow gradient, and does not depend on how its batch is cut, or on what is computed
    twice."""
    whole, model = whole_step(form), form.copy()
    gradients = oracles.stage_step(model, list(blocks(form)), "exclusive" in form, 0.5 if "routed" in form else 0.0)
    moved = {name for name, (before, after) in whole.items() if not torch.equal(before, after)}
    assert moved
    for name in moved:
        before, after = whole[name]
        close(after, before - gradients[name], rtol=2e-4)
    cut = step(form, batch=2, accumulation=4, checkpointing=True)
    for name, (_, value) in whole.items():
        torch.testing.assert_close(cut[name][1], value, rtol=1e-4, atol=2e-6, msg=name)


@operation
def two_ranks(form: Form) -> None:
    """P6: two ranks make the step that one process makes."""
    whole, of_ranks = whole_step(form), form.helpers.ranks.step(form)
    for name, (_, value) in whole.items():
        torch.testing.assert_close(of_ranks[name], value, rtol=1e-4, atol=2e-6, msg=name)


@operation
def frozen(form: Form) -> None:
    """P3: a stage moves new experts and routers alone."""
    model = load(trained(form))
    moved = changed(form.model, model)
    assert moved
    if "dmoe" not in form:
        may = of_last_expansion(form)
        may |= {name for name, source in form.model.all_tied_weights_keys.items() if source in may}
        assert moved <= may, sorted(moved - may)
        assert any(".experts." in name or ".adapters." in name for name in moved)
    if form.is_told:
        assert torch.equal(logits(model, form, languages="en"), logits(form.dense, form))


@operation
def review(form: Form) -> None:
    """Stage 2 moves routers and classifiers alone."""
    out = form.place("reviewed")
    train(form, out, moe.ReviewConfig, save_strategy="no")
    moved = changed(form.model, out)
    assert moved
    assert all(".router." in name or ".classifier." in name or "conditional_gate" in name for name in moved)


@operation
def masking(form: Form) -> None:
    """A step with masked experts is another one, and the same one for the same seed."""
    first, again = (step(form, masking=moe.Masking(expert_output=0.5)) for _ in range(2))
    assert all(torch.equal(first[name][1], again[name][1]) for name in first)
    assert any(not torch.equal(first[name][1], value) for name, (_, value) in whole_step(form).items())


@operation
def distillation(form: Form) -> None:
    """A review that keeps the base's predictions of old text."""
    trainer = trainer_of(form.copy(), form, moe.ReviewConfig, distillation_coef=1.0)
    trainer.train()
    assert trainer.state.log_history[0]["distillation_loss"] > 0


@operation
def resume(form: Form) -> None:
    """P7, P8: a stage that is interrupted and run again writes the same bytes."""
    whole, out = trained(form), form.place("resumed")
    with suppress(KeyboardInterrupt), interrupted(3):
        train(form, out)
    assert not out.exists()
    train(form, out)
    again, expected = contents(out), contents(whole)
    assert again.keys() == expected.keys()
    for name, data in expected.items():
        if name != "trainer_state.json":  # it holds times
            assert again[name] == data, name


def trained(form: Form) -> Path:
    """The form after three steps of its stage."""
    out = form.root / "trained"
    if not out.exists():
        train(form, out)
    return out


@operation
def peft_on_top(form: Form) -> None:
    """A LoRA of PEFT on all linear layers: merged, it computes the same; taken off, the model is as it was."""
    torch.manual_seed(0)
    lora = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    wrapped = get_peft_model(form.copy(), lora).eval()
    asked = told_each(form)
    trains = [name for name, parameter in wrapped.named_parameters() if parameter.requires_grad]
    assert not any(part in name for name in trains for part in (".router.", ".classifier.", ".language_gate."))
    assert not any("_update." in name for name in trains)
    with wrapped.disable_adapter():
        for more in asked:
            assert torch.equal(logits(wrapped, form, **more), logits(form.model, form, **more))
    found = [logits(wrapped, form, **more) for more in asked]
    assert not torch.allclose(found[0], logits(form.model, form, **asked[0]), atol=1e-3)
    out = form.place("lora")
    wrapped.save_pretrained(out)
    again = PeftModel.from_pretrained(form.copy(), out).eval()
    merged = wrapped.merge_and_unload()
    for more, expected in zip(asked, found, strict=True):
        close(logits(again, form, **more), expected, rtol=1e-5)
        close(logits(merged, form, **more), expected)


@operation
def sft_on_top(form: Form) -> None:
    """A step of TRL's supervised fine-tuning follows the slow gradient of its rows."""
    before, after, expected = sft(form)
    seen = 0
    for name, value in before.items():
        gradient = expected.get(name)
        torch.testing.assert_close(after[name], value if gradient is None else value - gradient, rtol=1e-3, atol=1e-5)
        seen += gradient is not None and bool(gradient.any())
    assert seen

"""Deviation analysis against a fine-tuning written out, on every backbone; resuming; refusals."""

import copy

import pytest
import torch
from conftest import byte_tokenizer, refused, tiny_dense
from safetensors.torch import load_file

from hf_moe_expand import measure_deviation
from hf_moe_expand.analysis import deviation
from hf_moe_expand.core.scratch import MARKER
from hf_moe_expand.planning.results import DeviationResult

# One document a language, so that the order of documents is none.
TEXTS = {
    "en": ["A plain sentence, and another one that is a little longer than the first. " * 3],
    "el": ["Μια απλή πρόταση, και μία ακόμα, λίγο πιο μεγάλη. " * 3],
    "hu": ["Egy egyszerű mondat, és még egy, kicsit hosszabb az elsőnél. " * 3],
}
SETTINGS = {"steps": 3, "batch_size": 3, "block_size": 12, "micro_batch_size": 2, "learning_rate": 1e-3}


def measure(model, work_dir, texts=TEXTS, **changes):
    return measure_deviation(model, byte_tokenizer(), texts, work_dir=work_dir, **{**SETTINGS, **changes})


def slow_change(model, text, until=SETTINGS["steps"]):
    """AdamW's steps as its paper has them, on whole batches; the change of every parameter after so many steps."""
    steps, rows, size = SETTINGS["steps"], SETTINGS["batch_size"], SETTINGS["block_size"]
    tokens = torch.tensor(byte_tokenizer()(text).input_ids[: steps * rows * size]).view(steps, rows, size)
    trained = copy.deepcopy(model).float().train()
    start = {name: p.detach().clone() for name, p in trained.named_parameters()}
    first, second = ({name: torch.zeros_like(p) for name, p in start.items()} for _ in range(2))
    for step, batch in enumerate(tokens[:until]):
        logits = trained(input_ids=batch).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        gradients = torch.autograd.grad(loss, list(trained.parameters()))
        rate = SETTINGS["learning_rate"] * (1 - step / steps)
        with torch.no_grad():
            for (name, p), gradient in zip(trained.named_parameters(), gradients, strict=True):
                first[name] = 0.9 * first[name] + 0.1 * gradient
                second[name] = 0.999 * second[name] + 0.001 * gradient**2
                mean, spread = first[name] / (1 - 0.9 ** (step + 1)), second[name] / (1 - 0.999 ** (step + 1))
                p -= rate * mean / (spread.sqrt() + 1e-8)
    return {name: (p.detach() - start[name]).double() for name, p in trained.named_parameters()}


def ffn_change(change, *layers):
    names = ("mlp", "ffn", "feed_forward", "fc1", "fc2")
    inside = tuple(f".{layer}.{name}." for layer in layers for name in names)
    return torch.cat([value.flatten() for name, value in change.items() if any(part in name for part in inside)])


def cosine(one, other):
    return pytest.approx(torch.cosine_similarity(one, other, dim=0).item(), abs=1e-3)


def test_every_backbone_moves_as_written_out(backbone, tmp_path):
    model = tiny_dense(backbone)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    found = measure(model, tmp_path / "work", last_layers=2)
    changes = {language: slow_change(model, documents[0]) for language, documents in TEXTS.items()}
    for language, change in changes.items():
        expected = [ffn_change(change, layer).norm().item() for layer in range(3)]
        assert found.by_language[language] == pytest.approx(expected, rel=1e-3)
    mean = [sum(of_layer) / 3 for of_layer in zip(*found.by_language.values(), strict=True)]
    assert found.deviation == pytest.approx(mean)
    ways = [ffn_change(change, 1, 2) for change in changes.values()]
    assert found.similarity == [[cosine(a, b) for b in ways] for a in ways]
    assert (found.languages, found.layers) == (["en", "el", "hu"], [1, 2])


def test_any_layers_can_be_compared_and_only_they_are_stored(tmp_path):
    model = tiny_dense("qwen2")
    found = measure(model, tmp_path / "work", layers=[2, 0])
    ways = [ffn_change(slow_change(model, TEXTS[code][0]), 0, 2) for code in ("en", "hu")]
    assert found.similarity[0][2] == cosine(*ways)
    stored = sorted(path.name for path in (tmp_path / "work" / "language-en").iterdir())
    assert stored == ["deviation.json", "layer-0.safetensors", "layer-2.safetensors"]


def test_languages_are_compared_at_earlier_steps_as_well(tmp_path):
    model = tiny_dense("qwen2")
    found = measure(model, tmp_path / "work", at_steps=[1, 2])
    change = {
        (code, step): ffn_change(slow_change(model, documents[0], step), 0, 1, 2)
        for code, documents in TEXTS.items()
        for step in (1, 2, 3)
    }
    assert [*found.similarity_at] == ["1", "2"]
    for step, matrix in [*found.similarity_at.items(), ("3", found.similarity)]:
        assert matrix[0][2] == cosine(change["en", int(step)], change["hu", int(step)])
    for code, matrix in found.likeness_of_steps.items():
        assert [len(matrix), len(matrix[0])] == [3, 3]
        assert matrix[0][2] == cosine(change[code, 1], change[code, 3])
        assert matrix[1][0] == cosine(change[code, 2], change[code, 1])
    plain = measure(model, tmp_path / "plain")
    assert (found.similarity, found.by_language) == (plain.similarity, plain.by_language)
    assert (plain.similarity_at, plain.likeness_of_steps) == ({}, {})
    found.to_json(tmp_path / "found.json")
    assert DeviationResult.from_json(tmp_path / "found.json") == found


def test_a_weight_without_a_gradient_does_not_decay(tmp_path):
    """Decay moves the weights alike for every language, and would make all languages look similar."""
    model = tiny_dense("qwen2")
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)  # hides the other two matrices from the first step's loss
    measure(model, tmp_path / "work", steps=1)
    change = load_file(tmp_path / "work" / "language-en" / "layer-2.safetensors")
    assert {name for name, value in change.items() if value.any()} == {"down_proj.weight"}


def test_pieces_of_tensors_add_up(tmp_path, monkeypatch):
    whole = measure(tiny_dense("bloom"), tmp_path / "work")
    monkeypatch.setattr(deviation, "_ELEMENTS", 7)
    folders = [tmp_path / "work" / f"language-{language}" for language in TEXTS]
    found = deviation.change_cosines(folders, whole.layers)
    assert torch.allclose(torch.tensor(found), torch.tensor(whole.similarity), atol=1e-12)


def test_a_bfloat16_model_is_trained_in_float32_and_given_back(tmp_path):
    model = tiny_dense("gemma3_text", dtype=torch.bfloat16)
    before = copy.deepcopy(model.state_dict())
    # In bfloat16 next to a weight of 0.1 the nearest other number is 5e-4 away.
    found = measure(model, tmp_path / "bfloat16", learning_rate=1e-6)
    assert not model.training
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, before[name]), name
    assert all(parameter.grad is None for parameter in model.parameters())
    # No weight gets further than the sum of the learning rates, 2e-6, and most get near.
    weights = sum(p.numel() for p in model.model.layers[0].mlp.parameters())
    assert 0.5e-6 * weights**0.5 < found.deviation[0] <= 2.001e-6 * weights**0.5
    assert found == measure(model.float(), tmp_path / "float32", learning_rate=1e-6)


def test_each_language_starts_from_the_same_weights_and_may_have_any_name(tmp_path):
    model = tiny_dense("qwen2", tie_word_embeddings=True)
    found = measure(model, tmp_path / "there")
    odd = measure(model, tmp_path / "odd", {"zh/TW": TEXTS["en"], "..": TEXTS["el"]})
    assert [*odd.by_language.values()] == [found.by_language[code] for code in ("en", "el")]
    assert measure(model, tmp_path / "back", dict(reversed(TEXTS.items()))).by_language == found.by_language
    alone = measure(model, tmp_path / "alone", {"hu": TEXTS["hu"]})
    assert alone.by_language["hu"] == found.by_language["hu"]
    assert alone.similarity == [[pytest.approx(1.0)]]
    assert {path.name for path in tmp_path.iterdir()} == {"there", "back", "alone", "odd"}


def test_the_seed_orders_documents_and_draws_dropout_for_each_language_anew(tmp_path):
    texts = {"en": [f"Sentence number {i} of so many. " for i in range(30)]}
    runs = [measure(tiny_dense("qwen2"), tmp_path / str(i), texts, seed=seed) for i, seed in enumerate([0, 0, 1])]
    assert runs[0].deviation == runs[1].deviation != runs[2].deviation
    model, hu = tiny_dense("qwen2", attention_dropout=0.5), {"hu": TEXTS["hu"]}
    both = measure(model, tmp_path / "both", {"en": TEXTS["en"], **hu})
    alone, other = (measure(model, tmp_path / f"seed {seed}", hu, seed=seed) for seed in (0, 1))
    assert alone.by_language["hu"] == both.by_language["hu"] != other.by_language["hu"]


@pytest.mark.parametrize("place", ["_fine_tune", "_write_change"])  # where it is interrupted
def test_an_interrupted_analysis_goes_on(tmp_path, monkeypatch, place):
    model, made, calls = tiny_dense("qwen2"), getattr(deviation, place), []
    weights = copy.deepcopy(model.state_dict())
    once = measure(model, tmp_path / "once", at_steps=[2])
    stop = 2 if place == "_fine_tune" else 4  # the second language, or its last step

    def stops(*given):
        calls.append(given)
        if len(calls) == stop:
            raise KeyboardInterrupt
        return made(*given)

    monkeypatch.setattr(deviation, place, stops)
    with pytest.raises(KeyboardInterrupt):
        measure(model, tmp_path / "work", at_steps=[2])
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    left = {path.name for path in (tmp_path / "work").iterdir()}
    assert left == {MARKER, "language-en", "language-en.step-2"} | ({"language-el.step-2"} if stop == 4 else set())
    assert measure(model, tmp_path / "work", at_steps=[2]) == once
    assert len(calls) == {"_fine_tune": 4, "_write_change": 8}[place]  # the interrupted one once more, no finished one
    assert measure(model, tmp_path / "work", at_steps=[2]) == once
    assert len(calls) == {"_fine_tune": 4, "_write_change": 8}[place]


def test_a_work_folder_of_other_work_is_refused(tmp_path):
    model, work = tiny_dense("qwen2"), tmp_path / "work"
    measure(model, work, {"en": TEXTS["en"]}, steps=2)
    for changes, said in (
        ({"steps": 3}, "steps, text"), ({"seed": 1}, "seed"), ({"learning_rate": 1e-4}, "learning_rate"),
        ({"layers": [0]}, "layers"), ({"at_steps": [1]}, "at_steps"), ({"texts": {"en": TEXTS["hu"]}}, "text"),
        ({"model": tiny_dense("qwen2", seed=1)}, "model"),
    ):  # fmt: skip
        given = {"model": model, "work_dir": work, "texts": {"en": TEXTS["en"]}, "steps": 2, **changes}
        refused(measure, says=f"language-en: was made with other {said}: give another", **given)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_text("")
    refused(measure, model, tmp_path / "photos", says="photos: exists and is not a work folder")


def test_settings_out_of_range_are_refused(tmp_path):
    for changes, said in (
        ({"block_size": 65}, "block_size is 65; this model takes blocks of 2 to 64 tokens"),
        ({"last_layers": 4}, "this model has layers 0 to 2"),
        ({"at_steps": [3]}, r"at_steps is \[3\]: must be ascending steps below 3, the last one"),
        ({"layers": [0, 3]}, "layers 0 to 2"),
        ({"texts": {}}, "No language was given"),
        ({"learning_rate": 1e38}, "moved the FFN of layer 0 by"),
        # Bytes, and an end of text after each document.
        ({"texts": {**TEXTS, "el": ["ψ"]}}, "9 blocks .* of 12 tokens need 108 tokens"),
    ):
        refused(measure, tiny_dense("qwen2"), tmp_path / "work", says=said, **changes)
        assert not (tmp_path / "work" / "language-en").exists()

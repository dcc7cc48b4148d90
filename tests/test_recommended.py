"""`recipes new`: the recipe it writes is the recommended one, its steps and batches follow from text and memory."""

import re
from pathlib import Path

import pytest
import yaml
from conftest import invoke, refused, save_dense, write_texts
from encoder_decoders import save_tiny

from hf_moe_expand import PostPretrainConfig
from hf_moe_expand.analysis.settings import GateSettings
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.data.sources import LanguageText
from hf_moe_expand.demo import real
from hf_moe_expand.planning.methods import plan_settings
from hf_moe_expand.runs import recommended
from hf_moe_expand.runs.recipe import Recipe
from hf_moe_expand.runs.recipes import WholeRecipe, find_recipe
from hf_moe_expand.runs.recommended import blocks_a_step, new_recipe, rates_for


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_dense(tmp_path_factory.mktemp("base") / "tiny", "llama", max_position_embeddings=1024)


@pytest.fixture
def texts(tmp_path):
    lines = {"hu": "egy hosszú szöveg a városról", "en": "a long text about the city", "tr": "şehir hakkında"}
    return {code: write_texts(tmp_path / f"{code}.jsonl", [f"{text} {n}" for n in range(40)]) for code, text in
            lines.items()}  # fmt: skip


def written(base, texts, tmp_path, *more):
    out = tmp_path / "recipe.yaml"
    said = invoke("recipes", "new", "--base", str(base), "--new", f"hu={texts['hu']}", "--out", str(out), *more)
    return Recipe.load(out), said, out.read_text("utf-8")


def test_it_is_the_recommended_recipe_for_this_text(base, texts, tmp_path):
    test = write_texts(tmp_path / "hu.test.jsonl", ["más mondatok, amelyeket senki sem olvasott"] * 9)
    recipe, said, text = written(
        base, texts, tmp_path, "--new", f"tr={texts['tr']}", "--old", f"en={texts['en']}", "--test", f"hu={test}"
    )
    recommended = Recipe.load(find_recipe("recommended"))
    assert recipe.plan == recommended.plan == plan_settings("exclusive")
    assert recipe.gates == GateSettings() == recommended.gates
    assert dict(recipe.new) == {"hu": str(texts["hu"]), "tr": str(texts["tr"])}
    assert dict(recipe.old) == {"en": str(texts["en"])}
    assert dict(recipe.test) == {"hu": str(test)}
    assert recipe.output == "runs/tiny-hu-tr"
    for one in (recipe, recommended):
        assert [stage.key for stage, _ in one.stages()] == ["post_pretrain", "gates", "average"]
        assert one.average.weight == 0.6
    ours, theirs = recipe.post_pretrain, recommended.post_pretrain
    assert ours.block_size == theirs.block_size
    sources = [LanguageText(code, str(texts[code])) for code in ("hu", "tr")]
    tokens = sum(len(document.encode()) + 1 for source in sources for document in source.documents())  # bytes, an end
    assert f"about {max(tokens // 512, 1)} steps, of {tokens:,} tokens" in text
    assert recipe.post_pretrain.given["num_train_epochs"] == 1
    assert recipe.post_pretrain.given["per_device_train_batch_size"] == 1
    assert re.search(r"post_pretrain: about \d+ steps.* text: 1; tokens at hand, about: hu [\d,]+", said)
    assert max(map(len, text.replace(str(tmp_path), "").splitlines())) <= 120


def test_a_schedule_for_a_number_of_tokens(base, texts, tmp_path):
    recipe, said, _ = written(base, texts, tmp_path, "--tokens", "819200")
    training = recipe.post_pretrain
    assert training.given["tokens"] == 819_200
    assert "num_train_epochs" not in training.given
    rows = training.given["per_device_train_batch_size"] * training.given["gradient_accumulation_steps"]
    assert (rows, training.given["learning_rate"]) == (16, 2e-3)
    assert "post_pretrain: about 100 steps of 8,192 tokens" in said
    assert "warning: post_pretrain: after more than 4 passes" in said
    few, *_ = written(base, texts, tmp_path, "--tokens", "51200", "--overwrite")
    assert few.post_pretrain.given["learning_rate"] == 1e-3  # steps of 512 tokens
    refused(new_recipe, str(base), {}, {"hu": str(texts["hu"])}, {}, tokens=0, says="--tokens is 0: must be at least 1")


def test_steps_follow_from_the_text():
    assert blocks_a_step(None) == 16
    for tokens in (10, 51_200, 409_600, 819_200, 1_638_400, 10**8, 10**9, 10**12):
        blocks = blocks_a_step(tokens)
        steps = tokens / (512 * blocks)
        assert blocks & (blocks - 1) == 0
        assert steps >= 100 or blocks == 1
        assert steps <= 10_000 or blocks == 1024
        assert blocks == 16 or (blocks < 16) == (tokens < 100 * 16 * 512)


def test_rates_name_their_source(base, texts):
    assert [rates_for(n).stage for n in (135_000_000, 500_000_000, 1_800_000_000)] == ["2e-3", "2e-4", "5e-5"]
    assert "not measured" in rates_for(500_000_000).source
    for name, parameters in (("recommended", 135_000_000), ("moe-lpr-qwen1.5-1.8b", 1_800_000_000)):
        recipe = WholeRecipe.load(find_recipe(name)).mapping
        assert recipe["post_pretrain"]["learning_rate"] == float(rates_for(parameters).stage)
    # A small step takes the rate measured for small steps.
    assert (rates_for(135_000_000, 512).stage, rates_for(135_000_000, 4096)) == ("1e-3", rates_for(135_000_000))
    assert "512 tokens" in rates_for(135_000_000, 2048).source
    short = new_recipe(str(base), {}, {"hu": str(texts["hu"])}, {})
    assert "learning_rate: 1e-3  # measured on SmolLM2, 135 million parameters, with steps of 512 tokens" in short


def test_readme_defaults_demo_and_notebook_have_the_rates_of_their_sizes():
    root = Path(__file__).parents[1]
    readme, notebook = ((root / name).read_text("utf-8") for name in ("README.md", "examples/quickstart.ipynb"))
    qwen, smollm2 = rates_for(494_000_000).stage, rates_for(135_000_000, 512).stage
    assert set(re.findall(r"learning_rate[=:] ?([\de.-]+)", readme)) == {qwen}
    assert f"RATE = 40, 256, {smollm2}" in notebook
    assert yaml.safe_load(re.sub(r"\$\w+", "x", real.RECIPE))["post_pretrain"]["learning_rate"] == smollm2
    assert PostPretrainConfig("x").learning_rate == float(rates_for(1_800_000_000).stage)


@pytest.mark.parametrize(("here", "gpu", "half", "cpu"), [
    (False, None, False, False), (False, True, True, False), (False, False, False, False),
    (True, None, True, False), (True, True, True, False), (True, False, False, True),
])  # fmt: skip
def test_a_gpu_or_none(base, texts, monkeypatch, here, gpu, half, cpu):
    monkeypatch.setattr(recommended.torch.cuda, "is_available", lambda: here)
    monkeypatch.setattr(recommended, "has_bfloat16", lambda: True)
    monkeypatch.setattr(recommended, "device_memory", lambda: 10**12)
    text = new_recipe(str(base), {}, {"hu": "hub:some/text"}, {}, gpu=gpu)
    given = Recipe.of_text(text, "x").post_pretrain.given
    assert (given.get("bf16", False), given.get("use_cpu", False)) == (half, cpu)
    elsewhere = gpu and not here
    assert given["per_device_train_batch_size"] == (1 if elsewhere else 16)
    assert ("a GPU that this machine does not know" in text) == bool(elsewhere)


def test_the_batch_fits_the_memory(base, texts, monkeypatch):
    given = ({"en": str(texts["en"])}, {"hu": "hub:some/text"}, {})
    sizes = []
    for memory in (10**12, 1):
        monkeypatch.setattr(recommended, "device_memory", lambda memory=memory: memory)
        training = Recipe.of_text(new_recipe(str(base), *given), "x").post_pretrain.given
        assert training["per_device_train_batch_size"] * training["gradient_accumulation_steps"] == 16
        sizes.append((training["per_device_train_batch_size"], any("checkpointing" in name for name in training)))
    assert sizes == [(16, False), (1, True)]


def test_what_it_refuses(base, texts, tmp_path):
    out = tmp_path / "r.yaml"
    arguments = ["recipes", "new", "--base", str(base), "--out", str(out)]
    with pytest.raises(InputError, match=r"--new hu: .*missing\.jsonl: no such"):
        invoke(*arguments, "--new", f"hu={tmp_path / 'missing.jsonl'}")
    with pytest.raises(InputError, match=r"test\.de: .* is training text, too \(old\.en: "):
        invoke(*arguments, "--new", f"hu={texts['hu']}", "--old", f"en={texts['en']}", "--test", f"de={texts['en']}")
    assert not out.exists()
    out.write_text("mine")
    refused(invoke, *arguments, "--new", f"hu={texts['hu']}", says="exists already")
    small = save_dense(tmp_path / "short", "llama", max_position_embeddings=64)
    with pytest.raises(InputError, match=r"takes 64 positions, but this recipe's blocks have 512"):
        new_recipe(str(small), {}, {"hu": str(texts["hu"])}, {})
    save_tiny(tmp_path / "t5", "t5")
    with pytest.raises(InputError, match=r"is an encoder-decoder, for which docs/backbones\.md has the commands"):
        new_recipe(str(tmp_path / "t5"), {}, {"hu": str(texts["hu"])}, {})

"""Review places classifiers by the model as it is after stage 1 (LayerMoE 3.3), on a checkpoint that has none."""

import json
from pathlib import Path

import pytest
import torch
from conftest import interrupted, run_fresh, write_texts
from safetensors.torch import load_file

from hf_moe_expand import LayerMoEForCausalLM, Plan, ReviewConfig, ReviewTrainer, expand_checkpoint, train_stage
from hf_moe_expand.analysis.similarity import measure_similarity
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.data.sources import LanguageText
from hf_moe_expand.inference.models import load_for_inference
from hf_moe_expand.stages.run import check_frozen

QUICK = {"block_size": 16, "max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 2, "disable_tqdm": True}
CODES = ("en", "el")


@pytest.fixture(scope="module")
def root(base, tmp_path_factory):
    root = tmp_path_factory.mktemp("placement")
    write_texts(root / "el.jsonl", [f"η γάτα {i} κάθεται" for i in range(30)])
    write_texts(root / "en.jsonl", [f"the cat {i} sits" for i in range(20)])
    for name, kinds in {"plain": {}, "classified": {"classifier_layers": [2]}, "told": {"exclusive": True}}.items():
        expand_checkpoint(base, root / name, Plan("own", [2, 1, 2], old=["en"], new=["el"], **kinds))
    return root


@pytest.fixture
def data(root):
    return {code: LanguageText(code, str(root / f"{code}.jsonl")) for code in CODES}


def placed(folder):
    config = json.loads((Path(folder) / "config.json").read_text())
    assert config["expansions"][-1]["classifier_layers"] == config["classifier_layers"]
    return config["classifier_layers"]


@pytest.mark.parametrize(("choice", "nearest"), [("similarity", max), ("last", min)])
def test_review_places_and_trains_them(root, data, tmp_path, choice, nearest, caplog):
    config = ReviewConfig(classifier_layers=1, classifier_choice=choice, classifier_tokens=200, **QUICK)
    record = train_stage(root / "plain", tmp_path / "out", data, config)
    assert "MISSING" not in caplog.text  # the library would advise to train what this stage is about to train
    model, tokenizer = load_for_inference(root / "plain")
    texts = {code: text.load().shuffle(seed=0)["text"] for code, text in data.items()}
    new_old = measure_similarity(model, tokenizer, texts, ["en"], ["el"], 200, 16).new_old
    (layer,) = placed(tmp_path / "out")
    assert new_old[layer] == nearest(new_old[0], new_old[2])
    assert record.settings["classifier_layers"] == 1
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert weights[f"model.layers.{layer}.mlp.classifier.weight"].any()  # which begins at zero
    assert check_frozen(root / "plain", tmp_path / "out", "review")  # P3 knows what was added
    code = "from transformers import AutoModelForCausalLM as A\n"
    code += "m, i = A.from_pretrained(sys.argv[1], trust_remote_code=True, output_loading_info=True)\nprint(i)"
    assert "'missing_keys': set(), 'unexpected_keys': set()" in run_fresh(code, str(tmp_path / "out"))


def test_an_interrupted_review_goes_on_with_the_layers_that_it_chose(root, data, tmp_path, monkeypatch):
    config = ReviewConfig(classifier_layers=1, **QUICK)
    train_stage(root / "plain", tmp_path / "whole", data, config)

    with interrupted(3), pytest.raises(KeyboardInterrupt):
        train_stage(root / "plain", tmp_path / "out", data, config)
    monkeypatch.setattr(ReviewConfig, "_chosen", lambda *_: pytest.fail("measured again"))
    train_stage(root / "plain", tmp_path / "out", data, config)
    whole, out = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "out"))
    assert all(torch.equal(whole[name], out[name]) for name in whole)


@pytest.mark.parametrize(
    ("name", "count", "message"),
    [
        ("classified", 1, r"classifiers already, in layers 2, which its plan placed: leave classifier_layers out"),
        ("plain", 3, "classifier_layers is 3, but 2 layers of the model have a router"),
        ("told", 1, "leave the review out"),
    ],
)
def test_what_cannot_have_them_is_refused_before_anything_runs(root, data, tmp_path, name, count, message):
    with pytest.raises(InputError, match=message):
        train_stage(root / name, tmp_path / "out", data, ReviewConfig(classifier_layers=count, **QUICK))
    assert not list(tmp_path.iterdir())


def test_a_trainer_trains_what_its_model_has(root, tmp_path):
    model = LayerMoEForCausalLM.from_pretrained(root / "plain")
    with pytest.raises(InputError, match="`train_stage`, from folder to folder, measures the model and places them"):
        ReviewTrainer(model, ReviewConfig(str(tmp_path), classifier_layers=1, **QUICK))

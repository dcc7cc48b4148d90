"""Every verb on the backbones that are unlike the common ones: FFNs of separate layers (OPT), parts that the library
puts together when it loads (OLMo-hybrid), layers that are mixtures already (GLM 4 MoE), FFNs of different widths beside
other paths (Gemma 3n)."""

import pytest
import torch
from conftest import byte_tokenizer, invoke, write_texts
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_moe_expand import LayerMoEForCausalLM, Plan
from hf_moe_expand.baselines.branches import expand_branches
from hf_moe_expand.checkpoint.compare import compare_checkpoints
from hf_moe_expand.checkpoint.expansion_only import save_expansion
from hf_moe_expand.checkpoint.promises import tiny_twin
from hf_moe_expand.core.jsonfile import write_json
from hf_moe_expand.evaluation.report import Evaluation
from hf_moe_expand.modeling import decoder_ffns
from hf_moe_expand.planning.results import RoutingResult, SimilarityResult

UNUSUAL = ("gemma3n_text", "glm4_moe", "olmo_hybrid", "opt")
IDS = torch.arange(3, 15)[None]
TEXT = {"en": "the cat sits on the mat", "el": "η γάτα κάθεται στο χαλί", "hu": "a macska a szőnyegen ül"}
pytestmark = pytest.mark.wide


@pytest.fixture(scope="module", params=UNUSUAL)
def place(request, tmp_path_factory):
    """A folder with a base, its expansion after two short stages, and what `grow` needs."""
    root = tmp_path_factory.mktemp(request.param)
    twin = tiny_twin(CONFIG_MAPPING[request.param]())
    twin.save_pretrained(root / "base")
    byte_tokenizer().save_pretrained(root / "base")
    for code, text in TEXT.items():
        write_texts(root / f"{code}.jsonl", [f"{text} {number}" for number in range(40)])
    dense = [not ffn.is_mixture for ffn in decoder_ffns(twin)]
    counts, more = [1 + own for own in dense], [1 + 2 * own for own in dense]
    Plan("own", counts, [0], old=["en"], new=["el"]).save(root / "plan.json")
    Plan("own", more, [0], old=["en", "el"], new=["hu"], grows_from=counts).save(root / "more.json")
    training = {"max_steps": 2, "per_device_train_batch_size": 2, "disable_tqdm": True}
    write_json(root / "stage.json", {"block_size": 16, **training})
    write_json(root / "review.json", {"block_size": 16, "distillation_coef": 0.5, **training})
    invoke("expand", root / "base", root / "expanded", "--plan", root / "plan.json")
    text = {code: ("--data", f"{code}={root / code}.jsonl") for code in TEXT}
    invoke("train", "post-pretrain", root / "expanded", root / "1", *text["el"], "--config", root / "stage.json")
    invoke("train", "review", root / "1", root / "2", *text["en"], *text["el"], "--config", root / "review.json")
    return root


def logits(folder):
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder).eval()(IDS).logits


def test_stages_leave_the_base_as_it_was(place):
    model = LayerMoEForCausalLM.from_pretrained(place / "2").eval()
    with torch.no_grad(), model.use_expert(0):
        assert torch.equal(model(IDS).logits, logits(place / "base"))
    assert not torch.equal(logits(place / "2"), logits(place / "base"))


def test_expert_0_is_exported_as_the_base(place):
    invoke("export", place / "2", place / "back", "--expert", "0")
    assert torch.equal(logits(place / "back"), logits(place / "base"))
    assert compare_checkpoints(place / "back", place / "base").same


def test_growing_keeps_every_earlier_expert(place):
    invoke("grow", place / "2", place / "grown", "--plan", place / "more.json")
    found = compare_checkpoints(place / "2", place / "grown")
    assert not any(".experts." in name for name in (*found.changed, *found.removed))


def test_a_delta_of_nothing_changes_nothing(place):
    options = ("--base", place / "base", "--instruct", place / "base")
    invoke("graft", place / "2", place / "grafted", *options)
    assert compare_checkpoints(place / "grafted", place / "2").same


def test_branches_and_averages_of_one_model_are_this_model(place):
    counts = Plan.load(place / "plan.json").experts_per_layer
    expand_branches([place / "base"] * 2, place / "branches", Plan("dmoe", counts, groups=[["en"], ["el"]]))
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(place / "branches").eval()
        torch.testing.assert_close(model(IDS).logits, logits(place / "base"), rtol=1e-4, atol=1e-5)
    invoke("merge", "average", place / "2", place / "2", "--out", place / "average")
    assert compare_checkpoints(place / "average", place / "2").same


def test_analyses_and_scores_run(place):
    text = [part for code in ("en", "el") for part in ("--data", f"{code}={place / code}.jsonl")]
    routing = ("--tokens", "100", "--block-size", "16", "--out", place / "routing.json")
    invoke("analyze", "routing", place / "2", *text, *routing)
    languages = ("--old", f"en={place / 'en'}.jsonl", "--new", f"el={place / 'el'}.jsonl")
    invoke("analyze", "similarity", place / "base", *languages, *routing[:4], "--out", place / "similarity.json")
    invoke("evaluate", place / "base", place / "2", *text, "--block-size", "16", "--out", place / "scores.json")
    layers = len(Plan.load(place / "plan.json").experts_per_layer)
    assert len(SimilarityResult.from_json(place / "similarity.json").similarity) == layers
    assert list(Evaluation.from_json(place / "scores.json").models) == ["base", "2"]
    assert set(RoutingResult.from_json(place / "routing.json").perplexity) == {"en", "el"}


def test_an_expansion_alone_holds_what_the_base_has_not(place):
    saved = save_expansion(place / "2", place / "alone", base=str(place / "base"))
    assert saved.changed == []
    model = LayerMoEForCausalLM.from_pretrained(place / "alone", base_model=str(place / "base")).eval()
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, logits(place / "2"))

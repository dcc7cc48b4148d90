"""vLLM's tokens, one by one, against those of transformers. `make vllm` runs these tests where vLLM is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: `make vllm` sets up an environment for these tests")

from conftest import byte_tokenizer, save_dense
from encoder_decoders import save_tiny
from test_join import make_pack
from test_peft_adapters import make
from transformers import AutoModelForCausalLM

from hf_moe_expand import Plan, expand_checkpoint, join_expansions, save_expansion
from hf_moe_expand.checkpoint.export import export_dense
from hf_moe_expand.checkpoint.gate import Gate
from hf_moe_expand.checkpoint.peft import export_peft
from hf_moe_expand.checkpoint.tuned import expand_tuned
from hf_moe_expand.modeling.language_gate import GateRule

# vLLM's attention on a CPU wants heads of at least 32 elements.
SIZES = {
    "hidden_size": 128, "intermediate_size": 96, "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
OURS = {"model_impl": "transformers", "trust_remote_code": True}
COUNT = 8
LANGUAGES = {"old": ["en"], "new": ["el"]}
MODELS = {
    "uniform": ("qwen2", Plan("moe-lpr", [3, 3, 3], **LANGUAGES), {}),
    "uneven": ("llama", Plan("layer-moe", [3, 1, 2], **LANGUAGES), {}),
    "classifiers": ("qwen2", Plan("layer-moe", [3, 1, 2], [0, 2], **LANGUAGES), {}),
    "conditional": ("qwen3", Plan("layer-moe", [3, 1, 4], [2], **LANGUAGES), {"conditional_routing": True}),
    "dmoe": ("qwen2", Plan("dmoe", [3, 1, 3], groups=[["en", "es"], ["el"], ["tr"]]), {}),
    "gemma3": ("gemma3_text", Plan("moe-lpr", [2, 2, 2], **LANGUAGES), {}),
    "granite": ("granite", Plan("layer-moe", [3, 1, 2], [0], **LANGUAGES), {}),
    "added": ("qwen2", Plan("layer-moe", [3, 1, 2], [0], **LANGUAGES), {"expert_kind": "added", "expert_width": 24}),
    "mistral": ("mistral", Plan("moe-lpr", [2, 2, 2], **LANGUAGES), {}),
}
GENERATOR = torch.Generator().manual_seed(5)
PROMPTS = [torch.randint(0, 256, (length,), generator=GENERATOR).tolist() for length in (20, 7, 33, 2)]


def perturbed(folder: Path) -> Path:
    """Experts that differ, and routers, classifiers and gates that decide; written over the checkpoint."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name and ".experts.0." not in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
            elif "router" in name:
                parameter.mul_(5)
            elif "classifier" in name or "conditional_gate" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """`made("uneven")`: the checkpoint of that name, which is made once."""
    root = tmp_path_factory.mktemp("models")

    def make(name: str) -> Path:
        if not (root / name).is_dir():
            backbone, plan, options = MODELS[name]
            save_dense(root / f"{name}-base", backbone, **SIZES)
            expand_checkpoint(root / f"{name}-base", root / name, plan, **options)
            perturbed(root / name)
        return root / name

    return make


def expected(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    """The greedy tokens by transformers, each prompt alone."""
    network = AutoModelForCausalLM.from_pretrained(model).eval()
    options = {"max_new_tokens": COUNT, "do_sample": False, "eos_token_id": None}
    return [network.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist() for ids in prompts]


def run_engine(
    model: Path, rounds: list[list[list[int]]], adapters: list[Path | None] | None = None, **options
) -> subprocess.CompletedProcess:
    engine = Path(__file__).with_name("engine.py")
    asked = json.dumps({"rounds": rounds, "count": COUNT, "options": options, "adapters": adapters}, default=str)
    command = [sys.executable, str(engine), str(model)]
    return subprocess.run(command, input=asked, capture_output=True, text=True, cwd="/", timeout=600, check=False)


def served(model: Path, rounds: list[list[list[int]]], **options) -> list[list[list[int]]]:
    done = run_engine(model, rounds, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_of_mixed_lengths_gets_the_tokens_of_transformers(made, name):
    model = made(name)
    # The second round's prompts are in the cache of prefixes.
    first, second = served(model, [PROMPTS, [PROMPTS[2], PROMPTS[0]]], **OURS)
    tokens = expected(model, PROMPTS)
    assert first == tokens
    assert second == [tokens[2], tokens[0]]


@pytest.mark.parametrize(
    "options",
    [
        {"enable_chunked_prefill": True, "max_num_batched_tokens": 16, "max_num_seqs": 4},
        {"enable_prefix_caching": False},
        {"enforce_eager": False},
    ],
    ids=lambda options: next(iter(options)),
)
def test_the_ways_in_which_vllm_cuts_and_compiles_change_nothing(made, options):
    model = made("classifiers")
    assert served(model, [PROMPTS], **OURS, **options) == [expected(model, PROMPTS)]


def test_a_join_of_packs(tmp_path):
    save_dense(tmp_path / "base", **SIZES)
    for seed, (code, counts) in enumerate({"el": [2, 1, 3], "hu": [3, 2, 1]}.items(), start=1):
        plan = Plan("moe-lpr", counts, old=["en"], new=[code], exclusive=True)
        make_pack(tmp_path / code, tmp_path / "base", plan, seed)
    join_expansions([tmp_path / "el", tmp_path / "hu"], tmp_path / "joined")
    assert served(tmp_path / "joined", [PROMPTS], **OURS) == [expected(tmp_path / "joined", PROMPTS)]


def test_a_gate_is_refused_and_the_dense_model_of_a_language_is_served(tmp_path):
    save_dense(tmp_path / "base", **SIZES)
    plan = Plan("moe-lpr", [2, 2, 2], exclusive=True, **LANGUAGES)
    gate = Gate(GateRule(0, [["en", "fr"], ["el"]]), torch.randn(3, 128) / 3, torch.zeros(3))
    expand_checkpoint(tmp_path / "base", tmp_path / "gated", plan, gate=gate)
    perturbed(tmp_path / "gated")
    done = run_engine(tmp_path / "gated", [PROMPTS], **OURS)
    assert done.returncode != 0
    assert "export --language" in done.stderr, done.stderr[-3000:]
    export_dense(tmp_path / "gated", tmp_path / "el", language="el")
    assert served(tmp_path / "el", [PROMPTS]) == [expected(tmp_path / "el", PROMPTS)]


@pytest.mark.parametrize("backbone", ["llama", "qwen2"])
def test_adapters_of_several_languages_are_served_request_by_request(tmp_path, backbone):
    save_dense(tmp_path / "base", backbone, **SIZES)
    adapters = {
        "el": make(tmp_path / "lora-el", tmp_path / "base", 1),
        "hu": make(tmp_path / "lora-hu", tmp_path / "base", 2, use_rslora=True, rank_pattern={"q_proj": 7}),
    }
    expand_tuned(tmp_path / "base", adapters, tmp_path / "model", ["en"])
    lines = export_peft(tmp_path / "model", tmp_path / "back").lines()
    assert "--max-loras 3 --max-lora-rank 8 " in lines[-1]
    languages = ["el", "hu", "en", "hu"]
    places = [None if code == "en" else tmp_path / "back" / code for code in languages]
    asked = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 3}  # as the line has it
    found = served(tmp_path / "base", [PROMPTS, PROMPTS], adapters=places, **asked)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    options = {"max_new_tokens": COUNT, "do_sample": False, "eos_token_id": None}
    told = [
        model.generate(torch.tensor([ids]), languages=code, **options)[0, len(ids) :].tolist()
        for ids, code in zip(PROMPTS, languages, strict=True)
    ]
    assert found == [told, told]
    assert told != expected(tmp_path / "base", PROMPTS)


def test_what_vllm_cannot_serve_is_refused_when_it_loads(tmp_path):
    save_dense(tmp_path / "base", "llama", **SIZES)
    plan = Plan("mola", [3, 1, 4], **LANGUAGES)
    expand_checkpoint(tmp_path / "base", tmp_path / "lora", plan, expert_kind="lora", lora_rank=4)
    byte_tokenizer().save_pretrained(tmp_path / "lora")
    expand_checkpoint(tmp_path / "base", tmp_path / "whole", Plan("moe-lpr", [2, 2, 2], **LANGUAGES))
    save_expansion(tmp_path / "whole", tmp_path / "added", tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "added")
    save_tiny(tmp_path / "nllb", "m2m_100", d_model=128)
    expand_checkpoint(
        tmp_path / "nllb", tmp_path / "translator", Plan("moe-lpr", [2] * 5, encoder_layers=3, **LANGUAGES)
    )
    save_dense(tmp_path / "olmoe", "olmoe", **SIZES)
    plan = Plan("moe-lpr", [2, 1, 2], **LANGUAGES)
    expand_checkpoint(tmp_path / "olmoe", tmp_path / "mixture", plan, expert_kind="added", expert_width=24)
    byte_tokenizer().save_pretrained(tmp_path / "mixture")
    for name, reason in {
        "mixture": "runs a mixture of experts by code of its own",
        "lora": "a dense model of one expert (`hf-moe-expand export --expert`)",
        "added": "holds only the tensors that an expansion added",
        "translator": "encoder-decoder",
    }.items():
        done = run_engine(tmp_path / name, [PROMPTS], **OURS)
        assert done.returncode != 0, name
        assert reason in done.stderr, done.stderr[-3000:]

"""Every backbone that is proven: its promises on a tiny twin, P1 to P4 among them, and a process without the package.

`make test` tries a sixth of them, which SEED chooses; `make backbones` tries all.
"""

import json
import os

import pytest
import torch
from conftest import byte_tokenizer, run_fresh
from promises import broken_promises
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_moe_expand import Plan, expand_checkpoint
from hf_moe_expand.checkpoint.promises import logits, tiny_twin
from hf_moe_expand.checkpoint.proven import PROVEN, PROVEN_ENCODER_DECODERS, PROVEN_MIXTURES
from hf_moe_expand.modeling import decoder_ffns, stack_sizes

SEED = int(os.environ.get("SEED", 0))
BACKBONES = sorted(name for name in {*PROVEN, *PROVEN_MIXTURES, *PROVEN_ENCODER_DECODERS} if name in CONFIG_MAPPING)
CHOSEN = [
    pytest.param(name, marks=[pytest.mark.backbones] * bool((number + SEED) % 6))
    for number, name in enumerate(BACKBONES)
]
ALONE = """
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
folder, kind = sys.argv[1], globals()[sys.argv[2]]
model, info = kind.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
assert not any(info.values()), info
assert type(model).__module__.startswith("transformers_modules")
ids = torch.arange(3, 27).view(2, 12)
more = {"decoder_input_ids": ids[:, :9]} if model.config.is_encoder_decoder else {}
with torch.no_grad(), model.eval().use_expert(0):
    torch.save(model(ids, **more).logits, folder + "/home.pt")
model.save_pretrained(folder + "/again")
"""


@pytest.mark.parametrize("name", CHOSEN)
def test_a_proven_backbone_keeps_every_promise(name, tmp_path):
    config = CONFIG_MAPPING[name]()
    assert broken_promises(config) == []
    dense = tiny_twin(config)
    dense.save_pretrained(tmp_path / "dense")
    byte_tokenizer().save_pretrained(tmp_path / "dense")
    mixtures = [ffn.is_mixture for ffn in decoder_ffns(dense)]
    counts = [1 if mixture else 2 for mixture in mixtures] if not all(mixtures) else [2] * len(mixtures)
    added = {"expert_kind": "added", "expert_width": 16} if all(mixtures) else {}
    encoder = stack_sizes(config := dense.config).get("encoder", 0)
    plan = Plan("own", counts, old=["en"], new=["el"], encoder_layers=encoder)
    expand_checkpoint(tmp_path / "dense", tmp_path / "out", plan, **added)
    parts = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))["parts"]
    assert "mixture" in parts or not any(mixtures)  # the configuration shows what the modules are
    kind = "AutoModelForSeq2SeqLM" if config.is_encoder_decoder else "AutoModelForCausalLM"
    run_fresh(ALONE, str(tmp_path / "out"), kind)
    for file in (tmp_path / "out" / "again").iterdir():
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes(), file.name
    home, expected = torch.load(tmp_path / "out" / "home.pt"), logits(dense)
    torch.testing.assert_close(home, expected, rtol=1e-5, atol=1e-5 * max(1.0, expected.abs().max().item()))

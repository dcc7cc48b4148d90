"""Once the package is imported, the Auto classes know its checkpoints."""

import pytest
from conftest import run_python, save_dense

from hf_moe_expand import Plan, expand_checkpoint

PROGRAM = """
import sys
{imports}
from transformers import AutoConfig, AutoModelForCausalLM
folder = sys.argv[1]
config = AutoConfig.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
print(type(config).__module__, isinstance(config, hf_moe_expand.LayerMoEConfig))
print(isinstance(model, hf_moe_expand.LayerMoEForCausalLM))
"""


@pytest.mark.parametrize("imports", ["import hf_moe_expand", "import trl\nimport hf_moe_expand"])
def test_checkpoints_load_without_remote_code(tmp_path, imports):
    expand_checkpoint(save_dense(tmp_path / "base"), tmp_path / "out", Plan("moe-lpr", [2, 1, 2], new=["el"]))
    module, *answers = run_python(PROGRAM.format(imports=imports), str(tmp_path / "out")).split()
    assert module.startswith("hf_moe_expand.modeling")
    assert answers == ["True"] * 2

"""Once the package is imported, the Auto classes know its checkpoints."""

import subprocess
import sys

import pytest
from conftest import save_dense

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
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(imports=imports), str(tmp_path / "out")],
        capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    module, *answers = done.stdout.split()
    assert module.startswith("hf_moe_expand.modeling")
    assert answers == ["True"] * 2

"""Once the package is imported, the Auto classes know its checkpoints."""

import pytest
import transformers
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


@pytest.mark.parametrize("head", ["SequenceClassification", "TokenClassification", "QuestionAnswering"])
@pytest.mark.parametrize("backbone", ["qwen2", "olmo2"])  # the second has no such head itself
def test_a_head_that_expanded_models_lack_is_refused_in_one_line(tmp_path, backbone, head):
    expand_checkpoint(save_dense(tmp_path / "base", backbone), tmp_path / "out", Plan("moe-lpr", [2, 1, 2], new=["el"]))
    auto = getattr(transformers, f"AutoModelFor{head}")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    for load in (lambda: auto.from_pretrained(tmp_path / "out"), lambda: auto.from_config(config)):
        with pytest.raises(
            ValueError, match=f"\\({backbone}\\) has the classes AutoModel and AutoModelForCausalLM"
        ) as said:
            load()
        assert "\n" not in str(said.value)

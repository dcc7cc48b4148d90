"""The scripts of docs/trainers.md and of README run as they stand, with a tiny model in the place of the real one."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import save_dense, write_texts
from guides import blocks
from hub_server import TOKEN, Client

WORDS = {
    "en": "the cat sat on the mat ",
    "el": "η γάτα κάθισε στο χαλί ",
    "hu": "a macska leült ",
    "tr": "kedi oturdu ",
}
WORDS["hi"] = "बिल्ली बैठ गई "
PRELUDE = """
import os
os.environ["HF_TOKEN"] = token
os.chdir(folder)
import hf_moe_expand.hub.publish
from hf_moe_expand.analysis import gate_fit, gating
from hf_moe_expand.analysis.settings import GateSettings
from hf_moe_expand.data.anchors import shipped_anchors
from transformers.integrations import integration_utils
hf_moe_expand.hub.publish.check_loads_alone = lambda folder: None
gating.shipped_anchors = lambda **given: dict(list(shipped_anchors(**given).items())[::10])
gate_fit.ITERATIONS = 4
QUICK = {"tokens": 300, "anchor_tokens": 200, "unseen_share": 0.99}
class Recorded(integration_utils.TrainerCallback):  # TensorBoard and its like need not be installed
    logs = []
    def on_log(self, args, state, control, logs=None, **others):
        self.logs.append(logs)
integration_utils.INTEGRATION_TO_CALLBACK["tensorboard"] = Recorded
"""
# A model with random weights knows no language.
QUICK_GATES = "fit_gates(model, settings=GateSettings(**QUICK), "
NAMED = {named[1]: text for text in blocks("trainers.md", "python") if (named := re.match(r"# (\S+\.py)\n", text))}
SCRIPTS = {name: text for name, text in NAMED.items() if name != "chat.py"}  # tests/test_chat_guide.py runs it
AFTER = {
    "post_pretrain.py": "assert trainer.record.stage == 'post-pretrain'",
    "review.py": "assert trainer.record.tokens_seen_by_language.keys() == {'en', 'el'}",
    "gates.py": "assert model.config.language_gate['layer'] in (5, 6, 7)",
    "gate_first.py": "assert model.config.language_gate['layer'] == report.layer",
    "dmoe.py": "assert [s['stage'] for s in model.config.expansions[0]['stages']] == ['group', 'joint']",
    "adapt.py": "assert trainer.model.config.language_groups == [['el'], ['hu', 'tr'], ['hi']]",
    "several.py": "assert trainer.state.global_step",
    "metrics.py": "logged = set().union(*trainer.state.log_history)\n"
    "assert {'eval_en_loss', 'eval_el_loss', 'eval_el_accuracy'} <= logged\nassert trainer.state.best_metric",
    "logged.py": "assert any('expert_0_score_new' in logs for logs in Recorded.logs)",
    "resume.py": "again = str(trainer.state.global_step)\nassert get_last_checkpoint('qwen-el-long').endswith(again)",
    "publish.py": "",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guide")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    save_dense(folder / "Qwen" / "Qwen2.5-0.5B", num_hidden_layers=24, max_position_embeddings=2048, **sizes)
    for code, words in WORDS.items():
        rows = [f"{number} {words * 4}" for number in range(60)]
        write_texts(folder / f"{code}.jsonl", rows)
        write_texts(folder / f"{code}.test.jsonl", rows[:40])
        tagged = [json.dumps({"text": row, "language": code}) + "\n" for row in rows]
        (folder / f"{code}.tagged.jsonl").write_text("".join(tagged))
    return folder


@pytest.fixture(scope="module")
def run(server, folder, tmp_path_factory):
    client = Client(server.environment(tmp_path_factory.mktemp("home")))
    yield lambda code: client.run(PRELUDE + code, folder=str(folder), token=TOKEN)
    client.process.stdin.close()
    client.process.wait()


def quick(script):
    script = script.replace("fit_gates(model, ", QUICK_GATES)
    return script.replace('new=["el"])\ngate, ', 'new=["el"], settings=GateSettings(**QUICK))\ngate, ')


@pytest.mark.guides
def test_the_scripts_run_one_after_the_other(server, folder, run):
    assert SCRIPTS.keys() == AFTER.keys()
    for name, script in SCRIPTS.items():
        answer = run(f"{quick(script)}\n{AFTER[name]}")
        assert "error" not in answer, (name, answer)
    published = server.files("me/qwen-el")
    assert {"model.safetensors", "modeling_layer_moe.py", "tokenizer.json", "README.md"} <= set(published)
    assert "training_args.bin" not in published
    for made in ("qwen-el-1", "qwen-el-2", "qwen-el-gated", "dmoe-2", "dmoe-hi", "dmoe-hi-more"):
        assert (folder / made / "modeling_layer_moe.py").is_file() or (folder / made / "modeling_dmoe.py").is_file()
        assert not list((folder / made).rglob("training_args.bin"))
    # On two ranks, and once more from the checkpoints that are there.
    (folder / "several.py").write_text(SCRIPTS["several.py"])
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "several.py"]
    done = subprocess.run(launch, cwd=folder, capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
    answer = run(SCRIPTS["resume.py"])
    assert "resumes at step" in answer["said"], answer


def test_readme_shows_the_trainers_first(server, run):
    readme = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
    script, loading = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert readme.index(script) < readme.index("```yaml")
    assert len(script.splitlines()) <= 30
    names = ["expand_model(", "PostPretrainTrainer(", "PostPretrainConfig(", "processing_class=", "train()"]
    for name in [*names, "fit_gates(", "average_experts(", "save_pretrained(", "push_to_hub("]:
        assert name in re.sub(r"\(\n +", "(", script)
    answer = run(f"{quick(script)}\nassert model.config.language_gate\n{loading}\nassert model.config.language_gate")
    assert "error" not in answer, answer
    pushed = server.files("me/qwen-el")
    assert {"model.safetensors", "modeling_layer_moe.py", "tokenizer.json", "README.md"} <= set(pushed)

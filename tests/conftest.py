"""Fixtures: tiny backbones, real text where it is at hand, and a fresh interpreter without the package."""

import copy
import gc
import json
import multiprocessing
import os
import runpy
import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from multiprocessing import forkserver
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import accelerate.utils.imports
import accelerate.utils.memory
import datasets
import pytest
import torch
import transformers.dynamic_module_utils as code_files
import typer.testing
import yaml
from accelerate.commands.launch import launch_command, launch_command_parser
from hub_server import Client, HubServer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch.distributed import TCPStore
from torch.multiprocessing import start_processes
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from typer.main import get_command
from typer.testing import CliRunner
from xdist.scheduler import LoadScopeScheduling
from zygote import Child, Zygote

from hf_moe_expand import cli
from hf_moe_expand.checkpoint.reader import CheckpointReader
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.core.schema import read
from hf_moe_expand.data.anchors import shipped_anchors
from hf_moe_expand.modeling import auto_class
from hf_moe_expand.stages.config import StageConfig
from hf_moe_expand.trainers.router_losses import CHECKPOINTING

HERE = Path(__file__).resolve().parent
# Else each training parses the metadata of packages twenty times, and each command line builds all commands anew.
accelerate.utils.imports._is_package_available = cache(accelerate.utils.imports._is_package_available)
# Nor does each training collect the garbage of all modules: the interpreter has its own turns.
accelerate.utils.memory.gc = SimpleNamespace(collect=lambda: None)
# A checkpoint's code is read anew only where its file has changed.
_imports = cache(lambda file, written, read=code_files.get_relative_imports: read(file))
code_files.get_relative_imports = lambda file: _imports(file, os.stat(file).st_mtime_ns)
_built = cache(lambda app, commands: get_command(app))
typer.testing._get_command = lambda app: _built(app, len(app.registered_commands))
# One thread here and in the processes that tests start: with more than there are cores they wait for one another.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
# Else products of matrices may depend on where in memory they lie, and two copies of a model lie at different places.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")
# Files of tests lie in memory, where there is enough: a checkpoint that is written waits for a disk, up to seconds.
IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 4 << 30 else None
if IN_MEMORY:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", IN_MEMORY)
# Real text lies outside the repository: tests that need it skip, with this reason, where it is absent.
DATA = Path(os.environ.get("HF_MOE_EXPAND_DATA", HERE.parents[1] / "shared" / "data"))
TABLES = yaml.safe_load((HERE / "tables.yaml").read_text("utf-8"))  # of plain data, each under its name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no GPU is at hand (`make gpu` needs one)"))
    # Files take longer than forms: at the end, no process waits long for another one.
    items.sort(key=lambda item: item.path.parent.name == "matrix")


class ByFileOrForm(LoadScopeScheduling):
    """A process runs a whole file, or a whole form of the matrix: it makes once what their tests share."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.rpartition(":")[0] if "::test_cell[" in nodeid else nodeid.partition("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFileOrForm:
    return ByFileOrForm(config, log)


def pytest_report_header() -> str:
    return f"backbones: a sixth, chosen by SEED={os.environ.get('SEED', 0)}"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    properties = (pair for report in terminalreporter.getreports("passed") for pair in report.user_properties)
    if cells := Counter(value for name, value in properties if name == "cell"):
        terminalreporter.write_line(f"matrix: {cells['ran']} cells ran, {cells['refused']} were refused")


@pytest.fixture(autouse=True, scope="module")
def quick_garbage_collection():
    """Excludes all imported modules from garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def given_anchors_alone():
    """No anchors of the package's own beside those that a test gives."""
    with patch("hf_moe_expand.analysis.gating.shipped_anchors", lambda leave_out: {}):
        yield


@pytest.fixture
def quick_gates(monkeypatch):
    """Gates from a tenth of the package's anchors, 300 tokens of each and a few iterations."""
    from hf_moe_expand.analysis import gate_fit, gate_text, gating

    few = lambda **given: dict(list(shipped_anchors(**given).items())[::10])  # noqa: E731
    little = lambda texts, tokenizer, tokens, block: gate_text.gate_examples(  # noqa: E731
        texts, tokenizer, min(tokens, 300), block
    )
    monkeypatch.setattr(gating, "shipped_anchors", few)
    monkeypatch.setattr(gating, "gate_examples", little)
    monkeypatch.setattr(gate_fit, "ITERATIONS", 4)


# The zero byte, as byte-level tokenizers write it.
BEGIN = sorted(pre_tokenizers.ByteLevel.alphabet()).index("\N{LATIN CAPITAL LETTER A WITH MACRON}")
VOCABULARY = {"vocab_size": 257, "pad_token_id": 256, "bos_token_id": None, "eos_token_id": 256}
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
# Backbones whose configuration has names of its own.
OTHER_SIZES = {
    "bloom": {"hidden_size": 32, "n_layer": 3, "n_head": 4},
    "falcon": {"hidden_size": 32, "ffn_hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4},
    "gemma3n_text": {
        **SIZES, "intermediate_size": [48, 64, 48], "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 257, "num_kv_shared_layers": 0,
        "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 3, "sliding_window": 16,
    },
    "gpt2": {"n_embd": 32, "n_inner": 48, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "gpt_neo": {
        "hidden_size": 32, "intermediate_size": 48, "num_layers": 3, "num_heads": 4, "max_position_embeddings": 64,
        "attention_types": [[["global", "local", "global"], 1]], "window_size": 8,
    },
    "gpt_neox": {name: size for name, size in SIZES.items() if name not in ("num_key_value_heads", "head_dim")},
    "gptj": {"n_embd": 32, "n_inner": 48, "n_layer": 3, "n_head": 4, "n_positions": 64, "rotary_dim": 4},
    "lfm2": {**SIZES, "block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention", "conv"]},
    "mpt": {"d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 64, "expansion_ratio": 2},
    "opt": {
        "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "max_position_embeddings": 64, "word_embed_proj_dim": 32, "dropout": 0.0,
    },
    "qwen3_5_text": {
        **SIZES, "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    },
    "starcoder2": {**SIZES, "sliding_window": 16},
}  # fmt: skip


def tiny_config(backbone: str, **changes):
    """A configuration with three layers and 257 tokens."""
    return AutoConfig.for_model(backbone, **{**VOCABULARY, **OTHER_SIZES.get(backbone, SIZES), **changes})


def tiny_dense(backbone: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes):
    """A dense model with random weights, none of them special (biases and norms too)."""
    torch.manual_seed(seed)
    return shaken(AutoModelForCausalLM.from_config(tiny_config(backbone, **changes), dtype=dtype).eval())


@torch.no_grad()
def shaken(model, scale=0.1):
    """The model, whose parameters have moved at random."""
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * scale)
    return model


CHAT = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"


def byte_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """256 bytes and an end-of-text token, with a chat template or none."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)} | {"<end>": 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    given = {"chat_template": template} if template else {}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>", **given)


def beginning_tokenizer() -> PreTrainedTokenizerFast:
    """`byte_tokenizer`, but the zero byte is a begin-of-text token, which it puts before every text."""
    tokenizer = byte_tokenizer()
    begin = tokenizer.convert_ids_to_tokens(BEGIN)
    backend = tokenizer.backend_tokenizer
    backend.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, BEGIN)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=begin, eos_token=tokenizer.eos_token, pad_token=tokenizer.pad_token
    )


# Of dense checkpoints: where each lies, and the state of the random numbers right after it was made.
_MADE: dict[str, tuple[Path, torch.Tensor]] = {}
_PLACE = TemporaryDirectory(dir=IN_MEMORY)
# Of text that is read.
datasets.config.HF_DATASETS_CACHE = Path(os.environ.setdefault("HF_DATASETS_CACHE", f"{_PLACE.name}/datasets"))


def save_dense(folder: Path, backbone: str = "qwen2", **changes) -> Path:
    """A dense checkpoint with a tokenizer, as a user would bring it. It is made once, and copied."""
    key = f"{backbone} {changes}"
    if key not in _MADE:
        place = Path(_PLACE.name, str(len(_MADE)))
        tiny_dense(backbone, **changes).save_pretrained(place)
        byte_tokenizer().save_pretrained(place)
        _MADE[key] = place, torch.get_rng_state()
    place, state = _MADE[key]
    torch.set_rng_state(state)
    return Path(shutil.copytree(place, folder, copy_function=shutil.copyfile, dirs_exist_ok=True))


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    """The checkpoint of `save_dense`, which no test changes."""
    return save_dense(tmp_path_factory.mktemp("session") / "base")


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def tensors(folder) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors by the names in its files."""
    reader = CheckpointReader(folder)
    return {name: reader.tensor(name) for name in reader.tensors}


@torch.no_grad()
def moved(model, seed=2, scale=0.3):
    """A copy whose new experts, routers, classifiers and gates have changed."""
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    for ffn in model.expanded_ffns().values():
        for module in (*ffn.experts[1:], *ffn.scorers):
            for parameter in () if module is None else module.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    return model


def move(folder: Path, out: Path | None = None, seed=2) -> Path:
    """The checkpoint, or a copy of it, after something like training."""
    out = shutil.copytree(folder, out) if out else folder
    moved(auto_class(AutoConfig.from_pretrained(out)).from_pretrained(out, dtype="auto"), seed).save_pretrained(out)
    return out


class StopAt(TrainerCallback):
    """Kills the process's work after a step, as a time limit would."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


@contextmanager
def interrupted(step: int, kind: type[StageConfig] = StageConfig, callback: TrainerCallback | None = None):
    """Inside, trainings of stages end after this step, or have another callback."""
    made = kind.make_trainer

    def make(*arguments):
        trainer = made(*arguments)
        trainer.add_callback(callback or StopAt(step))
        return trainer

    with patch.object(kind, "make_trainer", make):
        yield


def write_texts(path: Path, texts) -> Path:
    path.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts), "utf-8")
    return path


def keywords(stage: type, **given):
    """A stage's keywords, as a recipe's file has them."""
    return read(stage, given)


def invoke(*arguments) -> str:
    """Runs the command line in this process; returns what it prints."""
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def verb(*words):
    """The command of the command line with this name, such as `plan`, `dmoe`, or the whole of it."""
    command, context = typer.main.get_command(cli.app), None
    for word in words:
        context = typer.Context(command, parent=context, info_name=command.name)
        command = command.get_command(context, word)
    return command


def refused(call, *given, says=".", raises=InputError, **keywords) -> str:
    """The one line with which a call is refused."""
    with pytest.raises(raises, match=says) as error:
        call(*given, **keywords)
    assert "\n" not in str(error.value)
    return str(error.value)


def checkpointed(wanted: bool = True, reentrant: bool = False) -> dict:
    """Gradient checkpointing in the words of the `TrainingArguments` at hand."""
    return {CHECKPOINTING: wanted, f"{CHECKPOINTING}_kwargs": {"use_reentrant": reentrant}}


def enable_checkpointing(model, reentrant: bool = False) -> None:
    getattr(model, f"{CHECKPOINTING}_enable")({"use_reentrant": reentrant})


def load_offloaded(folder: Path):
    """A float32 checkpoint, two thirds of it on disk."""
    sizes = {"cpu": sum(file.stat().st_size for file in folder.glob("*.safetensors")) // 3}
    model = AutoModelForCausalLM.from_pretrained(
        folder, device_map="auto", max_memory=sizes, offload_folder=folder / "offload"
    ).eval()
    assert "disk" in model.hf_device_map.values()
    return model


_PROCESSES = Zygote("torch", "transformers.trainer", "transformers.models.qwen2.modeling_qwen2", "datasets")


def run_python(code: str, *arguments: str, cwd: str | Path = "/") -> str:
    """Runs code in a new process, which has imported nothing of ours; returns what it prints."""
    child = start_python(code, *arguments, cwd=cwd)
    said, errors = child.communicate()
    assert child.returncode == 0, errors
    return said


def start_python(code: str, *arguments: str, cwd: str | Path = "/", timeout: int = 900) -> Child:
    """Starts code as `run_python` does; the caller waits for its end."""
    return _PROCESSES.start(f"import sys\n{code}", *arguments, cwd=cwd, timeout=timeout)


def run_fresh(code: str, *arguments: str, cwd: str | Path = "/") -> str:
    """As `run_python`, where `hf_moe_expand` cannot be imported."""
    return run_python(f"sys.modules['hf_moe_expand'] = None\n{code}", *arguments, cwd=cwd)


def accelerates_environment(configuration: Path, count: int = 2) -> dict[str, str]:
    """The variables that `accelerate launch` sets for its ranks."""
    found: dict[str, str] = {}
    options = ["--config_file", str(configuration), "--num_processes", str(count), "--main_process_port", "0"]
    with patch("torch.distributed.run.run", lambda arguments: found.update(os.environ)):
        launch_command(launch_command_parser().parse_args([*options, "script.py"]))
    return {name: value for name, value in found.items() if os.environ.get(name) != value}


_FOR_RANKS_ALONE: set[int] = set()  # processes that have imported what ranks need; they end when no rank is left
# What ranks import, before they are forked.
FOR_RANKS = ["ranks", "one_sft_step", "hf_moe_expand.stages.run", *(["deepspeed"] if find_spec("deepspeed") else [])]


def fork_ranks(script: str, *arguments: str, count: int = 2, environment: Mapping[str, str] = {}) -> None:
    """Runs a script of this folder, or a module, on forked ranks; rank 0 prints to the file `$SAID.0`."""
    started, _ = start_ranks(script, *arguments, count=count, environment=environment)
    deadline = time.monotonic() + 600
    while not started.join(timeout=1):
        if time.monotonic() > deadline:
            for process in started.processes:
                process.kill()
            raise TimeoutError(f"{script}: the ranks hang.")


def _run_rank(rank: int, script: str, arguments: tuple, count: int, port: int, environment: dict[str, str]) -> None:
    """Runs a script of this folder, or a module, as one of the ranks, which meet at the store on this port."""
    gc.freeze()  # what was imported before the fork
    multiprocessing.set_start_method("fork", force=True)  # as in a launched process; else workers import all anew
    os.environ.update(environment)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True",
    )  # fmt: skip
    sys.argv = [script, *arguments]
    if said := os.environ.get("SAID"):
        sys.stdout = open(f"{said}.{rank}", "w", 1, "utf-8")  # noqa: SIM115
    if script.endswith(".py"):
        runpy.run_path(str(HERE / script), run_name="__main__")
    else:
        runpy.run_module(script, run_name="__main__")


def start_ranks(script: str, *arguments: str, count: int = 2, environment: Mapping[str, str] = {}) -> tuple:
    """As `fork_ranks`, which the caller waits for: their processes, and the store at which they meet."""
    server = forkserver._forkserver
    if server._forkserver_pid is None or server._forkserver_pid not in _FOR_RANKS_ALONE:
        server._stop()  # a benchmark's, with other modules, or none
        multiprocessing.set_forkserver_preload(FOR_RANKS)
        with patch.dict(os.environ, PYTHONPATH=str(HERE)):
            forkserver.ensure_running()
        _FOR_RANKS_ALONE.add(server._forkserver_pid)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    options = {"nprocs": count, "start_method": "forkserver", "join": False}
    return start_processes(_run_rank, (script, arguments, count, store.port, dict(environment)), **options), store


# One backbone of each kind of FFN call, of head and of key names. All architectures that are proven stand in
# matrix/test_backbones.py.
COMMON_BACKBONES = ("bloom", "gemma3_text", "gpt_neox", "llama", "qwen2")
BACKBONE_NAMES = sorted({
    *COMMON_BACKBONES, *OTHER_SIZES, "cohere", "gemma", "gemma2", "granite", "mistral", "olmo2", "phi3", "qwen3",
    "smollm3", "stablelm",
})  # fmt: skip


@pytest.fixture(params=COMMON_BACKBONES)
def backbone(request) -> str:
    return request.param


ADDED = {"expert_kind": "added", "expert_width": 16}


@pytest.fixture
def published() -> dict:
    figures = DATA.parent / "reference" / "published_figures.json"
    if not figures.is_file():
        pytest.skip(f"published figures are not at {figures}")
    return json.loads(figures.read_text("utf-8"))


@pytest.fixture
def help_text():
    """`help_text("el", "test", 20)`: so many real documents."""
    folder = DATA / "help"
    if not folder.is_dir():
        pytest.skip(f"real text is not at {folder}; set HF_MOE_EXPAND_DATA to its parent")

    def read(language: str, split: str, count: int) -> list[str]:
        with open(folder / f"{language}.{split}.jsonl", encoding="utf-8") as file:
            return [json.loads(line)["text"] for line, _ in zip(file, range(count), strict=False)]

    return read


@pytest.fixture(scope="module")
def server():
    """A hub on localhost (`hub_server.py`)."""
    with HubServer() as running:
        yield running


@pytest.fixture(scope="module")
def client(server, tmp_path_factory):
    """A process that talks to it, with a home of its own."""
    client = Client(server.environment(tmp_path_factory.mktemp("home")))
    yield client
    client.stop()

"""Compares this package with other tools on the same machine, each in an environment of its own.

    python benchmarks/peers.py --environments runs/peers --out peers.md --json peers.json

- Building a mixture of experts, all of them copies of the dense FFN: `hf-moe-expand expand`, mergekit's `mergekit-moe`,
  and plain transformers (load, copy, save). A whole command is measured, imports included, from a cold page cache until
  its output is on the disk. Then the output is loaded in transformers and its logits are compared with the base's.
- A training step: full fine-tuning and PEFT's LoRA under `Trainer`, and the stages of this package, with FFN experts
  and with LoRA experts.

Bases are Llamas with random weights. The tools run in turn, `--repeats` rounds; times are those of the fastest round.
Peak memory is resident memory, pages of mapped files counted; in the second table without that of the imports. mergekit
and PEFT are installed from the package index; a tool that cannot be installed is skipped, with the reason. Linux only.

`peers.py step` and `peers.py upcycle` are what it measures. They run in the environment of each tool, so this file
imports where it is used what an environment may lack, and what is not to count.
"""

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from tables import markdown_table
from timing import header, in_own_process, parser, reset_peak, resident_bytes
from transformers import AutoModelForCausalLM

DISK_VOCABULARY = 32000
SELF = str(Path(__file__).resolve())
BUILDERS = ("hf-moe-expand expand", "mergekit-moe", "transformers by hand")
# The cases of `step`.
STEPS = {
    "full": "full fine-tuning",
    "peft": "PEFT LoRA",
    "post-pretrain-ffn": "post-pretrain, FFN experts",
    "post-pretrain-lora": "post-pretrain, LoRA experts",
    "review-ffn": "review, FFN experts",
    "review-lora": "review, LoRA experts",
}
# What pip installs for each tool, whose row is named so.
PACKAGES = {BUILDERS[1]: ("mergekit",), STEPS["peft"]: ("peft", "transformers", "datasets")}

# Stage and expert kind of our cases.
OURS = {case: tuple(case.rsplit("-", 1)) for case in STEPS if case not in ("full", "peft")}
_INSTALLED = ".installed"
IMPORTS = "importing torch and transformers alone"

# Runs a command in a small process, since a process's peak memory is at least that of its parent.
_LAUNCHER = """
import json, os, sys, time
start = time.perf_counter()
child = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)
_, status, usage = os.wait4(child, 0)
print(json.dumps([os.waitstatus_to_exitcode(status), time.perf_counter() - start, usage.ru_maxrss << 10]))
"""


def write_base(folder: Path, vocabulary: int, hidden: int, layers: int, dtype: torch.dtype, seed: int) -> int:
    """Writes a Llama with random weights and a tokenizer of bytes; returns its number of parameters."""
    from models import ffn_size
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    heads = max(4, hidden // 64)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=ffn_size(hidden),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        dtype=dtype,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {"<end>": 0} | {character: number for number, character in enumerate(alphabet, start=1)}
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"bos_token": "<end>", "eos_token": "<end>", "pad_token": "<end>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return model.num_parameters()


def build_commands(folder: Path, options: argparse.Namespace, mergekit: Path | None) -> dict[str, list[str]]:
    """The command of each builder, which reads `base` and writes `out` in the folder."""
    from models import uniform_plan

    plan, config, base, out = (str(folder / name) for name in ("plan.json", "moe.yaml", "base", "out"))
    uniform_plan(options.disk_layers, options.experts).save(plan)
    settings = {"base_model": base, "gate_mode": "random", "dtype": "bfloat16", "experts_per_token": 2}
    experts = [{"source_model": base} for _ in range(options.experts)]
    Path(config).write_text(yaml.safe_dump({**settings, "experts": experts}), "utf-8")
    python = sys.executable
    found = {BUILDERS[0]: [python, "-m", "hf_moe_expand", "expand", base, out, "--plan", plan]}
    if mergekit:
        found[BUILDERS[1]] = [str(mergekit.with_name("mergekit-moe")), config, out]
    found[BUILDERS[2]] = [python, SELF, "upcycle", base, out, str(options.experts)]
    return found


def launch(command: list[str]) -> tuple[float, int]:
    """Seconds and peak bytes of a command.

    Raises:
        RuntimeError: the command fails; the message ends with what it said.
    """
    start = [sys.executable, "-S", "-c", _LAUNCHER, *command]
    done = subprocess.run(start, capture_output=True, text=True, check=True)
    code, seconds, peak = json.loads(done.stdout.splitlines()[-1])
    if code:
        raise RuntimeError(f"{' '.join(command)} ended with {code}: {done.stderr[-2000:]}")
    return seconds, peak


def compare(base: Path, out: Path, seed: int) -> dict[str, Any]:
    """How the output of a builder loads in transformers, and the largest difference of its logits from the base's.

    Both compute in float32. In 64 random tokens every layer's FFN runs.
    """
    dense = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    ids = torch.randint(1, 257, (1, 64), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        expected = dense(ids).logits
        del dense
        try:
            options = {"dtype": torch.float32, "output_loading_info": True}
            model, info = AutoModelForCausalLM.from_pretrained(out, **options)
        except Exception as error:  # the library raises many types
            return {"loads": f"no: {type(error).__name__}: {error}"[:300], "difference": None}
        difference = (model.eval()(ids).logits - expected).abs().max().item()
    wrong = [f"{len(info[kind])} tensors {word}" for kind, word in _PROBLEMS.items() if info.get(kind)]
    return {"loads": ", ".join(wrong) or "yes", "difference": difference, "largest": expected.abs().max().item()}


_PROBLEMS = {"missing_keys": "missing", "unexpected_keys": "not used", "mismatched_keys": "of another shape"}


def keep(figures: dict[str, Any], seconds: float, peak: int) -> None:
    figures["seconds"].append(seconds)
    figures["peak"].append(peak)


def measure_builders(folder: Path, options: argparse.Namespace, mergekit: Path | None) -> tuple[int, dict[str, dict]]:
    """Parameters of the base, and each builder's figures."""
    from expand_io import flush

    base, out = folder / "base", folder / "out"
    shape = (DISK_VOCABULARY, options.disk_hidden, options.disk_layers)
    size = in_own_process(write_base, base, *shape, torch.bfloat16, options.seed)
    commands = build_commands(folder, options, mergekit)
    imports = [sys.executable, "-c", "import torch; from transformers import AutoModelForCausalLM"]
    found: dict[str, dict] = {name: {"seconds": [], "peak": []} for name in (*commands, IMPORTS)}
    for turn in range(options.repeats):
        keep(found[IMPORTS], *launch(imports))
        for name, command in commands.items():
            flush(base, drop=True)
            seconds, peak = launch(command)
            start = perf_counter()
            flush(out)
            keep(found[name], seconds + perf_counter() - start, peak)
            if not turn:
                found[name]["bytes"] = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
                found[name] |= in_own_process(compare, base, out, options.seed)
            shutil.rmtree(out)
    return size, found


def measure_steps(folder: Path, options: argparse.Namespace, peft: Path | None) -> tuple[int, dict[str, dict]]:
    """Parameters of the base, and the figures of each case of a training step."""
    base = folder / "small"
    shape = (options.vocabulary, options.hidden, options.layers)
    size = in_own_process(write_base, base, *shape, torch.float32, options.seed)
    pythons = {case: peft if case == "peft" else Path(sys.executable) for case in STEPS}
    keys = ("batch", "block", "steps", "rank", "dtype", "seed", "trained_experts")
    given = json.dumps({key: getattr(options, key) for key in keys})
    found: dict[str, dict] = {case: {"seconds": [], "peak": []} for case, python in pythons.items() if python}
    for _ in range(options.repeats):
        for case in found:
            command = [str(pythons[case]), SELF, "step", case, str(base), given]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
            said = json.loads(done.stdout.splitlines()[-1])
            keep(found[case], said.pop("seconds"), said.pop("peak"))
            found[case] |= said
    return size, {STEPS[case]: figures for case, figures in found.items()}


def builder_rows(found: dict[str, dict], skipped: dict[str, str]) -> list[list[str]]:
    rows = []
    for name in (*BUILDERS, IMPORTS):
        if name not in found:
            rows.append([name, *"––––", f"skipped: {skipped[name]}", "–"])
            continue
        figures = found[name]
        seconds, peak = f"{min(figures['seconds']):.1f}", f"{max(figures['peak']) / 2**20:,.0f}"
        if name == IMPORTS:
            rows.append([name, seconds, "–", peak, *"–––"])
            continue
        ratio = min(figures["seconds"]) / min(found[BUILDERS[0]]["seconds"])
        difference = (
            "–" if figures["difference"] is None else f"{figures['difference']:.2g} of {figures['largest']:.2g}"
        )
        size = f"{figures['bytes'] / 2**30:.2f}"
        rows.append([name, seconds, f"{ratio:.2f}", peak, size, figures["loads"], difference])
    return rows


def step_rows(found: dict[str, dict], skipped: dict[str, str]) -> list[list[str]]:
    rows, base = [], found[STEPS["full"]]
    for name in STEPS.values():
        if name not in found:
            rows.append([f"{name}, skipped: {skipped[name]}", *"––––––"])
            continue
        figures = found[name]
        ratio = min(figures["seconds"]) / min(base["seconds"])
        peak = median(figures["peak"])
        rows.append(
            [
                name,
                f"{figures['parameters']:,}",
                f"{figures['trained']:,}",
                f"{1000 * min(figures['seconds']):,.0f}",
                f"{ratio:.2f}",
                f"{peak / 2**20:,.0f}",
                f"{peak / median(base['peak']):.2f}",
            ]
        )
    return rows


def compare_all(arguments: list[str] | None) -> None:
    options_parser = parser(__doc__, repeats=3, on_device=False)
    add = options_parser.add_argument
    add("--environments", type=Path, default=Path("runs/peers"), help="folder of the tools' environments (%(default)s)")
    add("--scratch", type=Path, help="folder on the disk to measure; its files stay unchanged")
    add("--json", type=Path, help="also write all figures here")
    add("--experts", type=int, default=4, help="experts of each layer, expert 0 counted, when building (%(default)s)")
    add("--disk-hidden", type=int, default=1536, help="hidden size of the base to expand (%(default)s)")
    add("--disk-layers", type=int, default=16, help="decoder layers of the base to expand (%(default)s)")
    add("--hidden", type=int, default=512, help="hidden size of the base to train (%(default)s)")
    add("--layers", type=int, default=8, help="decoder layers of the base to train (%(default)s)")
    add("--vocabulary", type=int, default=8192, help="vocabulary size of the base to train (%(default)s)")
    add("--trained-experts", type=int, default=2, help="experts of each layer in training (%(default)s)")
    add("--rank", type=int, default=16, help="rank of LoRA (%(default)s)")
    add("--batch", type=int, default=8, help="blocks in a step (%(default)s)")
    add("--block", type=int, default=256, help="tokens in a block (%(default)s)")
    add("--steps", type=int, default=4, help="steps a round; the first is not timed (%(default)s)")
    add("--dtype", choices=["autocast", "fp32"], default="autocast", help="of training (%(default)s)")
    options = options_parser.parse_args(arguments)
    pythons: dict[str, Path | None] = {}
    skipped: dict[str, str] = {}
    for name, packages in PACKAGES.items():
        try:
            pythons[name] = environment(options.environments / packages[0], *packages)
        except UnavailableError as error:
            pythons[name], skipped[name] = None, str(error)
    versions = {name: installed(python, PACKAGES[name][0]) for name, python in pythons.items() if python}
    with TemporaryDirectory(dir=options.scratch, prefix="peers-") as scratch:
        disk_size, built = measure_builders(Path(scratch), options, pythons[BUILDERS[1]])
        size, stepped = measure_steps(Path(scratch), options, pythons[STEPS["peft"]])
    counts = f"{options.experts} experts in each of {options.disk_layers} layers"
    build = f"Llama of {disk_size:,} parameters (bfloat16) to {counts}"
    step = (
        f"Training step, Llama of {size:,} parameters, {options.trained_experts} experts, LoRA rank {options.rank}, "
        f"{options.batch} x {options.block} tokens, {options.dtype}"
    )
    text = "\n".join(
        [
            header(build, options),
            *(f"{name}: {version}" for name, version in versions.items()),
            "",
            markdown_table(BUILD_HEAD, builder_rows(built, skipped)),
            "",
            header(step, options),
            "",
            markdown_table(STEP_HEAD, step_rows(stepped, skipped)),
        ]
    )
    print(text)
    if options.out:
        options.out.write_text(text + "\n", "utf-8")
    if options.json:
        kept = {"build": build, "builders": built, "step": step, "steps": stepped}
        everything = {**kept, "versions": versions, "skipped": skipped}
        options.json.write_text(json.dumps(everything, indent=2) + "\n", "utf-8")


BUILD_HEAD = ["way", "seconds", "time", "peak MiB", "GiB written", "loads", "logits differ by"]
STEP_HEAD = ["step", "parameters", "trained", "ms", "time", "peak MiB", "memory"]


def installed(python: Path, package: str) -> str:
    """Versions in an environment: the package, transformers and torch."""
    names = dict.fromkeys((package, "transformers", "torch"))
    code = f"from importlib.metadata import version; print(', '.join(n + ' ' + version(n) for n in {[*names]}))"
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()


class UnavailableError(Exception):
    """A tool that cannot be installed. The message is the reason."""


def environment(folder: Path, *packages: str) -> Path:
    """The Python of an environment with the packages and this environment's version of torch; made once.

    Packages come from the index that the user's pip is set up for. Nothing is installed where torch would bring CUDA
    libraries, several gigabytes that a measurement on a CPU does not use.

    Raises:
        UnavailableError: pip does not find the packages or a common version of what they need, or torch would bring
            CUDA libraries.
    """
    python = folder.absolute() / "bin" / "python"
    if (folder / _INSTALLED).exists():
        return python
    # Not the local version, such as 2.13.0+cpu, which no public index has.
    wanted = [*packages, f"torch=={torch.__version__.partition('+')[0]}"]
    _run(sys.executable, "-m", "venv", "--clear", str(folder))
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    cuda = [name for name in planned(_run(*pip, "--dry-run", "--report=-", *wanted)) if name.startswith("nvidia-")]
    if cuda:
        raise UnavailableError(f"pip would install {len(cuda)} CUDA packages, such as {cuda[0]}")
    _run(*pip, *wanted)
    (folder / _INSTALLED).touch()
    return python


def planned(report: str) -> list[str]:
    """Names of the packages that pip would install, from its report."""
    return sorted(entry["metadata"]["name"] for entry in json.loads(report)["install"])


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        why = next((line for line in said if line.startswith("ERROR: ")), said[-1] if said else "no reason given")
        raise UnavailableError(why.removeprefix("ERROR: "))
    return done.stdout


def import_tool(case: str) -> Any:
    """The tool's module, imported before memory is measured; transformers itself for full fine-tuning."""
    tool = import_module({"full": "transformers", "peft": "peft"}.get(case, "hf_moe_expand"))
    if case in OURS:  # the package imports these on first use
        _ = tool.Plan, tool.expand_model, tool.PostPretrainTrainer, tool.ReviewTrainer
    return tool


def trainer_of(case: str, dense: Any, tool: Any, options: SimpleNamespace) -> tuple[type, type, Any, dict[str, Any]]:
    """The classes of a case's trainer and of its settings, its model, and its arguments beside those that all cases
    share."""
    from transformers import Trainer, TrainingArguments

    if case == "full":
        return Trainer, TrainingArguments, dense, {}
    if case == "peft":
        # PEFT's usual choice: every linear layer but the output head, scaled by alpha / rank = 2.
        config = tool.LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear")
        return Trainer, TrainingArguments, tool.get_peft_model(dense, config), {}
    stage, kind = OURS[case]
    layers = dense.config.num_hidden_layers
    plan = tool.Plan("moe-lpr", [options.trained_experts] * layers, old=["en"], new=["el"])
    lora = {"expert_kind": "lora", "lora_rank": options.rank, "lora_alpha": 2 * options.rank} if kind == "lora" else {}
    model = tool.expand_model(dense, plan, seed=options.seed, **lora)
    name = "PostPretrain" if stage == "post-pretrain" else "Review"
    return getattr(tool, f"{name}Trainer"), getattr(tool, f"{name}Config"), model, {"language_classes": [0, 1]}


def blocks(options: SimpleNamespace, vocabulary: int) -> Any:
    """A batch of random tokens for each step, a language a block."""
    from datasets import Dataset

    generator = torch.Generator().manual_seed(options.seed)
    ids = torch.randint(1, vocabulary, (options.batch * options.steps, options.block), generator=generator)
    languages = torch.randint(0, 2, (len(ids), 1), generator=generator).expand(ids.shape)
    return Dataset.from_dict({"input_ids": ids.tolist(), "labels": ids.tolist(), "language_ids": languages.tolist()})


def measured_step(case: str, base: str, options: SimpleNamespace) -> dict[str, Any]:
    """Median seconds of the steps after the first, peak bytes above those of the imports, and parameters.

    The loop, the text and the measuring are the same in every case; `full` and `peft` import nothing of this package.
    """
    import datasets  # noqa: F401
    from transformers import TrainerCallback, default_data_collator

    begun: list[float] = []
    seconds: list[float] = []

    class StepTimer(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            begun.append(perf_counter())

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seconds.append(perf_counter() - begun[-1])

    tool = import_tool(case)
    imports = resident_bytes()
    dense = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    trainer_class, settings, model, arguments = trainer_of(case, dense, tool, options)
    data = blocks(options, dense.config.vocab_size)
    with TemporaryDirectory() as folder:
        training = settings(
            output_dir=folder,
            per_device_train_batch_size=options.batch,
            max_steps=options.steps,
            learning_rate=5e-5,
            bf16=options.dtype == "autocast",
            use_cpu=True,
            seed=options.seed,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        if case not in OURS:
            data = data.remove_columns("language_ids")
        reset_peak()
        trainer_class(
            model, args=training, train_dataset=data, data_collator=default_data_collator,
            callbacks=[StepTimer()], **arguments,
        ).train()  # fmt: skip
    return {
        "seconds": median(seconds[1:]),
        "peak": resident_bytes(peak=True) - imports,
        "parameters": sum(p.numel() for p in model.parameters()),
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "tool": f"{tool.__name__} {tool.__version__}",
    }


def upcycle(base: str, out: str, experts: int) -> None:
    """By hand in plain transformers: loads a Llama, copies its FFNs into Mixtral's experts, saves."""
    from transformers import MixtralConfig, MixtralForCausalLM

    dense = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    own = ("architectures", "model_type")
    fields = {name: value for name, value in dense.config.to_dict().items() if name not in own}
    config = MixtralConfig(**fields, num_local_experts=experts, num_experts_per_tok=2)
    torch.set_default_dtype(dense.dtype)
    model = MixtralForCausalLM(config)
    weights = dense.state_dict()
    with torch.no_grad():
        for name, target in model.state_dict().items():
            layer, is_ffn, part = name.partition(".mlp.")
            if not is_ffn:
                target.copy_(weights[name])
            elif part == "experts.gate_up_proj":
                parts = [weights[f"{layer}.mlp.{which}_proj.weight"] for which in ("gate", "up")]
                target.copy_(torch.cat(parts).expand_as(target))
            elif part == "experts.down_proj":
                target.copy_(weights[f"{layer}.mlp.down_proj.weight"].expand_as(target))
    model.save_pretrained(out)


def main(arguments: list[str] | None = None) -> None:
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["upcycle"]:
        upcycle(words[1], words[2], int(words[3]))
    elif words[:1] == ["step"]:
        with contextlib.redirect_stdout(sys.stderr):  # the trainers print
            found = measured_step(words[1], words[2], SimpleNamespace(**json.loads(words[3])))
        print(json.dumps(found))
    else:
        compare_all(words)


if __name__ == "__main__":
    main()

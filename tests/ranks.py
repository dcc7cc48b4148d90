"""What test_distributed.py runs on two ranks, all in one launch: `ranks.py FOLDER CHECK...` leaves FOLDER/CHECK.pt."""

import json
import os
import sys
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from accelerate.state import DistributedType, PartialState
from conftest import StopAt, interrupted
from gated_models import CODES, GREEDY, KINDS, gated_model, tokens
from one_step import build, rows, train
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback
from transformers.distributed import DistributedConfig
from transformers.utils.logging import disable_progress_bar
from uneven_rows import scores

import hf_moe_expand as moe
from hf_moe_expand.stages import run
from hf_moe_expand.stages.distributed import leave_ranks
from hf_moe_expand.trainers import pieces

# One optimizer step of a stage trainer; `batch` is that of one process alone.
STEPS = {
    "review": {"stage": "review", "prior": 1.0, "classifier": 1.0},
    "post": {"stage": "post", "balance": 1.0, "prior": 0.0, "classifier": 0.0},
    "idle": {"stage": "post", "balance": 1.0, "prior": 0.0, "classifier": 0.0, "halves": True},
    "idle, checkpointing": {
        "stage": "post", "balance": 1.0, "prior": 0.0, "classifier": 0.0, "halves": True, "checkpointing": True
    },
    "everything": {"stage": "post", "balance": 1.0, "prior": 1.0, "classifier": 1.0, "everything": True},
}  # fmt: skip
# With so large an epsilon AdamW's steps follow the gradient smoothly, rounding errors and all.
SPEED = {"learning_rate": 0.3, "optim": "adamw_torch", "adam_epsilon": 0.1, "disable_tqdm": True, "logging_steps": 1}


def model_of(step, backbone="qwen2"):
    """The model before a step. Of `idle` ones each half of the blocks leaves one of experts 1 and 2 without tokens."""
    model = build(backbone, vocab_size=258)  # which two ranks share alike
    if step.startswith("idle"):
        with torch.no_grad():
            embedding = model.get_input_embeddings().weight
            embedding[:, 0] = torch.where(torch.arange(len(embedding)) < 125, 8.0, -8.0)
            embedding[:, 1] = 8.0
            for ffn in model.expanded_ffns().values():
                ffn.router.weight.zero_()
                ffn.router.weight[0, 1] = 1.0
                ffn.router.weight[1, 0] = 0.5
                ffn.router.weight[2, 0] = -0.5
                ffn.router.weight[3:, 1] = -1.0
    return model


def share(tensor):
    """This rank's half of the rows."""
    return tensor[:4] if dist.get_rank() == 0 else tensor[4:]


def saved(folder, name, backbone="qwen2", step="review"):
    """The checkpoint of the model that a step starts from, written by the first rank."""
    path = folder / f"{name}.base"
    if dist.get_rank() == 0:
        model_of(step, backbone).save_pretrained(path)
    dist.barrier()
    return path


def one_step(folder, name, step, ranks, backbone="qwen2", **sharding):
    """The parameters after a step of a stage trainer, where `ranks` of the processes have data of their own."""
    if sharding:
        base = saved(folder, name, backbone, step)
        model = moe.LayerMoEForCausalLM.from_pretrained(base, distributed_config=DistributedConfig(**sharding))
    else:
        model = model_of(step, backbone)
    out = {"model": model, "save": str(folder / name), "batch": 8 // ranks}
    return train(str(folder / f"{name}.run"), **STEPS[step], **out)


def ddp_in_pieces(folder):
    """The loss of some tokens at a time, outside of the wrapped model's forward pass."""
    with patch.object(pieces, "LARGE", 2 * 258), patch.object(pieces, "PIECE", 6 * 258):
        return one_step(folder, "ddp in pieces", "idle", ranks=2)


def evaluation(folder):
    """Every Trainer's loss of rows with labels on very different numbers of tokens."""
    return scores(folder)


def fsdp_native(folder):
    """transformers' own FSDP2, through the stage trainers. Gemma's embeddings are tied to its head."""
    found = {
        step: one_step(folder, f"fsdp {step}", step, ranks=2, fsdp_size=2)
        for step in ("review", "post", "idle, checkpointing", "everything")
    }
    found["tied"] = one_step(folder, "fsdp tied", "post", ranks=2, backbone="gemma3_text", fsdp_size=2)
    try:
        one_step(folder, "fsdp refused", "everything", ranks=2, backbone="gemma3_text", fsdp_size=2)
    except ValueError as error:
        found["refused"] = str(error)
    return found


def tensor_parallel(folder):
    """Both ways to ask for it: logits, what is split, saving. Then the stage trainers."""
    found = {}
    ids, _ = rows()
    for backbone, how in (
        ("qwen2", {"tp_plan": "auto"}),
        ("gemma3_text", {"distributed_config": DistributedConfig(tp_size=2)}),
        ("gpt_neox", {"tp_plan": "auto"}),
    ):
        base = saved(folder, f"tp {backbone}", backbone)
        model, whole = (moe.LayerMoEForCausalLM.from_pretrained(base, **more).eval() for more in (how, {}))
        with torch.no_grad():
            logits = model(ids).logits, whole(ids).logits
        model.save_pretrained(folder / f"tp {backbone}")
        split = [name for name, parameter in model.named_parameters() if hasattr(parameter.data, "placements")]
        found[backbone] = {"logits": logits, "split": split}
    # Accelerate lets tensor parallelism on accelerators only; nothing else keeps it from a CPU.
    ParallelismConfig._validate_accelerator = lambda self, accelerator: None
    for step in ("review", "post", "everything"):
        found[step] = one_step(folder, f"tp {step}", step, ranks=1, tp_size=2)
    return found


def judging(folder):
    """Classes, logits and answers of a model with a gate, shared out in each way, beside those of the whole model."""
    found, ids = {}, tokens(8, 12, seed=3)
    whole = gated_model(**KINDS["exclusive"], vocab_size=258, rule={"begin": 255})
    if dist.get_rank() == 0:
        whole.save_pretrained(folder / "gated")
    dist.barrier()
    load = partial(moe.LayerMoEForCausalLM.from_pretrained, folder / "gated")

    def by_hand():
        model = load()
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        return model

    ways = {
        "ddp": lambda: DistributedDataParallel(load()),
        "by hand": by_hand,
        "fsdp": lambda: load(distributed_config=DistributedConfig(fsdp_size=2)),
        "tp": lambda: load(tp_plan="auto"),
    }
    for way, make in ways.items():
        model, own = make().eval(), ids if way == "tp" else share(ids)
        inner = getattr(model, "module", model)
        with torch.no_grad():
            told = whole(own, languages=[CODES[number] for number in whole.judge(own)]).logits
            found[way] = {
                "classes": (inner.judge(own), whole.judge(own)),
                "logits": (model(own).logits, told),
                "answers": (inner.generate(own, **GREEDY), whole.generate(own, **GREEDY)),
            }
    return found


class DifferentTokens(TrainerCallback):
    """After training: single tokens, other ones on each rank, so that each rank uses other experts; then answers."""

    def on_train_end(self, args, state, control, model, **kwargs):
        model.eval()
        with torch.no_grad():
            mine = range(dist.get_rank(), 60, 2)
            self.logits = torch.cat([model(torch.tensor([[token]])).logits for token in mine])
            ids = share(tokens(8, 12, seed=3))
            self.answers = model.generate(ids, **GREEDY)
            self.classes = model.judge(ids) if model.config.language_gate else None


def stage(folder, name, config, callback=None, start="ffn"):
    """`train_stage` on the texts and an expanded checkpoint that the test has put into the folder."""
    data = {code: moe.LanguageText(code, str(folder / f"{code}.jsonl")) for code in ("en", "el")}
    if isinstance(config, moe.PostPretrainConfig):
        del data["en"]
    watched = interrupted(0, callback=callback) if callback else nullcontext()
    with watched, suppress(*[KeyboardInterrupt] if isinstance(callback, StopAt) else []):
        moe.train_stage(folder / start, folder / name, data, config)


def post_pretraining(per_device, **changes):
    return moe.PostPretrainConfig(block_size=16, **options(per_device, **changes))


def options(per_device, **changes):
    return {**SPEED, "per_device_train_batch_size": per_device, "max_steps": 4, **changes}


def stage_native(folder):
    """`train_stage` on a model that transformers splits; how many weights, and how many files of them."""
    counts, gathered = [], run.whole_weights

    def counted(*arguments):
        weights = gathered(*arguments)
        counts.append((len(weights), len(list(arguments[-1].glob("*.safetensors")))))
        return weights

    with patch.object(run, "whole_weights", counted):
        stage(folder, "native", post_pretraining(2, distributed_config={"fsdp_size": 2}))
        split = options(4, max_steps=2, distributed_config={"tp_size": 2})
        stage(folder, "native tp", moe.ReviewConfig(block_size=16, **split))
    return counts


def dense(folder, name, method, per_device, **changes):
    """Dense training of the base on its text."""
    config = moe.DenseConfig(block_size=16, method=method, **options(per_device, **changes))
    return moe.train_stage(
        folder / "base", folder / name, {"en": moe.LanguageText("en", str(folder / "en.jsonl"))}, config
    )


def adapt(folder, name, per_device, **changes):
    """`adapt_language` of a DMoE checkpoint; one step, before which a router scores an expert and its copy alike."""
    config = moe.AdaptConfig(block_size=16, sample_tokens=200, **options(per_device, max_steps=1, **changes))
    return moe.adapt_language(folder / "dmoe", folder / name, moe.LanguageText("el", str(folder / "el.jsonl")), config)


def streamed(folder):
    """A stage on streamed text, interrupted and gone on with; one that is not; and one that is left interrupted."""
    for name, stops in (("streamed again", [3, None]), ("streamed", [None]), ("streamed left", [3])):
        for stop in stops:
            config = post_pretraining(2, stream=True, save_steps=2)
            stage(folder, name, config, None if stop is None else StopAt(stop))


def adaptation(folder):
    """Two ranks adapt a model to a language, data-parallel."""
    return adapt(folder, "adapted", 2).perplexity


def on_this_machine():
    """Makes accelerate treat this machine's CPU as it treats GPUs, but for the backend."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda self, *rest: ("gloo", DistributedType.MULTI_GPU)
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        import deepspeed

        # Communication through shared memory, which would be compiled first.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def stage_accelerate(folder):
    """`train_stage` under FSDP2 or ZeRO-3, interrupted and gone on with; `DifferentTokens` must not make ranks wait."""
    found = {}
    # Each training has a configuration of its own: DeepSpeed's part of it belongs to one training.
    config = partial(post_pretraining, 1, gradient_accumulation_steps=2, save_steps=2, use_cpu=False)
    for start in ("ffn", "lora", "gate", "adapters"):
        out, used, left = f"trained {start}", DifferentTokens(), []
        if start in ("ffn", "adapters"):
            stage(folder, out, config(), StopAt(3), start)
            left = os.listdir(folder / f"{out}.training")
        stage(folder, out, config(), used, start)
        found[start] = {"left": left, "logits": used.logits, "answers": used.answers, "classes": used.classes}
    for method in ("full", "lora"):
        dense(folder, f"dense {method}", method, 1, gradient_accumulation_steps=2, use_cpu=False)
    return found


if __name__ == "__main__":
    disable_progress_bar()
    folder, checks = Path(sys.argv[1]), sys.argv[2:]
    if checks == ["stage_accelerate"]:
        on_this_machine()
    else:
        dist.init_process_group("gloo")
    for check in checks:
        result = globals()[check](folder)
        if int(os.environ["RANK"]) == 0:
            torch.save(result, folder / f"{check}.pt")
        dist.barrier()
    print(json.dumps(checks))
    leave_ranks()

"""How added experts start: neurons of the base's own block, or random rows, after stage 1 on real text.

    python benchmarks/added_start.py --data DIR --base runs/study/small/base --seeds 0 1 2 --out added_start.md

DIR holds help/LANGUAGE.train.jsonl and help/LANGUAGE.test.jsonl; the base is that of `study.py base`, and is made if it
is not there. Each row trains experts of `--width` beside expert 0 in every layer on Greek, Hungarian and Turkish, for
`--steps` steps of 2,048 tokens, and gives bits per byte of 3,000 tokens of held-out text of each language.
"""

import json
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

from small_base import NEW, OLD, load, make_small_base
from timing import parser, report

from hf_moe_expand import LanguageText, Plan, PostPretrainConfig, expand_checkpoint, train_stage
from hf_moe_expand.checkpoint.source import load_base_config
from hf_moe_expand.evaluation.perplexity import evaluate_model
from hf_moe_expand.models import load_for_inference

STARTS = {"copy": "neurons", "random": "random rows"}


def trained(options, start: str, rate: float, seed: int, work: Path) -> tuple[float, dict[str, float]]:
    """The loss of the last logged steps, and bits per byte by language."""
    layers = load_base_config(options.base).num_hidden_layers
    plan = Plan("moe-lpr", [2] * layers, old=list(OLD), new=list(NEW))
    expand_checkpoint(
        options.base, work / "new", plan, expert_kind="added", expert_width=options.width, expert_init=start, seed=seed
    )
    text = {code: LanguageText(code, str(options.data / "help" / f"{code}.train.jsonl")) for code in NEW}
    config = PostPretrainConfig(
        block_size=256, per_device_train_batch_size=8, max_steps=options.steps, learning_rate=rate,
        warmup_steps=max(1, options.steps // 10), bf16=True, logging_steps=max(1, options.steps // 4),
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    train_stage(work / "new", work / "trained", text, config, seed)
    log = json.loads((work / "trained" / "trainer_state.json").read_text("utf-8"))["log_history"]
    model, tokenizer = load_for_inference(work / "trained")
    held = {code: load(options.data / "help", code, "test")["text"] for code in (*NEW, "en")}
    scores = evaluate_model(model, tokenizer, held, block_size=256, batch_size=16, max_tokens=3000)
    return [entry["loss"] for entry in log if "loss" in entry][-1], {c: s.bits_per_byte for c, s in scores.items()}


def main(arguments: list[str] | None = None) -> None:
    options_parser = parser(__doc__, repeats=1, on_device=False)
    options_parser.add_argument("--data", type=Path, required=True, help="folder with help/")
    options_parser.add_argument("--base", type=Path, default=Path("runs/study/small/base"), help="(%(default)s)")
    options_parser.add_argument("--width", type=int, default=176, help="of each added expert (%(default)s)")
    options_parser.add_argument("--steps", type=int, default=100, help="(%(default)s)")
    options_parser.add_argument("--rates", type=float, nargs="+", default=[3e-3, 1e-2], help="(%(default)s)")
    options_parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(%(default)s)")
    options = options_parser.parse_args(arguments)
    make_small_base(options.data / "help", options.base)
    rows = []
    for rate in options.rates:
        for start, words in STARTS.items():
            found = []
            for seed in options.seeds:
                with TemporaryDirectory() as work:
                    found.append(trained(options, start, rate, seed, Path(work)))
            bits = [f"{mean(scores[code] for _, scores in found):.3f}" for code in (*NEW, "en")]
            rows.append([words, f"{rate:g}", f"{mean(loss for loss, _ in found):.3f}", *bits])
    title = f"Added experts of width {options.width}, {options.steps} steps of 2,048 tokens, seeds {options.seeds}"
    report(title, ["rows", "learning rate", "last loss", *NEW, "en"], rows, options)


if __name__ == "__main__":
    main()

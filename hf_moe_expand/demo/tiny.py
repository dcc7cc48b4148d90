"""`hf-moe-expand demo`: all steps with a tiny model, from training a base to loading the expanded checkpoint."""

import json
import random
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from ..core.jsonfile import write_text
from ..core.yamlfile import parse_yaml
from ..data.sources import LanguageText
from ..report.page import make_page
from ..runs.pipeline import run_recipe
from ..runs.recipe import Recipe
from ..trainers.bfloat16 import has_bfloat16
from .pretraining import BaseSettings, make_base

MINUTES, MEGABYTES = 3, 25
OLD, NEW = ("en", "es", "de"), ("el", "hu", "tr")
TRAIN_DOCUMENTS, TEST_DOCUMENTS = 1000, 60
# Real bases have seen a little text in most languages: 3 % of this base's blocks are in the new ones.
SHARES = {**dict.fromkeys(OLD, 0.97 / len(OLD)), **dict.fromkeys(NEW, 0.03 / len(NEW))}
BASE = BaseSettings(
    vocab_size=1024, hidden_size=128, intermediate_size=256, num_layers=4, block_size=128, blocks_per_step=16,
    steps=500, learning_rate=3e-3, logging_steps=50,
)  # fmt: skip
RECIPE = (files(__package__) / "tiny.yaml").read_text(encoding="utf-8")
# By kind of word or sentence, then by language.
WORDS = parse_yaml((files(__package__) / "sentences.yaml").read_text(encoding="utf-8"), "sentences.yaml")


def run_demo(out: str | Path, seed: int = 0) -> None:
    """Makes text, a base model and a recipe under `out`, runs the recipe, draws the plan, and loads the result back."""
    out = Path(out)
    data = out / "data"
    data.mkdir(parents=True, exist_ok=True)
    print(
        f"This demo trains a small base model, mostly on {', '.join(OLD)}, and teaches it {', '.join(NEW)}. It "
        f"downloads nothing, writes to {out} (about {MEGABYTES} MB) and takes about {MINUTES} minutes on two idle CPU "
        "cores."
    )
    sources: dict[str, dict[str, Path]] = {"train": {}, "test": {}}
    for code in (*OLD, *NEW):
        for split, count in (("train", TRAIN_DOCUMENTS), ("test", TEST_DOCUMENTS)):
            path = sources[split][code] = data / f"{code}.{split}.jsonl"
            if not path.exists():
                # By another seed, test documents combine the same words in ways that training never saw.
                lines = documents(code, count, seed * 2 + (split == "test"))
                write_text(path, "".join(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in lines))
    if not (out / "base").exists():
        print(f"training the base model in {out / 'base'}, {BASE.steps} steps ...")
        texts = {code: LanguageText(code, str(path)).load() for code, path in sources["train"].items()}
        make_base(out / "base", texts, SHARES, BASE, seed)
    text = Template(RECIPE).substitute(
        out=out,
        seed=seed,
        bf16=str(has_bfloat16()).lower(),
        old=_yaml({code: sources["train"][code] for code in OLD}),
        new=_yaml({code: sources["train"][code] for code in NEW}),
        test=_yaml(sources["test"]),
    )
    final = run_in(out, text)
    write_page(out / "run")
    model: Any = AutoModelForCausalLM.from_pretrained(final, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(final)
    print(f"loaded as {type(model).__name__}; it continues four prompts:")
    for prompt in ("It is raining. Anna goes", "Βρέχει. Η Μαρία πηγαίνει", "Esik az eső. Péter", "Kar yağıyor. Elif"):
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        output = model.generate(**inputs, max_new_tokens=16, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        print(f"  {tokenizer.decode(output[0], skip_special_tokens=True)}")


def documents(language: str, count: int, seed: int) -> list[str]:
    """`count` documents of six sentences about a day of one person, drawn with `seed` from our own templates."""
    draw = random.Random(f"{language}-{seed}")
    texts = []
    for _ in range(count):
        sentences = [draw.choice(WORDS["weather"][language])]
        name, name2 = draw.sample(WORDS["names"][language], 2)
        for template in draw.sample(WORDS["sentences"][language], 5):
            good, good2 = draw.sample(WORDS["goods"][language], 2)
            time = draw.choice(WORDS["times"][language])
            words = {"time_cap": time[0].upper() + time[1:], "place": draw.choice(WORDS["places"][language])}
            sentences.append(template.format(name=name, name2=name2, good=good, good2=good2, time=time, **words))
        texts.append(" ".join(sentences))
    return texts


def write_page(run: Path) -> None:
    page = run / "report.html"
    write_text(page, make_page(run))
    print(f"page: {page}")


def run_in(out: Path, text: str) -> Path:
    """Writes a recipe into a demo's folder and runs it; returns the final checkpoint."""
    recipe = out / "recipe.yaml"
    write_text(recipe, text)
    print(f"hf-moe-expand run {recipe}")
    return run_recipe(Recipe.load(recipe))


def _yaml(paths: dict[str, Path]) -> str:
    return ", ".join(f"{code}: {json.dumps(str(path))}" for code, path in paths.items())

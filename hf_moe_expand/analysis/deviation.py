"""Fine-tunes a dense model a few steps on each language: which FFNs move, and which languages move them alike.

From the same weights, all parameters are trained on each language alone (AdamW without weight decay, linear decay to
zero), in float32: in bfloat16 such steps round away. Memory holds the weights twice besides gradients and AdamW's
state; the changes go to a folder, 4 bytes for each FFN parameter of the chosen layers, language and compared step.
"""

import hashlib
import os
import random
import shutil
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedTokenizerBase, get_linear_schedule_with_warmup

from ..checkpoint.writer import new_folder
from ..core.errors import InputError, goes_on
from ..core.jsonfile import read_json, write_json
from ..core.languages import check_named_once
from ..core.progress import Bar
from ..core.schema import checked
from ..core.scratch import work_folder
from ..data.tokens import begin_tokens, encode_documents
from ..inference.models import check_decoder, longest_block, model_name
from ..modeling import decoder_ffns
from ..planning.results import DeviationResult
from .settings import DeviationSettings

_FOUND = "deviation.json"
_SIZES = {"micro_batch_size", "last_layers", "at_steps"}  # settings that do not change what is trained
_DOCUMENTS = 256  # tokenised at a time
_ELEMENTS = 1 << 16  # of each language's change, in memory at a time


@partial(checked, keywords=DeviationSettings)
def measure_deviation(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    texts: Mapping[str, Sequence[str]],
    *,
    work_dir: str | os.PathLike,
    layers: Sequence[int] | None = None,
    seed: int = 0,
    **settings: Any,
) -> DeviationResult:
    """Measures how far each layer's FFN moves on each language, and the cosine between the changes of two languages
    (DMoE section 3.1, Eq. 1); the module says how, and what it takes.

    Args:
        work_dir: folder for the results of each language; the caller deletes it. A second run with it does not train
            finished languages again, and may add languages. Of `settings`, `micro_batch_size` may differ then.
        layers: the layers over whose FFNs languages are compared, instead of the last ones.
        seed: random seed of the order of documents, and of dropout.
        settings: keys of `DeviationSettings`.

    Raises:
        InputError: a language has too little text, `work_dir` has results of another model, text or other settings, or
            training left an FFN unchanged or not finite.
    """
    check_decoder(model.config, model_name(model), "deviation and DMoE")
    how = DeviationSettings(**settings)  # refuses numbers out of range
    chosen = check_sizes(model.config, len(decoder_ffns(model)), how.block_size, how.last_layers, layers)
    blocks = _blocks(texts, tokenizer, how.steps * how.batch_size, how.block_size, seed)
    folders = {language: Path(work_dir) / f"language-{quote(language, safe='')}" for language in texts}
    _train_languages(model, blocks, folders, chosen, how, seed)
    by_language = {
        language: read_json(folder / _FOUND, "a deviation")["deviation"] for language, folder in folders.items()
    }
    at_each = {str(step): [_at_step(folder, step) for folder in folders.values()] for step in how.at_steps}
    of_steps = {
        language: change_cosines([*(_at_step(folder, step) for step in how.at_steps), folder], chosen)
        for language, folder in folders.items() if how.at_steps
    }  # fmt: skip
    return DeviationResult(
        languages=list(texts), by_language=by_language,
        deviation=[sum(values) / len(values) for values in zip(*by_language.values(), strict=True)],
        similarity=change_cosines(list(folders.values()), chosen),
        similarity_at={step: change_cosines(places, chosen) for step, places in at_each.items()},
        likeness_of_steps=of_steps, layers=chosen, seed=seed, **how.model_dump(exclude=_SIZES),
    )  # fmt: skip


def _train_languages(
    model: Any, blocks: Mapping[str, torch.Tensor], folders: Mapping[str, Path], chosen: Sequence[int],
    settings: DeviationSettings, seed: int,
) -> None:  # fmt: skip
    """Trains the model on each language that is not finished, from the same weights, and writes the changes."""
    work_folder(next(iter(folders.values())).parent)
    with _in_float32(model) as start:
        of_all = settings.model_dump(exclude={"micro_batch_size", "last_layers"})
        of_all |= {"layers": list(chosen), "seed": seed, "model": _digest(start)}
        made_of = {language: {**of_all, "text": _digest({"tokens": rows})} for language, rows in blocks.items()}
        unfinished = [language for language in blocks if not _finished(folders[language], made_of[language])]
        with Bar(total=len(unfinished) * settings.steps, desc="deviation", unit="step") as bar:
            for language in unfinished:
                torch.manual_seed(seed)
                write = partial(_write_change, model, language, chosen, start, made_of[language])
                with goes_on(lambda language=language: f"with language {language!r}"):  # type: ignore[misc]
                    for step in _fine_tune(model, blocks[language], settings):
                        bar.update()
                        if step in settings.at_steps:
                            shutil.rmtree(_at_step(folders[language], step), ignore_errors=True)  # interrupted
                            write(_at_step(folders[language], step))
                    write(folders[language])
                with torch.no_grad():
                    for name, tensor in _floating(model):
                        tensor.copy_(start[name])


def change_cosines(folders: Sequence[Path], layers: Sequence[int]) -> list[list[float]]:
    """Cosines of the changes in the `n` folders, over all of `layers` together: `[n, n]`.

    Dot products are summed in float64, with one piece of one tensor of each folder in memory.
    """
    gram = torch.zeros(len(folders), len(folders), dtype=torch.float64)
    for layer in layers:
        with ExitStack() as stack:
            files = [stack.enter_context(safe_open(_layer_file(folder, layer), "pt")) for folder in folders]
            for name in files[0].keys():  # noqa: SIM118 not a dictionary
                changes = [file.get_slice(name) for file in files]
                for begin in range(0, changes[0].get_shape()[0], _ELEMENTS):
                    piece_LE = torch.stack([change[begin : begin + _ELEMENTS] for change in changes]).double()
                    gram += piece_LE @ piece_LE.T
    norms = gram.diagonal().sqrt()
    cosines = gram / torch.outer(norms, norms)
    return ((cosines + cosines.T) / 2).tolist()


def check_sizes(
    config: Any, num_layers: int, block_size: int, last_layers: int, layers: Sequence[int] | None = None
) -> list[int]:
    """The layers over whose FFNs languages are compared; refuses layers and blocks that the model does not take."""
    longest = longest_block(config) or block_size
    if block_size > longest:
        raise InputError(f"block_size is {block_size}; this model takes blocks of 2 to {longest} tokens.")
    chosen = sorted({*(range(num_layers - last_layers, num_layers) if layers is None else layers)})
    if not chosen or chosen[0] < 0 or chosen[-1] >= num_layers:
        raise InputError(f"layers is {chosen}; this model has layers 0 to {num_layers - 1}: name some of them.")
    return chosen


def _blocks(
    texts: Mapping[str, Sequence[str]], tokenizer: Any, count: int, block_size: int, seed: int
) -> dict[str, torch.Tensor]:
    """`[count, block_size]` tokens of each language; checks every language before the first is trained."""
    if not texts:
        raise InputError("No language was given.")
    check_named_once(list(texts))
    needed = count * block_size
    tokens = {language: _first_tokens(documents, tokenizer, needed, seed) for language, documents in texts.items()}
    if short := [f"{language} has {len(ids):,}" for language, ids in tokens.items() if len(ids) < needed]:
        raise InputError(
            f"Too little text: {count:,} blocks (steps x batch_size) of {block_size} tokens need {needed:,} tokens of "
            f"each language, but {', '.join(short)}. Give more text, or smaller `steps` or `batch_size`."
        )
    blocks = {language: ids.view(count, block_size) for language, ids in tokens.items()}
    begin = torch.tensor(begin_tokens(tokenizer), dtype=torch.int32)
    for rows in blocks.values():
        rows[:, : len(begin)] = begin  # as in the blocks of a stage
    return blocks


def _first_tokens(documents: Sequence[str], tokenizer: Any, needed: int, seed: int) -> torch.Tensor:
    """The first `needed` tokens (or all, if fewer) of the documents in a random order, int32."""
    order = random.Random(seed).sample(range(len(documents)), len(documents))
    batches = (order[begin : begin + _DOCUMENTS] for begin in range(0, len(order), _DOCUMENTS))
    rows = chain.from_iterable(encode_documents([documents[i] for i in batch], tokenizer) for batch in batches)
    return torch.tensor(array("i", islice(chain.from_iterable(rows), min(needed, sys.maxsize))), dtype=torch.int32)


def _floating(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Floating-point parameters and buffers, each tied one once."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_floating_point():
            yield name, tensor


@contextmanager
def _in_float32(model: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Puts the model into float32 and training mode; yields its original weights (on the CPU) and restores them."""
    start = {name: tensor.detach().to("cpu", copy=True) for name, tensor in _floating(model)}
    training = model.training
    devices = [model.device] if model.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            model.float().train()
            yield start
    finally:
        model.zero_grad()
        for name, tensor in _floating(model):
            tensor.data = start[name].to(tensor.device)
        model.train(training)


def _at_step(folder: Path, step: int) -> Path:
    return folder.with_name(f"{folder.name}.step-{step}")


def _fine_tune(model: Any, blocks: torch.Tensor, settings: DeviationSettings) -> Iterator[int]:
    """Trains the model; yields each step that is done."""
    # Fused: the other implementations hold further copies of the weights for a moment.
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0, fused=True)
    schedule = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=0, num_training_steps=settings.steps)
    for step, batch in enumerate(blocks.split(settings.batch_size), start=1):
        for part in batch.split(settings.micro_batch_size):
            input_ids = part.long().to(model.device)
            loss = model(input_ids=input_ids, labels=input_ids, use_cache=False).loss
            (loss * len(part) / settings.batch_size).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield step


def _write_change(
    model: Any, language: str, chosen: Sequence[int], start: Mapping[str, torch.Tensor], made_of: Mapping[str, Any],
    folder: Path,
) -> None:  # fmt: skip
    """Writes each layer's deviation and the changes of the chosen layers into `folder`, whole or not at all."""
    ffns, deviation = decoder_ffns(model), []
    sizes = [sum(parameter.numel() for parameter in ffns[layer].module.parameters()) for layer in chosen]
    with new_folder(folder, needed_bytes=4 * sum(sizes)) as partial:
        for layer, ffn in enumerate(ffns):
            changes = {
                name: (parameter.detach().cpu() - start[f"{ffn.name}.{name}"].float()).flatten()
                for name, parameter in ffn.module.named_parameters()
            }
            squares = sum(change.double().square().sum().item() for change in changes.values())
            if not 0 < squares < float("inf"):  # NaN fails this comparison too
                raise InputError(
                    f"Fine-tuning on {language!r} moved the FFN of layer {layer} by {squares**0.5:g}: check the "
                    "learning rate, and that the layer's weights are trainable and finite."
                )
            deviation.append(squares**0.5)
            if layer in chosen:
                save_file(changes, _layer_file(partial, layer))
        write_json(partial / _FOUND, {"made_of": made_of, "deviation": deviation})


def _layer_file(folder: Path, layer: int) -> Path:
    return folder / f"layer-{layer}.safetensors"


def _finished(folder: Path, made_of: Mapping[str, Any]) -> bool:
    """Whether a language is done; refuses a folder of other settings, another model or other text."""
    if not folder.is_dir():
        return False
    before = read_json(folder / _FOUND, "a deviation").get("made_of", {})
    if differing := [name for name, value in made_of.items() if before.get(name) != value]:
        raise InputError(
            f"{folder}: was made with other {', '.join(differing)}: give another work folder, or delete this one."
        )
    return True


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """A hash of names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()

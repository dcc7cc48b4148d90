"""The model card: fills the templates of `model_cards/` with the facts in config.json and in an evaluation."""

import json
import os
import re
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import jinja2
import langcodes
from huggingface_hub import EvalResult, ModelCard, ModelCardData, metadata_load, snapshot_download
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError
from markupsafe import Markup

from .. import __version__
from ..checkpoint.compare import Verdict, moved_tensors
from ..checkpoint.facts import Facts
from ..checkpoint.records import History, StageRecord, without_folders
from ..checkpoint.source import (
    load_config,
    load_expanded_config,
    name_in_results,
    own_name,
    resolve_checkpoint,
    text_config,
)
from ..checkpoint.stored import BASE_FIELDS, StoredModel, field_of, network_of
from ..core.disk import readable_size
from ..core.errors import InputError, errors_at, library_errors_at
from ..core.jsonfile import read_json
from ..core.languages import check_language_code, in_words
from ..core.layer_names import layer_name
from ..core.private import refuse_private
from ..core.schema import checked
from ..core.yamlfile import to_yaml
from ..evaluation.report import THIS, Evaluation, markdown_table
from ..planning.methods import METHODS, PlanSettings
from ..report.inspection import inspect_checkpoint
from .published import CARD

# Settings that say nothing of a model without routers, classifiers or conditional routing.
_ABOUT = {
    "routers": "balance_coef balance_counts language_prior_coef localized_balance_coef masking group_coef",
    "classifiers": "classifier_coef classifier_layers classifier_choice classifier_tokens",
    "conditional": "budget_coef gate_budget",
}
_MEASURES = ("bits_per_byte", "perplexity")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_MARKDOWN = str.maketrans({
    "&": "&amp;", "<": "&lt;", "[": "&#91;", "]": "&#93;", "|": "&#124;", "`": "&#96;", "*": "&#42;"
})  # fmt: skip


@dataclass(frozen=True)
class BaseModel:
    """The dense model inside an expanded one; `hub_id` is None for a model known only as a local folder."""

    name: str
    hub_id: str | None
    revision: str | None


def named_base(config: Any) -> BaseModel:
    """The base that config.json records."""
    first = Facts(config).history.first
    name, revision = first.base_model, first.base_revision  # of a model of the hub only
    if name is None:
        raise InputError(
            "config.json does not say which base model was expanded: give its hub id (`push --base HUB_ID`)."
        )
    return BaseModel(name, name if revision else None, revision)


def base_on_hub(config: Any, hub_id: str, token: str | None = None) -> BaseModel:
    """The base that the hub has under `hub_id`, with its present commit; its configuration must be that of the model
    that was expanded. Where the hub is out of reach, or a model gated, nothing is compared and the commit is None."""
    where = f"--base {hub_id}"
    if Path(hub_id).is_dir():  # without the hub, nothing else would tell it from an id
        raise InputError(f"{where}: is a local folder; give the base model's hub id.")
    with library_errors_at(where, secrets=[token]):
        try:
            folder = Path(snapshot_download(hub_id, allow_patterns="config.json", token=token))
        except (GatedRepoError, LocalEntryNotFoundError):
            return BaseModel(hub_id, hub_id, None)
    with errors_at(where):
        _compare_configs(config, text_config(load_config(folder)))
    return BaseModel(hub_id, hub_id, folder.name)  # the hub's cache names a snapshot's folder by its commit


def _compare_configs(config: Any, base: Any) -> None:
    grafted = any(stage.changes_everything for stage in Facts(config).history.stages)  # perhaps with further tokens
    for name in ("hidden_size", "intermediate_size", *([] if grafted else ["vocab_size"]), *BASE_FIELDS):
        if (ours := field_of(config, name, base)) != (theirs := field_of(base, name, base)):
            raise InputError(f"is not the model that was expanded: its {name} is {theirs!r}, not {ours!r}.")


def config_with_base(file: Path, base: BaseModel) -> bytes:
    """A checkpoint's config.json in which every expansion of the first one's base names `base`."""
    fields = read_json(file, "a configuration")
    before = fields["expansions"][0].get("base_model")
    for record in fields["expansions"]:
        if record.get("base_model") == before:
            record |= {"base_model": base.name, "base_revision": base.revision}
    return (json.dumps(fields, indent=2, ensure_ascii=False) + "\n").encode()


@checked
def make_card(
    model: str | os.PathLike,
    repo_id: str | None = None,
    evaluation: str | os.PathLike | None = None,
    evaluated_as: str | None = None,
    license: str | None = None,
    base: str | BaseModel | None = None,
    expansion_only: bool = False,
) -> ModelCard:
    """The card of an expanded checkpoint, which is a folder or a hub id.

    Args:
        repo_id: repository of the published model; the card's title and loading lines name it.
        evaluation: evaluation.json; the card shows this model's scores beside those of its first model.
        evaluated_as: the name of this model in `evaluation`; its folder's name or `repo_id` by default.
        license: license of the card; by default the base model's license, if its card names one.
        base: hub id of the base, if config.json knows it only as a local folder (see `base_on_hub`).
        expansion_only: whether the card is for a repository that holds only the added tensors.

    Raises:
        InputError: config.json or `evaluation` lacks what the card says, or holds a secret, or `base` is not the base.
    """
    folder = resolve_checkpoint(model, weights=False)
    config = load_expanded_config(folder)
    location = repo_id or own_name(model)
    origin = base_on_hub(config, base) if isinstance(base, str) else base or named_base(config)
    facts = Facts(config)
    old, new = _languages(facts.history)
    scores = None
    if evaluation is not None:
        names = [evaluated_as] if evaluated_as else [location, folder.resolve().name, name_in_results(model)]
        scores = Evaluation.from_json(Path(evaluation)).of_this(names, evaluation)
    name = location.rpartition("/")[2]
    template = "adapter" if facts.has_adapters else _method(facts).card
    text = _render(
        template, location=Markup(json.dumps(location)), name=name, expansion_only=expansion_only, base=origin,
        metadata=Markup(_metadata(facts, origin, name, license, expansion_only, scores).to_yaml()),
        old=in_words(old), new=new, scores=scores,
        results={kind: scores.rows(kind) for kind in _MEASURES} if scores and scores.rows()[1] else None,
        tasks=scores and scores.tasks.get(THIS) and scores.task_rows(),
        untested_languages=in_words(c for c in [*old, *new] if scores is None or c not in scores.models[THIS]),
        **_contents(folder, facts),
    )  # fmt: skip
    refuse_private({CARD: text.encode()})
    return ModelCard(text)


def _metadata(
    facts: Facts, base: BaseModel, name: str, license: str | None, expansion_only: bool, scores: Evaluation | None
) -> ModelCardData:
    """The card's head, which the hub reads."""
    old, new = _languages(facts.history)
    licensed: dict[str, Any] = {"license": license} if license else _base_license(base)
    updates = ["lora"] if facts.has_updates else []
    kind = updates if facts.has_adapters else ["mixture-of-experts", _method(facts).tag]
    return ModelCardData(
        language=list(dict.fromkeys(filter(None, (langcodes.Language.get(code).language for code in [*old, *new])))),
        **licensed,
        library_name="transformers",
        pipeline_tag="translation" if facts.encoder_layers else "text-generation",
        tags=[*kind, "multilingual", "hf-moe-expand"],
        base_model=base.hub_id,
        base_model_relation=None if base.hub_id is None else ("adapter" if expansion_only else "finetune"),
        model_name=None if scores is None else name,  # of the results
        eval_results=None if scores is None else _eval_results(scores),
    )


def _contents(folder: Path, facts: Facts) -> dict[str, Any]:
    """What the card says of the checkpoint itself."""
    config, history, inspection = facts.config, facts.history, inspect_checkpoint(folder)
    has_weights = any(folder.glob("*.safetensors"))  # those of a hub id stay there
    verdict = moved_tensors(StoredModel(folder, config)) if has_weights else Verdict()
    trained = any(stage.changes_everything for stage in history.stages)
    settings = [stage.settings or {} for stage in history.stages]
    counts = [[1] * len(inspection.layers), *(record.experts_per_layer for record in history.expansions)]
    item_size, method = getattr(config.dtype, "itemsize", None), METHODS.get(history.last.method)
    return {
        "config": config,
        "history": history,
        "inspection": inspection,
        "moved": verdict.names or ("the weights beside the adapters" if trained and not verdict.checked else ""),
        "words": method.words if method else "",
        "stays_home": config.declares("stays_home"),
        "grafted": any(stage.stage == "graft" for stage in history.stages),
        "regularised": config.declares("shares_expert_0") or any(map(_is_regularised, settings)),
        "groups": facts.groups,
        "added_bytes": item_size and readable_size(item_size * (inspection.total - inspection.base)),
        "judges": bool(facts.classifiers),
        "gate": facts.gate,
        "plan": _plan_rows(inspection.layers, inspection.encoder_layers),
        "expansions": [
            (record, [after - count for after, count in zip(now, before, strict=True)])
            for record, (before, now) in zip(history.expansions, pairwise(counts), strict=True)
        ],
        "version": (history.last.versions or {}).get("hf_moe_expand", __version__),
    }


def _read(name: str) -> str:
    return (files("hf_moe_expand.model_cards") / name).read_text(encoding="utf-8")


def _render(template: str, **facts: Any) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_read), undefined=jinja2.StrictUndefined, finalize=_escaped
    )
    filters: dict[str, Any] = {"count": "{:,}".format, "is_hub_id": _HUB_ID.fullmatch, "table": _table}
    environment.filters |= {**filters, "settings": partial(_settings, facts["config"]), "layer_name": layer_name}
    facts["bibtex"] = lambda name: Markup(_read(f"{name}.bib").rstrip())
    return environment.get_template(f"{template}.md").render(facts) + "\n"


def _escaped(value: Any) -> Any:
    """A fact escaped for Markdown, so that names from config.json cannot add HTML, links or lines."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return "".join(c if c.isprintable() else " " for c in value).translate(_MARKDOWN)


def _table(table: tuple[list[str], list[list[str]]], words: int = 1) -> Markup:
    header, rows = table
    return Markup(markdown_table([*map(_escaped, header)], [[*map(_escaped, row)] for row in rows], words))


def _method(facts: Facts) -> type[PlanSettings]:
    """The method of the card's template and tag: LayerMoE where expansions differ in it, and for a user's own plan."""
    if facts.config.model_type == "dmoe":
        return METHODS["dmoe"]
    used = {METHODS.get(record.method) for record in facts.history.expansions}
    return (used.pop() if len(used) == 1 else None) or METHODS["layer-moe"]


def _languages(history: History) -> tuple[list[str], list[str]]:
    """The base model's languages, and the languages of all expansions."""
    with errors_at("config.json: expansions"):
        for code in history.languages:
            check_language_code(code)
    old, *new = history.by_expansion
    return list(old), list(dict.fromkeys(code for codes in new for code in codes))


def _base_license(base: BaseModel) -> dict[str, str]:
    """The license fields of the base's card; empty if the card is missing or cannot be fetched."""
    if base.hub_id is None:
        return {}
    try:
        folder = snapshot_download(base.hub_id, revision=base.revision, allow_patterns=CARD)
        metadata = metadata_load(Path(folder) / CARD) or {}
    except Exception:  # the card is no condition, and libraries raise many types
        return {}
    return {name: metadata[name] for name in ("license", "license_name", "license_link") if name in metadata}


def _plan_rows(layers: list[tuple[int, bool, int]], encoder: int) -> list[dict[str, Any]]:
    """The plan's table; neighbouring layers with equal values share a row."""
    rows = []
    alike = groupby(enumerate(layers), key=lambda item: (item[0] < encoder, *item[1][:2]))
    for (_, experts, classifier), group in alike:
        numbers = [index for index, _ in group]
        first, last = (layer_name(numbers[end], encoder) for end in (0, -1))
        span = f"{first}-{last.rpartition('.')[2]}" if len(numbers) > 1 else first
        rows.append({"layers": span, "experts": experts, "classifier": classifier})
    return rows


def _is_regularised(settings: dict[str, Any]) -> bool:
    """Whether a stage had a curriculum or Elbayad et al.'s masking; the dropout of LoRA experts is LoRAMoE's."""
    masking = settings.get("masking") or {}
    return bool(settings.get("curriculum")) or any(v for name, v in masking.items() if name != "lora_dropout")


def _settings(config: Any, stage: StageRecord) -> Markup:
    """A stage's settings of what the model has, as YAML of which none ends the block of code that it stands in; empty
    without any."""

    def known(value: Any) -> Any:
        return {key: known(item) for key, item in value.items() if item is not None} if type(value) is dict else value

    has = {
        "routers": any(ffn.router is not None for ffn in network_of(config).expanded_ffns().values()),
        "classifiers": Facts(config).classifiers, "conditional": config.conditional_routing,
    }  # fmt: skip
    lacked = {name for what, names in _ABOUT.items() if not has[what] for name in names.split()}
    settings = known(without_folders(stage.settings or {}))
    settings = {name: value for name, value in settings.items() if name not in lacked}
    return Markup(to_yaml(settings).strip().replace("```", "'''") if settings else "")


def _eval_results(scores: Evaluation) -> list[EvalResult]:
    results = []

    def add(dataset: str, name: str, kind: str, value: float, of: dict[str, Any], **more: Any) -> None:
        results.append(EvalResult("text-generation", dataset, name, kind, round(value, 4), dataset_args=of, **more))

    for code, text in scores.models[THIS].items():
        for kind in _MEASURES:
            of = {"tokens": text.tokens, "bytes": text.bytes}
            more = {"dataset_config": code, "metric_name": kind.replace("_", " ")}
            add("text", f"held-out text ({code})", kind, getattr(text, kind), of, **more)
    for task, score in scores.tasks.get(THIS, {}).items():
        settings = {"num_few_shot": score.shots, "samples": score.samples, "version": score.version}
        for kind, metric in score.metrics.items() if score.group is None else ():
            add(task, f"{task} (lm-evaluation-harness)", kind, metric.value, settings, metric_name=kind)
    return results

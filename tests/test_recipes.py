"""The packaged recipes: each is good and has the papers' numbers; the papers' commands run, in order."""

import gc
import json
import re
import shlex
import socket
from fnmatch import fnmatch
from functools import reduce
from pathlib import Path
from types import SimpleNamespace

import papers
import pytest
import yaml
from conftest import TABLES, invoke, refused, save_dense, shaken, tiny_config, write_texts
from encoder_decoders import SENTENCES, save_tiny, tiny
from guides import DOCS, EXTRA, bash_lines
from transformers import AutoModelForCausalLM

from hf_moe_expand import Plan, PostPretrainConfig
from hf_moe_expand.analysis.settings import GateSettings
from hf_moe_expand.core.schema import changed
from hf_moe_expand.core.yamlfile import parse_mapping
from hf_moe_expand.data.sources import LanguageText
from hf_moe_expand.demo import real
from hf_moe_expand.evaluation import harness
from hf_moe_expand.planning.methods import plan_settings
from hf_moe_expand.planning.results import DeviationResult, RoutingResult
from hf_moe_expand.runs import recommended
from hf_moe_expand.runs.pipeline import validate_recipe
from hf_moe_expand.runs.recipe import Recipe
from hf_moe_expand.runs.recipes import WholeRecipe, find_recipe, packaged_files, packaged_recipes
from hf_moe_expand.runs.recommended import blocks_a_step, new_recipe, rates_for

NAMES, FACTS = list(packaged_files()), list(papers.facts())
# Of the real bases: backbone, layers, positions.
BASES = TABLES["bases of recipes"]


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(self, address):
        raise AssertionError(f"a connection to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    for variable in ("MADLAD", "INSTRUCT", "NLLB"):
        monkeypatch.delenv(variable, raising=False)


def load(name):
    return Recipe.load(find_recipe(name), unset_ok=True)


def found_at(recipe, key):
    """What a recipe has where the table names it."""
    expansion = recipe.all_expansions[key.startswith("second.")]
    key = key.removeprefix("second.")
    if key in ("new", "languages"):
        return " ".join(expansion.new) if key == "new" else len(expansion.new)
    if key.startswith("sequences."):
        stage = getattr(expansion, key.partition(".")[2])
        return stage.per_device_train_batch_size * stage.gradient_accumulation_steps * 8
    value = expansion
    for part in key.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return len(value) if key == "plan.groups" and isinstance(value, list) else value


def of_recipes(words):
    """The packaged recipes of these patterns; none for a row of the page."""
    return [name for name in NAMES if any(fnmatch(name, pattern) for pattern in words.split())]


@pytest.mark.parametrize("name", NAMES)
def test_each_has_the_papers_numbers_and_its_plans_fit_its_base(name, tmp_path):
    ours = TABLES["recipes"].items()  # what is no number of a paper
    wanted = {key: value for words, of in ours if name in of_recipes(words) for key, value in of.items()}
    for _, _, words, key, value in FACTS:
        if name in of_recipes(words):
            wanted[key] = value["is"] if isinstance(value, dict) else value
    recipe = load(name)
    assert len(wanted) > 5
    assert {key: found_at(recipe, key) for key in wanted} == wanted
    assert ("graft" in recipe.model_fields_set) == name.startswith(("deltamoe", "mola"))
    assert not name.startswith(("layermoe", "moe-lpr")) or list(recipe.old) == ["en", "es", "zh"]
    assert recipe.output == f"runs/{name}"
    backbone, layers, positions = BASES[recipe.base]
    more = {} if positions is None else {"max_position_embeddings": positions}
    if backbone == "m2m_100":
        config = tiny(backbone, encoder_layers=12, decoder_layers=12, **more).config
    else:
        config = tiny_config(backbone, **{"n_layer" if backbone == "bloom" else "num_hidden_layers": layers}, **more)
    config.save_pretrained(tmp_path / "base")
    narrow = changed(recipe.expand, lora_rank=8) if recipe.expand.expert_kind == "lora" else recipe.expand
    found = validate_recipe(changed(recipe, base=str(tmp_path / "base"), expand=narrow), offline=True)
    assert f"base: {tmp_path / 'base'}, {backbone}, {layers} layers" in found
    assert sum(line.startswith("expansion ") and " experts, " in line for line in found) == len(recipe.all_expansions)


def test_the_128_languages_are_in_the_papers_groups(published):
    recipe = load("dmoe-bloom-560m-128-languages")
    assert recipe.plan.groups[9] == ["bn", "gu", "kn", "ml", "mr", "pa", "ta", "te"]
    assert sorted(code for group in recipe.plan.groups for code in group) == sorted(recipe.new)
    assert sorted(load("dmoe-bloom-560m").new) == sorted(published["dmoe_bloom_560m_grouping"]["languages"])


def test_names_and_files(tmp_path, monkeypatch):
    assert {recipe.name for recipe in packaged_recipes()} == set(NAMES)
    name = "moe-lpr-qwen1.5-1.8b"
    *lines, last = invoke("recipes", "ls").splitlines()
    listed = next(line for line in lines if line.startswith(f"{name}  "))
    assert all(word in listed for word in ("MoE-LPR", "Qwen/Qwen1.5-1.8B", "Greek"))
    assert last == "to inherit: deltamoe, dmoe, layermoe, moe-lpr"
    shown = invoke("recipes", "show", name)
    assert yaml.safe_load(shown)["plan"]["experts"] == 6
    assert "inherits" not in shown
    assert f"{name}: ok" in invoke("validate", "--offline", name)
    # A file of the same name wins.
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(yaml.safe_dump({**yaml.safe_load(shown), "base": "org/other"}))
    assert "org/other is not on this machine" in invoke("validate", "--offline", name)
    for verb in (["validate"], ["run"], ["recipes", "show"]):
        refused(invoke, *verb, "moe-lpr-qwen.yaml", says=r"yaml: no such file, .* \(`hf-moe-expand recipes ls`\)")


@pytest.mark.skipif(not papers.TEXTS.is_dir(), reason=f"the papers are not at {papers.TEXTS}")
def test_the_papers_have_these_numbers():
    for paper, section, _, key, value in FACTS:
        printed = value["of"] if isinstance(value, dict) else [value]
        text = papers.section_text(paper, section)
        for number in printed:
            if number is not None and not isinstance(number, bool):
                assert papers.has(text, number), (paper, section, key, number)
    # The page of choice quotes table 1 of MoE-LPR.
    (row,) = [line for line in (DOCS / "choose.md").read_text("utf-8").splitlines() if line.startswith("| billions |")]
    expanded, original = papers.section_text("MoE-LPR", "Experiment Results").split("Original Languages", 1)
    for part, base, ours in ((expanded, "34.36", "45.07"), (original, "53.97", "52.12")):
        cells = [re.sub(r"</?[bu]>", "", line).split("\t") for line in part.splitlines() if line]
        rows = {row[0]: row[-1] for row in cells}
        assert (rows["Qwen1.5-1.8B"], rows["MoE-LPR"]) == (base, ours)
        assert f"from {base} to {ours}" in row


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_dense(tmp_path_factory.mktemp("base") / "tiny", "llama", max_position_embeddings=1024)


@pytest.fixture
def texts(tmp_path):
    lines = {"hu": "egy hosszú szöveg a városról", "en": "a long text about the city", "tr": "şehir hakkında"}
    return {code: write_texts(tmp_path / f"{code}.jsonl", [f"{text} {n}" for n in range(40)]) for code, text in
            lines.items()}  # fmt: skip


def written(base, texts, tmp_path, *more):
    out = tmp_path / "recipe.yaml"
    said = invoke("recipes", "new", "--base", str(base), "--new", f"hu={texts['hu']}", "--out", str(out), *more)
    return Recipe.load(out), said, out.read_text("utf-8")


def test_it_is_the_recommended_recipe_for_this_text(base, texts, tmp_path):
    test = write_texts(tmp_path / "hu.test.jsonl", ["más mondatok, amelyeket senki sem olvasott"] * 9)
    given = ("--new", f"tr={texts['tr']}", "--old", f"en={texts['en']}", "--test", f"hu={test}")
    recipe, said, text = written(base, texts, tmp_path, *given)
    recommended = Recipe.load(find_recipe("recommended"))
    assert recipe.plan == recommended.plan == plan_settings("exclusive")
    assert recipe.gates == GateSettings() == recommended.gates
    found = (dict(recipe.new), dict(recipe.old), dict(recipe.test), recipe.output)
    of = {code: {code: str(path)} for code, path in texts.items()}
    assert found == (of["hu"] | of["tr"], of["en"], {"hu": str(test)}, "runs/tiny-hu-tr")
    for one in (recipe, recommended):
        assert [stage.key for stage, _ in one.stages()] == ["post_pretrain", "gates", "average"]
        assert one.average.weight == 0.6
    ours, theirs = recipe.post_pretrain, recommended.post_pretrain
    assert ours.block_size == theirs.block_size
    sources = [LanguageText(code, str(texts[code])) for code in ("hu", "tr")]
    tokens = sum(len(document.encode()) + 1 for source in sources for document in source.documents())  # bytes, an end
    assert f"about {max(tokens // 512, 1)} steps, of {tokens:,} tokens" in text
    assert (ours.num_train_epochs, ours.per_device_train_batch_size) == (1, 1)
    assert re.search(r"post_pretrain: about \d+ steps.* text: 1; tokens at hand, about: hu [\d,]+", said)
    assert max(map(len, text.replace(str(tmp_path), "").splitlines())) <= 120


def test_a_schedule_for_a_number_of_tokens(base, texts, tmp_path):
    recipe, said, _ = written(base, texts, tmp_path, "--tokens", "819200")
    training = recipe.post_pretrain
    assert training.tokens == 819_200
    assert "num_train_epochs" not in training.changes()
    rows = training.per_device_train_batch_size * training.gradient_accumulation_steps
    assert (rows, training.learning_rate) == (16, 2e-3)
    assert "post_pretrain: about 100 steps of 8,192 tokens" in said
    assert "warning: post_pretrain: after more than 4 passes" in said
    few, *_ = written(base, texts, tmp_path, "--tokens", "51200", "--overwrite")
    assert few.post_pretrain.learning_rate == 1e-3  # steps of 512 tokens
    refused(new_recipe, str(base), {}, {"hu": str(texts["hu"])}, {}, tokens=0, says="--tokens is 0: must be at least 1")


def test_steps_follow_from_the_text():
    assert blocks_a_step(None) == 16
    for tokens in (10, 51_200, 409_600, 819_200, 1_638_400, 10**8, 10**9, 10**12):
        blocks = blocks_a_step(tokens)
        steps = tokens / (512 * blocks)
        assert blocks & (blocks - 1) == 0
        assert steps >= 100 or blocks == 1
        assert steps <= 10_000 or blocks == 1024
        assert blocks == 16 or (blocks < 16) == (tokens < 100 * 16 * 512)


def test_rates_name_their_source(base, texts):
    assert [rates_for(n).stage for n in (135_000_000, 500_000_000, 1_800_000_000)] == ["2e-3", "2e-4", "5e-5"]
    assert "not measured" in rates_for(500_000_000).source
    for name, parameters in (("recommended", 135_000_000), ("moe-lpr-qwen1.5-1.8b", 1_800_000_000)):
        recipe = WholeRecipe.load(find_recipe(name)).mapping
        assert recipe["post_pretrain"]["learning_rate"] == float(rates_for(parameters).stage)
    # A small step takes the rate measured for small steps.
    assert (rates_for(135_000_000, 512).stage, rates_for(135_000_000, 4096)) == ("1e-3", rates_for(135_000_000))
    assert "512 tokens" in rates_for(135_000_000, 2048).source
    short = new_recipe(str(base), {}, {"hu": str(texts["hu"])}, {})
    assert "learning_rate: 1e-3  # measured on SmolLM2, 135 million parameters, with steps of 512 tokens" in short


def test_readme_defaults_demo_and_notebook_have_the_rates_of_their_sizes():
    root = Path(__file__).parents[1]
    readme, notebook = ((root / name).read_text("utf-8") for name in ("README.md", "examples/quickstart.ipynb"))
    qwen, smollm2 = rates_for(494_000_000).stage, rates_for(135_000_000, 512).stage
    assert set(re.findall(r"learning_rate[=:] ?([\de.-]+)", readme)) == {qwen}
    assert f"RATE = 40, 256, {smollm2}" in notebook
    assert yaml.safe_load(re.sub(r"\$\w+", "x", real.RECIPE))["post_pretrain"]["learning_rate"] == smollm2
    assert PostPretrainConfig("x").learning_rate == float(rates_for(1_800_000_000).stage)


@pytest.mark.parametrize(("here", "gpu", "able", "half", "cpu"), [
    (False, None, True, False, False), (False, True, True, True, False), (False, False, True, False, False),
    (True, None, True, True, False), (True, None, False, False, False), (True, True, True, True, False),
    (True, False, True, False, True),
])  # fmt: skip
def test_a_gpu_or_none(base, texts, monkeypatch, here, gpu, able, half, cpu):
    """A GPU that emulates bfloat16 is not asked for it."""
    monkeypatch.setattr(recommended.torch.cuda, "is_available", lambda: here)
    monkeypatch.setattr(recommended, "has_bfloat16", lambda: able)
    monkeypatch.setattr(recommended, "device_memory", lambda: 10**12)
    text = new_recipe(str(base), {}, {"hu": "hub:some/text"}, {}, gpu=gpu)
    made = Recipe.of_text(text, "x").post_pretrain
    assert (bool(made.bf16), "use_cpu: true" in text) == (half, cpu)
    elsewhere = gpu and not here
    assert made.per_device_train_batch_size == (1 if elsewhere else 16)
    assert ("a GPU that this machine does not know" in text) == bool(elsewhere)
    if gpu is None:  # the batch fits the memory
        monkeypatch.setattr(recommended, "device_memory", lambda: 1)
        text = new_recipe(str(base), {}, {"hu": "hub:some/text"}, {})
        made = Recipe.of_text(text, "x").post_pretrain
        assert (made.per_device_train_batch_size, made.gradient_accumulation_steps) == (1, 16)


def test_what_it_refuses(base, texts, tmp_path):
    out = tmp_path / "r.yaml"
    arguments = ["recipes", "new", "--base", str(base), "--out", str(out)]
    refused(invoke, *arguments, "--new", f"hu={tmp_path / 'missing.jsonl'}", says=r"missing\.jsonl: no such")
    twice = ("--new", f"hu={texts['hu']}", "--old", f"en={texts['en']}", "--test", f"de={texts['en']}")
    refused(invoke, *arguments, *twice, says=r"test\.de: .* is training text, too \(old\.en: ")
    assert not out.exists()
    out.write_text("mine")
    refused(invoke, *arguments, "--new", f"hu={texts['hu']}", says="exists already")
    small = save_dense(tmp_path / "short", "llama", max_position_embeddings=64)
    refused(new_recipe, str(small), {}, {"hu": str(texts["hu"])}, {}, says=r"takes 64 positions, but this recipe's")
    save_tiny(tmp_path / "t5", "t5")
    refused(new_recipe, str(tmp_path / "t5"), {}, {"hu": str(texts["hu"])}, {}, says=r"is an encoder-decoder, for")


SMALL = {
    "block_size": 16, "per_device_train_batch_size": 2, "max_steps": 1, "save_strategy": "no", "disable_tqdm": True,
}  # fmt: skip
OPTIONS = EXTRA | {
    "analyze similarity": ["--tokens", "40", "--block-size", "16"],
    "analyze routing": ["--tokens", "24", "--block-size", "16"],
    "sample base": ["--tokens", "10"],
    "evaluate base": ["--block-size", "16"],
    "--pairs": ["--max-new-tokens", "3"],
    "evaluate dense-1": ["--block-size", "16", "--max-tokens", "40"],
}
# Of the papers' sizes: too many for a tiny model, or more than its text.
SMALLER = {"--blocks": "2"}
LARGE = ("tokens_per_language", "replay_share")
TEXTS = {
    "en": "The cat {} sits in the sun.", "es": "El gato {} duerme al sol.", "el": "Η γάτα {} κάθεται.",
    "hu": "A macska {} a napon ül.", "tr": "Kedi {} güneşte oturuyor.",
}  # fmt: skip


def rows() -> list[tuple[str, str, list[list[str]]]]:
    """What a comment of the page announces: its words, its settings, and the commands below it."""
    found = []
    for line in bash_lines("papers.md"):
        if line.startswith("# "):
            what, _, settings = line[2:].partition("; s.yaml: ")
            found.append((what, settings, []))
        else:
            found[-1][2].append(shlex.split(line)[1:])
    return found


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = {"num_hidden_layers": 4, "max_position_embeddings": 256}
    save_dense(tmp_path / "base", **sizes)
    save_dense(tmp_path / "chat", **sizes)
    shaken(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), 0.01).save_pretrained(tmp_path / "chat")
    save_tiny(tmp_path / "nllb")
    for code, sentence in TEXTS.items():
        write_texts(tmp_path / f"{code}.jsonl", [sentence.format(number) for number in range(12)])
    for code in ("es", "el"):
        pairs = [{"translation": {"en": b, code: a}} for a, b in zip(SENTENCES[code], SENTENCES["en"], strict=True)]
        text = "".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs)
        (tmp_path / f"en-{code}.jsonl").write_text(text * 2, "utf-8")
    for code in ("en", "el"):
        (tmp_path / f"{code}.txt").write_text("\n".join(SENTENCES[code][:2]) + "\n", "utf-8")
    vectors = {"en": [1, 0], "tr": [1, 0.1], "el": [0, 1], "hu": [0.2, 1]}
    (tmp_path / "vectors.json").write_text(json.dumps(vectors))
    # The tasks' data are on the hub.
    no_tasks = SimpleNamespace(evaluate=lambda *_: {}, benchmarks={}, unnamed=[])
    monkeypatch.setattr(harness, "HarnessTasks", lambda *_, **__: no_tasks)


def test_the_commands_have_the_papers_numbers():
    page = {what.partition(":")[0]: (what, settings, commands) for what, settings, commands in rows()}
    held = 0
    for paper, section, row, key, value in FACTS:
        if of_recipes(row):
            continue
        what, settings, commands = page[row]
        wanted = value["is"] if isinstance(value, dict) else value
        if key == "title":
            found = [int(number) for number in re.findall(r"\b\d+(?= )", what)]
        elif key.startswith("--"):
            found = [float(words[words.index(key) + 1]) for words in commands if key in words]
        else:
            found = [reduce(dict.__getitem__, key.split("."), parse_mapping(settings, row))]
        assert wanted in found, (paper, section, row, key)
        held += 1
    assert held > 25


def test_every_command_of_the_papers_runs(workplace):
    made, said = rows(), {}
    assert len(made) > 60
    for what, settings, commands in made:
        if settings:
            stage = parse_mapping(settings, what)
            small = SMALL if "curriculum" not in stage else {k: v for k, v in SMALL.items() if k != "max_steps"}
            size = 64 if Path("pairs").is_dir() else 16  # a sentence pair is not cut
            stage |= {key: 0.1 if key == "replay_share" else 100 for key in LARGE if key in stage}
            Path("s.yaml").write_text(yaml.safe_dump({**small, **stage, "block_size": size}))
        for command in commands:
            before = [None, *command]
            words = [SMALLER.get(option, word) for option, word in zip(before, command, strict=False)]
            assert ("s.yaml" in words) <= bool(settings), what
            more = OPTIONS.get("--pairs" if "--pairs" in words else " ".join(words[:2]), [])
            said[" ".join(words)] = invoke(*words, *more)  # `diff`: no tensor differs
        gc.freeze()  # accelerate collects after each training: a third of its time
    assert Plan.load("random.json").classifier_layers == Plan.load("layer-moe.json").classifier_layers
    assert len(DeviationResult.from_json("deviation.json").similarity_at) == 1
    assert [*RoutingResult.from_json("directions.json").classes] == ["en-el", "el-en"]
    assert Path("comet/lpr-2/en-el.txt").is_file()
    answer = lambda start: next(text for words, text in said.items() if words.startswith(start))  # noqa: E731
    assert "random experts" in answer("analyze routing lpr-2")
    assert "(total 10)" in answer("plan random")
    assert "classifier layers  none: the paper's ablation" in answer("plan layer-moe --analysis analysis.json "
                                                                     "--total-experts 10 --out none.json")  # fmt: skip
    for stage in ("post-pretrain lpr lpr-1", "review lpr-1 lpr-2", "dense deep pro", "post-pretrain pairs eom"):
        assert "frozen tensors are byte-identical" in answer(f"train {stage}"), stage
    assert "frozen tensors are byte-identical, and so are the routers' other rows" in answer("train adapt")
    stages = lambda name: json.loads(Path(name, "config.json").read_text())["expansions"][-1]["stages"]  # noqa: E731
    assert stages("und-2")[-1]["written_by"] == {"und": "base"}
    assert [stages(name)[0]["stage"] for name in ("lpr-one", "lpr-all")] == ["post-pretrain", "everything"]
    assert stages("eom")[-1]["settings"]["masking"]["expert_output"] == 0.1
    log = json.loads(Path("cmr-1/trainer_state.json").read_text())["log_history"]
    assert {"budget_loss", "gate"} <= set().union(*log)
    assert json.loads(Path("counts.json").read_text("utf-8"))["steps"] == 100_000

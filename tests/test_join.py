"""Language packs, joined without training, alone or in a recipe, with the files beside their weights, and evaluated."""

import json
import os
import re
import shutil
import signal
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import yaml
from conftest import invoke, load, refused, save_dense, write_texts
from safetensors.torch import load_file, save_file
from test_train_stage import same_files
from test_tuned import fine_tune

from hf_moe_expand import Plan, expand_checkpoint, graft_delta, join_expansions, run_recipe, validate_recipe
from hf_moe_expand.checkpoint.expansion_only import save_expansion
from hf_moe_expand.checkpoint.records import History
from hf_moe_expand.checkpoint.source import name_in_results, own_name
from hf_moe_expand.hub.published import check_code, published_files
from hf_moe_expand.report.page import make_page
from hf_moe_expand.runs.recipe import Recipe

EL = Plan("layer-moe", [2, 1, 3], old=["en"], new=["el"], exclusive=True)
HU = Plan("layer-moe", [3, 2, 1], old=["en", "de"], new=["hu"], exclusive=True)
TR = Plan("layer-moe", [2, 2, 2], old=["en"], new=["tr"], exclusive=True)


def one_expert(language, top_k=2):
    return Plan("moe-lpr", [2, 2, 2], top_k=top_k, old=["en"], new=[language], exclusive=True)


def make_pack(folder, base, plan, seed, **arguments):
    """An expanded checkpoint whose new experts and routers are no one else's."""
    expand_checkpoint(base, folder, plan, seed=seed, **arguments)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        new_expert = ".experts." in name and ".experts.0." not in name
        if new_expert or "router" in name:
            scale = 0.3 if new_expert else 1.0
            tensor.copy_(scale * torch.randn(tensor.shape, generator=generator))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    """Three packs of one base, beside it."""
    home, named = tmp_path_factory.mktemp("packs"), {"el": EL, "hu": HU, "tr": TR}
    base = save_dense(home / "base")
    return {code: make_pack(home / f"qwen-{code}", base, plan, at) for at, (code, plan) in enumerate(named.items(), 1)}


IDS = torch.randint(0, 250, (2, 14), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def assert_as_alone(folder, packs):
    """Whether a text in each pack's language gets what the pack alone computes, and one in the base's what it does."""
    model, row = load(folder), IDS[:1]
    for code, pack in packs.items():
        alone = load(pack)(row, languages=code).logits
        torch.testing.assert_close(model(row, languages=code).logits, alone, rtol=1e-4, atol=1e-5)
    with model.use_expert(0):
        home = model(row).logits
    assert torch.equal(model(row, languages="en").logits, home)


def test_joined_models_and_expansion_only_packs_join(packs, base, tmp_path):
    small = tmp_path / "qwen-tr"
    save_expansion(packs["tr"], small, base=base)
    fields = json.loads((small / "config.json").read_text())
    fields["parts"]["expansion_only"]["base_model"] = str(base)
    (small / "config.json").write_text(json.dumps(fields))
    join_expansions([packs["el"], packs["hu"]], tmp_path / "two")
    report = join_expansions([tmp_path / "two", small], tmp_path / "again")
    assert report == replace(join_expansions([*packs.values()], tmp_path / "three"), out=tmp_path / "again")
    same_files(tmp_path / "again", tmp_path / "three")


def test_updates_and_ffns_meet(packs, base, tmp_path):
    plan = Plan("mola", [2, 3, 1], old=["en"], new=["fr"], exclusive=True)
    lora = make_pack(tmp_path / "qwen-fr", base, plan, 7, expert_kind="lora", lora_rank=4, lora_alpha=6.0)
    join_expansions([packs["el"], lora], tmp_path / "out")
    join_expansions([tmp_path / "out", packs["hu"]], tmp_path / "more")
    assert_as_alone(tmp_path / "more", {"el": packs["el"], "fr": lora, "hu": packs["hu"]})
    said = invoke("inspect", tmp_path / "out")
    assert re.search(r"expansion 2 +pack qwen-fr: mola on base: old en; new fr\n", said)
    check_code(tmp_path / "out")  # else it is not pushed
    load(tmp_path / "out").save_pretrained(tmp_path / "saved")
    assert_as_alone(tmp_path / "saved", {"el": packs["el"], "fr": lora})


def test_the_history_keeps_each_packs_own(packs, base, tmp_path):
    join_expansions([packs["el"], packs["hu"]], tmp_path / "out")
    history = History.of(json.loads((tmp_path / "out" / "config.json").read_text()))
    assert [one.pack for one in history.expansions] == ["qwen-el", "qwen-hu"]
    assert history.classes == {"en": 0, "de": 0, "el": 1, "hu": 2}
    assert all(set(a.new_languages) <= set(b.old_languages) for a, b in pairwise(history.expansions))
    later = Plan("moe-lpr", [2, 2, 2], old=["en", "el"], new=["fr"], exclusive=True)
    make_pack(tmp_path / "qwen-fr", base, later, 5)  # another pack's new language is not old
    assert join_expansions([packs["el"], tmp_path / "qwen-fr"], tmp_path / "fr").old_languages == ["en"]


def test_what_does_not_fit_is_refused(packs, base, tmp_path):
    def expanded(name, plan):
        expand_checkpoint(base, tmp_path / name, plan)
        return tmp_path / name

    def staged(stage):
        folder = shutil.copytree(packs["hu"], tmp_path / stage)
        fields = json.loads((folder / "config.json").read_text())
        fields["expansions"][-1]["stages"].append({"stage": stage})
        (folder / "config.json").write_text(json.dumps(fields))
        return folder

    el = packs["el"]
    other = make_pack(tmp_path / "of-another", save_dense(tmp_path / "other", seed=9), one_expert("fr"), 4)
    three = expanded("qwen-fi", one_expert("fi", top_k=3))
    for said, *given in (
        ("two or more packs", el),
        ("is no expansion of the base of qwen-el: tensor '(lm_head|model.embed_tokens).weight' differs", el, other),
        ("el: qwen-el and again both add it", el, shutil.copytree(el, tmp_path / "again")),
        ("dmoe: nothing of a DMoE's base is frozen", el,
         expanded("dmoe", Plan("dmoe", [2, 1, 2], groups=[["en"], ["el"]]))),
        ("a qwen2 checkpoint, not an expanded one", el, base),
        ("router_top_k is 2 in qwen-el, but 3 in qwen-fi", el, three),
        ("router_top_k is 3 in qwen-fi, but 2 in qwen-el", three, el),
        ("everything: `everything` trained the base inside", el, staged("everything")),
        ("some packs got a graft, and some did not", el, staged("graft")),
        ("routed: its routers choose among all experts, and a language pack has", el,
         expanded("routed", Plan("moe-lpr", [3, 3, 3], old=["en"], new=["pl"]))),
    ):  # fmt: skip
        refused(join_expansions, given, tmp_path / "out", says=said)
    assert not (tmp_path / "out").exists()


def test_a_run_names_its_pack_and_a_name_may_be_given(packs, tmp_path):
    """Both runs end in a folder `gated`."""
    el, hu = (tmp_path / "runs" / f"qwen-{code}" / "2" / "gated" for code in ("el", "hu"))
    for code, folder in (("el", el), ("hu", hu)):
        shutil.copytree(packs[code], folder)
        (folder.parents[1] / "steps.json").write_text("{}")
    assert name_in_results(el) == "qwen-el/2/gated"
    assert own_name(el) == name_in_results(packs["el"]) == own_name(packs["el"]) == "qwen-el"
    assert name_in_results("me/qwen") == own_name("me/qwen") == "me/qwen"
    assert "# qwen-el\n" in invoke("card", el)
    assert join_expansions([el, hu], tmp_path / "out").packs == ["qwen-el", "qwen-hu"]
    assert join_expansions([f"greek={el}", hu], tmp_path / "a=b").packs == ["greek", "qwen-hu"]
    assert join_expansions([tmp_path / "a=b", packs["tr"]], tmp_path / "three").packs[0] == "greek"
    said = invoke("join", tmp_path / "cli", f"greek={el}", f"Hungarian 1={hu}")
    assert "pack 2  Hungarian 1: hu" in said
    assert f"until you run `gates {tmp_path / 'cli'} OUT`" in said
    assert "pack greek" in invoke("inspect", tmp_path / "cli")
    for wrong, *names in (("a: two packs have this name", "a", "a"), ("a pack's name must be of", "a\nb", "c")):
        named = [f"{name}={pack}" for name, pack in zip(names, (el, hu), strict=True)]
        refused(invoke, "join", tmp_path / "no", *named, says=wrong)
    again = [f"both={tmp_path / 'out'}", packs["tr"]]
    refused(join_expansions, again, tmp_path / "no", says="joins packs already, which keep their names")


WORDS = {
    "en": "the cat {} sits", "de": "die Katze {} sitzt", "el": "η γάτα {} κάθεται", "hu": "a macska {} ül",
    "tr": "kedi {}",
}  # fmt: skip


def test_a_link_out_of_the_folder_is_not_followed(packs, base, tmp_path):
    (tmp_path / "token").write_text("a secret of the user's")
    pack, dense = shutil.copytree(packs["el"], tmp_path / "qwen-el"), shutil.copytree(base, tmp_path / "dense")
    for folder in (pack, dense):
        (folder / "vocab.txt").symlink_to(tmp_path / "token")
    for call, *given in (
        (join_expansions, [pack, packs["hu"]], tmp_path / "out"),
        (expand_checkpoint, dense, tmp_path / "out", EL),
        (graft_delta, packs["el"], tmp_path / "out", base, dense),
    ):
        refused(call, *given, says=r"vocab\.txt: .* a link that leads out of it")
    assert not (tmp_path / "out").exists()


def test_a_link_inside_the_folder_and_those_of_the_hubs_cache_are_files(packs, tmp_path):
    el, hu = packs["el"], packs["hu"]
    cache = tmp_path / "models--me--el"
    snapshot = shutil.copytree(el, cache / "snapshots" / "0123")
    (cache / "blobs").mkdir()
    shutil.move(snapshot / "tokenizer.json", cache / "blobs" / "abc")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/abc")
    (snapshot / "vocab.json").symlink_to("tokenizer.json")
    join_expansions([snapshot, hu], tmp_path / "out")
    assert not (tmp_path / "out" / "tokenizer.json").is_symlink()
    published_files(tmp_path / "out")


@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "broken link"])
def test_what_is_no_file_is_refused_at_once(packs, tmp_path, kind):
    signal.alarm(60)  # reading a pipe or a device never ends
    try:
        for name in ("tokenizer_config.json", "generation_config.json", "merges.txt"):
            pack = shutil.copytree(packs["el"], tmp_path / name / "qwen-el")
            place = pack / name
            place.unlink(missing_ok=True)
            if kind == "folder":
                place.mkdir()
            elif kind == "pipe":
                os.mkfifo(place)
            else:
                place.symlink_to("/dev/zero" if kind == "device" else "nowhere")
            refused(join_expansions, [pack, packs["hu"]], tmp_path / "out", says=name)
    finally:
        signal.alarm(0)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def home(packs):
    home = packs["el"].parent
    for code, words in WORDS.items():
        write_texts(home / f"{code}.jsonl", [words.format(number) for number in range(20)])
        write_texts(home / f"{code}.test.jsonl", [words.format(number) for number in range(100, 120)])
    return home


def fields(home, tmp_path, **changes):
    texts = {code: str(home / f"{code}.jsonl") for code in WORDS}
    found = {
        "base": str(home / "base"), "output": str(tmp_path / "run"),
        "join": {"packs": [str(home / "qwen-el"), str(home / "qwen-hu")]},
        "old": {code: texts[code] for code in ("en", "de")}, "new": {code: texts[code] for code in ("el", "hu")},
        "test": {code: str(home / f"{code}.test.jsonl") for code in ("en", "el", "hu", "tr")},
        "gates": {"tokens": 200, "anchor_tokens": 100}, "evaluation": {"block_size": 32, "batch_size": 4}, **changes,
    }  # fmt: skip
    return {name: value for name, value in found.items() if value is not None}


def recipe(home, tmp_path, **changes):
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(fields(home, tmp_path, **changes)))
    return Recipe.load(file)


def ran(loaded):
    """The steps of a run and its last checkpoint; run again, each is done already."""
    said, again = [], []
    last = run_recipe(loaded, said.append)
    run_recipe(loaded, again.append)
    assert all("done already" in line for line in again if line.startswith("["))
    lines = [line for line in said if line.startswith("[") and not line.endswith("...")]
    return [line.split("] ")[1].split(":")[0] for line in lines], last


def test_it_joins_fits_the_gate_and_evaluates_and_resumes(home, tmp_path, quick_gates):
    loaded, run = recipe(home, tmp_path), tmp_path / "run"
    assert "join: qwen-el, qwen-hu; experts per layer 4 2 3" in validate_recipe(loaded, offline=True)
    assert ran(loaded) == (["join", "gates", "evaluate"], run / "gates")
    evaluation = json.loads((run / "evaluation.json").read_text())
    assert list(evaluation["models"]) == ["base", "joined", "gated"]
    assert (evaluation["expansions"], evaluation["unnamed"]) == ([["el"], ["hu"]], ["tr"])
    config = json.loads((run / "gates" / "config.json").read_text())
    assert config["parts"]["gate"]["languages"][1:] == [["el"], ["hu"]]
    page = make_page(run)
    assert "New: el, then hu." in page
    assert "Packs: qwen-el, qwen-hu." in page


def test_without_text_it_joins_and_trains_nothing(home, tmp_path):
    loaded, run = recipe(home, tmp_path, old=None, new=None, gates=None), tmp_path / "run"
    validate_recipe(loaded)
    assert ran(loaded) == (["join", "evaluate"], run / "joined")
    join_expansions(loaded.join.packs, tmp_path / "same")
    same_files(run / "joined", tmp_path / "same")
    evaluation = json.loads((run / "evaluation.json").read_text())
    assert (evaluation["old"], evaluation["expansions"]) == (["en", "de"], [["el"], ["hu"]])


def test_what_a_recipe_cannot_say(home, tmp_path):
    for message, changes in (
        ("plan: a recipe with `join` makes and trains no new experts", {"plan": {"method": "moe-lpr", "experts": 2}}),
        ("expansions: a recipe with `join`", {"expansions": [{"new": {"tr": "tr.jsonl"}}]}),
        ("join.packs", {"join": {"packs": ["only-one"]}}),
        ("join: unknown key `gates`", {"join": {"packs": ["a", "b"], "gates": False}}),
        ("review: a recipe with `join` makes and trains no new", {"review": {"max_steps": 2}}),
    ):
        refused(recipe, home, tmp_path, says=message, **changes)


def test_what_validation_refuses(home, tmp_path):
    el, wide = str(home / "qwen-el"), save_dense(tmp_path / "wide", intermediate_size=64)
    copied, nothing = shutil.copytree(el, tmp_path / "copy"), tmp_path / "nothing"
    texts = {code: str(home / f"{code}.jsonl") for code in ("el", "hu", "tr")}
    for message, changes in (
        ("join.packs: .*no such folder", {"join": {"packs": [el, str(nothing)]}}),
        ("join.packs: .*a qwen2 checkpoint, not an expanded one", {"join": {"packs": [el, str(wide)]}}),
        ("join.packs: el: qwen-el and copy both add it", {"join": {"packs": [el, str(copied)]}}),
        ("qwen-el: is no expansion of `base`, .*wide: tensor .* differs", {"base": str(wide)}),
        ("new: tr: the packs have el, hu", {"new": texts}),
        ("gates: no text in hu, which the gate shall recognise", {"new": {"el": texts["el"]}}),
        ("output: .*lies in the input folder", {"output": f"{el}/run"}),
    ):
        refused(validate_recipe, recipe(home, tmp_path, **changes), says=message)
    assert not (tmp_path / "run").exists()


def test_fine_tunes_become_languages_fit_the_gate_and_are_evaluated(home, tmp_path, quick_gates):
    models = {code: str(tmp_path / f"tuned-{code}") for code in ("el", "hu")}
    for seed, folder in enumerate(models.values()):
        fine_tune(load(home / "base"), seed).save_pretrained(folder)
    loaded = recipe(home, tmp_path, join=None, tuned=models, old={"en": str(home / "en.jsonl")})
    (line,) = [line for line in validate_recipe(loaded) if line.startswith("tuned")]
    assert line.endswith("parameters, if all of their tensors differ")
    assert ran(loaded) == (["tuned", "gates", "evaluate"], tmp_path / "run" / "gates")
    some = {"join": None, "tuned": models, "new": None, "gates": None, "test": {"el": str(home / "el.test.jsonl")}}
    said = "test: no held-out text in de, en, hu: it is not measured"
    assert said in validate_recipe(recipe(home, tmp_path, **some))
    for changes, why in (
        ({"plan": {"method": "exclusive"}}, "a recipe with `tuned` makes and trains no new experts"),
        ({"tuned": {"el": models["el"]}}, "`tuned` has no fine-tune for it"),
        ({"new": {"el": str(home / "el.jsonl")}}, "^gates: no text in hu, which the gate shall recognise"),
        ({"join": {"packs": ["a", "b"]}}, "a recipe with `join` takes no fine-tunes"),
    ):
        given = {"join": None, "tuned": models, **changes}
        refused(lambda given=given: validate_recipe(recipe(home, tmp_path, **given)), says=why)


def test_offline_and_variables(home, tmp_path, monkeypatch):
    file = tmp_path / "recipe.yaml"
    packs = {"packs": ["$PACKS/qwen-el", "me/qwen-hu"]}
    file.write_text(yaml.safe_dump(fields(home, tmp_path, join=packs)))
    refused(Recipe.load, file, says=r"join\.packs\[0\]: the environment variable \$PACKS is not set")
    found = validate_recipe(Recipe.load(file, unset_ok=True), offline=True)
    assert "skipped: join: base and packs are not whole on this machine" in found
    monkeypatch.setenv("PACKS", str(home))
    assert Recipe.load(file).join.packs[0] == str(home / "qwen-el")

"""The files beside the weights: none from outside a checkpoint's folder, and nothing but files."""

import os
import shutil
import signal

import pytest
from conftest import refused
from test_join import EL, HU, make_pack

from hf_moe_expand import expand_checkpoint, graft_delta, join_expansions
from hf_moe_expand.hub.published import published_files


@pytest.fixture(scope="module")
def packs(base, tmp_path_factory):
    home = tmp_path_factory.mktemp("companions")
    return base, make_pack(home / "qwen-el", base, EL, 1), make_pack(home / "qwen-hu", base, HU, 2)


def test_a_link_out_of_the_folder_is_not_followed(packs, tmp_path):
    base, el, hu = packs
    (tmp_path / "token").write_text("a secret of the user's")
    pack = shutil.copytree(el, tmp_path / "qwen-el")
    (pack / "chat_template.jinja").symlink_to(tmp_path / "token")
    said = "is a link that leads out of the folder"
    refused(join_expansions, [pack, hu], tmp_path / "out", says=rf"chat_template\.jinja: {said}")
    dense = shutil.copytree(base, tmp_path / "dense")
    (dense / "vocab.txt").symlink_to(tmp_path / "token")
    refused(expand_checkpoint, dense, tmp_path / "out", EL, says=r"vocab\.txt: is a link that leads out of the folder")
    refused(graft_delta, el, tmp_path / "out", base, dense, says=r"vocab\.txt: is a link that leads out of the folder")
    assert not (tmp_path / "out").exists()


def test_a_link_inside_the_folder_and_those_of_the_hubs_cache_are_files(packs, tmp_path):
    _, el, hu = packs
    cache = tmp_path / "models--me--el"
    snapshot = shutil.copytree(el, cache / "snapshots" / "0123")
    (cache / "blobs").mkdir()
    shutil.move(snapshot / "tokenizer.json", cache / "blobs" / "abc")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/abc")
    (snapshot / "vocab.json").symlink_to("tokenizer.json")
    join_expansions([snapshot, hu], tmp_path / "out")
    assert not (tmp_path / "out" / "tokenizer.json").is_symlink()
    published_files(tmp_path / "out")


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "merges.txt"])
@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "broken link"])
def test_what_is_no_file_is_refused_at_once(packs, tmp_path, name, kind):
    _, el, hu = packs
    pack = shutil.copytree(el, tmp_path / "qwen-el")
    place = pack / name
    place.unlink(missing_ok=True)
    if kind == "folder":
        place.mkdir()
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to("/dev/zero" if kind == "device" else "nowhere")
    signal.alarm(60)  # reading a pipe or a device never ends
    try:
        refused(join_expansions, [pack, hu], tmp_path / "out", says=name)
    finally:
        signal.alarm(0)
    assert not (tmp_path / "out").exists()

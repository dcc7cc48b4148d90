"""A push with `--base` where the hub is out of reach: nothing waits for it, and the user hears of it."""

import pytest
from conftest import save_dense
from huggingface_hub.errors import LocalEntryNotFoundError

from hf_moe_expand import Plan, expand_checkpoint
from hf_moe_expand.hub import card
from hf_moe_expand.hub import files as hub_files
from hf_moe_expand.hub.publish import push_to_hub


@pytest.mark.parametrize("reachable", [False, True])
def test_without_the_hub_nothing_waits_for_it(tmp_path, monkeypatch, reachable):
    expand_checkpoint(
        save_dense(tmp_path / "tiny"), tmp_path / "tiny-el", Plan("moe-lpr", [2] * 3, old=["en"], new=["el"])
    )
    asked = []

    def download(name, file, **options):
        asked.append((name, file, options["local_files_only"]))
        raise LocalEntryNotFoundError("not in the cache")

    for module in (hub_files, card):
        monkeypatch.setattr(module, "hub_problem", lambda: "" if reachable else "no route")
        monkeypatch.setattr(module, "hf_hub_download", download)
    said = []
    pushed = push_to_hub(tmp_path / "tiny-el", "me/tiny-el", base="org/tiny", dry_run=True, say=said.append)
    assert [file for _, file, _ in asked] == ["config.json", "README.md"]
    assert all(
        alone is not reachable for *_, alone in asked
    )  # the library is told not to try where it would be in vain
    assert any(line.startswith("base: org/tiny was not compared with the checkpoint") for line in said)
    assert "org/tiny" in pushed.card

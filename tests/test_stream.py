"""Text that is streamed: each document once a pass, the same blocks after an interruption, shares, budgets, bad shards
and places that drop."""

import gzip
import json
import lzma
from itertools import islice, pairwise
from unittest.mock import patch

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import BEGIN, beginning_tokenizer, byte_tokenizer, save_dense, write_texts
from hypothesis import given, settings
from hypothesis import strategies as st
from test_train_stage import same_files
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from hf_moe_expand import (
    DenseConfig,
    GroupConfig,
    Plan,
    PostPretrainConfig,
    ReviewConfig,
    expand_checkpoint,
    train_stage,
)
from hf_moe_expand.checkpoint.source import load_expanded_config
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.data import stream_reader
from hf_moe_expand.data.sources import LanguageText
from hf_moe_expand.data.stream import TextStream
from hf_moe_expand.stages import streaming
from hf_moe_expand.stages.streaming import is_streamed
from hf_moe_expand.stages.trainer import StageTrainer
from hf_moe_expand.trainers import LanguageMix

END = 256
QUICK = {"block_size": 16, "per_device_train_batch_size": 2, "disable_tqdm": True, "stream": True}


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(stream_reader, "_WINDOW", 4)
    monkeypatch.setattr(stream_reader, "_AT_ONCE", 3)


def texts_of(code, count):
    return [f"{code} {number}" + " word" * (number % 7) for number in range(count)]


@pytest.fixture
def shards(tmp_path):
    """`shards("el", 3, 50)`: a folder of three files, with 50 documents together."""

    def make(code, files, count):
        (tmp_path / code).mkdir()
        for number in range(files):
            write_texts(tmp_path / code / f"{number}.jsonl", texts_of(code, count)[number::files])
        return LanguageText(code, str(tmp_path / code))

    return make


def begun(texts, rank=0, ranks=1, workers=1, rows=2, mix=None, block_size=8, tokenizer=None, saved=(), **options):
    texts = {text.language: text for text in texts}
    stream = TextStream(texts, tokenizer or byte_tokenizer(), block_size, 7, **options)
    stream.said = stream.begin(mix or LanguageMix([1] * len(texts)), rows, 1, rank, ranks, workers, saved=saved)
    return stream


def batches(stream, count, processes=0):
    loader = DataLoader(stream, batch_size=None, num_workers=processes, generator=torch.Generator())
    return [{name: value.tolist() for name, value in batch.items()} for batch in islice(stream.received(loader), count)]


def as_json(value):
    return json.loads(json.dumps(value))


def read_once(make, ranks, code="el"):
    """The documents that all readers together give before they read any again, those that are begun only left out."""
    found = []
    for rank in range(ranks):
        tokens = []
        for batch in make(rank, ranks):
            assert "error" not in batch, batch
            if batch["place"][1][code]["counts"]["seen"].get("repeated"):
                break
            tokens += batch["input_ids"].flatten().tolist()
        found += documents_of(tokens)
    return found


def documents_of(tokens):
    ends = [-1, *(place for place, token in enumerate(tokens) if token == END)]
    assert ends[-1] == len(tokens) - 1
    return [byte_tokenizer().decode(tokens[a + 1 : b]) for a, b in pairwise(ends)]


# --- what it reads ---------------------------------------------------------------------------------------------------


def write_as(folder, kind, texts):
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    lines = "".join(f"{text}\n" for text in texts).encode()
    path = folder / f"el{kind}"
    if kind == ".parquet":
        pq.write_table(pa.table({"text": texts}), path, row_group_size=7)
    elif kind == ".jsonl.zst":
        with pa.CompressedOutputStream(str(path), "zstd") as file:
            file.write(rows)
    else:
        open_ = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
        with open_(path, "wb") as file:
            file.write(lines if ".txt" in kind else rows)
    return path


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("kind", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".txt", ".txt.xz", ".parquet"])
def test_each_document_comes_once_in_a_pass(tmp_path, kind, ranks):
    source = LanguageText("el", str(write_as(tmp_path, kind, texts_of("el", 33))))
    found = read_once(lambda rank, ranks: begun([source], rank, ranks, rows=1, block_size=1), ranks)
    assert sorted(found) == sorted(texts_of("el", 33))
    assert found != texts_of("el", 33)  # but in another order


@pytest.mark.parametrize("files", [1, 3, 8])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_shards_are_dealt_to_readers(shards, files, ranks):
    source = shards("el", files, 40)
    found = read_once(lambda rank, ranks: begun([source], rank, ranks, rows=1, block_size=1), ranks)
    assert sorted(found) == sorted(texts_of("el", 40))


@pytest.mark.parametrize(
    "address", ["memory://bucket/el/*.jsonl", "memory://bucket/el", "memory://bucket/el/0.jsonl", "file://{}/*.jsonl"]
)
def test_any_place_is_read(shards, tmp_path, address):
    local = shards("el", 2, 20)
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    for path in (tmp_path / "el").iterdir():
        memory.pipe(f"/bucket/el/{path.name}", path.read_bytes())
    memory.pipe("/bucket/el/README.md", b"about")
    expected = texts_of("el", 20)[::2] if address.endswith("0.jsonl") else texts_of("el", 20)
    source = LanguageText("el", address.format(local.source))
    found = read_once(lambda rank, ranks: begun([source], rank, ranks, rows=1, block_size=1), 2)
    assert sorted(found) == sorted(expected)
    assert sorted(source.load()["text"]) == sorted(expected)  # map mode, too


def test_a_block_begins_as_in_map_mode(shards):
    source = shards("el", 1, 20)
    for batch in batches(begun([source], tokenizer=beginning_tokenizer()), 5):
        assert [ids[0] for ids in batch["input_ids"]] == [BEGIN, BEGIN]
        assert batch["labels"] == batch["input_ids"]
        assert batch["language_ids"] == [[0] * 8] * 2


# --- it goes on at the same document ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("processes", "taken"), [(0, 1), (0, 7), (2, 0), (2, 1), (2, 8), (3, 20)])
def test_an_interruption_changes_no_block(shards, processes, taken):
    sources = [shards("el", 3, 50), shards("en", 1, 20)]
    options = {"workers": processes, "mix": LanguageMix([3, 1])}
    whole = begun(sources, **options)
    expected = batches(whole, 40, processes)
    first = begun(sources, **options)
    assert batches(first, taken, processes) == expected[:taken]
    second = begun(sources, **options, saved=[as_json(first.state())])
    assert batches(second, 40 - taken, processes) == expected[taken:]
    assert second.said == ""
    assert as_json(second.state()) == as_json(whole.state())


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=4), st.integers(0, 30), st.integers(1, 9), st.integers(1, 5),
    st.integers(1, 3),
)  # fmt: skip
def test_any_interruption_at_any_place(tmp_path_factory, sizes, taken, block_size, window, ranks):
    folder = tmp_path_factory.mktemp("any")
    for number, size in enumerate([*sizes, 3]):
        write_texts(folder / f"{number}.jsonl", [f"{number} {one}" for one in range(size)] or [" "])
    source = LanguageText("el", str(folder))
    with patch.object(stream_reader, "_WINDOW", window):
        expected = batches(begun([source], ranks - 1, ranks, block_size=block_size), 40)
        first = begun([source], ranks - 1, ranks, block_size=block_size)
        batches(first, taken)
        saved = [as_json(first.state())] * ranks
        second = begun([source], ranks - 1, ranks, block_size=block_size, saved=saved)
        assert batches(second, 40 - taken) == expected[taken:]


@pytest.mark.parametrize(("before", "after"), [((2, 1), (1, 1)), ((1, 2), (3, 1)), ((2, 2), (1, 3)), ((3, 1), (2, 2))])
@pytest.mark.parametrize("files", [1, 4, 9])
def test_other_ranks_and_workers_read_on_without_a_gap(shards, files, before, after):
    source = shards("el", files, 60)
    states, tokens = [], []
    options = {"rows": 1, "block_size": 1}
    for rank in range(before[0]):
        stream = begun([source], rank, before[0], before[1], **options)
        tokens.append([])
        for batch in batches(stream, 50 + 30 * rank, before[1]):
            tokens[-1] += batch["input_ids"][0]
        states.append(as_json(stream.state()))
    for state in states:  # ranks take equally many
        state["taken"] = 50
    said, finished = set(), []
    for rank in range(after[0]):
        stream = begun([source], rank, after[0], after[1], **options, saved=states)
        said.add(stream.said)
        for worker in range(after[1]):
            reader = reader_of(stream, worker)
            rest = []
            while not reader.counts["seen"]["repeated"]:
                rest += reader.take(1)
            finished += rest[:-1]
    # What was begun before, and what is begun afterwards: all documents, each once.
    assert finished.count(END) + sum(part.count(END) for part in tokens) == 60
    assert len(said) == 1
    assert f"{before[0]} x {before[1]} readers" in said.pop()


def reader_of(stream, worker):
    return stream_reader.Reader(
        "el", 0, stream.shards["el"], stream.parts["el"], stream.tokenizer, stream.seed, "stop",
        stream.places[worker]["el"], stream.readers, False,
    )  # fmt: skip


def test_a_state_of_other_text_is_refused(shards):
    state = begun([shards("el", 3, 9)]).state()
    with pytest.raises(InputError, match="other shards than before the interruption"):
        begun([LanguageText("el", shards("en", 2, 9).source)], saved=[state])


# --- shares ----------------------------------------------------------------------------------------------------------


def drawn(mix, count, ranks=1, rows=4, accumulation=1):
    """The language of each row of each batch, `[ranks, count, rows]`."""
    stream = TextStream.__new__(TextStream)
    stream.seed = 3
    found = []
    for rank in range(ranks):
        stream.mix, stream.rank, stream.rows, stream.accumulation = mix, rank, rows, accumulation
        found.append([stream._languages(batch) for batch in range(count)])
    return np.array(found)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_shares_are_kept_all_the_way(temperature):
    mix = LanguageMix([70, 25, 5], temperature)
    weights = np.array([70, 25, 5]) ** (1 / temperature)
    languages = drawn(mix, 400, ranks=2)
    for rank in languages:
        for some in np.split(rank.flatten(), 5):  # of 320 blocks each
            assert np.abs(np.bincount(some, minlength=3) / len(some) - weights / weights.sum()).max() < 0.02
    assert (languages[0] != languages[1]).any()


def test_a_curriculum_counts_steps():
    languages = drawn(LanguageMix([1, 1, 1], entry=[0, 5, 10]), 60, accumulation=3)[0]
    assert [sorted(set(languages[3 * step : 3 * step + 3].flatten())) for step in (4, 9)] == [[0], [0, 1]]
    assert {1} <= set(languages[15:30].flatten())
    assert {0, 1, 2} == set(languages[30:].flatten())


def test_a_batch_has_one_group():
    groups = np.array([0, 1, 1])
    languages = drawn(LanguageMix([2, 1, 1], groups=groups.tolist()), 300)[0]
    of_batches = groups[languages]
    assert (of_batches == of_batches[:, :1]).all()
    assert abs(of_batches.mean() - 0.5) < 0.05
    assert set(languages.flatten()) == {0, 1, 2}


# --- stages ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("stream")
    for code, count in (("en", 40), ("el", 60), ("tr", 30)):
        (root / code).mkdir()
        for number in range(3):
            write_texts(root / code / f"{number}.jsonl", texts_of(code, count)[number::3])
    base = save_dense(root / "base", vocab_size=258)
    expand_checkpoint(base, root / "expanded", Plan("moe-lpr", [2, 1, 2], [0], old=["en"], new=["el", "tr"]))
    expand_checkpoint(base, root / "dmoe", Plan("dmoe", [2, 1, 2], groups=[["en"], ["el", "tr"]]))
    return root


def data_of(root, *codes):
    return {code: LanguageText(code, str(root / code)) for code in codes}


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def interrupted(step):
    """Inside, a training ends after a step, as a time limit would end it."""
    begun = StageTrainer.__init__

    def begin(self, *args, **kwargs):
        begun(self, *args, **kwargs)
        self.add_callback(StopAt(step))

    return patch.object(StageTrainer, "__init__", begin)


STAGES = {
    "stage 1": (PostPretrainConfig, {}, ("el", "tr")),
    "replay": (PostPretrainConfig, {"replay": True, "replay_share": 0.25}, ("en", "el", "tr")),
    "temperature": (PostPretrainConfig, {"temperature": 5.0}, ("el", "tr")),
    "review": (ReviewConfig, {}, ("en", "el", "tr")),
    "group": (GroupConfig, {}, ("en", "el", "tr")),
    "dense": (DenseConfig, {}, ("el",)),
}
START = {"group": "dmoe", "dense": "base"}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stage_that_was_interrupted_ends_the_same(root, tmp_path, stage, workers, capsys):
    kind, changes, codes = STAGES[stage]

    def config():
        made = kind(**QUICK, **changes, max_steps=6, save_steps=2, gradient_accumulation_steps=2)
        made.dataloader_num_workers = workers
        return made

    start, data = root / START.get(stage, "expanded"), data_of(root, *codes)
    expected = train_stage(start, tmp_path / "whole", data, config())
    with interrupted(5), pytest.raises(KeyboardInterrupt):
        train_stage(start, tmp_path / "again", data, config())
    assert train_stage(start, tmp_path / "again", data, config()) == expected
    same_files(tmp_path / "again", tmp_path / "whole")
    assert sum(expected.tokens.values()) == 6 * 2 * 2 * 16 == expected.tokens_seen
    assert expected.settings["stream"] is True
    assert "resumes at step 4 of 6" in capsys.readouterr().out


def test_workers_may_change(root, tmp_path, capsys):
    made = [PostPretrainConfig(**QUICK, max_steps=6, save_steps=2) for _ in range(2)]
    made[0].dataloader_num_workers = 0
    with interrupted(5), pytest.raises(KeyboardInterrupt):
        train_stage(root / "expanded", tmp_path / "out", data_of(root, "el", "tr"), made[0])
    record = train_stage(root / "expanded", tmp_path / "out", data_of(root, "el", "tr"), made[1])
    assert record.tokens_seen == sum(record.tokens.values()) == 6 * 2 * 16
    out = capsys.readouterr().out
    assert "by 1 x 1 readers (ranks x workers) before the interruption, and is by 1 x 2 now" in out


@pytest.mark.parametrize("stage", ["replay", "review"])
def test_shares_of_old_and_new_text(root, tmp_path, stage):
    kind, changes, codes = STAGES[stage]
    record = train_stage(
        root / "expanded", tmp_path / "out", data_of(root, *codes), kind(**QUICK, **changes, tokens=6400)
    )
    share = record.tokens_seen_by_language["en"] / record.tokens_seen
    assert share == pytest.approx(0.5 if stage == "review" else 0.25, abs=0.02)


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize(("given", "steps"), [
    ({"tokens": 640}, 20), ({"tokens": 641.0}, 21), ({"tokens": 1e4, "gradient_accumulation_steps": 4}, 79),
    ({"tokens_per_language": 320}, 20), ({"tokens_per_language": 320, "num_train_epochs": 2}, 40),
    ({"tokens_per_language": 320, "tokens": 64}, 2),
])  # fmt: skip
def test_a_budget_in_tokens(root, tmp_path, given, steps, streams):
    if not streams and "tokens" not in given:
        pytest.skip("whole documents are taken")
    config = PostPretrainConfig(**{**QUICK, "stream": streams}, **given)
    record = train_stage(root / "expanded", tmp_path / "out", data_of(root, "el", "tr"), config)
    assert record.steps == steps


def test_passes_over_a_stream_are_counted_from_its_size(root, tmp_path, capsys):
    config = PostPretrainConfig(**QUICK, num_train_epochs=3)
    record = train_stage(root / "expanded", tmp_path / "out", data_of(root, "el", "tr"), config)
    tokens = sum(len(text.encode()) + 1 for code, count in (("el", 60), ("tr", 30)) for text in texts_of(code, count))
    assert record.steps == pytest.approx(3 * tokens / 32, rel=0.05)
    out, errors = capsys.readouterr()
    assert "text is read while the model trains: el about 1," in out
    assert "of them again" in out
    assert "el: all of its text was read once; it is read again" in errors


@pytest.mark.parametrize(("size", "changes", "streams"), [
    (0, {}, False), (1, {}, True), (1, {"stream": False}, False), (0, {"stream": True}, True),
])  # fmt: skip
def test_large_text_is_streamed_by_default(root, size, changes, streams, monkeypatch):
    texts = data_of(root, "el", "tr")
    total = sum(path.stat().st_size for text in texts.values() for path in text.files())
    monkeypatch.setattr(streaming, "STREAMED", total - size)
    model = load_expanded_config(root / "expanded")
    assert is_streamed(PostPretrainConfig(**changes), texts, model) is streams
    assert not is_streamed(ReviewConfig(old_documents=5), data_of(root, "en", "el", "tr"), model)


@pytest.mark.parametrize(("changes", "streams"), [
    ({}, False), ({"tokens": 1e6}, True), ({"max_steps": 10}, True), ({"tokens_per_language": 100}, True),
    ({"max_steps": 10, "stream": False}, False),
])  # fmt: skip
@pytest.mark.parametrize("source", ["hub:me/data", "s3://bucket/el/*.parquet"])
def test_text_elsewhere_is_streamed_where_its_amount_is_known(root, source, changes, streams):
    model = load_expanded_config(root / "expanded")
    texts = {code: LanguageText(code, source) for code in ("el", "tr")}
    assert is_streamed(PostPretrainConfig(**changes), texts, model) is streams


@pytest.mark.parametrize(("kind", "changes", "message"), [
    (ReviewConfig, {"old_documents": 3}, "stream: counts tokens, but old_documents counts documents"),
    (PostPretrainConfig, {"tokens": 100, "max_steps": 2}, "tokens and max_steps both say how long"),
    (PostPretrainConfig, {"tokens": 100, "num_train_epochs": 2}, "tokens and num_train_epochs both say how long"),
    (PostPretrainConfig, {"tokens": 100, "curriculum": "c.json"}, "tokens and curriculum both say how long"),
])  # fmt: skip
def test_settings_that_contradict_a_stream(root, tmp_path, kind, changes, message):
    with pytest.raises(InputError, match=message):
        train_stage(root / "expanded", tmp_path / "out", data_of(root, "en", "el", "tr"), kind(**QUICK, **changes))


@pytest.mark.parametrize("value", [0, -1, "24e9", 1.5])
def test_a_budget_is_a_whole_number(value):
    with pytest.raises(InputError, match="tokens"):
        PostPretrainConfig(tokens=value)

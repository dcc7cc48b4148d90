"""Text that is streamed: passes, interruptions, shares, budgets, bad shards, places that drop."""

import gzip
import json
import lzma
from contextlib import nullcontext
from functools import partial
from itertools import chain, islice, pairwise
from unittest.mock import patch

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import BEGIN, StopAt, beginning_tokenizer, byte_tokenizer, interrupted, refused, save_dense, write_texts
from fsspec.implementations.memory import MemoryFile
from hypothesis import given, settings
from hypothesis import strategies as st
from test_train_stage import same_files
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

import hf_moe_expand as moe
from hf_moe_expand.checkpoint.source import load_expanded_config
from hf_moe_expand.data import places, stream_reader
from hf_moe_expand.data.sources import LanguageText
from hf_moe_expand.data.stream import TextStream
from hf_moe_expand.data.stream_reader import passed_line, summed
from hf_moe_expand.stages import streaming
from hf_moe_expand.stages.streaming import is_streamed
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
    stream.begin(mix or LanguageMix([1] * len(texts)), rows, 1, rank, ranks, workers, saved=saved)
    return stream


def batches(stream, count, processes=0):
    loader = DataLoader(stream, batch_size=None, num_workers=processes, generator=torch.Generator())
    return [{name: value.tolist() for name, value in batch.items()} for batch in islice(stream.received(loader), count)]


def as_json(value):
    return json.loads(json.dumps(value))


def goes_on(make, taken, count, processes=0):
    """Taken so many batches, and begun anew with what was saved, a stream gives the batches of one that goes on."""
    whole, first = make(), make()
    expected = batches(whole, taken + count, processes)
    assert batches(first, taken, processes) == expected[:taken]
    second = make(saved=[as_json(first.state())])
    assert batches(second, count, processes) == expected[taken:]
    assert as_json(second.state()) == as_json(whole.state())


def read_once(source, rank, ranks):
    """The documents that a reader gives before it reads any again, and its counts then."""
    tokens, counts = [], {}
    for batch in begun([source], rank, ranks, rows=1, block_size=1):
        assert "error" not in batch, batch
        if batch["place"][1]["el"]["counts"]["seen"].get("repeated"):
            break
        tokens += batch["input_ids"].flatten().tolist()
        counts = batch["place"][1]["el"]["counts"]
    return documents_of(tokens), counts


def read_by_all(source, ranks):
    return [text for rank in range(ranks) for text in read_once(source, rank, ranks)[0]]


def documents_of(tokens):
    ends = [-1, *(place for place, token in enumerate(tokens) if token == END)]
    assert ends[-1] == len(tokens) - 1
    return [byte_tokenizer().decode(tokens[a + 1 : b]) for a, b in pairwise(ends)]


def write_as(folder, kind, texts):
    path = folder / f"el{kind}"
    rows = "".join(f"{text}\n" if ".txt" in kind else json.dumps({"text": text}) + "\n" for text in texts).encode()
    if kind == ".parquet":
        pq.write_table(pa.table({"text": texts}), path, row_group_size=7)
    elif kind == ".jsonl.zst":
        with pa.CompressedOutputStream(str(path), "zstd") as file:
            file.write(rows)
    else:
        path.write_bytes({".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)(rows))
    return path


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [(".jsonl", 1), (".jsonl.gz", 2), (".jsonl.zst", 1), (".txt", 5), (".txt.xz", 2), (".parquet", 1), (".parquet", 5)],
)
def test_each_document_comes_once_in_a_pass(tmp_path, kind, ranks):
    source = LanguageText("el", str(write_as(tmp_path, kind, texts_of("el", 33))))
    found = read_by_all(source, ranks)
    assert sorted(found) == sorted(texts_of("el", 33))
    assert found != texts_of("el", 33)  # but in another order


@pytest.mark.parametrize("sizes", [[200, 10], [100, 5, 5, 5], [3, 90, 20, 50, 7, 11, 30, 2, 60, 14, 25]])
@pytest.mark.parametrize("ranks", [2, 3])
def test_readers_have_like_shares_of_files_of_any_sizes(tmp_path, sizes, ranks):
    """Else one would read its files again while others have yet to read theirs."""
    texts = iter(texts_of("el", sum(sizes)))
    for number, size in enumerate(sizes):
        write_texts(tmp_path / f"{number}.jsonl", [*islice(texts, size)])
    source = LanguageText("el", str(tmp_path))
    found = [read_once(source, rank, ranks)[0] for rank in range(ranks)]
    assert sorted(chain(*found)) == sorted(texts_of("el", sum(sizes)))
    shares = [len(texts) for texts in found]
    assert max(shares) < 1.2 * min(shares)


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
    assert sorted(read_by_all(source, 2)) == sorted(expected)
    assert sorted(source.load()["text"]) == sorted(expected)  # map mode, too


def test_a_block_begins_as_in_map_mode(shards):
    source = shards("el", 1, 20)
    for batch in batches(begun([source], tokenizer=beginning_tokenizer()), 5):
        assert [ids[0] for ids in batch["input_ids"]] == [BEGIN, BEGIN]
        assert batch["labels"] == batch["input_ids"]
        assert batch["language_ids"] == [[0] * 8] * 2


@pytest.mark.parametrize(("processes", "taken"), [(0, 7), (2, 0), (2, 8), (3, 20)])
def test_an_interruption_changes_no_block(shards, processes, taken):
    sources = [shards("el", 3, 50), shards("en", 1, 20)]
    goes_on(partial(begun, sources, workers=processes, mix=LanguageMix([3, 1])), taken, 40 - taken, processes)


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
        make = partial(begun, [source], ranks - 1, ranks, block_size=block_size)
        goes_on(lambda saved=(): make(saved=[*saved] * ranks), taken, 40 - taken)


@pytest.mark.parametrize(("before", "after"), [((2, 1), (1, 1)), ((1, 2), (3, 1)), ((2, 2), (1, 4))])
def test_other_ranks_or_workers_are_refused(shards, before, after):
    source = shards("el", 1, 60)
    states = [as_json(begun([source], rank, *before).state()) for rank in range(before[0])]
    said = f"was read by {before[0]} ranks with {before[1]} workers each .*, and is by {after[0]} with {after[1]} now"
    refused(begun, [source], 0, *after, saved=states, says=said)


def test_a_state_of_other_text_is_refused(shards):
    state = begun([shards("el", 3, 9)]).state()
    others = [LanguageText("el", shards("en", 2, 9).source)]
    refused(begun, others, saved=[state], says="other shards than before the interruption")


def drawn(mix, count, ranks=1, rows=4, accumulation=1):
    """The language of each row of each batch, `[ranks, count, rows]`."""
    stream = TextStream.__new__(TextStream)
    stream.seed, stream.mix, stream.rows, stream.accumulation = 3, mix, rows, accumulation
    found = []
    for stream.rank in range(ranks):
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


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("stream")
    for code, count in (("en", 40), ("el", 60), ("tr", 30)):
        (root / code).mkdir()
        for number in range(3):
            write_texts(root / code / f"{number}.jsonl", texts_of(code, count)[number::3])
    base = save_dense(root / "base", vocab_size=258)
    moe.expand_checkpoint(base, root / "expanded", moe.Plan("moe-lpr", [2, 1, 2], [0], old=["en"], new=["el", "tr"]))
    moe.expand_checkpoint(base, root / "dmoe", moe.Plan("dmoe", [2, 1, 2], groups=[["en"], ["el", "tr"]]))
    return root


def data_of(root, *codes):
    return {code: LanguageText(code, str(root / code)) for code in codes}


STAGES = {
    "stage 1": (moe.PostPretrainConfig, {}, ("el", "tr")),
    "replay": (moe.PostPretrainConfig, {"replay": True, "replay_share": 0.25}, ("en", "el", "tr")),
    "temperature": (moe.PostPretrainConfig, {"temperature": 5.0}, ("el", "tr")),
    "review": (moe.ReviewConfig, {}, ("en", "el", "tr")),
    "group": (moe.GroupConfig, {}, ("en", "el", "tr")),
    "dense": (moe.DenseConfig, {}, ("el",)),
}
START = {"group": "dmoe", "dense": "base"}


@pytest.mark.parametrize(("stage", "workers"), [*((stage, 0) for stage in STAGES), ("stage 1", 2)])
def test_a_stage_that_was_interrupted_ends_the_same(root, tmp_path, stage, workers, capsys):
    kind, changes, codes = STAGES[stage]

    def config():
        made = kind(**QUICK, **changes, max_steps=6, save_steps=2, gradient_accumulation_steps=2)
        made.dataloader_num_workers = workers
        return made

    start, data = root / START.get(stage, "expanded"), data_of(root, *codes)
    expected = moe.train_stage(start, tmp_path / "whole", data, config())
    with interrupted(5, kind), pytest.raises(KeyboardInterrupt):
        moe.train_stage(start, tmp_path / "again", data, config())
    assert moe.train_stage(start, tmp_path / "again", data, config()) == expected
    same_files(tmp_path / "again", tmp_path / "whole")
    assert sum(expected.tokens.values()) == 6 * 2 * 2 * 16 == expected.tokens_seen
    assert expected.settings["stream"] is True
    assert "resumes at step 4 of 6" in capsys.readouterr().out


@pytest.mark.parametrize(("stage", "share"), [("replay", 0.25), ("review", 0.5)])
def test_shares_of_old_and_new_text(root, tmp_path, stage, share):
    kind, changes, codes = STAGES[stage]
    config = kind(**QUICK, **changes, tokens=2048)  # 64 draws, among which each language has its share, for each row
    record = moe.train_stage(root / "expanded", tmp_path / "out", data_of(root, *codes), config)
    assert record.tokens_seen_by_language["en"] / record.tokens_seen == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize(("streams", "given", "steps"), [
    (True, {"tokens": 64}, 2), (False, {"tokens": 65.0}, 3), (True, {"tokens_per_language": 32}, 2),
    (True, {"tokens": 300, "gradient_accumulation_steps": 4}, 3),
    (True, {"tokens_per_language": 32, "num_train_epochs": 2}, 4),
    (True, {"tokens_per_language": 320, "tokens": 64}, 2),
])  # fmt: skip
def test_a_budget_in_tokens(root, tmp_path, given, steps, streams):
    config = moe.PostPretrainConfig(**{**QUICK, "stream": streams}, **given)
    assert moe.train_stage(root / "expanded", tmp_path / "out", data_of(root, "el", "tr"), config).steps == steps


def test_passes_over_a_stream_are_counted_from_its_size(root, tmp_path, capfd):
    config = moe.PostPretrainConfig(**{**QUICK, "per_device_train_batch_size": 8}, num_train_epochs=3)
    record = moe.train_stage(root / "expanded", tmp_path / "out", data_of(root, "el", "tr"), config)
    tokens = sum(len(text.encode()) + 1 for code, count in (("el", 60), ("tr", 30)) for text in texts_of(code, count))
    assert record.steps == pytest.approx(3 * tokens / 128, rel=0.05)
    out, errors = capfd.readouterr()
    assert "text is read while the model trains: el about 1," in out
    assert "of them again" in out
    assert "el: all of its text was read once; it is read again" in errors


def test_large_text_and_text_elsewhere_of_a_known_amount_is_streamed_by_default(root, monkeypatch):
    texts, model = data_of(root, "el", "tr"), load_expanded_config(root / "expanded")
    total = sum(path.stat().st_size for text in texts.values() for path in text.files())
    elsewhere, of_hub = (
        {code: LanguageText(code, place) for code in ("el", "tr")} for place in ("s3://bucket/*.parquet", "hub:me/data")
    )
    for text, smaller, changes, streams in (
        (texts, 0, {}, False), (texts, 1, {}, True), (texts, 1, {"stream": False}, False),
        (texts, 0, {"stream": True}, True), (elsewhere, 0, {}, False), (of_hub, 0, {"tokens": 1e6}, True),
        (elsewhere, 0, {"max_steps": 10}, True), (of_hub, 0, {"tokens_per_language": 100}, True),
        (of_hub, 0, {"max_steps": 10, "stream": False}, False),
    ):  # fmt: skip
        monkeypatch.setattr(streaming, "STREAMED", total - smaller)
        assert is_streamed(moe.PostPretrainConfig(**changes), text, model) is streams
    assert not is_streamed(moe.ReviewConfig(old_documents=5), data_of(root, "en", "el", "tr"), model)


ROWS = 40


def good_file(path):
    return write_texts(path, texts_of("el", ROWS))


def cut(path):
    whole = gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in texts_of("el", 60)).encode())
    path.with_suffix(".jsonl.gz").write_bytes(whole[: len(whole) // 2])


def table(**columns):
    return lambda path: pq.write_table(pa.table(columns), path.with_suffix(".parquet"))


BAD = {
    "cut": (cut, "cannot be read: "),
    "no row": (table(text=pa.array([], pa.string())), "is empty"),
    "other column": (table(body=["x"]), "has no string under `text`"),
    "other type": (table(text=[1, 2]), "(found text: int)"),
    "not UTF-8": (lambda path: path.write_bytes(b'{"text": "\xff"}\n'), ":1: not UTF-8 text"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_shard_stops_the_training_or_is_left_out_and_counted(tmp_path, kind, capsys):
    for name, write in (("a", good_file), ("b", BAD[kind][0]), ("c", good_file)):
        write(tmp_path / f"{name}.jsonl")
    source = LanguageText("el", str(tmp_path))
    processes = 2 * (kind == "cut")
    line = refused(batches, begun([source], workers=processes), 400, processes, says=r"/b\..*on_bad_shard: skip")
    assert BAD[kind][1] in line
    stream = begun([source], on_bad_shard="skip")
    batches(stream, 150)
    counts = summed([place["el"]["counts"] for place in stream.places])
    (bad,) = counts["bad"]
    assert "/b." in bad
    assert f"1 bad shard left out: {bad}" in passed_line("el", counts)
    said = capsys.readouterr().err
    assert "el: left out from here: " in said
    assert BAD[kind][1] in said
    assert counts["seen"]["documents"] > 2 * ROWS  # the run went on, and read the others again
    for taken in (1, 20, 77):
        goes_on(partial(begun, [source], on_bad_shard="skip"), taken, 20)


def test_a_file_that_goes_away(tmp_path):
    for name in ("a", "b"):
        good_file(tmp_path / f"{name}.jsonl")
    stop, skip = (begun([LanguageText("el", str(tmp_path))], on_bad_shard=what) for what in ("stop", "skip"))
    (tmp_path / "b.jsonl").unlink()
    refused(batches, stop, 200, says=r"b.jsonl: cannot be read: No such file")
    batches(skip, 200)
    assert list(skip.places[0]["el"]["counts"]["bad"]) == [str(tmp_path / "b.jsonl")]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("row", ['{"text": "a", "language": "tr"}', '{"text": " "}', "no json"])
def test_text_without_a_document_ends(tmp_path, row, ranks):
    for number in range(2):
        (tmp_path / f"{number}.jsonl").write_text(f"{row}\n" * 5)
    stream = begun([LanguageText("el", str(tmp_path))], ranks - 1, ranks, on_bad_shard="skip")
    refused(batches, stream, 1, says="el: its text has no document in this language")


def test_rows_that_are_left_out_are_counted_once(tmp_path):
    rows = [{"text": "a b c"}, {"text": " "}, {"text": "x", "language": "tr"}, {"text": "d e f", "language": "ell"}]
    (tmp_path / "el.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 10))
    source = LanguageText("el", str(tmp_path / "el.jsonl"))
    found = summed([read_once(source, rank, 2)[1] for rank in range(2)])
    assert found["left_out"] == {"without text": 10, "tagged 'tr'": 10}
    assert found["seen"]["documents"] == 20
    assert "el: 120 tokens of 20 documents passed; 20 rows left out: 10 " in passed_line("el", found)


def test_text_that_the_tokenizer_loses_is_counted_and_refused(root, tmp_path):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<unk>": 0, "word": 1, "<end>": 2}, unk_token="<unk>")),
        unk_token="<unk>", eos_token="<end>",
    )  # fmt: skip
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    source = LanguageText("el", str(write_texts(tmp_path / "el.jsonl", ["word γάτα"] * 9)))
    stream = begun([source], tokenizer=tokenizer)
    batches(stream, 3)
    assert "the tokenizer lost " in passed_line("el", stream.places[0]["el"]["counts"])
    model = load_expanded_config(root / "expanded")
    given = (moe.PostPretrainConfig(max_steps=1), {"el": source}, tokenizer, model)
    refused(streaming.streamed, *given, False, says="el: the tokenizer loses 66.7 % of the text's bytes")
    assert streaming.streamed(*given, True).lost["el"].lost


@pytest.fixture
def bucket(monkeypatch):
    """A place elsewhere, and how many of its reads fail from now on."""
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    for name in "abc":
        rows = "".join(json.dumps({"text": text}) + "\n" for text in texts_of(name, 40)).encode()
        memory.pipe(f"/bucket/{name}.jsonl", rows)
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table({"text": texts_of(name, 40)}), sink)
        memory.pipe(f"/bucket/{name}.parquet", sink.getvalue().to_pybytes())
    monkeypatch.setattr(places, "WAITS", (0, 0))
    failures = {"left": 0, "error": ConnectionResetError("reset by peer"), "met": 0}
    read = MemoryFile.read

    def fails(self, *size):
        if failures["left"]:
            failures["left"] -= 1
            failures["met"] += 1
            raise failures["error"]
        return read(self, *size)

    monkeypatch.setattr(MemoryFile, "read", fails)
    return failures


@pytest.mark.parametrize(
    ("error", "kind"),
    [(ConnectionResetError, "jsonl"), (TimeoutError, "parquet"), (OSError, "jsonl"), (RuntimeError, "parquet")],
)
@pytest.mark.filterwarnings("ignore:.*tries it again:UserWarning")
def test_a_read_that_fails_is_tried_again(bucket, error, kind):
    source = LanguageText("el", f"memory://bucket/*.{kind}")
    expected = batches(begun([source]), 60)
    stream, found = begun([source]), []
    bucket["error"] = error("503 Slow Down")
    for _ in range(6):
        bucket["left"] = 2
        stream = begun([source], saved=[as_json(stream.state())] if found else ())
        found += batches(stream, 10)
    assert found == expected
    assert bucket["met"] >= 2


@pytest.mark.parametrize(("kind", "on_bad_shard"), [("jsonl", "stop"), ("parquet", "skip")])
@pytest.mark.filterwarnings("ignore:.*tries it again:UserWarning")
def test_a_place_that_stays_away_ends_a_training_that_can_go_on(root, tmp_path, bucket, kind, on_bad_shard):
    data = {"el": LanguageText("el", f"memory://bucket/*.{kind}"), "tr": LanguageText("tr", str(root / "tr"))}

    def train(name, callback=None):
        config = moe.PostPretrainConfig(**QUICK, max_steps=60, on_bad_shard=on_bad_shard)
        config.dataloader_num_workers = 0
        with patch.object(StopAt, "on_step_end", callback) if callback else nullcontext(), interrupted(-1):
            return moe.train_stage(root / "expanded", tmp_path / name, data, config)

    def fail(self, args, state, control, **kwargs):
        if state.global_step == 7:
            bucket["left"] = 10**6

    expected = train("whole")
    refused(train, "again", fail, says=r"memory:///bucket/.* does not answer after 0 s \(.*reset by peer.*\): run")
    bucket["left"] = 0
    assert [*(tmp_path / "again.training").glob("checkpoint-*")]
    assert train("again") == expected
    same_files(tmp_path / "again", tmp_path / "whole")


@pytest.mark.parametrize("error", [Exception("No credentials"), ImportError("Install s3fs")])
def test_a_place_that_does_not_open(error):
    with patch.object(fsspec.core, "url_to_fs", side_effect=error):
        refused(LanguageText("el", "s3://bucket/el").shards, says=str(error))
    with patch.object(fsspec.core, "url_to_fs", side_effect=FileNotFoundError("s3://bucket/el")):
        refused(LanguageText("el", "s3://bucket/el").shards, says="^s3://bucket/el: cannot be opened: no such file.$")


@pytest.mark.parametrize("source", ["nowhere://a/b.jsonl", "memory://bucket/none*.jsonl", "memory://none", "memory://"])
def test_addresses_of_nothing(bucket, source):
    fsspec.filesystem("memory").store.clear()
    refused(lambda: LanguageText("el", source).shards(), says=source.split(":")[0])


@pytest.mark.parametrize("source", [
    "s3://AKIA123:verysecret@bucket/el", "https://host/el.jsonl?token=verysecret", "gs://b/el.jsonl?a=1&X-Amz-Signature=verysecret",
    "abfs://c@account.dfs/el.jsonl?sig=verysecret", "sftp://user:very/secret@host/el.txt", "https://host/a.jsonl?sv=1&sig=verysecret",
])  # fmt: skip
def test_an_address_with_credentials_is_refused_without_them(source):
    assert "secret" not in refused(LanguageText, "el", source, says="the address holds credentials: leave them out")


def test_addresses_that_are_taken_as_they_stand_and_chains_that_are_not():
    for other in ("abfs://container@account.dfs.core.windows.net/el", "s3://bucket/key=el/part-?.jsonl"):
        assert LanguageText("el", other).source == other
    refused(LanguageText, "el", "zip://el.jsonl::file:///el.zip", says=r"zip://el.jsonl::file:///el.zip: chains of")


@pytest.mark.parametrize(("slice_of", "ranks"), [("", 1), ("", 5), ("::train[:17]", 2)])
def test_a_data_set_of_the_hub(tmp_path, slice_of, ranks):
    for number in range(3):
        write_texts(tmp_path / f"{number}.jsonl", texts_of("el", 40)[number::3])
    source = LanguageText("el", f"hub:{tmp_path}{slice_of}")
    assert len(source.shards()) == (1 if slice_of else 3)
    assert sorted(read_by_all(source, ranks)) == sorted(source.load()["text"])
    goes_on(partial(begun, [source]), 7, 9)


def test_the_amount_of_a_data_set_of_the_hub_is_asked_for(root, tmp_path):
    write_texts(tmp_path / "data.jsonl", texts_of("el", 40))
    data = {"el": LanguageText("el", f"hub:{tmp_path}"), "tr": LanguageText("tr", str(root / "tr"))}
    given = (root / "expanded", tmp_path / "out", data)
    refused(moe.train_stage, *given, moe.PostPretrainConfig(**QUICK), says="its size is not known: set")
    record = moe.train_stage(*given, moe.PostPretrainConfig(**QUICK, tokens=640))
    assert set(record.tokens_seen_by_language) == {"el", "tr"}

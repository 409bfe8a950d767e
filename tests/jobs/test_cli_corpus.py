"""`ringspan corpus` and the options of ingest that lead to a store, as their user meets them; Ray is never started."""

from __future__ import annotations

import contextlib
import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ray.exceptions import OutOfMemoryError, WorkerCrashedError

from pipelines.corpus.code import Code
from pipelines.corpus.ingest import find, in_process, ingest, reusable
from tests.jobs.test_cli import no_ray, refusal, run  # noqa: F401


@pytest.fixture
def store(tmp_path):
    for i in range(6):
        (tmp_path / "repo").mkdir(exist_ok=True)
        (tmp_path / "repo" / f"f{i}.py").write_text(f"# SPDX-License-Identifier: MIT\ndef f{i}():\n    return {'1' * 100 * i}\n")
    (tmp_path / "repo" / "nul.py").write_bytes(b"a\0b")
    ingest(Code(), [tmp_path / "repo"], tmp_path / "store", shard_bytes=600, run=in_process)
    return tmp_path / "store"


def answer(*arguments) -> dict:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_show(store):
    found = answer("corpus", "show", store)
    assert found["rows"] == 6 and found["licences"]["MIT"]["rows"] == 6 and found["skipped"] == {"binary": 1}
    shown = run("corpus", "show", store, "--most", 1).stdout
    assert "6 rows in 6 documents" in shown and "skipped: 1 binary" in shown
    assert "no manifest.json" in refusal("corpus", "show", store.parent / "repo")


def test_sample(store):
    first = answer("corpus", "sample", store, "--count", 4, "--tokens", 30)
    assert first == answer("corpus", "sample", store, "--count", 4, "--tokens", 30) and len(first["samples"]) == 4
    assert "<|endoftext|>" in run("corpus", "sample", store, "--context", 4096).stdout
    for arguments in (["--count", 0], ["--tokens", -1], ["--context", 0], ["--context", -1]):
        assert "both must be at least 1" in refusal("corpus", "sample", store, *arguments)
    assert "show at most 1,048,576" in refusal("corpus", "sample", store, "--context", 10**11)
    assert "--seed" in refusal("corpus", "sample", store, "--seed", -1) and "--most" in refusal("corpus", "show", store, "--most", -1)


def test_verify_lists_every_bad_shard(store):  # C2
    assert answer("corpus", "verify", store)["faults"] == []
    shards = sorted(store.glob("shard-*"))
    assert len(shards) >= 3
    data = bytearray(shards[0].read_bytes())
    data[data.index(b"def f")] = ord("x")
    shards[0].write_bytes(data)
    os.truncate(shards[1], shards[1].stat().st_size - 1)
    shards[2].unlink()
    result = run("corpus", "verify", store, "--json")
    faults = json.loads(result.stdout)["faults"]
    assert result.exit_code == 1 and [fault.split(": ")[0] for fault in faults] == [str(path) for path in shards[:3]]
    assert ["checksum" in faults[0], "bytes, the manifest says" in faults[1], "missing" in faults[2]] == [True] * 3
    assert "3 of its files" in result.stderr and "remove the folder and ingest again" in result.stderr


@pytest.mark.parametrize("text", [None, "", "{}", "\xff"])
def test_verify_reads_the_tokenizer(store, text):
    (store / "tokenizer.json").unlink() if text is None else (store / "tokenizer.json").write_text(text, encoding="latin-1")
    result = run("corpus", "verify", store, "--json")
    assert result.exit_code == 1 and len(json.loads(result.stdout)["faults"]) == 1 and "1 of its files" in result.stderr


def test_megatron_out_and_in(store, tmp_path):
    result = answer("corpus", "export", store, "--megatron", tmp_path / "m" / "x")
    back = answer("corpus", "import", tmp_path / "m" / "x", "--tokenizer", "byte", "--out", tmp_path / "back")
    assert result["tokens"] == back["tokens"] == answer("corpus", "show", store)["tokens"] and back["documents"] == 6
    assert "the ids are made already" in refusal(
        "corpus", "import", tmp_path / "m" / "x", "--tokenizer", "bpe:300", "--out", tmp_path / "y"
    )
    assert "no such file" in refusal("corpus", "import", tmp_path / "none", "--tokenizer", "byte", "--out", tmp_path / "y")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "1"])
def test_a_damaged_record_makes_a_store_out_of_date(store, text):
    found = find(Code(), [store.parent / "repo"], shard_bytes=600)
    assert reusable(found, store) is not None
    (store / ".ingest.json").write_text(text)
    assert reusable(found, store) is None


@pytest.mark.parametrize("error, said", [
    (WorkerCrashedError(), "ingest failed"), (OutOfMemoryError("one line\nthe task was killed"), "ingest failed: the task was killed; what"),
    (OSError("no space"), "ingest failed: no space; what is finished is kept"), (KeyboardInterrupt(), "stopped; what is finished is kept"),
])  # fmt: skip
def test_an_ingest_that_fails_is_one_line_and_code_1(store, tmp_path, monkeypatch, error, said):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr("cluster.launch.connected", lambda **_: contextlib.nullcontext())
    monkeypatch.setattr("pipelines.corpus.ingest.ingest", fails)
    result = run("ingest", "code", tmp_path / "repo", "--out", tmp_path / "new")
    assert result.exit_code == 1 and said in result.stderr.splitlines()[-1], (result.stderr, result.exception)


def test_what_stays_on_this_machine_takes_no_address(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answer("corpus", "export", store, "--megatron", tmp_path / "x")
    assert "an address" in refusal("corpus", "export", store, "--megatron", "s3://bucket/x")
    assert "an address" in refusal("corpus", "import", tmp_path / "x", "--tokenizer", "byte", "--out", "s3://bucket/x")
    assert "an address" in refusal("train", "code_completion/tiny", "--set", f"corpus.store={store}", "--out", "s3://bucket/x")
    assert not (tmp_path / "s3:").exists()


def test_what_ingest_refuses_before_it_starts(store, tmp_path):
    repo = tmp_path / "repo"
    assert "made with the tokenizer byte, not bpe:300" in refusal(
        "ingest", "code", repo, "--out", store, "--append", "--tokenizer", "bpe:300"
    )
    assert "made with unit 'row', not 'collection'" in refusal("ingest", "code", repo, "--out", store, "--append", "--unit", "repository")
    assert "no manifest.json" in refusal("ingest", "code", repo, "--out", tmp_path / "none", "--append")
    assert "can't grow; ingest anew, or make the store with --shelves none" in refusal("ingest", "papers", repo, "--out", store, "--append")
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "t.parquet")
    assert "no column text or content; it has body" in refusal("ingest", "tables", tmp_path / "t.parquet", "--out", tmp_path / "s")
    for size in (263, -1, 10**11, "9" * 5000):
        assert "264 to 1,048,576" in refusal("ingest", "code", repo, "--out", tmp_path / "s", "--tokenizer", f"bpe:{size}")
    assert "requires an argument" in refusal("ingest", "code", repo, "--out")
    assert "tiktoken:cl100k:FILE" in refusal("ingest", "code", repo, "--out", tmp_path / "s", "--tokenizer", "tiktoken:x")
    assert "cannot be reached" in refusal("ingest", "code", repo, "--out", "ftp://host/x")

"""Stores in an object store, against a real S3 server."""

import json
import os
import pickle
import subprocess
import sys
from contextlib import closing
from socket import socket
from time import monotonic, sleep

import pytest
from pyarrow.fs import FileSystem

from pipelines.corpus import remote
from pipelines.corpus.store import StoreError, TokenStore
from tests.unit.pipelines.corpus.test_store import build


@pytest.fixture(scope="module")
def server():
    """An S3 server (moto) with an empty bucket; the environment that points to it is set per test."""
    with closing(socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = monotonic() + 60
    while True:
        with closing(socket()) as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        assert process.poll() is None and monotonic() < deadline, "the S3 server did not start"
        sleep(0.1)
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait()


@pytest.fixture
def bucket(server, monkeypatch, tmp_path, request):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("RINGSPAN_CACHE", str(tmp_path / "cache"))
    name = request.node.name.replace("_", "-")[:60].rstrip("-")
    FileSystem.from_uri("s3://x?allow_bucket_creation=true")[0].create_dir(name)
    return f"s3://{name}"


def names(uri: str) -> list[str]:
    from pyarrow.fs import FileSelector

    files, folder = FileSystem.from_uri(uri)
    return sorted(info.base_name for info in files.get_file_info(FileSelector(folder)))


def test_put_and_open(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "_RANGE", 1000)  # several ranges a shard
    ours = build(tmp_path / "made", [["", "a" * 5000], ["naïve"]])
    uri = f"{bucket}/corpora/one"
    remote.check_writable(uri)
    assert remote.put(tmp_path / "made", uri)
    assert not remote.put(tmp_path / "made", uri)  # already there
    store = TokenStore.open(uri)
    assert store.fingerprint == ours.fingerprint and store.skipped == ours.skipped
    assert [store.text(i) for i in range(3)] == ["", "a" * 5000, "naïve"]
    store.verify()
    again = pickle.loads(pickle.dumps(store))
    assert again.address == uri and again.folder == store.folder == tmp_path / "cache" / "stores" / ours.fingerprint
    inode = (store.folder / "shard-00000.arrow").stat().st_ino
    (store.folder / "shard-00001.arrow").unlink()  # one is brought again, the other not
    assert TokenStore.open(uri).text(2) == "naïve" and (store.folder / "shard-00000.arrow").stat().st_ino == inode


def test_another_store_takes_its_place_whole(bucket, tmp_path):
    uri = f"{bucket}/corpus"
    first = build(tmp_path / "a", [["a"], ["b"], ["c"]])
    second = build(tmp_path / "b", [["other"]])
    remote.put(tmp_path / "a", uri)
    assert TokenStore.open(uri).fingerprint == first.fingerprint
    remote.put(tmp_path / "b", uri)
    assert TokenStore.open(uri).fingerprint == second.fingerprint
    assert names(uri) == ["manifest.json", "shard-00000.arrow", "skipped.jsonl", "tokenizer.json"]


def test_what_was_left_out_is_told_anew_where_the_rows_are_the_same(bucket, tmp_path):
    uri = f"{bucket}/corpus"
    for skipped in ([], [{"path": "r/b.bin", "reason": "binary: .bin"}]):
        build(tmp_path / "a", [["a"]], skipped=skipped)
        assert remote.put(tmp_path / "a", uri)
        store = TokenStore.open(uri)
        assert store.skipped == skipped and sum(store.manifest["skipped"].values()) == len(skipped)


def test_an_appended_store_puts_what_is_new_and_never_loses_the_old(bucket, tmp_path):
    uri = f"{bucket}/corpus"
    build(tmp_path / "a", [["a"], ["b"]])
    remote.put(tmp_path / "a", uri)
    build(tmp_path / "b", [["a"], ["b"], ["c"]])
    for name in ("shard-00000.arrow", "shard-00001.arrow"):
        (tmp_path / "b" / name).unlink()  # would be missed if it were read
    (tmp_path / "b" / "shard-00002.arrow").rename(tmp_path / "kept")
    with pytest.raises(OSError):
        remote.put(tmp_path / "b", uri)
    assert len(TokenStore.open(uri)) == 2
    (tmp_path / "kept").rename(tmp_path / "b" / "shard-00002.arrow")
    remote.put(tmp_path / "b", uri)
    assert [TokenStore.open(uri).text(i) for i in range(3)] == ["a", "b", "c"]


def test_a_put_that_stops_leaves_no_store(bucket, tmp_path):  # C13
    uri = f"{bucket}/corpus"
    build(tmp_path / "a", [["a"], ["b"]])
    build(tmp_path / "b", [["x"], ["y"]])
    remote.put(tmp_path / "a", uri)
    (tmp_path / "b" / "shard-00001.arrow").rename(tmp_path / "kept")
    with pytest.raises(OSError):
        remote.put(tmp_path / "b", uri)
    with pytest.raises(StoreError, match="no manifest.json"):
        TokenStore.open(uri)
    (tmp_path / "kept").rename(tmp_path / "b" / "shard-00001.arrow")
    remote.put(tmp_path / "b", uri)
    assert TokenStore.open(uri).text(1) == "y"


def test_a_shard_that_is_not_the_manifests(bucket, tmp_path):  # C2
    uri = f"{bucket}/corpus"
    build(tmp_path / "a", [["aaaa"], ["b"]])
    remote.put(tmp_path / "a", uri)
    files, folder = FileSystem.from_uri(uri)
    data = files.open_input_file(f"{folder}/shard-00000.arrow").read().replace(b"aaaa", b"aaxa")
    with files.open_output_stream(f"{folder}/shard-00000.arrow") as out:
        out.write(data)
    with pytest.raises(StoreError, match="shard-00000.arrow: checksum .* the manifest says") as error:
        TokenStore.open(uri)
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "cache").rglob("*shard-00000*"))  # what is wrong is not kept
    for wrong in ({"shards": []}, {"fingerprint": 1, "shards": []}, {"fingerprint": "1", "shards": [{"name": 1, "checksum": 1}]}, []):
        with files.open_output_stream(f"{folder}/manifest.json") as out:
            out.write(json.dumps(wrong).encode())
        with pytest.raises(StoreError, match="not a manifest|cannot be reached"):
            TokenStore.open(uri)


def test_wrong_bucket_place_and_endpoint_are_one_line(bucket, tmp_path, monkeypatch):
    for call, uri, said in (
        (TokenStore.open, "s3://no-such-bucket/x", "no manifest.json|cannot be reached"),
        (remote.check_writable, "s3://no-such-bucket/x", "there is no bucket no-such-bucket"),
        (remote.check_writable, bucket, "name a folder in the bucket"),
        (TokenStore.open, f"{bucket}/nothing", "no manifest.json, so no finished token store"),
        (TokenStore.open, "ftp://host/x", "cannot be reached"),
    ):
        with pytest.raises(StoreError, match=said) as error:
            call(uri)
        assert "\n" not in str(error.value) and uri in str(error.value)
    files, _ = FileSystem.from_uri(bucket)
    with files.open_output_stream(f"{bucket.removeprefix('s3://')}/notes/thesis.tex") as out:
        out.write(b"years of work")
    with pytest.raises(StoreError, match="holds 'thesis.tex', which is no part of a token store"):
        remote.check_writable(f"{bucket}/notes")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StoreError, match="cannot be reached with the credentials, region and endpoint"):
        TokenStore.open(f"{bucket}/corpus")


def test_an_address_stays_one_on_its_way_to_whoever_opens_it(tmp_path, monkeypatch):
    from pipelines.evaluation import evaluate
    from pipelines.models.source import Source

    assert remote.located("s3://bucket/store", "--store") == "s3://bucket/store"
    assert remote.located("store", "--store") == tmp_path.cwd() / "store"
    (tmp_path / "corpus.json").write_text(json.dumps({"store": "s3://bucket/store"}))
    monkeypatch.setattr(evaluate, "of_model", lambda source, opened: opened)
    monkeypatch.setattr(evaluate, "TokenStore", type("Opened", (), {"open": staticmethod(lambda address: address)}))
    assert evaluate.open_store(Source(tmp_path, tmp_path, None, 1), None) == "s3://bucket/store"


def test_a_run_of_a_store_there_is_evaluated_and_its_shelf_asked(bucket, tmp_path, monkeypatch):
    from pipelines.evaluation.evaluate import prepare
    from pipelines.literature_analysis.analyze import open_shelf
    from tests.unit.pipelines.untrained import SMALL, untrained_run

    uri = f"{bucket}/store"
    ours = build(tmp_path / "made", [["a" * 500, "b" * 500, "c" * 500]])
    remote.put(tmp_path / "made", uri)
    monkeypatch.chdir(tmp_path)
    run = untrained_run(tmp_path / "run", f"corpus.store={uri}", "corpus.held_out=0.3", *SMALL)
    for store in (None, uri):
        assert prepare(run, store).pieces.store.fingerprint == ours.fingerprint
    with open_shelf(run, uri) as shelf:
        assert shelf.fingerprint == ours.fingerprint

"""Checkpoints in an object store, against a server that speaks S3."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_agent import start_without_agent
from fsspec.spec import AbstractBufferedFile
from object_stores import BUCKET, ObjectStore, object_store

import trainer_runtime as tr
from trainer_runtime import checkpoint
from trainer_runtime import object_store as store_of
from trainer_runtime.checkpoint import CheckpointError
from trainer_runtime.object_store import new_file, open_place
from trainer_runtime.resume import StartingPoint
from trainer_runtime.writer import Content, Writer


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with object_store() as running:
        yield running


@pytest.fixture
def place(server: ObjectStore, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """An empty place."""
    start_without_agent(monkeypatch)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{request.node.name}"


def keys(server: ObjectStore, place: str) -> list[str]:
    """The names of all objects there."""
    prefix = place.removeprefix(f"s3://{BUCKET}/") + "/"
    return [name.removeprefix(prefix) for name in server.names(prefix)]


class Training:
    """A training of this process, whose script has files of its own."""

    def __init__(self, place: str, *, keep: int = 2) -> None:
        torch.manual_seed(0)
        self.net = torch.nn.Linear(3, 2)
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=0.1)
        self.state = tr.State(checkpoint_dir=place, save_every=10**6, keep=keep, net=self.net, opt=self.opt)
        self.loaded = ""
        self.state.on_save(self._save)
        self.state.on_load(self._load)
        self.state.restore()

    def _save(self, extra: Path) -> None:
        (extra / "of").mkdir()
        (extra / "of" / "mine.txt").write_text(f"step {self.state.step}")

    def _load(self, extra: Path) -> None:
        self.loaded = (extra / "of" / "mine.txt").read_text()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.opt.zero_grad()
            self.net(torch.randn(4, 3, generator=torch.Generator().manual_seed(self.state.step))).sum().backward()
            self.opt.step()
            self.state.commit()

    def weights(self) -> list[float]:
        return [value for each in self.net.parameters() for value in each.flatten().tolist()]


def test_a_training_goes_on_from_an_object_store(server: ObjectStore, place: str) -> None:
    first = Training(place)
    for _ in range(3):
        first.train(2)
        first.state.save()
    again = Training(place)
    assert (again.state.step, again.loaded) == (6, "step 6")
    assert again.weights() == first.weights()
    undisturbed = Training(f"{place}-undisturbed")
    undisturbed.train(8)
    again.train(2)
    assert again.weights() == undisturbed.weights()
    private = {name.partition("/")[0] for name in keys(server, place) if name.startswith(".")}
    final = {name.partition("/")[0] for name in keys(server, place) if not name.startswith(".")}
    assert {re.sub(r"^\.(.*)\.\w+$", r"\1", name) for name in private} == final
    assert {checkpoint.parse_stem(name)[2] for name in final} == {4, 6}, "what was superseded is gone"


def test_of_two_writers_with_one_name_the_first_commits(server: ObjectStore, place: str) -> None:
    writers = [Writer(open_place(place), "us", 1, keep=2, start=StartingPoint()) for _ in range(2)]
    writers[0].write(Content({"w": torch.zeros(2)}), step=1, world_size=1, metrics={})
    assert writers[0].finish()
    writers[1].write(Content({"w": torch.ones(2)}), step=1, world_size=1, metrics={})
    with pytest.raises(CheckpointError, match="which exists; a checkpoint's name is never used twice"):
        writers[1].finish()
    assert len({name.partition("/")[0] for name in keys(server, place)}) == 2, "the second one has left nothing"
    found = checkpoint.find(open_place(place), "us", fresh=False)
    assert found is not None
    found.data.close()


def test_without_the_store_training_goes_on_and_says_so(
    server: ObjectStore, place: str, capfd: pytest.CaptureFixture[str]
) -> None:
    training = Training(place)
    training.train(1)
    training.state.save()
    server.go_away()
    try:
        training.train(1)
        with pytest.raises(OSError, match="EndpointConnectionError"):
            training.state.save()
        training.train(1)
    finally:
        server.come_back()
    said = capfd.readouterr().err
    assert f"step 2 was NOT saved in {place}" in said
    assert "Traceback" not in said
    training.state.save()
    assert Training(place).weights() == training.weights()


def test_a_bucket_that_is_not_there_is_named_at_the_start(place: str) -> None:
    with pytest.raises(OSError, match="there is no bucket nowhere"):
        Training(place.replace(BUCKET, "nowhere"))


@pytest.mark.parametrize("reads_back", [True, False])
def test_a_commit_whose_answer_is_lost_keeps_its_files(
    place: str, monkeypatch: pytest.MonkeyPatch, *, reads_back: bool
) -> None:
    """The copy of the manifest has been written. If it can be read back, that is known."""
    training = Training(place)
    training.train(1)
    fs: Any = open_place(place).fs  # type: ignore[attr-defined] # a UPath
    pipe, cat = fs.pipe_file, fs.cat_file

    def lose_answer(key: str, data: bytes, **options: object) -> None:
        pipe(key, data, **options)
        raise ConnectionError("the answer is lost")

    def refuse(*_: object, **__: object) -> bytes:
        raise ConnectionError("away")

    monkeypatch.setattr(fs, "pipe_file", lose_answer)
    if not reads_back:
        monkeypatch.setattr(fs, "cat_file", refuse)
        with pytest.raises(OSError, match="not known whether it was written"):
            training.state.save()
    else:
        training.state.save()
    monkeypatch.setattr(fs, "pipe_file", pipe)
    monkeypatch.setattr(fs, "cat_file", cat)
    assert Training(place).state.step == 1


def test_a_large_state_is_sent_in_parts(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_of, "_PART_BYTES", 5 << 20)
    longest = 0

    def put(self: AbstractBufferedFile, data: bytes) -> int:
        nonlocal longest
        longest = max(longest, len(data))
        return int(write(self, data))

    write = AbstractBufferedFile.write
    monkeypatch.setattr(AbstractBufferedFile, "write", put)
    with new_file(open_place(place) / "large") as file:
        file.write(bytes(12 << 20))
    assert longest <= 5 << 20
    assert store_of.size_of(open_place(place) / "large") == 12 << 20


def test_files_of_a_save_that_failed_do_not_stay(
    server: ObjectStore, place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    training = Training(place)
    training.train(1)
    server.go_away()
    try:
        with pytest.raises(OSError, match="EndpointConnectionError"):
            training.state.save()
    finally:
        server.come_back()
    assert not [*tmp_path.iterdir()]


def test_a_script_that_ends_after_a_commit_does_not_lose_it(server: ObjectStore, place: str) -> None:
    """The address is a name, for which the client starts a thread whenever it connects."""
    script = """
import torch, trainer_runtime as tr
tr.init()
state = tr.State(value=torch.zeros(4), save_every=1)
state.restore()
for _ in state.epochs(1):
    for _ in state.steps(range(9)):
        state.value += 1
        state.commit()
        break
    break
"""
    known = {**server.environment, "ELASTIC_AGENT_CHECKPOINT_DIR": place}
    known["AWS_ENDPOINT_URL"] = known["AWS_ENDPOINT_URL"].replace("127.0.0.1", "localhost")
    subprocess.run([sys.executable, "-c", script], env={**os.environ, **known}, check=True, timeout=120)
    assert any(name.endswith("s000000001/manifest.json") for name in keys(server, place))


@pytest.mark.parametrize("what", ["missing", "flipped", "truncated"])
def test_a_damaged_checkpoint_is_not_used(
    server: ObjectStore, place: str, what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    training = Training(place)
    for _ in range(2):
        training.train(1)
        training.state.save()
    newest = next(name for name in keys(server, place) if "s000000002" in name and name.endswith("state.pt"))
    key = f"{place.removeprefix(f's3://{BUCKET}/')}/{newest}"
    data = bytearray(server.client.get_object(Bucket=BUCKET, Key=key)["Body"].read())
    data[len(data) // 2] ^= 1
    if what == "missing":
        server.client.delete_object(Bucket=BUCKET, Key=key)
    else:
        server.client.put_object(Bucket=BUCKET, Key=key, Body=bytes(data[: -1 if what == "truncated" else None]))
    assert Training(place).state.step == 1
    assert "skipped checkpoint" in capfd.readouterr().err
    for name in keys(server, place):
        if name.endswith("state.pt"):
            server.client.delete_object(Bucket=BUCKET, Key=f"{place.removeprefix(f's3://{BUCKET}/')}/{name}")
    with pytest.raises(CheckpointError, match="all are damaged"):
        Training(place)


def test_an_upload_that_is_broken_off_leaves_nothing(
    server: ObjectStore, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_of, "_PART_BYTES", 5 << 20)  # the least that S3 takes

    def write() -> None:
        with new_file(open_place(place) / "large") as file:
            for _ in range(3):
                file.write(bytes(6 << 20))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write()
    assert not keys(server, place)
    assert "Uploads" not in server.client.list_multipart_uploads(Bucket=BUCKET)


@pytest.mark.parametrize(("url", "said"), [("nosuch://x/y", "Unsupported filesystem"), ("gs://x/y", "gcsfs")])
def test_a_store_that_nothing_here_reads_is_refused_with_what_to_install(url: str, said: str) -> None:
    with pytest.raises(ValueError, match=rf"{url} cannot be used for checkpoints.*{said}.*elastic-agent\[cloud\]"):
        tr.State(checkpoint_dir=url)


def test_a_file_url_is_a_path(tmp_path: Path) -> None:
    assert open_place(f"file://{tmp_path}") == tmp_path


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (Path("s3://bucket/name"), "got 's3:/bucket/name'; a URL is a str"),
        ("s3://", "wanted a URL as s3://bucket/name"),
        ("ftp://me:word@host/x", r"without a password, got 'ftp://me:\.\.\.@host/x'"),
    ],
)
def test_what_is_no_place_is_refused(place: str | Path, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        open_place(place)

"""Files that take the place of others: whole, or not at all."""

from __future__ import annotations

import hashlib
import threading
from typing import TYPE_CHECKING

import fsspec
import pytest

from aiokv.checkpoint.files import Aside, checksum, read
from aiokv.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path


def write(url: str, *pieces: bytes) -> Aside:
    """Write a file up to its name."""
    file = Aside(url)
    file.write(pieces)
    file.seal()
    return file


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_ends_with_the_digest_of_all_before() -> None:
    write("memory://files/digest", b"ab", b"c").publish()
    data = read("memory://files/digest")
    assert data == b"abc" + hashlib.blake2b(b"abc", digest_size=32).digest()
    assert checksum(b"abc") == data[3:]


def test_a_published_file_is_read_and_replaces_the_one_before(tmp_path: Path) -> None:
    url = str(tmp_path / "state")
    for content in (b"first", b"second"):
        file = write(url, content)
        assert len(names(tmp_path)) == 1 + (content == b"second")
        file.publish()
        file.drop()
        assert read(url)[:-32] == content
    assert names(tmp_path) == ["state"]


def test_a_url_of_any_file_system_will_do() -> None:
    for content in (b"first", b"second"):
        write("memory://files/state", content).publish()
        assert read("memory://files/state")[:-32] == content
    write("memory://files/state", b"third").drop()
    assert fsspec.filesystem("memory").ls("files", detail=False).count("/files/state") == 1
    assert not [name for name in fsspec.filesystem("memory").ls("files", detail=False) if "tmp" in name]


@pytest.mark.parametrize("step", ["begun", "written", "sealed"])
def test_a_file_that_is_stopped_gets_no_name_and_is_gone(tmp_path: Path, step: str) -> None:
    url = str(tmp_path / "state")
    write(url, b"old").publish()
    file = Aside(url)
    if step != "begun":
        file.write([b"new"])
    if step == "sealed":
        file.seal()
    file.stop()
    file.write([b"more"])
    file.seal()
    file.publish()
    file.drop()
    file.drop()
    assert read(url)[:-32] == b"old"
    assert names(tmp_path) == ["state"]


def test_a_thread_that_is_at_work_when_all_is_over_deletes_what_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who drops the file does not wait for it."""
    url = str(tmp_path / "state")
    write(url, b"old").publish()
    begun, go_on = threading.Event(), threading.Event()

    def slow(descriptor: int) -> None:
        begun.set()
        go_on.wait()

    monkeypatch.setattr("aiokv.checkpoint.files.os.fsync", slow)
    file = Aside(url)
    file.write([b"new"])
    thread = threading.Thread(target=file.seal)
    thread.start()
    begun.wait()
    file.drop()
    assert len(names(tmp_path)) == 2
    go_on.set()
    thread.join()
    assert names(tmp_path) == ["state"]
    file.publish()
    assert read(url)[:-32] == b"old"


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path / "state")
    write(url, b"old").publish()

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("aiokv.checkpoint.files.os.fsync", full)
    file = Aside(url)
    file.write([b"new"])
    with pytest.raises(DataError, match="No space left"):
        file.seal()
    file.drop()
    assert read(url)[:-32] == b"old"
    assert names(tmp_path) == ["state"]


@pytest.mark.parametrize("name", ["missing", "."])
def test_what_is_no_file_can_not_be_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="can't be read") as caught:
        read(str(tmp_path / name))
    assert caught.value.details["path"] == str(tmp_path / name)


@pytest.mark.parametrize("name", ["missing/state", "."])
def test_where_no_file_can_be_nothing_is_written(tmp_path: Path, name: str) -> None:
    file = Aside(str(tmp_path / name))
    with pytest.raises(DataError, match="can't be written"):  # noqa: PT012 - a folder is refused at the end
        file.write([b"content"])
        file.seal()
        file.publish()
    file.drop()
    assert not list(tmp_path.iterdir())


def test_an_unknown_kind_of_url_is_refused() -> None:
    with pytest.raises(DataError, match="nosuch"):
        read("nosuch://bucket/state")
    with pytest.raises(DataError, match="nosuch"):
        Aside("nosuch://bucket/state").write([b"x"])


# --- a folder that files have to be in ---


def test_a_file_is_written_into_the_folder_and_relative_paths_begin_there(tmp_path: Path) -> None:
    folder = tmp_path / "safe"
    (folder / "deep").mkdir(parents=True)
    for url in ("state", "deep/state", str(folder / "absolute"), (folder / "as-url").as_uri()):
        file = Aside(url, str(folder))
        file.write([b"abc"])
        file.seal()
        file.publish()
        assert read(url, str(folder)).startswith(b"abc")
    assert names(folder) == ["absolute", "as-url", "deep", "state"]
    assert names(folder / "deep") == ["state"]


@pytest.mark.parametrize(
    "url",
    [
        "../outside",
        "deep/../../outside",
        "{tmp}/outside",
        "{tmp}/safe-not/outside",
        "{tmp}/safe/../outside",
        "{tmp}/safe",
        "link/outside",
        "file://{tmp}/outside",
        "memory://safe/outside",
        "simplecache::file://{tmp}/safe/inside",
    ],
)
def test_a_path_that_leaves_the_folder_is_refused_and_nothing_is_written(tmp_path: Path, url: str) -> None:
    folder = tmp_path / "safe"
    for name in ("safe", "safe-not", "elsewhere"):
        (tmp_path / name).mkdir()
    (folder / "link").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (tmp_path / "outside").write_bytes(b"old")
    url = url.format(tmp=tmp_path)
    with pytest.raises(DataError, match="is not in the folder") as caught:
        Aside(url, str(folder)).write([b"new"])
    assert caught.value.details == {"path": url, "expected": str(folder)}
    with pytest.raises(DataError, match="is not in the folder"):
        read(url, str(folder))
    assert (tmp_path / "outside").read_bytes() == b"old"
    assert [names(tmp_path / name) for name in ("safe", "safe-not", "elsewhere")] == [["link"], [], []]


def test_a_folder_may_be_an_address_of_another_file_system() -> None:
    folder = "memory://checkpoints/run-1"
    file = Aside("first", folder)
    file.write([b"abc"])
    file.seal()
    file.publish()
    assert read("memory://checkpoints/run-1/first", folder).startswith(b"abc")
    for url in ("../run-2/first", "memory://checkpoints/run-12/first", "memory://checkpoints/run-1/../run-2/first"):
        with pytest.raises(DataError, match="is not in the folder"):
            read(url, folder)

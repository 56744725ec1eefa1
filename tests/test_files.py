"""Files are found in the promised order; downloads arrive whole and checked, or not at all."""

import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import threading
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fedbat.data.files import Bundled, Downloadable, Remote, cache_folder
from fedbat.errors import DataError
from fedbat.storage import draft_of, remove_old_drafts, write_text

NOWHERE = "http://127.0.0.1:9"  # the discard port: refused at once


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    """A machine of our own: an empty cache, nothing brought, no proxy between us and our server."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("FEDBAT_DATA", raising=False)


@dataclass
class Server:
    folder: Path
    url: str
    requests: list[str] = field(default_factory=list)

    def put(self, name, content):
        (self.folder / name).write_bytes(content)
        return Remote(f"{self.url}/{name}", hashlib.md5(content).hexdigest())


@pytest.fixture
def server(tmp_path):
    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format, *args):
            pass

        def log_request(self, code="-", size="-"):
            served.requests.append(self.path)

    folder = tmp_path / "server"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder)) as http:
        served = Server(folder, f"http://127.0.0.1:{http.server_port}")
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield served
        http.shutdown()
        thread.join()


def tar_gz(members):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for info, content in members:
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def tree(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def place(folder, *names):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"")


def test_places_are_searched_in_order(tmp_path, monkeypatch):
    data, system = tmp_path / "data", tmp_path / "system"
    toy = Downloadable(
        "toy",
        (Remote(f"{NOWHERE}/a", ""), Remote(f"{NOWHERE}/b", "")),
        aliases=("toy-1.0",),
        system=(system,),
    )
    monkeypatch.setenv("FEDBAT_DATA", str(data))
    order = [
        data / "toy" / "toy-1.0",
        data / "toy",
        data / "toy-1.0",
        data,
        tmp_path / "cache" / "fedbat" / "toy",
        system,
    ]
    for folder in reversed(order):
        place(folder, "a")  # a folder with only some of the files does not count
        if folder is not system:
            assert toy.find(None)["a"].parent != folder
        place(folder, "b")
        assert toy.find(None) == {"a": folder / "a", "b": folder / "b"}


def test_root_takes_the_place_of_the_variable(tmp_path, monkeypatch):
    toy = Downloadable("toy", (Remote(f"{NOWHERE}/a", ""),))
    place(tmp_path / "brought", "a")
    place(tmp_path / "given", "a")
    monkeypatch.setenv("FEDBAT_DATA", str(tmp_path / "brought"))
    assert toy.find(None) == {"a": tmp_path / "brought" / "a"}
    assert toy.find(tmp_path / "given") == {"a": tmp_path / "given" / "a"}


def test_gzipped_files_may_lie_there_unpacked(tmp_path):
    toy = Downloadable("toy", (Remote(f"{NOWHERE}/a.gz", ""), Remote(f"{NOWHERE}/b.gz", "")))
    place(tmp_path, "a", "b", "b.gz")
    assert toy.find(tmp_path) == {"a.gz": tmp_path / "a", "b.gz": tmp_path / "b.gz"}


def test_cache_follows_the_xdg_rule(tmp_path, monkeypatch):
    assert cache_folder() == tmp_path / "cache" / "fedbat"
    monkeypatch.setenv("XDG_CACHE_HOME", "")  # empty counts as unset
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "fedbat"


def test_files_are_downloaded_once(server):
    toy = Downloadable("toy", (server.put("a.gz", b"first"), server.put("b.gz", b"second" * 50_000)))
    for _ in range(2):
        paths = toy.find(None)
        assert {name: path.read_bytes() for name, path in paths.items()} == {
            "a.gz": b"first",
            "b.gz": b"second" * 50_000,
        }
    assert server.requests == ["/a.gz", "/b.gz"]
    assert tree(cache_folder()) == ["toy", "toy/a.gz", "toy/b.gz"]


def test_download_goes_on_where_it_broke_off(server):
    a, b = server.put("a", b"first"), server.put("b", b"second")
    (server.folder / "b").rename(server.folder / "gone")
    with pytest.raises(DataError, match="404"):
        Downloadable("toy", (a, b)).find(None)
    (server.folder / "gone").rename(server.folder / "b")
    Downloadable("toy", (a, b)).find(None)
    assert server.requests == ["/a", "/b", "/b"]


def test_wrong_checksum_leaves_nothing_behind(server):
    remote = server.put("a", b"as published")
    (server.folder / "a").write_bytes(b"tampered with")
    with pytest.raises(DataError, match="does not match the known hash"):
        Downloadable("toy", (remote,)).find(None)
    assert tree(cache_folder()) == ["toy"]


def test_archive_gives_the_wanted_members_and_nothing_else(server, tmp_path):
    link = tarfile.TarInfo("toy-1.0/b.bin")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    archive = tar_gz(
        [
            (tarfile.TarInfo("toy-1.0/readme.html"), b"not wanted"),
            (tarfile.TarInfo("../../escaped"), b"not wanted either"),
            (link, b""),
            (tarfile.TarInfo("/absolute/a.bin"), b"a"),  # the folder in the archive is ignored
            (tarfile.TarInfo("toy-1.0/b.bin"), b"b"),
        ]
    )
    remote = server.put("toy.tar.gz", archive)
    toy = Downloadable("toy", (Remote(remote.url, remote.md5, ("a.bin", "b.bin")),))
    before = tree(tmp_path)
    paths = toy.find(None)
    assert {name: path.read_bytes() for name, path in paths.items()} == {"a.bin": b"a", "b.bin": b"b"}
    new = set(tree(tmp_path)) - set(before)
    assert new == {"cache", "cache/fedbat", *(f"cache/fedbat/{p}" for p in ("toy", "toy/a.bin", "toy/b.bin"))}
    toy.find(None)
    assert server.requests == ["/toy.tar.gz"]


def test_archive_without_a_member_leaves_nothing_behind(server):
    remote = server.put("toy.tar.gz", tar_gz([(tarfile.TarInfo("a.bin"), b"a")]))
    with pytest.raises(DataError, match=r"has no b\.bin"):
        Downloadable("toy", (Remote(remote.url, remote.md5, ("a.bin", "b.bin")),)).find(None)
    assert tree(cache_folder()) == ["toy"]


def test_offline_error_says_what_to_put_where(tmp_path):
    toy = Downloadable("toy", (Remote(f"{NOWHERE}/toy.tar.gz", "", ("a.bin", "b.bin")),), aliases=("toy-1.0",))
    with pytest.raises(DataError) as caught:
        toy.find(tmp_path / "brought")
    message = str(caught.value)
    for part in (
        str(tmp_path / "brought" / "toy-1.0"),
        str(tmp_path / "cache" / "fedbat" / "toy"),
        f"fetch {NOWHERE}/toy.tar.gz",
        f"put a.bin, b.bin into {tmp_path / 'brought' / 'toy'} (cause",
    ):
        assert part in message
    assert "toy is in none of " in message and "Max retries" not in message and "(cause: [Errno " in message
    only = Downloadable("toy", toy.remotes)
    cache = tmp_path / "cache" / "fedbat" / "toy"
    with pytest.raises(DataError, match=re.escape(f"toy is not in {cache} and could not")) as caught:
        only.find(None)
    assert f"into {cache} (cause" in str(caught.value)


def test_bundled_files_are_where_the_package_is():
    paths = Bundled("fmnist_mini", ("LICENSE",)).find(Path("/nonexistent"))
    assert "Zalando" in paths["LICENSE"].read_text()


def test_import_needs_neither_pooch_nor_scipy_nor_matplotlib():
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['pooch', 'scipy', 'matplotlib']))\n"  # None makes an import fail
        "import fedbat.data\n"
        "assert len(fedbat.data.load_dataset('fmnist-mini').y_train) == 6000\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)


def test_two_writers_of_one_file_do_not_share_a_draft(tmp_path):
    path = tmp_path / "file"
    with draft_of(path) as first:
        first.write_text("first")
        write_text(path, "second")
        assert path.read_text() == "second"
    assert path.read_text() == "first" and tree(tmp_path) == ["file"]


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "file"
    write_text(path, "before")
    with pytest.raises(KeyboardInterrupt), draft_of(path) as draft:
        draft.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "before" and tree(tmp_path) == ["file"]


def test_old_drafts_of_a_file_are_removed(tmp_path):
    names = ["file.0a.draft", "file.1b.draft", "file-2.0a.draft", "file"]
    for name in names:
        (tmp_path / name).touch()
    for name in set(names) - {"file.1b.draft"}:
        os.utime(tmp_path / name, (0, 0))
    remove_old_drafts(tmp_path / "file")
    assert tree(tmp_path) == ["file", "file-2.0a.draft", "file.1b.draft"]

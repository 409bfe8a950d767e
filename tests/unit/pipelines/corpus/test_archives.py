import gzip
import io
import lzma
import os
import struct
import tarfile
import time
import zipfile
import zlib

import pytest

from pipelines.corpus import archives
from pipelines.corpus.archives import is_archive, stem
from pipelines.corpus.decode import Unreadable
from pipelines.corpus.find import find_code
from pipelines.corpus.sources import reading
from tests.allocations import growth
from tests.unit.pipelines.corpus.trees import names, reasons

FILES = {"p/a.py": b"a\r\n", "p/b/c.c": b"int c;" * 200, "p/empty.py": b"", "p/block.py": b"x" * 1024}


def write_tar(path, entries, mode="w"):
    """Entries are (name, bytes) or TarInfo."""
    with tarfile.open(path, mode) as tar:
        for entry in entries:
            if isinstance(entry, tarfile.TarInfo):
                tar.addfile(entry)
                continue
            info = tarfile.TarInfo(entry[0])
            info.size = len(entry[1])
            tar.addfile(info, io.BytesIO(entry[1]))
    return path


def special(name, kind, link=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def contents(found) -> dict[str, bytes]:
    with reading(found[0]) as read:
        return {file.name: read(file) for file in found[0]}


@pytest.mark.parametrize(
    "end, mode", [(".tar", "w"), (".tar.gz", "w:gz"), (".tgz", "w:gz"), (".tar.bz2", "w:bz2"), (".tar.xz", "w:xz"), (".zip", "")]
)
def test_members_are_read_in_place_by_the_rules_of_a_folder(tmp_path, end, mode):
    path = tmp_path / ("project-1.2" + end)
    extra = {"p/node_modules/x/y.js": b"y", "p/logo.png": b"p", "p/inner.zip": b"z", "p/z.tar.gz": b"z", "./p/dot.py": b"d"}
    if mode:
        write_tar(path, [special("p", tarfile.DIRTYPE), *FILES.items(), *extra.items()], mode)
    else:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("p/", "")
            for name, data in (FILES | extra).items():
                archive.writestr(name, data)
    found = find_code([path])
    assert contents(found) == {f"project-1.2/{name}": data for name, data in FILES.items()} | {"project-1.2/p/dot.py": b"d"}
    assert reasons(found) == {
        "project-1.2/p/node_modules/": "excluded folder: installed packages",
        "project-1.2/p/logo.png": "binary: .png",
        "project-1.2/p/inner.zip": "archive: inside another input; name it itself to have it read",
        "project-1.2/p/z.tar.gz": "archive: inside another input; name it itself to have it read",
    }
    assert {file.collection for file in found[0]} == {"project-1.2"}
    assert all(file.size == len(contents(found)[file.name]) for file in found[0])
    assert os.listdir(tmp_path) == [path.name]


def test_names_and_kinds_that_lead_elsewhere_are_refused(tmp_path):  # C12
    path = write_tar(
        tmp_path / "evil.tar",
        [
            ("../../evil.py", b"e"), ("/etc/evil.py", b"e"), ("a/../../x.py", b"e"), ("ok.py", b"o"),
            special("link.py", tarfile.SYMTYPE, "../../secret"), special("hard.py", tarfile.LNKTYPE, "/etc/passwd"),
            special("device.py", tarfile.CHRTYPE), special("pipe.py", tarfile.FIFOTYPE),
        ],
    )  # fmt: skip
    found = find_code([path])
    assert contents(found) == {"evil/ok.py": b"o"}
    unsafe = "unsafe name: it leads out of the archive"
    assert reasons(found) == {
        "evil/../../evil.py": unsafe, "evil//etc/evil.py": unsafe, "evil/a/../../x.py": unsafe,
        "evil/link.py": "link: to ../../secret, in an archive", "evil/hard.py": "link: to /etc/passwd, in an archive",
        "evil/device.py": "not a regular file: a pipe or device", "evil/pipe.py": "not a regular file: a pipe or device",
    }  # fmt: skip
    assert os.listdir(tmp_path) == ["evil.tar"]


def _zeros(opener, path, header: bytes, size: int):
    with opener(path, "wb") as file:
        file.write(header)
        block = bytes(1 << 20)
        for _ in range(size >> 20):
            file.write(block)
    return path


@pytest.mark.parametrize("opener, end", [(gzip.open, ".gz"), (lzma.open, ".xz")])
def test_a_bomb_is_refused_before_it_goes_off(tmp_path, opener, end):  # C12
    info = tarfile.TarInfo("zeros.c")
    info.size = 10 << 30
    # The header promises 10 GB; how much of it follows makes no difference, because none of it is decompressed.
    path = _zeros(opener, tmp_path / f"bomb.tar{end}", info.tobuf(), 32 << 20)

    def refused():
        with pytest.raises(ValueError, match=r"no source file in .*bomb.*1 archive refused"):
            find_code([path])
        with pytest.raises(Unreadable, match="archive refused: it holds more than .* bytes, 200 times its size"):
            archives.members(str(path))

    start = time.monotonic()
    assert growth(refused) < 100 << 20
    assert time.monotonic() - start < 5


def test_a_zip_bomb_and_a_large_member(tmp_path):  # C12
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("zeros.c", "w") as file:
            for _ in range(128):
                file.write(bytes(1 << 20))
        archive.writestr("a.py", "a")
    with pytest.raises(Unreadable, match="archive refused: it holds 134,217,729 bytes, more than 200 times its size"):
        archives.members(str(path))
    info = tarfile.TarInfo("large.c")
    info.size = archives.LARGEST_MEMBER + 1
    with open(tmp_path / "large.tar", "wb") as file:
        file.write(info.tobuf())
        file.truncate(info.size + 2048)  # a file with a hole
    with open(tmp_path / "a.py", "w"):
        pass
    found = find_code([tmp_path / "large.tar", tmp_path / "a.py"])
    assert reasons(found) == {"large/large.c": "too large: 268,435,457 bytes, more than 268,435,456 for a member"}


def test_a_header_larger_than_anything_is_not_read(tmp_path):
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 1 << 30
    with open(tmp_path / "pax.tar", "wb") as file:
        file.write(info.tobuf())
        file.truncate(1 << 31)
    with pytest.raises(Unreadable, match="archive refused: a header of"):
        archives.members(str(tmp_path / "pax.tar"))


def test_a_name_longer_than_a_disk_takes(tmp_path):
    path = write_tar(tmp_path / "long.tar", [("d/" * 200_000 + "x.py", b"x"), ("a.py", b"a")])
    found = find_code([path])
    assert names(found) == ["long/a.py"]
    assert reasons(found) == {"long/" + "d/" * 100 + "…": "name too long: 400,004 characters, more than 4,096"}


def test_encrypted_members_and_links_of_a_zip_are_listed(tmp_path):
    path = tmp_path / "z.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("secret.py", "s" * 40)
        archive.writestr("plain.py", "p")
        link = zipfile.ZipInfo("link.py")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "../../etc/passwd")
        archive.writestr("../up.py", "u")
    data = bytearray(path.read_bytes())
    for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):  # the flag in the local and the central header
        data[data.index(mark) + offset] |= 1
    path.write_bytes(bytes(data))
    found = find_code([path])
    assert contents(found) == {"z/plain.py": b"p"}
    assert reasons(found) == {
        "z/secret.py": "encrypted: a member with a password",
        "z/link.py": "link: in an archive",
        "z/../up.py": "unsafe name: it leads out of the archive",
    }


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_of_two_members_of_a_name_the_last_stands(tmp_path):
    write_tar(tmp_path / "t.tar.gz", [("a.py", b"1"), ("b.py", b"b"), ("./a.py", b"22")], "w:gz")
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as archive:
        for data in ("1", "22"):
            archive.writestr("a.py", data)
    found = find_code([tmp_path / "t.tar.gz", tmp_path / "z.zip"])
    assert contents(found) == {"t/a.py": b"22", "t/b.py": b"b", "z/a.py": b"22"}
    assert reasons(found) == dict.fromkeys(("t/a.py", "z/a.py"), "name twice in the archive: the last of that name stands")


def test_damage_is_told_and_never_taken_for_the_end(tmp_path):
    whole = write_tar(tmp_path / "w.tar", [(f"f{i}.py", b"x" * 600) for i in range(5)]).read_bytes()
    cases = {
        "cut.tar": whole[:2000],
        "header.tar": whole[:1536] + b"?" * 512 + whole[2048:],
        "cut.tar.gz": gzip.compress(whole)[:-30],
        "flipped.tar.gz": gzip.compress(whole)[:-6] + b"\0" * 6,
        "noise.tar.xz": b"\0noise",
        "noise.zip": b"PK\x03\x04noise",
        "empty.tar": b"",
    }
    for name, data in cases.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(Unreadable, match="^archive damaged: ."):
            archives.members(str(tmp_path / name))
            with archives.reader(str(tmp_path / name), ["4"]) as reader:
                reader.read("4")


def test_a_member_whose_bytes_are_damaged(tmp_path):
    path = tmp_path / "z.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.py", "abcdef")
    path.write_bytes(path.read_bytes().replace(b"abcdef", b"abcdeg", 1))
    with reading(find_code([path])[0]) as read, pytest.raises(Unreadable, match="archive damaged: Bad CRC-32"):
        read(find_code([path])[0][0])


def test_an_archive_that_went_away(tmp_path):
    path = write_tar(tmp_path / "t.tar", FILES.items())
    files = find_code([path])[0]
    path.unlink()
    with reading(files) as read, pytest.raises(Unreadable, match="unreadable: No such file"):
        read(files[0])


def test_a_compressed_tar_is_decompressed_once_for_all_that_is_wanted(tmp_path, monkeypatch):
    sizes = {f"f{i:03d}.py": os.urandom(512 * (i % 4)) for i in range(100)}
    path = write_tar(tmp_path / "t.tar.gz", sizes.items(), "w:gz")
    found = find_code([path])
    wanted = found[0][::-3]
    rewound = []
    monkeypatch.setattr("_compression.DecompressReader._rewind", lambda self: rewound.append(self))
    with reading(wanted) as read:
        assert {file.name: read(file) for file in wanted} == {f"t/{name}": sizes[name] for name in [f.name[2:] for f in wanted]}
    assert not rewound


def test_names_of_archives():
    assert stem("linux-6.1.tar.xz") == "linux-6.1" and stem("A.ZIP") == "A" and stem("x.tgz") == "x"
    assert is_archive("a.tar.bz2") and not is_archive("a.gz") and not is_archive("zip")


def test_a_ring_of_headers_ends(tmp_path):
    # A negative size, in base 256, leads back to the header itself.
    info = bytearray(tarfile.TarInfo("x.py").tobuf())
    info[124:136] = b"\xff" + struct.pack(">q", -512).rjust(11, b"\xff")
    info[148:156] = b" " * 8
    info[148:156] = b"%06o\0 " % sum(info)
    (tmp_path / "ring.tar").write_bytes(bytes(info) + bytes(2048))
    with pytest.raises(Unreadable, match="archive (refused|damaged)"):
        archives.members(str(tmp_path / "ring.tar"))


def test_bytes_of_a_member_that_say_they_are_more(tmp_path):
    path = tmp_path / "z.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.py", "a" * 5000)
    data = path.read_bytes()
    path.write_bytes(data.replace(struct.pack("<I", 5000), struct.pack("<I", 6000)))
    files = find_code([path])[0]
    with reading(files) as read, pytest.raises(Unreadable, match="archive damaged: 5,000 bytes where 6,000 are promised"):
        read(files[0])


def test_bytes_of_a_deflated_member_that_say_they_are_fewer(tmp_path):
    path = tmp_path / "z.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.py", "a" * 5000)
    data = path.read_bytes()
    assert data.count(struct.pack("<I", 5000)) == 2
    path.write_bytes(data.replace(struct.pack("<I", 5000), struct.pack("<I", 10)))
    assert zlib.crc32(b"a" * 10) != zlib.crc32(b"a" * 5000)
    files = find_code([path])[0]
    with reading(files) as read, pytest.raises(Unreadable, match="archive damaged"):
        read(files[0])

import os
import subprocess

import pytest

from pipelines.corpus.decode import Unreadable
from pipelines.corpus.find import find_code
from pipelines.corpus.git import commit_id, split
from pipelines.corpus.sources import reading
from tests.unit.pipelines.corpus.trees import names, reasons, tree

IDENTITY = ["-c", "user.name=n", "-c", "user.email=e@x", "-c", "core.autocrlf=false", "-c", "safe.directory=*"]


def git(folder, *arguments) -> str:
    environment = {
        **os.environ,
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_AUTHOR_DATE": "2020-01-01T00:00Z",
        "GIT_COMMITTER_DATE": "2020-01-01T00:00Z",
    }
    done = subprocess.run(["git", *IDENTITY, "-C", str(folder), *arguments], check=True, capture_output=True, text=True, env=environment)
    return done.stdout.strip()


@pytest.fixture
def repo(tmp_path):
    """Two commits, of which the first is v1; then the work tree goes its own way."""
    root = tree(
        tmp_path / "repo", {"a.py": b"one\r\n", "sub/b.c": "int b;\n", "LICENSE": "MIT", ".gitignore": "*.c\n", "node_modules/x.js": "x"}
    )
    os.symlink("/etc/passwd", root / "link.py")
    with open(os.fsencode(root) + b"/bad\xff.py", "w"):
        pass
    git(root, "init", "-q", "-b", "main", ".")
    git(root, "add", "-Af")
    git(root, "update-index", "--add", "--cacheinfo", "160000," + "1" * 40 + ",library")
    git(root, "commit", "-qm", "1")
    git(root, "tag", "-a", "v1", "-m", "v1")
    tree(root, {"a.py": "two\n", "new.py": "n"})
    git(root, "add", "-A")
    git(root, "commit", "-qm", "2")
    tree(root, {"a.py": "not committed", "loose.py": "l"})
    return root


def contents(found) -> dict[str, bytes]:
    with reading(found[0]) as read:
        return {file.name: read(file) for file in found[0]}


def test_a_commit_is_read_without_a_checkout(repo):
    found = find_code([f"{repo}@v1"])
    assert contents(found) == {"repo/a.py": b"one\r\n", "repo/sub/b.c": b"int b;\n"}  # .gitignore has no say
    assert [file.size for file in found[0]] == [5, 7]
    assert reasons(found) == {
        "repo/.gitignore": "not a source file: no extension",
        "repo/LICENSE": "not a source file: no extension",
        "repo/bad\\xff.py": "name not UTF-8: rename it to have it read",
        "repo/library": "submodule: another repository at " + "1" * 40 + "; name it itself",
        "repo/link.py": "symbolic link: in a commit, where its target is found by itself",
        "repo/node_modules/": "excluded folder: installed packages",
    }
    assert {file.collection for file in found[0]} == {"repo"}
    commit = git(repo, "rev-parse", "v1^{commit}")
    assert all(file.member.startswith(commit + ":") for file in found[0])  # the id, which a tag may leave, is in the identity
    assert contents(find_code([f"{repo}@HEAD"]))["repo/a.py"] == b"two\n"
    assert contents(find_code([f"{repo}@{commit[:8]}"])) == contents(found)
    assert git(repo, "status", "--porcelain").splitlines() == ["M a.py", "?? loose.py"]


def test_equal_files_of_a_commit_are_two(repo):
    tree(repo, {"x.py": "same", "y.py": "same"})
    git(repo, "add", "x.py", "y.py")
    git(repo, "commit", "-qm", "3")
    found = contents(find_code([f"{repo}@HEAD"]))
    assert found["repo/x.py"] == found["repo/y.py"] == b"same"


def test_bare_repositories_folders_of_one_and_two_commits(repo, tmp_path):
    git(tmp_path, "clone", "-q", "--bare", str(repo), str(tmp_path / "bare.git"))
    assert contents(find_code([f"{tmp_path}/bare.git@v1"])) == {"bare/a.py": b"one\r\n", "bare/sub/b.c": b"int b;\n"}
    assert contents(find_code([f"{repo}/.git@v1"])) == contents(find_code([f"{repo}@v1"]))
    assert contents(find_code([f"{repo}/sub@v1"])) == {"sub/b.c": b"int b;\n"}
    assert names(find_code([f"{repo}/sub@v1", tmp_path / "bare.git@v1"])) == ["bare/a.py", "bare/sub/b.c", "sub/b.c"]
    both = names(find_code([f"{repo}@v1", f"{repo}@main"]))
    assert len(both) == 5 and both[0].startswith("repo@" + commit_id(str(repo), "main")[:12]) != both[0].startswith(
        "repo@" + commit_id(str(repo), "v1")[:12]
    )


def test_nothing_of_the_repository_is_run(repo, tmp_path):
    mark = tmp_path / "ran"
    script = tree(tmp_path, {"script": f"#!/bin/sh\ntouch {mark}\ncat\n"}) / "script"
    script.chmod(0o755)
    for setting in (
        "core.fsmonitor",
        "core.pager",
        "core.sshCommand",
        "filter.x.smudge",
        "diff.x.textconv",
        "alias.ls-tree",
        "core.editor",
    ):
        git(repo, "config", setting, str(script))
    for hook in ("post-checkout", "post-index-change", "reference-transaction"):
        (repo / ".git/hooks").mkdir(exist_ok=True)
        (repo / ".git/hooks" / hook).write_bytes(script.read_bytes())
        (repo / ".git/hooks" / hook).chmod(0o755)
    (repo / ".git/info/attributes").write_text("* filter=x diff=x eol=crlf\n")
    before = sorted((path, path.stat().st_mtime_ns) for path in (repo / ".git").rglob("*"))
    assert contents(find_code([f"{repo}@v1"]))["repo/sub/b.c"] == b"int b;\n"
    assert not mark.exists()
    assert sorted((path, path.stat().st_mtime_ns) for path in (repo / ".git").rglob("*")) == before


def test_unknown_revisions_and_repositories_are_one_line(repo, tmp_path, monkeypatch):
    (tmp_path / "plain").mkdir()
    for path, message in [
        (f"{repo}@v9", "this repository has no commit 'v9'"),
        (f"{repo}@--help", "this repository has no commit '--help'"),
        (f"{repo}@v1:a.py", "this repository has no commit 'v1:a.py'"),
        (f"{repo}@", "name a commit, branch or tag after the @"),
        (f"{tmp_path}/plain@v1", "plain is not a git repository"),
        (f"{tmp_path}/none@v1", "none@v1: no such file or folder"),
    ]:
        with pytest.raises(ValueError, match=message) as error:
            find_code([path])
        assert "\n" not in str(error.value)
    monkeypatch.setenv("GIT_DIR", str(repo / ".git"))  # of somebody's shell or hook
    with pytest.raises(ValueError, match="not a git repository"):
        find_code([f"{tmp_path}/plain@v1"])


def test_an_at_in_a_name_is_no_commit(tmp_path):
    tree(tmp_path, {"a@b/x.py": "x", "a/y.py": "y"})
    assert names(find_code([tmp_path / "a@b"])) == ["a@b/x.py"]
    assert split(str(tmp_path / "a@b@HEAD@{1}")) == (str(tmp_path / "a"), "b@HEAD@{1}")
    assert split(str(tmp_path / "a@b")) is None and split("nothing") is None


def test_an_object_that_is_gone(repo):
    file = find_code([f"{repo}@v1"])[0][0]
    id = file.member.partition(":")[2]
    (repo / ".git/objects" / id[:2] / id[2:]).unlink()
    with reading([file]) as read, pytest.raises(Unreadable, match="unreadable: the repository lacks this object"):
        read(file)


def test_a_damaged_object_is_not_read_as_a_shorter_file(repo):
    text = "".join(f"line {i * 7919 % 104729}\n" for i in range(200_000))
    tree(repo, {"long.py": text})
    git(repo, "add", "long.py")
    git(repo, "commit", "-qm", "3")
    id = git(repo, "rev-parse", "HEAD:long.py")
    path = repo / ".git" / "objects" / id[:2] / id[2:]
    path.chmod(0o644)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    found = [file for file in find_code([f"{repo}@HEAD"])[0] if file.name == "repo/long.py"]
    assert found[0].size == len(text)
    with reading(found) as read, pytest.raises(Unreadable, match="unreadable: "):
        read(found[0])

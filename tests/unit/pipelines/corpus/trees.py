"""Trees of files for the tests of what is read."""


def tree(root, files: dict[str, str | bytes]):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def names(found) -> list[str]:
    return [file.name for file in found[0]]


def reasons(found) -> dict[str, str]:
    return {entry.path: entry.reason for entry in found[1]}

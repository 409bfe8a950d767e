"""In which order a repository's files stand in its one long document.

`dependency` puts a file after what it imports or includes, so that a model reads a definition before its use (Guo et al.
2024, "DeepSeek-Coder"); `path` sorts by name; `random` shuffles by a hash of the name. All three depend on the set of
files, not on the order in which they were found.
"""

from __future__ import annotations

import hashlib

from pipelines.code_completion.links import Repository, language

STRATEGIES = ("dependency", "path", "random")


def order(names: list[str], links: list[list[str]], strategy: str = "dependency", seed: int = 0) -> list[int]:
    """The places of `names` (paths inside one repository) in their new order; `links[i]` are those of file i.

    Raises ValueError for a strategy that does not exist.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"order is {strategy!r}; choose {', '.join(STRATEGIES)}")
    if strategy == "dependency":
        return order_files(names, links)
    if strategy == "path":
        return sorted(range(len(names)), key=lambda i: names[i])
    return sorted(range(len(names)), key=lambda i: (_hash(names[i], seed), names[i]))


def order_files(names: list[str], links: list[list[str]]) -> list[int]:
    """Places of `names` so that a file follows what it links to, in linear time and without recursion.

    Files that link to one another in a circle come together, by path; what they share comes before them. Where the links
    leave a choice, the order by path decides. A link to the file itself, or out of the repository, counts for nothing.
    """
    by_path = sorted(range(len(names)), key=lambda i: names[i])
    return [by_path[place] for place in dependencies_first([names[i] for i in by_path], [links[i] for i in by_path])]


def dependencies_first(names: list[str], links: list[list[str]]) -> list[int]:
    """The same, but where the links leave a choice the order of `names` decides."""
    after = dependencies(names, links)
    return [place for component in components(after) for place in sorted(component) if place < len(names)]  # beyond are folders


def dependencies(names: list[str], links: list[list[str]]) -> list[list[int]]:
    """For each file the sorted places of what it links to.

    An imported folder is a node of its own behind the files, whose neighbours are its files: so n files that import a
    package of m files are n + m edges.
    """
    repository = Repository(names)
    node = {name: i for i, name in enumerate(names)}
    after: list[list[int]] = []
    folders: list[str] = []
    for i, name in enumerate(names):
        targets = set()
        for link in links[i]:
            found = repository.find(name, link)
            if found is None or found == name:
                continue
            if found not in node:
                node[found] = len(node)
                folders.append(found)
            targets.add(node[found])
        after.append(sorted(targets))
    for folder in folders:
        after.append(sorted(node[name] for name in repository.files_in(folder) if language(name) and not name.endswith("_test.go")))
    return after


def components(after: list[list[int]]) -> list[list[int]]:
    """The strongly connected components of a graph, each after those it leads to (Tarjan 1972, with its own stack)."""
    count = len(after)
    index, low, on_stack = [-1] * count, [0] * count, [False] * count
    found, stack, clock = [], [], 0
    for root in range(count):
        if index[root] >= 0:
            continue
        work = [(root, 0)]
        while work:
            node, first = work.pop()
            if first == 0:
                index[node] = low[node] = clock
                clock += 1
                stack.append(node)
                on_stack[node] = True
            for edge in range(first, len(after[node])):
                other = after[node][edge]
                if index[other] < 0:
                    work += [(node, edge + 1), (other, 0)]
                    break
                if on_stack[other]:
                    low[node] = min(low[node], index[other])
            else:
                if work:
                    parent = work[-1][0]
                    low[parent] = min(low[parent], low[node])
                if low[node] == index[node]:
                    component = []
                    while not component or component[-1] != node:
                        component.append(stack.pop())
                        on_stack[component[-1]] = False
                    found.append(component)
    return found


def _hash(name: str, seed: int) -> bytes:
    return hashlib.blake2b(f"{seed}:{name}".encode("utf-8", "surrogateescape"), digest_size=16).digest()

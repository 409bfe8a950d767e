"""A file stands behind what it depends on; the order hangs on the set of files alone."""

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.code_completion.order import components, order, order_files


def ordered(files: dict[str, list[str]], **options) -> list[str]:
    names = list(files)
    return [names[i] for i in order(names, list(files.values()), **options)]


def test_a_file_follows_what_it_depends_on():
    files = {"a.py": ["b", "lib/c"], "b.py": ["lib/c"], "lib/c.py": [], "z.py": ["a"]}
    assert ordered(files) == ["lib/c.py", "b.py", "a.py", "z.py"]


def test_a_circle_comes_together_by_path_behind_what_it_shares():  # C14
    files = {"b.py": ["a", "base"], "a.py": ["b"], "base.py": [], "use.py": ["a"], "self.py": ["self"]}
    assert ordered(files) == ["base.py", "a.py", "b.py", "self.py", "use.py"]


def test_a_circle_of_thirty_thousand_files_and_a_chain_as_long():  # C14: no recursion
    count = 30_000
    names = [f"{i:06}.h" for i in range(count)]
    chain = [[f'"{i + 1:06}.h'] if i + 1 < count else [] for i in range(count)]
    assert order_files(names, chain) == list(range(count))[::-1]
    chain[-1] = ['"000000.h']
    assert order_files(names, chain) == list(range(count))


def test_an_imported_go_package_stands_before_its_user_as_a_whole():
    files = {"cmd/a.go": ["ex.com/m/pkg"], "pkg/x.go": [], "pkg/y.go": [], "pkg/x_test.go": ["ex.com/m/cmd"]}
    got = ordered(files)
    assert got.index("cmd/a.go") > max(got.index("pkg/x.go"), got.index("pkg/y.go"))
    assert got.index("pkg/x_test.go") > got.index("cmd/a.go")


@st.composite
def repositories(draw):
    names = draw(
        st.lists(st.sampled_from([f"{folder}{stem}.h" for folder in ("", "a/", "a/b/") for stem in "pqrst"]), unique=True, min_size=1)
    )
    links = [draw(st.lists(st.sampled_from([f'"{n}' for n in names]), max_size=4)) for _ in names]
    return names, links


@given(repositories(), st.randoms(use_true_random=False), st.sampled_from(["dependency", "path", "random"]))
def test_the_order_is_a_permutation_that_hangs_on_the_set_of_files_alone(repository, shuffle, strategy):
    names, links = repository
    got = [names[i] for i in order(names, links, strategy, seed=3)]
    assert sorted(got) == sorted(names)
    pairs = list(zip(names, links))
    shuffle.shuffle(pairs)
    again = [pairs[i][0] for i in order([n for n, _ in pairs], [found for _, found in pairs], strategy, seed=3)]
    assert again == got


@given(st.integers(1, 12).flatmap(lambda n: st.lists(st.sets(st.integers(0, n - 1)), min_size=n, max_size=n)))
def test_components_are_those_of_the_definition(graph):
    after = [sorted(edges) for edges in graph]
    reach = [set() for _ in after]
    for i in range(len(after)):
        work = [i]
        while work:
            for j in after[work.pop()]:
                if j not in reach[i]:
                    reach[i].add(j)
                    work.append(j)
    found = components(after)
    assert sorted(i for part in found for i in part) == list(range(len(after)))
    where = {i: k for k, part in enumerate(found) for i in part}
    for i in range(len(after)):
        for j in range(len(after)):
            assert (where[i] == where[j]) == (i == j or (j in reach[i] and i in reach[j]))
        assert all(where[j] <= where[i] for j in after[i])


def test_path_and_random():
    files = {name: [] for name in ("b/a.c", "a.c", "a/z.c", "c.c")}
    assert ordered(files, strategy="path") == ["a.c", "a/z.c", "b/a.c", "c.c"]
    assert ordered(files, strategy="random", seed=1) != ordered(files, strategy="random", seed=2)
    with pytest.raises(ValueError, match="order is 'size'; choose dependency, path, random"):
        ordered(files, strategy="size")


def test_seventy_thousand_files_in_seconds():
    """As many files and includes as a kernel has."""
    rng = random.Random(0)
    headers = [f"include/d{i % 100}/h{i}.h" for i in range(20_000)]
    names = headers + [f"drivers/d{i % 700}/s{i % 9}/f{i}.c" for i in range(50_000)]
    links = [[f"<d{h % 100}/h{h}.h" for h in rng.choices(range(20_000), k=8)] for _ in names]
    started = time.process_time()
    assert len(order_files(names, links)) == 70_000
    assert time.process_time() - started < 20  # about 3 s on an idle core

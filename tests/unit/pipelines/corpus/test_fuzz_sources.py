from tests.benchmarks.fuzz_sources import fuzz


def test_nasty_trees_archives_and_commits():  # C3 to C8, C12
    # `python -m tests.benchmarks.fuzz_sources` looks at 10,000 of them.
    outcome = fuzz(200)
    assert outcome.kept > 100
    assert {"archive damaged", "undecodable", "unsafe name", "symbolic link", "name not UTF-8", "ignored", "licence"} <= set(
        outcome.reasons
    )

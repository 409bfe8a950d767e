"""A browser for the tests that look at pages, and a folder of runs to look at."""

import os
import shutil

import pytest


@pytest.fixture(scope="session")
def chromium() -> str:
    """Where chromium is. Without one: skipped on a developer's machine, failed in CI, where a skip would hide the gap for good."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    message = "no chromium on PATH: apt-get update && apt-get install -y --no-install-recommends chromium"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)

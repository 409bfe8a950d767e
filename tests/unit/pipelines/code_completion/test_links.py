"""Imports and includes are read and found as each language means them."""

import time

import pytest

from pipelines.code_completion.links import Repository, links


def found(names: list[str], name: str, text: str) -> list[str]:
    """The files that `name` with this text refers to, in a repository of `names`."""
    repository = Repository([*names, name])
    return [file for link in links(name, text) if (file := repository.find(name, link))]


@pytest.mark.parametrize(
    "name, text, names, expected",
    [
        ("fs/ext4/inode.c", '#include "ext4.h"\n', ["fs/ext4/ext4.h", "ext4.h"], ["fs/ext4/ext4.h"]),
        ("fs/ext4/inode.c", " # include <linux/fs.h> // x\n", ["include/linux/fs.h", "tools/include/linux/fs.h"], ["include/linux/fs.h"]),
        ("fs/a.c", "#include <linux/x.h>", ["tools/far/linux/x.h", "include/uapi/linux/x.h"], ["include/uapi/linux/x.h"]),
        ("fs/a.c", "#include <linux/x.h>", ["b/linux/x.h", "a/linux/x.h"], ["a/linux/x.h"]),
        ("arch/x86/k.c", "#include <asm/io.h>", ["arch/arm/include/asm/io.h", "arch/x86/include/asm/io.h"], ["arch/x86/include/asm/io.h"]),
        ("a/b.c", '#include "../c/d.h"\n#include <stdio.h>', ["c/d.h"], ["c/d.h"]),
        ("a/b.c", '#include "../../../x/d.h"', ["lib/x/d.h"], ["lib/x/d.h"]),
        ("a.c", 'char *s = "#include \\"b.h\\"";', ["b.h"], []),
        ("pkg/a.py", "import os, pkg.b as b\n", ["pkg/b.py", "pkg/__init__.py"], ["pkg/b.py"]),
        ("pkg/a.py", "import types\n", ["pkg/types.py", "pkg/__init__.py"], []),  # not an absolute import's
        ("tools/a.py", "import types\n", ["tools/types.py"], ["tools/types.py"]),  # a script beside it
        ("tests/t.py", "from pkg.b import f\n", ["src/pkg/b.py", "src/pkg/__init__.py"], ["src/pkg/b.py"] * 2),
        ("pkg/a.py", "from . import b, name\n", ["pkg/b.py", "pkg/__init__.py"], ["pkg/b.py", "pkg/__init__.py"]),
        ("pkg/s/a.py", "from ..b import (\n    f,  # g,\n    h as i,\n)\n", ["pkg/b.py"], ["pkg/b.py"] * 3),
        ("pkg/a.py", "from .b.c import d\n", ["pkg/b/c/d.py"], ["pkg/b/c/d.py"]),
        ("src/a.ts", "import x from './b.js'\nexport * from \"../lib\"\n", ["src/b.ts", "lib/index.ts"], ["src/b.ts", "lib/index.ts"]),
        ("src/a.js", "const x = require('./b'); import('./c.mjs'); require('fs')", ["src/b/index.js", "src/c.mjs"], ["src/b/index.js", "src/c.mjs"]),
        ("src/a.ts", "import x from '@/b'", ["src/b.tsx"], ["src/b.tsx"]),
        ("s/com/x/A.java", "import com.y.B;\nimport static com.y.C.f;\nimport java.util.List;", ["s/com/y/B.java", "s/com/y/C.java"], ["s/com/y/B.java", "s/com/y/C.java"]),
        ("s/com/x/A.java", "import com.y.*;", ["s/com/y/B.java"], ["s/com/y/"]),
        ("cmd/m.go", 'import (\n\t"fmt"\n\tx "github.com/o/r/pkg/u"\n)\nimport "github.com/o/r/z"', ["pkg/u/u.go", "z/z.go"], ["pkg/u/", "z/"]),
        ("src/lib.rs", "pub mod a;\nmod b { }\nuse crate::c::{D, e};", ["src/a.rs", "src/c/e.rs", "src/c.rs"], ["src/a.rs", "src/c.rs", "src/c/e.rs"]),
        ("src/a.rs", "mod b;\nuse super::c::X;\nuse std::io;\nuse self::b::Y;", ["src/a/b.rs", "src/c/mod.rs"], ["src/a/b.rs", "src/c/mod.rs", "src/a/b.rs"]),
        ("README.md", "import os\n", ["os.py"], []),
    ],
)  # fmt: skip
def test_what_a_file_refers_to(name, text, names, expected):
    assert found(names, name, text) == expected


def test_a_file_that_names_itself_is_found_as_itself():  # C14
    assert found([], "a.py", "import a\n") == ["a.py"]
    assert found([], "x/a.h", '#include "a.h"\n') == ["x/a.h"]


@pytest.mark.parametrize("name", ["a.c", "a.py", "a.js", "a.java", "a.go", "a.rs"])
@pytest.mark.parametrize(
    "piece", ["#include <", "from a import (", "import (", "import a.", 'require( "', "use crate::{", " ", "\t\n", "import", "mod x"]
)
def test_a_megabyte_of_anything_is_read_in_linear_time(name, piece):  # C5
    started = time.process_time()
    links(name, piece * ((1 << 20) // len(piece)))
    assert time.process_time() - started < 3

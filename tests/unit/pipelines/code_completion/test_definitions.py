"""A line that defines a name is told from one that uses it, in each language."""

import time

import pytest

from pipelines.code_completion.definitions import block, definition, head, names_near


@pytest.mark.parametrize(
    "kind, text, line",
    [
        ("c", "int other(void);\nint f(int);\nstatic int f(int x)\n{\n\treturn f(x);\n}\n", 2),
        ("c", "  f(x);\n#define f(x) ((x) + 1)\n", 1),
        ("c", "struct f *g;\nstruct f {\n\tint x;\n};\n", 1),
        ("c", "struct f;\ntypedef struct {\n} f;\n", 2),
        ("c", "typedef unsigned long f;\n", 0),
        ("c", "x = f(1);\nf(\n", 1),
        ("c", "if (f(x)) {\n}\n  void f() {\n", 2),
        ("c", "SYSCALL_DEFINE(f, int, x)\n", 0),
        ("python", "f(1)\nx.f = 2\ndef ff(): pass\nasync def f(x):\n    pass\n", 3),
        ("python", "if f == 1: pass\nclass f(Base):\n", 1),
        ("python", "f: int = 3\n", 0),
        ("script", "f();\nexport default async function f() {\n", 1),
        ("script", "export const f = () => 1\n", 0),
        ("script", "export interface f {\n", 0),
        ("jvm", "import x.f;\npublic final class f extends Base {\n", 1),
        ("jvm", "  return f(x);\n  new f(x);\n  private List<String> f(int x) throws E {\n", 2),
        ("go", "\tf(1)\nfunc (s *T) f(x int) {\n", 1),
        ("go", "type f struct {\n", 0),
        ("rust", "use f;\npub(crate) async fn f<T>(x: T) {\n", 1),
        ("rust", "macro_rules! f {\n", 0),
        ("c", "g(f);\nreturn f(x) + 1;\n", None),
        ("python", "import f\nx = f(1)\n", None),
    ],
)
def test_where_a_name_is_defined(kind, text, line):
    assert definition(text.encode(), "f", kind) == line
    assert definition(text.replace("\n", "\r\n").encode(), "f", kind) == line


@pytest.mark.parametrize(
    "kind, text, first, end",
    [
        ("c", "int f(int a,\n      int b)\n{\n\tif (a) {\n\t}\n}\nint g;\n", 0, 6),
        ("c", "#define F(x) \\\n\tg(x)\nint g;\n", 0, 2),
        ("c", "int x;\n", 0, 1),
        ("c", "typedef struct {\n\tint a;\n} f;\nint g;\n", 2, 3),
        ("python", "def f(\n    a,\n):\n    return 1\n\n\ndef g(): pass\n", 0, 4),
        ("python", "class A:\n    def f(self):\n        pass\n\n    def g(self):\n        pass\n", 1, 3),
        ("rust", "struct F;\nfn g() {}\n", 0, 1),
        ("c", "int f(\n" + "x\n" * 999, 0, 200),
    ],
)
def test_where_a_definition_ends(kind, text, first, end):
    assert block(text.split("\n"), first, kind) == end


def test_comments_and_decorators_come_along():
    assert head(["import a", "", "# why", "@cached", "def f():"], 4) == 2
    assert head(["#include <a.h>", "/* what", " * it does */", "int f()"], 3) == 1


def test_names_near_a_line_nearest_first():
    text = "far_away = 1\n" + "\n" * 40 + "near = other(third)\nhere = call_it(self)\n" + "\n" * 40 + "behind = 1\n"
    assert names_near(text, 43) == ["here", "call_it", "near", "other", "third"]


@pytest.mark.parametrize("kind", ["c", "python", "script", "jvm", "go", "rust"])
@pytest.mark.parametrize("piece", ["f(", "a f\n", "struct f ", " f" * 50 + "\n", "(((" + "f\n", "pub const f\n", "a, " * 300 + "f\n"])
def test_a_megabyte_of_uses_is_searched_in_linear_time(kind, piece):  # C5
    started = time.process_time()
    definition(piece.encode() * ((1 << 20) // len(piece)), "f", kind)
    assert time.process_time() - started < 6

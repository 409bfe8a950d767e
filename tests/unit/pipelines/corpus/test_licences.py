import time

import pytest

from pipelines.corpus.licences import Allowed, by_folder, declared, is_licence_file, nearest, recognise

MIT = """Copyright (c) 2020 Somebody

Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
documentation files (the "Software"), to deal in the Software without restriction. The above copyright notice and this
permission notice shall be included in all copies or substantial portions of the Software.
"""
BSD = """Redistribution and use in source and binary forms, with or without modification, are permitted:
1. Redistributions of source code must retain the above copyright notice.
2. Redistributions in binary form must reproduce the above copyright notice.
"""
TEXTS = {
    "MIT": MIT,
    "BSD-2-Clause": BSD,
    "BSD-3-Clause": BSD + "3. Neither the name of the holder may be used to endorse or promote products.",
    "Apache-2.0": "                                 Apache License\n                           Version 2.0, January 2004\n",
    "GPL-2.0-only": "\t\t    GNU GENERAL PUBLIC LICENSE\n\t\t       Version 2, June 1991\n",
    "GPL-3.0-only": "GNU GENERAL PUBLIC LICENSE\nVersion 3, 29 June 2007\n\n13. Use with the GNU Affero General Public License.\n",
    "AGPL-3.0-only": "GNU AFFERO GENERAL PUBLIC LICENSE\nVersion 3\nthe GNU General Public License version 3",
    "LGPL-3.0-only": "GNU LESSER GENERAL PUBLIC LICENSE\nVersion 3\nversion 3 of the GNU General Public License",
    "LGPL-2.1-only": "GNU LESSER GENERAL PUBLIC LICENSE\nVersion 2.1, February 1999",
    "MPL-2.0": "Mozilla Public License Version 2.0\n====",
    "ISC": "Permission to use, copy, modify, and/or distribute this software for any purpose\nwith or without fee is hereby "
    "granted, provided that the above copyright notice and this permission notice appear in all copies.",
    "Unlicense": "This is free and unencumbered software released into the public domain.",
    "CC0-1.0": "Creative Commons Legal Code\n\nCC0 1.0 Universal\n",
    "GPL-2.0 WITH Linux-syscall-note": "The Linux Kernel is provided under:\n\n\tSPDX-License-Identifier: GPL-2.0 WITH Linux-syscall-note\n",
}


@pytest.mark.parametrize("expected", TEXTS)
def test_texts_are_recognised(expected):
    assert recognise(TEXTS[expected]) == expected
    commented = "".join(f" * {line}\n" for line in TEXTS[expected].splitlines())
    assert recognise(commented) == expected


def test_other_texts_are_not():
    assert recognise("All rights reserved.") is None
    assert recognise("") is None


def test_declared_is_the_expression_in_the_head():
    assert declared("# SPDX-License-Identifier: MIT\n") == "MIT"
    assert declared("/* SPDX-License-Identifier: (GPL-2.0-only WITH Linux-syscall-note) OR MIT */\n") == (
        "(GPL-2.0-only WITH Linux-syscall-note) OR MIT"
    )
    assert declared("\n" * 5000 + "SPDX-License-Identifier: MIT") is None
    assert declared("All rights reserved.") is None


def test_names_of_licence_files():
    for name in ("LICENSE", "LICENCE.txt", "COPYING", "COPYING.LESSER", "LICENSE-MIT", "License.md", "UNLICENSE", "MIT-LICENSE"):
        assert is_licence_file(name), name
    for name in ("license.py", "licensed.txt", "copying_files", "LICENSE.png", "README", "my-LICENSE"):
        assert not is_licence_file(name), name


def test_the_nearest_licence_above_holds():
    folders = by_folder(
        [("r/COPYING", "GPL-2.0-only"), ("r/a/LICENSE-MIT", "MIT"), ("r/a/LICENSE-APACHE", "Apache-2.0"), ("r/b/LICENSE", None)]
    )
    assert nearest("r/x.c", folders) == nearest("r/b/deep/x.c", folders) == "GPL-2.0-only"
    assert nearest("r/a/x.c", folders) == "Apache-2.0 AND MIT"
    assert nearest("other/x.c", folders) is None
    assert by_folder([("r/A", "MIT OR ISC"), ("r/B", "0BSD")]) == {"r": "0BSD AND (MIT OR ISC)"}


@pytest.mark.parametrize(
    "expression, allowed",
    [
        ("MIT", True), ("mit", True), ("ISC", False), ("MIT OR ISC", True), ("ISC OR MIT", True), ("MIT AND ISC", False),
        ("MIT AND Apache-2.0", True), ("ISC OR MIT AND Apache-2.0", True), ("ISC AND MIT OR MIT", True),
        ("ISC AND (MIT OR MIT)", False), ("(ISC OR MIT) AND Apache-2.0", True), ("(GPL-2.0 WITH Linux-syscall-note) OR MIT", True),
        ("GPL-2.0 WITH Linux-syscall-note", True), ("GPL-2.0+", True), ("GPL-2.0-or-later", True), ("GPL-3.0", False),
        ("LicenseRef-x", False), ("NONE", False),
    ],
)  # fmt: skip
def test_expressions_are_judged(expression, allowed):
    said = Allowed(["MIT", "Apache-2.0", "GPL-2.0"]).why_not(expression)
    assert said == (None if allowed else f"licence: {expression}")


def test_what_is_no_expression_is_left_out_with_its_words():
    allowed = Allowed(["MIT"])
    assert allowed.why_not(None) == "licence: none found"
    for wrong in ("MIT OR", "OR", "(MIT", "MIT)", "MIT MIT", "MIT AND WITH", "()", "", "MIT WITH"):
        assert allowed.why_not(wrong) == f"licence: {wrong!r} is no SPDX expression", wrong
    start = time.process_time()
    assert allowed.why_not("(" * 2000 + "MIT" + ")" * 2000) is None
    assert "no SPDX" in allowed.why_not("(" * 4000)
    assert time.process_time() - start < 1


def test_a_wrong_list_is_one_line():
    for wrong in ([], [""], ["MIT OR ISC"]):
        with pytest.raises(ValueError, match="--licences names '.*'; give SPDX ids"):
            Allowed(wrong)

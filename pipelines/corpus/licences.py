"""Under which licence a file may be used: what its own SPDX line says, else the nearest licence file above it.

Texts are recognised by the sentences that only they have. Several licence files side by side count as `AND`: which of
them one may choose is not written in a file's name. An expression is judged against the licences a person allows:
`A OR B` needs one of them, `A AND B` both, and `A WITH exception`, which only permits more, needs A.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from pipelines.corpus.rules import BINARY, SOURCE_EXTENSIONS

_SPDX = re.compile(r"SPDX-License-Identifier:[ \t]*([\w.+()\- ]*[\w.+)])")
_HEAD = 4096
_FILE_NAME = re.compile(r"(?i)(un)?licen[cs]es?([-._].*)?|copying([-.].*)?|mit-licen[cs]e([-._].*)?")

_ANY_PURPOSE = "software for any purpose with or without fee"
_FREE_OF_CHARGE = "permission is hereby granted, free of charge, to any person obtaining a copy"

# SPDX id and what a licence file must hold, in lower case with single spaces; the first that fits is taken.
_TEXTS = (
    ("Apache-2.0", ("apache license", "version 2.0, january 2004")),
    ("AGPL-3.0-only", ("gnu affero general public license version 3",)),
    ("LGPL-3.0-only", ("gnu lesser general public license version 3",)),
    ("LGPL-2.1-only", ("gnu lesser general public license version 2.1",)),
    ("LGPL-2.0-only", ("gnu library general public license version 2",)),
    ("GPL-3.0-only", ("gnu general public license version 3",)),
    ("GPL-2.0-only", ("gnu general public license version 2",)),
    ("MPL-2.0", ("mozilla public license", "version 2.0")),
    ("EPL-2.0", ("eclipse public license - v 2.0",)),
    ("CC0-1.0", ("cc0 1.0 universal",)),
    ("CC-BY-SA-4.0", ("attribution-sharealike 4.0 international",)),
    ("CC-BY-4.0", ("attribution 4.0 international",)),
    ("Unlicense", ("this is free and unencumbered software released into the public domain",)),
    ("WTFPL", ("do what the fuck you want to public license",)),
    ("BSL-1.0", ("boost software license - version 1.0",)),
    ("PSF-2.0", ("python software foundation license version 2",)),
    ("Zlib", ("this software is provided 'as-is', without any express or implied", "altered source versions must be")),
    ("ISC", ("permission to use, copy, modify, and/or distribute this", _ANY_PURPOSE, "provided that the above")),
    ("ISC", ("permission to use, copy, modify, and distribute this", _ANY_PURPOSE, "provided that the above")),
    ("0BSD", ("permission to use, copy, modify, and/or distribute this", _ANY_PURPOSE)),
    ("MIT-0", (_FREE_OF_CHARGE, "persons to whom the software is furnished to do so. the software is provided")),
    ("MIT", (_FREE_OF_CHARGE, "the above copyright notice and this permission notice")),
    ("BSD-4-Clause", ("redistribution and use in source and binary forms", "all advertising materials mentioning")),
    ("BSD-3-Clause", ("redistribution and use in source and binary forms", "endorse or promote products")),
    ("BSD-2-Clause", ("redistribution and use in source and binary forms", "redistributions in binary form must reproduce")),
)  # fmt: skip
_TEXT_HEAD = 1 << 16
_COMMENT = re.compile(r"^[ \t]*[#*/;]+", re.M)
_DEPRECATED = re.compile(r"(?i)((?:[AL]?GPL|GFDL)-\d\.\d)(\+?)")
_TOKEN = re.compile(r"[()]|[^\s()]+")


def declared(text: str) -> str | None:
    """The SPDX expression in the first 4,096 characters, or None."""
    found = _SPDX.search(text, 0, _HEAD)
    return found and found[1]


def is_licence_file(name: str) -> bool:
    """Whether a file of this name (the last part of its path) holds the terms of what stands beside and below it."""
    extension = os.path.splitext(name)[1].lower()
    is_code = extension in SOURCE_EXTENSIONS and extension not in (".md", ".rst")
    return _FILE_NAME.fullmatch(name) is not None and not is_code and extension not in BINARY


def recognise(text: str) -> str | None:
    """The licence that a licence file gives, by its SPDX line or its words, or None."""
    if expression := declared(text):
        return expression
    words = " ".join(_COMMENT.sub(" ", text[:_TEXT_HEAD]).lower().split())
    return next((licence for licence, sentences in _TEXTS if all(sentence in words for sentence in sentences)), None)


def by_folder(files: Iterable[tuple[str, str | None]]) -> dict[str, str]:
    """From the licence files, each its path and what `recognise` said, the licence of each folder that has one."""
    found: dict[str, set[str]] = {}
    for name, licence in files:
        if licence:
            found.setdefault(name.rpartition("/")[0], set()).add(licence)
    return {folder: _both(sorted(some)) for folder, some in found.items()}


def nearest(name: str, folders: dict[str, str]) -> str | None:
    """The licence of the nearest folder above a file, or None."""
    while name:
        name = name.rpartition("/")[0]
        if name in folders:
            return folders[name]
    return None


class Allowed:
    """The licences that a person takes. Raises ValueError in one line for a list that names none or not an id."""

    def __init__(self, licences: Iterable[str]):
        self._ids = {_current(name) for name in licences}
        wrong = [name for name in self._ids if not re.fullmatch(r"[\w.+-]+", name)]
        if wrong or not self._ids:
            raise ValueError(f"--licences names {wrong[0] if wrong else ''!r}; give SPDX ids with commas between, as in MIT,Apache-2.0")

    def why_not(self, expression: str | None) -> str | None:
        """Why a file under this licence is left out, `licence: detail`, or None."""
        if expression is None:
            return "licence: none found"
        try:
            return None if self._holds(expression) else f"licence: {expression}"
        except (ValueError, IndexError):
            return f"licence: {expression!r} is no SPDX expression"

    def _holds(self, expression: str) -> bool:
        # Two stacks (Dijkstra's shunting yard): an expression may be nested deeper than calls may.
        values: list[bool] = []
        operators: list[str] = []

        def apply() -> None:
            right, left = values.pop(), values.pop()
            values.append(left and right if operators.pop() == "AND" else left or right)

        tokens = _TOKEN.findall(expression)
        expects_id, at = True, 0
        while at < len(tokens):
            token, at = tokens[at], at + 1
            upper = token.upper()
            if expects_id and token == "(":
                operators.append(token)
            elif expects_id and token != ")" and upper not in ("AND", "OR", "WITH"):
                values.append(self._has(token))
                if at + 1 < len(tokens) and tokens[at].upper() == "WITH":
                    at += 2
                expects_id = False
            elif not expects_id and upper in ("AND", "OR"):
                while operators and (operators[-1] == "AND" or operators[-1] == upper):
                    apply()
                operators.append(upper)
                expects_id = True
            elif not expects_id and token == ")":
                while operators[-1] != "(":
                    apply()
                operators.pop()
            else:
                raise ValueError(token)
        if expects_id or "(" in operators:
            raise ValueError(expression)
        while operators:
            apply()
        return values[0]

    def _has(self, licence: str) -> bool:
        current = _current(licence)
        # "Or later" leaves the choice of the version to whoever uses the file.
        return current in self._ids or current.replace("-or-later", "-only") in self._ids


def _both(expressions: list[str]) -> str:
    if len(expressions) == 1:
        return expressions[0]
    return " AND ".join(f"({one})" if " OR " in one.upper() else one for one in expressions)


def _current(name: str) -> str:
    """An id in one spelling: GPL-2.0 is GPL-2.0-only and GPL-2.0+ is GPL-2.0-or-later; capitals don't count."""
    name = name.strip()
    if found := _DEPRECATED.fullmatch(name):
        name = found[1] + ("-or-later" if found[2] else "-only")
    return name.lower()

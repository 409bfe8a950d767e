"""Papers as LaTeX sources: a main file, what it includes, its bibliography.

1. `\\input` and `\\include` are followed inside the paper's folder only; comments are taken out; the paper's own simple
   macros are expanded.
2. The reference list comes from `thebibliography`, in the text or the `.bbl` file, or else from the `.bib` files: of
   those what the text cites, in the order in which it does.
3. The body is written as text: headings, paragraphs, citations as `[1, 2]` with the numbers of the list. Formulas stay
   as source, and so does every command and environment that isn't known here: nothing is lost by not being understood.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from pipelines.literature_analysis import bibliography, tex
from pipelines.literature_analysis.paper import Draft, Paper, one_line
from pipelines.literature_analysis.references import Reference

Read = Callable[[str], "str | None"]

_MAIN = re.compile(r"(?m)^[^%\n]{0,200}?\\document(?:class|style)\b")
_INCLUDED = re.compile(r"\\(?:input|include|subfile)[ \t]*(?:\{([^{}\n]{1,200})\}|[ \t]([\w./-]{1,200}))")
_DEEPEST, _LARGEST = 16, 32 << 20
_LEVELS = {"part": 0, "chapter": 0, "section": 1, "subsection": 2, "subsubsection": 3, "paragraph": 4, "subparagraph": 5}
_CITES = re.compile(r"(?:no|foot|full|paren|text|auto|smart|super)?[cC]ite(?:p|t|alp|alt|author|year|yearpar|text|num|n|A|NP|as|s)?")
_MATH = frozenset("equation align gather multline eqnarray displaymath math flalign alignat array split".split())
_OPEN = frozenset(
    "document center flushleft flushright itemize enumerate description quote quotation figure table wrapfigure "
    "minipage small footnotesize abstract keywords thebibliography adjustbox spacing multicols subfigure".split()
)
_UNWRAPPED = frozenset(
    "textbf textit emph texttt textsc textrm textsf textsl textmd textup textnormal underline mbox text hbox url path "
    "uppercase MakeUppercase caption title author date thanks ensuremath centerline uline keywords institute affil "
    "affiliation address email textcolor bibinfo bibfield natexlab enquote nolinkurl textsuperscript textsubscript".split()
)
_DROPPED = {
    **dict.fromkeys(
        "centering noindent maketitle clearpage newpage small large Large LARGE huge Huge tiny scriptsize footnotesize "
        "normalsize bf it em tt rm sc sl sf bfseries itshape ttfamily rmfamily sffamily scshape mdseries upshape protect "
        "bigskip medskip smallskip appendix tableofcontents vfill hfill xspace relax null bibfont raggedright sloppy "
        "newblock balance frontmatter mainmatter backmatter makeatletter makeatother allowbreak leavevmode doublespacing "
        "printbibliography onecolumn twocolumn cleardoublepage singlespacing unskip ignorespaces and boldmath".split(),
        0,
    ),
    **dict.fromkeys(
        "vspace hspace bibliographystyle bibliography pagestyle thispagestyle includegraphics usepackage nocite "
        "documentclass documentstyle addbibresource vskip graphicspath pagenumbering RequirePackage hyphenation "
        "theoremstyle bibpunct phantom hphantom vphantom providecommand bibitemdeclare BibitemShut bibAnnoteFile".split(),
        1,
    ),
    **dict.fromkeys("setlength addtolength setcounter addtocounter newtheorem numberwithin resizebox definecolor".split(), 2),
}


def is_main(text: str) -> bool:
    """Whether a TeX file is a paper's main one."""
    return _MAIN.search(text) is not None


def read_latex(text: str, name: str, read: Read) -> Paper:
    """The paper whose main file `name` has this text; `read` gives another file of its folder, None where there is none.

    Whatever `read` is asked for is inside the folder or absent: it sees to that.
    """
    text = _whole(tex.without_comments(text), read, (name,))
    head, begin, body = text.partition("\\begin{document}")
    if not begin:
        head, body = "", text
    body = body.partition("\\end{document}")[0]
    macros, head = tex.definitions(head)
    inner, body = tex.definitions(body)
    macros |= inner
    head, body = (tex.accents(tex.expanded(part, macros)) for part in (head, body))

    stem = name.rpartition("/")[2].rpartition(".")[0]
    references = _references(body, stem, read, head)
    draft = Draft("latex")
    draft.references(references)
    draft.title(plain(_given("title", head) or _given("title", body) or ""))
    if author := _given("author", head):
        _Body(draft, False).run(author)
        draft.paragraph()
    start = body.find("\\begin{thebibliography}")
    if start >= 0:
        end = body.find("\\end{thebibliography}", start)
        body = body[:start] + (body[end + len("\\end{thebibliography}") :] if end >= 0 else "")
    _Body(draft, "\\chapter" in body).run(body)
    draft.write_references()
    if (abstract := _given("abstract", head)) and not any(s.heading == "Abstract" for s in draft.finish().sections):
        draft.heading("Abstract", 1)
        _Body(draft, False).run(abstract)
    return draft.finish()


def plain(source: str) -> str:
    """A piece of TeX as text in one line."""
    draft = Draft("latex")
    _Body(draft, False, inner=True).run(tex.accents(source))
    return one_line(draft.finish().text)


def _whole(text: str, read: Read, inside: tuple[str, ...]) -> str:
    """The text with its included files in their places; a missing one, or one inside itself, stays a command."""
    left = [_LARGEST]

    def include(found: re.Match, inside: tuple[str, ...]) -> str:
        name = (found[1] or found[2]).strip().removeprefix("./")
        for candidate in (name, f"{name}.tex"):
            if candidate in inside or len(inside) > _DEEPEST or (part := read(candidate)) is None:
                continue
            left[0] -= len(part)
            if left[0] < 0:
                break
            part = tex.without_comments(part)
            return _INCLUDED.sub(lambda deeper: include(deeper, (*inside, candidate)), part)
        return found[0]

    return _INCLUDED.sub(lambda found: include(found, inside), text)


def _given(command: str, source: str) -> str | None:
    """The argument of the last `\\command{…}`, without what `\\thanks` adds."""
    found = None
    for mark in re.finditer(rf"\\{command}(?![A-Za-z])", source):
        _, position = tex.option(source, mark.end())
        read = tex.argument(source, position) if source[position : position + 1] == "{" else None
        found = read[0] if read else found
    return found and re.sub(r"\\thanks[ ]*\{[^{}]*\}|\\\\(?:\[[^\[\]]*\])?|\\and\b|\\AND\b", " ", found)


def _references(body: str, stem: str, read: Read, head: str) -> list[Reference]:
    written = body if "\\bibitem" in body else read(f"{stem}.bbl") or ""
    if "\\bibitem" not in written:  # biblatex's .bbl files have none
        names = [name for part in re.findall(r"\\bibliography\{([^{}]*)\}", body) for name in part.split(",")]
        names += re.findall(r"\\addbibresource(?:\[[^\[\]]*\])?\{([^{}]*)\}", head + body)
        files = [read(name if name.endswith(".bib") else f"{name}.bib") for name in (name.strip() for name in names)]
        known = {entry.key: entry for file in files if file for entry in reversed(bibliography.read_bib(file, plain))}
        cited = _cited_keys(body)
        everything = list(known) if "*" in cited else []
        return [known[key] for key in dict.fromkeys([*cited, *everything]) if key in known]
    if written is not body:
        macros, written = tex.definitions(tex.without_comments(written))
        written = tex.accents(tex.expanded(written, macros))
    return bibliography.read_bbl(written, plain)


def _cited_keys(source: str) -> list[str]:
    commands = (found for found in re.finditer(r"\\([A-Za-z]+)\*?", source) if _CITES.fullmatch(found[1]))
    return [key for command in commands if (read := _cited(source, command.end())) for key in read[0]]


def _cited(source: str, position: int) -> tuple[list[str], str | None, str | None, int] | None:
    """Keys, the notes before and after them, and the end of the citation command whose name ends at `position`."""
    first, position = tex.option(source, position)
    second, position = tex.option(source, position)
    before, after = (first, second) if second is not None else (None, first)
    read = tex.argument(source, position) if source[position : position + 1] == "{" else None
    return read and ([key.strip() for key in read[0].split(",") if key.strip()], before, after, read[1])


class _Body:
    """Writes TeX into a draft."""

    _TOKEN = re.compile(r"\\([A-Za-z]+)(\*?)|\\(.)|(\$\$?)|([{}])|(\n[ \t]*\n\s*)|(---?|``|''|~)|[^\\${}\n~`'-]+|\n|.", re.S)

    def __init__(self, draft: Draft, chapters: bool, inner: bool = False):
        self.draft, self.deeper, self.inner = draft, 1 if chapters else 0, inner
        self.kept: list[bool] = []  # for every open group, whether its braces are written

    def run(self, source: str) -> None:
        self.source, self.unclosed = source, set()
        position = 0
        while position < len(source):
            token = self._TOKEN.match(source, position)
            position = token.end()
            command, star, sign, dollar, brace, blank, typed = token.groups()
            if command:
                position = self._command(command, star, position)
            elif sign:
                position = self._sign(sign, position)
            elif dollar:
                position = self._formula(token.start(), dollar, dollar)
            elif brace:
                position = self._brace(brace, position)
            elif blank:
                self.draft.paragraph()
            elif typed:
                self.draft.words({"---": "—", "--": "–", "``": "“", "''": "”", "~": " "}[typed])
            else:
                self.draft.words(token[0])

    def _brace(self, brace: str, position: int) -> int:
        if brace == "{":
            self.kept.append(False)
        elif self.kept and self.kept.pop():
            self.draft.add("}")
            self._keep(position)
            return position + (self.source[position : position + 1] == "{")
        return position

    def _keep(self, position: int) -> None:
        """A group right after a command that is kept is an argument of it, and keeps its braces."""
        if self.source[position : position + 1] == "{":
            self.draft.add("{")
            self.kept.append(True)

    def _sign(self, sign: str, position: int) -> int:
        if sign in "([":
            return self._formula(position - 2, "\\" + sign, "\\" + {"(": ")", "[": "]"}[sign])
        if sign == "\\":
            _, position = tex.option(self.source, position + (self.source[position : position + 1] == "*"))
            self.draft.words("\n")
        elif sign in "%&#_${}":
            self.draft.add(sign)
        elif sign in " \n\t":
            self.draft.words(" ")
        elif sign == ",":
            self.draft.add("\u2009")
        elif sign not in "/-@!;:>":
            self.draft.add("\\" + sign)
        return position

    def _formula(self, start: int, opening: str, closing: str) -> int:
        """A formula, as source; an opening sign that nothing closes is a sign."""
        end = -1 if closing in self.unclosed else self._closing(start + len(opening), closing)
        if end < 0:
            self.unclosed.add(closing)
            self.draft.add(opening)
            return start + len(opening)
        self.draft.add(self.source[start:end])
        return end

    def _closing(self, position: int, closing: str) -> int:
        while (end := self.source.find(closing, position)) >= 0:
            slashes = end
            while slashes > position and self.source[slashes - 1] == "\\":
                slashes -= 1
            if (end - slashes) % 2 == 0:
                return end + len(closing)
            position = end + 1
        return -1

    def _command(self, command: str, star: str, position: int) -> int:
        source = self.source
        if command in _LEVELS:
            _, after = tex.option(source, position)
            if (read := tex.argument(source, after)) and source[after : after + 1] == "{":
                if self.inner:  # a heading inside one is words, however deep it goes
                    return after
                self.draft.heading(plain(read[0]), max(1, _LEVELS[command] + self.deeper))
                return read[1]
        elif command in ("begin", "end"):
            if (read := tex.argument(source, position)) and source[position : position + 1] == "{":
                return self._environment(command, read[0], position, read[1])
        elif _CITES.fullmatch(command) and command != "nocite" and (read := _cited(source, position)):
            keys, before, after, end = read
            numbers = ", ".join(dict.fromkeys(str(self.draft.number(key) or key) for key in keys))
            before, after = ((note if self.inner else plain(note)) if note else "" for note in (before, after))
            marker = f"{before} {numbers}".strip() + (f", {after}" if after else "")
            self.draft.cite(f"[{marker}]", keys)
            return end
        elif command in tex.SIGNS:
            self.draft.add(tex.SIGNS[command])
            return self._after_name(position)
        elif command == "item":
            self.draft.paragraph()
            label, position = tex.option(source, position)
            label = label if self.inner or not label else plain(label)
            self.draft.words(f"- {label}: " if label else "- ")
            return self._after_name(position)
        elif command == "par":
            self.draft.paragraph()
            return position
        elif command == "verb" and position < len(source):
            end = source.find(source[position], position + 1)
            if end > 0:
                self.draft.add(source[position + 1 : end])
                return end + 1
        elif command in _DROPPED and (after := self._past(position, _DROPPED[command])) is not None:
            return after
        elif command in _UNWRAPPED:
            _, after = tex.option(source, position)
            return after
        self.draft.add("\\" + command + star)
        if source[position : position + 1] == "[" and (end := tex.group(source, position)) is not None:
            self.draft.add(source[position:end])
            position = end
        self._keep(position)
        return position + (source[position : position + 1] == "{")

    def _past(self, position: int, arguments: int) -> int | None:
        """The position after a command's options and arguments, None where they aren't all there."""
        if not arguments:
            return self._after_name(position)
        for _ in range(arguments):
            _, position = tex.option(self.source, position)
            if self.source[position : position + 1] != "{" or (end := tex.group(self.source, position)) is None:
                return None
            position = end
        return tex.option(self.source, position)[1]

    def _after_name(self, position: int) -> int:
        while self.source[position : position + 1] in (" ", "\t"):
            position += 1
        return position

    def _environment(self, command: str, name: str, start: int, position: int) -> int:
        bare = name.rstrip("*")
        if command == "begin" and (bare in _MATH or name in tex.VERBATIM) and name not in self.unclosed:
            end = self.source.find(f"\\end{{{name}}}", position)
            if end >= 0:
                self.draft.paragraph()
                stop = end + len(f"\\end{{{name}}}")
                self.draft.add(f"\\begin{{{name}}}" + self.source[position:stop] + "\n")
                self.draft.paragraph()
                return stop
            self.unclosed.add(name)
        self.draft.paragraph()
        if bare == "abstract" and command == "begin":
            self.draft.heading("Abstract", 1)
        elif bare == "abstract":
            self.draft.paragraph()
        elif bare in _OPEN:
            if command == "begin":
                _, position = tex.option(self.source, position)
                if bare in ("minipage", "wrapfigure", "multicols", "adjustbox", "spacing", "subfigure"):
                    position = self._past(position, 2 if bare == "wrapfigure" else 1) or position
        else:
            self.draft.add(f"\\{command}{{{name}}}")
            if command == "begin":
                self._keep(position)
                return position + (self.source[position : position + 1] == "{")
            self.draft.add("\n")
        return position

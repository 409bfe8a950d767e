import pytest

from pipelines.literature_analysis import bibliography, tex
from pipelines.literature_analysis.latex import plain, read_latex
from tests.unit.pipelines.literature_analysis import papers

FILES = {"method.tex": papers.METHOD, "refs.bib": papers.BIB}


def latex(body: str, head: str = "", files=None):
    return read_latex(f"\\documentclass{{a}}{head}\\begin{{document}}{body}\\end{{document}}", "main.tex", (files or {}).get)


def cited(paper):
    return [(paper.text[c.start : c.stop], c.references, c.unresolved) for c in paper.citations]


def test_a_paper():
    paper = read_latex(papers.LATEX, "main.tex", FILES.get)
    assert paper.title == "Rings of Gödel: A Small Study"
    assert [(s.level, s.heading) for s in paper.sections] == [(1, "Abstract"), (1, "Introduction"), (2, "Method"), (1, "References")]
    assert "Ann Author Ben Writer" in paper.pieces()[0]
    assert "We show that RingNet is 50% better." in paper.text and "nobody knows" not in paper.text
    assert "$\\mathbf{x} \\cdot y$" in paper.text and "\\begin{equation}\na = b\n\\end{equation}\n" in paper.text
    assert "The \\unknown[a]{method} is bold “quoted” —" in paper.text
    assert "\\input{../../evil}" in paper.text and "\\input{method}" in paper.text  # neither is followed
    assert cited(paper) == [("[1, missing]", (1,), ("missing",)), ("[see 2, p. 3]", (2,), ())]
    assert [(e.number, e.key, e.title, e.year) for e in paper.references] == [
        (1, "vaswani", "Attention is All You Need", 2017),
        (2, "smith", "On Örings", 1999),
    ]
    assert paper.references[0].identifiers == {"arxiv": "1706.03762"} and paper.references[1].identifiers == {"doi": "10.1000/abc"}
    assert paper.text.endswith("[2] J. Smith. On Örings. 1999. 10.1000/AbC\n")


def test_the_bbl_goes_before_the_bib():  # C11: its duplicate is one reference
    paper = read_latex(papers.LATEX, "main.tex", {**FILES, "main.bbl": papers.BBL}.get)
    assert [(e.number, e.key, e.text) for e in paper.references] == [
        (1, "smith", "J. Smith. On Örings. 1999."),
        (2, "vaswani", "Ashish Vaswani. Attention is all you need. NeurIPS, 2017."),
    ]
    assert cited(paper)[0] == ("[2, missing]", (2,), ("missing",))


def test_references_in_the_text():
    body = "As \\cite{a}.\\begin{thebibliography}{9}\\bibitem{a} Doe. 2001.\\bibitem{b} Roe.\\end{thebibliography} After."
    paper = latex(body)
    assert cited(paper) == [("[1]", (1,), ())] and len(paper.references) == 2 and "After." in paper.text


def test_macros():
    head = (
        r"\newcommand\foo[2][x]{#1-#2}\def\bar{Bar}\newcommand{\hard}{\def\x{1}}\renewcommand{\loop}{\loop\loop}\newcommand{\s}{S\xspace}"
    )
    paper = latex(r"\foo{a} \foo[y]{b} \bar baz \hard{} \s is \s. \loop", head)
    assert paper.text.startswith("x-a y-b Barbaz \\hard{} S is S. ")


def test_macros_that_double_are_bounded():
    head = (
        "".join(f"\\newcommand{{\\{chr(98 + i)}x}}{{\\{chr(97 + i)}x\\{chr(97 + i)}x}}" for i in range(24))
        + "\\newcommand{\\ax}{long text}"
    )
    assert len(latex("\\yx", head).text) < 32 << 20


def test_comments_and_verbatim():
    tex_ = "a % b\nc\\% d\n% all\n\ne \\\\% f\n\\begin{verbatim}\n% kept\n\\end{verbatim}\\begin{comment}\nx\n\\end{comment}g%\n\nh"
    assert tex.without_comments(tex_) == "a c\\% d\n\n\ne \\\\\\begin{verbatim}\n% kept\n\\end{verbatim}g\n\nh"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (r"Erd\H{o}s na\"{\i}ve \v{S}kola \c c {\'e} \~n \ss \o", "Erdős naïve Škola ç é ñ ßø"),
        (r"``a'' --- b -- c~d \& \$5 \_ \# \{x\}", "“a” — b – c d & $5 _ # {x}"),
        (r"\textbf{a \emph{b}} {\bf c} \url{http://x.y/z}", "a b c http://x.y/z"),
        (r"$a \$ b$ \(c\) \[d\] $$e$$", r"$a \$ b$ \(c\) \[d\] $$e$$"),
        (r"\unknown{a}{b} \other[o]{c}", r"\unknown{a}{b} \other[o]{c}"),
        (r"a $ b", "a $ b"),
        (r"\section{\section{\textit{x}}}", "x"),
    ],
)
def test_plain(source, text):
    assert plain(source) == text


def test_environments():
    paper = latex(
        r"\begin{itemize}\item One \item[Two] 2\end{itemize}\begin{figure}[t]\centering\includegraphics[w=3]{a}\caption{A \cite{a}.}\end{figure}"
        r"\begin{theorem}[Main]It holds.\end{theorem}\begin{align*}x&=1\\y&=2\end{align*}"
    )
    assert paper.text.split("\n\n")[:3] == ["- One", "- Two: 2", "A [a]."]
    assert "\\begin{theorem}[Main]It holds.\n\n\\end{theorem}" in paper.text and "\\begin{align*}x&=1\\\\y&=2\\end{align*}" in paper.text
    assert "includegraphics" not in paper.text


def test_chapters_come_before_sections():
    paper = latex(r"\chapter{One}\section{Two}\subsubsection{Three}")
    assert [(s.level, s.heading) for s in paper.sections] == [(1, "One"), (2, "Two"), (4, "Three")]


def test_bib():
    entries = bibliography.read_bib(papers.BIB + "@comment{x, y={z}}@misc{open, title={never closed", plain)
    assert [entry.key for entry in entries] == ["vaswani", "smith", "uncited", "open"]
    assert entries[0].text == "Ashish Vaswani, Noam Shazeer. Attention is All You Need. NeurIPS 30. 2017. 1706.03762"

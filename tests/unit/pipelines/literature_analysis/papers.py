"""One small paper in every format, and PDFs as a test needs them."""

from __future__ import annotations

import io

from reportlab.lib.pagesizes import A4
from reportlab.pdfbase.pdfmetrics import stringWidth
from reportlab.pdfgen.canvas import Canvas

LATEX = r"""\documentclass{article}
\usepackage[utf8]{inputenc}
\newcommand{\ring}{RingNet\xspace}
\newcommand{\vect}[1]{\mathbf{#1}}
\title{Rings of G\"odel: A {\em Small} Study\thanks{Nobody.}}
\author{Ann Author \and Ben Writer}
\begin{document}
\maketitle
\begin{abstract}
We show that \ring is 50\% better. % nobody knows
\end{abstract}
\section{Introduction}
Models attend~\cite{vaswani, missing} over rings \citep[see][p.~3]{smith} with $\vect{x} \cdot y$.

\begin{equation}
a = b
\end{equation}
\input{method}
\bibliography{refs}
\end{document}
"""
METHOD = "\\subsection{Method}\nThe \\unknown[a]{method} is \\textbf{bold} ``quoted'' --- \\input{../../evil} \\input{method}\n"
BIB = r"""@string{nips = "NeurIPS"}
@inproceedings{vaswani, title={Attention is {All} You Need}, author="Ashish Vaswani and Noam Shazeer",
  booktitle=nips # { 30}, year=2017, eprint={1706.03762}}
@article{smith, author={J. Smith}, title={On {\"O}rings}, year={1999}, doi={10.1000/AbC}}
@article{uncited, title={Nobody reads this}, year=2001}
"""
BBL = r"""\begin{thebibliography}{9}
\bibitem[Smith(1999)]{smith} J.~Smith. \newblock On {\"O}rings. 1999.

\bibitem{vaswani} Ashish Vaswani. Attention is all you need. \emph{NeurIPS}, 2017.

\bibitem{twice} J. Smith. On {\"O}rings. 1999.
\end{thebibliography}
"""
JATS = """<?xml version="1.0"?>
<!DOCTYPE article PUBLIC "-//NLM//DTD JATS//EN" "JATS-archivearticle1.dtd">
<article xmlns:xlink="http://www.w3.org/1999/xlink"><front><article-meta>
<article-id pub-id-type="doi">10.1000/Jats.1</article-id><article-id pub-id-type="pmc">123456</article-id>
<title-group><article-title>Rings in <italic>vivo</italic></article-title></title-group>
<pub-date><year>2012</year></pub-date><pub-date><year>2011</year></pub-date>
<permissions><license xlink:href="https://creativecommons.org/licenses/by/4.0/"><p>Open.</p></license></permissions>
<abstract><p>We gave rings &alpha; to mice.</p></abstract></article-meta></front>
<body><sec><title>Methods</title><p>As before <xref ref-type="bibr" rid="B1 B2">[1,2]</xref> and in
<xref ref-type="fig" rid="F1">Figure 1</xref>.</p>
<sec><title>Mice</title><p>Ten.</p><table-wrap><table><tr><td>a</td><td>1</td></tr></table></table-wrap></sec></sec></body>
<back><ack><p>Thanks.</p></ack><ref-list><title>References</title>
<ref id="B1"><mixed-citation>Doe J. Mouse rings. 2001. <pub-id pub-id-type="pmid">77</pub-id></mixed-citation></ref>
<ref id="B2"><element-citation><person-group><name><surname>Roe</surname><given-names>R</given-names></name></person-group>
<article-title>More rings</article-title><year>2003</year><pub-id pub-id-type="doi">10.1000/x</pub-id></element-citation></ref>
<ref id="B3"><mixed-citation>Again, doi:10.1000/X.</mixed-citation></ref></ref-list></back></article>
"""
TEI = """<?xml version="1.0" encoding="UTF-8"?>
<TEI xmlns="http://www.tei-c.org/ns/1.0"><teiHeader><fileDesc><titleStmt><title level="a">Rings by machine</title></titleStmt>
<publicationStmt><availability><licence target="https://creativecommons.org/publicdomain/zero/1.0/"/></availability>
<date type="published" when="2019-03-01">March 2019</date></publicationStmt>
<sourceDesc><biblStruct><idno type="arXiv">arXiv:1903.00001v2</idno></biblStruct></sourceDesc></fileDesc>
<profileDesc><abstract><p>Machines read rings.</p></abstract></profileDesc></teiHeader>
<text><body><div><head n="1">Introduction</head><p>As shown <ref type="bibr" target="#b0">(Doe, 2001)</ref>, and
<ref type="bibr">[9]</ref>.</p><formula>x = y</formula></div></body>
<back><div type="references"><listBibl><biblStruct xml:id="b0"><analytic><title level="a">Mouse rings</title>
<author><persName><forename>J</forename><surname>Doe</surname></persName></author></analytic>
<monogr><imprint><date when="2001"/></imprint></monogr></biblStruct></listBibl></div></back></text></TEI>
"""
MARKDOWN = """---
title: Rings in Markdown
date: 2020-05-01
---

Written quickly.

# Introduction

As shown [@doe2001, p. 3] and noted[^1]. Intervals are [0, 1].

```python
# no heading
```

Methods
-------

See [1].

## References

[1] Jane Doe. 2001. Mouse rings are round. Journal.

[^1]: A note.
"""
RST = """PEP: 9999
Title: Rings in
       reStructuredText
Created: 01-Feb-2003

Abstract
========

As :pep:`8` says [1]_ and [#auto]_ and [missing]_::

    Not a heading
    =============

Details
-------

Text.

References
==========

.. [1] Jane Doe,
   Mouse rings, 2001.

.. [#auto] Auto note.

Copyright
=========

Placed in the public domain.
"""
PLAIN = """Rings in Plain Text

Ann Author

Abstract

We de\ufb01ne rings. A state-
of-the-art is a real-world com-
pound, as in real-
world rings and compound words.

1. Introduction

Doe (2001) and others (Roe and Poe, 2003; Nobody, 1999) cite. The interval [0, 1] is none.

References

Doe, J. 2001. Mouse rings are round.

Roe, R. and P. Poe. 2003. More rings.
"""
SENTENCES = """<PAPER>
<S sid ="0">Rings &amp; Things</S>
<ABSTRACT><S sid ="1" ssid = "1">We present a classi\xc6er for R & D where a < b.</S>
<S sid ="2" ssid = "2">It identi\ufb01es rings; iden- ti\ufb01es, too; pre- and post-.</S></ABSTRACT>
<SECTION title="Introduction. " number = "1">
<S sid ="3" ssid = "1">As (Pedersen, 2001) says.</S>
</SECTION>
<SECTION title="On "quotes". " number = "2">
<S sid ="4" ssid = "1">Never closed.
</PAPER>"""
LABELLED = """TITLE:\x20
Rings in women



ABSTRACT.RESULTS:
They were round.

BODY.METHODS:
Twice a week.
As before.

BODY:
The rest.
"""
SCIREX = {
    "words": "document : Ring Nets We look at rings . section : Method theorem : Let x be . It is . subsection : A subsubsection : B End .".split(),
    "sections": [[0, 9], [9, 21], [21, 24], [24, 29]],
    "sentences": [[0, 4], [4, 9], [9, 12], [12, 18], [18, 21], [21, 24], [24, 27], [27, 29]],
}


def pdf(pages, encrypt: str | None = None) -> bytes:
    """A PDF of pages, each a list of (x, y, size, text) with y from the page's top, in points; "" for a page of a box."""
    buffer = io.BytesIO()
    canvas = Canvas(buffer, pagesize=A4, encrypt=encrypt, invariant=1)
    for page in pages:
        for x, y, size, text in page:
            canvas.setFont("Times-Roman", size)
            canvas.drawString(x, A4[1] - y, text)
        if not page:
            canvas.rect(50, 50, 400, 400, fill=1)
        canvas.showPage()
    canvas.save()
    return buffer.getvalue()


def column(x: float, y: float, lines, size: float = 10, leading: float = 12):
    """Lines one below the other."""
    return [(x, y + leading * i, size, line) for i, line in enumerate(lines)]


def set_in(width: float, text: str, size: float = 10) -> list[str]:
    """Text broken into lines of a width."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if stringWidth(longer, "Times-Roman", size) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines

"""A little SVG: text, boxes and arrows in the page's light or dark, as wide as a phone can show."""

from collections.abc import Sequence
from html import escape

WIDTH = 480
# Okabe and Ito's hues, which the colour-blind tell apart; in the dark lighter ones of the same.
_STYLE = """
.paper{fill:#fff}.ink,.code{fill:#16181d}.faint{fill:#596070}
.box{fill:#eef1f5;stroke:#8a93a3}.line{stroke:#596070;fill:none}
.c0{fill:#0072b2}.c1{fill:#d98c00}.c2{fill:#009e73}.c3{fill:#a0437c}.c4{fill:#b24300}.on{fill:#fff}
text{font:14px system-ui,-apple-system,'Segoe UI',sans-serif}
.title{font-weight:600;font-size:16px}.small{font-size:12px}
.code{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
@media (prefers-color-scheme:dark){
.paper{fill:#14161a}.ink,.code{fill:#eceef2}.faint{fill:#a3abb9}.box{fill:#23272f;stroke:#6b7280}.line{stroke:#a3abb9}
.c0{fill:#56b4e9}.c1{fill:#f0ae3e}.c2{fill:#2cc596}.c3{fill:#e79cc8}.c4{fill:#ff9a5c}.on{fill:#14161a}}
"""


def text(x: float, y: float, words: str, classes: str = "ink", anchor: str = "start") -> str:
    """Words that begin, end or have their middle (``anchor``) at a place on their base line."""
    where = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:g}" y="{y:g}" class="{classes}"{where}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, classes: str = "box", about: str = "") -> str:
    """A rectangle; ``about`` is its tooltip."""
    title = f"<title>{escape(about)}</title>" if about else ""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" class="{classes}">{title}</rect>'


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    """A straight line with a head."""
    return f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" class="line" marker-end="url(#head)"/>'


def picture(height: float, about: str, parts: Sequence[str]) -> str:
    """A file of ``height``; ``about`` says what it shows to those who cannot see it."""
    head = (
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0L8 4L0 8z" class="faint"/></marker>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="600" role="img">\n'
        f"<title>{escape(about)}</title>\n<style>{_STYLE}</style>\n<defs>{head}</defs>\n"
        f'<rect width="{WIDTH}" height="{height:g}" class="paper"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )

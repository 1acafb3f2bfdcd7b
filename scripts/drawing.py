"""`Drawing`: boxes, rows of cells, arrows and labels, as an SVG file for pages in light and dark.

Colours are variables, which docs/assets/site.css sets by the page's scheme; a file that is looked
at by itself goes by the system's. Text in backticks is code.
"""

from collections.abc import Sequence
from html import escape

Point = tuple[float, float]

STYLE = """
svg.nv{--ink:#1f2430;--quiet:#596577;--line:#7d889a;--paper:#fff;--a:#dfe4fb;--a-line:#5c6bc0;
--b:#fde3cf;--b-line:#d9622b;--c:#d8f0e0;--c-line:#2e8b57;--g:#eef0f3;--g-line:#a7afbb}
@media (prefers-color-scheme:dark){svg.nv{--ink:#e6e9ef;--quiet:#a9b3c3;--line:#8a95a8;
--paper:#1e2129;--a:#323b6b;--a-line:#8c9eff;--b:#5b3620;--b-line:#ff9a62;--c:#1f4a35;
--c-line:#6fcf97;--g:#2c313c;--g-line:#5b6472}}
.nv .paper{fill:var(--paper)}.nv text{fill:var(--ink);font-family:system-ui,sans-serif}
.nv .m{font-family:ui-monospace,Menlo,Consolas,monospace}.nv .quiet{fill:var(--quiet)}
.nv .bold{font-weight:600}.nv rect,.nv path{stroke-width:1.2}
.nv .plain{fill:none;stroke:var(--line)}.nv .a{fill:var(--a);stroke:var(--a-line)}
.nv .b{fill:var(--b);stroke:var(--b-line)}.nv .c{fill:var(--c);stroke:var(--c-line)}
.nv .g{fill:var(--g);stroke:var(--g-line)}.nv .dash{stroke-dasharray:4 3}
.nv .wire{fill:none;stroke:var(--line)}.nv .tip{fill:var(--line);stroke:none}
"""
LEADING = 1.3  # of the size of text


class Drawing:
    """A picture that is added to from the back to the front.

    Kinds of boxes: "plain" (an outline), "a", "b", "c" (colours whose meaning the picture says) and
    "g" (grey).

    Args:
        width, height: in units of which text has 12 or so.
    """

    def __init__(self, width: int, height: int) -> None:
        self._size = width, height
        self._parts: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        text: str = "",
        kind: str = "plain",
        size: float = 12,
        dashed: bool = False,
    ) -> None:
        """A box with lines of text in its middle."""
        style = f"{kind} dash" if dashed else kind
        place = f'x="{x}" y="{y}" width="{w}" height="{h}"'
        self._parts.append(f'<rect class="{style}" {place} rx="4"/>')
        lines = text.split("\n") if text else []
        top = y + h / 2 - (len(lines) - 1) * size * LEADING / 2 + size * 0.35
        for i, line in enumerate(lines):
            self.text(x + w / 2, top + i * size * LEADING, line, "middle", size=size)

    def cells(
        self,
        x: float,
        y: float,
        texts: Sequence[object],
        kinds: str,
        w: float = 26,
        h: float = 24,
        size: float = 11,
    ) -> None:
        """Boxes side by side; `kinds` has a letter for each, or one for all ("." is plain)."""
        for i, text in enumerate(texts):
            kind = kinds[i % len(kinds)]
            self.box(x + i * w, y, w, h, str(text), "plain" if kind == "." else kind, size)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        anchor: str = "start",
        style: str = "",
        size: float = 12,
    ) -> None:
        """Lines of text, of which the first stands on y."""
        for i, line in enumerate(text.split("\n")):
            attributes = f'x="{x:g}" y="{y + i * size * LEADING:g}" font-size="{size:g}"'
            if anchor != "start":
                attributes += f' text-anchor="{anchor}"'
            if style:
                attributes += f' class="{style}"'
            spans = escape(line, quote=False).split("`")
            spans[1::2] = [f'<tspan class="m">{span}</tspan>' for span in spans[1::2]]
            self._parts.append(f"<text {attributes}>{''.join(spans)}</text>")

    def note(self, x: float, y: float, text: str, anchor: str = "start", size: float = 11) -> None:
        """Text that steps back."""
        self.text(x, y, text, anchor, "quiet", size)

    def head(self, x: float, y: float, text: str, anchor: str = "start") -> None:
        """Text that stands out."""
        self.text(x, y, text, anchor, "bold", 13)

    def line(self, *points: Point, dashed: bool = False) -> None:
        """A line through points."""
        path = " L".join(f"{x:g} {y:g}" for x, y in points)
        self._parts.append(f'<path class="wire{" dash" if dashed else ""}" d="M{path}"/>')

    def arrow(self, *points: Point, dashed: bool = False) -> None:
        """The same, which ends in a tip. Its last part is level or upright."""
        self.line(*points, dashed=dashed)
        (x0, y0), (x, y) = points[-2:]
        dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
        if dx and dy:
            dx = 0
        back, side = 7, 3.5
        left = x - dx * back - dy * side, y - dy * back - dx * side
        right = x - dx * back + dy * side, y - dy * back + dx * side
        tip = " L".join(f"{px:g} {py:g}" for px, py in ((x, y), left, right))
        self._parts.append(f'<path class="tip" d="M{tip} Z"/>')

    def brace(self, x0: float, x1: float, y: float, text: str, up: bool = False) -> None:
        """A bracket below (or above) what lies between x0 and x1, with a note."""
        step = -6 if up else 6
        self.line((x0, y), (x0, y + step), (x1, y + step), (x1, y))
        self.note((x0 + x1) / 2, y + (2.2 * step if up else step + 13), text, "middle")

    def svg(self) -> str:
        """The file."""
        width, height = self._size
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="nv" viewBox="0 0 {width} {height}">'
            f"<style>{STYLE}</style>\n"
            f'<rect class="paper" width="{width}" height="{height}" rx="6"/>\n'
            + "\n".join(self._parts)
            + "\n</svg>\n"
        )

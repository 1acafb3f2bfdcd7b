"""Hooks of mkdocs for the documentation site: generated parts, and checks.

- `<!-- flags: COMMAND -->` becomes the flags of that command, from the command line's own parser;
  `<!-- families -->` the architectures that config.json may name; `<!-- options of vLLM -->` and
  `<!-- parameters of vLLM -->` what is accepted of vLLM's.
- Drawings (docs/drawings/*.svg) are put into the page itself, so that they take its colours.
- Each page also exists as Markdown, and `llms.txt` lists those, for programs that read.
- Every link of the finished site resolves, anchors included, and no page asks another host for
  anything: exceptions are warnings, by which `mkdocs build --strict` fails.
"""

import argparse
import logging
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from nanovllm.checkpoint.families import FAMILIES
from nanovllm.cli.main import _parsers
from nanovllm.config import FOREIGN_OPTIONS
from nanovllm.sampling_params import FOREIGN_PARAMS
from nanovllm.utils.options import Foreign

logger = logging.getLogger("mkdocs.hooks")  # whose warnings count with --strict
HIDDEN = re.compile(r'<a class="headerlink".*?</a>|<svg.*?</svg>|<button.*?</button>', re.S)
DRAWING = re.compile(r'<p><img alt="([^"]*)" src="[^"]*?(drawings/[\w-]+\.svg)"[^>]*></p>')
CODE = re.compile(r"language-(\w+)")

# Values of vLLM's options that ask for nothing.
NEUTRAL: tuple[Any, ...] = (
    *(None, False, True, 0, 0.0, 1, 1.0, {}, [], "", "auto", "hf", "mp", "none", "generate"),
    *("string", "vllm", "fcfs"),
)

_as_markdown: dict[str, tuple[str, str]] = {}  # of pages, by their path: title and text


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in what is generated from the code."""
    if page.file.src_uri == "experiments.md":  # mentions everything: others are to be found first
        page.meta["search"] = {"boost": 0.2}
    markdown = re.sub(r"<!-- flags: (\w+) -->", lambda found: flags(found[1]), markdown)
    markdown = markdown.replace("<!-- options of vLLM -->", foreign(FOREIGN_OPTIONS))
    markdown = markdown.replace("<!-- parameters of vLLM -->", foreign(FOREIGN_PARAMS))
    return markdown.replace("<!-- families -->", families())


def flags(command: str) -> str:
    """The text of `nanovllm COMMAND --help`, as Markdown."""
    parser = _parsers()[1][command]
    parts = [_fenced(part) for part in (parser.description or "").split("\n\n")]
    for group in parser._action_groups:
        if not group._group_actions:
            continue
        if group.title not in ("options", "optional arguments"):
            parts.append(f"**{group.title}** ({group.description})")
        rows = [_flag(action) for action in group._group_actions]
        parts.append("\n".join(["| flag | meaning |", "|---|---|", *rows]))
    return "\n\n".join(parts)


def _fenced(paragraph: str) -> str:
    is_laid_out = re.search(r"^ ", paragraph, re.M)
    return f"```text\n{paragraph.rstrip()}\n```" if is_laid_out else paragraph


def _flag(action: argparse.Action) -> str:
    value = f" {action.metavar}" if action.metavar else ""
    if action.choices:
        value = f" {'|'.join(map(str, action.choices))}"  # in code, no cell ends there
    names = ", ".join(f"`{name}{value}`" for name in action.option_strings)
    text = (action.help or "").replace("%%", "%").replace("|", "\\|").replace("{", "&#123;")
    return f"| {names} | {text}{' (required)' if action.required else ''} |"


def families() -> str:
    """The table of architectures, and the files that compute them."""
    rows = [f"| `{name}` | `models/{_file(each)}` |" for name, each in sorted(FAMILIES.items())]
    return "\n".join(["| architecture in config.json | file |", "|---|---|", *rows])


def foreign(options: Foreign) -> str:
    """The table of names of vLLM: with which values they are accepted, and what others mean."""
    rows = [
        f"| `{name}` | {_accepted(accepts)} | {remedy} |"
        for name, (accepts, remedy) in sorted(options.items())
    ]
    return "\n".join(["| in vLLM | accepted | instead of others |", "|---|---|---|", *rows])


def _accepted(accepts: Callable[[Any], bool]) -> str:
    if accepts(0.5):
        return "any number"
    if accepts(7):
        return "up to 20"
    return ", ".join(f"`{value!r}`" for value in NEUTRAL if accepts(value))


def _file(family: Any) -> str:
    return f"{family.model.partition('.')[0]}.py"


def on_page_content(html: str, page: Any, config: Any, **_: Any) -> str:
    """Put the drawings in, and keep the page's text."""
    whole = html
    html = DRAWING.sub(lambda found: _drawing(Path(config.docs_dir), found[2], found[1]), html)
    path = page.file.dest_uri.removesuffix(".html") + ".md"
    _as_markdown[path] = str(page.title), _markdown(DRAWING.sub(r"<p>[Drawing: \1]</p>", whole))
    return html


def _markdown(html: str) -> str:
    """A page as Markdown: code blocks keep their language, links lead to pages of this kind."""
    from markdownify import ATX, MarkdownConverter  # not needed where no site is built

    base: Any = MarkdownConverter

    class Converter(base):  # type: ignore[misc]
        def convert_pre(self, el: Any, text: str, **_: Any) -> str:
            classes = " ".join((el.find_parent("div", class_="highlight") or el).get("class") or ())
            found = CODE.search(classes)
            return f"\n```{found[1] if found else ''}\n{el.get_text().strip()}\n```\n"

        def convert_a(self, el: Any, text: str, **kwargs: Any) -> str:
            href = el.get("href") or ""
            if not urlsplit(href).scheme:
                el["href"] = href.replace(".html", ".md")
            return str(base.convert_a(self, el, text, **kwargs))

        def convert_td(self, el: Any, text: str, **kwargs: Any) -> str:
            return str(base.convert_td(self, el, text.replace("|", "\\|"), **kwargs))

    made = Converter(heading_style=ATX, bullets="-", escape_underscores=False)
    return re.sub(r"\n{3,}", "\n\n", made.convert(HIDDEN.sub("", html))).strip() + "\n"


def _drawing(docs: Path, name: str, alt: str) -> str:
    svg = (docs / name).read_text(encoding="utf-8")
    return f'<figure class="drawing" role="img" aria-label="{alt}">{svg}</figure>'


def on_post_build(config: Any, **_: Any) -> None:
    """Write the pages as Markdown and llms.txt, and look at every link."""
    site = Path(config.site_dir)
    lines = [f"# {config.site_name}", "", f"> {config.site_description}."]
    for section in config.nav:
        [(title, entries)] = section.items()
        paths = [each if isinstance(each, str) else str(*each.values()) for each in entries]
        lines += ["", f"## {title}", "", *map(_entry, paths)]
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for path, (_title, markdown) in _as_markdown.items():
        (site / path).write_text(markdown, encoding="utf-8")
    for problem in problems(site):
        logger.warning(problem)


def _entry(path: str) -> str:
    """A page's line of llms.txt: its title, and its first sentences."""
    title, text = _as_markdown[path]
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    paragraphs = [part for part in text.split("\n\n") if re.match(r"[\w`*\[]", part)]
    first = " ".join(paragraphs[0].split()) if paragraphs else ""
    first = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", first)
    return f"- [{title}]({path}): {first}"


# -- links --------------------------------------------------------------------------------------


class _Page(HTMLParser):
    """Links, requests and anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids, self.links, self.wanted = {""}, [], []  # type: ignore[var-annotated]
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids |= {values[name] or "" for name in ("id", "name") if name in values}
        if tag == "a":
            self.links.append(values.get("href") or "")
        elif tag == "link":
            self.wanted.append(values.get("href") or "")
        elif values.get("src"):
            self.wanted.append(values["src"] or "")


def problems(site: Path) -> Iterator[str]:
    """Problems with the links of a finished site."""
    pages = {file: _Page(file.read_text(encoding="utf-8")) for file in sorted(site.rglob("*.html"))}
    for file, page in pages.items():
        if file.name == "404.html":  # whose links are absolute
            continue
        for link in page.wanted:
            if urlsplit(link).netloc:
                yield f"{file.relative_to(site)} asks another host for {link}"
        for link in [*page.links, *page.wanted]:
            url = urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = (file.parent / unquote(url.path)).resolve() if url.path else file
            if not target.is_file():
                yield f"{file.relative_to(site)} links to {link}, which is not there"
            elif target in pages and unquote(url.fragment) not in pages[target].ids:
                yield f"{file.relative_to(site)} links to {link}, an anchor that is not there"

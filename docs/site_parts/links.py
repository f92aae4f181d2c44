"""Links of pages that Sphinx has no page for: to files and folders of the repository.

    [the README](../README.md)       -> the first page of the site
    [speed](../README.md#how-fast)   -> a page that shows the README, at that heading
    [design](design)                 -> docs/design/README.md, as on GitHub
    [results](../benchmarks/a.md)    -> a page of the site that shows that file
    [examples](../examples)          -> a page that lists that folder, with links of its own

So a link of a page holds both on GitHub and in the site. One to a file that is not there stays as
MyST made it, and MyST warns of it, which `make docs` takes for an error. Pictures are not links.
"""

from __future__ import annotations

import html
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from markdown_it import MarkdownIt
from markdown_it.token import Token
from mdit_py_plugins.anchors import anchors_plugin
from myst_parser.slugs import github_slugify
from pygments.lexers import get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.highlighting import PygmentsBridge
from sphinx.transforms import SphinxTransform
from sphinx.util.osutil import relative_uri

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
README = ROOT / "README.md"
_LEFT_OUT = ("_build", "__pycache__", ".git", ".venv")


class LinksToFiles(SphinxTransform):
    """Those of one page."""

    default_priority = 5  # before Sphinx copies what is downloaded

    def apply(self, **kwargs: Any) -> None:
        page = Path(self.env.doc2path(self.env.docname))
        for node in [*self.document.findall(_is_link)]:
            target, _, place = node["reftarget"].partition("#")
            if node.get("refdomain") == "doc":  # MyST has cut the ending and the page's folder off
                target, place = f"{target}.md", node.get("reftargetid") or ""
                path = (DOCS / target).resolve()
            else:
                path = (page.parent / target).resolve()
            if not target or not path.is_relative_to(ROOT) or not path.exists():
                continue
            name = _page_of(path, place)
            if name in self.env.found_docs:
                if path.is_dir() or path == README:
                    node.replace_self(_to_page(node, name, place))
            elif not place or place in _places(path):  # else MyST says that it finds none
                files_shown(self.env)[self.env.docname].add(path.relative_to(ROOT).as_posix())
                uri = self.app.builder.get_relative_uri(self.env.docname, name)
                uri = f"{uri}#{place}" if place else uri
                node.replace_self(nodes.reference("", "", *node.children, refuri=uri))


def _is_link(node: nodes.Node) -> bool:
    return isinstance(node, addnodes.download_reference) or (
        isinstance(node, addnodes.pending_xref) and node.get("reftype") == "myst"
    )


def _to_page(node: nodes.Element, name: str, place: str) -> addnodes.pending_xref:
    """As MyST marks a link to a page."""
    made = addnodes.pending_xref("", *node.children, **node.attributes)
    made["refdomain"], made["reftarget"], made["reftargetid"] = "doc", name, place or None
    return made


def _page_of(path: Path, place: str = "") -> str:
    """The name of the page that shows the file or folder; the README as a whole is the first."""
    if path == README and not place:
        return "index"
    if path.is_relative_to(DOCS):
        page = path / "README" if path.is_dir() else path.with_suffix("")
        if page.with_suffix(".md").exists() and path.suffix in ("", ".md"):
            return page.relative_to(DOCS).as_posix()
    return f"files/{path.relative_to(ROOT).as_posix()}"


def files_shown(env: Any) -> dict[str, set[str]]:
    """By page, the files of the repository that it links to and that are no pages of docs/."""
    if not hasattr(env, "dtensor_files_shown"):
        env.dtensor_files_shown = {}
    shown: dict[str, set[str]] = env.dtensor_files_shown
    shown.setdefault(env.docname, set())
    return shown


def _is_left_out(path: Path) -> bool:
    return path.name in _LEFT_OUT or path.suffix == ".png"  # pages show pictures


def pages_of_files(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """A page for each file that a page links to, and for those of the folders among them."""
    shown: dict[str, set[str]] = getattr(app.env, "dtensor_files_shown", {})
    waiting = {ROOT / path for paths in shown.values() for path in paths}
    done: set[Path] = set()
    while waiting - done:
        path = min(waiting - done)
        done.add(path)
        title = path.relative_to(ROOT).as_posix()
        name = f"files/{title}"
        if path.is_dir():
            there = [f for f in sorted(path.iterdir()) if not _is_left_out(f)]
            waiting |= {f for f in there if _page_of(f).startswith("files/")}
            body = _list(name, there)
        else:
            body, linked = _text(path, app.builder.highlighter)  # type: ignore[attr-defined]
            waiting |= linked
        if path.suffix != ".md":
            body = f"<h1>{html.escape(title)}</h1>{body}"
        yield name, {"title": title, "body": body}, "page.html"


def _list(name: str, files: list[Path]) -> str:
    items = [
        f'<li><a href="{html.escape(relative_uri(f"{name}.html", f"{_page_of(f)}.html"))}">'
        f"{html.escape(f.name)}</a></li>"
        for f in files
    ]
    return f"<ul>{''.join(items)}</ul>"


def _text(path: Path, highlighter: PygmentsBridge) -> tuple[str, set[Path]]:
    """And the files that it links to, which need pages too."""
    if path.suffix == ".md":
        return _markdown(path)
    try:
        language = get_lexer_for_filename(path.name).aliases[0]
    except ClassNotFound:
        language = "none"
    return highlighter.highlight_block(path.read_text(), language, linenos="inline"), set()


def _parsed(path: Path) -> tuple[MarkdownIt, list[Token]]:
    """Markdown of a file; headings have the ids that GitHub gives them."""
    reader = MarkdownIt("commonmark", {"html": True}).enable("table")
    reader.use(anchors_plugin, max_level=6, slug_func=github_slugify)
    return reader, reader.parse(path.read_text())


def _places(path: Path) -> set[str]:
    """Of a file of Markdown, where links into it may lead."""
    if path.suffix != ".md":
        return set()
    return {str(token.attrs["id"]) for token in _parsed(path)[1] if token.type == "heading_open"}


def _markdown(path: Path) -> tuple[str, set[Path]]:
    reader, tokens = _parsed(path)
    linked: set[Path] = set()
    for token in (child for t in tokens for child in t.children or [] if child.type == "link_open"):
        target, _, place = str(token.attrs["href"]).partition("#")
        there = (path.parent / target).resolve()
        if target and there.is_relative_to(ROOT) and there.exists():
            name = _page_of(there, place)
            uri = relative_uri(f"files/{path.relative_to(ROOT)}.html", f"{name}.html")
            token.attrs["href"] = f"{uri}#{place}" if place else uri
            linked |= {there} if name.startswith("files/") else set()
    return reader.renderer.render(tokens, reader.options, {}), linked


def _forget(app: Sphinx, env: Any, docname: str) -> None:
    getattr(env, "dtensor_files_shown", {}).pop(docname, None)


def _merge(app: Sphinx, env: Any, docnames: set[str], other: Any) -> None:
    shown = getattr(env, "dtensor_files_shown", {})
    env.dtensor_files_shown = shown | getattr(other, "dtensor_files_shown", {})


def setup(app: Sphinx) -> None:
    app.add_transform(LinksToFiles)
    app.connect("html-collect-pages", pages_of_files)
    app.connect("env-purge-doc", _forget)
    app.connect("env-merge-info", _merge)

"""MkDocs hooks: pages from outside docs/, the navigation of whole folders, and links between files of the repository.

Documents link to each other as files of the repository, so that the links work on GitHub as well.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

# Page of the site: file of the repository.
ELSEWHERE = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "examples.md": "examples/README.md",
}
PAGES = {source: page for page, source in ELSEWHERE.items()}
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")


def on_config(config: Any) -> Any:
    """Fills `folder/*` in the navigation, and appends guides that nobody listed."""
    listed = set(_pages(config.nav))
    config.nav = [_filled(entry, listed) for entry in config.nav]
    config.extra["alone"] = [page for entry in config.nav for page in entry.values() if isinstance(page, str)]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that stand outside docs/, and the style sheet."""
    for page, source in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    files.append(File.generated(config, "site.css", abs_src_path=str(DOCS / "site" / "site.css")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turns links between files of the repository into links between pages; others become plain text in code style."""
    here = page.file.src_uri
    if here in config.extra["alone"]:  # the sidebar would list this page and no other
        page.meta.setdefault("hide", ["navigation"])
    source = ELSEWHERE.get(here, f"docs/{here}")

    def target(match: re.Match[str]) -> str:
        path, anchor = match[1], match[2] or ""
        repository_path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if not (ROOT / repository_path).exists():
            return match[0]  # MkDocs reports it
        if (ROOT / repository_path).is_dir():
            repository_path = _index_of(repository_path)
        to = PAGES.get(repository_path, repository_path.removeprefix("docs/"))
        return posixpath.relpath(to, posixpath.dirname(here) or ".") + anchor

    return LINK.sub(target, markdown)


def _index_of(folder: str) -> str:
    readme = f"{folder}/README.md"
    if (ROOT / readme).is_file():
        return readme
    return sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / folder).glob("*.md"))[0]


def _pages(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    if isinstance(nav, dict):
        nav = list(nav.values())
    return [page for entry in nav for page in _pages(entry)]


def _filled(entry: Any, listed: set[str]) -> Any:
    if not isinstance(entry, dict):
        return entry
    ((title, pages),) = entry.items()
    if not isinstance(pages, list):
        return entry
    filled: list[Any] = []
    for page in pages:
        if isinstance(page, str) and page.endswith("/*"):
            folder = page.removesuffix("/*")
            # Names begin with dates where they have one: the newest first.
            filled += sorted(
                (f"{folder}/{path.name}" for path in (DOCS / folder).glob("*.md")), reverse=folder == "log"
            )
        else:
            filled.append(page)
    if title == "Guides":
        guides = [path for folder in (DOCS, DOCS / "guides") for path in sorted(folder.glob("*.md"))]
        filled += [page for page in (path.relative_to(DOCS).as_posix() for path in guides) if page not in listed]
    return {title: filled}

"""The repository's pages as the pages of a website: where each one goes, and where its links lead."""

import re
from collections.abc import Mapping
from pathlib import Path
from posixpath import normpath, relpath

# Pages outside docs/, and their paths in the site.
_TOP = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "reporting.md",
}
# Text and target of a link or an image. The text may hold code, but no other link.
_LINK = re.compile(r"(!?)\[((?:`[^`]*`|[^\]`])*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def site_paths(root: Path) -> dict[str, str]:
    """The path in the site of every page and image of the repository, by its path in the repository."""
    paths = dict(_TOP)
    for file in sorted((root / "docs").rglob("*")):
        if file.suffix in {".md", ".png", ".svg"}:
            path = file.relative_to(root / "docs").as_posix()
            paths[f"docs/{path}"] = path.replace("README.md", "index.md")
    return paths


def site_page(text: str, source: str, paths: Mapping[str, str]) -> str:
    """A page with links that work in the site.

    A link to a file that the site does not have, such as a test, becomes the path of the file.

    Args:
        text: Markdown.
        source: the path of the page in the repository.
        paths: as `site_paths` returns them.
    """
    folder = Path(source).parent.as_posix()
    here = Path(paths[source]).parent.as_posix()

    def replaced(match: re.Match[str]) -> str:
        image, label, target, anchor = match.groups()
        if not target or "://" in target:
            return match.group()
        file = normpath(f"{folder}/{target}")
        if file in paths:
            return f"{image}[{label}]({relpath(paths[file], here)}{anchor or ''})"
        is_name = label.strip("`") in {file, Path(file).name, Path(file).stem}
        return f"`{file}`" if is_name else f"{label} (`{file}`)"

    end = 0
    parts = []
    for fence in _FENCE.finditer(text):
        parts += [_LINK.sub(replaced, text[end : fence.start()]), fence.group()]
        end = fence.end()
    return "".join([*parts, _LINK.sub(replaced, text[end:])])

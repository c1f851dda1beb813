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
    "examples/clients/README.md": "other-languages.md",
}
# Files that readers take from the site, such as manifests and programs. Their paths are those in the repository.
_DOWNLOADS = (
    "deploy/**/*",
    "examples/clients/**/*",
    "examples/notebooks/*.ipynb",
    "serving/protocol/descriptors.binpb",
)
# Text and target of a link or an image. The text may hold code, but no other link.
_LINK = re.compile(r"(!?)\[((?:`[^`]*`|[^\]`])*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def site_paths(root: Path) -> dict[str, str]:
    """The path in the site of every page, image and download of the repository, by its path in the repository."""
    paths = dict(_TOP)
    for file in sorted((root / "docs").rglob("*")):
        if file.suffix in {".md", ".png", ".svg"}:
            path = file.relative_to(root / "docs").as_posix()
            paths[f"docs/{path}"] = path.replace("README.md", "index.md")
    for pattern in _DOWNLOADS:
        for file in sorted(root.glob(pattern)):
            path = file.relative_to(root).as_posix()
            if file.is_file() and path not in paths:
                paths[path] = path
    return paths


def site_page(text: str, source: str, paths: Mapping[str, str]) -> str:
    """A page with links that work in the site.

    A link to a file that the site does not have becomes the path of the file, or the name of a test.

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
        if is_name and file.startswith("tests/"):
            return f"`{Path(file).stem}`"
        return f"`{file}`" if is_name else f"{label} (`{file}`)"

    end = 0
    parts = []
    for fence in _FENCE.finditer(text):
        parts += [_LINK.sub(replaced, text[end : fence.start()]), fence.group()]
        end = fence.end()
    return "".join([*parts, _LINK.sub(replaced, text[end:])])


def with_programs(text: str, root: Path) -> str:
    """A page of the site, with each program of examples/ that it links in a section of its own.

    Raises:
        OSError: a program cannot be read.
    """
    targets = dict.fromkeys(target for _, _, target, _ in _LINK.findall(text))
    programs = [root / target for target in targets if target.startswith("examples/") and not target.endswith(".sh")]
    sections = [f"## {program.name}\n\n```{program.suffix[1:]}\n{program.read_text()}```" for program in programs]
    return "\n\n".join([text.rstrip(), *sections]) + "\n"

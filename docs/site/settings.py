"""Write the tables of docs/settings.md from the code that reads the settings. `make settings` runs this."""

import re
from collections.abc import Sequence
from pathlib import Path

from export.commands.options import OPTIONS, ExportOption
from serving.model.settings import Setting, kind_of, table
from serving.terminal.options import integer, real

PAGE = Path(__file__).parents[1] / "settings.md"
_OPEN_ENDED = re.compile(r"^(\d+) to (2147483647|9223372036854775807)$")


def settings_page(page: str) -> str:
    """The page with the tables between `<!-- NAME -->` and `<!-- /NAME -->` as the code has them now."""
    tables = {
        "export": _export_table(""),
        "sharding": _export_table("sharding"),
        "serving": _serving_table(),
    }
    for name, rows in tables.items():
        start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, rest = page.split(start)
        page = "\n\n".join([before + start, rows, end + rest.split(end)[1]])
    return page


def _export_table(section: str) -> str:
    rows = [
        (f"`{option.name}`", _file_type(option), f"{option.help}{_other_flag(option)}")
        for option in OPTIONS
        if option.section == section
    ]
    return _markdown_table(("key", "*type.* meaning"), rows)


def _serving_table() -> str:
    rows = [
        (
            f"`{entry.name}`",
            _values(kind_of(entry), setting) + _shown(setting.otherwise if entry.default is None else entry.default),
            setting.help,
        )
        for entry, setting in table()
    ]
    return _markdown_table(("key", "*values.* meaning"), rows)


def _markdown_table(head: tuple[str, str], rows: Sequence[tuple[str, str, str]]) -> str:
    """Two columns, so that a table fits a phone: a key, and its values before its help text."""
    lines = [f"| {key} | *{values}.* {_escaped(meaning)} |" for key, values, meaning in rows]
    return "\n".join([f"| {head[0]} | {head[1]} |", "|---|---|", *lines])


def _escaped(text: str) -> str:
    """Help text as Markdown."""
    return re.sub(r"([*|<\[\]])", r"\\\1", text)


def _other_flag(option: ExportOption) -> str:
    """The option, if it is not called as its key."""
    return f" Option: {option.flag}." if option.flag and option.flag != "--" + option.name.replace("_", "-") else ""


def _file_type(option: ExportOption) -> str:
    """The type of an option's value in the TOML file."""
    if option.metavar:
        kind = "integer" if option.parse is integer else "number" if option.parse is real else "text"
        return f"{kind}, by {option.by.lower().replace('input', 'dense input')}"
    names = {str: "text", bool: "boolean", int: "integer", str | int: "text or integer", list[str]: "array of text"}
    return names[option.file_type]


def _shown(default: object) -> str:
    """A default, to follow the values. Nothing if the setting is off by default."""
    match default:
        case None:
            return ""
        case bool():
            return f"; default {str(default).lower()}"
        case int():
            return f"; default {default:,}"
        case dict():
            return "; default error"
        case _:
            return f"; default {default}"


def _values(kind: type, setting: Setting) -> str:
    if kind is bool:
        return "boolean"
    words = setting.allowed.words if setting.allowed else ""
    # An optional part is a word of its own, so that a phone can break the line before it.
    return _escaped(_OPEN_ENDED.sub(r"integer ≥ \1", words).replace("[", " ["))


if __name__ == "__main__":
    PAGE.write_text(settings_page(PAGE.read_text()))

"""HTML whose text cannot become markup: only what these functions make is taken as it is, all else is escaped."""

from __future__ import annotations

from html import escape


class Html(str):
    """Markup."""

    __slots__ = ()


def tag(name: str, *content: str, **attributes: str) -> Html:
    """An element with its content; text in it, and in attributes, is escaped.

    Args:
        name: of the element.
        content: elements and text.
        attributes: by name; a trailing underscore is dropped (`class_`), others are hyphens.
    """
    said = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"' for key, value in attributes.items())
    return Html(f"<{name}{said}>{join(*content)}</{name}>")


def join(*content: str) -> Html:
    """Elements and text, one after the other."""
    return Html("".join(each if isinstance(each, Html) else escape(each) for each in content))

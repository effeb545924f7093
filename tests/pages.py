"""Reads the HTML pages that tnlm writes: the figures as plotly's JSON, and the text of elements."""

import html
import json
import re
from typing import Any


def figures_of(page: str) -> list[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Traces and layout of each figure of a page, in order."""
    found = []
    for start in re.finditer(r'Plotly\.newPlot\(\s*"[^"]+",\s*', page):
        traces, end = json.JSONDecoder().raw_decode(page, start.end())
        comma = re.compile(r"\s*,\s*").match(page, end)
        assert comma
        layout, _ = json.JSONDecoder().raw_decode(page, comma.end())
        found.append((traces, layout))
    return found


def texts_of(page: str, tag: str) -> list[str]:
    """The text of each element of a kind, in order."""
    return [html.unescape(text) for text in re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", page, flags=re.DOTALL)]


def tables_of(page: str) -> list[list[list[str]]]:
    """The cells of each table of a page, by rows; the first row is the header."""
    rows = (
        [texts_of(row, "t[hd]") for row in re.findall(r"<tr>(.*?)</tr>", table, flags=re.DOTALL)]
        for table in re.findall(r"<table>(.*?)</table>", page, flags=re.DOTALL)
    )
    return list(rows)

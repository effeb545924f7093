"""Pages escape text, embed the script once, and need no network."""

import plotly.graph_objects as go

from tests.pages import figures_of, tables_of, texts_of
from tnlm.output.page import Page


def test_page_escapes_and_embeds_the_script_once(tmp_path):
    page = Page("a <b> & c")
    page.heading("h")
    page.text("1 < 2")
    page.code("<script>alert(1)</script>")
    page.table(["x"], [[1234567], [0.123456], [True], ["<i>"]])
    page.figure(go.Figure(go.Bar(y=[1, 2])))
    page.figure(go.Figure(go.Bar(y=[3])))
    text = page.write(tmp_path / "new" / "page.html").read_text()
    assert "a &lt;b&gt; &amp; c" in text
    assert "alert(1)" in text
    assert "<script>alert(1)" not in text
    assert "1,234,567" in text
    assert "0.1235" in text
    assert "<td>True</td>" in text
    assert text.count("plotly.js v") == 1
    assert text.count("Plotly.newPlot(") >= 2
    assert "color-scheme: light dark" in text


def test_parts_come_in_the_order_they_were_added_and_cells_in_their_columns():
    page = Page("title & more")
    page.heading("first")
    page.table(["name", "count", "share"], [["a", 1200, 0.51239], ["b < c", 7, 1e-9]])
    page.figure(go.Figure(go.Bar(x=["p", "q"], y=[1, 2], name="bars"), layout={"xaxis": {"title": "letters"}}))
    page.heading("second")
    page.text("pale", note=True)
    text = page.render()
    assert tables_of(text) == [[["name", "count", "share"], ["a", "1,200", "0.5124"], ["b < c", "7", "1e-09"]]]
    assert texts_of(text, "title")[0] == texts_of(text, "h1")[0] == "title & more"
    assert texts_of(text, "h2") == ["first", "second"]
    (((bars,), layout),) = figures_of(text)
    assert (bars["x"], bars["y"], bars["name"]) == (["p", "q"], [1, 2], "bars")
    assert layout["xaxis"]["title"]["text"] == "letters"
    places = [
        text.index(part) for part in ("<h2>first", "<table", "Plotly.newPlot(", "<h2>second", '<p class="note">pale')
    ]
    assert places == sorted(places)

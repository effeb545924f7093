"""Pages escape text, embed the script once, and need no network."""

import plotly.graph_objects as go

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

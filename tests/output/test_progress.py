"""Progress: every item once, nothing on stdout, nothing before its time."""

import io

from tests.conftest import wait_for_announcement
from tnlm.output import progress
from tnlm.output.progress import announce, track


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_items_come_once_and_in_order_and_fast_work_is_silent(capsys):
    assert list(track(range(5), "counting")) == [0, 1, 2, 3, 4]
    assert list(track([], "counting")) == []
    assert capsys.readouterr() == ("", "")


def test_slow_work_in_a_log_writes_lines(capsys, monkeypatch):
    monkeypatch.setattr(progress, "DELAY", -1.0)
    monkeypatch.setattr(progress, "LINE_EVERY", -1.0)
    assert list(track("ab", "counting")) == ["a", "b"]
    assert capsys.readouterr() == ("", "counting: 0/2\ncounting: 1/2\n")


def test_slow_work_at_a_terminal_shows_a_bar_and_removes_it(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setattr(progress, "DELAY", -1.0)
    monkeypatch.setenv("TERM", "xterm")
    for item in track(range(9), "counting"):
        if item == 2:
            break
    assert "counting" in screen.getvalue()


def test_disabled_is_silent(capsys, monkeypatch):
    monkeypatch.setattr(progress, "DELAY", -1.0)
    assert list(track(range(3), "counting", enabled=False)) == [0, 1, 2]
    assert capsys.readouterr() == ("", "")


def test_a_long_wait_is_announced_and_a_short_one_is_not(capsys, monkeypatch):
    with announce("short"):
        pass
    monkeypatch.setattr(progress, "DELAY", 0.01)
    with announce("long"):
        wait_for_announcement()
    assert capsys.readouterr() == ("", "long ...\n")

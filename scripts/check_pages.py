"""Open HTML pages in a headless Chromium, in light and in dark, without a network, and report their faults.

    python scripts/check_pages.py site demo/demo.html --figures 1 [--screenshots FOLDER]

Checked: no console error or exception; every figure drawn, and at least ``--figures`` of them on each page; nothing
requested from outside the disk; contrast of all text at least 4.5 (3 for large text, WCAG 2.1 criterion 1.4.3) in both
colour schemes; no sideways scrolling of the page; links to files have a target. Without a browser it only says so.
"""

import argparse
import base64
import fcntl
import json
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --remote-debugging-pipe "
    "--disable-background-networking --disable-component-update --disable-sync --disable-extensions"
).split()
OFFLINE = "--host-resolver-rules=MAP * ~NOTFOUND"
ON_DISK = ("file", "data", "blob", "about")
WIDTH, HEIGHT = 1100, 900
SECONDS = 60
REDIRECT = re.compile(r"""<meta http-equiv=["']?refresh["']? content=["']\d+; ?url=([^"']+)["']""")

# Runs in the page. A figure is a `.figure` element; it is drawn once plotly's svg in it has an area.
LOOK = r"""(async () => {
  const figures = [...document.querySelectorAll(".figure")];
  const drawn = f => [...f.querySelectorAll(".js-plotly-plot .main-svg")].some(
    s => s.getBoundingClientRect().height > 50 && s.querySelector("path, rect, image, circle"));
  for (let i = 0; i < 40 && !figures.every(drawn); i++) await new Promise(r => setTimeout(r, 50));
  await new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)));
  for (const a of document.getAnimations())  // colours fade when the scheme changes: look at where they end
    if (Number.isFinite(a.effect.getComputedTiming().endTime)) a.finish();

  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgba = colour => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = ([r, g, b, a], under) => [r, g, b].map((c, i) => a * c + (1 - a) * under[i]);
  const luminance = c => {
    const [r, g, b] = c.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const style = e => getComputedStyle(e);
  const behind = e => {  // what is painted under the text of e: the box of a plotly button or cell, then backgrounds
    if (!e) {
      const probe = document.createElement("i");
      probe.style.color = "Canvas";
      document.body.append(probe);
      const base = rgba(style(probe).color).slice(0, 3);
      probe.remove();
      return base;
    }
    const box = e.tagName === "text" && e.parentNode.querySelector(":scope > rect");
    const layer = box ? rgba(style(box).fill) : rgba(style(e).backgroundColor);
    if (box) layer[3] *= style(box).fillOpacity;
    return over(layer, behind(e.parentElement));
  };
  const texts = {};
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode());) {
    const e = node.parentElement, text = node.data.trim();
    if (!text || e.closest("script, style") || !e.checkVisibility({visibilityProperty: true, opacityProperty: true}))
      continue;
    const svg = e.closest("text"), s = style(e);
    const colour = rgba(svg ? s.fill : s.color);
    for (let p = e; p; p = p.parentElement) colour[3] *= style(p).opacity;
    const under = behind(svg || e), [x, y] = [luminance(over(colour, under)), luminance(under)];
    const contrast = (Math.max(x, y) + 0.05) / (Math.min(x, y) + 0.05);
    const size = parseFloat(s.fontSize), large = size >= 24 || (size >= 18.66 && s.fontWeight >= 700);
    if (contrast < (large ? 3 : 4.5)) (texts[contrast.toFixed(2)] ??= []).push(text.slice(0, 40));
  }
  return JSON.stringify({
    figures: figures.length,
    undrawn: figures.flatMap((f, i) => drawn(f) ? [] : [i]),
    faint: Object.entries(texts).map(([c, t]) => `${c}: ${JSON.stringify(t[0])} (${t.length} texts)`).sort(),
    remote: [...document.querySelectorAll("[src], link[href]")].map(e => e.src || e.href).filter(u => /^http/.test(u)),
    wide: document.documentElement.scrollWidth - window.innerWidth,
    height: document.documentElement.scrollHeight,
    links: [...document.querySelectorAll("a[href]")].map(a => a.href),
    ids: [...document.querySelectorAll("[id]")].map(e => e.id),
  });
})()"""


@dataclass
class Seen:
    """Faults found on one page, and what is needed to check links: its links and the ids of its sections."""

    figures: int = 0
    faults: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)


class Browser:
    """A headless Chromium controlled over pipes (DevTools protocol: JSON messages, each followed by a zero byte)."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._unread, self._last = bytearray(), 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The result of one command; events that come first are kept in ``events``."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while (reply := self._read()).get("id") != self._last:
            self.events.append(reply)
        if "error" in reply:
            raise RuntimeError(f"{method}: {reply['error']['message']}")
        return reply["result"]

    def wait(self, method: str) -> None:
        """Read until the event ``method`` has come."""
        while not any(e["method"] == method for e in self.events):
            self.events.append(self._read())

    def _read(self) -> dict[str, Any]:
        while (end := self._unread.find(b"\0")) < 0:
            if not select.select([self._receive], [], [], SECONDS)[0]:
                raise RuntimeError(f"the browser said nothing for {SECONDS} s")
            data = os.read(self._receive, 2**20)
            if not data:
                raise RuntimeError("the browser closed the connection")
            self._unread += data
        message = json.loads(self._unread[:end])
        del self._unread[: end + 1]
        return message


@contextmanager
def browser(executable: str) -> Iterator[Browser]:
    """Start a browser that reads commands from file descriptor 3 and answers on 4; end it afterwards."""
    (their_in, our_out), (our_in, their_out) = os.pipe(), os.pipe()
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (their_in, their_out)]  # clear of 3 and 4
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            ["bash", "-c", f'exec "$0" "$@" 3<&{high[0]} 4>&{high[1]}']
            + [executable, *FLAGS, OFFLINE, f"--user-data-dir={profile}"],
            pass_fds=high,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (their_in, their_out, *high):
            os.close(fd)
        try:
            yield Browser(our_out, our_in)
        finally:
            process.terminate()
            process.wait(SECONDS)
            os.close(our_out)
            os.close(our_in)


def look(chromium: Browser, page: Path, *, figures: int = 0, screenshots: Path | None = None) -> Seen:
    """Faults, figures and links of one page, opened in both colour schemes; of a redirecting page only its link."""
    if redirect := REDIRECT.search(page.read_text(encoding="utf-8")):
        return Seen(figures=figures, links=[(page.parent / redirect[1]).as_uri()])
    target = chromium.call("Target.createTarget", url="about:blank")["targetId"]
    session = chromium.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def call(method: str, **params: Any) -> dict[str, Any]:
        return chromium.call(method, session, **params)

    chromium.events.clear()
    for domain in ("Page", "Runtime", "Log", "Network"):
        call(f"{domain}.enable")
    call("Emulation.setDeviceMetricsOverride", width=WIDTH, height=HEIGHT, deviceScaleFactor=1, mobile=False)
    seen = Seen()
    for scheme in ("light", "dark"):
        call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        if scheme == "light":
            call("Page.navigate", url=page.resolve().as_uri())
            chromium.wait("Page.loadEventFired")
        state = json.loads(call("Runtime.evaluate", expression=LOOK, awaitPromise=True)["result"]["value"])
        seen.faults += [f"contrast in {scheme} {text}" for text in state["faint"]]
        if screenshots is not None:
            _screenshot(call, state["height"], screenshots / f"{page.stem}-{scheme}.png")
    seen.figures, seen.links, seen.ids = state["figures"], state["links"], set(state["ids"])
    seen.faults += [f"figure {i + 1} of {seen.figures} is not drawn" for i in state["undrawn"]]
    if seen.figures < figures:
        seen.faults.append(f"{seen.figures} figures, at least {figures} wanted")
    if state["wide"] > 0:
        seen.faults.append(f"the page is {state['wide']} px wider than a window of {WIDTH}")
    requests = [e["params"]["request"]["url"] for e in chromium.events if e["method"] == "Network.requestWillBeSent"]
    remote = {url for url in [*requests, *state["remote"]] if urlsplit(url).scheme not in ON_DISK}
    seen.faults += [f"wants the network: {url[:100]}" for url in sorted(remote)]
    seen.faults += [text for e in chromium.events if (text := _complaint(e))]
    chromium.call("Target.closeTarget", targetId=target)
    return seen


def _screenshot(call: Callable[..., dict[str, Any]], height: int, path: Path) -> None:
    clip = {"x": 0, "y": 0, "width": WIDTH, "height": height, "scale": 1}
    data = call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)["data"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(base64.b64decode(data))


def _complaint(event: dict[str, Any]) -> str | None:
    """The text of an event that reports an error on the console."""
    params = event.get("params", {})
    if event["method"] == "Runtime.exceptionThrown":
        details = params["exceptionDetails"]
        return "exception: " + details.get("exception", {}).get("description", details["text"]).splitlines()[0]
    if event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
        return "console: " + " ".join(str(a.get("value", a.get("description", ""))) for a in params["args"])
    if event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
        return f"log: {params['entry']['text']} {params['entry'].get('url', '')[:100]}"
    return None


def broken_links(seen: dict[Path, Seen]) -> Iterator[tuple[Path, str]]:
    """Pages with their faulty links: to files that do not exist, or to sections that an opened page does not have."""
    for page, what in seen.items():
        for link in sorted(set(what.links)):
            parts = urlsplit(link)
            if parts.scheme != "file":
                continue
            path, section = Path(unquote(parts.path)), unquote(parts.fragment)
            if not path.exists() or (section and path in seen and section not in seen[path].ids):
                yield page, f"link leads nowhere: {os.path.relpath(path, page.parent)}{section and '#' + section}"


def check(executable: str, pages: list[Path], *, figures: int = 0, screenshots: Path | None = None) -> dict[Path, Seen]:
    """The findings on every page, broken links among their faults."""
    pages = [page.resolve() for page in pages]
    with browser(executable) as chromium:
        seen = {page: look(chromium, page, figures=figures, screenshots=screenshots) for page in pages}
    for page, fault in broken_links(seen):
        seen[page].faults.append(fault)
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", type=Path, nargs="+", help="HTML files, or folders of them")
    parser.add_argument("--figures", type=int, default=0, help="figures that each page must have (default: 0)")
    parser.add_argument("--screenshots", type=Path, help="folder for one PNG per page and colour scheme")
    args = parser.parse_args()
    pages = [page for path in args.pages for page in (sorted(path.rglob("*.html")) if path.is_dir() else [path])]
    if missing := [str(page) for page in pages if not page.is_file()] or [str(p) for p in args.pages if not pages]:
        print(f"no page at {', '.join(missing)}", file=sys.stderr)
        return 2
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        print(f"skipped, nothing checked: none of {', '.join(BROWSERS)} is on the PATH", file=sys.stderr)
        return 0
    seen = check(executable, pages, figures=args.figures, screenshots=args.screenshots)
    for page, what in seen.items():
        print(f"{'FAILED' if what.faults else 'ok    '} {page} ({what.figures} figures)")
        for fault in what.faults:
            print(f"       {fault}")
    return int(any(what.faults for what in seen.values()))


if __name__ == "__main__":
    sys.exit(main())

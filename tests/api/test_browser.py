"""A page of another site, in a real browser, can neither read from a server on this machine nor make it work."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium on this machine (Debian: apt-get install chromium)"
)

REBOUND = "rebound.example"  # a name that the browser resolves to this machine

# Every way in which a page may send something to another server; `found` is what it could read of the answers.
PAGE = """<!doctype html><body><script>
const target = "%s", body = JSON.stringify({prompt: "say(driven)", max_tokens: 2}), found = [];
const read = async (name, answer) => { try { found.push([name, await (await answer).text()]) } catch (error) {} };
const form = (action, kind) => {
  const frame = document.createElement("iframe"); frame.name = "f" + Math.random(); document.body.append(frame);
  const made = document.createElement("form"), input = document.createElement("input");
  Object.assign(made, {action, method: "POST", target: frame.name, enctype: kind});
  input.name = body.slice(0, -1) + ', "x": "'; input.value = '"}';
  made.append(input); document.body.append(made); made.submit();
  return new Promise(done => frame.onload = () => {
    try { found.push(["form", frame.contentDocument.body.innerText]) } catch (error) {} done() });
};
const tag = (name, source) => new Promise(done => {
  const made = document.createElement(name); made.src = source; made.onload = made.onerror = done;
  document.body.append(made) });
const json = "application/json";
const post = (kind, mode) => ({method: "POST", mode, body, headers: {"content-type": kind}});
(async () => {
  const route = target + "/v1/completions";
  await Promise.all([
    read("get", fetch(target + "/v1/models")),
    read("page", fetch(target + "/")),
    read("metrics", fetch(target + "/metrics")),
    read("json", fetch(route, post(json, "cors"))),
    read("plain", fetch(route, post("text/plain", "cors"))),
    read("blind", fetch(route, post("text/plain", "no-cors"))),
    read("blob", fetch(route, {method: "POST", mode: "no-cors", body: new Blob([body])})),
    read("typed", fetch(route, {method: "POST", mode: "no-cors", body: new Blob([body], {type: json})})),
    form(route, "text/plain"), form(route, "application/x-www-form-urlencoded"), form(route, "multipart/form-data"),
    tag("script", target + "/v1/models"), tag("img", target + "/v1/models"), tag("iframe", target + "/v1/models"),
  ]);
  navigator.sendBeacon(route, new Blob([body], {type: "text/plain"}));
  navigator.sendBeacon(route, new Blob([body], {type: "application/json"}));
  setTimeout(() => document.body.innerText = "found" + JSON.stringify(found.filter(each => each[1])) + "done", 500);
})();
</script>"""


@pytest.fixture
def attacker() -> Iterator[Any]:
    """A site of somebody else's; `page` is what it shows."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(site.page.encode())  # type: ignore[attr-defined]

        def log_message(self, *arguments: Any) -> None:
            pass

    site = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=site.serve_forever)
    thread.start()
    yield site
    site.shutdown()
    thread.join()
    site.server_close()


def browse(url: str, profile: Path) -> str:
    """The page as it is when its scripts have run."""
    assert BROWSER is not None
    command = [
        BROWSER,
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
        *("--disable-background-networking", "--disable-component-update", f"--user-data-dir={profile}"),
        *(f"--host-resolver-rules=MAP {REBOUND} 127.0.0.1", "--virtual-time-budget=20000", "--timeout=30000"),
        *("--dump-dom", url),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return html.unescape(done.stdout)


def found_by(attacker: Any, target: str, profile: Path) -> list[list[str]]:
    attacker.page = PAGE % target
    shown = browse(f"http://127.0.0.1:{attacker.server_address[1]}/", profile)
    match = re.search(r"found(\[.*\])done", shown, re.DOTALL)
    assert match, f"the page did not run to its end: {shown[:500]}"
    return list(json.loads(match[1]))


def test_a_page_of_another_origin_reads_nothing_and_drives_nothing(fresh_house, attacker, tmp_path):
    house = fresh_house()
    for name in ("127.0.0.1", "localhost", REBOUND):
        found = found_by(attacker, f"http://{name}:{house.port}", tmp_path / name)
        assert found == [], f"read through {name}"
        assert house.engine.requests == [], f"driven through {name}"


def test_a_name_bound_anew_to_this_machine_shows_no_page_and_no_models(fresh_house, tmp_path):
    house = fresh_house()
    for path in ("/", "/v1/models"):
        shown = browse(f"http://{REBOUND}:{house.port}{path}", tmp_path / "profile")
        assert "host_not_allowed" in shown and "paper-9b" not in shown and "<script" not in shown
    assert "paper-9b" in browse(f"http://localhost:{house.port}/v1/models", tmp_path / "profile")


def test_the_attack_works_where_the_operator_allows_it(fresh_house, attacker, tmp_path):
    """The same page, and so the tests above can fail."""
    house = fresh_house(origins=(f"http://127.0.0.1:{attacker.server_address[1]}",))
    found = dict(found_by(attacker, f"http://127.0.0.1:{house.port}", tmp_path / "profile"))
    assert "paper-9b" in found["get"]
    assert "dr" in found["json"] and len(house.engine.requests) > 0

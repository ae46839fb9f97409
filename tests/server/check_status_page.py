#!/usr/bin/env python3
"""The status page in headless Chromium, at the width of a phone and of a desk, against a real
server with adapters of hostile names and with traffic.
    check_status_page.py PROGRAM SCRATCH [--pictures FOLDER]
Ends with 77, and says so, where no Chromium is installed."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

from serving import ADAPTERS, post, serving

NAMES = [
    "<img src=x onerror=document.title='broken'>",
    "\"><script>document.title='broken'</script>",
    "a&amp;b 'quoted' {{7*7}} ${7*7}",
    "\u202egnp.exe",
    "w" * 200,
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u4e2d\u6587",
]
KEY = "open-sesame-1"
EXTRA = ["--max-loras", "4", "--no-access-log", "--adapter-dir", ADAPTERS, "--adapter",
         "scripture=%s" % (ADAPTERS / "scripture")]


# ---- the server ---------------------------------------------------------------------------------


# ---- the browser --------------------------------------------------------------------------------


def find_chromium():
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if shutil.which(name):
            return shutil.which(name)
    return None


class Browser:
    """The DevTools protocol over a pipe: one JSON text after the other, with a NUL behind each."""

    def __init__(self, program, scratch):
        to_browser, self.write_end = os.pipe()
        self.read_end, from_browser = os.pipe()
        inside = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (to_browser, from_browser)]

        def connect():
            os.dup2(inside[0], 3)
            os.dup2(inside[1], 4)

        flags = ["--headless=new", "--remote-debugging-pipe", "--disable-gpu", "--no-first-run",
                 "--disable-background-networking", "--hide-scrollbars",
                 "--user-data-dir=" + str(scratch)]
        if os.geteuid() == 0:
            flags.append("--no-sandbox")
        self.process = subprocess.Popen([program] + flags, stdout=subprocess.DEVNULL,
                                        stderr=subprocess.DEVNULL, pass_fds=(3, 4),
                                        preexec_fn=connect)
        for fd in [to_browser, from_browser] + inside:
            os.close(fd)
        self.buffer, self.next_id, self.session = b"", 1, None
        self.problems, self.requests, self.n_dialogs = [], [], 0

    def message(self):
        while b"\0" not in self.buffer:
            more = os.read(self.read_end, 1 << 16)
            assert more, "the browser has gone"
            self.buffer += more
        text, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(text)

    def take(self, event):
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.problems.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"] + " " + params["entry"].get("url", ""))
        elif method == "Page.javascriptDialogOpening":
            self.n_dialogs += 1
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def call(self, method, **params):
        number, self.next_id = self.next_id, self.next_id + 1
        call = {"id": number, "method": method, "params": params}
        if self.session:
            call["sessionId"] = self.session
        os.write(self.write_end, json.dumps(call).encode() + b"\0")
        while True:
            message = self.message()
            if message.get("id") == number:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            self.take(message)

    def open(self, url, width, height, dark):
        self.requests, self.problems, self.session = [], [], None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target,
                                 flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page", "Network"):
            self.call(domain + ".enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=width < 600)
        self.call("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        self.call("Page.addScriptToEvaluateOnNewDocument", source=SPY)
        self.call("Page.navigate", url=url)

    def run(self, script):
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def status_just_shown(self):
        """The next status.json that the page takes, and the page's texts with it: nothing can come
        between what SPY notes and what the page makes of it."""
        before = self.run("window.nSeen || 0")
        for _ in range(1000):
            if self.run("window.nSeen || 0") > before:
                break
            time.sleep(0.01)
        return self.run("[window.seen, %s]" % TEXTS)

    def picture(self, path):
        import base64
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True,
                         clip={"x": 0, "y": 0, "width": size["width"],
                               "height": size["height"], "scale": 1})
        Path(path).write_bytes(base64.b64decode(shot["data"]))

    def close(self):
        self.session = None
        self.call("Browser.close")
        self.process.wait(30)


SPY = """
const json = Response.prototype.json;
Response.prototype.json = async function () {
  window.seen = await json.call(this);
  window.nSeen = (window.nSeen || 0) + 1;
  return window.seen;
};
"""

TEXTS = """(() => {
  const texts = {};
  for (const node of document.querySelectorAll("[id]")) texts[node.id] = node.textContent;
  texts.rows = [...document.querySelectorAll("#adapters tr")].map(
    (row) => [...row.cells].map((cell) => cell.textContent));
  texts.slots = [...document.querySelectorAll("#slots li")].map((slot) => slot.textContent);
  texts.points = Object.fromEntries(["tokens-line", "step-line"].map((id) => [id,
    document.querySelector("#" + id + " polyline")?.getAttribute("points") || ""]));
  texts.totals = [...document.querySelectorAll("#totals dd")].map((node) => node.textContent);
  texts.title = document.title;
  return texts;
})()"""


# ---- what must be shown -------------------------------------------------------------------------


def fixed(value, digits):
    """As toFixed: of two numbers that are as close the larger one."""
    return str(Decimal(value).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


def shown_rate(value):
    return "%.1f" % value if value < 10 else "{:,}".format(int(value + 0.5))


def shown_seconds(value):
    if value <= 0:
        return "0\u00a0ms"
    if value < 0.01:
        return fixed(value * 1000, 2) + "\u00a0ms"
    return fixed(value * 1000, 0) + "\u00a0ms" if value < 1 else fixed(value, 1) + "\u00a0s"


def shown_bytes(n):
    unit = 0
    while n >= 1024 and unit < 4:
        n, unit = n / 1024, unit + 1
    number = "{:,}".format(n) if unit == 0 else fixed(n, 1)
    return "%s\u00a0%s" % (number, ("B", "KiB", "MiB", "GiB", "TiB")[unit])


def same_number(text, wanted):
    """Equal, or a half rounded the other way in the last place."""
    digits = lambda s: float("".join(c for c in s if c in "0123456789."))
    return text == wanted or (text.split("\u00a0")[1:] == wanted.split("\u00a0")[1:] and
                              abs(digits(text) - digits(wanted)) <= 0.011 * (1 + digits(wanted)))


def check_measures(status, texts):
    """Times, memory, the prefix cache, and why requests wait."""
    for node, name in (("first", "first_token"), ("inter", "inter_token"), ("queue", "queue")):
        for share in ("p50", "p95"):
            latency = status["latency"][name]
            want = shown_seconds(latency[share]) if latency["count"] else "\u2014"
            assert same_number(texts["%s-%s" % (node, share)], want), (node, share, texts, latency)
    memory = status["memory"]
    for node, key in (("memory-weights", "weights"), ("memory-kv", "kv"), ("memory-slots", "slots"),
                      ("memory-scratch", "scratch"), ("host-used", "host_cache"),
                      ("host-max", "host_cache_max")):
        assert same_number(texts[node], shown_bytes(memory[key])), (node, texts[node], memory)
    assert texts["prefix-rate"] == "%d%%" % int(status["prefix"]["hit_rate"] * 100 + 0.5)
    why = [("slot", "for a slot"), ("load", "for a load"), ("pages", "for pages"),
           ("batch", "for the batch")]
    assert texts["waiting-why"] == ", ".join(
        "{:,} {}".format(status["queue"]["for_" + key], text) for key, text in why
        if status["queue"]["for_" + key] > 0), texts["waiting-why"]
    loaded = "{:,} loaded".format(len(status["adapters"]))
    assert texts["adapters-count"].startswith(loaded), texts["adapters-count"]


def check_lines(status, texts):
    """A point for each second since the start, none before it, and the scale's top."""
    for node, key in (("tokens-line", "tokens"), ("step-line", "step_seconds_max")):
        values = status["history"][key]
        known = [v for v in values if v is not None]
        points = [tuple(map(float, p.split(","))) for p in texts["points"][node].split()]
        assert len(points) == len(known), (node, points, values)
        assert all(v is None for v in values[:len(values) - len(known)]), values
        assert not points or points[0][0] == 2 * (len(values) - len(known)), (node, points)
    top = max([v for v in status["history"]["tokens"] if v is not None] + [0])
    assert texts["tokens-top"] == "top: {:,} in a second".format(int(top)), texts["tokens-top"]


def check_values(status, texts):
    rates, queue, totals, kv = (status[key] for key in ("rates", "queue", "totals", "kv"))
    assert same_number(texts["tokens-rate"], shown_rate(rates["tokens_per_second"])), (texts, rates)
    assert same_number(texts["step-mean"], shown_seconds(rates["step_seconds_mean"])), texts
    assert same_number(texts["step-max"], shown_seconds(rates["step_seconds_max"])), texts
    assert same_number(texts["pause-all"], shown_seconds(totals["load_pause_seconds"])), texts
    for node, value in (("running", queue["running"]), ("waiting", queue["waiting"]),
                        ("running-max", queue["running_max"]), ("kv-used", kv["used"]),
                        ("kv-pages", kv["pages"]), ("errors", status["responses"]["server_errors"]),
                        ("turned-away", status["responses"]["turned_away"]),
                        ("client-errors", status["responses"]["client_errors"]),
                        ("prefix-tokens", status["prefix"]["prompt_tokens"])):
        assert texts[node] == "{:,}".format(value), (node, texts[node], value)
    check_measures(status, texts)
    check_lines(status, texts)
    assert texts["base"] == status["base"]["name"]
    rows = texts["rows"]
    assert len(rows) == len(status["adapters"]) + len(status["folders"]) + 1
    everything = status["adapters"] + status["folders"]
    everything.sort(key=lambda a: (-a["generated_tokens"], -a["requests"])) # stable, as the page's
    for row, adapter in zip(rows[1:], everything):
        if "digest" not in adapter:
            assert row[:2] == [adapter["name"],
                               "unloaded" if adapter["unloaded"] else "in folder"], row
            continue
        place = " \u00b7 %d" % adapter["slot"] if adapter["slot"] >= 0 else ""
        numbers = [adapter[key] for key in
                   ("running", "waiting", "requests", "generated_tokens", "rank")]
        assert row == [adapter["name"], adapter["state"] + place] + \
            ["{:,}".format(n) for n in numbers] + \
            ["{:,} \u00b7 {}".format(adapter["generation"], adapter["digest"][:8])], (row, adapter)
    assert rows[0][4] == "{:,}".format(status["base"]["requests"])
    for text, slot in zip(texts["slots"], status["slots"]):
        assert (slot["adapter"] or "\u2014") in text and slot["state"] in text, (text, slot)
        assert slot["adapter"] is None or "%d running" % slot["running"] in text, (text, slot)
    assert len(texts["slots"]) == len(status["slots"]) == 4
    assert texts["totals"][0] == "{:,}".format(totals["generated_tokens"])
    assert texts["totals"][6] == "{:,}".format(totals["finished"])
    assert status["refused"][0]["name"] == "absent"
    assert status["refused"][0]["message"] in texts["trouble-list"]
    assert [f["name"] for f in status["load_failures"]] == ["late"]
    assert status["load_failures"][0]["message"] in texts["trouble-list"]


def check_shape(browser, width):
    """Nothing is wider than the window, and no name has become markup."""
    wide = browser.run("document.documentElement.scrollWidth")
    assert wide <= width, "%d wide in a window of %d" % (wide, width)
    over = browser.run(
        "[...document.querySelectorAll('main *')].filter((n) => n.getBoundingClientRect().right >"
        " innerWidth + 0.5 && getComputedStyle(n).position !== 'absolute' &&"
        " !n.closest('thead')).map((n) => n.outerHTML.slice(0, 80))")
    assert over == [], over
    assert browser.run("document.querySelectorAll('img, iframe, a, object').length") == 0
    assert browser.run("document.scripts.length") == 1
    assert browser.run("document.title").endswith("Sidepath")


def check_trouble_first(browser, width):
    """What was refused comes before all else on a phone."""
    tops = browser.run("['#trouble', '#main > section'].map((s) =>"
                       " document.querySelector(s).getBoundingClientRect().top)")
    assert (tops[0] < tops[1]) == (width < 640), (width, tops)


def check_orders(browser):
    """The table follows the order that is chosen, in the next answer."""
    for order in ("name", "traffic"):
        browser.run("document.getElementById('sort').value = '%s';"
                    "document.getElementById('sort').dispatchEvent(new Event('change'))" % order)
        rows = browser.status_just_shown()[1]["rows"][1:]
        if order == "name":
            names = [row[0] for row in rows]
            assert names == sorted(names, key=lambda n: n.encode("utf-16-be")), names


# ---- the checks ---------------------------------------------------------------------------------


class Traffic:
    """Three clients that ask for one model after the other until the end."""

    def __init__(self, server, models):
        self.server, self.models, self.stopping = server, models, threading.Event()
        self.threads = [threading.Thread(target=self.run, args=(i,)) for i in range(3)]

    def run(self, at):
        while not self.stopping.is_set():
            post(self.server, "/v1/completions", {
                "model": self.models[at % len(self.models)], "prompt": "In the",
                "max_tokens": 40, "ignore_eos": True, "temperature": 1})
            at += 1

    def __enter__(self):
        for thread in self.threads:
            thread.start()

    def __exit__(self, *_):
        self.stopping.set()
        for thread in self.threads:
            thread.join()


def load(server, name):
    answer = post(server, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": "csource"})
    assert answer.status == 200, (name, answer.bytes)


def check_views(browser, server, pictures):
    for width, height in ((390, 844), (1280, 900)):
        for dark in (False, True):
            browser.open(server.url + "/", width, height, dark)
            for _ in range(3 if not dark else 1):
                check_values(*browser.status_just_shown())
            check_shape(browser, width)
            check_trouble_first(browser, width)
            assert browser.problems == [] and browser.n_dialogs == 0, browser.problems
            assert all(url.startswith(server.url) for url in browser.requests), browser.requests
            shade = "dark" if dark else "light"
            if pictures:
                browser.picture(Path(pictures) / ("status-%d-%s.png" % (width, shade)))
            print("%d px, %s: right" % (width, shade), flush=True)


def check_open_server(browser, program, pictures):
    with serving(program, *EXTRA, "--adapter", "absent=%s" % (ADAPTERS / "none")) as server:
        for name in NAMES:
            load(server, name)
        assert post(server, "/v1/load_lora_adapter",
                    {"lora_name": "late", "lora_path": "."}).status >= 400
        with Traffic(server, ["scripture", "base", "sqldoc"] + NAMES):
            check_views(browser, server, pictures)
        status, texts = browser.status_just_shown()
        check_values(status, texts)
        assert status["queue"] == {"waiting": 0, "running": 0, "running_max": 64, "for_slot": 0,
                                   "for_load": 0, "for_pages": 0, "for_batch": 0}
        check_orders(browser)
        server.stop()
        time.sleep(1.5)
        assert "no answer" in browser.run("document.getElementById('state').textContent")
    print("at rest, and without a server: right", flush=True)


def wait_until(browser, condition):
    for _ in range(200):
        if browser.run(condition):
            return
        time.sleep(0.05)
    raise AssertionError("never: " + condition)


def check_locked_server(browser, program, scratch, pictures):
    key_file = Path(scratch) / "keys"
    key_file.write_text(KEY + "\n")
    with serving(program, *EXTRA, "--api-key-file", key_file) as server:
        browser.open(server.url + "/", 390, 844, False)
        wait_until(browser, "document.readyState === 'complete' &&"
                            " !document.getElementById('key').hidden")
        assert browser.run("document.getElementById('main').hidden")
        if pictures:
            browser.picture(Path(pictures) / "status-390-locked.png")
        assert "scripture" not in browser.run("document.documentElement.outerHTML")
        browser.run("document.getElementById('key-text').value = '%s';"
                    "document.querySelector('#key button').click()" % KEY)
        status, texts = browser.status_just_shown()
        assert texts["base"] == status["base"]["name"]
        assert not browser.run("document.getElementById('main').hidden")
        # The browser itself reports the 401; nothing else may be said.
        assert all("401" in problem for problem in browser.problems), browser.problems
    print("with a key: right", flush=True)


def main():
    program, scratch = sys.argv[1:3]
    pictures = sys.argv[4] if sys.argv[3:4] == ["--pictures"] else None
    chromium = find_chromium()
    if not chromium:
        print("skipped: no Chromium is installed (package chromium)")
        sys.exit(77)
    shutil.rmtree(scratch, ignore_errors=True)
    Path(scratch).mkdir(parents=True)
    browser = Browser(chromium, Path(scratch) / "profile")
    try:
        check_open_server(browser, program, pictures)
        check_locked_server(browser, program, scratch, pictures)
    finally:
        browser.close()
    shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Metrics and the page of a real server: counts after requests that are counted here, the lists of
adapters while a stream runs, promtool where it is installed, and the page's policy against hashes
worked out here.
    check_metrics.py PROGRAM [CHECK...]"""

import base64
import hashlib
import http.client
import json
import re
import shutil
import subprocess
import sys
import time

from serving import JSON, ROOT, get, post, run_checks, serving, until, ADAPTERS


def value_of(text, series):
    """The value of one series, given as it is printed."""
    for line in text.split("\n"):
        if line.startswith(series + " "):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError("no series " + series)


def metrics_of(server):
    answer = get(server, "/metrics")
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/plain")
    return answer.bytes.decode()


def counts_are_right(server):
    for model, n in (("scripture", 7), ("scripture", 5), ("base", 4)):
        answer = post(server, "/v1/completions", {"model": model, "prompt": "In the morning",
                                                  "max_tokens": n, "ignore_eos": True})
        assert answer.json["usage"]["completion_tokens"] == n
    for _ in range(2):
        assert get(server, "/v1/models/nobody").status == 404
    text = metrics_of(server)
    adapter = 'sidepath_adapter_%s{adapter="%s"}'
    assert value_of(text, adapter % ("requests_total", "scripture")) == 2
    assert value_of(text, adapter % ("generated_tokens_total", "scripture")) == 12
    assert value_of(text, adapter % ("generated_tokens_total", "base")) == 4
    assert value_of(text, adapter % ("prompt_tokens_total", "scripture")) == 6
    assert value_of(text, "sidepath_generated_tokens_total") == 16
    assert value_of(text, 'sidepath_requests_total{outcome="length"}') == 3
    assert value_of(text, 'sidepath_http_responses_total{code="404"}') == 2
    assert value_of(text, 'sidepath_http_responses_total{code="200"}') == 3
    assert value_of(text, "sidepath_time_to_first_token_seconds_count") == 3
    assert value_of(text, "sidepath_inter_token_seconds_count") == 13
    assert value_of(text, "sidepath_step_seconds_count") == value_of(text, "sidepath_steps_total")
    assert value_of(text, 'vllm:num_gpu_loaded_lora_adapters{model_name="base",engine="0"}') == 1
    assert value_of(text, 'vllm:max_gpu_lora_adapters{model_name="base",engine="0"}') == 2
    stamp = value_of(text, 'vllm:lora_requests_info{max_lora="2",running_lora_adapters="",'
                           'waiting_lora_adapters=""}')
    assert abs(stamp - time.time()) < 60
    return text


def running_ones_are_listed(server):
    """An adapter is in the list of running ones while a request of it runs."""
    connection = http.client.HTTPConnection(*server.address, timeout=60)
    connection.request("POST", "/v1/completions",
                       json.dumps({"model": "sqldoc", "prompt": "A", "max_tokens": 400,
                                   "ignore_eos": True, "stream": True}),
                       JSON)
    stream = connection.getresponse()
    assert stream.status == 200
    stream.read(64)
    text = metrics_of(server)
    listed = re.search('running_lora_adapters="([^"]*)"', text).group(1)
    running = value_of(text, 'vllm:num_requests_running{model_name="base",engine="0"}')
    assert (listed, running) == ("sqldoc", 1), (listed, running)
    connection.close()
    until(lambda: value_of(metrics_of(server), 'vllm:num_requests_running{model_name="base",'
                                               'engine="0"}') == 0)
    text = metrics_of(server)
    assert value_of(text, 'sidepath_requests_total{outcome="cancelled"}') == 1
    assert 'vllm:lora_adapter_loaded{model_name="base",engine="0",adapter_name="sqldoc",' \
        'level="gpu",pinned="false",rank="8"} 1\n' in text


def promtool_agrees(text):
    if not shutil.which("promtool"):
        print("skipped: promtool (package prometheus) is not installed")
        return
    said = subprocess.run(["promtool", "check", "metrics"], input=text, text=True,
                          capture_output=True, check=False)
    lines = [line for line in (said.stdout + said.stderr).split("\n") if line]
    assert all(line.startswith("vllm:") and "contain ':'" in line for line in lines), lines


def documents_agree(text):
    """docs/OPERATIONS.md explains every family and no other; the rules use families that exist.
    Those of peers are there with --peer alone: check_peers.py."""
    families = set(re.findall(r"^# TYPE (\S+)", text, re.M))
    explained = set(re.findall(r"`((?:sidepath_|vllm:)[a-z_]+)`",
                               (ROOT / "docs/OPERATIONS.md").read_text()))
    explained = {family for family in explained if not family.startswith("sidepath_peer_")}
    assert families == explained, (families ^ explained)
    rules = (ROOT / "docs/alerts.yml").read_text()
    used = set(re.findall(r"\b(sidepath_[a-z_]+)", rules))
    parts = {family + end for family in families for end in ("", "_bucket", "_sum", "_count")}
    assert used and used <= parts, used - parts
    if shutil.which("promtool"):
        subprocess.run(["promtool", "check", "rules", str(ROOT / "docs/alerts.yml")], check=True,
                       stdout=subprocess.DEVNULL)


def digest_of(text):
    return "'sha256-%s'" % base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def page_is_locked(server):
    answer = get(server, "/")
    page, headers = answer.bytes.decode(), answer.headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    script = re.fullmatch(r"(?s).*<script>(.*)</script>.*", page).group(1)
    style = re.fullmatch(r"(?s).*<style>(.*)</style>.*", page).group(1)
    assert policy == {"default-src": "'none'", "connect-src": "'self'", "base-uri": "'none'",
                      "form-action": "'none'", "frame-ancestors": "'none'",
                      "script-src": digest_of(script), "style-src": digest_of(style)}, policy
    # Only the name of the SVG elements' own language looks like an address.
    assert re.findall(r"(?:https?:)?//[^\s\"']+", page) == ["http://www.w3.org/2000/svg"]
    assert "innerHTML" not in page and " style=" not in page and " on" + "click" not in page
    answer = get(server, "/status.json")
    status = answer.json
    assert status["totals"]["generated_tokens"] >= 16 and status["queue"]["running"] == 0
    assert [a["name"] for a in status["adapters"]] == ["scripture", "sqldoc"]
    assert answer.headers["cache-control"] == "no-store"


def quantile_of(text, family, share):
    """As Prometheus' histogram_quantile."""
    buckets = [(float(bound), float(n)) for bound, n in
               re.findall(r'^%s_bucket\{le="([^"]+)"\} (\d+)$' % family, text, re.M)]
    rank, low, before = share * buckets[-1][1], 0.0, 0.0
    for bound, n in buckets:
        if n >= rank > before:
            return low if bound == float("inf") else \
                low + (bound - low) * (rank - before) / (n - before)
        low, before = (bound, n) if bound != float("inf") else (low, before)
    return 0.0


def page_equals_metrics(server):
    """At rest the page's numbers are those of /metrics."""
    status, text = get(server, "/status.json").json, metrics_of(server)
    pairs = [(status["memory"][kind], 'sidepath_memory_bytes{kind="%s"}' % kind)
             for kind in ("weights", "slots", "kv", "scratch", "draft_model")]
    pairs += [(status["memory"]["host_cache"], "sidepath_host_cache_bytes"),
              (status["memory"]["host_cache_max"], "sidepath_host_cache_bytes_max"),
              (status["memory"]["host_cache_evictions"], "sidepath_host_cache_evictions_total"),
              (status["totals"]["prefix_tokens"], "sidepath_prefix_cache_tokens_total"),
              (status["totals"]["drafted_tokens"], "sidepath_drafted_tokens_total"),
              (status["totals"]["accepted_tokens"], "sidepath_accepted_tokens_total")]
    pairs += [(status["queue"]["for_" + why], 'sidepath_requests_waiting{reason="%s"}' % why)
              for why in ("slot", "load", "pages", "batch")]
    for shown, series in pairs:
        assert shown == value_of(text, series), (shown, series)
    for name, family in (("first_token", "sidepath_time_to_first_token_seconds"),
                         ("inter_token", "sidepath_inter_token_seconds"),
                         ("queue", "sidepath_queue_seconds")):
        shown, n = status["latency"][name], value_of(text, family + "_count")
        assert shown["count"] == n > 0, (name, shown, n)
        assert abs(shown["mean"] - value_of(text, family + "_sum") / n) < 1e-7, name
        for key, share in (("p50", 0.5), ("p95", 0.95)):
            want = quantile_of(text, family, share)
            assert abs(shown[key] - want) < 1e-9, (name, key, shown, want)
    codes = dict(re.findall(r'sidepath_http_responses_total\{code="(\d+)"\} (\d+)', text))
    errors = sum(int(n) for code, n in codes.items() if code[0] == "4" and code != "429")
    assert status["responses"]["client_errors"] == errors > 0, (status["responses"], codes)
    assert status["responses"]["turned_away"] == int(codes.get("429", 0))
    series = r"^sidepath_adapter_%s_tokens_total\{.*\} (\d+)$"
    prompt, cached = (sum(map(int, re.findall(series % kind, text, re.M)))
                      for kind in ("prompt", "cached"))
    prefix = status["prefix"]
    assert (prefix["prompt_tokens"], prefix["cached_tokens"]) == (prompt, cached)


def failures_are_named(server):
    """A load that fails is on the page with its code until the name loads; folders are listed."""
    def load(path):
        body = {"lora_name": "late", "lora_path": path}
        return post(server, "/v1/load_lora_adapter", body).status
    assert load(".") >= 400
    status = get(server, "/status.json").json
    failed = status["load_failures"]
    assert [f["name"] for f in failed] == ["late"] and failed[0]["code"], failed
    assert str(ADAPTERS) not in json.dumps(status), "a path of the server"
    assert [f["name"] for f in status["folders"]] == ["csource"], status["folders"]
    assert load("csource") == 200
    assert get(server, "/status.json").json["load_failures"] == []
    assert post(server, "/v1/unload_lora_adapter", {"lora_name": "csource"}).status == 200
    folder = get(server, "/status.json").json["folders"][0]
    assert folder == {"name": "csource", "unloaded": True, "requests": 0, "generated_tokens": 0}


def check_metrics_and_page(binary):
    with serving(binary, "--max-loras", 2, "--adapter", "scripture=%s" % (ADAPTERS / "scripture"),
                 "--adapter-dir", ADAPTERS, "--no-access-log") as server:
        counts_are_right(server)
        running_ones_are_listed(server)
        promtool_agrees(metrics_of(server))
        documents_agree(metrics_of(server))
        page_is_locked(server)
        page_equals_metrics(server)
        failures_are_named(server)


if __name__ == "__main__":
    run_checks([globals()[name] for name in sys.argv[2:] or ["check_metrics_and_page"]],
               sys.argv[1])

#!/usr/bin/env python3
"""The HTTP API on the demo model, against `sidepath generate`, and what users of other servers met:
unknown models, echoes of names, bad names and paths, bad adapters, loads beside running streams.
    check_http_api.py SIDEPATH [CHECK..]"""

import json
import os
import sys
import threading
import urllib.parse

import serving
from serving import (ADAPTERS, DEMO, EXACT, call, complete, folder_of_adapters, generate, get, post,
                     run_checks, until)

GREEDY_THE = [263, 413, 781, 266, 707]  # demo/golden/greedy.json: the base goes on with these


def demo_flags():
    return ["--adapter", "scripture=%s" % (ADAPTERS / "scripture"), "--adapter-dir", ADAPTERS]


def check_completions(binary):
    with serving.serving(binary, *demo_flags(), *EXACT) as server:
        tokens, text = complete(server, "base", max_tokens=5)
        assert tokens == GREEDY_THE and text == "re are two ways", (tokens, text)
        oracle = generate(binary, "csource", "static int", 12, *EXACT)
        for model in ("csource", "base:csource"):
            tokens, text = complete(server, model, "static int", 12)
            assert tokens == oracle["tokens"] and text == oracle["text"], (model, tokens)
        # Text, ids, and lists of both are the same prompt.
        ids = oracle["prompt_tokens"]
        answer = post(server, "/v1/completions", {
            "model": "csource", "prompt": [ids, ids], "max_tokens": 12, "temperature": 0, "n": 2,
            "return_token_ids": True})
        choices = answer.json["choices"]
        assert [c["index"] for c in choices] == [0, 1, 2, 3]
        assert all(c["token_ids"] == oracle["tokens"] for c in choices)
        usage = answer.json["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2 * len(ids), 48), usage
        assert usage["total_tokens"] == 2 * len(ids) + 48
        answer = post(server, "/v1/completions", {"model": "csource", "prompt": ["a", "static int"],
                                                  "max_tokens": 12, "temperature": 0})
        assert answer.json["choices"][1]["text"] == oracle["text"]


def check_streams(binary):
    with serving.serving(binary, *demo_flags()) as server:
        body = {"model": "base:scripture", "prompt": "In the", "max_tokens": 20, "temperature": 0,
                "return_token_ids": True}
        whole = post(server, "/v1/completions", body).json
        streamed = post(server, "/v1/completions",
                        {**body, "stream": True, "stream_options": {"include_usage": True}})
        events = streamed.events()
        last = events.pop()
        assert last["choices"] == [] and last["usage"] == {
            **whole["usage"], "prompt_tokens_details": last["usage"]["prompt_tokens_details"]}
        assert all(e["usage"] is None for e in events)
        # Every chunk echoes the name as it was asked for, and the adapter's digest.
        digest = get(server, "/v1/models/scripture").json["adapter_digest"]
        for event in events + [whole]:
            assert event["model"] == "base:scripture" and event["adapter_digest"] == digest
        assert len({event["id"] for event in events}) == 1
        text = "".join(e["choices"][0]["text"] for e in events)
        ids = [t for e in events for t in e["choices"][0]["token_ids"]]
        assert text == whole["choices"][0]["text"] and ids == whole["choices"][0]["token_ids"]
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert all(e["choices"][0]["finish_reason"] is None for e in events[:-1])
        # Several choices in one stream, and an echo before each.
        events = post(server, "/v1/completions", {
            **body, "n": 3, "stream": True, "echo": True, "temperature": 1, "seed": 7}).events()
        whole = post(server, "/v1/completions", {
            **body, "n": 3, "echo": True, "temperature": 1, "seed": 7}).json
        for index in range(3):
            text = "".join(c["text"] for e in events for c in e["choices"] if c["index"] == index)
            assert text == whole["choices"][index]["text"] and text.startswith("In the")
        assert len({c["text"] for c in whole["choices"]}) == 3


def check_sampling_fields(binary):
    with serving.serving(binary, *demo_flags()) as server:
        plain, text = complete(server, "base", "The", 12)
        again = complete(server, "base", "The", 12, temperature=0.9, seed=11, top_p=0.9)
        assert again == complete(server, "base", "The", 12, temperature=0.9, seed=11, top_p=0.9)
        assert again != complete(server, "base", "The", 12, temperature=0.9, seed=12, top_p=0.9)
        # A filter that leaves one token is greedy whatever the temperature.
        assert complete(server, "base", "The", 12, temperature=2, top_k=1)[0] == plain
        # A bias of -100 forbids, one of 100 forces.
        biased = complete(server, "base", "The", 12, logit_bias={str(plain[0]): -100})[0]
        assert plain[0] not in biased[:1]
        assert complete(server, "base", "The", 4, logit_bias={"300": 100})[0] == [300] * 4
        stop = text[5:9]
        stopped = post(server, "/v1/completions", {"model": "base", "prompt": "The",
                                                   "max_tokens": 12, "temperature": 0,
                                                   "stop": [stop]}).json["choices"][0]
        assert stopped["finish_reason"] == "stop" and stopped["text"] == text[:text.index(stop)]
        assert complete(server, "scripture", "The", 12, lora_scale=0)[0] == plain
        assert complete(server, "scripture", "The", 12)[0] != plain


def check_logprobs(binary):
    with serving.serving(binary, *demo_flags(), *EXACT) as server:
        body = {"model": "base", "prompt": "The end of", "max_tokens": 4, "temperature": 0,
                "logprobs": 3, "return_token_ids": True}
        choice = post(server, "/v1/completions", body).json["choices"][0]
        got = choice["logprobs"]
        assert "".join(got["tokens"]) == choice["text"]
        assert len(got["token_logprobs"]) == len(got["top_logprobs"]) == 4
        for token, value, top in zip(got["tokens"], got["token_logprobs"], got["top_logprobs"]):
            assert value == max(top.values()) == top[token] and -20 < value < 0, (token, top)
            assert len(top) == 3
        assert got["text_offset"] == [sum(map(len, got["tokens"][:i])) for i in range(4)]
        echoed = post(server, "/v1/completions", {**body, "echo": True}).json["choices"][0]
        prompt_ids = echoed["prompt_token_ids"]
        lists = echoed["logprobs"]
        assert len(lists["tokens"]) == len(prompt_ids) + 4
        assert "".join(lists["tokens"]) == echoed["text"] == "The end of" + choice["text"]
        assert lists["token_logprobs"][0] is None and lists["top_logprobs"][0] is None
        assert lists["token_logprobs"][len(prompt_ids):] == got["token_logprobs"]
        # Scoring a text: no new tokens. The same numbers as when it was generated.
        scored = post(server, "/v1/completions", {
            **body, "prompt": prompt_ids + choice["token_ids"], "max_tokens": 0,
            "echo": True}).json["choices"][0]
        assert scored["text"] == echoed["text"] and scored["token_ids"] == []
        assert scored["logprobs"]["token_logprobs"] == lists["token_logprobs"]
        streamed = post(server, "/v1/completions", {**body, "echo": True, "stream": True}).events()
        parts = [e["choices"][0]["logprobs"] for e in streamed if e["choices"][0]["logprobs"]]
        assert sum((p["token_logprobs"] for p in parts), []) == lists["token_logprobs"]
        assert sum((p["text_offset"] for p in parts), []) == lists["text_offset"]
        # Without echo and tokens there is nothing to do.
        assert post(server, "/v1/completions", {**body, "max_tokens": 0}).status == 400


def check_chat(binary):
    """A chat is the completion of its template, whose text the Qwen form writes so."""
    messages = [{"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Say <|im_end|> twice"}]
    before = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
    after = "<|im_end|>\n<|im_start|>assistant\n"
    with serving.serving(binary, *demo_flags(), "--max-context", 128) as server:
        def ids(text, special):
            body = {"prompt": text, "parse_special": special}
            return post(server, "/tokenize", body).json["tokens"]

        # A special token in a message is text, so the prompt is not simply tokenised.
        said = messages[1]["content"]
        prompt = ids(before, True) + ids(said, False) + ids(after, True)
        assert prompt != ids(before + said + after, True)
        body = {"model": "csource", "max_tokens": 12, "temperature": 0, "return_token_ids": True}
        want = post(server, "/v1/completions", {**body, "prompt": prompt}).json
        body["messages"] = messages
        chat = post(server, "/v1/chat/completions", body)
        assert chat.status == 200, chat.bytes
        chat = chat.json
        assert chat["object"] == "chat.completion" and chat["model"] == "csource"
        assert chat["usage"]["prompt_tokens"] == len(prompt), (chat["usage"], len(prompt))
        assert chat["choices"][0]["token_ids"] == want["choices"][0]["token_ids"]
        assert chat["choices"][0]["message"] == {"role": "assistant",
                                                 "content": want["choices"][0]["text"]}
        streamed = {**body, "stream": True, "n": 2, "stream_options": {"include_usage": True},
                    "logprobs": True, "top_logprobs": 2}
        events = post(server, "/v1/chat/completions", streamed).events()
        assert events.pop()["usage"]["completion_tokens"] == 24
        for index in range(2):
            mine = [c for e in events for c in e["choices"] if c["index"] == index]
            assert mine[0]["delta"] == {"role": "assistant", "content": ""}
            text = "".join(c["delta"].get("content", "") for c in mine)
            assert text == want["choices"][0]["text"]
            assert sum((c["token_ids"] for c in mine), []) == want["choices"][0]["token_ids"]
            logprobs = sum((c["logprobs"]["content"] for c in mine if c["logprobs"]), [])
            assert len(logprobs) == 12 and all(len(l["top_logprobs"]) == 2 for l in logprobs)
            assert bytes(sum((l["bytes"] for l in logprobs), [])).decode() == \
                want["choices"][0]["text"]
            assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["length"]
        for change, param in (({"messages": []}, "messages"), ({"messages": "x"}, "messages"),
                              ({"messages": [{"role": "x"}]}, None), ({"tool_choice": "required"},
                                                                      "tool_choice"),
                              ({"prompt": "a"}, "prompt"), ({"top_logprobs": 3}, "top_logprobs"),
                              ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
                              ({"max_tokens": 0}, "max_tokens")):
            answer = post(server, "/v1/chat/completions", {**body, **change})
            assert answer.status == 400, (change, answer.status, answer.bytes)
            assert param is None or answer.json["error"]["param"] == param, answer.bytes
        answer = post(server, "/v1/chat/completions", {**body, "model": "nope"})
        assert answer.status == 404
        # As much as there is room for, when nothing else is said; the stop text ends it.
        body = {"model": "base", "messages": messages, "temperature": 0, "ignore_eos": True}
        whole = post(server, "/v1/chat/completions", body).json
        assert whole["usage"]["total_tokens"] == 128
        text = whole["choices"][0]["message"]["content"]
        ended = post(server, "/v1/chat/completions", {**body, "stop": text[9]}).json["choices"][0]
        assert ended["finish_reason"] == "stop"
        assert ended["message"]["content"] == text[:text.index(text[9])]


def check_ends(binary):
    """The base's only end is <|endoftext|>; the template closes turns with <|im_end|>."""
    turn_end, end = 2047, 2045
    body = {"model": "csource", "messages": [{"role": "user", "content": "a"}], "temperature": 0,
            "max_tokens": 6, "return_token_ids": True, "logit_bias": {str(turn_end): 100}}
    with serving.serving(binary, *demo_flags()) as server:
        def ask(path="/v1/chat/completions", **change):
            answer = post(server, path, {**body, **change})
            assert answer.status == 200, answer.bytes
            choice = answer.json["choices"][0]
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            return choice["token_ids"], choice["finish_reason"], text

        assert ask() == ([turn_end], "stop", "")
        assert ask(logit_bias={str(end): 100}) == ([end], "stop", "")
        assert ask(ignore_eos=True) == ([turn_end] * 6, "length", "")
        # ignore_eos switches off the model's ends, never the client's.
        for named in ({"stop": "<|im_end|>"}, {"stop": ["x y z", "<|im_end|>"]},
                      {"stop_token_ids": [7, turn_end]}):
            assert ask(ignore_eos=True, **named) == ([turn_end], "stop", ""), named
        tokens, reason, _ = ask(min_tokens=3)
        assert len(tokens) == 4 and reason == "stop" and turn_end not in tokens[:3], tokens
        assert ask(ignore_eos=True, skip_special_tokens=False)[2] == "<|im_end|>" * 6
        whole = ask(logit_bias={})
        assert ask(logit_bias={}, stop_token_ids=[whole[0][2]])[0] == whole[0][:3]
        # Completions know no turns: there the client names what ends its text.
        plain = {"messages": None, "prompt": "a"}
        assert ask("/v1/completions", **plain) == ([turn_end] * 6, "length", "")
        for named in ({"stop": ["<|im_end|>"]}, {"stop_token_ids": [turn_end]}):
            assert ask("/v1/completions", **plain, **named) == ([turn_end], "stop", ""), named
        streamed = post(server, "/v1/chat/completions", {**body, "stream": True}).events()
        assert [e["choices"][0]["finish_reason"] for e in streamed][-1] == "stop"


def check_bad_requests(binary):
    good = {"model": "base", "prompt": "a", "max_tokens": 1}
    bad = [
        ({"temperature": -1}, "temperature"), ({"temperature": "hot"}, "temperature"),
        ({"top_p": 2}, "top_p"), ({"lora_scale": 17}, "lora_scale"), ({"n": 0}, "n"),
        ({"n": 129}, "n"), ({"stop": ["a", ""]}, "stop"), ({"stop": 5}, "stop"),
        ({"stop": ["x"] * 65}, "stop"), ({"stop": "x" * 1025}, "stop"),
        ({"logprobs": 21}, "logprobs"), ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"), ({"logit_bias": []}, "logit_bias"),
        ({"prompt": []}, "prompt"), ({"prompt": [1, "a"]}, "prompt"), ({"prompt": 5}, "prompt"),
        ({"prompt": [-1]}, "prompt"), ({"prompt": ""}, "prompt"), ({"prompt": None}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"), ({"max_tokens": 100000}, "prompt"),
        ({"stream_options": {}}, "stream_options"), ({"seed": 1.5}, "seed"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options"),
        ({"repetition_penalty": 0}, "repetition_penalty"), ({"model": 7}, "model"),
        # Fields that would change the meaning, and those that nobody knows.
        ({"best_of": 0}, "best_of"), ({"best_of": 129}, "best_of"), ({"suffix": "x"}, "suffix"),
        ({"best_of": 2, "n": 3}, "best_of"), ({"best_of": 2, "stream": True}, "best_of"),
        ({"guided_json": 5}, "guided_json"), ({"response_format": {"type": "json"}},
                                              "response_format"),
        ({"skip_special_tokens": "no"}, "skip_special_tokens"), ({"min_tokens": 3}, "min_tokens"),
        ({"stop_token_ids": [2048]}, "stop_token_ids"), ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"temprature": 0.5}, "temprature"),
    ]
    harmless = {"user": "u", "metadata": {"a": 1}, "best_of": 1, "suffix": None, "min_tokens": 0,
                "guided_json": None, "response_format": {"type": "text"}, "stop": None,
                "logprobs": None, "logit_bias": {}, "seed": None, "skip_special_tokens": True}
    raw = [b"", b"{", b"[]", b"null", b'{"model": "base", "model": "base", "prompt": "a"}',
           b'{"model": "base", "prompt": "\xff"}', b'{"model": "base", "prompt": "\xc3"}',
           b'{"model": "base", "prompt": "\xed\xa0\x80"}', b'{"model":"base","prompt":"a\\u0000"}',
           b'\xef\xbb\xbf{"model": "base", "prompt": "a"}', b'{"prompt": "a"} x',
           b'{"prompt": "\\ud800"}', b'{"temperature": 1e400, "prompt": "a"}', b"[" * 3000]
    with serving.serving(binary, *demo_flags()) as server:
        for change, param in bad:
            answer = post(server, "/v1/completions", {**good, **change})
            assert answer.status == 400, (change, answer.status, answer.bytes)
            assert answer.json["error"]["param"] == param, (change, answer.bytes)
        assert post(server, "/v1/completions", {**good, **harmless}).status == 200
        for body in raw:
            answer = post(server, "/v1/completions", body)
            assert answer.status == 400 and answer.code == "invalid-json", (body, answer.bytes)
        assert call(server, "POST", "/v1/completions", b"{}",
                    {"Content-Type": "text/plain"}).status == 415
        assert get(server, "/v1/completions").status == 405
        assert get(server, "/v2").status == 404
        assert get(server, "/v1/models/%zz").status == 400
        assert get(server, "/v1/models/base%00x").status == 400
        assert complete(server, "base", max_tokens=2)


def check_unknown_models(binary):
    """404 on every route that takes a model, and never the base."""
    with serving.serving(binary, *demo_flags()) as server:
        for model in ("nope", "base:nope", "base:", ":base", "", "scripture ", "base:base:x",
                      "../adapters/csource", "nope/../csource", "x" * 300):
            for path, body in (("/v1/completions", {"prompt": "a"}),
                               ("/v1/completions", {"prompt": "a", "stream": True}),
                               ("/v1/chat/completions",
                                {"messages": [{"role": "user", "content": "a"}]}),
                               ("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
                answer = post(server, path, {**body, "model": model})
                assert answer.status == 404, (path, model, answer.status, answer.bytes)
                assert answer.code == "model_not_found" and answer.json["error"]["param"] == "model"
            if model:
                quoted = urllib.parse.quote(model, safe="")
                assert get(server, "/v1/models/" + quoted).status == 404, model
        assert post(server, "/v1/lora/active", {"lora_name": "nope"}).status == 404
        assert post(server, "/v1/unload_lora_adapter", {"lora_name": "nope"}).status == 404


def check_models(binary):
    with serving.serving(binary, *demo_flags()) as server:
        models = {m["id"]: m for m in get(server, "/v1/models").json["data"]}
        assert set(models) == {"base", "scripture", "csource", "sqldoc"}, models
        assert models["base"]["parent"] is None
        assert all(m["parent"] == "base" for n, m in models.items() if n != "base")
        assert all(m["root"] == n for n, m in models.items())
        everything = json.dumps([get(server, path).json for path in
                                 ("/v1/models", "/v1/lora_adapters")])
        assert str(DEMO) not in everything and "adapters/" not in everything
        count = post(server, "/tokenize", {"model": "sqldoc", "prompt": "The end"}).json
        assert count["count"] == len(count["tokens"]) == 2
        text = post(server, "/detokenize", {"model": "base", "tokens": count["tokens"]}).json
        assert text == {"prompt": "The end"}
        assert get(server, "/health").status == get(server, "/ready").status == 200
        assert "version" in get(server, "/version").json


def check_loading(binary):
    """Names, paths and adapters, good and bad, with the bodies of vLLM's clients."""
    with folder_of_adapters(good="sqldoc", other="csource", bad="sqldoc") as folder:
        (folder / "bad" / "adapter_model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
        os.symlink(ADAPTERS / "scripture", folder / "outside")
        (folder / "files").mkdir()
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            os.symlink(ADAPTERS / "scripture" / name, folder / "files" / name)
        with serving.serving(binary, "--adapter-dir", folder, "--max-loras", 4) as server:
            base, _ = complete(server, "base")

            def load(name, path, **more):
                return post(server, "/v1/load_lora_adapter",
                            {"lora_name": name, "lora_path": str(path), **more})

            answer = load("mine", "good")
            assert answer.status == 200
            assert answer.bytes == b"Success: LoRA adapter 'mine' added successfully."
            first = int(answer.headers["x-adapter-generation"])
            mine, _ = complete(server, "mine")
            assert mine != base
            answer = load("mine", "other")
            assert (answer.status, answer.code) == (400, "name-taken"), answer.bytes
            assert load("mine", "other", load_inplace=True,
                        expected_generation=first + 7).status == 409
            assert complete(server, "mine")[0] == mine
            answer = load("mine", folder / "other", load_inplace=True, expected_generation=first)
            assert answer.status == 200 and int(answer.headers["x-adapter-generation"]) > first
            assert complete(server, "mine")[0] == complete(server, "other")[0] != mine
            for name in ("base", "a:b", "", ".", "..", " a", "a ", "a\nb", "x" * 256, "\x7f"):
                assert load(name, "good").status == 400, name
            for name in ("a/b", "with blank", "ümlaut", "x" * 255):
                assert load(name, "good").status == 200, name
                assert complete(server, name)[0] == mine
                quoted = urllib.parse.quote(name, safe="")
                assert get(server, "/v1/models/" + quoted).json["id"] == name
                assert post(server, "/v1/unload_lora_adapter", {"lora_name": name}).bytes == (
                    "Success: LoRA adapter '%s' removed successfully." % name).encode()
            for path in ("../" + folder.name + "/good", "..", "/etc", "good/../../x", "outside",
                         str(ADAPTERS / "scripture"), "/proc/self/root", str(folder) + "/../x",
                         str(folder) + "x"):
                answer = load("evil", path)
                assert (answer.status, answer.code) == (400, "unsafe-path"), (path, answer.bytes)
            # An escape is part of a name, and nothing has that name.
            for path in ("%2e%2e/x", "none", "good/none"):
                assert load("evil", path).status == 404, path
            answer = load("evil", "files")
            assert answer.status == 400 and answer.code == "config-missing", answer.bytes
            answer = load("evil", "bad")
            assert answer.status == 400 and answer.code not in (None, ""), answer.bytes
            assert str(folder) not in answer.bytes.decode()
            assert load("evil", "").status == load("evil", "good", what=1).status == 400
            assert get(server, "/v1/models/evil").status == 404
            assert complete(server, "base")[0] == base
            states = {a["name"]: a["state"] for a in get(server, "/v1/lora_adapters").json["data"]}
            assert states["mine"] == "ready" and states["good"] == "available", states


def check_skipped_folders(binary):
    """What --adapter-dir holds and lists do not show is named once, with what to do. Its own name
    may be relative, or lead through a link; nothing leads out by any of them."""
    reasons = {"outside": "it is a link out of the directory", "empty": "it has no adapter_config",
               "files": "its adapter_config.json is a link out", "base": "no adapter can have this",
               "models--a--b": "snapshots/REVISION", "adapter_config.json": "an adapter itself"}
    with folder_of_adapters(good="sqldoc") as folder:
        inside = folder / "inside"
        inside.mkdir()
        os.symlink("inside", folder / "alias")
        os.rename(folder / "good", inside / "good")
        os.symlink(ADAPTERS / "scripture", inside / "outside")
        for name in ("empty", "files", "models--a--b", ".staged", "base"):
            (inside / name).mkdir()
        (inside / "README.md").write_text("no adapter")
        (inside / "adapter_config.json").write_text("{}")
        os.symlink(ADAPTERS / "scripture" / "adapter_config.json",
                   inside / "files" / "adapter_config.json")
        for given in (os.path.relpath(inside), folder / "alias"):
            with serving.serving(binary, "--adapter-dir", given,
                                 "--adapter", "a=%s/outside" % given,
                                 "--adapter", "b=%s/good" % given) as server:
                for _ in range(3): # three scans
                    listed = get(server, "/v1/lora_adapters").json["data"]
                    assert {a["name"] for a in listed} == {"a", "b", "good"}, listed
                refused = [a["error"] for a in listed if a["name"] == "a"][0]
                assert "leads out" in refused["message"], refused
                skipped = [l for l in server.log if "in --adapter-dir is skipped" in l]
                assert len(skipped) == len(reasons), skipped
                for name, why in reasons.items():
                    assert any('"%s" in' % name in l and why in l for l in skipped), (name, skipped)
                for path, status in (("good", 200), ("outside", 400), ("files", 400)):
                    body = {"lora_name": "x", "lora_path": os.path.abspath(given) + "/" + path,
                            "load_inplace": True}
                    assert post(server, "/v1/load_lora_adapter", body).status == status, path


def check_snapshot_as_directory(binary):
    """A snapshot in the cache of Hugging Face, whose files are links to its repository's blobs."""
    with folder_of_adapters() as hub:
        repository = hub / "models--a--b"
        snapshot = repository / "snapshots" / "4f2c"
        (repository / "blobs").mkdir(parents=True)
        for name in ("sqldoc", "csource"):
            (snapshot / name).mkdir(parents=True)
            for file in (ADAPTERS / name).iterdir():
                blob = repository / "blobs" / (name + file.name)
                blob.write_bytes(file.read_bytes())
                os.symlink(os.path.relpath(blob, snapshot / name), snapshot / name / file.name)
        oracle = generate(binary, "sqldoc", "The", 8)["tokens"]
        with serving.serving(binary, "--adapter-dir", snapshot) as server:
            listed = {m["id"] for m in get(server, "/v1/models").json["data"]}
            assert listed == {"base", "sqldoc", "csource"}, listed
            assert complete(server, "sqldoc")[0] == oracle
            body = {"lora_name": "x", "lora_path": "csource/../../../blobs"}
            assert post(server, "/v1/load_lora_adapter", body).code == "unsafe-path"
            assert not any("skipped" in line for line in server.log), server.log


def check_begin_of_text(binary):
    """A tokenizer whose post-processor puts <s> before a text, and whose tokens carry blanks."""
    template = "{{ bos_token }}[INST] {{ messages[0]['content'] }} [/INST]"
    data = serving.ROOT / "tests" / "engine" / "data" / "tokenizers"
    file = (data / "mistral_metaspace" / "tokenizer.json").read_text()
    names = {t["content"]: t["id"] for t in json.loads(file)["added_tokens"]}
    with serving.model_without(tokenizer_json=file, tokenizer_config_json={
            "chat_template": template, "bos_token": "<s>"}) as model, \
            serving.serving(binary, model=model) as server:
        def ids(**body):
            answer = post(server, "/tokenize", body)
            assert answer.status == 200, answer.bytes
            return answer.json["tokens"]

        text = "the adapter of a base"
        prompt = ids(prompt=text)
        assert prompt[0] == names["<s>"] and names["<s>"] not in prompt[1:]
        assert ids(prompt=text, add_special_tokens=False) == prompt[1:]
        assert ids(prompt="") == prompt[:1]
        shown = post(server, "/tokenize", {"prompt": text, "return_token_strs": True}).json
        assert "".join(shown["token_strs"]) == "<s> " + text, shown
        # A template writes it, so nothing else does; what a user writes is text.
        chat = ids(messages=[{"role": "user", "content": "<s>" + text}])
        assert chat[:2] == [names["<s>"], names["[INST]"]] and chat[-1] == names["[/INST]"]
        assert names["<s>"] not in chat[1:]
        refused = post(server, "/tokenize", {"messages": [{"role": "user", "content": text}],
                                             "add_special_tokens": True})
        assert refused.status == 400 and refused.json["error"]["param"] == "add_special_tokens"

        body = {"model": "base", "max_tokens": 12, "temperature": 0, "return_token_ids": True}
        answer = post(server, "/v1/completions", {**body, "prompt": text}).json
        choice = answer["choices"][0]
        assert choice["prompt_token_ids"] == prompt and answer["usage"]["prompt_tokens"] == \
            len(prompt)
        same = post(server, "/v1/completions", {**body, "prompt": prompt}).json["choices"][0]
        assert same["token_ids"] == choice["token_ids"] and same["text"] == choice["text"]
        raw = post(server, "/v1/completions", {**body, "prompt": text, "add_special_tokens": False})
        assert raw.json["choices"][0]["prompt_token_ids"] == prompt[1:]
        # The answer goes on with the prompt: a blank that begins it is its own.
        def text_of(tokens):
            return post(server, "/detokenize", {"tokens": tokens}).json["prompt"]

        assert text_of(prompt) == "<s> " + text and text_of(prompt[1:]) == text
        goes_on = text_of(prompt[1:] + [prompt[1]])
        assert goes_on.startswith(text + " "), goes_on
        assert text_of(prompt[1:] + choice["token_ids"]) == text + choice["text"]
        biased = {**body, "logit_bias": {str(prompt[1]): 100}, "max_tokens": 1}
        after = post(server, "/v1/completions", {**biased, "prompt": text}).json["choices"][0]
        assert after["token_ids"] == [prompt[1]] and after["text"] == goes_on[len(text):]
        alone = post(server, "/v1/completions", {**biased, "prompt": ""}).json["choices"][0]
        assert alone["token_ids"] == [prompt[1]] and alone["text"] == after["text"][1:]
        # An echo is the prompt as it was sent, and the token before it takes no room in it.
        echoed = post(server, "/v1/completions", {
            **body, "prompt": text, "echo": True, "logprobs": 0}).json["choices"][0]
        lists = echoed["logprobs"]
        assert echoed["text"] == text + choice["text"]
        assert lists["tokens"][0] == "<s>" and lists["text_offset"][:2] == [0, 0], lists


def check_pinned(binary):
    """With every slot pinned nothing else can ever run: that is no "try again"."""
    with serving.serving(binary, "--adapter-dir", ADAPTERS, "--max-loras", 1) as server:
        def load(name, path, **more):
            return post(server, "/v1/load_lora_adapter",
                        {"lora_name": name, "lora_path": path, **more})
        assert load("kept", "scripture", pinned=True).status == 200
        kept = complete(server, "kept")
        listed = {a["name"]: a for a in get(server, "/v1/lora_adapters").json["data"]}
        assert listed["kept"]["pinned"] and listed["kept"]["slot"] == 0
        receipt = listed["kept"]["receipt"]
        assert receipt["verdict"] == "accepted" and receipt["digest"] == listed["kept"]["digest"]
        assert receipt["sites"] == listed["kept"]["sites"] and receipt["engine_missing"] == []
        assert str(ADAPTERS) not in json.dumps(receipt)
        answer = post(server, "/v1/completions", {"model": "csource", "prompt": "a"})
        assert (answer.status, answer.code) == (409, "slots-pinned"), answer.bytes
        assert "retry-after" not in answer.headers
        assert complete(server, "kept") == kept
        again = load("kept", "scripture", load_inplace=True, pinned=False)
        assert again.status == 200, again.bytes
        assert not get(server, "/v1/lora_adapters").json["data"][0]["pinned"]
        assert complete(server, "csource")
        assert load("kept", "scripture", load_inplace=True, pinned=True).status == 200
        assert post(server, "/v1/unload_lora_adapter", {"lora_name": "kept"}).status == 200
        assert complete(server, "csource")


def check_forbidden_folders(binary):
    """A folder whose name no adapter may have is no adapter, to any route."""
    names = {"base": "csource", "a:b": "csource", " lead": "csource", "a\nb": "csource",
             "good": "csource"}
    with serving.folder_of_adapters(**names) as folder, \
            serving.serving(binary, "--adapter-dir", folder) as server:
        assert sorted(m["id"] for m in get(server, "/v1/models").json["data"]) == ["base", "good"]
        for name in ("a:b", " lead", "a\nb"):
            for path, body in (("/v1/completions", {"prompt": "a"}), ("/tokenize", {"prompt": "a"}),
                               ("/v1/chat/completions",
                                {"messages": [{"role": "user", "content": "a"}]})):
                answer = post(server, path, {"model": name, **body})
                assert answer.status == 404, (name, path, answer.bytes)
            for path in ("/v1/unload_lora_adapter", "/v1/lora/active"):
                answer = post(server, path, {"lora_name": name})
                assert answer.status in (400, 404), (name, path, answer.bytes)
        answer = post(server, "/v1/unload_lora_adapter", {"lora_name": "base"})
        assert answer.status == 404, answer.bytes
        assert complete(server, "base") and complete(server, "good")


def check_folder_names(binary):
    """A folder is an adapter by its name, until it is unloaded."""
    with serving.serving(binary, "--adapter-dir", ADAPTERS) as server:
        oracle = complete(server, "sqldoc")
        both = [None, None]

        def ask(i):
            both[i] = complete(server, "csource")
        threads = [threading.Thread(target=ask, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert both[0] == both[1] is not None
        assert post(server, "/v1/lora/active", {"lora_name": "sqldoc"}).json == {"active": "sqldoc"}
        assert complete(server, None) == oracle
        assert post(server, "/v1/lora/active", {"lora_name": "scripture"}).status == 200
        assert complete(server, None) == complete(server, "scripture") != oracle
        assert post(server, "/v1/lora/active", {"lora_name": None}).json == {"active": None}
        assert complete(server, None) == complete(server, "base")
        assert post(server, "/v1/unload_lora_adapter", {"lora_name": "sqldoc"}).status == 200
        assert post(server, "/v1/completions", {"model": "sqldoc", "prompt": "a"}).status == 404
        assert "sqldoc" not in [m["id"] for m in get(server, "/v1/models").json["data"]]
        assert post(server, "/v1/unload_lora_adapter", {"lora_name": "sqldoc"}).status == 404
        assert post(server, "/v1/load_lora_adapter",
                    {"lora_name": "sqldoc", "lora_path": "sqldoc"}).status == 200
        assert complete(server, "sqldoc") == oracle


def check_refused_at_start(binary):
    """One bad adapter does not keep the server from starting; it is listed as failed."""
    with folder_of_adapters(bad="sqldoc") as folder:
        (folder / "bad" / "adapter_config.json").write_text("{")
        with serving.serving(binary, "--adapter", "bad=%s" % (folder / "bad"), "--adapter",
                             "scripture=%s" % (ADAPTERS / "scripture")) as server:
            listed = {a["name"]: a for a in get(server, "/v1/lora_adapters").json["data"]}
            assert listed["bad"]["state"] == "failed", listed
            assert listed["bad"]["error"]["code"] == "config-malformed"
            assert str(folder) not in json.dumps(listed)
            assert listed["scripture"]["state"] == "ready"
            assert complete(server, "scripture") != complete(server, "base")
            answer = post(server, "/v1/completions", {"model": "bad", "prompt": "a"})
            assert answer.status == 404
            answer = post(server, "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "bad"})
            assert (answer.status, answer.code) == (403, "no-adapter-dir")


def check_keys(binary):
    with folder_of_adapters(good="sqldoc") as folder:
        (folder / "keys").write_text("# clients\nsecret-a\n  \nsecret-b  \n")
        (folder / "admin").write_text("boss\n")
        show = lambda key: {"Authorization": "Bearer " + key}
        load = {"lora_name": "x", "lora_path": "good"}
        flags = ["--adapter-dir", folder, "--api-key-file", folder / "keys"]
        with serving.serving(binary, *flags, "--admin-key-file", folder / "admin") as server:
            for key in ("", "secret", "secret-aa", "Secret-a", "bos"):
                assert get(server, "/v1/models", headers=show(key)).status == 401, key
            assert get(server, "/v1/models").status == 401
            assert get(server, "/v1/models", headers=show("secret")).code == "invalid_api_key"
            assert get(server, "/v1/models", headers={"Authorization": "secret-a"}).status == 401
            for key in ("secret-a", "secret-b", "boss"):
                assert get(server, "/v1/models", headers=show(key)).status == 200, key
            assert post(server, "/v1/load_lora_adapter", load).status == 401
            assert post(server, "/v1/load_lora_adapter", load,
                        headers=show("secret-a")).status == 401
            assert post(server, "/v1/load_lora_adapter", load, headers=show("boss")).status == 200
            assert get(server, "/health").status == get(server, "/version").status == 200
            assert not any("secret" in line or "boss" in line for line in server.log)
        with serving.serving(binary, *flags, "--no-adapter-routes") as server:
            answer = post(server, "/v1/load_lora_adapter", load, headers=show("secret-a"))
            assert (answer.status, answer.code) == (403, "adapter-routes-off")
            answer = post(server, "/v1/completions", {"model": "good", "prompt": "a"},
                          headers=show("secret-b"))
            assert answer.status == 200


def check_loads_beside_streams(binary):
    """Loads and an unload in mid-stream change no token."""
    prompts = ["In the", "static", "The", "select", "And", "int", "When", "a"]
    models = ["scripture", "csource", "sqldoc", "base"] * 2
    with serving.serving(binary, "--adapter-dir", ADAPTERS) as server:
        quiet = [complete(server, m, p, 120) for m, p in zip(models, prompts)]
        got = [None] * 8

        def ask(i):
            got[i] = complete(server, models[i], prompts[i], 120)
        threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for i in range(6):
            body = {"lora_name": "extra%d" % (i % 2), "lora_path": "csource", "load_inplace": True}
            assert post(server, "/v1/load_lora_adapter", body).status in (200, 503)
        assert post(server, "/v1/unload_lora_adapter", {"lora_name": "scripture"}).status == 200
        for thread in threads:
            thread.join()
        assert [g for g, m in zip(got, models) if m != "scripture"] == \
            [q for q, m in zip(quiet, models) if m != "scripture"]
        assert [g for g, m in zip(got, models) if m == "scripture"] == \
            [q for q, m in zip(quiet, models) if m == "scripture"]
        until(lambda: all(a["references"] == 0 for a in
                          get(server, "/v1/lora_adapters").json["data"] if "references" in a))


def check_settings(binary):
    """Flags and the environment are one table; a queue that is full says so."""
    environment = {**os.environ, "SIDEPATH_SERVED_MODEL_NAME": "house",
                   "SIDEPATH_ADAPTER_DIR": str(ADAPTERS), "SIDEPATH_QUEUE": "0",
                   "SIDEPATH_MAX_RUNNING": "2"}
    with serving.serving(binary, environment=environment) as server:
        assert complete(server, "house:csource") == complete(server, "csource")
        assert post(server, "/v1/completions", {"model": "base", "prompt": "a"}).status == 404
        answer = post(server, "/v1/completions", {"model": "house", "prompt": "a", "n": 3})
        assert answer.status == 400 and answer.json["error"]["param"] == "n"
        long = {"model": "csource", "prompt": "a", "max_tokens": 1500, "ignore_eos": True, "n": 2}
        def references():
            listed = get(server, "/v1/lora_adapters").json["data"]
            return sum(adapter.get("references", 0) for adapter in listed)

        with server.connect() as sock:
            data = json.dumps(long).encode()
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: "
                         b"application/json\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
            until(lambda: references() == 2)
            full = post(server, "/v1/completions", {"model": "house", "prompt": "a"})
            assert full.status == 429, full.bytes
            assert full.code == "queue-full" and full.headers["retry-after"] == "1"
        until(lambda: references() == 0)
        assert complete(server, "house")


CHECKS = [check_completions, check_streams, check_sampling_fields, check_logprobs, check_chat,
          check_ends, check_bad_requests, check_unknown_models, check_models, check_loading,
          check_skipped_folders, check_snapshot_as_directory,
          check_begin_of_text, check_pinned, check_forbidden_folders, check_folder_names,
          check_refused_at_start, check_keys, check_loads_beside_streams, check_settings]

if __name__ == "__main__":
    run_checks([c for c in CHECKS if len(sys.argv) < 3 or c.__name__ in sys.argv[2:]], sys.argv[1])

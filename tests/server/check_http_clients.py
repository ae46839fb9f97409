#!/usr/bin/env python3
"""What common clients send, and what they read out of the answers: load generators, agent
frameworks, evaluation harnesses, proxies. On the demo model, whose tokenizer has 2,048 ids: 2045 to
2047 are special.
    check_http_clients.py SIDEPATH [CHECK..]"""

import json
import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import serving
from serving import (ADAPTERS, BASE, EXACT, ROOT, call, complete, folder_of_adapters, get, post,
                     run_checks)

CONTINUATION_BYTE = 0x80


def byte_token(server, byte):
    """The id of the token that is this byte alone."""
    for token in range(2045):
        text = post(server, "/detokenize", {"tokens": [token]}).json["prompt"]
        if text == "\ufffd" and post(server, "/detokenize", {
                "tokens": [token, token]}).json["prompt"] == "\ufffd\ufffd":
            return token
    raise AssertionError("no token of a lone byte")


def check_logprob_entries(binary):
    """One entry for each id, also where ids share a text; offsets stay inside of the text."""
    with serving.serving(binary, *EXACT) as server:
        def ask(**change):
            body = {"model": "base", "prompt": "The", "max_tokens": 4, "temperature": 0,
                    "logprobs": 20, "return_token_ids": True, **change}
            answer = post(server, "/v1/completions", body)
            assert answer.status == 200, answer.bytes
            return answer.json["choices"][0]

        lone = byte_token(server, CONTINUATION_BYTE)
        shared = 0
        # Ids that are a byte of a character each look like U+FFFD, and these are followed by many.
        for prompt in ([127], [158], [lone, lone], "The"):
            lists = ask(prompt=prompt)["logprobs"]
            for token, value, top in zip(lists["tokens"], lists["token_logprobs"],
                                         lists["top_logprobs"]):
                assert len(top) in (20, 21) and top[token] == value, top
                shared += sum(key.startswith("token_id:") for key in top)
        assert shared > 10
        # Forced: a token that is no whole character, twice: both are one entry more than 20.
        choice = ask(logit_bias={str(lone): 100}, max_tokens=2)
        assert choice["token_ids"] == [lone, lone]
        for top in choice["logprobs"]["top_logprobs"]:
            assert len(top) >= 20, top
        # Special tokens have no text in the answer, and a stop text is cut off.
        text = ask(logprobs=None, max_tokens=12)["text"]
        for change in ({"logit_bias": {"2047": 100}}, {"stop": text[5:9], "max_tokens": 12},
                       {"stop": text[3:12], "max_tokens": 12}, {"prompt": [lone], "max_tokens": 9},
                       {"echo": True, "stop": text[5:9], "max_tokens": 12},
                       {"echo": True, "prompt": "cafe\u0301 The", "max_tokens": 12}):
            choice = ask(**change)
            offsets = choice["logprobs"]["text_offset"]
            assert len(offsets) == len(choice["logprobs"]["tokens"])
            assert offsets == sorted(offsets) and offsets[0] == 0, (change, offsets)
            assert offsets[-1] <= len(choice["text"]), (change, offsets, choice["text"])
            body = {"model": "base", "prompt": "The", "max_tokens": 4, "temperature": 0,
                    "logprobs": 20, **change, "stream": True}
            events = [e["choices"][0] for e in post(server, "/v1/completions", body).events()]
            assert "".join(e["text"] for e in events) == choice["text"]
            parts = [e["logprobs"] for e in events if e["logprobs"]]
            for name in ("tokens", "token_logprobs", "text_offset"):
                assert sum((p[name] for p in parts), []) == choice["logprobs"][name], (change, name)


def check_token_ids(binary):
    """return_token_ids: those of the prompt too, on each route, whole and streamed."""
    with serving.serving(binary) as server:
        body = {"model": "base", "max_tokens": 3, "temperature": 0, "return_token_ids": True}
        prompt = post(server, "/tokenize", {"prompt": "The end"}).json["tokens"]
        text = {**body, "prompt": ["The end", "The end"], "n": 2}
        whole = post(server, "/v1/completions", text).json
        assert all(c["prompt_token_ids"] == prompt for c in whole["choices"])
        for echo in (False, True):
            events = post(server, "/v1/completions",
                          {**text, "stream": True, "echo": echo}).events()
            for index in range(4):
                mine = [c for e in events for c in e["choices"] if c["index"] == index]
                assert [c.get("prompt_token_ids") for c in mine] == \
                    [prompt] + [None] * (len(mine) - 1), mine
        messages = [{"role": "user", "content": "The end"}]
        chat = {**body, "messages": messages, "n": 2}
        whole = post(server, "/v1/chat/completions", chat).json
        ids = whole["prompt_token_ids"]
        assert len(ids) == whole["usage"]["prompt_tokens"] and ids[0] == 2046
        tail = len(ids) - ids.index(prompt[0])
        assert ids[-tail:-tail + 2] == prompt
        events = post(server, "/v1/chat/completions", {**chat, "stream": True}).events()
        assert [e.get("prompt_token_ids") for e in events] == [ids] + [None] * (len(events) - 1)
        assert "prompt_token_ids" not in post(server, "/v1/chat/completions", {
            **chat, "return_token_ids": False}).json


def check_usage_in_each(binary):
    """continuous_usage_stats, as load generators send it; without include_usage it is nothing."""
    with serving.serving(binary) as server:
        for path, prompt in (("/v1/completions", {"prompt": "The"}), (
                "/v1/chat/completions", {"messages": [{"role": "user", "content": "The"}]})):
            body = {"model": "base", "max_tokens": 5, "temperature": 0, "stream": True,
                    "ignore_eos": True, **prompt}
            options = {"include_usage": True, "continuous_usage_stats": True}
            events = post(server, path, {**body, "stream_options": options}).events()
            last = events.pop()
            counts = [e["usage"]["completion_tokens"] for e in events]
            assert counts == sorted(counts) and counts[-1] == 5, counts
            assert last["choices"] == [] and last["usage"]["completion_tokens"] == 5
            for event in events:
                usage = event["usage"]
                assert usage["prompt_tokens"] == last["usage"]["prompt_tokens"] > 0
                assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            options["continuous_usage_stats"] = False
            events = post(server, path, {**body, "stream_options": options}).events()
            assert all(e["usage"] is None for e in events[:-1]) and events[-1]["usage"]
            options = {"continuous_usage_stats": True}
            events = post(server, path, {**body, "stream_options": options}).events()
            assert not any("usage" in e for e in events)
            options = {"include_usage": True, "continuous_usage_stats": "yes"}
            answer = post(server, path, {**body, "stream_options": options})
            assert answer.status == 400 and answer.json["error"]["param"] == "stream_options"


def check_unasked(binary):
    """Fields and forms that frameworks send though nobody chose them."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": " "}}
    history = [{"role": "user", "content": "a"},
               {"role": "assistant", "content": None, "tool_calls": [call], "function_call": None},
               {"role": "tool", "tool_call_id": "1", "content": "b"}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    body = {"model": "base", "messages": history, "max_tokens": 2, "temperature": 0}
    with serving.serving(binary) as server:
        want = post(server, "/v1/chat/completions", body).json["choices"]
        for change in ({"parallel_tool_calls": False}, {"parallel_tool_calls": True},
                       {"parallel_tool_calls": None}, {"stop": []}, {"stream_options": None},
                       {"tools": [], "tool_choice": "auto"}, {"functions": []}, {"echo": False},
                       {"include_reasoning": True}, {"prediction": {"type": "content"}},
                       {"return_tokens_as_token_ids": False}, {"response_format": None},
                       {"top_logprobs": None, "logprobs": False}, {"logit_bias": None}):
            answer = post(server, "/v1/chat/completions", {**body, **change})
            assert answer.status == 200, (change, answer.bytes)
            assert answer.json["choices"] == want, change
        for arguments in ("null", "", "{}", "\t\n", None, {}):
            call["function"]["arguments"] = arguments
            assert post(server, "/v1/chat/completions", body).json["choices"] == want, arguments
        answer = post(server, "/v1/chat/completions", {**body, "parallel_tool_calls": "no"})
        assert answer.status == 400 and answer.json["error"]["param"] == "parallel_tool_calls"
        assert post(server, "/v1/chat/completions", {
            **body, "tools": tools, "parallel_tool_calls": False}).status == 200


def check_best_of(binary):
    """The n best of best_of choices, by the mean logprob of their tokens."""
    with serving.serving(binary, "--adapter-dir", ADAPTERS, *EXACT) as server:
        body = {"model": "csource", "prompt": ["static", "int"], "max_tokens": 6, "seed": 5,
                "temperature": 1, "ignore_eos": True, "return_token_ids": True}
        every = post(server, "/v1/completions", {**body, "n": 5, "logprobs": 0}).json["choices"]
        got = post(server, "/v1/completions", {**body, "n": 2, "best_of": 5})
        assert got.status == 200, got.bytes
        assert [c["index"] for c in got.json["choices"]] == [0, 1, 2, 3]
        assert got.json["usage"]["completion_tokens"] == 60
        assert got.json["usage"]["prompt_tokens"] == len(every[0]["prompt_token_ids"]) + \
            len(every[5]["prompt_token_ids"])
        for prompt in range(2):
            ranked = sorted(every[5 * prompt:5 * prompt + 5],
                            key=lambda c: -sum(c["logprobs"]["token_logprobs"]) / 6)
            mine = got.json["choices"][2 * prompt:2 * prompt + 2]
            assert [c["token_ids"] for c in mine] == [c["token_ids"] for c in ranked[:2]]
            assert all(c["logprobs"] is None for c in mine)
        assert [c["token_ids"] for c in post(server, "/v1/completions", {
            **body, "n": 5, "best_of": 5}).json["choices"]] == [c["token_ids"] for c in every]
        for change in ({"n": 3, "best_of": 2}, {"best_of": 2, "stream": True}):
            answer = post(server, "/v1/completions", {**body, **change})
            assert answer.status == 400 and answer.json["error"]["param"] == "best_of", answer.bytes


def check_context(binary):
    """OpenAI's code and sentence, by which proxies know that a conversation is to be shortened."""
    user = lambda text: [{"role": "user", "content": text}]
    for flag in ("--max-context", "--kv-tokens"):
        with serving.serving(binary, flag, 128) as server:
            for path, body, param in (
                    ("/v1/completions", {"prompt": "a " * 500}, "prompt"),
                    ("/v1/completions", {"prompt": [5] * 128, "max_tokens": 1}, "prompt"),
                    ("/v1/completions", {"prompt": [5], "max_tokens": 128}, "prompt"),
                    ("/v1/completions", {"prompt": [5], "max_tokens": 128, "stream": True},
                     "prompt"),
                    ("/v1/chat/completions", {"messages": user("a " * 500)}, "messages"),
                    ("/v1/chat/completions", {"messages": user("a"), "max_tokens": 128},
                     "messages")):
                answer = post(server, path, body)
                error = answer.json["error"]
                assert answer.status == 400, (path, answer.bytes)
                assert error["code"] == "context_length_exceeded" and error["param"] == param, error
                assert error["type"] == "invalid_request_error"
                assert error["message"].startswith(
                    "This model's maximum context length is 128 tokens. However, "), error
                assert flag[2:] in error["message"], error
                if "max_tokens" in body and param == "prompt":
                    assert "you requested 129 tokens" in error["message"], error
            assert len(complete(server, "base", [5] * 127, 1, ignore_eos=True)[0]) == 1


def check_error_codes(binary):
    """Every error has a code, and `param` is a field of the request or null."""
    chat = {"messages": [{"role": "user", "content": "a"}]}
    text, talk, load = "/v1/completions", "/v1/chat/completions", "/v1/load_lora_adapter"
    bad = [
        (text, {}, "prompt"), (text, {"prompt": "a", "n": 0}, "n"),
        (text, {"prompt": "a", "temperature": "x"}, "temperature"),
        (text, {"prompt": "a", "top_p": 7}, "top_p"), (text, {"prompt": "a", "stop": [5]}, "stop"),
        (text, {"prompt": "a", "nonsense": 5}, "nonsense"), (text, {"prompt": [999999]}, "prompt"),
        (text, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        (text, {"prompt": "a", "model": "nope"}, "model"),
        (text, {"prompt": "a", "n": 128}, "n"), (text, {"prompt": "a", "model": "bad"}, None),
        (talk, {**chat, "tool_choice": "required"}, "tool_choice"),
        (talk, {"messages": [{"role": "x"}]}, "messages[0].role"),
        (talk, {**chat, "logit_bias": {"1": 101}}, "logit_bias"),
        (talk, {**chat, "model": "nope"}, "model"),
        ("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {**chat, "prompt": "a"}, "messages"),
        ("/tokenize", {"messages": 5}, "messages"),
        ("/detokenize", {"tokens": "a"}, "tokens"), ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1], "prompt": "a"}, "prompt"), (load, {}, "lora_name"),
        (load, {"lora_name": "a:b", "lora_path": "sqldoc"}, "lora_name"),
        (load, {"lora_name": "x"}, "lora_path"),
        (load, {"lora_name": "x", "lora_path": "none"}, "lora_path"),
        (load, {"lora_name": "x", "lora_path": "bad"}, None),
        (load, {"lora_name": "x", "lora_path": "/etc"}, "lora_path"),
        ("/v1/unload_lora_adapter", {"lora_name": "nope"}, "lora_name"),
        ("/v1/unload_lora_adapter", {"lora_name": 5}, "lora_name"),
        ("/v1/lora/active", {"lora_name": "nope"}, "lora_name"),
        ("/v1/lora/active", {"x": 1}, "lora_name"), ("/v1/nothing", {}, None),
    ]
    with folder_of_adapters(sqldoc="sqldoc", bad="sqldoc") as folder:
        (folder / "bad" / "adapter_model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
        with serving.serving(binary, "--adapter-dir", folder, "--queue", 16) as server:
            for path, body, param in bad:
                answer = post(server, path, body)
                error = answer.json["error"]
                assert 400 <= answer.status < 500, (path, body, answer.bytes)
                assert error["code"] and error["type"] and error["message"], (path, body, error)
                assert error["param"] == param, (path, body, error)
            for path in ("/v1/models/nope", "/v1/models/%zz", "/nothing"):
                assert get(server, path).code, path

            def refused():
                return [line for line in server.access_log() if line["status"] >= 400]

            serving.until(lambda: len(refused()) >= len(bad) + 3, 5, "the lines of the log")
            assert all(line["code"] for line in refused())


def check_no_tokenizer(binary):
    """What the server lacks is no fault of the request, and no unknown model."""
    messages = [{"role": "user", "content": "a"}]
    with serving.model_without("tokenizer.json", "tokenizer_config.json") as model, \
            serving.serving(binary, model=model) as server:
        for path, body in (("/v1/completions", {"prompt": "a"}), ("/tokenize", {"prompt": "a"}),
                           ("/detokenize", {"tokens": [5]})):
            answer = post(server, path, body)
            assert (answer.status, answer.code) == (501, "tokenizer-missing"), answer.bytes
            assert answer.json["error"]["param"] is None
        for path in ("/v1/chat/completions", "/tokenize"):
            answer = post(server, path, {"messages": messages})
            assert (answer.status, answer.code) == (501, "chat-template-missing"), answer.bytes
        answer = get(server, "/tokenizer_info")
        assert (answer.status, answer.code) == (501, "tokenizer-missing")
        assert any("no chat: " in line and "[chat-template-missing]" in line for line in server.log)
        answer = post(server, "/v1/completions", {"prompt": [5, 6], "max_tokens": 2,
                                                  "return_token_ids": True})
        assert answer.status == 200 and len(answer.json["choices"][0]["token_ids"]) == 2


def check_broken_template(binary):
    """A base whose template cannot be used does not start by itself, and serves all but chat when
    it is told to; /health says whether there is chat."""
    said = "--chat-template FILE takes another template, none serves without chat"
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    for template, code in (("{% if %}", "chat-template-malformed"),
                           ("{% import 'a' as b %}", "chat-template-unsupported")):
        with serving.model_without("chat_template.jinja",
                                   chat_template_jinja=template) as model:
            line = serving.start_failing(binary, model=model)
            assert said in line and line.endswith("[%s]" % code), line
            with serving.serving(binary, "--chat-template", "none", model=model) as server:
                for path in ("/health", "/ready"):
                    assert get(server, path).json == {"status": "ok", "chat": False}
                answer = post(server, "/v1/chat/completions", body)
                assert (answer.status, answer.code) == (501, "chat-template-missing")
                assert "--chat-template none" in answer.json["error"]["message"]
                assert complete(server, "base", max_tokens=2)
                assert any("no chat: " in line for line in server.log), server.log
            (model / "good.jinja").write_text("{{ messages[0].content }}")
            with serving.serving(binary, "--chat-template", model / "good.jinja",
                                 model=model) as server:
                assert get(server, "/health").json == {"status": "ok", "chat": True}
                assert post(server, "/v1/chat/completions", body).status == 200


def check_refused_base(binary):
    """A base that does not run is refused with the names of those that do."""
    config = json.loads((BASE / "config.json").read_text())
    for change in ({"architectures": ["BertForMaskedLM"], "model_type": "bert"},
                   {"architectures": ["FalconForCausalLM"], "model_type": "falcon"}):
        with serving.model_without("config.json", config_json={**config, **change}) as model:
            line = serving.start_failing(binary, model=model)
            assert change["architectures"][0] in line, line
            runs = line[line.index("this engine runs "):]
            assert " only" in runs, line
            for name in ("Qwen3ForCausalLM", "Qwen3NextForCausalLM",
                         "Qwen3_5MoeForConditionalGeneration", "LlamaForCausalLM"):
                assert name in runs, line


def check_cors(binary):
    """Pages of the origins that --cors-allow-origin names, and of no others, may call and read."""
    page, other = "https://chat.example.org", "https://evil.example.org"
    body = {"prompt": "a", "max_tokens": 1}

    def asked(server, origin, path="/v1/completions", method="POST"):
        return call(server, "OPTIONS", path, headers={
            "Origin": origin, "Access-Control-Request-Method": method,
            "Access-Control-Request-Headers": "authorization,content-type,x-sdk"})

    def said(answer):
        return {k: v for k, v in answer.headers.items() if k.startswith("access-control-")}

    with serving.serving(binary) as server:
        assert asked(server, page).status == 405
        answer = post(server, "/v1/completions", body, headers={"Origin": page})
        assert not said(answer) and "vary" not in answer.headers
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text("secret\n")
        with serving.serving(binary, "--cors-allow-origin", page, "--cors-allow-origin",
                             "http://localhost:3000", "--api-key-file", keys) as server:
            answer = asked(server, page)
            assert (answer.status, answer.bytes) == (204, b""), (answer.status, answer.bytes)
            assert "content-length" not in answer.headers
            assert said(answer) == {
                "access-control-allow-origin": page, "access-control-max-age": "86400",
                "access-control-allow-methods": "GET, POST, PUT",
                "access-control-allow-headers": "authorization,content-type,x-sdk",
                "access-control-expose-headers":
                    said(answer)["access-control-expose-headers"]}, said(answer)
            assert asked(server, "http://localhost:3000").status == 204
            for origin in (other, "http://localhost:3001", page + ":443", "null", "*"):
                answer = asked(server, origin)
                assert answer.status == 405 and not said(answer), (origin, answer.headers)
                assert answer.headers["vary"] == "Origin"
            assert asked(server, page, "/nothing").status == 404
            no_question = call(server, "OPTIONS", "/v1/completions", headers={"Origin": page})
            assert no_question.status == 405
            # What is answered can be read, whatever it is; the key is asked for as ever.
            for key, status in (("secret", 200), ("wrong", 401)):
                answer = post(server, "/v1/completions", body, headers={
                    "Origin": page, "Authorization": "Bearer " + key})
                assert answer.status == status
                assert said(answer)["access-control-allow-origin"] == page
                assert "X-Request-Id" in said(answer)["access-control-expose-headers"]
            answer = post(server, "/v1/completions", {**body, "stream": True}, headers={
                "Origin": page, "Authorization": "Bearer secret"})
            assert answer.events() and said(answer)["access-control-allow-origin"] == page
    with serving.serving(binary, "--cors-allow-origin", "*") as server:
        answer = asked(server, other)
        assert said(answer)["access-control-allow-origin"] == "*" and "vary" not in answer.headers
    for bad in ("chat.example.org", "https://a.org/", "https://A.org", "https://", "a, b", "null"):
        assert "cors-allow-origin" in serving.start_failing(binary, "--cors-allow-origin", bad)


def blow_up(file):
    """Every element of an adapter's file becomes 1e30, which is finite in F32 and in BF16."""
    data = bytearray(file.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    (dtype,) = {t["dtype"] for n, t in header.items() if n != "__metadata__"}
    huge = struct.pack("<f", 1e30)[{"F32": 0, "BF16": 2}[dtype]:]
    data[8 + length:] = huge * ((len(data) - 8 - length) // len(huge))
    file.write_bytes(data)


def check_non_finite(binary):
    """An adapter whose finite values blow up: its requests fail as its own, and it is counted."""
    with folder_of_adapters(huge="sqldoc", good="sqldoc") as folder:
        blow_up(folder / "huge" / "adapter_model.safetensors")
        with serving.serving(binary, "--adapter-dir", folder) as server:
            want = complete(server, "good"), complete(server, "base")
            body = {"model": "huge", "prompt": "The", "max_tokens": 4}
            for change in ({}, {"stream": True}, {"n": 2}, {"temperature": 0}):
                answer = post(server, "/v1/completions", {**body, **change})
                error = answer.json["error"]
                assert answer.status == 500, (change, answer.bytes)
                assert error["code"] == "adapter-non-finite" and error["param"] is None, error
                assert error["type"] == "server_error" and "huge" in error["message"]
            assert post(server, "/v1/completions", {**body, "lora_scale": 0}).status == 200
            assert (complete(server, "good"), complete(server, "base")) == want
            counts = [line for line in get(server, "/metrics").bytes.decode().split("\n")
                      if line.startswith("sidepath_adapter_non_finite_total")]
            assert 'sidepath_adapter_non_finite_total{adapter="huge"} 4' in counts, counts
            assert 'sidepath_adapter_non_finite_total{adapter="good"} 0' in counts, counts


def check_tokenizer(binary):
    """/tokenize with messages gives the prompt of a chat; /tokenizer_info names its tokens."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "a <|im_end|>"}]
    with serving.serving(binary) as server:
        for change in ({}, {"tools": tools}, {"chat_template_kwargs": {"enable_thinking": False}},
                       {"tools": tools, "tool_choice": "none"}):
            chat = post(server, "/v1/chat/completions", {
                "messages": messages, "max_tokens": 1, "return_token_ids": True, **change}).json
            said = post(server, "/tokenize", {"messages": messages, **change,
                                              "return_token_strs": True})
            assert said.status == 200, said.bytes
            assert said.json["tokens"] == chat["prompt_token_ids"], (change, said.json)
            assert said.json["count"] == len(said.json["token_strs"]) == len(said.json["tokens"])
        bare = post(server, "/tokenize", {"messages": messages, "add_generation_prompt": False})
        whole = post(server, "/tokenize", {"messages": messages})
        n = bare.json["count"]
        assert whole.json["tokens"][:n] == bare.json["tokens"] and whole.json["count"] > n
        long = [{"role": "user", "content": "a b " * 2000}]
        assert post(server, "/tokenize", {"messages": long}).json["count"] > 2048
        long[0]["content"] *= 5
        answer = post(server, "/tokenize", {"messages": long})
        assert (answer.status, answer.code) == (400, "too-many-tokens"), answer.bytes
        assert answer.json["error"]["param"] == "messages"
        assert any(line.endswith("chat by built-in Qwen form") for line in server.log), server.log
        info = get(server, "/tokenizer_info")
        assert info.status == 200
        assert info.json == json.loads((BASE / "tokenizer_config.json").read_text())


def check_generation_config(binary):
    """What the base's makers sample with, unless the request says otherwise."""
    def ask(server, **fields):
        body = {"prompt": "The", "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
        answer = post(server, "/v1/completions", {**body, **fields})
        assert answer.status == 200, answer.bytes
        return answer.json["choices"][0]["token_ids"]

    config = {"temperature": 0.01, "top_k": 1, "max_new_tokens": 5, "do_sample": True}
    with serving.model_without(generation_config_json=config) as model:
        with serving.serving(binary, model=model) as server:
            greedy = ask(server, temperature=0)
            assert ask(server) == ask(server) == greedy
            assert ask(server, temperature=None, top_k=None) == greedy
            assert any("leave them out: temperature 0.01, top_k 1; not used: max_new_tokens, "
                       "do_sample" in line for line in server.log), server.log
            hot = {"temperature": 5, "seed": 3}
            assert ask(server, **hot) == greedy  # one token is left to choose from
            free = ask(server, **hot, top_k=0)
            assert free != greedy
            chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9,
                    "return_token_ids": True}
            answers = [post(server, "/v1/chat/completions", chat).json["choices"][0]["token_ids"]
                       for _ in range(2)]
            assert answers[0] == answers[1]
        with serving.serving(binary, "--generation-config", "none", model=model) as server:
            assert ask(server, **hot) == ask(server, **hot, top_k=0) == free
            assert not any("generation_config" in line for line in server.log)
    with serving.model_without(generation_config_json={"top_p": 3}) as model:
        run = subprocess.run([binary, "serve", "--model", str(model), "--port", "0"], timeout=60,
                             capture_output=True, text=True)
        assert run.returncode != 0 and "top_p" in run.stderr, run.stderr
        with serving.serving(binary, "--generation-config", "none", model=model) as server:
            assert ask(server, temperature=0) == greedy


def check_adapter_notes(binary):
    """Files beside an adapter's weights: in its receipt and in the log, at the start and later."""
    with folder_of_adapters(first="sqldoc", later="csource", plain="scripture") as folder:
        (folder / "first" / "chat_template.jinja").write_text("x")
        (folder / "later" / "generation_config.json").write_text('{"eos_token_id": 5}')
        with serving.serving(binary, "--adapter", "first=%s" % (folder / "first"), "--adapter-dir",
                             folder, "--max-lora-rank", 16) as server:
            def said(name):
                return [line for line in server.log
                        if line.startswith('sidepath serve: adapter "%s": ' % name)]

            assert "chat_template.jinja beside the weights" in said("first")[0], server.log
            assert len(said("first")) == 2, server.log  # and that chat is by it
            for name in ("later", "plain", "later"):
                complete(server, name)
            serving.until(lambda: said("later"), 5, "a line for the later adapter")
            assert len(said("later")) == 2 and "generation_config.json" in said("later")[0]
            assert not said("plain")
            listed = {a["name"]: a for a in get(server, "/v1/lora_adapters").json["data"]}
            assert any("generation_config.json" in n for n in listed["later"]["receipt"]["notes"])
            assert listed["plain"]["receipt"]["notes"] == []


def documented_fields():
    """{(route, field): default as JSON, or None} of docs/HTTP.md."""
    text = (ROOT / "docs/HTTP.md").read_text()
    text = text[text.index("## Fields"):text.index("An answer ends with")]
    fields = {}
    for name, where, default in re.findall(r"^\| `(\w+)` \| (\w+) \| ([^|]*) \|", text, re.M):
        for route in ("completions", "chat"):
            if where in ("both", route):
                fields[route, name] = default
    for line in text.split("\n"):
        if line.startswith("Taken and ignored") or line.startswith("Taken only"):
            for part in re.split(r"[;:] |, and ", line)[1:]:
                routes = [r for r in ("completions", "chat") if part.startswith("in " + r)] or \
                    ["completions", "chat"]
                for name, value in re.findall(r"`(\w+)`((?: [^`,.;]+)?)", part):
                    fields.update({(route, name): value.strip() for route in routes})
    return fields


def check_documented_fields(binary):
    """What docs/HTTP.md calls a field's default is what happens without it."""
    documented = documented_fields()
    with serving.serving(binary) as server:
        for route, path, body in (
                ("completions", "/v1/completions", {"prompt": "The"}),
                ("chat", "/v1/chat/completions",
                 {"messages": [{"role": "user", "content": "The"}], "max_tokens": 16})):
            body = {**body, "seed": 7}
            want = post(server, path, body).json["choices"]
            tried = 0
            for (where, field), default in documented.items():
                try:
                    value = json.loads(default)
                except ValueError:
                    continue
                if where == route and field not in body:
                    answer = post(server, path, {**body, field: value})
                    assert answer.status == 200, (route, field, value, answer.bytes)
                    assert answer.json["choices"] == want, (route, field, value)
                    tried += 1
            assert tried >= 25, tried


CHECKS = [check_logprob_entries, check_token_ids, check_usage_in_each, check_unasked, check_best_of,
          check_context, check_error_codes, check_no_tokenizer, check_broken_template,
          check_refused_base, check_cors, check_non_finite, check_tokenizer,
          check_generation_config, check_adapter_notes, check_documented_fields]

if __name__ == "__main__":
    run_checks([c for c in CHECKS if len(sys.argv) < 3 or c.__name__ in sys.argv[2:]], sys.argv[1])

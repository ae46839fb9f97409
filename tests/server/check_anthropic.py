#!/usr/bin/env python3
"""POST /v1/messages on the demo model, by hand and by the `anthropic` client: its answers are those
of chat in another form, its streams put together are the whole, and what is refused is refused in
Anthropic's words. What the client does is skipped by name where it is missing: `tools/install-
packages.sh client` puts it into build/client-venv.
    check_anthropic.py SIDEPATH [CHECK...]"""

import json
import os
import sys
import tempfile
from pathlib import Path

import serving
from serving import post, run_checks

VENV = Path(__file__).resolve().parents[2] / "build/client-venv/bin/python"
TALK = {"model": "base", "max_tokens": 60, "temperature": 1, "seed": 4,
        "messages": [{"role": "user", "content": "The"}]}
TOOL = {"name": "get", "description": "d", "input_schema": {
    "type": "object", "properties": {"city": {"enum": ["A", "B"]}}, "required": ["city"]}}
CALL = {"tools": [TOOL], "max_tokens": 500, "tool_choice": {
    "type": "tool", "name": "get", "disable_parallel_tool_use": True}}


def message(server, **fields):
    answer = post(server, "/v1/messages", {**TALK, **fields})
    assert answer.status == 200, answer.bytes
    return answer.json


def stream(server, **fields):
    answer = post(server, "/v1/messages", {**TALK, **fields, "stream": True})
    assert answer.status == 200, answer.bytes
    events = []
    for block in answer.bytes.decode().strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == "event: " + events[-1]["type"], block
    return events


def chat_of(server, messages, **fields):
    answer = post(server, "/v1/chat/completions", {
        "model": "base", "temperature": 1, "seed": 4, "max_tokens": 60, "messages": messages,
        "chat_template_kwargs": {"enable_thinking": False}, **fields})
    assert answer.status == 200, answer.bytes
    return answer.json


def check_message_text(binary):
    with serving.serving(binary) as server:
        system = {"role": "system", "content": "s"}
        user = {"role": "user", "content": "The"}
        want = chat_of(server, [system, user])
        made = message(server, system=[{"type": "text", "text": "s"}], messages=[
            {"role": "user", "content": [{"type": "text", "text": "The"}]}])
        text = want["choices"][0]["message"]["content"]
        assert made["content"] == [{"type": "text", "text": text}], made
        assert made["type"] == "message" and made["role"] == "assistant"
        assert made["stop_reason"] == "max_tokens" and made["stop_sequence"] is None
        usage = made["usage"]
        assert usage["output_tokens"] == want["usage"]["completion_tokens"] == 60
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == \
            want["usage"]["prompt_tokens"]
        count = post(server, "/v1/messages/count_tokens", {
            "model": "base", "system": "s", "messages": TALK["messages"]})
        assert count.json == {"input_tokens": want["usage"]["prompt_tokens"]}, count.bytes
        words = text.split()
        made = message(server, system="s", stop_sequences=["qqq", words[3]])
        assert (made["stop_reason"], made["stop_sequence"]) == ("stop_sequence", words[3]), made
        assert made["content"][0]["text"] == text[:text.index(words[3])]
        begun = {"role": "assistant", "content": "There is"}  # the answer goes on with it
        want = chat_of(server, [user, begun], continue_final_message=True,
                       add_generation_prompt=False)
        made = message(server, messages=[user, begun])
        assert made["content"][0]["text"] == want["choices"][0]["message"]["content"]
        form = {"type": "json_schema", "schema": {
            "type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}}
        made = message(server, output_config={"format": form})
        assert json.loads(made["content"][0]["text"])["on"] in (True, False)
        assert made["stop_reason"] == "end_turn", made


def check_message_events(binary):
    with serving.serving(binary) as server:
        whole = message(server)
        events = stream(server)
        types = [e["type"] for e in events]
        n = types.count("content_block_delta")
        assert types == ["message_start", "content_block_start"] + ["content_block_delta"] * n + \
            ["content_block_stop", "message_delta", "message_stop"], types
        assert events[0]["message"]["content"] == []
        assert events[0]["message"]["stop_reason"] is None
        text = "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta")
        assert text == whole["content"][0]["text"]
        assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
        assert events[-2]["usage"]["output_tokens"] == 60
        thought = message(server, temperature=0,
                          thinking={"type": "enabled", "budget_tokens": 1024})
        kinds = [b["type"] for b in thought["content"]]
        assert kinds in (["text"], ["thinking"], ["thinking", "text"]), kinds


def check_message_tools(binary):
    with serving.serving(binary) as server:
        made = message(server, **CALL)
        block, = made["content"]
        assert made["stop_reason"] == "tool_use" and block["type"] == "tool_use", made
        assert block["name"] == "get" and block["input"]["city"] in ("A", "B"), made
        events = stream(server, **CALL)
        assert events[1]["content_block"]["input"] == {} and events[1]["content_block"]["id"]
        arguments = "".join(e["delta"]["partial_json"] for e in events
                            if e["type"] == "content_block_delta")
        assert json.loads(arguments) == block["input"]
        assert events[-2]["delta"]["stop_reason"] == "tool_use"
        history = [{"role": "user", "content": "The"},
                   {"role": "assistant", "content": [{"type": "thinking", "thinking": "x",
                                                      "signature": ""},
                                                     {"type": "text", "text": "so"}, block]},
                   {"role": "user", "content": [
                       {"type": "tool_result", "tool_use_id": block["id"], "content": [
                           {"type": "text", "text": "7"}]}, {"type": "text", "text": "and?"}]}]
        made = message(server, messages=history, tools=[TOOL])
        want = chat_of(server, [
            {"role": "user", "content": "The"},
            {"role": "assistant", "content": "so", "tool_calls": [
                {"id": block["id"], "type": "function", "function": {
                    "name": "get", "arguments": json.dumps(block["input"])}}]},
            {"role": "tool", "tool_call_id": block["id"], "content": "7"},
            {"role": "user", "content": "and?"}], tools=[{"type": "function", "function": {
                "name": "get", "description": "d", "parameters": TOOL["input_schema"]}}])
        assert made["content"][0]["text"] == want["choices"][0]["message"]["content"]
        none = message(server, tools=[TOOL], tool_choice={"type": "none"})
        assert none["content"] == message(server)["content"]


def check_message_refusals(binary):
    user = TALK["messages"]
    with tempfile.TemporaryDirectory() as top:
        keys = Path(top) / "keys"
        keys.write_text("secret\n")
        with serving.serving(binary, "--api-key-file", keys) as server:
            head = {"X-Api-Key": "secret", "anthropic-version": "2023-06-01"}
            for change, param, code in (
                    ({"max_tokens": None}, "max_tokens", "invalid-value"),
                    ({"messages": []}, "messages", "invalid-value"),
                    ({"messages": [{"role": "system", "content": "x"}]}, "messages",
                     "bad-messages"),
                    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages",
                     "unsupported-content-type"),
                    ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools",
                     "unsupported-field"),
                    ({"tool_choice": {"type": "any"}}, "tool_choice", "unsupported-tool-choice"),
                    ({"tool_choice": {"type": "all"}}, "tool_choice", "invalid-value"),
                    ({"thinking": {"type": "x"}}, "thinking", "invalid-value"),
                    ({"mcp_servers": [{}]}, "mcp_servers", "unsupported-field"),
                    ({"n": 2}, "n", "unsupported-field"),
                    ({"nobody": 1}, "nobody", "unknown-field"),
                    ({"temperature": -1}, "temperature", "invalid-value")):
                for streamed in (False, True):
                    answer = post(server, "/v1/messages", {**TALK, **change, "stream": streamed},
                                  headers=head)
                    assert answer.status == 400, (change, answer.bytes)
                    made = answer.json
                    assert made["type"] == "error" and made["request_id"], made
                    error = made["error"]
                    assert error["type"] == "invalid_request_error" and error["message"], error
                    assert (error["param"], error["code"]) == (param, code), (change, error)
            for more, status, kind in (({"headers": {}}, 401, "authentication_error"),
                                       ({"headers": {"X-Api-Key": "x"}}, 401,
                                        "authentication_error")):
                answer = post(server, "/v1/messages", TALK, **more)
                assert answer.status == status and answer.json["error"]["type"] == kind
            answer = post(server, "/v1/messages", {**TALK, "model": "nope"}, headers=head)
            assert answer.status == 404, answer.bytes
            assert answer.json["error"]["type"] == "not_found_error", answer.bytes
            answer = post(server, "/v1/messages/count_tokens", {"messages": user, "max_tokens": 3},
                          headers=head)
            assert answer.status == 400 and answer.json["error"]["code"] == "unknown-field"
            answer = post(server, "/v1/completions", {"prompt": "a"}, headers=head)
            assert answer.status == 401  # this header is these routes' alone
            answer = post(server, "/v1/messages", TALK, headers=head)
            assert answer.status == 200, answer.bytes


def check_message_client(binary):
    import anthropic  # pylint: disable=import-outside-toplevel
    with serving.serving(binary) as server:
        client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
        fields = {"model": "base", "max_tokens": 40, "messages": TALK["messages"],
                  "extra_body": {"temperature": 0}}
        whole = client.messages.create(**fields)
        with client.messages.stream(**fields) as events:
            text = "".join(events.text_stream)
            final = events.get_final_message()
        assert text == whole.content[0].text == final.content[0].text
        assert final.usage.output_tokens == whole.usage.output_tokens == 40
        assert whole.stop_reason == "max_tokens" and whole.model == "base"
        made = client.messages.create(**{**fields, "max_tokens": 400}, tools=[TOOL],
                                      tool_choice={"type": "any",
                                                   "disable_parallel_tool_use": True})
        assert made.stop_reason == "tool_use" and made.content[0].input["city"] in ("A", "B")
        with client.messages.stream(**{**fields, "max_tokens": 400}, tools=[TOOL], tool_choice={
                "type": "any", "disable_parallel_tool_use": True}) as events:
            final = events.get_final_message()
        assert final.content[0].input == made.content[0].input
        count = client.messages.count_tokens(model="base", messages=TALK["messages"])
        assert count.input_tokens == whole.usage.input_tokens + \
            whole.usage.cache_read_input_tokens
        try:
            client.messages.create(**{**fields, "model": "nope"})
            raise AssertionError("a model that is not there answers")
        except anthropic.NotFoundError as error:
            assert error.body["error"]["type"] == "not_found_error", error.body
        try:
            client.messages.create(**fields, container="c")
            raise AssertionError("a container is taken")
        except anthropic.BadRequestError as error:
            assert "container" in error.message, error.message


CHECKS = [check_message_text, check_message_events, check_message_tools, check_message_refusals,
          check_message_client]


def main():
    wanted = [c for c in CHECKS if len(sys.argv) < 3 or c.__name__ in sys.argv[2:]]
    if check_message_client in wanted:
        try:
            import anthropic  # pylint: disable=import-outside-toplevel,unused-import
        except ImportError:
            if VENV.is_file() and Path(sys.prefix) != VENV.parents[1]:
                os.execv(VENV, [str(VENV), "-B"] + sys.argv)
            print("check_message_client: skipped, the anthropic package is not installed: "
                  "tools/install-packages.sh client")
            wanted.remove(check_message_client)
    if not wanted:
        sys.exit(77)
    run_checks(wanted, sys.argv[1])


if __name__ == "__main__":
    main()

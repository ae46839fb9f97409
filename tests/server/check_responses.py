#!/usr/bin/env python3
"""POST /v1/responses on the demo model: its answers are those of chat in another form, its streams
have the events in OpenAI's order, and their parts add up to the whole.
    check_responses.py PROGRAM [CHECK...]"""

import json
import sys

import serving
from serving import post, run_checks

TALK = {"model": "base", "max_output_tokens": 60, "temperature": 1, "seed": 4,
        "chat_template_kwargs": {"enable_thinking": False}}
TOOL = {"type": "function", "name": "get", "strict": True, "parameters": {
    "type": "object", "properties": {"city": {"enum": ["A", "B"]}}, "required": ["city"]}}
CALL = {"input": "The", "tools": [TOOL], "max_output_tokens": 500, "parallel_tool_calls": False,
        "tool_choice": {"type": "function", "name": "get"}}
SCHEMA = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}


def respond(server, **fields):
    answer = post(server, "/v1/responses", {**TALK, **fields})
    assert answer.status == 200, answer.bytes
    return answer.json


def stream(server, **fields):
    answer = post(server, "/v1/responses", {**TALK, **fields, "stream": True})
    assert answer.status == 200, answer.bytes
    events = []
    for block in answer.bytes.decode().strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == "event: " + events[-1]["type"], block
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    return events


def check_response_text(binary):
    with serving.serving(binary) as server:
        chat = {k: v for k, v in TALK.items() if k != "max_output_tokens"}
        want = post(server, "/v1/chat/completions", {**chat, "max_tokens": 60, "messages": [
            {"role": "system", "content": "s"}, {"role": "user", "content": "The"}]}).json
        made = respond(server, input=[{"role": "user", "content": [
            {"type": "input_text", "text": "The"}]}], instructions="s")
        text = want["choices"][0]["message"]["content"]
        assert [i["type"] for i in made["output"]] == ["message"]
        assert made["output"][0]["content"][0]["text"] == text
        assert made["usage"]["input_tokens"] == want["usage"]["prompt_tokens"]
        assert made["usage"]["output_tokens"] == want["usage"]["completion_tokens"] == 60
        assert made["status"] == "incomplete" and made["instructions"] == "s"
        assert made["incomplete_details"] == {"reason": "max_output_tokens"}
        form = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
        made = respond(server, input="The", text=form)
        assert made["status"] == "completed" and made["text"] == form
        assert json.loads(made["output"][0]["content"][0]["text"])["on"] in (True, False)


def check_response_events(binary):
    with serving.serving(binary) as server:
        whole = respond(server, input="The")
        events = stream(server, input="The")
        types = [e["type"].removeprefix("response.") for e in events]
        n = types.count("output_text.delta")
        assert types == ["created", "in_progress", "output_item.added", "content_part.added"] + \
            ["output_text.delta"] * n + ["output_text.done", "content_part.done",
                                         "output_item.done", "incomplete"], types
        text = whole["output"][0]["content"][0]["text"]
        assert "".join(e["delta"] for e in events if e["type"].endswith("text.delta")) == text
        assert events[-1]["response"]["output"][0]["content"] == whole["output"][0]["content"]
        assert events[-1]["response"]["usage"] == {**whole["usage"], "input_tokens_details": {
            "cached_tokens": events[-1]["response"]["usage"]["input_tokens_details"]
            ["cached_tokens"]}}
        assert events[0]["response"]["status"] == "in_progress"
        thought = stream(server, input="The", chat_template_kwargs={}, text={
            "format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
            max_output_tokens=200)
        kinds = [i["type"] for i in thought[-1]["response"]["output"]]
        assert kinds in (["message"], ["reasoning"], ["reasoning", "message"]), kinds


def check_response_calls(binary):
    with serving.serving(binary) as server:
        made = respond(server, **CALL)
        item = made["output"][0]
        assert made["status"] == "completed" and len(made["output"]) == 1
        assert item["type"] == "function_call" and item["name"] == "get"
        assert json.loads(item["arguments"])["city"] in ("A", "B")
        events = stream(server, **CALL)
        types = [e["type"].removeprefix("response.") for e in events]
        assert types == ["created", "in_progress", "output_item.added",
                         "function_call_arguments.delta", "function_call_arguments.done",
                         "output_item.done", "completed"], types
        assert events[4]["arguments"] == item["arguments"]
        assert events[2]["item"]["name"] == "get" and events[2]["item"]["arguments"] == ""
        again = respond(server, input=[
            {"role": "user", "content": "The"},
            {"type": "function_call", "call_id": item["call_id"], "name": "get",
             "arguments": item["arguments"]},
            {"type": "function_call_output", "call_id": item["call_id"], "output": "7"}])
        assert again["usage"]["input_tokens"] > 20


def check_response_refusals(binary):
    with serving.serving(binary) as server:
        for change, param, code in (
                ({"previous_response_id": "resp-1"}, "previous_response_id", "unsupported-field"),
                ({"background": True}, "background", "unsupported-field"),
                ({"tools": [{"type": "web_search"}]}, "tools", "unsupported-field"),
                ({"input": []}, "input", "invalid-value"), ({"input": 5}, "input", "invalid-value"),
                ({"n": 2}, "n", "unsupported-field"), ({"nobody": 2}, "nobody", "unknown-field"),
                ({"temperature": -1}, "temperature", "invalid-value"),
                ({"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
                 "response_format", "grammar-unsupported"),
                ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input",
                 "unsupported-content-type")):
            for streamed in (False, True):
                answer = post(server, "/v1/responses", {**TALK, "input": "a", **change,
                                                        "stream": streamed})
                assert answer.status == 400, (change, answer.bytes)
                error = answer.json["error"]
                assert (error["param"], error["code"]) == (param, code), (change, error)
        answer = post(server, "/v1/responses", {**TALK, "input": "a", "model": "nope"})
        assert answer.status == 404, answer.bytes


CHECKS = [check_response_text, check_response_events, check_response_calls,
          check_response_refusals]

if __name__ == "__main__":
    run_checks([c for c in CHECKS if len(sys.argv) < 3 or c.__name__ in sys.argv[2:]], sys.argv[1])

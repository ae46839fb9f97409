#!/usr/bin/env python3
"""Constrained answers over HTTP on the demo model: every answer that ends by itself is what was
wanted, in streams and whole, for each field, with thoughts and forced calls, at temperatures 0 to
2; and what is refused says where.
    check_structured.py PROGRAM [CHECK...]"""

import ast
import contextlib
import json
import re
import sys
import tempfile
import threading
from pathlib import Path

import serving
from serving import ADAPTERS, post, run_checks

SCHEMA = {"type": "object", "properties": {
    "name": {"type": "string", "maxLength": 12}, "n": {"type": "integer", "minimum": 0,
                                                       "maximum": 99},
    "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2}},
    "required": ["name", "n", "tags"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": name, "strict": True, "parameters": {
    "type": "object", "properties": {"city": {"enum": ["A", "B"]}}, "required": ["city"]}}}
    for name in ("get_weather", "get_time")]
SUMS = """# of digits
root ::= sum ";"
sum  ::= sum [+*] term | term
term ::= [1-9] [0-9]{0,2}
       | "(" sum ")"
"""
# Of JSON Schema, and not enforced; one of nobody's.
KEYWORDS = {"not": {}, "if": True, "then": True, "else": True, "patternProperties": {},
            "propertyNames": True, "minProperties": 1, "maxProperties": 1, "dependentRequired": {},
            "dependentSchemas": {}, "unevaluatedProperties": False, "unevaluatedItems": False,
            "contains": {}, "minContains": 1, "maxContains": 1, "uniqueItems": True,
            "multipleOf": 2, "contentSchema": {}, "$anchor": "a", "$id": "a", "$dynamicRef": "#",
            "$dynamicAnchor": "a", "$vocabulary": {}, "dependencies": {}, "minLenght": 1}
TALK = {"messages": [{"role": "user", "content": "The"}], "max_tokens": 500, "temperature": 1,
        "chat_template_kwargs": {"enable_thinking": False}}


def format_of(schema):
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}


def is_valid(text):
    value = json.loads(text)
    assert list(value) == ["name", "n", "tags"], text
    assert isinstance(value["name"], str) and len(value["name"]) <= 12, text
    assert isinstance(value["n"], int) and 0 <= value["n"] <= 99, text
    assert isinstance(value["tags"], list) and len(value["tags"]) <= 2, text
    assert set(value["tags"]) <= {"a", "b"}, text
    return value


def is_sum(choice):
    """An answer of SUMS, as Python reads it; one that was cut may still be open."""
    text = choice.get("text") or choice["message"]["content"]
    assert re.fullmatch(r"[0-9+*()]+;?", text), choice
    if choice["finish_reason"] == "stop":
        assert text.endswith(";"), choice
        kinds = {type(node) for node in ast.walk(ast.parse(text[:-1], mode="eval"))}
        assert kinds <= {ast.Expression, ast.BinOp, ast.Add, ast.Mult, ast.Constant}, choice


def choice_of(server, **fields):
    answer = post(server, "/v1/completions", {"model": "base", "prompt": "The", **fields})
    assert answer.status == 200, answer.bytes
    return answer.json["choices"][0]


def events_of(answer):
    lines = [line[6:] for line in answer.bytes.decode().split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def check_formats(binary):
    with serving.serving(binary, "--adapter-dir", ADAPTERS) as server:
        for seed, temperature in enumerate((0, 0.5, 1, 2, 2)):
            for model in ("base", "csource"):
                answer = post(server, "/v1/completions", {
                    "model": model, "prompt": "static", "max_tokens": 500, "n": 3, "seed": seed,
                    "temperature": temperature, "response_format": format_of(SCHEMA),
                    "logprobs": 2, "repetition_penalty": 1.2}).json
                for choice in answer["choices"]:
                    assert choice["finish_reason"] == "stop", choice
                    is_valid(choice["text"])
        for fields, pattern in (
                ({"guided_regex": "[0-9]{3}-[a-f]{2}"}, "[0-9]{3}-[a-f]{2}"),
                ({"guided_choice": ["yes", "no", "not yet"]}, "yes|no|not yet"),
                ({"structured_outputs": {"regex": "(ab|c){2,3}"}}, "(ab|c){2,3}"),
                ({"structured_outputs": {"choice": ["x", "xy"]}}, "x|xy"),
                ({"guided_json": {"const": [1, "a"]}}, re.escape('[1,"a"]'))):
            for seed in range(4):
                choice = choice_of(server, max_tokens=40, temperature=1.5, seed=seed, **fields)
                assert re.fullmatch(pattern, choice["text"]), (fields, choice)
        for seed, name in enumerate(("guided_grammar", "structured_outputs") * 2):
            fields = {name: SUMS if name == "guided_grammar" else {"grammar": SUMS}}
            choice = choice_of(server, max_tokens=300, temperature=1.5, seed=seed, **fields)
            is_sum(choice)
        for seed in range(4):
            choice = choice_of(server, max_tokens=200, temperature=1, seed=seed,
                               response_format={"type": "json_object"})
            assert choice["finish_reason"] == "length" or \
                isinstance(json.loads(choice["text"]), dict), choice


def check_chat_formats(binary):
    with serving.serving(binary) as server:
        body = {**TALK, "response_format": format_of(SCHEMA), "seed": 5}
        whole = post(server, "/v1/chat/completions", body).json["choices"][0]
        is_valid(whole["message"]["content"])
        events = events_of(post(server, "/v1/chat/completions", {**body, "stream": True}))
        text = "".join(e["choices"][0]["delta"].get("content", "") for e in events)
        assert text == whole["message"]["content"]
        assert events[-1]["choices"][0]["finish_reason"] == "stop"
        is_sum(post(server, "/v1/chat/completions", {
            **TALK, "guided_grammar": SUMS}).json["choices"][0])
        for seed in range(2):  # the model may think first, and what it thinks is not JSON
            choice = post(server, "/v1/chat/completions", {
                **body, "seed": seed, "chat_template_kwargs": {},
                "max_tokens": 200}).json["choices"][0]
            if choice["finish_reason"] == "stop":
                is_valid(choice["message"]["content"])


def check_forced_calls(binary):
    named = {"type": "function", "function": {"name": "get_time"}}
    with serving.serving(binary) as server:
        for seed in range(2):
            for choice, names in (("required", {"get_weather", "get_time"}), (named, {"get_time"})):
                body = {**TALK, "tools": TOOLS, "tool_choice": choice, "seed": seed,
                        "parallel_tool_calls": False}
                made = post(server, "/v1/chat/completions", body).json["choices"][0]
                assert made["finish_reason"] == "tool_calls", made
                assert made["message"]["content"] is None, made
                function = made["message"]["tool_calls"][0]["function"]
                assert function["name"] in names and len(made["message"]["tool_calls"]) == 1
                assert json.loads(function["arguments"])["city"] in ("A", "B"), function
                events = events_of(post(server, "/v1/chat/completions", {**body, "stream": True}))
                calls = [c for e in events for c in e["choices"][0]["delta"].get("tool_calls", [])]
                assert calls[0]["function"]["name"] == function["name"]
                assert "".join(c["function"]["arguments"] for c in calls) == function["arguments"]
                assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


TAGS = """{% if tools %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Calls are <tool_call>
<function=NAME>
<parameter=KEY>
VALUE
</parameter>
</function>
</tool_call>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@contextlib.contextmanager
def serving_by(binary, text):
    """A server whose chat template is this text."""
    with tempfile.TemporaryDirectory() as top:
        template = Path(top) / "template.jinja"
        template.write_text(text)
        with serving.serving(binary, "--chat-template", template) as server:
            yield server


def check_tagged_calls(binary):
    """Forced calls in the tags of Qwen3-Coder's template."""
    tool = {"type": "function", "function": {"name": "book", "parameters": {
        "type": "object", "properties": {
            "city": {"type": "string", "maxLength": 8},
            "nights": {"type": "integer", "minimum": 1, "maximum": 9},
            "rooms": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1,
                      "maxItems": 2}},
        "required": ["city", "nights", "rooms"]}}}
    with serving_by(binary, TAGS) as server:
        for seed in range(4):
            body = {**TALK, "tools": [tool], "tool_choice": "required", "seed": seed,
                    "parallel_tool_calls": False}
            made = post(server, "/v1/chat/completions", body).json["choices"][0]
            assert made["finish_reason"] == "tool_calls", made
            call, = made["message"]["tool_calls"]
            arguments = json.loads(call["function"]["arguments"])
            assert call["function"]["name"] == "book" and len(arguments["city"]) <= 8, made
            assert 1 <= arguments["nights"] <= 9 and set(arguments["rooms"]) <= {"a", "b"}, made


def check_strict_tools(binary):
    """A call that is left to the model: other text is what it is without strict tools."""
    loose = [{**tool, "function": {**tool["function"], "strict": False}} for tool in TOOLS]
    wrong = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {
        "type": "object", "properties": {"a": {"type": "string", "contentSchema": {}}}}}}]
    with serving_by(binary, TAGS.replace("tool | tojson", "tool.function.name")) as server:
        for more in ({"temperature": 0}, {"seed": 3}):
            body = {**TALK, "max_tokens": 60, **more}
            plain = post(server, "/v1/chat/completions", {**body, "tools": loose}).json["choices"]
            strict = post(server, "/v1/chat/completions", {**body, "tools": TOOLS}).json["choices"]
            assert plain == strict, (plain, strict)
        for choice in ("auto", "required"):
            answer = post(server, "/v1/chat/completions", {**TALK, "tools": wrong,
                                                           "tool_choice": choice})
            error = answer.json["error"]
            assert answer.status == 400 and error["code"] == "grammar-unsupported", answer.bytes
            assert error["param"] == ("tools" if choice == "auto" else "tool_choice"), error
            assert "#/properties/a/contentSchema" in error["message"], error
        wrong[0]["function"]["strict"] = False
        assert post(server, "/v1/chat/completions", {**TALK, "tools": wrong,
                                                     "max_tokens": 2}).status == 200
        is_valid(post(server, "/v1/chat/completions", {  # what the body says of the answer counts
            **TALK, "tools": TOOLS, "response_format": format_of(SCHEMA)}).json
                 ["choices"][0]["message"]["content"])


def check_neighbours(binary):
    """What is not constrained is answered as if nobody else were there."""
    with serving.serving(binary, "--max-running", "8") as server:
        plain = {"model": "base", "prompt": "In the", "max_tokens": 60, "temperature": 1,
                 "seed": 9, "logprobs": 1, "ignore_eos": True}
        alone = post(server, "/v1/completions", plain).json["choices"][0]
        others = [threading.Thread(target=choice_of, args=(server,), kwargs={
            "max_tokens": 80, "temperature": 1.5, "seed": seed, "ignore_eos": True,
            "guided_regex": "[a-z ]{%d,}" % (20 + seed)}) for seed in range(6)]
        for thread in others:
            thread.start()
        beside = post(server, "/v1/completions", plain).json["choices"][0]
        for thread in others:
            thread.join()
        assert alone == beside


def check_refusals(binary):
    large = {"enum": ["x" * 50 + str(i) for i in range(6000)]}
    with serving.serving(binary) as server:
        for fields, param, code, words in (
                ({"response_format": format_of({"properties": {"a": {"uniqueItems": True}}})},
                 "response_format", "grammar-unsupported", "#/properties/a/uniqueItems"),
                ({"guided_json": {"$ref": "#"}}, "guided_json", "grammar-unsatisfiable", ""),
                ({"guided_json": "{"}, "guided_json", "grammar-malformed", ""),
                ({"guided_json": large}, "guided_json", "grammar-too-large", "bytes"),
                ({"guided_regex": "(a|b)*a(a|b){30}"}, "guided_regex", "grammar-too-large", ""),
                ({"guided_regex": "(a)\\1"}, "guided_regex", "grammar-unsupported",
                 "back reference"),
                ({"guided_grammar": "root ::= a"}, "guided_grammar", "grammar-malformed",
                 "the rule a, which is not defined, at line 1, column 10"),
                ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs",
                 "grammar-unsupported", "Lark"),
                ({"guided_grammar": "root ::= root"}, "guided_grammar", "grammar-unsatisfiable",
                 ""),
                ({"guided_grammar": "root ::= ([ab]{2000}){2000}"}, "guided_grammar",
                 "grammar-too-large", "the rule root"),
                ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs",
                 "unsupported-field", "structural_tag"),
                ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "invalid-value",
                 "exclude")):
            for path, more in (("/v1/completions", {"prompt": "a"}),
                               ("/v1/chat/completions", {"messages": TALK["messages"]})):
                for stream in (False, True):
                    answer = post(server, path, {**more, **fields, "stream": stream})
                    error = answer.json["error"]
                    assert answer.status == 400, (fields, answer.bytes)
                    assert (error["param"], error["code"]) == (param, code), error
                    assert words in error["message"], error
        for keyword, value in KEYWORDS.items():
            answer = post(server, "/v1/chat/completions", {**TALK, "response_format": format_of(
                {"type": "object", "properties": {"a/b": {keyword: value}}})})
            error = answer.json["error"]
            assert (answer.status, error["code"]) == (400, "grammar-unsupported"), answer.bytes
            assert "#/properties/a~1b/" + keyword in error["message"], error
        for change, words in (({"tool_choice": "required"}, "no tools"),
                              ({"tools": TOOLS, "tool_choice": "any"}, "by its name"),
                              ({"tools": TOOLS, "tool_choice": "required",
                                "response_format": {"type": "json_object"}}, "exclude"),
                              ({"tools": TOOLS, "tool_choice": {
                                  "type": "function", "function": {"name": "x"}}}, "called x")):
            answer = post(server, "/v1/chat/completions", {**TALK, **change})
            assert answer.status == 400 and answer.json["error"]["param"] == "tool_choice", \
                answer.bytes
            assert words in answer.json["error"]["message"], answer.bytes


CHECKS = [check_formats, check_chat_formats, check_forced_calls, check_tagged_calls,
          check_strict_tools, check_neighbours, check_refusals]

if __name__ == "__main__":
    run_checks([c for c in CHECKS if len(sys.argv) < 3 or c.__name__ in sys.argv[2:]], sys.argv[1])

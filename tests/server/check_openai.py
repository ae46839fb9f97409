#!/usr/bin/env python3
"""The real `openai` client against a server on the demo model: every route that it has, streaming
and not. Exit status 77, with a word, where the package is missing: `tools/install-packages.sh
client` puts it into build/client-venv.
    check_openai.py SIDEPATH"""

import os
import sys
from pathlib import Path

VENV = Path(__file__).resolve().parents[2] / "build/client-venv/bin/python"

try:
    import openai
except ImportError:
    if VENV.is_file() and Path(sys.prefix) != VENV.parents[1]:
        os.execv(VENV, [str(VENV), "-B"] + sys.argv)
    print("the openai package is not installed: tools/install-packages.sh client")
    sys.exit(77)

import serving
from serving import ADAPTERS, generate, run_checks


def client_of(server, key="none"):
    return openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0)


def check_client_completions(binary):
    oracle = generate(binary, "csource", "static int", 16)
    with serving.serving(binary, "--adapter-dir", ADAPTERS) as server:
        client = client_of(server)
        fields = {"model": "csource", "prompt": "static int", "max_tokens": 16, "temperature": 0}
        whole = client.completions.create(**fields)
        assert whole.choices[0].text == oracle["text"] and whole.model == "csource"
        assert whole.choices[0].finish_reason == oracle["finish_reason"]
        assert whole.usage.completion_tokens == 16
        assert len(whole.adapter_digest) == 64
        text, usage = "", None
        for chunk in client.completions.create(**fields, stream=True,
                                               stream_options={"include_usage": True}):
            text += "".join(choice.text for choice in chunk.choices)
            usage = chunk.usage or usage
        assert text == oracle["text"] and usage.total_tokens == whole.usage.total_tokens
        ids = client.completions.create(**{**fields, "prompt": oracle["prompt_tokens"]}, logprobs=2)
        assert ids.choices[0].text == oracle["text"]
        assert "".join(ids.choices[0].logprobs.tokens) == oracle["text"]
        many = client.completions.create(**{**fields, "prompt": ["static int", "In the"]}, n=2,
                                         seed=3, stop=["zzz"], echo=True, presence_penalty=0.5,
                                         frequency_penalty=0.5, logit_bias={"5": -100}, user="u",
                                         extra_body={"top_k": 5, "min_p": 0.01, "lora_scale": 0.5})
        assert [c.index for c in many.choices] == [0, 1, 2, 3]
        assert many.choices[3].text.startswith("In the")


def check_client_chat(binary):
    with serving.serving(binary, "--adapter-dir", ADAPTERS) as server:
        create = client_of(server).chat.completions.create
        tool = {"type": "function", "function": {"name": "add", "parameters": {
            "type": "object", "properties": {"a": {"type": "integer"}}}}}
        fields = {"model": "scripture", "max_tokens": 16, "temperature": 0, "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "In the beginning"}]}]}
        whole = create(**fields)
        message = whole.choices[0].message
        assert message.role == "assistant" and message.content and message.tool_calls is None
        text = ""
        for chunk in create(**fields, stream=True, stream_options={"include_usage": True}):
            assert chunk.model == "scripture"
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
        assert text == message.content and chunk.usage.completion_tokens == 16
        other = create(**fields, tools=[tool], tool_choice="auto", logprobs=True, top_logprobs=1)
        assert other.usage.prompt_tokens > whole.usage.prompt_tokens
        assert len(other.choices[0].logprobs.content) == 16
        many = create(**{**fields, "max_completion_tokens": 4, "max_tokens": 4}, n=2, seed=1)
        assert len(many.choices) == 2
        forced = create(**{**fields, "max_tokens": 400}, tool_choice="required", tools=[tool],
                        parallel_tool_calls=False, extra_body={"chat_template_kwargs": {
                            "enable_thinking": False}})
        assert forced.choices[0].finish_reason in ("tool_calls", "length")
        if forced.choices[0].finish_reason == "tool_calls":
            assert forced.choices[0].message.tool_calls[0].function.name == "add"


def check_client_parse(binary):
    """What a client's own models become, and what it makes of the answer."""
    from pydantic import BaseModel

    class Step(BaseModel):
        text: str
        done: bool

    class Plan(BaseModel):
        title: str
        steps: list[Step]

    with serving.serving(binary) as server:
        for seed in range(6):
            try:
                made = client_of(server).chat.completions.parse(
                    model="base", messages=[{"role": "user", "content": "The"}], seed=seed,
                    temperature=0.5, max_tokens=600, response_format=Plan,
                    extra_body={"chat_template_kwargs": {"enable_thinking": False}})
            except openai.LengthFinishReasonError:
                continue
            assert isinstance(made.choices[0].message.parsed, Plan)
            return
        raise AssertionError("no answer of six was finished")


def check_client_responses(binary):
    from pydantic import BaseModel

    class Switch(BaseModel):
        on: bool

    more = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}, "seed": 1}}
    with serving.serving(binary) as server:
        responses = client_of(server).responses
        whole = responses.create(model="base", input="The", max_output_tokens=12, **more)
        assert whole.output_text and whole.usage.output_tokens == 12
        with responses.stream(model="base", input="The", max_output_tokens=12, **more) as events:
            text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
            assert text == whole.output_text
        made = responses.parse(model="base", input="The", text_format=Switch,
                               max_output_tokens=300, **more)
        assert made.output_parsed.on in (True, False)
        caught = expect(openai.BadRequestError, responses.create, model="base", input="a",
                        previous_response_id="resp-1")
        assert caught.param == "previous_response_id"


def check_client_models(binary):
    with serving.serving(binary, "--adapter-dir", ADAPTERS) as server:
        client = client_of(server)
        models = {model.id: model for model in client.models.list()}
        assert set(models) == {"base", "scripture", "csource", "sqldoc"}
        assert models["sqldoc"].parent == "base" and models["sqldoc"].root == "sqldoc"
        assert client.models.retrieve("scripture").id == "scripture"


def expect(error, function, *arguments, **fields):
    try:
        function(*arguments, **fields)
    except error as caught:
        return caught
    raise AssertionError("%s did not come" % error.__name__)


def check_client_errors(binary):
    with serving.serving(binary, "--adapter-dir", ADAPTERS) as server:
        create = client_of(server).completions.create
        caught = expect(openai.NotFoundError, create, model="nope", prompt="a")
        assert caught.code == "model_not_found" and caught.param == "model"
        expect(openai.NotFoundError, create, model="nope", prompt="a", stream=True)
        expect(openai.NotFoundError, client_of(server).models.retrieve, "nope")
        caught = expect(openai.BadRequestError, create, model="base", prompt="a", temperature=-1)
        assert caught.param == "temperature"
        caught = expect(openai.BadRequestError, create, model="base", prompt="a", best_of=0)
        assert caught.param == "best_of"


def check_client_leaves(binary):
    with serving.serving(binary, "--adapter-dir", ADAPTERS) as server:
        stream = client_of(server).completions.create(model="sqldoc", prompt="a", max_tokens=1500,
                                                      stream=True, extra_body={"ignore_eos": True})
        next(iter(stream))
        stream.close()
        serving.until(lambda: all(a.get("references", 0) == 0 for a in
                                  serving.get(server, "/v1/lora_adapters").json["data"]), 5)


CHECKS = [check_client_completions, check_client_chat, check_client_parse, check_client_responses,
          check_client_models, check_client_errors, check_client_leaves]

if __name__ == "__main__":
    run_checks([c for c in CHECKS if len(sys.argv) < 3 or c.__name__ in sys.argv[2:]], sys.argv[1])

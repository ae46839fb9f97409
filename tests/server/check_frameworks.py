#!/usr/bin/env python3
"""What agent frameworks ask for on their first structured call, by their own code, against a server
on the demo model. One that is missing is skipped by name; exit status 77 where all are. CI has
those of requirements.txt; those of requirements-frameworks.txt need other versions of the same
packages, and are run by hand, each in an environment of its own.
    check_frameworks.py SIDEPATH [CHECK...]"""

import contextlib
import importlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Literal

VENV = Path(__file__).resolve().parents[2] / "build/client-venv/bin/python"

try:
    import openai
    from pydantic import BaseModel, Field
except ImportError:
    if VENV.is_file() and Path(sys.prefix) != VENV.parents[1]:
        os.execv(VENV, [str(VENV), "-B"] + sys.argv)
    print("the openai package is not installed: tools/install-packages.sh client")
    sys.exit(77)

import serving
from serving import run_checks

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it asks a host of its own else
ASK = "What is the weather?"
# A small model that may think first does so at length, and these clients have no word against it.
TEMPLATE = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Calls are <tool_call> JSON </tool_call>.<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


class Weather(BaseModel):
    """The weather of a city."""
    city: str = Field(max_length=12)
    sky: Literal["clear", "clouds"]
    degrees: int = Field(ge=-50, le=60)
    notes: list[Literal["wind", "fog"]] = Field(max_length=2)


def is_weather(value):
    assert isinstance(value, Weather), value
    assert -50 <= value.degrees <= 60 and len(value.city) <= 12, value


class Missing(Exception):
    """A check's package is not installed."""


@contextlib.contextmanager
def serving_for(binary, *names):
    """A server, and the modules of these names."""
    try:
        modules = [importlib.import_module(name) for name in names]
    except ImportError as missing:
        raise Missing(missing.name) from missing
    with tempfile.TemporaryDirectory() as top:
        template = Path(top) / "template.jinja"
        template.write_text(TEMPLATE)
        with serving.serving(binary, "--chat-template", template) as server:
            yield server, *modules


def client_of(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def talk(**more):
    return {"model": "base", "messages": [{"role": "user", "content": ASK}], "max_tokens": 400,
            "seed": 1, **more}


def check_framework_openai(binary):
    with serving_for(binary, "openai") as (server, _):
        client = client_of(server)
        made = client.chat.completions.parse(**talk(response_format=Weather)).choices[0]
        is_weather(made.message.parsed)
        tool = openai.pydantic_function_tool(Weather)
        made = client.chat.completions.parse(**talk(tools=[tool], tool_choice="required",
                                                    parallel_tool_calls=False)).choices[0]
        is_weather(made.message.tool_calls[0].function.parsed_arguments)
        with client.chat.completions.stream(**talk(response_format=Weather)) as stream:
            is_weather(stream.get_final_completion().choices[0].message.parsed)
        made = client.responses.parse(model="base", input=ASK, text_format=Weather,
                                      max_output_tokens=400, temperature=0)
        is_weather(made.output_parsed)


def check_framework_instructor(binary):
    with serving_for(binary, "instructor") as (server, instructor):
        for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
            client = instructor.from_openai(client_of(server), mode=mode)
            made = client.chat.completions.create(**talk(response_model=Weather, max_retries=0))
            is_weather(made)


def check_framework_pydantic_ai(binary):
    names = ("pydantic_ai", "pydantic_ai.models.openai", "pydantic_ai.providers.openai")
    with serving_for(binary, *names) as (server, pydantic_ai, models, providers):
        kind = getattr(models, "OpenAIChatModel", None) or models.OpenAIModel
        model = kind("base", provider=providers.OpenAIProvider(base_url=server.url + "/v1",
                                                               api_key="none"))
        for output in (pydantic_ai.ToolOutput(Weather), pydantic_ai.NativeOutput(Weather)):
            agent = pydantic_ai.Agent(model, output_type=output, retries=0,
                                      model_settings={"max_tokens": 400, "seed": 1})
            is_weather(agent.run_sync(ASK).output)


def check_framework_langchain(binary):
    with serving_for(binary, "langchain_openai") as (server, langchain_openai):
        model = langchain_openai.ChatOpenAI(base_url=server.url + "/v1", api_key="none",
                                            model="base", max_tokens=400, seed=1, max_retries=0)
        for method in ("json_schema", "function_calling"):
            is_weather(model.with_structured_output(Weather, method=method).invoke(ASK))
        asked = model.with_structured_output(Weather, method="json_mode", include_raw=True)
        raw = asked.invoke(ASK)["raw"]
        assert raw.content.startswith("{"), raw  # whose members nobody has said
        assert raw.response_metadata["finish_reason"] == "length" or raw.content.endswith("}"), raw


def check_framework_llama_index(binary):
    names = ("llama_index.llms.openai_like", "llama_index.core.prompts")
    with serving_for(binary, *names) as (server, openai_like, prompts):
        model = openai_like.OpenAILike(
            model="base", api_base=server.url + "/v1", api_key="none", is_chat_model=True,
            is_function_calling_model=True, max_tokens=400, max_retries=0,
            additional_kwargs={"seed": 1})
        is_weather(model.structured_predict(Weather, prompts.PromptTemplate(ASK)))
        is_weather(model.as_structured_llm(Weather).complete(ASK).raw)


def check_framework_litellm(binary):
    with serving_for(binary, "litellm") as (server, litellm):
        litellm.suppress_debug_info = True
        fields = talk(model="openai/base", api_base=server.url + "/v1", api_key="none")
        made = litellm.completion(**fields, response_format=Weather).choices[0]
        is_weather(Weather.model_validate_json(made.message.content))
        tool = {"type": "function", "function": {"name": "weather",
                                                 "parameters": Weather.model_json_schema()}}
        made = litellm.completion(**fields, tools=[tool], tool_choice="required").choices[0]
        is_weather(Weather.model_validate_json(made.message.tool_calls[0].function.arguments))


def check_framework_llm(binary):
    with serving_for(binary, "llm", "llm.default_plugins.openai_models") as (server, _, plugin):
        model = plugin.Chat("base", model_name="base", api_base=server.url + "/v1",
                            supports_schema=True)
        for stream in (False, True):
            made = model.prompt(ASK, schema=Weather, max_tokens=400, seed=1, key="none",
                                stream=stream)
            is_weather(Weather.model_validate_json(made.text()))


CHECKS = [check_framework_openai, check_framework_instructor, check_framework_pydantic_ai,
          check_framework_langchain, check_framework_llama_index, check_framework_litellm,
          check_framework_llm]


def main():
    wanted = [c for c in CHECKS if len(sys.argv) < 3 or c.__name__ in sys.argv[2:]]
    n_skipped = 0
    for check in wanted:
        try:
            run_checks([check], sys.argv[1])
        except Missing as missing:
            print("%s: skipped, %s is not installed" % (check.__name__, missing))
            n_skipped += 1
    sys.exit(77 if n_skipped == len(wanted) else 0)


if __name__ == "__main__":
    main()

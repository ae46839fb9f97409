#!/usr/bin/env python3
"""What an adapter's folder says of requests for it: a chat template of its own, and the ids that
end a text. Prompts are compared with ids of texts that were written out here by hand.
    check_adapter_chat.py SIDEPATH [CHECK...]"""

import json
import sys
import threading

import serving
from serving import complete, folder_of_adapters, get, post, run_checks, until

HELLO = [{"role": "user", "content": "Hello there"}]
# How the built-in form writes these messages; the adapters' own templates.
BUILT_IN = "<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n"
FIRST = "First: {{ messages[-1].content }} ->"
SECOND = "[{{ messages[-1].content }}]{{ eos_token }}"


def ids(server, text, parse_special=False):
    body = {"prompt": text, "add_special_tokens": False, "parse_special": parse_special}
    return post(server, "/tokenize", body).json["tokens"]


def chat(server, model, messages=None, **fields):
    body = {"messages": messages or HELLO, "max_tokens": 4, "temperature": 0,
            "return_token_ids": True, **fields}
    if model:
        body["model"] = model
    return post(server, "/v1/chat/completions", body)


def prompt_of(server, model, **fields):
    answer = chat(server, model, **fields)
    assert answer.status == 200, answer.bytes
    if fields.get("stream"):
        return answer.events()[0]["prompt_token_ids"]
    return answer.json["prompt_token_ids"]


def tokenized(server, model):
    answer = post(server, "/tokenize", {"model": model, "messages": HELLO})
    assert answer.status == 200, answer.bytes
    return answer.json["tokens"]


def load(server, name, path, **fields):
    return post(server, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path, **fields})


def unload(server, name):
    assert post(server, "/v1/unload_lora_adapter", {"lora_name": name}).status == 200


def said(server, name):
    return [line for line in server.log if line.startswith('sidepath serve: adapter "%s"' % name)]


def write_config(folder, **fields):
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))


def check_own_templates(binary):
    """An adapter's template makes its prompts, whether it is loaded yet or not; those of the base
    and of adapters without one stay the base's."""
    with folder_of_adapters(file="sqldoc", config="csource", plain="scripture") as top:
        (top / "file" / "chat_template.jinja").write_text(FIRST)
        write_config(top / "file", chat_template="not this one")
        write_config(top / "config", chat_template=[{"name": "default", "template": SECOND}],
                     eos_token={"content": "<|im_end|>"})
        with serving.serving(binary, "--adapter-dir", top, "--max-loras", 2) as server:
            built_in = ids(server, BUILT_IN, True)
            first = ids(server, "First: Hello there ->")
            second = ids(server, "[Hello there]<|im_end|>", True)
            for name, want in (("file", first), ("config", second), ("plain", built_in)):
                assert tokenized(server, name) == want, name  # which loads nothing
            listed = {a["name"]: a["state"] for a in get(server, "/v1/lora_adapters").json["data"]}
            assert set(listed.values()) == {"available"}, listed
            for _ in range(2):
                for name, want in (("file", first), ("base", built_in), ("config", second),
                                   ("plain", built_in), (None, built_in)):
                    assert prompt_of(server, name) == want, name
                    assert prompt_of(server, name, stream=True, n=2) == want, name
            assert tokenized(server, "file") == first
            assert tokenized(server, "base:config") == second
            assert prompt_of(server, "base:config") == second
            post(server, "/v1/lora/active", {"lora_name": "file"})
            assert prompt_of(server, None) == first and prompt_of(server, "base") == built_in
            unload(server, "file")
            assert prompt_of(server, None) == built_in
            assert (chat(server, "file").status, chat(server, "file").code) == \
                (404, "model_not_found")
            assert chat(server, "nobody").code == "model_not_found"
            assert len(said(server, "file")) == 2, said(server, "file")
            assert any("chat by its own chat_template.jinja" in s for s in said(server, "file"))
            assert any("chat by its own tokenizer_config.json" in s
                       for s in said(server, "config"))


def check_replaced_template(binary):
    """A version and its template go together: no answer has the one of one version and the other of
    another, while clients ask and others replace."""
    with folder_of_adapters(first="sqldoc", second="csource", none="scripture") as top:
        (top / "first" / "chat_template.jinja").write_text(FIRST)
        (top / "second" / "chat_template.jinja").write_text(SECOND)
        with serving.serving(binary, "--adapter-dir", top, "--max-loras", 4) as server:
            want = {"first": ids(server, "First: Hello there ->"),
                    "second": ids(server, "[Hello there]<|endoftext|>", True),
                    "none": ids(server, BUILT_IN, True)}
            digests = {}
            for name in want:
                assert load(server, "house", name, load_inplace=True).status == 200
                answer = chat(server, "house").json
                assert answer["prompt_token_ids"] == want[name], name
                digests[answer["adapter_digest"]] = want[name]
            stop, problems, counts = threading.Event(), [], {d: 0 for d in digests}

            def ask(stream):
                while not stop.is_set() and not problems:
                    answer = chat(server, "house", stream=stream)
                    made = answer.events()[0] if stream and answer.status == 200 else answer.json
                    if answer.status != 200 or \
                            made["prompt_token_ids"] != digests[made["adapter_digest"]]:
                        problems.append(answer.bytes)
                    else:
                        counts[made["adapter_digest"]] += 1

            threads = [threading.Thread(target=ask, args=(i % 2 == 0,)) for i in range(6)]
            for thread in threads:
                thread.start()
            for i in range(30):
                assert load(server, "house", list(want)[i % 3], load_inplace=True).status == 200
            stop.set()
            for thread in threads:
                thread.join()
            assert not problems, problems[0]
            assert min(counts.values()) > 0, counts
            unload(server, "house")
            assert load(server, "house", "none").status == 200
            assert prompt_of(server, "house") == want["none"]


def spoil(top):
    """Templates that cannot be used, by the name of their adapter: what they say, and the code."""
    (top / "syntax" / "chat_template.jinja").write_text("a\n{% for %}")
    (top / "unknown" / "chat_template.jinja").write_text("{{ messages|wordwrap }}")
    (top / "json" / "tokenizer_config.json").write_text('{"chat_template": ')
    write_config(top / "list", chat_template=[])
    (top / "link" / "chat_template.jinja").symlink_to("/etc/hostname")
    (top / "added" / "chat_template.jinja").write_text("<|new|>{{ messages[-1].content }}")
    (top / "added" / "added_tokens.json").write_text('{"<|new|>": 2048}')
    (top / "moved" / "chat_template.jinja").write_text("<|im_end|>{{ messages[-1].content }}")
    write_config(top / "moved", added_tokens_decoder={"7": {"content": "<|im_end|>"}})
    (top / "named" / "chat_template.jinja").write_text("{{ bos_token }}")
    write_config(top / "named", bos_token="<|begin|>")
    malformed, unsupported = "chat-template-malformed", "chat-template-unsupported"
    return {"syntax": ("line 2", malformed), "unknown": ("wordwrap", unsupported),
            "json": ("tokenizer_config.json", malformed), "list": ("default", malformed),
            "link": ("leads out", "unsafe-path"), "added": ("<|new|>", unsupported),
            "moved": ("<|im_end|>", unsupported), "named": ("<|begin|>", unsupported)}


def check_broken_templates(binary):
    """A template that cannot be used refuses chat with that adapter, by name, and nothing else; the
    base's never takes its place. Mended and loaded again, it is used."""
    names = ("syntax", "unknown", "json", "list", "link", "added", "moved", "named")
    with folder_of_adapters(**{name: "sqldoc" for name in names}) as top:
        broken = spoil(top)
        with serving.serving(binary, "--adapter-dir", top, "--max-loras", 2, "--adapter",
                             "start=%s" % (top / "syntax")) as server:
            want = complete(server, "start")
            built_in = ids(server, BUILT_IN, True)
            for name, (text, code) in {**broken, "start": broken["syntax"]}.items():
                for _ in range(2):
                    answer = chat(server, name)
                    status = 400 if code == "unsafe-path" else 501
                    assert (answer.status, answer.code) == (status, code), (name, answer.bytes)
                    assert text in answer.json["error"]["message"], (name, answer.bytes)
                    assert str(top) not in answer.json["error"]["message"], answer.bytes
                answer = post(server, "/tokenize", {"model": name, "messages": HELLO})
                assert answer.code == code, (name, answer.bytes)
                assert complete(server, name) == want, name
                until(lambda name=name, code=code: any(
                    "chat with it is refused" in s and s.endswith("[%s]" % code)
                    for s in said(server, name)), what="the warning of " + name)
                assert prompt_of(server, "base") == built_in
            (top / "syntax" / "chat_template.jinja").write_text(FIRST)
            assert load(server, "start", "syntax", load_inplace=True).status == 200
            assert prompt_of(server, "start") == ids(server, "First: Hello there ->")


def check_own_ends(binary):
    """generation_config.json: the adapter's ids end its texts in place of the base's."""
    with folder_of_adapters(plain="sqldoc", one="sqldoc", two="sqldoc", bad="sqldoc",
                            none="sqldoc") as top:
        with serving.serving(binary, "--adapter-dir", top, "--max-loras", 2) as server:
            tokens = complete(server, "plain", max_tokens=12, ignore_eos=True)[0]
        end = tokens[4]
        before = tokens[:tokens.index(end)]
        for name, value in (("one", end), ("two", [1, end]), ("bad", 1 << 20), ("none", None)):
            (top / name / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
        with serving.serving(binary, "--adapter-dir", top, "--max-loras", 2) as server:
            for _ in range(2):  # before it is loaded, and after
                for name in ("one", "two"):
                    got = complete(server, name, max_tokens=12)[0]
                    assert got in (before, before + [end]), (name, got, tokens)
                    assert complete(server, name, max_tokens=12, ignore_eos=True)[0] == tokens
                for name in ("plain", "none"):
                    assert complete(server, name, max_tokens=12, ignore_eos=True)[0] == tokens
                answer = chat(server, "one", max_tokens=40, logit_bias={str(end): 100})
                assert answer.json["choices"][0]["finish_reason"] == "stop", answer.bytes
                answer = chat(server, "plain", max_tokens=40, logit_bias={str(end): 100})
                assert answer.json["choices"][0]["finish_reason"] == "length", answer.bytes
            until(lambda: any("its own ids: 1, %d" % end in s for s in said(server, "two")))
            for path, body in (("/v1/completions", {"prompt": "The"}),
                               ("/v1/chat/completions", {"messages": HELLO})):
                answer = post(server, path, {"model": "bad", "max_tokens": 4, **body})
                assert (answer.status, answer.code) == (501, "generation-config-malformed"), \
                    answer.bytes
                assert post(server, path, {"model": "bad", "max_tokens": 4, "ignore_eos": True,
                                           **body}).status == 200
            until(lambda: any("requests for it are refused" in s for s in said(server, "bad")))


def check_sources_of_loads(binary):
    """Adapters of the start and of the state's file bring theirs; --chat-template is for all; a
    base without a template serves the chat of an adapter that has one."""
    with folder_of_adapters(house="sqldoc", plain="csource") as top:
        (top / "house" / "chat_template.jinja").write_text(FIRST)
        state, file = top.parent / (top.name + ".json"), top.parent / (top.name + ".jinja")
        file.write_text("All {{ messages[-1].content }}")
        flags = ("--adapter-dir", top, "--max-lora-rank", 16, "--state-file", state,
                 "--adapter", "start=%s" % (top / "house" / "adapter_model.safetensors"))
        try:
            with serving.serving(binary, *flags) as server:
                assert load(server, "kept", "house").status == 200
                first = ids(server, "First: Hello there ->")
                assert prompt_of(server, "start") == first
                until(lambda: state.exists() and "kept" in state.read_text())
            with serving.serving(binary, *flags) as server:
                assert prompt_of(server, "kept") == prompt_of(server, "start") == first
            with serving.serving(binary, *flags, "--chat-template", file) as server:
                want = ids(server, "All Hello there")
                for name in ("kept", "start", "base", "plain"):
                    assert prompt_of(server, name) == want, name
            with serving.serving(binary, *flags, "--chat-template", "none") as server:
                for name in ("kept", "start", "base", "plain"):
                    assert chat(server, name).code == "chat-template-missing", name
        finally:
            state.unlink(missing_ok=True)
            file.unlink(missing_ok=True)
        config = json.loads((serving.BASE / "tokenizer.json").read_text())
        for token in config["added_tokens"]:
            token["content"] = token["content"].replace("im_", "no_")
        with serving.model_without(tokenizer_json=config) as model, \
                serving.serving(binary, "--adapter-dir", top, model=model) as server:
            assert any("no chat" in line for line in server.log), server.log
            assert prompt_of(server, "house") == ids(server, "First: Hello there ->")
            for name in ("base", "plain", None):
                answer = chat(server, name)
                assert (answer.status, answer.code) == (501, "chat-template-missing"), answer.bytes


CHECKS = [check_own_templates, check_replaced_template, check_broken_templates, check_own_ends,
          check_sources_of_loads]

if __name__ == "__main__":
    run_checks([c for c in CHECKS if len(sys.argv) < 3 or c.__name__ in sys.argv[2:]], sys.argv[1])

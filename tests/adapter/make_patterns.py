#!/usr/bin/env python3
"""Writes patterns.json: what Python's `re` says of patterns as PEFT uses them.

    make_patterns.py > patterns.json

"suffix" is re.match(r"(.*\\.)?(KEY)$", path) of rank_pattern and alpha_pattern, "whole" is
re.fullmatch(KEY, path) of target_modules. A pattern of the list UNSUPPORTED must be refused by the
reader; Python's opinion of it does not matter."""

import json
import re

PATHS = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.3.self_attn.k_proj",
    "model.layers.13.self_attn.k_proj",
    "model.layers.31.mlp.gate_proj",
    "model.language_model.layers.2.mlp.experts.gate_up_proj",
    "model.layers.2.mlp.experts.17.down_proj",
    "model.layers.0.mlp.gate",
    "model.layers.0.mlp.gate.weight",
    "model.layers.0.mlp.shared_expert_gate",
    "model.layers.7.linear_attn.in_proj_qkvz",
    "lm_head",
    "model.embed_tokens",
    "q_proj",
    "xq_proj",
]

SUPPORTED = [
    "q_proj", "k_proj", "gate", "gate_proj", "layers.3.self_attn.k_proj", "layers.3.*.k_proj",
    "model.layers.0.self_attn.q_proj", "^model.layers.0.self_attn.q_proj", "q_proj$",
    r".*\.gate_up_proj", r".*gate_up_proj", r"layers\.(0|3)\.self_attn\..*", "q_proj|k_proj",
    r"(q|k)_proj", r"[qk]_proj", r"[^q]_proj", r"layers\.\d+\.mlp\.gate", r"layers\.\d\.mlp.*",
    r"layers\.1?3\..*", r"layers\.[0-9]{2}\..*", r"layers\.\d{1,}\.self_attn\.\w+",
    r"(?!.*mlp).*_proj", r"(?=.*mlp).*_proj", r"^(?!.*language_model).*(?:q_proj|down_proj)$",
    r"(?:.*?(?:self_attn|mlp).*?(?:q_proj|gate_proj).*?)", r".*\bgate\b", r"\w+", r"\w+\.\w+",
    r".+?proj", "lm_head", "embed_tokens", "(lm_head|embed_tokens)", "model", ".*", ".", "..proj",
    r"experts\.\d+\.down_proj", r"mlp\.experts\.(gate_up|down)_proj", "Q_PROJ", "proj", "",
    r".*\.(?:layers)\.([37])\..*", r"model\.layers\.(?:[0-9]|1[0-9])\.self_attn\.k_proj",
    r"\S+_proj", r"\D+", r".*_(proj|head)", r"(?:a|)q_proj", "x?q_proj", "x*q_proj", "[q-z]_proj",
    r"[\w.]+", r"[^.]+", r".*[.]q_proj", r"(((q)))_proj", "q_proj|", "|q_proj",
]

UNSUPPORTED = [
    r"(?i)Q_PROJ", r"(?P<name>q)_proj", r"(q)\1", r"(?<=x)q_proj", r"(?<!x)q_proj", r"\Aq_proj",
    r"q_proj\Z", r"\x71_proj", r"\p{L}+", r"\Qq_proj\E", "q_proj*+", "q++", "q??+", "a**", "*a",
    "(*ACCEPT)", "(?#comment)q", "(?>q)_proj", "(?|a|b)", "a{,3}", "a{3", "a{2}{3}", "a{2000}",
    "a{3,2}", "[]a]", "[a", "[[:alpha:]]", "[a&&b]", "[a--b]", "(a", "a)", "q\u00e9", "\\", "a\tb",
    "^*", "$?", r"\b+", "(?=a)*", "}", "]", r"[\b]", "(?P=name)", "(?1)", "(?R)", r"\R", r"\K",
    "a\n",
]


def rows():
    for key in SUPPORTED:
        yield {
            "key": key,
            "suffix": [bool(re.match(rf"(.*\.)?({key})$", path)) for path in PATHS],
            "whole": [bool(re.fullmatch(key, path)) for path in PATHS],
        }


print(json.dumps({"paths": PATHS, "patterns": list(rows()), "unsupported": UNSUPPORTED}, indent=1))

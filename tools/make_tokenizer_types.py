#!/usr/bin/env python3
"""Makes a small tokenizer.json of each served type, and goldens of it, with PyPI tokenizers 0.23.3.

    python3 tools/make_tokenizer_types.py                    # the files under tests/engine/data
    python3 tools/make_tokenizer_types.py --cases 10000 --seed 7 --out DIRECTORY
    build/release/tests/test_tokenizer_types DIRECTORY/*     # compares them

The tokenizers have the settings of the released files of their type and a vocabulary that is
trained on this repository's documents. With --out the files in the tree are taken as they are, and
cases are drawn for them. A golden has texts with their ids, with special tokens parsed ("ids") and
as plain text ("plain_ids", where it differs), what ids decode to ("decoded" and, without special
tokens, "skipped", where they differ from what comes before them), what the post-processor puts
around a text ("before", "after"), and random ids with their text ("sequences").
"""

import argparse
import glob
import json
import os
import random
import re
import unicodedata

import tokenizers
from make_tokenizer_golden import BY_HAND, GROUPS, WORDS
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = os.path.join(os.path.dirname(__file__), "..")
DATA = os.path.join(ROOT, "tests", "engine", "data", "tokenizers")
META = "\u2581"

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
          r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
          r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
          r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")

# Languages that the documents lack; each line is in the corpus a few times.
LINES = [
    "Der Zug fährt über die Brücke, während es schneit; größer als gestern.",
    "L'été dernier, les élèves ont étudié près de la forêt, où il fait très beau.",
    "El niño comió una manzana y después salió a jugar con su perro pequeño.",
    "Поезд идёт через мост, а снег падает на крыши старого города.",
    "今天天气很好，我们去公园散步。日本語の文章もここにあります。カタカナも。",
    "오늘은 날씨가 좋아서 공원에 갑니다.", "اللغة العربية جميلة جدا وهي لغة قديمة.",
    "मैं आज घर जा रहा हूँ और कल वापस आऊँगा।",
    "HTTPServer XMLHttpRequest camelCaseName SomeLongName",
]
MISSING = "".join(chr(c) for c in (0x10FFFF, 0xF0000, 0x50000, 0x07C0, 0x0700, 0x0100))


def special(content):
    return tokenizers.AddedToken(content, special=True, normalized=False)


def template(before, after, ids):
    pieces = lambda name: [{"SpecialToken": {"id": t, "type_id": 0}} for t in before] + [
        {"Sequence": {"id": name, "type_id": 0}}] + [
        {"SpecialToken": {"id": t, "type_id": 0}} for t in after]
    return {"type": "TemplateProcessing", "single": pieces("A"),
            "pair": pieces("A") + pieces("B"),
            "special_tokens": {t: {"id": t, "ids": [ids[t]], "tokens": [t]}
                               for t in {*before, *after}}}


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
              "use_regex": False}
DIGITS = {"type": "Digits", "individual_digits": True}
BYTE_LEVEL_REGEX = dict(BYTE_LEVEL, use_regex=True)


def split(pattern):
    return {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
        BYTE_LEVEL]}


def metaspace(scheme, splits):
    return {"type": "Metaspace", "replacement": META, "prepend_scheme": scheme, "split": splits}


REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": META}
PREPEND = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": META}, REPLACE]}
SPELLED = [{"type": "Replace", "pattern": {"String": META}, "content": " "},
           {"type": "ByteFallback"}, {"type": "Fuse"}]
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
CHAT = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
META_TOKENS = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]

# name: what the pre-tokenizer is, special tokens, what stands around a text, the rest.
TYPES = {
    "qwen2": dict(pre=split(QWEN2), specials=CHAT, normalizer={"type": "NFC"}),
    "llama3": dict(pre=split(LLAMA3), around=(["<|begin_of_text|>"], []), ignore_merges=True,
                   specials=["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>",
                             "<|end_header_id|>", "<|eot_id|>"]),
    "smollm2": dict(pre={"type": "Sequence", "pretokenizers": [DIGITS, BYTE_LEVEL_REGEX]},
                    specials=CHAT, drops=True),
    "smollm3": dict(pre=split(LLAMA3), specials=CHAT, ignore_merges=True, around=([], [])),
    "tekken": dict(pre=split(TEKKEN), specials=META_TOKENS, around=(["<s>"], ["</s>"]),
                   ignore_merges=True),
    "gpt2": dict(pre=BYTE_LEVEL_REGEX, specials=CHAT),
    "mistral_prepend": dict(normalizer=PREPEND, specials=META_TOKENS[:3], around=(["<s>"], []),
                            strip=True),
    "mistral_metaspace": dict(pre=metaspace("first", False), specials=META_TOKENS,
                              around=(["<s>"], []), strip=True),
    "metaspace_pieces": dict(pre=metaspace("always", True), specials=META_TOKENS,
                             around=(["<s>"], []), strip=False),
}


def corpus():
    texts = LINES * 6
    for path in sorted(glob.glob(os.path.join(ROOT, "docs", "*.md"))):
        with open(path, encoding="utf-8") as file:
            texts += file.read().split("\n")
    return texts


def trained(pre, **options):
    tokenizer = Tokenizer(models.BPE(**options.pop("model", {})))
    tokenizer.pre_tokenizer = pre
    tokenizer.train_from_iterator(corpus(), trainers.BpeTrainer(show_progress=False, **options))
    return json.loads(tokenizer.to_str())["model"]


def byte_level_model(name, spec):
    pre = {"tekken": pre_tokenizers.Split(Regex(TEKKEN), "isolated")}.get(
        name, pre_tokenizers.Split(Regex(LLAMA3), "isolated"))
    alphabet = [] if spec.get("drops") else pre_tokenizers.ByteLevel.alphabet()
    bytes_ = pre_tokenizers.ByteLevel(False, use_regex=False)
    model = trained(pre_tokenizers.Sequence([pre, bytes_]), vocab_size=420,
                    initial_alphabet=alphabet)
    model["ignore_merges"] = spec.get("ignore_merges", False)
    if model["ignore_merges"]:  # tokens that no merge makes, as Llama 3 has them
        model["merges"] = [m for i, m in enumerate(model["merges"]) if i % 5 != 3]
    return model


def spelled_model():
    bytes_ = ["<0x%02X>" % b for b in range(256)]
    model = trained(pre_tokenizers.Metaspace(META, "always", True), vocab_size=490,
                    limit_alphabet=110, special_tokens=["<unk>", "<s>", "</s>", *bytes_],
                    model=dict(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    for left in (META, META * 2):
        model["vocab"][left * 2] = len(model["vocab"])
        model["merges"].append([left, left])
    return model


def make(name, spec):
    spelled = spec.get("pre") is None or spec["pre"]["type"] == "Metaspace"
    model = spelled_model() if spelled else byte_level_model(name, spec)
    ids = dict(model["vocab"])
    # A token that is not special, in two kinds: looked for before and behind the normaliser.
    added = [(t, True, False) for t in spec["specials"]] + [("<tool>", False, True),
                                                            ("<think>", False, False)]
    for content, _, _ in added:
        ids.setdefault(content, len(ids))
    around = spec.get("around")
    post = template(*around, ids) if around else None
    if name == "llama3":
        post = {"type": "Sequence", "processors": [dict(BYTE_LEVEL, use_regex=True), post]}
    decoder = dict(BYTE_LEVEL, add_prefix_space=True, use_regex=True)
    if spelled:
        decoder = {"type": "Sequence", "decoders": SPELLED + [STRIP] * spec["strip"]}
    return {"version": "1.0", "truncation": None, "padding": None,
            "added_tokens": sorted(({"id": ids[c], "content": c, "single_word": False,
                                     "lstrip": False, "rstrip": False, "normalized": n,
                                     "special": s} for c, s, n in added), key=lambda t: t["id"]),
            "normalizer": spec.get("normalizer"), "pre_tokenizer": spec.get("pre"),
            "post_processor": post, "decoder": decoder, "model": model}


# --- Cases ------------------------------------------------------------------------------------

HOSTILE = [
    META, META + META, " " + META, META + " ", "<0x41>", "<0xE4>", "a" + META + "b", META + "a",
    "A\u4e2dB", "HTTPServer", "iPhone15Pro", "\u01c5\u02b0\u00aa", "x/y//z/\n/", "1 2  3   4",
    "12345678", "  1", " 1", "\n1", "a  1", "'S's'LL'll", *MISSING, "a" + MISSING[0] + "b",
    "\u00e9\u00e9", "\u07c0\u07c1", "<tool>", " <tool>", "<tool> ", "<think>", "<think> x", "",
]


def texts_of(spec, source, n):
    groups = GROUPS + [META + " " + META + "ab ", MISSING,
                       "ABCdeFGhi\u0416\u0436\u01c5\u02b0\u00aa"]
    words = WORDS + [w for w in HOSTILE if w] + spec["specials"] * 3 + [
        t[:-1] for t in spec["specials"]]
    for text in (HOSTILE + spec["specials"] + BY_HAND)[:n // 2]:
        yield text
    for _ in range(n - min(n // 2, len(HOSTILE) + len(spec["specials"]) + len(BY_HAND))):
        parts = []
        for _ in range(source.randint(1, 8)):
            choice = source.random()
            if choice < 0.3:
                parts.append(source.choice(words))
            elif choice < 0.4:
                parts.append(any_character(source) * source.randint(1, 3))
            elif choice < 0.5:
                line = source.choice(LINES)
                begin = source.randrange(len(line))
                parts.append(line[begin:begin + source.randint(1, 20)])
            else:
                group = source.choice(groups)
                parts.append("".join(source.choice(group) for _ in range(source.randint(1, 5))))
        yield "".join(parts)


def any_character(source):
    while True:
        character = chr(source.randrange(0x110000 if source.random() < 0.3 else 0x3100))
        # Assigned and stable in NFC, whatever the version.
        if (unicodedata.category(character) not in ("Cn", "Cs")
                and not unicodedata.combining(character)
                and unicodedata.normalize("NFD", character) == character):
            return character


def text_case(tokenizer, text, around):
    case = {"text": text}
    tokenizer.encode_special_tokens = False
    case["ids"] = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text).ids == around[0] + case["ids"] + around[1]
    tokenizer.encode_special_tokens = True
    plain = tokenizer.encode(text, add_special_tokens=False).ids
    if plain != case["ids"]:
        case["plain_ids"] = plain
    return dict(case, **decoded(tokenizer, case["ids"], text))


def decoded(tokenizer, ids, text):
    made = {}
    plain = tokenizer.decode(ids, skip_special_tokens=False)
    skipped = tokenizer.decode(ids, skip_special_tokens=True)
    if plain != text:
        made["decoded"] = plain
    if skipped != plain:
        made["skipped"] = skipped
    return made


def is_mixed(tokenizer, ids, specials):
    """Whether bytes in a row, that are spelled, hold characters and more: the known difference."""
    words = [tokenizer.id_to_token(i) or "" for i in ids]
    for kept in (words, [w for w in words if w not in specials]):
        text = "".join(w if re.fullmatch("<0x[0-9A-F]{2}>", w) else "|" for w in kept if w)
        for run in re.findall("(?:<0x..>)+", text):
            run = bytes.fromhex(re.sub("<0x|>", "", run))
            if any(run[i:j].decode("utf-8", "ignore") for i in range(len(run))
                   for j in range(i + 1, i + 5)) and "\ufffd" in run.decode("utf-8", "replace"):
                return True
    return False


def sequence_case(tokenizer, source, spec):
    n = tokenizer.get_vocab_size()
    while True:
        ids = [source.randrange(300 if source.random() < 0.6 else n + 4)
               for _ in range(source.randint(1, 10))]
        if not is_mixed(tokenizer, ids, spec["specials"]):
            break
    case = {"ids": ids}
    case.update(decoded(tokenizer, ids, None))
    case.setdefault("skipped", case["decoded"])
    return case


def golden(tokenizer, spec, source, n):
    around = [[tokenizer.token_to_id(t) for t in side] for side in spec.get("around", ([], []))]
    return {"made_by": f"tools/make_tokenizer_types.py, tokenizers {tokenizers.__version__}",
            "before": around[0], "after": around[1],
            "cases": [text_case(tokenizer, t, around) for t in texts_of(spec, source, n)],
            "sequences": [sequence_case(tokenizer, source, spec) for _ in range(n // 4)]}


def write_json(path, value, lists):
    dump = lambda v: json.dumps(v, separators=(",", ":"))
    with open(path, "w", encoding="ascii") as file:
        file.write("{" + ",\n".join(
            dump(k) + ":" + ("[\n" + ",\n".join(map(dump, v)) + "\n]" if k in lists else dump(v))
            for k, v in value.items()) + "}\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=300, help="texts of each type")
    parser.add_argument("--seed", type=int, default=14)
    parser.add_argument("--out", help="write copies and their cases here; train nothing")
    arguments = parser.parse_args()
    for name, spec in TYPES.items():
        directory = os.path.join(arguments.out or DATA, name)
        os.makedirs(directory, exist_ok=True)
        if arguments.out:
            with open(os.path.join(DATA, name, "tokenizer.json"), encoding="ascii") as file:
                made = json.load(file)
        else:
            made = make(name, spec)
        write_json(os.path.join(directory, "tokenizer.json"), made, ["added_tokens"])
        tokenizer = Tokenizer.from_file(os.path.join(directory, "tokenizer.json"))
        cases = golden(tokenizer, spec, random.Random(f"{name} {arguments.seed}"), arguments.cases)
        write_json(os.path.join(directory, "golden.json"), cases, ["cases", "sequences"])


if __name__ == "__main__":
    main()

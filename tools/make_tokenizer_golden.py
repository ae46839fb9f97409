#!/usr/bin/env python3
"""Writes tests/engine/data/tokenizer_golden.json with the reference tokenizer (PyPI tokenizers).

    python3 tools/make_tokenizer_golden.py

Cases for demo/base/tokenizer.json: texts with their ids, with special tokens parsed ("ids") and as
plain text ("plain_ids", only where it differs), the text decoded again ("decoded", only where it
differs from the text; "skipped" without special tokens, only where it differs from "decoded"), and
random ids with their text, most of them no UTF-8 ("sequences"). Made with tokenizers 0.23.3, whose
character classes are Unicode 16 and whose NFC is Unicode 9: the random texts use old characters.
"""

import json
import os
import random

import tokenizers

ROOT = os.path.join(os.path.dirname(__file__), "..")
OUTPUT = os.path.join(ROOT, "tests", "engine", "data", "tokenizer_golden.json")

BY_HAND = [
    "\x00", "a\x00b", "'\x00", "\u180e", "a\u180eb", " \u180e ", "\u180e\n",
    "it\u017f it'\u017f '\u017fe", "'", "''", "'s", "'S", "'t'T'm'M'd'D",
    "'re'RE'rE've'VE'll'LL'lL", "'r", "'v", "'l", "'rx", "'lx", "o'clock o'er 'twas 'em",
    "DON'T I'LL we'Re", "'\u212a", "x's's's", " 's", "\n's", "''s", " ", "  ", "   a", " a",
    "  a", "   ", "a ", "a  ", "a   b", "\t", "\t\t", "\ta", " \ta", "\t a", "a\t\tb", "\n", "\r",
    "\r\n", "\r\n\r\n", " \n", "\n ", "\n  a", " \n \n a", "a\n", "a \n", "a\n\nb",
    "a\r\n  b\r\n", "\u00a0", "\u00a0a", " \u00a0a", "\u00a0 a", "\u3000\u3000x", "\u2028\u2029",
    "x\u2028y", "\x85", "a\x85b", "\x0b\x0c", "\x1c\x1d\x1e\x1f", "a\x1cb", "\u200b", "a\u200bb",
    "\ufeffx", "\u2060", "!", "!!", " !", " !\n", "!\n\n", "!\r\n!", "! \n", "?!.\n\n  x", "...a",
    " ...a", "(a)", "$5", "-1", "a-b_c", "x1y2", "12", "\u0661\u0662\u0663", "\u00bd\u2153",
    "\u2160\u216b", "1\u0301", "x\u00b2", "3rd 4th",
    "\u4e2d\u6587\u5b57\u7b26 \u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4", "\u3042\u30a2\uff71",
    "\u1112\u1161\u11ab\u1100\u116e\u11a8",
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0651\u0629\u060c \u0661\u0662",
    "\u05e9\u05b8\u05c1\u05dc\u05d5\u05b9\u05dd", "\u0939\u093f\u0928\u094d\u0926\u0940",
    "\u0e44\u0e17\u0e22", "e\u0301", "\u00e9", "a\u0323\u0302", "a\u0302\u0323",
    "\u1e69 s\u0323\u0307 s\u0307\u0323", "\u212b \u2126 \u2000x\u2001", "\u0344", "\u0958",
    "\ufb01", "\u1e9b\u0323", "\uf900\ufa0e", "\u0301", "\u0301\u0301a", " \u0301", "\n\u0301",
    "\U0001d15e", "\U0001f600", "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\U0001f44d\U0001f3fd", "\u2764\ufe0f", "\U0001f1e9\U0001f1ea", "a\U0001f600b",
    "\U00010400\U00010428", "\U0001d7d8", "\U0010ffff", "\ue000", "\uffff", "\ufffd", "\u0378",
    "\U000e0001", "<|endoftext|>", "<|im_start|>user\nhi<|im_end|>\n", "a<|endoftext|>b",
    "<|im_start|", "<|im_start|><|im_end|>", "<<|im_end|>>", "<|im_<|im_end|>end|>",
    "e<|im_end|>\u0301", " <|endoftext|> ", "<|IM_END|>", "<|endoftext|", "a" * 300, " " * 300,
    " " * 300 + "x", "\n" * 300, "!" * 300, "1" * 40, "ab" * 150, "\u0301" * 40, "e\u0301" * 40,
    "the " * 60, "\r\n" * 50, " \n" * 50, "\t" * 33 + "x", "\u3000" * 33 + "x",
    "=" * 80 + "\n" + "-" * 80 + "\n",
]

GROUPS = [
    "abcdefghijklmnopqrstuvwxyz", "ABCDELMRSTVW'''",
    "  \t\n\r\r\n\u00a0\u3000\u2028\x0b\x85\u180e", "0123456789\u0663\u00bd",
    ".,;!?-()[]{}<>|/\\\"'=+*&^%$#@~`",
    "e\u0301a\u0323o\u0302\u0308u\u0327\u1100\u1161\u11a8\uac00\u212b",
    "\u0627\u0628\u062a\u0640\u064b\u0651\u0670", "\u4e00\u4e2d\u6587\u3042\u30ab\uff01\u3001",
    "\u0915\u094d\u0937\u093f\u0903", "\u200d\U0001f468\U0001f469\ufe0f\U0001f3fb\U0001f600",
    "\u017f\u0131\u0130\u00df\u212a\ufb06", "\u05d0\u05b0\u05bc\u05d1",
]

WORDS = [
    "'s", "'S", "'\u017f", "'re", "'LL", "<|endoftext|>", "<|im_end|>", "<|im_", " the", " and ",
    "\n\n", "    ",
]


def random_text(source):
    parts = []
    for _ in range(source.randint(1, 8)):
        if source.random() < 0.25:
            parts.append(source.choice(WORDS))
        else:
            group = source.choice(GROUPS)
            parts.append("".join(source.choice(group) for _ in range(source.randint(1, 5))))
    return "".join(parts)


def text_case(tokenizer, text):
    case = {"text": text}
    tokenizer.encode_special_tokens = False
    case["ids"] = tokenizer.encode(text, add_special_tokens=False).ids
    tokenizer.encode_special_tokens = True
    plain = tokenizer.encode(text, add_special_tokens=False).ids
    if plain != case["ids"]:
        case["plain_ids"] = plain
    decoded = tokenizer.decode(case["ids"], skip_special_tokens=False)
    if decoded != text:
        case["decoded"] = decoded
    skipped = tokenizer.decode(case["ids"], skip_special_tokens=True)
    if skipped != decoded:
        case["skipped"] = skipped
    return case


def sequence_case(tokenizer, source):
    n_ids = tokenizer.get_vocab_size()
    # The first 256 ids are single bytes: parts of characters, whole ones, and what is neither.
    ids = [source.randrange(100, 256) if source.random() < 0.7 else source.randrange(n_ids + 8)
           for _ in range(source.randint(1, 12))]
    return {"ids": ids, "decoded": tokenizer.decode(ids, skip_special_tokens=False),
            "skipped": tokenizer.decode(ids, skip_special_tokens=True)}


def main():
    tokenizer = tokenizers.Tokenizer.from_file(os.path.join(ROOT, "demo", "base", "tokenizer.json"))
    source = random.Random(20)
    texts = BY_HAND + [random_text(source) for _ in range(500)]
    golden = {
        "made_by": f"tools/make_tokenizer_golden.py, tokenizers {tokenizers.__version__}",
        "cases": [text_case(tokenizer, text) for text in texts],
        "sequences": [sequence_case(tokenizer, source) for _ in range(200)],
    }
    with open(OUTPUT, "w", encoding="ascii") as file:
        file.write('{"made_by": %s,\n"cases": [\n' % json.dumps(golden["made_by"]))
        file.write(",\n".join(json.dumps(case, separators=(",", ":")) for case in golden["cases"]))
        file.write('\n],\n"sequences": [\n')
        file.write(",\n".join(json.dumps(c, separators=(",", ":")) for c in golden["sequences"]))
        file.write("\n]}\n")


if __name__ == "__main__":
    main()

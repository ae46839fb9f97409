#!/usr/bin/env python3
"""Writes a tokenizer.json of a real vocabulary, for benchmarks of what depends on its size.

    pip download --no-deps dashscope
    unzip -p dashscope-*.whl dashscope/resources/qwen.tiktoken > qwen.tiktoken
    bench/tokenizer_of_tiktoken.py qwen.tiktoken demo/base/tokenizer.json OUT
    make_checkpoint --preset 0.6b --dtype bf16 --tokenizer OUT DIR

The frame (normalizer, splits, special tokens) is that of the second file; the vocabulary and the
merges are the first's: each token is merged from the two parts that its lower ranks make of it.
"""

import base64
import json
import sys


def byte_letters():
    """The letters that stand for bytes in a byte-level vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return {**{b: chr(b) for b in plain}, **{b: chr(256 + i) for i, b in enumerate(rest)}}


def parts(token, rank_of):
    """The last two pieces of a token, merged by ranks below its own."""
    pieces = [token[i:i + 1] for i in range(len(token))]
    while len(pieces) > 2:
        ranks = [rank_of.get(pieces[i] + pieces[i + 1], 1 << 30) for i in range(len(pieces) - 1)]
        at = ranks.index(min(ranks))
        pieces[at:at + 2] = [pieces[at] + pieces[at + 1]]
    return pieces


def main():
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    letters = byte_letters()
    with open(sys.argv[1], "rb") as file:
        tokens = [base64.b64decode(line.split()[0]) for line in file if line.strip()]
    with open(sys.argv[2]) as file:
        frame = json.load(file)
    rank_of = {token: rank for rank, token in enumerate(tokens)}
    spell = lambda token: "".join(letters[b] for b in token)
    frame["model"]["vocab"] = {spell(token): rank for token, rank in rank_of.items()}
    frame["model"]["merges"] = [[spell(p) for p in parts(token, rank_of)]
                                for token in tokens if len(token) > 1]
    for i, added in enumerate(frame["added_tokens"]):
        added["id"] = len(tokens) + i
    with open(sys.argv[3], "w") as file:
        json.dump(frame, file)
    print(len(tokens), "tokens")


main()

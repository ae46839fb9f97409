#!/usr/bin/env python3
"""Random text grammars: what is drawn from them, and what is not, by a recogniser of this file's
own, which reads the tree that each text was written from and tries every way.
    check_ebnf.py SCHEMA_WALK [GRAMMARS]"""

import json
import random
import subprocess
import sys

NAMES = ["root", "a", "b-c", "d_1", "e.f"]
SIGNS = list("ab()x[\n-^]\"\\") + ["\u00e9", "\u0800", "\U0001F600"]
MOST = {"*": (0, None), "+": (1, None), "?": (0, 1)}


# ---- trees: ("set", inverted, ranges), ("text", str), ("rule", name), ("seq", [..]), ("or", [..]),
# ---- ("times", item, least, most)

def make_set(rng):
    if rng.randrange(6) == 0:
        return ("set", True, [])
    ranges = []
    for _ in range(rng.randrange(1, 3)):
        low, high = sorted(ord(rng.choice(SIGNS)) for _ in range(2))
        ranges.append((low, high if rng.randrange(2) else low))
    return ("set", rng.randrange(4) == 0, ranges)


def make_item(rng, depth, names):
    kind = rng.randrange(9 if depth else 5)
    if kind < 2:
        return ("text", "".join(rng.choice(SIGNS) for _ in range(rng.choice([0, 1, 1, 1, 2, 3]))))
    if kind == 2:
        return make_set(rng)
    if kind < 5:
        return ("rule", rng.choice(names))
    if kind < 7:
        return make_choice(rng, depth - 1, names)
    low = rng.randrange(3)
    least, most = rng.choice([(0, None), (1, None), (0, 1), (low, low), (low, None),
                              (low, low + rng.randrange(3))])
    return ("times", make_item(rng, depth - 1, names), least, most)


def make_choice(rng, depth, names):
    return ("or", [("seq", [make_item(rng, depth, names)
                            for _ in range(rng.choice([0, 1, 1, 2, 2, 3]))])
                   for _ in range(rng.choice([1, 2, 2, 3]))])


def make_grammar(rng):
    names = NAMES[:rng.randrange(1, len(NAMES) + 1)]
    rules = {}
    for name in names:
        tree = make_choice(rng, 2, names)
        if rng.randrange(2):  # a way out, or most would never end
            tree[1].append(("seq", [("text", rng.choice(SIGNS))]))
        rules[name] = tree
    return rules


# ---- trees as texts -----------------------------------------------------------------------------

def write_sign(rng, code, special):
    short = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
    sign = chr(code)
    if sign in special:
        return short.get(sign, "\\" + sign)
    way = rng.randrange(5)
    if way == 0 and code < 256:
        return "\\x%02X" % code
    if way == 1 and code < 65536:
        return "\\u%04x" % code
    if way == 2:
        return "\\U%08x" % code
    return sign


def blank(rng, least=0):
    return rng.choice(["", " ", " ", "  ", "\n\t", " # a \"note\" ::= |\n"][least:])


def write_set(rng, inverted, ranges):
    if inverted and not ranges:
        return "."
    text = ""
    for low, high in ranges:
        text += write_sign(rng, low, "]\\^-")
        if high > low:
            text += "-" + write_sign(rng, high, "]\\^-")
    return "[" + "^" * inverted + text + "]"


def write(rng, tree):
    kind = tree[0]
    if kind == "text":
        return '"' + "".join(write_sign(rng, ord(c), '"\\') for c in tree[1]) + '"'
    if kind == "set":
        return write_set(rng, tree[1], tree[2])
    if kind == "rule":
        return tree[1] + " "
    if kind == "or":
        return "(" + write_ways(rng, tree) + ")"
    item, least, most = tree[1:]
    for sign, counts in MOST.items():
        if counts == (least, most) and rng.randrange(3):
            return write_operand(rng, item) + blank(rng) + sign
    return "%s{%s%d%s}" % (write_operand(rng, item), blank(rng), least,
                           "" if least == most else "," if most is None else ", %d" % most)


def write_operand(rng, item):
    return "(" + write(rng, item) + ")" if item[0] == "times" else write(rng, item)


def write_ways(rng, tree):
    return (blank(rng) + "|").join(
        blank(rng).join([""] + [write(rng, item) for item in way[1]]) for way in tree[1])


def write_grammar(rng, rules):
    names = list(rules)
    rng.shuffle(names)
    return blank(rng) + blank(rng, 1).join(
        name + blank(rng) + "::=" + write_ways(rng, rules[name]) for name in names) + blank(rng)


# ---- which texts are in it ----------------------------------------------------------------------

def takes(tree, code):
    return any(low <= code <= high for low, high in tree[2]) != tree[1]


class Recogniser:
    """Ends of each rule at each place, which grow until nothing changes."""

    def __init__(self, rules, text):
        self.rules, self.text = rules, text
        self.known = {}
        self.wanted = [("root", 0)]

    def ends(self, tree, at):
        kind = tree[0]
        if kind == "text":
            return {at + len(tree[1])} if self.text.startswith(tree[1], at) else set()
        if kind == "set":
            return {at + 1} if at < len(self.text) and takes(tree, ord(self.text[at])) else set()
        if kind == "rule":
            if (tree[1], at) not in self.known:
                self.known[tree[1], at] = set()
                self.wanted.append((tree[1], at))
            return self.known[tree[1], at]
        if kind == "or":
            return set().union(*[self.ends(way, at) for way in tree[1]])
        if kind == "seq":
            places = {at}
            for item in tree[1]:
                places = set().union(*[self.ends(item, place) for place in places])
            return places
        return self.times(tree[1], tree[2], tree[3], at)

    def times(self, item, least, most, at):
        places = {at}
        for _ in range(least):
            places = set().union(*[self.ends(item, place) for place in places])
        found, n = set(places), least
        while places and n != most:
            places = set().union(*[self.ends(item, place) for place in places]) - found
            found |= places
            n += 1
        return found

    def run(self):
        self.known["root", 0] = set()
        changed = True
        while changed:
            changed = False
            n = len(self.wanted)
            for name, at in list(self.wanted):
                ends = self.ends(self.rules[name], at)
                if not ends <= self.known[name, at]:
                    self.known[name, at] |= ends
                    changed = True
            changed |= len(self.wanted) > n
        return len(self.text) in self.known["root", 0]


# ---- what has to be refused ---------------------------------------------------------------------

def shortest(rules):
    """Of each rule the lengths 0 and more that it can have: a set of False (none) and True."""
    found = {name: set() for name in rules}

    def lengths(tree):
        kind = tree[0]
        if kind == "text":
            return {bool(tree[1])}
        if kind == "set":
            return {True}
        if kind == "rule":
            return found[tree[1]]
        if kind == "or":
            return set().union(*[lengths(way) for way in tree[1]])
        if kind == "seq":
            made = {False}
            for item in tree[1]:
                made = {a or b for a in made for b in lengths(item)}
            return made
        item, least, most = lengths(tree[1]), tree[2], tree[3]
        made = {False} if least == 0 or item else set()
        if most != 0:
            made |= item
        if least > 0 and False not in item:
            made -= {False}
        return made

    while True:
        made = {name: lengths(rules[name]) for name in rules}
        if made == found:
            return found
        found = made


def has_left_recursion(rules, empty):
    """Whether a rule can come back to itself without a character, directly or not."""
    def firsts(tree):  # (rules at the beginning, whether it may be empty)
        kind = tree[0]
        if kind == "text":
            return set(), not tree[1]
        if kind == "set":
            return set(), False
        if kind == "rule":
            return {tree[1]}, tree[1] in empty
        if kind == "or":
            made = [firsts(way) for way in tree[1]]
            return set().union(*[m[0] for m in made]), any(m[1] for m in made)
        if kind == "seq":
            names = set()
            for item in tree[1]:
                made, may = firsts(item)
                names |= made
                if not may:
                    return names, False
            return names, True
        made, may = firsts(tree[1])
        return (made, may or tree[2] == 0) if tree[3] != 0 else (set(), True)

    calls = {name: firsts(rules[name])[0] for name in rules}
    for name in rules:
        seen, work = set(), [name]
        while work:
            for called in calls[work.pop()]:
                if called == name:
                    return True
                if called not in seen:
                    seen.add(called)
                    work.append(called)
    return False


# ---- texts --------------------------------------------------------------------------------------

def derive(rng, rules, tree, budget):
    """A text of the tree, or None where the budget is over."""
    if budget[0] <= 0:
        return None
    budget[0] -= 1
    kind = tree[0]
    if kind == "text":
        return tree[1]
    if kind == "set":
        fit = [sign for sign in SIGNS if takes(tree, ord(sign))]
        return rng.choice(fit) if fit else None
    if kind == "rule":
        return derive(rng, rules, rules[tree[1]], budget)
    if kind == "or":
        return derive(rng, rules, rng.choice(tree[1]), budget)
    items = tree[1] if kind == "seq" else [tree[1]] * (
        tree[2] + rng.randrange(3 if tree[3] is None else tree[3] - tree[2] + 1))
    made = [derive(rng, rules, item, budget) for item in items]
    return None if None in made else "".join(made)


def texts_of(rng, rules):
    texts = ["", "".join(rng.choice(SIGNS) for _ in range(rng.randrange(1, 6)))]
    for _ in range(8):
        text = derive(rng, rules, rules["root"], [60])
        if text is None or len(text) > 30:
            continue
        texts.append(text)
        at = rng.randrange(len(text) + 1)
        texts.append(text[:at] + rng.choice(["", rng.choice(SIGNS)]) + text[at + 1:])
        texts.append(text[:at])
    return texts


def walk(binary, seed, lines, outputs):
    done = subprocess.run([binary, str(outputs), "30", str(seed)], check=True, text=True,
                          input="".join(json.dumps(line) + "\n" for line in lines),
                          capture_output=True)
    return [json.loads(line) for line in done.stdout.split("\n") if line]


def check_refusal(rules, made, counts):
    lengths = shortest(rules)
    empty = {name for name in rules if False in lengths[name]}
    recursive = has_left_recursion(rules, empty)
    if made.get("code") == "grammar-unsupported":
        assert recursive and "left recursion" in made["text"], (rules, made)
        counts["left recursion"] += 1
    elif "code" in made:
        assert made["code"] == "grammar-unsatisfiable", (rules, made)
        assert True not in lengths["root"], (rules, made)
        counts["never"] += 1
    else:
        assert True in lengths["root"], rules
        counts["left recursion that loops"] += recursive


def main():
    binary, n = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 250
    rng = random.Random(n)
    grammars = [make_grammar(rng) for _ in range(n)]
    lines = [{"grammar": write_grammar(rng, rules), "texts": texts_of(rng, rules)}
             for rules in grammars]
    counts = dict.fromkeys(("left recursion", "left recursion that loops", "never", "drawn", "in",
                            "out", "left out"), 0)
    for rules, line, made in zip(grammars, lines, walk(binary, n, lines, 4), strict=True):
        check_refusal(rules, made, counts)
        for text in made.get("outputs", []):
            assert len(text) > 60 or Recogniser(rules, text).run(), (line["grammar"], text)
            counts["drawn"] += len(text) <= 60
        for text, has in zip(line["texts"], made.get("has", [])):
            found = Recogniser(rules, text).run()
            # Only where a state had more than 512 alternatives may a text be missing.
            assert found == has or (found and made["left_out"]), (line["grammar"], text, has)
            counts["in" if has else "left out" if found else "out"] += 1
    print(n, "grammars:", counts)
    assert min(counts["drawn"], counts["in"], counts["out"]) > n / 2, counts
    assert counts["left out"] * 500 < counts["in"], counts
    assert counts["left recursion"] > 0 and counts["left recursion that loops"] > 0, counts


if __name__ == "__main__":
    main()

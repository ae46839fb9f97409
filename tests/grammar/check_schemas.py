#!/usr/bin/env python3
"""Random schemas of the claimed keywords: what is drawn from their grammars parses and is valid by
PyPI's jsonschema (2020-12, with formats); and what jsonschema refuses is in no grammar.
    check_schemas.py SCHEMA_WALK [SCHEMAS]"""

import copy
import json
import os
import random
import subprocess
import sys
from pathlib import Path

VENV = Path(__file__).resolve().parents[2] / "build/client-venv/bin/python"

try:
    import jsonschema
except ImportError:
    if VENV.is_file() and Path(sys.prefix) != VENV.parents[1]:
        os.execv(VENV, [str(VENV), "-B"] + sys.argv)
    print("the jsonschema package is not installed: tools/install-packages.sh client")
    sys.exit(77)

NAMES = ["a", "b", "ab", "name", "x y", "\u00e9t\u00e9", "q\"", "z/~"]
WORDS = ["", "a", "ab", "on", "\u00e9", "q\"", "the\nend"]
FORMATS = ["date", "time", "date-time", "ipv4", "uuid", "email"]
PATTERNS = ["^a+$", "b", "^[a-f0-9]{2,4}$", "x|^y", "\\d\\.\\d", "[^a-z]$", "^(ab|c){1,3}z?$"]


def literal(rng):
    return rng.choice([None, True, 0, -3, 12, 1.5, *WORDS, [], [1, "a"], {}, {"a": None}])


def make_string(rng, depth):
    kind = rng.randrange(5)
    if kind == 0:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if kind == 1:
        return {"type": "string", "format": rng.choice(FORMATS)}
    if kind == 2:
        least = rng.randrange(4)
        return {"type": "string", "minLength": least, "maxLength": least + rng.randrange(5)}
    if kind == 3:
        return {"type": "string", "enum": rng.sample(WORDS, 3)}
    return {"type": "string"}


def make_number(rng, depth):
    schema = {"type": rng.choice(["integer", "number"])}
    low = rng.randrange(-300, 300)
    if rng.randrange(2):
        schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
    if rng.randrange(2):
        schema[rng.choice(["maximum", "exclusiveMaximum"])] = low + 2 + rng.randrange(2000)
    return schema


def make_array(rng, depth):
    schema = {"type": "array"}
    if rng.randrange(3) == 0:
        schema["prefixItems"] = [make_schema(rng, depth - 1) for _ in range(rng.randrange(1, 3))]
    if rng.randrange(3) > 0:
        schema["items"] = make_schema(rng, depth - 1)
    if rng.randrange(2):
        schema["maxItems"] = rng.randrange(4)
    return schema


def make_object(rng, depth):
    names = rng.sample(NAMES, rng.randrange(4))
    schema = {"type": "object", "properties": {n: make_schema(rng, depth - 1) for n in names}}
    schema["required"] = [n for n in names if rng.randrange(2)]
    more = rng.randrange(4)
    if more < 2:
        schema["additionalProperties"] = False
    elif more == 2:
        schema["additionalProperties"] = make_schema(rng, depth - 1)
    return schema


def make_choice(rng, depth):
    keyword = rng.choice(["anyOf", "enum", "const", "oneOf", "allOf"])
    if keyword == "enum":
        return {"enum": [literal(rng) for _ in range(3)]}
    if keyword == "const":
        return {"const": literal(rng)}
    if keyword == "oneOf":
        return {"oneOf": [make_object(rng, depth - 1), make_array(rng, depth - 1),
                          {"type": "null"}]}
    if keyword == "allOf":
        return {"allOf": [make_schema(rng, depth - 1)]}
    return {"anyOf": [make_schema(rng, depth - 1) for _ in range(2)]}


def make_schema(rng, depth):
    if depth <= 0:
        return rng.choice([{"type": "null"}, {"type": "boolean"}, make_string(rng, 0),
                           make_number(rng, 0), {"$ref": "#/$defs/d"}])
    return rng.choice([make_string, make_number, make_array, make_object, make_object,
                       make_choice])(rng, depth)


def make_document(rng):
    schema = make_object(rng, 3)
    schema["$defs"] = {"d": rng.choice([
        {"type": "array", "items": {"$ref": "#/$defs/d"}, "maxItems": 2},
        {"type": ["string", "null"]}, {"anyOf": [{"type": "null"}, {"$ref": "#"}]}])}
    return schema


def instances(rng):
    """Texts that a schema may or may not take."""
    def value(depth):
        if depth == 0 or rng.randrange(3) == 0:
            return literal(rng)
        if rng.randrange(3) == 0:
            return [value(depth - 1) for _ in range(rng.randrange(3))]
        return {n: value(depth - 1) for n in rng.sample(NAMES, rng.randrange(3))}
    return [json.dumps(value(3), ensure_ascii=False) for _ in range(8)]


def validator_of(schema):
    return jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)


def mutate(rng, text):
    """A text near one that is valid: one value of it is another."""
    value = json.loads(text)

    def places(at):
        if isinstance(at, dict):
            for name in at:
                yield at, name
                yield from places(at[name])
        elif isinstance(at, list):
            for index in range(len(at)):
                yield at, index
                yield from places(at[index])

    value = copy.deepcopy(value)
    found = list(places(value))
    if not found:
        return json.dumps(literal(rng))
    at, key = rng.choice(found)
    if isinstance(at, dict) and rng.randrange(3) == 0:
        del at[key]
    else:
        at[key] = literal(rng)
    return json.dumps(value, ensure_ascii=False)


def walk(binary, seed, lines, outputs):
    done = subprocess.run([binary, str(outputs), "300", str(seed)], check=True, text=True,
                          input="".join(json.dumps(line) + "\n" for line in lines),
                          capture_output=True)
    return [json.loads(line) for line in done.stdout.split("\n") if line]


def main():
    binary, n = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 300
    rng = random.Random(n)
    schemas = [make_document(rng) for _ in range(n)]
    drawn = walk(binary, n, [{"schema": schema} for schema in schemas], 6)
    counts = {"outputs": 0, "cut": 0, "refused": {}, "taken": 0, "not in it, and valid": 0,
              "not valid": 0}
    again = []
    for schema, made in zip(schemas, drawn):
        if "code" in made:
            counts["refused"][made["code"]] = counts["refused"].get(made["code"], 0) + 1
            assert made["code"] == "grammar-unsatisfiable", (schema, made)
            again.append({"schema": schema, "texts": []})
            continue
        for text in made["outputs"]:
            validator_of(schema).validate(json.loads(text))
        counts["outputs"] += len(made["outputs"])
        counts["cut"] += made["n_cut"]
        again.append({"schema": schema, "texts": instances(rng) + [
            mutate(rng, text) for text in made["outputs"]]})
    for line, made in zip(again, walk(binary, 1, again, 0)):
        for text, has in zip(line["texts"], made.get("has", [])):
            valid = validator_of(line["schema"]).is_valid(json.loads(text))
            assert valid or not has, (line["schema"], text)
            counts["taken"] += has
            counts["not in it, and valid"] += valid and not has
            counts["not valid"] += not valid
    print(n, "schemas:", counts)
    assert counts["outputs"] > n and counts["taken"] > n / 4 and counts["not valid"] > n


if __name__ == "__main__":
    main()

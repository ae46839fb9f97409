#!/usr/bin/env python3
"""What texts name, the program has: every flag, reason code, request field, metric and environment
variable in the texts of the sources (errors, help), in the README and in docs/ is looked up there.
Flags come from the help of each verb, so a text may advise only flags of the verbs that print it.
    check_texts.py SIDEPATH [ROOT]
    check_texts.py --self-test"""

import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

VERBS = ["serve", "peer", "generate", "logits", "inspect", "bench delta", "bench load",
         "bench speculative", "bench step", "bench structured", "bench swap"]
RUNS = {"serve", "generate", "logits", "bench load", "bench speculative", "bench step",
        "bench structured", "bench swap"}
# Whose texts a file of these folders holds; of several rows the first that fits. The rest is the
# library's, which names settings without dashes and is used by every verb that runs a model.
ROOMS = [("src/server/", {"serve"}), ("src/cli/serve", {"serve"}),
         ("src/cli/peer", {"peer"}),
         ("src/cli/generate", {"generate"}), ("src/cli/logits", {"logits"}),
         ("src/cli/inspect", {"inspect"}), ("src/cli/bench_delta", {"bench delta"}),
         ("src/cli/bench_load", {"bench load"}),
         ("src/cli/bench_speculative", {"bench speculative"}),
         ("src/cli/bench_structured", {"bench structured"}),
         ("src/cli/bench_swap", {"bench swap"}), ("src/cli/bench", {"bench step"}),
         ("src/cli/requests", {"generate"}), ("src/engine/request/request_rows", {"generate"})]
# Words with a hyphen that are plain English, or the names of others.
PLAIN = set("""all-linear args-json-object base-uri built-in connect-src default-src end-of-text
form-action frame-ancestors function-name gemv-max-m instruction-set key-value libucx-dev
llama-cpp-deepseek-r1 llama-cpp-python log-probabilities multiply-adds pre-tokenizer prefill-bgmv
sidepath-engine sliding-window streaming-read utf-8
add_subdirectory save_pretrained""".split())
OTHERS = {"static", "cases"} # flags of other programs

CODE = (".c", ".h", ".inc")
SOURCES = (".c", ".h", ".inc", ".cu", ".cuh", ".py", ".sh", ".js", ".html", ".cmake", ".in")
LITERAL = re.compile(r'"((?:\\.|[^"\\\n])*)"')
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|(\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*')",
                     re.DOTALL)
FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9]*(?:-[a-z0-9]+)*)(?![\w-])")
HYPHENED = re.compile(r"(?<![\w/.%-])[a-z][a-z0-9]*(?:-[a-z0-9]+)+(?![\w/-]|\.\w)")
FIELD = re.compile(r'(?:\.name = |KNOWN\()"(\w+)"')
METRIC = re.compile(r"(?<![\w/-])(?:sidepath_[a-z][a-z_]*[a-z]|vllm:[a-z_]+[a-z])(?![\w(*.<-])")
VARIABLE = re.compile(r"\bSIDEPATH_[A-Z_]+[A-Z]\b")
SPAN = re.compile(r"```\w*\n(.*?)```|`([^`\n]+)`", re.DOTALL)
COMMAND = re.compile(r"\bsidepath (%s)\b([^|;&\n]*)" % "|".join(VERBS + ["bench"]))


# ---- the program -----------------------------------------------------------------------------

def literals(text):
    """The string literals of C, those that stand side by side as one."""
    text = COMMENT.sub(lambda m: m.group(1) or " ", text)
    text = re.sub(r'"\s*(?:PRI\w+\s*)?"', "", re.sub(r"\\\n", " ", text))
    return [m.group(1) for m in LITERAL.finditer(text)]


def words_of(root):
    """All words of the tree but those of documents, and of the checks that name what is not there.
    """
    words = set()
    for top in ("src", "include", "tests", "tools", "bench", "examples", "cmake", "demo"):
        for path in (root / top).rglob("*"):
            if path.suffix in SOURCES and "tests/style" not in str(path):
                words |= set(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    return words


class Program:
    def __init__(self, binary, root):
        self.flags, self.variables = {}, set()
        for verb in VERBS:
            out = subprocess.run([str(binary), *verb.split(), "--help"], capture_output=True,
                                 text=True, check=True).stdout
            named = re.findall(r"^  --(\[no-\])?([a-z0-9-]+)", out, re.MULTILINE)
            self.flags[verb] = {flag for _, flag in named} | {"help"}
            self.flags[verb] |= {"no-" + flag for no, flag in named if no}
            self.variables |= set(VARIABLE.findall(out))
        self.any_flag = set().union(*self.flags.values(), {"version"})
        sources = {str(path.relative_to(root)): path.read_text(encoding="utf-8")
                   for top in ("src", "include")
                   for path in sorted((root / top).rglob("*")) if path.suffix in CODE}
        code = "".join(sources.values())
        self.texts = {name: literals(text) for name, text in sources.items()}
        self.literals = {t for texts in self.texts.values() for t in texts}
        for path in sorted((root / "bindings/python/src").rglob("*.py")):
            self.literals |= set(LITERAL.findall(path.read_text(encoding="utf-8")))
        self.codes = set(literals(re.sub(r'\{"[a-z0-9-]+", SP_SETTING_', "", code)))
        self.words = words_of(root)
        counting = ("src/server/", "src/peer/peer_server")
        self.metrics = {m for name, texts in self.texts.items()
                        if name.startswith(counting) for text in texts
                        for m in METRIC.findall(text)}
        rows = [root / "src/server/api/body_rows.c", root / "src/engine/request/request_rows.inc"]
        self.fields = set(FIELD.findall("".join(path.read_text(encoding="utf-8")
                                                for path in rows if path.is_file())))
        reasons = re.findall(r'X\((SP_REASON_\w+), \d+, "([\w-]+)"', code)
        seen = Counter(re.findall(r"\bSP_REASON_\w+|\"[a-z-]+\"", code))
        self.given = {name for symbol, name in reasons if seen[symbol] > 1 or
                      seen['"%s"' % name] > 1}
        self.reasons = {name for _, name in reasons}


def verbs_of(name):
    for start, verbs in ROOMS:
        if name.startswith(start):
            return verbs
    return RUNS


# ---- texts in the sources --------------------------------------------------------------------

def problems_of_texts(program):
    for name, texts in program.texts.items():
        verbs = verbs_of(name)
        for text in texts:
            for flag in FLAG.findall(text):
                for verb in sorted(verbs):
                    if flag not in program.flags[verb] | {"version"}:
                        yield "%s: a text names --%s, which `%s` does not have" % (name, flag, verb)
            if " " not in text or name.startswith("src/server/api/page"):
                continue
            for word in HYPHENED.findall(FLAG.sub(" ", text)):
                if word in program.any_flag:
                    lacking = [v for v in sorted(verbs) if word not in program.flags[v]]
                    if lacking and not name.startswith("src/cli/"):
                        yield "%s: a text names the setting %s, which `%s` does not have" % (
                            name, word, lacking[0])
                elif word not in program.any_flag | PLAIN and word not in program.literals:
                    yield "%s: a text names %s, which is no setting and no code" % (name, word)


# ---- documents -------------------------------------------------------------------------------

def documents(root):
    return [root / "README.md", root / "CHANGELOG.md"] + sorted((root / "docs").rglob("*.md"))


def tables(text):
    """(the header's cells, a row's cells) of every table."""
    header = None
    for line in text.split("\n"):
        if not line.startswith("|"):
            header = None
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if header is None:
            header = cells
        elif not set(line) <= set("| -:"):
            yield header, cells


def problems_of_commands(program, text):
    joined = re.sub(r"\\\n\s*", " ", text)
    for fence, inline in SPAN.findall(joined):
        for verb, rest in COMMAND.findall(fence or inline):
            verbs = [v for v in VERBS if v == verb or v.startswith(verb + " ")]
            if verb == "bench":
                verbs = [v for v in VERBS if v.startswith("bench")]
            for flag in FLAG.findall(rest):
                if not any(flag in program.flags[v] for v in verbs):
                    yield "`sidepath %s` has no --%s" % (verb, flag)


def problems_of_tables(program, text):
    for header, cells in tables(text):
        titles = [re.sub(r"[^a-z ]", "", title.lower()) for title in header]
        for title, cell in zip(titles, cells):
            named = re.findall(r"`([^`]+)`", cell)
            if title == "code":
                for code in named:
                    if re.fullmatch(r"[a-z][\w-]+", code) and code not in program.codes:
                        yield "no error has the code `%s`" % code
                    elif code in program.reasons - program.given and "Not given" not in cells[-1]:
                        yield "nothing gives the code `%s`" % code
            elif title == "field" and "in" in titles:
                for field in named:
                    if field not in program.fields:
                        yield "no request has the field `%s`" % field


def problems_of_words(program, text):
    """Words in backquotes, and flags anywhere but in commands of others."""
    ours = re.compile(r"`--|`[^`\n]*sidepath ")
    prose = SPAN.sub(lambda m: m.group(0) if ours.match(m.group(0)) else " ", text)
    for flag in sorted(set(FLAG.findall(prose))):
        if flag not in program.any_flag | OTHERS:
            yield "no verb has --%s" % flag
    for _, span in SPAN.findall(text):
        word = span.strip()
        if re.fullmatch(HYPHENED, word) and word not in program.literals | program.any_flag | PLAIN:
            yield "`%s` is no code and no setting" % word
        if re.fullmatch(r"[a-z]+(_[a-z0-9]+)+", word) and word not in program.words | PLAIN:
            yield "`%s` is not in the sources" % word
        for key in re.findall(r'"([a-z_]+)":', span):
            if key not in program.words:
                yield "`%s` has the key \"%s\", which is not in the sources" % (span, key)
    for metric in sorted(set(METRIC.findall(text))):
        if metric not in program.metrics and not metric.startswith("sidepath_engine") and \
                metric not in program.words:
            yield "there is no metric %s" % metric
    for variable in sorted(set(VARIABLE.findall(text))):
        yield from () if variable in program.variables else \
            ["nothing reads the environment's %s" % variable]


def known_variables(root):
    """Those of the build, of tests and of the service."""
    files = [root / "CMakeLists.txt", root / "Makefile", *(root / "cmake").glob("*"),
             *(root / "tools").glob("*"), *(root / "tests").rglob("*.cmake"), root / ".ci"]
    return set(VARIABLE.findall("".join(path.read_text(encoding="utf-8", errors="replace")
                                        for path in files if path.is_file())))


def problems_of(program, root):
    yield from problems_of_texts(program)
    said = ""
    program.variables |= known_variables(root)
    program.variables |= {v for texts in program.texts.values() for t in texts
                          for v in VARIABLE.findall(t)} | program.words
    for document in documents(root):
        if not document.is_file():
            continue
        text = document.read_text(encoding="utf-8")
        said += text
        for find in (problems_of_commands, problems_of_tables, problems_of_words):
            for problem in find(program, text):
                yield "%s: %s" % (document.name, problem)
    for rules in sorted((root / "docs").glob("*.yml")):
        for metric in sorted(set(METRIC.findall(rules.read_text(encoding="utf-8")))):
            if re.sub("_(bucket|sum|count)$", "", metric) not in program.metrics:
                yield "%s: there is no metric %s" % (rules.name, metric)
    for metric in sorted(program.metrics - set(METRIC.findall(said))):
        yield "no document says what the metric %s is" % metric
    for field in sorted(f for f in program.fields if "`%s`" % f not in said and
                        '"%s"' % f not in said):
        yield "no document says what the field %s is" % field


# ---- the proof that it can fail --------------------------------------------------------------

HELP = """#!/bin/sh
[ "$1" = serve ] && echo "  --port P  the port (SIDEPATH_PORT)"
[ "$1" = inspect ] || echo "  --[no-]max-loras N  slots (SIDEPATH_MAX_LORAS)"
[ "$1" != inspect ] || echo "  --json  one object"
"""
GOOD = {
    "src/pool/pool.c": 'sp_fail(e, SP_ERR_STATE, "pool-full", "raise max-loras");',
    "src/server/server.c": 'say("change --port");\n/* --gone */ add("sidepath_steps_total");',
    "src/adapter/reason.h": 'X(SP_REASON_DORA, 24, "dora", S)\nX(SP_REASON_FAR, 25, "far", S)\n'
                            'refuse(SP_REASON_DORA);',
    "src/server/api/body_rows.c": 'rows[] = {\n    {.name = "prompt", .forms = BOTH},\n};',
    "docs/alerts.yml": "expr: rate(sidepath_steps_total[5m]) > 0",
    "README.md": "`sidepath serve --port 1 --no-max-loras` gives `sidepath_steps_total`, `--port`\n"
                 "```sh\nsidepath serve \\\n  --port 2\ncmake --preset x\n```\n",
    "docs/HTTP.md": "| code | what |\n| --- | --- |\n| `pool-full` | `--max-loras` |\n"
                    "| `dora` | |\n| `far` | Not given |\n\n| field | in |\n| --- | --- |\n"
                    "| `prompt` | both |\n\n`max-loras` is `SIDEPATH_MAX_LORAS`: `{\"prompt\": 1}`",
}
BAD = [
    ("src/pool/pool.c", "raise max-loras", "raise min-loras",
     "src/pool/pool.c: a text names min-loras, which is no setting and no code"),
    ("src/server/server.c", "change --port", "change --json",
     "src/server/server.c: a text names --json, which `serve` does not have"),
    ("src/pool/pool.c", "raise max-loras", "raise --port",
     "src/pool/pool.c: a text names --port, which `generate` does not have"),
    ("README.md", "serve --port 1", "serve --json", "README.md: `sidepath serve` has no --json"),
    ("README.md", "  --port 2", "  --prot 2", "README.md: `sidepath serve` has no --prot"),
    ("README.md", "`--port`", "`--prot`", "README.md: no verb has --prot"),
    ("README.md", "`--port`", "a --prot", "README.md: no verb has --prot"),
    ("README.md", "gives `sidepath_steps_total`", "gives sidepath_steps_total, sidepath_stops",
     "README.md: there is no metric sidepath_stops"),
    ("docs/alerts.yml", "steps_total", "stops_total",
     "alerts.yml: there is no metric sidepath_stops_total"),
    ("docs/HTTP.md", "| `pool-full`", "| `pool-fool`",
     "HTTP.md: no error has the code `pool-fool`"),
    ("docs/HTTP.md", "Not given", "", "HTTP.md: nothing gives the code `far`"),
    ("docs/HTTP.md", "| `prompt`", "| `prompts`", "HTTP.md: no request has the field `prompts`"),
    ("docs/HTTP.md", "`max-loras` is", "`max-lora` is",
     "HTTP.md: `max-lora` is no code and no setting"),
    ("docs/HTTP.md", "SIDEPATH_MAX_LORAS", "SIDEPATH_MAX_LORA",
     "HTTP.md: nothing reads the environment's SIDEPATH_MAX_LORA"),
    ("docs/HTTP.md", '{"prompt"', '{"prompts"',
     'HTTP.md: `{"prompts": 1}` has the key "prompts", which is not in the sources'),
    ("src/server/server.c", "sidepath_steps_total", "sidepath_steps_total sidepath_new",
     "no document says what the metric sidepath_new is"),
    ("src/server/api/body_rows.c", "\n};", '\n    KNOWN("seed", CHAT, IGNORED),\n};',
     "no document says what the field seed is"),
]


def self_test():
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)

        def problems(**changed):
            for name, text in {**GOOD, **changed}.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text)
            return list(problems_of(Program(root / "sidepath", root), root))

        (root / "sidepath").write_text(HELP)
        (root / "sidepath").chmod(0o755)
        assert not problems(), problems()
        for name, before, after, want in BAD:
            assert before in GOOD[name], (name, before)
            found = problems(**{name: GOOD[name].replace(before, after)})
            assert want in found, (want, found)
    print("check_texts: %d inventions are found" % len(BAD))


def main():
    if sys.argv[1:] == ["--self-test"]:
        self_test()
        return 0
    root = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).resolve().parents[2]
    program = Program(sys.argv[1], root)
    found = list(problems_of(program, root))
    for problem in found:
        print(problem, file=sys.stderr)
    print("check_texts: %d flags, %d metrics, %d fields, %d problems" % (
        len(program.any_flag), len(program.metrics), len(program.fields), len(found)))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

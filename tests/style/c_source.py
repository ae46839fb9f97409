"""Just enough of C to count the lines of functions and to find calls: comments, literals and
preprocessor lines are blanked out, line for line, so that positions stay true."""

import re

_BLANK = re.compile(
    r"//(?:\\\n|[^\n])*"  # a line comment
    r"|/\*.*?\*/"  # a block comment
    r'|"(?:\\.|[^"\\\n])*"'  # a string
    r"|'(?:\\.|[^'\\\n])*'",  # a character
    re.DOTALL)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
_CALL = re.compile(r"(\.|->)?\s*\b([A-Za-z_]\w*)\s*\(")


def _spaces(match):
    text = match.group(0)
    if text[0] in "\"'":  # literals stay visible as empty ones
        return text[0] + re.sub(r"[^\n]", " ", text[1:-1]) + text[0]
    return re.sub(r"[^\n]", " ", text)


def without_comments(text):
    """Comments become blanks, and so does what stands inside literals."""
    return _BLANK.sub(_spaces, text)


def comments(text):
    """Every comment as a list of (line, text): its lines, without what marks them as a comment."""
    for match in _BLANK.finditer(text):
        if match.group(0)[0] in "\"'":
            continue
        first = text.count("\n", 0, match.start()) + 1
        yield [(first + i, re.sub(r"^\s*(?:/\*+|//|\*(?!/))?\s*|\s*(?:\*/)?\s*$", "", line))
               for i, line in enumerate(match.group(0).split("\n"))]


def code_only(text):
    """The same without preprocessor lines: macros have no functions of their own."""
    return _DIRECTIVE.sub(lambda match: re.sub(r"[^\n]", " ", match.group(0)),
                          without_comments(text))


def calls(text):
    """(line, name) of everything that looks like a call, macros' bodies included; calls through a
    member (table.free()) are not."""
    text = without_comments(text)
    for match in _CALL.finditer(text):
        if not match.group(1):
            yield text.count("\n", 0, match.start(2)) + 1, match.group(2)


def functions(text):
    """(first line, number of lines, name) of every function that is defined in the file. Lines are
    counted from the line of the signature to the closing brace."""
    code = code_only(text)
    code = re.sub(r'extern\s+"\s*"\s*\{', lambda m: re.sub(r"[^\n]", " ", m.group(0)), code)
    depth, start, name = 0, 0, None
    for match in re.finditer(r"[{};]", code):
        symbol, position = match.group(0), match.start()
        if symbol == "{":
            if depth == 0:
                name = _function_name(code[start:position])
                if name:
                    signature = start + len(code[start:position]) - len(
                        code[start:position].lstrip())
            depth += 1
        elif symbol == "}":
            depth = max(0, depth - 1)  # a closing brace of extern "C" has no partner left
            if depth == 0:
                if name:
                    first = code.count("\n", 0, signature) + 1
                    last = code.count("\n", 0, position) + 1
                    yield first, last - first + 1, name
                name, start = None, position + 1
        elif depth == 0:
            start = position + 1


def _function_name(head):
    """The name when `head`, the text before a brace at file scope, is a function's signature."""
    head = re.sub(r"__attribute__\s*\(\(.*?\)\)", " ", head, flags=re.DOTALL)
    match = re.search(r"([A-Za-z_]\w*)\s*\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)\s*$", head)
    return match.group(1) if match and "=" not in head[:match.start()] else None

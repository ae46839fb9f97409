#!/usr/bin/env python3
"""The commands of the README's section "Serve", as they stand there: the server is started by the
first block, the curl calls of the others have to succeed.
    check_readme.py SIDEPATH"""

import re
import shutil
import subprocess
import sys

import serving


def blocks():
    text = (serving.ROOT / "README.md").read_text(encoding="utf-8")
    section = text[text.index("\n## Serve\n"):]
    section = section[:section.index("\n## ", 5)]
    return re.findall(r"```sh\n(.*?)```", section, re.DOTALL)


def commands(block):
    """Whole shell commands, continued lines joined."""
    return [c for c in re.sub(r"\\\n\s*", "", block).split("\n") if c.strip()]


def check_readme_commands(binary):
    if not shutil.which("curl"):
        print("curl is not installed")
        sys.exit(77)
    start, *calls = blocks()
    flags = commands(start)[0].split()[2:]
    model = flags.index("--model")
    port = flags.index("--port")
    address = "127.0.0.1:%s" % flags[port + 1]
    assert flags[model + 1] == "demo/base"
    flags = [f.replace("demo/", str(serving.DEMO) + "/") for i, f in enumerate(flags)
             if i not in (model, model + 1, port, port + 1)]
    calls = [command for block in calls for command in commands(block)]
    assert len(calls) >= 5
    with serving.serving(binary, *flags) as server:
        for command in calls:
            assert command.startswith("curl ") and address in command, command
            command = command.replace(address, "%s:%d" % server.address)
            done = subprocess.run(["bash", "-c", command.replace("curl ", "curl -sSf ", 1)],
                                  capture_output=True, text=True, check=False)
            assert done.returncode == 0 and done.stdout, (command, done)
            assert '"error":' not in done.stdout.replace('"error": null', ""), done.stdout


if __name__ == "__main__":
    serving.run_checks([check_readme_commands], sys.argv[1])

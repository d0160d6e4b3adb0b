#!/usr/bin/env python3
"""Style and layout as a test: prints file:line: message for each breach and exits 1 if there is one.

Folders are the dependency law: io/ and kernels/ include only themselves, src/ adds both, jobs/ adds src/.
Limits: functions 70 lines, files 800 (kernels and tests 1,000), lines 100 columns. Unsafe calls are banned, and calls of the
operating system outside io/sys.c, io/mem.c and the thread pool.
"""
import pathlib, re, sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LAYERS = {"io": {"io"}, "kernels": {"kernels"}, "src": {"src", "io", "kernels"}, "jobs": {"jobs", "src", "io", "kernels"}}
BANNED = re.compile(r"\b(sprintf|vsprintf|strcpy|strcat|strncpy|strncat|atoi|atol|atof|strtok|rand|srand|system|popen|gets|alloca)\s*\(")
RAW = re.compile(r"(?<![\w.>])(open|openat|read|write|pread|pwrite|fsync|fdatasync|ftruncate|rename|unlink|rmdir|mkdir|flock|mmap|munmap|"
                 r"malloc|calloc|realloc|free|strdup|strndup|fopen|clock_gettime|gettimeofday)\s*\(")
RAW_ALLOWED = {"io/sys.c", "io/mem.c", "kernels/pool.c"}
COLUMNS, FUNCTION, FILE = 100, 70, 800
problems = []


def say(path, line, text):
    problems.append(f"{path}:{line}: {text}")


def code_of(text):
    """The text with comments and string contents blanked, line structure kept."""
    blank = lambda m: re.sub(r"[^\n]", " ", m.group(0))
    return re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', blank, text, flags=re.S)


def functions(lines):
    """(first line, last line) of each function body that starts at column 0."""
    start = None
    for i, line in enumerate(lines, 1):
        if start is None and re.match(r"^[A-Za-z_].*\)\s*\{\s*$", line) and not line.startswith(("typedef", "struct", "enum", "union")):
            start = i
        elif start is None and line == "{" :
            start = i
        elif start is not None and line.startswith("}"):
            yield start, i
            start = None


def check(path):
    name = path.relative_to(ROOT).as_posix()
    top = name.split("/", 1)[0]
    text = path.read_text(encoding="utf-8")
    raw_lines, lines = text.split("\n"), code_of(text).split("\n")
    limit = 1000 if top in ("kernels", "tests") else FILE
    if len(raw_lines) > limit:
        say(name, limit, f"file has {len(raw_lines)} lines (limit {limit})")
    for i, line in enumerate(raw_lines, 1):
        if len(line) > COLUMNS:
            say(name, i, f"line has {len(line)} columns (limit {COLUMNS})")
        if line.endswith((" ", "\t")) or "\t" in line:
            say(name, i, "tab or trailing blank")
        m = re.match(r'\s*#include "([a-z0-9_]+)/', line)
        if m and top in LAYERS and m.group(1) not in LAYERS[top]:
            say(name, i, f"{top}/ must not include {m.group(1)}/")
    for i, line in enumerate(lines, 1):
        if BANNED.search(line):
            say(name, i, f"banned call: {BANNED.search(line).group(1)}")
        if top in LAYERS and name not in RAW_ALLOWED and RAW.search(line):
            say(name, i, f"raw call of {RAW.search(line).group(1)} outside io/sys.c and io/mem.c")
    if path.suffix in (".c", ".cu"):
        for first, last in functions(lines):
            if last - first + 1 > FUNCTION:
                say(name, first, f"function has {last - first + 1} lines (limit {FUNCTION})")
    return set(re.findall(r'#include "([^"]+)"', text))


def main():
    included, headers = set(), set()
    for folder in (*LAYERS, "tests"):
        for path in sorted(p for p in (ROOT / folder).rglob("*.*") if p.suffix in (".c", ".h", ".cu")):
            included |= check(path)
            if path.suffix == ".h" and folder in LAYERS:
                headers.add(path.relative_to(ROOT).as_posix())
    for h in sorted(headers - included):
        say(h, 1, "nobody includes this file")
    print("\n".join(problems))
    print(f"{len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""A tiny model and rows of every kind, for scripts that kill and stop real runs of the program."""
import json, pathlib, subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent


def write_model(path):
    """The model of tests/unit/tiny_gguf.h."""
    main = ('#include "tests/unit/tiny_gguf.h"\n'
            "int main(int n, char **a) { return n != 2 || !tiny_gguf_write(a[1], -1); }\n")
    program = str(path) + ".program"
    subprocess.run(["cc", "-D_GNU_SOURCE", "-std=c11", f"-I{ROOT}", "-x", "c", "-", "-o", program, "-lm"],
                   input=main.encode(), check=True)
    subprocess.run([program, path], check=True)


def row(i):
    if i % 97 == 13:
        return {"id": f"bad{i}", "prompt": 5}
    if i % 5 == 1:
        return {"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions",
                "body": {"prompt": f"Hello {i}", "max_tokens": 2 + i % 4}}
    if i % 5 == 2:
        return {"id": f"m{i}", "messages": [{"role": "user", "content": f"row {i}"}], "max_tokens": 3}
    if i % 5 == 3:
        return {"id": f"s{i}", "prompt": "abc", "choices": ["d", f"e{i}"]}
    return {"id": f"p{i}", "prompt": f"row {i} ", "max_tokens": 1 + i % 6, "field": i}


def write_rows(path, n):
    with open(path, "w") as f:
        for i in range(n):
            f.write("not json\n" if i % 211 == 100 else json.dumps(row(i)) + "\n")

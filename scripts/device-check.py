#!/usr/bin/env python3
"""Checks a GPU in under eight minutes and writes one JSON. device-check.py BUILD DEVICE OUT.json [MODEL]
DEVICE is a name of --device (cuda:0, hip, sim). Steps, each with its own time limit: every kernel against plain C; tiny models
against their reference; copies, matrix instructions, kernels and the maker's GEMM library beside them (bench device); with MODEL
rows on the CPU and on the device, exact and fast; the same rows with memory for a few of them, pages going to the disk and back:
the same bytes; with the maker's GEMM library, where it is there; a model of an 8B model's shape with seeded weights, all of it on
the device, then with less memory than its weights take: the same bytes; the kernels under compute-sanitizer, where that is on PATH.
Exit 1: a step failed. On an emulated device models are tiny: the figures mean nothing, the steps are the same."""
import json, os, pathlib, shutil, subprocess, sys, tempfile, time

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIMIT_S = 470


class Check:
    def __init__(self, build, device, model):
        self.build, self.device, self.emulated = build, device, device.startswith("sim")
        self.model, self.steps, self.start = model, [], time.monotonic()

    def run(self, name, command, limit, env=None):
        """Runs a command; adds its step. Its standard output, or None where it failed."""
        left = self.left()
        step = {"step": name, "ok": False, "seconds": 0.0}
        self.steps.append(step)
        began = time.monotonic()
        try:
            done = subprocess.run([str(c) for c in command], capture_output=True, text=True, errors="replace", cwd=ROOT,
                                  timeout=max(1, min(limit, left)), env={**os.environ, "MILLRACE_CACHE": "", **(env or {})})
            step["ok"] = done.returncode == 0
            if not step["ok"]:
                step["why"] = f"exit {done.returncode}: " + (done.stdout + done.stderr)[-600:]
        except subprocess.TimeoutExpired:
            step["why"] = f"it took more than {min(limit, left):.0f} s"
        step["seconds"] = round(time.monotonic() - began, 2)
        print(f"{'ok  ' if step['ok'] else 'FAIL'} {name} ({step['seconds']} s)", flush=True)
        return done.stdout if step["ok"] else None

    def left(self):
        return LIMIT_S - (time.monotonic() - self.start)

    def judge(self, name, ok, why="", **more):
        self.steps.append({"step": name, "ok": bool(ok), **({} if ok else {"why": why}), **more})
        print(f"{'ok  ' if ok else 'FAIL'} {name}", flush=True)


def rows_of(folder, n, tokens, words="Write a sentence about the number {}. "):
    path = folder / f"rows-{n}-{tokens}.jsonl"
    with open(path, "w") as f:
        for i in range(n):
            f.write(json.dumps({"id": f"r{i}", "prompt": words.format(i * 7) * (1 + i % 3),
                                "max_tokens": tokens, "temperature": 0, "ignore_eos": True}) + "\n")
    return path


def outputs(path):
    return [json.loads(line)["output"] for line in open(path)]


def job(check, folder, name, rows, limit, *options, model=None):
    out = folder / f"{name.replace(' ', '-').replace(',', '')}.jsonl"
    ok = check.run(name, [check.build / "millrace", "run", rows, "-m", model or check.model, "-o", out, "--progress", "none", *options], limit)
    if ok is None:
        return None, {}
    report = json.loads(out.with_name(out.name.replace(".jsonl", ".report.json")).read_text())
    return out, report


def numbers(report):
    """Where a report has the rates of the run."""
    found = {}
    def walk(node):
        for key, value in node.items() if isinstance(node, dict) else []:
            if isinstance(value, (int, float)) and ("per_s" in key or key.startswith("kv_") or key in ("wall_s", "rows_fetched")):
                found.setdefault(key, value)
            walk(value)
    walk(report)
    return found


def whole_runs(check, folder):
    n, tokens = (6, 60) if check.emulated else (128, 128)
    device = ["--device", check.device]
    rows = rows_of(folder, n, tokens)
    cpu, _ = job(check, folder, "rows on the cpu, exact", rows, 120, "--compute", "exact")
    exact, _ = job(check, folder, "rows on the device, exact", rows, 120, "--compute", "exact", *device)
    if cpu and exact:
        a, b = outputs(cpu), outputs(exact)
        same = sum(x == y for x, y in zip(a, b))
        check.judge("exact: the device's rows are the CPU's", same >= 0.97 * n, f"{same} of {n} rows are equal", equal=same, rows=n)
    fast, report = job(check, folder, "rows on the device, fast", rows, 120, *device)
    if fast:
        check.steps[-1]["figures"] = numbers(report)
    # pages for a few sequences only: the rest goes to the disk and back, and no bit changes
    small, report = job(check, folder, "rows on the device, fast, little memory", rows, 120, *device, "--kv-memory",
                        "64KiB" if check.emulated else "24MiB", "--kv-disk", "512MiB", "--kv-policy", "spill", "--prefix-sharing", "off")
    if small:
        check.steps[-1]["figures"] = numbers(report)
    if fast and small:
        check.judge("little memory: the same bytes", small.read_bytes() == fast.read_bytes(), "outputs differ")
        check.judge("little memory: pages went to the disk and back", check.steps[-2]["figures"].get("kv_fetch_bytes", 0) > 0, "none did")


def library_run(check, folder, bench):
    """The same rows by the maker's GEMM library; each in steps of its own, too: the same bytes."""
    if not bench or not any(k["kernel"] == "gemm library" for k in bench["kernels"]):
        return
    rows = rows_of(folder, 32, 32)
    options = ["--device", check.device, "--device-weights", "bf16", "--device-gemm", "library"]
    many, report = job(check, folder, "rows by the GEMM library", rows, 60, *options)
    if not many:
        return
    check.steps[-1]["figures"] = {**numbers(report), "gemm": report["engine"].get("gemm")}
    few, _ = job(check, folder, "rows by the GEMM library, few at once", rows, 60, *options, "--max-batch", "3", "--max-step-tokens", "40")
    if few:
        check.judge("the GEMM library: the same bytes whatever the batch", few.read_bytes() == many.read_bytes(), "outputs differ")


def shaped_runs(check, folder):
    """A model of which only the shape is real; then with memory for three quarters of its weights."""
    model, shape = folder / "shaped.gguf", "toy" if check.emulated else "8b"
    if check.run(f"a model of shape {shape}", [sys.executable, ROOT / "scripts/shaped_model.py", shape, model], 60) is None:
        return
    rows = rows_of(folder, 3, 6, "{} ") if check.emulated else rows_of(folder, 256, 32)
    options = ["--device", check.device, *(["--max-step-tokens", "4", "--max-batch", "3", "--kv-type", "int8"] if check.emulated else [])]
    whole, report = job(check, folder, f"shape {shape}", rows, 120, *options, model=model)
    if not whole:
        return
    weights = report["engine"]["packed_bytes"]
    check.steps[-1]["figures"] = {**numbers(report), "weight_bytes": weights}
    memory = int(weights * (0.9 if check.emulated else 0.75))
    part, report = job(check, folder, f"shape {shape}, weights come over", rows, 120, *options, "--device-memory", str(memory), model=model)
    if not part:
        return
    check.steps[-1]["figures"] = {**numbers(report), "device_memory": memory, "weight_bytes": report["engine"]["packed_bytes"]}
    check.judge("weights come over: the same bytes", part.read_bytes() == whole.read_bytes(), "outputs differ")
    check.judge("weights come over: they did not fit", report["engine"]["packed_bytes"] < min(weights, memory), "they did")


def sanitize(check, on_it):
    """False: compute-sanitizer is not on PATH, there is nothing that it could see, or no time for all."""
    tool = shutil.which("compute-sanitizer")
    if not tool or not check.device.startswith("cuda"):
        return False
    for kind in ("memcheck", "racecheck"):
        for test in ("kernels", "attention"):
            if check.left() < 50:
                return False
            check.run(f"{kind} test_gpu_{test}", [tool, "--tool", kind, "--error-exitcode", "9", check.build / "tests" / f"test_gpu_{test}"],
                      45, on_it)
    return True


def main():
    build, device, out = (ROOT / sys.argv[1]).resolve(), sys.argv[2], pathlib.Path(sys.argv[3])
    model = pathlib.Path(sys.argv[4]).resolve() if len(sys.argv) > 4 else None
    with tempfile.TemporaryDirectory(prefix="device-check-") as tmp:
        tmp = pathlib.Path(tmp)
        if model is None:
            sys.path.insert(0, str(ROOT / "tests"))
            import tinyjob
            model = tmp / "tiny.gguf"
            tinyjob.write_model(model)
        check = Check(build, device, model)
        on_it = {"MR_TEST_DEVICE": device}
        for test in ("kernels", "attention", "experts", "models"):
            check.run(f"test_gpu_{test}", [build / "tests" / f"test_gpu_{test}"], 100, on_it)
        bench = check.run("bench device", [build / "millrace", "bench", "device", device, "--json"], 90)
        bench = json.loads(bench) if bench else None
        whole_runs(check, tmp)
        library_run(check, tmp, bench)
        shaped_runs(check, tmp)
        sanitized = sanitize(check, on_it)
    result = {"device": device, "model": model.name, "seconds": round(time.monotonic() - check.start, 1),
              "ok": all(s["ok"] for s in check.steps), "sanitized": sanitized, "steps": check.steps, "bench": bench}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{'ok' if result['ok'] else 'FAILED'}: {out}")
    sys.exit(not result["ok"])


main()

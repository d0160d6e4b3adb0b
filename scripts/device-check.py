#!/usr/bin/env python3
"""Checks a GPU in under eight minutes and writes one JSON. device-check.py BUILD DEVICE OUT.json [MODEL]
DEVICE is a name of --device (cuda:0, hip, sim). Steps, each with its own time limit: every kernel against plain C; tiny models
against their reference; copies, matrix instructions and kernels beside them (bench device); with MODEL rows on the CPU and on
the device, exact and fast; the same rows with memory for a few of them, pages going to the disk and back: the same bytes.
Exit 1: a step failed. On an emulated device the rows are a tiny model's: the figures mean nothing, the steps are the same."""
import json, os, pathlib, subprocess, sys, tempfile, time

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIMIT_S = 470


class Check:
    def __init__(self, build, device, model):
        self.build, self.device, self.emulated = build, device, device.startswith("sim")
        self.model, self.steps, self.start = model, [], time.monotonic()

    def run(self, name, command, limit, env=None):
        """Runs a command; adds its step. Its standard output, or None where it failed."""
        left = LIMIT_S - (time.monotonic() - self.start)
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

    def judge(self, name, ok, why="", **more):
        self.steps.append({"step": name, "ok": bool(ok), **({} if ok else {"why": why}), **more})
        print(f"{'ok  ' if ok else 'FAIL'} {name}", flush=True)


def rows_of(folder, n, tokens):
    path = folder / f"rows-{n}-{tokens}.jsonl"
    with open(path, "w") as f:
        for i in range(n):
            f.write(json.dumps({"id": f"r{i}", "prompt": f"Write a sentence about the number {i * 7}. " * (1 + i % 3),
                                "max_tokens": tokens, "temperature": 0, "ignore_eos": True}) + "\n")
    return path


def outputs(path):
    return [json.loads(line)["output"] for line in open(path)]


def job(check, folder, name, rows, limit, *options):
    out = folder / f"{name.replace(' ', '-').replace(',', '')}.jsonl"
    ok = check.run(name, [check.build / "millrace", "run", rows, "-m", check.model, "-o", out, "--progress", "none", *options], limit)
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
        whole_runs(check, tmp)
    result = {"device": device, "model": model.name, "seconds": round(time.monotonic() - check.start, 1),
              "ok": all(s["ok"] for s in check.steps), "steps": check.steps, "bench": json.loads(bench) if bench else None}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{'ok' if result['ok'] else 'FAILED'}: {out}")
    sys.exit(not result["ok"])


main()

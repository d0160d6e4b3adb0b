#!/usr/bin/env python3
"""What this machine can do, and what millrace and its peers do on it, as Markdown tables.

    scripts/bench.py BINARY MODEL...        (make bench)

A share is the arithmetic of the weights over the int8 peak of the registers, which is measured beside
each run because a machine's speed drifts. The whole job is $MR_DATA/sets/offline-256.jsonl where that is
there, else examples/questions.jsonl; every row runs to its limit of tokens, for all programs alike.
BENCH_ROWS=N takes only the first N rows. Peers are run where `make bench-peers` has put them."""
import json, os, pathlib, resource, subprocess, sys, tempfile, time

ROOT = pathlib.Path(__file__).resolve().parent.parent
PEERS = ROOT / "build" / "peers" / "bin" / "python"
THREADS = len(os.sched_getaffinity(0))


def run(*args):
    p = subprocess.run([str(a) for a in args], capture_output=True, text=True)
    if p.returncode:
        sys.exit(f"{' '.join(map(str, args))}: exit code {p.returncode}\n{p.stderr.strip()[-800:]}")
    return p.stdout


def table(head, rows):
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for r in rows:
        print("| " + " | ".join(str(c) for c in r) + " |")
    print(flush=True)


def throughput(binary, model):
    out = []
    for what, prompt, gen, batch in [("decode", 128, 32, b) for b in (1, 8, 64, 128, 256)] + [("prefill 512", 512, 0, 8)]:
        r = json.loads(run(binary, "bench", "throughput", "-m", model, "--prompt", prompt, "--gen", gen, "--batch", batch, "--json"))
        kind = "decode" if gen else "prefill"
        out.append((what, batch, f"{r[kind + '_tokens_per_s']:.0f}", f"{r[kind + '_of_int8_peak']:.2f}", f"{r['int8_peak_ops_per_s'] / 1e9:.0f}", f"{r['mbu']:.2f}"))
    table((os.path.basename(model), "batch", "tok/s", "weights, of the int8 peak", "peak, Gop/s", "of memory bandwidth"), out)


def job_rows():
    data = os.environ.get("MR_DATA")
    path = pathlib.Path(data) / "sets" / "offline-256.jsonl" if data else ROOT / "examples" / "questions.jsonl"
    rows = [json.loads(x) for x in path.read_text(encoding="utf-8").splitlines() if x.strip()]
    rows = rows[:int(os.environ.get("BENCH_ROWS") or len(rows))]
    out = []
    for i, r in enumerate(rows):
        body = r.get("body", r)
        messages = body.get("messages") or [{"role": "user", "content": body["prompt"]}]
        out.append({"custom_id": f"row-{i}", "method": "POST", "url": "/v1/chat/completions",
                    "body": {"messages": messages, "max_tokens": body.get("max_tokens") or 64, "temperature": 0, "ignore_eos": True}})
    return path.name, out


def cpu_seconds():
    """Of all programs run so far: what others on the machine take does not count."""
    u = resource.getrusage(resource.RUSAGE_CHILDREN)
    return u.ru_utime + u.ru_stime


def whole_job(binary, model, rows, tmp):
    """Seconds from start to end, without loading, of CPU, and output tokens."""
    src, out = tmp / "job.jsonl", tmp / "out.jsonl"
    src.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    start, cpu = time.monotonic(), cpu_seconds()
    run(binary, "run", src, "-m", model, "-o", out, "--progress", "none")
    wall, cpu = time.monotonic() - start, cpu_seconds() - cpu
    report = json.loads((tmp / "out.report.json").read_text())
    for f in tmp.glob("out*"):
        f.unlink()
    return wall, wall - report["seconds"]["load"], cpu, report["output_tokens"]


def peer(name, model, rows, tmp):
    src = tmp / "job.jsonl"
    src.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    cpu = cpu_seconds()
    p = subprocess.run([PEERS, ROOT / "scripts" / "bench_peer.py", name, model, src, str(THREADS)], capture_output=True, text=True)
    if p.returncode or not p.stdout.strip():
        return None
    r = json.loads(p.stdout.strip().splitlines()[-1])
    return r["load_s"] + r["run_s"], r["run_s"], cpu_seconds() - cpu, r["output_tokens"]


def job_line(name, runs, ours):
    """The median of runs by the time without loading, beside ours."""
    runs = sorted((r for r in runs if r), key=lambda r: r[1])
    if not runs:
        return (name, "did not run", "", "", "", "", "")
    wall, busy, cpu, n = runs[len(runs) // 2]
    return (name, f"{wall:.1f}", f"{busy:.1f}", f"{cpu:.1f}", f"{n / busy:.0f}",
            f"{ours[3] / ours[1] / (n / busy):.2f}", f"{ours[3] / ours[2] / (n / cpu):.2f}")


def jobs(binary, model, rounds=3):
    name, rows = job_rows()
    ours, theirs = [], {}
    peers = [p for p in ("openvino", "llama") if PEERS.exists()]
    with tempfile.TemporaryDirectory() as t:
        for i in range(rounds if peers else 1):  # in turn, so that all meet the same machine
            ours.append(whole_job(binary, model, rows, pathlib.Path(t)))
            for p in peers if i == 0 else peers[:1]:  # one row at a time takes long: llama.cpp runs once
                theirs.setdefault(p, []).append(peer(p, model, rows, pathlib.Path(t)))
    middle = sorted(ours, key=lambda r: r[1])[len(ours) // 2]
    out = [job_line("millrace", ours, middle)] + [job_line(p, r, middle) for p, r in theirs.items()]
    head = (f"{name}, {len(rows)} rows, median of {len(ours)}", "s", "s without loading", "CPU s", "output tok/s",
            "millrace is faster by", "by CPU time")
    table(head, out)


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    binary, models = pathlib.Path(sys.argv[1]).resolve(), sys.argv[2:]
    print(f"{time.strftime('%Y-%m-%d')}, {THREADS} threads, load {os.getloadavg()[0]:.1f}\n")
    print(run(binary, "bench", "machine"))
    print(run(binary, "bench", "kernels"))
    for m in models:
        throughput(binary, m)
    jobs(binary, models[0])


main()

#!/usr/bin/env python3
"""Memory of plan, run, check and merge at several sizes of a job: memory.py BINARY [long [MODEL]]

Peaks are what the kernel counted (ru_maxrss) with a tiny model, so that the model does not matter. The short form compares two
sizes: what grew for each row must be less than a table with a number a row would take. `long` goes to 10 million rows and takes
about half an hour; with MODEL, it also plans with that model and says what is resident beside the mapped file.
"""
import os, pathlib, re, subprocess, sys, tempfile, threading, time
import tinyjob

binary = os.path.realpath(sys.argv[1])
long = sys.argv[2:3] == ["long"]
model = sys.argv[3] if len(sys.argv) > 3 else None
MIB = 1 << 20
LIMIT_MIB = 300
failed = 0


def check(name, ok, figure):
    global failed
    failed += not ok
    print(f"{'ok  ' if ok else 'FAIL'} {name}: {figure}", flush=True)


def write_rows(path, n, bad=False):
    """n rows; all but the first bad ones, if so."""
    with open(path, "w") as f:
        for i in range(n):
            f.write('{"id":"r%d","prompt":5}\n' % i if bad and i else '{"id":"r%d","prompt":"a%d","max_tokens":1}\n' % (i, i))


def watch(pid, mapped, peak):
    """The most that is resident beside the mapping of a file, looked at ten times a second."""
    while True:
        try:
            text = pathlib.Path(f"/proc/{pid}/smaps").read_text()
        except OSError:
            return
        beside = 0
        for part in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", text, flags=re.M):
            rss = re.search(r"^Rss:\s+(\d+)", part, re.M)
            if rss and not part.split("\n", 1)[0].endswith(mapped):
                beside += int(rss[1])
        peak[0] = max(peak[0], beside // 1024)
        time.sleep(0.1)


def run(args, expect, mapped=None):
    """(peak in MiB, seconds of CPU): of the whole process, or beside the mapped file."""
    peak = [0]
    p = subprocess.Popen([binary, *args], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    if mapped:
        threading.Thread(target=watch, args=(p.pid, mapped, peak), daemon=True).start()
    said = p.stderr.read()
    _, status, used = os.wait4(p.pid, 0)
    p.returncode = os.waitstatus_to_exitcode(status)
    if p.returncode not in expect:
        sys.exit(f"{' '.join(args)} ends with {p.returncode}: {said.decode()[-300:]}")
    return peak[0] if mapped else used.ru_maxrss // 1024, used.ru_utime + used.ru_stime


def tiny(work):
    return ["-m", f"{work}/tiny.gguf", "--threads", "1", "--kv-memory", "8MiB"]


def plan(work, rows):
    return run(["plan", rows, *tiny(work)], (0,))


def plan_model(work, rows):
    return run(["plan", rows, "-m", model, "--kv-memory", "64MiB"], (0,), os.path.basename(model))


def job(work, rows):
    return run(["run", rows, *tiny(work), "-o", f"{work}/o.jsonl.zst", "--progress", "none"], (0, 1))


def check_output(work, rows):
    return run(["check", f"{work}/o.jsonl.zst"], (0,))


def merge(work, rows):
    """Both halves of the job, and their merger."""
    for i in (1, 2):
        run(["run", rows, *tiny(work), "-o", f"{work}/s{i}.jsonl.zst", "--shard", f"{i}/2", "--progress", "none", "--created", "1"],
            (0, 1))
    return run(["merge", "-o", f"{work}/merged.jsonl.zst", f"{work}/s1.jsonl.zst", f"{work}/s2.jsonl.zst"], (0, 1))


def measure(work, name, what, sizes, bad=False):
    """Runs `what` on jobs of these sizes. [(rows, MiB)]"""
    peaks = []
    for n in sizes:
        rows = f"{work}/{'bad' if bad else 'good'}{n}.jsonl"
        if not os.path.exists(rows):
            write_rows(rows, n, bad)
        for f in pathlib.Path(work).glob("[osm]*.jsonl.zst" if what in (job, merge) else "none"):
            for old in pathlib.Path(work).glob(f.name.split(".")[0] + ".*"):
                old.unlink()
        mib, cpu = what(work, rows)
        peaks.append((n, mib))
        print(f"     {name:28} {n:>10} rows {mib:>5} MiB {cpu:>7.1f} s of CPU", flush=True)
    return peaks


def flat(name, peaks, bytes_a_row):
    (n0, m0), (n1, m1) = peaks[0], peaks[-1]
    grown = (m1 - m0) * MIB / (n1 - n0)
    check(name, grown < bytes_a_row and m1 <= LIMIT_MIB,
          f"{m0} MiB for {n0} rows, {m1} MiB for {n1}: {max(grown, 0):.1f} bytes a row, under {bytes_a_row}")


def main():
    sizes = (1_000_000, 3_000_000, 10_000_000) if long else (100_000, 400_000)
    short = sizes if long else (60_000, 240_000)
    # A table of 8 bytes a row would show in the long form; in the short one buffers still fill.
    few = 7 if long else 56
    with tempfile.TemporaryDirectory() as work:
        tinyjob.write_model(f"{work}/tiny.gguf")
        if long and model:
            flat("plan with the model, beside its mapping", measure(work, "plan, the model", plan_model, sizes), few)
        flat("plan", measure(work, "plan", plan, sizes), few)
        runs, checks = [], []
        for n in short:
            runs += measure(work, "run", job, (n,))
            checks += measure(work, "check", check_output, (n,))
        flat("run", runs, few)
        flat("check", checks, few)
        flat("run of error rows", measure(work, "run, all but one bad", job, short, bad=True), few)
        if long:
            flat("merge", measure(work, "merge of two shards", merge, sizes[:2]), 24)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

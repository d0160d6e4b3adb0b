#!/usr/bin/env python3
"""kill -9 at random times, resumed each time: kill.py BINARY KILLS [SEED]

Each job is killed until it ends. Then its files must be those of a job that was never disturbed, byte by byte (but for
`created`, the time of its first start), and while it runs the rows that `status` counts as done never become fewer.
"""
import json, os, pathlib, random, re, subprocess, sys, tempfile, time
import tinyjob

ROWS = 3000
binary, kills = os.path.realpath(sys.argv[1]), int(sys.argv[2])
seed = int(sys.argv[3]) if len(sys.argv) > 3 else int(time.time())
dice = random.Random(seed)
problems = []


def command(work, out):
    return [binary, "run", f"{work}/rows.jsonl", "-m", f"{work}/tiny.gguf", "-o", f"{out}.jsonl", "--threads", "1",
            "--max-batch", "32", "--kv-memory", "8MiB", "--progress", "none"]


def files(out):
    """The lines of both files and the time of the first start; "created" is taken out of the lines."""
    created = json.load(open(f"{out}.manifest.json"))["identity"]["created"]
    text = open(f"{out}.jsonl", "rb").read()
    stamps = set(re.findall(rb'"created":(\d+)', text))
    if stamps != {str(created).encode()}:
        problems.append(f"{out}: created is {stamps}, the job was first started at {created}")
    return re.sub(rb'"created":\d+', b'"created":0', text), open(f"{out}.errors.jsonl.zst", "rb").read()


def done_rows(out):
    p = subprocess.run([binary, "status", str(out), "--json"], capture_output=True, text=True)
    return json.loads(p.stdout)["rows_done"] if p.returncode == 0 and p.stdout else 0


def kill_once(work, out, longest):
    """True if the run was killed, False if it ended by itself, well."""
    p = subprocess.Popen(command(work, out), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        _, said = p.communicate(timeout=dice.uniform(0, longest))
    except subprocess.TimeoutExpired:
        p.kill()
        p.communicate()
        return True
    if p.returncode != 1:
        problems.append(f"{out}: a resumed run ends with {p.returncode}: {said.decode()[-200:]}")
    return False


def one_job(work, out, longest, left):
    """Kills one job until it ends or `left` kills are spent; the number of kills."""
    n, before = 0, 0
    while n < left and kill_once(work, out, longest):
        n += 1
        now = done_rows(out)
        if now < before:
            problems.append(f"{out}: {before} rows were done, then {now} (kill {n})")
        before = now
    p = subprocess.run(command(work, out), capture_output=True, text=True)
    if p.returncode != 1:
        problems.append(f"{out}: the last run ends with {p.returncode}: {p.stderr[-200:]}")
    return n


def main():
    with tempfile.TemporaryDirectory() as work:
        tinyjob.write_model(f"{work}/tiny.gguf")
        tinyjob.write_rows(f"{work}/rows.jsonl", ROWS)
        start = time.time()
        if subprocess.run(command(work, f"{work}/ref"), capture_output=True).returncode != 1:
            sys.exit("the undisturbed job fails")
        whole = time.time() - start
        want = files(f"{work}/ref")
        n = jobs = 0
        while n < kills and len(problems) < 10:
            out = pathlib.Path(f"{work}/job{jobs}")
            start = time.time()
            more = one_job(work, out, whole * dice.choice((0.2, 0.5, 1.0)), kills - n)
            if more == 0:
                whole = min(whole, time.time() - start)  # the first one may have had to share the machine
            n += more
            jobs += 1
            if files(out) != want:
                problems.append(f"{out}: the files differ from those of an undisturbed job")
            if pathlib.Path(f"{out}.run").exists():
                problems.append(f"{out}.run is still there")
            if subprocess.run([binary, "check", f"{out}.jsonl"], capture_output=True).returncode != 0:
                problems.append(f"{out}: check is not content")
            for f in pathlib.Path(work).glob(f"job{jobs - 1}.*"):
                f.unlink() if f.is_file() else None
            if jobs % 10 == 0:
                print(f"{n} kills over {jobs} jobs, {len(problems)} problems", flush=True)
        print("\n".join(problems[:20]))
        print(f"{n} kills over {jobs} jobs of {ROWS} rows (a whole one takes {whole:.2f} s), seed {seed}: "
              f"{len(problems)} problems")
    return 1 if problems or n < kills else 0


if __name__ == "__main__":
    sys.exit(main())

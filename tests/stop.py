#!/usr/bin/env python3
"""Signals, locks, closed files and full disks, with the real program: stop.py BINARY

Each check prints a line; the exit status is 1 if one failed. What needs a mount is left out where mounting is not allowed.
"""
import json, os, pathlib, signal, subprocess, sys, tempfile, time
import tinyjob

binary = os.path.realpath(sys.argv[1])
failed = 0
MANY = 16000


def check(name, ok, figure=""):
    global failed
    failed += not ok
    print(f"{'ok  ' if ok else 'FAIL'} {name}: {figure}", flush=True)


def command(work, out, rows="rows.jsonl", *more):
    return [binary, "run", f"{work}/{rows}", "-m", f"{work}/tiny.gguf", "-o", str(out), "--threads", "1", "--kv-memory",
            "8MiB", "--max-batch", "8", "--kv-disk", "8MiB", "--progress", "line", *more]


def run(args, **kw):
    kw.setdefault("stderr", subprocess.PIPE)
    kw.setdefault("stdout", subprocess.DEVNULL)
    return subprocess.run(args, timeout=120, **kw)


def start(args, **kw):
    return subprocess.Popen(args, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, **kw)


def wait_for(p, phase):
    """Until the run says that it is in this phase."""
    for line in p.stderr:
        if line.startswith(f"millrace: {phase}"):
            return True
    return False


def end(p, limit):
    """(exit status or "late", seconds, what it said)"""
    t = time.time()
    try:
        _, said = p.communicate(timeout=limit)
        return p.returncode, time.time() - t, said
    except subprocess.TimeoutExpired:
        p.kill()
        p.communicate()
        return "late", limit, ""


def write_rows(work, name, n):
    """Without rows that hold the time."""
    tinyjob.write_rows(f"{work}/all.jsonl", n)
    lines = [x for x in open(f"{work}/all.jsonl") if "custom_id" not in x]
    open(f"{work}/{name}", "w").writelines(lines)


def undisturbed(work, name):
    """What the job gives."""
    out = pathlib.Path(f"{work}/want-{name}")
    for f in out.parent.glob(f"{out.stem}.*"):
        f.unlink()  # of a shorter one
    p = run(command(work, out, name))
    if p.returncode != 1:
        sys.exit(f"the undisturbed job ends with {p.returncode}: {p.stderr.decode()}")
    return out.read_bytes()


def whole(work, out, want, rows="rows.jsonl", *more):
    """The job resumes to the bytes of the undisturbed one."""
    rc = run(command(work, out, rows, *more)).returncode
    return rc == 1 and open(out, "rb").read() == want and run([binary, "check", str(out)]).returncode == 0


# ---------------------------------------------------------------- signals
def phases(work, want_many):
    """SIGTERM in each phase: 75 within 10 s, and the job resumes."""
    for phase in ("preflight", "load", "run", "assemble"):
        out = f"{work}/{phase}.jsonl"
        p = start(command(work, out, "many.jsonl"))
        there = wait_for(p, phase)
        if phase == "run":
            time.sleep(0.05)
        p.send_signal(signal.SIGTERM)
        rc, took, said = end(p, 15)
        may = (75, 1) if phase == "assemble" else (75,)
        check(f"SIGTERM in {phase}", there and rc in may and took < 10, f"exit {rc} after {took:.2f} s")
        check(f"resumed after {phase}", whole(work, out, want_many, "many.jsonl"))


def blocked_input(work):
    """A job that waits for its input: standard input, a FIFO that nobody has opened, one whose writer is silent."""
    os.mkfifo(f"{work}/fifo")
    writer = None
    for name in ("standard input", "a FIFO without a writer", "a FIFO whose writer is silent"):
        out = f"{work}/blocked.jsonl"
        words = command(work, out)
        words[2] = "-" if name == "standard input" else f"{work}/fifo"
        if "silent" in name:
            writer = os.open(f"{work}/fifo", os.O_RDWR)
            os.write(writer, b'{"id":"a","prompt":"b"}\n{"id"')
        p = start(words, stdin=subprocess.PIPE)
        there = wait_for(p, "preflight")
        time.sleep(0.2)
        p.send_signal(signal.SIGTERM)
        t = time.time()
        while p.poll() is None and time.time() - t < 15:
            time.sleep(0.01)
        took = time.time() - t
        check(f"SIGTERM while {name} is awaited", there and p.returncode == 75 and took < 2 and not os.path.exists(f"{work}/blocked.run"),
              f"exit {p.returncode} after {took:.2f} s")
        p.kill()
        p.communicate()
        t = time.time()
        p = start(words + ["--time-limit", "1s"], stdin=subprocess.PIPE)
        try:
            rc = p.wait(10)  # its standard input stays open
        except subprocess.TimeoutExpired:
            rc = "late"
        took = time.time() - t
        p.kill()
        p.communicate()
        check(f"a time limit while {name} is awaited", rc == 75 and took < 5 and not os.path.exists(f"{work}/blocked.run"),
              f"exit {rc} after {took:.2f} s")
    os.close(writer)


def fifo_input(work, want):
    """Rows that come through a FIFO, bit by bit, are the job's rows."""
    text = open(f"{work}/rows.jsonl", "rb").read()
    words = command(work, f"{work}/piped.jsonl")
    words[2] = f"{work}/fifo"
    p = start(words)
    with open(f"{work}/fifo", "wb", buffering=0) as f:
        for i in range(0, len(text), 501):
            f.write(text[i:i + 501])
    rc, _, _ = end(p, 60)
    check("rows through a FIFO", rc == 1 and open(f"{work}/piped.jsonl", "rb").read() == want, f"exit {rc}")


def changed_clock(work):
    """--until where the clock is put on in three seconds to the time that is named, an hour ahead."""
    at = int(time.time()) + 3
    ahead, t = 3600 + -at % 60, time.gmtime(at)
    zone = time.strftime(f"AAA0BBB-%H:%M:%S,{t.tm_yday - 1}/", time.gmtime(ahead)) + time.strftime("%H:%M:%S", t) + ",364/23"
    p = start(command(work, f"{work}/until.jsonl", "fifo", "--until", time.strftime("%H:%M", time.gmtime(at + ahead))),
              env=dict(os.environ, TZ=zone))
    rc, took, _ = end(p, 15)
    check("--until over a change of the clock", rc == 75 and took < 9, f"exit {rc} after {took:.2f} s")


def long_job(work):
    """A job that takes this machine 2.5 s or more; what it gives."""
    n, took = MANY, 0
    while took < 2.5:
        n *= 2
        write_rows(work, "long.jsonl", n)
        t = time.time()
        want = undisturbed(work, "long.jsonl")
        took = time.time() - t
    return want


def deadlines(work):
    """Runs of a second each: 75 in time, with rows done in each, until the job is done. Memory may differ each time."""
    want = long_job(work)
    for i, (name, all_more) in enumerate((("with saved keys and values", [()]), ("without", [("--kv-disk", "0")]),
                                          ("with other memory each time", [(), ("--kv-memory", "128KiB", "--max-batch", "3")]))):
        out, ends, rc = f"{work}/limit-{i}.jsonl", [], 75
        while rc == 75 and len(ends) < 60:
            t, more = time.time(), all_more[len(ends) % len(all_more)]
            rc = run(command(work, out, "long.jsonl", "--time-limit", "1s", *more)).returncode
            ends.append(time.time() - t)
        check(f"a time limit of 1 s, {name}", rc == 1 and len(ends) > 1 and max(ends[:-1]) < 5 and
              open(out, "rb").read() == want, f"exit {rc}, {len(ends)} runs, the longest {max(ends):.2f} s")


def second_signal(work, want_many):
    out = f"{work}/second.jsonl"
    p = start(command(work, out, "many.jsonl"))
    wait_for(p, "run")
    time.sleep(0.05)
    p.send_signal(signal.SIGINT)
    p.send_signal(signal.SIGTERM)
    rc, took, _ = end(p, 15)
    check("the second signal stops at once", rc == 75 and took < 1, f"exit {rc} after {took:.2f} s")
    check("resumed after it", whole(work, out, want_many, "many.jsonl"))


def harmless_signals(work, want_many):
    out = f"{work}/hup.jsonl"
    p = start(command(work, out, "many.jsonl"))
    wait_for(p, "run")
    p.send_signal(signal.SIGHUP)
    p.send_signal(signal.SIGPIPE)
    p.send_signal(signal.SIGUSR1)
    rc, _, said = end(p, 60)
    check("SIGHUP and SIGPIPE do nothing", rc == 1 and open(out, "rb").read() == want_many, f"exit {rc}")
    check("SIGUSR1 prints progress", "millrace: run" in said, said.split("\n")[0][:90])


# ---------------------------------------------------------------- two runs
def two_runs(work, want_many):
    out = f"{work}/two.jsonl"
    p = start(command(work, out, "many.jsonl"))
    wait_for(p, "run")
    t = time.time()
    other = run(command(work, out, "many.jsonl"))
    took = time.time() - t
    check("a second run on the same output", other.returncode == 75 and took < 2 and b"another run" in other.stderr,
          f"exit {other.returncode} after {took:.2f} s: {other.stderr.decode().strip()[-90:]}")
    rc, _, _ = end(p, 60)
    check("the first is not disturbed", rc == 1 and open(out, "rb").read() == want_many, f"exit {rc}")


# ---------------------------------------------------------------- standard files
def closed_files(work, want):
    for which in ("2>&-", "<&- >&- 2>&-"):
        out = f"{work}/closed{len(which)}.jsonl"
        p = run(["bash", "-c", 'exec "$@" ' + which, "bash", *command(work, out)])
        check(f"closed standard files {which}", p.returncode == 1 and open(out, "rb").read() == want, f"exit {p.returncode}")
    with open("/dev/full", "w") as full:
        p = run(command(work, "-"), stdout=full)
        check("standard output on a full disk", p.returncode == 74, f"exit {p.returncode}: {p.stderr.decode().strip()[-70:]}")
        out = f"{work}/stderrfull.jsonl"
        p = run(command(work, out), stderr=full)
        check("standard error on a full disk", p.returncode == 1 and open(out, "rb").read() == want, f"exit {p.returncode}")
    p = run(["bash", "-c", '"$@" | true; exit ${PIPESTATUS[0]}', "bash", *command(work, "-", "many.jsonl")])
    check("standard output whose reader has gone", p.returncode == 74, f"exit {p.returncode}")


# ---------------------------------------------------------------- outputs that cannot be
def refused_outputs(work):
    rows = f"{work}/rows.jsonl"
    before = open(rows, "rb").read()
    os.symlink(rows, f"{work}/symlink.jsonl")
    os.link(rows, f"{work}/hardlink.jsonl")
    for name in ("rows.jsonl", "./rows.jsonl", "symlink.jsonl", "hardlink.jsonl"):
        p = run(command(work, f"{work}/{name}"))
        left = os.path.exists(f"{work}/{name[:-6]}.run")
        check(f"output {name} that is the input", p.returncode in (64, 73) and open(rows, "rb").read() == before and not left,
              f"exit {p.returncode}: {p.stderr.decode().strip()[-90:]}")
    for out in ("/dev/full", f"{work}/no/such/folder/o.jsonl", f"{work}/tiny.gguf/o.jsonl"):
        p = run(command(work, out))
        check(f"output {out.replace(work, '')}", p.returncode in (64, 73), f"exit {p.returncode}: {p.stderr.decode().strip()[-90:]}")


def read_only(work):
    d = pathlib.Path(f"{work}/readonly")
    d.mkdir()
    mounted = os.geteuid() == 0 and subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", d], stderr=-3).returncode == 0
    if os.geteuid() == 0 and not mounted:
        return print("skip read-only folder: root, and no mount allowed")
    d.chmod(0o555) if not mounted else None
    p = run(command(work, d / "o.jsonl"))
    check("read-only folder", p.returncode == 73 and not os.listdir(d), f"exit {p.returncode}: {p.stderr.decode().strip()[-90:]}")
    subprocess.run(["umount", d]) if mounted else d.chmod(0o755)


# ---------------------------------------------------------------- room
def file_size_limit(work, want):
    """Limits of the size of a file from small to enough: 74 until it is done, each time a little further."""
    out, codes = f"{work}/limit.jsonl", []
    for blocks in (1, 4, 8, 16, 64, 1024):
        p = run(["bash", "-c", f'ulimit -f {blocks}; exec "$@"', "bash", *command(work, out)])
        codes.append(p.returncode)
        if p.returncode != 74:
            break
    check("a limit of the size of files", codes[0] == 74 and codes[-1] == 1 and set(codes[:-1]) == {74} and
          open(out, "rb").read() == want, f"exits {codes}")


def merge_with_limit(work):
    """A merge that may not write is told so by its exit status, and is made by the same command without the limit."""
    for i in (1, 2):
        run(command(work, f"{work}/part-{i}.jsonl", "rows.jsonl", "--shard", f"{i}/2", "--created", "5"))
    words = [binary, "merge", "-o", f"{work}/merged.jsonl", f"{work}/part-1", f"{work}/part-2"]
    limited = run(["bash", "-c", 'ulimit -f 0; exec "$@"', "bash", *words])
    again = run(words)
    check("a merge with a limit of the size of files", limited.returncode == 74 and again.returncode in (0, 1),
          f"exits {limited.returncode}, {again.returncode}")


def full_disk(work, want_many):
    d = f"{work}/small"
    os.mkdir(d)
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", d], stderr=-3).returncode:
        return print("skip full disk: no mount allowed")
    try:
        codes = []
        for size in (64, 128, 256, 512, 1024, 2048, 65536):
            subprocess.run(["mount", "-o", f"remount,size={size}k", d], check=True)
            codes.append(run(command(work, f"{d}/o.jsonl", "many.jsonl")).returncode)
            if codes[-1] != 74:
                break
        check("a full disk that grows", codes[0] == 74 and codes[-1] == 1 and set(codes[:-1]) == {74} and
              open(f"{d}/o.jsonl", "rb").read() == want_many, f"exits {codes}")
    finally:
        subprocess.run(["umount", d])


def main():
    with tempfile.TemporaryDirectory() as work:
        tinyjob.write_model(f"{work}/tiny.gguf")
        write_rows(work, "rows.jsonl", 60)
        write_rows(work, "many.jsonl", MANY)
        few, many = undisturbed(work, "rows.jsonl"), undisturbed(work, "many.jsonl")
        phases(work, many)
        blocked_input(work)
        changed_clock(work)
        fifo_input(work, few)
        deadlines(work)
        second_signal(work, many)
        harmless_signals(work, many)
        two_runs(work, many)
        closed_files(work, few)
        refused_outputs(work)
        read_only(work)
        file_size_limit(work, few)
        merge_with_limit(work)
        full_disk(work, many)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

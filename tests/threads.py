#!/usr/bin/env python3
"""A job with several threads and with keys and values on disk gives the bytes of one thread: threads.py BINARY

Made for the thread sanitizer's build, whose binary fails when it has seen a race.
"""
import os, subprocess, sys, tempfile
import tinyjob

ROWS = 400


def main():
    results = set()
    with tempfile.TemporaryDirectory() as work:
        tinyjob.write_model(f"{work}/tiny.gguf")
        tinyjob.write_rows(f"{work}/rows.jsonl", ROWS)
        for i, more in enumerate((["--threads", "1"], ["--threads", "4"],
                                  ["--threads", "4", "--kv-memory", "64KiB", "--kv-disk", "4MiB", "--kv-policy", "spill",
                                   "--spill-dir", work])):
            out = f"{work}/o{i}.jsonl"
            p = subprocess.run([sys.argv[1], "run", f"{work}/rows.jsonl", "-m", f"{work}/tiny.gguf", "-o", out, "--created", "1",
                                "--progress", "none", *more], stderr=subprocess.PIPE)
            print(f"{' '.join(more)}: exit {p.returncode}")
            if p.returncode != 1:
                sys.exit(p.stderr.decode()[-4000:])
            results.add(open(out, "rb").read())
    return 0 if len(results) == 1 else 1


if __name__ == "__main__":
    os.environ.setdefault("TSAN_OPTIONS", "halt_on_error=1")
    sys.exit(main())

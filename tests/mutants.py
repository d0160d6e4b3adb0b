#!/usr/bin/env python3
"""Plants faults into the GPU's kernels, one at a time, and sees whether the tests find each. mutants.py BUILD
Exit 1: one was not found, or the text that it changes is not there any more."""
import pathlib, shutil, subprocess, sys, tempfile
from concurrent.futures import ThreadPoolExecutor

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = (ROOT / sys.argv[1]).resolve()
SYNC, MFMA, WMMA = ("sync", "MR_MMA_SYNC"), ("mfma", "MR_MMA_MFMA"), ("wmma", "MR_MMA_WMMA")
# name, file, text (its last occurrence is changed), what it becomes, machine, test program
MUTANTS = [
    ("a barrier is missing after the products", "gemm.cu", "multiply<ROWS, KIND, TILES>(c, s, i % STAGES, row, col);\n    MR_BARRIER();",
     "multiply<ROWS, KIND, TILES>(c, s, i % STAGES, row, col);", SYNC, "kernels"),
    ("a wait is one group short", "gemm.cu", "mr_async_wait<1>();", "mr_async_wait<2>();", SYNC, "kernels"),
    ("the last copy is not waited for", "gemm.cu", "mr_async_wait<0>();", "mr_async_wait<1>();", SYNC, "kernels"),
    ("mma.sync: columns and k of B are mixed up", "mma.h", "(g + i / 2 * 8) * ld + t * 2 + i % 2 * 8);", "(g + i % 2 * 8) * ld + t * 2 + i / 2 * 8);", SYNC, "kernels"),
    ("MFMA: wrong rows of C", "mma.h", "return MR_LANE / 16 * 4 + i;", "return MR_LANE / 16 + i * 4;", MFMA, "kernels"),
    ("WMMA: wrong rows of C", "mma.h", "return 2 * i + MR_LANE / 16;", "return i + MR_LANE / 16 * 8;", WMMA, "kernels"),
    ("the low plane is left out", "gemm.cu", "mr_mma(c[t], low, w);", "", SYNC, "kernels"),
    ("a block's sum misses its barrier", "gpu.h", "room[MR_THREAD / MR_WARP] = x;\n  MR_BARRIER();", "room[MR_THREAD / MR_WARP] = x;", MFMA, "kernels"),
    ("a warp does not wait for its scores", "attn.cu", "scores(a, b, ready);\n      MR_WARP_SYNC();", "scores(a, b, ready);", SYNC, "attention"),
    ("a warp resets another's sums", "attn.cu", "b.stat[16 * b.warp + MR_LANE].max = MR_MINUS_INF;",
     "b.stat[(16 * b.warp + MR_LANE + 16) % b.rows].max = MR_MINUS_INF;", SYNC, "attention"),
    ("a page is read before it is there", "attn.cu", "mr_async_wait<1>();", "mr_async_wait<2>();", SYNC, "attention"),
    ("a window is one too wide", "attn.cu", "pos - a.window + 1)", "pos - a.window)", SYNC, "attention"),
    ("keys that nobody wrote are read", "attn.cu", "bool there = j < p.keys &&", "bool there =", SYNC, "attention"),
    ("a head is rotated before all of it is there", "heads.cu", "line[i] = clipped(x[i], a.clip);\n  MR_WARP_SYNC();", "line[i] = clipped(x[i], a.clip);", SYNC, "attention"),
    ("a head is rotated while it is still stored", "heads.cu", "  MR_WARP_SYNC(); /* values may be this line */\n", "", SYNC, "attention"),
    ("a page is converted while it is used", "attn.cu", "convert_page(a, b, page, stage);\n      MR_BARRIER();", "convert_page(a, b, page, stage);", SYNC, "attention"),
    ("weights are multiplied while they are widened", "gemm.cu", "i * MR_GPU_K);\n      MR_BARRIER();", "i * MR_GPU_K);", SYNC, "kernels"),
    ("a histogram is read before it is whole", "top.cu", "mr_count(&s->bins[key >> shift & 255u]);\n  }\n  MR_BARRIER();", "mr_count(&s->bins[key >> shift & 255u]);\n  }", SYNC, "kernels"),
    ("equal logits are taken whatever their id", "top.cu", "while (s->equal > s->need && high", "while (0 && high", SYNC, "kernels"),
    ("a row out of reach is not computed again", "attn.cu", "return !(mr_abs(max - a.phi) < a.reach);", "return false;", SYNC, "attention"),
]


def run(*command):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace")


def one(mutant):
    name, file, old, new, (machine, define), test = mutant
    with tempfile.TemporaryDirectory(prefix="mutant-") as tmp:
        tmp = pathlib.Path(tmp)
        shutil.copytree(ROOT / "kernels" / "gpu", tmp / "kernels" / "gpu")
        path = tmp / "kernels" / "gpu" / file
        text = path.read_text()
        at = text.rfind(old)
        if at < 0:
            return name, "the text to change is not there"
        path.write_text(text[:at] + new + text[at + len(old):])
        r = run("g++", "-x", "c++", "-std=gnu++17", "-O1", "-march=x86-64-v2", "-ffp-contract=off", "-fno-exceptions", "-fno-rtti", "-fPIC", "-w",
                f"-I{tmp}", f"-DMR_MMA={define}", f"-DMR_EMU_TABLE=mr_emu_{machine}", "-c", "-o", tmp / "emu.o", tmp / "kernels/gpu/all.cu")
        if r.returncode:
            return name, "does not compile: " + r.stderr[-300:]
        r = run("gcc", "-std=c11", "-D_GNU_SOURCE", "-O1", "-w", "-pthread", "-I.", "-o", tmp / "test", f"tests/unit/test_gpu_{test}.c", tmp / "emu.o",
                BUILD / "libmillrace.a", "-lcmocka", "-lzstd", "-larchive", "-lz", "-ljansson", "-lpcre2-8", "-lutf8proc", "-lxxhash", "-lm", "-ldl")
        if r.returncode:
            return name, "does not link: " + r.stderr[-300:]
        try:
            found = subprocess.run([tmp / "test"], cwd=ROOT, capture_output=True, timeout=120).returncode != 0
        except subprocess.TimeoutExpired:
            found = True
        return name, "" if found else "no test finds it"


bad = 0
with ThreadPoolExecutor(2) as pool:
    for name, why in pool.map(one, MUTANTS):
        print(f"{'FAIL' if why else 'ok  '} {name}{': ' if why else ''}{why}", flush=True)
        bad += bool(why)
print(f"{len(MUTANTS) - bad} of {len(MUTANTS)} planted faults are found")
sys.exit(1 if bad else 0)

#!/usr/bin/env python3
"""Plants faults into the GPU's kernels and the code that waits for them, one at a time, and sees whether the tests find each. mutants.py BUILD
Exit 1: one was not found, or the text that it changes is not there any more."""
import itertools, pathlib, shutil, subprocess, sys, tempfile
from concurrent.futures import ThreadPoolExecutor

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = (ROOT / sys.argv[1]).resolve()
SYNC, MFMA, WMMA = ("sync", "MR_MMA_SYNC"), ("mfma", "MR_MMA_MFMA"), ("wmma", "MR_MMA_WMMA")
# name, file, text (its last occurrence is changed), what it becomes, machine, test program
MUTANTS = [
    ("a barrier is missing after the products", "gemm.cu", "multiply<ROWS, KIND, TILES>(c, s, i % STAGES, row, col);\n    MR_BARRIER();",
     "multiply<ROWS, KIND, TILES>(c, s, i % STAGES, row, col);", SYNC, "gpu_kernels"),
    ("a wait is one group short", "gemm.cu", "mr_async_wait<1>();", "mr_async_wait<2>();", SYNC, "gpu_kernels"),
    ("the last copy is not waited for", "gemm.cu", "mr_async_wait<0>();", "mr_async_wait<1>();", SYNC, "gpu_kernels"),
    ("mma.sync: columns and k of B are mixed up", "mma.h", "(g + i / 2 * 8) * ld + t * 2 + i % 2 * 8);", "(g + i % 2 * 8) * ld + t * 2 + i / 2 * 8);", SYNC, "gpu_kernels"),
    ("MFMA: wrong rows of C", "mma.h", "return MR_LANE / 16 * 4 + i;", "return MR_LANE / 16 + i * 4;", MFMA, "gpu_kernels"),
    ("WMMA: wrong rows of C", "mma.h", "return 2 * i + MR_LANE / 16;", "return i + MR_LANE / 16 * 8;", WMMA, "gpu_kernels"),
    ("the low plane is left out", "gemm.cu", "mr_mma(c[t], low, w);", "", SYNC, "gpu_kernels"),
    ("a block's sum misses its barrier", "gpu.h", "room[MR_THREAD / MR_WARP] = x;\n  MR_BARRIER();", "room[MR_THREAD / MR_WARP] = x;", MFMA, "gpu_kernels"),
    ("a warp does not wait for its scores", "attn.cu", "scores(a, b, ready);\n      MR_WARP_SYNC();", "scores(a, b, ready);", SYNC, "gpu_attention"),
    ("a warp resets another's sums", "attn.cu", "b.stat[16 * b.warp + MR_LANE].max = MR_MINUS_INF;",
     "b.stat[(16 * b.warp + MR_LANE + 16) % b.rows].max = MR_MINUS_INF;", SYNC, "gpu_attention"),
    ("a page is read before it is there", "attn.cu", "mr_async_wait<1>();", "mr_async_wait<2>();", SYNC, "gpu_attention"),
    ("a window is one too wide", "attn.cu", "pos - a.window + 1)", "pos - a.window)", SYNC, "gpu_attention"),
    ("keys that nobody wrote are read", "attn.cu", "bool there = j < p.keys &&", "bool there =", SYNC, "gpu_attention"),
    ("a head is rotated before all of it is there", "heads.cu", "line[i] = clipped(x[i], a.clip);\n  MR_WARP_SYNC();", "line[i] = clipped(x[i], a.clip);", SYNC, "gpu_attention"),
    ("a head is rotated while it is still stored", "heads.cu", "  MR_WARP_SYNC(); /* values may be this line */\n", "", SYNC, "gpu_attention"),
    ("a page is converted while it is used", "attn.cu", "convert_page(a, b, page, stage);\n      MR_BARRIER();", "convert_page(a, b, page, stage);", SYNC, "gpu_attention"),
    ("weights are multiplied while they are widened", "gemm.cu", "i * MR_GPU_K);\n      MR_BARRIER();", "i * MR_GPU_K);", SYNC, "gpu_kernels"),
    ("a histogram is read before it is whole", "top.cu", "mr_count(&s->bins[key >> shift & 255u]);\n  }\n  MR_BARRIER();", "mr_count(&s->bins[key >> shift & 255u]);\n  }", SYNC, "gpu_kernels"),
    ("equal logits are taken whatever their id", "top.cu", "while (s->equal > s->need && high", "while (0 && high", SYNC, "gpu_kernels"),
    ("an adapter's sums are read before they are whole", "lora.cu", "[mr_col(i)] = c.r[i];\n  MR_BARRIER();", "[mr_col(i)] = c.r[i];", SYNC, "gpu_kernels"),
    ("what lies behind an adapter's ranks is read", "lora.cu", "i < count ? from[i] : (mr_gpu_bf16)0;", "from[i];", SYNC, "gpu_kernels"),
    ("a row gets the adapter of its neighbour", "lora.cu", "a.slots.adapter[a.slots.from[b.first + r]] == b.adapter);", "true);", SYNC, "gpu_kernels"),
    ("what a group left of a row is not taken", "attn.cu", "float total = before ? before[c] : 0", "float total = 0", SYNC, "gpu_attention"),
    ("a member's position is taken for its place in the group", "attn.cu", "return a.members ? a.members[token] : token;", "return token;", SYNC, "gpu_attention"),
    ("an expert is looked for while the last one is struck out", "route.cu", "s.choice[best] = MR_MINUS_INF;\n    MR_WARP_SYNC();", "s.choice[best] = MR_MINUS_INF;", SYNC, "gpu_experts"),
    ("experts outside the best groups are chosen", "route.cu", "for (int drop = a.groups - a.best_groups; drop > 0; drop--) {", "for (int drop = 0; drop > 0; drop--) {", MFMA, "gpu_experts"),
    ("counts of an expert's rows are written over", "route.cu", "at += s->of_warp[w];\n    }\n    MR_BARRIER();", "at += s->of_warp[w];\n    }", SYNC, "gpu_experts"),
    ("an expert's weights are taken for another type", "gemm.cu", "if (e.hold != KIND)\n    return;", "", SYNC, "gpu_experts"),
    ("a row out of reach is not computed again", "attn.cu", "return !(mr_abs(max - a.phi) < a.reach);", "return false;", SYNC, "gpu_attention"),
]
# of the host: name, file, text, what it becomes, test program
HOST_MUTANTS = [
    ("a layer is computed before its weights are there", "src/backend_gpu_stream.c", "return rc ? rc : o->wait(g->dev, g->stream, s->came[i % 2]);",
     "return rc;", "gpu_stream"),
    ("weights come while the ones before are in use", "src/backend_gpu_stream.c", "mr_code rc = o->wait(g->dev, s->copy, s->free[at]);",
     "mr_code rc = MR_OK;", "gpu_stream"),
    ("rows of the shared expert lie among the others", "src/backend_gpu_experts.c", "size_t first = shared ? chosen_rows(g) : 0;", "size_t first = 0;", "gpu_models"),
    ("a group shares a split that only begins alike", "src/backend_gpu_groups.c", "return n / SPLIT_PAGES;", "return mr_gpu_up(n, SPLIT_PAGES);", "gpu_groups"),
    ("a parked page is written again before it was copied", "src/engine_device.c", "mr_code rc = d->dev->ops->sync(d->dev, d->stream);\n  return rc ? rc\n",
     "mr_code rc = MR_OK;\n  return rc ? rc\n", "engine_device"),
    ("a page is used before it came back", "src/kvtier.c", "p->sent = t->memory && p->n;", "p->sent = false;", "engine_device"),
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
        return name, link_and_run(tmp, test, tmp / "emu.o")


def link_and_run(tmp, test, *objects):
    """Why the fault is not found; empty: it is."""
    r = run("gcc", "-std=c11", "-D_GNU_SOURCE", "-O1", "-w", "-pthread", "-I.", "-Wl,--allow-multiple-definition", "-o", tmp / "test",
            f"tests/unit/test_{test}.c", *objects, BUILD / "libmillrace.a", "-lcmocka", "-lzstd", "-larchive", "-lz", "-ljansson", "-lpcre2-8",
            "-lutf8proc", "-lxxhash", "-lm", "-ldl")
    if r.returncode:
        return "does not link: " + r.stderr[-300:]
    try:
        found = subprocess.run([tmp / "test"], cwd=ROOT, capture_output=True, timeout=120).returncode != 0
    except subprocess.TimeoutExpired:
        found = True
    return "" if found else "no test finds it"


def one_of_host(mutant):
    name, file, old, new, test = mutant
    text = (ROOT / file).read_text()
    if old not in text:
        return name, "the text to change is not there"
    with tempfile.TemporaryDirectory(prefix="mutant-") as tmp:
        path = pathlib.Path(tmp) / "mutant.c"
        path.write_text(text.replace(old, new))
        return name, link_and_run(pathlib.Path(tmp), test, path)


bad = 0
with ThreadPoolExecutor(2) as pool:
    for name, why in itertools.chain(pool.map(one, MUTANTS), pool.map(one_of_host, HOST_MUTANTS)):
        print(f"{'FAIL' if why else 'ok  '} {name}{': ' if why else ''}{why}", flush=True)
        bad += bool(why)
n = len(MUTANTS) + len(HOST_MUTANTS)
print(f"{n - bad} of {n} planted faults are found")
sys.exit(1 if bad else 0)

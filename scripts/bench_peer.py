#!/usr/bin/env python3
"""One peer runs a job of chat rows: bench_peer.py openvino|llama MODEL JOB.jsonl THREADS

Run by scripts/bench.py with the Python of build/peers. The last line of output is a JSON object:
load_s, run_s, output_tokens. Greedy; every row runs to its limit."""
import json, sys, time


def openvino(model, rows, threads):
    import openvino_genai as g
    start = time.monotonic()
    cfg = g.SchedulerConfig()
    cfg.cache_size, cfg.max_num_batched_tokens, cfg.max_num_seqs = 4, 512, 256
    pipe = g.ContinuousBatchingPipeline(model, cfg, "CPU", {"INFERENCE_NUM_THREADS": threads})
    tok = pipe.get_tokenizer()
    prompts = [tok.apply_chat_template(r["body"]["messages"], add_generation_prompt=True) for r in rows]
    configs = []
    for r in rows:
        c = g.GenerationConfig()
        c.max_new_tokens, c.ignore_eos, c.do_sample = r["body"]["max_tokens"], True, False
        configs.append(c)
    loaded = time.monotonic()
    pipe.generate(prompts, configs)
    return loaded - start, time.monotonic() - loaded


def llama(model, rows, threads):
    import llama_cpp
    start = time.monotonic()
    lm = llama_cpp.Llama(model, n_ctx=4096, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False)
    loaded = time.monotonic()
    for r in rows:                                             # its Python face takes one sequence at a time
        lm.create_chat_completion(r["body"]["messages"], max_tokens=r["body"]["max_tokens"], temperature=0,
                                  logit_bias={lm.token_eos(): -100.0})
    return loaded - start, time.monotonic() - loaded


def main():
    name, model, job, threads = sys.argv[1:]
    rows = [json.loads(x) for x in open(job, encoding="utf-8")]
    load_s, run_s = {"openvino": openvino, "llama": llama}[name](model, rows, int(threads))
    print(json.dumps({"load_s": load_s, "run_s": run_s, "output_tokens": sum(r["body"]["max_tokens"] for r in rows)}))


main()

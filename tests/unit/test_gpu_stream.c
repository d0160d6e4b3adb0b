/* Weights that do not fit into a device's memory come over in each step: the same bits, beside the
 * work of the layers before. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#define TINY_GGUF_LAYERS 8

#include "io/mem.h"
#include "src/engine_int.h"
#include "tests/unit/tiny_gguf.h"

enum { ROWS = 3, PROMPT = 20, NEW = 12 };

static char path[64];
static mr_prompter *prompter;
static int32_t prompt[PROMPT];

static int setup(void **state) {
  (void)state;
  mr_err e = MR_ERR_INIT;
  snprintf(path, sizeof path, "/tmp/mr_test_gpu_stream_%d.gguf", (int)getpid());
  for (int t = 0; t < PROMPT; t++)
    prompt[t] = t * 37 % 256;
  return tiny_gguf_write(path, -1) && !mr_prompter_open(&prompter, path, &e) ? 0 : -1;
}

static int teardown(void **state) {
  (void)state;
  mr_prompter_close(prompter);
  unlink(path);
  return (int)mr_mem_live();
}

typedef struct ran {
  int32_t ids[ROWS * NEW];
  float logprobs[ROWS * NEW];
  int streamed;
  uint64_t weights;
  double clock_s, busy_s;
} ran;

static bool admit(mr_engine *e, int i) {
  mr_err err = MR_ERR_INIT;
  mr_request q = {.tag = (uint64_t)i, .prompt = prompt + i, .n_prompt = PROMPT - 5 * i};
  q.sampling = mr_sampling_default;
  q.sampling.temperature = 0;
  q.sampling.max_tokens = NEW;
  q.sampling.ignore_eos = true;
  q.sampling.logprobs = 0;
  mr_code rc = mr_engine_admit(e, &q, &err);
  assert_true(!rc || rc == MR_E_AGAIN);
  return !rc;
}

static void run(const mr_engine_opts *o, ran *out) {
  mr_err err = MR_ERR_INIT;
  mr_engine *e;
  mr_result *r;
  if (mr_engine_open(&e, o, prompter, &err))
    fail_msg("open: %s", err.text);
  for (int done = 0, next = 0; done < ROWS;) {
    while (next < ROWS && admit(e, next))
      next++;
    if (mr_engine_step(e, &err))
      fail_msg("step: %s", err.text);
    for (; (r = mr_engine_collect(e)); done++) {
      for (int t = 0; t < NEW; t++) {
        out->ids[r->tag * NEW + (size_t)t] = r->choices[0].ids[t];
        out->logprobs[r->tag * NEW + (size_t)t] = r->choices[0].logprobs[t].logprob;
      }
      mr_result_free(r);
    }
  }
  out->streamed = e->device.streamed;
  out->weights = e->info.packed_bytes;
  out->clock_s = mr_sim_seconds(e->device.dev);
  out->busy_s = mr_sim_busy(e->device.dev);
  mr_engine_close(e);
}

static mr_engine_opts options(const char *device, int weights) {
  return (mr_engine_opts){.model_path = path,
                          .device = device,
                          .device_weights = weights,
                          .threads = 1,
                          .max_step_tokens = 16,
                          .max_batch = ROWS,
                          .kv_type = -1};
}

/* As many layers as memory asks for, even and odd. */
static void same_bits_in_little_memory(void **state) {
  (void)state;
  static const char *const devices[] = {"sim", "sim:wave64"};
  static ran all, some;
  int last = 0;
  for (int w = 1; w <= 3; w++) {
    mr_engine_opts o = options(devices[w % 2], w);
    if (w == 3) /* layers are small beside the head: little room is left for a step */
      o.max_step_tokens = 8;
    run(&o, &all);
    assert_int_equal(all.streamed, 0);
    for (int share = w < 3 ? 8 : 10; share <= 10; share++) {
      o.device_memory = all.weights / 10 * (uint64_t)share;
      run(&o, &some);
      assert_true(some.streamed >= 3 && some.weights < o.device_memory);
      assert_memory_equal(all.ids, some.ids, sizeof all.ids);
      assert_memory_equal(all.logprobs, some.logprobs, sizeof all.logprobs);
      last |= 1 << some.streamed % 2;
    }
  }
  assert_int_equal(last, 3);
}

/* A layer's copy takes as long as its kernels. */
static void copies_run_beside_layers(void **state) {
  (void)state;
  static ran all, some;
  mr_engine_opts o = options("sim", 1);
  run(&o, &all);
  o.device_memory = all.weights / 10 * 9;
  mr_sim_defaults =
      (mr_sim_opts){.copy_bytes_per_s = 1.1e9, .copy_latency_s = 1e-6, .kernel_s = 4e-6};
  run(&o, &some);
  print_message("%d of %d layers come over: %.2f of the serial time\n", some.streamed, TINY_LAYERS,
                some.clock_s / some.busy_s);
  assert_true(some.clock_s <= 0.6 * some.busy_s);
  assert_memory_equal(all.logprobs, some.logprobs, sizeof all.logprobs);
  /* slow ones are waited for */
  mr_sim_defaults.copy_bytes_per_s = 2e7;
  run(&o, &some);
  mr_sim_defaults = (mr_sim_opts){0};
  assert_memory_equal(all.logprobs, some.logprobs, sizeof all.logprobs);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(same_bits_in_little_memory),
      cmocka_unit_test(copies_run_beside_layers),
  };
  return cmocka_run_group_tests(tests, setup, teardown);
}

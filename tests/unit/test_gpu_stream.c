/* Weights that do not fit into a device's memory come over in each step: the same bits, beside the
 * work of the layers before. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#define TINY_GGUF_LAYERS 8

#include "src/engine_int.h"
#include "tests/unit/engine_rig.h"

enum { ROWS = 3, PROMPT = 20, NEW = 12 };

static int32_t prompt[PROMPT];

static int setup(void **state) {
  for (int t = 0; t < PROMPT; t++)
    prompt[t] = t * 37 % 256;
  return tiny_begin(state, -1);
}

typedef struct ran {
  int32_t ids[ROWS * NEW];
  float logprobs[ROWS * NEW];
  int streamed;
  uint64_t weights;
  double clock_s, busy_s;
} ran;

static void run(const mr_engine_opts *o, ran *out) {
  mr_request reqs[ROWS];
  mr_result *r[ROWS] = {0};
  for (int i = 0; i < ROWS; i++) {
    reqs[i] = generate(prompt + i, PROMPT - 5 * i, NEW);
    reqs[i].tag = (uint64_t)i;
    reqs[i].sampling.ignore_eos = true;
    reqs[i].sampling.logprobs = 0;
  }
  mr_engine *e = open_engine(o, tiny);
  run_all(e, reqs, ROWS, false, r);
  for (int i = 0; i < ROWS; i++)
    for (int t = 0; t < NEW; t++) {
      out->ids[i * NEW + t] = r[i]->choices[0].ids[t];
      out->logprobs[i * NEW + t] = r[i]->choices[0].logprobs[t].logprob;
    }
  free_results(r, ROWS);
  out->streamed = e->device.streamed;
  out->weights = e->info.packed_bytes;
  out->clock_s = mr_sim_seconds(e->device.dev);
  out->busy_s = mr_sim_busy(e->device.dev);
  mr_engine_close(e);
}

static mr_engine_opts options(const char *device, int weights) {
  mr_engine_opts o = tiny_options(device, 16, 0);
  o.compute = MR_COMPUTE_FAST;
  o.device_weights = weights;
  o.max_batch = ROWS;
  return o;
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
  return cmocka_run_group_tests(tests, setup, tiny_end);
}

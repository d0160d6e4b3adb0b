#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "jobs/estimate.h"

static const mr_engine_info small = {.max_batch = 64,
                                     .threads = 1,
                                     .packed_bytes = 1 << 20,
                                     .kv_bytes_per_token = 1024,
                                     .kv_tokens = 10000,
                                     .flops_per_prompt_token = 1e6,
                                     .flops_per_output_token = 2e6};

static mr_estimate estimate(const mr_engine_info *info, mr_workload w) {
  const mr_engine_opts o = {0};
  mr_estimate e;
  mr_err err = MR_ERR_INIT;
  assert_int_equal(mr_estimate_run(info, &o, &w, &e, &err), MR_OK);
  return e;
}

static void rates_are_measured_and_times_add_up(void **state) {
  (void)state;
  mr_estimate e = estimate(&small, (mr_workload){100, 10000, 5000});
  assert_true(e.gemm_flops_per_s > 1e7 && e.memory_bytes_per_s > 1e7 && e.pack_bytes_per_s > 1e5);
  assert_true(e.seconds > 0 && e.seconds >= e.prefill_s + e.decode_s);
  double want = 10000 * 1e6 / e.gemm_flops_per_s;
  assert_true(e.prefill_s > 0.99 * want && e.prefill_s < 1.01 * want);
}

static void the_batch_is_what_the_limits_allow(void **state) {
  (void)state;
  assert_true(estimate(&small, (mr_workload){3, 30, 3}).batch == 3);
  assert_true(estimate(&small, (mr_workload){1000, 1000, 1000}).batch == 64);
  mr_estimate e = estimate(&small, (mr_workload){1000, 900000, 99000}); /* 999 tokens a row */
  assert_true(e.batch == 10);
  mr_engine_info wide = small;
  wide.packed_bytes = 1u << 30;
  assert_string_equal(estimate(&wide, (mr_workload){2, 2, 2000}).bound_by, "rows");
}

static void no_rows_take_no_time(void **state) {
  (void)state;
  mr_estimate e = estimate(&small, (mr_workload){0, 0, 0});
  assert_true(e.prefill_s == 0 && e.decode_s == 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(rates_are_measured_and_times_add_up),
      cmocka_unit_test(the_batch_is_what_the_limits_allow),
      cmocka_unit_test(no_rows_take_no_time),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}

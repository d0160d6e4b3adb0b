/* Adapters on emulated GPUs: beside the base they give what the base gives with them merged into
 * it, on every machine, in exact mode and in bfloat16; a row's bits do not depend on its neighbours
 * and their adapters. What a device cannot do is refused, and a call that fails leaks nothing. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "tests/unit/directories.h"
#include "tests/unit/lora_rig.h"

#define MEMORY ((size_t)96 << 20)

static mr_sim_opts sim = {.memory = MEMORY, .guard = true};
static int turn; /* models take the machines and orders by turns */

static int on_next_machine(void **state) {
  sim.machine = turn % 3;
  sim.emu = (mr_emu_opts){
      .order = (mr_emu_order)(turn / 3 % 3), .seed = (uint32_t)turn, .lazy = 1, .poison = 1};
  turn++;
  on_sim = &sim;
  return temp_begin(state);
}

static int off_machine(void **state) {
  on_sim = NULL;
  sim.fail_alloc = sim.fail_copy = 0;
  return temp_end(state);
}

/* ------------------------------------------------------------------ latent attention */

/* Heads of odd sizes, and of those that copies of 16 bytes meet. */
static const tiny_latent sizes[2] = {{3, 10, 6, 14, 24, 20}, {2, 16, 16, 16, 32, 0}};

static void test_latent(void **unused) {
  (void)unused;
  static const char *const sets[] = {"attn_kv_b", "attn_kv_b attn_q_b attn_q",
                                     "attn_kv_b attn_output", "attn_q_b attn_q attn_output", NULL};
  for (size_t i = 0; i < 2 * sizeof sets / sizeof *sets; i++) {
    bool low = i % 2 == 0;
    const char *dir = write_latent(&merged, &sizes[!low], low);
    lora_rank = low ? 3 : 8;
    only = sets[i / 2];
    one_directory((void **)&dir);
    on_next_machine((void *[]){NULL});
  }
  only = NULL;
  lora_rank = 3;
}

/* ------------------------------------------------------------------ bfloat16 */

/* An adapter is hardly further from float32 beside the base than merged into it. */
static void test_fast(void **unused) {
  (void)unused;
  check_fast(write_latent(&merged, &sizes[0], true));
}

/* ------------------------------------------------------------------ refusals and faults */

static int64_t fail_host = -1; /* the host's allocation that fails, from 0 */

static mr_code try_to_open(const char *dir, const char *with, mr_err *err) {
  engine e;
  mr_lora *l;
  int64_t live = mr_mem_live();
  assert_int_equal(open_with(&e, &l, dir, &with, 1, err), MR_OK);
  mr_mem_fail_after(fail_host);
  mr_code rc = open_on_sim(&e, err);
  mr_mem_fail_after(-1);
  close_all(&e, l);
  assert_int_equal(mr_mem_live(), live);
  return rc;
}

static void has_words(const mr_err *err, int n) {
  size_t len = strlen(err->text);
  if (!len || err->text[len - 1] == ' ')
    fail_msg("call %d fails without words: '%s'", n, err->text);
}

/* Each copy, each allocation of the device and each of the host fails once. */
static void test_faults(void **unused) {
  (void)unused;
  const char *dirs[2], *dir = write_latent(&merged, &sizes[0], true);
  char whole[300];
  write_merged(dir, dirs, whole);
  int *const faults[] = {&sim.fail_copy, &sim.fail_alloc};
  sim.memory = MEMORY / 8; /* it is cleared each time */
  for (int i = 0; i < 2; i++) {
    mr_code rc = MR_E_INTERNAL;
    for (int n = 1; n < 400 && rc; n++) {
      mr_err err = MR_ERR_INIT;
      *faults[i] = n;
      rc = try_to_open(dir, dirs[0], &err);
      if (rc)
        has_words(&err, n);
    }
    *faults[i] = 0;
    assert_int_equal(rc, MR_OK);
  }
  int failed = 0;
  fail_host = 0;
  for (int fine = 0; fine < 30; fail_host++) { /* some can be done without */
    mr_err err = MR_ERR_INIT;
    mr_code rc = try_to_open(dir, dirs[0], &err);
    fine = rc ? 0 : fine + 1;
    failed += rc != MR_OK;
    if (rc)
      has_words(&err, (int)fail_host);
  }
  fail_host = -1;
  assert_true(failed > 20);
  sim.memory = MEMORY;
}

static void test_no_room(void **unused) {
  (void)unused;
  mr_err err = MR_ERR_INIT;
  const char *dirs[2], *dir = write_latent(&merged, &sizes[0], true);
  char whole[300];
  write_merged(dir, dirs, whole);
  size_t least = 1 << 16;
  bool said = false;
  for (sim.memory = least; try_to_open(dir, dirs[0], &err) != MR_OK; sim.memory += least) {
    said |= strstr(err.text, "the adapters do not fit") != NULL;
    mr_err_clear(&err);
  }
  sim.memory = MEMORY;
  assert_true(said);
}

int main(void) {
  static struct CMUnitTest tests[MAX_DIRS] = {
      cmocka_unit_test_setup_teardown(test_latent, on_next_machine, off_machine),
      cmocka_unit_test_setup_teardown(test_fast, on_next_machine, off_machine),
      cmocka_unit_test_setup_teardown(test_faults, on_next_machine, off_machine),
      cmocka_unit_test_setup_teardown(test_no_room, on_next_machine, off_machine),
  };
  size_t n = find_directories(tests, 4, "tiny/hf", one_directory, on_next_machine, off_machine);
  return _cmocka_run_group_tests("gpu_lora", tests, n, NULL, NULL);
}

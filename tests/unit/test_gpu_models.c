/* The tiny models on emulated GPUs, or on the one that MR_TEST_DEVICE names, in exact mode, against
 * the reference values: every architecture's flags through every kernel. Skipped without the data
 * ($MR_DATA, see conformance.h). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/unit/directories.h"
#include "tests/unit/oracle.h"

#define PROBES 3
#define STEPS 3
#define MEMORY ((size_t)64 << 20)

static const char *const machines[] = {"warp 32, mma.sync", "wave 64, MFMA", "warp 32, WMMA"};
static int turn; /* models take the machines and orders by turns */

static void check_dir(void **state) {
  const char *dir = *state;
  mr_err err = MR_ERR_INIT;
  engine e;
  mr_sim_opts opts = {
      .machine = turn % 3,
      .memory = MEMORY,
      .guard = true,
      .emu = {
          .order = (mr_emu_order)(turn / 3 % 3), .seed = (uint32_t)turn, .lazy = 1, .poison = 1}};
  turn++;
  reset();
  on_device = getenv("MR_TEST_DEVICE");
  on_sim = &opts;
  if (engine_open(&e, dir, mr_kernels_best()->name, &err))
    fail_msg("%s: %s", dir, err.text);
  check_cases(&e, dir, PROBES, STEPS, dir);
  engine_close(&e);
  report(on_device ? on_device : machines[opts.machine]);
}

int main(void) {
  static struct CMUnitTest tests[MAX_DIRS];
  return run_directories(tests, find_directories(tests, 0, "tiny/hf", check_dir, NULL, NULL));
}

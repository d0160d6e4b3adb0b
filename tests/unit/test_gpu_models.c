/* The tiny models on emulated GPUs, or on the one that MR_TEST_DEVICE names, in exact mode, against
 * the reference values: every architecture's flags through every kernel. Skipped without the data
 * ($MR_DATA, see conformance.h). */
#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/unit/oracle.h"

#define MAX_DIRS 128
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

static void no_data(void **state) {
  (void)state;
  skip();
}

static int by_name(const void *a, const void *b) {
  const struct CMUnitTest *x = a, *y = b;
  return strcmp(x->name, y->name);
}

int main(void) {
  static struct CMUnitTest tests[MAX_DIRS];
  int n = 0;
  const char *root = data_path("tiny/hf");
  DIR *d = root ? opendir(root) : NULL;
  for (struct dirent *entry; d && n < MAX_DIRS && (entry = readdir(d));) {
    char path[4500];
    if (*entry->d_name == '.')
      continue;
    snprintf(path, sizeof path, "%s/%s", root, entry->d_name);
    char *own = strdup(path);
    tests[n++] = (struct CMUnitTest){strrchr(own, '/') + 1, check_dir, NULL, NULL, own};
  }
  if (d)
    closedir(d);
  if (n == 0)
    tests[n++] = (struct CMUnitTest){"no data", no_data, NULL, NULL, NULL};
  qsort(tests, (size_t)n, sizeof *tests, by_name);
  return _cmocka_run_group_tests("directories", tests, (size_t)n, NULL, NULL);
}

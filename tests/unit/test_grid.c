#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "io/mem.h"
#include "kernels/dtype.h"
#include "src/grid.h"

enum { K = 256 };

static float w[K];

static void make(void) {
  uint64_t s = 3;
  for (int i = 0; i < K; i++) {
    s = s * 6364136223846793005u + 1442695040888963407u;
    w[i] = ((float)(s >> 40) / (float)(1 << 24) - 0.3f) * (i < 128 ? 1 : 0.1f);
  }
}

static double error_of(const mr_grid_spec *spec) {
  mr_grid g;
  mr_err err = MR_ERR_INIT;
  float room[K];
  double sum = 0;
  assert_int_equal(mr_grid_open(&g, 2, K, spec, &err), MR_OK);
  mr_grid_fit(&g, 1, w, NULL, room);
  for (int i = 0; i < K; i++) {
    int q = mr_grid_code(&g, 1, i, w[i]);
    float v = mr_grid_value(&g, 1, i, q);
    assert_in_range(q, 0, spec->levels);
    assert_int_equal(mr_grid_code(&g, 1, i, v), q); /* a value of the grid keeps its code */
    sum += (double)(v - w[i]) * (v - w[i]);
    if (spec->half) {
      float s = g.scale[mr_grid_at(&g, 1, i)];
      assert_true(mr_f16_to_f32(mr_f32_to_f16(s)) == s);
    }
    if (spec->kind == MR_GRID_WHOLE) {
      float z = -g.base[mr_grid_at(&g, 1, i)] / g.scale[mr_grid_at(&g, 1, i)];
      assert_true(fabsf(z - rintf(z)) < 1e-3f && z > -0.1f && z < (float)spec->levels + 0.1f);
    }
  }
  mr_grid_close(&g);
  return sqrt(sum / K);
}

static void kinds(void **state) {
  (void)state;
  make();
  double centred = error_of(&(mr_grid_spec){MR_GRID_CENTRED, 15, 32, true, false});
  double whole = error_of(&(mr_grid_spec){MR_GRID_WHOLE, 15, 32, true, false});
  double ranged = error_of(&(mr_grid_spec){MR_GRID_RANGED, 15, 32, true, false});
  double wide = error_of(&(mr_grid_spec){MR_GRID_RANGED, 15, 0, true, false});
  double eight = error_of(&(mr_grid_spec){MR_GRID_CENTRED, 255, 0, false, true});
  print_message("centred %.4f, whole %.4f, ranged %.4f, one group %.4f, 8 bits %.5f\n", centred,
                whole, ranged, wide, eight);
  assert_true(ranged <= whole && whole < centred && centred < 0.05);
  assert_true(eight < ranged && ranged < wide);
}

static void odd_groups(void **state) {
  static const mr_grid_kind kind[] = {MR_GRID_CENTRED, MR_GRID_WHOLE, MR_GRID_RANGED};
  (void)state;
  for (int k = 0; k < 3; k++)
    for (int what = 0; what < 4; what++) {
      for (int i = 0; i < K; i++)
        w[i] = what == 0 ? 0 : what == 1 ? 0.25f : what == 2 ? -0.25f : i == 7 ? -3 : 0;
      mr_grid g;
      mr_err err = MR_ERR_INIT;
      float room[K];
      mr_grid_spec spec = {kind[k], 15, 64, true, false};
      assert_int_equal(mr_grid_open(&g, 1, K, &spec, &err), MR_OK);
      mr_grid_fit(&g, 0, w, NULL, room);
      for (int i = 0; i < K; i++) {
        float v = mr_grid_value(&g, 0, i, mr_grid_code(&g, 0, i, w[i]));
        if (fabsf(v - w[i]) > 0.1f * fabsf(w[i]) + (what == 3 ? 2e-3f : 1e-6f)) /* f16 */
          fail_msg("kind %d, case %d: %g for %g", k, what, (double)v, (double)w[i]);
      }
      mr_grid_close(&g);
    }
}

static void refused(void **state) {
  mr_grid g;
  mr_err err = MR_ERR_INIT;
  mr_grid_spec spec = {MR_GRID_CENTRED, 15, 100, true, false};
  (void)state;
  assert_int_equal(mr_grid_open(&g, 1, K, &spec, &err), MR_E_INTERNAL);
  mr_grid_close(&g);
  spec.group = 32;
  for (int n = 0; n < 2; n++) {
    mr_err_clear(&err);
    mr_mem_fail_after(n);
    assert_int_equal(mr_grid_open(&g, 1, K, &spec, &err), MR_E_NOMEM);
    mr_mem_fail_after(-1);
    mr_grid_close(&g);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(kinds), cmocka_unit_test(odd_groups),
                                     cmocka_unit_test(refused)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "io/mem.h"
#include "src/calibrate.h"
#include "src/forward.h"
#include "src/product.h"
#include "tests/unit/temp.h"
#include "tests/unit/tiny_gguf.h"

#define TINY_HF_WIDE 64
#define TINY_HF_VOCAB 256
#include "tests/unit/tiny_hf.h"

static int32_t ids[3][60];
static mr_tokens texts[3];
static mr_model *m;
static mr_pool *pool;

static int begin(void **state) {
  mr_err err = MR_ERR_INIT;
  uint64_t s = 5;
  if (temp_begin(state))
    return -1;
  for (int t = 0; t < 3; t++) {
    for (int i = 0; i < 60; i++)
      ids[t][i] = (int32_t)((s = s * 6364136223846793005u + 1) >> 56);
    texts[t] = (mr_tokens){ids[t], 20 + 20 * t};
  }
  pool = mr_pool_new(2, 0);
  tiny_gguf_write(temp_path("m.gguf"), -1);
  return pool && !mr_model_open(&m, temp_path("m.gguf"), &err) ? 0 : -1;
}

static int end(void **state) {
  mr_model_close(m);
  m = NULL;
  mr_pool_free(pool);
  return temp_end(state);
}

static mr_calibration *gathered(bool products, int first, int n, mr_pool *p) {
  mr_calibration *c;
  mr_err err = MR_ERR_INIT;
  assert_int_equal(mr_calibration_open(&c, m, p, &err), MR_OK);
  assert_int_equal(mr_calibration_run(c, texts, 3, products, first, n, &err), MR_OK);
  return c;
}

static const mr_site *site(const mr_calibration *c, int layer, int kind) {
  return mr_calibration_site(c, layer, (mr_site_kind)kind);
}

static void what_is_seen(void **state) {
  static const int width[] = {TINY_DIM, TINY_DIM, TINY_DIM, TINY_FF};
  mr_calibration *c = gathered(false, 0, TINY_LAYERS, pool);
  (void)state;
  for (int i = 0; i < TINY_LAYERS; i++)
    for (int k = 0; k <= MR_SITE_DOWN; k++) {
      const mr_site *s = site(c, i, k);
      assert_int_equal(s->k, width[k]);
      assert_int_equal(s->n, 20 + 40 + 60);
      assert_null(s->h);
      double sum = 0;
      for (int j = 0; j < s->k; j++) {
        assert_true(s->most[j] * s->most[j] <= s->square[j] * 1.0001);
        assert_true(s->mean[j] <= s->most[j] * 120.01f && s->square[j] > 0);
        sum += s->square[j];
      }
      if (k == MR_SITE_QKV) /* rows of an RMS norm with weights of one have a mean square of one */
        assert_true(sum / (120.0 * s->k) > 0.98 && sum / (120.0 * s->k) < 1.01);
    }
  mr_calibration_free(c);
}

/* The diagonal of the products is the squares; they are symmetric; a range of layers has those of
 * the whole, whatever the threads. */
static void products(void **state) {
  mr_pool *three = mr_pool_new(3, 0);
  mr_calibration *all = gathered(true, 0, TINY_LAYERS, pool), *one = gathered(true, 1, 1, three);
  (void)state;
  for (int k = 0; k <= MR_SITE_DOWN; k++) {
    const mr_site *a = site(all, 1, k), *b = site(one, 1, k);
    assert_memory_equal(a->h, b->h, (size_t)a->k * (size_t)a->k * sizeof(float));
    assert_int_equal(site(one, 0, k)->k, 0);
    for (int i = 0; i < a->k; i++) {
      double d = a->h[(size_t)i * (size_t)a->k + (size_t)i];
      assert_true(fabs(d - a->square[i]) < 1e-4 * d + 1e-6);
      for (int j = 0; j < i; j++)
        assert_true(fabsf(a->h[i * a->k + j] - a->h[j * a->k + i]) < 1e-3f);
    }
  }
  mr_calibration_free(all);
  mr_calibration_free(one);
  mr_pool_free(three);
}

static void layers_in_a_budget(void **state) {
  mr_calibration *c = gathered(false, 0, 1, pool);
  (void)state;
  assert_int_equal(mr_calibration_layers(c, 0), 1);
  assert_int_equal(mr_calibration_layers(c, UINT64_MAX / 2), TINY_LAYERS);
  mr_calibration_free(c);
  assert_int_equal(mr_site_of("attn_k"), MR_SITE_QKV);
  assert_int_equal(mr_site_of("ffn_down"), MR_SITE_DOWN);
  assert_int_equal(mr_site_of("token_embd"), -1);
}

/* trace(W H W'): sum of squares of what a matrix makes of the site's rows. */
static double through(const mr_matrix *w, const mr_site *s) {
  double sum = 0;
  float *row = calloc((size_t)w->k, sizeof *row);
  assert_int_equal(w->k, s->k);
  for (int r = 0; r < w->n; r++) {
    mr_matrix_row(w, r, row);
    for (int i = 0; i < s->k; i++)
      for (int j = 0; j < s->k; j++)
        sum += (double)row[i] * row[j] * s->h[(size_t)i * (size_t)s->k + (size_t)j];
  }
  free(row);
  return sum;
}

typedef struct seen { /* sums of squares of what the output's product makes of its rows */
  const mr_model *m;
  double sum[2];
} seen;

static void see_output(void *ctx, const mr_matrix *w, const float *rows, int n, int k) {
  seen *x = ctx;
  float *all = calloc((size_t)w->n * (size_t)k, sizeof *all);
  float *room = calloc(mr_matrix_room(w, w->n), sizeof *room);
  for (int i = 0; i < 2; i++) {
    if (w != &x->m->layers[i].o)
      continue;
    mr_matrix_rows(w, 0, w->n, all, room);
    for (int t = 0; t < n; t++)
      for (int r = 0; r < w->n; r++) {
        double y = 0;
        for (int j = 0; j < k; j++)
          y += (double)all[r * k + j] * rows[t * k + j];
        x->sum[i] += y * y;
      }
  }
  free(all);
  free(room);
}

/* With latent attention the output's site has what its own matrix meets: both ways make the same.
 */
static void latent_attention(void **state) {
  static const tiny_latent sizes = {4, 16, 8, 24, 32, 40};
  static const int width[] = {64, 4 * 24, 64, 96, 40};
  static out_file file;
  static float room[60 * 4 * 40];
  mr_err err = MR_ERR_INIT;
  seen x = {0};
  mr_tap tap = {.see = see_output, .ctx = &x, .rows = room};
  mr_kv *kv;
  mr_forward *f;
  mr_kv_seq seq;
  (void)state;
  mr_model_close(m);
  assert_int_equal(mr_model_open(&m, write_latent(&file, &sizes, true), &err), MR_OK);
  clear(&file);
  x.m = m;
  mr_calibration *c = gathered(true, 0, 2, pool);
  assert_int_equal(mr_kv_open(&kv, &m->c, MR_KV_F32, 2 * mr_kv_groups_of(&m->c, MR_KV_F32).n, &err),
                   MR_OK);
  assert_int_equal(mr_forward_open(&f, m, mr_kernels_best(), pool, kv, 60, 1, &err), MR_OK);
  assert_int_equal(mr_kv_seq_init(kv, &seq, 60, &err), MR_OK);
  mr_forward_tap(f, &tap);
  for (int t = 0; t < 3; t++) {
    mr_run run = {.seq = &seq, .tokens = ids[t], .n = texts[t].n, .no_logits = 1};
    mr_kv_seq_release(kv, &seq);
    assert_int_equal(mr_kv_seq_reserve(kv, &seq, run.n), MR_OK);
    assert_int_equal(mr_forward_step(f, &run, 1, NULL, &err), MR_OK);
  }
  for (int i = 0; i < 2; i++) {
    for (int k = 0; k < MR_SITES; k++)
      assert_int_equal(site(c, i, k)->k, width[k]);
    double want = through(&m->layers[i].o.product->w, site(c, i, MR_SITE_OUT));
    assert_true(want > 0 && fabs(x.sum[i] - want) < 1e-4 * want);
  }
  mr_kv_seq_free(kv, &seq);
  mr_forward_close(f);
  mr_kv_close(kv);
  mr_calibration_free(c);
}

static void allocations_fail(void **state) {
  mr_code rc = MR_E_NOMEM;
  (void)state;
  for (int n = 0; rc; n++) {
    mr_err err = MR_ERR_INIT;
    mr_calibration *c;
    mr_mem_fail_after(n);
    rc = mr_calibration_open(&c, m, pool, &err);
    if (!rc)
      rc = mr_calibration_run(c, texts, 1, true, 0, TINY_LAYERS, &err);
    mr_mem_fail_after(-1);
    mr_calibration_free(c);
    assert_true(rc == MR_OK || rc == MR_E_NOMEM);
    assert_true(n < 1000);
  }
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, begin, end)

int main(void) {
  const struct CMUnitTest tests[] = {TEST(what_is_seen), TEST(products), TEST(layers_in_a_budget),
                                     TEST(latent_attention), TEST(allocations_fail)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}

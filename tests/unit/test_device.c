/* The simulated device: a pipeline of copies and kernels on its virtual clock, and what happens
 * when something fails; and the names of devices. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "io/mem.h"
#include "src/device.h"

enum { LAYERS = 12, COLS = 512, ROWS = 32 };
#define BYTES ((size_t)ROWS * COLS * sizeof(float))

typedef struct pipe { /* layers of the host's memory go through `n` buffers of the device */
  mr_device *d;
  mr_stream *up, *work, *down;
  mr_event *came[LAYERS], *worked[LAYERS], *left[LAYERS];
  float *buffer[4];
} pipe;

static mr_sim_opts plain(void) {
  return (mr_sim_opts){.memory = 1 << 20,
                       .guard = true,
                       .emu = {.lazy = 1, .poison = 1},
                       .copy_bytes_per_s = 1e9,
                       .copy_latency_s = 5e-6,
                       .kernel_s = 70e-6};
}

static void pipe_open(pipe *p, const mr_sim_opts *o, int n) {
  mr_err err = MR_ERR_INIT;
  *p = (pipe){0};
  assert_int_equal(mr_device_sim(&p->d, o, &err), MR_OK);
  mr_stream **streams[] = {&p->up, &p->work, &p->down};
  for (int i = 0; i < 3; i++)
    assert_int_equal(p->d->ops->stream_new(p->d, streams[i]), MR_OK);
  for (int l = 0; l < LAYERS; l++) {
    assert_int_equal(p->d->ops->event_new(p->d, &p->came[l]), MR_OK);
    assert_int_equal(p->d->ops->event_new(p->d, &p->worked[l]), MR_OK);
    assert_int_equal(p->d->ops->event_new(p->d, &p->left[l]), MR_OK);
  }
  for (int i = 0; i < n; i++)
    assert_int_equal(p->d->ops->alloc(p->d, BYTES, (void **)&p->buffer[i]), MR_OK);
}

static void pipe_close(pipe *p) {
  for (int l = 0; l < LAYERS; l++) {
    p->d->ops->event_free(p->d, p->came[l]);
    p->d->ops->event_free(p->d, p->worked[l]);
    p->d->ops->event_free(p->d, p->left[l]);
  }
  mr_device_close(p->d);
}

/* One layer up, softcapped where it lies, and down. forget: nobody waits for it to come. */
static mr_code one_layer(pipe *p, int l, int n, const float *in, float *out, bool forget) {
  const mr_device_ops *o = p->d->ops;
  float *x = p->buffer[l % n];
  mr_code rc = l >= n ? o->wait(p->d, p->up, p->left[l - n]) : MR_OK;
  if (!rc)
    rc = o->copy(p->d, p->up, MR_TO_DEVICE, x, in + (size_t)l * ROWS * COLS, BYTES);
  if (!rc)
    rc = o->record(p->d, p->came[l], p->up);
  if (!rc && !forget)
    rc = o->wait(p->d, p->work, p->came[l]);
  mr_gpu_finish a = {.x = x, .ld = COLS, .scale = 0.5f, .cap = 2, .cols = COLS};
  mr_grid grid = {.blocks = {1, ROWS, 1}, .warps = MR_GPU_WARPS};
  if (!rc)
    rc = o->launch(p->d, p->work, MR_GPU_finish, &grid, &a);
  if (!rc)
    rc = o->record(p->d, p->worked[l], p->work);
  if (!rc)
    rc = o->wait(p->d, p->down, p->worked[l]);
  if (!rc)
    rc = o->copy(p->d, p->down, MR_TO_HOST, out + (size_t)l * ROWS * COLS, x, BYTES);
  return rc ? rc : o->record(p->d, p->left[l], p->down);
}

/* All layers; the virtual seconds in *s. */
static mr_code run(const mr_sim_opts *opts, int n, const float *in, float *out, bool forget,
                   double *s) {
  pipe p;
  mr_code rc = MR_OK;
  pipe_open(&p, opts, n);
  for (int l = 0; l < LAYERS && !rc; l++)
    rc = one_layer(&p, l, n, in, out, forget);
  if (!rc)
    rc = p.d->ops->sync(p.d, p.down);
  *s = mr_sim_seconds(p.d);
  pipe_close(&p);
  return rc;
}

static void setup_layers(float **in, float **a, float **b) {
  *in = mr_mem_alloc(LAYERS, BYTES);
  *a = mr_mem_alloc(LAYERS, BYTES);
  *b = mr_mem_alloc(LAYERS, BYTES);
  assert_true(*in && *a && *b);
  for (int i = 0; i < LAYERS * ROWS * COLS; i++)
    (*in)[i] = (float)(i % 1001) / 100;
}

static void copies_and_kernels_overlap(void **state) {
  (void)state;
  float *in, *serial, *out;
  double alone, beside;
  mr_sim_opts o = plain();
  setup_layers(&in, &serial, &out);
  assert_int_equal(run(&o, 1, in, serial, false, &alone), MR_OK);
  assert_int_equal(run(&o, 3, in, out, false, &beside), MR_OK);
  assert_memory_equal(serial, out, LAYERS * BYTES);
  print_message("three buffers: %.2f of the time of one\n", beside / alone);
  assert_true(beside <= 0.6 * alone);
  /* a wait that was forgotten is seen, each time */
  memset(out, 0, LAYERS * BYTES);
  run(&o, 3, in, out, true, &beside);
  assert_true(memcmp(serial, out, LAYERS * BYTES) != 0);
  mr_mem_free(in);
  mr_mem_free(serial);
  mr_mem_free(out);
}

static void failures_are_told(void **state) {
  (void)state;
  float *in, *good, *out;
  double s;
  mr_sim_opts o = plain();
  setup_layers(&in, &good, &out);
  assert_int_equal(run(&o, 2, in, good, false, &s), MR_OK);
  o.fail_copy = 7;
  assert_int_equal(run(&o, 2, in, out, false, &s), MR_E_UNAVAILABLE);
  o = plain();
  o.lose_at = 20;
  assert_int_equal(run(&o, 2, in, out, false, &s), MR_E_UNAVAILABLE);
  o = plain();
  o.flip_copy = 2 * LAYERS; /* the last one down */
  assert_int_equal(run(&o, 2, in, out, false, &s), MR_OK);
  assert_true(memcmp(good, out, LAYERS * BYTES) != 0);
  mr_mem_free(in);
  mr_mem_free(good);
  mr_mem_free(out);
}

static void memory_has_an_end(void **state) {
  (void)state;
  mr_err err = MR_ERR_INIT;
  mr_sim_opts o = {.memory = 1 << 16, .fail_alloc = 2};
  mr_device *d;
  void *p;
  assert_int_equal(mr_device_sim(&d, &o, &err), MR_OK);
  assert_int_equal(d->ops->alloc(d, 1 << 17, &p), MR_E_NOMEM);
  assert_int_equal(d->ops->alloc(d, 256, &p), MR_E_NOMEM); /* the second one */
  assert_int_equal(d->ops->alloc(d, 256, &p), MR_OK);
  d->ops->release(d, p);
  assert_int_equal(mr_device_start(d, 4096, &err), MR_OK);
  assert_non_null(mr_device_take(d, 4000));
  assert_null(mr_device_take(d, 1));
  assert_int_equal(mr_device_left(d), 0);
  mr_device_close(d);
}

static void names(void **state) {
  (void)state;
  static const char *const unknown[] = {"gpu",  "cuda:",    "cuda:x", "cuda:1x",
                                        "hip0", "sim:wave", "simx"};
  mr_device *d;
  assert_false(mr_device_is_gpu(NULL));
  assert_false(mr_device_is_gpu("auto"));
  assert_false(mr_device_is_gpu("cpu"));
  for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++) {
    mr_err err = MR_ERR_INIT;
    assert_true(mr_device_is_gpu(unknown[i]));
    assert_int_equal(mr_device_open(&d, unknown[i], 0, &err), MR_E_UNAVAILABLE);
    assert_non_null(strstr(err.text, "unknown"));
  }
  mr_err err = MR_ERR_INIT;
  assert_int_equal(mr_device_open(&d, "sim:wave64", 1 << 20, &err), MR_OK);
  assert_int_equal(d->warp, 64);
  mr_device_close(d);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(copies_and_kernels_overlap),
      cmocka_unit_test(failures_are_told),
      cmocka_unit_test(memory_has_an_end),
      cmocka_unit_test(names),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}

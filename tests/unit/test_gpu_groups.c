/* Sequences that begin with the same pages, on every emulated machine: the bits of each alone, and
 * what is shared is read once. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#define TINY_GGUF_CONTEXT 1024

#include "io/mem.h"
#include "src/forward.h"
#include "tests/unit/tiny_gguf.h"

enum { MEMBERS = 6, IN_GROUP = 4, SPLITS = 2, LOGITS = TINY_VOCAB, STEP = 64, PAGES = 240 };

/* Of sequence i: tokens that are the first one's; those that it has in all. The first four have
 * two whole splits in common; the last but one has too little, the last nothing. */
static const int common[MEMBERS] = {0, 830, 771, 600, 250, 0};
static const int length[MEMBERS] = {840, 833, 800, 520, 300, 290};

static char path[64];

typedef struct rig {
  mr_model *m;
  mr_device *d;
  mr_kv *kv;
  mr_kv_memory memory;
  mr_forward *f;
  mr_kv_seq seq[MEMBERS];
  mr_stream *copies;
} rig;

static int setup(void **state) {
  (void)state;
  snprintf(path, sizeof path, "/tmp/mr_test_gpu_groups_%d.gguf", (int)getpid());
  return tiny_gguf_write(path, -1) ? 0 : -1;
}

static int teardown(void **state) {
  (void)state;
  unlink(path);
  return (int)mr_mem_live();
}

/* ------------------------------------------------------------------ a device with sequences */

static void *take(void *ctx, size_t bytes) {
  return mr_device_take(((rig *)ctx)->d, bytes);
}

static mr_code copy_page(void *ctx, void *dst, const void *src, size_t bytes) {
  rig *r = ctx;
  mr_code rc = r->d->ops->copy(r->d, r->copies, MR_ON_DEVICE, dst, src, bytes);
  return rc ? rc : r->d->ops->sync(r->d, r->copies);
}

static void rig_open(rig *r, int machine, mr_gpu_scheme scheme, mr_kv_type type) {
  mr_err err = MR_ERR_INIT;
  mr_sim_opts o = {.machine = machine,
                   .memory = (size_t)48 << 20,
                   .guard = true,
                   .emu = {.order = (mr_emu_order)machine, .seed = 3, .lazy = 1, .poison = 1}};
  *r = (rig){.memory = {.ctx = r, .take = take, .copy = copy_page}};
  assert_int_equal(mr_model_open(&r->m, path, &err), MR_OK);
  assert_int_equal(mr_device_sim(&r->d, &o, &err), MR_OK);
  assert_int_equal(mr_device_start(r->d, (uint64_t)40 << 20, &err), MR_OK);
  assert_int_equal(r->d->ops->stream_new(r->d, &r->copies), MR_OK);
  assert_int_equal(mr_kv_open_on(&r->kv, &r->m->c, type, PAGES, &r->memory, &err), MR_OK);
  if (mr_forward_open_gpu(&r->f, r->m, r->d, r->kv, scheme, 0, STEP, MEMBERS, &err))
    fail_msg("%s", err.text);
}

static void rig_close(rig *r) {
  for (int i = 0; i < MEMBERS; i++)
    mr_kv_seq_free(r->kv, &r->seq[i]);
  mr_forward_close(r->f);
  mr_kv_close(r->kv);
  mr_device_close(r->d);
  mr_model_close(r->m);
}

static int32_t token_of(int seq, int at) {
  return (int32_t)((uint32_t)(at < common[seq] ? at : at + 77 * seq) * 2654435761u >> 24);
}

static void step(rig *r, const mr_run *runs, int n) {
  mr_err err = MR_ERR_INIT;
  if (mr_forward_step(r->f, runs, n, NULL, &err))
    fail_msg("%s", err.text);
}

/* Sequences with their tokens; they hold the first one's pages, or pages with the same bytes. */
static void fill(rig *r, bool share) {
  mr_err err = MR_ERR_INIT;
  for (int i = 0; i < MEMBERS; i++) {
    mr_kv_seq *s = &r->seq[i], *first = &r->seq[0];
    int32_t tokens[STEP];
    assert_int_equal(mr_kv_seq_init(r->kv, s, TINY_CONTEXT, &err), MR_OK);
    if (share && common[i]) {
      mr_kv_seq_share(r->kv, s, first, common[i]);
    } else if (common[i]) {
      assert_int_equal(mr_kv_seq_reserve(r->kv, s, common[i]), MR_OK);
      for (int p = 0; p * MR_KV_BLOCK < common[i]; p++)
        assert_int_equal(copy_page(r, mr_kv_page(r->kv, s->pages[p]),
                                   mr_kv_page(r->kv, first->pages[p]), mr_kv_size_of_page(r->kv)),
                         MR_OK);
      s->len = common[i];
    }
    while (s->len < length[i]) {
      int n = length[i] - s->len < STEP ? length[i] - s->len : STEP;
      for (int t = 0; t < n; t++)
        tokens[t] = token_of(i, s->len + t);
      assert_int_equal(mr_kv_seq_reserve(r->kv, s, n), MR_OK);
      step(r, &(mr_run){.seq = s, .tokens = tokens, .n = n, .no_logits = 1}, 1);
    }
  }
}

/* One more token of each, in another order than the pages'; logits to out [MEMBERS, LOGITS].
 * alone: a step each. Returns what kernels loaded of pages, weights and rows. */
static uint64_t decode(rig *r, bool alone, float *out, mr_step_stats *stats) {
  mr_err err = MR_ERR_INIT;
  mr_run runs[MEMBERS];
  int32_t tokens[MEMBERS];
  uint64_t before = mr_sim_loaded(r->d);
  for (int i = 0; i < MEMBERS; i++) {
    int s = (5 * i + 3) % MEMBERS;
    tokens[i] = token_of(s, r->seq[s].len);
    assert_int_equal(mr_kv_seq_reserve(r->kv, &r->seq[s], 1), MR_OK);
    runs[i] = (mr_run){.seq = &r->seq[s], .tokens = &tokens[i], .n = 1};
  }
  int each = alone ? 1 : MEMBERS;
  for (int i = 0; i < MEMBERS; i += each) {
    if (mr_forward_step(r->f, runs + i, each, stats, &err))
      fail_msg("%s", err.text);
    for (int j = 0; j < each; j++)
      memcpy(out + (size_t)((5 * (i + j) + 3) % MEMBERS) * LOGITS, mr_forward_logits(r->f, j),
             LOGITS * sizeof *out);
  }
  for (int i = 0; i < MEMBERS; i++)
    r->seq[i].len--;
  return mr_sim_loaded(r->d) - before;
}

static float alone[MEMBERS * LOGITS], together[MEMBERS * LOGITS], apart[MEMBERS * LOGITS];

static void check_bits(const rig *r, const char *what, const float *got) {
  for (int i = 0; i < MEMBERS; i++)
    if (memcmp(got + i * LOGITS, alone + i * LOGITS, LOGITS * sizeof *got))
      fail_msg("%s, %s, kv %s: other bits of sequence %d", r->d->name, what,
               mr_kv_type_name(mr_kv_type_of(r->kv)), i);
}

/* ------------------------------------------------------------------ tests */

typedef struct kind {
  mr_gpu_scheme scheme;
  mr_kv_type kv;
} kind;

static const kind kinds[] = {
    {MR_GPU_ALL_BF16, MR_KV_BF16}, {MR_GPU_ALL_BF16, MR_KV_INT8}, {MR_GPU_EXACT, MR_KV_F32}};

/* What is loaded less when sequences share: the splits of a group once instead of once a member, in
 * all layers. Pages in float32 are not loaded by asynchronous copies. */
static void shared_pages_are_read_once(void **state) {
  (void)state;
  static mr_step_stats st[2];
  for (int machine = 0; machine < 3; machine++)
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
      rig r[2];
      uint64_t loaded[2];
      for (int own = 0; own < 2; own++) {
        rig_open(&r[own], machine, kinds[k].scheme, kinds[k].kv);
        fill(&r[own], !own);
        decode(&r[own], true, alone, &st[own]);
        loaded[own] = decode(&r[own], false, own ? apart : together, &st[own]);
        check_bits(&r[own], own ? "own pages" : "shared pages", own ? apart : together);
      }
      double page = (double)mr_kv_size_of_page(r[0].kv);
      double less = (IN_GROUP - 1) * SPLITS * MR_GPU_SPLIT / MR_KV_BLOCK * page;
      if (kinds[k].kv != MR_KV_F32)
        assert_true((double)(loaded[1] - loaded[0]) == less);
      assert_true(st[1].bytes - st[0].bytes == less);
      rig_close(&r[0]);
      rig_close(&r[1]);
    }
}

/* A window that hides some of the shared splits, one that hides all, sinks; scores that leave the
 * unified form's range. */
static void layers_of_all_kinds(void **state) {
  (void)state;
  static const int windows[] = {300, 40};
  static const float sinks[TINY_HEADS] = {0.5f, -1, 2, 0};
  for (int i = 0; i < 3; i++) {
    rig r;
    mr_step_stats st;
    rig_open(&r, i, MR_GPU_ALL_BF16, MR_KV_BF16);
    r.m->layers[0].sinks = sinks;
    if (i < 2) {
      r.m->c.window = windows[i];
      r.m->c.windowed[1] = 1;
    } else {
      r.m->c.attn_scale = 4000;
    }
    fill(&r, true);
    decode(&r, true, alone, &st);
    decode(&r, false, together, &st);
    check_bits(&r, "layers of other kinds", together);
    rig_close(&r);
  }
}

/* Pages behind the windows of one of two layers are given back: a group reads the table of the
 * member that has most of them left, the last one in order of pages, too. */
static void behind_windows(void **state) {
  (void)state;
  tiny_mixed = true;
  tiny_window = 300;
  assert_true(tiny_gguf_write(path, -1));
  for (int machine = 0; machine < 3; machine++) {
    rig r;
    mr_step_stats st;
    rig_open(&r, machine, MR_GPU_ALL_BF16, MR_KV_BF16);
    assert_int_equal(mr_kv_groups_in(r.kv).n, 2);
    fill(&r, true);
    for (int i = 0; i < MEMBERS; i++)
      mr_kv_seq_drop(r.kv, &r.seq[i], mr_kv_first(r.kv, r.seq[i].len));
    assert_true(mr_kv_seq_dropped(&r.seq[0]) > mr_kv_seq_dropped(&r.seq[2]));
    for (int i = 0; i < 2; i++) {
      decode(&r, true, alone, &st);
      decode(&r, false, together, &st);
      check_bits(&r, i ? "others behind windows" : "behind windows", together);
      mr_kv_seq_release(r.kv, &r.seq[3]); /* the shortest one begins anew */
    }
    rig_close(&r);
  }
  tiny_mixed = false;
  tiny_window = 0;
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(shared_pages_are_read_once),
      cmocka_unit_test(layers_of_all_kinds),
      cmocka_unit_test(behind_windows),
  };
  return cmocka_run_group_tests(tests, setup, teardown);
}

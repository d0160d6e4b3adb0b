#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include <sys/resource.h>
#include <sys/stat.h>

#include "io/mem.h"
#include "jobs/commit.h"
#include "jobs/merge.h"
#include "jobs/rowlist.h"
#include "temp.h"

enum { ROWS = 40, SHARDS = 3 };

typedef struct spec { /* one shard's output as a run would leave it */
  int index, of;
  uint64_t cut, job_rows;
  const char *model;
  int64_t created;
  bool completion;
  int first; /* row % of == first is its own */
} spec;

static const char *base_of(int i) {
  char name[16];
  snprintf(name, sizeof name, "s%d", i);
  return temp_path(name);
}

static bool failed_row(uint64_t row) {
  return row % 7 == 3;
}

static void put_row(mr_commit *c, uint64_t local, uint64_t row, mr_err *e) {
  char line[128];
  int n =
      snprintf(line, sizeof line, "{\"id\":\"r%d\",\"usage\":{\"prompt_tokens\":2}}\n", (int)row);
  mr_line_info info = {.row = local,
                       .kind = failed_row(row) ? MR_LINE_ERROR : MR_LINE_RESULT,
                       .prompt_tokens = failed_row(row) ? 0 : 2};
  assert_int_equal(mr_commit_add(c, &info, line, (size_t)n, e), MR_OK);
}

static void identify(mr_job_identity *id, const spec *s) {
  mr_err e = MR_ERR_INIT;
  mr_hash_hex("in", 2, id->input_digest);
  mr_hash_hex(s->model, strlen(s->model), id->model_digest);
  snprintf(id->numerics, sizeof id->numerics, "test");
  assert_int_equal(mr_identity_set_options(id, json_object(), &e), MR_OK);
  id->created = s->created;
  id->part = (mr_identity_part){s->index, s->of, s->job_rows, s->cut};
  for (uint64_t row = (uint64_t)s->first; row < s->job_rows; row += (uint64_t)s->of)
    id->rows++;
}

static void make_shard(const spec *s) {
  mr_err e = MR_ERR_INIT;
  mr_paths p;
  mr_commit *c;
  mr_job_identity id = {.rows = 0};
  mr_manifest m = {.n_files = 0};
  mr_rowlist lists[MR_STREAMS] = {{.end = 0}};
  char base[256], output[300];
  snprintf(base, sizeof base, "%s", base_of(s->index));
  snprintf(output, sizeof output, "%s.jsonl", base);
  identify(&id, s);
  assert_int_equal(mr_paths_make(&p, base, output, &e), MR_OK);
  assert_int_equal(mr_commit_open(&c, &p, &e), MR_OK);
  assert_int_equal(mr_commit_bind(c, &id, &e), MR_OK);
  for (uint64_t i = 0; i < id.rows; i++) {
    uint64_t row = (uint64_t)s->first + i * (uint64_t)s->of;
    mr_rowlist_add(&lists[failed_row(row)], row);
    put_row(c, i, row, &e);
  }
  assert_int_equal(mr_commit_assemble(c, MR_OUT_PLAIN, 3, s->completion, &m, &e), MR_OK);
  for (int i = 0; i < MR_STREAMS; i++) {
    mr_rowlist_end(&lists[i]);
    m.row_list[i] = lists[i].text.data;
  }
  assert_int_equal(mr_commit_publish(c, &m, &e), MR_OK);
  mr_commit_close(c);
  mr_manifest_free(&m);
  mr_identity_free(&id);
  mr_paths_free(&p);
}

static void remove_shard(int i) {
  static const char *const ends[] = {".jsonl", ".errors.jsonl.zst", ".manifest.json"};
  for (size_t k = 0; k < sizeof ends / sizeof *ends; k++) {
    char path[300];
    snprintf(path, sizeof path, "%s%s", base_of(i), ends[k]);
    unlink(path);
  }
}

static spec standard(int i) {
  return (spec){.index = i + 1,
                .of = SHARDS,
                .cut = 9,
                .job_rows = ROWS,
                .model = "m",
                .created = 100 - i,
                .first = i};
}

static void make_all(const spec *list) {
  for (int i = 0; i < SHARDS; i++) {
    remove_shard(list[i].index);
    make_shard(&list[i]);
  }
}

static mr_code open_all(mr_merge **m, mr_err *e) {
  char names[SHARDS][256];
  char *list[SHARDS + 1];
  for (int i = 0; i < SHARDS; i++) {
    snprintf(names[i], sizeof names[i], "%s", base_of(SHARDS - i)); /* any order */
    list[i] = names[i];
  }
  list[SHARDS] = names[0]; /* and one of them twice */
  return mr_merge_open(m, list, SHARDS + 1, e);
}

static void refused(mr_code want, const char *words) {
  mr_merge *m;
  mr_err e = MR_ERR_INIT;
  int64_t live = mr_mem_live();
  assert_int_equal(open_all(&m, &e), want);
  if (!strstr(e.text, words))
    print_error("%s\n", e.text);
  assert_non_null(strstr(e.text, words));
  assert_int_equal(mr_mem_live(), live);
}

static mr_code to_text(void *ctx, uint64_t row, mr_line_kind kind, const char *line, size_t len,
                       mr_err *err) {
  mr_text *texts = ctx;
  (void)row;
  mr_text_add(&texts[kind], line, len);
  return texts[kind].failed ? mr_err_set(err, MR_E_NOMEM, "out of memory") : MR_OK;
}

/* bucket_bytes: 0, or so few that lines go through files. */
static mr_code write_all(mr_merge *m, size_t bucket_bytes, mr_text texts[MR_STREAMS], mr_err *e) {
  char spill[256];
  snprintf(spill, sizeof spill, "%s", temp_path("bucket"));
  return mr_merge_write(m, spill, bucket_bytes, to_text, texts, e);
}

static void free_texts(mr_text texts[MR_STREAMS]) {
  for (int i = 0; i < MR_STREAMS; i++)
    mr_text_free(&texts[i]);
}

static void expect_rows(const mr_text *text, bool errors) {
  mr_text want = {0};
  for (uint64_t row = 0; row < ROWS; row++)
    if (failed_row(row) == errors)
      mr_text_addf(&want, "{\"id\":\"r%d\",\"usage\":{\"prompt_tokens\":2}}\n", (int)row);
  assert_string_equal(text->data, want.data);
  mr_text_free(&want);
}

static void rows_come_in_input_order(void **state) {
  (void)state;
  const spec list[SHARDS] = {standard(0), standard(1), standard(2)};
  mr_merge *m;
  mr_err e = MR_ERR_INIT;
  mr_manifest whole = {.n_files = 0};
  make_all(list);
  assert_int_equal(open_all(&m, &e), MR_OK);
  assert_int_equal(mr_merge_shards(m), SHARDS);
  for (int i = 0; i < SHARDS; i++)
    assert_int_equal(mr_merge_manifest(m, i)->id.part.index, i + 1);
  for (size_t bucket = 0; bucket <= 300; bucket += 150) {
    mr_text texts[MR_STREAMS] = {{0}};
    assert_int_equal(write_all(m, bucket, texts, &e), MR_OK);
    expect_rows(&texts[MR_LINE_RESULT], false);
    expect_rows(&texts[MR_LINE_ERROR], true);
    free_texts(texts);
  }
  assert_int_equal(mr_merge_whole(m, &whole, &e), MR_OK);
  assert_int_equal(whole.id.rows, ROWS);
  assert_int_equal(whole.id.part.of, 0);
  assert_int_equal(whole.id.created, 98);
  assert_int_equal(whole.rows_ok + whole.rows_failed, ROWS);
  assert_int_equal(whole.prompt_tokens, 2 * whole.rows_ok);
  mr_manifest_free(&whole);
  mr_merge_close(m);
}

/* The shard is no part of a job's id, nor is the time: ids of rows are the same everywhere. */
static void ids_do_not_tell_the_shard(void **state) {
  (void)state;
  mr_job_identity a = {.rows = 0}, b = {.rows = 0};
  const spec x = standard(0), y = standard(1);
  identify(&a, &x);
  identify(&b, &y);
  mr_identity_make_id(&a);
  mr_identity_make_id(&b);
  assert_string_equal(a.job_id, b.job_id);
  mr_text words = {0};
  mr_identity_differ(&a, &b, &words);
  assert_string_equal(words.data, "the shard (2/3, was 1/3)");
  mr_text_free(&words);
  mr_identity_free(&a);
  mr_identity_free(&b);
}

static void what_does_not_fit_is_refused(void **state) {
  (void)state;
  static const struct {
    spec other; /* what differs from the second shard */
    const char *words;
  } cases[] = {
      {{.model = "n"}, "the model file"},
      {{.cut = 8}, "cut the job otherwise"},
      {{.job_rows = ROWS + 3}, "cut the job otherwise"},
      {{.of = 4}, "is shard 2/4"},
      {{.completion = true}, "--order"},
      {{.first = 2}, "is in two shards"},
      {{.index = 1}, "is missing"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    spec list[SHARDS] = {standard(0), standard(1), standard(2)};
    const spec *c = &cases[i].other;
    spec *s = &list[1];
    make_all(list);
    remove_shard(2);
    s->model = c->model ? c->model : s->model;
    s->cut = c->cut ? c->cut : s->cut;
    s->job_rows = c->job_rows ? c->job_rows : s->job_rows;
    s->of = c->of ? c->of : s->of;
    s->completion = c->completion;
    s->first = c->first ? c->first : s->first;
    if (c->index) { /* the first shard again under the second's name */
      mr_merge *m;
      mr_err e = MR_ERR_INIT;
      char *one[] = {(char[256]){0}, (char[256]){0}};
      snprintf(one[0], 256, "%s", base_of(1));
      snprintf(one[1], 256, "%s", base_of(3));
      assert_int_equal(mr_merge_open(&m, one, 2, &e), MR_E_DATA);
      assert_non_null(strstr(e.text, "shard 2/3 is missing"));
      continue;
    }
    make_shard(s);
    refused(MR_E_DATA, cases[i].words);
  }
}

static void damage_is_found(void **state) {
  (void)state;
  const spec list[SHARDS] = {standard(0), standard(1), standard(2)};
  make_all(list);
  char path[300];
  snprintf(path, sizeof path, "%s.jsonl", base_of(2));
  FILE *f = fopen(path, "r+b");
  fseek(f, 30, SEEK_SET);
  fputc('x', f);
  fclose(f);
  refused(MR_E_DATA, "damaged");
  snprintf(path, sizeof path, "%s.manifest.json", base_of(2));
  unlink(path);
  refused(MR_E_NOINPUT, "no such output");
  snprintf(path, sizeof path, "%s.run", base_of(2));
  assert_int_equal(mkdir(path, 0777), 0);
  refused(MR_E_STOPPED, "not finished");
  rmdir(path);
}

static void completion_order_is_kept(void **state) {
  (void)state;
  spec list[SHARDS] = {standard(0), standard(1), standard(2)};
  for (int i = 0; i < SHARDS; i++)
    list[i].completion = true;
  mr_merge *m;
  mr_err e = MR_ERR_INIT;
  mr_text texts[MR_STREAMS] = {{0}};
  make_all(list);
  assert_int_equal(open_all(&m, &e), MR_OK);
  assert_int_equal(write_all(m, 0, texts, &e), MR_OK);
  const char *results = texts[MR_LINE_RESULT].data;
  const char *a = strstr(results, "\"r0\""), *b = strstr(results, "\"r1\"");
  assert_true(a && b && strstr(results, "\"r39\"") < b); /* 39 is of the first shard */
  mr_merge_close(m);
  free_texts(texts);
}

/* Hundreds of shards, and few files that may be open. */
static void many_shards_need_few_open_files(void **state) {
  (void)state;
  enum { MANY = 300 };
  mr_merge *m;
  mr_err e = MR_ERR_INIT;
  struct rlimit few, was;
  static char names[MANY][256];
  char *list[MANY];
  mr_text texts[MR_STREAMS] = {{0}}, want = {0};
  for (int i = 0; i < MANY; i++) {
    remove_shard(i + 1);
    spec s = standard(i);
    s.of = MANY;
    s.job_rows = 3 * MANY;
    s.created = 1000 - i;
    make_shard(&s);
    snprintf(names[i], sizeof names[i], "%s", base_of(i + 1));
    list[i] = names[i];
  }
  assert_int_equal(getrlimit(RLIMIT_NOFILE, &was), 0);
  few = was;
  few.rlim_cur = 24;
  assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
  assert_int_equal(mr_merge_open(&m, list, MANY, &e), MR_OK);
  assert_int_equal(write_all(m, 20000, texts, &e), MR_OK);
  assert_int_equal(setrlimit(RLIMIT_NOFILE, &was), 0);
  for (int row = 0; row < 3 * MANY; row++)
    if (!failed_row((uint64_t)row))
      mr_text_addf(&want, "{\"id\":\"r%d\",\"usage\":{\"prompt_tokens\":2}}\n", row);
  assert_string_equal(texts[MR_LINE_RESULT].data, want.data);
  mr_merge_close(m);
  mr_text_free(&want);
  free_texts(texts);
  for (int i = 0; i < MANY; i++)
    remove_shard(i + 1);
}

static void out_of_memory(void **state) {
  (void)state;
  const spec list[SHARDS] = {standard(0), standard(1), standard(2)};
  make_all(list);
  int64_t live = mr_mem_live();
  int failed = 0, good = 0; /* few failures do no harm: a name is tried that is not needed */
  for (int n = 0; good < 20; n++) {
    mr_merge *m;
    mr_err e = MR_ERR_INIT;
    mr_mem_fail_after(n);
    mr_code rc = open_all(&m, &e);
    if (!rc) {
      mr_text texts[MR_STREAMS] = {{0}};
      rc = write_all(m, n % 2 ? 150 : 0, texts, &e);
      mr_merge_close(m);
      free_texts(texts);
    }
    mr_mem_fail_after(-1);
    if (rc != MR_OK && rc != MR_E_NOMEM)
      print_error("%d: %d %s\n", n, rc, e.text);
    assert_true(rc == MR_OK || rc == MR_E_NOMEM);
    assert_int_equal(mr_mem_live(), live);
    failed += rc != MR_OK;
    good = rc ? 0 : good + 1;
  }
  assert_true(failed > 200);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(rows_come_in_input_order),
      cmocka_unit_test(ids_do_not_tell_the_shard),
      cmocka_unit_test(what_does_not_fit_is_refused),
      cmocka_unit_test(damage_is_found),
      cmocka_unit_test(completion_order_is_kept),
      cmocka_unit_test(many_shards_need_few_open_files),
      cmocka_unit_test(out_of_memory),
  };
  return cmocka_run_group_tests(tests, temp_begin, temp_end);
}

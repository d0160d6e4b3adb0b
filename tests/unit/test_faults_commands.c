/* The faults of test_faults.c under the other commands: plan and check on inputs and outputs of all
 * kinds, merge, rendering of templates. MR_CRASH_SEEDS: every call and allocation, else a share. */
#include <archive.h>
#include <archive_entry.h>

#include "tests/unit/fault_sys.h"

static int64_t most(int64_t few) {
  return getenv("MR_CRASH_SEEDS") ? 1 << 20 : few;
}

static int begin(void **state) {
  (void)state;
  fault_sys_begin();
  return fault_job_begin(&table);
}

static int end(void **state) {
  (void)state;
  return fault_job_end();
}

/* ---- inputs that are packed */

typedef struct packing {
  const char *name;
  int (*format)(struct archive *), (*filter)(struct archive *);
} packing;

static const packing packings[] = {
    {"a.jsonl.gz", archive_write_set_format_raw, archive_write_add_filter_gzip},
    {"b.jsonl.zst", archive_write_set_format_raw, archive_write_add_filter_zstd},
    {"c.tar.xz", archive_write_set_format_ustar, archive_write_add_filter_xz},
    {"d.zip", archive_write_set_format_zip, archive_write_add_filter_none},
};
enum { PACKINGS = sizeof packings / sizeof *packings };

static void pack(const packing *p, const char *text) {
  struct archive *a = archive_write_new();
  struct archive_entry *e = archive_entry_new();
  archive_entry_set_pathname(e, "rows.jsonl");
  archive_entry_set_filetype(e, AE_IFREG);
  archive_entry_set_size(e, (la_int64_t)strlen(text));
  assert_int_equal(p->format(a), ARCHIVE_OK);
  assert_int_equal(p->filter(a), ARCHIVE_OK);
  assert_int_equal(archive_write_open_filename(a, fault_path(p->name)), ARCHIVE_OK);
  assert_int_equal(archive_write_header(a, e), ARCHIVE_OK);
  assert_int_equal(archive_write_data(a, text, strlen(text)), strlen(text));
  assert_int_equal(archive_write_close(a), ARCHIVE_OK);
  archive_write_free(a);
  archive_entry_free(e);
}

/* A share of the plan's work is a measurement with memory of its own; what is said of it is left
 * out. */
static void plan_of_packed_inputs(void **state) {
  (void)state;
  static char names[PACKINGS][160], model[160];
  for (int i = 0; i < PACKINGS; i++) {
    char text[400];
    snprintf(text, sizeof text,
             "{\"id\":\"g%d\",\"prompt\":\"row\",\"max_tokens\":2}\nnot json\n"
             "{\"id\":\"m%d\",\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]}\n"
             "{\"id\":\"same\",\"prompt\":\"abc\",\"choices\":[\"d\",\"e\"]}\n",
             i, i);
    pack(&packings[i], text);
    snprintf(names[i], sizeof names[i], "%s", fault_path(packings[i].name));
  }
  snprintf(model, sizeof model, "%s", fault_path("tiny.gguf"));
  mr_mem_fail_above(0);
  look_with_faults(&(looking){.name = "plan",
                              .command = mr_cmd_plan,
                              .finding = MR_E_CANTCREATE,
                              .until = "\"kv_bytes_per_token\"",
                              .args = {names[0], names[1], names[2], names[3], "-m", model,
                                       "--threads", "1", "--kv-memory", "1MiB", "--json"}},
                   most(25));
  mr_mem_fail_above((size_t)32 << 20);
  fault_assert_no_problems();
}

/* ---- outputs that are packed */

static void check_of_packed_outputs(void **state) {
  (void)state;
  static char rows[160], model[160], out[160], base[160];
  static const char *const ends[] = {".jsonl.zst", ".jsonl.gz"};
  snprintf(rows, sizeof rows, "%s", fault_path("rows.jsonl"));
  snprintf(model, sizeof model, "%s", fault_path("tiny.gguf"));
  for (int i = 0; i < 2; i++) {
    snprintf(base, sizeof base, "%s", fault_path("out/packed"));
    snprintf(out, sizeof out, "%s%s", base, ends[i]);
    no_fault();
    fault_job_wipe();
    const looking run = {.name = "run",
                         .command = mr_cmd_run,
                         .args = {rows, "-m", model, "-o", out, "--threads", "1", "--kv-memory",
                                  "1MiB", "--progress", "none"}};
    assert_int_equal(look(&run), FAULT_JOB_DONE);
    look_with_faults(&(looking){.name = ends[i],
                                .command = mr_cmd_check,
                                .finding = MR_E_DATA,
                                .args = {out, "--json"}},
                     most(150));
  }
  fault_assert_no_problems();
}

/* ---- merge */

static char merge_names[3][160];
static mr_text merge_want[FAULT_JOB_FILES];

static looking merge_look(void) {
  return (looking){.name = "merge",
                   .command = mr_cmd_merge,
                   .finding = MR_E_CANTCREATE,
                   .until = ", in ",
                   .args = {"-o", merge_names[2], merge_names[0], merge_names[1]}};
}

static void remove_merged(void) {
  static const char *const ends[] = {
      "", ".jsonl", ".errors.jsonl.zst", ".report.json", ".report.html", ".manifest.json", ".run"};
  char path[200];
  mr_err e = MR_ERR_INIT;
  for (size_t i = 1; i < sizeof ends / sizeof *ends; i++) {
    snprintf(path, sizeof path, "%s%s", fault_path("out/m"), ends[i]);
    mr_sys_now = &mr_sys_os;
    if (i + 1 == sizeof ends / sizeof *ends)
      assert_int_equal(mr_durable_remove_tree(path, &e), MR_OK);
    else
      unlink(path);
    mr_sys_now = &table;
  }
}

/* Whatever failed: the same command makes the files of an undisturbed merge. */
static void expect_merged(const char *what) {
  mr_text got = {0};
  char path[200];
  const looking again = merge_look();
  no_fault();
  if (look(&again) != FAULT_JOB_DONE)
    fault_problem("%s: the second merge fails", what);
  for (int i = 0; i < FAULT_JOB_FILES; i++) {
    snprintf(path, sizeof path, "%s%s", fault_path("out/m"), fault_job_ends[i]);
    if (!fault_slurp(path, &got) || got.len != merge_want[i].len ||
        memcmp(got.data, merge_want[i].data, got.len) != 0)
      fault_problem("%s: %s is not that of an undisturbed merge", what, fault_job_ends[i]);
  }
  mr_text_free(&got);
}

static void merge_of_two_shards(void **state) {
  (void)state;
  static char rows[160], model[160];
  snprintf(rows, sizeof rows, "%s", fault_path("rows.jsonl"));
  snprintf(model, sizeof model, "%s", fault_path("tiny.gguf"));
  no_fault();
  fault_job_wipe();
  for (int i = 0; i < 2; i++) {
    char part[8];
    snprintf(part, sizeof part, "%d/2", i + 1);
    snprintf(merge_names[i], sizeof *merge_names, "%s%d.jsonl", fault_path("out/s"), i + 1);
    const looking run = {.name = "run",
                         .command = mr_cmd_run,
                         .args = {rows, "-m", model, "-o", merge_names[i], "--threads", "1",
                                  "--kv-memory", "1MiB", "--progress", "none", "--shard", part}};
    assert_int_equal(look(&run), FAULT_JOB_DONE);
  }
  snprintf(merge_names[2], sizeof *merge_names, "%s", fault_path("out/m.jsonl"));
  looking l = merge_look();
  assert_int_equal(look(&l), FAULT_JOB_DONE);
  for (int i = 0; i < FAULT_JOB_FILES; i++) {
    char path[200];
    snprintf(path, sizeof path, "%s%s", fault_path("out/m"), fault_job_ends[i]);
    assert_true(fault_slurp(path, &merge_want[i]));
  }
  l.before = remove_merged;
  l.after = expect_merged;
  look_with_faults(&l, most(150));
  for (int i = 0; i < FAULT_JOB_FILES; i++)
    mr_text_free(&merge_want[i]);
  fault_assert_no_problems();
}

/* ---- deadlines */

/* A time limit holds for rows that have an error already, too; each look at the clock takes time.
 */
static void a_time_limit_among_bad_rows(void **state) {
  (void)state;
  static char rows[160], model[160], out[160];
  unsigned long long done = 0;
  snprintf(rows, sizeof rows, "%s", fault_path("bad.jsonl"));
  snprintf(model, sizeof model, "%s", fault_path("tiny.gguf"));
  snprintf(out, sizeof out, "%s", fault_path("out/b.jsonl"));
  FILE *f = fopen(rows, "wb");
  assert_non_null(f);
  for (int i = 0; i < 500; i++)
    fprintf(f, "{\"id\":\"b%d\",\"prompt\":5}\n", i);
  fputs("{\"id\":\"good\",\"prompt\":\"a\",\"max_tokens\":1}\n", f);
  fclose(f);
  no_fault();
  const looking run = {.name = "run",
                       .command = mr_cmd_run,
                       .args = {rows, "-m", model, "-o", out, "--threads", "1", "--kv-memory",
                                "1MiB", "--progress", "none", "--time-limit", "8s"}};
  assert_int_equal(look(&run), MR_E_STOPPED);
  const char *after = strstr(fault_said(), "the time limit after ");
  assert_non_null(after);
  assert_int_equal(sscanf(after, "the time limit after %llu of 501", &done), 1);
  assert_true(done > 0 && done < 400);
  mr_sys_wake_at(0);
}

/* ---- templates */

static const char template_text[] =
    "{%- macro call(t) -%}{{ t.name | upper }}({{ t.arguments | tojson(indent=2) }})"
    "{%- endmacro -%}\n"
    "{%- set ns = namespace(n=0, seen=[]) -%}\n"
    "{%- if tools -%}{{ '\\n'.join(tools | map(attribute='name') | sort | list) }}{%- endif -%}\n"
    "{%- for m in messages if m.role != 'hidden' -%}\n"
    "{%- set ns.n = ns.n + 1 -%}{%- set ns.seen = ns.seen + [m.role] -%}\n"
    "{{ loop.index }}/{{ loop.length }} <|{{ m['role'] }}|>"
    "{{ m.content[0:4] ~ m.content | trim | replace('a', 'bb') }}\n"
    "{%- for t in m.tool_calls or [] %}{{ call(t) }}{{ loop.cycle(1, 2) }}{% endfor -%}\n"
    "{%- endfor -%}\n"
    "{{ ns.seen | unique | join(',') }} {{ messages | selectattr('role', 'equalto', 'user') | list"
    " | length }} {{ strftime_now('%d %b %Y') }} {{ '%s-%d' | format('x', ns.n) }}\n"
    "{{ {'b': [1, 2.5, none], 'a': {'x': true}} | items | list }} {{ range(5) | reverse | list }}\n"
    "{% if messages[0].role == 'dog' %}{{ raise_exception('no dogs') }}{% endif %}";

static const char template_lines[] =
    "{\"messages\":[{\"role\":\"user\",\"content\":\" banana \"},{\"role\":\"assistant\","
    "\"content\":\"\",\"tool_calls\":[{\"name\":\"f\",\"arguments\":{\"k\":[1,\"\\u00e9\"]}}]},"
    "{\"role\":\"hidden\",\"content\":\"\"}],\"tools\":[{\"name\":\"z\"},{\"name\":\"b\"}]}\n"
    "{\"messages\":[{\"role\":\"dog\",\"content\":\"c\"}]}\n"
    "{\"messages\"\n";

static int template_input;

static void rewind_input(void) {
  lseek(template_input, 0, SEEK_SET);
  dup2(template_input, STDIN_FILENO);
}

static void write_text(const char *path, const char *text) {
  FILE *f = fopen(path, "wb");
  assert_non_null(f);
  fputs(text, f);
  fclose(f);
}

static void rendering_of_a_template(void **state) {
  (void)state;
  static char path[160];
  int in = dup(STDIN_FILENO);
  write_text(fault_path("lines"), template_lines);
  snprintf(path, sizeof path, "%s", fault_path("t.jinja"));
  write_text(path, template_text);
  template_input = open(fault_path("lines"), O_RDONLY);
  assert_true(template_input >= 0);
  look_with_faults(&(looking){.name = "template",
                              .command = mr_cmd_model_template,
                              .finding = MR_E_IO,
                              .before = rewind_input,
                              .args = {"--file", path, "--jsonl"}},
                   most(400));
  close(template_input);
  dup2(in, STDIN_FILENO);
  close(in);
  fault_assert_no_problems();
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(plan_of_packed_inputs),   cmocka_unit_test(check_of_packed_outputs),
      cmocka_unit_test(merge_of_two_shards),     cmocka_unit_test(a_time_limit_among_bad_rows),
      cmocka_unit_test(rendering_of_a_template),
  };
  return cmocka_run_group_tests(tests, begin, end);
}

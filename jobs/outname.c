#include "jobs/outname.h"

#include <string.h>

#include "io/mem.h"
#include "io/source.h"
#include "io/sys.h"
#include "io/text.h"

static mr_code no_memory(mr_err *err) {
  return mr_err_set(err, MR_E_NOMEM, "out of memory for the options");
}

static mr_code set_base(mr_job *j, size_t stem, mr_output_format f, mr_err *err) {
  char *base = mr_mem_copy(j->output, stem);
  if (!base)
    return no_memory(err);
  mr_mem_free(j->base);
  j->base = base;
  j->format = f;
  return MR_OK;
}

mr_code mr_outname_set(mr_job *j, mr_err *err) {
  static const struct {
    const char *end;
    mr_output_format f;
  } ends[] = {{".jsonl.zst", MR_OUT_ZST}, {".jsonl.gz", MR_OUT_GZ}, {".jsonl", MR_OUT_PLAIN}};
  static const char *const others[] = {".json", ".zst", ".gz",  ".xz",
                                       ".bz2",  ".csv", ".txt", ".parquet"};
  if (!strcmp(j->output, "-")) {
    j->format = MR_OUT_STDOUT;
    return MR_OK;
  }
  size_t n = strlen(j->output);
  if (n == 0)
    return mr_err_set(err, MR_E_USAGE, "the output has no name");
  for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
    size_t m = strlen(ends[i].end);
    if (n > m && !strcmp(j->output + n - m, ends[i].end) && j->output[n - m - 1] != '/')
      return set_base(j, n - m, ends[i].f, err);
  }
  for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
    size_t m = strlen(others[i]);
    if (n > m && !strcmp(j->output + n - m, others[i]))
      return mr_err_set(err, MR_E_USAGE,
                        "output %s: the name must end in .jsonl.zst, .jsonl.gz or .jsonl",
                        j->output);
  }
  struct stat st;
  bool there = mr_sys_now->stat(j->output, &st) == 0;
  if (j->output[n - 1] == '/' || (there && S_ISDIR(st.st_mode)))
    return mr_err_set(err, MR_E_USAGE, "output %s: this is a directory; name a file in it",
                      j->output);
  if (there && !S_ISREG(st.st_mode))
    return mr_err_set(err, MR_E_CANTCREATE,
                      "output %s: not a regular file (-o - is standard output)", j->output);
  mr_text t = {0};
  mr_text_addf(&t, "%s.jsonl.zst", j->output);
  mr_code rc = t.failed ? no_memory(err) : set_base(j, n, MR_OUT_ZST, err);
  if (rc != MR_OK) {
    mr_text_free(&t);
    return rc;
  }
  mr_mem_free(j->output);
  j->output = t.data; /* the bytes are j's now */
  return MR_OK;
}

static bool same_file(const char *a, const char *b) {
  struct stat x, y;
  return mr_sys_now->stat(a, &x) == 0 && mr_sys_now->stat(b, &y) == 0 && x.st_dev == y.st_dev &&
         x.st_ino == y.st_ino && (S_ISREG(x.st_mode) || S_ISDIR(x.st_mode));
}

static mr_code check_against(const mr_job *j, const mr_source *s, const char *path, mr_err *err) {
  for (size_t i = 0; i < mr_source_n_paths(s); i++)
    if (same_file(path, mr_source_path(s, i)))
      return mr_err_set(err, MR_E_USAGE, "the output %s is the input %s; name another output", path,
                        mr_source_path(s, i));
  mr_text dir = {0};
  const char *slash = strrchr(j->output, '/');
  mr_text_add(&dir, slash ? j->output : "./", slash ? (size_t)(slash - j->output) + 1 : 2);
  mr_code rc = dir.failed ? no_memory(err) : MR_OK;
  for (int i = 0; i < j->n_inputs && rc == MR_OK; i++)
    if (same_file(dir.data, j->inputs[i]))
      rc = mr_err_set(
          err, MR_E_USAGE,
          "the output %s lies in the input directory %s, and would be read as an input next time",
          j->output, j->inputs[i]);
  mr_text_free(&dir);
  return rc;
}

mr_code mr_job_check_output(const mr_job *j, mr_err *err) {
  static const char *const ends[] = {".errors.jsonl.zst", ".errors.jsonl.gz", ".errors.jsonl",
                                     ".report.json", ".manifest.json"};
  if (!j->base)
    return MR_OK;
  mr_source *s;
  mr_code rc = mr_source_open(&s, (const char *const *)j->inputs, j->n_inputs, err);
  if (rc != MR_OK)
    return rc;
  rc = check_against(j, s, j->output, err);
  for (size_t i = 0; i < sizeof ends / sizeof *ends && rc == MR_OK; i++) {
    mr_text t = {0};
    mr_text_addf(&t, "%s%s", j->base, ends[i]);
    rc = t.failed ? no_memory(err) : check_against(j, s, t.data, err);
    mr_text_free(&t);
  }
  mr_source_close(s);
  return rc;
}

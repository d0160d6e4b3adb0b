/* A job's state: the first byte says whether the journal is the rest as it is, or records (u8 type,
 * u16 length, payload) that are given their places in the chain of checksums. */
#include "fuzz.h"
#include "io/durable.h"
#include "io/hash.h"
#include "io/text.h"
#include "jobs/check.h"
#include "jobs/commit.h"
#include "jobs/journal.h"

static void add_record(mr_text *t, uint32_t *crc, uint32_t type, const uint8_t *p, uint32_t n) {
  size_t at = t->len;
  mr_text_add(t, &n, 4);
  mr_text_add(t, &type, 4);
  mr_text_add(t, p, n);
  *crc = mr_crc32c(*crc, t->data + at, t->len - at);
  mr_text_add(t, crc, 4);
}

static void build(mr_text *t, const uint8_t *p, size_t n) {
  uint32_t crc = mr_crc32c(0, "MRJRNL1\n", 8);
  mr_text_adds(t, "MRJRNL1\n");
  while (n >= 3) {
    size_t len = (size_t)p[1] | (size_t)p[2] << 8;
    if (len > n - 3)
      len = n - 3;
    add_record(t, &crc, p[0], p + 3, (uint32_t)len);
    p += 3 + len;
    n -= 3 + len;
  }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  mr_text t = {0};
  mr_err e = MR_ERR_INIT, ignored = MR_ERR_INIT;
  mr_paths p;
  mr_commit *c;
  mr_check check = {0};
  char base[128], output[160];
  if (size < 1)
    return 0;
  if (data[0] & 1)
    mr_text_add(&t, data + 1, size - 1);
  else
    build(&t, data + 1, size - 1);
  snprintf(base, sizeof base, "%s/out", fuzz_dir());
  snprintf(output, sizeof output, "%s.jsonl", base);
  fuzz_check(mr_paths_make(&p, base, output, &e) == MR_OK);
  fuzz_check(mkdir(p.run, 0700) == 0);
  fuzz_write("out.run/journal", t.data ? t.data : "", t.len);
  fuzz_write("out.run/results.frames", "abcdefgh", 8);
  mr_code rc = mr_check_state(&check, &p, &e);
  fuzz_check_error(rc, &e);
  mr_check_free(&check);
  mr_err_clear(&e);
  rc = mr_commit_open(&c, &p, &e);
  fuzz_check_error(rc, &e);
  if (!rc) {
    const mr_job_identity *id = mr_commit_identity(c);
    fuzz_check(!id || mr_commit_done_rows(c) <= id->rows);
    fuzz_check(mr_commit_discard(c, &e) == MR_OK);
    mr_commit_close(c);
  } else {
    fuzz_check(mr_durable_remove_tree(p.run, &ignored) == MR_OK);
  }
  mr_paths_free(&p);
  mr_text_free(&t);
  return 0;
}

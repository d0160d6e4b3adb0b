/* A file of rows, packed or not, and its lines; the first byte chooses the name that it has. */
#include "fuzz.h"
#include "io/lines.h"

#define TEXT_MAX ((uint64_t)8 << 20) /* what is read of a bomb */
#define LINE_MAX_BYTES 4096

static void read_lines(mr_source *s, mr_lines *l, mr_err *e) {
  mr_line line;
  uint64_t last = 0;
  mr_lines_start(l);
  while (l->text_bytes < TEXT_MAX) {
    mr_code rc = mr_lines_next(l, &line, e);
    fuzz_check_error(rc, e);
    if (rc || !line.s)
      return;
    fuzz_check(line.number > last && (line.too_long || line.len <= LINE_MAX_BYTES));
    last = line.number;
  }
  (void)s;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static const char *const names[] = {"f.jsonl",     "f.jsonl.zst", "f.jsonl.gz", "f.jsonl.xz",
                                      "f.jsonl.bz2", "f.tar",       "f.zip",      "f"};
  mr_err e = MR_ERR_INIT;
  mr_source *s;
  mr_lines l;
  bool more;
  if (size < 1)
    return 0;
  const char *path = fuzz_write(names[data[0] % 8], data + 1, size - 1);
  fuzz_check(mr_source_open(&s, &path, 1, &e) == MR_OK);
  mr_lines_init(&l, s, LINE_MAX_BYTES, NULL);
  while (l.text_bytes < TEXT_MAX) {
    mr_code rc = mr_source_next(s, &more, &e);
    fuzz_check_error(rc, &e);
    if (rc || !more)
      break;
    read_lines(s, &l, &e);
    if (e.code)
      break;
  }
  mr_lines_free(&l);
  mr_source_close(s);
  return 0;
}

/* A file of zstd frames with its seek table, and a frame by itself. */
#include "fuzz.h"
#include "io/zframe.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  mr_err e = MR_ERR_INIT;
  mr_text t = {0};
  mr_zfile *f;
  mr_code rc = mr_zframe_unpack(data, size, 1 << 20, "frame", &t, &e);
  fuzz_check_error(rc, &e);
  fuzz_check(rc || t.len <= 1 << 20);
  mr_text_free(&t);
  mr_err_clear(&e);
  rc = mr_zfile_open(&f, fuzz_write("f.jsonl.zst", data, size), &e);
  fuzz_check_error(rc, &e);
  if (rc)
    return 0;
  for (uint32_t i = 0; i < mr_zfile_frames(f) && i < 8; i++) {
    t = (mr_text){0};
    mr_err_clear(&e);
    rc = mr_zfile_read(f, i, &t, &e);
    fuzz_check_error(rc, &e);
    mr_text_free(&t);
  }
  mr_zfile_close(f);
  return 0;
}

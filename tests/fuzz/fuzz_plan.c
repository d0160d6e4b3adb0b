/* A plan: u8 rows, u8 bytes of names, the names' part of plan.head, entries of plan.index, and the
 * rest as plan.data; checksums are put right, so that what lies behind them is reached. */
#include <stddef.h>

#include "fuzz.h"
#include "io/hash.h"
#include "io/text.h"
#include "jobs/plan.h"
#include "jobs/shard.h"

/* As in plan.c. */
typedef struct head {
  char magic[8];
  uint64_t rows, bad_rows, prompt_tokens, output_tokens;
  uint64_t data_bytes;
  char index_digest[MR_HASH_HEX], digest[MR_HASH_HEX];
  char pad[2];
  uint32_t n_files;
} head;

static void read_all(mr_plan *p, bool shards) {
  mr_err e = MR_ERR_INIT;
  mr_plan_record rec;
  mr_shard *s;
  for (uint64_t i = 0; i < mr_plan_rows(p); i++) {
    mr_code rc = mr_plan_read(p, i, &rec, &e);
    fuzz_check_error(rc, &e);
    if (!rc)
      mr_plan_record_free(&rec);
    mr_err_clear(&e);
  }
  if (shards && mr_shard_open(&s, p, (mr_shard_part){1, 3}, &e) == MR_OK)
    mr_shard_close(s);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  if (size < 2)
    return 0;
  uint64_t rows = data[0] % 16;
  size_t names = data[1], index_bytes = rows * sizeof(mr_plan_entry);
  if (size - 2 < names + index_bytes)
    return 0;
  head h = {.magic = "MRPLAN\0\2", .rows = rows, .n_files = names ? data[2] % 8 : 0};
  mr_plan_entry entries[16];
  const uint8_t *records = data + 2 + names + index_bytes;
  h.data_bytes = size - 2 - names - index_bytes;
  memcpy(entries, data + 2 + names, index_bytes);
  for (uint64_t i = 0; i < rows; i++) {
    mr_plan_entry *e = &entries[i];
    e->offset %= h.data_bytes + 2;
    e->bytes %= 512;
    e->kind %= 8;
    if (e->offset + e->bytes <= h.data_bytes)
      e->check = mr_hash_64(records + e->offset, e->bytes);
  }
  mr_hash_hex(entries, index_bytes, h.index_digest);
  mr_text t = {0};
  mr_text_add(&t, &h, sizeof h);
  mr_text_add(&t, data + 2, names);
  uint64_t check = mr_hash_64(t.data, t.len);
  mr_text_add(&t, &check, sizeof check);
  fuzz_write("plan.head", t.data, t.len);
  fuzz_write("plan.index", entries, index_bytes);
  fuzz_write("plan.data", records, (size_t)h.data_bytes);
  mr_text_free(&t);
  mr_err e = MR_ERR_INIT;
  mr_plan *p;
  mr_code rc = mr_plan_open(&p, fuzz_dir(), &e);
  fuzz_check_error(rc, &e);
  if (rc)
    return 0;
  read_all(p, size % 16 == 0); /* which takes longer than all the rest */
  mr_plan_close(p);
  return 0;
}

/* A manifest: a JSON object that is signed as millrace does it, so that what lies behind is
 * reached. */
#include "fuzz.h"
#include "io/hash.h"
#include "io/json.h"
#include "io/mem.h"
#include "jobs/manifest.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  char hex[MR_HASH_HEX];
  mr_err e = MR_ERR_INIT;
  mr_manifest m;
  json_t *o = mr_json_load((const char *)data, size);
  if (!json_is_object(o)) {
    json_decref(o);
    return 0;
  }
  json_object_del(o, "digest");
  char *text = mr_json_dumps(o, JSON_COMPACT | JSON_SORT_KEYS);
  mr_hash_hex(text, strlen(text), hex);
  mr_mem_free(text);
  json_object_set_new(o, "digest", json_string(hex));
  text = mr_json_dumps(o, JSON_COMPACT | JSON_SORT_KEYS);
  json_decref(o);
  size_t n = strlen(text);
  text[n] = '\n'; /* in the place of the NUL */
  const char *path = fuzz_write("manifest.json", text, n + 1);
  mr_mem_free(text);
  mr_code rc = mr_manifest_load(&m, path, &e);
  fuzz_check_error(rc, &e);
  if (!rc) {
    mr_text again = {0};
    fuzz_check(mr_manifest_dump(&m, &again, &e) == MR_OK);
    mr_text_free(&again);
    mr_manifest_free(&m);
  }
  return 0;
}

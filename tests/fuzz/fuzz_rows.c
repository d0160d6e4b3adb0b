/* A line of input to a record, the record to a request, a bad one to its error line. */
#include "../unit/row_model.h"
#include "fuzz.h"
#include "io/json.h"
#include "jobs/render.h"
#include "jobs/rows.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static mr_prompter *p;
  static mr_job j;
  mr_err e = MR_ERR_INIT;
  if (!p) {
    mr_job_init(&j);
    fuzz_check(mr_prompter_open(&p, row_model_write(), &e) == MR_OK);
    build_remove(build_path("model.gguf"));
  }
  j.long_prompt = size % 2 ? MR_LONG_ERROR : MR_LONG_TRUNCATE_LEFT;
  j.keep_prompt = size % 3 == 0;
  const mr_row_source src = {.file = "in.jsonl", .line = 7};
  mr_plan_record rec;
  fuzz_check(mr_row_parse(&j, p, 0, ROW_MODEL_CONTEXT, &src, (const char *)data, size, &rec, &e) ==
             MR_OK);
  json_t *record = mr_json_parse(rec.json, rec.json_len, NULL, NULL);
  fuzz_check(json_is_object(record));
  if (rec.e.kind == MR_ROW_BAD) {
    const char *files[] = {"in.jsonl"};
    const mr_render r = {.model = "m", .vocab = mr_prompter_vocab(p), .files = files};
    mr_text line = {0};
    fuzz_check(mr_render_bad(&r, &rec, &line, &e) == MR_OK && !line.failed);
    json_t *o = mr_json_parse(line.data, line.len - 1, NULL, NULL);
    fuzz_check(line.data[line.len - 1] == '\n' && json_is_object(o));
    json_decref(o);
    mr_text_free(&line);
  } else {
    mr_request req;
    mr_row_keep keep = {0};
    fuzz_check(mr_row_request(&rec, mr_prompter_vocab(p), &req, &keep, &e) == MR_OK);
    fuzz_check(req.n_prompt >= 1 && req.n_prompt <= ROW_MODEL_CONTEXT);
    for (int i = 0; i < req.n_prompt; i++)
      fuzz_check(req.prompt[i] >= 0 && req.prompt[i] < ROW_MODEL_VOCAB);
    mr_row_keep_free(&keep);
  }
  json_decref(record);
  mr_plan_record_free(&rec);
  return 0;
}

/* A job file, or (first byte '-') a command line with an argument on each line. */
#include "fuzz.h"
#include "jobs/options.h"

enum { ARGS_MAX = 40 };

static int split(char *text, char **argv) {
  int n = 1;
  argv[0] = text; /* the command's name is passed over */
  for (char *s = text; *s && n < ARGS_MAX;) {
    argv[n++] = s;
    s += strcspn(s, "\n");
    if (*s)
      *s++ = '\0';
  }
  return n;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  char *argv[ARGS_MAX] = {"run"};
  int argc = 2;
  mr_err e = MR_ERR_INIT;
  mr_job j;
  char *text = calloc(size + 1, 1);
  memcpy(text, data, size);
  if (size && data[0] == '-') {
    argc = split(text, argv);
  } else {
    char *path = (char *)(uintptr_t)fuzz_write("job.json", data, size);
    argv[1] = path;
  }
  mr_job_init(&j);
  mr_code rc =
      mr_job_parse(&j, size % 5 ? MR_CMD_RUN : (mr_command)(size % 30 / 5), argc, argv, &e);
  fuzz_check_error(rc, &e);
  if (rc == MR_OK && !j.help) {
    json_t *o = mr_job_result_options(&j);
    fuzz_check(json_is_object(o));
    json_decref(o);
  }
  mr_job_free(&j);
  free(text);
  return 0;
}

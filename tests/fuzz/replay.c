/* Runs a fuzz target on the files it is given, and on the files of folders: the committed corpus.
 */
#include <dirent.h>

#include "fuzz.h"

static size_t n_run;

static void run_file(const char *path) {
  FILE *f = fopen(path, "rb");
  fuzz_check(f && fseek(f, 0, SEEK_END) == 0);
  long size = ftell(f);
  uint8_t *bytes = malloc((size_t)size ? (size_t)size : 1);
  rewind(f);
  fuzz_check(size >= 0 && bytes && fread(bytes, 1, (size_t)size, f) == (size_t)size);
  fclose(f);
  LLVMFuzzerTestOneInput(bytes, (size_t)size);
  free(bytes);
  n_run++;
}

static void run_path(const char *path) {
  DIR *d = opendir(path);
  if (!d) {
    run_file(path);
    return;
  }
  for (struct dirent *e; (e = readdir(d));) {
    char file[1024];
    if (e->d_name[0] == '.')
      continue;
    snprintf(file, sizeof file, "%s/%s", path, e->d_name);
    run_path(file);
  }
  closedir(d);
}

int main(int argc, char **argv) {
  for (int i = 1; i < argc; i++)
    run_path(argv[i]);
  printf("%zu inputs\n", n_run);
  return n_run ? 0 : 1;
}

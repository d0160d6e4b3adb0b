#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "io/mem.h"
#include "io/zframe.h"

static char path[] = "/tmp/mr_test_zframe_XXXXXX";

static void save(const mr_text *t) {
  int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
  assert_true(fd >= 0);
  assert_int_equal(write(fd, t->data, t->len), (ssize_t)t->len);
  close(fd);
}

/* n frames of growing text, then the table. */
static void make(mr_text *out, int n) {
  mr_zpack *z;
  mr_err e = MR_ERR_INIT;
  assert_int_equal(mr_zpack_open(&z, 3, &e), MR_OK);
  for (int i = 0; i < n; i++) {
    mr_text t = {0};
    for (int k = 0; k < i * 100; k++)
      mr_text_addf(&t, "line %d of frame %d\n", k, i);
    assert_int_equal(mr_zpack_frame(z, t.data, t.len, out, &e), MR_OK);
    mr_text_free(&t);
  }
  assert_int_equal(mr_zpack_table(z, out, &e), MR_OK);
  mr_zpack_close(z);
}

static mr_text last; /* all that read_back read */

static mr_code read_back(uint64_t *bytes) {
  mr_zfile *f;
  mr_err e = MR_ERR_INIT;
  mr_code rc = mr_zfile_open(&f, path, &e);
  if (rc)
    return rc;
  mr_text t = {0};
  mr_text_clear(&last);
  for (uint32_t i = 0; !rc && i < mr_zfile_frames(f); i++) {
    rc = mr_zfile_read(f, i, &t, &e);
    mr_text_add(&last, t.data, t.len);
    *bytes += t.len;
  }
  assert_true(rc || *bytes == mr_zfile_text_bytes(f));
  mr_text_free(&t);
  mr_zfile_close(f);
  return rc;
}

static void round_trip(void **state) {
  (void)state;
  for (int n = 0; n < 6; n++) {
    mr_text out = {0};
    uint64_t bytes = 0;
    make(&out, n);
    save(&out);
    assert_int_equal(read_back(&bytes), MR_OK);
    assert_true((bytes > 0) == (n > 1));
    mr_text_free(&out);
    mr_text_free(&last);
  }
  assert_int_equal(mr_mem_live(), 0);
}

/* The tool of the format's authors accepts the file, seek table and all. */
static void zstd_reads_it(void **state) {
  (void)state;
  for (int n = 0; n < 4; n++) {
    mr_text out = {0};
    make(&out, n);
    save(&out);
    mr_text_free(&out);
    pid_t child = fork();
    if (child == 0) {
      execlp("zstd", "zstd", "-tq", path, (char *)NULL);
      _exit(99);
    }
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 99)
      skip();
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
}

static void every_cut_is_found(void **state) {
  (void)state;
  mr_text out = {0};
  make(&out, 3);
  size_t len = out.len;
  for (size_t n = 0; n < len; n++) {
    uint64_t bytes = 0;
    out.len = n;
    save(&out);
    assert_int_equal(read_back(&bytes), MR_E_DATA);
  }
  mr_text_free(&out);
}

/* Found, or without effect: the format has unused bits, one in each frame's head and some in its
 * tables. */
static void no_flipped_bit_changes_the_text(void **state) {
  (void)state;
  mr_text out = {0}, good = {0};
  uint64_t n = 0;
  int silent = 0;
  make(&out, 3);
  save(&out);
  assert_int_equal(read_back(&n), MR_OK);
  mr_text_add(&good, last.data, last.len);
  for (size_t bit = 0; bit < out.len * 8; bit++) {
    uint64_t bytes = 0;
    out.data[bit / 8] ^= (char)(1 << bit % 8);
    save(&out);
    out.data[bit / 8] ^= (char)(1 << bit % 8);
    if (read_back(&bytes) != MR_OK)
      continue;
    assert_int_equal(last.len, good.len);
    assert_memory_equal(last.data, good.data, good.len);
    silent++;
  }
  assert_in_range(silent, 3, out.len * 8 / 50);
  mr_text_free(&good);
  mr_text_free(&last);
  mr_text_free(&out);
  assert_int_equal(mr_mem_live(), 0);
}

static void unpack_refuses_too_much(void **state) {
  (void)state;
  mr_zpack *z;
  mr_err e = MR_ERR_INIT;
  mr_text frame = {0}, out = {0};
  assert_int_equal(mr_zpack_open(&z, 1, &e), MR_OK);
  assert_int_equal(mr_zpack_frame(z, "abcdef", 6, &frame, &e), MR_OK);
  assert_int_equal(mr_zframe_unpack(frame.data, frame.len, 5, "x", &out, &e), MR_E_DATA);
  mr_err_clear(&e);
  assert_int_equal(mr_zframe_unpack(frame.data, frame.len - 1, 6, "x", &out, &e), MR_E_DATA);
  mr_err_clear(&e);
  assert_int_equal(mr_zframe_unpack(frame.data, frame.len, 6, "x", &out, &e), MR_OK);
  assert_string_equal(out.data, "abcdef");
  mr_text_free(&frame);
  mr_text_free(&out);
  mr_zpack_close(z);
}

static int begin(void **state) {
  (void)state;
  int fd = mkstemp(path);
  return fd < 0 ? -1 : close(fd);
}

static int end(void **state) {
  (void)state;
  return unlink(path);
}

#if defined(__SANITIZE_ADDRESS__)
#define SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(memory_sanitizer)
#define SANITIZED 1
#endif
#endif

/* zstd takes memory of its own: when there is none, the frame is not damaged. */
static void out_of_memory_is_no_damage(void **state) {
  (void)state;
#ifdef SANITIZED
  skip(); /* its allocator would end the program */
#else
  static void *held[1 << 16];
  size_t n = 0;
  mr_err e = MR_ERR_INIT;
  mr_text packed = {0}, back = {0};
  mr_zpack *z;
  struct rlimit old, none = {1, 1};
  assert_int_equal(mr_zpack_open(&z, 1, &e), MR_OK);
  assert_int_equal(mr_zpack_frame(z, "some text", 9, &packed, &e), MR_OK);
  mr_zpack_close(z);
  assert_int_equal(getrlimit(RLIMIT_AS, &old), 0);
  none.rlim_max = old.rlim_max;
  assert_int_equal(setrlimit(RLIMIT_AS, &none), 0);
  while (n < sizeof held / sizeof *held && (held[n] = malloc(32 << 10)) != NULL)
    n++;
  mr_code rc = mr_zframe_unpack(packed.data, packed.len, 100, "frames", &back, &e);
  while (n)
    free(held[--n]);
  setrlimit(RLIMIT_AS, &old);
  assert_int_equal(rc, MR_E_NOMEM);
  mr_text_free(&packed);
  mr_text_free(&back);
#endif
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(round_trip),
      cmocka_unit_test(zstd_reads_it),
      cmocka_unit_test(every_cut_is_found),
      cmocka_unit_test(no_flipped_bit_changes_the_text),
      cmocka_unit_test(unpack_refuses_too_much),
      cmocka_unit_test(out_of_memory_is_no_damage),
  };
  return cmocka_run_group_tests(tests, begin, end);
}

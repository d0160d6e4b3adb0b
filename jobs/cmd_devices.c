/* cmd_devices.c: `millrace devices`: what can compute here, and why the rest cannot. */
#include <getopt.h>
#include <jansson.h>
#include <stdbool.h>

#include "io/err.h"
#include "jobs/cmd.h"
#include "kernels/kernels.h"
#include "kernels/pool.h"
#include "src/device.h"
#include "src/machine.h"

static const char usage[] =
    "usage: millrace devices [--json]\n"
    "\n"
    "Lists devices, their memory and instruction sets, and why one is not usable.\n"
    "\n"
    "  --json      print one JSON object\n"
    "  -h, --help  print this page\n"
    "\n"
    "MILLRACE_ISA names another instruction set for the cpu than the best one.\n";

#define MOST 32 /* devices that are listed */

static json_t *cpu_object(void) {
  char name[128];
  const mr_kernels *best = mr_kernels_best();
  mr_memory mem = mr_machine_memory();
  json_t *isa = json_array();
  for (const char *const *n = mr_kernels_names(); *n; n++)
    json_array_append_new(isa, json_string(*n));
  json_t *o = json_pack("{s:s, s:b, s:s, s:o, s:i, s:I, s:I}", "name", "cpu", "usable",
                        best != NULL, "model", mr_machine_cpu(name, sizeof name), "isa", isa,
                        "threads", mr_pool_cpus(), "memory_bytes", (json_int_t)mem.total,
                        "memory_available_bytes", (json_int_t)mem.available);
  if (best)
    json_object_set_new(o, "isa_used", json_string(best->name));
  else
    json_object_set_new(o, "reason", json_string("MILLRACE_ISA names what this CPU cannot run"));
  return o;
}

static json_t *gpu_object(const mr_device_found *f) {
  json_t *o = json_pack("{s:s, s:b}", "name", f->name, "usable", !*f->why);
  if (*f->model)
    json_object_set_new(o, "model", json_string(f->model));
  if (*f->arch)
    json_object_set_new(o, "arch", json_string(f->arch));
  if (f->memory_bytes) {
    json_object_set_new(o, "memory_bytes", json_integer((json_int_t)f->memory_bytes));
    json_object_set_new(o, "memory_available_bytes", json_integer((json_int_t)f->free_bytes));
  }
  if (*f->why)
    json_object_set_new(o, "reason", json_string(f->why));
  if (*f->gemm)
    json_object_set_new(o, "gemm_library", json_string(f->gemm));
  return o;
}

static int print_json(void) {
  json_t *list = json_array();
  json_array_append_new(list, cpu_object());
  mr_device_found found[MOST];
  int n = mr_device_list(found, MOST);
  for (int i = 0; i < n; i++)
    json_array_append_new(list, gpu_object(&found[i]));
  json_t *o = json_pack("{s:o}", "devices", list);
  int failed = !o || json_dumpf(o, stdout, JSON_INDENT(2)) || fputc('\n', stdout) == EOF;
  json_decref(o);
  return failed;
}

static void print_gpu(const mr_device_found *f) {
  printf("%-5s %s%s\n", f->name, *f->why ? "not usable: " : "usable", f->why);
  if (*f->model)
    printf("      %s (%s)\n", f->model, f->arch);
  if (f->memory_bytes)
    printf("      memory: %.1f GiB, %.1f GiB available\n", (double)f->memory_bytes / 0x1p30,
           (double)f->free_bytes / 0x1p30);
  if (*f->gemm)
    printf("      GEMM library: %s\n", f->gemm);
}

static int print_page(void) {
  char name[128];
  const mr_kernels *best = mr_kernels_best();
  mr_memory mem = mr_machine_memory();
  printf("cpu   %s\n", best ? "usable" : "not usable: MILLRACE_ISA names what this CPU cannot run");
  printf("      %s, %d threads\n", mr_machine_cpu(name, sizeof name), mr_pool_cpus());
  printf("      instruction sets:");
  for (const char *const *n = mr_kernels_names(); *n; n++)
    printf(" %s", *n);
  printf("%s%s\n", best ? ", used: " : "", best ? best->name : "");
  printf("      memory: %.1f GiB, %.1f GiB available\n", (double)mem.total / 0x1p30,
         (double)mem.available / 0x1p30);
  mr_device_found found[MOST];
  int n = mr_device_list(found, MOST);
  for (int i = 0; i < n; i++)
    print_gpu(&found[i]);
  return ferror(stdout);
}

static int report(mr_code rc, const mr_err *err) {
  mr_err_print(err, stderr);
  return mr_err_exit(rc);
}

int mr_cmd_devices(int argc, char **argv) {
  static const struct option options[] = {
      {"json", no_argument, NULL, 'j'}, {"help", no_argument, NULL, 'h'}, {NULL, 0, NULL, 0}};
  mr_err err = MR_ERR_INIT;
  bool json = false;
  optind = 0;
  opterr = 0;
  for (int c; (c = getopt_long(argc, argv, "h", options, NULL)) != -1;) {
    if (c == 'h')
      return fputs(usage, stdout) == EOF ? MR_E_IO : 0;
    if (c == '?')
      return report(
          mr_err_set(&err, MR_E_USAGE, "devices: unknown option %s (try --help)", argv[optind - 1]),
          &err);
    json = true;
  }
  if (optind < argc)
    return report(mr_err_set(&err, MR_E_USAGE, "devices takes no argument, not %s (try --help)",
                             argv[optind]),
                  &err);
  if ((json ? print_json() : print_page()) || fflush(stdout))
    return report(mr_err_errno(&err, MR_E_IO, NULL, "cannot write to standard output"), &err);
  return 0;
}

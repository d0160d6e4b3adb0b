/* cmd.h: the sub-commands. argv[0] is the sub-command's name (for `millrace model info FILE`:
 * "info"), the rest are its own arguments. Each prints its own errors and returns the exit status.
 */
#ifndef MR_JOBS_CMD_H
#define MR_JOBS_CMD_H

int mr_cmd_run(int argc, char **argv);
int mr_cmd_plan(int argc, char **argv);
int mr_cmd_status(int argc, char **argv);
int mr_cmd_check(int argc, char **argv);
int mr_cmd_merge(int argc, char **argv);
int mr_cmd_score(int argc, char **argv);
int mr_cmd_quantize(int argc, char **argv);
int mr_cmd_bench(int argc, char **argv);
int mr_cmd_devices(int argc, char **argv);
int mr_cmd_model_info(int argc, char **argv);
int mr_cmd_model_tokenize(int argc, char **argv);
int mr_cmd_model_detokenize(int argc, char **argv);
int mr_cmd_model_template(int argc, char **argv);

#endif

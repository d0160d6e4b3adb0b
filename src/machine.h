/* machine.h: what this machine offers: memory and the processor's name. Reads /proc and the control
 * group. */
#ifndef MR_SRC_MACHINE_H
#define MR_SRC_MACHINE_H

#include <stddef.h>
#include <stdint.h>

typedef struct mr_memory {
  uint64_t total, available; /* bytes; the control group's limit counts, of what it uses files
                                that can be read again do not; 0: unknown */
} mr_memory;

mr_memory mr_machine_memory(void);

/* Others at work beside this process:
 *     mr_watch w = mr_machine_watch();  ...;  mr_machine_waited_share(&w)
 * the share of the time between for which the first thread of the process could have run and did
 * not, as others had the processors; 0: the kernel does not say. */
typedef struct mr_watch {
  double began_s, waited_s;
} mr_watch;

mr_watch mr_machine_watch(void);
double mr_machine_waited_share(const mr_watch *w);

/* With more than this a measurement says little of the machine. */
#define MR_MACHINE_WAITED 0.1

/* The processor's model name into buf (always terminated); "cpu" where the kernel does not say.
 * Returns buf. */
const char *mr_machine_cpu(char *buf, size_t cap);

#endif

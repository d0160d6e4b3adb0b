/* peak.h: what this machine can do at most, measured in about a quarter of a second: the base of MFU and MBU.
 *
 * ops: integer multiply-adds of bytes from registers, a multiply and an add counted as two, on all threads, with the
 * widest instructions that the processor has (AVX-512 VNNI, else AVX2, else SSE). bytes: copying between arrays beyond
 * the caches, reads and writes counted. Both are what the machine gives now, with what else runs on it.
 */
#ifndef MR_JOBS_PEAK_H
#define MR_JOBS_PEAK_H

typedef struct mr_peaks {
  double ops, bytes; /* a second; 0: could not be measured */
  char basis[128];   /* in words */
} mr_peaks;

mr_peaks mr_peak_measure(int threads);

#endif

/* score_text.h: how an answer is compared with one acceptable text.
 *
 * Sources: exact match, token F1 and their normalization: the evaluation of SQuAD 1.1 (Rajpurkar
 * and others, 2016), where 2.0 settles empty answers; ROUGE-L: Lin, 2004, as an F-measure over
 * words in lower case; numbers: the answers of GSM8K (Cobbe and others, 2021), "#### 42".
 */
#ifndef MR_JOBS_SCORE_TEXT_H
#define MR_JOBS_SCORE_TEXT_H

#include <stdbool.h>
#include <stddef.h>

#include "io/text.h"

/* Appends s without what `ignore` (MR_IGNORE_*) passes over. out->failed tells of missing memory.
 */
void mr_score_normalize(mr_str s, unsigned ignore, mr_text *out);

/* 0 or 1, or within; -1: out of memory. Texts as they come: f1 and rouge_l normalize themselves. */
double mr_score_f1(mr_str answer, mr_str ref);
/* -2: more than MR_ROUGE_CELLS pairs of words. */
double mr_score_rouge_l(mr_str answer, mr_str ref);
#define MR_ROUGE_CELLS ((size_t)100000000)

/* Whether the number that each text ends on is the same: what follows the last "####", else the
 * last number. 1,234.50 is 1234.5 and 12e2 is 1200; exact, whatever the length. A text without one
 * equals nothing. */
bool mr_score_same_number(mr_str answer, mr_str ref);
/* Normalized texts: the answer has the reference in it. An empty one is only in an empty answer. */
bool mr_score_contains(mr_str answer, mr_str ref);

/* The index that a label names: 0, "0", or a letter (A is 0). -1: neither. */
int mr_score_label(mr_str label);

#endif

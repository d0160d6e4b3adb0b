/* messages.h: the messages of a chat, checked and brought into the form that chat templates read.
 *
 * Content that is a list of text parts becomes one string (parts joined with a newline), and the
 * arguments of tool calls that are JSON text become the objects they spell. Everything else is
 * passed on as it is.
 */
#ifndef MR_JOBS_MESSAGES_H
#define MR_JOBS_MESSAGES_H

#include "jobs/params.h"

/* A new array, or NULL with *why set (its message names the place: "messages[2].content ..."). */
json_t *mr_messages_read(const json_t *messages, mr_row_error *why);

#endif

/* names.h: what tensors are called. The program knows a tensor by its name in GGUF files without
 * "blk.N." and the ending ("attn_q"); directories have other names for it, one of a list.
 *
 *     mr_names n;
 *     mr_names_open(&n, weights);
 *     t = mr_names_find(&n, layer, "attn_q", ".weight", name);    name: for messages
 */
#ifndef MR_SRC_NAMES_H
#define MR_SRC_NAMES_H

#include "io/weights.h"

#define MR_NAME 192 /* bytes of a tensor's name here; ours are shorter */

typedef struct mr_names {
  const mr_weights *w;
  const char *base;   /* directories: before all names but the head's: "model." */
  const char *blocks; /* ... and then before a layer's number: "layers." */
} mr_names;

void mr_names_open(mr_names *n, const mr_weights *w);

/* layer -1: tensors of no layer. ext with its dot, or "". `name` gets the full name of the tensor,
 * or where there is none (NULL) of the first that was looked for. A stem may hold "%d": the expert
 * `item`. */
const mr_gguf_tensor *mr_names_find(const mr_names *n, int layer, const char *stem, const char *ext,
                                    int item, char name[MR_NAME]);

/* The name that a stem has where its layer has `like`: the one of its list that begins with the
 * same part of the model ("mlp.", "feed_forward."), or else the first. */
void mr_names_beside(const mr_names *n, int layer, const char *stem, const char *ext, int item,
                     mr_str like, char name[MR_NAME]);

/* What a module is called here: "model.layers.3.self_attn.q_proj", as directories have it, is
 * "attn_q" of layer 3 (-1: of none), "mlp.experts.7.up_proj" item 7 of "ffn_up_exp". NULL: not
 * known. */
const char *mr_names_module(const char *module, int *layer, int *item);

/* The layer that a tensor's name belongs to, -1: none. *rest: what follows its number. */
int mr_names_layer(const mr_names *n, mr_str name, mr_str *rest);

#endif

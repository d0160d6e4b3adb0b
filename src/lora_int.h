/* lora_int.h: what lora.c (memory, packing), lora_config.c (adapter_config.json), lora_load.c
 * (tensors) and lora_latent.c (those of latent attention) share. */
#ifndef MR_SRC_LORA_INT_H
#define MR_SRC_LORA_INT_H

#include <jansson.h>

#include "src/lora.h"
#include "src/regex.h"

typedef struct mr_lora_pattern { /* a value for modules whose name ends so */
  mr_regex *re;
  double value;
} mr_lora_pattern;

typedef struct mr_lora_config {
  double alpha;
  int r;
  bool rslora;
  bool tied;                       /* what changes the embedding changes the head, too */
  mr_lora_pattern *ranks, *alphas; /* the first that fits counts; owned */
  size_t n_ranks, n_alphas;
  mr_regex *target;   /* target_modules as an expression; NULL: a list, or all */
  json_t *targets;    /* a list of names; NULL: target or all */
  json_t *layers;     /* layers_to_transform as a list; NULL: all */
  json_t *parameters; /* target_parameters: a list of names; NULL: none */
  mr_regex_scratch scratch;
  mr_err failed; /* an expression that could not be tried: what was answered then is void */
} mr_lora_config;

/* Refuses what would compute something else. */
mr_code mr_lora_config_read(mr_lora_config *c, const char *path, mr_err *err);
void mr_lora_config_free(mr_lora_config *c);
/* These three look for expressions: see `failed` after them.
 * Whether target_modules and layers_to_transform name the module. */
bool mr_lora_config_targets(mr_lora_config *c, const char *module, int layer);
/* Whether target_parameters names the parameter ("...mlp.experts.down_proj"). */
bool mr_lora_config_parameter(const mr_lora_config *c, const char *name);
/* Rank and factor of a module, or of a parameter. */
void mr_lora_config_module(mr_lora_config *c, const char *module, int *rank, float *scale);

/* Zeroed memory that lives as long as its list. NULL: none. */
void *mr_lora_block(mr_lora_blocks *list, size_t count, size_t size);
/* The adapter's link of a matrix, made where there is none. NULL: no memory. */
mr_lora_link *mr_lora_link_of(mr_lora *l, mr_matrix *w, int adapter);
/* w [n, k] in the adapters' form; where nothing is packed only its size. False: no memory. */
bool mr_lora_panels(mr_lora *l, uint8_t **out, const float *w, int n, int k, mr_scheme scheme);

typedef struct mr_lora_pair { /* an adapter's factors of a matrix [n, k], as read */
  float *a, *b;               /* [rank, k], [n, rank]; NULL: none. Borrowed */
  float *bias;                /* [n] to be added, or NULL */
  int rank;
  float scale; /* on b */
} mr_lora_pair;

typedef struct mr_lora_latent { /* of a layer with latent attention */
  mr_lora_pair q, kv_b, o;
} mr_lora_latent;

/* Makes the links of the products that these matrices are factors of. MR_E_DATA, MR_E_NOMEM; where
 * is a path for messages. */
mr_code mr_lora_add_latent(mr_lora *l, int adapter, int layer, const mr_lora_latent *p,
                           const char *where, mr_err *err);

/* Takes one adapter's tensors over, into links with a and b. */
mr_code mr_lora_load(mr_lora *l, int i, const char *name, const char *dir, mr_err *err);

#endif

/* lora.h: low-rank adapters (LoRA, Hu et al. 2021) in PEFT's directories: adapter_config.json and
 * adapter_model.safetensors.
 *
 *     mr_lora *l;
 *     mr_lora_new(&l, model, n, kernels, scheme, MR_LORA_PANELS, &err);   n adapters beside the
 *                                             base, which is packed by the same scheme
 *     mr_lora_add(l, i, name, dir, &err);     reads, checks and packs adapter i (0..n-1)
 *     mr_lora_close(l);                       before the model
 *
 * An adapter adds scale * B (A x) to what a matrix makes of x: A [rank, k], B [n, rank], scale
 * alpha / rank, or alpha / sqrt(rank) with rsLoRA; rank and alpha may differ from module to module.
 * A is packed as the base's matrices are, so that it reads the same packed rows; so is B, but for
 * short ranks, which are float32.
 * After mr_lora_add the model's matrices know what each adapter adds to them (mr_matrix.lora);
 * a row of a step names its adapter (mr_run.adapter: 0 none, i + 1). Modules are known by the names
 * that they have in Hugging Face models, whatever the base was read from: rows of B are reordered
 * where a GGUF file has reordered rows, and cut where a tensor is fused; what is stacked for all
 * experts (target_parameters) goes to each one's matrices.
 *
 * Latent attention (product.h): kv_b is a factor of the queries' matrix and of the output's, head
 * by head, so that an adapter of it adds rank times heads ranks to each. One of the two factors of
 * every such product is A itself, which all heads share (mr_lora_heads).
 *
 * Both files are hostile input. Refused by name (MR_E_DATA): what is no LoRA (DoRA, aLoRA, QA-LoRA,
 * BD-LoRA ...), adapters that were made by changing the base (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA),
 * modules_to_save, modules that are not linear layers of this model or not named by target_modules,
 * shapes and ranks that do not fit, values that are not finite.
 */
#ifndef MR_SRC_LORA_H
#define MR_SRC_LORA_H

#include "src/model.h"

#define MR_LORA_NUMERICS 2       /* raised when what adapters add gets other bits */
#define MR_LORA_MAX 1024         /* adapters of a job */
#define MR_LORA_RANK_MAX 1024    /* of a module */
#define MR_LORA_HEADS_MAX 16384  /* rank of an adapter of kv_b times heads */
#define MR_LORA_UP MR_SCHEME_F32 /* of B with less than MR_LORA_LONG columns: */
#define MR_LORA_LONG 16          /* int8 packs columns by 64, and gains from 16 on */

typedef enum mr_lora_form {                 /* what becomes of factors */
                            MR_LORA_COUNT,  /* nothing: they are checked and counted */
                            MR_LORA_PANELS, /* the CPU's panels */
                            MR_LORA_ROWS /* float32 rows in place of panels, for a device to copy */
} mr_lora_form;

/* A of the matrices that read the same input, one below the other, so that it is read once. */
typedef struct mr_lora_down {
  int k, ranks; /* [ranks, k] */
  mr_scheme scheme;
  uint8_t *packed; /* panels */
} mr_lora_down;

/* What A [rank, latent] of kv_b does in each head. */
typedef struct mr_lora_heads {
  bool output;      /* A meets the output's input before up; else its transpose follows down */
  int n, rank;      /* heads */
  int size, latent; /* values of a head in the row that is met; A's are the first of them */
  uint8_t *panels;  /* of MR_LORA_UP: A, or its transpose [latent, rank] */
} mr_lora_heads;

struct mr_lora_link {         /* of one adapter and one matrix */
  const mr_lora_down *down;   /* or NULL */
  int first, rank;            /* which rows of down are this matrix's */
  const mr_lora_heads *heads; /* or NULL */
  int up_rank; /* rank, and n * rank of the heads of an output; queries: without the heads' */
  mr_scheme up_scheme;
  uint8_t *up;  /* [n, up_rank] times scale in panels, or NULL */
  float *bias;  /* [n] that is added, or NULL */
  float *a, *b; /* as read, while it is loaded */
};

typedef struct mr_lora_embed { /* of one adapter: x += b a[token] */
  int rank;                    /* 0: none */
  float *a;                    /* [n_vocab, rank] */
  float *b;                    /* [rank, d_model] times scale */
} mr_lora_embed;

typedef struct mr_lora_blocks { /* owned memory */
  void **p;
  size_t n, cap;
} mr_lora_blocks;

struct mr_lora {
  mr_model *m;         /* borrowed */
  const mr_kernels *k; /* borrowed */
  int n;
  mr_scheme scheme; /* of the base */
  mr_lora_form form;
  int most_ranks;            /* of any down or up */
  int widest;                /* k of any down, or latents of a head */
  int most_heads, head_rank; /* of any adapter of kv_b */
  bool experts;              /* some adapter changes experts */
  mr_lora_embed *embed;      /* [n] */
  uint64_t *keys;            /* [n] digests of the adapters' files */
  uint64_t bytes;            /* of panels and embeddings */
  mr_lora_blocks kept, rows; /* rows: MR_LORA_ROWS' */
  mr_lora_blocks raw;        /* while an adapter is loaded */
};

mr_code mr_lora_new(mr_lora **out, mr_model *m, int n, const mr_kernels *k, mr_scheme scheme,
                    mr_lora_form form, mr_err *err);
mr_code mr_lora_add(mr_lora *l, int i, const char *name, const char *dir, mr_err *err);
void mr_lora_close(mr_lora *l);     /* NULL is fine */
void mr_lora_drop_rows(mr_lora *l); /* once they are copied; NULL is fine */

typedef struct mr_lora_group { /* matrices that read the same input */
  mr_matrix *w[3];
  int n;
  int layer, expert; /* -1: none */
  bool exact;        /* factors are float32 whatever the base is */
} mr_lora_group;

/* Calls fn for all matrices that adapters may change, in the order of layers and then of experts,
 * until it says false. */
typedef bool (*mr_lora_visit)(void *ctx, const mr_lora_group *group);
bool mr_lora_each_group(const mr_lora *l, mr_lora_visit fn, void *ctx);

/* xxh3-128 of both files' bytes and MR_LORA_NUMERICS. MR_E_NOINPUT, MR_E_IO, MR_E_NOMEM. */
mr_code mr_lora_digest(const char *dir, char hex[33], mr_err *err);

#endif

/* route.h: which experts a token goes to, and with what weights.
 *
 * Softmax or sigmoid scores; a bias may change the choice but not the weights; the choice may be
 * limited to the best groups (DeepSeek-V2 and V3, 2024); SparseMixer's weights (Phi-3.5-MoE, after
 * Liu et al. 2023). Ties go to the lower expert. Depends on the token alone.
 */
#ifndef MR_SRC_ROUTE_H
#define MR_SRC_ROUTE_H

#include "src/config.h"

/* logits [n_experts]; bias the same or NULL; room for 2*n_experts floats; chosen and weights
 * [n_experts_used], the best first. */
void mr_route(const mr_config *c, const float *logits, const float *bias, float *room,
              int32_t *chosen, float *weights);

#endif

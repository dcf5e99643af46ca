/* SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB) */
/*
 * A program polls a completion queue that has nothing, in the place of the guest's header of this
 * name. What it waits for is done by the device's thread and by its peer, who may share this very
 * processor: then a program that only polls keeps them from running for the rest of its time slice
 * (milliseconds) and waits for nothing but itself. So it offers the processor now and then. Where
 * nobody takes it, or somebody with long work of his own does, it asks more and more seldom; where
 * it is given back soon, the others have done theirs, and it asks early.
 */
#ifndef VRDMA_IDLE_H
#define VRDMA_IDLE_H

#include <stdint.h>

/* Polls in a row until the processor is offered: some 0.2 us, and some 20. */
#define VRDMA_IDLE_FEW 16u
#define VRDMA_IDLE_MANY 2048u

struct vrdma_idle {
	uint32_t polls;
	uint32_t wait;
};

/* With the thread's own block: a library's variable is else found by a call, at each poll. */
extern __thread struct vrdma_idle vrdma_idle __attribute__((tls_model("initial-exec")));

void vrdma_offer_processor(struct vrdma_idle *idle);

static inline void vrdma_polled_nothing(void)
{
	struct vrdma_idle *idle = &vrdma_idle;

	if (++idle->polls >= idle->wait)
		vrdma_offer_processor(idle);
}

#endif

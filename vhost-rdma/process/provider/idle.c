// SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB)
#include "idle.h"

#include <sched.h>
#include <time.h>

/* What a call takes that found nobody, at most, and what somebody takes who has little to do. */
#define NOBODY_NS 1500
#define SHORT_NS 50000

__thread struct vrdma_idle vrdma_idle = { 0, VRDMA_IDLE_FEW };

static int64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000000ll + now.tv_nsec;
}

void vrdma_offer_processor(struct vrdma_idle *idle)
{
	int64_t took = now_ns();

	sched_yield();
	took = now_ns() - took;
	idle->polls = 0;
	if (took > NOBODY_NS && took < SHORT_NS)
		idle->wait = VRDMA_IDLE_FEW;
	else if (idle->wait < VRDMA_IDLE_MANY)
		idle->wait *= 2;
}

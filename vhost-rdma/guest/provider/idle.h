/* SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB) */
/*
 * A program polls a completion queue that has nothing. In a guest that is the guest's affair: what
 * would make progress meanwhile is on other processors than its own. A build where the device's
 * thread may want this very processor brings a header of this name in this one's place.
 */
#ifndef VRDMA_IDLE_H
#define VRDMA_IDLE_H

static inline void vrdma_polled_nothing(void)
{
}

#endif

/* SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB) */
/*
 * How a post reaches the device (docs/virtio-rdma.md, section 6.4).
 *
 * The other side is a thread of another process on the same memory, not a bus master, so these are
 * CPU-to-CPU protocols and need CPU fences: rdma-core's udma_* barriers stop only the compiler on
 * x86. The two places where a store must be seen before a later load is done, here and in the
 * arming of a CQ, need a store-load fence, the one thing that x86 reorders.
 *
 * The fence is `mfence` by name. The compiler's sequentially consistent fence is a locked `or` on
 * x86-64, and QEMU's TCG, while the guest has one vCPU, turns locked instructions into plain loads
 * and stores with no fence at all (its `mfence` is always a host fence, for the sake of I/O
 * threads). A kick would be lost now and then in such guests.
 */
#ifndef VIRTIO_RDMA_DOORBELL_H
#define VIRTIO_RDMA_DOORBELL_H

#include "virtio_rdma.h"

static inline void vrdma_full_fence(void)
{
#if defined(__x86_64__)
	__asm__ volatile("mfence" ::: "memory");
#else
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

/* Notifies the context's kick queue by system call: the NIC has no notify page for this context. */
void vrdma_kick_ioctl(struct vrdma_context *ctx);

static inline void vrdma_kick(struct vrdma_context *ctx)
{
	if (ctx->notify) {
		/*
		 * virtio 1.3, 4.1.5.2: the index of the virtqueue, 16 bits, at its notify address.
		 */
		volatile uint16_t *addr = (volatile uint16_t *)((uint8_t *)ctx->notify +
								ctx->notify_offset);

		*addr = htole16((uint16_t)ctx->kick_queue);
	} else {
		vrdma_kick_ioctl(ctx);
	}
}

/*
 * Publishes `head` as the producer index of `wq` and wakes the device if it sleeps. Called once per
 * batch of work requests, with the queue's lock held (one writer per index).
 */
static inline void vrdma_ring(struct vrdma_context *ctx, struct vrdma_wq *wq, uint32_t head)
{
	const uint32_t *need_kick =
		(const uint32_t *)((const uint8_t *)ctx->status + VIRTIO_RDMA_STATUS_NEED_KICK);

	__atomic_store_n(&wq->head, head, __ATOMIC_RELEASE);
	__atomic_store_n(wq->db_index, htole32(head), __ATOMIC_RELEASE);
	__atomic_store_n(wq->db_summary, 1, __ATOMIC_RELEASE);
	vrdma_full_fence();
	if (__atomic_load_n(need_kick, __ATOMIC_RELAXED))
		vrdma_kick(ctx);
}

#endif /* VIRTIO_RDMA_DOORBELL_H */

/* SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB) */
/*
 * Copies between a program's memory and the shadows of it that the device reaches (private.h), in
 * the place of the guest's header of this name. A context without private memory has no mirror, and
 * pays one branch.
 */
#ifndef VRDMA_MIRROR_H
#define VRDMA_MIRROR_H

#include "virtio_rdma.h"

/* mirror.c */
void vrdma_mirror_leave(struct vrdma_mirror *mirror, struct vrdma_qp *qp, uint32_t index);
void vrdma_mirror_expect(struct vrdma_mirror *mirror, struct virtio_rdma_rq_wqe *wqe);
int vrdma_mirror_keep(struct vrdma_mirror *mirror, struct vrdma_srq *srq,
		      const struct ibv_recv_wr *wr);
void vrdma_mirror_bring(struct vrdma_mirror *mirror, struct vrdma_qp *qp,
			const struct virtio_rdma_cqe *cqe);
void vrdma_mirror_drop(struct vrdma_mirror *mirror, struct vrdma_qp *qp,
		       const struct virtio_rdma_cqe *cqe);

static inline struct vrdma_mirror *vrdma_mirror_of(const struct vrdma_context *ctx)
{
	return __atomic_load_n(&ctx->mirror, __ATOMIC_ACQUIRE);
}

/* The work request of an index is complete in its slot of the SQ, and not published. */
static inline void vrdma_mirror_send(struct vrdma_context *ctx, struct vrdma_qp *qp, uint32_t index)
{
	struct vrdma_mirror *mirror = vrdma_mirror_of(ctx);

	if (unlikely(mirror))
		vrdma_mirror_leave(mirror, qp, index);
}

/* A receive is complete in its slot, and not published. */
static inline void vrdma_mirror_recv(struct vrdma_context *ctx, struct virtio_rdma_rq_wqe *wqe)
{
	struct vrdma_mirror *mirror = vrdma_mirror_of(ctx);

	if (unlikely(mirror))
		vrdma_mirror_expect(mirror, wqe);
}

/* Receives are about to be posted to an SRQ, under its lock: 0 or an errno. */
static inline int vrdma_mirror_srq(struct vrdma_context *ctx, struct vrdma_srq *srq,
				   const struct ibv_recv_wr *wr)
{
	struct vrdma_mirror *mirror = vrdma_mirror_of(ctx);

	return unlikely(mirror) ? vrdma_mirror_keep(mirror, srq, wr) : 0;
}

/* A completion is taken, and its slots are not free yet. */
static inline void vrdma_mirror_completed(struct vrdma_context *ctx, struct vrdma_qp *qp,
					  const struct virtio_rdma_cqe *cqe)
{
	struct vrdma_mirror *mirror = vrdma_mirror_of(ctx);

	if (unlikely(mirror))
		vrdma_mirror_bring(mirror, qp, cqe);
}

/* A completion is discarded. */
static inline void vrdma_mirror_discarded(struct vrdma_context *ctx, struct vrdma_qp *qp,
					  const struct virtio_rdma_cqe *cqe)
{
	struct vrdma_mirror *mirror = vrdma_mirror_of(ctx);

	if (unlikely(mirror))
		vrdma_mirror_drop(mirror, qp, cqe);
}

#endif

/* SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB) */
/*
 * Copies between a program's memory and what the device reaches of it: none here, where the kernel
 * driver pins the pages themselves. A process without such a kernel has memory that its device does
 * not reach, and puts a header of this name in the place of this one
 * (vhost-rdma/process/provider/mirror.h).
 */
#ifndef VRDMA_MIRROR_H
#define VRDMA_MIRROR_H

#include "virtio_rdma.h"

/* The work request of an index is complete in its slot of the SQ, and not published. */
static inline void vrdma_mirror_send(struct vrdma_context *ctx, struct vrdma_qp *qp, uint32_t index)
{
}

/* A receive is complete in its slot, and not published. */
static inline void vrdma_mirror_recv(struct vrdma_context *ctx, struct virtio_rdma_rq_wqe *wqe)
{
}

/* Receives are about to be posted to an SRQ, under its lock: 0 or an errno. */
static inline int vrdma_mirror_srq(struct vrdma_context *ctx, struct vrdma_srq *srq,
				   const struct ibv_recv_wr *wr)
{
	return 0;
}

/* A completion is taken, and its slots are not free yet. */
static inline void vrdma_mirror_completed(struct vrdma_context *ctx, struct vrdma_qp *qp,
					  const struct virtio_rdma_cqe *cqe)
{
}

/* A completion is discarded. */
static inline void vrdma_mirror_discarded(struct vrdma_context *ctx, struct vrdma_qp *qp,
					  const struct virtio_rdma_cqe *cqe)
{
}

#endif /* VRDMA_MIRROR_H */

// SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB)
/*
 * Shared receive queues. The device tells in the ring's control block how many receives it has
 * taken (docs/virtio-rdma.md, section 7.2): it copies a receive when a message begins, so the slot
 * is free long before the completion.
 */
#include "virtio_rdma.h"

struct vrdma_create_srq_cmd {
	struct ibv_create_srq ibv_cmd;
	struct virtio_rdma_srq_req drv;
};
struct vrdma_create_srq_rsp {
	struct ib_uverbs_create_srq_resp ibv_resp;
	struct virtio_rdma_srq_resp drv;
};
struct vrdma_modify_srq_cmd {
	struct ibv_modify_srq ibv_cmd;
	struct virtio_rdma_srq_req drv;
};
static_assert(offsetof(struct vrdma_create_srq_cmd, drv) == sizeof(struct ibv_create_srq),
	      "padding");
static_assert(offsetof(struct vrdma_create_srq_rsp, drv) ==
	      sizeof(struct ib_uverbs_create_srq_resp), "padding");
static_assert(offsetof(struct vrdma_modify_srq_cmd, drv) == sizeof(struct ibv_modify_srq),
	      "padding");

static size_t srq_ring_len(uint32_t entries, uint8_t log2_stride)
{
	return vrdma_ctrl_offset(entries, log2_stride) + VIRTIO_RDMA_CTRL_SIZE;
}

static void srq_fill_request(struct virtio_rdma_srq_req *req, const struct vrdma_buf *buf,
			     uint32_t entries, uint8_t log2_stride)
{
	req->buf = (uintptr_t)buf->addr;
	req->buf_len = buf->len;
	req->entries = entries;
	req->log2_stride = log2_stride;
}

/* Under the SRQ's lock. Once the device is lost polling moves the tail itself (cq.c). */
void vrdma_srq_update_tail(struct vrdma_srq *srq)
{
	const uint32_t *taken = (const uint32_t *)(srq->ctrl + VIRTIO_RDMA_CTRL_TAKEN);
	uint32_t index = le32toh(__atomic_load_n(taken, __ATOMIC_ACQUIRE));

	if (index - srq->wq.tail <= srq->wq.head - srq->wq.tail)
		srq->wq.tail = index;
}

static int srq_create_in_kernel(struct ibv_pd *pd, struct vrdma_srq *srq,
				struct ibv_srq_init_attr *attr)
{
	struct vrdma_create_srq_cmd cmd = {};
	struct vrdma_create_srq_rsp rsp = {};
	int ret;

	srq_fill_request(&cmd.drv, &srq->wq.buf, srq->wq.mask + 1, srq->wq.log2_stride);
	ret = ibv_cmd_create_srq(pd, &srq->vsrq.srq, attr, &cmd.ibv_cmd, sizeof(cmd), &rsp.ibv_resp,
				 sizeof(rsp));
	if (ret)
		return ret;
	ret = vrdma_wq_bind_doorbell(to_vctx(pd->context), &srq->wq, rsp.drv.db, rsp.drv.db_mmap);
	if (ret)
		ibv_cmd_destroy_srq(&srq->vsrq.srq);
	srq->srqn = rsp.drv.srqn;
	return ret;
}

static int srq_check(const struct vrdma_context *ctx, const struct ibv_srq_attr *attr)
{
	if (!attr->max_wr || attr->max_wr > ctx->max_srq_wr || attr->max_sge > ctx->max_srq_sge)
		return EINVAL;
	return 0;
}

struct ibv_srq *vrdma_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *attr)
{
	struct vrdma_context *ctx = to_vctx(pd->context);
	struct vrdma_srq *srq;
	uint32_t entries;
	int ret;

	ret = srq_check(ctx, &attr->attr);
	if (ret)
		goto err;
	srq = calloc(1, sizeof(*srq));
	if (!srq) {
		ret = ENOMEM;
		goto err;
	}
	ret = vrdma_wq_layout(&srq->wq, attr->attr.max_wr,
			      VIRTIO_RDMA_RQ_WQE_DATA +
			      (size_t)attr->attr.max_sge * sizeof(struct virtio_rdma_sge),
			      VIRTIO_RDMA_RQ_WQE_MIN_LOG2_STRIDE);
	if (ret)
		goto err_free;
	entries = srq->wq.mask + 1;
	ret = vrdma_buf_alloc(ctx, pd, VRDMA_RING_SRQ, &srq->wq.buf,
			      srq_ring_len(entries, srq->wq.log2_stride));
	if (ret)
		goto err_free;
	srq->ctrl = (uint8_t *)srq->wq.buf.addr + vrdma_ctrl_offset(entries, srq->wq.log2_stride);
	vrdma_lock_init(&srq->wq.lock, !vrdma_pd_single_threaded(pd));
	ret = srq_create_in_kernel(pd, srq, attr);
	if (ret)
		goto err_buf;
	srq->wq.max_wr = attr->attr.max_wr;
	srq->wq.max_sge = attr->attr.max_sge;
	return &srq->vsrq.srq;

err_buf:
	vrdma_buf_free(&srq->wq.buf);
err_free:
	free(srq);
err:
	errno = ret;
	return NULL;
}

struct ibv_srq *vrdma_create_srq_ex(struct ibv_context *context, struct ibv_srq_init_attr_ex *attr)
{
	struct ibv_srq_init_attr basic = { .srq_context = attr->srq_context, .attr = attr->attr };
	struct ibv_srq *srq;

	if (!check_comp_mask(attr->comp_mask, IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD) ||
	    (attr->comp_mask & IBV_SRQ_INIT_ATTR_TYPE && attr->srq_type != IBV_SRQT_BASIC)) {
		errno = EOPNOTSUPP;
		return NULL;
	}
	if (!(attr->comp_mask & IBV_SRQ_INIT_ATTR_PD)) {
		errno = EINVAL;
		return NULL;
	}
	srq = vrdma_create_srq(attr->pd, &basic);
	if (srq)
		attr->attr = basic.attr;
	return srq;
}

/*
 * Section 7.2: the device moves what it has not taken to the new ring; nobody posts meanwhile,
 * since the lock is held.
 */
static int srq_resize(struct vrdma_srq *srq, struct ibv_srq_attr *attr, int mask)
{
	struct vrdma_context *ctx = to_vctx(srq->vsrq.srq.context);
	struct vrdma_modify_srq_cmd cmd = {};
	struct vrdma_wq new_wq = {};
	struct vrdma_buf old;
	int ret;

	ret = vrdma_wq_layout(&new_wq, attr->max_wr, (size_t)1 << srq->wq.log2_stride,
			      srq->wq.log2_stride);
	if (!ret)
		ret = vrdma_buf_alloc(ctx, srq->wq.buf.domain ? &srq->wq.buf.domain->pd : NULL,
				      VRDMA_RING_SRQ, &new_wq.buf,
				      srq_ring_len(new_wq.mask + 1, new_wq.log2_stride));
	if (ret)
		return ret;
	srq_fill_request(&cmd.drv, &new_wq.buf, new_wq.mask + 1, new_wq.log2_stride);

	vrdma_lock(&srq->wq.lock);
	vrdma_srq_update_tail(srq);
	if (srq->wq.head - srq->wq.tail > attr->max_wr) {
		ret = EINVAL;
		goto out;
	}
	ret = ibv_cmd_modify_srq(&srq->vsrq.srq, attr, mask, &cmd.ibv_cmd, sizeof(cmd));
	if (ret)
		goto out;
	old = srq->wq.buf;
	srq->wq.buf = new_wq.buf;
	srq->wq.mask = new_wq.mask;
	srq->wq.max_wr = attr->max_wr;
	srq->ctrl = (uint8_t *)new_wq.buf.addr +
		    vrdma_ctrl_offset(new_wq.mask + 1, new_wq.log2_stride);
	new_wq.buf = old;
out:
	vrdma_unlock(&srq->wq.lock);
	vrdma_buf_free(&new_wq.buf);
	return ret;
}

int vrdma_modify_srq(struct ibv_srq *ibsrq, struct ibv_srq_attr *attr, int mask)
{
	struct vrdma_context *ctx = to_vctx(ibsrq->context);
	struct vrdma_modify_srq_cmd cmd = {};

	if (!(mask & IBV_SRQ_MAX_WR))
		return ibv_cmd_modify_srq(ibsrq, attr, mask, &cmd.ibv_cmd, sizeof(cmd));
	if (!(ctx->caps & VIRTIO_RDMA_CAP_SRQ_RESIZE))
		return EOPNOTSUPP;
	if (!attr->max_wr || attr->max_wr > ctx->max_srq_wr)
		return EINVAL;
	return srq_resize(to_vsrq(ibsrq), attr, mask);
}

int vrdma_query_srq(struct ibv_srq *srq, struct ibv_srq_attr *attr)
{
	struct ibv_query_srq cmd = {};

	return ibv_cmd_query_srq(srq, attr, &cmd, sizeof(cmd));
}

int vrdma_destroy_srq(struct ibv_srq *ibsrq)
{
	struct vrdma_srq *srq = to_vsrq(ibsrq);
	int ret;

	ret = ibv_cmd_destroy_srq(ibsrq);
	if (ret)
		return ret;
	vrdma_buf_free(&srq->wq.buf);
	free(srq);
	return 0;
}

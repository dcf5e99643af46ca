// SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB)
/*
 * Queue pairs: creation (rings, doorbells, the CQs' tables), state changes and destruction.
 *
 * The state kept here is the one that the program asked for; the device may be in ERR already. It
 * serves only to refuse posts where verbs says that they fail at once (section 8.1 of
 * docs/virtio-rdma.md); in ERR posts are taken and the device flushes them.
 */
#include <ccan/minmax.h>

#include "virtio_rdma.h"

struct vrdma_create_qp_cmd {
	struct ibv_create_qp ibv_cmd;
	struct virtio_rdma_qp_req drv;
};
struct vrdma_create_qp_rsp {
	struct ib_uverbs_create_qp_resp ibv_resp;
	struct virtio_rdma_qp_resp drv;
};
static_assert(offsetof(struct vrdma_create_qp_cmd, drv) == sizeof(struct ibv_create_qp), "padding");
static_assert(offsetof(struct vrdma_create_qp_rsp, drv) == sizeof(struct ib_uverbs_create_qp_resp),
	      "padding");

#define VRDMA_QP_COMP_MASK \
	(IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS)

static int qp_check_type(const struct vrdma_context *ctx, enum ibv_qp_type type)
{
	switch (type) {
	case IBV_QPT_RC:
		return 0;
	case IBV_QPT_UC:
		return ctx->caps & VIRTIO_RDMA_CAP_UC ? 0 : EOPNOTSUPP;
	case IBV_QPT_UD:
		return ctx->caps & VIRTIO_RDMA_CAP_UD ? 0 : EOPNOTSUPP;
	default:
		return EOPNOTSUPP;
	}
}

static int qp_check(const struct vrdma_context *ctx, const struct ibv_qp_init_attr_ex *attr)
{
	const struct ibv_qp_cap *cap = &attr->cap;
	int ret;

	if (!check_comp_mask(attr->comp_mask, VRDMA_QP_COMP_MASK))
		return EOPNOTSUPP;
	if (attr->comp_mask & IBV_QP_INIT_ATTR_CREATE_FLAGS && attr->create_flags)
		return EOPNOTSUPP;
	if (!(attr->comp_mask & IBV_QP_INIT_ATTR_PD) || !attr->send_cq || !attr->recv_cq)
		return EINVAL;
	ret = qp_check_type(ctx, attr->qp_type);
	if (ret)
		return ret;
	if (cap->max_send_wr > ctx->max_qp_wr || cap->max_send_sge > ctx->max_send_sge ||
	    cap->max_inline_data > ctx->max_inline)
		return EINVAL;
	if (!attr->srq && (cap->max_recv_wr > ctx->max_qp_wr ||
			   cap->max_recv_sge > ctx->max_recv_sge))
		return EINVAL;
	return 0;
}

static int wq_alloc(struct vrdma_context *ctx, struct ibv_pd *pd, struct vrdma_wq *wq)
{
	return vrdma_buf_alloc(ctx, pd, VRDMA_RING_QP, &wq->buf,
			       (size_t)(wq->mask + 1) << wq->log2_stride);
}

static int qp_alloc_rings(struct vrdma_context *ctx, struct vrdma_qp *qp,
			  const struct ibv_qp_init_attr_ex *attr)
{
	const struct ibv_qp_cap *cap = &attr->cap;
	size_t data = max_t(size_t, (size_t)cap->max_send_sge * sizeof(struct virtio_rdma_sge),
			    cap->max_inline_data);
	int ret = 0;

	if (cap->max_send_wr) {
		ret = vrdma_wq_layout(&qp->sq, cap->max_send_wr, VIRTIO_RDMA_SQ_WQE_DATA + data,
				      VIRTIO_RDMA_SQ_WQE_MIN_LOG2_STRIDE);
		if (!ret)
			ret = wq_alloc(ctx, attr->pd, &qp->sq);
	}
	if (!ret && cap->max_recv_wr) {
		data = (size_t)cap->max_recv_sge * sizeof(struct virtio_rdma_sge);
		ret = vrdma_wq_layout(&qp->rq, cap->max_recv_wr, VIRTIO_RDMA_RQ_WQE_DATA + data,
				      VIRTIO_RDMA_RQ_WQE_MIN_LOG2_STRIDE);
		if (!ret)
			ret = wq_alloc(ctx, attr->pd, &qp->rq);
	}
	return ret;
}

/*
 * Inline bytes lie where the scatter-gather elements would, so there is room for more than was
 * asked. A program gets all of it, as other devices give it: some send inline without having asked.
 */
static void qp_grant_inline(const struct vrdma_context *ctx, const struct vrdma_qp *qp,
			    struct ibv_qp_cap *cap)
{
	uint32_t room;

	if (!qp->sq.buf.addr)
		return;
	room = (1u << qp->sq.log2_stride) - VIRTIO_RDMA_SQ_WQE_DATA;
	cap->max_inline_data = min_t(uint32_t, room, ctx->max_inline);
}

static void qp_free(struct vrdma_qp *qp)
{
	vrdma_buf_free(&qp->sq.buf);
	vrdma_buf_free(&qp->rq.buf);
	free(qp);
}

static void qp_fill_request(const struct vrdma_qp *qp, struct virtio_rdma_qp_req *req)
{
	if (qp->sq.buf.addr) {
		req->sq_buf = (uintptr_t)qp->sq.buf.addr;
		req->sq_len = qp->sq.buf.len;
		req->sq_entries = qp->sq.mask + 1;
		req->sq_log2_stride = qp->sq.log2_stride;
	}
	if (qp->rq.buf.addr) {
		req->rq_buf = (uintptr_t)qp->rq.buf.addr;
		req->rq_len = qp->rq.buf.len;
		req->rq_entries = qp->rq.mask + 1;
		req->rq_log2_stride = qp->rq.log2_stride;
	}
}

static int qp_bind_doorbells(struct vrdma_context *ctx, struct vrdma_qp *qp,
			     const struct virtio_rdma_qp_resp *rsp)
{
	int ret = 0;

	if (qp->sq.buf.addr)
		ret = vrdma_wq_bind_doorbell(ctx, &qp->sq, rsp->sq_db, rsp->sq_db_mmap);
	if (!ret && qp->rq.buf.addr)
		ret = vrdma_wq_bind_doorbell(ctx, &qp->rq, rsp->rq_db, rsp->rq_db_mmap);
	return ret;
}

static int qp_create_in_kernel(struct ibv_context *context, struct vrdma_qp *qp,
			       struct ibv_qp_init_attr_ex *attr)
{
	struct vrdma_create_qp_cmd cmd = {};
	struct vrdma_create_qp_rsp rsp = {};
	int ret;

	qp_fill_request(qp, &cmd.drv);
	ret = ibv_cmd_create_qp_ex(context, &qp->vqp, attr, &cmd.ibv_cmd, sizeof(cmd),
				   &rsp.ibv_resp, sizeof(rsp));
	if (ret)
		return ret;
	ret = qp_bind_doorbells(to_vctx(context), qp, &rsp.drv);
	if (ret)
		ibv_cmd_destroy_qp(&qp->vqp.qp);
	return ret;
}

static void qp_link_cqs(struct vrdma_qp *qp)
{
	struct vrdma_cq *send = to_vcq(qp->vqp.qp.send_cq), *recv = to_vcq(qp->vqp.qp.recv_cq);

	vrdma_cq_lock_both(send, recv);
	qp->links[0].qp = qp;
	vrdma_cq_link_qp(send, &qp->links[0]);
	if (recv != send) {
		qp->links[1].qp = qp;
		vrdma_cq_link_qp(recv, &qp->links[1]);
	}
	vrdma_cq_unlock_both(send, recv);
}

static void qp_set_limits(struct vrdma_qp *qp, const struct ibv_qp_init_attr_ex *attr)
{
	bool locked = !vrdma_pd_single_threaded(attr->pd);

	vrdma_lock_init(&qp->sq.lock, locked);
	vrdma_lock_init(&qp->rq.lock, locked);
	qp->sq.max_wr = attr->cap.max_send_wr;
	qp->sq.max_sge = attr->cap.max_send_sge;
	qp->rq.max_wr = attr->cap.max_recv_wr;
	qp->rq.max_sge = attr->cap.max_recv_sge;
	qp->max_inline = attr->cap.max_inline_data;
	qp->sig_all = attr->sq_sig_all;
	qp->state = IBV_QPS_RESET;
}

/*
 * Tells ibv_qp_to_qp_ex() that the ibv_wr_* functions are there.
 *
 * libibverbs 45 and later have one member more in struct ibv_qp_ex (wr_flush) than 44 has, within
 * the same private ABI, so where the library of the guest looks depends on its version and not on
 * the headers that we were built with. The mark is put where either looks: 8 bytes before ours is
 * wr_flush, 8 bytes behind the XRC domain, and this device has no XRC. A program that asks for
 * FLUSH has a library that knows it, which looks where we do; its function pointer stays.
 */
static void qp_mark_extended(struct vrdma_qp *qp, uint64_t ops)
{
	uint8_t *mask = (uint8_t *)qp + offsetof(struct vrdma_qp, vqp.comp_mask);
	const uint32_t mark = VERBS_QP_EX;
	int at;

	for (at = ops & IBV_QP_EX_WITH_FLUSH ? 0 : -8; at <= 8; at += 8)
		memcpy(mask + at, &mark, sizeof(mark));
}

struct ibv_qp *vrdma_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr)
{
	struct vrdma_context *ctx = to_vctx(context);
	struct ibv_qp_init_attr_ex req = *attr;
	struct vrdma_qp *qp;
	int ret;

	ret = qp_check(ctx, attr);
	if (ret)
		goto err;
	if (req.srq) {
		req.cap.max_recv_wr = 0;
		req.cap.max_recv_sge = 0;
	}
	req.comp_mask &= ~(uint32_t)IBV_QP_INIT_ATTR_CREATE_FLAGS;
	qp = calloc(1, sizeof(*qp));
	if (!qp) {
		ret = ENOMEM;
		goto err;
	}
	ret = vrdma_set_wr_ops(qp, attr, ctx->caps);
	if (!ret)
		ret = qp_alloc_rings(ctx, qp, &req);
	if (ret)
		goto err_free;
	qp_grant_inline(ctx, qp, &req.cap);
	ret = qp_create_in_kernel(context, qp, &req);
	if (ret)
		goto err_free;
	attr->cap = req.cap;
	qp_set_limits(qp, &req);
	if (attr->comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS)
		qp_mark_extended(qp, attr->send_ops_flags);
	qp_link_cqs(qp);
	return &qp->vqp.qp;

err_free:
	qp_free(qp);
err:
	errno = ret;
	return NULL;
}

struct ibv_qp *vrdma_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	struct ibv_qp_init_attr_ex ex = {
		.qp_context = attr->qp_context,
		.send_cq = attr->send_cq,
		.recv_cq = attr->recv_cq,
		.srq = attr->srq,
		.cap = attr->cap,
		.qp_type = attr->qp_type,
		.sq_sig_all = attr->sq_sig_all,
		.comp_mask = IBV_QP_INIT_ATTR_PD,
		.pd = pd,
	};
	struct ibv_qp *qp = vrdma_create_qp_ex(pd->context, &ex);

	if (qp)
		attr->cap = ex.cap;
	return qp;
}

static void wq_reset(struct vrdma_wq *wq)
{
	if (!wq->buf.addr)
		return;
	vrdma_lock(&wq->lock);
	wq->head = 0;
	wq->tail = 0;
	__atomic_store_n(wq->db_index, 0, __ATOMIC_RELEASE);
	vrdma_unlock(&wq->lock);
}

/*
 * Section 8.1: after the command, stale completions are discarded and both producer indices begin
 * at 0 again.
 */
static void qp_reset(struct vrdma_qp *qp)
{
	struct vrdma_cq *send = to_vcq(qp->vqp.qp.send_cq), *recv = to_vcq(qp->vqp.qp.recv_cq);

	vrdma_cq_lock_both(send, recv);
	vrdma_cq_discard(send, qp);
	if (recv != send)
		vrdma_cq_discard(recv, qp);
	wq_reset(&qp->sq);
	wq_reset(&qp->rq);
	vrdma_cq_unlock_both(send, recv);
}

int vrdma_modify_qp(struct ibv_qp *ibqp, struct ibv_qp_attr *attr, int mask)
{
	struct vrdma_qp *qp = to_vqp(ibqp);
	struct ibv_modify_qp cmd = {};
	int ret;

	ret = ibv_cmd_modify_qp(ibqp, attr, mask, &cmd, sizeof(cmd));
	if (ret || !(mask & IBV_QP_STATE))
		return ret;
	if (attr->qp_state == IBV_QPS_RESET)
		qp_reset(qp);
	__atomic_store_n(&qp->state, attr->qp_state, __ATOMIC_RELEASE);
	return 0;
}

int vrdma_query_qp(struct ibv_qp *ibqp, struct ibv_qp_attr *attr, int mask,
		   struct ibv_qp_init_attr *init_attr)
{
	struct vrdma_qp *qp = to_vqp(ibqp);
	struct ibv_query_qp cmd = {};
	int ret;

	ret = ibv_cmd_query_qp(ibqp, attr, mask, init_attr, &cmd, sizeof(cmd));
	if (ret)
		return ret;
	init_attr->cap.max_send_wr = qp->sq.max_wr;
	init_attr->cap.max_recv_wr = qp->rq.max_wr;
	init_attr->cap.max_send_sge = qp->sq.max_sge;
	init_attr->cap.max_recv_sge = qp->rq.max_sge;
	init_attr->cap.max_inline_data = qp->max_inline;
	init_attr->sq_sig_all = qp->sig_all;
	attr->cap = init_attr->cap;
	return 0;
}

int vrdma_destroy_qp(struct ibv_qp *ibqp)
{
	struct vrdma_cq *send = to_vcq(ibqp->send_cq), *recv = to_vcq(ibqp->recv_cq);
	struct vrdma_qp *qp = to_vqp(ibqp);
	int ret;

	ret = ibv_cmd_destroy_qp(ibqp);
	if (ret)
		return ret;
	vrdma_cq_lock_both(send, recv);
	vrdma_cq_discard(send, qp);
	vrdma_cq_unlink_qp(send, &qp->links[0]);
	if (recv != send) {
		vrdma_cq_discard(recv, qp);
		vrdma_cq_unlink_qp(recv, &qp->links[1]);
	}
	vrdma_cq_unlock_both(send, recv);
	qp_free(qp);
	return 0;
}

// SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB)
/*
 * Posting work requests: stores to a ring, then one doorbell for the whole list.
 *
 * Refused here is what verbs says fails at once: a full queue (ENOMEM), too many scatter-gather
 * elements or inline bytes and posts in RESET (EINVAL), a lost device (EIO). Everything else is the
 * device's to judge and comes back as a completion.
 */
#include "doorbell.h"
#include "mirror.h"
#include "virtio_rdma.h"

static enum ibv_qp_state qp_state(const struct vrdma_qp *qp)
{
	return __atomic_load_n(&qp->state, __ATOMIC_ACQUIRE);
}

static bool wq_full(const struct vrdma_wq *wq, uint32_t head)
{
	return head - __atomic_load_n(&wq->tail, __ATOMIC_ACQUIRE) >= wq->max_wr;
}

/* Whether the SQ takes one more work request at `head`: 0 or the errno of the post. */
int vrdma_sq_room(struct vrdma_qp *qp, uint32_t head)
{
	enum ibv_qp_state state = qp_state(qp);

	/* IBTA 10.8.2: the send queue takes nothing before RTS. */
	if (unlikely(state == IBV_QPS_RESET || state == IBV_QPS_INIT || state == IBV_QPS_RTR))
		return EINVAL;
	if (unlikely(vrdma_lost(to_vctx(qp->vqp.qp.context))))
		return EIO;
	if (unlikely(wq_full(&qp->sq, head)))
		return ENOMEM;
	return 0;
}

static void fill_sges(struct virtio_rdma_sge *out, const struct ibv_sge *sge, int num)
{
	int i;

	for (i = 0; i < num; i++) {
		out[i].addr = htole64(sge[i].addr);
		out[i].length = htole32(sge[i].length);
		out[i].lkey = htole32(sge[i].lkey);
	}
}

static int fill_data(struct vrdma_qp *qp, struct virtio_rdma_sq_wqe *wqe,
		     const struct ibv_send_wr *wr)
{
	uint8_t *data = (uint8_t *)wqe + VIRTIO_RDMA_SQ_WQE_DATA;
	size_t len = 0;
	int i;

	if (wr->num_sge < 0)
		return EINVAL;
	if (!(wr->send_flags & IBV_SEND_INLINE)) {
		if ((uint32_t)wr->num_sge > qp->sq.max_sge)
			return EINVAL;
		fill_sges((struct virtio_rdma_sge *)data, wr->sg_list, wr->num_sge);
		wqe->num_sge = htole16(wr->num_sge);
		return 0;
	}
	for (i = 0; i < wr->num_sge; i++) {
		if (wr->sg_list[i].length > qp->max_inline - len)
			return EINVAL;
		memcpy(data + len, (const void *)(uintptr_t)wr->sg_list[i].addr,
		       wr->sg_list[i].length);
		len += wr->sg_list[i].length;
	}
	wqe->num_sge = htole16(len);
	return 0;
}

void vrdma_fill_bind(struct virtio_rdma_sq_wqe *wqe, const struct ibv_mw *mw, uint32_t rkey,
		     const struct ibv_mw_bind_info *info)
{
	wqe->imm = htole32(mw->rkey);
	wqe->rkey = htole32(rkey);
	wqe->remote_addr = htole64(info->addr);
	wqe->arg0 = htole64(info->length);
	wqe->arg1 = htole64(info->mr ? info->mr->lkey : 0);
	/*
	 * Programs add LOCAL_WRITE, as for a region; a window is for peers only and the device
	 * knows no such right of one.
	 */
	wqe->aux = htole32(info->mw_access_flags & ~(unsigned int)IBV_ACCESS_LOCAL_WRITE);
}

static int fill_ud(struct virtio_rdma_sq_wqe *wqe, const struct ibv_send_wr *wr)
{
	if (!wr->wr.ud.ah)
		return EINVAL;
	wqe->arg0 = htole64(to_vah(wr->wr.ud.ah)->ahn);
	wqe->rkey = htole32(wr->wr.ud.remote_qpn);
	wqe->aux = htole32(wr->wr.ud.remote_qkey);
	return 0;
}

/* The fields of the table in section 7.1. The opcodes of the ABI are those of verbs. */
static int fill_opcode(struct vrdma_qp *qp, struct virtio_rdma_sq_wqe *wqe,
		       const struct ibv_send_wr *wr)
{
	switch (wr->opcode) {
	case IBV_WR_RDMA_WRITE_WITH_IMM:
		memcpy(&wqe->imm, &wr->imm_data, sizeof(wqe->imm));
		SWITCH_FALLTHROUGH;
	case IBV_WR_RDMA_WRITE:
	case IBV_WR_RDMA_READ:
	case IBV_WR_ATOMIC_WRITE:
		wqe->remote_addr = htole64(wr->wr.rdma.remote_addr);
		wqe->rkey = htole32(wr->wr.rdma.rkey);
		return 0;
	case IBV_WR_ATOMIC_CMP_AND_SWP:
	case IBV_WR_ATOMIC_FETCH_AND_ADD:
		wqe->remote_addr = htole64(wr->wr.atomic.remote_addr);
		wqe->rkey = htole32(wr->wr.atomic.rkey);
		wqe->arg0 = htole64(wr->wr.atomic.compare_add);
		wqe->arg1 = htole64(wr->wr.atomic.swap);
		return 0;
	case IBV_WR_SEND_WITH_IMM:
		memcpy(&wqe->imm, &wr->imm_data, sizeof(wqe->imm));
		SWITCH_FALLTHROUGH;
	case IBV_WR_SEND:
		return qp->vqp.qp.qp_type == IBV_QPT_UD ? fill_ud(wqe, wr) : 0;
	case IBV_WR_SEND_WITH_INV:
	case IBV_WR_LOCAL_INV:
		wqe->imm = htole32(wr->invalidate_rkey);
		return 0;
	case IBV_WR_BIND_MW:
		if (!wr->bind_mw.mw)
			return EINVAL;
		vrdma_fill_bind(wqe, wr->bind_mw.mw, wr->bind_mw.rkey, &wr->bind_mw.bind_info);
		return 0;
	default:
		return EINVAL;
	}
}

static bool opcode_has_inline(enum ibv_wr_opcode opcode)
{
	return opcode == IBV_WR_SEND || opcode == IBV_WR_SEND_WITH_IMM ||
	       opcode == IBV_WR_SEND_WITH_INV ||
	       opcode == IBV_WR_RDMA_WRITE || opcode == IBV_WR_RDMA_WRITE_WITH_IMM ||
	       opcode == IBV_WR_ATOMIC_WRITE;
}

#define VRDMA_SEND_FLAGS (IBV_SEND_FENCE | IBV_SEND_SIGNALED | IBV_SEND_SOLICITED | IBV_SEND_INLINE)

static int post_one_send(struct vrdma_qp *qp, const struct ibv_send_wr *wr, uint32_t head)
{
	struct virtio_rdma_sq_wqe *wqe;
	int ret;

	ret = vrdma_sq_room(qp, head);
	if (unlikely(ret))
		return ret;
	if (unlikely(wr->send_flags & ~(unsigned int)VRDMA_SEND_FLAGS))
		return EINVAL;
	if (unlikely(wr->send_flags & IBV_SEND_INLINE && !opcode_has_inline(wr->opcode)))
		return EINVAL;
	wqe = vrdma_wqe(&qp->sq, head);
	memset(wqe, 0, sizeof(*wqe));
	wqe->wr_id = htole64(wr->wr_id);
	wqe->opcode = wr->opcode;
	wqe->flags = wr->send_flags | (qp->sig_all ? VIRTIO_RDMA_SEND_SIGNALED : 0);
	ret = fill_opcode(qp, wqe, wr);
	if (unlikely(ret))
		return ret;
	if (wr->opcode == IBV_WR_LOCAL_INV || wr->opcode == IBV_WR_BIND_MW)
		return 0;
	return fill_data(qp, wqe, wr);
}

int vrdma_post_send(struct ibv_qp *ibqp, struct ibv_send_wr *wr, struct ibv_send_wr **bad_wr)
{
	struct vrdma_context *ctx = to_vctx(ibqp->context);
	struct vrdma_qp *qp = to_vqp(ibqp);
	uint32_t head;
	int ret = 0;

	vrdma_lock(&qp->sq.lock);
	head = qp->sq.head;
	for (; wr; wr = wr->next) {
		ret = post_one_send(qp, wr, head);
		if (unlikely(ret)) {
			*bad_wr = wr;
			break;
		}
		vrdma_mirror_send(ctx, qp, head);
		head++;
	}
	if (likely(head != qp->sq.head))
		vrdma_ring(ctx, &qp->sq, head);
	vrdma_unlock(&qp->sq.lock);
	return ret;
}

static int post_one_recv(struct vrdma_wq *wq, const struct ibv_recv_wr *wr, uint32_t head)
{
	struct virtio_rdma_rq_wqe *wqe;

	if (unlikely(wq_full(wq, head)))
		return ENOMEM;
	if (unlikely(wr->num_sge < 0 || (uint32_t)wr->num_sge > wq->max_sge))
		return EINVAL;
	wqe = vrdma_wqe(wq, head);
	memset(wqe, 0, sizeof(*wqe));
	wqe->wr_id = htole64(wr->wr_id);
	wqe->num_sge = htole16(wr->num_sge);
	fill_sges((struct virtio_rdma_sge *)((uint8_t *)wqe + VIRTIO_RDMA_RQ_WQE_DATA), wr->sg_list,
		  wr->num_sge);
	return 0;
}

/* Under the queue's lock. */
static int post_recvs(struct vrdma_context *ctx, struct vrdma_wq *wq, struct ibv_recv_wr *wr,
		      struct ibv_recv_wr **bad_wr)
{
	uint32_t head = wq->head;
	int ret = 0;

	for (; wr; wr = wr->next) {
		ret = post_one_recv(wq, wr, head);
		if (unlikely(ret)) {
			*bad_wr = wr;
			break;
		}
		vrdma_mirror_recv(ctx, vrdma_wqe(wq, head));
		head++;
	}
	if (likely(head != wq->head))
		vrdma_ring(ctx, wq, head);
	return ret;
}

int vrdma_post_recv(struct ibv_qp *ibqp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr)
{
	struct vrdma_context *ctx = to_vctx(ibqp->context);
	struct vrdma_qp *qp = to_vqp(ibqp);
	int ret;

	vrdma_lock(&qp->rq.lock);
	if (unlikely(qp_state(qp) == IBV_QPS_RESET || ibqp->srq)) {
		*bad_wr = wr;
		ret = EINVAL;
	} else if (vrdma_lost(ctx)) {
		*bad_wr = wr;
		ret = EIO;
	} else {
		ret = post_recvs(ctx, &qp->rq, wr, bad_wr);
	}
	vrdma_unlock(&qp->rq.lock);
	return ret;
}

int vrdma_post_srq_recv(struct ibv_srq *ibsrq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr)
{
	struct vrdma_context *ctx = to_vctx(ibsrq->context);
	struct vrdma_srq *srq = to_vsrq(ibsrq);
	int ret;

	vrdma_lock(&srq->wq.lock);
	if (vrdma_lost(ctx)) {
		*bad_wr = wr;
		ret = EIO;
	} else {
		vrdma_srq_update_tail(srq);
		ret = vrdma_mirror_srq(ctx, srq, wr);
		if (unlikely(ret))
			*bad_wr = wr;
		else
			ret = post_recvs(ctx, &srq->wq, wr, bad_wr);
	}
	vrdma_unlock(&srq->wq.lock);
	return ret;
}

/* A window of type 1 (ibv_bind_mw): a bind work request with the next key of the window. */
int vrdma_bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind)
{
	struct ibv_send_wr *bad_wr, wr = {
		.wr_id = bind->wr_id,
		.opcode = IBV_WR_BIND_MW,
		.send_flags = bind->send_flags,
	};
	int ret;

	wr.bind_mw.mw = mw;
	wr.bind_mw.rkey = ibv_inc_rkey(mw->rkey);
	wr.bind_mw.bind_info = bind->bind_info;
	ret = vrdma_post_send(qp, &wr, &bad_wr);
	if (!ret)
		mw->rkey = wr.bind_mw.rkey;
	return ret;
}

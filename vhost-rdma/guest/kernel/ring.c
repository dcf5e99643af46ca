// SPDX-License-Identifier: GPL-2.0
/*
 * Posting from the kernel: the GSI and kernel consumers (docs/virtio-rdma.md, sections 6.4, 7.1,
 * 7.2).
 *
 * A batch of work requests is written first and made visible by one doorbell (held.c). Slots are
 * freed by completions (poll.c); an SRQ's by the count of what the device took. After a loss of the
 * device posting succeeds and polling flushes, so that a consumer that drains its queue comes to an
 * end.
 */
#include <linux/log2.h>
#include <linux/slab.h>
#include "virtio_rdma.h"

/*
 * Zeroed but for what the caller set; vrdma_wq_free() also undoes what was done before a failure.
 */
int vrdma_wq_init(struct vrdma *vr, struct vrdma_wq *wq, const struct vrdma_wq_shape *shape)
{
	u32 entries = roundup_pow_of_two(shape->max_wr);
	u8 shift = max_t(u8, shape->min_log2_stride, order_base_2(shape->bytes));
	struct vrdma_mem *mem;

	if (shift > VIRTIO_RDMA_WQE_MAX_LOG2_STRIDE)
		return -EINVAL;
	spin_lock_init(&wq->lock);
	wq->wr_ids = kvcalloc(entries, sizeof(*wq->wr_ids), GFP_KERNEL);
	if (shape->handles)
		wq->handles = kvcalloc(entries, sizeof(*wq->handles), GFP_KERNEL);
	if (!wq->wr_ids || (shape->handles && !wq->handles))
		goto err;
	mem = vrdma_mem_kernel(vr, vrdma_ring_bytes(entries, shift, shape->ctrl));
	if (IS_ERR(mem))
		goto err;
	wq->mem = mem;
	wq->ring = mem->vaddr;
	wq->entries = entries;
	wq->max_wr = shape->max_wr;
	wq->max_sge = shape->max_sge;
	wq->log2_stride = shift;
	return 0;
err:
	vrdma_wq_free(vr, wq, true);
	return -ENOMEM;
}

void vrdma_wq_free(struct vrdma *vr, struct vrdma_wq *wq, bool device_is_done)
{
	vrdma_mem_put(vr, wq->mem, device_is_done);
	kvfree(wq->wr_ids);
	kvfree(wq->handles);
	wq->mem = NULL;
	wq->wr_ids = NULL;
	wq->handles = NULL;
}

static void vrdma_wq_reset(struct vrdma_wq *wq)
{
	unsigned long flags;

	if (!wq->entries)
		return;
	spin_lock_irqsave(&wq->lock, flags);
	wq->head = 0;
	wq->rung = 0;
	wq->tail = 0;
	/* The device looks at it again when the QP leaves RESET. */
	virt_store_release(wq->db_index, cpu_to_le32(0));
	spin_unlock_irqrestore(&wq->lock, flags);
}

/* The QP was moved to RESET: the device forgot what was posted, and so do we (section 8.1). */
void vrdma_qp_reset_rings(struct vrdma_qp *qp)
{
	vrdma_qp_discard(qp);
	vrdma_sq_drop_held(qp);
	vrdma_wq_reset(&qp->sq);
	vrdma_wq_reset(&qp->rq);
}

static void *vrdma_wq_slot(struct vrdma_wq *wq, u64 wr_id)
{
	u32 slot = wq->head & (wq->entries - 1);

	wq->wr_ids[slot] = wr_id;
	return wq->ring + ((size_t)slot << wq->log2_stride);
}

static void vrdma_put_sges(void *at, const struct ib_sge *sge, int num)
{
	struct virtio_rdma_sge *out = at;
	int i;

	for (i = 0; i < num; i++) {
		out[i].addr = cpu_to_le64(sge[i].addr);
		out[i].length = cpu_to_le32(sge[i].length);
		out[i].lkey = cpu_to_le32(sge[i].lkey);
	}
}

static int vrdma_put_inline(void *at, u32 max, const struct ib_sge *sge, int num, __le16 *bytes)
{
	u32 total = 0;
	int i;

	for (i = 0; i < num; i++) {
		if (sge[i].length > max - total)
			return -EINVAL;
		memcpy(at + total, (void *)(uintptr_t)sge[i].addr, sge[i].length);
		total += sge[i].length;
	}
	*bytes = cpu_to_le16(total);
	return 0;
}

static void vrdma_put_reg(struct virtio_rdma_sq_wqe *wqe, const struct ib_reg_wr *reg)
{
	struct vrdma_mr *mr = to_vmr(reg->mr);
	u64 array = mr->mem->dma[0];

	wqe->rkey = cpu_to_le32(reg->key);
	wqe->remote_addr = cpu_to_le64(reg->mr->iova);
	wqe->arg0 = cpu_to_le64(reg->mr->length);
	wqe->imm = cpu_to_le32(reg->access);
	wqe->aux = cpu_to_le32(mr->page_count);
	wqe->arg1 = cpu_to_le64(array | (u64)ilog2(reg->mr->page_size) << 56);
}

/* The handle is named when the request is rung: its number may not be there yet. */
static void vrdma_put_ud(struct virtio_rdma_sq_wqe *wqe, const struct ib_ud_wr *ud)
{
	wqe->rkey = cpu_to_le32(ud->remote_qpn);
	wqe->aux = cpu_to_le32(ud->remote_qkey);
}

static void vrdma_put_atomic(struct virtio_rdma_sq_wqe *wqe, const struct ib_send_wr *wr)
{
	const struct ib_atomic_wr *at = atomic_wr(wr);

	wqe->remote_addr = cpu_to_le64(at->remote_addr);
	wqe->rkey = cpu_to_le32(at->rkey);
	wqe->arg0 = cpu_to_le64(at->compare_add);
	wqe->arg1 = cpu_to_le64(at->swap);
}

static int vrdma_put_op(struct vrdma_qp *qp, struct virtio_rdma_sq_wqe *wqe,
			const struct ib_send_wr *wr)
{
	bool mem_mgt = qp->ctx->vr->caps & VIRTIO_RDMA_CAP_MEM_MGT;

	switch (wr->opcode) {
	case IB_WR_SEND_WITH_IMM:
		wqe->imm = (__force __le32)wr->ex.imm_data;
		fallthrough;
	case IB_WR_SEND:
		if (vrdma_is_datagram(qp))
			vrdma_put_ud(wqe, ud_wr(wr));
		break;
	case IB_WR_SEND_WITH_INV:
	case IB_WR_LOCAL_INV:
		if (!mem_mgt)
			return -EOPNOTSUPP;
		wqe->imm = cpu_to_le32(wr->ex.invalidate_rkey);
		break;
	case IB_WR_RDMA_WRITE_WITH_IMM:
		wqe->imm = (__force __le32)wr->ex.imm_data;
		fallthrough;
	case IB_WR_RDMA_WRITE:
	case IB_WR_RDMA_READ:
		wqe->remote_addr = cpu_to_le64(rdma_wr(wr)->remote_addr);
		wqe->rkey = cpu_to_le32(rdma_wr(wr)->rkey);
		break;
#ifdef VRDMA_HAVE_ATOMIC_WRITE
	case IB_WR_ATOMIC_WRITE:
		if (!(qp->ctx->vr->caps & VIRTIO_RDMA_CAP_ATOMIC_WRITE))
			return -EOPNOTSUPP;
		wqe->remote_addr = cpu_to_le64(rdma_wr(wr)->remote_addr);
		wqe->rkey = cpu_to_le32(rdma_wr(wr)->rkey);
		break;
#endif
	case IB_WR_ATOMIC_CMP_AND_SWP:
	case IB_WR_ATOMIC_FETCH_AND_ADD:
		vrdma_put_atomic(wqe, wr);
		break;
	case IB_WR_REG_MR:
		if (!mem_mgt)
			return -EOPNOTSUPP;
		vrdma_put_reg(wqe, reg_wr(wr));
		break;
	default:
		return -EINVAL;
	}
	/* enum ib_wr_opcode and VIRTIO_RDMA_WR_* have the same numbers. */
	wqe->opcode = wr->opcode;
	return 0;
}

static void vrdma_remember_handle(struct vrdma_wq *sq, struct vrdma_ah_handle *handle)
{
	struct vrdma_ah_handle **at = &sq->handles[sq->head & (sq->entries - 1)];

	/* After a loss a slot can be freed (poll.c) before it was rung. */
	if (*at)
		vrdma_ah_handle_put(*at);
	refcount_inc(&handle->ref);
	*at = handle;
}

static int vrdma_put_send(struct vrdma_qp *qp, const struct ib_send_wr *wr)
{
	struct vrdma_wq *sq = &qp->sq;
	struct virtio_rdma_sq_wqe wqe = { .wr_id = cpu_to_le64(wr->wr_id) };
	bool data = wr->opcode != IB_WR_REG_MR && wr->opcode != IB_WR_LOCAL_INV;
	u8 *slot;
	int ret;

	if (sq->head - sq->tail >= sq->entries)
		return -ENOMEM;
	if (data && wr->num_sge > sq->max_sge)
		return -EINVAL;
	ret = vrdma_put_op(qp, &wqe, wr);
	if (ret)
		return ret;
	slot = vrdma_wq_slot(sq, wr->wr_id);
	wqe.flags = wr->send_flags & (IB_SEND_FENCE | IB_SEND_SIGNALED | IB_SEND_SOLICITED);
	if (data && wr->send_flags & IB_SEND_INLINE) {
		wqe.flags |= VIRTIO_RDMA_SEND_INLINE;
		ret = vrdma_put_inline(slot + VIRTIO_RDMA_SQ_WQE_DATA, qp->cap.max_inline_data,
				       wr->sg_list, wr->num_sge, &wqe.num_sge);
		if (ret)
			return ret;
	} else if (data) {
		wqe.num_sge = cpu_to_le16(wr->num_sge);
		vrdma_put_sges(slot + VIRTIO_RDMA_SQ_WQE_DATA, wr->sg_list, wr->num_sge);
	}
	/* IB_SEND_FENCE is 1, SIGNALED 2, SOLICITED 4, as on the wire. */
	memcpy(slot, &wqe, sizeof(wqe));
	if (data && vrdma_is_datagram(qp))
		vrdma_remember_handle(sq, to_vah(ud_wr(wr)->ah)->handle);
	sq->head++;
	return 0;
}

static bool vrdma_can_send(const struct vrdma_qp *qp)
{
	return qp->state == IB_QPS_RTS || qp->state == IB_QPS_SQD || qp->state == IB_QPS_SQE ||
	       qp->state == IB_QPS_ERR;
}

/* Work that no device will complete: whoever waits on the CQ has to come and poll it. */
static void vrdma_after_post(struct vrdma *vr)
{
	if (vrdma_is_lost(vr))
		schedule_work(&vr->lost_work);
}

int vrdma_post_send(struct ib_qp *ibqp, const struct ib_send_wr *wr, const struct ib_send_wr **bad)
{
	struct vrdma_qp *qp = to_vqp(ibqp);
	struct vrdma *vr = qp->ctx->vr;
	struct vrdma_wq *sq = &qp->sq;
	unsigned long flags;
	int ret = 0;

	/* The rings of a process are not ours to write. */
	if (qp->user || !sq->entries) {
		*bad = wr;
		return -EINVAL;
	}
	spin_lock_irqsave(&sq->lock, flags);
	if (!vrdma_can_send(qp))
		ret = -EINVAL;
	while (!ret && wr) {
		ret = vrdma_put_send(qp, wr);
		if (!ret)
			wr = wr->next;
	}
	vrdma_sq_ring(qp);
	spin_unlock_irqrestore(&sq->lock, flags);
	if (ret)
		*bad = wr;
	vrdma_after_post(vr);
	return ret;
}

static int vrdma_put_recv(struct vrdma_wq *rq, const struct ib_recv_wr *wr)
{
	struct virtio_rdma_rq_wqe wqe = {
		.wr_id = cpu_to_le64(wr->wr_id),
		.num_sge = cpu_to_le16(wr->num_sge),
	};
	u8 *slot;

	if (rq->head - rq->tail >= rq->entries)
		return -ENOMEM;
	if (wr->num_sge > rq->max_sge)
		return -EINVAL;
	slot = vrdma_wq_slot(rq, wr->wr_id);
	memcpy(slot, &wqe, sizeof(wqe));
	vrdma_put_sges(slot + VIRTIO_RDMA_RQ_WQE_DATA, wr->sg_list, wr->num_sge);
	rq->head++;
	return 0;
}

static int vrdma_put_recvs(struct vrdma_ctx *ctx, struct vrdma_wq *rq, const struct ib_recv_wr *wr,
			   const struct ib_recv_wr **bad)
{
	u32 first = rq->head;
	int ret = 0;

	lockdep_assert_held(&rq->lock);
	while (!ret && wr) {
		ret = vrdma_put_recv(rq, wr);
		if (!ret)
			wr = wr->next;
	}
	if (rq->head != first && !vrdma_is_lost(ctx->vr))
		vrdma_doorbell(ctx->vr, ctx->kick_queue, rq->db_index, rq->head);
	if (ret)
		*bad = wr;
	return ret;
}

int vrdma_post_recv(struct ib_qp *ibqp, const struct ib_recv_wr *wr, const struct ib_recv_wr **bad)
{
	struct vrdma_qp *qp = to_vqp(ibqp);
	unsigned long flags;
	int ret;

	if (qp->user || !qp->rq.entries) {
		*bad = wr;
		return -EINVAL;
	}
	spin_lock_irqsave(&qp->rq.lock, flags);
	if (qp->state == IB_QPS_RESET) {
		*bad = wr;
		ret = -EINVAL;
	} else {
		ret = vrdma_put_recvs(qp->ctx, &qp->rq, wr, bad);
	}
	spin_unlock_irqrestore(&qp->rq.lock, flags);
	vrdma_after_post(qp->ctx->vr);
	return ret;
}

int vrdma_post_srq_recv(struct ib_srq *ibsrq, const struct ib_recv_wr *wr,
			const struct ib_recv_wr **bad)
{
	struct vrdma_srq *srq = to_vsrq(ibsrq);
	unsigned long flags;
	int ret;

	if (srq->user) {
		*bad = wr;
		return -EINVAL;
	}
	spin_lock_irqsave(&srq->rq.lock, flags);
	srq->rq.tail = vrdma_ctrl_load(srq->ctrl, VIRTIO_RDMA_CTRL_TAKEN);
	ret = vrdma_put_recvs(srq->ctx, &srq->rq, wr, bad);
	spin_unlock_irqrestore(&srq->rq.lock, flags);
	return ret;
}

// SPDX-License-Identifier: GPL-2.0
/*
 * Polling and arming the kernel's completion queues (docs/virtio-rdma.md, sections 7.3 and 7.4).
 *
 * An entry belongs to us once its sequence number is there; the acquire on it orders all that we
 * read behind it. Completions free the slots of the work queue up to the one they name, so that
 * unsignaled work requests before it are freed as well.
 *
 * When the device is lost, polling makes up the completions that it owes: every work request posted
 * and not completed is flushed, in order.
 */
#include "virtio_rdma.h"

static struct virtio_rdma_cqe *vrdma_cqe(struct vrdma_cq *cq, u32 index)
{
	return (struct virtio_rdma_cqe *)(cq->ring +
		((size_t)(index & (cq->entries - 1)) << VIRTIO_RDMA_CQE_LOG2_STRIDE));
}

static bool vrdma_cqe_valid(const struct virtio_rdma_cqe *cqe, u32 index)
{
	/* The device stores it last (section 7.3). */
	return le32_to_cpu(virt_load_acquire(&cqe->seq)) == index + 1;
}

/*
 * Entries of a QP that is gone or was moved to RESET are marked, not removed: the device owns the
 * order of the ring.
 */
static void vrdma_cq_discard(struct vrdma_cq *cq, u32 qpn)
{
	struct virtio_rdma_cqe *cqe;
	unsigned long flags;
	u32 i;

	spin_lock_irqsave(&cq->lock, flags);
	for (i = cq->consumer; i - cq->consumer < cq->entries; i++) {
		cqe = vrdma_cqe(cq, i);
		if (!vrdma_cqe_valid(cqe, i))
			break;
		if (le32_to_cpu(cqe->qpn) == qpn)
			WRITE_ONCE(cqe->status, VIRTIO_RDMA_WC_STATUS_DISCARDED);
	}
	spin_unlock_irqrestore(&cq->lock, flags);
}

void vrdma_qp_discard(struct vrdma_qp *qp)
{
	struct vrdma_cq *send = to_vcq(qp->ibqp.send_cq), *recv = to_vcq(qp->ibqp.recv_cq);

	vrdma_cq_discard(send, qp->qpn);
	if (recv != send)
		vrdma_cq_discard(recv, qp->qpn);
}

static enum ib_wc_opcode vrdma_wc_opcode(u8 opcode)
{
	switch (opcode) {
#ifdef VRDMA_HAVE_ATOMIC_WRITE
	case VIRTIO_RDMA_WC_ATOMIC_WRITE:
		return IB_WC_ATOMIC_WRITE;
#endif
	case VIRTIO_RDMA_WC_RDMA_WRITE:
		return IB_WC_RDMA_WRITE;
	case VIRTIO_RDMA_WC_RDMA_READ:
		return IB_WC_RDMA_READ;
	case VIRTIO_RDMA_WC_COMP_SWAP:
		return IB_WC_COMP_SWAP;
	case VIRTIO_RDMA_WC_FETCH_ADD:
		return IB_WC_FETCH_ADD;
	case VIRTIO_RDMA_WC_LOCAL_INV:
		return IB_WC_LOCAL_INV;
	case VIRTIO_RDMA_WC_REG_MR:
		return IB_WC_REG_MR;
	case VIRTIO_RDMA_WC_RECV:
		return IB_WC_RECV;
	case VIRTIO_RDMA_WC_RECV_RDMA_WITH_IMM:
		return IB_WC_RECV_RDMA_WITH_IMM;
	default:
		return IB_WC_SEND;
	}
}

static void vrdma_fill_success(struct ib_wc *wc, const struct virtio_rdma_cqe *cqe, u16 flags)
{
	wc->opcode = vrdma_wc_opcode(cqe->opcode);
	wc->byte_len = le32_to_cpu(cqe->byte_len);
	wc->src_qp = le32_to_cpu(cqe->src_qp);
	wc->pkey_index = le16_to_cpu(cqe->pkey_index);
	wc->sl = cqe->sl;
	if (flags & VIRTIO_RDMA_CQE_IMM) {
		wc->ex.imm_data = (__force __be32)cqe->imm;
		wc->wc_flags |= IB_WC_WITH_IMM;
	} else if (flags & VIRTIO_RDMA_CQE_INV) {
		wc->ex.invalidate_rkey = le32_to_cpu(cqe->imm);
		wc->wc_flags |= IB_WC_WITH_INVALIDATE;
	}
	if (flags & VIRTIO_RDMA_CQE_GRH) {
		wc->wc_flags |= IB_WC_GRH | IB_WC_WITH_NETWORK_HDR_TYPE;
		wc->network_hdr_type = RDMA_NETWORK_IPV6;
		if (flags & VIRTIO_RDMA_CQE_IPV4)
			wc->network_hdr_type = RDMA_NETWORK_IPV4;
	}
	if (flags & VIRTIO_RDMA_CQE_SMAC) {
		memcpy(wc->smac, cqe->smac, sizeof(wc->smac));
		wc->wc_flags |= IB_WC_WITH_SMAC;
	}
}

static void vrdma_retire(struct vrdma_wq *wq, u32 index, u32 end)
{
	unsigned long flags;

	spin_lock_irqsave(&wq->lock, flags);
	/* Only forward, and never past what it was told of, whatever the device says. */
	if (index - wq->tail < end - wq->tail)
		wq->tail = index + 1;
	spin_unlock_irqrestore(&wq->lock, flags);
}

/* False: the entry is of no QP that we know. */
static bool vrdma_take_cqe(struct vrdma *vr, const struct virtio_rdma_cqe *cqe, struct ib_wc *wc)
{
	u16 flags = le16_to_cpu(cqe->flags);
	struct vrdma_qp *qp;

	qp = xa_load(&vr->qps, le32_to_cpu(cqe->qpn));
	if (!qp || qp->user)
		return false;
	memset(wc, 0, sizeof(*wc));
	wc->qp = &qp->ibqp;
	wc->wr_id = le64_to_cpu(cqe->wr_id);
	/* enum ib_wc_status and VIRTIO_RDMA_WC_STATUS_* have the same numbers. */
	wc->status = cqe->status;
	wc->vendor_err = le32_to_cpu(cqe->vendor_err);
	wc->port_num = 1;
	if (cqe->status == VIRTIO_RDMA_WC_STATUS_SUCCESS)
		vrdma_fill_success(wc, cqe, flags);
	else if (flags & VIRTIO_RDMA_CQE_RECV)
		wc->opcode = IB_WC_RECV;
	if (!(flags & VIRTIO_RDMA_CQE_RECV))
		vrdma_retire(&qp->sq, le32_to_cpu(cqe->wqe_index), READ_ONCE(qp->sq.rung));
	else if (!(flags & VIRTIO_RDMA_CQE_SRQ))
		vrdma_retire(&qp->rq, le32_to_cpu(cqe->wqe_index), READ_ONCE(qp->rq.head));
	return true;
}

static int vrdma_flush_wq(struct vrdma_qp *qp, struct vrdma_wq *wq, enum ib_wc_opcode opcode,
			  int num, struct ib_wc *wc)
{
	int n = 0;

	if (!wq->entries)
		return 0;
	spin_lock(&wq->lock);
	while (n < num && wq->tail != wq->head) {
		memset(&wc[n], 0, sizeof(wc[n]));
		wc[n].qp = &qp->ibqp;
		wc[n].wr_id = wq->wr_ids[wq->tail & (wq->entries - 1)];
		wc[n].status = IB_WC_WR_FLUSH_ERR;
		wc[n].opcode = opcode;
		wq->tail++;
		n++;
	}
	spin_unlock(&wq->lock);
	return n;
}

static int vrdma_flush_lost(struct vrdma_cq *cq, int num, struct ib_wc *wc)
{
	struct vrdma_qp *qp;
	int n = 0;

	list_for_each_entry(qp, &cq->send_qps, on_send_cq)
		n += vrdma_flush_wq(qp, &qp->sq, IB_WC_SEND, num - n, wc + n);
	list_for_each_entry(qp, &cq->recv_qps, on_recv_cq)
		n += vrdma_flush_wq(qp, &qp->rq, IB_WC_RECV, num - n, wc + n);
	return n;
}

int vrdma_poll_cq(struct ib_cq *ibcq, int num, struct ib_wc *wc)
{
	struct vrdma_cq *cq = to_vcq(ibcq);
	struct vrdma *vr = cq->ctx->vr;
	struct virtio_rdma_cqe *cqe;
	unsigned long flags;
	u32 first, left;
	int n = 0;

	if (!cq->ring)
		return -EINVAL;
	spin_lock_irqsave(&cq->lock, flags);
	first = cq->consumer;
	/* Entries that are skipped count too: a ring is the most that one call looks at. */
	for (left = cq->entries; n < num && left; left--) {
		cqe = vrdma_cqe(cq, cq->consumer);
		if (!vrdma_cqe_valid(cqe, cq->consumer))
			break;
		if (READ_ONCE(cqe->status) != VIRTIO_RDMA_WC_STATUS_DISCARDED &&
		    vrdma_take_cqe(vr, cqe, &wc[n]))
			n++;
		cq->consumer++;
	}
	if (cq->consumer != first)
		vrdma_ctrl_store(cq->ctrl, VIRTIO_RDMA_CTRL_CONSUMER, cq->consumer);
	if (!n && vrdma_is_lost(vr))
		n = vrdma_flush_lost(cq, num, wc);
	spin_unlock_irqrestore(&cq->lock, flags);
	return n;
}

static bool vrdma_cq_owes(struct vrdma_cq *cq)
{
	struct vrdma_qp *qp;

	list_for_each_entry(qp, &cq->send_qps, on_send_cq)
		if (READ_ONCE(qp->sq.tail) != READ_ONCE(qp->sq.head))
			return true;
	list_for_each_entry(qp, &cq->recv_qps, on_recv_cq)
		if (READ_ONCE(qp->rq.tail) != READ_ONCE(qp->rq.head))
			return true;
	return false;
}

/* Section 7.4: only ever widened while armed; a full fence; then one more look. */
int vrdma_req_notify_cq(struct ib_cq *ibcq, enum ib_cq_notify_flags notify)
{
	struct vrdma_cq *cq = to_vcq(ibcq);
	bool solicited = (notify & IB_CQ_SOLICITED_MASK) == IB_CQ_SOLICITED;
	u32 what = solicited ? VIRTIO_RDMA_ARM_SOLICITED : VIRTIO_RDMA_ARM_ANY;
	u32 seq_mask = U32_MAX >> VIRTIO_RDMA_ARM_SEQ_SHIFT, arm, fired;
	unsigned long flags;
	__le32 *word;
	int missed = 0;

	if (!cq->ring)
		return -EINVAL;
	spin_lock_irqsave(&cq->lock, flags);
	word = (__le32 *)(cq->ctrl + VIRTIO_RDMA_CTRL_ARM);
	arm = le32_to_cpu(*word);
	fired = vrdma_ctrl_load(cq->ctrl, VIRTIO_RDMA_CTRL_FIRED) & seq_mask;
	if (arm >> VIRTIO_RDMA_ARM_SEQ_SHIFT == fired)
		arm = (fired + 1) << VIRTIO_RDMA_ARM_SEQ_SHIFT | what;
	else if (!solicited)
		arm = (arm & ~VIRTIO_RDMA_ARM_WHAT_MASK) | VIRTIO_RDMA_ARM_ANY;
	/* Nothing of what follows an event may be read before this. */
	virt_store_release(word, cpu_to_le32(arm));
	/* The device must see the arm word, or we the entry. */
	mb();
	if (notify & IB_CQ_REPORT_MISSED_EVENTS)
		missed = vrdma_cqe_valid(vrdma_cqe(cq, cq->consumer), cq->consumer) ||
			 (vrdma_is_lost(cq->ctx->vr) && vrdma_cq_owes(cq));
	spin_unlock_irqrestore(&cq->lock, flags);
	return missed;
}

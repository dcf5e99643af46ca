// SPDX-License-Identifier: GPL-2.0
/*
 * Queue pairs: creation and destruction. Attributes are in qp_attr.c.
 *
 * The queues of a process are its own memory, pinned here; those of kernel consumers (the GSI among
 * them) are made here and driven by ring.c.
 */
#include <linux/log2.h>
#include <linux/slab.h>
#include "virtio_rdma.h"

static int vrdma_qp_type(struct vrdma *vr, const struct ib_qp_init_attr *init, bool user, u32 *type)
{
	switch (init->qp_type) {
	case IB_QPT_RC:
		*type = VIRTIO_RDMA_QPT_RC;
		return 0;
	case IB_QPT_UC:
		*type = VIRTIO_RDMA_QPT_UC;
		return vr->caps & VIRTIO_RDMA_CAP_UC ? 0 : -EOPNOTSUPP;
	case IB_QPT_UD:
		*type = VIRTIO_RDMA_QPT_UD;
		return vr->caps & VIRTIO_RDMA_CAP_UD ? 0 : -EOPNOTSUPP;
	case IB_QPT_GSI:
		*type = VIRTIO_RDMA_QPT_GSI;
		return user ? -EPERM : 0;
	default:
		return -EOPNOTSUPP;
	}
}

static int vrdma_qp_check(struct vrdma *vr, const struct ib_qp_init_attr *init)
{
	const struct ib_qp_cap *cap = &init->cap;
	u32 max_wr = vrdma_attr32(vr->attr.max_qp_wr);

	if (init->create_flags)
		return -EOPNOTSUPP;
	if (!init->send_cq || !init->recv_cq)
		return -EINVAL;
	if (cap->max_send_wr > max_wr || cap->max_send_sge > vrdma_attr32(vr->attr.max_send_sge) ||
	    cap->max_inline_data > vrdma_attr32(vr->attr.max_inline))
		return -EINVAL;
	if (!init->srq &&
	    (cap->max_recv_wr > max_wr || cap->max_recv_sge > vrdma_attr32(vr->attr.max_recv_sge)))
		return -EINVAL;
	return 0;
}

static int vrdma_user_wq(struct ib_device *ib, struct vrdma_wq *wq, u64 buf, u32 len, u32 entries,
			 u8 log2_stride)
{
	struct vrdma_mem *mem;

	if (!entries)
		return wq->max_wr ? -EINVAL : 0;
	if (!is_power_of_2(entries) || entries < wq->max_wr ||
	    log2_stride < VIRTIO_RDMA_RQ_WQE_MIN_LOG2_STRIDE ||
	    log2_stride > VIRTIO_RDMA_WQE_MAX_LOG2_STRIDE)
		return -EINVAL;
	mem = vrdma_mem_user_ring(ib, buf, len, vrdma_ring_bytes(entries, log2_stride, false));
	if (IS_ERR(mem))
		return PTR_ERR(mem);
	wq->mem = mem;
	wq->entries = entries;
	wq->log2_stride = log2_stride;
	return 0;
}

static int vrdma_qp_user_rings(struct vrdma_qp *qp, struct ib_udata *udata)
{
	struct virtio_rdma_qp_req req;
	int ret;

	ret = ib_copy_validate_udata_in(udata, req, reserved);
	if (ret)
		return ret;
	ret = vrdma_user_wq(qp->ibqp.device, &qp->sq, req.sq_buf, req.sq_len, req.sq_entries,
			    req.sq_log2_stride);
	if (ret)
		return ret;
	return vrdma_user_wq(qp->ibqp.device, &qp->rq, req.rq_buf, req.rq_len, req.rq_entries,
			     req.rq_log2_stride);
}

static int vrdma_qp_kernel_rings(struct vrdma_qp *qp)
{
	const size_t sge = sizeof(struct virtio_rdma_sge);
	const struct ib_qp_cap *cap = &qp->cap;
	struct vrdma_wq_shape sq = {
		.max_wr = qp->sq.max_wr,
		.max_sge = cap->max_send_sge,
		.bytes = VIRTIO_RDMA_SQ_WQE_DATA +
			 max_t(u32, cap->max_send_sge * sge, cap->max_inline_data),
		.min_log2_stride = VIRTIO_RDMA_SQ_WQE_MIN_LOG2_STRIDE,
		.handles = vrdma_is_datagram(qp),
	};
	struct vrdma_wq_shape rq = {
		.max_wr = qp->rq.max_wr,
		.max_sge = cap->max_recv_sge,
		.bytes = VIRTIO_RDMA_RQ_WQE_DATA + cap->max_recv_sge * sge,
		.min_log2_stride = VIRTIO_RDMA_RQ_WQE_MIN_LOG2_STRIDE,
	};
	int ret = 0;

	if (sq.max_wr)
		ret = vrdma_wq_init(qp->ctx->vr, &qp->sq, &sq);
	if (!ret && rq.max_wr)
		ret = vrdma_wq_init(qp->ctx->vr, &qp->rq, &rq);
	return ret;
}

static int vrdma_qp_db(struct vrdma_qp *qp, struct vrdma_wq *wq, __le32 db)
{
	wq->db = le32_to_cpu(db);
	if (!wq->entries)
		return 0;
	wq->db_index = vrdma_db_index(qp->ctx, wq->db);
	if (!wq->db_index) {
		vrdma_failed(qp->ctx->vr, "a QP has a doorbell that does not exist");
		return -EIO;
	}
	/*
	 * The slot may have served another queue. The QP is in RESET: the device looks at the word
	 * only when it leaves it.
	 */
	virt_store_release(wq->db_index, cpu_to_le32(0));
	return 0;
}

static void vrdma_qp_fill_req(struct virtio_rdma_qp_create_req *req, const struct vrdma_qp *qp,
			      const struct ib_qp_init_attr *init, u32 type)
{
	memset(req, 0, sizeof(*req));
	req->pdn = cpu_to_le32(to_vpd(qp->ibqp.pd)->pdn);
	req->type = cpu_to_le32(type);
	if (init->sq_sig_type == IB_SIGNAL_ALL_WR)
		req->flags = cpu_to_le32(VIRTIO_RDMA_QP_SIG_ALL);
	req->send_cqn = cpu_to_le32(to_vcq(init->send_cq)->cqn);
	req->recv_cqn = cpu_to_le32(to_vcq(init->recv_cq)->cqn);
	req->srqn = cpu_to_le32(init->srq ? to_vsrq(init->srq)->srqn : VIRTIO_RDMA_NO_SRQ);
	req->sq_entries = cpu_to_le32(qp->sq.entries);
	req->rq_entries = cpu_to_le32(qp->rq.entries);
	req->max_send_wr = cpu_to_le32(qp->sq.max_wr);
	req->max_recv_wr = cpu_to_le32(qp->rq.max_wr);
	req->max_send_sge = cpu_to_le16(qp->cap.max_send_sge);
	req->max_recv_sge = cpu_to_le16(qp->cap.max_recv_sge);
	req->max_inline = cpu_to_le16(qp->cap.max_inline_data);
	req->sq_log2_stride = qp->sq.log2_stride;
	req->rq_log2_stride = qp->rq.log2_stride;
}

static int vrdma_qp_cmd_create(struct vrdma_qp *qp, const struct ib_qp_init_attr *init, u32 type)
{
	struct vrdma *vr = qp->ctx->vr;
	struct virtio_rdma_qp_create_req req;
	struct virtio_rdma_qp_create_resp resp;
	struct vrdma_page_list sq = {}, rq = {};
	int ret = 0;

	vrdma_qp_fill_req(&req, qp, init, type);
	if (qp->sq.entries)
		ret = vrdma_page_list_build(vr, &sq, qp->sq.mem);
	if (!ret && qp->rq.entries)
		ret = vrdma_page_list_build(vr, &rq, qp->rq.mem);
	if (!ret) {
		req.sq = sq.desc;
		req.rq = rq.desc;
		ret = vrdma_cmd(vr, VIRTIO_RDMA_CMD_QP_CREATE, qp->ctx->id, &req, sizeof(req),
				&resp, sizeof(resp));
	}
	vrdma_page_list_free(vr, &sq);
	vrdma_page_list_free(vr, &rq);
	if (ret)
		return ret;
	qp->qpn = le32_to_cpu(resp.qpn);
	ret = vrdma_qp_db(qp, &qp->sq, resp.sq_db);
	if (!ret)
		ret = vrdma_qp_db(qp, &qp->rq, resp.rq_db);
	return ret;
}

static u32 vrdma_qp_slots(const struct vrdma_qp *qp)
{
	return !!qp->sq.entries + !!qp->rq.entries;
}

static int vrdma_qp_answer(struct vrdma_qp *qp, struct ib_udata *udata)
{
	struct virtio_rdma_qp_resp uresp = {
		.qpn = qp->qpn,
		.sq_db = qp->sq.entries ? qp->sq.db : VIRTIO_RDMA_DB_NONE,
		.rq_db = qp->rq.entries ? qp->rq.db : VIRTIO_RDMA_DB_NONE,
	};

	if (!udata)
		return 0;
	if (qp->sq.entries)
		uresp.sq_db_mmap = vrdma_db_mmap_offset(qp->ctx, qp->sq.db);
	if (qp->rq.entries)
		uresp.rq_db_mmap = vrdma_db_mmap_offset(qp->ctx, qp->rq.db);
	return ib_respond_udata(udata, uresp);
}

/* Kernel CQs know their QPs: after a loss of the device they must flush for them. */
static void vrdma_qp_join_cqs(struct vrdma_qp *qp, struct vrdma_cq *send, struct vrdma_cq *recv)
{
	unsigned long flags;

	spin_lock_irqsave(&send->lock, flags);
	list_add_tail(&qp->on_send_cq, &send->send_qps);
	spin_unlock_irqrestore(&send->lock, flags);
	spin_lock_irqsave(&recv->lock, flags);
	list_add_tail(&qp->on_recv_cq, &recv->recv_qps);
	spin_unlock_irqrestore(&recv->lock, flags);
}

static void vrdma_qp_leave_cqs(struct vrdma_qp *qp)
{
	struct vrdma_cq *send = to_vcq(qp->ibqp.send_cq), *recv = to_vcq(qp->ibqp.recv_cq);
	unsigned long flags;

	spin_lock_irqsave(&send->lock, flags);
	list_del_init(&qp->on_send_cq);
	spin_unlock_irqrestore(&send->lock, flags);
	spin_lock_irqsave(&recv->lock, flags);
	list_del_init(&qp->on_recv_cq);
	spin_unlock_irqrestore(&recv->lock, flags);
}

static void vrdma_qp_init(struct vrdma_qp *qp, struct vrdma *vr, struct ib_qp_init_attr *init,
			  struct ib_udata *udata)
{
	qp->ctx = vrdma_ctx_of(vr, udata);
	qp->user = udata;
	qp->state = IB_QPS_RESET;
	qp->sig_type = init->sq_sig_type;
	if (init->srq) {
		init->cap.max_recv_wr = 0;
		init->cap.max_recv_sge = 0;
	}
	qp->cap = init->cap;
	qp->sq.max_wr = init->cap.max_send_wr;
	qp->rq.max_wr = init->cap.max_recv_wr;
	qp->sq.max_sge = init->cap.max_send_sge;
	qp->rq.max_sge = init->cap.max_recv_sge;
	INIT_LIST_HEAD(&qp->on_send_cq);
	INIT_LIST_HEAD(&qp->on_recv_cq);
	INIT_LIST_HEAD(&qp->on_held);
	spin_lock_init(&qp->sq.lock);
	spin_lock_init(&qp->rq.lock);
	vrdma_ref_init(&qp->ref);
}

int vrdma_create_qp(struct ib_qp *ibqp, struct ib_qp_init_attr *init, struct ib_udata *udata)
{
	struct vrdma *vr = to_vr(ibqp->device);
	struct vrdma_qp *qp = to_vqp(ibqp);
	struct ib_ucontext *ibuc = NULL;
	bool done = true;
	u32 type;
	int ret;

	ret = vrdma_qp_type(vr, init, udata, &type);
	if (!ret)
		ret = vrdma_qp_check(vr, init);
	if (ret)
		return ret;
	vrdma_qp_init(qp, vr, init, udata);
	if (udata)
		ibuc = &container_of(qp->ctx, struct vrdma_ucontext, ctx)->ibucontext;
	ret = udata ? vrdma_qp_user_rings(qp, udata) : vrdma_qp_kernel_rings(qp);
	if (ret)
		goto err_rings;
	ret = vrdma_ctx_reserve_slots(qp->ctx, ibuc, vrdma_qp_slots(qp));
	if (ret)
		goto err_rings;
	ret = vrdma_qp_cmd_create(qp, init, type);
	if (ret) {
		done = !vrdma_is_lost(vr);
		goto err_slots;
	}
	ibqp->qp_num = qp->qpn;
	ret = vrdma_qp_answer(qp, udata);
	if (!ret)
		ret = xa_insert_irq(&vr->qps, qp->qpn, qp, GFP_KERNEL);
	if (ret) {
		done = vrdma_cmd_destroy(vr, VIRTIO_RDMA_CMD_QP_DESTROY, qp->ctx->id, qp->qpn);
		goto err_slots;
	}
	if (!udata)
		vrdma_qp_join_cqs(qp, to_vcq(init->send_cq), to_vcq(init->recv_cq));
	vrdma_keepalive_while_used(vr);
	return 0;

err_slots:
	vrdma_ctx_release_slots(qp->ctx, vrdma_qp_slots(qp));
err_rings:
	vrdma_wq_free(vr, &qp->sq, done);
	vrdma_wq_free(vr, &qp->rq, done);
	return ret;
}

int vrdma_destroy_qp(struct ib_qp *ibqp, struct ib_udata *udata)
{
	struct vrdma *vr = to_vr(ibqp->device);
	struct vrdma_qp *qp = to_vqp(ibqp);
	bool done;

	/*
	 * First: once the device has freed the number, it may be another QP's. Completions are
	 * polled by number, under the lock of the CQ: after these lines nobody finds this QP.
	 */
	xa_erase_irq(&vr->qps, qp->qpn);
	if (!qp->user)
		vrdma_qp_leave_cqs(qp);
	vrdma_sq_drop_held(qp);
	vrdma_ref_wait(&qp->ref);
	done = vrdma_cmd_destroy(vr, VIRTIO_RDMA_CMD_QP_DESTROY, qp->ctx->id, qp->qpn);
	/* What the device wrote until then, before the number comes back. */
	if (!qp->user)
		vrdma_qp_discard(qp);
	vrdma_ctx_release_slots(qp->ctx, vrdma_qp_slots(qp));
	vrdma_wq_free(vr, &qp->sq, done);
	vrdma_wq_free(vr, &qp->rq, done);
	vrdma_unused(vr);
	return 0;
}

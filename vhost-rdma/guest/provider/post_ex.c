// SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB)
/*
 * The ibv_wr_* interface: each call writes straight into the ring, ibv_wr_complete() rings the
 * doorbell once for all.
 *
 * An error of any call is kept until ibv_wr_complete(), which then publishes nothing (verbs: all or
 * none).
 */
#include "doorbell.h"
#include "mirror.h"
#include "virtio_rdma.h"

static struct virtio_rdma_sq_wqe *wr_begin(struct ibv_qp_ex *ibqp, uint8_t opcode)
{
	struct vrdma_qp *qp = ex_to_vqp(ibqp);
	struct virtio_rdma_sq_wqe *wqe;

	qp->wr_cur = NULL;
	if (qp->wr_err)
		return NULL;
	qp->wr_err = vrdma_sq_room(qp, qp->wr_head);
	if (qp->wr_err)
		return NULL;
	wqe = vrdma_wqe(&qp->sq, qp->wr_head);
	memset(wqe, 0, sizeof(*wqe));
	wqe->wr_id = htole64(ibqp->wr_id);
	wqe->opcode = opcode;
	wqe->flags = ibqp->wr_flags & (IBV_SEND_FENCE | IBV_SEND_SIGNALED | IBV_SEND_SOLICITED);
	if (qp->sig_all)
		wqe->flags |= VIRTIO_RDMA_SEND_SIGNALED;
	qp->wr_cur = wqe;
	qp->wr_head++;
	return wqe;
}

static void wr_start(struct ibv_qp_ex *ibqp)
{
	struct vrdma_qp *qp = ex_to_vqp(ibqp);

	vrdma_lock(&qp->sq.lock);
	qp->wr_head = qp->sq.head;
	qp->wr_cur = NULL;
	qp->wr_err = 0;
}

static int wr_complete(struct ibv_qp_ex *ibqp)
{
	struct vrdma_qp *qp = ex_to_vqp(ibqp);
	int ret = qp->wr_err;

	if (!ret && qp->wr_head != qp->sq.head)
		vrdma_ring(to_vctx(qp->vqp.qp.context), &qp->sq, qp->wr_head);
	vrdma_unlock(&qp->sq.lock);
	return ret;
}

static void wr_abort(struct ibv_qp_ex *ibqp)
{
	vrdma_unlock(&ex_to_vqp(ibqp)->sq.lock);
}

static void wr_rdma(struct ibv_qp_ex *qp, uint8_t opcode, uint32_t rkey, uint64_t remote_addr,
		    uint32_t imm)
{
	struct virtio_rdma_sq_wqe *wqe = wr_begin(qp, opcode);

	if (!wqe)
		return;
	wqe->rkey = htole32(rkey);
	wqe->remote_addr = htole64(remote_addr);
	wqe->imm = imm;
}

static void wr_rdma_read(struct ibv_qp_ex *qp, uint32_t rkey, uint64_t remote_addr)
{
	wr_rdma(qp, VIRTIO_RDMA_WR_RDMA_READ, rkey, remote_addr, 0);
}

static void wr_rdma_write(struct ibv_qp_ex *qp, uint32_t rkey, uint64_t remote_addr)
{
	wr_rdma(qp, VIRTIO_RDMA_WR_RDMA_WRITE, rkey, remote_addr, 0);
}

static void wr_rdma_write_imm(struct ibv_qp_ex *qp, uint32_t rkey, uint64_t remote_addr, __be32 imm)
{
	wr_rdma(qp, VIRTIO_RDMA_WR_RDMA_WRITE_WITH_IMM, rkey, remote_addr, (__force uint32_t)imm);
}

static void wr_atomic(struct ibv_qp_ex *qp, uint8_t opcode, uint32_t rkey, uint64_t remote_addr,
		      const uint64_t arg[2])
{
	struct virtio_rdma_sq_wqe *wqe = wr_begin(qp, opcode);

	if (!wqe)
		return;
	wqe->rkey = htole32(rkey);
	wqe->remote_addr = htole64(remote_addr);
	wqe->arg0 = htole64(arg[0]);
	wqe->arg1 = htole64(arg[1]);
}

static void wr_atomic_cmp_swp(struct ibv_qp_ex *qp, uint32_t rkey, uint64_t remote_addr,
			      uint64_t compare, uint64_t swap)
{
	const uint64_t arg[2] = { compare, swap };

	wr_atomic(qp, VIRTIO_RDMA_WR_ATOMIC_CMP_AND_SWP, rkey, remote_addr, arg);
}

static void wr_atomic_fetch_add(struct ibv_qp_ex *qp, uint32_t rkey, uint64_t remote_addr,
				uint64_t add)
{
	const uint64_t arg[2] = { add, 0 };

	wr_atomic(qp, VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD, rkey, remote_addr, arg);
}

/*
 * The word stands in the request like inline data: what the program does with its own afterwards
 * does not matter.
 */
static void wr_atomic_write(struct ibv_qp_ex *qp, uint32_t rkey, uint64_t remote_addr,
			    const void *word)
{
	struct virtio_rdma_sq_wqe *wqe = wr_begin(qp, VIRTIO_RDMA_WR_ATOMIC_WRITE);

	if (!wqe)
		return;
	wqe->rkey = htole32(rkey);
	wqe->remote_addr = htole64(remote_addr);
	memcpy((uint8_t *)wqe + VIRTIO_RDMA_SQ_WQE_DATA, word, 8);
	wqe->flags |= VIRTIO_RDMA_SEND_INLINE;
	wqe->num_sge = htole16(8);
}

static void wr_flush(struct ibv_qp_ex *qp, uint32_t rkey, uint64_t remote_addr, size_t len,
		     uint8_t type, uint8_t level)
{
	struct virtio_rdma_sq_wqe *wqe = wr_begin(qp, VIRTIO_RDMA_WR_FLUSH);

	if (!wqe)
		return;
	wqe->rkey = htole32(rkey);
	wqe->remote_addr = htole64(remote_addr);
	wqe->arg0 = htole64(len);
	wqe->aux = htole32((type & IBV_FLUSH_GLOBAL ? VIRTIO_RDMA_FLUSH_GLOBAL : 0) |
			   (type & IBV_FLUSH_PERSISTENT ? VIRTIO_RDMA_FLUSH_PERSISTENT : 0) |
			   (level == IBV_FLUSH_MR ? VIRTIO_RDMA_FLUSH_MR : 0));
}

static void wr_with_imm(struct ibv_qp_ex *qp, uint8_t opcode, uint32_t imm)
{
	struct virtio_rdma_sq_wqe *wqe = wr_begin(qp, opcode);

	if (wqe)
		wqe->imm = imm;
}

static void wr_send(struct ibv_qp_ex *qp)
{
	wr_with_imm(qp, VIRTIO_RDMA_WR_SEND, 0);
}

static void wr_send_imm(struct ibv_qp_ex *qp, __be32 imm)
{
	wr_with_imm(qp, VIRTIO_RDMA_WR_SEND_WITH_IMM, (__force uint32_t)imm);
}

static void wr_send_inv(struct ibv_qp_ex *qp, uint32_t rkey)
{
	wr_with_imm(qp, VIRTIO_RDMA_WR_SEND_WITH_INV, htole32(rkey));
}

static void wr_local_inv(struct ibv_qp_ex *qp, uint32_t rkey)
{
	wr_with_imm(qp, VIRTIO_RDMA_WR_LOCAL_INV, htole32(rkey));
}

static void wr_bind_mw(struct ibv_qp_ex *qp, struct ibv_mw *mw, uint32_t rkey,
		       const struct ibv_mw_bind_info *info)
{
	struct virtio_rdma_sq_wqe *wqe = wr_begin(qp, VIRTIO_RDMA_WR_BIND_MW);

	if (wqe)
		vrdma_fill_bind(wqe, mw, rkey, info);
}

static void wr_set_ud_addr(struct ibv_qp_ex *ibqp, struct ibv_ah *ah, uint32_t remote_qpn,
			   uint32_t remote_qkey)
{
	struct virtio_rdma_sq_wqe *wqe = ex_to_vqp(ibqp)->wr_cur;

	if (!wqe)
		return;
	wqe->arg0 = htole64(to_vah(ah)->ahn);
	wqe->rkey = htole32(remote_qpn);
	wqe->aux = htole32(remote_qkey);
}

static void wr_set_sge_list(struct ibv_qp_ex *ibqp, size_t num_sge, const struct ibv_sge *list)
{
	struct vrdma_qp *qp = ex_to_vqp(ibqp);
	struct virtio_rdma_sge *sge;
	size_t i;

	if (!qp->wr_cur)
		return;
	if (num_sge > qp->sq.max_sge) {
		qp->wr_err = EINVAL;
		return;
	}
	sge = (struct virtio_rdma_sge *)((uint8_t *)qp->wr_cur + VIRTIO_RDMA_SQ_WQE_DATA);
	for (i = 0; i < num_sge; i++) {
		sge[i].addr = htole64(list[i].addr);
		sge[i].length = htole32(list[i].length);
		sge[i].lkey = htole32(list[i].lkey);
	}
	qp->wr_cur->num_sge = htole16(num_sge);
	vrdma_mirror_send(to_vctx(qp->vqp.qp.context), qp, qp->wr_head - 1);
}

static void wr_set_sge(struct ibv_qp_ex *qp, uint32_t lkey, uint64_t addr, uint32_t length)
{
	const struct ibv_sge sge = { .addr = addr, .length = length, .lkey = lkey };

	wr_set_sge_list(qp, 1, &sge);
}

static void wr_set_inline_data_list(struct ibv_qp_ex *ibqp, size_t num_buf,
				    const struct ibv_data_buf *list)
{
	struct vrdma_qp *qp = ex_to_vqp(ibqp);
	size_t len = 0, i;
	uint8_t *data;

	if (!qp->wr_cur)
		return;
	data = (uint8_t *)qp->wr_cur + VIRTIO_RDMA_SQ_WQE_DATA;
	for (i = 0; i < num_buf; i++) {
		if (list[i].length > qp->max_inline - len) {
			qp->wr_err = EINVAL;
			return;
		}
		memcpy(data + len, list[i].addr, list[i].length);
		len += list[i].length;
	}
	qp->wr_cur->flags |= VIRTIO_RDMA_SEND_INLINE;
	qp->wr_cur->num_sge = htole16(len);
}

static void wr_set_inline_data(struct ibv_qp_ex *qp, void *addr, size_t length)
{
	const struct ibv_data_buf buf = { .addr = addr, .length = length };

	wr_set_inline_data_list(qp, 1, &buf);
}

/* The send operations of each type (IBTA table 10.1) that this device has. */
static uint64_t supported_ops(enum ibv_qp_type type, uint64_t caps)
{
	uint64_t ops = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;

	if (type == IBV_QPT_UD)
		return ops;
	ops |= IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
	if (caps & (VIRTIO_RDMA_CAP_MW_TYPE1 | VIRTIO_RDMA_CAP_MW_TYPE2))
		ops |= IBV_QP_EX_WITH_BIND_MW;
	if (caps & (VIRTIO_RDMA_CAP_MW_TYPE2 | VIRTIO_RDMA_CAP_MEM_MGT))
		ops |= IBV_QP_EX_WITH_LOCAL_INV;
	if (type != IBV_QPT_RC)
		return ops;
	ops |= IBV_QP_EX_WITH_RDMA_READ;
	if (caps & VIRTIO_RDMA_CAP_ATOMIC)
		ops |= IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;
	if (caps & (VIRTIO_RDMA_CAP_MW_TYPE2 | VIRTIO_RDMA_CAP_MEM_MGT))
		ops |= IBV_QP_EX_WITH_SEND_WITH_INV;
	if (caps & VIRTIO_RDMA_CAP_ATOMIC_WRITE)
		ops |= IBV_QP_EX_WITH_ATOMIC_WRITE;
	if (caps & VIRTIO_RDMA_CAP_FLUSH)
		ops |= IBV_QP_EX_WITH_FLUSH;
	return ops;
}

static void set_ops(struct ibv_qp_ex *qp, uint64_t ops)
{
	qp->wr_start = wr_start;
	qp->wr_complete = wr_complete;
	qp->wr_abort = wr_abort;
	qp->wr_set_sge = wr_set_sge;
	qp->wr_set_sge_list = wr_set_sge_list;
	qp->wr_set_inline_data = wr_set_inline_data;
	qp->wr_set_inline_data_list = wr_set_inline_data_list;
	if (ops & IBV_QP_EX_WITH_SEND)
		qp->wr_send = wr_send;
	if (ops & IBV_QP_EX_WITH_SEND_WITH_IMM)
		qp->wr_send_imm = wr_send_imm;
	if (ops & IBV_QP_EX_WITH_SEND_WITH_INV)
		qp->wr_send_inv = wr_send_inv;
	if (ops & IBV_QP_EX_WITH_RDMA_WRITE)
		qp->wr_rdma_write = wr_rdma_write;
	if (ops & IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM)
		qp->wr_rdma_write_imm = wr_rdma_write_imm;
	if (ops & IBV_QP_EX_WITH_RDMA_READ)
		qp->wr_rdma_read = wr_rdma_read;
	if (ops & IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP)
		qp->wr_atomic_cmp_swp = wr_atomic_cmp_swp;
	if (ops & IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD)
		qp->wr_atomic_fetch_add = wr_atomic_fetch_add;
	if (ops & IBV_QP_EX_WITH_ATOMIC_WRITE)
		qp->wr_atomic_write = wr_atomic_write;
	if (ops & IBV_QP_EX_WITH_FLUSH)
		qp->wr_flush = wr_flush;
	if (ops & IBV_QP_EX_WITH_LOCAL_INV)
		qp->wr_local_inv = wr_local_inv;
	if (ops & IBV_QP_EX_WITH_BIND_MW)
		qp->wr_bind_mw = wr_bind_mw;
}

/* EOPNOTSUPP if an operation was asked for that the type or the device does not have. */
int vrdma_set_wr_ops(struct vrdma_qp *qp, const struct ibv_qp_init_attr_ex *attr, uint64_t caps)
{
	if (!(attr->comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS))
		return 0;
	if (attr->send_ops_flags & ~supported_ops(attr->qp_type, caps))
		return EOPNOTSUPP;
	set_ops(&qp->vqp.qp_ex, attr->send_ops_flags);
	if (attr->qp_type == IBV_QPT_UD)
		qp->vqp.qp_ex.wr_set_ud_addr = wr_set_ud_addr;
	return 0;
}

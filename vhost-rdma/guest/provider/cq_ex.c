// SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB)
/*
 * Extended completion queues: ibv_start_poll() to ibv_end_poll() hold the CQ's lock and look at the
 * entries in place; the consumer index is told to the device once, at the end.
 */
#include "virtio_rdma.h"

#include "idle.h"

static void cq_ex_set_current(struct vrdma_cq *cq, const struct virtio_rdma_cqe *cqe)
{
	cq->cur = cqe;
	cq->vcq.cq_ex.wr_id = le64toh(cqe->wr_id);
	cq->vcq.cq_ex.status = cqe->status;
}

static void cq_ex_end_poll(struct ibv_cq_ex *ibcq)
{
	struct vrdma_cq *cq = ex_to_vcq(ibcq);

	vrdma_cq_publish(cq);
	cq->cur = NULL;
	vrdma_unlock(&cq->lock);
}

static int cq_ex_next_poll(struct ibv_cq_ex *ibcq)
{
	struct vrdma_cq *cq = ex_to_vcq(ibcq);
	const struct virtio_rdma_cqe *cqe = vrdma_cq_next(cq);

	if (!cqe)
		return ENOENT;
	cq_ex_set_current(cq, cqe);
	return 0;
}

static int cq_ex_start_poll(struct ibv_cq_ex *ibcq, struct ibv_poll_cq_attr *attr)
{
	struct vrdma_cq *cq = ex_to_vcq(ibcq);
	int ret;

	if (attr->comp_mask)
		return EINVAL;
	vrdma_lock(&cq->lock);
	ret = cq_ex_next_poll(ibcq);
	/*
	 * Without an entry there is no ibv_end_poll(); discarded entries that were skipped are
	 * given back here.
	 */
	if (ret) {
		cq_ex_end_poll(ibcq);
		vrdma_polled_nothing();
	}
	return ret;
}

static enum ibv_wc_opcode cq_ex_read_opcode(struct ibv_cq_ex *cq)
{
	return ex_to_vcq(cq)->cur->opcode;
}

static uint32_t cq_ex_read_vendor_err(struct ibv_cq_ex *cq)
{
	return le32toh(ex_to_vcq(cq)->cur->vendor_err);
}

static uint32_t cq_ex_read_byte_len(struct ibv_cq_ex *cq)
{
	return le32toh(ex_to_vcq(cq)->cur->byte_len);
}

/* ibv_wc_read_invalidated_rkey() comes here too and wants a number; immediates are opaque bytes. */
static __be32 cq_ex_read_imm_data(struct ibv_cq_ex *ibcq)
{
	const struct virtio_rdma_cqe *cqe = ex_to_vcq(ibcq)->cur;
	uint32_t imm = cqe->imm;

	if (le16toh(cqe->flags) & VIRTIO_RDMA_CQE_INV)
		imm = le32toh(imm);
	return (__force __be32)imm;
}

static uint32_t cq_ex_read_qp_num(struct ibv_cq_ex *cq)
{
	return le32toh(ex_to_vcq(cq)->cur->qpn);
}

static uint32_t cq_ex_read_src_qp(struct ibv_cq_ex *cq)
{
	return le32toh(ex_to_vcq(cq)->cur->src_qp);
}

static unsigned int cq_ex_read_wc_flags(struct ibv_cq_ex *cq)
{
	uint16_t flags = le16toh(ex_to_vcq(cq)->cur->flags);
	unsigned int wc_flags = 0;

	if (flags & VIRTIO_RDMA_CQE_GRH)
		wc_flags |= IBV_WC_GRH;
	if (flags & VIRTIO_RDMA_CQE_IMM)
		wc_flags |= IBV_WC_WITH_IMM;
	if (flags & VIRTIO_RDMA_CQE_INV)
		wc_flags |= IBV_WC_WITH_INV;
	return wc_flags;
}

/* RoCE has no local identifiers. */
static uint32_t cq_ex_read_slid(struct ibv_cq_ex *cq)
{
	return 0;
}

static uint8_t cq_ex_read_sl(struct ibv_cq_ex *cq)
{
	return ex_to_vcq(cq)->cur->sl;
}

static uint8_t cq_ex_read_dlid_path_bits(struct ibv_cq_ex *cq)
{
	return 0;
}

static uint64_t cq_ex_read_completion_ts(struct ibv_cq_ex *cq)
{
	return le64toh(ex_to_vcq(cq)->cur->timestamp);
}

#define VRDMA_CQ_WC_FLAGS	(IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP)

/* Time stamps are the device's, and a device without a clock (an RNIC's, perhaps) writes none. */
static bool cq_ex_has_clock(struct ibv_context *context)
{
	struct ibv_device_attr_ex attr;

	return !ibv_query_device_ex(context, NULL, &attr) && attr.completion_timestamp_mask;
}

static int cq_ex_check(struct ibv_context *context, const struct ibv_cq_init_attr_ex *attr)
{
	if (!check_comp_mask(attr->comp_mask,
			     IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD))
		return EOPNOTSUPP;
	if (attr->comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS &&
	    attr->flags & ~(uint32_t)IBV_CREATE_CQ_ATTR_SINGLE_THREADED)
		return EOPNOTSUPP;
	if (attr->wc_flags & ~(uint64_t)VRDMA_CQ_WC_FLAGS)
		return EOPNOTSUPP;
	if (attr->wc_flags & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP && !cq_ex_has_clock(context))
		return EOPNOTSUPP;
	return 0;
}

static void cq_ex_set_readers(struct ibv_cq_ex *cq, uint64_t wc_flags)
{
	cq->start_poll = cq_ex_start_poll;
	cq->next_poll = cq_ex_next_poll;
	cq->end_poll = cq_ex_end_poll;
	cq->read_opcode = cq_ex_read_opcode;
	cq->read_vendor_err = cq_ex_read_vendor_err;
	cq->read_wc_flags = cq_ex_read_wc_flags;
	if (wc_flags & IBV_WC_EX_WITH_BYTE_LEN)
		cq->read_byte_len = cq_ex_read_byte_len;
	if (wc_flags & IBV_WC_EX_WITH_IMM)
		cq->read_imm_data = cq_ex_read_imm_data;
	if (wc_flags & IBV_WC_EX_WITH_QP_NUM)
		cq->read_qp_num = cq_ex_read_qp_num;
	if (wc_flags & IBV_WC_EX_WITH_SRC_QP)
		cq->read_src_qp = cq_ex_read_src_qp;
	if (wc_flags & IBV_WC_EX_WITH_SLID)
		cq->read_slid = cq_ex_read_slid;
	if (wc_flags & IBV_WC_EX_WITH_SL)
		cq->read_sl = cq_ex_read_sl;
	if (wc_flags & IBV_WC_EX_WITH_DLID_PATH_BITS)
		cq->read_dlid_path_bits = cq_ex_read_dlid_path_bits;
	if (wc_flags & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP)
		cq->read_completion_ts = cq_ex_read_completion_ts;
}

struct ibv_cq_ex *vrdma_create_cq_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr)
{
	struct vrdma_cq *cq;
	int ret;

	ret = cq_ex_check(context, attr);
	if (ret) {
		errno = ret;
		return NULL;
	}
	cq = vrdma_cq_new(context, attr);
	if (!cq)
		return NULL;
	cq_ex_set_readers(&cq->vcq.cq_ex, attr->wc_flags);
	return &cq->vcq.cq_ex;
}

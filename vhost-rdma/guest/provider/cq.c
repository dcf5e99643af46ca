// SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB)
/*
 * Completion queues: a ring that the device fills and the process empties (docs/virtio-rdma.md,
 * sections 7.3 and 7.4).
 *
 * A CQ knows its QPs by number. That tells which queue's slots a completion frees, and it makes
 * completions of destroyed QPs vanish. When the device is lost the same table is what polling walks
 * to complete everything outstanding with WR_FLUSH_ERR (section 5.6), so that a program that only
 * polls comes to an end too.
 */
#include "doorbell.h"
#include "idle.h"
#include "mirror.h"
#include "virtio_rdma.h"

struct vrdma_create_cq_cmd {
	struct ibv_create_cq ibv_cmd;
	struct virtio_rdma_cq_req drv;
};
struct vrdma_create_cq_rsp {
	struct ib_uverbs_create_cq_resp ibv_resp;
	struct virtio_rdma_cq_resp drv;
};
struct vrdma_resize_cq_cmd {
	struct ibv_resize_cq ibv_cmd;
	struct virtio_rdma_cq_req drv;
};
static_assert(offsetof(struct vrdma_create_cq_cmd, drv) == sizeof(struct ibv_create_cq), "padding");
static_assert(offsetof(struct vrdma_create_cq_rsp, drv) == sizeof(struct ib_uverbs_create_cq_resp),
	      "padding");
static_assert(offsetof(struct vrdma_resize_cq_cmd, drv) == sizeof(struct ibv_resize_cq), "padding");

#define VRDMA_CQ_FIRST_BUCKETS	16u
#define VRDMA_ARM_SEQ_MASK	0x3fffffffu

/* ---- The table of QPs, under the CQ's lock --------------------------------------------------- */

static void cq_table_insert(struct vrdma_cq *cq, struct vrdma_cq_link *link)
{
	struct vrdma_cq_link **bucket = &cq->buckets[link->qp->vqp.qp.qp_num & cq->bucket_mask];

	link->next = *bucket;
	*bucket = link;
}

static int cq_table_grow(struct vrdma_cq *cq)
{
	uint32_t old_buckets = cq->bucket_mask + 1, i;
	struct vrdma_cq_link **old = cq->buckets, **table;

	table = calloc((size_t)old_buckets * 2, sizeof(*table));
	if (!table)
		return ENOMEM;
	cq->buckets = table;
	cq->bucket_mask = old_buckets * 2 - 1;
	for (i = 0; i < old_buckets; i++) {
		struct vrdma_cq_link *link = old[i], *next;

		for (; link; link = next) {
			next = link->next;
			cq_table_insert(cq, link);
		}
	}
	free(old);
	return 0;
}

void vrdma_cq_link_qp(struct vrdma_cq *cq, struct vrdma_cq_link *link)
{
	/* A table that can not grow only gets slower. */
	if (cq->num_links > 2 * (cq->bucket_mask + 1))
		(void)cq_table_grow(cq);
	cq_table_insert(cq, link);
	cq->num_links++;
}

void vrdma_cq_unlink_qp(struct vrdma_cq *cq, struct vrdma_cq_link *link)
{
	struct vrdma_cq_link **at = &cq->buckets[link->qp->vqp.qp.qp_num & cq->bucket_mask];

	while (*at && *at != link)
		at = &(*at)->next;
	if (*at) {
		*at = link->next;
		cq->num_links--;
	}
	if (cq->last_qp == link->qp)
		cq->last_qp = NULL;
}

static struct vrdma_qp *cq_find_qp(struct vrdma_cq *cq, uint32_t qpn)
{
	struct vrdma_cq_link *link;

	if (cq->last_qp && cq->last_qp->vqp.qp.qp_num == qpn)
		return cq->last_qp;
	for (link = cq->buckets[qpn & cq->bucket_mask]; link; link = link->next) {
		if (link->qp->vqp.qp.qp_num == qpn) {
			cq->last_qp = link->qp;
			return link->qp;
		}
	}
	return NULL;
}

void vrdma_cq_lock_both(struct vrdma_cq *a, struct vrdma_cq *b)
{
	if (a == b) {
		vrdma_lock(&a->lock);
		return;
	}
	vrdma_lock(a < b ? &a->lock : &b->lock);
	vrdma_lock(a < b ? &b->lock : &a->lock);
}

void vrdma_cq_unlock_both(struct vrdma_cq *a, struct vrdma_cq *b)
{
	vrdma_unlock(&a->lock);
	if (a != b)
		vrdma_unlock(&b->lock);
}

/* ---- The ring, under the CQ's lock ----------------------------------------------------------- */

static struct virtio_rdma_cqe *cq_entry(const struct vrdma_cq *cq, uint32_t index)
{
	return (struct virtio_rdma_cqe *)cq->buf.addr + (index & cq->mask);
}

/*
 * The device stores `seq` last: with it seen, the whole entry and the payload it announces are
 * there.
 */
static bool cq_entry_valid(const struct virtio_rdma_cqe *cqe, uint32_t index)
{
	return le32toh(__atomic_load_n(&cqe->seq, __ATOMIC_ACQUIRE)) == index + 1;
}

static uint32_t *cq_ctrl_word(const struct vrdma_cq *cq, unsigned int offset)
{
	return (uint32_t *)(cq->ctrl + offset);
}

void vrdma_cq_publish(struct vrdma_cq *cq)
{
	__atomic_store_n(cq_ctrl_word(cq, VIRTIO_RDMA_CTRL_CONSUMER), htole32(cq->consumer),
			 __ATOMIC_RELEASE);
}

/*
 * Section 7.3: entries of a QP that was destroyed or moved to RESET are overwritten where they
 * stand.
 */
void vrdma_cq_discard(struct vrdma_cq *cq, struct vrdma_qp *qp)
{
	uint32_t i;

	for (i = cq->consumer; i - cq->consumer <= cq->mask; i++) {
		struct virtio_rdma_cqe *cqe = cq_entry(cq, i);

		if (!cq_entry_valid(cqe, i))
			break;
		if (le32toh(cqe->qpn) == qp->vqp.qp.qp_num) {
			vrdma_mirror_discarded(to_vctx(cq->vcq.cq.context), qp, cqe);
			cqe->status = VIRTIO_RDMA_WC_STATUS_DISCARDED;
		}
	}
}

/*
 * Work requests complete in order, so a completion frees its slot and all before it (unsignaled
 * ones too).
 */
static void wq_completed(struct vrdma_wq *wq, uint32_t index)
{
	uint32_t done = index + 1 - wq->tail;

	if (done <= __atomic_load_n(&wq->head, __ATOMIC_ACQUIRE) - wq->tail)
		__atomic_store_n(&wq->tail, index + 1, __ATOMIC_RELEASE);
}

static const struct virtio_rdma_cqe *flush_entry(struct vrdma_cq *cq, const struct vrdma_qp *qp,
						 const void *wqe, uint16_t flags)
{
	struct virtio_rdma_cqe *cqe = &cq->flush;

	memset(cqe, 0, sizeof(*cqe));
	/* The first field of both kinds of work request. */
	memcpy(&cqe->wr_id, wqe, sizeof(cqe->wr_id));
	cqe->qpn = htole32(qp->vqp.qp.qp_num);
	cqe->status = VIRTIO_RDMA_WC_STATUS_WR_FLUSH_ERR;
	cqe->opcode = flags & VIRTIO_RDMA_CQE_RECV ? VIRTIO_RDMA_WC_RECV : VIRTIO_RDMA_WC_SEND;
	cqe->flags = htole16(flags);
	return cqe;
}

static const struct virtio_rdma_cqe *flush_wq(struct vrdma_cq *cq, struct vrdma_qp *qp,
					      struct vrdma_wq *wq, uint16_t flags)
{
	const struct virtio_rdma_cqe *cqe = NULL;
	uint32_t head = __atomic_load_n(&wq->head, __ATOMIC_ACQUIRE);

	if (wq->buf.addr && head != wq->tail) {
		cqe = flush_entry(cq, qp, vrdma_wqe(wq, wq->tail), flags);
		__atomic_store_n(&wq->tail, wq->tail + 1, __ATOMIC_RELEASE);
	}
	return cqe;
}

static const struct virtio_rdma_cqe *flush_qp(struct vrdma_cq *cq, struct vrdma_qp *qp)
{
	const struct virtio_rdma_cqe *cqe = NULL;
	struct vrdma_srq *srq;

	if (qp->vqp.qp.send_cq == &cq->vcq.cq)
		cqe = flush_wq(cq, qp, &qp->sq, 0);
	if (cqe || qp->vqp.qp.recv_cq != &cq->vcq.cq)
		return cqe;
	if (!qp->vqp.qp.srq)
		return flush_wq(cq, qp, &qp->rq, VIRTIO_RDMA_CQE_RECV);
	srq = to_vsrq(qp->vqp.qp.srq);
	vrdma_lock(&srq->wq.lock);
	cqe = flush_wq(cq, qp, &srq->wq, VIRTIO_RDMA_CQE_RECV | VIRTIO_RDMA_CQE_SRQ);
	vrdma_unlock(&srq->wq.lock);
	return cqe;
}

/* The device is lost: the next outstanding work request of this CQ as a flushed completion. */
static const struct virtio_rdma_cqe *cq_flush_next(struct vrdma_cq *cq)
{
	const struct virtio_rdma_cqe *cqe;
	struct vrdma_cq_link *link;
	uint32_t i;

	for (i = 0; i <= cq->bucket_mask; i++) {
		for (link = cq->buckets[i]; link; link = link->next) {
			cqe = flush_qp(cq, link->qp);
			if (cqe)
				return cqe;
		}
	}
	return NULL;
}

/* Takes the next completion, or returns NULL. The entry stays as it is until vrdma_cq_publish(). */
const struct virtio_rdma_cqe *vrdma_cq_next(struct vrdma_cq *cq)
{
	struct vrdma_context *ctx = to_vctx(cq->vcq.cq.context);

	for (;;) {
		const struct virtio_rdma_cqe *cqe = cq_entry(cq, cq->consumer);
		struct vrdma_qp *qp;
		uint16_t flags;

		if (!cq_entry_valid(cqe, cq->consumer)) {
			if (!vrdma_lost(ctx))
				return NULL;
			return cq_flush_next(cq);
		}
		cq->consumer++;
		if (cqe->status == VIRTIO_RDMA_WC_STATUS_DISCARDED)
			continue;
		qp = cq_find_qp(cq, le32toh(cqe->qpn));
		if (!qp)
			continue;
		vrdma_mirror_completed(ctx, qp, cqe);
		flags = le16toh(cqe->flags);
		if (!(flags & VIRTIO_RDMA_CQE_RECV))
			wq_completed(&qp->sq, le32toh(cqe->wqe_index));
		else if (!(flags & VIRTIO_RDMA_CQE_SRQ))
			wq_completed(&qp->rq, le32toh(cqe->wqe_index));
		return cqe;
	}
}

static void cqe_to_wc(const struct virtio_rdma_cqe *cqe, struct ibv_wc *wc)
{
	uint16_t flags = le16toh(cqe->flags);

	wc->wr_id = le64toh(cqe->wr_id);
	wc->status = cqe->status;
	wc->opcode = cqe->opcode;
	wc->vendor_err = le32toh(cqe->vendor_err);
	wc->byte_len = le32toh(cqe->byte_len);
	wc->qp_num = le32toh(cqe->qpn);
	wc->src_qp = le32toh(cqe->src_qp);
	wc->wc_flags = 0;
	if (flags & VIRTIO_RDMA_CQE_GRH)
		wc->wc_flags |= IBV_WC_GRH;
	if (flags & VIRTIO_RDMA_CQE_IMM)
		wc->wc_flags |= IBV_WC_WITH_IMM;
	if (flags & VIRTIO_RDMA_CQE_INV) {
		wc->wc_flags |= IBV_WC_WITH_INV;
		wc->invalidated_rkey = le32toh(cqe->imm);
	} else {
		memcpy(&wc->imm_data, &cqe->imm, sizeof(wc->imm_data));
	}
	wc->pkey_index = le16toh(cqe->pkey_index);
	wc->slid = 0;
	wc->sl = cqe->sl;
	wc->dlid_path_bits = 0;
}

int vrdma_poll_cq(struct ibv_cq *ibcq, int num_entries, struct ibv_wc *wc)
{
	struct vrdma_cq *cq = to_vcq(ibcq);
	const struct virtio_rdma_cqe *cqe;
	uint32_t first;
	int n;

	vrdma_lock(&cq->lock);
	first = cq->consumer;
	for (n = 0; n < num_entries; n++) {
		cqe = vrdma_cq_next(cq);
		if (!cqe)
			break;
		cqe_to_wc(cqe, &wc[n]);
	}
	if (cq->consumer != first)
		vrdma_cq_publish(cq);
	vrdma_unlock(&cq->lock);
	if (!n && num_entries)
		vrdma_polled_nothing();
	return n;
}

int vrdma_arm_cq(struct ibv_cq *ibcq, int solicited_only)
{
	uint32_t what = solicited_only ? VIRTIO_RDMA_ARM_SOLICITED : VIRTIO_RDMA_ARM_ANY;
	struct vrdma_cq *cq = to_vcq(ibcq);
	uint32_t fired, seq;

	vrdma_lock(&cq->lock);
	fired = le32toh(__atomic_load_n(cq_ctrl_word(cq, VIRTIO_RDMA_CTRL_FIRED),
					__ATOMIC_ACQUIRE)) & VRDMA_ARM_SEQ_MASK;
	seq = cq->arm >> VIRTIO_RDMA_ARM_SEQ_SHIFT;
	if (seq != fired) {
		/*
		 * Armed already: only ever widened, an event that was asked for is not taken back.
		 */
		if ((cq->arm & VIRTIO_RDMA_ARM_WHAT_MASK) == VIRTIO_RDMA_ARM_ANY)
			what = VIRTIO_RDMA_ARM_ANY;
	} else {
		seq = (fired + 1) & VRDMA_ARM_SEQ_MASK;
	}
	cq->arm = seq << VIRTIO_RDMA_ARM_SEQ_SHIFT | what;
	__atomic_store_n(cq_ctrl_word(cq, VIRTIO_RDMA_CTRL_ARM), htole32(cq->arm),
			 __ATOMIC_RELEASE);
	/*
	 * The caller polls once more, as verbs programs must; that look may not be done before the
	 * store is visible.
	 */
	vrdma_full_fence();
	vrdma_unlock(&cq->lock);
	return 0;
}

/* ---- Life ------------------------------------------------------------------------------------ */

static int cq_alloc_ring(struct vrdma_context *ctx, struct ibv_pd *pd, uint32_t entries,
			 struct vrdma_buf *buf)
{
	return vrdma_buf_alloc(ctx, pd, VRDMA_RING_CQ, buf,
			       vrdma_ctrl_offset(entries, VIRTIO_RDMA_CQE_LOG2_STRIDE) +
			       VIRTIO_RDMA_CTRL_SIZE);
}

static void cq_use_ring(struct vrdma_cq *cq, const struct vrdma_buf *buf, uint32_t entries)
{
	cq->buf = *buf;
	cq->mask = entries - 1;
	cq->ctrl = (uint8_t *)buf->addr + vrdma_ctrl_offset(entries, VIRTIO_RDMA_CQE_LOG2_STRIDE);
}

static int cq_check_size(const struct vrdma_context *ctx, uint32_t cqe)
{
	return cqe && cqe <= ctx->max_cqe && roundup_pow_of_two(cqe) <= INT32_MAX ? 0 : EINVAL;
}

static int cq_create_in_kernel(struct ibv_context *context, struct vrdma_cq *cq,
			       const struct ibv_cq_init_attr_ex *attr)
{
	struct vrdma_create_cq_cmd cmd = {};
	struct vrdma_create_cq_rsp rsp = {};
	int ret;

	cmd.drv.buf = (uintptr_t)cq->buf.addr;
	cmd.drv.buf_len = cq->buf.len;
	cmd.drv.entries = cq->mask + 1;
	ret = ibv_cmd_create_cq(context, attr->cqe, attr->channel, attr->comp_vector, &cq->vcq.cq,
				&cmd.ibv_cmd, sizeof(cmd), &rsp.ibv_resp, sizeof(rsp));
	cq->cqn = rsp.drv.cqn;
	return ret;
}

/* Whether threads may share the CQ: not with SINGLE_THREADED or a parent domain of one thread. */
static bool cq_is_shared(const struct ibv_cq_init_attr_ex *attr, struct ibv_pd *pd)
{
	if (attr->comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS &&
	    attr->flags & IBV_CREATE_CQ_ATTR_SINGLE_THREADED)
		return false;
	return !pd || !vrdma_pd_single_threaded(pd);
}

struct vrdma_cq *vrdma_cq_new(struct ibv_context *context, const struct ibv_cq_init_attr_ex *attr)
{
	struct ibv_pd *pd = attr->comp_mask & IBV_CQ_INIT_ATTR_MASK_PD ? attr->parent_domain : NULL;
	struct vrdma_context *ctx = to_vctx(context);
	struct vrdma_buf buf = {};
	struct vrdma_cq *cq;
	uint32_t entries;
	int ret;

	ret = cq_check_size(ctx, attr->cqe);
	if (ret)
		goto err;
	entries = roundup_pow_of_two(attr->cqe);
	cq = calloc(1, sizeof(*cq));
	if (!cq) {
		ret = ENOMEM;
		goto err;
	}
	cq->buckets = calloc(VRDMA_CQ_FIRST_BUCKETS, sizeof(*cq->buckets));
	cq->bucket_mask = VRDMA_CQ_FIRST_BUCKETS - 1;
	if (!cq->buckets) {
		ret = ENOMEM;
		goto err_free;
	}
	ret = cq_alloc_ring(ctx, pd, entries, &buf);
	if (ret)
		goto err_buckets;
	cq_use_ring(cq, &buf, entries);
	vrdma_lock_init(&cq->lock, cq_is_shared(attr, pd));
	ret = cq_create_in_kernel(context, cq, attr);
	if (ret)
		goto err_buf;
	return cq;

err_buf:
	vrdma_buf_free(&cq->buf);
err_buckets:
	free(cq->buckets);
err_free:
	free(cq);
err:
	errno = ret;
	return NULL;
}

struct ibv_cq *vrdma_create_cq(struct ibv_context *context, int cqe,
			       struct ibv_comp_channel *channel, int vector)
{
	struct ibv_cq_init_attr_ex attr = {
		.cqe = cqe < 0 ? 0 : cqe,
		.channel = channel,
		.comp_vector = vector,
	};
	struct vrdma_cq *cq = vrdma_cq_new(context, &attr);

	return cq ? &cq->vcq.cq : NULL;
}

/*
 * Section 7.3: the device copies the entries that were not consumed and goes on in the new ring at
 * the same indices. Our half of the new control block is set before; nobody polls or arms
 * meanwhile, since the lock is held.
 */
int vrdma_resize_cq(struct ibv_cq *ibcq, int cqe)
{
	struct vrdma_context *ctx = to_vctx(ibcq->context);
	struct ib_uverbs_resize_cq_resp resp = {};
	struct vrdma_resize_cq_cmd cmd = {};
	struct vrdma_cq *cq = to_vcq(ibcq);
	struct vrdma_buf buf = {}, old;
	uint32_t entries, *ctrl;
	int ret;

	ret = cq_check_size(ctx, cqe < 0 ? 0 : cqe);
	if (ret)
		return ret;
	entries = roundup_pow_of_two(cqe);
	ret = cq_alloc_ring(ctx, cq->buf.domain ? &cq->buf.domain->pd : NULL, entries, &buf);
	if (ret)
		return ret;
	cmd.drv.buf = (uintptr_t)buf.addr;
	cmd.drv.buf_len = buf.len;
	cmd.drv.entries = entries;
	ctrl = (uint32_t *)((uint8_t *)buf.addr +
			    vrdma_ctrl_offset(entries, VIRTIO_RDMA_CQE_LOG2_STRIDE));

	vrdma_lock(&cq->lock);
	vrdma_cq_publish(cq);
	ctrl[VIRTIO_RDMA_CTRL_CONSUMER / 4] = htole32(cq->consumer);
	ctrl[VIRTIO_RDMA_CTRL_ARM / 4] = htole32(cq->arm);
	ret = ibv_cmd_resize_cq(ibcq, cqe, &cmd.ibv_cmd, sizeof(cmd), &resp, sizeof(resp));
	if (ret) {
		vrdma_unlock(&cq->lock);
		vrdma_buf_free(&buf);
		return ret;
	}
	old = cq->buf;
	cq_use_ring(cq, &buf, entries);
	vrdma_unlock(&cq->lock);
	vrdma_buf_free(&old);
	return 0;
}

int vrdma_modify_cq(struct ibv_cq *cq, struct ibv_modify_cq_attr *attr)
{
	struct ibv_modify_cq cmd = {};

	return ibv_cmd_modify_cq(cq, attr, &cmd, sizeof(cmd));
}

int vrdma_destroy_cq(struct ibv_cq *ibcq)
{
	struct vrdma_cq *cq = to_vcq(ibcq);
	int ret;

	ret = ibv_cmd_destroy_cq(ibcq);
	if (ret)
		return ret;
	vrdma_buf_free(&cq->buf);
	free(cq->buckets);
	free(cq);
	return 0;
}

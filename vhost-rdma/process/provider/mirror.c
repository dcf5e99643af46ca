// SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB)
/*
 * What the program itself sends and receives: copied where it posts and where it polls, in its own
 * thread. A source is copied to the out half when it is posted, and the element names that; what
 * arrives is copied from the in half when its completion is taken, which is when verbs says that
 * the program may look (IBTA 9.5).
 */
#include "mirror.h"

#include "private.h"

#define FIRST_BUCKETS 64u

/* A receive of an SRQ, whose slot is another's as soon as the device has taken it (7.2). */
struct vrdma_kept {
	struct vrdma_kept *next;
	const struct vrdma_wq *of;
	uint32_t index;
	uint32_t num;
	struct virtio_rdma_sge sges[];
};

static uint64_t addr_of(const struct virtio_rdma_sge *sge)
{
	return le64toh(sge->addr);
}

/*
 * An element that names what is not the program's is made to name what is beyond the shadow, for
 * the device to refuse: it takes all of the shadow for the region.
 */
static int refuse(const struct vrdma_region *region, struct virtio_rdma_sge *sge, size_t *at)
{
	if (vrdma_inside(region, addr_of(sge), le32toh(sge->length), at))
		return 0;
	sge->addr = htole64(region->iova + 2 * region->half);
	return 1;
}

static struct vrdma_region *region_of(struct vrdma_mirror *mirror,
				      const struct virtio_rdma_sge *sge)
{
	return sge->length ? vrdma_region_get(mirror, le32toh(sge->lkey)) : NULL;
}

static void expect(struct vrdma_mirror *mirror, struct virtio_rdma_sge *sge)
{
	struct vrdma_region *region = region_of(mirror, sge);
	size_t at;

	if (!region)
		return;
	(void)refuse(region, sge, &at);
	vrdma_region_put(region);
}

/* Bytes that a work request brings back. */
static size_t result(const struct virtio_rdma_sq_wqe *wqe)
{
	switch (wqe->opcode) {
	case VIRTIO_RDMA_WR_RDMA_READ:
		return SIZE_MAX;
	case VIRTIO_RDMA_WR_ATOMIC_CMP_AND_SWP:
	case VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD:
		return sizeof(uint64_t);
	default:
		return 0;
	}
}

static struct virtio_rdma_sge *sq_sges(struct virtio_rdma_sq_wqe *wqe)
{
	return (void *)((uint8_t *)wqe + VIRTIO_RDMA_SQ_WQE_DATA);
}

/* ---- Sources --------------------------------------------------------------------------------- */

/* A part of a region. */
struct span {
	size_t from;
	size_t to;
};

/*
 * What outstanding reads and atomics bring to a region at `at` or behind it: the first such part,
 * or none at the end of everything. `at` may lie within it.
 */
static struct span brought(struct vrdma_qp *qp, uint32_t index, const struct vrdma_region *region,
			   size_t at)
{
	struct span found = { SIZE_MAX, SIZE_MAX }, one;
	uint32_t i = __atomic_load_n(&qp->sq.tail, __ATOMIC_ACQUIRE);
	unsigned int n;

	for (; i != index; i++) {
		struct virtio_rdma_sq_wqe *wqe = vrdma_wqe(&qp->sq, i);
		const struct virtio_rdma_sge *sges = sq_sges(wqe);

		for (n = 0; result(wqe) && n < le16toh(wqe->num_sge); n++) {
			if (le32toh(sges[n].lkey) != region->key ||
			    !vrdma_inside(region, addr_of(&sges[n]), le32toh(sges[n].length),
					  &one.from))
				continue;
			one.to = one.from + le32toh(sges[n].length);
			if (one.to > at && one.from < found.from)
				found = one;
		}
	}
	return found;
}

/* A part of an element, from its beginning on: what a read brings, or what is beside that. */
static struct span part_of(struct vrdma_qp *qp, uint32_t index, const struct vrdma_region *region,
			   struct span source, int *is_brought)
{
	struct span next = brought(qp, index, region, source.from);

	*is_brought = next.from <= source.from;
	next.to = *is_brought ? next.to : next.from;
	return (struct span){ source.from, next.to < source.to ? next.to : source.to };
}

/*
 * All of an element leaves from the in half, with what it has beside what reads bring. What a peer
 * writes there at this very time may be lost: it is in the in half too, until it is copied.
 */
static void leave_together(struct vrdma_qp *qp, uint32_t index, const struct vrdma_region *region,
			   struct span source)
{
	struct span part;
	int is_brought;

	for (; source.from < source.to; source.from = part.to) {
		part = part_of(qp, index, region, source, &is_brought);
		if (!is_brought)
			memcpy(region->in + part.from, region->memory + part.from,
			       part.to - part.from);
	}
}

/* As elements of up to `most`, at least one; their number, or 0: it takes more. */
static unsigned int leave_apart(struct vrdma_qp *qp, uint32_t index,
				const struct vrdma_region *region, struct span source,
				struct virtio_rdma_sge *parts, unsigned int most)
{
	unsigned int num = 0;
	struct span part;
	int is_brought;

	for (; source.from < source.to; source.from = part.to, num++) {
		if (num == most)
			return 0;
		part = part_of(qp, index, region, source, &is_brought);
		parts[num].addr = htole64(region->iova + part.from +
					  (is_brought ? 0 : region->half));
		parts[num].length = htole32((uint32_t)(part.to - part.from));
		parts[num].lkey = htole32(region->key);
		if (!is_brought)
			memcpy(region->in + region->half + part.from, region->memory + part.from,
			       part.to - part.from);
	}
	return num;
}

/*
 * A fenced request begins when the reads before it have ended (IBTA 10.8.3.3), and may send what
 * they bring: that is in the in half by then, and nowhere else. What lies beside it leaves from the
 * out half, as of any request. So such an element becomes several, if the device takes so many.
 */
static unsigned int leave_fenced(struct vrdma_mirror *mirror, struct vrdma_qp *qp, uint32_t index,
				 const struct virtio_rdma_sge *sge, struct virtio_rdma_sge *parts,
				 unsigned int most)
{
	struct vrdma_region *region = region_of(mirror, sge);
	uint32_t len = le32toh(sge->length);
	unsigned int num = 1;
	struct span all;
	size_t at;

	parts[0] = *sge;
	if (!region)
		return 1;
	if (!refuse(region, &parts[0], &at)) {
		all = (struct span){ at, at + len };
		num = leave_apart(qp, index, region, all, parts, most);
		if (!num) {
			leave_together(qp, index, region, all);
			parts[0] = *sge;
			num = 1;
		}
	}
	vrdma_region_put(region);
	return num;
}

static void leave_all_fenced(struct vrdma_mirror *mirror, struct vrdma_qp *qp, uint32_t index)
{
	struct virtio_rdma_sge parts[(1u << VIRTIO_RDMA_WQE_MAX_LOG2_STRIDE) /
				     sizeof(struct virtio_rdma_sge)];
	struct virtio_rdma_sq_wqe *wqe = vrdma_wqe(&qp->sq, index);
	unsigned int left = le16toh(wqe->num_sge), num = 0, most;
	struct virtio_rdma_sge *sges = sq_sges(wqe), *sge;

	most = left > qp->sq_elements ? left : qp->sq_elements;
	for (sge = sges; left; sge++) {
		left--;
		num += leave_fenced(mirror, qp, index, sge, parts + num, most - num - left);
	}
	memcpy(sges, parts, num * sizeof(parts[0]));
	wqe->num_sge = htole16(num);
}

static void leave(struct vrdma_mirror *mirror, struct virtio_rdma_sge *sge)
{
	struct vrdma_region *region = region_of(mirror, sge);
	size_t at;

	if (!region)
		return;
	if (!refuse(region, sge, &at)) {
		memcpy(region->in + region->half + at, region->memory + at, le32toh(sge->length));
		sge->addr = htole64(addr_of(sge) + region->half);
	}
	vrdma_region_put(region);
}

/*
 * A window covers what the program has registered, which the device does not know: it takes the
 * shadow, which is larger, for the region.
 */
static void confine(struct vrdma_mirror *mirror, struct virtio_rdma_sq_wqe *wqe)
{
	struct vrdma_region *region = vrdma_region_get(mirror, (uint32_t)le64toh(wqe->arg1));
	size_t at;

	if (!region)
		return;
	if (!vrdma_inside(region, le64toh(wqe->remote_addr), le64toh(wqe->arg0), &at))
		wqe->remote_addr = htole64(region->iova + 2 * region->half);
	vrdma_region_put(region);
}

/* One that has no elements says so: its `num_sge` is 0. */
void vrdma_mirror_leave(struct vrdma_mirror *mirror, struct vrdma_qp *qp, uint32_t index)
{
	struct virtio_rdma_sq_wqe *wqe = vrdma_wqe(&qp->sq, index);
	struct virtio_rdma_sge *sges = sq_sges(wqe);
	unsigned int i;

	if (wqe->flags & VIRTIO_RDMA_SEND_INLINE)
		return;
	if (wqe->opcode == VIRTIO_RDMA_WR_BIND_MW)
		confine(mirror, wqe);
	if (wqe->flags & VIRTIO_RDMA_SEND_FENCE && !result(wqe)) {
		leave_all_fenced(mirror, qp, index);
		return;
	}
	for (i = 0; i < le16toh(wqe->num_sge); i++) {
		if (result(wqe))
			expect(mirror, &sges[i]);
		else
			leave(mirror, &sges[i]);
	}
}

void vrdma_mirror_expect(struct vrdma_mirror *mirror, struct virtio_rdma_rq_wqe *wqe)
{
	struct virtio_rdma_sge *sges = (void *)((uint8_t *)wqe + VIRTIO_RDMA_RQ_WQE_DATA);
	unsigned int i;

	for (i = 0; i < le16toh(wqe->num_sge); i++)
		expect(mirror, &sges[i]);
}

/* The first `bytes` bytes of the elements have arrived. */
static void arrived(struct vrdma_mirror *mirror, const struct virtio_rdma_sge *sges,
		    unsigned int num, size_t bytes)
{
	struct vrdma_region *region;
	unsigned int i;
	size_t len, at;

	for (i = 0; i < num && bytes; i++) {
		len = le32toh(sges[i].length);
		if (len > bytes)
			len = bytes;
		bytes -= len;
		region = len ? region_of(mirror, &sges[i]) : NULL;
		if (!region)
			continue;
		if (vrdma_inside(region, addr_of(&sges[i]), len, &at))
			memcpy(region->memory + at, region->in + at, len);
		vrdma_region_put(region);
	}
}

/* ---- Receives of SRQs ------------------------------------------------------------------------ */

/* With the lock. */
static struct vrdma_kept **kept_at(struct vrdma_mirror *mirror, const struct vrdma_wq *of,
				   uint32_t index)
{
	struct vrdma_kept **at = &mirror->kept[index & mirror->kept_mask];

	while (*at && ((*at)->of != of || (*at)->index != index))
		at = &(*at)->next;
	return at;
}

static struct vrdma_kept *kept_take(struct vrdma_mirror *mirror, const struct vrdma_wq *of,
				    uint32_t index)
{
	struct vrdma_kept **at, *kept = NULL;

	pthread_mutex_lock(&mirror->kept_lock);
	if (mirror->kept) {
		at = kept_at(mirror, of, index);
		kept = *at;
		if (kept) {
			*at = kept->next;
			mirror->kept_count--;
		}
	}
	pthread_mutex_unlock(&mirror->kept_lock);
	return kept;
}

/* With the lock. A table that cannot grow only gets slower. */
static int kept_grow(struct vrdma_mirror *mirror)
{
	uint32_t buckets = mirror->kept ? (mirror->kept_mask + 1) * 2 : FIRST_BUCKETS, i;
	struct vrdma_kept **old = mirror->kept, **table, *kept;

	if (old && mirror->kept_count <= mirror->kept_mask)
		return 0;
	table = calloc(buckets, sizeof(*table));
	if (!table)
		return old ? 0 : ENOMEM;
	for (i = 0; old && i <= mirror->kept_mask; i++) {
		while ((kept = old[i])) {
			old[i] = kept->next;
			kept->next = table[kept->index & (buckets - 1)];
			table[kept->index & (buckets - 1)] = kept;
		}
	}
	free(old);
	mirror->kept = table;
	mirror->kept_mask = buckets - 1;
	return 0;
}

static int kept_put(struct vrdma_mirror *mirror, struct vrdma_kept *kept)
{
	struct vrdma_kept **at;
	int ret;

	/*
	 * What had the index before was posted by a list that ended before it, or is of long ago.
	 */
	free(kept_take(mirror, kept->of, kept->index));
	pthread_mutex_lock(&mirror->kept_lock);
	ret = kept_grow(mirror);
	if (!ret) {
		at = &mirror->kept[kept->index & mirror->kept_mask];
		kept->next = *at;
		*at = kept;
		mirror->kept_count++;
	}
	pthread_mutex_unlock(&mirror->kept_lock);
	return ret;
}

static int is_private(struct vrdma_mirror *mirror, const struct ibv_recv_wr *wr)
{
	struct vrdma_region *region = NULL;
	int i;

	for (i = 0; i < wr->num_sge && !region; i++)
		region = vrdma_region_get(mirror, wr->sg_list[i].lkey);
	if (region)
		vrdma_region_put(region);
	return !!region;
}

static int keep_one(struct vrdma_mirror *mirror, const struct vrdma_wq *of, uint32_t index,
		    const struct ibv_recv_wr *wr)
{
	struct vrdma_kept *kept;
	int i, ret;

	if (!is_private(mirror, wr))
		return 0;
	kept = malloc(sizeof(*kept) + (size_t)wr->num_sge * sizeof(kept->sges[0]));
	if (!kept)
		return ENOMEM;
	kept->of = of;
	kept->index = index;
	kept->num = (uint32_t)wr->num_sge;
	for (i = 0; i < wr->num_sge; i++) {
		kept->sges[i].addr = htole64(wr->sg_list[i].addr);
		kept->sges[i].length = htole32(wr->sg_list[i].length);
		kept->sges[i].lkey = htole32(wr->sg_list[i].lkey);
	}
	ret = kept_put(mirror, kept);
	if (ret)
		free(kept);
	return ret;
}

/* As many as there is room for; a list may be longer than that, or have a bad request in it. */
int vrdma_mirror_keep(struct vrdma_mirror *mirror, struct vrdma_srq *srq,
		      const struct ibv_recv_wr *wr)
{
	const struct vrdma_wq *wq = &srq->wq;
	uint32_t index;
	int ret = 0;

	for (index = wq->head; wr && !ret && index - wq->tail < wq->max_wr;
	     index++, wr = wr->next) {
		if (wr->num_sge < 0 || (uint32_t)wr->num_sge > wq->max_sge)
			break;
		ret = keep_one(mirror, wq, index, wr);
	}
	return ret;
}

void vrdma_kept_forget(struct vrdma_mirror *mirror, const struct vrdma_wq *of)
{
	struct vrdma_kept **at, *kept;
	uint32_t i;

	pthread_mutex_lock(&mirror->kept_lock);
	for (i = 0; mirror->kept && i <= mirror->kept_mask; i++) {
		at = &mirror->kept[i];
		while ((kept = *at)) {
			if (of && kept->of != of) {
				at = &kept->next;
				continue;
			}
			*at = kept->next;
			mirror->kept_count--;
			free(kept);
		}
	}
	pthread_mutex_unlock(&mirror->kept_lock);
}

/* ---- Completions ----------------------------------------------------------------------------- */

/* Whether a completion is of a work request that is outstanding. */
static int outstanding(const struct vrdma_wq *wq, uint32_t index)
{
	return index - wq->tail < __atomic_load_n(&wq->head, __ATOMIC_ACQUIRE) - wq->tail;
}

/*
 * All that were not signaled and are done with this one have succeeded: a failure is always told.
 */
static void bring_sent(struct vrdma_mirror *mirror, struct vrdma_qp *qp,
		       const struct virtio_rdma_cqe *cqe)
{
	uint32_t last = le32toh(cqe->wqe_index), end = last + 1, index;

	if (!outstanding(&qp->sq, last))
		return;
	if (cqe->status != VIRTIO_RDMA_WC_STATUS_SUCCESS)
		end = last;
	for (index = qp->sq.tail; index != end; index++) {
		struct virtio_rdma_sq_wqe *wqe = vrdma_wqe(&qp->sq, index);

		if (result(wqe))
			arrived(mirror, sq_sges(wqe), le16toh(wqe->num_sge), result(wqe));
	}
}

/* A write with an immediate takes a receive and leaves its elements alone. */
static size_t received(const struct virtio_rdma_cqe *cqe)
{
	if (cqe->status != VIRTIO_RDMA_WC_STATUS_SUCCESS || cqe->opcode != VIRTIO_RDMA_WC_RECV)
		return 0;
	return le32toh(cqe->byte_len);
}

static void bring_received(struct vrdma_mirror *mirror, struct vrdma_qp *qp,
			   const struct virtio_rdma_cqe *cqe)
{
	uint32_t index = le32toh(cqe->wqe_index);
	const struct virtio_rdma_rq_wqe *wqe;

	if (!outstanding(&qp->rq, index))
		return;
	wqe = vrdma_wqe(&qp->rq, index);
	arrived(mirror, (const void *)((const uint8_t *)wqe + VIRTIO_RDMA_RQ_WQE_DATA),
		le16toh(wqe->num_sge), received(cqe));
}

static struct vrdma_kept *kept_of(struct vrdma_mirror *mirror, struct vrdma_qp *qp,
				  const struct virtio_rdma_cqe *cqe)
{
	if (!qp->vqp.qp.srq)
		return NULL;
	return kept_take(mirror, &to_vsrq(qp->vqp.qp.srq)->wq, le32toh(cqe->wqe_index));
}

void vrdma_mirror_bring(struct vrdma_mirror *mirror, struct vrdma_qp *qp,
			const struct virtio_rdma_cqe *cqe)
{
	uint16_t flags = le16toh(cqe->flags);
	struct vrdma_kept *kept;

	if (!(flags & VIRTIO_RDMA_CQE_RECV)) {
		bring_sent(mirror, qp, cqe);
	} else if (!(flags & VIRTIO_RDMA_CQE_SRQ)) {
		bring_received(mirror, qp, cqe);
	} else {
		kept = kept_of(mirror, qp, cqe);
		if (kept)
			arrived(mirror, kept->sges, kept->num, received(cqe));
		free(kept);
	}
}

void vrdma_mirror_drop(struct vrdma_mirror *mirror, struct vrdma_qp *qp,
		       const struct virtio_rdma_cqe *cqe)
{
	if (le16toh(cqe->flags) & VIRTIO_RDMA_CQE_SRQ)
		free(kept_of(mirror, qp, cqe));
}

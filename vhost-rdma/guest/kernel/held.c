// SPDX-License-Identifier: GPL-2.0
/*
 * Ringing the send queues of the kernel, and work requests that must wait for it.
 *
 * A datagram names an address handle by the number that the device gave it. A handle that was made
 * under a spinlock gets its number later (ah.c): its slot of the queue remembers the handle, and
 * the doorbell is rung up to that slot only. Nothing is reordered. When a number comes, all queues
 * that wait are looked at: they are few, and each is looked at once.
 */
#include "virtio_rdma.h"

/* Names the handle in the slot at `index` if its number is there. False: it still has none. */
static bool vrdma_name_handle(struct vrdma_wq *sq, u32 index)
{
	u32 slot = index & (sq->entries - 1);
	struct vrdma_ah_handle *handle;
	struct virtio_rdma_sq_wqe *wqe;
	int status;

	handle = sq->handles ? sq->handles[slot] : NULL;
	if (!handle)
		return true;
	/* Pairs with vrdma_ah_answered(). */
	status = smp_load_acquire(&handle->status);
	if (status == -EINPROGRESS)
		return false;
	wqe = (struct virtio_rdma_sq_wqe *)(sq->ring + ((size_t)slot << sq->log2_stride));
	/* A refused handle has no number: this one fails the request, as it should. */
	wqe->arg0 = cpu_to_le64(status ? VRDMA_NO_AH : handle->ahn);
	sq->handles[slot] = NULL;
	vrdma_ah_handle_put(handle);
	return true;
}

static bool vrdma_sq_advance(struct vrdma_qp *qp)
{
	struct vrdma_wq *sq = &qp->sq;
	u32 first = sq->rung;

	while (sq->rung != sq->head && vrdma_name_handle(sq, sq->rung))
		sq->rung++;
	if (sq->rung != first && !vrdma_is_lost(qp->ctx->vr))
		vrdma_doorbell(qp->ctx->vr, qp->ctx->kick_queue, sq->db_index, sq->rung);
	return sq->rung == sq->head;
}

/*
 * Makes what was posted visible, as far as it goes. Whether the number came before or after the
 * queue is on the list: one of the two looks finds it, this one or that of vrdma_ring_held().
 */
void vrdma_sq_ring(struct vrdma_qp *qp)
{
	struct vrdma *vr = qp->ctx->vr;

	lockdep_assert_held(&qp->sq.lock);
	if (vrdma_sq_advance(qp))
		return;
	spin_lock(&vr->held_lock);
	if (list_empty(&qp->on_held))
		list_add_tail(&qp->on_held, &vr->held);
	spin_unlock(&vr->held_lock);
	vrdma_sq_advance(qp);
}

/* The next of `list`, with a reference; QPs that are being destroyed leave it by themselves. */
static struct vrdma_qp *vrdma_take_held(struct vrdma *vr, struct list_head *list)
{
	struct vrdma_qp *qp, *next;
	unsigned long flags;

	spin_lock_irqsave(&vr->held_lock, flags);
	list_for_each_entry_safe(qp, next, list, on_held) {
		list_del_init(&qp->on_held);
		if (refcount_inc_not_zero(&qp->ref.count)) {
			spin_unlock_irqrestore(&vr->held_lock, flags);
			return qp;
		}
	}
	spin_unlock_irqrestore(&vr->held_lock, flags);
	return NULL;
}

/* A handle has got its number, or was refused. */
void vrdma_ring_held(struct vrdma *vr)
{
	struct vrdma_qp *qp;
	unsigned long flags;
	LIST_HEAD(look);

	spin_lock_irqsave(&vr->held_lock, flags);
	list_splice_init(&vr->held, &look);
	spin_unlock_irqrestore(&vr->held_lock, flags);
	while ((qp = vrdma_take_held(vr, &look))) {
		spin_lock_irqsave(&qp->sq.lock, flags);
		vrdma_sq_ring(qp);
		spin_unlock_irqrestore(&qp->sq.lock, flags);
		vrdma_ref_put(&qp->ref);
	}
}

/* Forgets the handles of what was not rung: the QP goes away or to RESET. */
void vrdma_sq_drop_held(struct vrdma_qp *qp)
{
	struct vrdma *vr = qp->ctx->vr;
	struct vrdma_wq *sq = &qp->sq;
	unsigned long flags;
	u32 i;

	if (!sq->handles)
		return;
	spin_lock_irqsave(&sq->lock, flags);
	spin_lock(&vr->held_lock);
	list_del_init(&qp->on_held);
	spin_unlock(&vr->held_lock);
	for (i = 0; i < sq->entries; i++) {
		if (sq->handles[i])
			vrdma_ah_handle_put(sq->handles[i]);
		sq->handles[i] = NULL;
	}
	sq->rung = sq->head;
	spin_unlock_irqrestore(&sq->lock, flags);
}
